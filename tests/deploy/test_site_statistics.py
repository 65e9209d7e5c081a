"""`fedsim deploy check --statistics`: what a site tells of its rows, worked out by hand, and what it keeps."""

import json

import numpy as np
import pytest
from demo import text_of
from flwr.app import ConfigRecord, Context, Message, RecordDict

from fedsim.common.errors import UserError
from fedsim.common.tables import MISSING
from fedsim.data import load_client
from fedsim.deploy.check import Answer, check
from fedsim.deploy.check_app import answer
from fedsim.deploy.site_statistics import (
    HIDDEN,
    ColumnNumbers,
    hidden,
    least_of,
    numbers_of,
    of_channel,
    statistics_table,
    without_rests,
)
from fedsim.flower.identity import assume_identity
from fedsim.settings.experiment import from_table

NAN = float("nan")


def told(values, least):
    column = numbers_of("x", np.array(values, float), least)
    return column.mean, column.deviation, column.missing


@pytest.mark.parametrize(
    ("values", "least", "expected"),
    [
        ([40, 50, 60, 70, NAN, NAN, NAN, NAN], 4, (55, 11.2, 4)),  # sqrt((225 + 25 + 25 + 225) / 4) = 11.18
        ([40, 50, 60, 70, NAN], 4, (55, 11.2, HIDDEN)),
        ([40, 50, 60, 70], 5, (None, None, 0)),
        ([0, 0, 0, 1, 1], 2, (0.4, 0.49, 0)),
        ([0, 0, 0, 1, 1], 3, (None, None, 0)),  # two rows have a 1
        ([0, 0, 1, 1, 2], 2, (None, None, 0)),  # one row has a 2
        ([0, 0, 0, 0, 1, 2, 3], 5, (0.857, 1.12, 0)),  # the mean of four values tells no number of rows
        ([7, 7, 7], 3, (7, 0, 0)),
        ([NAN, NAN], 2, (None, None, 2)),
        ([12345.6, 12345.6], 2, (12300, 0, 0)),
    ],
)
def test_numbers_of_a_column(values, least, expected):
    """Mean and deviation have three digits; a number of fewer rows than `least` is not told."""
    assert told(values, least) == expected


def test_the_other_categories_do_not_tell_the_hidden_one():
    """Of a variable with one hidden category none is told, because all of them together are all rows."""
    columns = [
        ColumnNumbers(name=name, missing=0, mean=mean) for name, mean in (("a=x", 0.5), ("a=y", None), ("b=x", 1))
    ]
    assert [column.mean for column in without_rests(columns)] == [None, None, 1]


def test_pixels_of_a_channel():
    """Of two images with the pixels 0 and 255, and 255 and 255, the mean is 3/4 and the deviation .433."""
    pixels = np.array([[0, 255], [255, 255]], np.uint8)
    assert of_channel("red", pixels, 2) == ColumnNumbers(name="red", missing=0, mean=0.75, deviation=0.433)
    assert of_channel("red", pixels, 3) == ColumnNumbers(name="red", missing=0)


def test_the_greater_number_hides():
    """A site hides by its own number where that is greater, and never less than numbers of fewer than five rows."""
    assert [hidden(count, 5) for count in (0, 1, 4, 5)] == [0, HIDDEN, HIDDEN, 5]
    assert least_of({}, 2) == 5
    assert least_of({}, 8) == 8
    assert least_of({"statistics-least": 20}, 8) == 20
    for no_number in ("many", True, float("nan"), float("inf")):
        with pytest.raises(UserError, match="statistics-least must be a finite number"):
            least_of({"statistics-least": no_number}, 8)
    assert least_of({"statistics-least": 1}, 1) == 5  # no site goes below (docs/sites.md)
    assert [least_of({"statistics-least": number}, 8) for number in (20.0, 20.5)] == [20, 21]


def asked(experiment, statistics, role="source", **node):
    """The answer of a site of the domain north, as the operator reads it."""
    assume_identity(1)
    content = RecordDict({"config": ConfigRecord({"experiment": experiment.toml(), "statistics": statistics})})
    config = {"site": "a", "domain": "north", "role": role, **node}
    reply = answer(Message(content, 7, "query.check"), Context(1, 7, config, RecordDict(), {}))
    raw = json.loads(json.dumps(dict(reply.content.config_records["site"])))
    return Answer.model_validate({**raw, "node": 7})


@pytest.fixture
def north(tmp_path):
    """(an experiment with a table of seven rows in the domain north, the node config with its folder)."""
    rows = ["age,sex,label", *("40,f,u", "50,f,u", "60,f,u", "70,m,u", "80,m,u", ",m,v", "90,m,v")]
    (tmp_path / "north.csv").write_text("\n".join(rows) + "\n")
    data = {
        "dataset": "arrays", "root": "/nowhere", "domains": ["north", "south"], "classes": ["u", "v"],
        "columns": {"label": "label", "features": ["age", "sex"], "categories": {"sex": ["f", "m"]}},
    }  # fmt: skip
    return from_table({"data": data}), {"data-dir": str(tmp_path)}


def test_answer_of_a_site(north):
    """Two rows of v and one missing age are hidden. There are three and four rows of the sexes, less than five."""
    experiment, node = north
    said = asked(experiment, 2, **node)
    assert (said.problem, said.classes, said.counts, said.least) == ("", ("u", "v"), (5, HIDDEN), 5)
    assert said.columns[0] == ColumnNumbers(name="age", missing=HIDDEN, mean=65, deviation=17.1)
    assert {column.name: column.mean for column in said.columns[1:]} == dict.fromkeys(("sex=f", "sex=m", "sex=(other)"))
    wider = asked(experiment, 2, **node, **{"statistics-least": 6})
    assert wider.counts == (HIDDEN, HIDDEN)
    assert wider.least == 6


def test_what_is_not_asked_for_is_not_told(north):
    """Without the option a site answers as before, and that of the unseen domain never tells of its columns."""
    experiment, node = north
    assert asked(experiment, 0, **node).columns == ()
    assert asked(experiment, 0, **node).counts == (5, 2)
    assert asked(experiment, 5, role="target", **node).columns == ()
    assert asked(experiment, 5, role="target", **node).counts == (5, HIDDEN)


def test_images_have_channels():
    """The pixels of the embedded digits, as numbers in [0, 1]."""
    experiment = from_table({"data": {"dataset": "digits", "domains": ["rot0", "rot15"]}})
    node = {"domain": "rot15"}
    (column,) = asked(experiment, 5, **node).columns
    images = load_client(experiment.data, "rot15").images / 255
    assert column.name == "channel 0"
    assert column.mean == pytest.approx(images.mean(), rel=0.005)
    assert column.deviation == pytest.approx(images.std(), rel=0.005)


def test_table():
    """A hidden number is `< 5`, a hidden column and a site that sent none have a dash."""
    columns = {
        "a": [
            ColumnNumbers(name="age", missing=HIDDEN, mean=65.0, deviation=17.1),
            ColumnNumbers(name="sex", missing=0),
        ],
        "b": [],
    }
    text = text_of(statistics_table(["u", "v"], {"a": (1500, HIDDEN), "b": (7, 0)}, columns, {"a": 5, "b": 6}))
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert {"u 1,500 7", "v < 5 0", f"age 65 ± 17.1 (< 5) {MISSING}", f"sex {MISSING} {MISSING}"} <= set(lines)


def test_without_an_experiment(federation):
    """There are no data to tell of."""
    with pytest.raises(UserError, match="--statistics are of the data that an experiment names"):
        check(federation, None, 1.0, 5)
