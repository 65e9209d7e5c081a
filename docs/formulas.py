"""Reads the plain-text formulas of docstrings into LaTeX: `theta + sum_k p_k delta_k / a_k`."""

import re

from symbols import BARS, CLOSING, GREEK, JOINS, PROSE, SIGNS, STOPS, WORDS, Token, bare, english, number, symbol

TIMES = "\\times "
FRACTION = r"\\frac(\{([^{}]|\{[^{}]*\})*\}){2}"


class StopError(Exception):
    """What follows is no formula."""


def inside_sum(product: list[str], below: str) -> int:
    """The place in a product where a fraction begins: behind the sum whose index its denominator has, else at 0.

    A denominator that is itself a sum over this index takes the whole sum as its numerator.
    """
    for place in range(len(product) - 1, 0, -1):
        index = re.fullmatch(r"\\sum\s*(_\{\w\})\s*", product[place - 1])
        if index and index[1] in below:
            return place - 1 if re.search(rf"\\sum\s*{re.escape(index[1])}", below) else place
    return 0


class Reader:
    """Reads a formula from tokens, from `place` on; `place` ends behind its last token."""

    def __init__(self, tokens: list[Token], place: int) -> None:
        self.tokens, self.place = tokens, place
        self.words = self.small = False  # within arguments, which may have words; within a script

    def peek(self, ahead: int = 0) -> Token:
        """The token there; an empty one behind the last."""
        place = self.place + ahead
        return self.tokens[place] if place < len(self.tokens) else Token("end", "", -1, -1, True, True)

    def take(self) -> Token:
        """The next token, which is read."""
        self.place += 1
        return self.tokens[self.place - 1]

    def run(self) -> list[str]:
        """The LaTeX of the longest formula that begins here, in terms; empty: none does."""
        terms, whole, kept = [""], [], self.place
        product: list[str] = []
        while True:
            token = self.peek()
            if token.text in SIGNS or (token.text == "." and token.before):
                if not self.is_operator(token, bool(product)):
                    break
                terms = [*terms[:-1], terms[-1] + "".join(product), SIGNS.get(self.take().text, "\\cdot ")]
                product = []
                continue
            try:
                product = self.factor(product)
            except StopError:
                break
            kept, whole = self.place, [*terms[:-1], terms[-1] + "".join(product)]
        self.place = kept
        return whole

    def is_operator(self, token: Token, follows: bool) -> bool:
        """Whether the sign joins two terms: as much white space is on its left as on its right, or it is a sign."""
        if token.text in "-+" and not follows:
            return not token.after
        return follows and token.before == token.after

    def factor(self, product: list[str]) -> list[str]:
        """The product with one more factor; a division makes a fraction of it."""
        token = self.peek()
        if token.kind == "number" and product and product[-1].strip() in GREEK.values():
            raise StopError  # "gamma 1" are two words
        if token.text != "/":
            gap = "\\," * (token.text == "[" and token.before and bool(product))  # a shape is no index
            return [*product, gap + self.scripted(self.atom(), token)]
        if not product or token.before != token.after:
            raise StopError
        kept = self.place
        self.take()
        first = self.peek()
        below = self.scripted(self.atom(), first)
        try:
            while first.text in ("sum", "mean") and token.before and self.peek().text != "/":
                below += self.scripted(self.atom(), self.peek(-1))
        except StopError:
            pass
        assert self.place > kept
        if self.small:
            return [*product, "/", below]
        first = inside_sum(product, below) if token.before else len(product) - 1
        above, rest = "".join(product[first:]), product[:first]
        return [*rest, f"\\frac{{{bare(above)}}}{{{bare(below)}}}"]

    def atom(self) -> str:
        """A number, a symbol, a function with its arguments, or a group."""
        token = self.peek()
        if token.kind == "number":
            return number(self.take().text)
        if token.text == "...":
            return f"\\{self.take().text.replace('...', 'dots ')}"
        if token.text in CLOSING:
            return self.group()
        if token.text in ("|", "||") and not token.after:
            return self.bars(token.text)
        if token.kind != "name" or not self.is_symbol(token):
            raise StopError
        self.take()
        times = (
            token.text == "x"
            and token.before
            and token.after
            and (self.peek().kind == "number" or self.peek().text == "(")
        )
        return TIMES if times else symbol(token.text)

    def is_symbol(self, token: Token) -> bool:
        """Whether a name belongs to a formula, and is no English word."""
        name = token.text.rstrip("'+")
        if name in PROSE:
            return False
        following, last = self.peek(1), self.peek(-1) if self.place else Token("end", "", -1, -1, True, True)
        if len(re.sub(r"\d", "", name)) == 1 and not (name in ("a", "A", "I") and english(following) and token.after):
            return True
        if re.sub(r"\d+$", "", name) in GREEK:
            return True
        if not token.after and following.text in "(_^[":
            script = self.peek(2).text
            return following.text != "_" or name in WORDS or name.isupper() or (len(script) <= 2 and len(name) <= 5)
        if name in WORDS and following.kind in ("name", "number", "sign") and following.text not in STOPS:
            return not english(following)
        before = last.text in JOINS and last.before == last.after and not english(following)
        acronym = (
            name.isupper()
            and self.place
            and last.kind in ("name", "sign")
            and not last.text.isupper()
            and not (english(last) and last.before)
        )
        return before or (following.text in JOINS and following.before == following.after) or bool(acronym)

    def scripted(self, latex: str, token: Token) -> str:
        """The symbol with what follows it without a space: _sub, ^sup, a hat, arguments."""
        while not self.peek(-1).after:
            sign = self.peek()
            if sign.text == "^" and (sign.after or self.peek(1).text in ",;)"):
                self.take()
                latex = f"\\hat{{{latex}}}"
            elif sign.text in ("_", "^") and not sign.after:
                self.take()
                latex += f"{sign.text}{{{self.script()}}}" + "^{+}" * self.peek(-1).text.endswith("+")
            elif sign.text in ("(", "[") and (token.kind == "name" or (token.kind == "number" and sign.text == "[")):
                inside = self.group(arguments=True)
                latex = f"\\sqrt{{{bare(inside)}}}" if token.text == "sqrt" else latex + inside
            else:
                break
        return latex

    def script(self) -> str:
        """What stands below or above a symbol."""
        small, self.small = self.small, True
        try:
            return self.scripts()
        finally:
            self.small = small

    def scripts(self) -> str:
        """The text of a script."""
        if self.peek().text in ("(", "{"):
            return bare(self.group(arguments=True))
        token = self.take()
        if token.kind not in ("name", "number"):
            raise StopError
        latex = number(token.text) if token.kind == "number" else symbol(token.text.rstrip("+"), small=True)
        if [self.peek(place).text for place in range(3)] == ["(", "i", ")"] and not token.after:
            latex += self.group()  # x_p(i) is the image in place p(i)
        if self.peek().text == "_" and not token.after:
            self.take()
            latex += f"_{{{self.script()}}}"
        if self.peek().text == "," and not self.peek().after and self.peek(1).kind == "name":
            self.take()
            latex += f",{self.script()}"
        return latex

    def group(self, arguments: bool = False) -> str:
        """What stands in brackets, which must be a formula throughout; an argument may be a word."""
        opening, words = self.take().text, self.words
        self.words |= arguments
        inside = ""
        while self.peek().text != CLOSING[opening]:
            inside += self.item()
        self.take()
        self.words = words
        if re.fullmatch(FRACTION, inside) and opening == "(" and not arguments and self.peek().text != "^":
            return inside
        left, right = (f"\\{opening}", f"\\{CLOSING[opening]}") if opening == "{" else (opening, CLOSING[opening])
        return f"\\left{left}{inside}\\right{right}"

    def item(self) -> str:
        """The next formula, separator or word in brackets."""
        token = self.peek()
        if token.text in (",", ";", ":"):
            return f"{self.take().text}\\ "
        if (
            token.text in ("||", "|")
            and token.before == token.after
            and (token.before or self.peek(-1).text not in CLOSING)
        ):
            return f"\\,{BARS[self.take().text]}\\,"
        if token.text == "in":
            return f"\\{self.take().text} "
        kept, inside = self.place, "".join(self.run())
        if self.place > kept:
            return inside
        if self.words and token.kind == "name":
            return f"\\mathrm{{{self.take().text}}}\\ "
        raise StopError

    def bars(self, sign: str) -> str:
        """A norm or an absolute value."""
        self.take()
        inside = "".join(self.run())
        if not inside or self.peek().text != sign:
            raise StopError
        self.take()
        return f"\\left{BARS[sign]} {inside}\\right{BARS[sign]} "
