"""A sweep's budget: the cores and GPUs that each cell gets."""

import pytest

from fedsim.common.errors import UserError
from fedsim.sweep import Budget, budget


@pytest.fixture
def machine(monkeypatch):
    """Pretend that this machine has these cores and GPUs."""

    def pretend(cores, gpus=()):
        monkeypatch.setattr(budget, "cores", lambda: cores)
        monkeypatch.setattr(budget, "visible_gpus", lambda: list(gpus))

    return pretend


@pytest.mark.parametrize(
    ("wish", "cores", "gpus", "reserved", "devices"),
    [
        (Budget(), 4, "", [1, 1, 1, 1], ""),
        (Budget(jobs=2), 4, "", [1, 1], ""),  # the same threads, so the same numbers, however many run at a time
        (Budget(jobs=8), 4, "", [1] * 8, ""),  # more cells than cores is the user's choice
        (Budget(cores=2), 5, "", [2, 2], ""),
        (Budget(jobs=8, cores=2), 4, "", [2, 2], ""),  # but not more cores than there are
        (Budget(jobs=1, cores=2), 8, "", [2], ""),
        (Budget(), 4, "ab", [1, 1, 1, 1], "abab"),  # GPUs are shared evenly
        (Budget(gpus=0.5), 8, "ab", [1, 1, 1, 1], "abab"),
        (Budget(gpus=1), 8, "ab", [1, 1], "ab"),
        (Budget(gpus=0.3, cores=2), 4, "a", [2, 2], "aa"),
    ],
)
def test_reservations_keep_the_budget(machine, wish, cores, gpus, reserved, devices):
    """There are as many cells as cores and GPUs allow; each has its cores and its device."""
    machine(cores, gpus)
    reservations = budget.local_reservations(wish)
    assert [reservation.cores for reservation in reservations] == reserved
    assert "".join("".join(reservation.gpus) for reservation in reservations) == devices


def test_several_gpus_for_one_cell(machine):
    """A cell gets a whole number of devices, and no device is given twice."""
    machine(8, "abcde")
    assert [reservation.gpus for reservation in budget.local_reservations(Budget(gpus=2))] == [("a", "b"), ("c", "d")]
    assert budget.local_reservations(Budget(), device="cpu")[0].gpus == ()
    assert [reservation.cores for reservation in budget.local_reservations(Budget(), threads=3)] == [3, 3]
    assert [reservation.cores for reservation in budget.local_reservations(Budget(jobs=4), threads=3)] == [3] * 4


@pytest.mark.parametrize(
    ("wish", "device", "gpus", "said"),
    [
        (Budget(cores=9), "auto", "", "has 8 cores"),
        (Budget(gpus=0.5), "auto", "", "no CUDA device"),
        (Budget(gpus=0.5), "cpu", "a", "run.device is 'cpu'"),
        (Budget(gpus=1.5), "auto", "ab", "whole number up to 2"),
        (Budget(gpus=3), "auto", "ab", "whole number up to 2"),
    ],
)
def test_what_does_not_fit_is_said(machine, wish, device, gpus, said):
    """The error is one line before anything starts."""
    machine(8, gpus)
    with pytest.raises(UserError, match=said):
        budget.local_reservations(wish, device)


def test_devices_are_the_visible_ones(monkeypatch):
    """The devices in the sweep's CUDA_VISIBLE_DEVICES are divided; no others are used."""
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5, GPU-abc")
    assert budget.visible_gpus() == ["5", "GPU-abc"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert budget.visible_gpus() == ["0", "1"]
