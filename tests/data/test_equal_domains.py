"""The images of one domain must not come again in another one, where they would be tested after training on them."""

import shutil

import pytest

from fedsim.common.errors import UserError
from fedsim.data import benchmark
from fedsim.data.fingerprint import difference, fingerprints, refuse_equal_domains
from fedsim.results.provenance import provenance_notes
from fedsim.settings import DataSettings

SAID = r"the domains 'art' and 'copy' of .* have the same 8 images with the same labels; remove one"


@pytest.fixture
def copied(tree_settings, tmp_path):
    data, copy = tree_settings(), tmp_path / "images" / "copy"
    assert len(fingerprints(data)) == 3
    shutil.copytree(tmp_path / "images" / "art", copy)
    return data, copy


def test_a_copied_linked_or_renamed_domain_is_refused(copied):
    data, copy = copied
    with pytest.raises(UserError, match=SAID):
        fingerprints(data)
    assert len(fingerprints(data.model_copy(update={"domains": ["copy", "photo"]}))) == 2
    (copy / "cat" / "000.png").rename(copy / "cat" / "other.png")
    with pytest.raises(UserError, match=SAID):
        fingerprints(data)
    (copy / "cat" / "other.png").rename(copy / "dog" / "other.png")  # another label
    assert len(fingerprints(data)) == 4
    shutil.rmtree(copy)
    copy.symlink_to(copy.parent / "art")
    with pytest.raises(UserError, match=SAID):
        fingerprints(data)


def test_the_sites_of_a_deployment_are_compared(tree_settings):
    """Two sites of one domain may have the same folder, of which each takes its own part; digits are rotations."""
    found = benchmark(tree_settings())
    own, other = ({"images": 8, "content": letter * 20} for letter in "ab")
    refuse_equal_domains(found, {"art/0": own, "art/1": own, "photo": other})
    with pytest.raises(UserError, match=SAID):
        refuse_equal_domains(found, {"art": own, "photo": other, "copy": own})
    for dataset in ("digits", "digit-masks"):
        assert len({own["content"] for own in fingerprints(DataSettings(dataset=dataset)).values()}) == 1


def test_a_new_folder_beside_the_chosen_domains_is_noticed(copied):
    """What fingerprints of a run on the old splits differ in; older records without the number are valid."""
    data, copy = copied
    chosen = data.model_copy(update={"domains": ["art", "photo", "sketch"]})
    shutil.rmtree(copy)
    before = fingerprints(chosen)
    assert [own["environment"] for own in before.values()] == [0, 1, 2]
    older = {domain: {key: own[key] for key in ("images", "content")} for domain, own in before.items()}
    assert difference(older, before) == difference(before, older) == difference(before, before) == ""
    shutil.copytree(copy.parent / "photo" / "cat", copy.parent / "cartoon" / "cat")
    shutil.copytree(copy.parent / "sketch" / "dog", copy.parent / "cartoon" / "dog")
    assert "photo: it was domain 1 of all and is domain 2 now" in difference(before, fingerprints(chosen))


def test_a_comparison_of_runs_with_other_splits_says_so():
    runs = {name: {"data": {"photo": {"environment": number}}} for name, number in (("one", 0), ("two", 1))}
    (said,) = provenance_notes(runs)
    assert "number of photo among all domains, which seeds its split, 0 (one), 1 (two)" in said
    assert provenance_notes({"one": runs["one"], "old": {"data": {"photo": {}}}}) == []
