"""Pieces of a LaTeX table with lines between its rows, as a reproduction of a paper's table prints it."""

from fedsim.common.tables import escape_latex


def table_begin(title: str, columns: int, select: str) -> list[str]:
    """The lines above the headings. The title is a comment; an oracle's is in the table, where nobody overlooks it."""
    title = " ".join(title.splitlines())
    shown = f"\\multicolumn{{{columns}}}{{l}}{{{escape_latex(title)}}} \\\\"
    return [
        f"% {title}",
        "\\begin{tabular}{l" + "r" * (columns - 1) + "}",
        "\\toprule",
        *([shown] if select == "oracle" else []),
    ]


def latex_number(text: str) -> str:
    """The text of a number. TeX prints a leading minus correctly only in mathematics mode."""
    return f"$-${text[1:]}" if text.startswith("-") else escape_latex(text)


def latex_row(texts: list[str]) -> str:
    """A line of a LaTeX table."""
    return " & ".join(texts) + " \\\\"
