"""The attackers of a simulation: what refuses them, and the labels of those that attack their own data."""

from dataclasses import replace

from fedsim.common.errors import UserError, nearest
from fedsim.common.tasks import TASKS
from fedsim.data import Benchmark, ClientData, domain_of
from fedsim.methods.recipe import Recipe
from fedsim.parts.part import part_name
from fedsim.settings.attackers import OF_LABELS, Attack, attack_on, liars_text, parse_attack
from fedsim.settings.experiment import Experiment


def refuse_attackers(experiment: Experiment, recipe: Recipe, bench: Benchmark, clients: tuple[str, ...]) -> None:
    """Raises UserError for attackers that this run cannot have."""
    run = experiment.run
    if not run.attackers:
        return
    names = {*clients, *map(domain_of, clients)}
    if run.runtime == "deployment":
        raise UserError("run.attackers is a setting of simulations; nobody makes a real site lie")
    for client, text in run.attackers.items():
        if client not in names:
            raise UserError(
                f"run.attackers names {client!r}, which does not train here; {nearest(client, names)}"
                f"clients: {', '.join(clients)}"
            )
        attack = parse_attack(text)
        if attack.name in OF_LABELS:
            if not TASKS[bench.task].has_classes:
                raise UserError(f"run.attackers: {attack.name} changes classes, and the task here is {bench.task}")
        elif recipe.fuse.masked:
            fuse = part_name(recipe.fuse)
            raise UserError(
                f"run.attackers: {attack.name} changes an update, and {fuse} has masked it already; attack the labels "
                f"({', '.join(OF_LABELS)})"
            )
        copied = attack.client
        if copied and (copied not in clients or attack_on(run.attackers, copied)):
            raise UserError(f"run.attackers: {text} copies {copied!r}, which is no honest client")
    if all(attack_on(run.attackers, client) for client in clients):
        raise UserError("run.attackers: every client lies; leave one honest")


def liar_notes(experiment: Experiment) -> list[str]:
    """Returns a line on the clients that lie in a run; none where all are honest."""
    liars = liars_text([experiment.run.attackers])
    if not liars:
        return []
    return [f"a run {liars}: it shows what a method makes of them, and is no result of the method"]


def attacked(data: ClientData, experiment: Experiment) -> ClientData:
    """Returns the data of a client; a `label_flip` attacker's training labels are turned round (y -> M - 1 - y)."""
    attack = data_attack(experiment, data.client)
    if attack is None or attack.name != "label_flip":
        return data
    labels = data.labels.copy()
    labels[data.train] = len(data.classes) - 1 - labels[data.train]
    return replace(data, labels=labels)


def shifted_share(experiment: Experiment, client: str) -> float:
    """Returns l of a `label_shift` attacker; 0 for all others."""
    attack = data_attack(experiment, client)
    if attack is None or attack.name != "label_shift":
        return 0.0
    return attack.number or 0.0


def data_attack(experiment: Experiment, client: str) -> Attack | None:
    """Returns the attack of a client on its labels, in a simulation; None without."""
    run = experiment.run
    if run.runtime == "deployment" or not run.attackers:
        return None
    attack = attack_on(run.attackers, client)
    if attack is None or attack.name not in OF_LABELS:
        return None
    return attack
