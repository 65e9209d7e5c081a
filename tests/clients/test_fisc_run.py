"""FISC in whole runs: its exchange, failures, combinations, and what it refuses."""

import logging

import numpy as np
import pandas as pd
import pytest
from flwr.app import Error, Message
from safetensors.numpy import load_file
from support import numbers, run_small, small_experiment

from fedsim.common.errors import UserError
from fedsim.methods.assembly import build_recipe, find_recipe
from fedsim.tensors.arrays import record_to_arrays

NAMES = ["rot0", "rot15", "rot30"]


def test_weights_of_zero_are_fedavg_bit_for_bit(tmp_path):
    """Nothing is sent in addition."""
    method = {"name": "fisc", "style_contrast": {"triplet_weight": 0, "norm_weight": 0}}
    folder, plain = (
        run_small(small_experiment(tmp_path / name, row))[0] for name, row in (("ours", method), ("plain", "fedavg"))
    )
    for table in ("rounds.csv", "clients.csv"):
        pd.testing.assert_frame_equal(numbers(folder / table), numbers(plain / table), rtol=0, atol=0)
    assert (folder / "last.safetensors").read_bytes() == (plain / "last.safetensors").read_bytes()
    assert build_recipe(small_experiment(tmp_path, method)).disclosure() == "model updates"


def sent(grid, kind, phase):
    """Records of the bank in messages of a kind and their replies, by client and round."""
    found = {}
    for message, reply in grid.seen:
        config = message.content.config_records["config"]
        if (message.metadata.message_type, config["phase"]) == (kind, phase) and not reply.has_error():
            key = config["client"], config["round"]
            records = (each.content.array_records.get("interpolation") for each in (message, reply))
            found[key] = [record and record_to_arrays(record) for record in records]
    return found


def test_the_exchange_is_as_said(tmp_path, caplog):
    """One style up, one down, once; with three clients it is their mean, which the log says."""
    with caplog.at_level(logging.WARNING, logger="fedsim"):
        folder, grid = run_small(small_experiment(tmp_path, "fisc", train={"rounds": 2}))
    assert [text for text in caplog.messages if "plain mean" in text] != []
    own = {client: reply for (client, _), (_, reply) in sent(grid, "query.collect", "collect").items()}
    assert list(own) == NAMES
    handed = sent(grid, "train", "train")
    for client in NAMES:
        down, up = handed[client, 1]
        assert up is None
        for key in ("mean", "std"):
            assert down[key] == pytest.approx(np.mean([own[name][key] for name in NAMES], axis=0), abs=1e-6)
        assert handed[client, 2] == [None, None]
    clients = pd.read_csv(folder / "clients.csv")
    assert clients.groupby("round")["bytes_up_interpolation"].sum().tolist() == [24, 0, 0]
    assert clients.groupby("round")["bytes_down_interpolation"].sum().tolist() == [0, 24, 0]
    details = pd.read_csv(folder / "details.csv")
    assert details[["round", "quantity", "value"]].to_numpy().tolist() == [[0, "style_clusters", 1.0]]
    assert "fisc(pixel)" in (folder / "summary.csv").read_text()


def test_a_client_that_sent_no_style_gets_that_of_the_others(tmp_path):
    def tamper(message, reply):
        config = message.content.config_records["config"]
        if config["phase"] == "collect" and config["client"] == "rot15":
            return Message(Error(2, "out of paint"), reply_to=message)
        return reply

    experiment = small_experiment(tmp_path, "fisc", train={"rounds": 2}, run={"on_client_failure": "continue"})
    folder, grid = run_small(experiment, tamper=tamper)
    own = [reply for _, reply in sent(grid, "query.collect", "collect").values()]
    assert len(own) == 2
    down, _ = sent(grid, "train", "train")["rot15", 1]
    assert down["mean"] == pytest.approx(np.mean([each["mean"] for each in own], axis=0), abs=1e-6)
    assert numbers(folder / "clients.csv").query("round == 2")["status"].tolist() == ["ok"] * 3


def test_combinations_train_and_differ_from_their_halves(tmp_path):
    """A fusion on the server, the other bank of styles, and a step that passes every batch twice."""
    models = {}
    for name in ["fisc", *(half for other in ("fedomg", "ccst", "fedsam") for half in (other, f"fisc+{other}"))]:
        experiment = small_experiment(tmp_path / name, name, train={"rounds": 1, "iterations": 3})
        folder, _ = run_small(experiment)
        assert np.isfinite(numbers(folder / "rounds.csv")["train_loss"].iloc[-1])
        models[name] = load_file(folder / "last.safetensors")
    for pair in [name for name in models if "+" in name]:
        for half in pair.split("+"):
            assert any(not np.array_equal(models[pair][key], models[half][key]) for key in models[half]), pair


def test_settings_that_cannot_work_are_refused(tmp_path):
    def refusal(method, **sections):
        with pytest.raises(UserError) as caught:
            build_recipe(small_experiment(tmp_path, method, **sections))
        assert "\n" not in str(caught.value)
        return str(caught.value)

    def settings(**values):
        return refusal({"name": "fisc", "style_contrast": values})

    assert "colour images" in settings(encoder="vgg")
    assert "style_contrast.statistics_layer = 'before_relu' is for encoder 'vgg'" in settings(
        statistics_layer="before_relu"
    )
    assert "less than or equal to 1" in settings(alpha=1.5)
    assert "greater than or equal to 1" in settings(clustered=0)
    assert "no part contributes to interpolation_style" in refusal({"name": "fisc", "terms": []})
    off = {"name": "fisc", "interpolation_style": {"shared": False}}
    assert "method.interpolation_style.shared = false leaves style_contrast without its bank" in refusal(off)
    pacs = {"dataset": "pacs", "image_size": 32, "domains": []}
    assert "method.style_contrast.encoder_weights is not set" in refusal(
        {"name": "fisc", "style_contrast": {"encoder": "vgg"}}, data=pacs, run={"target": "photo"}
    )
    with pytest.raises(UserError, match="all data pooled"):
        find_recipe("deepall+fisc")
    alone = build_recipe(small_experiment(tmp_path, {"name": "fedavg", "add": ["style_contrast"]}))
    assert alone.banks == find_recipe("fisc").banks
