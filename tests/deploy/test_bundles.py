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


def test_a_site_runs_what_the_operator_submits_for_fedsim(pins, tmp_path):
    """The bundles of `fedsim run` and `fedsim deploy check`, whatever folder they were written in."""
    assert pins.allows(fab(write_app(tmp_path / "a", RUN)))
    assert pins.allows(fab(write_app(tmp_path / "another", CHECK)))
    assert own_bundles().keys() == {"fedsim-run", "fedsim-check"}


def test_any_other_bundle_is_refused(pins, foreign, capsys):
    """With its hash, which the site's owner may allow."""
    assert not pins.allows(fab(foreign))
    assert bundle_hash(foreign) in capsys.readouterr().out


def test_a_site_allows_a_bundle_by_its_hash(pins, foreign, federation):
    """A line in its kit."""
    allowed = federation.kit("alpha") / "apps" / "allowed"
    allowed.write_text(allowed.read_text() + f"# of last week\n{bundle_hash(foreign).upper()} foreign\n")
    assert pins.allows(fab(foreign))


def test_the_operators_signature_allows_a_bundle(pins, foreign, federation):
    """By the key of this federation, over this very bundle."""
    found, signature = sign(foreign, federation.kit("operator") / "apps.key")
    file = federation.kit("alpha") / "apps" / f"{found}.sig"
    file.write_text(Ed25519PrivateKey.generate().sign(text(found)).hex())
    assert not pins.allows(fab(foreign))
    file.write_text("nonsense")
    assert not pins.allows(fab(foreign))
    file.write_text(f"{signature}\n")
    assert pins.allows(fab(foreign))
    (foreign / "foreign.py").write_text("app = 1\n")
    assert not pins.allows(fab(foreign))


def test_a_kit_without_pins_runs_what_it_is_sent(federation):
    (federation.kit("beta") / "apps" / "allowed").unlink()
    assert Pins.read(federation.kit("beta")) is None


def test_only_the_operators_key_signs(foreign, federation):
    with pytest.raises(UserError, match="not the operator's signing key"):
        sign(foreign, federation.kit("operator") / "ca.key")


def test_flower_asks_the_pins(pins, foreign, tmp_path, monkeypatch):
    """The SuperNode's own code refuses a foreign bundle with an error reply, and takes fedsim's."""
    internal = import_module("flwr.supernode.start_client_internal")
    command = import_module("flwr.supernode.cli.flower_supernode")
    started = []
    monkeypatch.setattr(command, "start_client_internal", lambda **named: started.append(named))
    monkeypatch.setattr(internal, "_verify_fab", internal._verify_fab)
    enforce(pins)
    command.start_client_internal(trusted_entities=None, node_config={})
    assert started[0]["trusted_entities"]
    assert internal._verify_fab(fab(write_app(tmp_path / "a", RUN)), started[0]["trusted_entities"])
    assert not internal._verify_fab(fab(foreign), started[0]["trusted_entities"])


def test_the_client_of_the_server_marks_bundles_for_the_check(tmp_path):
    """Without the mark Flower refuses each bundle unseen."""
    answer = SimpleNamespace(fab=SimpleNamespace(verifications={}))
    client = watched(type("Client", (), {"GetFab": lambda self, request: answer}), ContactFile(tmp_path / "contact"))
    assert client().GetFab(None).fab.verifications["valid_license"]
