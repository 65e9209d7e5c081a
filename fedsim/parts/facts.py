"""The closed vocabulary of compatibility: what parts may rely on in a recipe, and what other parts may change.

A part declares `assumes`, `breaks` and `replaces` with these facts (`fedsim.parts.part`), and
`fedsim.methods.compatibility` derives from them which recipes are refused, and in which words.
"""

from enum import Enum


class Fact(Enum):
    """One fact about a run, as a sentence that follows the word "that", and what to do when it does not hold."""

    ROWS = "the rows of features, logits and labels are the images of the batch"
    HARD_LABELS = "every image has one class as its label"

    def __init__(self, sentence: str, advice: str = "use one of the two") -> None:
        self.sentence, self.advice = sentence, advice
