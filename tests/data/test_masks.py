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
from fedsim.runs.plan import resolve
from fedsim.settings import DataSettings
from fedsim.settings.experiment import Experiment

PAIR = "image,mask\nimage/0.jpg,mask/0.png\n"
DIGIT_MASKS = DataSettings(dataset="digit-masks", image_size=32, split="stratified", holdout=0.2)


def test_digit_masks_are_the_same_figures_on_other_grounds():
    """Masks are equal in all source domains, with the core inside the figure; the unseen domain has other images.

    In the domain `inverted` the figure is darker than its background, elsewhere brighter.
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
    for domain, own in found.items():
        inside, outside = own.images[:, 0][figure == 1].mean(), own.images[:, 0][figure == 0].mean()
        assert (inside < outside) == (domain == "inverted")
    images, _, tested = load_target(DIGIT_MASKS, "noise")
    assert len(tested) == len(load_target_masks(DIGIT_MASKS, "noise")) == 200
    assert not {one.tobytes() for one in images} & {one.tobytes() for one in found["noise"].images}
    pooled = load_pooled(DIGIT_MASKS, "noise")
    assert np.array_equal(pooled.masks[400:800], found["shaded"].masks)


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
    nothing = torch.ones(1, 1, 2, 2)
    assert torch.equal(Augmentation().with_masks(nothing, nothing)[1], nothing)


def test_batches_carry_masks_in_the_geometry_of_their_images():
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
    values = np.full((12, 12), 255, np.uint8)
    values[2:10, 2:10] = 128
    values[4:8, 4:8] = 0
    for number, domain in enumerate(("site1", "site2")):
        for part in ("image", "mask"):
            (tmp_path / domain / part).mkdir(parents=True)
        for index in range(4):
            Image.fromarray(values).save(tmp_path / domain / "mask" / f"{index}.png")
            Image.new("RGB", (12, 12), (10 * number, index, 0)).save(tmp_path / domain / "image" / f"{index}.jpg")
    return tmp_path


@pytest.fixture
def masked(fundus, tmp_path_factory):
    own = {"root": str(fundus), "cache": str(tmp_path_factory.mktemp("cache")), "image_size": 12, "holdout": 0.25}
    structures = {"disc": [0, 128], "cup": [0]}
    return lambda **changes: DataSettings(**{"dataset": "masks", "structures": structures, **own, **changes})


def test_fundus_layout_and_table_of_samples(fundus, masked):
    """Disc and cup as two overlapping planes; a second call reads the cache. Masks are part of the fingerprint.
    samples.csv names images and masks wherever they lie; without it, folders below image/ and mask/ are read too."""
    data = masked()
    assert benchmark(data).structures == ("disc", "cup")
    client = load_client(data, "site1")
    assert client.images.shape == (4, 3, 12, 12)
    assert client.masks.sum((2, 3)).tolist() == [[64, 16]] * 4
    again = load_client(data, "site1").masks
    assert isinstance(again, np.memmap)
    assert np.array_equal(again, client.masks)
    assert load_client(masked(structures={"rim": [128]}), "site1").masks.sum((2, 3)).tolist() == [[48]] * 4
    before = fingerprints(data)
    Image.new("L", (12, 12), 255).save(fundus / "site1" / "mask" / "0.png")
    after = fingerprints(data)
    assert before["site1"] != after["site1"]
    assert before["site2"] == after["site2"]
    (fundus / "site1" / "samples.csv").write_text(f"{PAIR}image/2.jpg,mask/1.png\nimage/3.jpg,mask/1.png\n")
    assert len(load_client(masked(), "site1").masks) == 3
    (fundus / "site1" / "samples.csv").unlink()
    for part, ending in (("image", "jpg"), ("mask", "png")):
        (fundus / "site1" / part / "patient1").mkdir()
        (fundus / "site1" / part / f"0.{ending}").rename(fundus / "site1" / part / "patient1" / f"1.{ending}")
    assert len(load_client(masked(), "site1").masks) == 4
    for structures, said in (({}, r"data\.structures"), ({"disc": []}, "no values")):
        with pytest.raises(UserError, match=said):
            benchmark(masked(structures=structures))


@pytest.mark.parametrize(("file", "content", "words"), [
    ("mask/2.png", None, "every image needs its mask"),
    ("mask/2.png", Image.new("L", (12, 9)), "same size"),
    ("mask/2.png", Image.new("RGB", (12, 12)), "one number per pixel"),
    ("mask/2.jpg", Image.new("L", (12, 12)), r"^cannot read the image \S+2\.jpg \(a JPEG changes the values of pixels"),
    ("samples.csv", "image,label\na,b\n", "no column 'mask'"),
    ("samples.csv", f"{PAIR}./image/0.jpg,mask/1.png\n", "more than one"),
    ("samples.csv", f"{PAIR}../site2/image/1.jpg,mask/1.png\n",
     r"'\.\./site2/image/1\.jpg' lies in the folder of another domain"),
])  # fmt: skip
def test_spoiled_folders_are_refused_in_one_line(fundus, masked, file, content, words):
    path = fundus / "site1" / file
    if "mask" in file:
        path.with_suffix(".png").unlink()
    if isinstance(content, Image.Image):
        content.save(path)
    elif content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=rf"\A.*(?:{words}).*\Z"):
        load_client(masked(), "site1")


@pytest.mark.parametrize("mode", ["L", "1"])
def test_a_domain_with_masks_in_other_values_is_refused(fundus, masked, mode):
    """Its masks would be empty: the values found are named. The other domain can be read, also on a site of its own."""
    for file in (fundus / "site2" / "mask").iterdir():
        (Image.open(file).point(lambda value: value < 200).convert("L").point(bool, mode)).save(file)
    assert load_client(masked(structures={"disc": [0, 128]}), "site1").masks.any()
    said = r"site2: no mask has a pixel of the structure 'disc', .*the masks have the values 0, 1;"
    with pytest.raises(UserError, match=said):
        load_target_masks(masked(structures={"disc": [128], "rim": [255]}), "site2")
    found = load_target_masks(masked(structures={"disc": [1]}), "site2")
    assert found.sum((2, 3)).tolist() == [[64]] * 4


def test_an_augmentation_of_ones_own_that_works_only_on_images_is_refused_on_masks(tmp_path, monkeypatch):
    (tmp_path / "ownaugment.py").write_text(
        "from torch import Tensor\ndef blur(images: Tensor) -> Tensor: return images\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    data = DIGIT_MASKS.model_dump() | {"augment": "ownaugment:blur"}
    with pytest.raises(UserError, match="with_masks"):
        resolve(Experiment(model={"backbone": "unet-small"}, data=data))
