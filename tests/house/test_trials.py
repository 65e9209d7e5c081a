"""`make trials` and benchmarks/all.py: what has passed on a commit is not run again, what failed is, in one page."""

import sys

import trials


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


def test_every_measurement_is_a_script(monkeypatch):
    monkeypatch.syspath_prepend(trials.ROOT / "benchmarks")
    from all import table

    for name, (_, script, *_words) in table("FOLDER").items():
        assert (trials.ROOT / script).is_file(), name
    assert {"banks", "images", "sweep of PACS"} == table("FOLDER").keys() - table("").keys()
