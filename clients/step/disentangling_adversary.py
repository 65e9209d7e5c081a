"""The step of FADA's source clients: classification, domain identifier, generator, confusion, information, rebuild."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn
from torch.optim import Optimizer

from clients.optimizers import optimizer_tensors, restore_optimizer
from clients.parts import Batch, LocalRound, Step, StepFunction
from clients.tools.disentangling import (
    FEATURES,
    advance,
    auxiliary_networks,
    confusion_loss,
    domain_loss,
    information,
    input_width,
    make_adam,
    source_loss,
)
from clients.tools.networks import apart, statistics_frozen
from fedsim.models.inserts.base import Insert
from fedsim.parts.part import RecipeParts, part_name
from fedsim.settings.effect import Above, Only
from fedsim.settings.tuned import DECADE, Tuned

NETWORKS, MOMENTS = "adversary", "adversary-optimizer"  # the store's entries


@dataclass(frozen=True)
class DisentanglingAdversary(Step):
    """Six steps for each batch (x, y), with f = G(x), f_di = D_di(f), f_ds = D_ds(f) and target features f_t:

        1  CE(C(f_di), y) + CE(CI(f_ds), y)              G, D_di, C by the experiment's optimizer; D_ds, CI
        2  -E log DI(f) - E log(1 - DI(f_t))             DI
        3  -lambda_adv E log DI(f)                       G
        4  -(1 / (n C)) sum log CI_c(f_ds)               D_ds
        5  ascend DV(M), then descend lambda_mi DV       M, then D_di and D_ds
        6  lambda_rec ||R([f_di, f_ds]) - f||^2 / (n d)  D_di, D_ds, R

    The last column names the networks that a step trains.

    Source: FADA (Peng et al., ICLR 2020), its source clients. G is the backbone, D_di the bottleneck and C the head.
    D_ds, CI, R, M (MINE) and DI are the client's own; it stores them with their optimizer's moments. Every network has
    one optimizer for all the steps that train it, as in DAL's code. The client's own networks are trained by Adam. The
    shared ones (G, D_di, C) are trained by the experiment's optimizer, so that all methods share one protocol; DAL's
    code uses Adam throughout. A second Adam for steps 3, 5 and 6 alone would divide their weights out again. Only step
    1 changes running statistics. A round without target features (the first) leaves out steps 2 and 3; a batch of one
    image leaves out step 5. The terms of the recipe belong to step 1. DI is sent to the server's bank after training.

    The paper's Algorithm 1 takes a step on the classification before the alignment, and the losses of step 1 after it.
    We know the algorithm from memory and not from its text. `task_steps = "two"` has that order: first the step 0,
    CE(C(f_di), y) for G and C, then 2 and 3, then 1, then 4 to 6. The default has the classification once.

    lambda_adv: the weight of step 3 (DAL's code; the paper's formula has none, which is 1); 0 leaves step 3 out
    lambda_mi, lambda_rec: the weights of steps 5 and 6; 0 leaves a step out
    mine: `alternate` is step 5 as above. With `joint` (DAL's code) M descends the weighted bound too, in one step with
    D_di and D_ds, so that the bound is driven down instead of being estimated
    lr, weight_decay: the settings of Adam
    di_input: the input of DI: `feature` (G(x), the paper) or `invariant` (f_di, DAL's code)
    source_half: step 3 as in the paper, or `confuse`: -E log(1 - DI(f))
    confuse_updates_g: step 4 trains G as well (DAL's code)
    task_steps: `one`: the classification is in step 1 alone, before the alignment; `two`: as in Algorithm 1, above
    """

    lambda_adv: Annotated[float, Field(ge=0), Tuned("log:0.001:0.1", DECADE)] = 0.01
    lambda_mi: Annotated[float, Field(ge=0), Tuned("log:1e-5:1e-3", DECADE)] = 1e-4
    lambda_rec: Annotated[float, Field(ge=0), Tuned("log:0.001:0.1", DECADE)] = 0.01
    mine: Annotated[Literal["alternate", "joint"], Only(lambda_mi=Above(0))] = "alternate"
    lr: Annotated[float, Field(gt=0)] = 2e-4
    weight_decay: Annotated[float, Field(ge=0)] = 5e-4
    di_input: Literal["feature", "invariant"] = "feature"
    source_half: Annotated[Literal["paper", "confuse"], Only(lambda_adv=Above(0))] = "paper"
    confuse_updates_g: bool = False
    task_steps: Literal["one", "two"] = "one"
    bank: ClassVar[str] = "domain_identifier"
    requires: ClassVar[dict[str, str]] = {"banks": "domain_identifiers", "inserts": "disentangler"}
    needs_clients: ClassVar[bool] = True
    compiles: ClassVar[bool] = False
    discloses: ClassVar[str] = (
        "to the server and the target's client: a network that tells the client's features from the target's"
    )
    columns: ClassVar[tuple[str, ...]] = ("domain_loss", "mutual_information")

    @property
    def sets(self) -> dict[str, dict[str, object]]:
        """The target's client feeds the identifiers as the sources do."""
        return {"adversarial_target": {"di_input": self.di_input}}

    def refuses(self, recipe: RecipeParts) -> str:
        """The bottleneck gets features several times in a step, also stored ones of the target."""
        reading = [part_name(part) for part in recipe.of(Insert) if part.reads_map]
        if reading:
            return (
                f"disentangling_adversary passes features without their map through the bottleneck, and {reading[0]} "
                "reads the map there; use one of the two"
            )
        return super().refuses(recipe)

    def begin(self, round: LocalRound) -> StepFunction:
        """The steps of one batch, in their order."""
        net, aux = round.net, self._networks(round)
        optimizer = make_adam(aux, self.lr, self.weight_decay)
        if stored := round.store.get(MOMENTS):
            restore_optimizer(optimizer, stored)
        round.scratch[NETWORKS], round.scratch[MOMENTS] = aux, optimizer
        bank = round.tensors(FEATURES, "disentangling_adversary") if FEATURES in round.records else {}
        generator = round.generator("target-features")

        def step(batch: Batch) -> Tensor:
            small = len(batch.labels) < 2  # batch norm cannot normalize a single image
            for module in (net.bottleneck, aux):
                module.train(not small)
            if self.task_steps == "one":
                loss = self._task(round, batch, aux, optimizer)
                self._align(round, batch, aux, optimizer, bank, generator)
            else:
                self._classify(round, batch)
                self._align(round, batch, aux, optimizer, bank, generator)
                loss = self._task(round, batch, aux, optimizer)
            with statistics_frozen(net), statistics_frozen(aux):
                self._disentangle(round, batch, aux, optimizer, small)
            return loss

        return step

    def end(self, round: LocalRound) -> None:
        """Stores the client's own networks with their moments, and sends the domain identifier."""
        aux: nn.ModuleDict = round.scratch[NETWORKS]
        round.store.put(NETWORKS, aux.state_dict())
        round.store.put(MOMENTS, optimizer_tensors(round.scratch[MOMENTS], aux))
        round.send(self.bank, aux["domain"].state_dict())

    def _networks(self, round: LocalRound) -> nn.ModuleDict:
        """The client's own networks as they were stored; the first time they are made from the run's seed."""
        net = round.net
        width = input_width(net.bottleneck)
        with apart(round.generator("networks"), round.device):
            di_width = width if self.di_input == "feature" else net.feature_dim
            aux = auxiliary_networks(net.bottleneck, net.feature_dim, round.classes, di_width).to(round.device)
        if stored := round.store.get(NETWORKS):
            aux.load_state_dict(stored)
        return aux.requires_grad_(True).train()

    def _task(self, round: LocalRound, batch: Batch, aux: nn.ModuleDict, own: Optimizer) -> Tensor:
        """Trains the task: backbone, bottleneck, head and the client's own classifier take one step."""
        net = round.net
        own.zero_grad(set_to_none=True)
        with round.autocast():
            features = net.pooled(batch.images)
            batch.features = net.bottleneck(features)
            batch.logits = net.head(batch.features)
            guess = aux["classes"](aux["specific"](features))
        batch.loss = round.task.loss(batch.logits, batch.labels)
        loss = round.with_terms(batch, batch.loss) + F.cross_entropy(guess.float(), batch.labels)
        round.apply_gradients(loss)
        own.step()
        return loss.detach()

    def _classify(self, round: LocalRound, batch: Batch) -> None:
        """Step 0, which trains the backbone and the head."""
        net = round.net
        with statistics_frozen(net):
            logits = net.head(net.bottleneck(net.pooled(batch.images)))
            loss = round.task.loss(logits, batch.labels)
            advance(loss, (round.optimizer, [net.backbone, net.head]))

    def _align(
        self,
        round: LocalRound,
        batch: Batch,
        aux: nn.ModuleDict,
        own: Optimizer,
        bank: Mapping[str, Tensor],
        generator: torch.Generator,
    ) -> None:
        """Steps 2 and 3 with features of the target, as many as images; neither where the bank has none yet."""
        if not bank:
            return
        features = bank[FEATURES]
        chosen = torch.randint(len(features), (len(batch.labels),), generator=generator)
        target = features[chosen.to(features.device, non_blocking=True)]
        with statistics_frozen(round.net), statistics_frozen(aux):
            self._adversary(round, batch, aux, own, target)

    def _adversary(self, round: LocalRound, batch: Batch, aux: nn.ModuleDict, own: Optimizer, target: Tensor) -> None:
        """Steps 2 and 3."""
        net = round.net
        seen = net.bottleneck if self.di_input == "invariant" else nn.Identity()
        features = net.pooled(batch.images)
        with torch.no_grad():
            mine, theirs = seen(features), seen(target)
        loss = advance(domain_loss(aux["domain"](mine), aux["domain"](theirs)), (own, [aux["domain"]]))
        round.tally("domain_loss", loss)
        if not self.lambda_adv:  # momentum and weight decay would move G without any gradient
            return
        logits = aux["domain"](seen(features))
        loss = source_loss(logits if self.source_half == "paper" else -logits)
        advance(self.lambda_adv * loss, (round.optimizer, [net.backbone]))

    def _disentangle(self, round: LocalRound, batch: Batch, aux: nn.ModuleDict, own: Optimizer, small: bool) -> None:
        """Steps 4 to 6, on features of the present backbone."""
        net, specific = round.net, aux["specific"]
        features = net.pooled(batch.images)
        loss = confusion_loss(aux["classes"](specific(features)))
        advance(loss, (own, [specific]), (round.optimizer, [net.backbone] if self.confuse_updates_g else []))
        features = features.detach()
        if self.lambda_mi and not small:
            self._inform(round, features, aux, own)
        if self.lambda_rec:
            rebuilt = aux["rebuild"](torch.cat([net.bottleneck(features), specific(features)], dim=1))
            loss = self.lambda_rec * F.mse_loss(rebuilt, features)
            advance(loss, (own, [specific, aux["rebuild"]]), (round.optimizer, [net.bottleneck]))

    def _inform(self, round: LocalRound, features: Tensor, aux: nn.ModuleDict, own: Optimizer) -> None:
        """Step 5."""
        net, specific, statistic = round.net, aux["specific"], aux["statistic"]
        order = torch.randperm(len(features), device="cpu").to(features.device, non_blocking=True)

        def bound(p: Tensor, q: Tensor) -> Tensor:
            return information(statistic(p, q), statistic(p, q[order]))

        if self.mine == "alternate":
            with torch.no_grad():
                p, q = net.bottleneck(features), specific(features)
            round.tally("mutual_information", -advance(-bound(p, q), (own, [statistic])))
        limit = bound(net.bottleneck(features), specific(features))
        trained = [specific]
        if self.mine == "joint":
            trained.append(statistic)
            round.tally("mutual_information", limit.detach())
        advance(self.lambda_mi * limit, (own, trained), (round.optimizer, [net.bottleneck]))
