"""Registration of the sites' keys: noted once, found again after an interruption."""

import json

import pytest

from fedsim.common.errors import UserError
from fedsim.deploy import control as module
from fedsim.deploy.control import registered_nodes

TAKEN = {"success": False, "error-message": "[code: 23] Public key already in use"}


class SuperLink:
    """What `flwr` answers: a registered key is not taken a second time."""

    def __init__(self, federation):
        self.federation, self.nodes, self.ends_after = federation, {}, None

    def online(self, wait=0.0):
        return dict.fromkeys(self.nodes.values(), False)

    def flwr(self, *words):
        if words[-1] in self.nodes:
            return TAKEN
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


def test_an_interrupted_registration_is_found_again(link, federation):
    """The SuperLink has the key and the kit has no note of it: the next call notes it, and nobody is shut out."""
    link.ends_after = "beta"
    with pytest.raises(KeyboardInterrupt):
        module.register(federation)
    assert module.register(federation) == {"alpha": 100, "beta": 101}
    record = json.loads((federation.kit("server") / "state" / "nodes" / "beta.json").read_text())
    assert record == {"node": 101, "key": "key of beta"}
    assert not list((federation.kit("server") / "state" / "nodes").glob("*.begun"))


def test_a_key_that_was_removed_stays_out(link, federation):
    """Without an interrupted registration of this very key, no node is taken for the site's."""
    link.nodes["beta"] = 55
    with pytest.raises(UserError, match="site 'beta': its key was registered before and then removed"):
        module.register(federation)
    assert registered_nodes(federation) == {"alpha": 101}
