"""Share rules without the upload of batch norm: a model for the unseen domain must still exist, in every tensor."""

import pytest
from support import run_small, small_experiment

from fedsim.common.errors import UserError
from fedsim.methods.assembly import build_recipe


@pytest.mark.parametrize("infer", ["eval_mode", "tsmo_bn", "recompute"])
def test_fedbn_needs_the_upload(tmp_path, infer):
    """No rule computes gamma and beta again: without the upload they would be those of the untrained network."""
    method = {"name": "fedbn", "infer": infer, "without_batch_norm": {"upload": False}}
    with pytest.raises(UserError, match=r"keep upload = true, or set method\.share = 'without_statistics'"):
        build_recipe(small_experiment(tmp_path, method))


@pytest.mark.parametrize("infer", ["eval_mode", "tsmo_bn", "fixed_alpha"])
def test_silobn_without_the_upload_needs_a_rule_that_replaces_all_statistics(tmp_path, infer):
    """TsmoBN, for example, leaves batch norm of vectors and of one-pixel maps as it is."""
    method = {"name": "silobn", "infer": infer, "without_statistics": {"upload": False}}
    with pytest.raises(UserError, match=r"keep upload = true, or set method\.infer = 'recompute'"):
        build_recipe(small_experiment(tmp_path, method))


def test_silobn_without_the_upload_sends_no_statistics(tmp_path):
    method = {"name": "silobn", "infer": "recompute", "without_statistics": {"upload": False}}
    _, grid = run_small(small_experiment(tmp_path, method, model={"bottleneck": 16}, train={"rounds": 1}))
    replies = [reply for message, reply in grid.seen if message.metadata.message_type == "train"]
    assert len(replies) == 3
    assert not any("running" in name for reply in replies for name in reply.content.array_records["arrays"])


def test_a_scope_without_layers_has_nothing_to_upload(tmp_path):
    method = {"name": "fedbn", "without_batch_norm": {"scope": "none", "upload": False}}
    assert build_recipe(small_experiment(tmp_path, method)).share.scope == "none"
