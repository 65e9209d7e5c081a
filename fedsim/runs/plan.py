"""The resolved settings of a run, made once per process and passed on.

They are its experiment, recipe, data set, clients and folder.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch

from fedsim.common.cores import free_cores
from fedsim.common.errors import UserError, nearest
from fedsim.common.tasks import OF_CLASSES, REGRESSION, TASKS
from fedsim.data import Benchmark, benchmark, client_names, domain_of, resolve_domain, resolve_target
from fedsim.data.augment import check_joint, find_augmentation
from fedsim.methods.assembly import assemble, build_net, build_recipe
from fedsim.methods.recipe import Recipe
from fedsim.methods.variants import method_label, variant_words
from fedsim.models import find_backbone
from fedsim.models.net import Net
from fedsim.parts.part import part_name
from fedsim.runs.attacked_data import refuse_attackers
from fedsim.runs.doubt import refuse_doubt
from fedsim.runs.no_effect import refuse_no_effect
from fedsim.runs.privacy_account import refuse_budget
from fedsim.settings import TrainSettings
from fedsim.settings.experiment import Experiment
from fedsim.settings.run import NO_TARGET

ADAPT_SHARE = 0.5  # of the unseen domain's images, for methods that train on them without labels
POOLED = "pooled"  # the only client of a recipe that pools all source data


@dataclass(frozen=True)
class Plan:
    """One resolved run. `resolve` makes it; every function that needs a part of it takes the plan as an argument.

    experiment: the settings with their target filled in
    recipe: the parts of the method, checked against the settings
    data: the facts of the data set
    clients: the names of the clients that train, in the order of the domains
    """

    experiment: Experiment
    recipe: Recipe
    data: Benchmark
    clients: tuple[str, ...]

    @cached_property
    def changes(self) -> str:
        """What the recipe changes in its row, as the run's folder and its label have it; empty for the row itself."""
        return variant_words(self.experiment, self.recipe)

    @cached_property
    def row(self) -> Recipe:
        """The recipe of the method's row, without the settings of this run."""
        return assemble({"name": self.experiment.method_name}, {})

    @cached_property
    def folder(self) -> Path:
        """Folder of the run's records."""
        method = self.experiment.method_name
        if self.changes:
            method += f"@{self.changes}"
        return folder_of(self.experiment, method)

    @property
    def sources(self) -> int:
        """The number of clients that hold source data; for a pooled run, the clients that were pooled."""
        if not self.recipe.pooled:
            return len(self.clients)
        return len(client_names(self.experiment.data, self.experiment.run.target, self.data))

    def build_net(self) -> Net:
        """Returns a new network of this run with its initial weights, which the run's seed determines."""
        return build_net(self.experiment, self.recipe, self.data)

    def refuse_misfits(self) -> None:
        """Raises the UserError of `build_net` for parts that the network cannot have; weights are not read or made."""
        bare = replace(self, experiment=self.experiment.replace(model={"weights": "none"}))
        try:
            with torch.device("meta"):  # tensors with a shape and without numbers
                bare.build_net()
        except UserError:
            bare.build_net()  # the backbone's library may only have missed the numbers
        except Exception:  # a backbone that cannot be built without numbers: its run says whether the parts fit
            return


def resolve(experiment: Experiment, recorded: bool = False, bench: Benchmark | None = None) -> Plan:
    """Returns the plan of an experiment.

    Raises UserError for an unknown target, data set or method, and for parts that do not fit.

    `recorded`: the experiment is that of an existing run, which is only read. Such a run may have settings that are
    refused for a new one. `bench`: the facts of its data set, which are then not read from disk.
    """
    bench = bench or benchmark(experiment.data)
    if not recorded:  # records may name an augmentation of a package that is not installed here
        refuse_no_effect(experiment, bench)
        find_augmentation(experiment.data.augment)
        if TASKS[bench.task].maps:
            check_joint(experiment.data.augment)
        reason = next(_excluded(experiment), "")
        if reason:
            raise UserError(reason)
        refuse_unknown_domains(experiment, bench)
    experiment = _with_size(experiment)
    experiment = _with_target(experiment, bench, recorded)
    experiment = _with_threads(experiment)
    recipe = build_recipe(experiment, recorded)
    if not recorded:
        check_loss(experiment.train, recipe, bench)
        if experiment.run.select_by in OF_CLASSES and not TASKS[bench.task].has_classes:
            raise UserError(f"run.select_by: {experiment.run.select_by} is a metric of classes, which the task "
                            f"{bench.task} has none of; set it to primary or loss")  # fmt: skip
    if recipe.uses_target_unlabelled:
        experiment = _with_unlabelled(experiment)
    if recipe.pooled:
        clients: tuple[str, ...] = (POOLED,)
    else:
        clients = tuple(client_names(experiment.data, experiment.run.target, bench))
    if not recorded:
        refuse_attackers(experiment, recipe, bench, clients)
        refuse_unknown(experiment.train, clients)
        refuse_budget(experiment, recipe, len(clients))
        refuse_doubt(experiment, recipe, bench)
    return Plan(experiment, recipe, bench, clients)


