"""What a hostile server can put into a message to a site: nothing of it leads out of the site's own folders."""

import copy
import sys
import tomllib
from pathlib import Path

import pytest
import tomli_w
from flwr.app import ConfigRecord, Context, Message, RecordDict
from sites import run_on_sites
from support import tiny_experiment

from fedsim.apps.client import app
from fedsim.common.errors import UserError
from fedsim.deploy.check_app import answer
from fedsim.flower.identity import assume_identity, stamp
from fedsim.runs.site import LAST_ROUND, REPLACED, check_settings, state_folder

LONG = "x" * 2_000_000
PATHS = ("..", "../../x", "a/../../x", "/elsewhere", "~/x", "a\0b", "..\\x")
ODD = (*PATHS, "", LONG, None, -5, 10**18, float("inf"), float("nan"), b"x", ["../x"], [float("nan")], True)
# Values of a right form, or of settings that a site does not use.
HARMLESS = {"client": ("",), "state-dir": (*PATHS, "", LONG), "round": (), "token": (), "experiment": ()}


@pytest.fixture(scope="module")
def traffic(tmp_path_factory):
    """One message of each kind, by its kind and phase, with the context of its node."""
    folder, found = tmp_path_factory.mktemp("sites"), {}
    for method in ("fada", "scaffold", {"name": "fedavg", "fuse": "secure_mean"}):
        own = {"evaluate_target": "site", "update_limit": 0.0, "doubt": 0.1 if method == "scaffold" else 0.0}
        experiment = tiny_experiment(folder / str(len(found)), method, 2, run=own, train={"budget": "images"})
        _, grid = run_on_sites(experiment, folder / "state")
        for message, _ in grid.seen:
            config = message.content.config_records["config"]
            key = message.metadata.message_type, config["phase"], config.get("bank", "")
            found[key] = message, grid.contexts[message.metadata.dst_node_id]
    return found


def reply_to(message: Message, context: Context, **changed: object) -> Message:
    """The site's reply to a message with changed settings; a setting that is None is left out."""
    config = {**message.content.config_records["config"], **changed}
    record = ConfigRecord({key: value for key, value in config.items() if value is not None})
    altered = Message(RecordDict({**message.content, "config": record}), 1, message.metadata.message_type)
    assume_identity(1)
    stamp(altered, "m")
    return app(altered, copy.copy(context))


