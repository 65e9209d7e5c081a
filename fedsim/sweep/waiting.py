"""The cells that a sweep still has to run, of which other sweeps on the same folder may run some."""

import time
from collections import deque
from collections.abc import Sequence

from fedsim.common.errors import UserError
from fedsim.run import admission
from fedsim.run.claim import is_claimed
from fedsim.run.leftovers import is_finished
from fedsim.run.plan import resolve
from fedsim.sweep.cell_process import Message
from fedsim.sweep.plan import PRUNED, Cell

LOOK_SECONDS = 1.0  # between two looks at cells that others hold


class Waiting:
    """Gives the cells in their order. One that another process has claimed goes to the end, and is looked at again
    until that process has finished it, or has left it."""

    def __init__(self, cells: Sequence[Cell]) -> None:
        self._cells = deque(cells)
        self._next_look = 0.0

    def __bool__(self) -> bool:
        return bool(self._cells)

    def take(self) -> Cell | None:
        """The next cell that nobody holds; None while there is none."""
        if time.monotonic() < self._next_look:
            return None
        for _ in range(len(self._cells)):
            cell = self._cells.popleft()
            if is_claimed(cell.folder):
                self._pass_over(cell)
            elif is_finished(cell.folder):
                cell.hear(*_verdict(cell))
            elif cell.doomed and cell.doomed():  # another process has left it for that
                cell.hear(PRUNED, "", None)
            else:
                return cell
        self._next_look = time.monotonic() + LOOK_SECONDS
        return None

    def hear(self, cell: Cell, message: Message) -> None:
        """Note a message about a cell that was taken; one that another process has claimed before comes back."""
        if message[0] == "claimed":
            self._pass_over(cell)
        else:
            cell.hear(*message)

    def _pass_over(self, cell: Cell) -> None:
        cell.state = "elsewhere"
        self._cells.append(cell)


def _verdict(cell: Cell) -> Message:
    """The message that another process's finished run deserves: it may be one with other settings."""
    try:
        admission.earlier(resolve(cell.experiment))
    except UserError as error:
        return "failed", str(error), None
    return "finished", "", None
