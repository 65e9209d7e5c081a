"""The handshake: before round 1, and whenever a new node appears, the server asks the node which client it is.

The server knows a client by its name. Its node may change, because a site that restarts can come back as another node.
Every wait has a time limit.
"""

import logging
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import NoReturn

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from fedsim.common.errors import CLIENT_APP_RAISED, USER_ERROR, ClientFailedError, UserError, nearest
from fedsim.common.lists import first_few
from fedsim.data.fingerprint import difference
from fedsim.settings import RunSettings
from fedsim.tensors.records import Config
from strategies.wire.reply_checks import RESTART, Expected, RejectedReplyError, checked, one_line
from strategies.wire.sites import (
    UNANSWERED,
    Identify,
    Site,
    check_names,
    check_site,
    implausible,
    impostor,
    name_of,
    read_sites,
)

POLL_SECONDS = 1.0
FIRST_SECONDS = 5.0  # until the first line that somebody is missing
SAY_SECONDS = 30.0  # from one such line to the next
STARTING_SECONDS = 60.0  # that a site's process may take to start on a busy machine, until somebody is warned
ASK_AGAIN_SECONDS = 120.0
ASKED_AT_ONCE = 200  # nodes, whose answers are then in memory together
MOST_REASON = 20_000  # characters of a node's own error text that are shown
NOT_ONLINE = "its site is not online"

CheckLate = Callable[[Site], None]

logger = logging.getLogger("fedsim")
app_logger = logging.getLogger("flwr.fedsim")  # of an app, where Flower shows its lines


