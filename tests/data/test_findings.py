"""Findings: what the files of a data set show is said everywhere, and a grave one refuses until it is accepted."""

import io
import json
import shutil

import numpy as np
import pandas as pd
import pytest
from PIL import Image
from support import run_small, small_experiment
from typer.testing import CliRunner

from fedsim.analysis.provenance import finding_notes
from fedsim.commands.cli import app
from fedsim.common.errors import UserError
from fedsim.data import benchmark
from fedsim.data.findings import Finding, joined_names, lines_of, refuse_grave
from fedsim.data.inspect import inspect
from fedsim.data.label_findings import READ_AS_EMPTY, label_findings, one_hot_hint
from fedsim.data.levels import split_domains
from fedsim.data.mask_folders import mask_findings, value_counts, value_tally
from fedsim.data.pixel_findings import pixel_findings, tally_of
from fedsim.data.pixels import decode_measured
from fedsim.data.reader import reader
from fedsim.settings import DataSettings
from fedsim.settings.experiment import read_experiment

RAMP = np.linspace(0, 1, 64).reshape(8, 8)  # every shade
EMPTY_TEXTS = (
    "nan", "NaN", "NAN", "na", "NA", "N/A", "n/a", "a", "null", "Null", "NULL", "none", "None", "NONE", "NA>", "nan>",
    "N/A N/A", "IND", "QNAN", "inf", "?", "missing", "nil",
)  # fmt: skip
DOMAINS, CLASSES = ("bern", "lyon", "oslo"), ("cat", "dog")


def save(pixels, path, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path, **options)


def shades(seed, scale=255, kind=np.uint8):
    """A picture of 8 x 8 shades in another order for each seed."""
    return (np.random.default_rng(seed).permutation(RAMP.ravel()).reshape(8, 8) * scale).astype(kind)


def write(root, odd, ending="png"):
    """A tree of three domains and two classes of four pictures; oslo's are those that `odd(number)` makes."""
    number = 0
    for domain in DOMAINS:
        for name in CLASSES:
            for index in range(4):
                number += 1
                is_odd = domain == "oslo"
                path = root / domain / name / f"{index}.{ending if is_odd else 'png'}"
                save(odd(number) if is_odd else shades(number), path)
    return root


