"""The script for machines with a GPU is run in its small form on the CPU, so that all of its code is tested."""

from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.parametrize(
    ("check", "said"),
    [
        ("steps", "| nan | nan |"),
        ("synchronisation", "| fedavg | not a GPU |"),
        ("training", "fedsim sweep pacs"),
        ("small-nets", "| 3 | side by side |"),
        ("launches", "| a layer: XAN |"),
        pytest.param("verbs", "| `fedsim evaluate {run}` | 0 |", marks=pytest.mark.slow),
        pytest.param("runs", "| fedavg | True |", marks=pytest.mark.slow),
        pytest.param("rate", "| digits-cnn-bn | fp32 |", marks=pytest.mark.slow),
    ],
)
def test_small_form(check, said, tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import gpu

    gpu.main(["--small", "--device", "cpu", "--checks", check, "--output", str(tmp_path / "GPU.md")])
    text = (tmp_path / "GPU.md").read_text()
    assert said in text
    assert "driver none" in text
    assert f"--checks {check}" in text
