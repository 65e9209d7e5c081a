"""Settings as keywords of a Python call, under the names that they have in an experiment file."""

from collections.abc import Collection, Mapping

from fedsim.common.errors import UserError, nearest
from fedsim.common.values import Json, JsonTable
from fedsim.settings.experiment import SECTIONS, Experiment, assign, from_table

WHOLE = (*SECTIONS, "method", "parts")  # keywords that are a whole section of the file


def experiment_of(
    method: str, keywords: Mapping[str, Json], parts: Collection[str] = (), base: Experiment | None = None
) -> Experiment:
    """The experiment of a method with these settings; base: the experiment in which they are changed.

    A keyword is the name of a setting (`lr=0.01`), a part or a slot of the method (`proximal={"mu": 0.1}`), or a
    section (`train={"lr": 0.01}`).

    parts: what the method's own keywords may be called. Raises UserError, with the nearest name, for any other keyword,
    and for a value that a setting cannot have. A setting with one value by itself and another in its section is
    refused.

        >>> experiment_of("fedprox", {"lr": 0.1, "proximal": {"mu": 0.5}}, ["proximal"]).train.lr
        0.1
    """
    table: JsonTable = {"method": {"name": method}}
    for name, value in keywords.items():
        if name in WHOLE:
            _merge_section(table, name, value)
        elif name == "name":
            table["name"] = value
        else:
            section = section_of(name, parts)
            _refuse_second(table.get(section, {}), name, value)
            assign(table, f"{section}.{name}", value)
    return base.replace(**table) if base else from_table(table, "settings")


def section_of(name: str, parts: Collection[str]) -> str:
    """The section of the experiment file in which a setting stands; UserError for a name that is in none."""
    sections = [section for section, kind in SECTIONS.items() if name in kind.model_fields]
    sections += ["method"] if name in parts else []
    if len(sections) > 1:
        ways = " or ".join(f"{section}={{{name!r}: ...}}" for section in sections)
        raise UserError(f"{name} could be meant in two sections; write {ways}")
    if sections:
        return sections[0]
    settings = [field for kind in SECTIONS.values() for field in kind.model_fields]
    raise UserError(f"no setting is called {name!r}; {nearest(name, [*settings, *parts])}the names are those of the "
                    "experiment file, and of the method's parts")  # fmt: skip


def _merge_section(table: JsonTable, name: str, value: Json) -> None:
    """Adds the settings of a whole section to the table."""
    if not isinstance(value, Mapping):
        raise UserError(f"{name} is a section: write {name}={{...}} with its settings, not {value!r}")
    section = table.setdefault(name, {})
    for setting, of_setting in value.items():
        _refuse_second(section, setting, of_setting)
        section[setting] = of_setting


def _refuse_second(section: Mapping[str, Json], name: str, value: Json) -> None:
    """Raises UserError when a setting has been given another value already."""
    first = section.get(name, value)
    if first != value:
        raise UserError(f"{name} is given twice, as {first} and {value}; give it once")
