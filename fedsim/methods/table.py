"""All methods, each as a recipe of exchangeable parts. Start reading here; some rows stand in `further_rows.py`.

A row names the parts in which the method differs from FedAvg. On the command line `a+b` combines two rows, and
`method.guiding_head.weight=0.25` sets a field of a part. `method.weights="uniform"` replaces a part, and
`method.add=["guiding_head"]` adds one (`assembly.py`).
"""

from clients.augment.rand_augment import RandAugment
from clients.batches.balanced_budget import BalancedBudget
from clients.companions.ditto import Ditto
from clients.objective.client_agnostic import ClientAgnostic
from clients.reports.generalization_gap import GeneralizationGap
from clients.reports.gradient_count import GradientCount
from clients.reports.received_loss import ReceivedLoss
from clients.step.calibration import SemanticCalibration
from clients.step.disentangling_adversary import DisentanglingAdversary
from clients.terms.classifier_alignment import ClassifierAlignment
from clients.terms.client_momentum import ClientMomentum
from clients.terms.drift_correction import DriftCorrection
from clients.terms.dynamic_regularizer import DynamicRegularizer
from clients.terms.gradient_alignment import GradientAlignment
from clients.terms.guiding_head import GuidingHead
from clients.terms.label_smoothing import LabelSmoothing
from clients.terms.moon import ModelContrast
from clients.terms.other_heads import OtherHeads
from clients.terms.proximal import Proximal
from clients.unlabelled.adversarial_target import AdversarialTarget
from clients.update.sharpness_aware import GlobalAscent, SharpnessAware
from fedsim.methods import further_rows
from fedsim.methods.recipe import Recipe
from fedsim.models.infer.alpha import ZeroShotAdapter
from fedsim.models.infer.ensemble import EnsembleOfHeads
from fedsim.models.inserts.adapters import Adapters
from fedsim.models.inserts.disentangler import Disentangler
from fedsim.models.inserts.kept_scale import KeptScale
from fedsim.models.inserts.mixstyle import MixStyle
from fedsim.models.inserts.projection_head import ProjectionHead
from fedsim.models.norms import DSON, IBN, XAN, MixIG
from strategies.banks.classifier_gradients import ClassifierGradients
from strategies.banks.control_variates import ControlVariates
from strategies.banks.domain_identifiers import DomainIdentifiers
from strategies.banks.global_batch_norm import GlobalBatchNorm
from strategies.banks.global_direction import GlobalDirection
from strategies.banks.heads import Heads
from strategies.banks.target_features import TargetFeatures
from strategies.fuse.aligned_weights import AlignedWeights
from strategies.fuse.gradient_mask import GradientMask
from strategies.fuse.gradient_matching import GradientMatching
from strategies.fuse.krum import Krum
from strategies.fuse.normalized_average import NormalizedAverage
from strategies.fuse.q_fed_avg import QFedAvg
from strategies.fuse.semantic_divergence import SemanticDivergence
from strategies.refine.dynamic_correction import DynamicCorrection
from strategies.refine.ensemble_distillation import EnsembleDistillation
from strategies.refine.flower_optimizer import FedAdagrad, FedAdam, FedAvgM, FedYogi
from strategies.share.random_subnet import RandomSubnet
from strategies.share.without_batch_norm import WithoutBatchNorm
from strategies.share.without_head import WithoutHead
from strategies.share.without_statistics import WithoutStatistics
from strategies.visits.target_attention import TargetAttention
from strategies.visits.target_training import TargetTraining
from strategies.weights.agnostic import AgnosticWeights
from strategies.weights.generalization_adjustment import GeneralizationAdjustment
from strategies.weights.uniform import Uniform

