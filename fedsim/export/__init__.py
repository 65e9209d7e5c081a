"""The model comes out: a finished run as a module, its measures on other images, a file for other programs, a card."""
