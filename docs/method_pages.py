"""The pages of the methods, the list of all, and the table of the first page."""

from pathlib import Path

from part_pages import code_link, in_cell, part_section
from results_read import digits, results_of
from round_picture import picture

from fedsim.commands.methods import first_try
from fedsim.methods.groups import elsewhere_table, ideas, papers_of, printed_name, titled
from fedsim.methods.listing import MethodRow, listed, step_costs
from fedsim.methods.recipe import SLOTS, Recipe
from fedsim.methods.registry import one_line
from fedsim.methods.table import METHODS
from fedsim.parts.part import part_name


def write_method_pages(folder: Path) -> None:
    """A page for each method, the list of all, the table of the first page, and that of other benchmarks' names."""
    groups = {group: [row for row in rows if row.name in METHODS] for group, rows in listed().items()}
    for name, recipe in METHODS.items():
        (folder / f"{name}.md").write_text(method_page(name, recipe))
        (folder / f"{name}.svg").write_text(picture({slot for slot, _ in own_parts(recipe)}, "The slots of a round"))
    (folder / "index.md").write_text(methods_index(groups))
    (folder / "table.txt").write_text(methods_table(groups))
    (folder / "elsewhere.txt").write_text(elsewhere_table())


def own_parts(recipe: Recipe) -> list[tuple[str, object]]:
    """The parts in which a recipe differs from FedAvg's."""
    standard = {repr(part) for _, part in Recipe().pairs}
    own = [(slot, part) for slot, part in recipe.pairs if repr(part) not in standard]
    return sorted(own, key=lambda pair: list(SLOTS).index(pair[0]))


def leaves(recipe: Recipe) -> str:
    """What leaves the clients, in one of four classes; the method's page has the whole sentence."""
    if recipe.pooled:
        return "all raw data"
    more = {slot for slot, part in recipe.pairs if part.discloses}
    if recipe.prelude or more - {"reports"}:
        return "updates, and statistics, features or single models"
    return "updates and single numbers" if recipe.reports else "model updates"


def tasks(recipe: Recipe) -> str:
    """The tasks that all parts of a recipe can have."""
    return ", ".join(task for task in Recipe().step.tasks if all(task in part.tasks for _, part in recipe.pairs))


def methods_table(groups: dict[str, list[MethodRow]]) -> str:
    """All methods with what decides a choice; `site/methods.js` makes it sort and filter."""
    own = digits()
    lines = [
        "| method | changes | leaves the clients | step | bytes | tasks | digits, % |",
        "|---|---|---|--:|--:|---|--:|",
    ]
    for group, rows in groups.items():
        for row in rows:
            here = own.get(row.name, {})
            idea = f"<br><small>{in_cell(printed_name(row.name))}: {in_cell(ideas()[row.name])}</small>"
            cells = [f"[{row.name}](methods/{row.name}.md){idea}", group.partition(":")[0], leaves(row.recipe)]
            cells += ["" if row.cost is None else f"{row.cost:.2f}", here.get("bytes", ""), tasks(row.recipe)]
            lines.append(f"| {' | '.join([*cells, here.get('average', '').partition(' ')[0]])} |")
    return "\n".join(lines) + "\n"


def methods_index(groups: dict[str, list[MethodRow]]) -> str:
    """The page that lists all methods by what they change, with their papers."""
    lines = ["# Methods", "", "[The table of the first page](../index.md#all-methods) sorts and filters them.", ""]
    for group, rows in groups.items():
        lines += [f"## {group[0].upper()}{group[1:]}", "", "| method | parts | paper |", "|---|---|---|"]
        lines += [f"| [{row.name}]({row.name}.md) | {row.changes} | {cited(row.recipe)} |" for row in rows]
        lines.append("")
    entries = "\n".join(METHODS)
    return "\n".join(lines) + f"\n```{{toctree}}\n:hidden:\n\n{entries}\n```\n"


def cited(recipe: Recipe) -> str:
    """The paper's title with its link, and how the row names it."""
    titles = [f"[{paper.title}]({paper.link})" for paper in papers_of(recipe.paper)]
    return ". ".join([*titles, in_cell(recipe.paper)])


def method_page(name: str, recipe: Recipe) -> str:
    """One method: idea, paper, commands, disclosure, recipe, results, and each part with its formula and settings."""
    lines = [f"# {titled(name)}", "", f"**{in_cell(ideas()[name])}**", "", f"{cited(recipe)}.", ""]
    lines += ["```bash", f"{first_try(name, recipe)} --target rot75", f"fedsim methods {name}", "```", ""]
    cost = step_costs()[0].get(name)
    lines += [f"- **What leaves the clients:** {in_cell(recipe.disclosure())}."]
    lines += [f"- **Cost of a local step:** {cost:.2f} of FedAvg's (ResNet-18)."] if cost else []
    lines += [f"- **Tasks:** {tasks(recipe)}.", "", *recipe_section(name, recipe), "", *results(name), ""]
    parts = own_parts(recipe) or recipe.pairs
    for part in dict.fromkeys(part for _, part in parts):
        lines += part_section(type(part), part)
    return "\n".join(lines)


def recipe_section(name: str, recipe: Recipe) -> list[str]:
    """The parts of a method, with the picture of a round in which their slots are in colour."""
    own = own_parts(recipe)
    lines = ["## Recipe", ""]
    said = "One client holds all data; every" if recipe.pooled else "It is the reference: every"
    lines += ["All other slots are FedAvg's." if own else f"{said} part is the standard one.", ""]
    lines += [f"![One round; the slots in which {name} has parts of its own are in colour]({name}.svg)", ""]
    lines += ["| slot | part | what it does |", "|---|---|---|"]
    for slot, part in own or recipe.pairs:
        kind, key = type(part), part_name(part)
        cells = [f"[{slot}](../parts/{slot}.md)", f"[{key}](#{key})<br>{code_link(kind, 'source')}"]
        lines.append(f"| {' | '.join([*cells, in_cell(one_line(kind))])} |")
    return lines


def results(name: str) -> list[str]:
    """The method's rows of this repository's tables, each with a link to the whole table."""
    lines = ["## Results here", ""]
    found = list(results_of(name))
    for table in found:
        lines += [f"[{table.title}](../{table.place}):", ""]
        lines += [f"| {' | '.join(row)} |" for row in (table.heads, ["---"] * len(table.heads), *table.rows)]
        lines.append("")
    return lines if found else [*lines, "[The tables](../tables.md) have no run of this method yet."]
