"""CLIP's loss inside a batch, on numbers worked out by hand and against its usual form."""

import pytest
import torch
import torch.nn.functional as F
from small_round import colour_images, small_data, small_round

from clients.parts import Batch
from clients.terms.in_batch_contrast import InBatchContrast, in_batch_contrast
from fedsim.methods.assembly import assemble
from fedsim.models.clip_family import TextHead
from fedsim.parts.part import part_name


def test_images_of_one_class_are_negatives():
    """l = (2 2; 0 0): the rows give log 2 each, the columns log(1 + e^-2) = .126928 and 2.126928."""
    logits, labels = torch.tensor([[2.0, -5.0], [0.0, 9.0]]), torch.tensor([0, 0])
    assert in_batch_contrast(logits, labels).item() == pytest.approx((0.693147 + 1.126928) / 2, abs=1e-6)


def test_is_clips_loss_over_the_batchs_own_texts():
    """With a text head: s f_i . t_j for the text t_j of image j, whose targets are the diagonal in both directions."""
    torch.manual_seed(0)
    features, labels, head = torch.randn(6, 4), torch.tensor([0, 2, 1, 2, 0, 2]), TextHead(torch.randn(3, 4), 10.0)
    pairs = 10.0 * F.normalize(features, dim=1) @ head.text[labels].T
    expected = (F.cross_entropy(pairs, torch.arange(6)) + F.cross_entropy(pairs.T, torch.arange(6))) / 2
    torch.testing.assert_close(in_batch_contrast(head(features), labels), expected)


def test_replaces_a_share_of_the_cross_entropy():
    logits, labels = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 1])
    loss, contrast = F.cross_entropy(logits, labels), in_batch_contrast(logits, labels)
    round = small_round(small_data(colour_images(4)))
    for share in (0.25, 1.0):
        term = InBatchContrast(share).begin(round)(Batch(None, labels, logits=logits, loss=loss))
        torch.testing.assert_close(loss + term, (1 - share) * loss + share * contrast)
    assert InBatchContrast(0.0).begin(round) is None


def test_joins_fedclip():
    recipe = assemble({"name": "fedclip", "add": ["in_batch_contrast"]}, {})
    assert [part_name(term) for term in recipe.terms] == ["in_batch_contrast"]
