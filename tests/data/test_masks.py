"""Data with masks: digits, folders and tables, and augmentation that changes an image and its mask in the same way."""

import numpy as np
import pytest
import torch
from PIL import Image

from clients.local_data import LocalData
from fedsim.common.errors import UserError
from fedsim.data import ClientData, benchmark, load_client, load_pooled, load_target, load_target_masks
from fedsim.data.augment import AUGMENTATIONS, Augmentation, Normalization, Transforms
from fedsim.data.fingerprint import fingerprints
from fedsim.models.tasks import Segmentation
from fedsim.run.plan import resolve
from fedsim.settings import DataSettings
from fedsim.settings.experiment import Experiment

DIGIT_MASKS = DataSettings(dataset="digit-masks", image_size=32, split="stratified", holdout=0.2)


def test_digit_masks_are_the_same_figures_on_other_grounds():
    """Masks are equal in all source domains, the core is inside the figure, and the images differ between domains.

    The unseen domain has other images.
    """
    found = {domain: load_client(DIGIT_MASKS, domain) for domain in benchmark(DIGIT_MASKS).domains}
    first, *others = found.values()
    figure, core = first.masks[:, 0], first.masks[:, 1]
    assert first.images.shape == (400, 1, 32, 32)
    assert (core <= figure).all()
    assert 0.05 < core.mean() < figure.mean() < 0.5
    for other in others:
        assert np.array_equal(other.masks, first.masks)
        assert not np.array_equal(other.images, first.images)
    images, _, tested = load_target(DIGIT_MASKS, "noise")
    assert len(tested) == len(load_target_masks(DIGIT_MASKS, "noise")) == 200
    assert not {one.tobytes() for one in images} & {one.tobytes() for one in found["noise"].images}


def test_grounds_are_what_they_are_called():
    """In the domain `inverted` the figure is darker than its background, elsewhere brighter; noise is rough."""
    for domain in benchmark(DIGIT_MASKS).domains:
        client = load_client(DIGIT_MASKS, domain)
        core, ground = client.masks[:, 1].astype(bool), client.masks[:, 0] == 0
        brighter = client.images[:, 0][core].mean() > client.images[:, 0][ground].mean()
        assert brighter == (domain != "inverted")
    rough = {d: np.abs(np.diff(load_client(DIGIT_MASKS, d).images.astype(int))).mean() for d in ("noise", "shaded")}
    assert rough["noise"] > 2 * rough["shaded"]


def test_pooled_masks():
    """Masks are pooled in the order of their images."""
    pooled = load_pooled(DIGIT_MASKS, "noise")
    assert pooled.masks.shape == (1200, 2, 32, 32)
    assert np.array_equal(pooled.masks[400:800], load_client(DIGIT_MASKS, "shaded").masks)


@pytest.mark.parametrize("name", ["flip", "csac", "domainbed"])
def test_joint_augmentation(name):
    """An image that is its own mask stays equal to it: the geometry is the same, and draws do not depend on masks."""
    torch.manual_seed(0)
    masks = torch.zeros(16, 1, 32, 32, dtype=torch.uint8)
    masks[:, :, 4:20, 2:12] = 1
    augmentation = AUGMENTATIONS[name]
    torch.manual_seed(3)
    alone = augmentation(masks.float())
    torch.manual_seed(3)
    images, moved = augmentation.with_masks(masks.float(), masks)
    assert torch.equal(images, alone)
    assert torch.equal(moved, (images > 0.5).to(torch.uint8))
    assert not torch.equal(moved, masks)
    assert torch.equal(NOTHING_DONE[1], NOTHING)


NOTHING = torch.ones(1, 1, 2, 2)
NOTHING_DONE = Augmentation().with_masks(NOTHING, NOTHING)


