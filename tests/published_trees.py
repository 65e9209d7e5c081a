"""Small trees of images in the layouts in which data sets are published."""

from pathlib import Path

import numpy as np
from PIL import Image

from fedsim.data import BENCHMARKS

SIDE = 16


def image(path: Path, seed: int = 0, side: int = SIDE, red: int = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8)
    pixels[:, :, 0] = red
    Image.fromarray(pixels).save(path)


def digits_dg(root: Path) -> None:
    for place, domain in enumerate(BENCHMARKS["digits-dg"].domains):
        for part, count in (("train", 2), ("val", 1)):
            for digit in range(10):
                for number in range(count):
                    image(root / domain / part / str(digit) / f"{number}.png", 10 * place + digit)


def camelyon17(root: Path) -> None:
    rows = [",patient,node,x_coord,y_coord,tumor,slide,center,split"]
    for index in range(60):
        slide, tumor = f"patient_{index:03d}_node_0", index % 2
        image(root / "patches" / slide / f"patch_{slide}_x_{index}_y_64.png", index, 96, 255 * tumor)
        rows.append(f"{index},{index:03d},0,{index},64,{tumor},{index},{index // 12},{int(index % 4 == 3)}")
    (root / "metadata.csv").write_text("\n".join(rows) + "\n")


def fed_isic2019(root: Path) -> None:
    rows = ["image,target,center,fold,fold2"]
    for index in range(96):
        image(root / "ISIC_2019_Training_Input_preprocessed" / f"ISIC_{index:07d}.jpg", index)
        rows.append(f"ISIC_{index:07d},{index % 8},{index // 16},{'train' if index % 3 else 'test'},x")
    (root / "train_test_split").write_text("\n".join(rows) + "\n")


def classes(root: Path, domains: tuple[str, ...], names: list[str], count: int = 2, below: str = "") -> None:
    """Writes root/DOMAIN/(below/)CLASS/NUMBER.png, every image another one."""
    seed = 0
    for domain in domains:
        for name in names:
            for number in range(count):
                image(root / domain / below / name / f"{number}.png", seed)
                seed += 1


def prostate(root: Path, domains: tuple[str, ...], count: int = 5) -> None:
    """Slices of patients with a square as the prostate: DOMAIN/image/PATIENT/NUMBER.png, and the same below mask."""
    for place, domain in enumerate(domains):
        for number in range(count):
            name = f"Case{number // 2:02d}/{number}.png"
            image(root / domain / "image" / name, count * place + number)
            values = np.zeros((SIDE, SIDE), np.uint8)
            values[4 : 8 + number % 3, 5:12] = 255
            file = root / domain / "mask" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(values).save(file)
