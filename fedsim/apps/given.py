"""What a Python call gives as an object: a recipe, a model. Settings name such things, so that each gets a name."""

import inspect
import json
import sys
from collections.abc import Callable

import torch
from torch import nn

from fedsim.common.errors import UserError, first_line
from fedsim.common.seeding import stream_seed
from fedsim.data.reader import content_hash
from fedsim.methods.recipe import Recipe, values_of
from fedsim.methods.registry import GIVEN
from fedsim.methods.table import METHODS
from fedsim.models.own_module import GIVEN as BACKBONES_GIVEN
from fedsim.models.own_module import copies_of, module_row
from fedsim.settings.plugins import makes

Model = nn.Module | Callable[[], nn.Module]


def named_recipe(method: str | Recipe) -> str:
    """Returns the name of a method in settings: a row's, `module:name` of a recipe in a module, or one of its content.

    The last name is known only in processes that have called this function. Raises UserError for another object.
    """
    if isinstance(method, str):
        return method
    if not isinstance(method, Recipe):
        raise UserError(f"a method is the name of a row, `a+b`, `module:name` or a Recipe, not {type(method).__name__}")
    rows = [name for name, row in METHODS.items() if row is method]
    if rows:
        return rows[0]
    reference = reference_of(method)
    if reference:
        return reference
    values = json.dumps(values_of(method), sort_keys=True)
    digest = content_hash(values.encode())
    name = f"recipe-{digest[:8]}"
    GIVEN[name] = method
    return name


def reference_of(value: object) -> str:
    """Returns `module:name` of an object at the top level of a module.

    The text is empty when the object is in no module, or in that of a notebook or script.
    """
    home = getattr(value, "__module__", "")
    for name in sorted(sys.modules, key=lambda name: name != home):
        module = sys.modules[name]
        if name == "__main__" or getattr(module, "__spec__", None) is None:
            continue
        for attribute, other in vars(module).items():
            if other is value and attribute.isidentifier():
                return f"{name}:{attribute}"
    return ""


def named_model(model: Model) -> str:
    """Returns the name of a network in settings: `module:name` of its class, or one that only this process knows.

    Where a module is given, its weights are those with which each new network begins.
    """
    module = made(model)
    if isinstance(model, nn.Module):
        reference = reference_of_maker(type(model))
        make: Callable[[], nn.Module] = copies_of(model)
    else:
        reference = reference_of_maker(model)
        if reference:
            return reference
        make = model
    kind = type(module).__name__
    name = reference or f"own-{kind}-{_content_of(module)}"
    BACKBONES_GIVEN[name] = module_row(make, kind)
    return name


def reference_of_maker(make: Callable[[], nn.Module]) -> str:
    """Returns `module:name` of a class or function that makes a network without arguments; empty for another one."""
    return reference_of(make) if makes(make, nn.Module) else ""


def _content_of(module: nn.Module | None) -> str:
    """Returns a short hash of a network's layers and, where it can be read, of the source of its class."""
    try:
        source = inspect.getsource(type(module))
    except (OSError, TypeError):
        source = ""
    return content_hash(repr(module).encode(), source.encode())[:8]


def made(model: Model | None, seed: int = 0) -> nn.Module | None:
    """Returns the module that a user gives, or that his class or function makes; raises UserError for anything else.

    seed: of the run, which determines the weights of a module that is made
    """
    if model is None or isinstance(model, nn.Module):
        return model
    if not callable(model):
        raise UserError(f"model is {type(model).__name__}; give an nn.Module, or a function that makes one")
    try:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(stream_seed(seed, "init"))
            module = model()
    except Exception as error:  # the user's own code may raise any error
        raise UserError(f"model cannot be called without arguments ({first_line(error)})") from error
    if not isinstance(module, nn.Module):
        raise UserError(f"model makes {type(module).__name__}, not an nn.Module")
    return module
