"""A finished run's model as one module that contains the transforms and the inference rule."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from fedsim.common.doubt import Doubt
from fedsim.common.errors import UserError, nearest
from fedsim.common.tasks import OF_TENSORS, REGRESSION
from fedsim.data import Benchmark, benchmark, find_dataset
from fedsim.data.augment import make_transforms, to_float
from fedsim.data.fingerprint import difference, fingerprint
from fedsim.data.pixels import decode, decode_picture
from fedsim.data.scaling import Scale, scale_of_features, scales_targets
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
from fedsim.runs.inference_bank import kept_entries
from fedsim.runs.plan import Plan, resolve
from fedsim.settings.experiment import Experiment
from fedsim.tensors.arrays import load_arrays

MODELS = "*.safetensors"
SELECTED = ("best", "last")
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
        self, plan: Plan, net: Net, file: Path, own: Uploads | None = None, scale: Scale | None = None
    ) -> None:
        super().__init__()
        self.plan, self.file, self.scale = plan, file, scale
        self.feature_scale = scale_of_features(scale, plan.experiment.data, plan.data)
        self.rules = rules_of(plan.data.task, plan.experiment.data, plan.experiment.train)
        if scale and scales_targets(plan.experiment.data, plan.data):
            self.rules.use_units(scale.mean[-1], scale.std[-1])
        self.experiment: Experiment = plan.experiment
        self.classes, self.channels = plan.data.outputs, plan.data.channels
        self.image_size = self.experiment.data.image_size
        self.net = net.eval().requires_grad_(False)
        self.shape = plan.data.example_shape(self.image_size)
        mean, std = self._statistics()
        self.register_buffer("mean", mean)
        self.register_buffer("std", std)
        rule = plan.recipe.infer
        self.own = own  # the clients' tensors that the rule needs
        self.remark = unfinished(file.parent) if file.stem == "best" else ""
        self._predict = self._begun()
        self.batch_size = rule.pass_size(self.experiment.run.evaluate_batch_size)
        self.eval()

    def _apply(self, *arguments: Any, **more: Any) -> "TrainedModel":
        """Moves the clients' tensors too (`to`, `cuda`, `double`), and begins the rule again, which may hold copies.

        A transductive rule then needs `adapt` again.
        """
        moved = super()._apply(*arguments, **more)
        if self.own:
            self.own = [{name: arguments[0](tensor) for name, tensor in own.items()} for own in self.own]
        self._predict = self._begun()
        return moved

    def _begun(self) -> Predict | None:
        """The function of the inference rule; None for a rule that needs images first."""
        rule = self.plan.recipe.infer
        return None if rule.transductive else rule.begin(self.net, tuple, self.own)

    def _statistics(self) -> tuple[Tensor | None, Tensor | None]:
        """Mean and std by which the run normalized its images, or standardized its tensors; None for neither."""
        if not self.plan.data.images:
            arrays = self.feature_scale.arrays(self.shape) if self.feature_scale else ()
            mean, std = map(torch.from_numpy, arrays) if arrays else (None, None)
            return mean, std
        transforms = make_transforms(self.experiment.data, self.channels, weight_statistics(self.experiment.model))
        both = transforms.normalize.mean, transforms.normalize.std
        channels = [torch.tensor(values).view(1, -1, 1, 1) if values else None for values in both]
        return channels[0], channels[1]

    @property
    def doubt(self) -> Doubt | None:
        """What the sources fitted to this file's model (`run.doubt`); None for another file of the run."""
        return read_doubt(self.file.parent) if self.file.stem == "best" else None

    def normalize(self, images: Tensor) -> Tensor:
        """The network's input for images that are uint8, or float in [0, 1]; or for tensors before they are scaled."""
        images = to_float(images) if images.dtype == torch.uint8 and self.plan.data.images else images
        if self.mean is None or self.std is None:
            return images
        scaled = (images - self.mean) / self.std
        return scaled if self.plan.data.images else torch.nan_to_num(scaled, nan=0.0)

    def forward(self, images: Tensor) -> Tensor:
        """Logits of images [B, C, s, s]; UserError when the rule needs `adapt` first.

        A regression gives predictions in the user's unit.
        """
        if self._predict is None:
            name = type(self.plan.recipe.infer).__name__
            raise UserError(f"the rule {name} uses images of the unseen domain first; call adapt(batches)")
        logits = self._predict(self.normalize(images))
        return self.rules.keep(logits) if self.plan.data.task == REGRESSION.name else logits

    def adapt(self, batches: Iterable[Tensor]) -> "TrainedModel":
        """Show a transductive rule unlabelled batches of the domain on which it will predict, after the last `to`.

        They should come in a random order: a batch of one class has its statistics. Other rules ignore them.
        """
        kept = [self.normalize(images) for images in batches]
        self._predict = self.plan.recipe.infer.begin(self.net, lambda: iter(kept), self.own)
        return self

    def prepare(self, files: Sequence[Path | str | Image.Image]) -> Tensor:
        """float32 [B, C, s, s] in [0, 1] of image files or PIL images, decoded and resized as in the run's evaluation.

        This is what the module takes, and also every file that `fedsim export` writes from it.

        Raises UserError for an image that cannot be read, or whose numbers do not define their brightness.
        """
        if not self.plan.data.images:
            raise UserError(f"this model takes tensors of the shape {list(self.shape)}, and no image files; give it "
                            "such tensors, or a table to `fedsim predict`")  # fmt: skip
        return to_float(torch.from_numpy(np.stack([self._decode(file) for file in files])))

    def _decode(self, file: Path | str | Image.Image) -> np.ndarray:
        if isinstance(file, Image.Image):
            image = decode_picture(file, self.image_size)
        else:
            image = decode(Path(file), self.image_size)
        if self.channels == 3:
            return image
        grey = Image.fromarray(np.ascontiguousarray(image.transpose(1, 2, 0))).convert("L")
        return np.asarray(grey)[None]

    @property
    def has_targets(self) -> bool:
        """Whether each output is a number or a label of its own, and no class."""
        return self.plan.data.task in OF_TENSORS

    @torch.inference_mode()
    def outputs(self, values: Tensor) -> np.ndarray:
        """Predictions [N, Q] in the user's unit, or the probability of each label, of tensors in one batch."""
        outputs = self(values)
        return (outputs if self.plan.data.task == REGRESSION.name else self.rules.keep(outputs)).numpy()

    def require_classes(self) -> None:
        """Raise UserError when the outputs are masks of structures or other targets, of which there is no class."""
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
        parts = [files[start : start + self.batch_size] for start in range(0, len(files), self.batch_size)]
        return np.concatenate([self(self.prepare(part)).float().softmax(1).numpy() for part in parts])


