"""The tokens of class names: the tiny CLIP's differ for the names of every data set, and equal texts are refused."""

import pytest
from small_texts import build

from fedsim.common.errors import UserError
from fedsim.data import BENCHMARKS
from fedsim.models.tiny_clip import FIRST, TOKENS, tokens_of


def test_tokens_on_numbers():
    """al = 10 * 36 + 21, m = 22, ff = 15 * 36 + 15, zz = 35 * 36 + 35; the bytes of é are 195 and 169, that of . 46."""
    found = tokens_of("Alm ff1 é zz.")
    assert [number - FIRST for number in found] == [381, 22, 555, 1, 36 + 195, 36 + 169, 1295, 36 + 46]
    assert tokens_of("zz") == [TOKENS - 1]


@pytest.mark.parametrize("dataset", [name for name, found in BENCHMARKS.items() if found.classes])
def test_all_class_names_of_a_data_set_differ(dataset):
    """A digit has the number of its value, so that 0 and 8, and 6 and 9, are different texts."""
    names = BENCHMARKS[dataset].classes
    assert len({tuple(tokens_of(name.replace("_", " "))) for name in names}) == len(names)


def test_classes_of_equal_texts_are_refused():
    said = r"^model.head = 'text': the classes 'Alarm_Clock' and 'alarm clock' are the same text for tiny-clip; give"
    with pytest.raises(UserError, match=said):
        build(names=("dog", "Alarm_Clock", "alarm clock"))
