"""The closed vocabulary of compatibility: what parts may rely on in a recipe, and what other parts may change.

A part declares facts in `assumes`, `breaks`, `replaces` and `provides` (`fedsim.parts.part`).
`fedsim.methods.compatibility` derives from them which recipes are refused, and in which words.
"""

from enum import Enum

BOTH = "use one of the two"


class Fact(Enum):
    """One fact about a run: a sentence that follows the word "that", and what to do where it does not hold.

    The facts of the second group hold only where a part of the recipe provides them, all others unless a part breaks
    them.
    """

    SEVERAL_CLIENTS = "several clients train and differ", "use a federated method"
    SINGLE_UPDATES = "the server may look at what a single client sends"
    CLIENT_WEIGHTS = "the fused model counts every client with its weight"
    KNOWN_WEIGHTS = (
        "a client's weight follows from numbers of examples",
        "use method.weights = 'by_examples' or 'uniform'",
    )
    WEIGHTED_MEAN = "the fused model is the weighted mean of the clients' models"
    EVERY_ENTRY = "an update says of every weight how far it moved"
    STILL_ENTRIES = "in an update, a weight that did not move has a move of exactly 0"
    EVERY_CLIENT = "no client is left out of the fused model"
    CLIENTS_MOVE = "the global model moves about as far as its clients did in the round"
    WHOLE_MODEL = "a client trains the whole model"
    OBJECTIVE = "a step takes the loss of a batch from the objective"
    UPDATE = "the update moves the weights in each step"
    ONE_STEP = "one step with all terms of the loss trains all tensors"
    GLOBAL_HEAD = "all clients have the head of the global model"
    IMAGES = "the examples are images", "use a part or a method that takes any tensors"
    OWN_IMAGES = "a step gets the images as the data set's augmentation leaves them"
    ONE_INPUT = "the network gets all images as data.normalize leaves them"
    BATCH_NORM = "layers of batch norm normalize by their own statistics"
    PLAIN_LAYERS = "the norm layers are those of the backbone"
    BACKBONE_FEATURES = "the head gets the features of the backbone"
    CLASS_TEXTS = "the texts of the classes are those of model.prompt"
    ROWS = "the rows of features, logits and labels are the images of the batch"
    HARD_LABELS = "every image has one class as its label"
    DOMAINS_TOGETHER = "the loss of a batch is that of all its domains together"

    UPLOAD = "clients upload tensors that they keep to themselves", "set method.share = 'without_batch_norm'", False
    DRAWN_FEATURES = (
        "features are drawn from a distribution of each image",
        "add 'representation', with stochastic = true, to method.inserts",
        False,
    )
    ADAPTERS = "norm layers have adapters for unseen domains", "set method.norm = 'mix_ig', with adapter = true", False
    TARGET_STATISTICS = (
        "the inference rule computes all statistics of batch norm on the unseen domain",
        "keep upload = true, or set method.infer = 'recompute'",
        False,
    )

    def __init__(self, sentence: str, advice: str = BOTH, given: bool = True) -> None:
        self.sentence, self.advice, self.given = sentence, advice, given


Facts = tuple[Fact, ...]
