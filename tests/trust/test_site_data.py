"""A deployment's sites report which data they hold; a run does not continue with other data."""

import pytest

from fedsim.client_app import app
from fedsim.common.errors import UserError
from fedsim.data.fingerprint import fingerprint, fingerprints
from fedsim.run.plan import resolve
from fedsim.run.workspace import Workspace
from fedsim.runtime.inline import InlineGrid
from fedsim.settings import DataSettings
from fedsim.settings.experiment import Experiment
from strategies.wire.handshake import Roster
from strategies.wire.reply_checks import RejectedReplyError
from strategies.wire.sites import check_site, read_site

DIGITS = DataSettings(dataset="digits", image_size=16)
SAID = {"client": "photo", "role": "source", "examples": 5, "class-counts": [2, 3], "holds": "a site"}
GOOD = {"data-images": 5, "data-content": "0123456789abcdef0123"}


def test_what_a_site_says_about_its_data():
    assert fingerprint(DIGITS, "rot15") == fingerprints(DIGITS)["rot15"]
    site, _ = read_site(7, {**SAID, **GOOD})
    assert site.data == {"images": 5, "content": "0123456789abcdef0123"}
    assert read_site(7, {**SAID, **GOOD, "data-environment": 3})[0].data["environment"] == 3
    assert read_site(7, SAID)[0].data == {}
    check_site(site, 2, "")
    for examples, counts in ((6, [2, 3]), (5, [2, 4])):
        with pytest.raises(UserError, match=f"{examples} examples but {sum(counts)} labels"):
            check_site(read_site(7, {**SAID, "examples": examples, "class-counts": counts})[0], 2, "")


@pytest.mark.parametrize("wrong", [
    {"data-images": 5}, {**GOOD, "data-images": "5"}, {**GOOD, "data-images": True},
    {**GOOD, "data-content": "<script>"}, {**GOOD, "data-content": "0" * 10_000}, {**GOOD, "data-nameless": "<script>"},
    {**GOOD, "data-environment": "3"}, {**GOOD, "data-environment": True},
])  # fmt: skip
def test_nonsense_about_data_is_refused(wrong):
    with pytest.raises(RejectedReplyError, match="describes its data in a wrong form") as error:
        read_site(7, {**SAID, **wrong})
    assert len(str(error.value)) < 300


def roster_of(plan, folder, client, role="source", frozen=""):
    grid = InlineGrid(app, 1)
    (node,) = grid.get_node_ids()
    own = {"domain": client, "site": "a", "role": role, "data-dir": "", "state-dir": str(folder)}
    grid.contexts[node].node_config = own
    config = {"experiment": plan.experiment.toml(), "state-dir": str(folder), "token": "t", "timeout": 60.0}
    return Roster(grid, ["rot15"], 10, config, client if role == "target" else "", None, frozen)


def planned(**sections):
    return resolve(Experiment.model_validate({"data": DIGITS.model_dump(), **sections}))


def test_a_site_says_it_in_the_handshake(tmp_path):
    roster = roster_of(planned(), tmp_path, "rot15")
    assert roster.call(60.0) == []
    assert roster.fingerprints() == {"rot15": fingerprint(DIGITS, "rot15")}


def frozen_experiment(seed=0):
    return planned(model={"train": "head"}, run={"seed": seed})


@pytest.mark.parametrize("role", ["source", "target"])
def test_a_site_whose_frozen_weights_differ_is_refused_by_name(tmp_path, role):
    plan = frozen_experiment()
    client = "rot15" if role == "source" else plan.experiment.run.target
    assert roster_of(plan, tmp_path, client, role, Workspace(plan).frozen_content).call(60.0, [client]) == []
    other = Workspace(frozen_experiment(seed=1)).frozen_content
    with pytest.raises(UserError, match=f"client '{client}' has other frozen weights than the server"):
        roster_of(plan, tmp_path, client, role, other).call(60.0, [client])
    with pytest.raises(UserError, match="other frozen weights"):  # a site of an older version says nothing
        check_site(read_site(7, SAID)[0], 2, "0" * 20)
