"""Fixtures of small image trees and of the real data."""

from image_trees import make_tree, real_data, tree_settings

__all__ = ["make_tree", "real_data", "tree_settings"]
