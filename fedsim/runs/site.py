"""What a client app does on a machine of its own: it holds the server to the form of its messages, keeps its state in
folders and stops work that takes too long.

A site runs code that it trusts and gets data that it need not trust, also where its app is pinned. What a message
brings may name files, folders, modules and limits, so that none of it may lead out of the site's own folders.
"""

import contextlib
import faulthandler
import re
import shutil
import signal
import threading
import time
import tomllib
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, TypeVar

from flwr.app import RecordDict
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from fedsim.common.doubt import MOST
from fedsim.common.errors import UserError
from fedsim.tensors.records import configs_of

KEPT_SECONDS = 30 * 86_400.0  # a run's client state is removed when it was not used for so long
GRACE_SECONDS = 30.0
MOST_SECONDS = 7 * 86_400.0  # of the work for one message
MOST_TEXT = 1 << 20  # characters of an experiment
MOST_NAME = 300  # characters of a client's name
LAST_ROUND = 999_999  # the files of a client's state have six digits
TOKEN = "[0-9a-f]{16}"
# In the place of these a site has folders of its own.
REPLACED = ("data.root", "data.cache", "run.output", "run.federation")


def state_folder(root: str, token: str) -> str:
    """Returns the folder of this site's client state in the run of that token; empty (in memory) without a folder.

    Folders of runs that were not continued for KEPT_SECONDS are removed. Raises UserError for a text that is no token
    of a run, because the server chooses it, and for a folder that lies elsewhere.
    """
    if not re.fullmatch(TOKEN, token):
        raise UserError(
            f"{token[:100]!r} is no token of a run, which has 16 hexadecimal digits; is the server fedsim's?"
        )
    if not root:
        return ""
    runs = Path(root) / "runs"
    runs.mkdir(parents=True, exist_ok=True)
    state = runs / token
    if state.resolve().parent != runs.resolve():
        raise UserError(f"{state} is a link to another folder, and a run's state must lie here; remove the link")
    for folder in runs.iterdir():
        if folder != state and time.time() - folder.stat().st_mtime > KEPT_SECONDS:
            shutil.rmtree(folder, ignore_errors=True)
    state.mkdir(exist_ok=True)
    state.touch()
    return str(state)


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises TimeoutError when the work of a site takes longer than `seconds` (`run.timeout`).

    The server has then stopped waiting, and a SuperNode takes its next message only after this one. Work that cannot be
    interrupted ends with its process. Outside a process's main thread nothing is limited.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"the work took longer than run.timeout ({seconds:g} s)")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    faulthandler.dump_traceback_later(seconds + GRACE_SECONDS, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def stays_inside(text: str) -> str:
    """Returns the text, if it cannot lead out of a folder as a path below it; raises ValueError otherwise."""
    names = re.split(r"[/\\]", text)
    if text.startswith(("/", "\\", "~")) or ".." in names or "\0" in text:
        raise ValueError("it leads out of a site's own folders: write a path below them, without '..'")
    return text


Name = Annotated[str, Field(max_length=MOST_NAME), AfterValidator(stays_inside)]
Word = Annotated[str, Field(max_length=100, pattern=r"^[\w-]+$")]
Round = Annotated[int, Field(ge=-1, le=LAST_ROUND)]
Count = Annotated[int, Field(ge=0)]
Temperature = Annotated[float, Field(gt=0, le=2 * MOST)]
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
    temperatures: list[Temperature] | None = None
    temperature: Temperature | None = None
    scale_mean: Annotated[list[float] | None, Field(alias="scale-mean")] = None
    scale_std: Annotated[list[Annotated[float, Field(gt=0)]] | None, Field(alias="scale-std")] = None


class SiteCheck(BaseModel):
    """The settings of a message of `fedsim deploy check`: an experiment or none, and the packages that it needs."""

    model_config = ConfigDict(extra="forbid", strict=True)

    experiment: Annotated[str, Field(max_length=MOST_TEXT)]
    packages: Annotated[str, Field(max_length=10_000, pattern=r"^([\w.-]+(==[\w.+!-]+)?( |$))*$")] = ""
    statistics: Count = 0  # rows that a number of the statistics is about at least; 0: none are asked for


def check_message(content: RecordDict, form: type[Form]) -> Form:
    """Returns the settings of a message to a site in their form.

    Raises UserError when one has another form, is missing or unknown, or leads out of the site's folders.
    """
    settings = dict(configs_of(content).get("config", {}))
    try:
        accepted = form.model_validate(settings)
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
    """Yields (where it stands, text) of each key and each text in nested settings, without what the site replaces."""
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
