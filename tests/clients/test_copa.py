"""COPA: client, bank, share rule and ensemble."""

import math

import numpy as np
import pytest
import torch
from small_round import ready_round
from support import run_small, tiny_experiment
from torch import nn

from clients.parts import Batch
from clients.step.supervised import SupervisedStep
from clients.terms.other_heads import OtherHeads
from fedsim.models.infer import EnsembleOfHeads
from fedsim.tensors.arrays import record_to_arrays
from strategies.banks.heads import Heads
from strategies.parts import ServerRound, Update


def head_of(*probabilities):
    """A head that gives these probabilities for the feature 1."""
    return np.log(np.array(probabilities, np.float32))[:, None]


class Features(nn.Module):
    """A network of one parameter, which multiplies the features, and a head with given probabilities."""

    def __init__(self, *probabilities):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.head = nn.Linear(1, len(probabilities), bias=False)
        self.head.weight.data = torch.tensor(head_of(*probabilities))

    def features(self, x):
        return self.scale * x

    def forward(self, x):
        return self.head(self.features(x))


def test_loss_of_all_heads():
    """Own head .6, others .2 and .1: -log .6 - log .2 - log .1; the others' heads stay, f moves."""
    record = {  # this client's own entry is not used
        "a:head.weight": head_of(0.5, 0.5), "b:head.weight": head_of(0.2, 0.8), "c:head.weight": head_of(0.1, 0.9),
    }  # fmt: skip
    net, batch = Features(0.6, 0.4), Batch(torch.ones(1, 1), torch.tensor([0]))
    round = ready_round(net, {"heads": record}, clients=("a", "b", "c"))
    round.terms = [OtherHeads().begin(round)]
    assert SupervisedStep().begin(round)(batch).item() == pytest.approx(4.422849, abs=1e-5)
    halves = OtherHeads(mean=True).begin(round)(batch).item()
    assert halves == pytest.approx(-(math.log(0.2) + math.log(0.1)) / 2, abs=1e-5)
    assert net.scale.item() != 1
    assert (record["b:head.weight"] == head_of(0.2, 0.8)).all()
    assert OtherHeads(weight=0.0).begin(round) is None


def test_ensemble_of_heads():
    """The mean of (.6, .4), (.2, .8), (.1, .9) is (.3, .7); without heads the network's own."""
    net, x = Features(0.5, 0.5), torch.ones(1, 1)
    uploads = [{"head.weight": torch.tensor(head_of(*p))} for p in ((0.6, 0.4), (0.2, 0.8), (0.1, 0.9))]
    with torch.no_grad():
        assert EnsembleOfHeads().begin(net, tuple, uploads)(x).exp()[0].tolist() == pytest.approx([0.3, 0.7])
        assert EnsembleOfHeads().begin(net, tuple)(x).softmax(1)[0].tolist() == [0.5, 0.5]


def test_bank_hands_out_all_heads():
    """3 (512 * 7 + 7) = 10,773 scalars; the global model's head replaces that of a client without a reply."""
    initial = {"head.weight": np.zeros((7, 512), np.float32), "head.bias": np.zeros(7, np.float32)}
    server = ServerRound(1, 2, ["a", "b", "c"], {"backbone.x": np.ones(3, np.float32), **initial})
    own = {name: array + 1 for name, array in server.previous.items()}
    taken = Heads().gather(Update("b", 1, own), server)
    assert taken.keys() == initial.keys()
    handed = Heads().hand_out({"b": taken}, "a", server)
    assert sum(array.size for array in handed.values()) == 10_773
    assert [handed[f"{client}:head.weight"].max() for client in "abc"] == [0, 1, 0]


def test_heads_of_a_run_differ_and_are_never_averaged_for_clients(tmp_path):
    """In round 2 clients receive exactly the heads that they sent in round 1; no head is in the model."""
    _, grid = run_small(tiny_experiment(tmp_path, "copa"))
    sent, handed = {}, []
    for message, reply in grid.seen:
        config, records = message.content.config_records["config"], message.content.array_records
        if message.metadata.message_type == "train":
            assert not any(name.startswith("head.") for name in records["arrays"])
            if config["round"] == 1:
                sent[config["client"]] = record_to_arrays(reply.content.array_records["arrays"])["head.weight"]
            else:
                handed.append(record_to_arrays(records["heads"]))
    assert len(handed) == len(sent) == 3
    assert all((record[f"{client}:head.weight"] == own).all() for record in handed for client, own in sent.items())
    assert not np.array_equal(sent["rot0"], sent["rot15"])
