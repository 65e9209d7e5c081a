"""Nothing that the server sends to the sites of a deployment, or that they send back, names a folder of the server."""

import pytest
from support import run_small, small_experiment

from clients.base import DomainClient
from fedsim.common.errors import ClientFailedError


def texts(content) -> list[str]:
    """All texts in a message."""
    values = [value for record in content.config_records.values() for value in record.values()]
    flat = [item for value in values for item in (value if isinstance(value, list) else [value])]
    return [item for item in flat if isinstance(item, str)]


def test_no_path_of_the_server_in_messages_of_a_deployment(tmp_path):
    """No message and no answer, not even an error, names one; in a simulation the messages name the run's folder."""
    own = {"root": str(tmp_path / "data"), "cache": str(tmp_path / "cache")}
    run = {"runtime": "deployment", "federation": str(tmp_path / "federation.toml"), "evaluate_target": "server"}
    experiment = small_experiment(
        tmp_path / "out", "scaffold", data={"fraction": 0.05, **own}, run=run, train={"rounds": 1, "momentum": 0.0}
    )
    _, grid = run_small(experiment)
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
    own = {"root": str(tmp_path / "data"), "fraction": 0.05}
    run = {"runtime": "deployment", "federation": str(tmp_path / "federation.toml"), "evaluate_target": "server"}
    with pytest.raises(ClientFailedError, match="the state in None and the data in ''") as failed:
        run_small(small_experiment(tmp_path / "out", data=own, run=run))
    assert str(tmp_path) not in str(failed.value)
