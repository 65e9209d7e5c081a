"""The notes below a comparison: what is missing, how numbers are computed, and what must not be compared."""

from collections.abc import Iterable, Mapping, Sequence

import pandas as pd

from fedsim.analysis.comparison import MARKS, POOLED, WORST, Comparison, p_text
from fedsim.common.lists import times
from fedsim.common.tasks import BINARY, WITH_CLASSES
from fedsim.records.reading import Runs, run_environment
from fedsim.records.selection import BUDGET_TOLERANCE, comparable

PAPER_NOTES = {  # what a paper's ± is, and what its protocol
    "gPerXAN": "gPerXAN: mean of 3 runs, no spread printed",
    "CSAC": "CSAC: ± is the standard error of 5 runs; its released code picks the best round on the target, "
    "take its own row as an upper estimate",
    "FedIG-A": "FedIG-A: ± is the standard deviation of 4 runs",
}
FEWEST_PAIRS = 6
FEW_OTHERS = 10  # examples besides the most frequent class, below which a note says what an AUROC rests on
FEW_TESTED = 500  # examples of a target, below which a note says what one of them weighs
LEVEL = 0.05  # of p, below which a difference counts as shown
NAMED_RUNS = 3
EDGE_SHARE = 0.25  # of the runs, from which on a note says that their selected round is one of the first or the last
FIRST_ROUNDS = 2
LEAST_ROUNDS = 2 * FIRST_ROUNDS + 1  # of a run, below which its first and last rounds are no exception
SELECTION_TEXTS = {
    "best_validation": "Each run counts at the round with the best validation of the clients that trained, "
    "not at its last round.",
    "last": "Each run counts at its last round.",
}
MOST_RATIO = 1 + BUDGET_TOLERANCE  # of two budgets that are alike
# Of the kinds of `Runs.notes`.
ROUND_TEXTS = {
    "failed": "Clients failed, and rounds rest on the others, in {runs}.",
    "unmade": "No client's reply was accepted in rounds of {runs}: they left the model as it was, and are not "
    "selected.",
    "thin": "The selected round was validated by fewer clients than other rounds in {runs}.",
    "joined": "The worst source domain is unknown, because clients validate on several together, in {runs}.",
    "unvalidated": "The worst source domain is unknown, because no round validated one of them, in {runs}.",
}
GROUP_TEXTS = {
    POOLED: "not federated: one client holds all data, and sends nothing",
    "transductive": "transductive: uses unlabelled examples of the unseen domain at test time",
    "uses_target_unlabelled": "uses unlabelled examples of the unseen domain during training",
}


def comparison_notes(comparison: Comparison, published_reasons: Iterable[str], unfinished: list[str]) -> list[str]:
    """The notes on the numbers of a comparison, on the papers' rows and on unfinished runs."""
    table = comparison.table
    return [
        *measure_notes(comparison),
        *undefined_notes(comparison),
        *worst_notes(comparison),
        *missing_notes(table, comparison.defined),
        *split_notes(table),
        *rank_notes(comparison),
        *budget_notes(table, comparison.methods["label"], comparison.baseline, comparison.unit),
        *cost_notes(table),
        *test_size_notes(table, comparison.unit),
        *group_notes(comparison.methods),
        *paper_notes(comparison.published),
        *published_reasons,
        *unfinished_notes(unfinished),
    ]


def verdict_notes(comparison: Comparison, column_title: str = "unseen domain") -> list[str]:
    """Return one note that says which methods are shown to differ from the baseline; none without a baseline.

    It judges by p after the correction, where the comparison has one. Where the pairs are of few unseen domains it says
    so, and calls no difference shown, because seeds repeat the same domains. column_title: what a column is.
    """
    methods, base = comparison.methods, comparison.baseline
    others = methods[methods["label"] != base]
    if not base or others.empty:
        return []
    column, name = "p_holm", "p Holm"
    if "p_holm" not in others:
        column, name = "p_value", "p without a correction"
    tested = others.dropna(subset=column)
    if tested.empty:
        return [f"No method is shown to differ from {base}: there is no pair of runs to test."]
    differing = []
    for row in tested[tested[column] < LEVEL].to_dict("records"):
        is_greater = row["difference"] > 0
        direction = "worse" if is_greater == comparison.measure.less_is_better else "better"
        label = row["label"]
        p_value = p_text(row[column])
        differing.append(f"{label} ({direction}, {name} {p_value})")
    ground = _ground(comparison.table, base, list(tested["label"]), column_title)
    methods_and_p = ", ".join(differing)
    least = p_text(tested[column].min())
    verdict = f"Shown to differ from {base}: {methods_and_p}."
    if not differing:
        verdict = f"No method is shown to differ from {base}: the least {name} is {least}."
    elif ground:
        verdict = f"These differ over these pairs from {base}: {methods_and_p}."
    return [f"{verdict}{ground}"]


