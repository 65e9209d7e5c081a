"""Groups of rows of `fedsim.methods.table.METHODS`, which stand here so that the table stays short.

- STYLE_METHODS: clients get the styles of other clients' images or features.
- SINGLE_SOURCE_METHODS: each client generalizes from its one domain; nothing more than FedAvg's is exchanged.
- DOMAIN_METHODS: each client compares its domains, on pooled data (`deepall+irm`) or where clients have several
  (`data.mix`); nothing more than FedAvg's is exchanged.
- TEXT_METHODS: a CLIP model reads the texts of class names (`model.head = "text"`).
- BASELINE_METHODS: simple representations, prototypes, generated features, robust fusion, skew and fairness.
"""

from clients.augment.client_normalization import ClientNormalization
from clients.augment.cross_client_style import CrossClientStyle
from clients.augment.rand_augment import RandAugment
from clients.batches.equal_domains import EqualDomains
from clients.objective.aligned_views import AlignedViews
from clients.objective.collaborative_styles import CollaborativeStyles
from clients.objective.consistent_views import ConsistentViews
from clients.objective.enlarged_batch import EnlargedBatch
from clients.objective.jigsaw import Jigsaw
from clients.objective.learn_to_diversify import LearnToDiversify
from clients.objective.mixtures import CutMix, MixUp
from clients.objective.random_convolution import RandomConvolution
from clients.objective.self_challenging import SelfChallenging
from clients.reports.received_loss import ReceivedLoss
from clients.step.adversarial_reference import AdversarialReference
from clients.step.episodic import EpisodicStep
from clients.step.inter_domain import InterDomain
from clients.terms.conditional_information import ConditionalInformation
from clients.terms.consistent_update import ConsistentUpdate
from clients.terms.cyclic_rate import CyclicRate
from clients.terms.decorrelation import Decorrelation
from clients.terms.feature_alignment import CorrelationAlignment, MeanDiscrepancy
from clients.terms.feature_augmentation import FeatureAugmentation
from clients.terms.flatness import Flatness
from clients.terms.group_robust import GroupRobust
from clients.terms.invariant_risk import InvariantRisk
from clients.terms.not_true_distillation import NotTrueDistillation
from clients.terms.prompt_stages import PromptStages
from clients.terms.prototype_contrast import PrototypeContrast
from clients.terms.prototype_distance import PrototypeDistance
from clients.terms.query_loss import QueryLoss
from clients.terms.representation_norm import RepresentationNorm
from clients.terms.risk_extrapolation import RiskExtrapolation
from clients.terms.self_reg import SelfReg
from clients.terms.style_contrast import StyleContrast
from clients.update.sharpness_aware import AdaptiveSharpness
from fedsim.methods.recipe import Recipe
from fedsim.models.infer.sampled import SampledRepresentation
from fedsim.models.infer.target_normalization import TargetNormalization
from fedsim.models.inserts.dsu import DSU
from fedsim.models.inserts.feature_attention import FeatureAttention
from fedsim.models.inserts.feature_highlighter import FeatureHighlighter
from fedsim.models.inserts.feature_spread import FeatureSpread
from fedsim.models.inserts.jigsaw_head import JigsawHead
from fedsim.models.inserts.keyed_prompts import KeyedPrompts
from fedsim.models.inserts.learned_prompts import LearnedPrompts
from fedsim.models.inserts.projector import Projector
from fedsim.models.inserts.prompt_sets import PromptSets
from fedsim.models.inserts.representation import Representation
from fedsim.models.inserts.stochastic_embedding import StochasticEmbedding
from fedsim.models.inserts.style_exploration import StyleExploration
from strategies.banks.amplitude import AmplitudeBank
from strategies.banks.class_references import ClassReferences
from strategies.banks.feature_generator import FeatureGenerator
from strategies.banks.feature_styles import FeatureStyles
from strategies.banks.heads import Heads
from strategies.banks.image_moments import ImageMoments
from strategies.banks.interpolation_style import InterpolationStyle
from strategies.banks.pixel_statistics import PixelStatistics
from strategies.banks.prototypes import Prototypes
from strategies.banks.style import StyleBank
from strategies.fuse.centered_clipping import CenteredClipping
from strategies.fuse.geometric_median import GeometricMedian
from strategies.fuse.masked_mean import MaskedMean
from strategies.refine.client_spread import ClientSpread
from strategies.refine.own_rows import OwnRows
from strategies.refine.server_average import ServerAverage
from strategies.weights.domain_diversity import DomainDiversity
from strategies.weights.tilted import Tilted
from strategies.weights.uniform import Uniform

MIXED = ("data.mix=0.5",)  # with one domain on every client these rows are FedAvg
TINY = ("model.backbone=tiny-clip", "model.head=text", "model.train=head")

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

SINGLE_SOURCE_METHODS: dict[str, Recipe] = {
    "rsc": Recipe(objective=SelfChallenging(), paper="Huang et al., ECCV 2020, inside FedAvg"),
    "randaugment": Recipe(augment=RandAugment(), paper="Cubuk et al., NeurIPS 2020, inside FedAvg"),
    "augmix": Recipe(objective=ConsistentViews(), paper="Hendrycks et al., ICLR 2020, inside FedAvg"),
    "mixup": Recipe(objective=MixUp(), paper="Zhang et al., ICLR 2018, inside FedAvg"),
    "cutmix": Recipe(objective=CutMix(), paper="Yun et al., ICCV 2019, inside FedAvg"),
    "randconv": Recipe(objective=RandomConvolution(), paper="Xu et al., ICLR 2021, inside FedAvg"),
    "sfa-s": Recipe(terms=(FeatureAugmentation("s"),), paper="Li et al., ICCV 2021: SFA-S, inside FedAvg"),
    "sfa-a": Recipe(terms=(FeatureAugmentation("a"),), paper="Li et al., ICCV 2021: SFA-A, inside FedAvg"),
    "l2d": Recipe(
        objective=LearnToDiversify(),
        inserts=(StochasticEmbedding(),),
        paper="Wang et al., ICCV 2021, inside FedAvg; the augmenter stays on its client",
    ),
    "jigen": Recipe(objective=Jigsaw(), inserts=(JigsawHead(),), paper="Carlucci et al., CVPR 2019, inside FedAvg"),
    "selfreg": Recipe(terms=(SelfReg(),), inserts=(Projector(),), paper="Kim et al., ICCV 2021, inside FedAvg"),
}

