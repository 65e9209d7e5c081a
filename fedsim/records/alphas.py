"""alpha of every test image in every layer, which a run keeps of its selected model with `run.record = ["alpha"]`.

`alpha.safetensors` in a run's folder holds `index` [N], the image's number in its domain, and `alpha` [L, N]. Its
metadata have the paths of the L layers in the order of the network.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save

from fedsim.common.errors import UserError
from fedsim.common.files import atomic_write
from fedsim.records.readers import named

FILE = "alpha.safetensors"


@dataclass(frozen=True)
class Alphas:
    """index [N] int64, alpha [L, N] float64 between 0 and 1, layers: L paths."""

    index: np.ndarray
    alpha: np.ndarray
    layers: tuple[str, ...]

    def write(self, run: Path) -> None:
        """Writes them atomically into a run's folder, in the order of the images' numbers."""
        order = np.argsort(self.index, kind="stable")
        arrays = {"index": self.index[order], "alpha": np.ascontiguousarray(self.alpha[:, order])}
        metadata = {"layers": json.dumps(list(self.layers))}
        atomic_write(run / FILE, save(arrays, metadata))


def read_alphas(run: Path) -> Alphas | None:
    """The alphas of a run; None where it kept none. Raises UserError for a file that cannot be read."""
    file = run / FILE
    if not file.is_file():
        return None
    with named(file, "alpha of the test images"), safe_open(file, framework="numpy") as content:
        layers = tuple(json.loads(content.metadata()["layers"]))
        alphas = Alphas(content.get_tensor("index"), content.get_tensor("alpha"), layers)
    if alphas.alpha.shape != (len(layers), *alphas.index.shape):
        raise UserError(f"{file}: images, layers and alpha do not fit together")
    return alphas
