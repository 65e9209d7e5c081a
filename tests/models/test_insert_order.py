"""Inserts of two rows are applied in one order, however the rows are named."""

import itertools

import pytest
import torch
from support import small_experiment

from fedsim.common.errors import UserError
from fedsim.methods.table import METHODS
from fedsim.models.hidden import hidden_layers
from fedsim.run.plan import resolve

ROWS = [name for name, recipe in METHODS.items() if recipe.inserts]


def built(folder, method):
    """The network of a method, or the reason why it is refused."""
    try:
        return resolve(small_experiment(folder, method)).build_net()
    except UserError as error:
        return str(error)


def hooks(net):
    """How many hooks every module has."""
    return {path: (len(m._forward_pre_hooks), len(m._forward_hooks)) for path, m in net.named_modules()}


def test_the_order_of_names_does_not_change_the_network(tmp_path):
    for pair in itertools.combinations(ROWS, 2):
        one, two = (built(tmp_path, "+".join(names)) for names in (pair, pair[::-1]))
        assert isinstance(one, str) == isinstance(two, str), pair
        if isinstance(one, str):
            continue
        first, second = one.state_dict(), two.state_dict()
        assert list(first) == list(second), pair
        assert all(torch.equal(first[name], second[name]) for name in first), pair
        assert (one.frozen, hooks(one)) == (two.frozen, hooks(two)), pair


@pytest.mark.parametrize("pair", ["feddrop+fada", "feddrop+jigen", "feddrop+selfreg"])
def test_every_layer_of_dropped_units_is_scaled(tmp_path, pair):
    """FedDrop's scale reads the finished network: every layer after dropped units has it, and no other layer."""
    net = built(tmp_path, pair)
    readers = {layer.reader for layer in hidden_layers(net)}
    assert readers == {path for path, (before, _) in hooks(net).items() if before} != set()
