"""Modules that have another name now: the old names still work in this version, with one warning each."""

import importlib
import importlib.util
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

MOVED = {
    "clients.losses": "clients.tools.losses",
    "clients.networks": "clients.tools.networks",
    "fedsim.about": "fedsim.common.about",
    "fedsim.arrays": "fedsim.tensors.arrays",
    "fedsim.assembly": "fedsim.methods.assembly",
    "fedsim.cli": "fedsim.commands.cli",
    "fedsim.combinations": "fedsim.methods.combinations",
    "fedsim.console": "fedsim.common.console",
    "fedsim.contract": "fedsim.commands.contract",
    "fedsim.cores": "fedsim.common.cores",
    "fedsim.errors": "fedsim.common.errors",
    "fedsim.experiment": "fedsim.settings.experiment",
    "fedsim.kinds": "fedsim.tensors.kinds",
    "fedsim.message_records": "fedsim.tensors.records",
    "fedsim.method_list": "fedsim.methods.listing",
    "fedsim.part": "fedsim.parts.part",
    "fedsim.part_settings": "fedsim.methods.part_settings",
    "fedsim.plugins": "fedsim.settings.plugins",
    "fedsim.recipe": "fedsim.methods.recipe",
    "fedsim.registry": "fedsim.methods.registry",
    "fedsim.results.features": "fedsim.export.features",
    "fedsim.results.pictures": "fedsim.export.pictures",
    "fedsim.seeding": "fedsim.common.seeding",
    "fedsim.start": "fedsim.commands.start",
    "fedsim.style_methods": "fedsim.methods.styles",
    "fedsim.tasks": "fedsim.common.tasks",
    "fedsim.text_methods": "fedsim.methods.texts",
    "fedsim.variants": "fedsim.methods.variants",
    "strategies.masking": "strategies.tools.masking",
}


class OldNames(MetaPathFinder, Loader):
    """Finds the modules of `MOVED` by their old names."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """A specification that this class loads; None for every other name."""
        return importlib.util.spec_from_loader(name, self) if name in MOVED else None

    def exec_module(self, module: ModuleType) -> None:
        """Put the module with the new name where the old one was asked for."""
        old = module.__name__
        warnings.warn(f"{old} is {MOVED[old]} now; the old name goes with the next version", FutureWarning, 2)
        sys.modules[old] = importlib.import_module(MOVED[old])


def install() -> None:
    """Let Python find modules by their old names, where no module has that name."""
    if not any(isinstance(finder, OldNames) for finder in sys.meta_path):
        sys.meta_path.append(OldNames())
