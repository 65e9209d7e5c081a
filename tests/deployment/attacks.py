"""Attacks on a federation whose server, sites and attacker have a network namespace each, and what came of them.

    PYTHONPATH=tests:tests/deployment python tests/deployment/attacks.py [--only WORDS]

Needs root, `ip` and nginx. Each row: what happened, seconds until all sites were connected again, and the most memory
that nginx and the server app took. Everything is bounded, stays in the namespaces, and ends by itself.
"""

import argparse
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from bad_sites import absurd_count, bad_reply, flood, foreign_app, impostor
from fault_rows import (
    busy_database,
    cut,
    expired_certificate,
    hanging_supernode,
    killed_server,
    killed_site,
    restarted_proxy,
)
from lanes import need
from proxied import PORT, SITES, Federation, Watch
from support import read_audit
from test_namespaces import SERVER

from fedsim.deploy.audit import AUDIT
from fedsim.deploy.control import registered_nodes

FRESH_SECONDS = 25.0


def slow_connections(federation: Federation, watch: Watch) -> str:
    """One machine opens 1,000 slow connections at a time."""
    said = federation.outsider("slow", SERVER, PORT, 1000, 60)
    need(watch.oldest < FRESH_SECONDS, f"a site was silent for {watch.oldest:.0f} s; {said}")
    return f"{said}; longest silence of a site {watch.oldest:.0f} s"


def unauthenticated_bodies(federation: Federation, watch: Watch) -> str:
    """Send 40 bodies of 15 MB without a key."""
    said = federation.outsider("bodies", SERVER, PORT, 40, 15)
    need(watch.oldest < FRESH_SECONDS and watch.nginx < 200, f"{watch.oldest:.0f} s, {watch.nginx:.0f} MB; {said}")
    return f"{said}; longest silence of a site {watch.oldest:.0f} s"


def many_requests(federation: Federation, watch: Watch) -> str:
    """Send requests without a key as fast as possible."""
    said = federation.outsider("flood", SERVER, PORT, 1500)
    need(watch.oldest < FRESH_SECONDS and "200" not in said, f"{said} {watch.oldest}")
    return f"{said}; longest silence of a site {watch.oldest:.0f} s"


def stolen_key(federation: Federation, watch: Watch) -> str:
    """A second machine uses a site's key while the site is online."""
    node, key = registered_nodes(federation.federation)[SITES[1]], federation.federation.kit(SITES[1]) / "key"
    said = federation.outsider("steal", SERVER, PORT, key, node, 30)
    lines = [line for line in read_audit(federation.server_kit / AUDIT) if line["event"] == "double"]
    need(lines and lines[-1]["site"] == SITES[1], f"nothing was said; {said}")
    return f"said in audit log, check and status: {lines[-1]['reason']}"


def forgeries(federation: Federation, watch: Watch) -> str:
    """Send a reply in the name of another site, and use a signature twice."""
    nodes = registered_nodes(federation.federation)
    key = federation.federation.kit(SITES[1]) / "key"
    said = federation.outsider("forge", SERVER, PORT, key, nodes[SITES[1]], nodes[SITES[0]])
    answers = (said["another's reply"][0], said["signature"], said["signature again"])
    need(answers == (400, 200, 503), f"{said}")
    detail = json.loads(said["another's reply"][1])["detail"]
    return f"refused: {detail}; second use of a signature: 503"


def wrong_clock(federation: Federation, watch: Watch) -> str:
    """A site's clock is 12 s ahead."""
    status, said = federation.outsider("clock", SERVER, PORT, federation.federation.kit(SITES[1]) / "key", 12)["answer"]
    need(status == 400 and re.search("1[0-2] s ahead", said), f"{status} {said}")
    return json.loads(said)["detail"]


ATTACKS: dict[str, Callable[[Federation, Watch], str]] = {
    "1,000 slow connections from one machine, 60 s": slow_connections,
    "40 bodies of 15 MB without a key": unauthenticated_bodies,
    "1,500 requests without a key": many_requests,
    "stolen key beside the original": stolen_key,
    "reply in another's name, replayed signature": forgeries,
    "clock 12 s ahead": wrong_clock,
    "3e38 in every weight": bad_reply("values", "times the median"),
    "negative variances": bad_reply("variance", "negative value"),
    "reply of 500 MB": bad_reply("huge", "larger than", megabytes=500),
    "reply of 4 GB": flood,
    "10^9 examples": absurd_count,
    "site poses as another": impostor,
    "operator's app reads keys": foreign_app,
    "database locked for 90 s": busy_database,
    "server certificate expired": expired_certificate,
    "link cut for 45 s in round 2 (stop)": cut,
    "SuperNode kill -9 in round 2 (stop)": killed_site,
    "nginx restarted in round 2 (stop)": restarted_proxy,
    "SuperLink kill -9 in round 2": killed_server,
    "SuperNode hangs": hanging_supernode,
}


def main() -> int:
    """Attack, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="attacks whose name contains one of these words, by commas")
    words = parser.parse_args()
    need(os.geteuid() == 0 and shutil.which("ip"), "needs root and ip (iproute2)")
    rows = []
    with tempfile.TemporaryDirectory(prefix="attacks-") as folder:
        federation = Federation(Path(folder))
        federation.build()
        try:
            with federation:
                for name in [name for name in ATTACKS if any(word in name for word in words.only.split(","))]:
                    rows.append((name, *one(federation, name)))
                    print("| " + " | ".join(rows[-1]) + " |", flush=True)
        finally:
            federation.remove()
    return 0 if all(row[-1] == "yes" for row in rows) else 1


def one(federation: Federation, name: str) -> tuple[str, ...]:
    """(what happened, seconds, seconds to recovery, nginx MB, server app MB, whether this is what must happen)."""
    with Watch(federation) as watch:
        begin = time.monotonic()
        try:
            happened, holds = ATTACKS[name](federation, watch), "yes"
        except Exception as error:
            happened, holds = f"{type(error).__name__}: {error}", "NO"
        federation.end_runs()
        seconds = time.monotonic() - begin
        recovery = watch.recovered()
    numbers = (f"{seconds:.0f}", f"{recovery:.0f}", f"{watch.nginx:.0f}", f"{watch.app:.0f}")
    return (" ".join(happened.split())[:300].replace("|", "/"), *numbers, holds)


if __name__ == "__main__":
    sys.exit(main())
