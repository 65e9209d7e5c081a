"""Inference rules, computed a second time from their equations; see test_rounds_again.py."""

from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from tape import channel_norm, classified, features, recorded

from fedsim.runs.target import TargetEvaluator
from fedsim.runs.workspace import open_workspace


def score(evidence, predict):
    """(accuracy, mean cross-entropy) on the unseen domain, by predict(weights, images)."""
    weights = {name: torch.tensor(value) for name, value in evidence.last.items()}
    batches = list(TargetEvaluator(open_workspace(evidence.plan)).batches())
    images, labels = (torch.cat(each) for each in zip(*batches))
    logits = predict(weights, images)
    return (logits.argmax(1) == labels).double().mean().item(), F.cross_entropy(logits, labels).item()


def recorded_score(evidence):
    row = evidence.rounds.iloc[-1]
    return pytest.approx((row["target_accuracy"], row["target_loss"]), rel=1e-4)


def test_tsmobn(tmp_path):
    """mu <- 0.9 mu + 0.1 mu_batch over the test batches of 64, from the first batch's own; var as well, biased."""
    evidence, _, _ = recorded("fedavg", tmp_path, 'method.infer="tsmo_bn"', "data.fraction=0.5")

    def predict(weights, images):
        kept, logits = {}, []
        for start in range(0, len(images), 64):

            def norm(layer, x):
                def tracked(channel):
                    new = (x[:, channel].mean(), x[:, channel].var(unbiased=False))
                    old = kept.get((layer, channel), new)
                    kept[layer, channel] = tuple(0.9 * a + 0.1 * b for a, b in zip(old, new))
                    return kept[layer, channel]

                prefix = f"backbone.norm{layer}"
                return channel_norm(x, tracked, weights[f"{prefix}.weight"], weights[f"{prefix}.bias"])

            logits.append(classified(weights, features(weights, images[start : start + 64], norm)))
        assert len(logits) > 1
        return torch.cat(logits)

    assert score(evidence, predict) == recorded_score(evidence)


def test_mixnorm(tmp_path):
    """Five views of each image; mu = 0.05 mu_views + 0.95 mu_G, var as well; the original view is the prediction."""
    shown, own = [], torch.nn.Conv2d._conv_forward

    def seen(layer, x, *words):
        if x.shape[1] == 1 and not torch.is_grad_enabled():
            shown.append(x.clone())
        return own(layer, x, *words)

    with patch.object(torch.nn.Conv2d, "_conv_forward", seen):
        evidence, _, _ = recorded("fedavg", tmp_path, 'method.infer="mix_norm"')

    def predict(weights, images):
        views = next(x for x in reversed(shown) if len(x) == 5 * len(images)).view(5, *images.shape)
        assert torch.equal(views[0], images)
        logits = []
        for number in range(len(images)):

            def norm(layer, x):
                prefix = f"backbone.norm{layer}"
                kept = [weights[f"{prefix}.running_{kind}"] for kind in ("mean", "var")]

                def mixed(channel):
                    mean, variance = x[:, channel].mean(), x[:, channel].var(unbiased=False)
                    return 0.05 * mean + 0.95 * kept[0][channel], 0.05 * variance + 0.95 * kept[1][channel]

                return channel_norm(x, mixed, weights[f"{prefix}.weight"], weights[f"{prefix}.bias"])

            logits.append(classified(weights, features(weights, views[:, number], norm))[:1])
        return torch.cat(logits)

    assert score(evidence, predict) == recorded_score(evidence)
