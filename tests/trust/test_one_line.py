"""Settings that no program can use end in one line and exit code 2, never in a traceback."""

import pytest

from fedsim.common.errors import UserError
from fedsim.run.plan import resolve
from fedsim.settings.experiment import read_experiment

UNCALLABLE = r"json:JSONDecodeError': it cannot be called without arguments \(TypeE"


@pytest.mark.parametrize(("setting", "said"), [
    ("data.dataset=json:JSONDecodeError", UNCALLABLE), ("model.backbone=json:JSONDecodeError", UNCALLABLE),
    ('data.root="a\\u0000b"', "data.root: it contains a NUL character; remove it"),
    ('run.output="a\\u0000b"', "run.output: it contains a NUL character; remove it"),
])  # fmt: skip
def test_a_value_that_cannot_be_used(setting, said):
    with pytest.raises(UserError, match=rf"^[^\n]*{said}[^\n]*$"):
        resolve(read_experiment("digits", [setting])).build_net()


@pytest.mark.parametrize("word", ["inf", "-inf", "nan"])
@pytest.mark.parametrize("key", ["train.lr", "train.weight_decay", "train.dp_epsilon", "data.alpha", "run.timeout"])
def test_numbers_are_finite(key, word):
    with pytest.raises(UserError, match=rf"^override '{key}={word}': {key}: Input should be[^\n]*$"):
        read_experiment("digits", [f"{key}={word}"])
