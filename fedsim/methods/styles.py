"""The rows of `fedsim.methods.table.METHODS` in which clients get the styles of other clients' images or features."""

from clients.augment.client_normalization import ClientNormalization
from clients.augment.cross_client_style import CrossClientStyle
from clients.objective.aligned_views import AlignedViews
from clients.objective.enlarged_batch import EnlargedBatch
from clients.step.episodic import EpisodicStep
from clients.terms.style_contrast import StyleContrast
from fedsim.methods.recipe import Recipe
from fedsim.models.infer.target_normalization import TargetNormalization
from fedsim.models.inserts.feature_highlighter import FeatureHighlighter
from fedsim.models.inserts.style_exploration import StyleExploration
from strategies.banks.amplitude import AmplitudeBank
from strategies.banks.feature_styles import FeatureStyles
from strategies.banks.image_moments import ImageMoments
from strategies.banks.interpolation_style import InterpolationStyle
from strategies.banks.pixel_statistics import PixelStatistics
from strategies.banks.style import StyleBank
from strategies.weights.uniform import Uniform

STYLE_METHODS: dict[str, Recipe] = {
    "ccst": Recipe(augment=CrossClientStyle(), banks=(StyleBank(),), paper="Chen et al., WACV 2023"),
    "stablefdg": Recipe(
        objective=EnlargedBatch(),
        inserts=(StyleExploration(), FeatureHighlighter()),
        banks=(FeatureStyles(),),
        weights=Uniform(),
        paper="Park et al., NeurIPS 2023: StableFDG",
    ),
    "elcfs": Recipe(step=EpisodicStep(), banks=(AmplitudeBank(),), paper="Liu et al., CVPR 2021 (FedDG)"),
    "fedccrl": Recipe(objective=AlignedViews(), banks=(PixelStatistics(),), paper="Wang et al., 2024: FedCCRL"),
    "fisc": Recipe(terms=(StyleContrast(),), banks=(InterpolationStyle(),), paper="Nguyen et al., ICDCS 2025: FISC"),
    "fedrdn": Recipe(
        augment=ClientNormalization(),
        banks=(ImageMoments(),),
        infer=TargetNormalization(),
        paper="Yan et al., CVPR 2025: FedRDN",
    ),
}
