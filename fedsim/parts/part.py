"""The base class of all parts of a recipe, with what a part declares about itself."""

import ast
import dataclasses
import inspect
import re
import textwrap
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

from fedsim.common.errors import nearest
from fedsim.common.tasks import ANY_TASK
from fedsim.parts.facts import Facts
from fedsim.settings.plugins import entry_points, is_outside

if TYPE_CHECKING:
    from fedsim.settings.experiment import Experiment

P = TypeVar("P")


class RecipeParts(Protocol):
    """What a part may ask of the recipe in which it stands."""

    @property
    def prelude(self) -> str:
        """The training phase before round 1; empty: none."""

    def of(self, kind: type[P]) -> list[P]:
        """The parts of that class or contract, in the order of the slots."""


class Part:
    """A part fills one slot of a recipe, or several. Its fields are a paper's hyper-parameters. It also declares:

    requires: parts that must be in the recipe too, as {slot: name}, by settings name or `module:Class`; they are added
    when they are missing
    needs: metrics that every reply must have; a reply without them is refused
    columns: the numbers that it reports of each client (by `round.tally`, or as a Report), which become columns of
    clients.csv; a reply with a number that no part of the recipe names here is refused
    signed_loss: whether the training loss may be below 0 with this part
    tag: what the method's name in results shows about this part, as in `ccst(pixel)`; empty: nothing
    tasks: the tasks (fedsim.common.tasks) for which the part is made; it is refused on data sets with another task
    side_by_side: clients with this part may be trained together as one program (`clients/stacked/`), because its work
    in a step depends only on the tensors and the batch of one client. Steps and terms must declare it
    replaces: facts (fedsim.parts.facts) that it breaks, each of which one part alone may break
    belongs_to: the settings name of the part without which this one has no effect
    depends_on_rounds: whether its work in a round depends on how many rounds the run has (`round.rounds`); such a run
    cannot go on for more rounds
    remark: what a run says of this part before its first round; empty: nothing
    with_few: what a run says of this part where fewer than three clients train in a round; empty: nothing
    with_one_domain: what a run says of this part where every client has one domain; empty: nothing
    discloses: what this part shows the server or other clients about a client's data; empty: nothing beyond the model
    """

    if TYPE_CHECKING:
        __dataclass_fields__: ClassVar[dict[str, dataclasses.Field]]  # every part is a dataclass
    requires: ClassVar[dict[str, str]] = {}
    needs: ClassVar[tuple[str, ...]] = ()
    columns: ClassVar[tuple[str, ...]] = ()
    signed_loss: ClassVar[bool] = False
    tasks: ClassVar[tuple[str, ...]] = ANY_TASK
    side_by_side: ClassVar[bool] = True
    replaces: ClassVar[Facts] = ()
    belongs_to: ClassVar[str] = ""
    with_few: ClassVar[str] = ""
    with_one_domain: ClassVar[str] = ""

    @property
    def assumes(self) -> Facts:
        """Facts on which this part relies; a class, too, may name them."""
        return ()

    @property
    def breaks(self) -> Facts:
        """Facts that do not hold together with this part."""
        return ()

    @property
    def provides(self) -> Facts:
        """Facts that hold only together with a part that provides them."""
        return ()

    @property
    def sets(self) -> dict[str, dict[str, object]]:
        """Field values for other parts of the recipe, as {part: {field: value}}. A value that the user gave is kept."""
        return {}

    needs_clients: ClassVar[bool] = False

    @property
    def tag(self) -> str:
        """A short text that distinguishes variants of this part in results; empty: none."""
        return ""

    @property
    def depends_on_rounds(self) -> bool:
        """Whether its work in a round depends on how many rounds the run has."""
        return False

    @property
    def remark(self) -> str:
        """What a run says of this part before its first round, where nothing is refused; empty: nothing."""
        return ""

    @property
    def discloses(self) -> str:
        """What this part discloses beyond the model's updates; empty: nothing."""
        return ""

    def refuses(self, recipe: "RecipeParts") -> str:
        """Why this part does not work together with the other parts of a recipe; empty: it does."""
        return ""

    def check(self, experiment: "Experiment") -> None:
        """Raise UserError when the experiment lacks what this part needs, or when fields contradict each other."""

    def check_server(self, experiment: "Experiment", known: Mapping[str, Mapping[str, int | str]]) -> None:
        """Raise UserError when the server's own machine lacks what this part needs there, such as a folder of images.

        Called only on the server: before the run's folder is created, and again when the sites have sent the
        fingerprints of their data. known: these fingerprints by client; empty in a simulation.
        """

    def server_data(self, experiment: "Experiment") -> dict[str, dict[str, int | str]]:
        """Fingerprints of images that only the server has, by a name for messages: {name: {"images", "content"}}.

        They are recorded and compared like those of the domains, so that other files in the same folder are noticed.
        """
        return {}


