"""The command line that repeats a run, made only from its resolved settings."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

from fedsim.common.errors import UserError
from fedsim.records.differences import MACHINE_KEYS, flatten
from fedsim.settings.experiment import Experiment, read_experiment

SHORT = ("method.name", "run.target", "run.seed", "run.output", "run.callbacks", "run.tensorboard", "name")


def command_line(experiment: Experiment, file: Path) -> str:
    """`fedsim run CONFIG --method M --target D --seed S --set key=value ...`.

    CONFIG is the shipped experiment of the run's name, and `--set` gives what differs from it. When there is no such
    experiment, or when it sets something that an override cannot undo, CONFIG is `file`, the run's own experiment.toml.
    The folder of the data is left out, because it differs between machines. For clients with an app's own code, which
    no record has, it is a sentence.
    """
    if experiment.app is not None:
        return "# start the Flower app again: the code of its clients is in no record"
    run = experiment.run
    options = ["--method", experiment.method_name, "--target", run.target, "--seed", str(run.seed)]
    overrides = _overrides(experiment)
    if overrides is None:
        return shlex.join(["fedsim", "run", file.as_posix(), *options])
    for key, value in overrides.items():
        options += ["--set", f"{key}={override_text(value)}"]
    return shlex.join(["fedsim", "run", experiment.name, *options])


def override_text(value: Any) -> str:
    """A value as it is written in an override: plain words without quotes, everything else as TOML."""
    bare = isinstance(value, str) and re.fullmatch(r"[A-Za-z_][\w./-]*", value)
    if bare and value not in ("true", "false", "inf", "nan"):
        return value
    return json.dumps(value, ensure_ascii=False)


def _overrides(experiment: Experiment) -> dict[str, Any] | None:
    """Settings that differ from the experiment of the same name; None when overrides cannot express the run."""
    try:
        shipped = read_experiment(experiment.name)
    except UserError:
        return None
    before = flatten(shipped.model_dump())
    after = flatten(experiment.model_dump())
    for key in (*SHORT, *MACHINE_KEYS):
        before.pop(key, None)
        after.pop(key, None)
    if before.keys() - after.keys():
        return None
    changed = {}
    for key, value in after.items():
        if before.get(key) != value:
            changed[key] = value
    return changed
