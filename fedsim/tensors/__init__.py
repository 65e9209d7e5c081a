"""Tensors by name: their kinds in a network, and the records in which they travel."""
