"""Share rules without the upload of batch norm: a model for the unseen domain must still exist, in every tensor."""

import pytest
from support import run_small, small_experiment

from fedsim.common.errors import UserError
from fedsim.methods.assembly import build_recipe


@pytest.mark.parametrize(("method", "infer", "said"), [
    *(("fedbn", infer, r"method\.share = 'without_statistics'") for infer in ("eval_mode", "tsmo_bn", "recompute")),
    *(("silobn", infer, r"method\.infer = 'recompute'") for infer in ("eval_mode", "tsmo_bn", "fixed_alpha")),
])  # fmt: skip
def test_without_the_upload_a_rule_must_replace_all_that_is_missing(tmp_path, method, infer, said):
    """No rule computes gamma and beta again; TsmoBN, for example, leaves batch norm of vectors as it is."""
    share = {"fedbn": "without_batch_norm", "silobn": "without_statistics"}[method]
    with pytest.raises(UserError, match=f"keep upload = true, or set {said}"):
        build_recipe(small_experiment(tmp_path, {"name": method, "infer": infer, share: {"upload": False}}))


def test_silobn_without_the_upload_sends_no_statistics(tmp_path):
    method = {"name": "silobn", "infer": "recompute", "without_statistics": {"upload": False}}
    sections = {"model": {"bottleneck": 16}, "train": {"rounds": 1, "iterations": 1}}
    _, grid = run_small(small_experiment(tmp_path, method, **sections))
    sent = [set(reply.content["arrays"]) for message, reply in grid.seen if message.metadata.message_type == "train"]
    assert len(sent) == 3
    assert not [name for name in set.union(*sent) if "running" in name or "num_batches" in name]


def test_a_scope_without_layers_has_nothing_to_upload(tmp_path):
    method = {"name": "fedbn", "without_batch_norm": {"scope": "none", "upload": False}}
    assert build_recipe(small_experiment(tmp_path, method)).share.scope == "none"
