"""The images of one domain must not come again in another one, where they would be tested after training on them."""

import json
import shutil

import pandas as pd
import pytest
from PIL import Image

from fedsim.common.errors import UserError
from fedsim.data import benchmark, load_target
from fedsim.data.fingerprint import fingerprints, refuse_equal_domains
from fedsim.settings import DataSettings

SAID = r"the domains 'art' and 'copy' of .* have the same 8 images with the same labels; remove one"


def test_a_copied_or_linked_domain_is_refused(tree_settings, tmp_path):
    data, copy = tree_settings(), tmp_path / "images" / "copy"
    assert len(fingerprints(data)) == 3
    shutil.copytree(tmp_path / "images" / "art", copy)
    with pytest.raises(UserError, match=SAID):
        fingerprints(data)
    assert len(fingerprints(data.model_copy(update={"domains": ["copy", "photo"]}))) == 2
    shutil.rmtree(copy)
    copy.symlink_to(tmp_path / "images" / "art")
    with pytest.raises(UserError, match=SAID):
        fingerprints(data)


def as_table(root):
    rows = [{"path": str(path.relative_to(root)), "domain": path.parts[-3], "label": path.parent.name}
            for path in sorted(root.rglob("*.png"))]  # fmt: skip
    pd.DataFrame(rows).to_csv(root / "mine.csv", index=False)
    return {"dataset": "table", "root": str(root / "mine.csv")}


def as_hugging_face(root):
    datasets = pytest.importorskip("datasets")
    files = sorted(root.rglob("*.png"), reverse=True)
    rows = {"image": [{"path": None, "bytes": file.read_bytes()} for file in files],
            "domain": [file.parts[-3] for file in files], "label": [file.parent.name for file in files]}  # fmt: skip
    saved = datasets.Dataset.from_dict(rows).cast_column("image", datasets.Image())
    saved.save_to_disk(root / "saved")
    return {"dataset": "hugging-face", "root": str(root / "saved")}


@pytest.mark.parametrize("decoded", [False, True])
@pytest.mark.parametrize("make", [as_table, as_hugging_face])
def test_a_copy_is_found_under_any_names(tree_settings, tmp_path, make, decoded):
    """The rows of a table name the domain's folder; those of a Hugging Face set have no names at all."""
    data, root = tree_settings(), tmp_path / "images"
    shutil.copytree(root / "art", root / "copy")
    data = data.model_copy(update=make(root))
    if decoded:
        [load_target(data, domain) for domain in ("art", "copy", "photo")]
    with pytest.raises(UserError, match=SAID):
        fingerprints(data)
    assert len(fingerprints(data.model_copy(update={"domains": ["art", "photo"]}))) == 2


def test_the_same_labels_of_other_images_are_accepted(tree_settings, tmp_path):
    data = tree_settings()
    for _ in range(2):  # the second time from the cache
        assert len(fingerprints(data.model_copy(update=as_hugging_face(tmp_path / "images")))) == 3


def test_a_renamed_copy_is_refused(tree_settings, tmp_path):
    data, copy = tree_settings(), tmp_path / "images" / "copy"
    shutil.copytree(tmp_path / "images" / "art", copy)
    (copy / "cat" / "000.png").rename(copy / "cat" / "other.png")
    with pytest.raises(UserError, match=SAID):
        fingerprints(data)
    (copy / "cat" / "other.png").rename(copy / "dog" / "other.png")  # another label
    assert len(fingerprints(data)) == 4


def test_a_renamed_copy_with_its_masks_is_refused(tmp_path):
    for index, name in enumerate(("0", "1", "2", "3", "b", "a")):
        for part, mode in (("image", "RGB"), ("mask", "L")):
            file = tmp_path / ("site2" if index > 3 else "site1") / part / f"{name}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.new(mode, (12, 12), 10 * index).save(file)
    data = DataSettings(dataset="masks", root=str(tmp_path), cache=str(tmp_path / "cache"), image_size=12)
    data = data.model_copy(update={"structures": {"disc": [0, 10, 20, 30, 40, 50]}})
    assert len(fingerprints(data)) == 2
    for number, name in enumerate(("c", "b", "d", "a")):  # in another order, too
        for part in ("image", "mask"):
            copy = tmp_path / "site3" / part / f"{name}.png"
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(tmp_path / "site1" / part / f"{number}.png", copy)
    with pytest.raises(UserError, match=r"the domains 'site1' and 'site3' of .* have the same 4 images"):
        fingerprints(data)
    Image.new("L", (12, 12), 40).save(copy)  # another mask
    assert len(fingerprints(data)) == 3


def test_what_an_earlier_version_has_decoded_is_compared_by_its_files(tree_settings, tmp_path):
    data, copy = tree_settings(), tmp_path / "images" / "copy"
    shutil.copytree(tmp_path / "images" / "art", copy)
    load_target(data, "art")
    [manifest] = (tmp_path / "cache").rglob("manifest.json")
    table = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({key: value for key, value in table.items() if key != "nameless"}))
    with pytest.raises(UserError, match=SAID):
        fingerprints(data)


def test_the_sites_of_a_deployment_are_compared(tree_settings):
    """Two sites of one domain may have the same folder, of which each takes its own part."""
    found, own = benchmark(tree_settings()), {"images": 8, "content": "a" * 20}
    refuse_equal_domains(found, {"art/0": own, "art/1": own, "photo": {"images": 8, "content": "b" * 20}})
    with pytest.raises(UserError, match=SAID):
        refuse_equal_domains(found, {"art": own, "photo": {"images": 8, "content": "b" * 20}, "copy": own})


@pytest.mark.parametrize("dataset", ["digits", "digit-masks"])
def test_domains_that_share_their_images_by_design_are_accepted(dataset):
    assert len({own["content"] for own in fingerprints(DataSettings(dataset=dataset)).values()}) == 1
