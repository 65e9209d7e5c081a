"""The typed sections of an experiment's settings, one class and file per section of the TOML file.

`fedsim.settings.experiment` reads files, presets and overrides.
"""

from fedsim.settings.data import (
    AUGMENTS,
    SMALLEST_SIZE,
    START_VARIABLE,
    DataSettings,
    cache_root,
    data_root,
    start_folder,
)
from fedsim.settings.model import ModelSettings
from fedsim.settings.run import RunSettings
from fedsim.settings.sections import Settings, folder_name
from fedsim.settings.train import TrainSettings

__all__ = [
    "AUGMENTS",
    "SMALLEST_SIZE",
    "START_VARIABLE",
    "DataSettings",
    "ModelSettings",
    "RunSettings",
    "Settings",
    "TrainSettings",
    "cache_root",
    "data_root",
    "folder_name",
    "start_folder",
]