def test_batches_carry_masks_in_the_geometry_of_their_images():
    """`prepare` applies the same geometry to other images of the batch."""
    images = np.zeros((6, 1, 16, 16), np.uint8)
    images[:, :, 2:9, 1:6] = 255
    masks, order = (images > 0).astype(np.uint8), np.arange(6)
    data = ClientData("a", images, order * 0, order[:5], order[5:], ("image",), ("a",), order * 0, None, masks)
    local = LocalData(data, Transforms(AUGMENTATIONS["flip"], Normalization()), torch.device("cpu"), Segmentation())
    torch.manual_seed(0)
    batch = local.batch(order[:5])
    assert torch.equal((batch.images > 0.5).to(torch.uint8), batch.labels)
    assert torch.equal(batch.prepare(batch.raw), batch.images)
    assert not torch.equal(batch.images, batch.raw)


@pytest.fixture
def fundus(tmp_path):
    """Two domains in the fundus layout, 12 x 12 pixels: a disc (128) with a cup (0) inside, on background (255)."""
    for number, domain in enumerate(("site1", "site2")):
        for part in ("image", "mask"):
            (tmp_path / domain / part).mkdir(parents=True)
        for index in range(4):
            values = np.full((12, 12), 255, np.uint8)
            values[2:10, 2:10] = 128
            values[4:8, 4:8] = 0
            Image.fromarray(values).save(tmp_path / domain / "mask" / f"{index}.png")
            Image.new("RGB", (12, 12), (10 * number, index, 0)).save(tmp_path / domain / "image" / f"{index}.jpg")
    return tmp_path


def masked(root, tmp_path, **changes):
    """The settings of the folder."""
    values = {"dataset": "masks", "root": str(root), "cache": str(tmp_path / "cache"), "image_size": 12,
              "structures": {"disc": [0, 128], "cup": [0]}, "holdout": 0.25}  # fmt: skip
    return DataSettings(**{**values, **changes})


def test_fundus_layout(fundus, tmp_path_factory):
    """Disc and cup as two overlapping planes; a second call reads the cache."""
    data = masked(fundus, tmp_path_factory.mktemp("cache"))
    assert benchmark(data).structures == ("disc", "cup")
    client = load_client(data, "site1")
    assert client.images.shape == (4, 3, 12, 12)
    assert client.masks.sum((2, 3)).tolist() == [[64, 16]] * 4
    again = load_client(data, "site1").masks
    assert isinstance(again, np.memmap)
    assert np.array_equal(again, client.masks)
    swapped = load_client(masked(fundus, data_cache(data), structures={"rim": [128]}), "site1").masks
    assert swapped.sum((2, 3)).tolist() == [[48]] * 4


def data_cache(data):
    """The parent folder of the cache of these settings."""
    from pathlib import Path

    return Path(data.cache).parent


def test_masks_are_part_of_the_fingerprint(fundus, tmp_path_factory):
    """With another mask it is another data set."""
    data = masked(fundus, tmp_path_factory.mktemp("cache"))
    before = fingerprints(data)
    Image.new("L", (12, 12), 255).save(fundus / "site1" / "mask" / "0.png")
    after = fingerprints(data)
    assert before["site1"] != after["site1"]
    assert before["site2"] == after["site2"]


def test_table_of_samples(fundus, tmp_path_factory):
    """samples.csv names images and masks wherever they lie below the domain's folder."""
    (fundus / "site1" / "samples.csv").write_text("image,mask\nimage/2.jpg,mask/1.png\nimage/0.jpg,mask/1.png\n"
                                                  "image/3.jpg,mask/3.png\n")  # fmt: skip
    assert len(load_client(masked(fundus, tmp_path_factory.mktemp("cache")), "site1").masks) == 3


PAIR = "image,mask\nimage/0.jpg,mask/0.png\n"


