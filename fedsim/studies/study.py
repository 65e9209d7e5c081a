"""What a study is: it asks for cells step by step, and what it asks for next may follow from their records."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from rich.table import Table

from fedsim.studies.estimate import cell_table
from fedsim.studies.plan import Cell


class Study(ABC):
    """A grid, a search, draws, a search over combinations or the table of a paper; `carry_out` runs it.

    A study decides by the records of its cells alone. So the same command continues a study that was killed.
    """

    is_blind: ClassVar[bool] = False  # the live view shows nothing that was measured on the unseen domain

    @abstractmethod
    def ask(self) -> list[Cell]:
        """Return the cells of the next step, which may all run at the same time; none at the end of the study."""

    def begin(self, dry_run: bool) -> None:
        """Say what the step is, and write what has to be there before the first of its cells runs."""
        return

    def table(self, cells: Sequence[Cell], width: int) -> Table:
        """Return what a dry run shows of a step; `width` cells run at the same time (0: not known)."""
        return cell_table(cells, width)

    def looks_beyond(self, cells: Sequence[Cell]) -> bool:
        """Whether a dry run goes on after a step, as it can where the cells of the step are finished already."""
        return False

    def tell(self, cells: Sequence[Cell]) -> None:
        """Take in the outcome of a step, whose cells have ended: finished, failed or pruned."""
        return

    def report(self) -> None:
        """Print and write the results, once all steps have ended."""
        return
