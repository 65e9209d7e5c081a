"""Typesets the plain-text formulas of docstrings as MathML, which browsers show without a script.

A docstring writes a formula as one types it: `theta <- theta + sum_k p_k delta_k / a_k`. Here a run of symbols and
operators is found among the words and read into LaTeX, which latex2mathml turns into MathML. All else stays text.
"""

import re
from collections.abc import Callable

from docutils import nodes
from formulas import Reader
from latex2mathml.converter import convert
from sphinx.writers.html5 import HTML5Translator
from symbols import CLOSING, GREEK, TOKEN, Token

# A name of several letters, and what may stand beside it without an operator.
NAMED = r'(?:<mrow>(?:<mi mathvariant="normal">\w</mi>){2,}</mrow>|<mi>\w{2,}</mi>)'
BEFORE_NAME = re.compile(rf"(</m(?:i|n|row|sub|sup|subsup|frac)>)(?=(?:<m(?:sub|sup|subsup)>)?{NAMED})")
AFTER_NAME = re.compile(
    rf"(?<!<msub>)(?<!<msup>)(?<!<msubsup>)({NAMED})(?=<m(?:i|n|sub|sup|subsup|frac)>|<mrow>(?!<mo))"
)
SPACE = r'\1<mspace width="0.2em"/>'
LONG = 60  # characters of LaTeX, from which on a formula may be broken between its terms
ARROWS = {"<-": "←", "->": "→", ">=": "≥", "<=": "≤"}


def typeset(text: str, escaped: Callable[[str], str]) -> str:
    """The text as Markdown with its formulas as math roles. escaped: what is done to the words between them."""
    parts = re.split(r"( {2,})", text)
    if len(parts) > 1:  # columns of a block: no formula reaches over the gap
        return "".join(" &emsp;" if part.isspace() else typeset(part, escaped) for part in parts)
    tokens = [
        Token(str(found.lastgroup), found[0], *found.span(), spaced(text, found.start() - 1), spaced(text, found.end()))
        for found in TOKEN.finditer(text)
    ]
    shown, place, done = "", 0, 0
    while place < len(tokens):
        reader = Reader(tokens, place)
        terms = reader.run()
        start, end = tokens[place].start, tokens[reader.place - 1].end
        if terms and tells(text[start:end]):
            shown += words(text[done:start], escaped) + roles(terms)
            done, place = end, reader.place
        else:
            place += 1
            while place < len(tokens) and tokens[place].kind in ("name", "number") and not free(tokens, place):
                place += 1  # a formula does not begin in the middle of a word
    return shown + words(text[done:], escaped)


def free(tokens: list[Token], place: int) -> bool:
    """Whether a token is behind white space or behind a bracket that opens."""
    return tokens[place].before or tokens[place - 1].text in CLOSING


def words(text: str, escaped: Callable[[str], str]) -> str:
    """The words between formulas, with real arrows."""
    return escaped(re.sub("|".join(ARROWS), lambda found: ARROWS[found[0]], text))


def spaced(text: str, place: int) -> bool:
    """Whether white space, or an end of the text, is at that place."""
    return not 0 <= place < len(text) or text[place].isspace()


def tells(run: str) -> bool:
    """Whether a run of symbols is a formula beyond doubt: it has a script, a relation, or a Greek letter."""
    known = any(re.sub(r"\d", "", name) in GREEK for name in re.findall(r"[A-Za-z0-9]+", run))
    without = re.sub(r"\b[a-z]+(_[a-z]{3,})+", "name", run)  # names of settings
    return known or bool(
        re.search(r"[\w)'][_^][\w({]|<-|->| ([=*~+<>]|[<>!]=) |[\d)] / | / [\d(]|\|\||\w\(\w\)", without)
    )


def roles(terms: list[str]) -> str:
    """The terms of a formula as math roles: a browser breaks no line within one."""
    joined = terms if sum(map(len, terms)) > LONG else ["".join(terms)]
    return "".join(f"{{math}}`{term.strip()}`" for term in joined if term)


def mathml(latex: str) -> str:
    """A formula as MathML. A sign at its beginning joins it to the one before, and names have spaces around them."""
    spaced_words = AFTER_NAME.sub(SPACE, BEFORE_NAME.sub(SPACE, convert(latex)))
    found = re.sub(
        r"(<mrow>)<mo>(&#x0002B;|&#x02212;|&#x0003D;|&#x02190;)", r'\1<mo form="infix">\2', spaced_words, count=1
    )
    return found.replace('display="inline"', 'displaystyle="true"' if re.search(r"\\(sum|frac)", latex) else "")


def visit_math(page: HTML5Translator, node: nodes.math | nodes.math_block) -> None:
    """Sphinx's renderer of formulas, by the name `mathml`."""
    page.body.append(mathml(node.astext()))
    raise nodes.SkipNode
