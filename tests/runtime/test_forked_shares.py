"""Which clients each forked process gets: all processes have about the same work."""

import pytest
from support import tiny_experiment

import fedsim.runtime.forked
from fedsim.client_app import app
from fedsim.results.client_rows import client_rows
from fedsim.run.plan import resolve
from fedsim.runtime.forked import ForkedGrid, shares


def test_the_longest_work_is_shared_first():
    """Sources of PACS by images, on two cores: 2048 + 2344 beside 3929, and not 2048 + 3929 beside 2344."""
    assert shares([2048, 2344, 3929], 2) == [[2], [0, 1]]
    assert shares([0.0] * 5, 2) == [[0, 2, 4], [1, 3]]  # nothing is known: they take turns
    many = shares([float(place) for place in range(1000)], 2)
    assert sorted(many[0] + many[1]) == list(range(1000))
    assert all(len({place // 8 for place in own}) == 125 for own in many)  # both have some of every eight neighbours
    sums = [sum(own) for own in many]
    assert abs(sums[0] - sums[1]) <= 2


@pytest.fixture
def divided(monkeypatch, tmp_path):
    """divided(seconds, clients per domain, rows): each process's clients after a first round with these rows."""
    monkeypatch.setattr(fedsim.runtime.forked, "free_cores", lambda: 2)
    monkeypatch.setattr(fedsim.runtime.forked.ForkedProcess, "start", lambda process: None)

    def divide(seconds, many=1, merged=lambda rows: rows):
        plan = resolve(tiny_experiment(tmp_path, rounds=11, data={"clients_per_domain": many, "fraction": 0.1}))
        rows = [
            {"round": 1, "client": name, "domain": name.split("/")[0], "status": "ok", "train_seconds": taken}
            for name, taken in seconds(plan.clients)
        ]
        grid = ForkedGrid(app, plan, len(plan.clients), str)
        grid.on_round({"round": 1, "steps": 12, "train_seconds": 7.0}, merged(rows))
        places = dict(zip(grid.node_ids, plan.clients))
        return [[places[node] for node in process.contexts] for process in grid._processes]

    return divide


def test_clients_are_divided_by_the_seconds_of_the_first_round(divided):
    assert divided(lambda names: zip(names, (1.0, 2.0, 4.0))) == [["rot30"], ["rot0", "rot15"]]


@pytest.mark.parametrize("drawn", [0, 3, 20])
def test_clients_that_were_not_drawn_count_as_the_others(divided, drawn):
    """Of 30 clients that train about as long, few were drawn in the first round: both processes get 14 to 16."""
    seconds = lambda names: [(name, 1.0 + 0.01 * place) for place, name in enumerate(names[7 : 7 + drawn])]  # noqa: E731
    first, second = divided(seconds, 10)
    assert len(first) + len(second) == 30
    assert abs(len(first) - len(second)) <= 2


def test_clients_are_divided_by_the_means_of_their_domains_where_rows_are_merged(divided):
    """In the first domain each of the three clients trains ten times as long: one process gets two of them alone."""
    seconds = lambda names: [(name, 1.0 if name.startswith("rot0/") else 0.1) for name in names]  # noqa: E731
    first, second = divided(seconds, 3, lambda rows: client_rows(rows, "domains"))
    assert (first, len(second)) == (["rot0/0", "rot0/2"], 7)
