"""Rows that generalize inside each client, under FedAvg: nothing more than FedAvg's is exchanged.

The first generalize from one domain. The others compare the domains of a client, on pooled data (`deepall+irm`) or
where clients have several (`data.mix`).
"""

from clients.augment.rand_augment import RandAugment
from clients.batches.equal_domains import EqualDomains
from clients.objective.consistent_views import ConsistentViews
from clients.objective.jigsaw import Jigsaw
from clients.objective.learn_to_diversify import LearnToDiversify
from clients.objective.mixtures import CutMix, MixUp
from clients.objective.random_convolution import RandomConvolution
from clients.objective.self_challenging import SelfChallenging
from clients.step.inter_domain import InterDomain
from clients.terms.feature_alignment import CorrelationAlignment, MeanDiscrepancy
from clients.terms.feature_augmentation import FeatureAugmentation
from clients.terms.group_robust import GroupRobust
from clients.terms.invariant_risk import InvariantRisk
from clients.terms.risk_extrapolation import RiskExtrapolation
from clients.terms.self_reg import SelfReg
from fedsim.methods.recipe import Recipe
from fedsim.models.inserts.jigsaw_head import JigsawHead
from fedsim.models.inserts.projector import Projector
from fedsim.models.inserts.stochastic_embedding import StochasticEmbedding

MIXED = ("data.mix=0.5",)  # with one domain on every client these rows are FedAvg

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
