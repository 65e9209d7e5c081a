"""Hours of a dry run: local steps of a cell, and the seconds of a step that were measured."""

from pathlib import Path

import pytest

from fedsim.run.plan import resolve
from fedsim.settings.experiment import read_experiment
from fedsim.sweep.estimate import estimate, step_key, steps_left, training_counts
from fedsim.sweep.plan import Cell, guessed_rates


def cell(method, preset, config="pacs", target="sketch", **changes):
    words = [f"method.name={method}", f"run.target={target}", *(f"{k}={v}" for k, v in changes.items())]
    return Cell(resolve(read_experiment(config, words, preset)).experiment, Path("nowhere"))


def test_steps_are_those_of_the_papers():
    """FedIG: 40 rounds of 200 steps on three clients. FedSB: 45 batches each. CSAC's code: 30 x 60, then 40 x 200."""
    assert steps_left(cell("fedavg", "fedig")) == steps_left(cell("deepall", "fedig")) == 3 * 40 * 200
    assert steps_left(cell("fedsb", "fedsb")) == 3 * 100 * 45
    assert steps_left(cell("fedavg", "fedig-30")) == 10 * 120 * 20
    # gPerXAN: 90 % of 2,048, 2,344 and 1,670 images in batches of 32: 58 + 66 + 47
    assert training_counts(resolve(cell("fedavg", "gperxan").experiment)) == [1844, 2110, 1503]
    assert steps_left(cell("fedavg", "gperxan")) == 100 * (58 + 66 + 47)
    csac = cell("csac", "csac-code")
    assert steps_left(csac) == 3 * (1800 + 40 * 200)
    csac.round = 10
    assert steps_left(csac) == 3 * 30 * 200


def test_hours_without_a_time_of_the_row_are_fedavgs_times_its_cost():
    """0.5 s per step of FedAvg and a cost of 1.2 of FedProx give 14,400 s; a row's own time is used first."""
    one, key, cost = cell("fedprox", "fedig"), step_key(cell("fedavg", "fedig").experiment), {"fedprox": 1.2}
    elsewhere = {("vlcs", *key[1:]): (0.25, "another")}
    times = {key: (0.5, "a machine, 1 thread")} | elsewhere
    found = estimate([one], {}, times, cost)
    assert found.seconds == pytest.approx(14_400)
    assert found.source == "local steps alone on a machine, 1 thread: FedAvg's, times the cost of the method"
    assert estimate([one], {}, elsewhere, cost).seconds == pytest.approx(7_200)
    assert estimate([one], {}, times | {step_key(one.experiment): (1.0, "")}, cost).seconds == 24_000
    assert estimate([one], {}, times, {}).seconds is None
    assert estimate([cell("fedprox", "fedig", **{"method.proximal.mu": 0.5})], {}, times, cost).seconds
    # where a setting changes what a step does, the cost of the method says nothing
    for change in ({"method.add": "mix_style"}, {"method.norm": "ibn"}, {"method.augment": "rand_augment"}):
        assert estimate([cell("fedbn", "fedig", **change)], {}, times, {"fedbn": 1.1}).source == "not measured"
    doubled = cell("rsc", "fedig", **{"method.self_challenging.variant": "official"})
    assert estimate([doubled], {}, times, {"rsc": 1.4}).source == "not measured"
    assert estimate([one], {}, {(*key[:3], "96", *key[4:]): (0.5, "")}, cost).seconds is None  # another size


def test_a_method_without_finished_rounds_is_counted_by_the_cost_of_its_step():
    """2 s a round of FedAvg and 6 s of FedSAM, whose steps cost 1 and 2, give (2 / 1 + 6 / 2) / 2 = 2.5 s per cost."""
    cells = [cell(name, "fedig") for name in ("fedavg", "fedsam", "csac", "fedbn")]
    rates, costs = {"fedavg": 2.0, "fedsam": 6.0}, {"fedavg": 1.0, "fedsam": 2.0, "csac": 1.5}
    guessed, words = guessed_rates(cells, rates, costs)
    assert guessed == pytest.approx({"csac": 3.75, "fedbn": 4.0})
    assert words[0] == "csac is not measured: 3.75 s by the cost of its step"
    assert words[1] == "fedbn is not measured: it is counted like the mean of fedavg, fedsam"
    assert guessed_rates(cells[2:3], {"fedavg": 2.0}, {"csac": 1.5})[0] == {"csac": 2.0}
    cells[2].state = "failed"
    assert guessed_rates(cells[:3], rates, {}) == ({}, [])
    assert guessed_rates(cells, {}, costs) == ({}, [])
