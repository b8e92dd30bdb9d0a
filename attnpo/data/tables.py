"""Tables of rows: files, folders with a file per split, saved data sets, the Hugging Face hub.

Parquet, folders that ``save_to_disk`` wrote and the hub are read by the ``datasets`` library, JSON and CSV here, row by
row, so that what is wrong with a row costs that row and not the file. Light: commands ask it before torch is imported.
"""

import csv
import gzip
import io
import logging
import re
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable
from zlib import error as ZlibError

from attnpo.config.reader import MISSING, did_you_mean
from attnpo.system.errors import UserError
from attnpo.system.files import Json, parse_json
from attnpo.system.hub_access import hub_unreachable_reason, offline_if_unreachable

if TYPE_CHECKING:
    import datasets

_LOG = logging.getLogger(__name__)

_MARKS = {".csv": ",", ".tsv": "\t"}
_NAMED = {",": "commas", "\t": "tabs", ";": "semicolons"}
DELIMITED = (*_MARKS, *(f"{suffix}.gz" for suffix in _MARKS))

# Cells in which a library may have spelled out a missing value.
_LIKE_MISSING = frozenset({"nan", "null", "none", "n/a", "<na>"})
_SUFFIXES = (".jsonl", ".json", ".jsonl.gz", ".parquet", *DELIMITED)
_SHARD = re.compile(r"-\d{5}-of-\d{5}$")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
# What ``save_to_disk`` leaves in the folder of a data set, and in the folder of one with splits.
_SAVED, _SAVED_SPLITS = "state.json", "dataset_dict.json"


@runtime_checkable
class RowTable(Protocol):
    """Rows by number with named columns: what a ``datasets.Dataset`` and ``Lines`` have in common."""

    @property
    def column_names(self) -> list[str]:
        """Returns names of all columns."""

    def __len__(self) -> int:
        """Returns the number of rows."""

    def select(self, indices: Sequence[int]) -> Iterable[Mapping[str, object]]:
        """Returns the rows with these numbers."""


@dataclass(frozen=True)
class MemoryTable:
    """Rows in memory, each with every column (None where its line has no such key).

    ``headed``: the columns are those that a first line names.
    """

    rows: Sequence[Mapping[str, object]]
    column_names: list[str]
    headed: bool = False

    def __len__(self) -> int:
        return len(self.rows)

    def select(self, indices: Sequence[int]) -> list[Mapping[str, object]]:
        """Returns the rows with these numbers."""
        return [self.rows[index] for index in indices]


@dataclass(frozen=True)
class LinesOnDisk:
    """Rows of files with an object on each line, parsed when they are asked for.

    Row i begins at the byte ``begins[i]`` of ``files[numbers[i]]``. ``path``: the option's value.
    """

    files: Sequence[Path]
    numbers: Sequence[int]
    begins: Sequence[int]
    column_names: list[str]
    path: str

    def __len__(self) -> int:
        return len(self.begins)

    def select(self, indices: Sequence[int]) -> Iterator[Mapping[str, object]]:
        """Yields the rows with these numbers. UserError where a file has changed since it was looked through."""
        with ExitStack() as stack:
            opened = [stack.enter_context(file.open("rb")) for file in self.files]
            for index in indices:
                file = opened[self.numbers[index]]
                file.seek(self.begins[index])
                row = _try_json(_decode(file.readline()))
                if not isinstance(row, dict):
                    name = self.files[self.numbers[index]].name
                    raise UserError(f"data.path={self.path}: {name} was changed while it was read; start again")
                yield {name: row.get(name) for name in self.column_names}


def read_table(path: str, split: str, option: str, subset: str | None = None, revision: str | None = None) -> RowTable:
    """Returns all rows of a file, of a split of a folder, or of a dataset on the hub.

    ``option`` is the config key that names the split, for errors. UserError when nothing is there or it cannot be read.
    """
    place = Path(path).expanduser()
    if place.exists() and subset:
        raise UserError(
            f"data.subset={subset} names a part of a dataset on the hub, and data.path={path} is on this machine: set "
            "data.subset=null and data.path to the folder or file that is meant"
        )
    if place.exists() and revision:
        _LOG.warning("data.path=%s is on this machine: data.revision does nothing", path)
    if place.is_file():
        return _from_files([place], path)
    if (place / _SAVED).is_file():
        return _from_saved(place, path)
    if (place / _SAVED_SPLITS).is_file():
        _require_saved(place, path, split, option)
        return _from_saved(place / split, path)
    if place.is_dir():
        return _from_files(_split_files(place, split, option), path)
    _require_hub_name(path)
    return _from_hub(path, split, subset, revision)


