"""Names that fedsim/sweep still takes from here; the writer of tables is fedsim/common/tables.py."""

from fedsim.common.tables import MISSING, percent
from fedsim.common.tables import Cell as CellText

__all__ = ["MISSING", "CellText", "percent", "plain"]


def plain(cell: CellText) -> str:
    """The mean, and the deviation if there is one: `87.5 ± 1.2`."""
    return cell.plain
