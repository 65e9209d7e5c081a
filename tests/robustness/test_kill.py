"""`kill -9` at random moments: the same command finishes the run, and its records equal the unbroken run's."""

import random
import signal

import pytest
from killing import CommandLine, differences
from support import small_experiment

from fedsim.run.plan import run_folder

LONGER = {"rounds": 6}
METHODS = {
    "fedbn": "fedbn",
    "gperxan": "gperxan",
    "feddg-ga": "feddg-ga",
    "feddg-ga-accuracy": {"name": "feddg-ga", "generalization_gap": {"metric": "validation_accuracy"}},
    "csac": "csac",
    "ccst": "ccst",
}
INLINE = [(method, trial) for trial in range(2) for method in METHODS]
WRITES = [("gperxan", 14), ("csac", -9), ("feddg-ga", 31)]  # in the middle of a round's writes, before or after one


@pytest.fixture(scope="module")
def whole(quick_runs, tmp_path_factory):
    """The uninterrupted inline run of a method and its length; each run is done once."""
    made = {}

    def unbroken(name):
        if name not in made:
            experiment = small_experiment(tmp_path_factory.mktemp("whole"), METHODS[name], train=LONGER)
            done = quick_runs.run(experiment)
            assert done["code"] == 0
            made[name] = run_folder(experiment), done["seconds"]
        return made[name]

    return unbroken


@pytest.mark.slow
@pytest.mark.parametrize(("name", "write"), WRITES, ids=lambda value: str(value))
def test_killed_at_a_write(name, write, quick_runs, whole, tmp_path):
    """A kill between the files of one round: an incomplete round is not taken for a complete one."""
    experiment = small_experiment(tmp_path, METHODS[name], train=LONGER)
    assert quick_runs.run(experiment, write=write)["code"] == -signal.SIGKILL
    assert quick_runs.run(experiment)["code"] == 0
    assert differences(run_folder(experiment), whole(name)[0]) == []


@pytest.mark.slow
@pytest.mark.parametrize(("name", "trial"), INLINE)
def test_inline_run_killed_at_a_random_moment(name, trial, quick_runs, whole, tmp_path):
    """The moment is anywhere between the start and the end."""
    folder, length = whole(name)
    moments = random.Random(f"{name} {trial}")
    for attempt in range(20):  # a run that is quicker than the unbroken one was is over before the kill
        experiment = small_experiment(tmp_path / str(attempt), METHODS[name], train=LONGER)
        if quick_runs.run(experiment, seconds=moments.uniform(0.0, length))["code"] == -signal.SIGKILL:
            break
    assert quick_runs.run(experiment)["code"] == 0
    assert attempt < 19
    assert differences(run_folder(experiment), folder) == []


@pytest.mark.slow
def test_killed_at_every_write(quick_runs, tmp_path):
    """The kill is before or after every file that is written."""

    def experiment(folder):
        return small_experiment(tmp_path / folder, "gperxan", train={"rounds": 2})

    assert quick_runs.run(experiment("whole"))["code"] == 0
    for place in range(1, 1000):
        before, after = experiment(f"before{place}"), experiment(f"after{place}")
        if quick_runs.run(before, write=-place)["code"] == 0:
            break
        quick_runs.run(after, write=place)
        for cut in (before, after):
            assert quick_runs.run(cut)["code"] == 0
            assert differences(run_folder(cut), run_folder(experiment("whole"))) == []
    assert place > 20


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fedbn", "gperxan", "feddg-ga", "csac"])
def test_ray_run_killed_at_random_moments(name, tmp_path):
    """Driver, Ray's own processes and workers are killed together, while the run starts and while it trains."""
    pytest.importorskip("ray")
    line = CommandLine(tmp_path)

    def experiment(folder):
        return small_experiment(tmp_path / folder, METHODS[name], train={"rounds": 12}, run={"runtime": "ray"})

    whole = line.run(experiment("whole"))
    assert whole["code"] == 0, (tmp_path / "log").read_text()
    moments = random.Random(name)
    for trial, rounds in enumerate((False, True)):
        cut = experiment(f"cut{trial}")
        seconds = moments.uniform(0.0, 0.8 * (whole["training"] if rounds else whole["seconds"]))
        assert line.run(cut, seconds=seconds, rounds=rounds)["code"] == -signal.SIGKILL
        assert line.run(cut)["code"] == 0, (tmp_path / "log").read_text()
        assert differences(run_folder(cut), run_folder(experiment("whole"))) == []
