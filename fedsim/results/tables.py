"""The name that fedsim/sweep still takes from here; the writer of tables is fedsim/common/tables.py."""

from fedsim.common.tables import escape_markdown

__all__ = ["escape_markdown"]
