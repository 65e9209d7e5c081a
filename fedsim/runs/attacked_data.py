"""The attackers of a simulation: what refuses them, and the labels of those that attack their own data."""

from dataclasses import replace

from fedsim.common.errors import UserError, nearest
from fedsim.common.tasks import TASKS
from fedsim.data import Benchmark, ClientData, domain_of
from fedsim.methods.recipe import Recipe
from fedsim.settings.attackers import OF_LABELS, Attack, attack_on, liars_text, parse_attack
from fedsim.settings.experiment import Experiment


def refuse_attackers(experiment: Experiment, recipe: Recipe, bench: Benchmark, clients: tuple[str, ...]) -> None:
    """Raises UserError for attackers that this run cannot have."""
    run, names = experiment.run, {*clients, *map(domain_of, clients)}
    if not run.attackers:
        return
    if run.runtime == "deployment":
        raise UserError("run.attackers is a setting of simulations; nobody makes a real site lie")
    for client, text in run.attackers.items():
        if client not in names:
            raise UserError(
                f"run.attackers names {client!r}, which does not train here; {nearest(client, names)}"
                f"clients: {', '.join(clients)}"
            )
        attack = parse_attack(text)
        if attack.name in OF_LABELS and not TASKS[bench.task].has_classes:
            raise UserError(f"run.attackers: {attack.name} changes classes, and the task here is {bench.task}")
        if attack.name not in OF_LABELS and recipe.fuse.masked:
            raise UserError(
                f"run.attackers: {attack.name} changes an update, and secure_mean has masked it already; attack the "
                f"labels ({', '.join(OF_LABELS)})"
            )
        if attack.client and (attack.client not in clients or attack_on(run.attackers, attack.client)):
            raise UserError(f"run.attackers: {text} copies {attack.client!r}, which is no honest client")
    if all(attack_on(run.attackers, client) for client in clients):
        raise UserError("run.attackers: every client lies; leave one honest")


def liar_notes(experiment: Experiment) -> list[str]:
    """A line on the clients that lie in a run; none where all are honest."""
    liars = liars_text([experiment.run.attackers])
    return [f"a run {liars}: it shows what a method makes of them, and is no result of the method"] if liars else []


def attacked(data: ClientData, experiment: Experiment) -> ClientData:
    """The data of a client, its training labels turned round (y -> M - 1 - y) where it is a `label_flip` attacker."""
    attack = data_attack(experiment, data.client)
    if attack is None or attack.name != "label_flip":
        return data
    labels = data.labels.copy()
    labels[data.train] = len(data.classes) - 1 - labels[data.train]
    return replace(data, labels=labels)


def shifted_share(experiment: Experiment, client: str) -> float:
    """l of a `label_shift` attacker; 0 for all others."""
    attack = data_attack(experiment, client)
    return (attack.number or 0.0) if attack and attack.name == "label_shift" else 0.0


def data_attack(experiment: Experiment, client: str) -> Attack | None:
    """The attack of a client on its labels, in a simulation; None without."""
    run = experiment.run
    if run.runtime == "deployment" or not run.attackers:
        return None
    attack = attack_on(run.attackers, client)
    return attack if attack and attack.name in OF_LABELS else None
