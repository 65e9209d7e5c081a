"""The vocabulary of compatibility is closed and used, and its sentences say which part changes what."""

import pytest

from fedsim.common.errors import UserError
from fedsim.methods.assembly import find_recipe
from fedsim.methods.compatibility import Pooling, check_recipe
from fedsim.methods.recipe import Recipe, parts_of
from fedsim.methods.registry import shipped_parts
from fedsim.methods.table import METHODS
from fedsim.models.norms.mixig import MixIG
from fedsim.parts.facts import Fact
from fedsim.parts.part import Part, part_name
from strategies.parts import Weights
from strategies.refine.dynamic_correction import DynamicCorrection
from strategies.share.without_statistics import WithoutStatistics


def all_parts() -> list[Part]:
    """Every shipped part with its defaults and as the rows have it, and what stands for pooled data."""
    rows = [part for recipe in METHODS.values() for _, part in parts_of(recipe)]
    return [*dict.fromkeys([*rows, *(kind() for kind in shipped_parts()), WithoutStatistics(upload=False), Pooling()])]


def test_every_declared_fact_is_of_the_vocabulary():
    parts = all_parts()
    for part in parts:
        for name in ("assumes", "breaks", "replaces", "provides"):
            facts = getattr(part, name)
            assert isinstance(facts, tuple), f"{part_name(part)}.{name}"
            assert all(isinstance(fact, Fact) for fact in facts), f"{part_name(part)}.{name}"
            assert len(set(facts)) == len(facts), f"{part_name(part)}.{name} has a fact twice"
    assert {part.belongs_to for part in parts} - {""} <= {part_name(part) for part in parts}
    for fact in Fact:  # it follows the word "that"
        assert fact.sentence[0].islower(), fact.name
        assert (";" in fact.sentence, fact.sentence[-1] in ".,") == (False, False), fact.name
    assert len({fact.sentence for fact in Fact}) == len(Fact)


def test_every_fact_decides_about_some_recipe():
    """A fact is assumed and broken, or replaced by two parts, or assumed and provided."""
    parts = all_parts()
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
    ("afl+csac", "agnostic_weights assumes that the fused model counts every client with its weight, which does not "
                 "hold with semantic_divergence; use one of the two"),
])  # fmt: skip
def test_the_sentences_of_pairs(pair, sentence):
    """In either order."""
    for name in (pair, "+".join(reversed(pair.split("+")))):
        with pytest.raises(UserError) as no:
            find_recipe(name)
        assert str(no.value).endswith(f": {sentence}")


def refused(**parts: object) -> str:
    """The sentence that refuses these parts beside FedAvg's; empty: they fit."""
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
