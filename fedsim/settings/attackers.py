"""The setting `run.attackers`: which clients of a simulation lie, and how."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from fedsim.common.errors import nearest

HONEST = "none"  # a name that a grid may give to a client that does not lie
FORM = re.compile(r"(?P<name>\w+)(?:\((?P<option>[^()]*)\))?")
# {attack: its option where none is given}; None: computed, a text: a name.
ATTACKS: dict[str, float | str | None] = {
    "label_flip": 0.0,
    "label_shift": 1.0,
    "sign_flip": 1.0,
    "scaled": 10.0,
    "noise": 0.1,
    "alie": None,
    "mimic": "",
    "drift": 1.0,
}
OF_LABELS = ("label_flip", "label_shift")  # attacks on the client's data; the others are on what it sends


@dataclass(frozen=True)
class Attack:
    """What a client does in place of what it should; strategies/attacks.py has the formulas.

    number: the option of an attack that has a number; None where it is to be computed
    client: the option of `mimic`, the client that is copied; empty for the first honest one
    """

    name: str
    number: float | None = None
    client: str = ""


def parse_attack(text: str) -> Attack:
    """The attack of a text such as `sign_flip`, `scaled(10)` or `mimic(rot0)`; ValueError for what is none.

    >>> parse_attack("scaled(3)")
    Attack(name='scaled', number=3.0, client='')
    """
    match = FORM.fullmatch(text.strip())
    name = match["name"] if match else text
    if not match or name not in ATTACKS:
        raise ValueError(f"unknown attack {text!r}; {nearest(name, ATTACKS)}known: {', '.join(ATTACKS)}")
    usual, option = ATTACKS[name], match["option"]
    if isinstance(usual, str):
        return Attack(name, client=option or usual)
    if option is None:
        return Attack(name, usual)
    if name == "label_flip":
        raise ValueError(f"{text!r}: label_flip has no option")
    try:
        number = float(option)
    except ValueError:
        raise ValueError(f"{text!r}: write a number in the brackets, as in {name}(0.5)") from None
    most = 1.0 if name == "label_shift" else 1e6
    if not 0 <= number <= most:
        raise ValueError(f"{text!r}: the number is from 0 to {most:g}")
    return Attack(name, number)


def checked(attackers: Mapping[str, str]) -> dict[str, str]:
    """The attackers without the honest ones.

    Raises ValueError for an attack that does not exist, and for an honest client of a domain whose clients lie.
    """
    lying = {client: text for client, text in attackers.items() if text != HONEST}
    for text in lying.values():
        parse_attack(text)
    for client in attackers.keys() - lying.keys():
        domain = client.partition("/")[0]
        if domain in lying:
            raise ValueError(f"{client!r} cannot be honest where all clients of {domain!r} lie; name those that lie")
    return lying


def attack_on(attackers: Mapping[str, str], client: str) -> Attack | None:
    """The attack of a client, which is named itself or by its domain; None for an honest one."""
    text = attackers.get(client) or attackers.get(client.partition("/")[0])
    return parse_attack(text) if text else None


def liars_text(attackers: Iterable[Mapping[str, str]]) -> str:
    """The attackers of several runs in words, for the titles of tables; empty where all clients are honest.

    >>> liars_text([{"rot15": "sign_flip"}])
    'with one liar (rot15: sign_flip)'
    """
    different = {tuple(sorted(one.items())) for one in attackers}
    if not different or different == {()}:
        return ""
    if len(different) > 1:
        return "with different liars"
    (pairs,) = different
    named = ", ".join(f"{client}: {text}" for client, text in pairs)
    return f"with {'one liar' if len(pairs) == 1 else f'{len(pairs)} liars'} ({named})"
