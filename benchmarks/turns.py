"""What all comparisons of times share: their sides take turns, so that other programs slow all of them equally.

    sides = {"bare": clocked(bare_loop), "fedsim": clocked(run)}
    measured = take_turns(sides, repeats=5, show=say)
    print(paired_ratio(measured["fedsim"], measured["bare"]))

A side is a function that returns what one turn of it took: one number or several, such as (wall seconds, processor
seconds). Ratios are medians over turns of the ratio within one turn.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

Turn = tuple[float, ...]  # what one turn of a side took
WALL, PROCESSOR = 0, 1  # places in what `clocked` returns
Measured = dict[str, list[Turn]]  # by side: its turns


def say(line: str) -> None:
    """Print a line at once."""
    print(line, flush=True)


def clocked(work: Callable[[], object]) -> Callable[[], Turn]:
    """A side that does some work and returns (wall seconds, processor seconds)."""

    def side() -> Turn:
        started, busy = time.perf_counter(), time.process_time()
        work()
        return time.perf_counter() - started, time.process_time() - busy

    return side


def take_turns(
    sides: Mapping[str, Callable[[], Turn]],
    repeats: int,
    uncounted: int = 0,
    show: Callable[[str], object] | None = None,
) -> Measured:
    """Run all sides in turn, so many times, after some turns that are not counted; returns what each turn took.

    show: gets a line after each counted turn of all sides
    """
    measured: Measured = {name: [] for name in sides}
    for number in range(uncounted + repeats):
        turns = {name: side() for name, side in sides.items()}
        if number < uncounted:
            continue
        for name, turn in turns.items():
            measured[name].append(turn)
        if show:
            texts = [f"{name} {turn[0]:.3f}" for name, turn in turns.items()]
            show(f"turn {number - uncounted + 1}: {', '.join(texts)}")
    return measured


def medians(turns: Sequence[Turn]) -> list[float]:
    """The median over the turns of each number."""
    return [statistics.median(values) for values in zip(*turns, strict=True)]


def paired_ratio(turns: Sequence[Turn], others: Sequence[Turn], place: int = 0) -> float:
    """The median over turns of the ratio within one turn, of the number at a place."""
    return statistics.median(one[place] / other[place] for one, other in zip(turns, others, strict=True))
