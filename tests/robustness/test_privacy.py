"""Central and local differential privacy around a recipe: what is sent and aggregated is clipped and noisy."""

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, FedAvg
from scene import build, number
from support import run_small, tiny_experiment

from clients.base import DomainClient
from fedsim.apps.client import app
from fedsim.common.errors import USER_ERROR, ClientFailedError, UserError
from fedsim.flower.identity import assume_identity, with_content
from fedsim.runs.local_privacy import own_privacy, perturbed
from fedsim.runs.plan import resolve
from fedsim.runtime.local_grid import InlineGrid
from fedsim.settings import TrainSettings
from fedsim.tensors.arrays import record_to_arrays, state_to_record
from strategies.fuse.private_mean import PrivateMean
from strategies.parts import ServerRound, Update

NO_NORM = {"backbone": "digits-cnn"}


@pytest.mark.parametrize("clip", [0.05, 1e6])
def test_private_mean_is_flowers_wrapper_around_its_fed_avg(clip, tmp_path):
    """With equal weights, on a network without batch norm, in the middle of round 2."""
    scene = build({"name": "fedavg", "weights": "uniform"}, tmp_path, model=NO_NORM)
    replies, before = scene.replies["train"], record_to_arrays(scene.arrays)
    flowers = FedAvg(min_train_nodes=1, min_available_nodes=1, weighted_by_key="equal")
    wrapper = DifferentialPrivacyServerSideFixedClipping(flowers, 0.0, clip, len(replies))
    updates = [Update(client, 1, record_to_arrays(reply.content["arrays"])) for client, reply in replies.items()]
    ours = PrivateMean(clip, 0.0).fuse(updates, {}, ServerRound(2, 3, [], before, {}))
    number(list(wrapper.configure_train(2, scene.arrays, ConfigRecord(), InlineGrid(app, len(replies)))))
    copies = []
    for reply in replies.values():
        content = {"arrays": ArrayRecord(dict(reply.content["arrays"])), "metrics": MetricRecord({"equal": 1.0})}
        copies.append(with_content(reply, RecordDict(content)))
    theirs = record_to_arrays(wrapper.aggregate_train(2, copies)[0])
    for name, array in theirs.items():
        np.testing.assert_allclose(ours[name], array, rtol=1e-4, atol=1e-6, err_msg=name)
    moved = np.sqrt(sum(float(((ours[name] - before[name]) ** 2).sum()) for name in before))
    assert 0 < moved < (clip * 1.001 if clip < 1 else 100)


def reply_content(scale: float) -> tuple[RecordDict, RecordDict]:
    """(records of a message, records of its reply) with an update of L2 norm `scale`."""
    before = {"w": np.zeros(50_000, np.float32), "b": np.float32(0)}
    after = {"w": np.full(50_000, scale / np.sqrt(50_000), np.float32), "b": np.float32(0)}
    config = ConfigRecord({"experiment": ""})
    sent = RecordDict({"arrays": state_to_record(before), "config": config})
    return sent, RecordDict({"arrays": state_to_record(after), "metrics": MetricRecord({"num-examples": 3})})


def sent_model(train: dict, node: dict | None = None, extra: dict | None = None) -> np.ndarray:
    """The tensor that leaves a client whose update has norm 3."""
    assume_identity(1)
    down, up = reply_content(3.0)
    content = RecordDict({**up, **(extra or {})})
    message = Message(down, 2, "train")
    result = perturbed(content, message, Context(1, 2, node or {}, RecordDict(), {}), TrainSettings(**train))
    assert result.metric_records["metrics"]["num-examples"] == 3
    return record_to_arrays(result.array_records["arrays"])["w"].astype(np.float64)  # float32 norms depend on threads


