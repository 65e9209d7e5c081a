"""Grids of pictures that show how a method changes images: style transfer, interpolated amplitudes, mixed views.

They are for inspection only and need the images of all source clients on this machine. In a federation, clients never
see each other's images.
"""

from collections.abc import Callable, Mapping
from itertools import cycle
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from clients.augment import frequency, style
from clients.augment.cross_client_style import CrossClientStyle
from clients.augment.spaces import space_of
from clients.base import DomainClient
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
Images = dict[str, Tensor]  # of each client, [rows, C, H, W]
Entry = Mapping[str, np.ndarray]  # what a client contributed, e.g. "mean" and "std"
Bank = dict[str, Entry]  # by client, or of SERVER
SHARES = (0.25, 0.5, 0.75, 1.0)
INCHES = 1.15  # side of one picture


def draw_pictures(plan: Plan, output: Path, rows: int = 6) -> list[Path]:
    """Draws one PNG per source client: its images, and these images with styles or amplitudes of other clients.

    Returns the files. Raises UserError for a method that does not change images by means of a bank.
    """
    space = Workspace(plan)
    experiment = plan.experiment
    parts = [part for part in space.recipe.client_parts() if type(part) in COLUMNS and part.bank]
    if not parts:
        raise UserError(
            f"{experiment.method_name} does not change images by means of a bank; there are pictures for ccst, fisc, "
            "elcfs and fedccrl"
        )
    clients = {name: space.client(name, "") for name in plan.clients}
    images = {name: example_images(client.data, rows) for name, client in clients.items()}
    label = space.recipe.label(experiment.method_name)
    written = []
    for part in parts:
        bank = filled_bank(space, part.bank, clients)
        columns_of = COLUMNS[type(part)]
        for name, content in images.items():
            others = {other: images[other] for other in images if other != name}
            columns = [("content", content), *columns_of(part, content, others, bank)]
            client = name.replace("/", "-")
            file = output / f"{experiment.name}-{part.bank}-{client}.png"
            written.append(save_grid(columns, f"{label}: images of client {name}", file))
    return written


def filled_bank(space: Workspace, name: str, clients: dict[str, DomainClient]) -> Bank:
    """Returns the entries of a bank, by client, after all clients have contributed to it once."""
    config = {"round": 0, "phase": "collect", "bank": name}
    entries = {}
    for client_name, client in clients.items():
        entries[client_name] = client.collect({**config, "client": client_name})
    (bank,) = [bank for bank in space.recipe.banks if bank.name == name]
    return bank.merge({}, entries, ServerRound(0, 1, list(clients), {}))


def style_columns(part: CrossClientStyle, content: Tensor, others: Images, bank: Bank) -> list[Column]:
    """Returns two columns for every other client: its images, and the content in its style."""
    space = space_of(part, content.device)
    correction = int(part.content_variance == "unbiased")
    measured = style.statistics(space.encode(content), correction)
    columns = []
    for other, images in others.items():
        means, stds = statistics_of(bank[other], content.device)
        turn = torch.arange(len(content)) % len(means)
        affine = style.adain_affine(measured, (means[turn], stds[turn]), part.alpha, space.gain)
        restyled = style.apply_affine(space, content, affine)
        columns.append((f"one of\n{other}", images))
        columns.append((f"in the style of\n{other}", restyled))
    return columns


def contrast_columns(part: StyleContrast, content: Tensor, others: Images, bank: Bank) -> list[Column]:
    """Returns the content in the style of all clients, as the term uses it and at full strength."""
    space = space_of(part, content.device)
    correction = int(part.content_variance == "unbiased")
    statistics = statistics_of(bank[SERVER], content.device)
    columns = []
    for alpha in dict.fromkeys((part.alpha, 1.0)):
        restyled = style.restyle(space, content, statistics, alpha, correction)
        columns.append((f"strength {alpha:g}", restyled))
    return columns


def amplitude_columns(part: EpisodicStep, content: Tensor, others: Images, bank: Bank) -> list[Column]:
    """Returns the content interpolated with another client's image for several lambda, and that image.

    The rows take the other clients in turn.
    """
    if not others:
        raise UserError("one source client has no foreign amplitudes; the pictures need at least two")
    turn = cycle(others.values())
    foreign = torch.stack([next(turn)[row] for row in range(len(content))])
    b = frequency.half_width(part.L_w, *content.shape[-2:])
    windows = frequency.amplitude(foreign, b)
    columns = []
    for share in SHARES:
        shares = torch.full((len(content),), share, device=content.device)
        mixed = frequency.interpolate(content, windows, shares, b)
        columns.append((f"λ = {share:g}", mixed.clamp(0, 1)))
    columns.append((f"amplitudes of\n(b = {b})", foreign))
    return columns


def view_columns(part: AlignedViews, content: Tensor, others: Images, bank: Bank) -> list[Column]:
    """Returns the views of the content that a step makes, with rows of all other clients."""
    statistics = [statistics_of(bank[other], content.device) for other in others]
    statistics = [(means, stds) for means, stds in statistics if len(means)]
    styles = None
    if statistics:
        means, stds = map(torch.cat, zip(*statistics))
        styles = means[:, :, None, None], stds[:, :, None, None]
    columns = []
    for number in range(1, part.views + 1):
        columns.append((f"view {number}", part.changed(content, styles)))
    return columns


def statistics_of(entry: Entry, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns (means, standard deviations) of a bank's entry, as tensors on a device."""
    means = torch.from_numpy(entry["mean"])
    stds = torch.from_numpy(entry["std"])
    return means.to(device), stds.to(device)


COLUMNS: dict[type, Callable[..., list[Column]]] = {
    AlignedViews: view_columns,
    CrossClientStyle: style_columns,
    StyleContrast: contrast_columns,
    EpisodicStep: amplitude_columns,
}


def example_images(data: LocalData, rows: int) -> Tensor:
    """Returns training images of different classes in turn, [rows, C, H, W]."""
    labels = data.labels[: data.examples].cpu().numpy()
    turn = np.zeros(len(labels), np.int64)
    for label in np.unique(labels):
        is_of_class = labels == label
        turn[is_of_class] = np.arange(is_of_class.sum())
    return data.raw(np.lexsort((labels, turn))[:rows])


def save_grid(columns: list[Column], title: str, file: Path) -> Path:
    """Writes the columns as one PNG, enlarged without smoothing, and returns the file."""
    count = len(columns[0][1])
    width = INCHES * len(columns) + 0.2
    height = INCHES * count + 0.7
    figure = Figure(figsize=(width, height), layout="constrained")
    figure.suptitle(title, fontsize=10)
    axes = figure.subplots(count, len(columns), squeeze=False)
    for index, (heading, images) in enumerate(columns):
        axes[0, index].set_title(heading, fontsize=8)
        for row, image in enumerate(images.cpu()):
            pixels = image.permute(1, 2, 0).numpy()
            panel = axes[row, index]
            panel.imshow(pixels, cmap="gray", vmin=0, vmax=1, interpolation="nearest")
            panel.set_axis_off()
    write_figure(figure, file, dpi=150)
    return file