DOMAIN_METHODS: dict[str, Recipe] = {
    "irm": Recipe(
        terms=(InvariantRisk(),),
        batches=EqualDomains(),
        paper="Arjovsky et al. 2019 (arXiv 1907.02893): IRM, inside FedAvg",
        tried_with=MIXED,
    ),
    "vrex": Recipe(
        terms=(RiskExtrapolation(),),
        batches=EqualDomains(),
        paper="Krueger et al., ICML 2021: V-REx, inside FedAvg",
        tried_with=MIXED,
    ),
    "groupdro": Recipe(
        terms=(GroupRobust(),),
        batches=EqualDomains(),
        paper="Sagawa et al., ICLR 2020: GroupDRO, inside FedAvg",
        tried_with=MIXED,
    ),
    "coral": Recipe(
        terms=(CorrelationAlignment(),),
        batches=EqualDomains(),
        paper="Sun and Saenko, ECCV 2016: Deep CORAL between domains, inside FedAvg",
        tried_with=MIXED,
    ),
    "mmd": Recipe(
        terms=(MeanDiscrepancy(),),
        batches=EqualDomains(),
        paper="Li et al., CVPR 2018: MMD between domains, inside FedAvg",
        tried_with=MIXED,
    ),
    "fish": Recipe(
        step=InterDomain(),
        batches=EqualDomains(),
        paper="Shi et al., ICLR 2022: Fish, inside FedAvg",
        tried_with=MIXED,
    ),
}

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

BASELINE_METHODS: dict[str, Recipe] = {
    "fedsr": Recipe(
        inserts=(Representation(),),
        terms=(ConditionalInformation(), RepresentationNorm()),
        banks=(ClassReferences(),),
        infer=SampledRepresentation(),
        paper="Nguyen et al., NeurIPS 2022",
    ),
    "fedl2r": Recipe(
        inserts=(Representation(stochastic=False),),
        terms=(RepresentationNorm(),),
        paper="Nguyen et al., NeurIPS 2022: FedL2R, its deterministic half",
    ),
    "fedcmi": Recipe(
        inserts=(Representation(),),
        terms=(ConditionalInformation(),),
        banks=(ClassReferences(),),
        infer=SampledRepresentation(),
        paper="Nguyen et al., NeurIPS 2022: FedCMI, without the L2 penalty",
    ),
    "fpl": Recipe(terms=(PrototypeContrast(),), banks=(Prototypes(),), paper="Huang et al., CVPR 2023: FPL"),
    "fedadg": Recipe(
        step=AdversarialReference(),
        banks=(FeatureGenerator(),),
        paper="Zhang et al., 2021 (arXiv 2111.10487): FedADG",
    ),
    "rfa": Recipe(fuse=GeometricMedian(), paper="Pillutla et al., IEEE TSP 2022: RFA, the geometric median"),
    "centered-clipping": Recipe(fuse=CenteredClipping(), paper="Karimireddy et al., ICML 2021: centered clipping"),
    "feddecorr": Recipe(terms=(Decorrelation(),), paper="Shi et al., ICLR 2023: FedDecorr"),
    "fedntd": Recipe(terms=(NotTrueDistillation(),), paper="Lee et al., NeurIPS 2022: FedNTD"),
    "term": Recipe(weights=Tilted(), reports=(ReceivedLoss(),), paper="Tian Li et al., ICLR 2021: TERM"),
    "fedproto": Recipe(
        terms=(PrototypeDistance(),),
        banks=(Prototypes(cluster=False),),
        paper="Tan et al., AAAI 2022: FedProto, with averaged models",
    ),
    "fedasam": Recipe(update=AdaptiveSharpness(), paper="Caldarola et al., ECCV 2022: FedASAM"),
    "fedasam-swa": Recipe(
        update=AdaptiveSharpness(),
        terms=(CyclicRate(),),
        refine=(ServerAverage(running=True, after=0.75, cycle=5),),
        paper="Caldarola et al., ECCV 2022: FedASAM with stochastic weight averaging",
    ),
    "fedheal": Recipe(
        terms=(ConsistentUpdate(),),
        weights=DomainDiversity(),
        fuse=MaskedMean(),
        paper="Chen et al., CVPR 2024: FedHEAL, with FedAvg's loss",
    ),
    "fedlgf": Recipe(terms=(Flatness(),), weights=Uniform(), paper="Yan and Guo, ECCV 2024: FedLGF"),
    "mcsad": Recipe(
        objective=CollaborativeStyles(), banks=(Heads(),), weights=Uniform(), paper="Wei et al., IJCAI 2025: MCSAD"
    ),
    "dsu": Recipe(inserts=(DSU(),), paper="Li et al., ICLR 2022: DSU, inside FedAvg"),
    "fedfa": Recipe(inserts=(FeatureSpread(),), refine=(ClientSpread(),), paper="Zhou and Konukoglu, ICLR 2023: FedFA"),
}
