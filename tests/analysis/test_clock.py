"""The clock: what recorded runs would have taken on other machines and links."""

import math
import shutil

import pandas as pd
import pytest
from invented import write_grid
from typer.testing import CliRunner

from fedsim.analysis import compare
from fedsim.analysis.clock import Profile, Profiles, anytime, clock, read_profiles, round_times
from fedsim.commands.cli import app
from fedsim.common.errors import UserError
from fedsim.records import read_runs

SLOW = Profiles(profiles={"slow": Profile(up=1, down=20), "fast": Profile(up=10, down=100)},
                clients={"sketch": "slow", "*": "fast"})  # fmt: skip


def client(number, name, seconds, up=8e6, down=8e6):
    return {"round": number, "client": name, "bytes_up": up, "bytes_down": down, "train_seconds": seconds,
            "evaluation_seconds": 0.0}  # fmt: skip


def test_a_client_by_hand():
    """8 MB are 64 Mbit: 10 + 6.4 + 0.64, and 4 + 64 + 3.2. Latency counts for both exchanges."""
    assert Profile(up=10, down=100).seconds(10, 8e6, 8e6) == pytest.approx(17.04)
    assert Profile(up=1, down=20).seconds(4, 8e6, 8e6) == pytest.approx(71.2)
    assert Profile(up=1, down=20, slowdown=3, latency=0.5).seconds(4, 8e6, 8e6) == pytest.approx(80.2)


def test_a_round_is_its_slowest_client():
    """Of round 1 sketch is the slowest, of round 2 photo: 71.2 s of which 67.2 are transfer, then 100 + 7.04 s."""
    rows = pd.DataFrame([client(1, "photo", 10), client(1, "sketch", 4), client(2, "photo", 100), client(2, "art", 1)])
    times = round_times("run", rows, SLOW)
    assert list(times["seconds"]) == pytest.approx([71.2, 107.04])
    assert list(times["waiting"]) == pytest.approx([67.2, 7.04])
    assert list(times["hours"]) == pytest.approx([71.2 / 3600, 178.24 / 3600])
    pooled = round_times("run", rows, SLOW, is_pooled=True)  # nothing is sent
    assert (list(pooled["seconds"]), list(pooled["waiting"])) == ([10, 100], [0, 0])


def test_pooled_training_sends_nothing(tmp_path):
    """Of deepall the hours are those of computing alone, as a comparison has no bytes of it."""
    folder = write_grid(tmp_path, {"fedavg": 0.0, "deepall": 0.0}, rounds=2, targets=["photo"])
    runs = read_runs(folder)
    runs.summary["pooled"] = runs.summary["method"] == "deepall"
    made = clock(runs, compare(runs, published=False), read_profiles("clinics-dsl"))
    transfer = {record["label"]: record["transfer"] for record in made.table().records}
    assert transfer["deepall"] == 0 < transfer["fedavg"]


def test_the_value_of_a_moment_is_that_of_the_round_selected_so_far():
    """Round 2 validates worse than round 1, so that it does not count; the last round always does by `last`."""
    rounds = pd.DataFrame({"round": [0, 1, 2, 3], "clients": 3, "mean_validation_accuracy": [0.1, 0.6, 0.5, 0.7],
                           "target_accuracy": [0.1, 0.3, 0.9, 0.4]})  # fmt: skip
    times = pd.DataFrame({"round": [1, 2, 3], "hours": [1.0, 2.0, 3.0]})
    column = "mean_validation_accuracy"
    assert list(anytime(rounds, times, "best_validation", column)["value"]) == [0.3, 0.3, 0.4]
    assert list(anytime(rounds, times, "last", column)["value"]) == [0.3, 0.9, 0.4]
    assert list(anytime(rounds, times, "oracle", column)["value"]) == [0.3, 0.9, 0.9]