def _ground(table: pd.DataFrame, base: str, labels: list[str], column_title: str) -> str:
    """Return a sentence, after a space, on pairs of fewer unseen domains than a p below .05 takes; else empty."""
    values = table.dropna(subset="accuracy")
    of_base = values[values["label"] == base][["target", "seed"]]
    of_others = values[values["label"].isin(labels)][["target", "seed"]]
    pairs = of_base.merge(of_others.drop_duplicates())
    count = pairs["target"].nunique()
    if not 0 < count < FEWEST_PAIRS:
        return ""
    seeds = int(pairs.groupby("target")["seed"].nunique().max())
    domains = f"{count} {column_title}s"
    alone = f"the {count} alone"
    if count == 1:
        domains = f"1 {column_title}"
        alone = "it alone"
    of_seeds = f"up to {seeds} seeds" if seeds > 1 else "1 seed"
    if count > 1 and seeds > 1:
        of_seeds += " each"
    least = p_text(2 / 2**count)  # of the two-sided exact test
    return f" The pairs are {domains} with {of_seeds}; over {alone} no p below {least} is possible."


def frequent_class_notes(table: pd.DataFrame, shares: Mapping[str, tuple[int, float]]) -> list[str]:
    """Return a note on each target where a row's mean accuracy is not above the share of the most frequent class.

    table: that of `Comparison`; shares: {target: (tested examples, that share)} of the targets where they are recorded.
    """
    notes = []
    means = table.groupby(["target", "label"], sort=False)["accuracy"].mean().dropna()
    for target, (examples, share) in shares.items():
        if target not in means:
            continue
        of_target = means[target]
        # The mean of equal numbers may differ from them in its last bit.
        is_below = comparable(of_target) <= comparable(share)
        below = list(of_target.index[is_below])
        if not below:
            continue
        labels = ", ".join(below)
        rows = f"not above it: {labels}"
        if len(below) == len(of_target):
            rows = "no row is above it"
        percentage = 100 * share
        answer = f"one answer for all of its {examples:,} tested examples is right in {percentage:.1f} %"
        notes.append(f"{target}: {answer}; {rows}.")
    if notes:
        notes.append("Such answers gain nothing by --metric balanced_accuracy and --metric auroc.")
    return [*notes, *_sampling_notes(shares)]


def rare_class_notes(shares: Mapping[str, tuple[int, float]]) -> list[str]:
    """Return a note on each target whose AUROC rests on few examples, because the others are of one class.

    shares: {target: (tested examples, share of the most frequent class)}
    """
    notes = []
    for target, (examples, share) in shares.items():
        others = round(examples * (1 - share))
        if others < FEW_OTHERS:
            notes.append(f"{target}: its AUROC rests on {others} of {examples} tested examples; the rest is one class.")
    return notes


def _sampling_notes(shares: Mapping[str, tuple[int, float]]) -> list[str]:
    """Return a note on what one tested example weighs, where a target has few of them."""
    counts = {target: examples for target, (examples, _) in shares.items()}
    if min(counts.values(), default=FEW_TESTED) >= FEW_TESTED:
        return []
    target = min(counts, key=lambda name: counts[name])
    examples = counts[target]
    one = f"one of the {examples} of {target} is {100 / examples:.1f} points"
    return [f"± does not say which examples happened to be tested: {one}."]


