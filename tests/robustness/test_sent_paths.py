"""Nothing that the server sends to the sites of a deployment, or that they send back, names a folder of the server."""

import pytest
from support import run_small, tiny_experiment

from clients.base import DomainClient
from fedsim.common.errors import ClientFailedError


def texts(content) -> list[str]:
    """All texts in a message."""
    values = [value for record in content.config_records.values() for value in record.values()]
    flat = [item for value in values for item in (value if isinstance(value, list) else [value])]
    return [item for item in flat if isinstance(item, str)]


def deployed(folder):
    data = {"root": str(folder / "data"), "cache": str(folder / "cache")}
    run = {"runtime": "deployment", "federation": str(folder / "federation.toml"), "evaluate_target": "server"}
    return tiny_experiment(folder / "out", "scaffold", 1, data=data, run=run, train={"momentum": 0.0})


def test_no_path_of_the_server_in_messages_of_a_deployment(tmp_path):
    """In a simulation the messages name the run's folder."""
    _, grid = run_small(deployed(tmp_path))
    assert {message.metadata.message_type for message, _ in grid.seen} >= {"train", "evaluate", "query.handshake"}
    for message, reply in grid.seen:
        said = [*texts(message.content), *texts(reply.content)]
        assert any("dataset" in text for text in said)  # the settings themselves do travel
        assert not [text for text in said if str(tmp_path) in text]


def test_no_path_of_the_server_in_errors_of_a_deployment(tmp_path, monkeypatch):
    """A client that fails names its folder of state, which is its own."""

    def fail(client, parameters, config):
        raise RuntimeError(f"the state in {client.store._folder} and the data in {client.experiment.data.root!r}")

    monkeypatch.setattr(DomainClient, "fit", fail)
    with pytest.raises(ClientFailedError, match="the state in None and the data in ''") as failed:
        run_small(deployed(tmp_path))
    assert str(tmp_path) not in str(failed.value)
