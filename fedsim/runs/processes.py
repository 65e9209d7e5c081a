"""Whether the clients of a run may have forked processes of their own (`run.processes`)."""

import sys
import threading
from multiprocessing import current_process

import torch

from fedsim.common.errors import UserError
from fedsim.runs.workspace import pick_device
from fedsim.settings.experiment import Experiment


def check_processes(experiment: Experiment) -> None:
    """Raises UserError when several processes are asked for and the run cannot have them."""
    count = experiment.run.processes
    if count > 1 and (reason := reason_against(experiment)):
        raise UserError(f"run.processes = {count}: {reason}")


def reason_against(experiment: Experiment) -> str:
    """Why clients of this run cannot train in forked processes; "" when they can."""
    return reason_of_settings(experiment) or reason_of_machine()


def reason_of_machine() -> str:
    """What this process or its machine has against forks, whatever is set."""
    if current_process().daemon:
        return "this process is a daemon of Python's multiprocessing, which may have no processes of its own"
    if torch.accelerator.device_count():  # autograd has started a thread for each, also for a run on the CPU
        return (
            "this machine has an accelerator, and PyTorch then computes no gradients in forked processes; "
            "to have them, hide it (NVIDIA's: CUDA_VISIBLE_DEVICES='')"
        )
    return ""


def reason_of_settings(experiment: Experiment) -> str:
    """What the run's own settings, the system and the thread have against forks."""
    if experiment.run.runtime != "inline":
        return f"run.runtime = {experiment.run.runtime} has processes of its own; it is a setting of the inline runtime"
    if experiment.train.side_by_side > 1:
        return "train.side_by_side trains clients as one program of one process"
    if sys.platform != "linux":
        return "processes are forked on Linux only"
    if pick_device(experiment.run.device).type != "cpu":
        return "clients share one GPU in one process; use run.runtime = ray, or train.side_by_side"
    if experiment.run.threads != 1:
        return "several processes have one thread each; set run.threads = 1"
    if experiment.train.compile != "off":
        return "train.compile compiles for one process"
    if threading.current_thread() is not threading.main_thread():
        return "processes are forked from the main thread only"  # they would end with the thread that forked them
    return ""