def as_jpeg(root):
    """One mask as a JPEG, in place of its PNG."""
    file = root / "site1" / "mask" / "2.png"
    Image.open(file).save(file.with_suffix(".jpg"))
    file.unlink()


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda root: (root / "site1" / "mask" / "2.png").unlink(), "every image needs its mask"),
        (lambda root: Image.new("L", (12, 9)).save(root / "site1" / "mask" / "2.png"), "same size"),
        (lambda root: Image.new("RGB", (12, 12)).save(root / "site1" / "mask" / "2.png"), "one number per pixel"),
        (lambda root: (root / "site1" / "samples.csv").write_text("image,label\na,b\n"), "no column 'mask'"),
        (lambda root: (root / "site1" / "samples.csv").write_text("image,mask\na.png,\n"), "empty cell"),
        (
            lambda root: (root / "site1" / "samples.csv").write_text(f"{PAIR}./image/0.jpg,mask/1.png\n"),
            "more than one",
        ),
        (
            lambda root: (root / "site1" / "samples.csv").write_text(f"{PAIR}../site2/image/1.jpg,mask/1.png\n"),
            r"'\.\./site2/image/1\.jpg' lies in the folder of another domain",
        ),
        (
            lambda root: (root / "site1" / "samples.csv").write_bytes(b"image,mask\n\xe9.png,a.png\n"),
            "is not text in UTF-8",
        ),
        (as_jpeg, r"^cannot read the image \S+2\.jpg \(a JPEG changes the values of pixels"),
    ],
)
def test_spoiled_folders_are_refused_in_one_line(fundus, tmp_path_factory, spoil, words):
    """The error names the file and says what to do."""
    spoil(fundus)
    with pytest.raises(UserError, match=words) as error:
        load_client(masked(fundus, tmp_path_factory.mktemp("cache")), "site1")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("mode", "found"), [("L", "the masks have the values 0, 1;"), ("1", "the masks have the values 0, 1;")]
)
def test_a_domain_with_masks_in_other_values_is_refused(fundus, tmp_path_factory, mode, found):
    """Its masks would be empty: the values found are named. The other domain can be read, also on a site of its own."""
    for file in (fundus / "site2" / "mask").iterdir():
        (Image.open(file).point(lambda value: value < 200).convert("L").point(bool, mode)).save(file)
    data = masked(fundus, tmp_path_factory.mktemp("cache"), structures={"disc": [0, 128]})
    assert load_client(data, "site1").masks.any()
    other = data.model_copy(update={"structures": {"disc": [128], "rim": [255]}})
    with pytest.raises(UserError, match=f"site2: no mask has a pixel of the structure 'disc', .*{found}") as error:
        load_target_masks(other, "site2")
    assert "\n" not in str(error.value)
    named = data.model_copy(update={"structures": {"disc": [1, 0, 128]}})
    assert load_target_masks(named, "site2").any()


def test_one_bit_masks_have_the_values_0_and_1(fundus, tmp_path_factory):
    for file in (fundus / "site2" / "mask").iterdir():
        Image.open(file).point(lambda value: 255 * (value < 200)).convert("1").save(file)
    data = masked(fundus, tmp_path_factory.mktemp("cache"), structures={"disc": [1]})
    assert load_target_masks(data, "site2").sum((2, 3)).tolist() == [[64]] * 4


def test_structures_have_to_be_named(fundus, tmp_path):
    """Without structures no mask can be read."""
    with pytest.raises(UserError, match=r"data\.structures"):
        benchmark(masked(fundus, tmp_path, structures={}))
    with pytest.raises(UserError, match="no values"):
        benchmark(masked(fundus, tmp_path, structures={"disc": []}))


@pytest.mark.parametrize("method", ["fedsb", "csac", "moon"])
def test_parts_for_classes_are_refused(method):
    """The error is one line that names the part."""
    settings = {"data": DIGIT_MASKS.model_dump(), "model": {"backbone": "unet-small"}, "method": {"name": method}}
    with pytest.raises(UserError, match="made for classification"):
        resolve(Experiment(**settings))


def test_augmentations_without_masks_are_refused(tmp_path, monkeypatch):
    """A user's own augmentation that works only on images is refused."""
    (tmp_path / "ownaugment.py").write_text("def blur(images):\n    return images\n")
    monkeypatch.syspath_prepend(tmp_path)
    data = DIGIT_MASKS.model_dump() | {"augment": "ownaugment:blur"}
    with pytest.raises(UserError, match="with_masks"):
        resolve(Experiment(data=data, model={"backbone": "unet-small"}))
