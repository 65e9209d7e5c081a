"""The selection rule `worst`: the round whose validation is best on the source domain where it is worst.

It is computed from clients.csv and rounds.csv of finished runs, which keep no model of that round.
"""

import math
from dataclasses import replace

import pandas as pd

from fedsim.common.errors import UserError
from fedsim.common.tasks import CLASSIFICATION, task_of
from fedsim.records.reading import Runs, run_environment
from fedsim.records.selection import WORST_SOURCE, select, upwards
from fedsim.settings.experiment import Experiment


def worst_validations(clients: pd.DataFrame, column: str) -> pd.Series:
    """The validation of each round on the source domain where it is worst, by round; `column` is one of clients.csv.

        worst_t = min over domains d of  sum_{k in d} n_k v_tk / sum_{k in d} n_k

    v_tk is the validation of client k after round t, and n_k the number of its validation examples. Where less is
    better, as of a loss, it is the maximum. NaN in rounds where a domain has none, because that domain could be the
    worst one.

    >>> rows = {"round": [1, 1, 2, 2], "domain": ["a", "b"] * 2, "validation_examples": 10}
    >>> clients = pd.DataFrame({**rows, "validation_accuracy": [0.9, 0.2, 0.6, 0.5]})
    >>> worst_validations(clients, "validation_accuracy").to_dict()
    {1: 0.2, 2: 0.5}
    """
    rows = clients.dropna(subset=[column, "validation_examples"])
    rows = rows.assign(total=rows[column] * rows["validation_examples"])
    sums = rows.groupby(["round", "domain"])[["total", "validation_examples"]].sum()
    by_domain = (sums["total"] / sums["validation_examples"]).unstack()
    domains = clients["domain"].unique()
    by_domain = by_domain.reindex(columns=domains)
    better = upwards(by_domain, column).min(axis=1, skipna=False)
    return upwards(better, column)


def validation_of_clients(experiment: Experiment, metric: str = CLASSIFICATION.metric) -> str:
    """The column of clients.csv by which `run.select_on` and `run.select_by` select; metric: the primary one."""
    run = experiment.run
    start = "local_validation_" if run.select_on == "local" else "validation_"
    return start + (metric if run.select_by == "primary" else run.select_by)


def with_worst_source(runs: Runs) -> Runs:
    """The runs with the columns `worst_round` and `worst_target_METRIC` in their summary.

    A run without a round whose worst source is known gets NaN there. So does one whose clients validate on several
    domains together, and one with a source that no round validated, and its `notes` say why.

    Raises UserError where rounds and clients were not read.
    """
    summary = runs.summary
    if summary.empty:
        return runs
    if runs.rounds.empty or runs.clients.empty:
        raise UserError(f"{runs.source}: the rule {WORST_SOURCE!r} needs rounds.csv and clients.csv of the runs")
    metric = task_of(summary, "best_validation_target_").metric
    rounds_of = dict(iter(runs.rounds.groupby("run")))
    clients_of = _clients_of_sources(runs)
    numbers = []
    values = []
    notes = dict(runs.notes)
    for run, is_pooled in zip(summary["run"], summary["pooled"]):
        clients = clients_of.get(run)
        column = validation_of_clients(runs.experiments[run], metric)
        reason = "pooled data" if is_pooled else _reason_of_joined(runs, run)
        if reason:
            clients = None
            _add_note(notes, run, "joined", reason)
        elif missing := _never_validated(clients, column):
            _add_note(notes, run, "unvalidated", missing)
        number, value = _selected(rounds_of.get(run), clients, column, metric)
        numbers.append(number)
        values.append(value)
    columns = {f"{WORST_SOURCE}_round": numbers, f"{WORST_SOURCE}_target_{metric}": values}
    return replace(runs, summary=summary.assign(**columns), notes=notes)


def _reason_of_joined(runs: Runs, run: str) -> str:
    """The setting by which clients of a run have examples of several domains; empty where each has one domain."""
    experiment = runs.experiments[run]
    data = experiment.data
    if data.mix:
        return f"data.mix = {data.mix:g}"
    if not data.clients or isinstance(data.clients, dict):
        return ""
    recorded = run_environment(runs, run)
    sources = set(recorded.get("domains", ()))
    sources.discard(experiment.run.target)
    sources.discard(experiment.run.validation_domain)
    if data.clients < len(sources):
        return f"data.clients = {data.clients}"
    return ""


def _clients_of_sources(runs: Runs) -> dict[str, pd.DataFrame]:
    """The rows of clients.csv of each run, without that of an unseen domain which is on a site of its own."""
    summary = runs.summary
    targets = dict(zip(summary["run"], summary["target"]))
    clients_of = {}
    for run, clients in runs.clients.groupby("run"):
        name = str(run)
        is_source = clients["domain"] != targets.get(name)
        clients_of[name] = clients[is_source]
    return clients_of


def _add_note(
    notes: dict[str, dict[str, str]],
    run: str,
    kind: str,
    text: str,
) -> None:
    """Add a note of a kind to those of a run."""
    texts = dict(notes.get(run, {}))
    texts[kind] = text
    notes[run] = texts


def _never_validated(clients: pd.DataFrame | None, column: str) -> str:
    """The source domains of a run that no round validated; empty where there is none, or no validation at all."""
    if clients is None or column not in clients:
        return ""
    counts = clients["validation_examples"]
    has_value = clients[column].notna()
    is_validated = has_value & (counts > 0)
    validated = set(clients["domain"][is_validated])
    if not validated:
        return ""
    domains = set(clients["domain"])
    missing = domains - validated
    names = sorted(missing)
    return ", ".join(names)


def _selected(
    rounds: pd.DataFrame | None, clients: pd.DataFrame | None, column: str, metric: str
) -> tuple[float, float]:
    """The selected round and its metric on the target; NaN for a run where none can be selected."""
    if rounds is None or clients is None or column not in clients:
        return math.nan, math.nan
    worst = worst_validations(clients, column)
    name = f"worst_{column}"
    try:
        chosen = select(rounds.assign(**{name: rounds["round"].map(worst)}), column=name)
    except UserError:  # NaN in every round
        return math.nan, math.nan
    return float(chosen["round"]), float(chosen[f"target_{metric}"])
