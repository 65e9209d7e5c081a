"""Fixtures of small image trees."""

from image_trees import make_tree

__all__ = ["make_tree"]
