"""Writes the table of docs/own-app.md: what each method needs of the clients of a Flower app."""

from pathlib import Path

from fedsim.methods.any_client import requirements

PAGE = Path(__file__).with_name("own-app.md")
BEGIN, END = "<!-- table -->\n", "<!-- end of table -->"


def table() -> str:
    """The table in Markdown: a row for all methods that need the same."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name, client, needs in requirements():
        reason = "" if client == "fedsim's client" else needs or "nothing more"
        groups.setdefault((client, reason), []).append(name)
    lines = ["| clients | what replies must have, or why none | methods |", "|---|---|---|"]
    for (client, reason), names in groups.items():
        lines.append(f"| {client} | {reason} | {', '.join(names)} |")
    return "\n".join(lines) + "\n"


def with_table(page: str) -> str:
    """The page's text with the table of today."""
    before, rest = page.split(BEGIN)
    after = rest.split(END)[1]
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
