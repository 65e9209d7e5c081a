"""A trained model as a file for other programs: ONNX, or a program of torch.export. Every file is checked."""

import importlib.util
import json
import logging
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from fedsim.common.about import extra
from fedsim.common.doubt import Doubt
from fedsim.common.errors import UserError, first_line
from fedsim.data import load_target
from fedsim.data.augment import to_float
from fedsim.data.cache import remove_leftovers
from fedsim.export.trained import TrainedModel, describe, refuse_other_data
from fedsim.models.infer.base import Infer
from fedsim.settings.run import NO_TARGET

TOLERANCE = 1e-3  # the largest allowed difference, divided by the largest logit
ROUNDING = 1e-6  # of float32, by which a probability may miss the end of a set
IMAGES = 8  # number of images on which the file is compared with the model
Runner = Callable[[np.ndarray], np.ndarray]


def export(model: TrainedModel, format: str, output: Path) -> tuple[float, str]:
    """Writes the model; returns the largest difference of its logits from the original's, and the images used for it.

    onnx: for any ONNX runtime, with the opset of the installed exporter
    torch: `torch.export.load(file).module()`, which needs only PyTorch

    Both take float32 images [N, C, s, s] in [0, 1] for any N and return logits; they contain normalization and the
    inference rule. The names of the classes are in the card, and also in the metadata of an ONNX file. Where the run
    has fitted its doubt, they also return the calibrated probabilities and the sets (`WithDoubt`).

    The file is written under a temporary name and compared with the model on up to 8 images of the run's data set; only
    then is it renamed. Without the data set random images are used, and the returned text says so. Raises UserError for
    an unknown format, a missing package, and an inference rule that needs other images before it predicts. It also
    refuses a file whose logits differ by more than 1e-3 of the largest logit.
    """
    if format not in WRITERS:
        raise UserError(f"--format {format!r}: the known formats are {', '.join(WRITERS)}")
    if output.is_dir():
        raise UserError(f"--output {output} is a folder; name a file in it")
    _refuse_rule(model.inference_rule)
    images, source = comparison_images(model)
    with torch.inference_mode():
        expected = model(images).numpy()
    output.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(output.parent)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=".tmp-") as folder:
        file = Path(folder) / output.name
        with _quiet():
            runner = WRITERS[format](model, images, file)
        worst = _largest_difference(runner, images, expected)
        largest_logit = float(np.abs(expected).max())
        if not worst <= TOLERANCE * max(largest_logit, 1.0):
            raise UserError(f"the exported model differs from the original by {worst:.2g} on {source}; not written")
        file.replace(output)
    return worst, source


def _refuse_rule(rule: Infer) -> None:
    """Raises UserError for an inference rule that no file can hold."""
    name = type(rule).__name__
    if rule.transductive:
        raise UserError(f"the rule {name} uses images of the unseen domain before it predicts, so that no single "
                        "file holds the model; use fedsim.load")  # fmt: skip
    if rule.random:
        raise UserError(f"the rule {name} draws numbers at every prediction, which no file holds; use fedsim.load")


def _largest_difference(runner: Runner, images: Tensor, expected: np.ndarray) -> float:
    """The largest difference of the logits of a file from the expected ones, in a batch of all images and of one."""
    batches = (images, images[:1])
    differences = [runner(batch.numpy()) - expected[: len(batch)] for batch in batches]
    return max(float(np.abs(difference).max()) for difference in differences)


