"""What a run's folder keeps of its clients besides the model: what an inference rule needs, and personal models.

An inference rule needs for example COPA's heads. They are kept with the best and the last model. Personal models are
written at the end of a run, when `run.keep_personal` asks for them.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from safetensors.torch import load_file
from torch import Tensor

from clients.store import client_folder, newest_entry
from fedsim.common.errors import UserError
from fedsim.methods.recipe import Recipe
from fedsim.records.readers import named
from fedsim.runs.checkpoint import write_arrays
from fedsim.runs.origin import metadata_of, note_of, round_of
from fedsim.settings.experiment import Experiment
from strategies.parts import Entries

FOLDER = "inference"
KEPT = "personal"  # store entry of the tensors that the share rule keeps on a client


def keep_entries(folder: Path, which: str, bank: str, entries: Entries) -> None:
    """Writes the entries of the rule's bank, by client, for the model `which` that a run's folder has.

    Nothing is written without a bank.
    """
    if not bank:
        return
    tensors = {}
    for client, arrays in entries.items():
        for name, array in arrays.items():
            tensors[json.dumps([client, name])] = array
    note = note_of(folder / f"{which}.safetensors")
    assert note is not None  # the run has just written the model
    file = folder / FOLDER / f"{which}.safetensors"
    write_arrays(file, tensors, metadata_of(note.round, note.origins))


def kept_entries(folder: Path, which: str) -> list[dict[str, Tensor]] | None:
    """Returns the entries in the order of the clients' names, as the run's evaluation had them; None without the file.

    Raises UserError when they are of another round than the model.
    """
    model = folder / f"{which}.safetensors"
    file = folder / FOLDER / model.name
    if not file.is_file():
        return None
    if round_of(file) != round_of(model):
        raise UserError(
            f"{file} is of round {round_of(file)}, and {model.name} of round {round_of(model)}; finish the run"
        )
    by_client: dict[str, dict[str, Tensor]] = {}
    with named(file, "the clients' tensors"):
        for key, tensor in load_file(file).items():
            client, name = json.loads(key)
            by_client.setdefault(client, {})[name] = tensor
    return [by_client[client] for client in sorted(by_client)]


def take_over_best(folder: Path, waiting: Path, saved: int) -> None:
    """Moves the best model that waits in a checkpoint's folder into the run's folder, with its entries.

    It is of a round after the checkpoint before. When it is of a round after `saved` too, the run was killed; the round
    will be repeated and the model is removed.
    """
    model, entries = "best.safetensors", f"{FOLDER}/best.safetensors"
    if not (waiting / model).is_file():
        return
    covered = round_of(waiting / model) <= saved
    for name in (entries, model):  # the model last: until it is moved, a run that is killed here repeats both moves
        if covered and (waiting / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (waiting / name).replace(folder / name)
        else:
            (waiting / name).unlink(missing_ok=True)


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
