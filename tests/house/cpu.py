"""Prints the processor seconds of tests by file: `PYTHONPATH=tests pytest -p house.cpu`, also with xdist.

They are those of a test's process and of its ended children, since the phase before. `imports` is what is before.
"""

import os
from collections import Counter
from collections.abc import Iterator

import pytest

spent, seconds = 0.0, Counter()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Note the seconds on the report, which xdist sends to the process that prints."""
    global spent
    report = yield
    before, spent = spent, sum(os.times()[:4])
    report.cpu = item.path.relative_to(item.config.rootpath).as_posix() if before else "imports", spent - before
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Add them up."""
    name, more = getattr(report, "cpu", ("of a process that died", 0.0))
    seconds[name] += more


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the sums, the largest first."""
    for name, own in seconds.most_common():
        terminalreporter.write_line(f"{own:8.2f} s  {name}")
    terminalreporter.write_line(f"{seconds.total():8.2f} s  of processor time")
