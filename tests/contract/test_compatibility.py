"""Compatibility: its vocabulary is used, its sentences say which part changes what, and all pairs `a+b` of METHODS."""

import itertools
from contextlib import suppress

import pytest

from fedsim.common.errors import UserError
from fedsim.methods.assembly import find_recipe
from fedsim.methods.compatibility import Pooling, Tensors, check_recipe
from fedsim.methods.recipe import Recipe, same_parts
from fedsim.methods.registry import shipped_parts
from fedsim.methods.table import METHODS
from fedsim.models.norms.mixig import MixIG
from fedsim.parts.facts import Fact
from fedsim.testing.contract import run_watched, small_plan
from strategies.parts import Weights
from strategies.refine.dynamic_correction import DynamicCorrection
from strategies.share.without_statistics import WithoutStatistics


def test_every_fact_decides_about_some_recipe():
    """A fact is assumed and broken, or replaced by two parts, or assumed and provided."""
    rows = [part for recipe in METHODS.values() for _, part in recipe.pairs]
    parts = {*rows, *(kind() for kind in shipped_parts()), WithoutStatistics(upload=False), Pooling(), Tensors()}
    assumed, broken, provided = ({fact for part in parts for fact in getattr(part, name)}
                                 for name in ("assumes", "breaks", "provides"))  # fmt: skip
    replaced = [fact for part in parts for fact in part.replaces]
    for fact in Fact:
        if fact.given:
            assert (fact in assumed and fact in broken | {*replaced}) or replaced.count(fact) > 1, fact.name
            assert fact not in provided, fact.name
        else:
            assert fact in assumed & provided, fact.name
            assert fact not in broken | {*replaced}, fact.name


def test_weights_follow_from_examples_where_a_rule_says_so():
    for kind in shipped_parts():
        if issubclass(kind, Weights):
            known = kind().known({"a": 1, "b": 2})
            assert (known is None) == (Fact.KNOWN_WEIGHTS in kind().breaks), kind.__name__


@pytest.mark.parametrize(("pair", "sentence"), [
    ("moon+stablefdg", "model_contrast assumes that the rows of features, logits and labels are the images of the "
                       "batch, which does not hold with enlarged_batch; use one of the two"),
    ("fedavgm+fedadam", "fed_adam and fed_avg_m cannot both change that the global model moves about as far as its "
                        "clients did in the round; use one of the two"),
    ("deepall+krum", "krum assumes that several clients train and differ, which does not hold with all data pooled on "
                     "one client; use a federated method"),
])  # fmt: skip
def test_the_sentences_of_pairs(pair, sentence):
    for name in (pair, "+".join(reversed(pair.split("+")))):
        with pytest.raises(UserError) as no:
            find_recipe(name)
        assert str(no.value).endswith(f": {sentence}")


def refused(**parts: object) -> str:
    """The sentence that refuses these parts next to FedAvg's; empty: they fit."""
    try:
        check_recipe(Recipe(**parts), "x")
    except UserError as error:
        return str(error).removeprefix("x: ")
    return ""


def test_facts_may_follow_from_a_setting():
    assert refused(share=WithoutStatistics()) == ""
    assert refused(share=WithoutStatistics(upload=False)) == (
        "without_statistics assumes that the inference rule computes all statistics of batch norm on the unseen "
        "domain, which does not hold here; keep upload = true, or set method.infer = 'recompute'"
    )
    assert refused(norm=MixIG(), refine=(DynamicCorrection(),)) == ""
    assert refused(norm=MixIG(adapter=True), refine=(DynamicCorrection(),)).startswith(
        "dynamic_correction assumes that one step with all terms of the loss trains all tensors"
    )


PAIRS = list(itertools.combinations(METHODS, 2))


def combined(a, b):
    """The recipe of a pair, or the reason why it is refused."""
    try:
        return find_recipe(f"{a}+{b}")
    except UserError as error:
        return str(error)


def test_a_pair_differs_from_both_halves_or_is_refused_with_a_reason():
    """A refusal is one line that names both halves; the order of the halves has no effect."""
    halves, accepted = {name: find_recipe(name) for name in METHODS}, 0
    for place, (a, b) in enumerate(PAIRS):
        pair = combined(a, b)
        if refused := isinstance(pair, str):
            assert (a in pair, b in pair, "\n" in pair) == (True, True, False), pair
            assert "fedavg" not in (a, b) or "adds nothing" in pair or "deepall" in (a, b), pair
        else:
            accepted += 1
            assert not any(same_parts(pair, halves[name]) for name in (a, b)), (a, b)
        if place % 5 == 0:
            assert refused == isinstance(combined(b, a), str), (a, b)
    assert len(PAIRS) / 3 < accepted < len(PAIRS)
    assert "pooled on one client" in combined("deepall", "feddg-ga")


@pytest.mark.parametrize(("pair", "words"), [
    *((pair, "features of stochastic_embedding") for pair in ("l2d+fedsr", "fedl2r+l2d", "l2d+fedclip")),
    *((pair, "norm layers are those of the backbone") for pair in ("perada+gfedavg-dson", "perada+gperxan")),
    ("jigen+fedadg", "jigsaw assumes .* loss of a batch from the objective, .* not hold with adversarial_reference"),
    ("fedsam+elcfs", "sharpness_aware assumes .* moves the weights in each step, .* not hold with episodic_step"),
    ("mixup+selfreg", "self_reg assumes .* one class as its label, which does not hold with mix_up; use one of the"),
])  # fmt: skip
def test_pairs_of_which_one_takes_what_the_other_needs_are_refused(pair, words):
    """Before the run starts, and not by a client in the middle of it."""
    with pytest.raises(UserError, match=words):
        find_recipe(pair)


@pytest.mark.slow
@pytest.mark.parametrize("first", METHODS)
def test_the_pairs_of_a_row_run(first, tmp_path):
    """Every pair that is not refused runs one round, unless it needs more clients."""
    failed = {}
    for pair in ("+".join(pair) for pair in PAIRS if pair[0] == first and not isinstance(combined(*pair), str)):
        with suppress(UserError):
            plan = small_plan(pair, tmp_path, ["train.rounds=1"])
            try:
                assert len(run_watched(plan).rounds) == 2
            except Exception as error:  # rows that need texts: their network is built when the run begins
                if not (isinstance(error, UserError) and any(METHODS[name].tried_with for name in pair.split("+"))):
                    failed[pair] = error
    assert failed == {}
