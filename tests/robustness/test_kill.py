"""`kill -9` at random moments and at writes: the same command finishes the run, with the unbroken run's records."""

import random
import signal
from collections.abc import Iterator

import pytest
from image_trees import write_tree
from killing import QuickRuns, differences, run_by_command
from support import small_experiment

from fedsim.run.plan import run_folder

KILLED = -signal.SIGKILL
TRIES = 20  # a run that is quicker than the unbroken one was is over before the kill
ACCURACY = {"name": "feddg-ga", "generalization_gap": {"metric": "validation_accuracy"}}
# Banks and personal tensors; networks, moments and references of the clients' own.
METHODS = ["fedbn", "gperxan", "feddg-ga", ACCURACY, "csac", "ccst"]
METHODS += ["fedsr", "fedl2r", "fedcmi", "fedadg", "fpl", "perada", "ditto", "fada"]
PARTS = {
    "adversarial_reference": {"d_noise": 16, "width": 32, "r": 16, "hidden": 16},
    "adapters": {"freeze": False},  # the CNN has no pretrained weights
}
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def quick_runs() -> Iterator[QuickRuns]:
    quick_runs = QuickRuns()
    yield quick_runs
    quick_runs.close()


def check_equal(cut, whole):
    assert differences(run_folder(cut), run_folder(whole)) == []


def test_killed_before_and_after_every_write(quick_runs, tmp_path):
    """An incomplete round is not taken for a complete one."""
    whole = small_experiment(tmp_path / "whole", "gperxan", train={"rounds": 2})
    assert quick_runs.run(whole)["code"] == 0
    for place in range(1, 1000):
        before, after = (
            small_experiment(tmp_path / f"{when}{place}", "gperxan", train={"rounds": 2})
            for when in ("before", "after")
        )
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
        return small_experiment(tmp_path / folder, name, train={"rounds": 12}, run={"runtime": "ray"})

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
    return write_tree(tmp_path_factory.mktemp("pictures"), ["all"], ["all"], 8)


def rounds_of(experiment) -> int:
    file = run_folder(experiment) / "rounds.csv"
    return max(len(file.read_text().splitlines()) - 2, 0) if file.is_file() else 0


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_killed_three_times_at_random_moments(method, quick_runs, pictures, tmp_path):
    distillation = {"ensemble_distillation": {"data": str(pictures), "steps": 3, "batch_size": 8}}
    sections = {"train": {"rounds": 8}, "parts": PARTS | (distillation if method == "perada" else {})}
    sections |= (
        {"data": {"clients_per_domain": 2}} if method == "fpl" else {}
    )  # six prototypes of a class: they cluster
    whole = small_experiment(tmp_path / "whole", method, **sections)
    done, moments = quick_runs.run(whole), random.Random(str(method))
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
