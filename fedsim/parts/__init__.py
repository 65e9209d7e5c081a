"""What all parts of a recipe have in common."""
