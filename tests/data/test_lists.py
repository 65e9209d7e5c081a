"""Published split lists: which images train, validate and are tested, and which lists are refused."""

import pytest

from fedsim.common.errors import UserError
from fedsim.data import load_client, load_target
from fedsim.data.fingerprint import fingerprints


@pytest.fixture
def lists(tree_settings, tmp_path):
    """Settings with lists, and a function that writes one: lists("photo_train", ["photo/cat/000.png 1"])."""
    folder = tmp_path / "lists"
    folder.mkdir()

    def write(name: str, lines: list[str]) -> None:
        (folder / f"{name}.txt").write_text("\n".join(lines) + "\n")

    return tree_settings(split="lists", test_split="list", lists="../lists"), write


def test_the_lists_say_who_trains_and_validates(lists):
    data, write = lists
    write("photo_train_kfold", ["photo/dog/002.png 2", "photo/cat/000.png 1", "photo/cat/003.png 1", ""])
    write("photo_crossval_kfold", ["PACS/photo/dog/000.png", "cat\\001.png"])
    own = load_client(data, "photo")
    assert own.train.tolist() == [0, 3, 6]  # cat 0 to 3, dog 4 to 7, in sorted order
    assert own.validation.tolist() == [1, 4]
    write("sketch_test", ["sketch/dog/001.png 2"])
    assert load_target(data, "sketch")[2].tolist() == [5]


def test_without_a_validation_list_a_part_of_the_training_list_validates(lists):
    data, write = lists
    write("photo_train", [f"photo/{name}/00{index}.png" for name in ("cat", "dog") for index in range(3)])
    own, before = load_client(data.model_copy(update={"holdout": 0.34}), "photo"), fingerprints(data)["photo"]
    assert (len(own.train), len(own.validation)) == (4, 2)
    assert sorted([*own.train, *own.validation]) == [0, 1, 2, 4, 5, 6]
    write("photo_train", ["photo/cat/001.png"])
    assert fingerprints(data)["photo"]["content"] != before["content"]


@pytest.mark.parametrize(("lines", "said"), [
    (["photo/cat/999.png 1"], r"photo_train.txt, line 1: 'photo/cat/999.png' is none of the images of photo"),
    (["photo/cat/000.png", "a/photo/cat/000.png"], r"line 2: 'a/photo/cat/000.png' was named in line 1 already"),
    (["sketch/cat/000.png 1"], r"line 1: 'sketch/cat/000.png' is an image of another domain than photo"),
    (["photo/cat/000.png"], "1 training and 1 validation images"),
    (["photo/cat/001.png", "photo/dog/000.png", "photo/dog/001.png"], "1 images are in the training list and in"),
    (None, r"photo_train.txt is not text in UTF-8; save it in this encoding"),
])  # fmt: skip
def test_lists_that_cannot_be_meant_are_refused(lists, tmp_path, lines, said):
    data, write = lists
    write("photo_train", lines or [])
    write("photo_val", ["photo/cat/001.png"])
    if lines is None:
        (tmp_path / "lists" / "photo_train.txt").write_bytes("photo/cat/000.png caf\xe9".encode("latin-1"))
    with pytest.raises(UserError, match=said) as error:
        load_client(data, "photo")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("changes", "client", "said"), [
    ({}, "photo", r"no list photo_train\*.txt"),
    ({"lists": "elsewhere"}, "photo", r"no folder .*elsewhere; set data.lists"),
    ({"lists": ""}, "photo", r"data.lists is empty; set data.lists"),
    ({"dataset": "digits"}, "rot0", r"has no files that a list could name"),
    ({"fraction": 0.5}, "photo", r"all images of a domain to one client"),
])  # fmt: skip
def test_missing_lists_are_named(lists, changes, client, said):
    with pytest.raises(UserError, match=said):
        load_client(lists[0].model_copy(update=changes), client)
