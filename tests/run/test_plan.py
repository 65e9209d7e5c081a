"""A run is resolved once in a process, and passed on."""

import pytest
from flwr.app import Context, RecordDict
from support import small_experiment

from fedsim.client_app import node_clients
from fedsim.common.errors import UserError
from fedsim.run.plan import resolve
from fedsim.run.workspace import open_workspace, workspace
from fedsim.settings.experiment import Experiment, read_experiment


def test_a_plan_knows_its_folder_clients_and_data(tmp_path):
    plan = resolve(small_experiment(tmp_path))
    assert plan.clients == ("rot0", "rot15", "rot30")
    assert plan.folder == tmp_path / "small" / "fedavg" / "rot45" / "seed0"
    assert plan.data.domains == ("rot0", "rot15", "rot30", "rot45")
    assert resolve(small_experiment(tmp_path, "deepall")).clients == ("pooled",)
    assert resolve(Experiment()).experiment.run.target == "rot75"  # the last domain, filled in
    with pytest.raises(UserError, match="no domain 'rot4'"):
        resolve(Experiment().replace(run={"target": "rot4"}))
    space = open_workspace(plan)
    assert workspace(plan.experiment.toml()) is space
    again = open_workspace(plan)  # another run, from the initial network
    assert workspace(plan.experiment.toml()) is again is not space


def test_the_images_take_the_size_of_the_weights():
    """timm's models as well, see tests/models."""
    plan = resolve(read_experiment("digits", ["data.image_size=0", "model.backbone=resnet18"]))
    assert plan.experiment.data.image_size == 224  # and so it is recorded, compared and sent to the sites
    assert resolve(plan.experiment).experiment == plan.experiment
    with pytest.raises(UserError, match=r"data.image_size is 0.*digits-cnn-bn has no such weights: name a size"):
        resolve(read_experiment("digits", ["data.image_size=0"]))
    for size in (-1, 7, 1025):
        with pytest.raises(UserError, match=r"data\.image_size"):
            read_experiment("digits", [f"data.image_size={size}"])


@pytest.mark.parametrize("count", [1, 7, 100])
@pytest.mark.parametrize("nodes", [1, 2, 10])
def test_every_client_has_one_node_and_no_node_more_than_its_share(count, nodes, tmp_path):
    plan = resolve(small_experiment(tmp_path, data={"clients_per_domain": count}))
    places = [{"partition-id": place, "num-partitions": nodes} for place in range(nodes)]
    shares = [node_clients(Context(1, 2, place, RecordDict(), {}), plan) for place in places]
    assert sorted(client for share in shares for client in share) == sorted(plan.clients)
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
