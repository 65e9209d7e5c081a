"""A study as one file: equal bytes of equal records, the same tables as the folder's, and archives of somebody else."""

import shutil
import stat
import tomllib
import zipfile
from pathlib import Path

import pandas as pd
import pytest
from typer.testing import CliRunner

from fedsim.analysis import compare
from fedsim.commands.cli import app
from fedsim.common.errors import UserError
from fedsim.records import archive, read_runs
from fedsim.records.reading import finished_runs

RUN = "csac/photo/seed1"


def called(*words):
    return CliRunner().invoke(app, [*map(str, words)])


def archived(folder, file):
    archive.write_archive(folder, finished_runs(folder), file)
    return file


def refusal(file, limit=None):
    """The one line by which an archive is refused."""
    with pytest.raises(UserError, match=file.name) as caught:
        read_runs(file)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def changed(file, edit):
    """The archive again, with what edit(entry, bytes) makes of each entry; None leaves it out."""
    with zipfile.ZipFile(file) as before:
        entries = [(entry, before.read(entry)) for entry in before.infolist()]
    with zipfile.ZipFile(file, "w") as after:
        for entry, content in entries:
            if (new := edit(entry, content)) is not None:
                after.writestr(entry, new)
    return file


def test_the_archive_of_a_folder_reads_like_the_folder(own_grid):
    """Every command prints and draws the same; what it writes goes into a folder of the archive's name."""
    done = called("archive", own_grid)
    file = own_grid.with_suffix(".zip")
    assert done.output.split() == [f"{file}:", "8", "runs;", "fedsim", "compare", str(file)]
    runs, same = read_runs(own_grid), read_runs(file)
    for name in ("summary", "rounds", "clients", "details"):
        pd.testing.assert_frame_equal(getattr(runs, name), getattr(same, name))
    assert compare(runs, baseline="fedavg").render("csv") == compare(same, baseline="fedavg").render("csv")
    elsewhere = shutil.move(file, own_grid.parent / "other.zip")
    tables = [called("compare", each, "--format", "markdown").output for each in (own_grid, elsewhere)]
    assert tables[0] == tables[1] != ""
    assert called("compare", elsewhere).exit_code == 0
    assert not (own_grid.parent / "other").exists()
    reports = [called("report", each).output.split()[-1] for each in (own_grid, elsewhere)]
    assert reports[1] == str(own_grid.parent / "other" / "report.html")
    pages = [Path(each).read_text(encoding="utf-8") for each in reports]
    assert pages[0].replace(str(own_grid), "") == pages[1].replace(str(elsewhere), "")
    assert "--live is for a folder" in str(called("report", elsewhere, "--live").exception)


