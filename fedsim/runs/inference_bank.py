"""What an inference rule needs of the clients besides the model, such as COPA's heads: kept with a run's models."""

import json
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from fedsim.common.errors import UserError
from fedsim.records.readers import named
from fedsim.runs.checkpoint import write_arrays
from fedsim.runs.origin import metadata_of, note_of, round_of
from strategies.parts import Entries

FOLDER = "inference"


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