def _excluded(experiment: Experiment) -> Iterator[str]:
    """Yields a line for each pair of settings of a new run that exclude each other."""
    data, train, runtime = experiment.data, experiment.train, experiment.run.runtime
    has_group = bool(data.group or data.columns.get("group"))
    if data.group and data.columns.get("group"):
        yield "data.group and data.columns.group both say which images stay together; leave one of them out"
    if data.fraction < 1 and data.test_split == "list":
        yield "data.fraction takes no share of the images that data.test_split = 'list' tests; leave it at 1"
    if data.scale == "site" and (data.mix or data.clients or data.clients_per_domain > 1):
        yield (
            "data.scale = 'site' scales every domain by its own rows, which one client must hold; leave data.mix, "
            "data.clients and data.clients_per_domain at their defaults"
        )
    if data.partition == "classes" and (data.mix or data.clients or has_group):
        yield (
            "data.partition = 'classes' deals single images of a domain's own clients; leave data.mix, data.clients, "
            "data.group and data.columns.group out, or use 'dirichlet'"
        )
    if data.clients and data.clients_per_domain > 1:
        yield "data.clients and data.clients_per_domain both say how many clients there are; leave one at its default"
    if data.source_test == "list" and data.split != "lists":
        yield "data.source_test = 'list' needs data.split = 'lists', so that no image of the test lists trains"
    if data.source_test and data.is_dealt:
        yield "data.source_test takes images from a domain's own clients; leave data.mix and data.clients out"
    if data.clients and data.split == "lists":
        yield "data.split = 'lists' gives all images of a domain to one client; set data.clients to 0"
    if data.clients and runtime == "deployment":
        yield "data.clients deals images to the clients of a simulation, but a deployed site has its own; set it to 0"
    if data.mix and runtime == "deployment":
        yield "data.mix gives images of all domains to all clients, but a deployed site has only its own; set it to 0"
    if train.side_by_side > 1 and runtime != "inline":
        yield "train.side_by_side is for run.runtime = 'inline', where one process has all clients; set it to 1"
    if train.side_by_side > 1 and train.compile != "off":
        yield (
            "train.compile compiles the pass of one client and not that of train.side_by_side; set one of them to its "
            "default"
        )


def refuse_unknown_domains(experiment: Experiment, bench: Benchmark) -> None:
    """Raises UserError when the table `data.clients` names no domain of the data set."""
    clients = experiment.data.clients
    if not isinstance(clients, dict):
        return
    for name in clients:
        if name not in bench.domains:
            raise UserError(f"data.clients names {name!r}, which is no domain here; {nearest(name, bench.domains)}"
                            f"domains: {', '.join(bench.domains)}")  # fmt: skip


def refuse_unknown(train: TrainSettings, clients: Sequence[str]) -> None:
    """Raises UserError when `train.availability` names a client that does not train."""
    names = {*clients, *map(domain_of, clients), "*"}
    for name in train.availability:
        if name not in names:
            raise UserError(f"train.availability names {name!r}, which does not train here; {nearest(name, names)}"
                            f"clients: {', '.join(clients)}")  # fmt: skip


def check_loss(train: TrainSettings, recipe: Recipe, bench: Benchmark) -> None:
    """Raises UserError where a run would not train by `train.class_weights`, `train.focal` and `train.huber`."""
    weights, task = train.class_weights, TASKS[bench.task]
    if train.huber and bench.task != REGRESSION.name:
        raise UserError(f"train.huber is the loss of a regression, and the task here is {bench.task}; leave it at 0")
    if train.huber and recipe.step.own_loss:
        raise UserError(f"{part_name(recipe.step)} computes a loss of its own, without train.huber; leave it at 0")
    if not weights and not train.focal:
        return
    if not task.has_classes:
        targets = "several labels"
        if task.maps:
            targets = "masks"
        elif bench.task == REGRESSION.name:
            targets = f"targets of a {bench.task}"
        raise UserError(f"train.class_weights and train.focal are for classes; {bench.title} has {targets}")
    if weights and (len(weights) != len(bench.classes) or not any(weights)):
        raise UserError(f"train.class_weights needs a number for each of the {len(bench.classes)} classes of "
                        f"{bench.title}, not all of them 0: {', '.join(bench.classes)}")  # fmt: skip
    if recipe.step.own_loss:
        raise UserError(f"{part_name(recipe.step)} computes a loss of its own, without train.class_weights and "
                        "train.focal; leave both at their defaults")  # fmt: skip


