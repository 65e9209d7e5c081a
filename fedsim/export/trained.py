"""A finished run's model as one module that contains the transforms and the inference rule."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from fedsim.common.doubt import Doubt
from fedsim.common.errors import UserError, nearest
from fedsim.common.seeding import numpy_rng
from fedsim.common.tasks import OF_TENSORS, REGRESSION
from fedsim.data import Benchmark, benchmark, find_dataset
from fedsim.data.augment import make_transforms, to_float
from fedsim.data.fingerprint import difference, fingerprint
from fedsim.data.pixels import decode, decode_picture
from fedsim.data.scaling import Scale, scale_of_features, scale_rule, scales_targets
from fedsim.data.tensor_records import recorded_scale, with_recorded_shape
from fedsim.methods.registry import refuse_outside
from fedsim.models import weight_statistics
from fedsim.models.infer.base import Predict, Uploads
from fedsim.models.net import Net
from fedsim.models.tasks import rules_of
from fedsim.records.doubt import read_doubt
from fedsim.records.environment import read_environment
from fedsim.records.readers import AGAIN, link_text, read_arrays
from fedsim.records.reading import read_settings, unfinished
from fedsim.runs.frozen import frozen_record, refuse_other_frozen
from fedsim.runs.kept_tensors import kept_entries
from fedsim.runs.plan import Plan, resolve
from fedsim.settings.experiment import Experiment
from fedsim.tensors.arrays import load_arrays

MODELS = "*.safetensors"
SELECTED = ("best", "last")
T = TypeVar("T")
RUN_FOLDER = "name the folder of one run, e.g. outputs/digits/fedavg/rot75/seed0"


class TrainedModel(nn.Module):
    """A module that takes images [B, C, s, s], uint8 or float in [0, 1], and returns logits.

    The logits are [B, classes], or [B, structures, s, s] for masks; a regression gives its predictions [B, 1]. The
    module normalizes the images as the run did and predicts by the run's inference rule in eval mode. `prepare` makes
    such images from files. A rule that uses many images of the unseen domain before it predicts (a transductive rule)
    needs `adapt(batches)` first.

    classes: the names of the classes (or structures), in the order of the logits
    image_size: s
    channels: C
    batch_size: the run's batch size
    remark: what to know about the file; empty for most
    """

    mean: Tensor | None
    std: Tensor | None

    def __init__(
        self,
        plan: Plan,
        net: Net,
        file: Path,
        own: Uploads | None = None,
        scale: Scale | None = None,
    ) -> None:
        super().__init__()
        self.plan = plan
        self.file = file
        self.scale = scale
        self.feature_scale = scale_of_features(scale, plan.experiment.data, plan.data)
        self.rules = rules_of(plan.data.task, plan.experiment.data, plan.experiment.train)
        if scale and scales_targets(plan.experiment.data, plan.data):
            self.rules.use_units(scale.mean[-1], scale.std[-1])
        self.experiment: Experiment = plan.experiment
        self.classes = plan.data.outputs
        self.channels = plan.data.channels
        self.image_size = self.experiment.data.image_size
        self.net = net.eval().requires_grad_(False)
        self.shape = plan.data.example_shape(self.image_size)
        mean, std = self._statistics()
        self.register_buffer("mean", mean)
        self.register_buffer("std", std)
        self.inference_rule = plan.recipe.infer
        self.own = own  # the clients' tensors that the rule needs
        self.remark = unfinished(file.parent) if file.stem == "best" else ""
        self._predict = self._begun()
        self.batch_size = self.inference_rule.pass_size(self.experiment.run.evaluate_batch_size)
        self.eval()

    def _apply(self, *arguments: Any, **more: Any) -> "TrainedModel":
        """Moves the clients' tensors too (`to`, `cuda`, `double`), and begins the rule again, which may hold copies.

        A transductive rule then needs `adapt` again.
        """
        moved = super()._apply(*arguments, **more)
        if self.own:
            convert = arguments[0]
            converted = []
            for tensors in self.own:
                converted.append({name: convert(tensor) for name, tensor in tensors.items()})
            self.own = converted
        self._predict = self._begun()
        return moved

    def _begun(self) -> Predict | None:
        """The function of the inference rule; None for a rule that needs images first."""
        if self.inference_rule.transductive:
            return None
        return self.inference_rule.begin(self.net, tuple, self.own)

    def _statistics(self) -> tuple[Tensor | None, Tensor | None]:
        """Mean and std by which the run normalized its images, or standardized its tensors; None for neither."""
        if self.plan.data.images:
            statistics = weight_statistics(self.experiment.model)
            normalize = make_transforms(self.experiment.data, self.channels, statistics).normalize
            return _by_channel(normalize.mean), _by_channel(normalize.std)
        if self.feature_scale is None:
            return None, None
        mean, std = self.feature_scale.arrays(self.shape)
        return torch.from_numpy(mean), torch.from_numpy(std)

    @property
    def doubt(self) -> Doubt | None:
        """What the sources fitted to this file's model (`run.doubt`); None for another file of the run."""
        if self.file.stem != "best":
            return None
        return read_doubt(self.file.parent)

    def normalize(self, images: Tensor) -> Tensor:
        """The network's input for images that are uint8, or float in [0, 1]; or for tensors before they are scaled."""
        if images.dtype == torch.uint8 and self.plan.data.images:
            images = to_float(images)
        if self.mean is None or self.std is None:
            return images
        scaled = (images - self.mean) / self.std
        if self.plan.data.images:
            return scaled
        return torch.nan_to_num(scaled, nan=0.0)

    def forward(self, images: Tensor) -> Tensor:
        """Logits of images [B, C, s, s]; UserError when the rule needs `adapt` first.

        A regression gives predictions in the user's unit.
        """
        if self._predict is None:
            name = type(self.inference_rule).__name__
            raise UserError(f"the rule {name} uses images of the unseen domain first; call adapt(batches)")
        logits = self._predict(self.normalize(images))
        if self.is_regression:
            return self.rules.keep(logits)
        return logits

    def adapt(self, batches: Iterable[Tensor]) -> "TrainedModel":
        """Shows a transductive rule unlabelled batches of the domain on which it will predict, after the last `to`.

        They should come in a random order: a batch of one class has its statistics. Other rules ignore them.
        """
        inputs = [self.normalize(images) for images in batches]
        self._predict = self.inference_rule.begin(self.net, lambda: iter(inputs), self.own)
        return self

    def ordered(self, indices: np.ndarray) -> np.ndarray:
        """Returns indices [N] in the random order of the run for a rule that depends on the order, else as they are.

        A folder lists its images class by class, so that a batch in their order would often have a single class.
        """
        if not self.inference_rule.shuffled:
            return indices
        return numpy_rng(self.experiment.run.seed, "test-order").permutation(indices)

    def prepare(self, files: Sequence[Path | str | Image.Image]) -> Tensor:
        """float32 [B, C, s, s] in [0, 1] of image files or PIL images, decoded and resized as in the run's evaluation.

        This is what the module takes, and also every file that `fedsim export` writes from it.

        Raises UserError for an image that cannot be read, or whose numbers do not define their brightness.
        """
        if not self.plan.data.images:
            raise UserError(f"this model takes tensors of the shape {list(self.shape)}, and no image files; give it "
                            "such tensors, or a table to `fedsim predict`")  # fmt: skip
        images = np.stack([self._decode(file) for file in files])
        return to_float(torch.from_numpy(images))

    def _decode(self, file: Path | str | Image.Image) -> np.ndarray:
        """The pixels uint8 [C, s, s] of one image."""
        if isinstance(file, Image.Image):
            image = decode_picture(file, self.image_size)
        else:
            image = decode(Path(file), self.image_size)
        if self.channels == 3:
            return image
        rows = np.ascontiguousarray(image.transpose(1, 2, 0))
        grey = Image.fromarray(rows).convert("L")
        return np.asarray(grey)[None]

    @property
    def has_targets(self) -> bool:
        """Whether each output is a number or a label of its own, and no class."""
        return self.plan.data.task in OF_TENSORS

    @property
    def is_regression(self) -> bool:
        """Whether each output is a number in the user's unit."""
        return self.plan.data.task == REGRESSION.name

    @torch.inference_mode()
    def outputs(self, values: Tensor) -> np.ndarray:
        """Predictions [N, Q] in the user's unit, or the probability of each label, of tensors in one batch."""
        outputs = self(values)
        if not self.is_regression:
            outputs = self.rules.keep(outputs)
        return outputs.numpy()

    def require_classes(self) -> None:
        """Raises UserError when the outputs are masks of structures or other targets, of which there is no class."""
        if self.has_targets:
            raise UserError(f"{self.file}: this model was trained for {self.plan.data.task}, which has no classes; "
                            "call the model, or use fedsim predict")  # fmt: skip
        if self.plan.data.structures:
            raise UserError(f"{self.file}: this model predicts masks, for which there is no table of predictions; use "
                            "fedsim.load in Python, or fedsim export")  # fmt: skip

    @torch.inference_mode()
    def probabilities(self, files: Sequence[Path | str | Image.Image]) -> np.ndarray:
        """Softmax probabilities [N, classes] of image files, in batches."""
        self.require_classes()
        probabilities = []
        for batch in in_batches(files, self.batch_size):
            images = self.prepare(batch)
            probabilities.append(softmax_of(self(images)))
        return np.concatenate(probabilities)