def files_of(path: str, split: str, option: str) -> list[Path] | None:
    """Returns the files that ``read_table`` reads; None for the hub. UserError as there."""
    place = Path(path).expanduser()
    if place.is_file():
        return [place]
    saved = [folder for folder in (place, place / split) if (folder / _SAVED).is_file()]
    if saved:
        return sorted(file for file in saved[0].rglob("*") if file.is_file())
    return _split_files(place, split, option) if place.is_dir() else None


def check_validation(data: Mapping[str, object]) -> None:
    """Raises UserError where a config node ``data`` names data on this machine that lacks validation pairs.

    Reads no row. What the node of another component lacks is not asked for.
    """
    sets = data.get("mix")
    for one in sets.values() if isinstance(sets, dict) and sets else [data]:
        own = {key: value for key, value in one.items() if value is not None} if isinstance(one, dict) else {}
        path, split, share, rows = ({**data, **own}.get(key) for key in ("path", "val_split", "val_share", "val_rows"))
        if isinstance(path, str) and path != MISSING and "val_share" in data and share is None:
            require_validation(path, split if isinstance(split, str) else None, rows is not None)


def require_validation(path: str, split: str | None, rows: bool) -> None:
    """Raises UserError where nothing says which pairs at ``path`` are for validation; ``rows``: their rows are named.

    Reads no row, and asks nothing of the hub.
    """
    place = Path(path).expanduser()
    if is_one_table(path):
        if not rows:
            raise UserError(
                f"data.path={path} is one table, so its rows must be shared out: set data.val_share (0.1 keeps a "
                'tenth of the prompts for validation), or data.train_rows and data.val_rows ("0:90%" and "90%:")'
            )
    elif split is None:
        raise UserError("data.val_split=null: name the validation split, or set data.val_share=0.1 to make one")
    elif place.is_dir():
        try:
            if (place / _SAVED_SPLITS).is_file():
                _require_saved(place, path, split, "data.val_split")
            else:
                _split_files(place, split, "data.val_split")
        except UserError as error:
            raise UserError(f"{error}, or share out the training split with data.val_share=0.1") from error


def is_one_table(path: str) -> bool:
    """Returns whether there is one table without splits at ``path``: a file, or a data set saved without splits."""
    place = Path(path).expanduser()
    return place.is_file() or (place / _SAVED).is_file()


def has_split(path: str, split: str) -> bool:
    """Returns whether a split has this name, True on the hub, which only loading would tell. UserError for no data."""
    place = Path(path).expanduser()
    if not place.exists():
        _require_hub_name(path)
    if not place.is_dir():
        return not place.exists()
    if (place / _SAVED_SPLITS).is_file():
        return split in _saved_splits(place, path)
    return split in _stems(place).values()


def _require_hub_name(path: str) -> None:
    """Raises UserError for a path with nothing at it that can be no name of the hub either."""
    place = Path(path).expanduser()
    if _suffix(place) is not None or not _HUB_NAME.fullmatch(path):
        raise UserError(f"data.path={path}: no such file or folder. {_neighbours(place)}")


def _require_saved(folder: Path, path: str, split: str, option: str) -> None:
    """Raises UserError for a split that a saved data set does not have."""
    names = _saved_splits(folder, path)
    if split not in names:
        raise UserError(
            f"{option}={split}: the data set saved in {folder} has the splits {', '.join(names) or 'none'}"
            f"{_near(split, names, option)}. Name one of them with {option}=NAME"
        )


def _suffix(file: Path) -> str | None:
    """Returns the ending of a file that can be read, None for others."""
    return next((suffix for suffix in _SUFFIXES if file.name.endswith(suffix)), None)


def _split_files(folder: Path, split: str, option: str) -> list[Path]:
    """Returns the files of one split: one file, or its shards in order."""
    stems = _stems(folder)
    files = [file for file, stem in stems.items() if stem == split]
    if not files:
        listed = ", ".join(sorted({str(file.relative_to(folder)) for file in stems})) or "none"
        raise UserError(
            f"{option}={split}: {folder} has no file {split}.jsonl, {split}.csv or {split}.parquet; files it has: "
            f"{listed}{_near(split, list(stems.values()), option)}. Name one of them without its ending with "
            f"{option}=NAME"
        )
    shards = [file for file in files if _SHARD.search(file.name[: -len(_suffix(file) or "")])]
    if (len(files) > 1 and shards != files) or len({(_suffix(file), file.parent) for file in files}) > 1:
        listed = ", ".join(str(file.relative_to(folder)) for file in files)
        raise UserError(f"{option}={split} in {folder} could be any of {listed}; set data.path to the one you mean")
    return files