def measure_notes(comparison: Comparison) -> list[str]:
    """Notes on what the numbers of the cells are."""
    measured = comparison.measured
    over = "mean ± sample standard deviation over seeds" if comparison.most_seeds > 1 else "of one seed"
    unit = " in %" if comparison.measure.is_fraction else ""
    notes = [
        f"{measured[0].upper()}{measured[1:]}{unit}, {over}; "
        "averages are taken per seed first, over the seeds that have every target."
    ]
    if comparison.measure.less_is_better:
        notes.append("Less is better: the least value is the best, and a negative Δ is a gain.")
    if not comparison.is_primary:
        has_classes = comparison.measure.tasks == WITH_CLASSES
        left_out = "; classes without an example in the unseen domain are left out" if has_classes else ""
        notes.append(f"Computed from the kept predictions{left_out}.")
    if comparison.measure.tasks == (BINARY.name,):
        notes.append("The positive class is the second one in the order of classes; the start of each run names it.")
    if comparison.select == "oracle":
        notes.append("ORACLE: the round was chosen on the unseen domain's labels. An upper bound, not a result.")
    return notes


def undefined_notes(comparison: Comparison) -> list[str]:
    """Notes on the targets, and on the single runs, in which the metric has no value, with the reason."""
    measure, notes = comparison.measure, []
    because = f" ({measure.undefined})" if measure.undefined and not comparison.is_primary else ""
    if comparison.undefined:
        over = f"averages and ranks are over {len(comparison.defined)} of {len(comparison.targets)} targets"
        if not comparison.defined:
            over = "there is no average"
        named = ", ".join(comparison.undefined)
        notes.append(f"{_capitalized(measure.title)} is not defined on {named}{because}: {over}.")
    table = comparison.table
    if "undefined" in table:
        single = table[table["undefined"] & ~table["target"].isin(comparison.undefined)]
        if len(single):
            runs = _first_of(list(single["run"]))
            notes.append(f"{_capitalized(measure.title)} is not defined in {runs}{because}: averages are without them.")
    return notes


def worst_notes(comparison: Comparison) -> list[str]:
    """Return a note on what the column of the worst domain holds, or on why a table of several targets has none."""
    if WORST not in comparison.methods:
        if len(comparison.targets) < 2:
            return []
        return ["The worst target is left out: it takes two targets on which every row has a value."]
    targets = comparison.shared
    extreme = "greatest" if comparison.measure.less_is_better else "least"
    over = "the targets"
    if len(targets) < len(comparison.targets):
        over = f"{len(targets)} of {len(comparison.targets)} targets, on which every row has a value: "
        over += ", ".join(targets)
    return [f"Worst: the {extreme} mean over seeds among {over}."]


def _capitalized(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}"


def group_notes(methods: pd.DataFrame) -> list[str]:
    """Notes on the methods that are not federated, or use images of the target."""
    notes = []
    for group, text in GROUP_TEXTS.items():
        is_in_group = methods[POOLED] if group == POOLED else methods["group"] == group
        if is_in_group.any():
            place = "without a rank" if group == POOLED else "ranked apart, not with the others"
            notes.append(f"{MARKS[group]} {text}; {place}.")
    return notes


def paper_notes(published: pd.DataFrame) -> list[str]:
    """Notes on the papers' rows; published: those of `Comparison`."""
    if published.empty:
        return []
    notes = ["Published rows are from elsewhere: the papers' own protocol and seeds, not runs of this program."]
    papers = published["source"].str.split(" Table").str[0]
    for paper in papers.unique():
        if paper in PAPER_NOTES:
            notes.append(f"{PAPER_NOTES[paper]}.")
    return notes


def part_notes(only: str) -> list[str]:
    """A note that a table shows only some of the folder's runs."""
    return [f"A part of the runs: only {only}."] if only else []


def without_notes(reasons: list[str]) -> list[str]:
    """A note on the runs of which a metric could not be computed; its first reason stands for all."""
    if not reasons:
        return []
    first, *others = reasons
    more = f" and {len(others)} more" if others else ""
    return [f"Not computed: {first}{more}."]


def damaged_notes(damaged: Mapping[str, str]) -> list[str]:
    """A note on each run that cannot be read; damaged: {run: what is wrong with which of its files}."""
    notes = []
    for reason in damaged.values():
        notes.append(f"Left out, because a file of the run cannot be read: {reason}.")
    return notes


