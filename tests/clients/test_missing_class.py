"""Clients that lack classes, in the methods with class-wise records."""

import json

import numpy as np
import pytest
from support import Interrupt, numbers, run_small, small_experiment

from fedsim.run.checkpoint import load_checkpoint
from fedsim.run.plan import run_folder
from fedsim.tensors.arrays import record_to_arrays
from strategies.weights.by_examples import ByExamples

SKEWED = {"clients_per_domain": 2, "partition": "dirichlet", "alpha": 0.1, "split": "random"}
SMALL = {"adversarial_reference": {"d_noise": 4, "width": 8, "r": 6, "hidden": 5}}


@pytest.mark.parametrize(
    ("method", "bank", "classes_of"),
    [
        ({"name": "fedsr"}, "class_reference", lambda sent: np.flatnonzero(sent["counts"])),
        ({"name": "fpl"}, "prototypes", lambda sent: sent["classes"]),
        ({"name": "fedadg", **SMALL}, "generator", None),
    ],
    ids=["fedsr", "fpl", "fedadg"],
)
def test_a_class_is_missing_on_a_client(method, bank, classes_of, tmp_path):
    """The run continues with finite losses; a client sends rows for its own classes and receives those of all."""
    folder, grid = run_small(small_experiment(tmp_path, method, data=SKEWED, train={"rounds": 2}))
    assert np.isfinite(numbers(folder / "rounds.csv")["train_loss"][1:]).all()
    if classes_of is None:
        return
    held = {}
    for message, reply in grid.seen:
        if message.metadata.message_type == "train":
            client = message.content.config_records["config"]["client"]
            found = set(classes_of(record_to_arrays(reply.content.array_records[bank])).tolist())
            assert held.setdefault(client, found) >= found
    assert any(len(classes) < 10 for classes in held.values())
    assert len(set.union(*held.values())) > max(map(len, held.values()))


def test_server_parts_know_the_classes_and_records_name_those_that_are_missing(tmp_path, monkeypatch):
    """The classes are counted in the handshake; environment.json and the log name those that a client lacks."""
    weigh = ByExamples.weigh

    def counting(self, updates, server):
        server.state["counts"] = {client: list(counts) for client, counts in server.class_counts.items()}
        return weigh(self, updates, server)

    monkeypatch.setattr(ByExamples, "weigh", counting)
    experiment = small_experiment(tmp_path, data={**SKEWED, "fraction": 0.05}, train={"rounds": 2})
    with pytest.raises(KeyboardInterrupt):
        run_small(experiment, Interrupt(1))
    folder = run_folder(experiment)
    counts = load_checkpoint(folder / "checkpoint").state.parts["weights"]["counts"]
    assert len(counts) == 6
    clients = numbers(folder / "clients.csv").query("round == 1").set_index("client")
    assert {client: sum(own) for client, own in counts.items()} == clients["examples"].astype(int).to_dict()
    said = json.loads((folder / "environment.json").read_text())
    lacking = {client: [said["classes"][k] for k, n in enumerate(own) if n == 0] for client, own in counts.items()}
    assert any(lacking.values())
    assert said["missing_classes"] == {client: names for client, names in lacking.items() if names}
