"""A site that pushes the model away from what it learned, below `run.update_limit`: the lie grows with each round."""

import pandas as pd
import pytest
from support import run_small, small_experiment
from tampering import CONTINUE, VICTIM, rows_of

from fedsim.common.errors import ClientFailedError
from fedsim.tensors.arrays import record_to_arrays, state_to_record


def pushing_away(times, liar=VICTIM):
    """The update of this client is that of honest training, in the opposite direction and so many times as long."""

    def tamper(message, reply):
        config = message.content["config"]
        if config["phase"] == "train" and config["client"] == liar:
            start, trained = (record_to_arrays(content["arrays"]) for content in (message.content, reply.content))
            lies = {
                name: start[name] - times * (array - start[name]) if name in floating(start) else array
                for name, array in trained.items()
            }
            reply.content["arrays"] = state_to_record(lies)
        return reply

    return tamper


def floating(arrays):
    """The names of weights: variances below 0 are refused by another check."""
    return {name for name, array in arrays.items() if array.dtype.kind == "f" and "running" not in name}


def experiment(folder, rounds=12, **run):
    train = {"rounds": rounds, "epochs": 1, "batch_size": 16, "lr": 0.05, "momentum": 0.9}
    return small_experiment(folder, "fedavg", train=train, run={**CONTINUE, **run})


@pytest.mark.parametrize("times", [95, 10])
def test_the_model_is_taken_back_and_the_liar_has_no_say_from_then_on(times, tmp_path):
    honest, _ = run_small(experiment(tmp_path / "honest"))
    folder, _ = run_small(experiment(tmp_path / "attacked"), tamper=pushing_away(times))
    rows = rows_of(folder)["status"]
    liar = rows.xs(VICTIM, level="client")
    assert liar.str.contains("10 times what it was, or not finite, at").any()
    assert liar.iloc[-1].endswith("the limit of a client that has ruined a model is 3")
    losses = [pd.read_csv(each / "rounds.csv")["mean_validation_loss"].iloc[-1] for each in (honest, folder)]
    assert losses[1] < 2 * losses[0] + 1


def test_of_two_sites_neither_is_believed_and_the_run_ends(tmp_path):
    """Rounds that the lie has ruined are void until the run ends: no model of them is validated or kept."""
    two = experiment(tmp_path).replace(data={"domains": ["rot0", VICTIM, "rot45"]}, run={"target": "rot45"})
    with pytest.raises(ClientFailedError, match=r"left the model as it was.*either may be the wrong one"):
        run_small(two, tamper=pushing_away(95))
    rounds = pd.read_csv(next(tmp_path.rglob("rounds.csv")))
    assert rounds["mean_validation_loss"].isna().all()
    assert rounds["target_loss"].nunique() == 1  # the initial model's


def test_a_run_that_makes_no_round_any_more_ends(tmp_path):
    with pytest.raises(ClientFailedError, match=r"rounds 1 to 5 left the model as it was.*no reply was accepted"):
        run_small(experiment(tmp_path), tamper=lambda message, reply: reply if handshake(message) else spoilt(reply))


def handshake(message):
    return message.content["config"]["phase"] != "train"


def spoilt(reply):
    reply.content["echo"]["round"] = 99
    return reply
