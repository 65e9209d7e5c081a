"""The data sets by name: rows of facts with their sources (domains, classes, image counts)."""

from fedsim.data.array_rows import DISCOVER, READER
from fedsim.data.row import Benchmark

DIGITS = ("0", "1", "2", "3", "4", "5", "6", "7", "8", "9")
ANGLES = (0, 15, 30, 45, 60, 75)
_ROT = tuple(f"rot{angle}" for angle in ANGLES)
_M = tuple(f"M{angle}" for angle in ANGLES)
_AGREE = ("agree10", "agree80", "agree90")
_HALVES = ("0_to_4", "5_to_9")

PACS_COUNTS: dict[str, tuple[int, ...]] = {
    "art_painting": (379, 255, 285, 184, 201, 295, 449),
    "cartoon": (389, 457, 346, 135, 324, 288, 405),
    "photo": (189, 202, 182, 186, 199, 280, 432),
    "sketch": (772, 740, 753, 608, 816, 80, 160),
}
VLCS_COUNTS: dict[str, tuple[int, ...]] = {
    "Caltech101": (237, 123, 118, 67, 870),
    "LabelMe": (80, 1209, 88, 42, 1237),
    "SUN09": (20, 932, 1036, 30, 1264),
    "VOC2007": (330, 699, 428, 420, 1499),
}
HOSPITALS = {"cleveland": 304, "hungary": 293, "switzerland": 123, "va_long_beach": 200}  # patients
OFFICE_HOME_CLASSES = (
    "Alarm_Clock", "Backpack", "Batteries", "Bed", "Bike", "Bottle", "Bucket", "Calculator", "Calendar", "Candles",
    "Chair", "Clipboards", "Computer", "Couch", "Curtains", "Desk_Lamp", "Drill", "Eraser", "Exit_Sign", "Fan",
    "File_Cabinet", "Flipflops", "Flowers", "Folder", "Fork", "Glasses", "Hammer", "Helmet", "Kettle", "Keyboard",
    "Knives", "Lamp_Shade", "Laptop", "Marker", "Monitor", "Mop", "Mouse", "Mug", "Notebook", "Oven", "Pan",
    "Paper_Clip", "Pen", "Pencil", "Postit_Notes", "Printer", "Push_Pin", "Radio", "Refrigerator", "Ruler",
    "Scissors", "Screwdriver", "Shelf", "Sink", "Sneakers", "Soda", "Speaker", "Spoon", "TV", "Table", "Telephone",
    "ToothBrush", "Toys", "Trash_Can", "Webcam",
)  # fmt: skip
_DOMAINNET = ("clipart", "infograph", "painting", "quickdraw", "real", "sketch")
_STYLES = ("fluent_3d", "noto", "openmoji", "openmoji_black", "twemoji")
_GROUNDS = ("inverted", "noise", "shaded", "textured")
_OFFICE_CALTECH = (
    "back_pack", "bike", "calculator", "headphones", "keyboard", "laptop_computer", "monitor", "mouse", "mug",
    "projector",
)  # fmt: skip
_PENG = "Peng et al., Moment Matching for Multi-Source Domain Adaptation, ICCV 2019"


def _unnamed(count: int) -> tuple[str, ...]:
    """As many classes as there are, until their names are read from the folders."""
    return tuple(f"class_{index:03d}" for index in range(count))


