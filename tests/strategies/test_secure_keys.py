"""Sites that have each other's public keys sign the keys of secure aggregation."""

import dataclasses

import numpy as np
import pytest
from secure_federation import Federation, models, plain

from fedsim.common.errors import UserError
from fedsim.deploy.certificates import write_site_key
from strategies.banks.secure_exchange import KEYS, SHARES
from strategies.tools import masking
from strategies.weights.by_examples import ByExamples


@pytest.fixture
def signing(tmp_path):
    """Three clients whose kits have the public keys of all, with their keys exchanged."""
    federation = Federation([1, 1, 1])
    for name in federation.names:
        (tmp_path / name).mkdir()
        write_site_key(name, tmp_path / name / "key", tmp_path / f"{name}.pub")
        federation.stores[name].peers = tmp_path / name / "peers"
    for name in federation.names:  # the key's comment stands where the domain does
        (tmp_path / name / "peers").write_text("".join((tmp_path / f"{each}.pub").read_text() for each in "abc"))
    federation.ask(KEYS, federation.names)
    return federation


def whole_round(federation):
    federation.ask(SHARES, federation.names)
    trained = models(federation.names)
    updates = [federation.reply(name, trained[name]) for name in federation.names]
    return federation.end(updates), plain(updates, trained, ByExamples())


def test_signed_keys_give_fedavgs_model(signing):
    found, wanted = whole_round(signing)
    np.testing.assert_allclose(found["w"], wanted["w"], rtol=0, atol=1e-6)


def test_a_server_that_replaces_a_sites_keys_is_noticed(signing):
    """Keys of its own with the site's, another site's or no signature, keys of another round, and a site of its own."""
    lines = signing.banks[KEYS].hand_out(signing.entries[KEYS], "a", signing.server())
    own = np.frombuffer(masking.entry(masking.new_key(), masking.new_key(), 1), np.uint8)
    late = signing.part.collect(dataclasses.replace(signing.local("b", KEYS), round=2))["line"]
    cases = [own, late, *(np.concatenate([own, lines[name][masking.ENTRY :]]) for name in "bc")]
    (signing.stores["c"].peers).write_text("".join(signing.stores["c"].peers.read_text().splitlines(True)[1:]))
    for asked, wrong, named in (*(("a", {**lines, "b": line}, "b") for line in cases), ("c", lines, "a")):
        with pytest.raises(UserError, match=f"client '{named}' are not signed by its site"):
            signing.part.collect(signing.local(asked, SHARES, records={KEYS: wrong}))
    signing.part.collect(signing.local("a", SHARES, records={KEYS: lines}))
    signing.stores["a"].peers.with_name("key").unlink()
    with pytest.raises(UserError, match="so that secure_mean signs its keys, and cannot read"):
        signing.part.collect(signing.local("a", KEYS))
