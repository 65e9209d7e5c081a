"""Secure aggregation in whole runs: FedAvg's records, clients that fail in every exchange, and what is refused."""

import numpy as np
import pytest
from flwr.app import Error, Message
from safetensors.numpy import load_file
from support import Interrupt, numbers, run_small, small_experiment

from fedsim.common.errors import UserError
from fedsim.methods.assembly import build_recipe
from fedsim.tensors.arrays import record_to_arrays

OPEN = {"update_limit": 0.0}
SECURE = {"name": "fedavg", "fuse": "secure_mean"}


SMALL = {"fraction": 0.05}


def silent(*failures: tuple[str, str, int]):
    """A function for a grid that removes the replies (client, exchange, round).

    An exchange is the name of a bank's question, or "train".
    """

    def tamper(message: Message, reply: Message) -> Message:
        config = message.content.config_records["config"]
        if (config["client"], config.get("bank", config["phase"]), config["round"]) in failures:
            return Message(Error(3, "gone"), reply_to=message)
        return reply

    return tamper


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The folder of a run of FedAvg."""
    return run_small(small_experiment(tmp_path_factory.mktemp("plain"), run=OPEN, data=SMALL))[0]


@pytest.fixture(scope="module")
def secure(tmp_path_factory):
    """The same run with secure aggregation, and its grid."""
    return run_small(small_experiment(tmp_path_factory.mktemp("secure"), SECURE, run=OPEN, data=SMALL))


def test_a_run_is_fedavgs(plain, secure):
    """Numbers, models and losses agree to the precision of float32; every reply is noise, and as long as FedAvg's."""
    folder, grid = secure
    ours, theirs = load_file(folder / "last.safetensors"), load_file(plain / "last.safetensors")
    for name, array in theirs.items():
        np.testing.assert_allclose(ours[name], array, rtol=1e-4, atol=1e-5, err_msg=name)
        assert ours[name].dtype == array.dtype
    mine, others = numbers(folder / "rounds.csv"), numbers(plain / "rounds.csv")
    np.testing.assert_allclose(mine["train_loss"], others["train_loss"], rtol=1e-4)
    weights = [numbers(each / "clients.csv")["weight"].dropna() for each in (folder, plain)]
    assert (weights[0] == weights[1]).all()
    replies = [reply for message, reply in grid.seen if message.metadata.message_type == "train"]
    for reply in replies:
        arrays = record_to_arrays(reply.content.array_records["arrays"])
        noise = np.concatenate([array.reshape(-1) for array in arrays.values() if array.dtype == np.uint32])
        counts = np.bincount(noise >> np.uint32(24), minlength=256)
        expected = len(noise) / 256
        assert ((counts - expected) ** 2 / expected).sum() < 400  # chi-square of 255 degrees: p is below 1e-8
    assert 0 < mine["bytes_up"].iloc[-1] - others["bytes_up"].iloc[-1] < 2000


def test_clients_that_fail_in_every_exchange(tmp_path):
    """A client fails in round 2 before its keys, in 3 before its shares, in 4 before and in 5 after its update.

    The model is FedAvg's of the clients whose updates arrived. In round 6 two of three fail; t = 2 is not reached, and
    the model does not change.
    """
    run, train = {**OPEN, "on_client_failure": "continue"}, {"rounds": 6}
    exchanges = ["secure_keys", "secure_shares", "train", "secure_unmasking"]
    failures = [("rot15", exchange, round) for round, exchange in enumerate(exchanges, start=2)]
    failures += [("rot0", "train", 6), ("rot15", "train", 6)]
    settings = {"run": run, "train": train, "data": SMALL}
    ours, _ = run_small(small_experiment(tmp_path / "a", SECURE, **settings), tamper=silent(*failures))
    lost = silent(*[("rot15", "train", round) for round in (2, 3, 4)])
    theirs, _ = run_small(small_experiment(tmp_path / "b", **{**settings, "train": {"rounds": 5}}), tamper=lost)
    found, wanted = (numbers(each / "clients.csv") for each in (ours, theirs))
    before = found[found["round"] <= 5]
    assert before["weight"].tolist() == pytest.approx(wanted["weight"].tolist(), nan_ok=True)
    assert (before["status"] != "ok").sum() == 4
    rounds = numbers(ours / "rounds.csv")
    np.testing.assert_allclose(rounds["target_loss"][:6], numbers(theirs / "rounds.csv")["target_loss"], rtol=1e-4)
    assert rounds["target_loss"][5] == rounds["target_loss"][6] != rounds["target_loss"][4]


def test_a_method_that_sends_nothing_beside_its_model_is_accepted(tmp_path):
    """StableFDG without sharing has a bank that takes nothing; both rules refuse it with sharing (see below)."""
    method = {"name": "stablefdg", "fuse": "secure_mean", "enlarged_batch": {"sharing": 0.0}}
    folder, _ = run_small(small_experiment(tmp_path, method, run=OPEN, train={"rounds": 1}))
    assert set(numbers(folder / "clients.csv")["status"]) == {"ok"}
    build_recipe(small_experiment(tmp_path, {**method, "fuse": "private_mean"}))
    with pytest.raises(UserError, match="which does not hold with private_mean"):
        build_recipe(small_experiment(tmp_path, {"name": "stablefdg", "fuse": "private_mean"}))


def test_a_killed_run_goes_on(secure, tmp_path):
    """The resumed rounds have new keys and the same numbers."""
    experiment = small_experiment(tmp_path, SECURE, run=OPEN, data=SMALL)
    with pytest.raises(KeyboardInterrupt):
        run_small(experiment, Interrupt(1))
    folder, _ = run_small(experiment)
    assert numbers(folder / "rounds.csv").equals(numbers(secure[0] / "rounds.csv"))


@pytest.mark.parametrize(
    ("method", "sections", "said"),
    [
        ("fedavg", {"run": {}}, "set run.update_limit = 0"),
        ("fedavg", {"run": {**OPEN, "checkpoint_every": 2}}, "needs a checkpoint after every round"),
        ("feddg-ga", {}, "numbers of examples, which does not hold with generalization_adjustment"),
        ("scaffold", {}, "control_variates assumes that the server may look at"),
        ("stablefdg", {}, "feature_styles assumes that the server may look at"),
        ("copa", {}, "heads assumes that the server may look at"),
        ("feddyn", {}, "dynamic_correction assumes that the server may look at"),
        ("perada", {}, "ensemble_distillation assumes that the server may look at"),
        ("feddrop", {}, "which does not hold with random_subnet"),
        (
            "fedavg",
            {"train": {"dp_clip": 1.0}, "model": {"backbone": "digits-cnn"}},
            "dp_clip perturbs the model that",
        ),
        ("fedavg", {"data": {"domains": ["rot0", "rot45"]}}, "with 1 clients in a round: it needs at least two"),
        ({"name": "fedavg", "secure_mean": {"threshold": 1}}, {}, "threshold between 2 and 3"),
        ({"name": "fedavg", "masked_update": {"bits": 64}}, {}, "masked_update must have the values of"),
    ],
)
def test_what_needs_single_updates_is_refused(method, sections, said, tmp_path):
    """It is refused in one line, before the run."""
    named = {"name": method} if isinstance(method, str) else method
    with pytest.raises(UserError, match=said):
        run_small(small_experiment(tmp_path, {**named, "fuse": "secure_mean"}, **{"run": OPEN, **sections}))
