"""Secure aggregation in whole runs: FedAvg's records, clients that fail in every exchange, and what is refused."""

import numpy as np
import pytest
from flwr.app import Error, Message
from safetensors.numpy import load_file
from support import Interrupt, numbers, run_small, tiny_experiment

from fedsim.common.errors import UserError

OPEN = {"update_limit": 0.0}
SECURE = {"name": "fedavg", "fuse": "secure_mean"}
EXCHANGES = ["secure_keys", "secure_shares", "train", "secure_unmasking"]


def run(folder, method="fedavg", rounds=3, failures=(), mode="stop", callbacks=()):
    """(folder, grid) of a run without the replies (client, exchange, round): the exchange of a bank, or "train"."""

    def tamper(message: Message, reply: Message) -> Message:
        config = message.content.config_records["config"]
        if (config["client"], config.get("bank", config["phase"]), config["round"]) in failures:
            return Message(Error(3, "gone"), reply_to=message)
        return reply

    experiment = tiny_experiment(folder, method, rounds, run={**OPEN, "on_client_failure": mode})
    return run_small(experiment, *callbacks, tamper=tamper)


@pytest.fixture(scope="module")
def secure(tmp_path_factory):
    return run(tmp_path_factory.mktemp("secure"), SECURE)


def test_a_run_is_fedavgs_to_the_precision_of_float32(secure, tmp_path):
    (folder, _), (plain, _) = secure, run(tmp_path)
    ours, theirs = load_file(folder / "last.safetensors"), load_file(plain / "last.safetensors")
    for name, array in theirs.items():
        np.testing.assert_allclose(ours[name], array, rtol=1e-4, atol=1e-5, err_msg=name)
        assert ours[name].dtype == array.dtype
    mine, others = numbers(folder / "rounds.csv"), numbers(plain / "rounds.csv")
    np.testing.assert_allclose(mine["train_loss"], others["train_loss"], rtol=1e-4)
    weights = [numbers(each / "clients.csv")["weight"].dropna() for each in (folder, plain)]
    assert (weights[0] == weights[1]).all()
    assert 0 < mine["bytes_up"].iloc[-1] - others["bytes_up"].iloc[-1] < 2000


def test_clients_that_fail_in_every_exchange(tmp_path):
    """A client fails in round 1 before its keys, in 2 before its shares, in 3 before and in 4 after its update.

    The model is FedAvg's of the clients whose updates arrived. In round 5 two of three fail; t = 2 is not reached, and
    the model does not change.
    """
    failures = [("rot15", exchange, round) for round, exchange in enumerate(EXCHANGES, start=1)]
    failures += [("rot0", "train", 5), ("rot15", "train", 5)]
    ours, _ = run(tmp_path / "a", SECURE, 5, failures, "continue")
    theirs, _ = run(tmp_path / "b", "fedavg", 4, [("rot15", "train", round) for round in (1, 2, 3)], "continue")
    found, wanted = (numbers(each / "clients.csv") for each in (ours, theirs))
    before = found[found["round"] <= 4]
    assert before["weight"].tolist() == pytest.approx(wanted["weight"].tolist(), nan_ok=True)
    assert (before["status"] != "ok").sum() == 4
    losses = numbers(ours / "rounds.csv")["target_loss"]
    np.testing.assert_allclose(losses[:5], numbers(theirs / "rounds.csv")["target_loss"], rtol=1e-4)
    assert losses[4] == losses[5] != losses[3]


def test_a_killed_run_goes_on_with_new_keys_and_the_same_numbers(secure, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, SECURE, callbacks=[Interrupt(1)])
    folder, _ = run(tmp_path, SECURE)
    assert numbers(folder / "rounds.csv").equals(numbers(secure[0] / "rounds.csv"))


@pytest.mark.parametrize(("method", "sections", "said"), [
    ("fedavg", {"run": {}}, "set run.update_limit = 0"),
    ("fedavg", {"run": {**OPEN, "checkpoint_every": 2}}, "needs a checkpoint after every round"),
    ("feddg-ga", {}, "numbers of examples, which does not hold with generalization_adjustment"),
    ("scaffold", {}, "control_variates assumes that the server may look at"),
    ("feddrop", {}, "which does not hold with random_subnet"),
    ("fedavg", {"train": {"dp_clip": 1.0}, "model": {"backbone": "digits-cnn"}}, "dp_clip perturbs the model that"),
    ("fedavg", {"data": {"domains": ["rot0", "rot45"]}}, "with 1 clients in a round: it needs at least two"),
    ({"name": "fedavg", "secure_mean": {"threshold": 1}}, {}, "threshold between 2 and 3"),
    ({"name": "fedavg", "masked_update": {"bits": 64}}, {}, "masked_update must have the values of"),
])  # fmt: skip
def test_what_needs_single_updates_is_refused(method, sections, said, tmp_path):
    named = {"name": method} if isinstance(method, str) else method
    with pytest.raises(UserError, match=said):
        run_small(tiny_experiment(tmp_path, {**named, "fuse": "secure_mean"}, **{"run": OPEN, **sections}))