def test_equal_records_give_equal_bytes_without_places_models_and_unfinished_runs(own_grid):
    folder = own_grid / RUN
    for name in ("best.safetensors", "predictions/round000003.safetensors", "plots/a.png"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("large")
    settings = (folder / "experiment.toml").read_text()
    settings = settings.replace('root = ""', 'root = "/home/me/images"').replace(
        'output = "outputs"', 'output = "/home/me"'
    )
    (folder / "experiment.toml").write_text(settings)
    (own_grid / "fedavg/photo/seed0/summary.csv").unlink()
    (own_grid / "combinations.csv").write_text("method,search,rung\n")
    files = [archived(own_grid, own_grid.parent / name) for name in ("one.zip", "two.zip")]
    assert files[0].read_bytes() == files[1].read_bytes()
    with zipfile.ZipFile(files[0]) as content:
        names = content.namelist()
        table = tomllib.loads(content.read(f"{RUN}/experiment.toml").decode())
    assert names == sorted(names)
    assert [name for name in names if name.startswith(RUN)] == [
        f"{RUN}/{name}"
        for name in ("clients.csv", "details.csv", "environment.json", "experiment.toml", "rounds.csv", "summary.csv")
    ]
    assert "combinations.csv" in names
    assert not any(name.startswith("fedavg/photo/seed0/") for name in names)
    assert (table["data"]["root"], table["data"]["cache"], table["run"]["output"]) == ("", "", "outputs")
    assert table["method"] == tomllib.loads(settings)["method"]


def test_what_cannot_be_archived_is_said(own_grid, tmp_path):
    assert "a file NAME.zip" in str(called("archive", own_grid, "--output", tmp_path / "study").exception)
    assert not (tmp_path / "study").exists()
    (tmp_path / "empty").mkdir()
    for folder, said in ((tmp_path / "empty", "no run in it"), (tmp_path / "nothing", "no such folder")):
        assert said in str(called("archive", folder).exception)
    for summary in own_grid.rglob("summary.csv"):
        summary.unlink()
    assert "no finished run" in str(called("archive", own_grid).exception)
    (own_grid / RUN / "summary.csv").touch()
    (own_grid / RUN / "environment.json").write_text('{"format": 2}')
    assert "has format 2" in str(called("archive", own_grid).exception)
    assert not list(tmp_path.glob("*.zip"))


@pytest.mark.parametrize("name", ["../../experiment.toml", "/tmp/experiment.toml", "a/../../b/rounds.csv"])
def test_a_name_that_leads_out_is_refused(name, own_grid, tmp_path):
    file = archived(own_grid, tmp_path / "study.zip")
    before = sorted(tmp_path.rglob("*"))
    with zipfile.ZipFile(file, "a") as content:
        content.writestr(name, "planted")
    assert f"the name {name!r} leads out of the archive" in refusal(file)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_link_is_refused(own_grid, tmp_path):
    file = archived(own_grid, tmp_path / "study.zip")
    link = zipfile.ZipInfo("csac/photo/seed1/rounds.csv/link")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    with zipfile.ZipFile(file, "a") as content:
        content.writestr(link, "/etc/passwd")
    assert "is a link" in refusal(file)


def test_too_many_files_and_bytes_are_refused(own_grid, tmp_path, monkeypatch):
    """The sizes are those that the archive declares; more than is declared is not taken out."""
    file = archived(own_grid, tmp_path / "study.zip")
    with zipfile.ZipFile(file) as content:
        entries = content.infolist()
    size = sum(entry.file_size for entry in entries)
    for name, limit, said in (("MOST_FILES", len(entries), "files"), ("MOST_BYTES", size, "bytes of records")):
        monkeypatch.setattr(archive, name, limit)
        assert len(read_runs(file).summary) == 8
        archive._extracted.cache_clear()
        monkeypatch.setattr(archive, name, limit - 1)
        assert f"{limit:,} {said}" in refusal(file)
        monkeypatch.undo()
        archive._extracted.cache_clear()
    assert "not a readable archive of a study" in refusal(zipped_lie(tmp_path / "lie.zip"))


def zipped_lie(file):
    """An archive whose only record is declared with one byte and unpacks to a million."""
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as content:
        content.writestr("experiment.toml", bytes(10**6))
    data = file.read_bytes()
    assert data.count((10**6).to_bytes(4, "little")) == 2
    file.write_bytes(data.replace((10**6).to_bytes(4, "little"), (1).to_bytes(4, "little")))
    return file


def test_a_damaged_archive_is_one_line(own_grid, tmp_path):
    file = archived(own_grid, tmp_path / "study.zip")
    whole = file.read_bytes()
    for content in (b"", b"no archive", whole[: len(whole) // 2], whole[:2000] + bytes(500) + whole[2500:]):
        file.write_bytes(content)
        assert "not a readable archive of a study" in refusal(file)
        assert called("compare", file).exit_code == 1
    file.write_bytes(whole)
    assert len(read_runs(file).summary) == 8
    changed(file, lambda entry, content: None if entry.filename.endswith(".toml") else content)
    assert "no run in it" in refusal(file)
    file.unlink()
    assert "no such folder" in refusal(file)


def test_an_archive_of_another_program_is_read_and_other_files_are_left_out(own_grid, tmp_path):
    (own_grid / RUN / "best.safetensors").write_text("a model")
    file = shutil.make_archive(tmp_path / "study", "zip", own_grid)
    runs = read_runs(file)
    assert len(runs.summary) == 8
    assert not list(runs.folder.rglob("*.safetensors"))


def test_a_damaged_record_of_an_archive_is_named_as_in_a_folder(own_grid, tmp_path):
    file = archived(own_grid, tmp_path / "study.zip")
    changed(file, lambda entry, content: b"round;x\n1;2\n" if entry.filename == f"{RUN}/rounds.csv" else content)
    (text,) = read_runs(file).damaged.values()
    assert text.startswith(f"{RUN}/rounds.csv: ")
    assert "copy the file again" in text
