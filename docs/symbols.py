"""The signs, names and words of which the formulas in docstrings are made."""

import re
from typing import NamedTuple

LETTERS = """alpha beta gamma delta eta theta kappa lambda mu nu xi pi rho sigma tau phi psi
Gamma Delta Theta Lambda Sigma Phi Psi Omega"""
GREEK = {name: f"\\{name}" for name in re.findall(r"\w+", LETTERS)}
GREEK |= {"lam": "\\lambda", "eps": "\\epsilon", "inf": "\\infty", "infinity": "\\infty"}
LARGE = {"sum": "\\sum", "min": "\\min", "max": "\\max", "log": "\\log", "exp": "\\exp", "cos": "\\cos"}
STOPS = (",", ".", ";", ":", ")")
WORDS = {
    "mean",
    "median",
    "argmax",
    "grad",
    "floor",
    "ceil",
    "sqrt",
    "percentile",
    "softmax",
    *LARGE,
}  # functions, also without ()
PROSE = {"the", "of", "is", "in", "for", "true", "false", "else", "where", "with", "and", "over", "than", "to", "or"}
SIGNS = {
    "<-": "\\leftarrow ", "->": "\\to ", ">=": "\\ge ", "<=": "\\le ", "!=": "\\ne ", "*": "\\cdot ",
    "~": "\\;\\sim\\; ",
    "=": "=", "+": "+", "-": "-", "<": "<", ">": ">",
}  # fmt: skip
BARS = {"||": "\\Vert", "|": "\\vert"}
JOINS = ("=", "+", "-", "*", "/", "<-")
CLOSING = {"(": ")", "[": "]", "{": "}"}
TOKEN = re.compile(
    r"(?P<word>[A-Za-z]\w*(?:[.:/][A-Za-z]\w*|-[A-Za-z]\w+)+|[A-Za-z]{2,}-\d+|\w+\(\)|\"[^\"]*\")"
    r"|(?P<number>\d+(?:,\d{3})*(?:\.\d+)?(?:e-?\d+)?(?!\w)|\.\d+)"
    rf"|(?P<name>(?!(?:{'|'.join([*GREEK, *WORDS])})_)[a-z]{{2,}}(?:_[a-z]{{4,}})+"
    r"|(?:[A-Za-z][A-Za-z0-9]*|[0-9](?=[A-Za-z]\b))(?:'+(?![A-Za-z]))?(?:\+(?=[\s,);=_|]|$))?)"
    r"|(?P<sign><-|->|>=|<=|!=|\.\.\.|\|\||[=+*/~<>()\[\]{}|,;:^_-]|\.(?= ))|(?P<other>\S)"
)


class Token(NamedTuple):
    """kind: a group of TOKEN. before, after: whether white space stands there."""

    kind: str
    text: str
    start: int
    end: int
    before: bool
    after: bool


def english(token: Token) -> bool:
    """Whether a token is a word of the sentence around a formula."""
    name = re.sub(r"[\d'+]", "", token.text)
    known = name in GREEK or name in WORDS
    return token.kind == "word" or (token.kind == "name" and len(name) > 1 and name.islower() and not known)


def symbol(name: str, small: bool = False) -> str:
    """A name as LaTeX: Greek, a letter with a number below, an operator, or upright letters."""
    base, primes, plus = re.fullmatch(r"([^'+]*)('*)(\+?)", name).groups()
    after = primes + ("^{+}" if plus else "")
    if base in GREEK:
        return f"{GREEK[base]} {after}"
    if base in LARGE and not small:
        return f"{LARGE[base]} "
    numbered = re.fullmatch(r"([A-Za-z]+)(\d+)", base)
    if numbered and (len(numbered[1]) == 1 or numbered[1] in GREEK):
        return f"{GREEK.get(numbered[1], numbered[1])}_{{{numbered[2]}}}{after}"
    if len(base) == 1 or (small and re.fullmatch(r"[ijkdys]{2}|[ab]{2}", base)):
        return f"{base}{after}"
    upright = "mathrm" if small else "operatorname" if base in WORDS or base.isupper() else "mathrm"
    return f"\\{upright}{{{base.replace('_', chr(92) + '_')}}}{after} "


def number(text: str) -> str:
    """A number as LaTeX: 1e-7 is a power of ten."""
    return re.sub(r"^1e(-?\d+)$", r"10^{\1}", text) + " "


def bare(latex: str) -> str:
    """A group without its brackets, where a fraction or a script makes them needless."""
    found = re.fullmatch(r"\\left[(](.*)\\right[)]|\\left\\\{(.*)\\right\\\}", latex)
    inside = (found[1] or found[2] or "") if found else ""
    return inside if found and inside.count("\\left(") == inside.count("\\right)") and balanced(inside) else latex


def balanced(latex: str) -> bool:
    """Whether every bracket that closes was opened before."""
    depth = 0
    for sign in re.findall(r"\\left|\\right", latex):
        depth += 1 if sign == "\\left" else -1
        if depth < 0:
            return False
    return depth == 0
