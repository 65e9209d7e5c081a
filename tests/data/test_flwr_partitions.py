"""The partitions of Flower Datasets as domains, on images that the test makes, without a network."""

import sys

import pytest
from PIL import Image

from fedsim.common.errors import UserError
from fedsim.data import benchmark, load_client, load_target
from fedsim.data.reader import reader
from fedsim.settings import DataSettings

MODULE = """
from datasets import load_dataset
from flwr_datasets import FederatedDataset
from flwr_datasets.partitioner import NaturalIdPartitioner


def make(preprocessor=None, **partitioners):
    return FederatedDataset(dataset="imagefolder", data_dir={root!r}, partitioners=partitioners, cache_dir={cache!r},
                            preprocessor=preprocessor)


hospitals = make(train=NaturalIdPartitioner("hospital"), test=NaturalIdPartitioner("hospital"))
again = make(train=NaturalIdPartitioner("hospital"), test=NaturalIdPartitioner("hospital"))
numbered = make(train=3)
renamed = make(lambda parts: parts.rename_column("hospital", "domain"), train=3)
wrong = make(train=NaturalIdPartitioner("clinic"))
"""


@pytest.fixture
def settings(tmp_path, monkeypatch):
    """Settings by the name of a FederatedDataset of the module my_partitions: 12 + 4 images of two hospitals."""
    pytest.importorskip("flwr_datasets", reason="needs flwr-datasets (extra flwr-datasets)")
    lines = {"train": [], "test": []}
    for split, count in (("train", 12), ("test", 4)):
        folder = tmp_path / "images" / split
        folder.mkdir(parents=True)
        lines[split].append("file_name,label,hospital")
        for place in range(count):
            name = f"{place:02}.png"
            Image.new("RGB", (8, 8), (10 * place + (5 if split == "test" else 0), 0, 0)).save(folder / name)
            lines[split].append(f"{name},{'cat' if place % 2 else 'dog'},{'north' if place < count / 2 else 'Süd'}")
        (folder / "metadata.csv").write_text("\n".join(lines[split]))
    text = MODULE.format(root=str(tmp_path / "images"), cache=str(tmp_path / "hf"))
    (tmp_path / "my_partitions.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("FLWR_TELEMETRY_ENABLED", "0")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    usual = {"image_size": 8, "cache": str(tmp_path / "cache"), "columns": {"path": "image"}}
    yield lambda name, **more: DataSettings(dataset=f"my_partitions:{name}", **{**usual, **more})
    sys.modules.pop("my_partitions", None)


def test_partitions_are_domains(settings):
    """By a column they have its values as names; splits are joined with a word, or used where they are asked for."""
    data, asked = settings("hospitals"), settings("hospitals", split="lists", test_split="list")
    found = benchmark(data)
    assert (found.domains, found.classes) == (("Süd", "north"), ("cat", "dog"))
    assert found.joined == ("train (12 images)", "test (4 images)")
    images, labels, tested = load_target(data, "north")
    assert sorted(images[tested, 0, 0, 0].tolist()) == [0, 5, 10, 15, 20, 30, 40, 50]
    reds = images[:, 0, 0, 0].tolist()
    assert [found.classes[label] for label in labels] == ["cat" if red % 20 in (10, 15) else "dog" for red in reds]
    own, (images, _, tested) = load_client(asked, "Süd"), load_target(asked, "north")
    reds = own.images[[*own.train, *own.validation], 0, 0, 0]
    assert sorted(reds.tolist()) == [60, 70, 80, 90, 100, 110]
    assert sorted(images[tested, 0, 0, 0].tolist()) == [5, 15]
    prints = [reader(one, found).fingerprint("north") for one in (data, settings("again"), asked)]
    assert prints[0] == prints[1] != prints[2]


def test_partitions_without_names_have_numbers(settings):
    data = settings("numbered")
    assert benchmark(data).domains == ("0", "1", "2")
    assert len({red for name in "012" for red in load_target(data, name)[0][:, 0, 0, 0].tolist()}) == 12
    with pytest.raises(UserError, match=r"data.dataset 'my_partitions:wrong' cannot be partitioned \(.*clinic"):
        benchmark(settings("wrong"))


def test_a_column_of_domains_is_refused_because_the_partitions_are_the_domains(settings):
    data = settings("numbered", columns={"path": "image", "domain": "hospital"})
    with pytest.raises(UserError, match=r"data.columns.domain: the domains of 'my_partitions:numbered' are its part"):
        benchmark(data)


def test_a_column_that_is_called_domain_is_read_as_groups(settings):
    """The partitions have numbers; the column has the names of the hospitals."""
    columns = {"path": "image", "group": "domain"}
    read = reader(settings("renamed", columns=columns), benchmark(settings("renamed", columns=columns)))
    assert sorted(set(read.groups("0"))) == [0, 1]
