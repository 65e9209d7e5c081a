"""The benchmarks of domain generalization: their domains, classes and image counts (no torch, no images read).

benchmark(DataSettings(dataset="pacs")).domains  ->  ("art_painting", "cartoon", "photo", "sketch")
"""

from dataclasses import replace
from pathlib import Path

from fedsim.data.catalog import CATALOG
from fedsim.data.names import composed, matching, names_in, refuse_alike, refuse_repeated, same, subfolders
from fedsim.data.row import Benchmark
from fedsim.errors import UserError, nearest
from fedsim.plugins import instance, load, lookup
from fedsim.settings import DataSettings, data_root

AVERAGE = "average"  # the column of tables, and no domain
DIGITS = ("0", "1", "2", "3", "4", "5", "6", "7", "8", "9")
ANGLES = (0, 15, 30, 45, 60, 75)

PACS_COUNTS = {
    "art_painting": (379, 255, 285, 184, 201, 295, 449),
    "cartoon": (389, 457, 346, 135, 324, 288, 405),
    "photo": (189, 202, 182, 186, 199, 280, 432),
    "sketch": (772, 740, 753, 608, 816, 80, 160),
}
VLCS_COUNTS = {
    "Caltech101": (237, 123, 118, 67, 870),
    "LabelMe": (80, 1209, 88, 42, 1237),
    "SUN09": (20, 932, 1036, 30, 1264),
    "VOC2007": (330, 699, 428, 420, 1499),
}
OFFICE_HOME_CLASSES = (
    "Alarm_Clock",
    "Backpack",
    "Batteries",
    "Bed",
    "Bike",
    "Bottle",
    "Bucket",
    "Calculator",
    "Calendar",
    "Candles",
    "Chair",
    "Clipboards",
    "Computer",
    "Couch",
    "Curtains",
    "Desk_Lamp",
    "Drill",
    "Eraser",
    "Exit_Sign",
    "Fan",
    "File_Cabinet",
    "Flipflops",
    "Flowers",
    "Folder",
    "Fork",
    "Glasses",
    "Hammer",
    "Helmet",
    "Kettle",
    "Keyboard",
    "Knives",
    "Lamp_Shade",
    "Laptop",
    "Marker",
    "Monitor",
    "Mop",
    "Mouse",
    "Mug",
    "Notebook",
    "Oven",
    "Pan",
    "Paper_Clip",
    "Pen",
    "Pencil",
    "Postit_Notes",
    "Printer",
    "Push_Pin",
    "Radio",
    "Refrigerator",
    "Ruler",
    "Scissors",
    "Screwdriver",
    "Shelf",
    "Sink",
    "Sneakers",
    "Soda",
    "Speaker",
    "Spoon",
    "TV",
    "Table",
    "Telephone",
    "ToothBrush",
    "Toys",
    "Trash_Can",
    "Webcam",
)

BENCHMARKS: dict[str, Benchmark] = {
    "digits": Benchmark(
        "digits",
        "Rotated Digits (embedded)",
        tuple(f"rot{angle}" for angle in ANGLES),
        DIGITS,
        1,
        counts={f"rot{angle}": 1000 for angle in ANGLES},
        source="scikit-learn load_digits (UCI Optical Recognition of Handwritten Digits, 8x8)",
        note="needs no files; every client domain shows the SAME 1,000 images (100 a class, drawn by the split seed), "
        "rotated clockwise; the unseen domain shows the 797 others",
        same_images=True,
        test_apart=True,
        reader="fedsim.data.digits:Digits",
    ),
    "rotated-mnist": Benchmark(
        "rotated-mnist",
        "Rotated MNIST",
        tuple(f"M{angle}" for angle in ANGLES),
        DIGITS,
        1,
        counts={f"M{angle}": 1000 for angle in ANGLES},
        folder=("mnist",),
        source="LeCun et al. 1998; rotations as in CSAC (default) or DomainBed (data.variant)",
        note="csac: the same 1,000 images in every domain, the unseen one included; domainbed: all 70,000 images dealt "
        "to disjoint domains",
        same_images=True,
        variants={"domainbed": {"counts": None, "same_images": False}},
        reader="fedsim.data.rotated_mnist:RotatedMNIST",
    ),
    "pacs": Benchmark(
        "pacs",
        "PACS",
        tuple(PACS_COUNTS),
        ("dog", "elephant", "giraffe", "guitar", "horse", "house", "person"),
        3,
        counts={domain: sum(row) for domain, row in PACS_COUNTS.items()},
        class_counts=PACS_COUNTS,
        folder=("pacs", "kfold"),
        source="Li et al., Deeper, Broader and Artier Domain Generalization, ICCV 2017",
    ),
    "vlcs": Benchmark(
        "vlcs",
        "VLCS",
        tuple(VLCS_COUNTS),
        ("bird", "car", "chair", "dog", "person"),
        3,
        counts={domain: sum(row) for domain, row in VLCS_COUNTS.items()},
        class_counts=VLCS_COUNTS,
        folder=("vlcs",),
        source="Fang et al., Unbiased Metric Learning, ICCV 2013; folders of DomainBed",
        note="SUN09 has 20 birds and 30 dogs: a class can be absent from a small validation split",
    ),
    "office-home": Benchmark(
        "office-home",
        "Office-Home",
        ("Art", "Clipart", "Product", "Real_World"),
        OFFICE_HOME_CLASSES,
        3,
        counts={"Art": 2427, "Clipart": 4365, "Product": 4439, "Real_World": 4357},
        folder=("officehome", "officehomedataset10072016"),
        source="Venkateswara et al., Deep Hashing Network for Unsupervised Domain Adaptation, CVPR 2017",
        note="folders may be spelled with blanks, underscores or neither (Real World, Real_World, RealWorld)",
    ),
    "terra-incognita": Benchmark(
        "terra-incognita",
        "Terra Incognita",
        ("location_100", "location_38", "location_43", "location_46"),
        ("bird", "bobcat", "cat", "coyote", "dog", "empty", "opossum", "rabbit", "raccoon", "squirrel"),
        3,
        folder=("terraincognita",),
        source="Beery et al., Recognition in Terra Incognita, ECCV 2018; DomainBed's locations",
        note="no reference counts: downloads differ (24,788 images in FedSB, about 24,330 later)",
    ),
    "folder": Benchmark(
        "folder",
        "Any folder domain/class/image",
        (),
        (),
        3,
        source="your own images",
        note="domains and classes are read from disk; a site that holds one domain only must set data.domains",
    ),
    **CATALOG,
}


