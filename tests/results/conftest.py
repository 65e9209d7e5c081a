"""Fixtures of the tests of reports."""

from pathlib import Path

import pytest
from matplotlib.figure import Figure


@pytest.fixture
def unrendered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures are drawn but not rendered, which takes most of a report's time and is tested in test_report.py."""
    monkeypatch.setattr(Figure, "savefig", lambda figure, file, **_: file.touch() if isinstance(file, Path) else None)
