"""Findings: what the files of a data set show, and what no number of a run would tell.

A reader gives the findings of its domains once. `fedsim datasets`, the start of a run, `environment.json`, the notes
below tables and the report show the same ones. A grave finding refuses the run, unless `data.accept` has its kind.
"""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from pydantic import TypeAdapter, ValidationError

from fedsim.common.errors import UserError, printable
from fedsim.settings.data import ACCEPTED

MOST_SENT = 20  # findings of a site
LONGEST_SENT = 4000  # characters of one of them


@dataclass(frozen=True)
class Finding:
    """One thing that the files of a data set show.

    kind: one of `ACCEPTED`, the values of data.accept; other kinds are never grave
    where: the domain, the table or the folder
    count: how many images, masks or rows it concerns
    text: what was found, a clause that names `where` and `count` in words
    remedy: what can be done about it, a clause
    is_grave: whether a run is refused for it
    """

    kind: str
    where: str
    count: int
    text: str
    remedy: str = ""
    is_grave: bool = False

    def __post_init__(self) -> None:
        if self.is_grave and self.kind not in ACCEPTED:
            raise ValueError(f"no value of data.accept is called {self.kind!r}, so that nobody could accept it")

    @property
    def line(self) -> str:
        """The text and the remedy; of a grave finding also the setting that accepts it."""
        clauses = [self.text, self.remedy]
        if self.is_grave:
            clauses.append(f"data.accept = [{self.kind!r}] takes the data as they are")
        return "; ".join(filter(None, clauses))

    def record(self) -> dict[str, Any]:
        """The fields as environment.json has them."""
        return asdict(self)


FINDING = TypeAdapter(Finding)


def refuse_grave(findings: Iterable[Finding], accepted: Collection[str]) -> None:
    """Raises UserError for the first grave finding whose kind is not accepted, and says how many others there are."""
    grave = [finding for finding in findings if finding.is_grave and finding.kind not in accepted]
    if not grave:
        return
    first, *others = grave
    line = first.line
    if others:
        line += f" (and {len(others)} more such findings; fedsim datasets PATH lists them)"
    raise UserError(line)


def sent_findings(findings: Iterable[Finding], folder: str) -> list[str]:
    """The findings of a site as it sends them, in JSON, the grave ones first, without the path of its data folder."""
    texts = []
    for finding in sorted(findings, key=lambda finding: not finding.is_grave):
        record = finding.record()
        for name in ("where", "text", "remedy"):
            record[name] = record[name].replace(folder, "its data folder")
        texts.append(json.dumps(record))
    short = [text for text in texts if len(text) <= LONGEST_SENT]
    return short[:MOST_SENT]


def read_findings(client: str, texts: object) -> tuple[Finding, ...]:
    """The findings that the site of a client has sent, each with the client's name in front.

    Raises ValueError for anything but a list of what `sent_findings` makes. The texts are somebody else's.
    """
    if not isinstance(texts, list) or len(texts) > MOST_SENT:
        raise ValueError(f"its findings are no list of at most {MOST_SENT}")
    findings = []
    for sent in texts:
        if not isinstance(sent, str) or len(sent) > LONGEST_SENT:
            raise ValueError("a finding is no text, or too long")
        try:
            finding = FINDING.validate_json(sent, strict=True)
        except ValidationError:
            raise ValueError("a finding has another form than those of fedsim") from None
        text = printable(finding.text)
        if not text.startswith(client):
            text = f"{client}: {text}"
        finding = replace(
            finding,
            text=text,
            where=printable(finding.where),
            remedy=printable(finding.remedy),
        )
        findings.append(finding)
    return tuple(findings)


def lines_of(findings: Iterable[Finding], accepted: Collection[str] = ()) -> list[str]:
    """What a run says of its findings: a line for each, without advice for those that the settings accept."""
    return [finding.text if finding.kind in accepted else finding.line for finding in findings]


def recorded_texts(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """The texts of findings as environment.json has them."""
    return [str(record["text"]) for record in records]


def joined_names(names: Sequence[str], most: int = 4) -> str:
    """The first names, and how many others there are: 'a, b and 3 more'."""
    shown = ", ".join(names[:most])
    if len(names) > most:
        shown += f" and {len(names) - most} more"
    return shown
