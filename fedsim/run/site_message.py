"""What a message may bring to a site: the form of each of its settings is checked here, before anything uses them.

A site runs code that it trusts and gets data that it need not trust, also where its app is pinned. What a message
brings may name files, folders, modules and limits, so that none of it may lead out of the site's own folders.
"""

import re
import tomllib
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Annotated, Any, TypeVar

from flwr.app import RecordDict
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from fedsim.common.errors import UserError
from fedsim.tensors.records import configs_of

MOST_SECONDS = 7 * 86_400.0  # of the work for one message
MOST_TEXT = 1 << 20  # characters of an experiment
MOST_NAME = 300  # characters of a client's name
LAST_ROUND = 999_999  # the files of a client's state have six digits
TOKEN = "[0-9a-f]{16}"
# In the place of these a site has folders of its own.
REPLACED = ("data.root", "data.cache", "run.output", "run.federation")


def stays_inside(text: str) -> str:
    """The text, if it cannot lead out of a folder when it is used as a path below it; ValueError otherwise."""
    if text.startswith(("/", "\\", "~")) or ".." in re.split(r"[/\\]", text) or "\0" in text:
        raise ValueError("it leads out of a site's own folders: write a path below them, without '..'")
    return text


Name = Annotated[str, Field(max_length=MOST_NAME), AfterValidator(stays_inside)]
Word = Annotated[str, Field(max_length=100, pattern=r"^[\w-]+$")]
Round = Annotated[int, Field(ge=-1, le=LAST_ROUND)]
Count = Annotated[int, Field(ge=0)]
Form = TypeVar("Form", "SiteMessage", "SiteCheck")


class SiteMessage(BaseModel):
    """The settings of a message, as a site accepts them; others than these are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    experiment: Annotated[str, Field(min_length=1, max_length=MOST_TEXT)]
    token: Annotated[str, Field(pattern=f"^{TOKEN}$")]
    timeout: Annotated[float, Field(gt=0, le=MOST_SECONDS)]
    round: Annotated[int, Field(ge=0, le=LAST_ROUND)]
    phase: Word
    client: Name
    bank: Word | None = None
    packed: Word | None = None
    state_round: Annotated[Round | None, Field(alias="state-round")] = None
    saved_round: Annotated[Round | None, Field(alias="saved-round")] = None
    state_dir: Annotated[str, Field(alias="state-dir")] = ""  # a site has its own
    counts: list[Count] | None = None
    delivered: list[Name] | None = None
    places: list[Count] | None = None


class SiteCheck(BaseModel):
    """The settings of a message of `fedsim deploy check`: an experiment or none, and the packages that it needs."""

    model_config = ConfigDict(extra="forbid", strict=True)

    experiment: Annotated[str, Field(max_length=MOST_TEXT)]
    packages: Annotated[str, Field(max_length=10_000, pattern=r"^([\w.-]+(==[\w.+!-]+)?( |$))*$")] = ""


def check_message(content: RecordDict, form: type[Form]) -> Form:
    """The settings of a message to a site in their form.

    Raises UserError when one has another form, is missing or unknown, or leads out of the site's folders.
    """
    try:
        accepted = form.model_validate(dict(configs_of(content).get("config", {})))
    except ValidationError as error:
        problem = error.errors()[0]
        setting = ".".join(map(str, problem["loc"]))
        raise UserError(f"this site refuses the server's message: {setting}: {problem['msg']}") from None
    check_settings(accepted.experiment)
    return accepted


@lru_cache(maxsize=4)  # every message of a run has the same
def check_settings(experiment: str) -> None:
    """Raises UserError when an experiment from elsewhere is no TOML, or has a text that leads out of a site's folders.

    The keys are checked, too, since settings of parts and options of backbones may become names of files.
    """
    try:
        texts = list(_texts(tomllib.loads(experiment)))
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise UserError(f"this site refuses the experiment: it is not valid TOML ({type(error).__name__})") from None
    for key, text in texts:
        try:
            stays_inside(text)
        except ValueError as error:
            raise UserError(f"this site refuses the experiment: {key} = {text[:MOST_NAME]!r}: {error}") from None


def _texts(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """(where it stands, text) of each key and each text in nested settings, without those that the site replaces."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            path = f"{key}.{name}".removeprefix(".")
            if path not in REPLACED:
                yield path, name
                yield from _texts(inner, path)
    elif isinstance(value, list):
        for inner in value:
            yield from _texts(inner, key)