def in_batches(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """Yields the items in their order, `size` at a time."""
    for start in range(0, len(items), size):
        yield items[start : start + size]


def tensors_of(values: np.ndarray, indices: np.ndarray, size: int) -> Iterator[Tensor]:
    """Yields the values at the indices [N] in their order, as tensors of `size` examples."""
    for start in range(0, len(indices), size):
        batch = values[indices[start : start + size]]
        yield torch.from_numpy(np.ascontiguousarray(batch))


def softmax_of(logits: Tensor) -> np.ndarray:
    """Returns the probabilities float32 [N, classes] of logits."""
    return logits.float().softmax(1).numpy()


def _by_channel(values: Sequence[float]) -> Tensor | None:
    """The values of the channels as a tensor [1, C, 1, 1]; None where there are none."""
    if not values:
        return None
    return torch.tensor(values).view(1, -1, 1, 1)


def load_trained(run: str | Path, which: str = "best", trust: bool = False) -> TrainedModel:
    """Loads the model of a finished run's folder, e.g. outputs/pacs/fedavg/sketch/seed0.

    which: best (the model of the selected round), last, or another file of the folder such as personal-photo
    trust: modules outside fedsim that the folder names are imported, so that their code runs

    Frozen tensors are not in these files; they are built again from the run's weights and seed. A rule that needs
    tensors of every client (COPA's heads) gets those of the same round; a personal model predicts by itself. Raises
    UserError for a folder without such a model, and when the code or the frozen weights are not those of the run.
    """
    folder = Path(run)
    file = model_file(folder, which)
    plan, net = trained_net(file, trust)
    uploads = kept_entries(folder, which)
    bank = plan.recipe.infer.bank
    if bank and uploads is None and which in SELECTED:
        raise UserError(f"{folder} does not hold the clients' tensors of the bank {bank!r}, which the inference rule "
                        "needs; copy the whole folder of the run again")  # fmt: skip
    scale = recorded_scale(read_environment(folder))
    return TrainedModel(plan, net, file, uploads, scale)


def model_file(folder: Path, which: str) -> Path:
    """Returns the file of a run's model; UserError for a folder without it, and for a link that leads to no file."""
    file = folder / f"{which}.safetensors"
    if file.is_file():
        return file
    text = link_text(file)
    if text:
        raise UserError(f"{file} cannot be read{text}; copy the model itself into the run's folder (cp -L)")
    names = sorted(path.stem for path in folder.glob(MODELS))
    hint = RUN_FOLDER
    if names:
        hint = f"{nearest(which, names)}it has: {', '.join(names)}"
    raise UserError(f"{folder} holds no {which}.safetensors; {hint}")


def trained_net(file: Path, trust: bool = False) -> tuple[Plan, Net]:
    """Returns (plan of the run in whose folder a model's file is, its network with the tensors of the file).

    The names of domains and classes are those that the run recorded, not those on disk now. Raises UserError for a
    folder that names modules outside fedsim, without trust, and for a file that does not fit the run's settings.
    """
    experiment = read_settings(file.parent)
    refuse_outside(experiment, file.parent, trust)
    facts = _facts(experiment, read_environment(file.parent), file.parent / "environment.json")
    plan = resolve(experiment, recorded=True, bench=facts)
    net = plan.build_net()
    refuse_other_frozen(file.parent, frozen_record(net), plan.experiment.model.weights)
    arrays = read_arrays(file)
    try:
        load_arrays(net, arrays, net.state_dict().keys() - net.frozen)
    except (ValueError, TypeError) as error:
        raise UserError(f"{file} does not fit the run's settings: {error}") from None
    return plan, net


def refuse_other_data(plan: Plan) -> None:
    """Raises UserError when the data set on this machine has other classes or columns than the run's.

    Its labels would mean other classes, or the numbers of a row other features, in their order.
    """
    data = plan.experiment.data
    now = benchmark(data)
    for what, present, trained in (
        ("classes", now.outputs, plan.data.outputs),
        ("columns", now.features, plan.data.features),
        ("shapes of an example", now.shape, plan.data.shape),
    ):
        if present == trained:
            continue
        apart = sorted(map(str, set(present) ^ set(trained)))
        text = ", ".join(apart[:5]) or "their order"
        raise UserError(f"the data set {data.dataset!r} on this machine has other {what} than in the run ({text}); "
                        "name data that fit the run with --data")  # fmt: skip


def other_images(model: TrainedModel) -> str:
    """Says that the images of the run's target on this machine are not those of the run; empty where they are.

    It is empty, too, where the run did not record its images.
    """
    data = model.experiment.data
    target = model.experiment.run.target
    recorded = read_environment(model.file.parent).get("data", {})
    if target not in recorded:
        return ""
    reason = difference({target: recorded[target]}, {target: fingerprint(data, target)})
    if not reason:
        return ""
    return f"these are not the images of the run ({reason}); its recorded numbers do not compare"


def _facts(experiment: Experiment, recorded: Mapping[str, Any], place: Path) -> Benchmark | None:
    """The facts of the run's data set; None where nothing of them is on disk.

    The images may have been changed, moved or removed since the run, and domains may have come or gone.
    """
    data = experiment.data
    row = find_dataset(data.dataset)
    if not row.discover:
        return None
    for key in ("domains", "classes"):
        if key not in recorded:
            raise UserError(f"{place}: it does not name the {key} of the run; {AGAIN}")
    facts = {
        **row.variants.get(data.variant, {}),
        "structures": tuple(data.structures) or row.structures,
        "task": data.task or row.task,
        "domains": tuple(sorted(recorded["domains"])),
        "classes": tuple(recorded["classes"]),
    }
    return with_recorded_shape(replace(row, **facts), recorded)


def output_of(model: TrainedModel) -> str:
    """What the outputs of the model are, with their shape."""
    if model.is_regression:
        return "predictions [N, 1] in the unit of the label"
    if model.has_targets:
        return "logits [N, labels]; the sigmoid of each is the probability of its label"
    if model.plan.data.structures:
        data = model.experiment.data
        pixels = f"a pixel is of a class where its logit's sigmoid is above {data.mask_threshold:g}"
        largest = "; of these only the largest connected component" if data.largest_component else ""
        return f"logits [N, classes, H, W]; {pixels}{largest}"
    doubt = model.doubt
    if doubt is None:
        return "logits [N, classes]"
    return (
        f"logits [N, classes]; probabilities [N, classes], the softmax of logits / {doubt.temperature:.6g}; "
        f"set [N, classes], whether a class is in the set, 1 - probability <= {doubt.threshold:g}"
    )


def scaling_of(model: TrainedModel) -> str:
    """Says how the tensors that a model takes are scaled, by the model or before."""
    if model.feature_scale:
        return "the model standardizes them itself; NaN is a missing value"
    if scale_rule(model.experiment.data, model.plan.data) == "site":
        return "standardized before, by the mean and the deviation of their own site"
    return "as they are in the data, not standardized"


def describe(model: TrainedModel) -> dict[str, Any]:
    """Returns what another program needs to know about the model, as plain values."""
    if not model.plan.data.images:
        return {
            "classes": list(model.classes),
            "features": list(model.plan.data.features),
            "input": f"float32 tensors {['N', *model.shape]}; {scaling_of(model)}",
            "output": output_of(model),
        }
    return {
        "classes": list(model.classes),
        "image_size": model.image_size,
        "channels": model.channels,
        "input": "float32 images [N, C, H, W] in [0, 1]; the model normalizes them itself",
        "resize": "both sides to image_size, bilinear with antialiasing",
        "output": output_of(model),
    }
