"""What a method is: the table of all methods (`fedsim.methods.table`, start there), and what is made of its rows."""
