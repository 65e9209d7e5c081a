"""Sums of features and the scale that is made of them, as they travel; what is no sum is refused."""

import pytest
from flwr.app import ConfigRecord

from fedsim.data.scaling import Moments, Scale
from strategies.wire.reply_checks import RejectedReplyError
from strategies.wire.scales import moments_config, read_moments, scale_config, scale_in
from strategies.wire.sites import read_site

MOMENTS = Moments((2, 1), (4.0, 10.0), (10.0, 100.0))
SITE = {"client": "a", "role": "source", "examples": 2, "class-counts": [1, 1]}


def test_sums_and_scales_arrive_as_they_were_sent():
    assert read_moments(dict(ConfigRecord(moments_config(MOMENTS)))) == MOMENTS
    assert read_moments({}) is None
    scale = Scale((1.0, 0.1), (2.0, 3.0))
    assert scale_in(dict(ConfigRecord(scale_config(scale)))) == scale
    assert scale_in({}) is None


@pytest.mark.parametrize(
    "changed",
    [
        {"scale-sums": [4.0]},
        {"scale-sums": [4.0, float("nan")]},
        {"scale-sums": ["4", "10"]},
        {"scale-sums": 4.0},
        {"scale-squares": [1.0, 100.0]},
        {"scale-counts": [2.5, 1.0]},
        {"scale-counts": [-2, 1]},
        {"scale-squares": None},
    ],
)
def test_a_site_with_impossible_sums_is_refused_by_name(changed):
    assert read_site(7, SITE | moments_config(MOMENTS))[0].moments == MOMENTS
    with pytest.raises(RejectedReplyError, match="client 'a': its sums of features"):
        read_site(7, SITE | moments_config(MOMENTS) | changed)
