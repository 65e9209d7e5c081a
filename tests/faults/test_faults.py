"""The faults that tests/faults/seed.py makes fit the tree: each text occurs once, and the tests are there."""

from seed import FAULTS, TREE


def test_every_fault_can_be_made():
    assert len(FAULTS) == 240
    for fault, (file, text, _, tests) in FAULTS.items():
        assert (TREE / file).read_text(encoding="utf-8").count(text) == 1, fault
        assert all((TREE / name).exists() for name in tests), fault
