"""Kills of methods whose clients keep networks, moments or references, and of methods with banks of every round.

A run is killed at three random moments and resumed each time. Its records and model are those of an uninterrupted run.
"""

import random
import signal

import numpy as np
import pytest
from killing import differences
from PIL import Image
from support import small_experiment

from fedsim.run.plan import run_folder

KILLS = 3
TRIES = 12  # a run that is quicker than the unbroken one was is over before its third kill
PARTS = {
    "adversarial_reference": {"d_noise": 16, "width": 32, "r": 16, "hidden": 16},
    "adapters": {"freeze": False},  # the CNN has no pretrained weights
}
ROWS = {
    "fedsr": {},
    "fedl2r": {},
    "fedcmi": {},
    "fedadg": {},
    "fpl": {"data": {"clients_per_domain": 2}},  # six prototypes of a class: they cluster
    "perada": {},
    "ditto": {},
    "fada": {},
}


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """Unlabelled images for the server's distillation."""
    folder = tmp_path_factory.mktemp("pictures")
    for number in range(8):
        pixels = np.random.default_rng(number).integers(0, 256, (28, 28), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    return folder


def rounds_of(experiment) -> int:
    """Rounds in rounds.csv."""
    file = run_folder(experiment) / "rounds.csv"
    return max(len(file.read_text().splitlines()) - 2, 0) if file.is_file() else 0


def killed_three_times(quick_runs, experiment, length: float, moments: random.Random) -> list[int]:
    """The recorded rounds at each kill; fewer than three numbers when the run ended before the third kill."""
    found = []
    for _ in range(KILLS):
        if quick_runs.run(experiment, seconds=moments.uniform(0.0, 0.6 * length))["code"] != -signal.SIGKILL:
            break
        found.append(rounds_of(experiment))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("method", ROWS)
def test_killed_three_times_at_random_moments(method, quick_runs, pictures, tmp_path):
    """The CSV files and the last model are the same."""
    distillation = {"data": str(pictures), "steps": 3, "batch_size": 8}
    parts = PARTS | ({"ensemble_distillation": distillation} if method == "perada" else {})

    def experiment(folder):
        return small_experiment(tmp_path / folder, method, train={"rounds": 8}, parts=parts, **ROWS[method])

    whole = quick_runs.run(experiment("whole"))
    assert whole["code"] == 0
    moments = random.Random(method)
    for attempt in range(TRIES):
        cut = experiment(f"cut{attempt}")
        kills = killed_three_times(quick_runs, cut, whole["seconds"], moments)
        if len(kills) == KILLS and kills[-1] > 0:
            break
    assert len(kills) == KILLS
    print(f"{method}: killed after rounds {kills} of 8")
    assert quick_runs.run(cut)["code"] == 0
    assert differences(run_folder(cut), run_folder(experiment("whole"))) == []
