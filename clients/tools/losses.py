"""Loss terms of local training: tensors in, one scalar tensor out."""

import math
from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

MMD_SCALES = (1 / 27, 1 / 9, 1 / 3, 1.0, 3.0)


class _HalfSquaredDistance(torch.autograd.Function):
    """½ Σ‖w − r‖² over two equally long lists of tensors; gradient w − r for w only (differentiable once more)."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        half = len(tensors) // 2
        norms = torch._foreach_norm(torch._foreach_sub(tensors[:half], tensors[half:]))
        return 0.5 * torch.stack(norms).square().sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        half = len(ctx.saved_tensors) // 2
        differences = torch._foreach_sub(ctx.saved_tensors[:half], ctx.saved_tensors[half:])
        if torch.is_grad_enabled():  # create_graph: torch's foreach product has no second derivative
            return (*[difference * grad for difference in differences], *[None] * half)
        return (*torch._foreach_mul(differences, grad), *[None] * half)


def total(tensors: Iterable[Tensor]) -> Tensor:
    """Their sum; there is at least one."""
    return cast(Tensor, sum(tensors))


def proximal(params: Iterable[Tensor], reference: Iterable[Tensor], mu: float) -> Tensor:
    """The pull of the local model towards the global one, a scalar:

        (μ/2) Σ‖w − w_t‖² ,  with the gradient μ (w − w_t)

    params: the trainable parameters w, all on one device
    reference: w_t in the same order and shapes, a constant

    μ = 0 is FedAvg: a zero without a graph. Raises ValueError when the two lists do not fit together.

    Source: FedProx (Li et al., MLSys 2020), eq. 2. Some released codes sum unsquared norms of the tensors; we do not.
    """
    params, reference = list(params), [tensor.detach() for tensor in reference]
    if len(params) != len(reference):
        raise ValueError(f"{len(params)} parameters but {len(reference)} reference tensors")
    if not params:
        raise ValueError("proximal needs at least one parameter")
    for w, r in zip(params, reference):
        if w.shape != r.shape:
            raise ValueError(f"parameter of shape {tuple(w.shape)} against a reference of shape {tuple(r.shape)}")
    if mu == 0:
        return params[0].new_zeros(())
    return mu * _HalfSquaredDistance.apply(*params, *reference)


def js_divergence(logits: Sequence[Tensor]) -> Tensor:
    """The Jensen-Shannon divergence of several predictions for the same batch, mean over the batch:

        (1/V) Σ_v KL(p_v ‖ M) ,  M = (1/V) Σ_v p_v clipped at 1e-7 ;  0 for equal predictions, log V for disjoint ones

    logits: V tensors [B, classes]; gradients flow through all of them. The logarithm is natural.

    Source: AugMix (Hendrycks et al., ICLR 2020), RandConv (Xu et al., ICLR 2021).
    """
    logs = [each.float().log_softmax(1) for each in logits]
    mean = (total(each.exp() for each in logs) / len(logs)).clamp_min(1e-7).log()
    return total((each.exp() * (each - mean)).sum(1).mean() for each in logs) / len(logs)


def supervised_contrast(z: Tensor, labels: Tensor, temperature: float, own: bool = False) -> Tensor:
    """The supervised contrastive loss of normalized vectors, each of which is an anchor:

        mean_i [ log Σ_{j≠i} e^{s_ij} − mean_{j∈P_i} s_ij ] ,  s_ij = z_i·z_j / T ,  P_i = {j ≠ i, y_j = y_i}

    z [N, D], labels [N]. Give both views of a batch, so that every anchor has a positive; an anchor without one counts
    as 0.

    own: i is in P_i too, and still not in the sum over j (FedCCRL's released code). With n other positives the value is
    shifted, and the attraction to these is n/(n + 1) of what it is without

    Source: Khosla et al., NeurIPS 2020, L_out; the factor T / T_base of their released code is 1 here.
    """
    s = z @ z.T / temperature
    itself = torch.eye(len(z), dtype=torch.bool, device=z.device)
    alike = labels[:, None] == labels[None, :]
    positive = alike if own else alike & ~itself
    rest = s.masked_fill(itself, -math.inf).logsumexp(1)
    count = positive.sum(1)
    attraction = torch.where(positive, s, 0.0).sum(1) / count.clamp_min(1)
    return torch.where(count > 0, rest - attraction, 0.0).mean()


def mk_mmd(x: Tensor, y: Tensor, scales: Sequence[float] = MMD_SCALES, statistic: str = "u") -> Tensor:
    """The multi-kernel maximum mean discrepancy between two samples, a scalar:

        s = mean‖z_i − z_j‖² over all ordered pairs of z = [x; y], zeros included, constant ;
        k(u,v) = Σ_a exp(−‖u−v‖² / (2 a s)) ;
        "u": Σ_{i≠j} k(x_i,x_j)/(B(B−1)) + Σ_{i≠j} k(y_i,y_j)/(B(B−1)) − 2 Σ_{i,j} k(x_i,y_j)/B²  (may be negative)
        "v": the same with i = j included and B² below all three sums

    x and y are [B, ...]; they are flattened, and their two B may differ. s = 0 or B < 2 gives 0.0 that keeps the graph.

    Source: CSAC (Yuan et al., TKDE 2023); Gretton et al., JMLR 2012, eqs. 3 and 5. The released code of CSAC adds
    2/(B−1), which has no gradient and is left out here. Kernels are summed, not averaged, as there.
    """
    x, y = at_least_float32(x).flatten(1), at_least_float32(y).flatten(1)
    if min(len(x), len(y)) < 2:
        return 0.0 * (x.sum() + y.sum())
    with torch.autocast(x.device.type, enabled=False):
        z = torch.cat([x, y])
        distance = squared_distances(z)
        s = bandwidth(distance.detach().mean(), z)
        kernel = kernel_sum(distance, s, scales)
        n = len(x)
        within = kernel_mean(kernel[:n, :n], statistic) + kernel_mean(kernel[n:, n:], statistic)
        return torch.where(s > 0, within - 2 * kernel[:n, n:].mean(), 0.0 * z.sum())


def squared_distances(z: Tensor) -> Tensor:
    """The squared Euclidean distances [N, N] of the rows of z [N, D], by one matrix product of the centred rows:

    ‖z_i − z_j‖² = g_ii + g_jj − 2 g_ij ,  g = (z − mean)(z − mean)^T ;  never negative, zero on the diagonal
    """
    z = z - z.detach().mean(0)
    gram = z @ z.T
    norm = gram.diagonal()
    distance = (norm[:, None] + norm[None, :] - 2 * gram).clamp_min(0)
    return distance * (1 - torch.eye(len(z), dtype=z.dtype, device=z.device))


def bandwidth(s: Tensor, z: Tensor) -> Tensor:
    """s, or 0 where s is only the rounding error of the rows' mean squared norm, so that distances carry nothing."""
    noise = 1e-12 if z.dtype == torch.float32 else 1e-24
    return torch.where(s > noise * z.detach().square().sum(1).mean(), s, 0.0)


def kernel_sum(distance: Tensor, s: Tensor, scales: Sequence[float] = MMD_SCALES) -> Tensor:
    """Σ_a exp(−distance / (2 a s)), elementwise; s broadcasts against distance, and s = 0 counts as s = 1.

    Computed from the widest kernel to the narrowest: where the next scale is a third of the last, its kernel is the
    cube of the last one.
    """
    scaled = distance / torch.where(s > 0, s, 1.0)
    widest, *narrower = sorted(scales, reverse=True)
    kernel = total = torch.exp(scaled / (-2 * widest))
    last = widest
    for scale in narrower:
        kernel = kernel * kernel * kernel if math.isclose(last, 3 * scale) else torch.exp(scaled / (-2 * scale))
        total = total + kernel
        last = scale
    return total


def kernel_mean(kernel: Tensor, statistic: str) -> Tensor:
    """The mean of kernel [..., B, B] over pairs: "u" over i ≠ j, "v" over all."""
    if statistic == "v":
        return kernel.mean((-2, -1))
    if statistic != "u":
        raise ValueError(f"unknown statistic {statistic!r}: u or v")
    n = kernel.shape[-1]
    return (kernel.sum((-2, -1)) - kernel.diagonal(dim1=-2, dim2=-1).sum(-1)) / (n * (n - 1))


def at_least_float32(x: Tensor) -> Tensor:
    """x itself in float32 or float64; half precisions become float32."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