def load_trained(run: str | Path, which: str = "best", trust: bool = False) -> TrainedModel:
    """The model of a finished run's folder, e.g. outputs/pacs/fedavg/sketch/seed0.

    which: best (the model of the selected round), last, or another file of the folder such as personal-photo
    trust: modules outside fedsim that the folder names are imported, so that their code runs

    Frozen tensors are not in these files; they are built again from the run's weights and seed. A rule that needs
    tensors of every client (COPA's heads) gets those of the same round; a personal model predicts by itself. Raises
    UserError for a folder without such a model, and when the code or the frozen weights are not those of the run.
    """
    folder = Path(run)
    file = model_file(folder, which)
    plan, net = trained_net(file, trust)
    own = kept_entries(folder, which)
    if (bank := plan.recipe.infer.bank) and own is None and which in SELECTED:
        raise UserError(f"{folder} does not hold the clients' tensors of the bank {bank!r}, which the inference rule "
                        "needs; copy the whole folder of the run again")  # fmt: skip
    return TrainedModel(plan, net, file, own, recorded_scale(read_environment(folder)))


def model_file(folder: Path, which: str) -> Path:
    """Return the file of a run's model; UserError for a folder without it, and for a link that leads to no file."""
    file = folder / f"{which}.safetensors"
    if not file.is_file():
        if text := link_text(file):
            raise UserError(f"{file} cannot be read{text}; copy the model itself into the run's folder (cp -L)")
        found = sorted(path.stem for path in folder.glob(MODELS))
        hint = f"{nearest(which, found)}it has: {', '.join(found)}" if found else RUN_FOLDER
        raise UserError(f"{folder} holds no {which}.safetensors; {hint}")
    return file