# What a part must define, where its contract raises NotImplementedError: one of the names in each line.
MUST_DEFINE = (("begin",), ("indices",), ("answer",), ("fuse",), ("refine",), ("weigh", "known"))
CONTRACTS = ("clients.parts", "strategies.parts")


def undefined(kind: type) -> str:
    """The function that a class of parts must define and does not, with its arguments; empty: it defines all."""
    for names in MUST_DEFINE:
        functions = [getattr(kind, name, None) for name in names]
        if all(getattr(function, "__module__", "") in CONTRACTS for function in functions):
            first: Any = functions[0]
            if "NotImplementedError" in first.__code__.co_names:
                arguments = list(inspect.signature(first).parameters)[1:]
                return f"{names[0]}({', '.join(arguments)})"
    return ""


def forgotten(kind: type) -> str:
    """The function that `begin` of a class from outside defines and neither returns nor uses; empty: there is none.

    A term that begins without a function adds nothing to the loss, which is allowed, so that the run would be FedAvg's.
    """
    begin = getattr(kind, "begin", None)
    if begin is None or not is_outside(f"{begin.__module__}:{kind.__name__}"):
        return ""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(begin)))
    except (OSError, TypeError, SyntaxError):  # its text is not at hand, as in an interactive session
        return ""
    nodes = list(ast.walk(tree))
    used = {node.id for node in nodes if isinstance(node, ast.Name)}
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef)][1:]  # the first one is `begin`
    unused = [node.name for node in functions if node.name not in used and not node.decorator_list]
    return unused[0] if unused else ""


def unfit(part: Part) -> str:
    """Why an object of that class cannot be in a recipe, whatever its slot; empty: it can."""
    kind, parameters = type(part), getattr(part, "__dataclass_params__", None)
    if parameters is None or not parameters.frozen:
        return f"{kind.__name__} is not a frozen dataclass; write @dataclass(frozen=True) above the class"
    for field in dataclasses.fields(part):
        try:
            hash(getattr(part, field.name))
        except TypeError:
            value = type(getattr(part, field.name)).__name__
            return f"{kind.__name__}.{field.name} is a {value}, which can be changed; make it a tuple, number or text"
    if missing := undefined(kind):
        hint = nearest(missing.partition("(")[0], vars(kind))
        return f"{kind.__name__} defines no {missing}; {hint}".rstrip("; ")
    if function := forgotten(kind):
        return f"{kind.__name__}.begin makes {function}() and does not use it; end begin with `return {function}`"
    return ""


def part_name(part: object) -> str:
    """Settings name of a part (or its class): `GuidingHead` -> `guiding_head`, `XAN` -> `xan`."""
    return settings_name((part if isinstance(part, type) else type(part)).__name__)


def settings_name(name: str) -> str:
    """Settings name of a part whose class has this name."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


def named_part(key: str) -> str:
    """The settings name of the part that a key of `[parts]` names; its module is not imported."""
    reference = entry_points("parts").get(key, [key])[0]
    return settings_name(reference.rpartition(":")[2]) if ":" in reference else key