def comparison_images(model: TrainedModel) -> tuple[Tensor, str]:
    """Returns (float images in [0, 1], a text that says which they are) of the run's unseen domain.

    They are of the first domain where none is unseen, and random images when the run's data are not on this machine.
    """
    experiment = model.experiment
    domain = experiment.run.target
    if domain == NO_TARGET:
        domain = model.plan.data.domains[0]
    try:
        refuse_other_data(model.plan)
        images, _, indices = load_target(experiment.data, domain)
    except UserError:
        generator = torch.Generator().manual_seed(0)
        noise = torch.rand((IMAGES, *model.shape), generator=generator)
        return noise, f"random {model.plan.data.unit} (the run's data set is not on this machine)"
    count = min(IMAGES, len(indices))
    places = np.linspace(0, len(indices) - 1, count).astype(int)
    chosen = np.ascontiguousarray(images[indices[places]])
    real = torch.from_numpy(chosen)
    if model.plan.data.images:
        real = to_float(real)
    return real, f"{count} {model.plan.data.unit} of {domain}"


class WithDoubt(nn.Module):
    """A model that returns logits, calibrated probabilities and, for every class, whether it is in the set."""

    def __init__(self, model: TrainedModel, doubt: Doubt) -> None:
        super().__init__()
        self.model = model
        self.doubt = doubt

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns (logits, probabilities, set), each [N, classes]; the set is bool."""
        logits = self.model(images)
        probabilities = (logits.float() / self.doubt.temperature).softmax(1)
        is_in_set = 1 - probabilities <= self.doubt.threshold + ROUNDING
        return logits, probabilities, is_in_set


def start_autograd() -> None:
    """Lets PyTorch start what computes gradients, which it does once in a process.

    After a trace it would take the trace's imitated device for one of this machine and start threads for it. No process
    that is forked from this one could then train.
    """
    with torch.enable_grad():
        torch.ones(1, requires_grad=True).sum().backward()


def _program(model: TrainedModel, images: Tensor) -> torch.export.ExportedProgram:
    """The program of torch.export for a model and a number of images; UserError when the model cannot be traced."""
    start_autograd()
    module = WithDoubt(model, model.doubt) if model.doubt else model
    module.eval()
    try:
        with torch.no_grad():
            batch = torch.export.Dim("N", min=1)
            return torch.export.export(module, (images,), dynamic_shapes=({0: batch},), strict=False)
    except Exception as error:  # tracing may raise any class of error
        raise UserError(f"this model cannot be traced: {first_line(error, 160)}") from None


def _write_torch(model: TrainedModel, images: Tensor, file: Path) -> Runner:
    """Writes a program of torch.export; returns a function that runs the file."""
    torch.export.save(_program(model, images), file)
    module = torch.export.load(file).module()

    def run(batch: np.ndarray) -> np.ndarray:
        outputs = module(torch.from_numpy(batch))
        logits = outputs[0] if model.doubt else outputs
        return logits.detach().numpy()

    return run


def _write_onnx(model: TrainedModel, images: Tensor, file: Path) -> Runner:
    """Writes an ONNX file with the facts of the model in its metadata; returns a function that runs the file.

    Raises UserError where a package is missing.
    """
    for package in ("onnx", "onnxscript", "onnxruntime"):
        if importlib.util.find_spec(package) is None:
            raise UserError(f"--format onnx needs the package {package}; {extra('export')}")
    import onnx
    import onnxruntime

    outputs = ["logits"]
    if model.doubt:
        outputs += ["probabilities", "set"]
    program = torch.onnx.export(
        _program(model, images),
        input_names=["images"],
        output_names=outputs,
        dynamo=True,
        verbose=False,
    )
    assert program is not None  # it is made by torch's new exporter
    proto = program.model_proto
    for key, value in describe(model).items():
        entry = proto.metadata_props.add()
        entry.key = f"fedsim.{key}"
        entry.value = value if isinstance(value, str) else json.dumps(value)
    onnx.checker.check_model(proto)
    onnx.save(proto, file)
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return lambda batch: session.run(None, {name: batch})[0]


WRITERS: dict[str, Callable[[TrainedModel, Tensor, Path], Runner]] = {
    "onnx": _write_onnx,
    "torch": _write_torch,
}


@contextmanager
def _quiet() -> Iterator[None]:
    """Hides the output and the warnings of exporters."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