def trained_net(file: Path, trust: bool = False) -> tuple[Plan, Net]:
    """The plan of the run in whose folder a model's file is, and its network with the tensors of the file.

    The names of domains and classes are those that the run recorded, not those on disk now. UserError for a folder that
    names modules outside fedsim, without trust.
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


def refuse_other_classes(model: TrainedModel) -> None:
    """UserError when the data set on this machine has other classes than the run's, so that its labels mean others."""
    now = benchmark(model.experiment.data).outputs
    if now != model.classes:
        apart = ", ".join(sorted(set(now) ^ set(model.classes))[:5]) or "their order"
        raise UserError(f"the data set {model.experiment.data.dataset!r} on this machine has other classes than in the "
                        f"run ({apart}); name images in folders of the run's classes with --data")  # fmt: skip


def other_images(model: TrainedModel) -> str:
    """A text when the images of the run's target on this machine are not those of the run; else empty."""
    data, target = model.experiment.data, model.experiment.run.target
    then = {name: own for name, own in read_environment(model.file.parent).get("data", {}).items() if name == target}
    found = difference(then, {target: fingerprint(data, target)}) if then else ""
    return f"these are not the images of the run ({found}); its recorded numbers do not compare" if found else ""


def _facts(experiment: Experiment, recorded: Mapping[str, Any], place: Path) -> Benchmark | None:
    """The facts of the run's data set; None where nothing of them is on disk.

    The images may have been changed, moved or removed since the run, and domains may have come or gone.
    """
    data = experiment.data
    row = find_dataset(data.dataset)
    if not row.discover:
        return None
    structures = tuple(data.structures) or row.structures
    row = replace(row, **row.variants.get(data.variant, {}), structures=structures, task=data.task or row.task)
    if lacking := [key for key in ("domains", "classes") if key not in recorded]:
        raise UserError(f"{place}: it does not name the {lacking[0]} of the run; {AGAIN}")
    row = replace(row, domains=tuple(sorted(recorded["domains"])), classes=tuple(recorded["classes"]))
    return with_recorded_shape(row, recorded)


def describe(model: TrainedModel) -> dict[str, Any]:
    """What another program needs to know about the model, as plain values."""
    output = "logits [N, classes]"
    if model.has_targets:
        output = "predictions [N, 1] in the unit of the label"
        if model.plan.data.task != REGRESSION.name:
            output = "logits [N, labels]; the sigmoid of each is the probability of its label"
    elif model.plan.data.structures:
        threshold = model.experiment.data.mask_threshold
        output = f"logits [N, classes, H, W]; a pixel is of a class where its logit's sigmoid is above {threshold:g}"
    elif doubt := model.doubt:
        output += (
            f"; probabilities [N, classes], the softmax of logits / {doubt.temperature:.6g}; set [N, classes], whether "
            f"a class is in the set, 1 - probability <= {doubt.threshold:g}"
        )
    if not model.plan.data.images:
        missing = "NaN is missing" if model.feature_scale else "scaled before"
        return {
            "classes": list(model.classes),
            "features": list(model.plan.data.features),
            "input": f"float32 tensors {['N', *model.shape]}; {missing}",
            "output": output,
        }
    return {
        "classes": list(model.classes),
        "image_size": model.image_size,
        "channels": model.channels,
        "input": "float32 images [N, C, H, W] in [0, 1]; the model normalizes them itself",
        "resize": "both sides to image_size, bilinear with antialiasing",
        "output": output,
    }