BENCHMARKS: dict[str, Benchmark] = {
    "digits": Benchmark(
        "digits", "Rotated Digits (embedded)", _ROT, DIGITS, 1,
        counts=dict.fromkeys(_ROT, 1000),
        source="scikit-learn load_digits (UCI Optical Recognition of Handwritten Digits, 8x8)",
        note="needs no files; every client domain shows the SAME 1,000 images (100 a class, drawn by the split seed), "
        "rotated clockwise; the unseen domain shows the 797 others",
        same_images=True,
        test_apart=True,
        reader="fedsim.data.digits:Digits",
    ),
    "drawings": Benchmark(
        "drawings", "Drawings in five styles (embedded)", _STYLES,
        ("animal", "clock", "face", "food", "hand", "person", "vehicle"), 3,
        counts=dict.fromkeys(_STYLES, 579),
        source="emojis of Noto (Apache-2.0), Twemoji (CC-BY 4.0), OpenMoji (CC-BY-SA 4.0) and Fluent (MIT)",
        note="needs no files (32 pixels, which a larger data.image_size enlarges; data.root names the full set of 64); "
        "every style shows the SAME emojis, and a quarter of them, drawn by the split seed, is in no client's data: "
        "the unseen style is tested on these",
        same_images=True,
        test_apart=True,
        reader="fedsim.data.drawings:Drawings",
    ),
    "rotated-mnist": Benchmark(
        "rotated-mnist", "Rotated MNIST", _M, DIGITS, 1,
        counts=dict.fromkeys(_M, 1000),
        folder=("mnist",),
        source="LeCun et al. 1998; rotations as in CSAC (default) or DomainBed (data.variant)",
        note="csac: the same 1,000 images in every domain, the unseen one included; domainbed: all 70,000 images dealt "
        "to disjoint domains",
        same_images=True,
        variants={"domainbed": {"counts": None, "same_images": False}},
        reader="fedsim.data.rotated_mnist:RotatedMNIST",
    ),
    "colored-digits": Benchmark(
        "colored-digits", "Coloured Digits (embedded)", _AGREE, _HALVES, 3,
        counts=dict.fromkeys(_AGREE, 599),
        source="scikit-learn load_digits, coloured as ColoredMNIST (Arjovsky et al. 2019)",
        note="needs no files; a quarter of the labels is false, and the colour agrees with 80 or 90 % of them in the "
        "sources and with 10 % in agree10, which is the domain to leave out",
        reader="fedsim.data.digits:ColoredDigits",
    ),
    "colored-mnist": Benchmark(
        "colored-mnist", "ColoredMNIST", _AGREE, _HALVES, 3,
        folder=("mnist",),
        source="Arjovsky et al., Invariant Risk Minimization, 2019; disjoint domains as in DomainBed",
        note="from MNIST's own files, as rotated-mnist; the domains are those of colored-digits",
        reader="fedsim.data.rotated_mnist:ColoredMNIST",
    ),
    "pacs": Benchmark(
        "pacs", "PACS", tuple(PACS_COUNTS), ("dog", "elephant", "giraffe", "guitar", "horse", "house", "person"), 3,
        counts={domain: sum(row) for domain, row in PACS_COUNTS.items()},
        class_counts=PACS_COUNTS,
        folder=("pacs", "kfold"),
        source="Li et al., Deeper, Broader and Artier Domain Generalization, ICCV 2017",
    ),
    "vlcs": Benchmark(
        "vlcs", "VLCS", tuple(VLCS_COUNTS), ("bird", "car", "chair", "dog", "person"), 3,
        counts={domain: sum(row) for domain, row in VLCS_COUNTS.items()},
        class_counts=VLCS_COUNTS,
        folder=("vlcs",),
        source="Fang et al., Unbiased Metric Learning, ICCV 2013; folders of DomainBed",
        note="SUN09 has 20 birds and 30 dogs: a class can be absent from a small validation split; also read as "
        "CALTECH, LABELME, SUN and PASCAL with the folders train, crossval and test, which data.split = 'lists' uses",
        reader="fedsim.data.layouts:VLCS",
    ),
    "office-home": Benchmark(
        "office-home", "Office-Home", ("Art", "Clipart", "Product", "Real_World"), OFFICE_HOME_CLASSES, 3,
        counts={"Art": 2427, "Clipart": 4365, "Product": 4439, "Real_World": 4357},
        folder=("officehome", "officehomedataset10072016"),
        source="Venkateswara et al., Deep Hashing Network for Unsupervised Domain Adaptation, CVPR 2017",
        note="folders may be spelled with blanks, underscores or neither (Real World, Real_World, RealWorld)",
    ),
    "terra-incognita": Benchmark(
        "terra-incognita", "Terra Incognita", ("location_100", "location_38", "location_43", "location_46"),
        ("bird", "bobcat", "cat", "coyote", "dog", "empty", "opossum", "rabbit", "raccoon", "squirrel"), 3,
        folder=("terraincognita",),
        source="Beery et al., Recognition in Terra Incognita, ECCV 2018; DomainBed's locations",
        note="no reference counts: downloads differ (24,788 images in FedSB, about 24,330 later)",
    ),
    "folder": Benchmark(
        "folder", "Any folder domain/class/image", (), (), 3,
        source="your own images",
        note="domains and classes are read from disk; a site that holds one domain only must set data.domains",
        discover="fedsim.data.benchmarks:discover",
    ),
    "domainnet": Benchmark(
        "domainnet", "DomainNet", _DOMAINNET, _unnamed(345), 3,
        folder=("domainnet",),
        source=_PENG,
        note="names of the 345 classes are read from the folders; the published lists DOMAIN_train.txt and "
        "DOMAIN_test.txt are read with data.split = 'lists', data.test_split = 'list' and data.lists = '.'; "
        "data.root is then the DomainNet folder itself, in which they are",
        discover="fedsim.data.layouts:classes_on_disk",
    ),
    "domainnet-mini": Benchmark(
        "domainnet-mini", "DomainNet (mini)", ("clipart", "painting", "real", "sketch"), _unnamed(126), 3,
        folder=("domainnetmini", "minidomainnet", "domainnet126"),
        source=f"{_PENG}; four domains and 126 classes as in Saito et al., ICCV 2019",
        note="a folder with these 126 classes alone; names of classes are read from it",
        discover="fedsim.data.layouts:classes_on_disk",
    ),
    "digits-dg": Benchmark(
        "digits-dg", "Digits-DG", ("mnist", "mnist_m", "svhn", "syn"), DIGITS, 3,
        counts=dict.fromkeys(("mnist", "mnist_m", "svhn", "syn"), 6000),
        folder=("digitsdg",),
        source="Zhou et al., Deep Domain-Adversarial Image Generation for Domain Generalisation, AAAI 2020",
        note="600 images per class and domain, published as train and val (data.split = 'lists')",
        reader="fedsim.data.layouts:DigitsDG",
    ),
    "office-caltech-10": Benchmark(
        "office-caltech-10", "Office-Caltech-10", ("amazon", "caltech", "dslr", "webcam"), _OFFICE_CALTECH, 3,
        counts={"amazon": 958, "caltech": 1123, "dslr": 157, "webcam": 295},
        folder=("officecaltech", "officecaltech10", "office_caltech_10", "officecaltechdataset"),
        source="Gong et al., Geodesic Flow Kernel for Unsupervised Domain Adaptation, CVPR 2012",
    ),
    "office-caltech-home": Benchmark(
        "office-caltech-home", "Office-Caltech-Home",
        ("Art", "Clipart", "Product", "Real_World", "amazon", "caltech", "webcam"),
        ("backpack", "bike", "calculator", "keyboard", "laptop", "monitor", "mouse", "mug"), 3,
        folder=("officecaltechhome", "office8"),
        source="Yuan et al. (CSAC), TKDE 2023: the classes that Office-Caltech-10 and Office-Home share; no DSLR",
        note="folders of both data sets side by side; other classes in them are left out",
        reader="fedsim.data.layouts:OfficeCaltechHome",
    ),
    "camelyon17": Benchmark(
        "camelyon17", "Camelyon17", tuple(f"hospital_{index}" for index in range(5)), ("normal", "tumor"), 3,
        counts={"hospital_0": 59436, "hospital_1": 34904, "hospital_2": 85054, "hospital_3": 129838,
                "hospital_4": 146722},
        folder=("camelyon17", "camelyon17v1.0"),
        source="Bandi et al., IEEE TMI 2019; patches of Koh et al. (WILDS), ICML 2021",
        note="hospitals by `center` in metadata.csv (gPerXAN's H1 to H5); 96 pixels",
        reader="fedsim.data.layouts:Camelyon17",
    ),
    "fed-isic2019": Benchmark(
        "fed-isic2019", "Fed-ISIC2019", tuple(f"center_{index}" for index in range(6)),
        ("0_MEL", "1_NV", "2_BCC", "3_AK", "4_BKL", "5_DF", "6_VASC", "7_SCC"), 3,
        counts={"center_0": 12413, "center_1": 3954, "center_2": 3363, "center_3": 2259, "center_4": 819,
                "center_5": 439},
        folder=("fedisic2019", "fedisic", "isic2019"),
        source="Ogier du Terrail et al. (FLamby), NeurIPS 2022 Datasets and Benchmarks",
        note="FLamby's folder after its preprocessing: train_test_split and the folder of images",
        reader="fedsim.data.layouts:FedISIC",
    ),
    "table": Benchmark(
        "table", "Any table of images", (), (), 3,
        source="your own images",
        note="a CSV, TSV or Parquet file with the columns path, label, domain and perhaps split (train, validation, "
        "test); data.root names the file, data.columns other names of its columns",
        reader="fedsim.data.tables:TableReader",
        discover="fedsim.data.tables:discover",
    ),
    "hugging-face": Benchmark(
        "hugging-face", "Any Hugging Face data set on disk", (), (), 3,
        source="your own images",
        note="data.root is what `save_to_disk` wrote; columns image, label and domain, or others by data.columns "
        "(path, label, domain); its own splits are joined unless data.split = 'lists' or data.test_split = 'list'",
        reader="fedsim.data.hugging_face:HuggingFaceReader",
        discover="fedsim.data.hugging_face:discover",
    ),
    "arrays": Benchmark(
        "arrays", "Any tensors", (), (), 1,
        source="your own tensors",
        note="rows of numbers, signals or other tensors: data.root is an .npz file (x, label, domain), a CSV, TSV or "
        "Parquet table whose columns data.columns names, or a folder with one of these for each domain",
        images=False,
        reader=READER,
        discover=DISCOVER,
        takes_targets=True,
    ),
    "hospitals": Benchmark(
        "hospitals", "Heart disease in four hospitals (embedded)", tuple(HOSPITALS), ("no", "yes"), 1,
        counts=HOSPITALS,
        source="Janosi, Steinbrunn, Pfisterer and Detrano, Heart Disease, UCI Machine Learning Repository, 1989, "
        "doi:10.24432/C52P4X (CC BY 4.0)",
        note="needs no files: 920 patients of Cleveland (304), Hungary (293), Switzerland (123) and VA Long Beach "
        "(200), with 13 features; `fedsim run hospitals` takes the 740 patients (304, 260, 46 and 130) for whom all "
        "ten features are known that all hospitals measured, as FLamby's Fed-Heart-Disease does; --preset all takes "
        "all 920",
        images=False,
        reader=READER,
        discover=DISCOVER,
    ),
    "digit-masks": Benchmark(
        "digit-masks", "Digit masks (embedded)", _GROUNDS, DIGITS, 1,
        counts=dict.fromkeys(_GROUNDS, 400),
        source="scikit-learn load_digits (UCI Optical Recognition of Handwritten Digits, 8x8) on made grounds",
        note="needs no files; masks mark the digit (figure) and its darkest strokes (core), which lie within it; every "
        "client domain shows the SAME 400 images (40 of each digit, drawn by the split seed), the unseen domain 200 "
        "others",
        same_images=True,
        test_apart=True,
        reader="fedsim.data.digit_masks:DigitMasks",
        task="segmentation",
        structures=("figure", "core"),
    ),
    "masks": Benchmark(
        "masks", "Any folder with masks", (), ("image",), 3,
        source="your own images and masks",
        note="domain/image/NAME and domain/mask/NAME, or domain/samples.csv with the columns image and mask; "
        "data.structures says which pixel values mean which structure",
        reader="fedsim.data.mask_folders:MaskFolders",
        discover="fedsim.data.mask_folders:discover",
        task="segmentation",
    ),
}  # fmt: skip
