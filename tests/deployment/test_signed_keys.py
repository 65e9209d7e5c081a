"""Sites whose kits have a file `peers` sign their keys of secure_mean; a server that replaces them gets no update."""

import numpy as np
import pytest
from sites import run_on_sites
from support import tiny_experiment

from fedsim.common.errors import UserError
from fedsim.deploy.certificates import write_site_key
from fedsim.tensors.arrays import state_to_record
from strategies.banks.secure_exchange import KEYS
from strategies.tools import masking

RUN = {"evaluate_target": "site", "update_limit": 0.0}


def replaced(message, reply):
    """The server has keys of its own in the place of rot15's."""
    config = message.content.config_records["config"]
    if config.get("bank") == KEYS and config["client"] == "rot15":
        line = masking.entry(masking.new_key(), masking.new_key(), 40)
        reply.content[KEYS] = state_to_record({"line": np.frombuffer(line + bytes(masking.SIGNATURE), np.uint8)})
    return reply


def test_a_run_on_sites_signs_keys_and_ends_where_the_server_replaces_them(tmp_path):
    write_site_key("all", tmp_path / "key", tmp_path / "key.pub")  # one machine for all sites
    line = " ".join((tmp_path / "key.pub").read_text().split()[:2])
    (tmp_path / "peers").write_text("".join(f"{line} {domain}\n" for domain in ("rot0", "rot15", "rot30")))
    method = {"name": "fedavg", "fuse": "secure_mean"}
    peers = str(tmp_path / "peers")
    _, grid = run_on_sites(tiny_experiment(tmp_path / "a", method, 1, run=RUN), tmp_path / "s", peers=peers)
    sizes = [reply.content[KEYS]["line"].numpy().size for message, reply in grid.seen
             if message.content.config_records["config"].get("bank") == KEYS]  # fmt: skip
    assert sizes == [masking.ENTRY + masking.SIGNATURE] * 3
    wrong = tiny_experiment(tmp_path / "b", method, 1, run=RUN)
    with pytest.raises(UserError, match="'rot15' are not signed by its site"):
        run_on_sites(wrong, tmp_path / "t", tamper=replaced, peers=peers)