def unfinished_notes(unfinished: list[str]) -> list[str]:
    """A note on the runs that are left out because they have no summary yet."""
    if not unfinished:
        return []
    count = len(unfinished)
    few = "1 unfinished run is" if count == 1 else f"{count} unfinished runs are"
    return [f"{few} left out."]


def round_notes(runs: Runs, select: str) -> list[str]:
    """Notes on the runs that have rounds without some clients."""
    notes = []
    for kind, text in ROUND_TEXTS.items():
        if kind == "thin" and select != "best_validation":  # it is about the round that this rule selects
            continue
        named = []
        for run, texts in runs.notes.items():
            if kind in texts:
                named.append(f"{run} ({texts[kind]})")
        if named:
            notes.append(text.format(runs=_first_of(named)))
    return notes


def selection_notes(select: str) -> list[str]:
    """Return a note that says in words at which round each run counts, where the rule has one."""
    return [SELECTION_TEXTS[select]] if select in SELECTION_TEXTS else []


def edge_notes(summary: pd.DataFrame, select: str) -> list[str]:
    """Return notes where the selected round of many runs is one of the first two, or the last one that was played.

    summary: a row per run. Runs of few rounds do not count, nor does another rule than the best validation.
    """
    has_columns = {"best_validation_round", "rounds"} <= set(summary.columns)
    if select != "best_validation" or not has_columns:
        return []
    runs = summary.dropna(subset="best_validation_round")
    runs = runs[runs["rounds"] >= LEAST_ROUNDS]
    count = len(runs)
    least = max(1, EDGE_SHARE * count)
    early = int((runs["best_validation_round"] <= FIRST_ROUNDS).sum())
    late = int((runs["best_validation_round"] == runs["rounds"]).sum())
    notes = []
    if early >= least:
        notes.append(f"In {early} of {count} runs the selected round is one of the first two.")
    if late >= least:
        notes.append(f"In {late} of {count} runs the selected round is the last one: more rounds may change the order.")
    return notes


def _first_of(named: list[str]) -> str:
    """The first runs, and the number of others."""
    more = len(named) - NAMED_RUNS
    first = ", ".join(named[:NAMED_RUNS])
    if more < 1:
        return first
    runs = "run" if more == 1 else "runs"
    return f"{first} and {more} more {runs}"


def missing_notes(table: pd.DataFrame, targets: list[str], paired: bool = True) -> list[str]:
    """Notes on the targets that a method lacks in the seeds it has begun, and on seeds that only some methods have.

    paired: whether the table also has differences and ranks over the pairs that methods share.
    """
    notes = []
    lacking = []
    for label, cells in missing_cells(table, targets).items():
        named = []
        for target, seeds in cells.items():
            named.append(f"{target} ({seeds})")
        lacking.append(f"{label}: {', '.join(named)}")
    if lacking:
        notes.append(f"Missing (\N{EN DASH} marks empty cells): {'; '.join(lacking)}.")
    begun = _begun(table)
    everyone = sorted(set().union(*begun))
    for seed in everyone:
        holders = [label for label, seeds in begun.items() if seed in seeds]
        others = [label for label in begun.index if label not in holders]
        if others:
            few = f"not in {', '.join(others)}"
            if len(holders) <= len(others):
                few = f"only in {', '.join(holders)}"
            do = ", Δ and rank do" if paired else ""
            notes.append(f"Seed {seed} is {few}; averages over different seeds do not compare{do}.")
    if begun.map(len).max() == 1:
        each = "" if len(everyone) == 1 else " each"
        notes.append(f"One seed{each}: no standard deviation, differences may be noise.")
    return notes


def missing_cells(table: pd.DataFrame, targets: list[str]) -> dict[str, dict[str, str]]:
    """{label: {target: the seeds, in words}} of the cells that a method lacks in the seeds that it has begun."""
    has_value = table["accuracy"].notna()
    runs = table[has_value | table["undefined"]] if "undefined" in table else table[has_value]
    present = set(zip(runs["label"], runs["target"], runs["seed"]))
    missing: dict[str, dict[str, str]] = {}
    for label, seeds in _begun(table).items():
        for target in targets:
            lacking = [seed for seed in seeds if (label, target, seed) not in present]
            if lacking:
                by_target = missing.setdefault(str(label), {})
                by_target[target] = _seeds(lacking, all_of=seeds)
    return missing