def test_local_noise_has_the_size_of_the_gaussian_mechanism():
    """sigma = 2C sqrt(2 ln(1.25/delta)) / epsilon around an update of norm C."""
    model = sent_model({"dp_clip": 1.0, "dp_epsilon": 0.5, "dp_delta": 1e-5})
    sigma = 2 * np.sqrt(2 * np.log(1.25 / 1e-5)) / 0.5
    assert abs(model.std() / sigma - 1) < 0.02
    assert not np.array_equal(model, sent_model({"dp_clip": 1.0, "dp_epsilon": 0.5}))
    quiet = sent_model({"dp_clip": 1.0, "dp_epsilon": 1e9})
    assert abs(np.linalg.norm(quiet) - 1.0) < 1e-3  # clipped from 3
    assert abs(np.linalg.norm(sent_model({})) - 3.0) < 1e-5  # off


def test_a_site_decides_for_itself():
    """Its node config has priority over the server's settings, even when these ask for no privacy."""
    own = {"dp-clip": 0.5, "dp-epsilon": 1e9}
    assert abs(np.linalg.norm(sent_model({}, own)) - 0.5) < 1e-3
    loud = sent_model({"dp_delta": 0.999}, {"dp-clip": 0.5, "dp-epsilon": 1.0})  # a delta that asks for little noise
    assert abs(loud.std() / np.sqrt(2 * np.log(1.25 / 1e-5)) - 1) < 0.02
    with pytest.raises(UserError, match="one record of shared tensors"):
        sent_model({}, own, {"style": ArrayRecord()})


@pytest.mark.parametrize(("node", "said"), [
    *(({key: 0.5, "dp-epsilon": 1.0}, f"setting '{key}' is unknown") for key in ("dp_clip", "DP-CLIP", "delta")),
    ({"dp-epsilon": 1.0, "dp-delta": 0.1}, "sets dp-epsilon without dp-clip"),
    ({"dp-clip": 0.5}, "sets dp-clip without dp-epsilon"), ({"dp-delta": 0.1}, "sets dp-delta without dp-clip"),
    *(({"dp-clip": value, "dp-epsilon": 1.0}, "dp-clip must be") for value in (0, -1, np.inf, np.nan, "x", True)),
    *(({"dp-clip": 0.5, "dp-epsilon": value}, "dp-epsilon must be") for value in (0.0, np.inf, "")),
    ({"dp-clip": 0.5, "dp-epsilon": 1.0, "dp-delta": 1.0}, "dp-delta must be between 0 and 1"),
])  # fmt: skip
def test_a_near_miss_of_a_sites_own_privacy_is_refused(node, said):
    """Otherwise the site would believe in noise that is not there, or the server would choose how much there is."""
    with pytest.raises(UserError, match=said):
        sent_model({"dp_epsilon": 1e9}, node)
    assert own_privacy({"site": "a", "domain": "b", "role": "c", "state-dir": "d", "data-dir": "e"}) is None


PRIVATE = {"dp-clip": 0.5, "dp-epsilon": 1.0}


@pytest.mark.parametrize(("method", "role", "said"), [
    *((method, "source", "bank asks for would leave the client") for method in ("elcfs", "ccst")),
    ("fediir", "source", "classifier_gradients asks for"), ("fada", "target", "asks for would leave it without noise"),
    ({"name": "fedavg", "fuse": "secure_mean"}, "source", "which secure_mean masks"), ("fedavg", "source", ""),
])  # fmt: skip
def test_a_private_site_gives_nothing_but_its_perturbed_model(method, role, said, tmp_path):
    """In the handshake and later; the server's own setting is as strict."""
    assume_identity(1)
    experiment = tiny_experiment(tmp_path, method, model=NO_NORM, run={"update_limit": 0.0})
    domain = "rot45" if role == "target" else "rot0"
    node = {"site": "a", "domain": domain, "role": role, "state-dir": str(tmp_path), **PRIVATE}
    asked = {
        "client": domain,
        "token": "0" * 16,
        "timeout": 60.0,
        "round": 0,
        "phase": "x",
        "state-dir": "",
        "bank": "y",
    }
    config = ConfigRecord({"experiment": experiment.toml(), **asked})
    for kind in ("query.handshake", *(("query.collect", "query.visit") if said else ())):
        for own in (node, *([{**PRIVATE, "partition-id": 0, "num-partitions": 1}] if role == "source" else [])):
            reply = app(Message(RecordDict({"config": config}), 2, kind), Context(1, 2, own, RecordDict(), {}))
            assert reply.has_error() == bool(said)
            assert not said or (USER_ERROR in reply.error.reason and said in reply.error.reason)
    if said:
        with pytest.raises(UserError, match=r"train\.dp_clip perturbs"):
            resolve(experiment.replace(train={"dp_clip": 0.5})).build_net()


