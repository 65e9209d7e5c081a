"""Learned vectors in the texts of class names, on a tiny CLIP and on numbers worked out by hand."""

import pytest
import torch
from small_texts import build, simple_texts

from fedsim.common.errors import UserError
from fedsim.models.inserts.keyed_prompts import KeyedPrompts
from fedsim.models.inserts.learned_prompts import LearnedPrompts, PromptHead
from fedsim.models.inserts.prompt_sets import PromptSets
from fedsim.models.tiny_clip import FIRST, TOKENS, tokens_of


def test_tokens_and_names_of_several_lengths():
    """al = 10 * 36 + 21, m = 22, ff = 15 * 36 + 15, zz = 35 * 36 + 35; the bytes of é are 195 and 169, that of
    . 46. The class 3 4 has the mean of (1, 0), (0, 1), (2, 0), (0, 2) and the end; the other's padding has no
    effect."""
    found = tokens_of("Alm ff1 é zz.")
    assert [number - FIRST for number in found] == [381, 22, 555, 1, 36 + 195, 36 + 169, 1295, 36 + 46]
    assert tokens_of("zz") == [TOKENS - 1]
    head, expected = PromptHead(simple_texts(((3,), (3, 4))), torch.tensor([[0.0, 1]])), [9.486833, 7.071068]
    assert torch.allclose(head(torch.tensor([[2.0, 0]])), torch.tensor([expected]), atol=1e-5)
    head.tails[0, 2:] = 100.0
    assert torch.allclose(head(torch.tensor([[2.0, 0]])), torch.tensor([expected]), atol=1e-5)


@pytest.mark.parametrize(("context", "expected"), [
    ([[0.0, 1]], [9.486833, 3.162278]), ([[0.0, 5]], [5.144958, 1.414214]),
    ([[[0.0, 1]], [[0.0, 5]]], [9.486833, 1.414214]),  # a class with its own vectors
])  # fmt: skip
def test_logits_on_numbers(context, expected):
    """[start, V, name, end] with V = (0, 1): means along (3, 1), (1, 3), or (0, 5): (3, 5), (1, 7). f gives 10 cos."""
    head = PromptHead(simple_texts(), torch.tensor([[0.0, 1]]))
    head.context.data = torch.tensor(context)
    assert torch.allclose(head(torch.tensor([[2.0, 0]])), torch.tensor([expected]), atol=1e-5)


@pytest.mark.parametrize(("part", "model", "message"), [
    (LearnedPrompts(L=60), {}, r"learned_prompts.L: with 60 tokens .* 69 tokens .* tiny-clip reads 48"),
    (LearnedPrompts(init="template"), {"prompt": "{}"}, "no word in front of the name"),
    (LearnedPrompts(), {"head": "linear"}, r"insert learned_prompts: .* set model.head = 'text'"),
    (LearnedPrompts(), {"prompt": "a photo of a dog{}"}, "begins inside a token; put a space"),
    (KeyedPrompts(L=60), {"clients": 3}, r"keyed_prompts.L: with 60 tokens .* tiny-clip reads 48"),
    (PromptSets(heads=5), {"clients": 3}, "5 does not divide the encoder's width of 32"),
    (None, {"names": ("dog", "Alarm_Clock", "alarm clock")},
     r"^model.head = 'text': the classes 'Alarm_Clock' and 'alarm clock' are the same text for tiny-clip; give"),
])  # fmt: skip
def test_parts_that_do_not_fit(part, model, message):
    with pytest.raises(UserError, match=message):
        build(part, **model)
