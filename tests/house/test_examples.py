"""The examples in docstrings of public names run, and print what stands there."""

import doctest
import importlib

import pytest

MODULES = (
    "clients.parts",
    "fedsim.methods.assembly",
    "fedsim.methods.recipe",
    "fedsim.records.callbacks",
    "fedsim.runtime.launch",
    "fedsim.settings.experiment",
    "fedsim.settings.keywords",
    "fedsim.tensors.arrays",
    "fedsim.tensors.kinds",
    "strategies.aggregate",
    "strategies.bank",
    "strategies.parts",
    "strategies.server_round",
    "strategies.wire.own_apps",
)
MORE = {"torch": "torch", "np": "numpy"}  # names that an example may use without an import


def examples(name: str) -> list[doctest.DocTest]:
    """The docstrings of a module that have examples."""
    module = importlib.import_module(name)
    names = {key: importlib.import_module(value) for key, value in MORE.items()}
    found = doctest.DocTestFinder(exclude_empty=True).find(module, name, extraglobs=names)
    return [each for each in found if each.examples]


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name):
    runner = doctest.DocTestRunner(optionflags=doctest.IGNORE_EXCEPTION_DETAIL)
    for example in examples(name):
        runner.run(example)
    assert runner.summarize(verbose=False).failed == 0


def test_twenty_public_names_have_an_example():
    assert sum(len(examples(name)) for name in MODULES) >= 20
