"""Every error gives one line and an exit code, and never a traceback."""

import errno
import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fedsim.commands.cli import main
from fedsim.common import edge
from fedsim.common.errors import ClientFailedError, UserError

SMALL = ["--set", "train.rounds=1", "--set", "data.fraction=0.05"]
PROGRAM = [sys.executable, "-m", "fedsim"]
ROOT = Path(edge.__file__).parents[2]


def fedsim(*words, program=PROGRAM, stdout=subprocess.PIPE, cwd=None, **variables):
    variables = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    pipes = {"stdout": stdout, "stderr": subprocess.PIPE, "text": True}
    return subprocess.run([*program, *words], env=variables, cwd=cwd, timeout=200, **pipes)


def one_line(done, code):
    assert done.returncode == code, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("fedsim: ")]
    assert len(lines) == 1, done.stderr
    assert "Traceback" not in done.stderr
    return lines[0]


def exit_code_of(monkeypatch, *words):
    """Of a command in this process, which has imported PyTorch and the methods."""
    monkeypatch.setattr(signal, "signal", lambda number, answer: None)
    monkeypatch.setattr(sys, "argv", ["fedsim", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code


def test_output_on_a_file(capsys, monkeypatch, tmp_path):
    (tmp_path / "taken").write_text("")
    assert exit_code_of(monkeypatch, "run", "digits", *SMALL, "--output", str(tmp_path / "taken")) == 2
    (said,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("fedsim: ")]
    assert "taken" in said
    assert "Not a directory" in said or "File exists" in said


def test_a_full_standard_output():
    with Path("/dev/full").open("w") as full:
        assert "No space left on device" in one_line(fedsim("datasets", stdout=full), 2)


@pytest.mark.parametrize("words", ["methods", "--help"])
def test_an_ascii_terminal(words, monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    monkeypatch.setenv("COLUMNS", "200")
    assert exit_code_of(monkeypatch, words) == 0
    sys.stdout.flush()
    assert b"method" in written.getvalue()


def test_modules_that_hide_our_packages_are_named_with_both_paths(tmp_path):
    """`python -m` searches the working folder first; both Flower apps say it too."""
    for name, command in (("clients", ["methods"]), ("strategies", ["datasets"])):
        module = tmp_path / f"{name}.py"
        module.write_text("")
        said = f"{module} hides the package {name!r} of fedsim, which is {ROOT / name}; rename"
        assert said in one_line(fedsim(*command, cwd=tmp_path), 2)
        for app in ("server_app", "client_app"):
            loaded = fedsim(program=[sys.executable, "-c", f"import fedsim.{app}"], cwd=tmp_path)
            assert said in loaded.stderr.splitlines()[-1]
        module.unlink()


def failing(error):
    def command(*args, **kwargs):
        raise error

    return command


@pytest.mark.parametrize(("error", "code", "said"), [
    (UserError("no such thing"), 2, "no such thing"),
    (ClientFailedError("photo: out of memory"), 1, "photo: out of memory"),
    (KeyboardInterrupt(), 130, "interrupted"),
    (OSError(errno.EROFS, "Read-only file system", "/mnt/x"), 2, "/mnt/x: Read-only file system"),
    (OSError(errno.ENOSPC, "No space left on device"), 2, "cannot write: No space left on device"),
    (RuntimeError("I/O error: No space left on device (os error 28)"), 2, "free some space"),
    (ZeroDivisionError("division by zero"), 1, "ZeroDivisionError: division by zero (an unexpected error"),
    (ValueError("two\nlines"), 1, "ValueError: two lines"),
])  # fmt: skip
def test_every_error_becomes_one_line(error, code, said, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(edge.tempfile, "gettempdir", lambda: str(tmp_path))
    assert edge.guarded(failing(error)) == code
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("fedsim: ")
    assert said in line
    logs = list(tmp_path.glob("fedsim-*.log"))
    assert bool(logs) == (code == 1 and not isinstance(error, ClientFailedError))
    for log in logs:
        assert str(log) in line
        assert "Traceback" in log.read_text()


def test_a_full_disk_does_not_hide_an_unforeseen_error(capsys, monkeypatch):
    monkeypatch.setattr(Path, "write_text", failing(OSError(errno.ENOSPC, "full")))
    assert edge.guarded(failing(ZeroDivisionError("division by zero"))) == 1
    assert "(an unexpected error)" in capsys.readouterr().err


@pytest.mark.slow
def test_an_image_name_that_is_not_utf_8(make_tree, tmp_path):
    """It is read like any other; if the image is damaged, the message shows as much of the name as possible."""
    root = make_tree(["a", "b", "c"], ["x", "y"], 12)
    odd = Path(os.fsdecode(os.fsencode(root / "a" / "x") + b"/caf\xe9.png"))
    next((root / "a" / "x").iterdir()).rename(odd)
    settings = [
        "dataset=folder",
        f"root={root}",
        "image_size=28",
        "holdout=0.3",
        "domains=[]",
        f"cache={tmp_path / 'c'}",
    ]
    sets = [word for setting in settings for word in ("--set", f"data.{setting}")] + ["--set", "train.batch_size=4"]
    words = ["run", "digits", *SMALL[:2], *sets, "--target", "c", "--output", str(tmp_path / "out")]
    done = fedsim(*words)
    assert done.returncode == 0, done.stderr
    odd.write_bytes(b"no image")
    assert "caf" in one_line(fedsim(*words, "--seed", "1"), 2)


@pytest.mark.slow
def test_a_clients_folder_beside_the_command_on_ray(tmp_path):
    """fedsim is installed, so it comes last in the search path; Ray's workers search the working folder first."""
    work, site = tmp_path / "work", tmp_path / "site"
    (work / "clients").mkdir(parents=True)
    (work / "clients" / "__init__.py").write_text("")
    site.mkdir()
    (site / "sitecustomize.py").write_text(f"import sys\nsys.path.append({str(ROOT)!r})\n")
    program = "import sys; sys.path.remove(''); from fedsim.commands.cli import main; main()"
    words = [sys.executable, "-c", program, "run", "digits", "--runtime", "ray", "--output", "out", *SMALL]
    done = fedsim("--set", "run.workers=1", program=words, cwd=work, PYTHONPATH=str(site))
    assert one_line(done, 2).startswith(f"fedsim: {work / 'clients'} hides the package 'clients' of fedsim, which")
    assert "died twice" not in done.stderr
