"""More data sets by name: rows of facts with their sources. The classical benchmarks are in benchmarks.py."""

from fedsim.data.row import Benchmark

_DOMAINNET = ("clipart", "infograph", "painting", "quickdraw", "real", "sketch")
_GROUNDS = ("inverted", "noise", "shaded", "textured")
_DIGITS = ("0", "1", "2", "3", "4", "5", "6", "7", "8", "9")
_OFFICE_CALTECH = (
    "back_pack", "bike", "calculator", "headphones", "keyboard", "laptop_computer", "monitor", "mouse", "mug",
    "projector",
)  # fmt: skip
_PENG = "Peng et al., Moment Matching for Multi-Source Domain Adaptation, ICCV 2019"


def _unnamed(count: int) -> tuple[str, ...]:
    """As many classes as there are, until their names are read from the folders."""
    return tuple(f"class_{index:03d}" for index in range(count))


CATALOG: dict[str, Benchmark] = {
    "domainnet": Benchmark(
        "domainnet", "DomainNet", _DOMAINNET, _unnamed(345), 3,
        folder=("domainnet",),
        source=_PENG,
        note="names of the 345 classes are read from the folders; the published lists DOMAIN_train.txt and "
        "DOMAIN_test.txt are read with data.split = 'lists', data.test_split = 'list' and data.lists = '.'",
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
        "digits-dg", "Digits-DG", ("mnist", "mnist_m", "svhn", "syn"), _DIGITS, 3,
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
        "(path, label, domain); all its splits together",
        reader="fedsim.data.hugging_face:HuggingFaceReader",
        discover="fedsim.data.hugging_face:discover",
    ),
    "digit-masks": Benchmark(
        "digit-masks", "Digit masks (embedded)", _GROUNDS, _DIGITS, 1,
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
