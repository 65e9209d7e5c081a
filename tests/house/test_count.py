"""The house does not grow again without someone noticing: upper bounds of what `count.py` counts."""

from pathlib import Path

from count import circles, floors, main, module_graph, room_graph

ROOT = Path(__file__).parents[2]
ROOMS, PAIRS, FLOORS = 21, 122, 14  # whoever needs more says here what for


def test_the_house_does_not_grow():
    rooms = room_graph(module_graph(ROOT))
    assert len(rooms) <= ROOMS, sorted(rooms)
    assert sum(map(len, rooms.values())) <= PAIRS
    assert floors(rooms) <= FLOORS


def test_neither_modules_nor_rooms_import_in_a_circle():
    graph = module_graph(ROOT)
    assert circles(graph) == circles(room_graph(graph)) == []


def small_tree(folder: Path) -> Path:
    """Two rooms: `a` and `b` import each other, one of them in a function and one for a type checker."""
    texts = {
        "fedsim/a.py": "def f():\n    from fedsim.b import c\n",
        "fedsim/b/c.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from fedsim import a\n",
        "fedsim/b/d.py": "import fedsim.b.c\n",
        "strategies/parts.py": "class Part:\n    late: ClassVar[bool] = False\n    order: ClassVar[int] = 1\n",
        "strategies/one.py": "@dataclass\nclass One(Part):\n    late = True\n    def refuses(self, recipe): ...\n",
    }
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def test_imports_in_functions_and_of_type_checkers_make_circles(tmp_path):
    graph = module_graph(small_tree(tmp_path))
    assert graph["fedsim.b.d"] == {"fedsim.b.c"}
    assert circles(graph) == [{"fedsim.a", "fedsim.b.c"}]
    assert floors(graph) == 2
    assert room_graph(graph)["fedsim.a"] == {"fedsim.b"}


def test_the_table(tmp_path, capsys):
    main([str(small_tree(tmp_path)), str(tmp_path)])
    shown = {line[:45].strip(): line[45:].split() for line in capsys.readouterr().out.splitlines()[:-1]}
    assert shown["rooms"] == ["3", "3"]
    assert shown["circles of modules (modules in each)"] == ["2", "2"]
    assert shown["flags of parts"] == ["2", "2"]
    assert shown["methods `refuses`"] == ["1", "1"]
    assert shown["lines of code"] == ["13", "13"]
