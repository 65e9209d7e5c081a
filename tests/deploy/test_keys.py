"""Keys of sites are registered once; a site runs fedsim's app bundles, those the operator's key signed, no others."""

import json
from importlib import import_module
from types import SimpleNamespace

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from demo import register

from fedsim.common.errors import UserError
from fedsim.deploy import control as module
from fedsim.deploy.bundles import CHECK, RUN, Pins, bundle_hash, own_bundles, sign, text
from fedsim.deploy.certificates import write_site_key
from fedsim.deploy.control import add_public_key, registered_nodes
from fedsim.deploy.registry import Registry
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
    from flwr.cli.build import build_fab_from_disk

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


class SuperLink:
    """What `flwr` answers: a registered key is not taken a second time."""

    def __init__(self, federation):
        self.federation, self.nodes, self.ends_after = federation, {}, None

    def online(self, wait=0.0):
        return dict.fromkeys(self.nodes.values(), False)

    def flwr(self, *words):
        if words[-1] in self.nodes:
            return {"success": False, "error-message": "[code: 23] Public key already in use"}
        self.nodes[words[-1]] = 100 + len(self.nodes)
        if words[-1] == self.ends_after:
            raise KeyboardInterrupt
        return {"success": True, "node-id": str(self.nodes[words[-1]])}


@pytest.fixture
def link(federation, monkeypatch):
    """A SuperLink without keys, and a server kit with those of two sites."""
    sites = federation.kit("server") / "sites"
    for file in sites.glob("*.pub"):
        file.unlink()
    for name in ("alpha", "beta"):
        (sites / f"{name}.pub").write_text(f"key of {name}")
    link = SuperLink(federation)
    monkeypatch.setattr(module, "Control", lambda federation: link)
    monkeypatch.setattr(module, "write_key_map", lambda federation: None)
    return link


def test_an_interrupted_registration_is_found_again_and_nobody_is_shut_out(link, federation):
    link.ends_after = "beta"
    with pytest.raises(KeyboardInterrupt):
        module.register(federation)
    assert module.register(federation) == {"alpha": 100, "beta": 101}
    record = json.loads((federation.kit("server") / "state" / "nodes" / "beta.json").read_text())
    assert record == {"node": 101, "key": "key of beta"}
    assert not list((federation.kit("server") / "state" / "nodes").glob("*.begun"))


def test_a_key_that_was_removed_stays_out(link, federation):
    link.nodes["beta"] = 55
    with pytest.raises(UserError, match="site 'beta': its key was registered before and then removed"):
        module.register(federation)
    assert registered_nodes(federation) == {"alpha": 101}


def test_a_key_made_at_the_site_is_taken_once_and_only_its_own(federation, tmp_path):
    """The SuperLink takes a key once; with another site's, the server's start.sh would fail from then on."""
    sites = federation.kit("server") / "sites"
    write_site_key("alpha", tmp_path / "key", tmp_path / "key.pub")
    (tmp_path / "mail.pub").write_text((sites / "beta.pub").read_text().replace("beta", "from a mail"))
    for site, file, said in (
        ("alpha", "key.pub", "has another key already"),
        ("alpha", "mail.pub", "holds the key of site 'beta'; site 'alpha' needs one of its own"),
        ("alpha", "key", "holds no public key"),
    ):
        if file == "mail.pub":
            (sites / "alpha.pub").unlink()
        with pytest.raises(UserError, match=said):
            add_public_key(federation, site, tmp_path / file)
    assert not (sites / "alpha.pub").exists()
    add_public_key(federation, "alpha", tmp_path / "key.pub")
    assert (sites / "alpha.pub").read_text() == (tmp_path / "key.pub").read_text()


def test_keys_are_identities(federation):
    kit = register(federation, alpha=11, delta=12)
    identify = Registry(kit).of_node
    assert (identify(11).site, identify(12).role, identify(13)) == ("alpha", "target", None)
    assert identify(11).serves("rot0", "source")
    assert not identify(11).serves("rot15", "source")
    assert not identify(12).serves("rot45", "source")