class Roster:
    """The nodes of all clients (and of the target's site, when there is one), by name.

    `sites` keeps the order of `clients`; a client that has not answered yet has the node UNANSWERED. Where nodes have
    keys, `identify` says which site owns a node's key, and the node is admitted only in the role of that site.
    `frozen` is the hash of the server's frozen weights: they do not travel, so every node has to have the same ones.
    `names` are the hashes of the names of its classes and features, which do not travel either.
    """

    def __init__(
        self,
        grid: Grid,
        clients: Sequence[str],
        classes: int,
        run_config: Config,
        target: str = "",
        identify: Identify | None = None,
        frozen: str = "",
        names: Mapping[str, str] | None = None,
    ) -> None:
        self.grid = grid
        self.classes = classes
        self.run_config = run_config
        self.identify = identify
        self.frozen = frozen
        self.names = names or {}
        self.sites = {client: Site(client) for client in clients}
        self.target = Site(target, role="target") if target else None
        self.check_late: CheckLate | None = None  # of the data of a site that was not there when the run began
        self._examples_limit = 0.0  # of sites that come back; at first all sites are awaited, and then compared at once
        self.tolerant = False  # True: a client that fails when it comes back counts as missing and does not end the run
        self._online: set[int] = set()
        self._asked: set[int] = set()
        self._waiting: dict[str, int] = {}  # node by id of the question that it has not answered yet
        self._since: dict[int, float] = {}  # when a node was asked
        self._others: dict[int, str] = {}  # by node id: why this run does not need it, or which client it claims to be
        self._away: dict[str, float] = {}  # the time at which a client disappeared, when the others continue without it

    def call(self, wait: float, clients: Collection[str] | None = None, enough: int | None = None) -> list[str]:
        """Clients (of those asked for, otherwise all and the target) that are not online after at most `wait` seconds.

        Returns as soon as none is missing or, with `enough`, so many are online. Raises UserError or ClientFailedError
        for a node that cannot serve this experiment.
        """
        started = time.monotonic()
        deadline = started + wait
        next_line = started + FIRST_SECONDS
        while True:
            self._listen()
            missing = self.missing(clients)
            asked = self._all_sites() if clients is None else clients
            allowed = 0 if enough is None else len(asked) - enough
            if len(missing) <= allowed or time.monotonic() >= deadline:
                return missing
            now = time.monotonic()
            if now >= next_line:
                next_line = now + SAY_SECONDS
                self._say_missing(missing, deadline - now, wait)
            time.sleep(POLL_SECONDS)

    def _say_missing(self, missing: Sequence[str], left: float, wait: float) -> None:
        """Logs who is missing. It is no warning while their sites may just be starting.

        left, wait: the seconds of the wait that are left, and all of them
        """
        may_start = len(missing) <= len(self._silent)
        is_late = left < wait - STARTING_SECONDS
        level = logging.INFO if may_start and not is_late else logging.WARNING
        who = first_few(missing)
        who_else = self._who_else()
        logger.log(level, "waiting for %s (%.0f s more)%s", who, left, who_else)

    def gather(self, run: RunSettings, clients: Collection[str] | None = None) -> None:
        """Waits for the clients (at first for all and the target's site), for at most `run.wait_for_sites` seconds.

        ClientFailedError names the missing ones. With `run.on_client_failure = "continue"` one client is enough. The
        start of the run then waits for the others as above; a phase (`clients` given) waits for each until
        `run.patience` seconds after it disappeared.
        """
        self.tolerant = run.on_client_failure == "continue"
        here = [] if clients is None else list(clients)
        missing = self._wait_for(here, run)
        self._refuse_implausible(run.examples_limit)
        self._examples_limit = run.examples_limit
        missing = self.missing(missing)
        needed = here or list(self.sites)
        nobody_is_here = set(needed) <= set(missing)
        if missing and (not self.tolerant or nobody_is_here):
            waited = f"within {run.wait_for_sites:g} s"
            raise ClientFailedError(f"no node for {first_few(missing)} {waited}{self._who_else()}")
        if clients is not None:
            return
        for client in missing:
            logger.warning("the run continues without client %r: %s", client, NOT_ONLINE)
            self.give_up(client)

    def _wait_for(self, clients: list[str], run: RunSettings) -> list[str]:
        """Waits for these clients, or for all when there are none, as `gather` says; returns who is missing then."""
        if not clients:
            return self.call(run.wait_for_sites)
        if not self.tolerant:
            target = [self.target.client] if self.target else []
            return self.call(run.wait_for_sites, clients + target)
        patience = self._patience_left(run.patience, clients)
        missing = self.call(patience, clients)
        if set(clients) <= set(missing):
            missing = self.call(run.wait_for_sites, clients, enough=1)
        return missing

    def fingerprints(self) -> dict[str, dict[str, int | str]]:
        """Fingerprints of the sites' data by client; empty in a simulation, where the server reads the same files."""
        return {client: site.data for client, site in self._all_sites().items() if site.data}

    def missing(self, clients: Collection[str] | None = None) -> list[str]:
        """Clients with an unknown node, or a node that was not online at the last call."""
        sites = self._all_sites()
        names = sites if clients is None else clients
        return [client for client in names if sites[client].node_id not in self._online]

    def _all_sites(self) -> dict[str, Site]:
        """The sites of the clients, and that of the target where there is one, by name."""
        sites = dict(self.sites)
        if self.target:
            sites[self.target.client] = self.target
        return sites

    def give_up(self, client: str) -> None:
        """Does not wait for a client any more until it has come back once."""
        self._away[client] = -math.inf

    def _patience_left(self, patience: float, clients: Collection[str]) -> float:
        """The number of seconds to wait for those of the clients that are away now."""
        self._listen()
        missing = self.missing(clients)
        now = time.monotonic()
        away = {client: since for client, since in self._away.items() if client not in clients}
        left = 0.0
        for client in missing:
            since = self._away.get(client, now)
            away[client] = since
            left = max(left, patience - (now - since))
        self._away = away
        return left

    def _refuse_implausible(self, limit: float) -> None:
        """Refuses a site that claims far more examples than the others, because it would dominate the average."""
        for client, reason in implausible(self._examples(), limit).items():
            if not self.tolerant:
                raise UserError(f"client {client!r}: {reason}")
            logger.warning("client %r is refused: %s", client, reason)
            node = self.sites[client].node_id
            self._others[node] = f"{client}, refused"
            self.sites[client] = Site(client)

    def _examples(self) -> dict[str, int]:
        """The numbers of examples of the clients that have answered, by client."""
        return {site.client: site.examples for site in self.sites.values() if site.node_id != UNANSWERED}

    def _check_return(self, site: Site) -> None:
        """Raises UserError when a site comes late with data that do not fit the run, or when it comes back during the
        run with other data, or with another number of examples with which it no longer fits the others. It may come
        back within a phase, long before `gather` compares all sites again."""
        earlier = self.target if site.role == "target" else self.sites.get(site.client)
        if earlier is None:
            return
        if earlier.data:
            differs = difference({site.client: earlier.data}, {site.client: site.data})
            if differs:
                came_back = f"client {site.client!r} came back with other data than the run began with"
                raise UserError(f"{came_back} ({differs}); {RESTART}")
        has_other_examples = site.role == "source" and earlier.examples != site.examples
        if self._examples_limit and has_other_examples:
            self._refuse_out_of_proportion(site)
        if self.check_late and site.data and not earlier.data:  # last, because it records the data
            self.check_late(site)

    def _refuse_out_of_proportion(self, site: Site) -> None:
        """Raises UserError when a site's number of examples does not fit the others any more."""
        counts = {**self._examples(), site.client: site.examples}
        refused = implausible(counts, self._examples_limit)
        for client, reason in refused.items():
            came_back = f"client {site.client!r} came back with {site.examples} examples"
            if client != site.client:
                reason = f"with it client {client!r} would be out of proportion: {reason}"
            raise UserError(f"{came_back}; {reason}")

    @property
    def _silent(self) -> set[int]:
        """The nodes online that were asked and have not answered yet."""
        return self._online & set(self._waiting.values())

    def _who_else(self) -> str:
        """Who is online, for a line that says who is missing."""
        here = [client for client, site in self.sites.items() if site.node_id in self._online]
        others = [name for node, name in self._others.items() if node in self._online]
        silent = len(self._silent)
        text = f"; {len(self._online)} nodes online"
        if here:
            text = f"; online: {first_few(here)}"
        if silent:
            text += f"; {silent} of the nodes online have not answered yet"
        if others:
            text += f"; nodes that this run does not need: {first_few(others)}"
        return text

    def _listen(self) -> None:
        """Asks the new nodes, and processes the answers that have arrived."""
        self._online = set(self.grid.get_node_ids())
        self._asked &= self._online | set(self._waiting.values())
        now = time.monotonic()
        for key, node in list(self._waiting.items()):  # a busy SuperLink may lose messages
            waited = now - self._since[node]
            if waited > ASK_AGAIN_SECONDS:
                del self._waiting[key]
                self._asked.discard(node)
        fresh = sorted(self._online - self._asked)
        if fresh:
            self._ask(fresh, now)
        self._hear()

    def _ask(self, fresh: list[int], now: float) -> None:
        """Asks these nodes, some at a time."""
        config: Config = {**self.run_config, "round": 0, "phase": "handshake", "client": ""}
        content = RecordDict({"config": ConfigRecord(config)})
        for start in range(0, len(fresh), ASKED_AT_ONCE):
            if start:
                self._hear()
            part = fresh[start : start + ASKED_AT_ONCE]
            questions = [Message(content, node, "query.handshake") for node in part]
            ids = self.grid.push_messages(questions)
            for key, node in zip(ids, part):
                if key:
                    self._waiting[key] = node
            self._asked.update(part)
            self._since.update(dict.fromkeys(part, now))

    def _hear(self) -> None:
        """Process the answers that have arrived."""
        if not self._waiting:
            return
        for reply in self.grid.pull_messages(list(self._waiting)):
            question = reply.metadata.reply_to_message_id
            node = self._waiting.pop(question, None)
            if node is not None:
                self._take(node, reply)

    def _take(self, node: int, reply: Message) -> None:
        """Accepts or refuses the answer of a node; an error of the connection is neither."""
        if reply.has_error():
            if reply.error.code == CLIENT_APP_RAISED:
                self._refuse(node, str(reply.error.reason))
            else:
                self._asked.discard(node)  # it disappeared before it could answer, and is asked again when it is back
            return
        try:
            self._admit(node, reply)
        except RejectedReplyError as error:
            self._refuse(node, f"its answer is refused: {error}")
        except UserError as error:
            if not self.tolerant:
                raise
            self._refuse(node, str(error))

    def _admit(self, node: int, reply: Message) -> None:
        """Accepts the answer of a node, or raises RejectedReplyError or UserError."""
        source = reply.metadata.src_node_id
        if source != node:
            raise RejectedReplyError(f"it comes from another node, {source}")
        token = str(self.run_config["token"])
        expected = Expected("", token, 0, "handshake")
        sites = checked(partial(read_sites, node), reply.content, expected)
        for site, holds in sites:
            self._take_site(node, site, holds)

    def _take_site(self, node: int, site: Site, holds: str) -> None:
        """Notes one of a node's clients, or that this run does not need it.

        Raises UserError when two nodes claim to be the same client. Where a node claims another role than its key has,
        the run continues without it.
        """
        claim, reason = impostor(node, site.client, site.role, self.identify)
        if claim:
            self._others[node] = claim
            logger.warning("%s: refused", reason)
            return
        expected = self.sites.get(site.client)
        if site.role == "target" and self.target:
            expected = self.target
        if expected is None or site.client != expected.client or site.role != expected.role:
            self._others[node] = holds
            return
        if expected.node_id in self._online and expected.node_id != node:
            raise UserError(f"two nodes say that they are {site.client!r}; every client needs one node")
        check_site(site, self.classes, self.frozen)
        check_names(site, self.names)
        self._check_return(site)
        self._keep(site)

    def _keep(self, site: Site) -> None:
        if site.role == "target":
            self.target = site
        else:
            self.sites[site.client] = site

    def _refuse(self, node: int, reason: str) -> None:
        """Handles a node that answers with an error: ends the run, or gives up this client when others may continue."""
        if not self.tolerant:
            self._end_run(node, reason)
        line = one_line(reason[-MOST_REASON:])
        sites = [site for site in self._all_sites().values() if site.node_id == node]
        if not sites:
            who = name_of(node, self.identify)
            logger.warning("%s fails in the handshake: %s", who, line)
            self._others[node] = f"{who}, which fails"
            return
        names = ", ".join(repr(site.client) for site in sites)
        logger.warning("client %s came back and fails: %s", names, line)
        for site in sites:  # its data are compared again when it is back
            self._keep(Site(site.client, role=site.role, data=site.data))

    def _end_run(self, node: int, reason: str) -> NoReturn:
        """Raises UserError when a node names a fault that its user can correct, otherwise ClientFailedError."""
        who = name_of(node, self.identify)
        if USER_ERROR in reason:
            _, message = reason.split(USER_ERROR, 1)
            whose = f"{who}: " if self.identify else ""
            raise UserError(whose + one_line(message))
        text = reason[-MOST_REASON:]
        raise ClientFailedError(f"{who} failed in the handshake:\n{text.rstrip()}")


