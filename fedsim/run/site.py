"""What a client app does on a machine of its own: it keeps its state in folders and stops work that takes too long."""

import contextlib
import faulthandler
import re
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from fedsim.common.errors import UserError
from fedsim.run.site_message import TOKEN

KEPT_SECONDS = 30 * 86_400.0  # a run's client state is removed when it was not used for so long
GRACE_SECONDS = 30.0


def state_folder(root: str, token: str) -> str:
    """Folder of this site's client state in the run of that token; empty (in memory) without a state folder.

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
