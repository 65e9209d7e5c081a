"""A simulation with any number of nodes gives the same numbers: the nodes share the clients."""

import pytest
from flwr.app import Context, RecordDict
from support import SpyGrid, numbers, run_small, small_experiment

from fedsim.client_app import node_clients
from fedsim.run.plan import resolve
from fedsim.run.serve import serve

SHORT = {"rounds": 2, "iterations": 1}


@pytest.fixture(scope="module")
def inline(tmp_path_factory):
    return run_small(small_experiment(tmp_path_factory.mktemp("inline"), "fedbn", train=SHORT))[0]


@pytest.mark.parametrize("nodes", [1, 5])
def test_any_number_of_nodes_gives_the_inline_numbers(nodes, inline, tmp_path):
    grid = SpyGrid(nodes)
    folder = serve(grid, resolve(small_experiment(tmp_path, "fedbn", train=SHORT)))
    assert numbers(folder / "rounds.csv").equals(numbers(inline / "rounds.csv"))
    assert numbers(folder / "clients.csv").equals(numbers(inline / "clients.csv"))
    busy = {message.metadata.dst_node_id for message, _ in grid.seen if message.metadata.message_type == "train"}
    assert len(busy) == min(nodes, 3)


@pytest.mark.parametrize("count", [1, 7, 100])
@pytest.mark.parametrize("nodes", [1, 2, 10])
def test_every_client_has_one_node_and_no_node_more_than_its_share(count, nodes, tmp_path):
    plan = resolve(small_experiment(tmp_path, data={"clients_per_domain": count}))
    shares = [
        node_clients(Context(1, place, {"partition-id": place, "num-partitions": nodes}, RecordDict(), {}), plan)
        for place in range(nodes)
    ]
    assert sorted(client for share in shares for client in share) == sorted(plan.clients)
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
