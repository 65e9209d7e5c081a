"""`make trials` and benchmarks/all.py: what has passed on a commit is not run again, what failed is, in one page."""

import os
import signal
import sys
import threading

import pytest
import trials
from processes import until


def test_trials_resume(tmp_path, monkeypatch, capsys):
    mark = tmp_path / "runs"
    good = (sys.executable, "-c", f"open({str(mark)!r}, 'a').write('x'); print('2 skipped'); print('3 passed')")
    bad = (sys.executable, "-c", "print('no such thing'); raise SystemExit(3)")
    monkeypatch.setattr(trials, "commit", lambda: "abc")
    words = ["--folder", str(tmp_path / "page"), "--only", "good", "bad"]
    for whole in (False, True):
        asked = trials.arguments("", "trials").parse_args(words)
        assert trials.run({"good": good, "bad": bad, "never": good}, asked, "Trials", "trials.md", whole) == 1
        page = (tmp_path / "page" / "trials.md").read_text()
        assert ("2 skipped" in page) == whole
    assert mark.read_text() == "x"
    assert capsys.readouterr().out.count("bad: ") == 2
    assert "| good | abc | passed |" in page
    assert "| bad | abc | failed, exit code 3 |" in page
    assert "no such thing" in page
    assert "Not run yet: never." in page


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_trial_that_is_stopped_ends_what_it_started(tmp_path, monkeypatch, number):
    """Its teardown takes longer than the quarter of a second after which subprocess.run would kill it."""
    started, ended = tmp_path / "started", tmp_path / "ended"
    text = "\n".join([
        "import pathlib, time",
        "try:",
        f"    pathlib.Path({str(started)!r}).touch()",
        "    time.sleep(60)",
        "finally:",
        "    time.sleep(1)",
        f"    pathlib.Path({str(ended)!r}).touch()",
    ])  # fmt: skip

    def stop():
        until(started.exists, 20, "start of the trial")
        os.kill(os.getpid(), number)

    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    asked = trials.arguments("", "trials").parse_args(["--folder", str(tmp_path / "page")])
    threading.Thread(target=stop, daemon=True).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            trials.run({"long": (sys.executable, "-c", text)}, asked, "Trials", "trials.md")
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    assert ended.exists()


def test_every_measurement_is_a_script(monkeypatch):
    monkeypatch.syspath_prepend(trials.ROOT / "benchmarks")
    from all import table

    for name, (_, script, *_words) in table("FOLDER").items():
        assert (trials.ROOT / script).is_file(), name
    assert {"banks", "images", "sweep of PACS"} == table("FOLDER").keys() - table("").keys()
