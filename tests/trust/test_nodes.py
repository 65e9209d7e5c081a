"""A simulation with any number of nodes gives the same numbers: the nodes share the clients."""

import pytest
from flwr.app import Context, RecordDict
from support import SpyGrid, numbers, run_small, small_experiment

from fedsim.client_app import node_clients
from fedsim.run.plan import resolve
from fedsim.run.serve import serve


def test_any_number_of_nodes_gives_the_inline_numbers(tmp_path):
    def experiment(folder):
        return small_experiment(tmp_path / folder, "fedbn", train={"rounds": 2, "iterations": 1})

    inline, _ = run_small(experiment("inline"))
    for nodes in (1, 5):
        grid = SpyGrid(nodes)
        folder = serve(grid, resolve(experiment(str(nodes))))
        for file in ("rounds.csv", "clients.csv"):
            assert numbers(folder / file).equals(numbers(inline / file))
        busy = {message.metadata.dst_node_id for message, _ in grid.seen if message.metadata.message_type == "train"}
        assert len(busy) == min(nodes, 3)


@pytest.mark.parametrize("count", [1, 7, 100])
@pytest.mark.parametrize("nodes", [1, 2, 10])
def test_every_client_has_one_node_and_no_node_more_than_its_share(count, nodes, tmp_path):
    plan = resolve(small_experiment(tmp_path, data={"clients_per_domain": count}))
    places = [{"partition-id": place, "num-partitions": nodes} for place in range(nodes)]
    shares = [node_clients(Context(1, 2, place, RecordDict(), {}), plan) for place in places]
    assert sorted(client for share in shares for client in share) == sorted(plan.clients)
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
