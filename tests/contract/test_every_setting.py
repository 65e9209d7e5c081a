"""Every numeric and boolean setting of every row changes the records, or is refused, or is said to have no effect.

`pytest -m slow -s tests/contract/test_every_setting.py` prints how many settings did what.
"""

import dataclasses
import io
import json
import math
from collections.abc import Iterator

import pandas as pd
import pytest
from safetensors.numpy import load_file

from fedsim.common.errors import UserError
from fedsim.methods.part_settings import validated
from fedsim.methods.table import METHODS
from fedsim.parts.part import part_name
from fedsim.runs.workspace import close_workspaces
from fedsim.runtime.launch import carry_out
from fedsim.testing.contract import small_plan

FEW = ["data.fraction=0.05", "train.rounds=2"]
# With these values a term is not 0 from the start, so that its other settings act on two short rounds.
BASE = {
    "dsu": ["model.backbone=resnet18"],  # which has a stem
    "fpl": ["data.clients_per_domain=2"],  # three prototypes are never two clusters
    "fedproto": ["data.clients_per_domain=2"],
    "fisc": ["method.style_contrast.margin=1"],
    "fedheal": ["train.rounds=4"],  # the share of past rounds is 0 or 1 before
    "fedasam-swa": [
        "train.rounds=4", *(f"method.{part}.{key}" for part in ("cyclic_rate", "server_average")
                            for key in ("after=0.5", "cycle=1")),
    ],
}  # fmt: skip


def outcome(method, settings, folder):
    """(the records and the last model of a small run, its remarks); a refusal is a text."""
    try:
        run = carry_out(small_plan(method, folder, [*FEW, *BASE.get(method, []), *settings]))
    except UserError as error:
        return str(error), []
    finally:
        close_workspaces()
    tables = [pd.read_csv(run / f"{name}.csv", dtype=str) for name in ("rounds", "clients")]
    texts = [table[[column for column in table if "seconds" not in column]].to_csv() for table in tables]
    arrays = sorted((name, array.tobytes()) for name, array in load_file(run / "last.safetensors").items())
    return (*texts, *arrays), json.loads((run / "environment.json").read_text()).get("data_remarks", [])


def changed(part, field) -> Iterator[bool | float]:
    """Other values of a field that its range allows, of which the later ones are further away."""
    value = getattr(part, field)
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int | float):
        kind = type(value)
        others = 2 * value or 1, kind(value / 20), value + kind(30), kind(0), kind(1), value - 1, kind(value / 1e5)
        for other in others:
            try:
                validated(part, {field: other}, field)
            except UserError:
                continue
            if other != value:
                yield other


def effect(method, plain, key, values, folder):
    """What the first value does that does anything: `differs`, `refused`, `said`, or else `nothing`."""
    for number, value in enumerate(values):
        found, remarks = outcome(method, [f"{key}={json.dumps(value)}"], folder / f"{key}-{number}")
        if isinstance(found, str):
            return "refused"
        if found != plain:
            return "differs"
        if any(remark.startswith(f"{key} has no effect here") for remark in remarks):
            return "said"
    return "nothing"


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_no_setting_is_without_effect_and_without_a_word(method, tmp_path):
    plain, _ = outcome(method, [], tmp_path / "plain")
    found = {}
    for part in dict.fromkeys(part for _, part in small_plan(method, tmp_path).recipe.pairs):
        for field in dataclasses.fields(part):
            key = f"method.{part_name(part)}.{field.name}"
            values = list(changed(part, field.name))
            if values and key not in BASE:
                found[key] = effect(method, plain, key, values, tmp_path)
    print(method, *(f"{kind}: {list(found.values()).count(kind)}" for kind in ("differs", "refused", "said")))
    assert [key for key, kind in found.items() if kind == "nothing"] == []


SETTINGS = {
    "adam": ["train.optimizer=adam", "train.schedule=cosine"],
    "bf16": ["train.precision=bf16"],
    "head": ["model.train=head"],
    "norm and head": ["model.train=norm+head"],
    "bottleneck": ["model.bottleneck=8"],
    "several clients of a domain": ["data.clients_per_domain=3", "train.clients_per_round=4"],
    "mixed domains": ["data.mix=0.5", "train.evaluate_clients=drawn"],
    "local checks": ["train.local_checks=1"],
    "noise": ["train.dp_clip=0.01", "model.backbone=digits-cnn"],
    "side by side": ["train.side_by_side=3"],
    "own models": ["run.personalised=true", "train.persist_optimizer=true", "train.weight_decay=0.001"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
def test_all_rows_train_or_are_refused(name, tmp_path):
    """With settings that most rows' own tests leave at their defaults, a run ends with a finite loss or is refused."""
    ended = []
    for method in METHODS:
        found, _ = outcome(method, SETTINGS[name], tmp_path / method)
        if isinstance(found, str):
            assert "\n" not in found, method
        else:
            losses = pd.read_csv(io.StringIO(found[0]))["train_loss"].iloc[1:]
            assert all(map(math.isfinite, losses)), (method, losses.tolist())
            ended.append(method)
    assert "fedavg" in ended
    assert len(ended) > len(METHODS) / 2, ended
