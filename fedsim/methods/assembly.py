"""From `[method]` settings to a checked recipe and its network."""

import functools
from collections.abc import Mapping

import torch
from torch import nn

from fedsim.common.errors import PresetConflictError, UserError
from fedsim.common.seeding import stream_seed
from fedsim.common.tasks import fits
from fedsim.common.values import Json, JsonTable
from fedsim.data import Benchmark, benchmark, client_names, find_dataset
from fedsim.data.scaling import scale_rule, scales_targets
from fedsim.methods.compatibility import check_recipe
from fedsim.methods.part_settings import add, complete, exchange, set_fields, validated, values_for
from fedsim.methods.recipe import SLOTS, Recipe, combine, in_order
from fedsim.methods.registry import find_row
from fedsim.models import build_model
from fedsim.models.net import Net
from fedsim.models.tasks import rules_of
from fedsim.models.texts import TextHead
from fedsim.parts.facts import Fact
from fedsim.parts.part import part_name
from fedsim.settings.experiment import Experiment
from fedsim.tensors.kinds import nonnegative_names
from strategies.fuse.private_mean import PrivateMean


def build_recipe(experiment: Experiment, recorded: bool = False) -> Recipe:
    """The recipe of `[method]`, with its overrides; UserError for unknown names and for parts that do not fit.

    `recorded`: it is the recipe of an existing run, which may combine parts and settings that are refused for a new
    one. It is built where files that only training needs, such as images, may be missing.
    """
    recipe, row = assemble(experiment.method, experiment.parts), find_dataset(experiment.data.dataset)
    task = experiment.data.task or row.task
    if not recorded:
        _check_named(experiment, recipe)
        _check_preset(experiment, recipe)
        check_recipe(recipe, experiment.method_name, row.images)
    for _, part in recipe.pairs:
        if not fits(part.tasks, task):
            of_task = f"is a data set for {row.task}" if task == row.task else f"is used for {task} (data.task)"
            raise UserError(f"{experiment.method_name}: {part_name(part)} is made for {', '.join(part.tasks)}, and "
                            f"{experiment.data.dataset} {of_task}; use a method without "
                            "it")  # fmt: skip
        validated(part, {}, f"method.{part_name(part)}")  # checks the values that the row sets too
        if not recorded:
            part.check(experiment)
    return recipe


def _check_named(experiment: Experiment, recipe: Recipe) -> None:
    """UserError when a slot that the settings name lacks a part that another one needs there."""
    asked = _asked(experiment.method)
    for slot in (slot for slot in SLOTS if slot in experiment.method):
        kinds = {type(part) for part in asked.parts_in(slot)}
        needed = [part_name(part) for part in recipe.parts_in(slot) if type(part) not in kinds]
        if needed:
            raise UserError(f"method.{slot}: a part of {experiment.method_name} needs {needed[0]} there; name it too, "
                            f"or leave method.{slot} out")  # fmt: skip


def _check_preset(experiment: Experiment, recipe: Recipe) -> None:
    """PresetConflictError when a preset, which is made for some methods, replaces a part that makes another method."""
    preset, keys = experiment.preset
    for slot in (key for key in keys if key in SLOTS):
        row = assemble({"name": experiment.method_name}, {})
        kinds = {type(part) for part in [*recipe.parts_in(slot), *Recipe().parts_in(slot)]}
        lost = [part_name(part) for part in row.parts_in(slot) if type(part) not in kinds]
        if lost:
            raise PresetConflictError(
                f"the preset {preset!r} sets method.{slot}, which takes {lost[0]} from {experiment.method_name}; use "
                f"another preset, or say with --set method.{slot}=... which one is meant"
            )


def assemble(method: Mapping[str, Json], values: Mapping[str, JsonTable]) -> Recipe:
    """The recipe of the `[method]` settings with `[parts]` values; its parts are not yet checked against each other."""
    recipe, name = in_order(complete(_asked(method))), method["name"]
    settings = {key: value for key, value in method.items() if key not in ("name", "add", *SLOTS)}
    of_parts = values_for(recipe, values)
    for key, fields in [*of_parts.items(), *settings.items()]:
        recipe = set_fields(recipe, key, fields, name)
    given = {key: {**of_parts.get(key, {}), **settings.get(key, {})} for key in recipe.named}
    return _agree(recipe, given, name)


def _asked(method: Mapping[str, Json]) -> Recipe:
    """The row with the parts that the settings name, before other parts that these need."""
    recipe = functools.reduce(combine, [(word, find_row(word)) for word in method["name"].split("+")])[1]
    for slot in sorted((key for key in method if key in SLOTS), key=lambda slot: slot != "step"):
        recipe = exchange(recipe, slot, method[slot])
    return add(recipe, method.get("add", []), method)


def _agree(recipe: Recipe, given: dict[str, dict], name: str) -> Recipe:
    """The recipe with the field values that its parts set in other parts; values that the user gave are kept."""
    for _, part in recipe.pairs:
        for key, fields in part.sets.items():
            changes = {field: value for field, value in fields.items() if field not in given.get(key, {})}
            recipe = set_fields(recipe, key, changes, name) if key in given and changes else recipe
    return recipe


