"""What is printed on the terminal: lines, and a count while something lasts."""

from collections.abc import Iterable, Iterator
from typing import TypeVar

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import Progress, SpinnerColumn, TextColumn
from rich.segment import Segment

from fedsim.common.errors import printable

T = TypeVar("T")


class Terminal(Console):
    """rich's console, which prints no control character of any text. Colours and cursor movements are rich's own.

    rich itself leaves ESC in texts, by which a label in a record could clear the screen.
    """

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """The segments of whatever is printed, with printable texts."""
        for part in super().render(renderable, options):
            yield part if part.control else part._replace(text=printable(part.text))


console = Terminal()
errors = Terminal(stderr=True)


def say(text: str) -> None:
    """Print a line unchanged: brackets in names are not markup, and paths are not wrapped."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def cut(text: str, most: int) -> str:
    """A text of at most so many letters; a longer one is shortened in the middle."""
    return text if len(text) <= most else f"{text[: most // 2]}…{text[len(text) - (most - 1) // 2 :]}"


def counted(items: Iterable[T], words: str) -> Iterator[T]:
    """The items; while they come, a line on the terminal shows how many there were. It disappears at the end."""
    columns = SpinnerColumn(), TextColumn(words, markup=False), TextColumn("{task.completed:.0f}")
    with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as progress:
        task = progress.add_task(words, total=None)
        for item in items:
            progress.advance(task)
            yield item
