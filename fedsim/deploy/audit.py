"""The audit log of a federation's server: who was admitted and who was refused, and why; one JSON object a line.

    {"time": "2026-01-31T12:00:00.000000+00:00", "event": "refused", "site": "", "address": "10.0.0.9", "reason": "..."}

Lines are only ever appended, each with one write, so that several processes may write to one file. Refusals come from
outside and could fill the disk: of the same refusal one line a minute is written, which counts the others, and of all
refusals together at most MOST_REFUSALS a minute.
"""

import json
import logging
import os
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

AUDIT = Path("state/audit.jsonl")  # in the server's kit
SAME_SECONDS = 60.0
MOST_REFUSALS = 60  # lines a minute
LONGEST_VALUE = 500  # characters of one value

logger = logging.getLogger("fedsim")


class Audit:
    """Appends to an audit log."""

    def __init__(self, file: Path) -> None:
        self.file = file
        file.parent.mkdir(parents=True, exist_ok=True)
        self._last: dict[tuple[str, ...], float] = {}  # when a refusal was written
        self._skipped: dict[tuple[str, ...], int] = {}
        self._minute, self._written = 0, 0

    def write(self, event: str, **fields: Any) -> None:
        """Append one line."""
        fields_shown = {
            name: value[:LONGEST_VALUE] if isinstance(value, str) else value for name, value in fields.items()
        }
        line = json.dumps({"time": datetime.now(UTC).isoformat(), "event": event, **fields_shown})
        try:
            descriptor = os.open(self.file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            with os.fdopen(descriptor, "ab", buffering=0) as file:  # one call, one write
                file.write(line.encode() + b"\n")
        except OSError as error:  # a full disk stops the log, but not the federation and not a run
            logger.warning("the audit log %s cannot be written (%s): %s", self.file, error.strerror, line)

    def refuse(self, site: str, address: str, reason: str, **fields: Any) -> None:
        """A refusal; the same one (site, address, reason) is written once a minute, with how many there were."""
        key, now = (site, address, reason.split(":")[0]), time.monotonic()
        if now - self._last.get(key, -SAME_SECONDS) < SAME_SECONDS or not self._may_write(now):
            self._skipped[key] = self._skipped.get(key, 0) + 1
            if len(self._skipped) > 10_000:  # a flood from many addresses
                self._skipped.clear()
            return
        if len(self._last) > 10_000:
            self._last.clear()
        self._last[key] = now
        skipped = self._skipped.pop(key, 0)
        more = {"before_this": skipped} if skipped else {}
        self.write("refused", site=site, address=address, reason=reason, **more, **fields)

    def _may_write(self, now: float) -> bool:
        minute = int(now // 60)
        if minute != self._minute:
            self._minute, self._written = minute, 0
        self._written += 1
        return self._written <= MOST_REFUSALS
