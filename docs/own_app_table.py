"""Writes the table of docs/own-app.md: what each method needs of the clients of a Flower app."""

from pathlib import Path

from fedsim.methods.any_client import requirements

PAGE = Path(__file__).with_name("own-app.md")
BEGIN, END = "<!-- table -->\n", "<!-- end of table -->"


def table() -> str:
    """The table in Markdown."""
    lines = ["| method | its clients | what replies must have, or which part decides |", "|---|---|---|"]
    for name, client, needs in requirements():
        lines.append(f"| {name} | {client} | {needs or 'nothing more'} |")
    return "\n".join(lines) + "\n"


def with_table(page: str) -> str:
    """The page's text with the table of today."""
    before, rest = page.split(BEGIN)
    after = rest.split(END)[1]
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
