"""A finished run goes on for more rounds, where this equals an uninterrupted run of so many rounds."""

import ast
import inspect
import sys

import pandas as pd
import pytest
from support import interrupt, numbers, run_small, tiny_experiment

from fedsim.common.errors import UserError
from fedsim.methods.assembly import build_recipe
from fedsim.methods.registry import METHODS
from fedsim.parts.part import Part, part_name
from fedsim.runs.plan import run_folder
from fedsim.runs.workspace import close_workspaces

KEPT = {"keep_state": True}


@pytest.fixture(autouse=True)
def _new_process():
    close_workspaces()


def equal(folder, whole):
    """Check that two runs have the same records and models, times aside."""
    for name in ("rounds", "clients", "summary"):
        pd.testing.assert_frame_equal(numbers(folder / f"{name}.csv"), numbers(whole / f"{name}.csv"))
    for file in ("last.safetensors", "best.safetensors"):
        assert (folder / file).read_bytes() == (whole / file).read_bytes(), file
    rounds = [sorted(path.name for path in (run / "predictions").iterdir()) for run in (folder, whole)]
    assert rounds[0] == rounds[1]


@pytest.mark.parametrize(
    ("method", "train"),
    [
        ("fedavg", {"momentum": 0.9, "persist_optimizer": True, "clients_per_round": 2, "warmup_rounds": 2}),
        ("scaffold", {"evaluate_every": 2}),
        ("gperxan", {}),
    ],
)
def test_four_rounds_and_two_more_are_six_rounds_to_the_bit(method, train, tmp_path):
    """State of the optimizer, of the clients and of the server included; the same test holds for a killed run."""
    whole, _ = run_small(tiny_experiment(tmp_path / "whole", method, rounds=6, train=train, run=KEPT))
    for name, begin in (("finished", run_small), ("killed", lambda experiment: interrupt(experiment, 3))):
        close_workspaces()
        begin(tiny_experiment(tmp_path / name, method, rounds=4, train=train, run=KEPT))
        close_workspaces()
        folder, _ = run_small(tiny_experiment(tmp_path / name, method, rounds=6, train=train, run=KEPT))
        equal(folder, whole)


def test_a_longer_run_that_is_killed_goes_on_again(tmp_path):
    """Also with the command of before, which then asks for fewer rounds and is refused."""
    run_small(tiny_experiment(tmp_path, rounds=2, run=KEPT))
    close_workspaces()
    interrupt(tiny_experiment(tmp_path, rounds=5, run=KEPT), 3)
    close_workspaces()
    with pytest.raises(UserError, match=r"5 rounds that cannot go on to 2: these are fewer rounds \(train.rounds\)"):
        run_small(tiny_experiment(tmp_path, rounds=2, run=KEPT))
    folder, _ = run_small(tiny_experiment(tmp_path, rounds=5))
    assert list(pd.read_csv(folder / "rounds.csv")["round"]) == list(range(6))
    assert not (folder / "checkpoint").exists(), "the last command does not ask for the states"


def test_early_stopping_goes_on_counting(tmp_path):
    """A run that was stopped is the same with more rounds; one that was not is stopped by its own rule."""
    train = {"lr": 1e-9, "stop_after": 2}  # round 1 is the best
    run_small(tiny_experiment(tmp_path, rounds=2, train=train, run=KEPT))
    close_workspaces()
    folder, _ = run_small(tiny_experiment(tmp_path, rounds=8, train=train, run=KEPT))
    assert pd.read_csv(folder / "summary.csv")["rounds"].item() == 3


@pytest.mark.parametrize(
    ("method", "train", "reason"),
    [
        ("fedavg", {"schedule": "cosine"}, "train.schedule = 'cosine' spreads the learning rate over all rounds"),
        ("feddg-ga", {}, "generalization_adjustment spreads its work over all rounds"),
        ("fedavg", {"evaluate_every": 2, "rounds": 3}, "its last round was validated as such"),
        ("csac", {"budget": "steps"}, "train.budget = 'steps' takes what comes before round 1"),
    ],
)
def test_a_run_whose_first_rounds_would_be_others_is_refused(method, train, reason, tmp_path):
    """Nothing is changed in its folder: the command of before says that it has finished."""
    first = tiny_experiment(tmp_path, method, train=train, run=KEPT)
    folder, _ = run_small(first)
    records = (folder / "summary.csv").read_bytes()
    with pytest.raises(UserError) as refusal:
        run_small(first.replace(train={"rounds": 5}))
    assert reason in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert (folder / "summary.csv").read_bytes() == records
    run_small(first)


def test_a_run_without_its_states_says_how_to_keep_them(tmp_path):
    run_small(tiny_experiment(tmp_path))
    with pytest.raises(UserError, match=r"states with which it ended were removed; set run\.keep_state = true"):
        run_small(tiny_experiment(tmp_path, rounds=5, run=KEPT))
    folder = run_folder(tiny_experiment(tmp_path))
    assert (folder / "summary.csv").is_file()


def reads_rounds(part: Part) -> bool:
    """Whether the module of a part's class reads the number of rounds of a `ServerRound` or `LocalRound`."""
    tree = ast.parse(inspect.getsource(sys.modules[type(part).__module__]))
    return any(ast.unparse(node) in ("server.rounds", "round.rounds") for node in ast.walk(tree))


def test_parts_that_read_the_number_of_rounds_say_so(tmp_path):
    """Of all parts of all rows."""
    readers = set()
    for name in METHODS:
        recipe = build_recipe(tiny_experiment(tmp_path, name))
        for _, part in recipe.pairs:
            if reads_rounds(part):
                readers.add(part_name(part))
                assert type(part).depends_on_rounds is not Part.depends_on_rounds, part_name(part)
    assert readers == {"generalization_adjustment", "server_average", "cyclic_rate"}
