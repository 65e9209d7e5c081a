"""The feature highlighter: numbers worked out by hand, and properties."""

import pytest
import torch
from networks import build

from fedsim.models.inserts.feature_highlighter import WIDTH, FeatureHighlighter, Highlighter

PART = FeatureHighlighter()


def identity_highlighter():
    """Queries and keys are the map itself, two channels."""
    highlighter = Highlighter(2)
    with torch.no_grad():
        highlighter.project.weight.zero_()
        highlighter.project.bias.zero_()
        for row, channel in ((0, 0), (1, 1), (WIDTH, 0), (WIDTH + 1, 1)):
            highlighter.project.weight[row, channel] = 1
    return highlighter


def attended(highlighter, maps, partners=lambda queries: queries):
    """The features of these maps."""
    highlighter.keep(None, (), maps)
    with highlighter.paired(partners):
        return highlighter(maps.mean(dim=(2, 3)))


# Positions as (channel 0, channel 1): (1, 0), (2, 1) and (0, 2), (1, 1)
MAPS = torch.tensor([[[[1.0, 2.0]], [[0.0, 1.0]]], [[[0.0, 1.0]], [[2.0, 1.0]]]])


def test_two_samples_of_one_class():
    """T2: a = (.457057, .542943) and (.425033, .574967); each as its own partner: a = (.5, .5)."""
    found = attended(identity_highlighter(), MAPS, lambda queries: queries.flip(0))
    expected = torch.tensor([[1.5, 0.5, 1.542943, 0.542943], [0.5, 1.5, 0.574967, 1.425033]])
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
    alone = identity_highlighter()
    alone.keep(None, (), MAPS)
    means = MAPS.mean(dim=(2, 3))
    torch.testing.assert_close(alone(means), torch.cat([means, means], dim=1))


@pytest.mark.parametrize("backbone", ["resnet18", "densenet121"])
def test_the_attended_map_is_the_one_that_is_pooled(backbone):
    """With equal keys everywhere the attention is uniform, and both halves of the features are the means."""
    net = build(backbone, insert=PART, size=64).eval()
    torch.nn.init.zeros_(net.bottleneck.project.weight)
    torch.testing.assert_close(*net.features(torch.rand(2, 3, 64, 64)).chunk(2, dim=1), atol=1e-5, rtol=1e-5)