class OpenRoster(Roster):
    """The nodes of an app, whose clients are learned from their answers before the first round.

    least: how many clients are awaited. All nodes that are online by then are met; a client that comes later, under a
    name that is not known, takes no part.
    """

    def __init__(self, grid: Grid, least: int, run_config: Config, classes: int = 0, target: str = "") -> None:
        super().__init__(grid, (), classes, run_config, target)
        self.least = least
        self.is_open = True

    def call(self, wait: float, clients: Collection[str] | None = None, enough: int | None = None) -> list[str]:
        """Learns the names of the clients at first; then as `Roster.call`.

        Raises ClientFailedError when fewer than `least` have answered after `wait` seconds.
        """
        if self.is_open:
            self._meet(time.monotonic() + wait)
            self.sites = {name: self.sites[name] for name in sorted(self.sites)}
            self.is_open = False
        return super().call(wait, clients, enough)

    def _meet(self, deadline: float) -> None:
        """Asks all nodes that are online, until enough have said who they are; logs once for whom it waits."""
        next_line = time.monotonic() + FIRST_SECONDS
        while True:
            self._listen()
            target_is_away = self.target is not None and bool(self.missing([self.target.client]))
            is_complete = len(self.sites) >= self.least and not self._waiting
            if is_complete and not target_is_away:
                return
            now = time.monotonic()
            lacks = self._lacks(target_is_away)
            if now >= deadline:
                self._refuse_few(lacks, target_is_away)
            if now >= next_line:
                next_line = math.inf
                waiting = f"fedsim: waiting {deadline - now:.0f} s more (wait_for_sites)"
                answered = f"{len(self.sites)} clients have answered ({first_few(self.sites)})"
                app_logger.warning("%s: %s%s", waiting, answered, lacks)
            time.sleep(POLL_SECONDS)

    def _refuse_few(self, lacks: str, target_is_away: bool) -> NoReturn:
        """Raises ClientFailedError, which says who has answered in time and what `lacks`."""
        near = ""
        if self.target and target_is_away:
            near = nearest(self.target.client, self.sites)
        answered = f"{len(self.sites)} clients answered in time"
        raise ClientFailedError(f"{answered}{lacks}; {near}here are: {first_few(self.sites)}")

    def _lacks(self, awaited: bool) -> str:
        """Returns for whom the start waits, in words; awaited: whether the unseen domain's client is away."""
        text = ""
        if awaited and self.target:
            text = f", and not {self.target.client!r}, which holds the unseen domain"
        if len(self.sites) < self.least:
            text += f"; at least {self.least} are awaited (min_available_nodes)"
        if self._silent:
            text += f"; {len(self._silent)} of the nodes online have not answered yet"
        return text

    def _take_site(self, node: int, site: Site, holds: str) -> None:
        """Notes one of a node's clients, also one of an unknown name while names are learned."""
        if self.is_open and site.role == "source":
            self.sites.setdefault(site.client, Site(site.client))
        super()._take_site(node, site, holds)
