"""The cache of personal tensors: a mean over all clients so far."""

import numpy as np
import pytest
from safetensors.numpy import load_file
from support import Interrupt, numbers, run_small, small_experiment

from fedsim.common.errors import UserError
from fedsim.methods.assembly import build_recipe
from fedsim.run.workspace import close_workspaces
from fedsim.settings.experiment import Experiment
from strategies.parts import ServerRound, Update
from strategies.refine.upload_cache import UploadCache
from strategies.weights.by_examples import ByExamples

PLACES = {"w": "shared", "bn.running_var": "upload", "bn.num_batches_tracked": "upload"}


def update(client, examples, variance, batches):
    arrays = {"w": np.ones(1), "bn.running_var": np.full(1, variance), "bn.num_batches_tracked": np.array(batches)}
    return Update(client, examples, arrays)


def test_the_newest_of_each_client_counts():
    """Variances 1 and 5 of 1 and 3 images give 4; when b comes alone with 9, a still counts: (1 + 27) / 4 = 7."""
    state, arrays, means = {}, {}, []
    for updates in (
        [update("a", 1, 1.0, 8), update("b", 3, 5.0, 2)],
        [update("b", 3, 9.0, 4)],
        [update("c", 4, 1.0, 1)],
    ):
        server = ServerRound(1, 3, ["a", "b", "c"], {}, state, updates=updates, places=PLACES, arrays=arrays,
                             known_weights=ByExamples().known)  # fmt: skip
        fused = UploadCache().refine(dict(updates[0].arrays), server)
        assert fused["w"] is updates[0].arrays["w"]
        assert fused["bn.num_batches_tracked"] == 8  # counters take the maximum
        means.append(fused["bn.running_var"].item())
    assert means == [4.0, 7.0, 4.0]


def trained(folder, *callbacks, **method):
    experiment = small_experiment(
        folder, {"name": "gperxan", **method}, train={"rounds": 2, "iterations": 1, "clients_per_round": 1}
    )
    folder, _ = run_small(experiment, *callbacks)
    return load_file(folder / "last.safetensors"), numbers(folder / "rounds.csv")


def test_drawn_clients_train_alike_and_a_resumed_run_has_the_cache(tmp_path):
    plain, ours = (trained(tmp_path / str(len(add)), add=add) for add in ([], ["upload_cache"]))
    assert plain[1]["train_loss"].equals(ours[1]["train_loss"])
    changed = {name for name in plain[0] if not np.array_equal(plain[0][name], ours[0][name])}
    assert changed
    assert all(".bn." in name or name.endswith(".s_bn") for name in changed)
    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path / "cut", Interrupt(1), add=["upload_cache"])
    close_workspaces()
    cut = trained(tmp_path / "cut", add=["upload_cache"])
    assert all(np.array_equal(cut[0][name], ours[0][name]) for name in cut[0])


@pytest.mark.parametrize(("name", "words"), [
    ("fedavg", "clients upload tensors that they keep"),
    ("feddg-ga+fedbn", "examples, which does not hold with generalization_adjustment"),
    ("fedbn+krum", "weighted mean .* not hold with krum"),
])  # fmt: skip
def test_what_has_nothing_to_keep_or_no_weights_is_refused(name, words):
    with pytest.raises(UserError, match=words):
        build_recipe(Experiment(method={"name": name, "add": ["upload_cache"]}))
