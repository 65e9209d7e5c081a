"""Rows that generalize from one domain inside each client, under FedAvg: nothing more than FedAvg's is exchanged."""

from clients.augment.rand_augment import RandAugment
from clients.objective.consistent_views import ConsistentViews
from clients.objective.jigsaw import Jigsaw
from clients.objective.learn_to_diversify import LearnToDiversify
from clients.objective.mixtures import CutMix, MixUp
from clients.objective.random_convolution import RandomConvolution
from clients.objective.self_challenging import SelfChallenging
from clients.terms.feature_augmentation import FeatureAugmentation
from clients.terms.self_reg import SelfReg
from fedsim.methods.recipe import Recipe
from fedsim.models.inserts.jigsaw_head import JigsawHead
from fedsim.models.inserts.projector import Projector
from fedsim.models.inserts.stochastic_embedding import StochasticEmbedding

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
