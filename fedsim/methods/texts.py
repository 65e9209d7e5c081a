"""The rows of METHODS that need the texts of class names (`model.head = "text"`), which a CLIP model reads."""

from clients.terms.prompt_stages import PromptStages
from clients.terms.query_loss import QueryLoss
from fedsim.methods.recipe import Recipe
from fedsim.models.inserts.feature_attention import FeatureAttention
from fedsim.models.inserts.keyed_prompts import KeyedPrompts
from fedsim.models.inserts.learned_prompts import LearnedPrompts
from fedsim.models.inserts.prompt_sets import PromptSets
from strategies.refine.own_rows import OwnRows
from strategies.weights.uniform import Uniform

TINY = ("model.backbone=tiny-clip", "model.head=text", "model.train=head")

TEXT_METHODS: dict[str, Recipe] = {
    "fedclip": Recipe(
        inserts=(FeatureAttention(),),
        weights=Uniform(),
        paper="Lu et al., IEEE Data Engineering Bulletin 2023: FedCLIP; with model.head = text, model.train = head",
    ),
    "promptfl": Recipe(
        inserts=(LearnedPrompts(),),
        paper="Guo et al., IEEE TMC 2024: PromptFL; with model.head = text, model.train = head",
        tried_with=TINY,
    ),
    "fedapt": Recipe(
        inserts=(KeyedPrompts(),),
        terms=(QueryLoss(),),
        weights=Uniform(),
        paper="Su et al., AAAI 2024: FedAPT; with model.head = text, model.train = head",
        tried_with=TINY,
    ),
    "plan": Recipe(
        inserts=(PromptSets(),),
        terms=(PromptStages(),),
        refine=(OwnRows(),),
        weights=Uniform(),
        paper="Gong et al. 2024 (arXiv 2411.10063): PLAN; with model.head = text, model.train = head",
        tried_with=TINY,
    ),
}
