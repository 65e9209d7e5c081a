"""A comparison as LaTeX (booktabs): best of each column bold, second underlined."""

from fedsim.results.cell_texts import (
    MISSING,
    CellText,
    accuracy_cells,
    by_group,
    further_cells,
    further_columns,
    head,
    published_cells,
    shown_label,
)
from fedsim.results.compared import Compared

COMMANDS = str.maketrans(
    {
        "&": r"\&",
        "%": r"\%",
        "$": r"\$",
        "#": r"\#",
        "_": r"\_",
        "{": r"\{",
        "}": r"\}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "\\": r"\textbackslash{}",
        MISSING: "--",
        "±": r"$\pm$",
        "Δ": r"$\Delta$",
        "†": r"$^\dagger$",
        "‡": r"$^\ddagger$",
        "<": "$<$",
        ">": "$>$",
    }
)


def escape_latex(text: str) -> str:
    """Text with TeX's special characters escaped, and with Greek and typographic characters as commands."""
    return text.translate(COMMANDS)


def latex_table(comparison: Compared) -> str:
    """A booktabs table with the best of each column bold and the second underlined.

    The title is a comment above it, and the notes are comments below.
    """
    heads = [*head(comparison), *further_columns(comparison).values()]
    lines = [
        "% needs \\usepackage{booktabs}",
        *table_begin(f"{comparison.title}; {comparison.measured} (%)", len(heads), comparison.select),
        latex_row([escape_latex(head) for head in heads]),
        "\\midrule",
    ]
    cells = accuracy_cells(comparison)
    for number, group in enumerate(by_group(comparison)):
        lines += ["\\midrule"] if number else []
        for _, row in group.iterrows():
            further = [latex_number(text) for text in further_cells(comparison, row)]
            lines.append(latex_row([escape_latex(shown_label(row)), *map(_latex_cell, cells[row["label"]]), *further]))
    published = published_cells(comparison)
    if published:
        lines.append("\\midrule")
    for label, printed in published:
        empty = [""] * len(further_columns(comparison))
        lines.append(latex_row([escape_latex(label), *map(_latex_cell, printed), *empty]))
    notes = [f"% {line}" for note in comparison.notes for line in note.splitlines()]
    return "\n".join([*lines, "\\bottomrule", "\\end{tabular}", *notes]) + "\n"


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


def _latex_cell(cell: CellText) -> str:
    mean = {0: "{}", 1: "\\textbf{{{}}}", 2: "\\underline{{{}}}"}[cell.place].format(escape_latex(cell.mean))
    return f"{mean} $\\pm$ {cell.std}" if cell.std else mean


def latex_row(texts: list[str]) -> str:
    """A line of a LaTeX table."""
    return " & ".join(texts) + " \\\\"
