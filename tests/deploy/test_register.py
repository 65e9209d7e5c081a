"""Keys of sites: registered once, found again after an interruption, taken from a site, and who has them."""

import json

import pytest
from demo import register

from fedsim.common.errors import UserError
from fedsim.deploy import control as module
from fedsim.deploy.certificates import write_site_key
from fedsim.deploy.control import add_public_key, registered_nodes
from fedsim.deploy.registry import identities


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
    identify = identities(str(kit / "federation.toml"))
    assert (identify(11).site, identify(12).role, identify(13)) == ("alpha", "target", None)
    assert identify(11).serves("rot0", "source")
    assert not identify(11).serves("rot15", "source")
    assert not identify(12).serves("rot45", "source")
