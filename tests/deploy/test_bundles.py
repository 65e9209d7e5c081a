"""Which app bundles a site runs: fedsim's own, those the operator's key signed, and no others."""

from importlib import import_module
from types import SimpleNamespace

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from flwr.cli.build import build_fab_from_disk

from fedsim.common.errors import UserError
from fedsim.deploy.apps import CHECK, RUN
from fedsim.deploy.bundles import Pins, bundle_hash, own_bundles, sign, text
from fedsim.deploy.supernode import ContactFile, enforce, watched
from fedsim.flower.processes import write_app


@pytest.fixture
def pins(federation):
    return Pins.read(federation.kit("alpha"))


@pytest.fixture
def foreign(tmp_path):
    """An app with code of its own."""
    app = write_app(tmp_path / "foreign", {**RUN, "project": {**RUN["project"], "name": "foreign"}})
    (app / "foreign.py").write_text("app = None\n")
    return app


def fab(app):
    return SimpleNamespace(content=build_fab_from_disk(app))


def test_a_site_runs_what_the_operator_submits_for_fedsim_and_what_its_owner_allows(pins, foreign, federation, capsys):
    for name, app in (("a", RUN), ("another", CHECK)):  # whatever folder they were written in
        assert pins.allows(fab(write_app(foreign.parent / name, app)))
    assert own_bundles().keys() == {"fedsim-run", "fedsim-check"}
    assert not pins.allows(fab(foreign))
    assert bundle_hash(foreign) in capsys.readouterr().out
    allowed = federation.kit("alpha") / "apps" / "allowed"
    allowed.write_text(allowed.read_text() + f"# of last week\n{bundle_hash(foreign).upper()} foreign\n")
    assert pins.allows(fab(foreign))
    allowed.unlink()
    assert Pins.read(federation.kit("alpha")) is None  # such a kit runs what it is sent


def test_the_operators_signature_allows_this_very_bundle(pins, foreign, federation):
    found, signature = sign(foreign, federation.kit("operator") / "apps.key")
    file = federation.kit("alpha") / "apps" / f"{found}.sig"
    strangers = Ed25519PrivateKey.generate().sign(text(found)).hex()
    for written, allowed in ((strangers, False), ("nonsense", False), (f"{signature}\n", True)):
        file.write_text(written)
        assert pins.allows(fab(foreign)) == allowed
    (foreign / "foreign.py").write_text("app = 1\n")
    assert not pins.allows(fab(foreign))
    with pytest.raises(UserError, match="not the operator's signing key"):
        sign(foreign, federation.kit("operator") / "ca.key")


def test_flower_asks_the_pins(pins, foreign, tmp_path, monkeypatch):
    names = ("flwr.supernode.start_client_internal", "flwr.supernode.cli.flower_supernode")
    internal, command = map(import_module, names)
    started = []
    monkeypatch.setattr(command, "start_client_internal", lambda **named: started.append(named))
    monkeypatch.setattr(internal, "_verify_fab", internal._verify_fab)
    enforce(pins)
    command.start_client_internal(trusted_entities=None, node_config={})
    for app, allowed in ((write_app(tmp_path / "a", RUN), True), (foreign, False)):
        assert internal._verify_fab(fab(app), started[0]["trusted_entities"]) == allowed


def test_bundles_are_marked_without_which_flower_refuses_each_unseen(tmp_path):
    answer = SimpleNamespace(fab=SimpleNamespace(verifications={}))
    client = watched(type("Client", (), {"GetFab": lambda self, request: answer}), ContactFile(tmp_path / "contact"))
    assert client().GetFab(None).fab.verifications["valid_license"]