def build_net(experiment: Experiment, recipe: Recipe, bench: Benchmark | None = None) -> Net:
    """The experiment's network with the recipe's normalization, from the run's seed.

    `bench`: the facts of the data set, where they are known already.
    """
    bench = bench or benchmark(experiment.data)
    net = build_model(
        experiment.model,
        len(bench.outputs),
        bench.channels,
        experiment.data.image_size,
        recipe.norm,
        experiment.run.seed,
        rules_of(bench.task, experiment.data, experiment.train),
        bench.outputs,
        bench.shape,
    )
    head = net.head
    if any(part.counts_clients for part in recipe.inserts):
        net.clients = len(client_names(experiment.data, experiment.run.target or bench.domains[-1], bench))
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(stream_seed(experiment.run.seed, "inserts"))
        for part in sorted(recipe.inserts, key=lambda insert: (insert.order, part_name(insert))):
            part.apply(net)
            head = net.head if Fact.CLASS_TEXTS in part.replaces else head
    if isinstance(net.head, TextHead):
        net.head.texts = None  # and with it the text encoder, which inserts alone need
    _check_trained(experiment, net, head)
    reading = [part_name(part) for part in recipe.client_parts() if part.needs_levels]
    if reading and not net.levels:
        raise UserError(
            f"{reading[0]} aligns convolutional feature maps, and {experiment.model.backbone} "
            "has none; use a ResNet, DenseNet, AlexNet or the digits CNN"
        )
    _check_privacy(experiment, recipe, net)
    return net


def _check_trained(experiment: Experiment, net: Net, head: nn.Module) -> None:
    """Raise UserError when an insert has replaced the head of texts by another, or when no tensor is trained."""
    if experiment.model.head == "text" and net.head is not head:
        raise UserError(f"{experiment.method_name} makes a head of its own; it does not fit model.head = 'text'")
    if all(name in net.frozen for name, _ in net.named_parameters()):
        raise UserError(f"model.train = {experiment.model.train!r} trains nothing, because the texts are fixed; use "
                        "all, norm, a pattern, or a method that adds layers or texts (fedclip, promptfl)")  # fmt: skip


def _check_privacy(experiment: Experiment, recipe: Recipe, net: nn.Module) -> None:
    """Raise UserError when noise, on the server or on the clients, does not go with the network or the recipe."""
    if isinstance(recipe.fuse, PrivateMean):
        _refuse_norms(experiment, net)
    if experiment.train.dp_clip:
        check_local_privacy(experiment, recipe, net, "train.dp_clip")


def check_local_privacy(experiment: Experiment, recipe: Recipe, net: nn.Module, setting: str) -> None:
    """Raise UserError when noise would make tensors invalid, or when a client sends more than its perturbed model."""
    if recipe.fuse.masked:
        fuse = part_name(recipe.fuse)
        raise UserError(f"{setting} perturbs the model that leaves a client, which {fuse} masks; use one")
    if recipe.compress:
        raise UserError(f"{setting} perturbs the model that leaves a client, which {part_name(recipe.compress)} would "
                        "compress before the noise; use one of the two")  # fmt: skip
    beside = [*(bank for bank in recipe.banks if bank.contributed and bank.shared), *recipe.visits]
    if beside:
        raise UserError(
            f"{setting} perturbs only the model, and what {part_name(beside[0])} asks for would leave the client "
            "without noise; use a method without banks and visits"
        )
    if experiment.run.doubt:
        raise UserError(f"{setting} perturbs only the model, and the sums of run.doubt would leave the client without "
                        "noise; leave it at 0")  # fmt: skip
    bench = benchmark(experiment.data)
    if scales_targets(experiment.data, bench):
        raise UserError(f"{setting} perturbs only the model, and the sums of the targets by which a regression is "
                        "standardized would leave the client without noise; use data.scale = 'none'")  # fmt: skip
    if scale_rule(experiment.data, bench) == "federated":
        raise UserError(f"{setting} perturbs only the model, and the sums of data.scale = 'federated' would leave the "
                        "client without noise; use data.scale = 'site' or 'none'")  # fmt: skip
    _refuse_norms(experiment, net)


def _refuse_norms(experiment: Experiment, net: nn.Module) -> None:
    names = nonnegative_names(net)
    if not names:
        return
    advice = "use a backbone without batch norm (digits-cnn, alexnet, vit-b-16)"
    where = experiment.model.backbone
    if not any(name.startswith("backbone.") for name in names):
        where = f"{names[0].rpartition('.')[0]}, a layer of {experiment.method_name},"
        advice = "use another method"
    raise UserError(
        "differential privacy perturbs every tensor, which makes the batch-norm statistics of "
        f"{where} useless; {advice}"
    )


def find_recipe(name: str) -> Recipe:
    """Recipe of a row or a combination `a+b`, with the papers' values.

    >>> recipe = find_recipe("gperxan+feddg-ga")
    >>> type(recipe.norm).__name__, type(recipe.weights).__name__
    ('XAN', 'GeneralizationAdjustment')
    """
    return build_recipe(Experiment(method={"name": name}))