def test_a_masked_model_is_not_perturbed():
    """Noise on masked integers would not be noise on the update."""
    with pytest.raises(UserError, match="secure_mean has masked it already"):
        sent_model({}, PRIVATE, {"arrays": state_to_record({"w": np.zeros(5, np.uint32)})})


def test_a_run_with_local_privacy(tmp_path):
    """The server never receives a model without noise, also besides its own records: FedCM's direction is made of
    models that are perturbed already."""
    private = {"dp_clip": 0.1, "dp_epsilon": 1.0}
    _, grid = run_small(tiny_experiment(tmp_path, "fedcm", 1, model=NO_NORM, train=private, run={"update_limit": 0}))
    trained = [(sent, reply) for sent, reply in grid.seen if sent.metadata.message_type == "train"]
    assert len(trained) == 3
    for pair in trained:
        sent, received = (record_to_arrays(each.content["arrays"])["head.weight"] for each in pair)
        assert np.abs(received - sent).mean() > 0.1


CENTRAL = {"fuse": "private_mean"}


@pytest.mark.parametrize(("method", "sections", "said"), [
    ({"name": "fedavg"}, {"model": {}}, "batch-norm statistics of digits-cnn-bn"),
    ({"name": "ccst"}, {}, "style_bank asks for would leave the client"),
    ({"name": "selfreg"}, {}, r"batch-norm statistics of \S+, a layer of selfreg, useless; use another method"),
    # SCAFFOLD's variates and FedDyn's correction are sums of updates without noise
    ({"name": "scaffold", **CENTRAL}, {"train": {}}, "control_variates assumes that the server may look at"),
    ({"name": "feddyn", **CENTRAL}, {"train": {}}, "dynamic_correction assumes that the server may look at"),
])  # fmt: skip
def test_what_noise_cannot_protect_is_refused(method, sections, said, tmp_path):
    with pytest.raises(UserError, match=said):
        run_small(tiny_experiment(tmp_path, method, **{"model": NO_NORM, "train": {"dp_clip": 1.0}, **sections}))


def test_no_path_of_the_server_in_messages_and_errors_of_a_deployment(tmp_path, monkeypatch):
    """A client that fails names its folder of state, which is its own."""
    data = {"root": str(tmp_path / "data"), "cache": str(tmp_path / "cache")}
    run = {"runtime": "deployment", "federation": str(tmp_path / "federation.toml"), "evaluate_target": "server"}
    deployed = tiny_experiment(tmp_path / "out", "scaffold", 1, data=data, run=run, train={"momentum": 0.0})
    _, grid = run_small(deployed)
    assert {message.metadata.message_type for message, _ in grid.seen} >= {"train", "evaluate", "query.handshake"}
    for message, reply in grid.seen:
        said = [str(dict(each.content.config_records)) for each in (message, reply)]
        assert "dataset" in said[0]  # the settings themselves do travel
        assert not [text for text in said if str(tmp_path) in text]

    def fail(client, tensors, order):
        raise RuntimeError(f"the state in {client.store._folder} and the data in {client.experiment.data.root!r}")

    monkeypatch.setattr(DomainClient, "train", fail)
    with pytest.raises(ClientFailedError, match="the state in None and the data in ''") as failed:
        run_small(deployed.replace(name="again"))
    assert str(tmp_path) not in str(failed.value)
