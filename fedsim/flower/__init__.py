"""Flower's own programs and those of its names that are not public."""
