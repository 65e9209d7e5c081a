"""Weights that every machine builds or reads itself, so that a run records their hash and compares it later: frozen
tensors, personal tensors before the first round, and the file of `model.weights`."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from fedsim.common.errors import UserError
from fedsim.data.reader import content_hash
from fedsim.models.net import Net
from fedsim.records.environment import read_environment
from fedsim.settings.model import weights_file

KEY = "frozen"  # in environment.json
WEIGHTS_KEY = "weights"  # likewise


def frozen_content(
    state: Mapping[str, torch.Tensor],
    places: Mapping[str, str],
    weights: str = "none",
    classes: Sequence[str] = (),
) -> str:
    """Returns the hash of the names and values of the entries that every machine builds itself; "" without any.

    They are the frozen ones and, with weights of a file or a publisher, the personal ones, which begin with them on
    each client. Machines whose hashes differ compute different features, although all tensors that travel fit. What a
    process computes of weights is no entry of the state; for texts their origin is compared, which nothing rounds.

    weights: the setting model.weights
    classes: the names that a head of texts reads; they are compared too, and so is a backbone that comes with its text
    encoder from a file or a publisher
    """
    are_read = weights != "none"
    built = ("frozen", "local", "upload") if are_read else ("frozen",)
    has_texts = are_read and bool(classes)
    parts: list[bytes] = []
    for name, place in sorted(places.items()):
        if place not in built and not (has_texts and name.startswith("backbone.")):
            continue
        values = state[name].detach().cpu().contiguous().numpy()
        parts += [name.encode(), values.tobytes()]
    for name in classes:
        parts += [name.encode(), b""]
    return content_hash(*parts) if parts else ""


def frozen_record(net: Net) -> dict[str, str]:
    """Returns what environment.json says about the frozen tensors of a run's initial network; empty without any."""
    content = frozen_content(net.state_dict(), dict.fromkeys(net.frozen, "frozen"))
    return {KEY: content} if content else {}


def refuse_other_frozen(folder: Path, record: Mapping[str, str], weights: str) -> None:
    """Raises UserError when the run in a folder had other frozen tensors than its initial network has now.

    record: the `frozen_record` of the network. weights: the setting model.weights
    """
    if read_environment(folder).get(KEY) == record.get(KEY):
        return
    if weights == "none":
        reason = "this version of PyTorch makes others of the seed; take the versions in its environment.json"
    else:
        reason = f"model.weights = {weights!r} gives others now; put back the weights with which it began"
    raise UserError(f"{folder} holds a run with other frozen weights: {reason}")


def weights_record(weights: str) -> dict[str, str]:
    """Returns what environment.json says about the file of `model.weights`; empty where it names no file here."""
    file = weights_file(weights)
    return {WEIGHTS_KEY: content_hash(file.read_bytes())} if file else {}
