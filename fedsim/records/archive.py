"""A study as one file: the records of its finished runs in a zip archive, which is read like the folder.

An archive may come from somebody else. Only files with the names of records are taken out of it, into a temporary
folder. A name that leads out of that folder, a link, too many files or too many bytes are refused.
"""

import atexit
import io
import lzma
import shutil
import stat
import tempfile
import tomllib
import zipfile
import zlib
from collections.abc import Iterable
from functools import cache
from pathlib import Path, PurePosixPath

import tomli_w

from fedsim.common.errors import UserError
from fedsim.common.files import atomic_write, is_archive

SETTINGS = "experiment.toml"
OF_RUN = (SETTINGS, "environment.json", "rounds.csv", "clients.csv", "details.csv", "summary.csv")
OF_STUDY = ("table.toml", "combinations.csv")  # the copy of a paper's table, and the candidates of a search
# Settings that name folders of a machine, and what an archive has in their place.
PLACES = {("data", "root"): "", ("data", "cache"): "", ("run", "output"): "outputs"}
MOST_FILES, MOST_BYTES = 100_000, 2**30  # of an archive that is read; its bytes without compression
EARLIEST = (1980, 1, 1, 0, 0, 0)  # the time of every file, so that equal records give equal archives
# What zipfile raises for an archive that is cut off, changed or encrypted, and for names that a file system refuses.
DAMAGES = (zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, RuntimeError, ValueError, OSError)


def write_archive(folder: Path, runs: Iterable[Path], file: Path) -> None:
    """Write the records of these runs below a folder into one archive.

    Paths of this machine in the settings are left out, and so are models, predictions and pictures.
    """
    records = {place for run in runs for name in OF_RUN if (place := run / name).is_file()}
    for name in OF_STUDY:
        records.update(folder.rglob(name))
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for record in sorted(records):
            entry = zipfile.ZipInfo(record.relative_to(folder).as_posix(), EARLIEST)
            entry.create_system = 3  # Unix, also where another system writes it
            entry.external_attr = (stat.S_IFREG | 0o644) << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, _without_places(record) if record.name == SETTINGS else record.read_bytes())
    atomic_write(file, content.getvalue())


def _without_places(settings: Path) -> str:
    """Return the text of an experiment without the folders of this machine."""
    table = tomllib.loads(settings.read_text(encoding="utf-8"))
    for (section, key), value in PLACES.items():
        if key in table.get(section, {}):
            table[section][key] = value
    return tomli_w.dumps(table)


def folder_of(path: Path) -> Path:
    """Return the folder with the records that a path names: the folder itself, or one with an archive's files.

    The latter is a temporary one, which is removed when the process ends. Raises UserError for an archive that cannot
    be read, that holds no run, or that is refused.
    """
    if not is_archive(path) or not path.is_file():
        return path
    status = path.stat()
    return _extracted(path.absolute(), status.st_size, status.st_mtime_ns)


@cache  # a command may read an archive several times; its size and time tell whether it has changed
def _extracted(file: Path, size: int, modified: int) -> Path:
    """Return a new temporary folder, which is called like the archive and has its records."""
    temporary = tempfile.mkdtemp(prefix="fedsim-archive-")
    atexit.register(shutil.rmtree, temporary, ignore_errors=True)
    folder = Path(temporary, file.name)
    try:
        with zipfile.ZipFile(file) as archive:
            for entry in _records(file, archive.infolist()):
                place = folder / entry.filename
                place.parent.mkdir(parents=True, exist_ok=True)
                with archive.open(entry) as source, place.open("xb") as target:
                    shutil.copyfileobj(source, target)
    except UserError:
        raise
    except DAMAGES as error:
        raise UserError(f"{file}: not a readable archive of a study ({error}); copy it again") from None
    return folder


def _records(file: Path, entries: list[zipfile.ZipInfo]) -> list[zipfile.ZipInfo]:
    """Return the entries that are records; UserError for an archive that is refused, or that holds no run."""
    if len(entries) > MOST_FILES:
        raise UserError(f"{file}: {len(entries):,} files; an archive of a study has at most {MOST_FILES:,}")
    for entry in entries:
        path = PurePosixPath(entry.filename)
        if path.is_absolute() or ".." in path.parts:
            raise UserError(f"{file}: the name {entry.filename!r} leads out of the archive; do not use it")
        if stat.S_ISLNK(entry.external_attr >> 16):
            raise UserError(f"{file}: {entry.filename!r} is a link; make the archive with fedsim archive")
    records = [entry for entry in entries if _name(entry) in OF_RUN + OF_STUDY]
    size = sum(entry.file_size for entry in records)
    if size > MOST_BYTES:
        raise UserError(f"{file}: {size:,} bytes of records; an archive of a study has at most {MOST_BYTES:,}")
    if SETTINGS not in map(_name, records):
        raise UserError(f"{file}: no run in it (a run's folder holds an {SETTINGS})")
    return records


def _name(entry: zipfile.ZipInfo) -> str:
    return PurePosixPath(entry.filename).name
