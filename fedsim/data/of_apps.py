"""The data of a Flower app: its clients alone read them, so that the server knows names and nothing more.

The server names this data set in the experiment of its run. `data.domains` and `data.classes` are then all facts.
"""

from dataclasses import replace
from typing import NoReturn

import numpy as np

from fedsim.common.errors import UserError
from fedsim.data.reader import Images, Reader
from fedsim.data.row import Benchmark
from fedsim.settings import DataSettings

DATASET = f"{__name__}:DATA"  # as data.dataset names it


class AppReader(Reader):
    """Reads nothing: the images are with the clients of an app."""

    def images(self, domain: str, apart: bool = False) -> Images:
        """Raises UserError."""
        self._refuse(domain)

    def labels(self, domain: str) -> np.ndarray:
        """Raises UserError."""
        self._refuse(domain)

    def fingerprint(self, domain: str) -> str:
        """Raises UserError."""
        self._refuse(domain)

    def _refuse(self, domain: str) -> NoReturn:
        raise UserError(f"the data of {domain!r} are with a client of a Flower app, which alone reads them")


def discover(data: DataSettings, row: Benchmark) -> Benchmark:
    """The row with the domains and classes of the settings."""
    return replace(row, domains=tuple(sorted(data.domains)), classes=tuple(data.classes))


DATA = Benchmark(
    "app", "Data of a Flower app", (), (), 3,
    source="the app's own clients",
    note="fedsim.strategy names the domains, once the clients have said who they are",
    reader="fedsim.data.of_apps:AppReader",
    discover="fedsim.data.of_apps:discover",
)  # fmt: skip