def _stems(folder: Path) -> dict[Path, str]:
    """Returns the readable files of a folder and of its sub-folder ``data``, and the split that each belongs to."""
    files = [file for place in (folder, folder / "data") if place.is_dir() for file in sorted(place.iterdir())]
    readable = [file for file in files if file.is_file() and _suffix(file) is not None]
    return {file: _SHARD.sub("", file.name[: -len(_suffix(file) or "")]) for file in readable}


def _near(split: str, names: Sequence[str], option: str) -> str:
    """Returns a remark with the split whose name holds ``split``, is held by it, or is nearest to it."""
    holding = next((name for name in names if name in split or split in name), None)
    return f"; did you mean {option}={holding}?" if holding else did_you_mean(split, names, f"{option}=")


def _neighbours(place: Path) -> str:
    """Returns a sentence on what does exist near a path that does not."""
    parent = next(parent for parent in place.absolute().parents if parent.is_dir())
    names = sorted(entry.name + ("/" if entry.is_dir() else "") for entry in parent.iterdir())
    shown = ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")
    return f"{parent} holds: {shown or 'nothing'}"


# ------------------------------------------------------------------------------------------------ the library


@contextmanager
def _quiet() -> Iterator[None]:
    """Opens the library without progress bars and log lines (what matters in them is raised), and back afterwards."""
    import datasets

    shown, level = not datasets.are_progress_bars_disabled(), datasets.logging.get_verbosity()
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        datasets.logging.set_verbosity(level)
        if shown:
            datasets.enable_progress_bars()


def _from_files(files: list[Path], path: str) -> RowTable:
    suffix = _suffix(files[0])
    if suffix is None:
        raise UserError(f"data.path={path}: expected a file ending in {', '.join(_SUFFIXES)}, got {files[0].name}")
    if suffix == ".parquet":
        table = _from_parquet(files, path)
    else:
        table = read_delimited(files, path) if suffix in DELIMITED else read_lines(files, path)
    if not len(table):
        named = ", ".join(file.name for file in files)
        raise UserError(f"data.path={path}: {named} is empty; expected one row per line")
    return table


def _from_parquet(files: list[Path], path: str) -> RowTable:
    import datasets

    try:
        with _quiet():
            table: RowTable = datasets.load_dataset(
                "parquet", data_files={"train": [str(file) for file in files]}, split="train", trust_remote_code=False
            )
        _check_utf8(table)
    except (datasets.exceptions.DatasetsError, OSError, ValueError, TypeError, StopIteration) as error:
        named = ", ".join(file.name for file in files)
        raise UserError(
            f"data.path={path}: {named} cannot be read as parquet: {error.__cause__ or error}. Expected a table with "
            "text that is valid Unicode"
        ) from error
    return table


def _from_saved(folder: Path, path: str) -> RowTable:
    """Returns the rows of a folder that ``Dataset.save_to_disk`` wrote."""
    import datasets

    try:
        with _quiet():
            table = datasets.load_from_disk(str(folder))
        if not isinstance(table, datasets.Dataset):
            raise ValueError("it holds several splits")
        if not len(table):
            raise ValueError("it has no rows")
        _check_utf8(table)
    except (datasets.exceptions.DatasetsError, OSError, ValueError, TypeError, LookupError) as error:
        raise UserError(
            f"data.path={path}: {folder} cannot be read as a saved data set ({error}): expected what "
            "save_to_disk of the library datasets writes, whole and with rows; save or copy it again"
        ) from error
    saved: RowTable = table
    return saved


