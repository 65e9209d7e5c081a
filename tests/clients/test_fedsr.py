"""FedSR, FedL2R and FedCMI: their losses, and what a round of a client does with the reference."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from small_round import digits_net, ready_round

from clients.optimizers import make_optimizer
from clients.step.supervised import SupervisedStep
from clients.terms.conditional_information import MOMENTUM, ClassReference, ConditionalInformation, kl_normal
from clients.terms.representation_norm import RepresentationNorm, l2r
from fedsim.common.errors import UserError
from fedsim.methods.assembly import build_recipe, find_recipe
from fedsim.models.infer.ensemble import mean_probabilities
from fedsim.models.infer.sampled import SampledRepresentation
from fedsim.models.inserts.representation import LEAST_STD, Gaussian, Representation, gaussian_of
from fedsim.settings import TrainSettings
from fedsim.settings.experiment import Experiment


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


def net_of(width=0, stochastic=True, bottleneck=0):
    net = digits_net(bottleneck=bottleneck)
    torch.manual_seed(0)
    Representation(width, stochastic).apply(net)
    return net


def local_round(terms, classes=(0, 1), records=None, **train):
    settings = TrainSettings(lr=0.1, momentum=0.9, weight_decay=0.01, **train)
    round = ready_round(net_of(4), {"class_reference": records or {}}, 16, train=settings)
    labels = round.data.labels = torch.tensor([classes[number % len(classes)] for number in range(16)])
    round.data.class_counts = np.bincount(labels.numpy(), minlength=3)
    torch.manual_seed(3)
    round.terms = [function for term in terms if (function := term.begin(round)) is not None]
    step = SupervisedStep().begin(round)
    for start in range(0, 16, 4):
        step(round.data.batch(np.arange(start, start + 4)))
    for term in terms:
        term.end(round)
    return round


def test_kl_numbers():
    """Both orders, identical distributions, the initial reference, and the sum over dimensions."""
    one, zero, two = tensor(1), tensor(0), tensor(2)
    assert kl_normal(one, one, zero, two).item() == pytest.approx(0.443147, abs=1e-6)
    assert kl_normal(zero, two, one, one).item() == pytest.approx(1.306853, abs=1e-6)
    assert kl_normal(one, two, one, two).item() == 0
    first = ClassReference(1, 1)
    assert F.softplus(first.r_rho).item() == pytest.approx(1.313262, abs=1e-6)
    assert first.cmi(torch.zeros(1, 1), torch.ones(1, 1), torch.tensor([0])).item() == pytest.approx(0.062427, abs=1e-6)
    sums = kl_normal(tensor(1, 0), tensor(1, 0.5), tensor(0, 0), tensor(2, 0.5)).sum()
    assert sums.item() == pytest.approx(0.443147, abs=1e-6)
    mean, std, labels = torch.tensor([[1.0], [-1.0]]), torch.ones(2, 1), torch.tensor([0, 0])
    reference = ClassReference(1, 1)
    for spread, bound in ((1, 0.5), (np.sqrt(2), 0.346574)):
        with torch.no_grad():
            reference.r_rho.fill_(float(np.log(np.expm1(spread))))
        assert reference.cmi(mean, std, labels).item() == pytest.approx(bound, abs=1e-6)
        assert bound >= 0.336831


def test_l2r_numbers():
    """Squared and plain norm; the gradient at a zero row is 0, not NaN."""
    z = torch.tensor([[3.0, 4.0], [0.0, 0.0]], requires_grad=True)
    assert (l2r(z, "squared").item(), l2r(z, "norm").item()) == (12.5, 2.5)
    l2r(z, "norm").backward()
    assert z.grad.tolist() == [pytest.approx([0.3, 0.4]), [0, 0]]
    raw = torch.log(torch.expm1(torch.tensor(0.5)))  # softplus(raw) = .5
    torch.manual_seed(0)
    z = Gaussian().train()(torch.tensor([1.0, 2.0, raw, raw]).expand(100_000, 4))
    assert l2r(z).item() == pytest.approx(5.5, rel=0.02)
    mean, std = gaussian_of(z, "test")
    assert std[0].tolist() == pytest.approx([0.5, 0.5], abs=2e-6)
    kl = kl_normal(mean[0].double(), tensor(0.5, 0.5), tensor(0, 0), tensor(1, 1)).sum().item()
    entropy = np.log(2 * np.pi * np.e * 0.25)
    assert kl == pytest.approx(5.5 / 2 + np.log(2 * np.pi) - entropy, abs=1e-6) == pytest.approx(3.136294, abs=1e-6)


def test_kappa_scales_mean_and_spread():
    """The official scale starts at 1, where it changes nothing; at 2 the Gaussian is N(2 mu, 4 sigma^2)."""
    mean, std, labels = torch.tensor([[0.5]]), torch.tensor([[0.7]]), torch.tensor([0])
    plain = ClassReference(1, 1).cmi(mean, std, labels).item()
    scaled = {kind: ClassReference(1, 1, kind) for kind in ("free", "softplus")}
    assert [part.cmi(mean, std, labels).item() for part in scaled.values()] == pytest.approx([plain] * 2, abs=1e-6)
    with torch.no_grad():
        scaled["free"].kappa.fill_(2.0)
    wanted = kl_normal(2 * mean, 2 * std, torch.zeros(1), F.softplus(torch.tensor(1.0))).item()
    assert scaled["free"].cmi(mean, std, labels).item() == pytest.approx(wanted, abs=1e-6)


def test_representation_layers():
    """Names and widths; sigma stays positive for raw -50; eval mode gives the mean; a copy can be made at once."""
    net = net_of()
    d = net.feature_dim
    assert [tuple(p.shape) for p in net.bottleneck.parameters()] == [(2 * d, d), (2 * d,)]
    assert tuple(net_of(6, stochastic=False).bottleneck[0].weight.shape) == (6, d)
    assert len(net_of(6, bottleneck=8).bottleneck) == 3
    z = Gaussian().train()(torch.full((2, 4), -50.0))
    assert (gaussian_of(z, "test")[1] >= LEAST_STD).all()
    images = torch.rand(3, 3, 16, 16)
    drawn = net.train().features(images)
    assert not drawn.equal(gaussian_of(drawn, "test")[0])
    copy.deepcopy(net)
    still = net.eval().features(images)
    assert still.equal(gaussian_of(still, "test")[0])
    with pytest.raises(UserError, match="representation"):
        gaussian_of(torch.zeros(1, 2), "a term")


def test_probabilities_are_averaged():
    """The mean of S softmax vectors, whatever the batch."""
    two = mean_probabilities([torch.tensor([[0.0, 0.0]]), torch.tensor([[2.0, 0.0]])])
    assert two.exp()[0].tolist() == pytest.approx([0.6904, 0.3096], abs=1e-4)
    net, images = net_of(4), torch.rand(5, 3, 16, 16)
    predict = SampledRepresentation(S=20).begin(net, tuple)
    with torch.no_grad():
        found = predict(images)
        mean, std = gaussian_of(net.features(images), "test")
        noise = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
        wanted = torch.stack([torch.softmax(net.head(mean + std * eps), 1) for eps in noise]).mean(0)
        assert torch.allclose(found.exp(), wanted, atol=1e-6)
        assert torch.allclose(found[3:], predict(images[3:]), atol=1e-6)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_absent_class_is_neither_moved_nor_sent(optimizer):
    records = {"r_mu": np.full((3, 4), 2, np.float32), "r_rho": np.full((3, 4), 1.5, np.float32)}
    round = local_round([ConditionalInformation(alpha_cmi=1.0)], (0, 2), records, optimizer=optimizer)
    for name, value in (("r_mu", 2.0), ("r_rho", 1.5)):
        rows = getattr(round.scratch["class-reference"], name).detach()
        assert (rows[1] == value).all()
        assert (rows[[0, 2]] != value).all()
        assert round.outbox["class_reference"][name].shape == (2, 4)
    assert round.outbox["class_reference"]["counts"].tolist() == [8, 0, 8]
    uniform = local_round([ConditionalInformation(reference_weights="uniform")], (0, 2), records)
    assert uniform.outbox["class_reference"]["counts"].tolist() == [1, 0, 1]


def test_official_reference_stays_with_the_client():
    """r, kappa and their momentum are stored and not sent; the next round continues with them."""
    part = ConditionalInformation(alpha_cmi=1.0, variant="official")
    round = local_round([part], persist_optimizer=True)
    assert round.outbox == {}
    kept = {name: value.clone() for name, value in round.store.get("class-reference").items()}
    assert kept.keys() == {"r_mu", "r_rho", "kappa"}
    assert kept["kappa"] != 1
    assert (kept["r_rho"][2] < 1).all()  # weight decay moves a class that is absent, as in the code
    assert set(round.store.get(MOMENTUM)) == {f"{name}.momentum_buffer" for name in kept}
    round.store.commit()
    round.store.open_round(2)
    following = round.for_phase("train")
    following.optimizer = make_optimizer(following.net, following.train, 0.1)
    part.begin(following)
    reference = following.scratch["class-reference"]
    assert all(value.equal(kept[name]) for name, value in reference.state_dict().items())
    buffer = following.optimizer.state[reference.r_mu]["momentum_buffer"]
    assert buffer.equal(round.store.get(MOMENTUM)["r_mu.momentum_buffer"])


def test_variant_sets_the_other_parts():
    """The official variant is one setting, shown in the method's name; nothing but the model leaves a client."""
    recipe = build_recipe(Experiment(method={"name": "fedsr", "conditional_information": {"variant": "official"}}))
    assert [term.l2r for term in recipe.terms if isinstance(term, RepresentationNorm)] == ["norm"]
    assert not recipe.banks[0].shared
    assert recipe.label("fedsr") == "fedsr(official)"
    assert recipe.disclosure() == "model updates"
    assert "mean and a spread" in find_recipe("fedsr").disclosure()