def find_dataset(name: str) -> Benchmark:
    """The data set of that name: a row of BENCHMARKS, of an installed package, or `module:name`.

    `module:name` is a Benchmark, or a Reader class that has one as its attribute `benchmark` and then reads it.
    UserError gives the nearest known name.
    """
    where = "data.dataset: no data set"
    found = lookup(name, BENCHMARKS, "datasets", where)
    if isinstance(found, type) and isinstance(getattr(found, "benchmark", None), Benchmark):
        return replace(found.benchmark, reader=f"{found.__module__}:{found.__qualname__}")
    return instance(found, Benchmark, f"{where} {name!r}: it")


def benchmark(data: DataSettings) -> Benchmark:
    """The benchmark that the settings name, with the chosen `data.domains`; "folder" is read from disk.

    Domains come in the (sorted) order of the benchmark, whatever the order of `data.domains`. Raises UserError with the
    nearest name for an unknown data set or domain.
    """
    found = find_dataset(data.dataset)
    refuse_repeated(data.classes, "data.classes")
    if found.discover:
        found = load(found.discover, "data set")(data, found)
    if data.dataset == "folder":
        found = _named(data) or _discover(data_root(data), data.domains, sorted(map(composed, data.classes)))
    found = replace(found, **found.variants.get(data.variant, {}))
    for name in data.domains or found.domains:
        if reason := unusable(name):
            raise UserError(f"{found.title}: a domain cannot be called {name!r}, {reason}; rename it")
    if not data.domains:
        return found
    chosen = sorted(resolve_domain(found, name) for name in data.domains)
    refuse_repeated(chosen, "data.domains")
    return replace(found, domains=tuple(chosen), all_domains=found.domains)


def unusable(name: str) -> str:
    """Why no domain can have this name, in words; empty for a name that can be used."""
    if name.casefold() == AVERAGE:
        return "the name of the column of averages"
    if "/" in name or name in (".", ".."):
        return "because a run's folder is called like its unseen domain, and this is no name of one folder"
    return ""


def resolve_domain(found: Benchmark, name: str) -> str:
    """A domain's name as the benchmark spells it; UserError with the nearest one when there is none.

    The names of a published benchmark may have other separators and another case; those of a folder are exact.
    """
    domain = (matching if found.folder else same)(name, found.domains)
    if domain is None:
        raise UserError(
            f"{found.title} has no domain {name!r}; {nearest(name, found.domains)}known: {', '.join(found.domains)}"
        )
    return domain


def _named(data: DataSettings) -> Benchmark | None:
    """The benchmark of a machine without images, by the names that the settings give; None when they give none."""
    if not (data.domains and len(data.classes) > 1) or any((data_root(data) / name).is_dir() for name in data.domains):
        return None
    domains, classes = (tuple(sorted(map(composed, names))) for names in (data.domains, data.classes))
    return replace(BENCHMARKS["folder"], domains=domains, classes=classes)


def _discover(root: Path, asked: list[str], named: list[str]) -> Benchmark:
    """The benchmark of a tree root/domain/class/image; `asked` domains may be missing here (they are on other sites).

    Where the classes are `named`, a domain may lack some of them, because hospitals differ.
    """
    on_disk = names_in(root)
    asked = [composed(name) for name in asked]
    for name in set(asked) - set(on_disk):
        hint = nearest(name, set(on_disk) - set(asked))
        if hint or not set(asked) & set(on_disk):
            raise UserError(f"no domain folder {name!r} in {root}; {hint}found: {', '.join(on_disk) or 'no folder'}")
    domains = tuple(sorted({*on_disk, *asked}))
    refuse_alike([asked] if asked else [[name] for name in on_disk], "domains", root)
    used = [name for name in on_disk if not asked or name in asked]
    if not used:
        raise UserError(f"no domain folders in {root}: expected domain/class/image below it; set data.root")
    folder_of = {composed(name): root / name for name in subfolders(root)}
    classes = named or names_in(folder_of[used[0]])
    for name in used:
        unknown = sorted(set(names_in(folder_of[name])) - set(classes)) if named else []
        if unknown:
            raise UserError(f"{root / name}: the class folders are not data.classes ({', '.join(unknown[:5])})")
        if not named and names_in(folder_of[name]) != classes:
            difference = sorted(set(names_in(folder_of[name])) ^ set(classes))
            raise UserError(
                f"{root}: domains {used[0]!r} and {name!r} have different class folders "
                f"({', '.join(difference[:5])}); every domain needs the same classes; set data.domains, "
                "or name all classes in data.classes"
            )
    refuse_alike([names_in(folder_of[name]) for name in used] + [[name] for name in classes], "classes", root)
    if len(classes) < 2:
        raise UserError(f"{root / used[0]}: {len(classes)} class folder(s); at least 2 are needed (domain/class/image)")
    return replace(BENCHMARKS["folder"], domains=domains, classes=tuple(classes))
