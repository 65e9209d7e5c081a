"""Records of invented runs."""

from record_fixtures import grid, own_grid, unrendered  # noqa: F401
