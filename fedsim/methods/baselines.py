"""Rows with simple representations, prototypes or generated features, and baselines: robust fusion, skew, fairness."""

from clients.objective.collaborative_styles import CollaborativeStyles
from clients.reports.received_loss import ReceivedLoss
from clients.step.adversarial_reference import AdversarialReference
from clients.terms.conditional_information import ConditionalInformation
from clients.terms.consistent_update import ConsistentUpdate
from clients.terms.cyclic_rate import CyclicRate
from clients.terms.decorrelation import Decorrelation
from clients.terms.flatness import Flatness
from clients.terms.not_true_distillation import NotTrueDistillation
from clients.terms.prototype_contrast import PrototypeContrast
from clients.terms.prototype_distance import PrototypeDistance
from clients.terms.representation_norm import RepresentationNorm
from clients.update.sharpness_aware import AdaptiveSharpness
from fedsim.methods.recipe import Recipe
from fedsim.models.infer.sampled import SampledRepresentation
from fedsim.models.inserts.dsu import DSU
from fedsim.models.inserts.feature_spread import FeatureSpread
from fedsim.models.inserts.representation import Representation
from strategies.banks.class_references import ClassReferences
from strategies.banks.feature_generator import FeatureGenerator
from strategies.banks.heads import Heads
from strategies.banks.prototypes import Prototypes
from strategies.fuse.centered_clipping import CenteredClipping
from strategies.fuse.geometric_median import GeometricMedian
from strategies.fuse.masked_mean import MaskedMean
from strategies.refine.client_spread import ClientSpread
from strategies.refine.server_average import ServerAverage
from strategies.weights.domain_diversity import DomainDiversity
from strategies.weights.tilted import Tilted
from strategies.weights.uniform import Uniform

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
