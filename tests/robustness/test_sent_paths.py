"""Nothing that the server sends to the sites of a deployment, or that they send back, names a folder of the server."""

import pytest
from support import run_small, tiny_experiment

from clients.base import DomainClient
from fedsim.common.errors import ClientFailedError


@pytest.fixture
def deployed(tmp_path):
    data = {"root": str(tmp_path / "data"), "cache": str(tmp_path / "cache")}
    run = {"runtime": "deployment", "federation": str(tmp_path / "federation.toml"), "evaluate_target": "server"}
    return tiny_experiment(tmp_path / "out", "scaffold", 1, data=data, run=run, train={"momentum": 0.0})


def test_no_path_of_the_server_in_messages_of_a_deployment(deployed, tmp_path):
    _, grid = run_small(deployed)
    assert {message.metadata.message_type for message, _ in grid.seen} >= {"train", "evaluate", "query.handshake"}
    for message, reply in grid.seen:
        said = [str(dict(each.content.config_records)) for each in (message, reply)]
        assert "dataset" in said[0]  # the settings themselves do travel
        assert not [text for text in said if str(tmp_path) in text]


def test_no_path_of_the_server_in_errors_of_a_deployment(deployed, tmp_path, monkeypatch):
    """A client that fails names its folder of state, which is its own."""

    def fail(client, parameters, config):
        raise RuntimeError(f"the state in {client.store._folder} and the data in {client.experiment.data.root!r}")

    monkeypatch.setattr(DomainClient, "fit", fail)
    with pytest.raises(ClientFailedError, match="the state in None and the data in ''") as failed:
        run_small(deployed)
    assert str(tmp_path) not in str(failed.value)
