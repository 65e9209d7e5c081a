"""The ensemble over the clients' own batch norms."""

import pytest
import torch

from fedsim.models.infer import EnsembleOfLocalBN, EvalMode
from fedsim.models.infer.ensemble import mean_probabilities
from fedsim.tensors.kinds import tensor_kinds
from strategies.banks.own_batch_norm import OwnBatchNorm
from strategies.parts import ServerRound, Update


def predictions(rule, net, images, **more):
    with torch.inference_mode():
        return rule.begin(net, lambda: [images], **more)(images).clone()


def test_ensemble_averages_probabilities_not_logits():
    sets = [torch.tensor([[0.9, 0.1]]).log(), torch.tensor([[0.3, 0.7]]).log()]
    torch.testing.assert_close(mean_probabilities(sets).exp(), torch.tensor([[0.6, 0.4]]))
    averaged_logits = torch.stack(sets).mean(0).softmax(1)
    assert averaged_logits[0, 0].item() == pytest.approx(0.662614, abs=1e-6)


def own_set(net, state, places):
    """The tensors of one client that the server keeps under a share rule."""
    server = ServerRound(1, 3, ["a"], {}, places=places, kinds=tensor_kinds(net))
    return OwnBatchNorm().gather(Update("a", 1, state), server)


def test_ensemble_of_sets(net, digits):
    rule = EnsembleOfLocalBN()
    state = {name: value.numpy() for name, value in net.state_dict().items()}
    names = list(own_set(net, state, dict.fromkeys(state, "shared")))
    assert len(names) == 4  # statistics of two layers
    places = {name: "upload" if "norm" in name else "shared" for name in state}
    assert len(own_set(net, state, places)) == 8  # affine and statistics, no counters
    plain = predictions(EvalMode(), net, digits).log_softmax(1)
    own = {name: net.state_dict()[name].clone() for name in names}
    other = {name: value * 2 + 0.1 for name, value in own.items()}
    torch.testing.assert_close(predictions(rule, net, digits, uploads=[own, own, own]), plain)
    mixed = predictions(rule, net, digits, uploads=[own, other])
    torch.testing.assert_close(predictions(rule, net, digits, uploads=[other, own]), mixed)
    alone = predictions(rule, net, digits, uploads=[other])
    torch.testing.assert_close(mixed.exp(), (plain.exp() + alone.exp()) / 2)
    assert not torch.allclose(mixed, plain, atol=1e-3)
    torch.testing.assert_close(predictions(rule, net, digits, uploads=[]).log_softmax(1), plain)
