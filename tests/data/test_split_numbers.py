"""The number that seeds a domain's split counts all domains of the data root; a run notices when it changes."""

import json

import pytest
from image_trees import write_tree
from support import Interrupt, run_small, small_experiment

from fedsim.common.errors import UserError
from fedsim.data.fingerprint import difference, fingerprints
from fedsim.results.provenance import provenance_notes
from strategies.wire.reply_checks import RejectedReplyError
from strategies.wire.sites import read_site


def test_a_new_folder_beside_the_chosen_domains_is_noticed(tmp_path):
    """An unfinished and a finished run on the old splits are not continued on the new ones."""
    root = write_tree(tmp_path / "tree", ("art", "photo", "sketch"), ("cat", "dog"), 6)
    data = {"dataset": "folder", "root": str(root), "domains": ["art", "photo", "sketch"], "fraction": 1}
    experiment = small_experiment(tmp_path / "out", data=data, train={"rounds": 2}, run={"target": "sketch"})
    with pytest.raises(KeyboardInterrupt):
        run_small(experiment, Interrupt(1))
    write_tree(root, ("cartoon",), ("cat", "dog"), 1)
    with pytest.raises(UserError, match=r"photo: it was domain 1 of all and is domain 2 now, .* another split"):
        run_small(experiment)
    for file in sorted((root / "cartoon").rglob("*"), reverse=True):
        file.unlink() if file.is_file() else file.rmdir()
    (root / "cartoon").rmdir()
    assert (run_small(experiment)[0] / "summary.csv").is_file()


def test_older_records_without_the_number_are_valid(tree_settings):
    now = fingerprints(tree_settings())
    then = {domain: {key: own[key] for key in ("images", "content")} for domain, own in now.items()}
    assert difference(then, now) == difference(now, then) == difference(now, now) == ""
    assert [own["environment"] for own in now.values()] == [0, 1, 2]


def test_a_comparison_of_runs_with_other_splits_says_so():
    runs = {name: {"data": {"photo": {"environment": number}}} for name, number in (("one", 0), ("two", 1))}
    (said,) = provenance_notes(runs)
    assert "number of photo among all domains, which seeds its split, 0 (one), 1 (two)" in said
    assert provenance_notes({"one": runs["one"], "old": {"data": {"photo": {}}}}) == []


@pytest.mark.parametrize(("number", "right"), [(3, True), ("3", False), (True, False)])
def test_a_site_reports_it(number, right):
    said = {"client": "photo", "role": "source", "examples": 1, "class-counts": [1], "data-images": 5}
    said |= {"data-content": "0123456789abcdef0123", "data-environment": number}
    if right:
        assert read_site(1, said)[0].data["environment"] == 3
        return
    with pytest.raises(RejectedReplyError, match="describes its data in a wrong form"):
        read_site(1, json.loads(json.dumps(said)))
