"""Any nn.Module as a network: its last Linear is the head, the rest gives the features."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedsim import UserError
from fedsim.methods.assembly import build_net, build_recipe
from fedsim.models.own_module import GIVEN, copies_of, module_row
from fedsim.settings.experiment import Experiment


class Plain(nn.Module):
    """Two convolutions, a functional pooling, and two linear layers: no word of fedsim."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.blocks = nn.Sequential(nn.Conv2d(4, 6, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
        self.fc1 = nn.Linear(6 * 7 * 7, 20)
        self.fc2 = nn.Linear(20, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(self.norm(self.conv(x)), 2)
        return self.fc2(F.relu(self.fc1(self.blocks(x).flatten(1))))


class Small(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = self.blocks[:2]
        self.fc1 = nn.Linear(6 * 14 * 14, 20)


class WithHead(nn.Module):
    """Its head is called so, and another Linear comes after it in the list of modules."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(5, 10)
        self.features = nn.Sequential(nn.Flatten(), nn.Linear(784, 5), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(x))


class Probabilities(Plain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).softmax(1)


class Maps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 10, 28)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x).flatten(1)


def annotated() -> nn.Module:
    return WithHead()


def net_of(backbone, method="fedavg", **model):
    experiment = Experiment(model={"backbone": backbone, **model}, method={"name": method})
    return build_net(experiment, build_recipe(experiment))


@pytest.mark.parametrize("name", ["Plain", "WithHead", "annotated"])
def test_a_module_gives_the_same_logits_as_before(name):
    torch.manual_seed(3)
    net = net_of(f"{__name__}:{name}").eval()
    own = globals()[name]()
    entries = {key.removeprefix("backbone."): value for key, value in net.state_dict().items()}
    head = "fc2" if name == "Plain" else "head"
    own.load_state_dict({key.replace("head.", f"{head}."): value for key, value in entries.items()})
    x = torch.rand(2, 1, 28, 28)
    assert torch.allclose(net(x), own.eval()(x), atol=1e-6)
    assert net.features(x).shape == (2, net.feature_dim) == (2, 20 if name == "Plain" else 5)
    assert torch.equal(net.head.weight, net_of(f"{__name__}:{name}").head.weight)  # of the run's seed


def test_a_trained_module_keeps_its_weights(monkeypatch):
    own = Plain()
    monkeypatch.setitem(GIVEN, "own-plain", module_row(copies_of(own), "Plain"))
    net, other = net_of("own-plain"), net_of("own-plain")
    assert torch.equal(net.head.weight, own.fc2.weight)
    assert torch.equal(net.backbone.conv.weight, own.conv.weight)
    assert net.head.weight is not other.head.weight
    assert isinstance(own.fc2, nn.Linear)  # it is not changed


def test_stages_are_found_by_the_sizes_of_the_maps():
    """28 pixels become 14 by a functional pooling, and 7 in the last module of the Sequential: 1/4, the stage 1.

    Without that last pooling no map is as small as 1/4: the stages are then those of 28 and of 14 pixels.
    """
    assert net_of(f"{__name__}:Plain").stages == {1: ("backbone.blocks.2",)}
    net = net_of(f"{__name__}:Small")
    assert net.stages == {1: ("backbone.conv", "backbone.norm"), 2: ("backbone.blocks.0", "backbone.blocks.1")}
    assert net.levels == ("backbone.norm", "backbone.blocks.1")
    assert net_of(f"{__name__}:WithHead").stages == {}


def test_a_bottleneck_has_a_head_of_its_own():
    assert net_of(f"{__name__}:Plain", bottleneck=8).head.in_features == 8


REFUSED = {
    "no Linear": ("Maps", {}, "has no Linear"),
    "something after the head": ("Probabilities", {}, "does something with the outputs of its last Linear, 'fc2'"),
    "a method that compares maps": ("WithHead", {"method": "csac"}, "aligns convolutional feature maps"),
    "a method that replaces batch norm": ("WithHead", {"method": "gperxan"}, "batch norm"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_one_line(case):
    name, settings, text = REFUSED[case]
    with pytest.raises(UserError) as error:
        net_of(f"{__name__}:{name}", **settings)
    assert text in str(error.value)
    assert "\n" not in str(error.value)


def test_other_numbers_of_classes_and_shapes_are_refused(monkeypatch):
    monkeypatch.setitem(GIVEN, "few", module_row(lambda: nn.Sequential(nn.Flatten(), nn.Linear(784, 3)), "Few"))
    monkeypatch.setitem(GIVEN, "large", module_row(lambda: nn.Sequential(nn.Flatten(), nn.Linear(99, 10)), "Large"))
    monkeypatch.setitem(GIVEN, "list", module_row(Pair, "Pair"))
    for name, text in (("few", "gives 3 outputs, and there are 10 classes"), ("large", "shape [1, 28, 28]"),
                       ("list", "returns tuple")):  # fmt: skip
        with pytest.raises(UserError) as error:
            net_of(name)
        assert text in str(error.value)
        assert "\n" not in str(error.value)


class Pair(Plain):
    def forward(self, x: torch.Tensor) -> tuple:
        return super().forward(x), x
