"""What is printed on the terminal: lines, and a count while something lasts."""

from collections.abc import Iterable, Iterator
from typing import TypeVar

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn

from fedsim.common.errors import printable

T = TypeVar("T")

console = Console()
errors = Console(stderr=True)


def say(text: str) -> None:
    """Print a line unchanged: brackets in names are not markup, and paths are not wrapped."""
    console.print(printable(text), markup=False, highlight=False, soft_wrap=True)


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
