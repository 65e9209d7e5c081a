"""Personal models of the clients, written into the run's folder at its end when `run.keep_personal` asks for them."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from clients.store import client_folder, newest_entry
from fedsim.common.errors import UserError
from fedsim.methods.recipe import Recipe
from fedsim.runs.checkpoint import write_arrays
from fedsim.settings.experiment import Experiment

KEPT = "personal"  # store entry of the tensors that the share rule keeps on a client


def personal_entries(recipe: Recipe, places: Mapping[str, str]) -> list[str]:
    """Returns the store entries of a client's own model: what the share rule keeps, then the models of parts."""
    entries = []
    if {"upload", "local"} & set(places.values()):
        entries.append(KEPT)
    entries += [part.personal for part in recipe.client_parts() if part.personal]
    return entries


def check_personal(experiment: Experiment, recipe: Recipe, places: Mapping[str, str]) -> None:
    """Raises UserError when personal models are asked for and the method has none."""
    if experiment.run.keep_personal and not personal_entries(recipe, places):
        raise UserError(
            f"run.keep_personal is set, but all tensors of {experiment.method_name!r} are shared; remove the setting"
        )


def write_personal(
    folder: Path,
    clients: Sequence[str],
    entries: Sequence[str],
    arrays: Mapping[str, np.ndarray],
    stored: Mapping[str, int],
    metadata: Callable[[str], dict[str, str]],
) -> None:
    """Writes `personal-<client>.safetensors`, the last global model with the client's own tensors, for every client.

    The tensors are those of the round in `stored`, the last one with a state that the server counts on. Only clients
    with a state in the run's folder are written. Sites keep their state to themselves, and clients that never trained
    have none.

    metadata: gives the metadata of the file of a client
    """
    for client in clients:
        state = client_folder(str(folder / "state"), client)
        assert state is not None  # of a run with a folder
        personal: dict[str, np.ndarray] = {}
        has_entries = False
        for name in entries:
            entry = newest_entry(state, name, stored.get(client, -1))
            if entry is not None:
                has_entries = True
                personal |= {tensor_name: tensor.numpy() for tensor_name, tensor in entry.items()}
        if has_entries:
            file = folder / f"personal-{client.replace('/', '-')}.safetensors"
            write_arrays(file, {**arrays, **personal}, metadata(client))
