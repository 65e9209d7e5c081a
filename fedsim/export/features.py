"""t-SNE of a saved model's features by class and by domain (as gPerXAN's Figure 3 and CSAC's Figure 8)."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import torch
from matplotlib.figure import Figure
from sklearn.manifold import TSNE
from torch import Tensor, nn

from fedsim.analysis.figure_style import COLORS, MARKERS, SETTINGS
from fedsim.common.errors import UserError
from fedsim.common.files import write_figure
from fedsim.common.seeding import numpy_rng
from fedsim.data import Benchmark, benchmark
from fedsim.data.augment import Scaler, Transforms, make_transforms
from fedsim.data.loading import read_source, read_whole, source_domains
from fedsim.data.reader import Images, reader
from fedsim.data.scaling import Scale, scale_of_features
from fedsim.data.tensor_records import recorded_scale
from fedsim.export.trained import model_file, refuse_other_data, trained_net
from fedsim.methods.variants import method_label
from fedsim.models import weight_statistics
from fedsim.models.infer.base import EvalMode, Infer
from fedsim.models.net import Net
from fedsim.parts.facts import Fact
from fedsim.parts.part import part_name
from fedsim.records.environment import read_environment
from fedsim.records.reading import read_settings
from fedsim.runs.plan import Plan
from fedsim.settings.experiment import Experiment
from fedsim.settings.run import NO_TARGET

# Ten classes are common, so there are four colours more. Black stays free for the unseen domain.
HUES = (*(color for color in COLORS if color != "#000000"), "#882255", "#999933", "#6B3D00", "#332288")


@torch.inference_mode()
def domain_features(
    experiment: Experiment, weights: Path, per_domain: int, trust: bool = False
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns (features, class index, domain index) of a random subset of every domain, the unseen one included.

    They are those with which the model predicts, by the run's inference rule (FedIG-A's adapters). A rule that looks at
    all images of a domain, or at single clients' tensors, is left out, and the features are those of eval mode. The
    features of a segmentation are maps, of which the mean over the image is taken.
    """
    plan, net = trained_net(weights, trust)
    refuse_unequal_inputs(plan)
    refuse_other_data(plan)
    extract = extractor(net, plan.recipe.infer)
    data = benchmark(experiment.data)
    transforms = _transforms(experiment, data, recorded_scale(read_environment(weights.parent)))
    features: list[np.ndarray] = []
    classes: list[np.ndarray] = []
    domains: list[np.ndarray] = []
    for index, domain in enumerate(data.domains):
        images, labels = _read(experiment, data, domain)
        order = numpy_rng(experiment.run.seed, "features", domain).permutation(len(labels))
        chosen = np.sort(order[:per_domain])
        classes.append(labels[chosen])
        domains.append(np.full(len(chosen), index))
        for part in np.array_split(chosen, max(len(chosen) // 256, 1)):
            batch = transforms.read(torch.from_numpy(images[part]))
            maps = extract(transforms.normalize(batch))
            features.append(_of_images(maps).numpy())
    return np.concatenate(features), np.concatenate(classes), np.concatenate(domains)


def _read(experiment: Experiment, data: Benchmark, domain: str) -> Images:
    """The images and labels of a domain as the run scaled them; those that no client holds where there are such."""
    sources = source_domains(experiment.data, experiment.run.target, data)
    trains = domain in sources and not data.test_apart
    read_domain = read_source if trains else read_whole
    return read_domain(reader(experiment.data, data), domain)


def _of_images(maps: Tensor) -> Tensor:
    """Features [B, D]: the means over the image of maps [B, D, h, w], and features [B, D] as they are."""
    if maps.ndim > 2:
        return maps.flatten(2).mean(dim=2)
    return maps


def refuse_unequal_inputs(plan: Plan) -> None:
    """Raises UserError where clients normalize their images differently, because a run's folder does not say how."""
    names = [part_name(part) for _, part in plan.recipe.pairs if Fact.ONE_INPUT in part.breaks]
    if names:
        raise UserError(f"there is no picture of features with {names[0]}: each client normalizes images by its own "
                        "statistics, which a run's folder does not have")  # fmt: skip


def has_own_features(rule: Infer) -> bool:
    """Whether an inference rule gives features of its own, for each image by itself and from the model alone."""
    return not (isinstance(rule, EvalMode) or rule.transductive or rule.bank)


def extractor(net: Net, rule: Infer) -> Callable[[Tensor], Tensor]:
    """Returns a function from normalized images to the features that the head gets when the rule predicts.

    A rule may predict by a copy of the network, or in several passes, of which the last one counts. A rule that looks
    at several views of an image (`mix_norm`) has no features of single images, so that they are those of eval mode.
    """
    net.eval()
    if not has_own_features(rule):
        return net.features
    received: list[Tensor] = []

    def receive(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        received.append(inputs[0])

    net.head.register_forward_pre_hook(receive)  # a copy of the net has it too
    predict = rule.begin(net, tuple)

    def features(images: Tensor) -> Tensor:
        predict(images)
        last = received[-1]
        received.clear()
        if len(last) != len(images):
            return net.features(images)
        return last

    return features


def _transforms(experiment: Experiment, bench: Benchmark, scale: Scale | None) -> Transforms:
    """What the run did with images, or with tensors that it scaled so."""
    if bench.images:
        return make_transforms(experiment.data, bench.channels, weight_statistics(experiment.model))
    scale = scale_of_features(scale, experiment.data, bench)
    scaler = Scaler(bench.shape, waits=scale is not None)
    if scale:
        scaler.use(scale)
    return make_transforms(experiment.data, bench.channels, read=scaler)


def plot_features(run: Path, out: Path, per_domain: int = 200, trust: bool = False) -> list[Path]:
    """Draws the t-SNE of a finished run's best model; returns the PNG and SVG files.

    Masks have structures, not classes, so that their images are shown by domain alone.
    Raises UserError for a folder without such a model, and for one that names modules outside fedsim, without trust.
    """
    weights = model_file(run, "best")
    experiment = read_settings(run)
    features, classes, domains = domain_features(experiment, weights, per_domain, trust)
    perplexity = min(30.0, (len(features) - 1) / 3)
    seed = experiment.run.seed
    points = TSNE(perplexity=perplexity, random_state=seed, init="pca").fit_transform(features)
    method = method_label(experiment)
    if experiment.run.label:
        method = f"{method}@{experiment.run.label}"
    stem = f"features-{method}-{experiment.run.target}-seed{seed}"
    files = [out / f"{stem}.png", out / f"{stem}.svg"]
    with mpl.rc_context(SETTINGS):
        figure = features_figure(experiment, points, classes, domains)
        for file in files:
            write_figure(figure, file, dpi=150)
    return files


def features_figure(
    experiment: Experiment,
    points: np.ndarray,
    classes: np.ndarray,
    domains: np.ndarray,
) -> Figure:
    """Draws the points [N, 2] by class [N] and by domain [N], in two panels; those of masks by domain alone."""
    data = benchmark(experiment.data)
    run = experiment.run
    count = 1 if data.structures else 2
    figure = Figure(figsize=(5.5 * count, 5), layout="constrained")
    *by_class, by_domain = figure.subplots(1, count, squeeze=False)[0]
    for panel in by_class:
        scatter(panel, points, classes, list(data.classes), "by class")
    names = [f"{name} (unseen)" if name == run.target else name for name in data.domains]
    unseen = -1 if run.target == NO_TARGET else data.domains.index(run.target)
    scatter(by_domain, points, domains, names, "by domain", unseen)
    title = f"{method_label(experiment)}, unseen {run.target}, seed {run.seed}"
    figure.suptitle(f"t-SNE of the best model's features: {title}")
    return figure


def scatter(
    axes: mpl.axes.Axes,
    points: np.ndarray,
    groups: np.ndarray,
    names: list[str],
    title: str,
    unseen: int = -1,
) -> None:
    """Draws points with a colour and a marker per group, the unseen group in black on top.

    There is a legend for up to 20 groups.
    """
    for index in np.unique(groups):
        group = points[groups == index]
        style: dict[str, Any] = {"s": 14, "color": "#000000", "marker": "X", "zorder": 3}
        if index != unseen:
            color = HUES[index % len(HUES)]
            marker = MARKERS[index % len(MARKERS)]
            style = {"s": 10, "color": color, "marker": marker, "zorder": 2}
        x, y = group.T
        axes.scatter(x, y, alpha=0.8, label=names[index], linewidths=0, **style)
    axes.set(title=title, xticks=[], yticks=[])
    axes.grid(visible=False)
    if len(names) <= 20:
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, markerscale=1.8)
