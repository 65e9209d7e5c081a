"""Where clients train as one program, an error ends the round of those that it concerns, and not the run."""

import copy
import itertools

import pandas as pd
import pytest

from clients.base import DomainClient
from clients.stacked.net import StackedNet
from fedsim.client_app import app
from fedsim.commands.contract import small_plan
from fedsim.common.errors import ClientFailedError
from fedsim.run.serve import serve
from fedsim.runtime.together import TogetherGrid

SHORT = ["train.iterations=3", "train.rounds=1", "train.side_by_side=3", "data.fraction=0.05"]


def clients_of_one_round(folder):
    plan = small_plan("fedprox", folder, [*SHORT, "run.on_client_failure=continue"])
    grid = TogetherGrid(app, plan)
    rows = pd.read_csv(serve(grid, plan) / "clients.csv").query("round == 1").set_index("client")
    assert grid.program is not None, grid.reason
    return rows


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    return clients_of_one_round(tmp_path_factory.mktemp("unbroken"))


@pytest.mark.parametrize("place", ["batch", "term", "before_step", "took"])
def test_a_client_that_fails_in_a_step_is_the_only_one(place, unbroken, tmp_path, monkeypatch):
    """In its second step; the two others end with the losses that they have with it."""
    begin = DomainClient.begin_steps

    def broken(client, round):
        steps = begin(client, round)
        if round.client == "rot15":
            calls = itertools.count(1)

            def failing(*arguments):
                if next(calls) == 2:
                    raise ValueError("cannot crop this image")
                return 0.0

            if place == "batch":
                batch, client.data = client.data.batch, copy.copy(client.data)
                client.data.batch = lambda *arguments: failing() or batch(*arguments)
            elif place == "took":
                steps.after = [*steps.after, failing]
            else:
                getattr(round, "terms" if place == "term" else place).append(failing)
        return steps

    monkeypatch.setattr(DomainClient, "begin_steps", broken)
    rows = clients_of_one_round(tmp_path)
    assert "cannot crop this image" in rows["status"]["rot15"]
    others = ["rot0", "rot30"]
    assert list(rows["side_by_side"][others]) == [3, 3]
    assert list(rows["train_loss"][others]) == pytest.approx(list(unbroken["train_loss"][others]), abs=1e-6)


def test_an_error_of_the_common_pass_is_that_of_each_client(tmp_path, monkeypatch):
    forward, calls = StackedNet.forward, itertools.count(1)

    def broken(stack, rows, *arguments):
        if next(calls) == 3:  # the trial is the first
            raise RuntimeError("out of memory")
        return forward(stack, rows, *arguments)

    monkeypatch.setattr(StackedNet, "forward", broken)
    plan = small_plan("fedavg", tmp_path, SHORT)
    with pytest.raises(ClientFailedError, match="out of memory"):
        serve(TogetherGrid(app, plan), plan)
