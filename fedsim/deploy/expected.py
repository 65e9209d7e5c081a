"""How large the replies of a run may be: its server app says so in a file, and the gate holds the sites to it.

The gate stops a site that sends more only after the server app has had the chance to see it, which then refuses the
reply by name. Without the file (a run of another app) the federation's `largest_reply_mb` alone holds.
"""

from pathlib import Path

EXPECTED = Path("run/expected")  # in the server's kit: one file per run
SLACK = 64 << 20  # bytes that the gate lets through beyond what the server app refuses


def allowed(kit: Path, run_id: int, most: int) -> int:
    """Bytes that the gate lets a site send as one reply of a run, `most` at most."""
    try:
        return min(most, int((kit / EXPECTED / str(run_id)).read_text()) + SLACK)
    except (OSError, ValueError):
        return most
