"""COPA: client, bank, share rule and ensemble."""

import math

import numpy as np
import pytest
import torch
from small_round import colour_images, small_data, small_round
from support import run_small, small_experiment
from torch import nn

from clients.optimizers import make_optimizer
from clients.parts import Batch
from clients.step.supervised import SupervisedStep
from clients.terms.other_heads import OtherHeads
from fedsim.common.errors import UserError
from fedsim.methods.assembly import find_recipe
from fedsim.models import build_model
from fedsim.models.infer import EnsembleOfHeads
from fedsim.settings import ModelSettings
from fedsim.tensors.arrays import record_to_arrays
from strategies.banks.heads import Heads
from strategies.parts import ServerRound, Update
from strategies.share.without_head import WithoutHead


class Features(nn.Module):
    """A network of one parameter, which multiplies the features, and a head with given probabilities."""

    def __init__(self, probabilities):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.head = nn.Linear(1, len(probabilities), bias=False)
        self.head.weight.data = torch.tensor(probabilities).log()[:, None]

    def features(self, x):
        """The images, times the parameter."""
        return self.scale * x

    def forward(self, x):
        """Logits."""
        return self.head(self.features(x))


def head_of(probabilities):
    """A head that gives these probabilities for the feature 1."""
    return np.log(np.array(probabilities, np.float32))[:, None]


def test_loss_of_all_heads():
    """Own head .6, others .2 and .1: -log .6 - log .2 - log .1; the others' heads stay, f moves."""
    net = Features([0.6, 0.4])
    record = {
        "a:head.weight": head_of([0.5, 0.5]),  # this client's own entry is not used
        "b:head.weight": head_of([0.2, 0.8]),
        "c:head.weight": head_of([0.1, 0.9]),
    }
    round = small_round(small_data(colour_images(4)), {"heads": record}, net, clients=("a", "b", "c"))
    round.optimizer = make_optimizer(net, round.train, 0.1)
    round.terms = [OtherHeads().begin(round)]
    batch = Batch(torch.ones(1, 1), torch.tensor([0]))
    loss = SupervisedStep().begin(round)(batch)
    assert loss.item() == pytest.approx(4.422849, abs=1e-5)
    halves = OtherHeads(mean=True).begin(round)(batch).item()
    assert halves == pytest.approx(-(math.log(0.2) + math.log(0.1)) / 2, abs=1e-5)
    assert net.scale.item() != 1
    assert record["b:head.weight"][:, 0].tolist() == pytest.approx(np.log([0.2, 0.8]).tolist())
    assert OtherHeads(weight=0.0).begin(round) is None


def test_ensemble_of_heads():
    """The mean of (.6, .4), (.2, .8), (.1, .9) is (.3, .7); without heads the network's own."""
    net = Features([0.5, 0.5])
    uploads = [{"head.weight": torch.tensor(head_of(p))} for p in ((0.6, 0.4), (0.2, 0.8), (0.1, 0.9))]
    predict = EnsembleOfHeads().begin(net, tuple, uploads)
    with torch.no_grad():
        assert predict(torch.ones(1, 1)).exp()[0].tolist() == pytest.approx([0.3, 0.7])
        assert EnsembleOfHeads().begin(net, tuple)(torch.ones(1, 1)).softmax(1)[0].tolist() == [0.5, 0.5]


def test_bank_hands_out_all_heads():
    """3 (512 * 7 + 7) = 10,773 scalars; the global model's head replaces that of a client without a reply."""
    initial = {"head.weight": np.zeros((7, 512), np.float32), "head.bias": np.zeros(7, np.float32)}
    server = ServerRound(1, 2, ["a", "b", "c"], {"backbone.x": np.ones(3, np.float32), **initial})
    own = {name: array + 1 for name, array in server.previous.items()}
    taken = Heads().gather(Update("b", 1, own), server)
    assert taken.keys() == initial.keys()
    handed = Heads().hand_out({"b": taken}, "a", server)
    assert sum(array.size for array in handed.values()) == 10_773
    assert {key: float(array.max()) for key, array in handed.items() if key.endswith("weight")} == {
        "a:head.weight": 0, "b:head.weight": 1, "c:head.weight": 0,
    }  # fmt: skip


def test_share_rule():
    """Only the head is the client's own; it is sent to the server."""
    net = build_model(ModelSettings(backbone="digits-cnn-bn", bottleneck=8), 3, 1, 28, None, 0)
    places = WithoutHead().place(net)
    assert {name for name, place in places.items() if place == "upload"} == {"head.weight", "head.bias"}
    assert set(places.values()) == {"upload", "shared"}


@pytest.mark.parametrize("pair", ["gfedavg+copa", "copa+gfedavg-ibn"])
def test_a_guiding_head_needs_the_global_one(pair):
    """Clients of COPA receive no head, so that each one's own would guide it."""
    with pytest.raises(UserError, match=r"guiding_head .* without_head"):
        find_recipe(pair)


def test_heads_of_a_run_differ_and_are_never_averaged_for_clients(tmp_path):
    """In round 2 clients receive exactly the heads that they sent in round 1; no head is in the model."""
    experiment = small_experiment(tmp_path, "copa", train={"rounds": 2})
    _, grid = run_small(experiment)
    sent, handed = {}, {}
    for message, reply in grid.seen:
        config = message.content.config_records["config"]
        if message.metadata.message_type != "train":
            continue
        records = message.content.array_records
        assert not any(name.startswith("head.") for name in records["arrays"])
        if config["round"] == 1:
            sent[config["client"]] = record_to_arrays(reply.content.array_records["arrays"])
        else:
            handed[config["client"]] = record_to_arrays(records["heads"])
    assert len(handed) == 3
    for record in handed.values():
        for client, arrays in sent.items():
            assert np.array_equal(record[f"{client}:head.weight"], arrays["head.weight"])
    weights = [arrays["head.weight"] for arrays in sent.values()]
    assert not np.array_equal(weights[0], weights[1])
