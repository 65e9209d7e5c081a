"""`kill -9` at random moments and at writes: the same command finishes the run, with the unbroken run's records."""

import random
import signal
from collections.abc import Iterator

import numpy as np
import pytest
from killing import QuickRuns, differences, run_by_command
from PIL import Image
from support import small_experiment

from fedsim.run.plan import run_folder

KILLED = -signal.SIGKILL
TRIES = 20  # a run that is quicker than the unbroken one was is over before the kill
METHODS = {
    "fedbn": "fedbn",
    "gperxan": "gperxan",
    "feddg-ga": "feddg-ga",
    "feddg-ga-accuracy": {"name": "feddg-ga", "generalization_gap": {"metric": "validation_accuracy"}},
    "csac": "csac",
    "ccst": "ccst",
}
WRITES = [("gperxan", 14), ("csac", -9), ("feddg-ga", 31)]  # in the middle of a round's writes, before or after one
PARTS = {
    "adversarial_reference": {"d_noise": 16, "width": 32, "r": 16, "hidden": 16},
    "adapters": {"freeze": False},  # the CNN has no pretrained weights
}
LOCAL_STATE = ("fedsr", "fedl2r", "fedcmi", "fedadg", "fpl", "perada", "ditto", "fada")  # networks, moments, references
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def quick_runs() -> Iterator[QuickRuns]:
    quick_runs = QuickRuns()
    yield quick_runs
    quick_runs.close()


def check_equal(cut, whole):
    assert differences(run_folder(cut), run_folder(whole)) == []


def experiment(folder, name="gperxan", rounds=6):
    return small_experiment(folder, METHODS[name], train={"rounds": rounds})


@pytest.fixture(scope="module")
def whole(quick_runs, tmp_path_factory):
    """The uninterrupted run of a method and its seconds; each run is done once."""
    made = {}

    def unbroken(name):
        if name not in made:
            run = experiment(tmp_path_factory.mktemp("whole"), name)
            done = quick_runs.run(run)
            assert done["code"] == 0
            made[name] = run, done["seconds"]
        return made[name]

    return unbroken


@pytest.mark.parametrize(("name", "write"), WRITES, ids=lambda value: str(value))
def test_killed_at_a_write(name, write, quick_runs, whole, tmp_path):
    """An incomplete round is not taken for a complete one."""
    cut = experiment(tmp_path, name)
    assert quick_runs.run(cut, write=write)["code"] == KILLED
    assert quick_runs.run(cut)["code"] == 0
    check_equal(cut, whole(name)[0])


@pytest.mark.parametrize(("name", "trial"), [(method, trial) for trial in range(2) for method in METHODS])
def test_inline_run_killed_at_a_random_moment(name, trial, quick_runs, whole, tmp_path):
    """Anywhere between the start and the end."""
    unbroken, length = whole(name)
    moments = random.Random(f"{name} {trial}")
    for attempt in range(TRIES):
        cut = experiment(tmp_path / str(attempt), name)
        if quick_runs.run(cut, seconds=moments.uniform(0.0, length))["code"] == KILLED:
            break
    assert quick_runs.run(cut)["code"] == 0
    assert attempt < TRIES - 1
    check_equal(cut, unbroken)


def test_killed_before_and_after_every_write(quick_runs, tmp_path):
    whole = experiment(tmp_path / "whole", rounds=2)
    assert quick_runs.run(whole)["code"] == 0
    for place in range(1, 1000):
        before, after = (experiment(tmp_path / f"{when}{place}", rounds=2) for when in ("before", "after"))
        if quick_runs.run(before, write=-place)["code"] == 0:
            break
        quick_runs.run(after, write=place)
        for cut in (before, after):
            assert quick_runs.run(cut)["code"] == 0
            check_equal(cut, whole)
    assert place > 20


@pytest.mark.parametrize("name", ["fedbn", "gperxan", "feddg-ga", "csac"])
def test_ray_run_killed_at_random_moments(name, tmp_path):
    """Driver, Ray's own processes and workers are killed together, while the run starts and while it trains."""
    pytest.importorskip("ray")

    def on_ray(folder):
        return small_experiment(tmp_path / folder, METHODS[name], train={"rounds": 12}, run={"runtime": "ray"})

    log = tmp_path / "log"
    whole = run_by_command(on_ray("whole"), log)
    assert whole["code"] == 0, log.read_text()
    moments = random.Random(name)
    for rounds in (False, True):
        cut = on_ray(f"cut{rounds}")
        seconds = moments.uniform(0.0, 0.8 * (whole["training"] if rounds else whole["seconds"]))
        assert run_by_command(cut, log, seconds, rounds)["code"] == KILLED
        assert run_by_command(cut, log)["code"] == 0, log.read_text()
        check_equal(cut, on_ray("whole"))


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """Unlabelled images for the server's distillation."""
    folder = tmp_path_factory.mktemp("pictures")
    for number in range(8):
        pixels = np.random.default_rng(number).integers(0, 256, (28, 28), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    return folder


def rounds_of(experiment) -> int:
    file = run_folder(experiment) / "rounds.csv"
    return max(len(file.read_text().splitlines()) - 2, 0) if file.is_file() else 0


@pytest.mark.parametrize("method", LOCAL_STATE)
def test_killed_three_times_at_random_moments(method, quick_runs, pictures, tmp_path):
    """Methods whose clients keep more than batch norm, and those with banks of every round."""
    distillation = {"ensemble_distillation": {"data": str(pictures), "steps": 3, "batch_size": 8}}
    sections = {"train": {"rounds": 8}, "parts": PARTS | (distillation if method == "perada" else {})}
    sections |= (
        {"data": {"clients_per_domain": 2}} if method == "fpl" else {}
    )  # six prototypes of a class: they cluster
    whole = small_experiment(tmp_path / "whole", method, **sections)
    done, moments = quick_runs.run(whole), random.Random(method)
    assert done["code"] == 0
    for attempt in range(TRIES):
        cut, kills = small_experiment(tmp_path / f"cut{attempt}", method, **sections), []
        while len(kills) < 3:
            if quick_runs.run(cut, seconds=moments.uniform(0.0, 0.6 * done["seconds"]))["code"] != KILLED:
                break
            kills.append(rounds_of(cut))
        if len(kills) == 3 and kills[-1] > 0:
            break
    assert len(kills) == 3
    print(f"{method}: killed after rounds {kills} of 8")
    assert quick_runs.run(cut)["code"] == 0
    check_equal(cut, whole)
