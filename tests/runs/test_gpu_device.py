"""What a run does with a GPU, as far as it can be tested without one."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from clients.local_data import fetched, kept_near
from clients.stacked.net import StackedNet
from fedsim.models import Net
from fedsim.models.cnns import DigitsCNN
from fedsim.models.tasks import CLASSIFIES
from fedsim.runs.workspace import device_record, pick_device


def test_the_device_of_a_run_is_equal_to_that_of_its_tensors(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert [str(pick_device(wanted)) for wanted in ("auto", "cuda", "cpu")] == ["cuda:0", "cuda:0", "cpu"]


def test_images_that_would_fill_a_gpu_stay_on_the_host(monkeypatch):
    images = torch.zeros(4, 1, 8, 8, dtype=torch.uint8)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (4 * images.nbytes - 1, 10**9))
    assert kept_near(images, torch.device("cuda:0")) is images
    assert fetched(images, torch.device("cpu")) is images


@pytest.mark.parametrize(("capability", "override", "said"), [((9, 0), "", "TF32"), ((7, 5), "", "float32"),
                                                              ((9, 0), "0", "float32")])  # fmt: skip
def test_the_record_names_the_gpu_and_how_it_computes_convolutions(capability, override, said, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "GPU X")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", override)
    assert device_record(torch.device("cuda:0")) == f"GPU X, convolutions in {said}"
    assert device_record(torch.device("cpu")) == "cpu"


@pytest.mark.filterwarnings("ignore:Accessing the data pointer")
@pytest.mark.skipif(not torch.version.cuda, reason="PyTorch without CUDA has no cuDNN")
def test_vmap_takes_a_network_in_channels_last_order_through_cudnn():
    """With tensors that have a device and no values: cuDNN's batch norm refused its maps under vmap."""

    def on_gpu(value):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda")

    net = Net(DigitsCNN(1, batch_norm=True), 50, 10)
    # At its first use, autograd starts a thread for each device that it sees; after that, this process cannot fork.
    torch.ones(1, requires_grad=True).backward()
    with FakeTensorMode():
        for part in net.modules():
            part._buffers.update({name: on_gpu(value) for name, value in part._buffers.items()})
            own = {name: torch.nn.Parameter(on_gpu(value)) for name, value in part._parameters.items()}
            part._parameters.update(own)
        stack = StackedNet(net, {}, 2, CLASSIFIES)
        images, labels = torch.rand(2, 4, 1, 28, 28, device="cuda"), torch.zeros(2, 4, dtype=torch.long, device="cuda")
        assert stack.forward(stack.rows([0, 1]), images, labels).losses.shape == (2,)