def _begun(table: pd.DataFrame) -> pd.Series:
    """The seeds of each label, sorted."""
    seeds = table.groupby("label", sort=False)["seed"]
    return seeds.agg(lambda values: sorted(set(values)))


def _seeds(seeds: list[int], all_of: list[int]) -> str:
    if len(seeds) == len(all_of):
        return "every seed" if len(seeds) > 1 else f"seed {seeds[0]}"
    noun = "seed" if len(seeds) == 1 else "seeds"
    numbers = ", ".join(map(str, seeds))
    return f"{noun} {numbers}"


def split_notes(table: pd.DataFrame) -> list[str]:
    """A note when all seeds of a method share one data split: the deviation then does not contain the sampling."""
    runs = table.groupby("label", sort=False)
    seeds = runs["seed"].nunique()
    splits = runs["split_seed"].nunique(dropna=False)
    has_splits = runs["split_seed"].count() > 0  # recorded: not all are NaN
    is_fixed = (seeds > 1) & (splits == 1) & has_splits
    fixed = list(seeds.index[is_fixed])
    if not fixed:
        return []
    named = ", ".join(fixed)
    if len(fixed) == len(seeds):
        named = "all methods"
    return [f"Same splits for all seeds ({named}): the deviations contain no sampling of data."]


def budget_notes(table: pd.DataFrame, labels: Iterable[str], baseline: str = "", unit: str = "images") -> list[str]:
    """Notes on methods that trained on more or fewer examples, or took more or fewer steps, than the baseline.

    They are compared over the cells (target, seed) that both have, because a run's examples depend on the target.
    Without a baseline they are compared with the one that most often has the most frequent number of a cell, and of
    several such ones with the first of `labels`. Of equally frequent numbers the smallest counts.

    unit: what an example is called, in the plural
    """
    notes = []
    for column, title in {"images": unit, "steps": "steps"}.items():
        cells = table.pivot(index=["target", "seed"], columns="label", values=column)
        cells = cells[list(labels)].dropna(axis="columns", how="all")
        if cells.shape[1] < 2:
            continue
        base = baseline
        if baseline not in cells:
            most_frequent = cells.mode(axis="columns")[0]
            is_most_frequent = cells.eq(most_frequent, axis="index")
            base = is_most_frequent.sum().idxmax()
        shared = cells[cells[base].notna()]
        of_base = shared.notna().mul(shared[base], axis="index")  # in the cells that each method has
        ratios = shared.sum() / of_base.sum()
        others = []
        for label, ratio in ratios.items():
            if ratio > MOST_RATIO or ratio * MOST_RATIO < 1:
                others.append(f"{label} {times(ratio)} times")
        if others:
            budgets = f"Budgets differ: beside the {title} of {base}, {', '.join(others)}"
            notes.append(f"{budgets}; the table compares methods together with their budgets.")
    return notes


def stopping_notes(runs: Runs, table: pd.DataFrame) -> list[str]:
    """A note on the runs that `train.stop_after` ended early, whose budgets the validation has chosen.

    Another one is on the runs that `train.dp_max_epsilon` ended. table: that of `Comparison`, a row per run
    """
    by_validation = "Stopped early by source validation (train.stop_after)"
    by_privacy = "Ended by the privacy budget (train.dp_max_epsilon)"
    stopped: dict[str, dict[str, list[int]]] = {}  # {reason: {label and most rounds: the rounds that were played}}
    played = dict(zip(runs.summary["run"], runs.summary.get("rounds", [])))
    for run, label in zip(table["run"], table["label"]):
        experiment = runs.experiments[run]
        train = experiment.train
        if not train.stop_after and not train.dp_max_epsilon:
            continue
        rounds = int(played[run])
        if rounds >= train.rounds:
            continue
        environment = run_environment(runs, run)
        record = environment.get("stopped", {})
        reason = by_validation
        if "epsilon" in record:
            reason = by_privacy
        of_reason = stopped.setdefault(reason, {})
        title = f"{label} (of {train.rounds})"
        of_label = of_reason.setdefault(title, [])
        of_label.append(rounds)
    notes = []
    for reason, labels in stopped.items():
        note = f"{reason}: {_played(labels)}. Budgets follow from it."
        notes.append(note)
    return notes


