"""All pairs `a+b` of METHODS: each is a recipe that differs from both halves, or is refused with a reason."""

import itertools
from contextlib import suppress

import pytest

from fedsim.commands.contract import run_watched, small_plan
from fedsim.common.errors import UserError
from fedsim.methods.assembly import find_recipe
from fedsim.methods.combinations import same_parts
from fedsim.methods.table import METHODS

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


@pytest.mark.parametrize("pair", ["l2d+fedsr", "fedl2r+l2d", "l2d+fedclip", "perada+gfedavg-dson", "perada+gperxan"])
def test_pairs_of_which_one_takes_what_the_other_needs_are_refused(pair):
    """Before the run starts, and not by a client in the middle of it."""
    with pytest.raises(UserError, match=r"features of stochastic_embedding|norm layers are those of the backbone"):
        find_recipe(pair)


def test_what_inserts_attach_to_features_stays_with_a_part_of_the_batch(tmp_path):
    """AugMix passes three versions through the network together; terms get the first, with its mean and spread."""
    assert len(run_watched(small_plan("augmix+fedsr", tmp_path, ["train.rounds=1"])).rounds) == 2


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