def _with_unlabelled(experiment: Experiment) -> Experiment:
    """Returns the experiment with a share of the unseen domain that trains unlabelled; UserError without one."""
    if experiment.run.target == NO_TARGET:
        raise UserError(f"{experiment.method_name} trains on unlabelled images of the unseen domain, and there is none "
                        f"with run.target = {NO_TARGET!r}; name a domain")  # fmt: skip
    if experiment.data.adapt_share:
        return experiment
    return experiment.replace(data={"adapt_share": ADAPT_SHARE})


def _with_size(experiment: Experiment) -> Experiment:
    """Returns the experiment with the size of its images: that of the weights where the settings leave it open."""
    if experiment.data.image_size:
        return experiment
    model = experiment.model
    size = find_backbone(model).input_size
    if not size:
        raise UserError(f"data.image_size is 0, which takes the size of the images that the weights were trained on; "
                        f"{model.backbone} has no such weights: name a size")  # fmt: skip
    return experiment.replace(data={"image_size": size})


def _with_threads(experiment: Experiment) -> Experiment:
    """Returns the experiment with its number of threads, because numbers depend on it. Sites choose their own."""
    run = experiment.run
    if run.threads or run.runtime == "deployment":
        return experiment
    has_workers = run.runtime in ("ray", "flower")
    threads = max(int(run.cpus_per_worker), 1) if has_workers else free_cores()
    return experiment.replace(run={"threads": threads})


def complete(experiment: Experiment) -> Experiment:
    """Returns the experiment with its target filled in (the last domain by default) and checked."""
    return _with_target(experiment, benchmark(experiment.data))


def _with_target(experiment: Experiment, bench: Benchmark, recorded: bool = False) -> Experiment:
    """Returns the experiment with its unseen domain and its validation domain as the data set spells them."""
    domains = bench.domains
    target = resolve_target(bench, experiment.run.target) if experiment.run.target else domains[-1]
    if len(domains) < 2:
        raise UserError(f"{experiment.data.dataset} has one domain only ({domains[0]}); leave-one-domain-out needs two")
    changes = {"target": target}
    if experiment.run.validation_domain:
        changes["validation_domain"] = _validation_domain(experiment, bench, target, recorded)
    present = {key: getattr(experiment.run, key) for key in changes}
    return experiment if present == changes else experiment.replace(run=changes)


def _validation_domain(experiment: Experiment, bench: Benchmark, target: str, recorded: bool) -> str:
    """Returns the domain that selects the round, as the data set spells it; raises UserError for one that cannot."""
    domain = resolve_domain(bench, experiment.run.validation_domain)
    if domain == target:
        raise UserError(f"run.validation_domain: {domain!r} is the unseen domain, which may select nothing")
    if (bench.same_images or bench.test_apart) and not recorded:
        raise UserError(f"run.validation_domain: the domains of {bench.title} show the same images, so that {domain!r} "
                        "would select on images that are tested or trained on elsewhere; leave it out")  # fmt: skip
    if experiment.run.select_by in OF_CLASSES:
        raise UserError("run.validation_domain selects by the primary metric or the loss; set run.select_by to one of "
                        "them")  # fmt: skip
    if experiment.run.select_on != "aggregated":
        raise UserError("run.validation_domain selects by the aggregated model; leave run.select_on at 'aggregated'")
    return domain


def results_folder(experiment: Experiment) -> Path:
    """Returns the folder of all runs of an experiment."""
    return Path(experiment.run.output) / experiment.name


def run_folder(experiment: Experiment) -> Path:
    """Returns the folder of an experiment's records; raises UserError for a method that does not resolve."""
    return folder_of(experiment, method_label(experiment))


def folder_of(experiment: Experiment, method: str) -> Path:
    """Returns outputs/<experiment>/<method>[@what the recipe changes in its row, and the label]/<target>/seed<k>."""
    run = experiment.run
    name, _, changes = method.partition("@")
    name = name.replace(":", ".")  # of mymethods:moon; not every file system takes a colon
    suffix = ",".join(filter(None, (changes, run.label)))
    if suffix:
        name += f"@{suffix}"
    return results_folder(experiment) / name / run.target / f"seed{run.seed}"
