"""Makes the mistakes of faults.toml in a copy of the tree, one after the other; fails where the tests do not notice.

    [FAULTS_RECORD=FILE] python tests/faults/seed.py [-k ID] [-n JOBS] ...

The words are pytest's. A fault is caught when a test fails, or needs more than its processor seconds. Tests that fail
without any fault are left out. What is caught is noted in the record, and a later call with it leaves that out.
"""

import os
import re
import resource
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

HERE = Path(__file__).parent
TREE = HERE.parents[1]
LIMIT = 180  # processor seconds for the tests of one fault
FILES = tomllib.loads((HERE / "faults.toml").read_text(encoding="utf-8"))
# {id: (file, the text that occurs once in it, what stands there instead, the tests to run)}
FAULTS = {i: (file, *own[i], own["tests"]) for file, own in FILES.items() for i in own if i != "tests"}


def limited() -> None:
    """Ends a test process, for example one in an endless loop, after its processor seconds."""
    resource.setrlimit(resource.RLIMIT_CPU, (LIMIT, LIMIT))


def run_tests(folder: Path, words: Sequence[str], before: Callable[[], None] | None = None) -> tuple[int, list[str]]:
    """Pytest's exit status, and the tests that failed."""
    command = [sys.executable, "-m", "pytest", "-q", "-rfE", "-p", "no:cacheprovider", *words]
    mine = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}  # no worker of xdist
    environment = {**mine, "PYTHONPATH": str(folder)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, preexec_fn=before)
    return done.returncode, re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)


@pytest.fixture(scope="session")
def copied(tmp_path_factory, request) -> tuple[Path, list[str]]:
    """The tracked files of the tree in a new folder, and the tests of the chosen faults that fail without any."""
    folder = tmp_path_factory.mktemp("tree")
    names = subprocess.check_output(["git", "ls-files", "-z"], cwd=TREE, text=True)
    for name in filter(None, names.split("\0")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(TREE / name, folder / name)
    tests = sorted({name for item in request.session.items for name in FAULTS[item.callspec.id][3]})
    return folder, run_tests(folder, tests)[1]


@pytest.mark.parametrize("fault", FAULTS)
def test_it_is_caught(fault, request):
    record = Path(os.environ.get("FAULTS_RECORD", os.devnull))
    if record.exists() and fault in record.read_text().split():
        return
    (folder, failing), (file, text, instead, tests) = request.getfixturevalue("copied"), FAULTS[fault]
    good = (folder / file).read_text(encoding="utf-8")
    (folder / file).write_text(good.replace(text, instead), encoding="utf-8")
    try:
        words = ["-x", *(word for name in failing for word in ("--deselect", name)), *tests]
        status, _ = run_tests(folder, words, limited)
    finally:
        (folder / file).write_text(good, encoding="utf-8")
    assert status == 1 or status < 0, "missed" if status == 0 else "broken"  # negative: the signal of an endless loop
    with record.open("a") as notes:
        notes.write(f"{fault}\n")


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v", "-p", "no:cacheprovider", *sys.argv[1:]]))
