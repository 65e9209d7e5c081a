"""Changes of clients' replies in a run, and the records of such runs."""

import numpy as np
import pandas as pd
from flwr.app import RecordDict
from support import run_small, small_experiment

from fedsim.tensors.arrays import record_to_arrays, state_to_record

VICTIM, OTHERS = "rot15", ("rot0", "rot30")
EVERYBODY = (VICTIM, *OTHERS)
CONTINUE = {"on_client_failure": "continue"}


def tamper(change, phase="train", rounds=(2,), clients=(VICTIM,)):
    """Applies `change(content)` to the replies of these clients in these rounds."""

    def tampered(message, reply):
        config = message.content["config"]
        if config["phase"] == phase and config.get("round") in rounds and config["client"] in clients:
            change(reply.content)
        return reply

    return tampered


def arrays(change):
    """A change of `{name: array}`, which may be changed in place or replaced."""

    def changed(content: RecordDict) -> None:
        own = {name: np.array(array) for name, array in record_to_arrays(content["arrays"]).items()}
        content["arrays"] = state_to_record(change(own) or own)

    return changed


def floats(change):
    """A change of every float tensor."""
    return arrays(lambda own: {name: change(a) if a.dtype.kind == "f" else a for name, a in own.items()})


def set_nan(own):
    own["head.weight"][0, 0] = np.nan


def short(folder, rounds=2, method="fedavg", run=CONTINUE, iterations=1, **sections):
    """A run of one step a round, in which a client may fail."""
    train = {"rounds": rounds, "iterations": iterations}
    return small_experiment(folder, method, train=train, run=run, **sections)


def rows_of(folder):
    """clients.csv by round and client."""
    return pd.read_csv(folder / "clients.csv").set_index(["round", "client"])


def refused_row(folder, change, method="fedavg", phase="train", run=CONTINUE, **settings):
    """The victim's row after a round with this change; the others are well, and the model is finite."""
    experiment = short(folder, 1, method, run={**CONTINUE, **run}, **settings)
    folder, _ = run_small(experiment, tamper=tamper(change, phase, (0, 1)))
    rows = rows_of(folder).loc[1]
    assert rows.drop(VICTIM)["status"].eq("ok").all()
    assert pd.read_csv(folder / "rounds.csv")["target_loss"].iloc[1] < 10
    return rows.loc[VICTIM]
