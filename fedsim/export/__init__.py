"""The model of a finished run: as a module, with its metrics on other images, as a file for other programs, with a
card."""