def _played(labels: Mapping[str, Sequence[int]]) -> str:
    """`fedavg (of 8) after 3 to 5 rounds, ...`, for the rounds that the runs of each label have played."""
    texts = []
    for label, numbers in labels.items():
        first = min(numbers)
        last = max(numbers)
        between = f"{first} to {last}"
        if first == last:
            between = str(first)
        texts.append(f"{label} after {between} rounds")
    return ", ".join(texts)


def cost_notes(table: pd.DataFrame) -> list[str]:
    """Notes on methods whose budgets and costs are averages over fewer targets than those of others."""
    parts: dict[str, list[str]] = {}  # {targets: the methods}
    for label, targets in table.groupby("label", sort=False)["target"]:
        if targets.nunique() < table["target"].nunique():
            part = ", ".join(targets.unique())
            parts.setdefault(part, []).append(label)
    return [
        f"Budgets and costs of {', '.join(labels)} are averages over {part} alone: they do not compare with the others."
        for part, labels in parts.items()
    ]


def test_size_notes(table: pd.DataFrame, unit: str) -> list[str]:
    """Notes on methods that are tested on fewer examples of a target than others, because they train on the rest.

    Their number may vary with the seed, so that it is compared with that of others with the same seed. unit: what an
    example is called, in the plural.
    """
    runs = table.dropna(subset="target_images")
    most = runs.groupby(["target", "seed"])["target_images"].transform("max")
    runs = runs.assign(most=most)
    fewer = runs[runs["target_images"] < most].sort_values("target_images", kind="stable")
    least = fewer.drop_duplicates(["label", "target"])
    smaller: dict[str, list[str]] = {}
    for row in least.sort_index().itertuples():
        texts = smaller.setdefault(row.label, [])
        share = f"{row.target_images:.0f} of {row.most:.0f}"
        texts.append(f"{share} {unit} of {row.target}")
    return [
        f"{label} is tested on a smaller set: {', '.join(texts)}; the other methods' numbers are of all of them."
        for label, texts in smaller.items()
    ]


def rank_notes(comparison: Comparison, column: str = "target") -> list[str]:
    """Notes on what the ranks and the tests against a baseline rest on; column: what the table has a column for."""
    methods, notes = comparison.methods, []
    others = methods[methods["label"] != comparison.baseline]
    if comparison.baseline and len(others):
        notes += test_notes(others, comparison.baseline, column)
    for group, seeds in comparison.ranked_seeds.items():
        of_group = methods[methods["group"] == group]
        if seeds and of_group["seeds"].max() > len(seeds):
            listed = ", ".join(map(str, seeds))
            notes.append(f"Ranks rest on the seeds that all ranked methods have: {listed}.")
    unranked = methods[methods["rank"].isna() & ~methods[POOLED]]["label"]
    if len(unranked):
        needed = f"a seed with every {column} that the other ranked methods have, too"
        if comparison.baseline:
            needed = f"a pair with {comparison.baseline} on every {column}"
        notes.append(f"Without a rank: {', '.join(unranked)} (it takes {needed}).")
    return notes


def test_notes(others: pd.DataFrame, base: str, column: str) -> list[str]:
    """Notes on the pairs from which difference, p and rank against a baseline are computed."""
    tests = int(others["p_value"].notna().sum())
    corrected = f"p Holm is p with Holm's correction for these {tests} tests."
    if "p_holm" not in others:
        corrected = "No correction for testing several methods (--correction holm)."
    elif tests < 2:
        corrected = "One test needs no correction, so that p Holm is p."
    notes = [
        f"Δ, p and rank rest on the pairs with {base}: the cells ({column}, seed) that both have. Δ is their mean "
        "difference, the rank follows Δ, p is the two-sided Wilcoxon signed-rank test. Cells share source data and "
        f"targets, so they are not independent: read p as a description, not as proof. {corrected}"
    ]
    few = others[others["differing"] < FEWEST_PAIRS]
    if len(few):
        named = "every method"
        if len(few) < len(others):
            named = ", ".join(few["label"])
        notes.append(
            f"Fewer than {FEWEST_PAIRS} differing pairs for {named}: "
            "too few cells for any p < .05, whatever the difference."
        )
    return notes