def everything(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*"))


def sent(value: object) -> bool:
    """Whether Flower's records can hold it at all."""
    try:
        ConfigRecord({"key": value})
    except TypeError:
        return False
    return True


def test_every_setting_of_every_message_is_checked_by_its_form(traffic, tmp_path):
    """The site answers with one line, and no file is made, changed or removed anywhere near its state."""
    assert {kind for kind, _, _ in traffic} == {
        "query.handshake", "query.collect", "query.target", "query.visit", "query.doubt", "train", "evaluate"
    }  # fmt: skip
    assert {key for message, _ in traffic.values() for key in message.content.config_records["config"]} >= {
        "experiment", "token", "timeout", "round", "phase", "client", "bank", "state-dir", "state-round", "saved-round",
        "counts", "delivered",
    }  # fmt: skip
    for key, (message, context) in traffic.items():
        root = Path(context.node_config["state-dir"]).parents[1]
        before = everything(root)
        for setting, right in message.content.config_records["config"].items():
            optional = setting not in ("experiment", "token", "timeout", "round", "phase", "client")
            for value in filter(sent, ODD):
                same_form = type(value) is type(right) and value in HARMLESS.get(setting, ())
                if same_form or (value is None and optional):
                    continue
                reply = reply_to(message, context, **{setting: value})
                said = reply.error.reason if reply.has_error() else "accepted"
                assert said.startswith("user error: this site refuses the "), (
                    key,
                    setting,
                    str(value)[:40],
                    said[:200],
                )
                assert len(said) < 1000
                assert "\n" not in said
        assert everything(root) == before


def test_settings_that_nobody_asked_for_are_refused(traffic):
    message, context = traffic["train", "train", ""]
    assert "surprise" in reply_to(message, context, surprise="../x").error.reason


def test_every_text_of_an_experiment_is_checked(traffic):
    """Texts of parts and options of backbones may become names of files, too, and so may the keys of tables."""
    message, _ = traffic["train", "train", ""]
    text = message.content.config_records["config"]["experiment"]
    check_settings(text)
    table = tomllib.loads(text)
    places = [(section, key) for section in ("data", "model", "train", "method", "run") for key in table[section]]
    for section, key in [*places, ("parts", "x"), ("data", "structures"), ("model", "options")]:
        for value in ("../../x", "/elsewhere", "~/x", ["a", "../b"], {"a": {"b": "/c"}}, {"../x": 1}):
            changed = {**table, section: {**table.get(section, {}), key: value}}
            if f"{section}.{key}" in REPLACED:
                check_settings(tomli_w.dumps(changed))
                continue
            with pytest.raises(UserError, match=f"refuses the experiment: {section}.{key}.* leads out of a site's own"):
                check_settings(tomli_w.dumps(changed))
    for broken in ("[" * 100_000, "a = " + "[" * 100_000, "a = \x01"):
        with pytest.raises(UserError, match="not valid TOML"):
            check_settings(broken)


def test_a_site_uses_no_folder_of_the_server(traffic, tmp_path):
    """Not even where it has none of its own: then its $FEDSIM_DATA or ./data are meant."""
    message, context = traffic["query.handshake", "handshake", ""]
    table = tomllib.loads(message.content.config_records["config"]["experiment"])
    data, run = {"root": str(tmp_path), "cache": str(tmp_path / "c")}, {"output": str(tmp_path / "o")}
    own = tomli_w.dumps({**table, "data": {**table["data"], **data}, "run": {**table["run"], **run}})
    assert not reply_to(message, context, experiment=own).has_error()
    assert everything(tmp_path) == []


@pytest.mark.parametrize("token", ["../../x", "/elsewhere", "", "..", "a\0b", "0" * 15, "0" * 17, "G" * 16, LONG])
def test_a_token_names_a_folder_below_the_sites_state(token, tmp_path):
    with pytest.raises(UserError, match="is no token of a run"):
        state_folder(str(tmp_path / "state"), token)
    assert everything(tmp_path) == []


def test_a_state_folder_that_is_a_link_is_refused(tmp_path):
    (tmp_path / "runs").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "runs" / ("0" * 16)).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="is a link to another folder"):
        state_folder(str(tmp_path), "0" * 16)


def check_of(config: dict) -> dict:
    """What a site answers to the question of `fedsim deploy check` with these settings."""
    assume_identity(1)
    asked = Message(RecordDict({"config": ConfigRecord(config)}), 1, "query.check")
    said = answer(asked, Context(1, 1, {"site": "a"}, RecordDict(), {}))
    return said.content.config_records["site"]


@pytest.mark.parametrize("value", ["../x", "a b/../c", LONG, "antigravity;x", "a==", " ", "x\0", None, 5])
def test_the_check_of_a_deployment_is_held_to_its_form_too(value):
    config = {"experiment": "", "packages": value}
    problem = check_of({key: own for key, own in config.items() if own is not None})["problem"]
    assert ("this site refuses the server's message: packages" in problem) == (value is not None)


def test_a_check_imports_no_module_that_the_server_names(monkeypatch):
    """A search for `package.module` would import the package."""
    monkeypatch.delitem(sys.modules, "antigravity", raising=False)
    assert check_of({"experiment": "", "packages": "antigravity.x"})["lacking"] == []
    assert "antigravity" not in sys.modules


def test_the_largest_round_fits_the_names_of_state_files():
    assert len(str(LAST_ROUND)) == 6
