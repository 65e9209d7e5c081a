"""The model of a finished run: as a module, evaluated on other images, and as a file for other programs with a card."""
