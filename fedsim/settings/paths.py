"""Settings with absolute paths, for processes that have another working folder."""

import os
from pathlib import Path

from fedsim.settings import START_VARIABLE, RunSettings, cache_root, data_root, start_folder
from fedsim.settings.experiment import Experiment
from fedsim.settings.model import weights_file
from fedsim.settings.plugins import FOLDERS_VARIABLE, search_folders


def with_absolute_paths(experiment: Experiment) -> Experiment:
    """The experiment with absolute paths, because the SuperLink has another working folder; defaults stay unchanged."""
    data = {
        key: str(path(experiment.data).resolve())
        for key, path in (("root", data_root), ("cache", cache_root))
        if getattr(experiment.data, key)
    }
    return experiment.replace(data=data, run={"output": str(Path(experiment.run.output).resolve())})


def with_absolute_weights(experiment: Experiment) -> Experiment:
    """The experiment with an absolute path where `model.weights` names a file that is here. Not for a deployment, in
    which every machine reads its own file."""
    file = weights_file(experiment.model.weights)
    return experiment.replace(model={"weights": str(file.resolve())}) if file else experiment


def with_own_folders(experiment: Experiment, root: str) -> Experiment:
    """A server's experiment on a site: with the site's data folder (empty: its $FEDSIM_DATA), and no other folder."""
    none = {"output": RunSettings().output, "federation": ""}
    return experiment.replace(data={"root": root, "cache": ""}, run=none)


def folders(experiment: Experiment) -> dict[str, str]:
    """Environment variables for the data folders that the settings leave open, for the user's own modules, and for the
    relative paths in the settings of parts. A run's label and record have these paths as they were given."""
    return {
        "FEDSIM_DATA": str(data_root(experiment.data).resolve()),
        "FEDSIM_CACHE": str(cache_root(experiment.data).resolve()),
        FOLDERS_VARIABLE: os.pathsep.join(search_folders()),
        START_VARIABLE: str(start_folder()),
    }