def alpha(number):
    return np.dstack([shades(number)] * 3 + [40 + shades(number + 900) // 2])


PIXELS = {
    "12 bits in 16": (lambda n: shades(n, 4095, np.uint16), "png", "few-levels", "4,095, takes 12 bits"),
    "10 bits in 16": (lambda n: shades(n, 1023, np.uint16), "png", "few-levels", "1,023, takes 10 bits"),
    "8 bits in 16": (lambda n: shades(n, 255, np.uint16), "tif", "few-levels", "255, takes 8 bits"),
    "0 and 1": (lambda n: shades(n) // 128, "png", "few-levels", "mode L) have only 2 of 256 grey levels, 0 to 1"),
    "class numbers": (lambda n: shades(n, 9), "png", "few-levels", "have only 10 of 256 grey levels, 0 to 9"),
    "small floats": (lambda n: shades(n, 0.001, np.float32), "tif", "few-levels", "the largest is 0.001"),
    "5 bits": (lambda n: np.dstack([shades(n, 31)] * 3), "png", "few-levels", "mode RGB) have only 32"),
    "opaque is 1": (
        lambda n: np.dstack([shades(n)] * 3 + [shades(n) // 128]),
        "png",
        "few-levels",
        "parts are white) have only 1 of 256",
    ),
    "infrared": (alpha, "png", "alpha", "8 of the 8 images of oslo have a fourth channel with middle values"),
}


@pytest.mark.parametrize(("odd", "ending", "kind", "text"), PIXELS.values(), ids=PIXELS)
def test_pixels_that_a_whole_domain_loses_are_grave(tmp_path, odd, ending, kind, text):
    root = write(tmp_path / "images", odd, ending)
    data = DataSettings(dataset="folder", root=str(root), image_size=8, cache=str(tmp_path / "cache"))
    read = reader(data, benchmark(data))
    [finding] = read.file_findings()
    assert (finding.kind, finding.where, finding.count, finding.is_grave) == (kind, "oslo", 8, True)
    assert text in finding.text
    assert read.file_findings() == [finding]  # from the cache, where no file is opened
    assert finding.line in inspect(root).problems
    with pytest.raises(UserError, match=rf"data.accept = \['{kind}'\] takes the data as they are$"):
        refuse_grave([finding], [])
    refuse_grave([finding], [kind])


def test_pages_of_one_size_are_a_stack_and_smaller_ones_and_animations_are_not(tmp_path):
    pages = [Image.fromarray(shades(number)) for number in range(3)]
    measured = []
    for name, others in (("stack.tif", pages[1:]), ("pyramid.tif", [pages[1].resize((4, 4))]), ("moving.gif", pages)):
        pages[0].save(tmp_path / name, save_all=True, append_images=others)
        measured.append(decode_measured(tmp_path / name, 8)[2])
    assert [one.pages for one in measured] == [3, 1, 1]
    [finding] = pixel_findings("oslo", tally_of(measured[:1]))
    assert (finding.kind, finding.is_grave) == ("pages", True)
    [finding] = pixel_findings("oslo", tally_of(measured))
    assert finding.text.startswith("1 of the 3 image files of oslo hold up to 3 pages")
    assert not finding.is_grave  # of less than half of the images


def test_a_bright_dot_does_not_hide_a_deep_image_and_one_dark_image_is_a_remark(tmp_path):
    deep = np.tile(shades(1, 4095, np.uint16), (8, 8))
    deep[0, 0] = 65535  # of 4096 pixels
    save(deep, tmp_path / "dot.png")
    [finding] = pixel_findings("oslo", tally_of([decode_measured(tmp_path / "dot.png", 8)[2]]))
    assert "in 99.8% of their pixels" in finding.text
    save(np.zeros((8, 8), np.uint8), tmp_path / "night.png")
    save(shades(3), tmp_path / "day.png")
    both = tally_of(decode_measured(tmp_path / f"{name}.png", 8)[2] for name in ("night", "day", "day"))
    assert [(finding.count, finding.is_grave) for finding in pixel_findings("oslo", both)] == [(1, False)]
    spots = np.zeros((600, 600), np.uint8)
    spots[::90, ::90] = 250  # which almost vanish when the picture is made small
    save(spots, tmp_path / "spots.png")
    assert pixel_findings("oslo", tally_of([decode_measured(tmp_path / "spots.png", 8)[2]])) == []


def chunk(name, data):
    """A chunk of PNG, whose checksum Pillow needs."""
    import zlib

    return len(data).to_bytes(4, "big") + name + data + zlib.crc32(name + data).to_bytes(4, "big")


@pytest.mark.parametrize(("scale", "shift"), [(4095, 0), (4095, 4)])
def test_significant_bits_of_png_are_honoured_in_either_place(tmp_path, scale, shift):
    """12 bits that count: the lower ones are scaled by 4095; the upper ones are as the standard says."""
    values = shades(5, scale, np.uint16)
    save(values << shift, tmp_path / "a.png")
    content = (tmp_path / "a.png").read_bytes()
    marked = content[:33] + chunk(b"sBIT", bytes([12])) + content[33:]  # after the header
    pixels, _, measures = decode_measured(tmp_path / "a.png", 8, marked)
    assert np.abs(pixels[0].astype(int) - np.round(values * (255 / scale))).max() <= 1
    assert pixel_findings("oslo", tally_of([measures])) == []


def test_the_largest_sample_of_a_tiff_is_honoured(tmp_path):
    from PIL.TiffImagePlugin import ImageFileDirectory_v2

    tags = ImageFileDirectory_v2()
    tags[281] = 1023
    values = shades(6, 1023, np.uint16)
    save(values, tmp_path / "a.tif", tiffinfo=tags)
    pixels, _, measures = decode_measured(tmp_path / "a.tif", 8)
    assert (pixels[0] == np.round(values * (255 / 1023))).all()
    assert pixel_findings("oslo", tally_of([measures])) == []


def test_the_largest_value_that_a_tiff_happens_to_have_is_no_range(tmp_path):
    """TIFF 6.0 calls tag 281 the largest value used: a brightness of 500 was 128 in one file and 255 in another."""
    from PIL.TiffImagePlugin import ImageFileDirectory_v2

    levels = []
    for largest in (500, 1000):
        tags = ImageFileDirectory_v2()
        tags[281] = largest
        values = np.full((8, 8), 500, np.uint16)
        values[0, 0] = largest
        save(values, tmp_path / "a.tif", tiffinfo=tags)
        pixels, _, _ = decode_measured(tmp_path / "a.tif", 8)
        levels.append(int(pixels[0, 4, 4]))
    assert levels[0] == levels[1]


def test_values_of_masks_by_hand():
    mask = np.array([[0, 0, 1], [1, 255, 255]])
    assert value_counts(mask) == {0: 2, 1: 2, 255: 2}
    assert value_counts(mask - 1) == {-1: 2, 0: 2, 254: 2}
    assert value_tally([{0: 5, 1: 2}, {0: 1}]) == {"0": [2, 6], "1": [1, 2]}


NOTHING = {"a": {"0": [4, 90], "1": [4, 10]}}
MASKS = {
    "the background alone": ({**NOTHING, "b": {"0": [4, 90], "1": [4, 10]}}, {"organ": [1]}, []),
    "a background that is 255": ({"a": {"255": [4, 90], "0": [4, 9], "128": [4, 1]}}, {"disc": [0, 128]}, []),
    "interpolated": (
        {**NOTHING, "b": {str(value): [4, 100 - value] for value in range(0, 20)}}, {"organ": [1]},
        ["without interpolation"],
    ),
    "a new organ at one site": ({**NOTHING, "b": {"0": [4, 80], "1": [4, 10], "2": [3, 10]}}, {"organ": [1]},
                                ["other domains do not have them"]),
    "an ignore value": ({name: {"0": [4, 80], "1": [4, 10], "255": [4, 10]} for name in "ab"}, {"organ": [1]},
                        ["cannot be left out"] * 2),
    "an ignore value besides a named background": ({name: {"0": [4, 80], "1": [4, 10], "255": [4, 9], "7": [1, 1]}
                                                   for name in "a"}, {"ground": [0], "organ": [1]},
                                                  ["cannot be left out"]),
}  # fmt: skip


@pytest.mark.parametrize(("tallies", "structures", "remedies"), MASKS.values(), ids=MASKS)
def test_values_that_no_structure_names(tallies, structures, remedies):
    findings = mask_findings(tallies, structures)
    assert [any(remedy in finding.remedy for finding in findings) for remedy in remedies] == [True] * len(remedies)
    assert len(findings) == len(remedies)
    assert all(finding.is_grave and finding.kind == "mask-values" for finding in findings)


def test_a_run_on_interpolated_masks_is_refused_until_the_setting_accepts_them(tmp_path):
    for domain in ("a", "b", "c"):
        for index in range(4):
            save(np.dstack([shades(index + 7 * ord(domain))] * 3), tmp_path / "m" / domain / "image" / f"{index}.png")
            mask = np.zeros((8, 8), np.uint8)
            mask[2:6, 2:6] = 255
            mask[2, 2 : 2 + index] = 100 if domain == "c" else 255
            save(mask, tmp_path / "m" / domain / "mask" / f"{index}.png")
    data = {
        "dataset": "masks",
        "root": str(tmp_path / "m"),
        "structures": {"lesion": [255]},
        "cache": str(tmp_path / "c"),
    }
    data |= {"domains": [], "image_size": 16, "holdout": 0.25, "fraction": 1}
    sections = {"model": {"backbone": "unet-small"}, "train": {"rounds": 1}, "run": {"target": "c"}}
    with pytest.raises(UserError, match=r"6 pixels of the masks of c .* values 100, which no structure names"):
        run_small(small_experiment(tmp_path / "out", data=data, **sections))
    assert not (tmp_path / "out" / "small").exists()
    folder, _ = run_small(small_experiment(tmp_path / "out", data={**data, "accept": ["mask-values"]}, **sections))
    environment = json.loads((folder / "environment.json").read_text())
    [record] = environment["findings"]
    assert (record["kind"], record["where"], record["count"], record["is_grave"]) == ("mask-values", "c", 3, True)
    assert record["text"] in environment["data_remarks"]  # said at the start, without advice
    assert finding_notes({"run": environment, "again": environment}) == [f"Found in the data: {record['text']}."]


LABELS = {
    "zero width": ({"cat": 20, "cat\u200b": 1, "dog": 9}, "hidden-signs", "ZERO WIDTH SPACE, first in row 7"),
    "byte order": ({"cat": 20, "\ufeffcat": 1}, "hidden-signs", "ZERO WIDTH NO-BREAK SPACE"),
    "hard blank": ({"big cat": 20, "big\u00a0cat": 4}, "hidden-signs", "4 rows have 'big cat' with NO-BREAK SPACE"),
    "soft hyphen": ({"cat": 20, "c\u00adat": 1}, "hidden-signs", "SOFT HYPHEN"),
    "a ligature": ({"fish": 20, "\ufb01sh": 1}, "hidden-signs", "LATIN SMALL LIGATURE FI"),
    "nan": ({"cat": 20, "nan": 1}, "missing-labels", "1 row has 'nan', first in row 7"),
    "N/A": ({"cat": 20, "N/A": 2, "dog": 1}, "missing-labels", "2 rows have 'N/A'"),
    "NULL": ({"cat": 20, "NULL": 2}, "missing-labels", "'NULL'"),
    "<NA>": ({"cat": 20, "<NA>": 2}, "missing-labels", "'<NA>'"),
    "None": ({"cat": 20, "None": 2}, "missing-labels", "'None'"),
    "0 and 0.0": ({"0": 20, "0.0": 2, "1": 9}, "numbers", "'0' (rows: 20), '0.0' (rows: 2), first in row 7"),
    "1 and 01": ({"01": 20, "1": 2, "2": 9}, "numbers", "one number is written in 2 forms"),
    "1 and 1e0": ({"1e0": 20, "1": 2, "2": 9}, "numbers", "2 forms"),
    "1 and +1": ({"+1": 20, "1": 2, "3": 9}, "numbers", "2 forms"),
    "3 and 3.": ({"3.": 20, "3": 2, "2": 9}, "numbers", "2 forms"),
    "bars": ({"mass": 9, "edema": 8, "edema|mass": 2}, "multi-label", "2 rows have several labels in one, such as ede"),
    "semicolons": ({"mass": 9, "edema": 8, "mass; edema": 2}, "multi-label", "task 'multi-label'"),
    "commas": ({"a": 9, "b": 8, "c": 2, "a,b,c": 1, "b,c": 3}, "multi-label", "4 rows have"),
    "no single ones": ({"a|b": 9, "b|c": 8, "a|c": 2, "c|d": 1, "a|d": 3}, "multi-label", "23 rows"),
    "plus": ({"red": 9, "blue": 8, "red+blue": 2}, "multi-label", "red+blue"),
    "fractions": ({f"{n / 7:.3f}": 4 for n in range(1, 30)}, "continuous", "29 different numbers in 116 rows"),
    "ages": ({str(20 + n): 2 for n in range(40)}, "continuous", "task 'regression'"),
    "degrees": ({f"{n}.5": 90 for n in range(12)}, "continuous", "each a class of its own"),
    "below 0": ({f"-{n}.25": 1 for n in range(10)}, "continuous", "10 different numbers"),
    "with exponents": ({f"{n}e-3": 1 for n in range(1, 12)}, "continuous", "11 different numbers"),
}


@pytest.mark.parametrize(("counts", "kind", "text"), LABELS.values(), ids=LABELS)
def test_labels_that_are_not_what_they_look_like(counts, kind, text):
    [finding] = label_findings(counts, "t.csv", "label", lambda name: 7)
    assert (finding.kind, finding.is_grave) == (kind, True)
    assert text in finding.line


@pytest.mark.parametrize("names", [
    ("-1", "1"), ("0", "1", "2"), ("0.5", "1", "1.5"), ("none", "crack"), ("animal/cat", "animal/dog"),
    ("Rock & roll", "Jazz"), ("T-shirt", "Trouser"), tuple(map(str, range(1000))), ("salt, pepper", "salt, no pepper"),
    ("big|red", "big|blue", "small|red", "small|blue"), ("1e400", "2"), ("não", "sim"),
])  # fmt: skip
def test_usual_labels_are_no_finding(names):
    assert label_findings(dict.fromkeys(names, 9), "t.csv", "label") == []


def test_what_pandas_reads_as_empty():
    """A list of ours, so that a run needs no pandas for it: among many short texts pandas takes no others."""
    texts = [first + second for first in ("", "-", "#", "1.#", "-1.#", "<", "1", "n/") for second in EMPTY_TEXTS]
    cells = pd.read_csv(io.StringIO("\n".join(texts)), header=None, dtype=str, sep="\t", quoting=3)[0]
    assert {text for text, is_empty in zip(texts, cells.isna(), strict=True) if is_empty} == READ_AS_EMPTY


def test_names_of_two_spellings_and_a_number_below_0_are_remarks():
    [finding] = label_findings({"Cat": 4, "cat": 5, "dog": 1}, "t.csv", "label")
    assert "'Cat' (rows: 4), 'cat' (rows: 5) differ in spelling only and are 2 names" in finding.line
    assert not finding.is_grave
    [finding] = label_findings({"-1": 4, "0": 5, "1": 1}, "t.csv", "label", lambda name: 9)
    assert "4 rows have '-1', first in row 9, the only number below 0, as a class" in finding.line
    assert not finding.is_grave


@pytest.mark.parametrize(("black", "is_grave"), [(1, False), (4, True)])
def test_images_that_show_nothing_are_counted(tmp_path, black, is_grave):
    for number in range(8):
        save(shades(number) if number >= black else np.full((8, 8), 7, np.uint8), tmp_path / f"{number}.png")
    measured = [decode_measured(tmp_path / f"{number}.png", 8)[2] for number in range(8)]
    [finding] = pixel_findings("oslo", tally_of(measured))
    assert finding.text.startswith(f"{black} of the 8 images of oslo have one grey level everywhere")
    assert (finding.kind, finding.is_grave) == ("few-levels", is_grave)


def test_a_name_with_a_joiner_of_its_own_script_is_a_remark():
    [finding] = label_findings({"\u0645\u06cc\u200c\u062e": 4, "\u0633\u06af": 5}, "t.csv", "label")
    assert not finding.is_grave


def test_columns_of_0_and_1_are_named_where_a_label_is_missing():
    rows = pd.DataFrame(
        {"path": ["a", "b", "c"], "mel": ["1", "0", "0"], "nv": ["0", "1.0", "0"], "bcc": ["0", "0", "1"]}
    )
    assert "mel, nv, bcc hold 0 and 1, one 1 in a row: write the name" in one_hot_hint(rows)
    assert "several 1 in a row: this is the task 'multi-label'" in one_hot_hint(rows.assign(nv=["1", "1", "0"]))
    assert one_hot_hint(rows[["path", "mel"]]) == ""


SPLITS = {
    "train, val, test": ("train", "val", "test"),
    "Training, Testing": ("Training", "Testing"),
    "sites with parts": ("lyon_train", "lyon_val", "oslo_train", "oslo_val"),
    "years of parts": ("train2017", "val2017"),
    "folds": ("fold_0", "fold_1", "fold_2"),
    "set names": ("train-images", "test-images", "dev-images"),
}


@pytest.mark.parametrize("names", SPLITS.values(), ids=SPLITS)
def test_domains_that_are_parts_of_a_split_are_grave(names):
    assert all(finding.is_grave for finding in split_domains(names, "t.csv", "rename"))
    assert split_domains(names, "t.csv", "rename")


@pytest.mark.parametrize("names", [
    ("art", "photo", "sketch"), ("train station", "harbour"), ("hospital_1", "hospital_2"), ("trainer", "tester"),
    ("site1_train", "site2_train"), ("valencia", "testaccio"), ("test", "oslo"), ("2020", "2021"),
])  # fmt: skip
def test_other_domains_are_not(names):
    assert split_domains(names, "t.csv", "rename") == []


LEVELS = {
    "split/domain/class": (("train", "val"), ("bern", "lyon", "oslo"), "cat", "*/domain/class"),
    "domain/split/class": (("bern", "lyon", "oslo"), ("crossval", "full", "test"), "cat", "domain/*/class"),
    "domain/fold/class": (("bern", "lyon", "oslo"), ("fold_0", "fold_1"), "cat", "domain/*/class"),
    "year/domain/class": (("2019", "2020"), ("bern", "lyon", "oslo"), "cat", "*/domain/class"),
    "domain/camera/class": (("bern", "lyon", "oslo"), ("left", "right"), "cat", "domain/*/class"),
}


@pytest.mark.parametrize(("first", "second", "_", "levels"), LEVELS.values(), ids=LEVELS)
def test_a_level_that_is_neither_domain_nor_class(tmp_path, first, second, _, levels):
    number = 0
    for one in first:
        for two in second:
            for name in CLASSES:
                for index in range(2):
                    number += 1
                    save(shades(number), tmp_path / "data" / one / two / name / f"{index}.png")
    data = DataSettings(dataset="folder", root=str(tmp_path / "data"), cache=str(tmp_path / "cache"), image_size=8)
    with pytest.raises(UserError, match=r"'domain/\*/class' .* '\*/domain/class' .* 'domain/class' \(domains"):
        benchmark(data)
    with pytest.raises(UserError, match=r"data\.levels says which reading holds"):
        inspect(tmp_path / "data")
    data = data.model_copy(update={"levels": levels})
    bench = benchmark(data)
    assert (bench.domains, bench.classes) == (("bern", "lyon", "oslo"), CLASSES)
    read = reader(data, bench)
    folders = number // (3 * len(CLASSES))
    assert read.labels("oslo").tolist() == [0] * folders + [1] * folders
    assert len(read.images("oslo")[0]) == 2 * folders
    assert read.file_findings() == []
    assert inspect(tmp_path / "data", [f"data.levels={levels}"]).counts.to_numpy().sum() == number
    alone = DataSettings(**{**data.model_dump(), "levels": levels.replace("*", "full" if "full" in second else
                         (second if levels.startswith("domain") else first)[0])})  # fmt: skip
    assert len(reader(alone, benchmark(alone)).labels("oslo")) == 2 * len(CLASSES)
    # Domains and classes that the settings name are compared with the folders, and are split as without them.
    named = data.model_copy(update={"domains": ["lyon", "oslo"], "classes": list(CLASSES)})
    bench = benchmark(named)
    assert [bench.environment(name) for name in ("lyon", "oslo")] == [1, 2]
    elsewhere = named.model_copy(update={"domains": ["oslo", "kinshasa"]})  # on another site's machine
    of_elsewhere = reader(elsewhere, benchmark(elsewhere))
    with pytest.raises(UserError, match="no folder of the domain 'kinshasa'"):
        of_elsewhere.labels("kinshasa")
    save(shades(1), tmp_path / "data" / first[0] / second[0] / "unnamed" / "0.png")
    with pytest.raises(UserError, match="unnamed"):
        benchmark(named.model_copy(update={"domains": ["bern", "lyon", "oslo"]}))


def test_a_folder_with_the_files_of_all_others_is_named(tmp_path):
    for domain in DOMAINS:
        for name in CLASSES:
            for index in range(3):
                part = ("train", "crossval", "test")[index]
                for folder in (part, "full"):
                    save(shades(index), tmp_path / domain / folder / name / f"{index}.png")
    with pytest.raises(UserError, match=r"'full' has the files of all others in 'bern', so that 'domain/full/class'"):
        benchmark(DataSettings(dataset="folder", root=str(tmp_path)))


def test_what_no_level_is(tmp_path):
    write(tmp_path / "ok", shades)
    for levels in ("domain", "class/*", "domain/class/class", "domain//class"):
        with pytest.raises(UserError, match="must have domain and class once each"):
            benchmark(DataSettings(dataset="folder", root=str(tmp_path / "ok"), levels=levels))
    turned = DataSettings(dataset="folder", root=str(tmp_path / "ok"), levels="class/domain")
    assert benchmark(turned).domains == CLASSES
    for name in CLASSES:
        save(shades(1), tmp_path / "plain" / name / "1.png")
    with pytest.raises(UserError, match=r"the images lie in cat, dog themselves.* if they are classes, .* no domains"):
        benchmark(DataSettings(dataset="folder", root=str(tmp_path / "plain")))


SERIES = {
    "P1_0 P1_1 P2_0 P2_1": 2,
    "s01-a s01-b s02-a s02-b": 2,
    "3-slice-1 3-slice-2 4-slice-1 4-slice-2": 2,
    "case7.1 case7.2 case8.1 case8.2": 2,
    "2021_x1 2021_x2 2022_x1 2022_x2": 2,
    "img_1 img_2 img_3 img_4": 0,
    "IMG_2021_1 IMG_2021_2 IMG_2021_3 IMG_2021_4": 0,
    "10_1 20_1 30_1 40_1": 0,
    "0 1 2 3": 0,
}


@pytest.mark.parametrize(("text", "count"), SERIES.items())
def test_names_that_seem_to_be_in_series(tmp_path, text, count):
    for domain in ("a", "b"):
        for number, name in enumerate(text.split()):
            for kind in CLASSES:
                save(shades(number), tmp_path / domain / kind / f"{name}.png")
    data = DataSettings(dataset="folder", root=str(tmp_path))
    found = reader(data, benchmark(data)).findings()
    assert [finding.count for finding in found] == ([count] * 2 if count else [])
    assert not any(finding.is_grave for finding in found)


def test_files_of_other_kinds_are_counted_and_companions_are_not(tmp_path):
    root = write(tmp_path / "images", shades)
    for index in range(3):
        (root / "bern" / "cat" / f"volume{index}.nii.gz").write_bytes(b"x")
        (root / "bern" / "dog" / f"scan{index}.npy").write_bytes(b"x")
        (root / "lyon" / "cat" / f"{index}.json").write_text("{}")  # next to the image of this name
    (root / "lyon" / "cat" / "README.md").write_text("one note")
    data = DataSettings(dataset="folder", root=str(root))
    [finding] = reader(data, benchmark(data)).findings()
    assert finding.text.startswith("3 .nii.gz, 3 .npy files lie in the class folders of bern next to its 8 images")
    assert (finding.count, finding.is_grave) == (6, False)
    shutil.rmtree(root / "bern" / "cat")
    (root / "bern" / "cat").mkdir()
    (root / "bern" / "cat" / "a.npy").write_bytes(b"x")
    with pytest.raises(UserError, match=r"no image of class 'cat' in .*, whose 1 \.npy files are no images"):
        reader(data, benchmark(data)).labels("bern")


@pytest.fixture
def images(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "data" / "img", shades)
    return tmp_path / "data"


PATHS = {
    "Windows separators": (lambda path: path.replace("/", "\\"), r"it is there as 'img/bern/cat/0.png': write / for"),
    "a drive": (
        lambda path: "C:\\mine\\" + path.replace("/", "\\"),
        "leave out the drive, leave out 'mine'",
    ),
    "no ending": (lambda path: path[:-4], "add the ending"),
    "another ending": (lambda path: path[:-4] + ".jpg", "the file has another ending"),
    "capital letters": (lambda path: path[:-4] + ".PNG", "write capital and small letters as the file has them"),
    "one folder too many": (lambda path: f"data/{path}", "it is there as 'img/bern/cat/0.png': leave out 'data'"),
    "one folder too few": (lambda path: path[4:], "it is there as 'img/bern/cat/0.png': it is read from the table's"),
    "% codes": (lambda path: path.replace("/", "%2F"), "write signs for their % codes"),
    "an address": (lambda path: f"https://example.org/{path}", "it is an address, and images are read from files"),
    "a bucket": (lambda path: f"s3://bucket/{path}", "download them"),
    "nowhere": (lambda path: f"{path}.gone", "correct the path, which is read from the table's folder"),
}


@pytest.mark.parametrize(("change", "text"), PATHS.values(), ids=PATHS)
def test_a_path_without_a_file_is_explained(images, change, text):
    rows = [(f"img/{d}/{c}/{i}.png", c, d) for d in DOMAINS for c in CLASSES for i in range(4)]
    rows = [(change(path), name, domain) for path, name, domain in rows]
    pd.DataFrame(rows, columns=["path", "label", "domain"]).to_csv(images / "t.csv", index=False)
    data = DataSettings(dataset="table", root=str(images / "t.csv"))
    with pytest.raises(UserError) as error:
        reader(data, benchmark(data)).fingerprint("bern")
    first = str(error.value)
    assert f"{images / 't.csv'}, row 2, column 'path': no file " in first
    assert "8 of 8 files of bern are not there" in first
    assert text in first
    assert "replace or remove it" not in first
    assert first in inspect(images / "t.csv").problems


@pytest.mark.parametrize("sign", [";", "|", "\t"])
def test_a_table_with_other_separators_is_named(images, sign):
    (images / "t.csv").write_text(sign.join(("path", "label", "domain")) + "\n" + sign.join("abc") + "\n")
    with pytest.raises(UserError, match=r"its columns are separated by .*; save it with commas as \.csv"):
        benchmark(DataSettings(dataset="table", root=str(images / "t.csv")))
    with pytest.raises(UserError, match=r"its columns are separated by"):
        benchmark(DataSettings(dataset="arrays", root=str(images / "t.csv")))


@pytest.mark.parametrize(("text", "hint"), [
    ('[data]\nroot = "C:\\data"\n', "write the path with /, or in '...'"),
    ('[data]\nroot = "C:\\Users\\me"\n', "write the path with /, or in '...'"),
    ('[data]\nroot = "C:\\new"\n', "a tab or line end is in the path"),
    ("[train]\namp = True\n", "; write true"), ("[train]\namp = False\n", "; write false"),
    ("[train]\namp = None\n", "; leave the setting out"), ("[data]\ndataset = folder\n", "; write text in quotes"),
    ("[data]\nroot = 'x'\n".encode("utf-16"), "save it as UTF-8"),
])  # fmt: skip
def test_what_is_not_toml_is_said_with_the_remedy(tmp_path, text, hint):
    (tmp_path / "a.toml").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError) as error:
        read_experiment(str(tmp_path / "a.toml"))
    assert hint in str(error.value)


def test_a_byte_order_mark_is_no_text(tmp_path):
    (tmp_path / "a.toml").write_bytes(b"\xef\xbb\xbf[train]\nrounds = 3\n")
    assert read_experiment(str(tmp_path / "a.toml")).train.rounds == 3


def test_one_list_is_said_everywhere(tmp_path):
    """The inspection, the start of a run, environment.json and the notes below a table have the same text."""
    root = write(tmp_path / "images", lambda n: shades(n, 4095, np.uint16))
    for index in range(2):
        (root / "bern" / "cat" / f"x{index}.npy").write_bytes(b"x")
    result = CliRunner().invoke(app, ["datasets", str(root)])
    data = {"dataset": "folder", "root": str(root), "accept": ["few-levels"], "cache": str(tmp_path / "cache")}
    data |= {"domains": [], "image_size": 16, "holdout": 0.3, "fraction": 1}
    folder, _ = run_small(small_experiment(tmp_path / "out", data=data, train={"rounds": 1}, run={"target": "lyon"}))
    environment = json.loads((folder / "environment.json").read_text())
    texts = [record["text"] for record in environment["findings"]]
    assert [record["kind"] for record in environment["findings"]] == ["other-files", "few-levels"]
    for text in texts:
        assert text in " ".join(result.output.split())
        assert any(remark.startswith(text) for remark in environment["data_remarks"])
    compared = CliRunner().invoke(app, ["compare", str(folder.parents[2])])
    assert f"Found in the data: {'; '.join(texts)}." in " ".join(compared.output.split())


def test_a_grave_finding_has_a_setting_and_names_are_shortened():
    with pytest.raises(ValueError, match=r"no value of data\.accept is called 'odd'"):
        Finding("odd", "here", 1, "odd", is_grave=True)
    findings = [Finding("pages", "a", 1, "one", "do", is_grave=True), Finding("alpha", "a", 1, "two", is_grave=True)]
    with pytest.raises(UserError, match=r"one; do; data.accept = \['pages'\] .* \(and 1 more such findings"):
        refuse_grave(findings, [])
    assert lines_of(findings, ["alpha"])[1] == "two"
    assert joined_names(list("abcde"), 3) == "a, b, c and 2 more"
