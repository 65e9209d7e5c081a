"""The faults that tests/faults/seed.py makes fit the tree."""

from seed import HERE, misfits, read_faults


def test_every_fault_can_be_made():
    faults = read_faults()
    assert len({fault.id for fault in faults}) == len(faults) == 120
    assert not misfits(faults, HERE.parents[1])
