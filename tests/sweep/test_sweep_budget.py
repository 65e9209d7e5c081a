"""A sweep's budget: the cores and GPUs that each cell gets."""

import pytest
import torch

from fedsim.common.errors import UserError
from fedsim.sweep import Budget, budget


@pytest.fixture
def reserved(monkeypatch):
    """Function: (a wish, cores and GPUs of the machine, device, threads) -> (cores, GPUs of each cell)."""

    def reserve(wish, cores, gpus="", device="auto", threads=1):
        monkeypatch.setattr(budget, "cores", lambda: cores)
        monkeypatch.setattr(budget, "visible_gpus", lambda: list(gpus))
        found = budget.local_reservations(wish, device, threads)
        return [each.cores for each in found], ["".join(each.gpus) for each in found]

    return reserve


@pytest.mark.parametrize(("wish", "cores", "gpus", "expected", "devices"), [
    (Budget(), 4, "", [1, 1, 1, 1], [""] * 4),
    (Budget(jobs=2), 4, "", [1, 1], [""] * 2),  # the same threads, so the same numbers, whatever runs beside it
    (Budget(jobs=8), 4, "", [1] * 8, [""] * 8),  # more cells than cores is the user's choice
    (Budget(cores=2), 5, "", [2, 2], [""] * 2),
    (Budget(jobs=8, cores=2), 4, "", [2, 2], [""] * 2),  # but not more cores than there are
    (Budget(jobs=1, cores=2), 8, "", [2], [""]),
    (Budget(), 4, "ab", [1, 1, 1, 1], list("abab")),  # GPUs are shared evenly
    (Budget(gpus=0.5), 8, "ab", [1, 1, 1, 1], list("abab")),
    (Budget(gpus=1), 8, "ab", [1, 1], list("ab")),
    (Budget(gpus=0.3, cores=2), 4, "a", [2, 2], list("aa")),
    (Budget(gpus=2), 8, "abcde", [1, 1], ["ab", "cd"]),  # no device is given twice
])  # fmt: skip
def test_reservations_keep_the_budget(reserved, wish, cores, gpus, expected, devices):
    assert reserved(wish, cores, gpus) == (expected, devices)


def test_devices_and_threads_of_the_settings(reserved):
    assert reserved(Budget(), 8, "ab", device="cpu")[1] == [""] * 8
    assert reserved(Budget(), 8, "ab", threads=3)[0] == [3, 3]
    assert reserved(Budget(jobs=4), 8, "ab", threads=3)[0] == [3] * 4


@pytest.mark.parametrize(("wish", "device", "gpus", "said"), [
    (Budget(cores=9), "auto", "", "has 8 cores"),
    (Budget(gpus=0.5), "auto", "", "no CUDA device"),
    (Budget(gpus=0.5), "cpu", "a", "run.device is 'cpu'"),
    (Budget(gpus=1.5), "auto", "ab", "whole number up to 2"),
    (Budget(gpus=3), "auto", "ab", "whole number up to 2"),
])  # fmt: skip
def test_what_does_not_fit_is_said(reserved, wish, device, gpus, said):
    with pytest.raises(UserError, match=said):
        reserved(wish, 8, gpus, device)


def test_devices_are_the_visible_ones(monkeypatch):
    """The devices in the sweep's CUDA_VISIBLE_DEVICES are divided; no others are used."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5, GPU-abc")
    assert budget.visible_gpus() == ["5", "GPU-abc"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert budget.visible_gpus() == ["0", "1"]