def _saved_splits(folder: Path, path: str) -> list[str]:
    """Returns the names of the splits of a saved data set."""
    file = folder / _SAVED_SPLITS
    try:
        return [str(name) for name in parse_json(file.read_text(encoding="utf-8"))["splits"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"data.path={path}: {file} cannot be read ({type(error).__name__}: {error}); save or copy the data again"
        ) from error


def _check_utf8(table: "datasets.Dataset") -> None:
    """Raises ValueError where a text of the table is not UTF-8, which ``datasets`` itself notices only on use."""
    for column in table.data.columns:
        for chunk in column.chunks:
            chunk.validate(full=True)


def _from_hub(name: str, split: str, subset: str | None, revision: str | None) -> RowTable:
    import datasets

    try:
        with _quiet(), offline_if_unreachable():
            table: RowTable = datasets.load_dataset(
                name, subset, split=split, revision=revision, trust_remote_code=False
            )
    except (datasets.exceptions.DatasetsError, OSError, ValueError) as error:
        details = "".join(f", {key} {value}" for key, value in (("subset", subset), ("revision", revision)) if value)
        why = (
            f"there is no complete copy in the hub's cache, and {hub_unreachable_reason()}"
            if hub_unreachable_reason()
            else str(error)
        )
        raise UserError(
            f"data.path={name}: neither a file or folder here nor a dataset that could be loaded from the hub "
            f"(split {split}{details}): {why}. To work from files, point data.path at a folder holding "
            f"{split}.jsonl or {split}.parquet"
        ) from error
    return table


# ------------------------------------------------------------------------------------------------ JSON


def read_lines(files: Iterable[Path], path: str) -> RowTable:
    """Returns all rows of JSON files: an object per line, or one array of objects per file.

    A columnar reader gives every column one type: it refuses a file for one lone surrogate, and where it falls back on
    a mixed type, such a text has come back as an empty one (datasets 5.2). Here these are left to the adapters.
    Of plain files with lines no row is held: they are looked through, and parsed again where they are asked for.
    Bytes that are no UTF-8 become lone surrogates, which the adapters refuse row by row.

    Raises:
        UserError: a line holds no JSON object; the text names file and line, ``path`` is the option's value.
    """
    files = list(files)
    if any(file.suffix == ".gz" or _begins_array(file, path) for file in files):
        rows = [row for file in files for row in _json_rows(file, path)]
        names = list(dict.fromkeys(name for row in rows for name in row))
        return MemoryTable([{name: row.get(name) for name in names} for row in rows], names)
    columns, numbers, begins = dict[str, None](), array("q"), array("q")
    for number, file in enumerate(files):
        with _reading(file, path), file.open("rb") as opened:
            for _, begin, row in _lines(opened, file, path):
                columns |= dict.fromkeys(row)
                numbers.append(number)
                begins.append(begin)
    return LinesOnDisk(files, numbers, begins, list(columns), path)


def content_of(file: Path, path: str) -> bytes:
    """Returns the bytes of a file, unpacked where its name ends in .gz. UserError naming file and ``path``."""
    with _reading(file, path):
        return gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()


@contextmanager
def _reading(file: Path, path: str) -> Iterator[None]:
    try:
        yield
    except (OSError, EOFError, ZlibError) as error:
        raise UserError(f"data.path={path}: {file.name} cannot be read ({error}); write or copy it again") from error


def _begins_array(file: Path, path: str) -> bool:
    with _reading(file, path), file.open("rb") as opened:
        return next((text for line in opened if (text := _decode(line).strip("\ufeff \t\r\n"))), "").startswith("[")


def _json_rows(file: Path, path: str) -> Iterator[dict[str, Json]]:
    content = content_of(file, path)
    text = _decode(content)
    whole = _try_json(text) if text.lstrip().startswith("[") else None
    if not isinstance(whole, list):
        yield from (row for _, _, row in _lines(io.BytesIO(content), file, path))
        return
    for number, row in enumerate(whole, 1):
        yield _object(row, number, file, path)


def _lines(lines: Iterable[bytes], file: Path, path: str) -> Iterator[tuple[int, int, dict[str, Json]]]:
    """Yields the number of each line that is not blank, its first byte and what it holds."""
    begin = 0
    for number, line in enumerate(lines, 1):  # of bytes: U+2028 and others end no line of JSON
        text = _decode(line).removesuffix("\n")
        if text.strip():
            row = _try_json(text)
            if isinstance(row, Exception):
                raise UserError(
                    f"data.path={path}: {file.name}, line {number} is not JSON ({row}): {text[:40]!r}; expected one "
                    "JSON object per line, in UTF-8. A file that was cut off must be written or copied again"
                ) from row
            yield number, begin, _object(row, number, file, path)
        begin += len(line)


def _object(row: Json, number: int, file: Path, path: str) -> dict[str, Json]:
    if not isinstance(row, dict):
        raise UserError(
            f"data.path={path}: {file.name}, line {number} holds {type(row).__name__} {str(row)[:40]!r}, expected "
            "one JSON object per row"
        )
    return row


def _decode(content: bytes) -> str:
    """Returns text with what is no UTF-8 as lone surrogates, without a mark of byte order at its beginning."""
    return content.decode("utf-8", errors="surrogateescape").removeprefix("\ufeff")


def _try_json(text: str) -> Json | Exception:
    """Returns the value of a JSON text, or the exception that says why it is none."""
    try:
        value: Json = parse_json(text)
    except ValueError as error:
        return error
    return value


# ------------------------------------------------------------------------------------------------ CSV and TSV


def read_delimited(files: Iterable[Path], path: str) -> MemoryTable:
    """Returns all rows of CSV or TSV files of one header; a row's empty cells are None, as libraries mean them.

    No cell is guessed to be a number, a date or a missing value: "42" and "NaN" stay texts.
    Logs how many cells hold nothing but a word for a missing value, which are texts like others.

    Raises:
        UserError: a file is no UTF-8, its header lacks or repeats a name, is divided by another mark or differs from
            that of the first file, or a row has another number of cells; the text names file and line.
    """
    rows: list[dict[str, object]] = []
    names: list[str] | None = None
    for file in files:
        where = f"data.path={path}: {file.name}"
        cells = _cells(file, path, where)
        header = next(cells, None)
        if header is None:
            continue
        found = _header_names(header[1], _mark(file), where)
        if names is not None and found != names:
            raise UserError(
                f"{where} has the columns {', '.join(found)}, and the first file has {', '.join(names)}: give all "
                "files of a split one header"
            )
        names = found
        rows += _csv_rows(cells, names, where)
    _tell_missing(rows, path)
    named = [name for name in names or [] if name]
    return MemoryTable([{name: row[name] for name in named} for row in rows], named, headed=True)


def _mark(file: Path) -> str:
    return _MARKS[Path(file.name.removesuffix(".gz")).suffix]


def _cells(file: Path, path: str, where: str) -> Iterator[tuple[int, list[str]]]:
    """Yields the cells of each row that is not blank, with the number of its last line."""
    try:
        text = content_of(file, path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise UserError(
            f"{where}, line {line} is not UTF-8 (byte {error.object[error.start]:#04x}): save the file as UTF-8, which "
            'spreadsheets call "CSV UTF-8"'
        ) from error
    before = csv.field_size_limit(max(len(text), 1))
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=_mark(file), strict=True)
    try:
        yield from [(reader.line_num, row) for row in reader if row]
    except csv.Error as error:
        raise UserError(
            f"{where}, line {reader.line_num} cannot be read ({error}): put a cell that holds quotes, line breaks or "
            'the dividing mark between quotes, and write a quote inside it twice ("")'
        ) from error
    finally:
        csv.field_size_limit(before)


def _header_names(header: list[str], mark: str, where: str) -> list[str]:
    """Returns the names of the columns; "" only for the first, where libraries put the row's number."""
    names = [name.strip() for name in header]
    other = next((one for one in _NAMED if one != mark and len(names) == 1 and one in names[0]), None)
    if other is not None:
        raise UserError(
            f"{where}, line 1 is divided by {_NAMED[other]}, expected {_NAMED[mark]}: save it with {_NAMED[mark]}"
            + (", or name it .tsv" if other == "\t" else "")
        )
    unnamed = [place for place, name in enumerate(names[1:], 2) if not name]
    if unnamed:
        raise UserError(
            f"{where}, line 1 names no column {unnamed[0]}: expected a name for every column in the first line, such "
            f"as {mark.join(('prompt', 'chosen', 'rejected'))!r}"
        )
    twice = sorted(name for name, count in Counter(names).items() if count > 1)
    if twice:
        raise UserError(f"{where}, line 1 names {', '.join(twice)} twice: give every column its own name")
    return names


def _csv_rows(cells: Iterator[tuple[int, list[str]]], names: list[str], where: str) -> Iterator[dict[str, object]]:
    for line, row in cells:
        if len(row) != len(names):
            raise UserError(
                f"{where}, the row that ends in line {line} has {len(row)} cells and the first line names "
                f"{len(names)} columns: put a cell that holds the dividing mark or a line break between quotes"
            )
        yield {name: cell or None for name, cell in zip(names, row, strict=True)}


def _tell_missing(rows: list[dict[str, object]], path: str) -> None:
    """Warns of cells that say in a word that they are missing."""
    like = [
        number
        for number, row in enumerate(rows)
        if any(isinstance(cell, str) and cell.strip().lower() in _LIKE_MISSING for cell in row.values())
    ]
    if like:
        _LOG.warning(
            "data.path=%s: %d rows have a cell that is nothing but NaN, null, None or N/A (first: row %d), read as a "
            "text: leave cells empty where a value is missing",
            path,
            len(like),
            like[0],
        )
