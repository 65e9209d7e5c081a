"""Settings of a new run that exclude each other."""

from collections.abc import Iterator

from fedsim.common.errors import UserError
from fedsim.data import Benchmark
from fedsim.data.augment import check_joint, find_augmentation
from fedsim.settings.experiment import Experiment


def refuse_excluded(experiment: Experiment, found: Benchmark) -> None:
    """UserError for settings that exclude each other, and for an augmentation that the data set cannot have."""
    find_augmentation(experiment.data.augment)
    if found.structures:
        check_joint(experiment.data.augment)
    for reason in _excluded(experiment):
        raise UserError(reason)


def _excluded(experiment: Experiment) -> Iterator[str]:
    data, train, runtime = experiment.data, experiment.train, experiment.run.runtime
    if data.fraction < 1 and data.test_split == "list":
        yield "data.fraction takes no share of the images that data.test_split = 'list' tests; leave it at 1"
    if data.mix and runtime == "deployment":
        yield "data.mix gives images of all domains to all clients, but a deployed site has only its own; set it to 0"
    if train.side_by_side > 1 and runtime != "inline":
        yield "train.side_by_side is for run.runtime = 'inline', where one process has all clients; set it to 1"
    if train.side_by_side > 1 and train.compile != "off":
        yield (
            "train.compile compiles the pass of one client and not that of train.side_by_side; set one of them to its "
            "default"
        )
