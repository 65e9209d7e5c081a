"""Which methods run with a client that fedsim has not made: those whose client trains as FedAvg's does."""

from fedsim.methods.recipe import Recipe
from fedsim.methods.table import METHODS
from fedsim.parts.facts import Fact
from fedsim.parts.part import Part, part_name
from strategies.wire.own_apps import names_for

# Slots in which a part of its own would have to act on the client.
ON_CLIENTS = (
    "share", "compress", "objective", "update", "companions", "step", "terms", "batches", "augment", "unlabelled",
    "norm", "inserts", "infer", "visits",
)  # fmt: skip


def of_no_app(recipe: Recipe) -> str:
    """Why no app can run a recipe, in words; empty where one can."""
    if recipe.pooled:
        return "all data are pooled on one client"
    for part in recipe.inserts:
        if Fact.CLASS_TEXTS in part.replaces:
            return f"{part_name(part)} learns texts of classes, which need a CLIP model"
    return ""


def of_our_client(recipe: Recipe) -> str:
    """The part for which a recipe needs fedsim's own client, in words; empty where any client will do."""
    standard = Recipe()
    for slot in ON_CLIENTS:
        parts = [part for part in recipe.parts_in(slot) if part not in standard.parts_in(slot)]
        if parts:
            return f"{part_name(parts[0])} acts on the client"
    if recipe.fuse.masked:
        return f"{part_name(recipe.fuse)} masks what a client sends"
    for bank in recipe.banks:
        if bank.contributed and bank.when != "round":
            return f"{part_name(bank)} asks the client in a message of its own"
    return ""


def needs_of(recipe: Recipe) -> set[str]:
    """The metrics that the parts of a recipe need of every reply."""
    return {name for part in recipe.of(Part) for name in part.needs}


def banks_of(recipe: Recipe) -> list[str]:
    """The names of the banks to which every reply to a train message contributes."""
    return [bank.name for bank in recipe.banks if bank.contributed and bank.shared and bank.when == "round"]


def requirements() -> list[tuple[str, str, str]]:
    """(row, what its clients must be, what their replies must have) for every row, with any client first.

    The second is `any client`, `fedsim's client` or `none`, where no app can do it.
    """
    rows = []
    for name, recipe in METHODS.items():
        no_app = of_no_app(recipe)
        reason = of_our_client(recipe)
        if no_app:
            rows.append((name, "none", no_app))
        elif reason:
            rows.append((name, "fedsim's client", reason))
        else:
            rows.append((name, "any client", "; ".join([*names_for(needs_of(recipe)), *banks_of(recipe)])))
    return sorted(rows, key=lambda row: ("any client", "fedsim's client", "none").index(row[1]))
