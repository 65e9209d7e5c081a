"""Cross-client style transfer on a client's data: sizes, originals, fallbacks, labels, refusals."""

import logging
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from small_round import colour_images, small_data, small_round
from support import small_experiment

from clients.augment.cross_client_style import CrossClientStyle
from clients.augment.vgg_style import decoder, encoder
from fedsim.common.errors import UserError
from fedsim.data import benchmark
from fedsim.data.augment import to_float
from fedsim.methods.assembly import build_recipe
from fedsim.settings.experiment import read_experiment
from strategies.banks.style import StyleBank
from strategies.parts import ServerRound

FIRST_ROUND = ServerRound(1, 3, [], {})


def bank_of(part, clients="abc"):
    """What client `a` receives when clients of different brightness contribute."""
    entries = {}
    for index, client in enumerate(clients):
        data = small_data(colour_images(6, seed=index, offset=60 * index), client=client)
        entries[client] = part.collect(small_round(data))
        assert StyleBank().accept(client, entries[client], FIRST_ROUND) == ""
    return {"style": StyleBank().hand_out(entries, "a", FIRST_ROUND)}


def epoch(part, records=None, count=5, **changes):
    """All items of client `a` after the transfer, its original images and its round."""
    data = small_data(colour_images(count + 2), validation=2)
    round = small_round(data, bank_of(part) if records is None else records, **changes)
    items = np.arange(count * part.copies(round))
    return data.batch(items, part.begin(round)), to_float(data.images[:count]), round


@pytest.fixture(scope="module")
def vgg_files(tmp_path_factory):
    """Weight files with the right shapes and random values, which are enough to test everything but the pictures."""
    folder = tmp_path_factory.mktemp("vgg")
    torch.manual_seed(0)
    torch.save(encoder().state_dict(), folder / "vgg.pth")
    torch.save(decoder().state_dict(), folder / "decoder.pth")
    return {"encoder_weights": str(folder / "vgg.pth"), "decoder_weights": str(folder / "decoder.pth")}


@pytest.mark.parametrize("space", ["pixel", "haar", "vgg"])
def test_every_image_l_times_and_once_untouched(space, vgg_files):
    part = CrossClientStyle(encoder=space, L=3, **(vgg_files if space == "vgg" else {}))
    batch, originals, round = epoch(part)
    assert batch.labels.tolist() == round.data.labels[:5].tolist() * 3
    same = [[torch.equal(image, original) for original in originals] for image in batch.raw]
    assert sum(map(sum, same)) == 5
    assert [sum(column) for column in zip(*same)] == [1] * 5
    assert batch.raw.shape == (15, 3, 16, 16)
    assert batch.raw.min() >= 0
    assert batch.raw.max() <= 1
    assert part.__class__(**{**part.__dict__, "L": 1}).copies(round) == 1
    assert part.tag == space


def test_pixel_transfer_reaches_the_foreign_mean():
    part = CrossClientStyle(L=2)
    records = bank_of(part, "ab")
    batch, originals, _ = epoch(part, records)
    moved = [index for index in range(10) if not torch.equal(batch.raw[index], originals[index % 5])]
    assert len(moved) == 5
    reached = batch.raw[moved].mean(dim=(2, 3))
    assert torch.allclose(reached, torch.from_numpy(records["style"]["b:mean"]).expand(5, 3), atol=1e-3)


def test_the_level_is_lowered_to_the_styles_there_are(caplog):
    """A client that failed in phase 0 still gets the others' styles; without any its data stay as they are."""
    part = CrossClientStyle(L=9)
    assert len(epoch(part, bank_of(part, "bc"))[0].images) == 15
    for clients in ("", "a"):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            batch, originals, _ = epoch(part, bank_of(part, clients))
        assert torch.equal(batch.raw, originals)
        assert "no styles of other clients" in caplog.text


def test_the_same_images_every_round_unless_resampled():
    first, again, later = (epoch(CrossClientStyle(L=1), round=number)[0].raw for number in (1, 1, 2))
    assert torch.equal(first, again)
    assert torch.equal(first, later)
    anew = CrossClientStyle(L=1, resample_each_round=True)
    one, *others = (epoch(anew, round=number)[0].raw for number in (1, 2, 3, 4))
    assert not all(torch.equal(one, other) for other in others)


def test_level_one_without_strength_is_fedavg_and_quantised_images_are_eight_bit():
    batch, originals, _ = epoch(CrossClientStyle(L=1, alpha=0))
    assert torch.equal(batch.raw, originals)
    values = epoch(CrossClientStyle(quantise=True))[0].raw * 255
    assert torch.allclose(values, values.round(), atol=1e-4)


def test_single_styles_leave_constant_images_out():
    images = colour_images(10)
    images[:4] = 200
    part = CrossClientStyle(styles="single", J=3)
    assert part.collect(small_round(small_data(images)))["mean"].shape == (3, 3)
    many = CrossClientStyle(styles="single").collect(small_round(small_data(images)))
    assert many["mean"].shape == (6, 3)
    assert (abs(many["mean"] - 200 / 255) > 0.05).all()
    constant = part.collect(small_round(small_data(np.full_like(images, 7))))
    assert constant["mean"].shape == (1, 3)  # nothing but constant images: their overall style
    assert len(epoch(part)[0].images) == 15
    assert "single images" in part.discloses
    assert part.tag == "pixel, single"
    images = colour_images(8)
    images[6:] = 255
    rounds = small_round(small_data(images, validation=2)), small_round(small_data(images[:6]))
    split, whole = (CrossClientStyle().collect(round)["mean"] for round in rounds)
    assert np.array_equal(split, whole)


@pytest.mark.parametrize("data", ["pacs", "office-home", "camelyon17"])
def test_the_papers_level_is_the_number_of_clients(data):
    """L = K on the data sets of the paper, of which one domain is the target."""
    experiment = read_experiment(data, ["method.name=ccst"])
    level = build_recipe(experiment, recorded=True).augment.L
    assert level == len(benchmark(experiment.data).domains) - 1


@pytest.mark.filterwarnings("ignore:var_mean")
@pytest.mark.parametrize("size", [8, 9])
def test_no_unbiased_variance_of_one_value(size):
    """Images of 8 pixels have one value per Haar band of the last level, and its unbiased variance is 0 / 0."""
    options = {"encoder": "haar", "content_variance": "unbiased"}
    round = small_round(small_data(colour_images(4, size)))
    finite = all(values.isfinite().all() for values in CrossClientStyle(**options).content(round, correction=1))
    assert finite == (size == 9)
    method, data = {"name": "ccst", "cross_client_style": options}, {"image_size": size}
    with nullcontext() if finite else pytest.raises(UserError, match="less than 9 pixels"):
        build_recipe(small_experiment("unused", method, data=data))
    options["content_variance"] = "population"
    build_recipe(small_experiment("unused", method, data=data))