METHODS: dict[str, Recipe] = {
    "fedavg": Recipe(paper="McMahan et al., AISTATS 2017"),
    "fedprox": Recipe(terms=(Proximal(),), paper="Li et al., MLSys 2020"),
    "moon": Recipe(terms=(ModelContrast(),), inserts=(ProjectionHead(),), paper="Li et al., CVPR 2021"),
    "scaffold": Recipe(
        terms=(DriftCorrection(),), banks=(ControlVariates(),), paper="Karimireddy et al., ICML 2020, Option II"
    ),
    "ditto": Recipe(companions=(Ditto(),), paper="Li et al., ICML 2021; its shared model is FedAvg's"),
    "perada": Recipe(
        inserts=(Adapters(),),
        companions=(Ditto(0.2),),
        weights=Uniform(),
        refine=(EnsembleDistillation(),),
        paper="Xie et al., CVPR 2024: PerAda",
        discloses="adapters, norm and head only; the server uses single clients' models where it distils",
    ),
    "fada": Recipe(
        step=DisentanglingAdversary(),
        inserts=(Disentangler(),),
        banks=(DomainIdentifiers(), TargetFeatures()),
        weights=TargetAttention(),
        visits=(TargetAttention(), TargetTraining()),
        unlabelled=AdversarialTarget(),
        paper="Peng et al., ICLR 2020: FADA, adaptation to the unlabelled target",
    ),
    "fedbn": Recipe(
        share=WithoutBatchNorm(),
        paper="Li et al., ICLR 2021",
        discloses="as FedAvg: batch norm is uploaded for the unseen domain's model",
    ),
    "silobn": Recipe(
        share=WithoutStatistics(),
        paper="Andreux et al., DCL 2020",
        discloses="as FedAvg: statistics are uploaded for the unseen domain's model",
    ),
    "fedsb": Recipe(
        terms=(LabelSmoothing(0.01),),
        batches=BalancedBudget(2880),
        weights=Uniform(),
        paper="Soltany et al., ICASSP 2025",
    ),
    "deepall": Recipe(
        pooled=True, paper="pooled empirical risk, the reference that is not federated", discloses="all raw data"
    ),
    "gperxan": Recipe(
        norm=XAN(),
        share=WithoutBatchNorm("xan"),
        terms=(GuidingHead(0.5),),
        paper="Le et al., CVPR 2024",
        discloses="as FedAvg: batch norm and its score are uploaded for the unseen domain's model",
    ),
    "feddg-ga": Recipe(
        weights=GeneralizationAdjustment(0.2),
        reports=(GeneralizationGap(),),
        paper="Zhang et al., CVPR 2023",
        discloses="one number per round more than FedAvg: how much better the client's own model fits",
    ),
    "csac": Recipe(
        step=SemanticCalibration(),
        fuse=SemanticDivergence("l2"),
        paper="Yuan et al., TKDE 2023",
        discloses="more than FedAvg once: a model trained to convergence on the client's data alone",
    ),
    **further_rows.STYLE_METHODS,
    "fedig": Recipe(
        norm=MixIG(),
        share=WithoutBatchNorm(),
        banks=(GlobalBatchNorm(),),
        objective=ClientAgnostic(),
        paper="Anonymous, ICLR 2023 submission: FedIG",
        discloses="as FedAvg: batch norm is uploaded, and its average is sent back",
    ),
    "fedig-a": Recipe(
        norm=MixIG(adapter=True),
        share=WithoutBatchNorm(),
        banks=(GlobalBatchNorm(),),
        objective=ClientAgnostic(),
        infer=ZeroShotAdapter(),
        paper="Anonymous, ICLR 2023 submission: FedIG-A, the same with zero-shot adapters",
        discloses="as FedIG, and the adapters' weights",
    ),
    "mixstyle": Recipe(inserts=(MixStyle(),), paper="Zhou et al., ICLR 2021, inside FedAvg"),
    **further_rows.SINGLE_SOURCE_METHODS,
    "copa": Recipe(
        share=WithoutHead(),
        terms=(OtherHeads(),),
        banks=(Heads(),),
        augment=RandAugment(),
        norm=IBN(),
        infer=EnsembleOfHeads(),
        paper="Wu and Gong, ICCV 2021",
    ),
    "gfedavg": Recipe(terms=(GuidingHead(0.5),), paper="Le et al., CVPR 2024, Table 4: guiding head on FedAvg (BN)"),
    "gfedavg-ibn": Recipe(norm=IBN(), terms=(GuidingHead(0.5),), paper="Le et al., CVPR 2024, Table 4: I-BN"),
    "gfedavg-dson": Recipe(norm=DSON(), terms=(GuidingHead(0.5),), paper="Le et al., CVPR 2024, Table 4: DSON"),
    "fedavgm": Recipe(refine=(FedAvgM(),), paper="Hsu et al. 2019 (arXiv 1909.06335)"),
    "fedadam": Recipe(refine=(FedAdam(),), paper="Reddi et al., ICLR 2021: FedAdam"),
    "fedyogi": Recipe(refine=(FedYogi(),), paper="Reddi et al., ICLR 2021: FedYogi"),
    "fedadagrad": Recipe(refine=(FedAdagrad(),), paper="Reddi et al., ICLR 2021: FedAdagrad"),
    "krum": Recipe(fuse=Krum(), paper="Blanchard et al., NeurIPS 2017"),
    "qfedavg": Recipe(fuse=QFedAvg(), weights=Uniform(), paper="Li et al., ICLR 2020: q-FedAvg"),
    "fednova": Recipe(fuse=NormalizedAverage(), reports=(GradientCount(),), paper="Wang et al., NeurIPS 2020: FedNova"),
    "fediir": Recipe(
        terms=(ClassifierAlignment(),),
        banks=(ClassifierGradients(),),
        weights=Uniform(),
        paper="Guo et al., ICML 2023: FedIIR",
    ),
    "feddrop": Recipe(
        share=RandomSubnet(),
        inserts=(KeptScale(),),
        paper="Wen et al. 2021: Federated Dropout",
        discloses="as FedAvg, of a part of the weights",
    ),
    "fedomg": Recipe(fuse=GradientMatching(), paper="Nguyen et al., ICLR 2025: FedOMG"),
    "feddyn": Recipe(
        terms=(DynamicRegularizer(),),
        refine=(DynamicCorrection(),),
        weights=Uniform(),
        paper="Acar et al., ICLR 2021: FedDyn",
    ),
    "fedcm": Recipe(
        terms=(ClientMomentum(),),
        banks=(GlobalDirection(),),
        reports=(GradientCount(),),
        paper="Xu et al. 2021 (arXiv 2106.10874): FedCM",
    ),
    "fedsam": Recipe(update=SharpnessAware(), paper="Qu et al., ICML 2022: FedSAM"),
    "mofedsam": Recipe(
        update=SharpnessAware(),
        terms=(ClientMomentum(),),
        banks=(GlobalDirection(),),
        reports=(GradientCount(),),
        paper="Qu et al., ICML 2022: MoFedSAM",
    ),
    "fedlesam": Recipe(update=GlobalAscent(), paper="Fan et al., ICML 2024: FedLESAM"),
    "fedlesam-s": Recipe(
        update=GlobalAscent(),
        terms=(DriftCorrection(),),
        banks=(ControlVariates(),),
        paper="Fan et al., ICML 2024: FedLESAM-S",
    ),
    "fedlesam-d": Recipe(
        update=GlobalAscent(),
        terms=(DynamicRegularizer(),),
        refine=(DynamicCorrection(),),
        weights=Uniform(),
        paper="Fan et al., ICML 2024: FedLESAM-D",
    ),
    "fedgala": Recipe(
        terms=(GradientAlignment(),),
        fuse=AlignedWeights(),
        paper="Pourpanah et al., AAAI 2025: FedGaLA's alignment rules, with a supervised loss",
    ),
    **further_rows.TEXT_METHODS,
    "fedgma": Recipe(fuse=GradientMask(), paper="Tenison et al., TMLR 2023: gradient masked averaging"),
    "afl": Recipe(weights=AgnosticWeights(), reports=(ReceivedLoss(),), paper="Mohri et al., ICML 2019: agnostic FL"),
    **further_rows.BASELINE_METHODS,
    **further_rows.DOMAIN_METHODS,
}
