"""`make trials`: what has passed on a commit is not run again, what failed is, and the page has a line for each."""

import sys

import trials


def test_trials_resume(tmp_path, monkeypatch, capsys):
    mark = tmp_path / "runs"
    good = (sys.executable, "-c", f"open({str(mark)!r}, 'a').write('x'); print('3 passed')")
    bad = (sys.executable, "-c", "print('no such thing'); raise SystemExit(3)")
    monkeypatch.setattr(trials, "TRIALS", {"good": good, "bad": bad, "never": good})
    monkeypatch.setattr(trials, "commit", lambda: "abc")
    for _ in range(2):
        monkeypatch.setattr(sys, "argv", ["trials", "--folder", str(tmp_path / "page"), "--only", "good", "bad"])
        assert trials.main() == 1
    assert mark.read_text() == "x"
    assert capsys.readouterr().out.count("bad: ") == 2
    page = (tmp_path / "page" / "trials.md").read_text()
    assert "| good | abc | passed |" in page
    assert "| bad | abc | failed, exit code 3 |" in page
    assert "no such thing" in page
    assert "Not run yet: never." in page