def test_a_whole_folder(tmp_path):
    """With a thousandth of the rate everything is transfer; the last column holds what the comparison holds."""
    folder = write_grid(tmp_path, {"fedavg": 0.0, "csac": 0.1}, rounds=3, targets=["photo", "sketch"])
    runs = read_runs(folder)
    comparison = compare(runs, published=False)
    made = clock(runs, comparison, read_profiles("clinics-dsl"))
    records = {record["label"]: record for record in made.table().records}
    averages = dict(zip(comparison.methods["label"], comparison.methods["average"]))
    for label, record in records.items():
        assert list(record.values())[-1] == pytest.approx(averages[label])
        assert 0 < record["transfer"] < 1
    assert made.figure().axes[0].get_xlabel() == "hours"


def test_hours_have_the_notes_of_the_comparison(tmp_path):
    """Methods with other targets stand next to each other as in a comparison, which says so."""
    folder = write_grid(tmp_path, {"fedavg": 0.0, "csac": 0.1}, rounds=2, targets=["photo", "sketch"])
    shutil.rmtree(folder / "csac" / "sketch")
    runs = read_runs(folder)
    comparison = compare(runs, published=False)
    (missing,) = [note for note in comparison.notes if note.startswith("Missing")]
    assert missing in clock(runs, comparison, read_profiles("clinics-dsl")).table().notes
    given = ["compare", str(folder), "--clock", "clinics-dsl", "--baseline", "fedavg"]
    assert "it makes no tests" in str(CliRunner().invoke(app, given).exception)


def test_a_last_round_without_a_value_has_none(tmp_path):
    """By `last`, a run that has diverged has no value, and not that of the last round which had one."""
    folder = write_grid(tmp_path, {"fedavg": 0.0}, rounds=3, targets=["photo"])
    runs = read_runs(folder)
    runs.rounds.loc[runs.rounds["round"] == 3, "target_accuracy"] = math.nan
    made = clock(runs, compare(runs, select="last", published=False), read_profiles("clinics-dsl"))
    end = made.anytime["hours"].max()
    values = [made.value_at("fedavg", hours) for hours in (0.0, end / 2, end)]
    assert list(map(math.isnan, values)) == [True, False, True]


def test_the_command_prints_and_draws(tmp_path):
    folder = write_grid(tmp_path, {"fedavg": 0.0}, rounds=2, targets=["photo"])
    file = tmp_path / "clock.svg"
    profiles = tmp_path / "profiles.toml"
    profiles.write_text('[profiles.home]\nup = 5\ndown = 40\n[clients]\n"*" = "home"\n')
    for source in ("phones-lte", str(profiles)):
        result = CliRunner().invoke(app, ["compare", str(folder), "--clock", source, "--figure", str(file)])
        assert result.exit_code == 0, result.output
        assert "s/round" in result.output
    assert file.stat().st_size > 1000


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[clients]\n'*' = 'dsl'", "no profile 'dsl'"),
        ("[clients]\n", "clients: "),
        ("[profiles.a]\nup = 0\ndown = 1\n[clients]\n'*' = 'a'", "profiles.a.up: "),
        ("[profiles.a]\nupp = 1\nup = 1\ndown = 1\n[clients]\n'*' = 'a'", "profiles.a.upp: "),
        ("[clients", "not valid TOML"),
    ],
)
def test_bad_profiles_are_one_line(text, reason, tmp_path):
    file = tmp_path / "profiles.toml"
    file.write_text(text)
    with pytest.raises(UserError, match=reason) as error:
        read_profiles(str(file))
    assert "\n" not in str(error.value)


def test_records_that_make_no_clock_are_refused():
    rows = pd.DataFrame([client(1, "photo/*", 1)])
    with pytest.raises(UserError, match="client_rows"):
        round_times("run", rows, SLOW)
    with pytest.raises(UserError, match="no train_seconds"):
        round_times("run", pd.DataFrame([client(1, "photo", 1)]).drop(columns="train_seconds"), SLOW)
    with pytest.raises(UserError, match="no profile for 'photo'"):
        Profiles(clients={"sketch": "clinics-dsl"}).of("photo")
    with pytest.raises(UserError, match="clinics-dsl"):
        read_profiles("clinic-dsl")
