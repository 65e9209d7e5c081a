"""Grids of pictures that show how a method changes images: style transfer, interpolated amplitudes, mixed views.

They are for inspection only and need the images of all source clients on this machine. In a federation, clients never
see each other's images.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from clients.augment import frequency, style
from clients.augment.cross_client_style import CrossClientStyle
from clients.augment.spaces import space_of
from clients.local_data import LocalData
from clients.objective.aligned_views import AlignedViews
from clients.step.episodic import EpisodicStep
from clients.terms.style_contrast import StyleContrast
from fedsim.common.errors import UserError
from fedsim.common.files import write_figure
from fedsim.runs.plan import Plan
from fedsim.runs.workspace import Workspace
from strategies.parts import SERVER, ServerRound

Column = tuple[str, Tensor]  # heading, images [rows, C, H, W] in [0, 1]
SHARES = (0.25, 0.5, 0.75, 1.0)
INCHES = 1.15  # side of one picture


def draw_pictures(plan: Plan, output: Path, rows: int = 6) -> list[Path]:
    """One PNG per source client: its images, and the same images with the styles or amplitudes of other clients."""
    space, experiment = Workspace(plan), plan.experiment
    parts = [part for part in space.recipe.client_parts() if type(part) in COLUMNS and part.bank]
    if not parts:
        raise UserError(
            f"{experiment.method_name} does not change images by means of a bank; there are pictures for ccst, fisc, "
            "elcfs and fedccrl"
        )
    names = list(plan.clients)
    clients = {name: space.client(name, "") for name in names}
    images = {name: example_images(client.data, rows) for name, client in clients.items()}
    label = space.recipe.label(experiment.method_name)
    written = []
    for part in parts:
        config = {"round": 0, "phase": "collect", "bank": part.bank}
        entries = {name: client.collect({**config, "client": name}) for name, client in clients.items()}
        (filled,) = [bank for bank in space.recipe.banks if bank.name == part.bank]
        bank = filled.merge({}, entries, ServerRound(0, 1, names, {}))
        for name in names:
            columns = COLUMNS[type(part)](part, name, images, bank)
            file = output / f"{experiment.name}-{part.bank}-{name.replace('/', '-')}.png"
            written.append(save_grid(columns, f"{label}: images of client {name}", file))
    return written


def style_columns(part: CrossClientStyle, name: str, images: dict[str, Tensor], bank: dict) -> list[Column]:
    """The content images; then, for every other client, one of its images and the content in its style."""
    content = images[name]
    space = space_of(part, content.device)
    measured = style.statistics(space.encode(content), int(part.content_variance == "unbiased"))
    columns = [("content", content)]
    for other in [other for other in images if other != name]:
        rows_of = (torch.from_numpy(bank[other][key]).to(content.device) for key in ("mean", "std"))
        mean, std = (values[torch.arange(len(content)) % len(values)] for values in rows_of)
        affine = style.adain_affine(measured, (mean, std), part.alpha, space.gain)
        columns += [
            (f"one of\n{other}", images[other]),
            (f"in the style of\n{other}", style.apply_affine(space, content, affine)),
        ]
    return columns


def contrast_columns(part: StyleContrast, name: str, images: dict[str, Tensor], bank: dict) -> list[Column]:
    """The content images, and the content in the style of all clients, as the term uses it and at full strength."""
    content = images[name]
    space, correction = space_of(part, content.device), int(part.content_variance == "unbiased")
    mean, std = (torch.from_numpy(bank[SERVER][key]).to(content.device) for key in ("mean", "std"))
    strengths = dict.fromkeys((part.alpha, 1.0))
    moved = [
        (f"strength {alpha:g}", style.restyle(space, content, (mean, std), alpha, correction)) for alpha in strengths
    ]
    return [("content", content), *moved]


def amplitude_columns(part: EpisodicStep, name: str, images: dict[str, Tensor], bank: dict) -> list[Column]:
    """The content images, their interpolations with another client's image for several lambda, and that image.

    The rows take the other clients in turn.
    """
    content = images[name]
    others = [own for other, own in images.items() if other != name]
    if not others:
        raise UserError("one source client has no foreign amplitudes; the pictures need at least two")
    foreign = torch.stack([others[row % len(others)][row] for row in range(len(content))])
    b = frequency.half_width(part.L_w, *content.shape[-2:])
    windows = frequency.amplitude(foreign, b)
    columns = [("content", content)]
    for share in SHARES:
        shares = torch.full((len(content),), share, device=content.device)
        columns.append((f"λ = {share:g}", frequency.interpolate(content, windows, shares, b).clamp(0, 1)))
    return [*columns, (f"amplitudes of\n(b = {b})", foreign)]


def view_columns(part: AlignedViews, name: str, images: dict[str, Tensor], bank: dict) -> list[Column]:
    """The content images, and the views of them that a step makes, with rows of all other clients."""
    content = images[name]
    others = [bank[other] for other in images if other != name and len(bank[other]["mean"])]
    styles = None
    if others:
        joined = (torch.from_numpy(np.concatenate([entry[key] for entry in others])) for key in ("mean", "std"))
        mean, std = (values[:, :, None, None].to(content.device) for values in joined)
        styles = mean, std
    views = [(f"view {number}", part.changed(content, styles)) for number in range(1, part.views + 1)]
    return [("content", content), *views]


COLUMNS: dict[type, Callable[..., list[Column]]] = {
    AlignedViews: view_columns,
    CrossClientStyle: style_columns,
    StyleContrast: contrast_columns,
    EpisodicStep: amplitude_columns,
}


def example_images(data: LocalData, rows: int) -> Tensor:
    """Training images of different classes in turn, [rows, C, H, W]."""
    labels = data.labels[: data.examples].cpu().numpy()
    turn = np.zeros(len(labels), np.int64)
    for label in np.unique(labels):
        turn[labels == label] = np.arange((labels == label).sum())
    return data.raw(np.lexsort((labels, turn))[:rows])


def save_grid(columns: list[Column], title: str, file: Path) -> Path:
    """Write the columns as one PNG, enlarged without smoothing."""
    count = len(columns[0][1])
    figure = Figure(figsize=(INCHES * len(columns) + 0.2, INCHES * count + 0.7), layout="constrained")
    figure.suptitle(title, fontsize=10)
    axes = figure.subplots(count, len(columns), squeeze=False)
    for index, (heading, images) in enumerate(columns):
        axes[0, index].set_title(heading, fontsize=8)
        for row, image in enumerate(images.cpu()):
            pixels = image.permute(1, 2, 0).numpy()
            axes[row, index].imshow(pixels, cmap="gray", vmin=0, vmax=1, interpolation="nearest")
            axes[row, index].set_axis_off()
    write_figure(figure, file, dpi=150)
    return file
