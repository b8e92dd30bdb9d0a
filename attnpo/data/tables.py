"""Reads tables of rows from files, folders with one file per split, saved datasets and the Hugging Face hub.

Parquet, folders written by ``save_to_disk`` and hub datasets are read with the ``datasets`` library. JSON and CSV are
read here row by row, so that an error affects one row rather than the whole file. Has few imports because commands use
this module before they import torch.
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

# Texts that libraries write for missing values.
_LIKE_MISSING = frozenset({"nan", "null", "none", "n/a", "<na>"})
_SUFFIXES = (".jsonl", ".json", ".jsonl.gz", ".parquet", *DELIMITED)
_SHARD = re.compile(r"-\d{5}-of-\d{5}$")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
# Files that ``save_to_disk`` writes for a dataset, and for a dataset with splits.
_SAVED, _SAVED_SPLITS = "state.json", "dataset_dict.json"


@runtime_checkable
class RowTable(Protocol):
    """Rows accessible by row number, with named columns; implemented by ``datasets.Dataset`` and ``MemoryTable``."""

    @property
    def column_names(self) -> list[str]:
        """Returns the names of all columns."""

    def __len__(self) -> int:
        """Returns the number of rows."""

    def select(self, indices: Sequence[int]) -> Iterable[Mapping[str, object]]:
        """Returns the rows with the given row numbers."""


@dataclass(frozen=True)
class MemoryTable:
    """Rows kept in memory, each with a value for every column (None for missing keys).

    ``headed``: whether the column names come from a header line.
    """

    rows: Sequence[Mapping[str, object]]
    column_names: list[str]
    headed: bool = False

    def __len__(self) -> int:
        return len(self.rows)

    def select(self, indices: Sequence[int]) -> list[Mapping[str, object]]:
        """Returns the rows with the given row numbers."""
        return [self.rows[index] for index in indices]


@dataclass(frozen=True)
class JsonLinesOnDisk:
    """Rows of JSON Lines files, parsed on access.

    Row i starts at byte ``begins[i]`` of ``files[numbers[i]]``. ``path``: value of ``data.path``, for error messages.
    """

    files: Sequence[Path]
    numbers: Sequence[int]
    begins: Sequence[int]
    column_names: list[str]
    path: str

    def __len__(self) -> int:
        return len(self.begins)

    def select(self, indices: Sequence[int]) -> Iterator[Mapping[str, object]]:
        """Yields the rows with the given row numbers.

        Raises:
            UserError: a file has changed since it was scanned.
        """
        with ExitStack() as stack:
            opened = [stack.enter_context(file.open("rb")) for file in self.files]
            for index in indices:
                file = opened[self.numbers[index]]
                file.seek(self.begins[index])
                row = _parse_json_or_error(_decode(file.readline()))
                if not isinstance(row, dict):
                    name = self.files[self.numbers[index]].name
                    raise UserError(
                        f"data.path={self.path}: {name} changed while it was being read; run the command again"
                    )
                yield {name: row.get(name) for name in self.column_names}


def read_table(path: str, split: str, option: str, subset: str | None = None, revision: str | None = None) -> RowTable:
    """Reads all rows of a file, of a split of a folder, or of a dataset on the hub.

    ``option`` is the config key that sets ``split``, for error messages.

    Raises:
        UserError: no data are found, or the data cannot be read.
    """
    place = Path(path).expanduser()
    if place.exists() and subset:
        raise UserError(
            f"data.subset={subset} applies to datasets on the hub, but data.path={path} is a local path: set "
            "data.subset=null, and data.path to the folder or file you mean"
        )
    if place.exists() and revision:
        _LOG.warning("data.path=%s is a local path: data.revision has no effect", path)
    if place.is_file():
        return _read_files([place], path)
    if (place / _SAVED).is_file():
        return _read_saved(place, path)
    if (place / _SAVED_SPLITS).is_file():
        _check_saved_split(place, path, split, option)
        return _read_saved(place / split, path)
    if place.is_dir():
        return _read_files(_split_files(place, split, option), path)
    _check_hub_name(path)
    return _load_from_hub(path, split, subset, revision)


def list_files(path: str, split: str, option: str) -> list[Path] | None:
    """Returns the files that ``read_table`` reads; None for a dataset on the hub.

    Raises:
        UserError: see ``read_table``.
    """
    place = Path(path).expanduser()
    if place.is_file():
        return [place]
    saved = [folder for folder in (place, place / split) if (folder / _SAVED).is_file()]
    if saved:
        return sorted(file for file in saved[0].rglob("*") if file.is_file())
    return _split_files(place, split, option) if place.is_dir() else None


def check_validation(data: Mapping[str, object]) -> None:
    """Checks, without reading rows, that the local data of a config node ``data`` have validation pairs.

    Skips the ``data`` nodes of other components.

    Raises:
        UserError: a set has no validation pairs.
    """
    sets = data.get("mix")
    for one in sets.values() if isinstance(sets, dict) and sets else [data]:
        own = {key: value for key, value in one.items() if value is not None} if isinstance(one, dict) else {}
        path, split, share, rows = ({**data, **own}.get(key) for key in ("path", "val_split", "val_share", "val_rows"))
        if isinstance(path, str) and path != MISSING and "val_share" in data and share is None:
            check_validation_rows(path, split if isinstance(split, str) else None, rows is not None)


def check_validation_rows(path: str, split: str | None, rows: bool) -> None:
    """Checks, without reading rows or accessing the hub, that ``path`` has validation pairs.

    ``rows``: whether the config selects the rows for validation.

    Raises:
        UserError: ``path`` has no validation pairs.
    """
    place = Path(path).expanduser()
    if is_single_table(path):
        if not rows:
            raise UserError(
                f"data.path={path} is a single table, so its rows must be split into training and validation sets: set "
                "data.val_share (0.1 uses a tenth of the prompts for validation), or data.train_rows and data.val_rows "
                '("0:90%" and "90%:")'
            )
    elif split is None:
        raise UserError("data.val_split=null: name the validation split, or set data.val_share=0.1 to create one")
    elif place.is_dir():
        try:
            if (place / _SAVED_SPLITS).is_file():
                _check_saved_split(place, path, split, "data.val_split")
            else:
                _split_files(place, split, "data.val_split")
        except UserError as error:
            raise UserError(f"{error}, or split the training data with data.val_share=0.1") from error


def is_single_table(path: str) -> bool:
    """Returns whether ``path`` is one table without splits: a file, or a dataset saved without splits."""
    place = Path(path).expanduser()
    return place.is_file() or (place / _SAVED).is_file()


def has_split(path: str, split: str) -> bool:
    """Returns whether the data have this split; always True for hub datasets, which are not checked.

    Raises:
        UserError: no data are found.
    """
    place = Path(path).expanduser()
    if not place.exists():
        _check_hub_name(path)
    if not place.is_dir():
        return not place.exists()
    if (place / _SAVED_SPLITS).is_file():
        return split in _read_split_names(place, path)
    return split in _find_split_files(place).values()


def _check_hub_name(path: str) -> None:
    """Raises UserError if nothing exists at ``path`` and it is not a valid hub name either."""
    place = Path(path).expanduser()
    if _readable_suffix(place) is not None or not _HUB_NAME.fullmatch(path):
        raise UserError(f"data.path={path}: no such file or folder. {_describe_parent_folder(place)}")


def _check_saved_split(folder: Path, path: str, split: str, option: str) -> None:
    """Raises UserError if a saved dataset does not have the split."""
    names = _read_split_names(folder, path)
    if split not in names:
        raise UserError(
            f"{option}={split}: the dataset saved in {folder} has the splits {', '.join(names) or 'none'}"
            f"{_suggest_split(split, names, option) or '.'} Choose one with {option}=NAME"
        )


def _readable_suffix(file: Path) -> str | None:
    """Returns the extension of a file whose format can be read; None for other files."""
    return next((suffix for suffix in _SUFFIXES if file.name.endswith(suffix)), None)


def _split_files(folder: Path, split: str, option: str) -> list[Path]:
    """Returns the files of one split: one file, or its shards in order."""
    stems = _find_split_files(folder)
    files = [file for file, stem in stems.items() if stem == split]
    if not files:
        listed = ", ".join(sorted({str(file.relative_to(folder)) for file in stems})) or "none"
        raise UserError(
            f"{option}={split}: {folder} has no file {split}.jsonl, {split}.csv or {split}.parquet; its files: "
            f"{listed}{_suggest_split(split, list(stems.values()), option) or '.'} Choose one with {option}=NAME, "
            "without the file extension"
        )
    shards = [file for file in files if _SHARD.search(file.name[: -len(_readable_suffix(file) or "")])]
    if (len(files) > 1 and shards != files) or len({(_readable_suffix(file), file.parent) for file in files}) > 1:
        listed = ", ".join(str(file.relative_to(folder)) for file in files)
        raise UserError(f"{option}={split} in {folder} is ambiguous: {listed}; set data.path to the file you mean")
    return files


def _find_split_files(folder: Path) -> dict[Path, str]:
    """Returns the readable files of a folder and its sub-folder ``data``, with the split of each."""
    files = [file for place in (folder, folder / "data") if place.is_dir() for file in sorted(place.iterdir())]
    readable = [file for file in files if file.is_file() and _readable_suffix(file) is not None]
    return {file: _SHARD.sub("", file.name[: -len(_readable_suffix(file) or "")]) for file in readable}


def _suggest_split(split: str, names: Sequence[str], option: str) -> str:
    """Returns a hint with the most similar split name."""
    holding = next((name for name in names if name in split or split in name), None)
    return f"; did you mean {option}={holding}?" if holding else did_you_mean(split, names, f"{option}=")


def _describe_parent_folder(place: Path) -> str:
    """Returns a sentence that lists the contents of the closest existing parent folder."""
    parent = next(parent for parent in place.absolute().parents if parent.is_dir())
    names = sorted(entry.name + ("/" if entry.is_dir() else "") for entry in parent.iterdir())
    shown = ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")
    return f"{parent} contains: {shown or 'nothing'}"


# ----------------------------------------------------------------------------------------------- the datasets library


@contextmanager
def _silence_datasets() -> Iterator[None]:
    """Disables progress bars and log output of ``datasets`` inside the context; errors are still raised."""
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


def _read_files(files: list[Path], path: str) -> RowTable:
    suffix = _readable_suffix(files[0])
    if suffix is None:
        raise UserError(
            f"data.path={path}: expected a file with the extension {', '.join(_SUFFIXES)}, got {files[0].name}"
        )
    if suffix == ".parquet":
        table = _read_parquet(files, path)
    else:
        table = read_csv(files, path) if suffix in DELIMITED else read_json(files, path)
    if not len(table):
        named = ", ".join(file.name for file in files)
        raise UserError(f"data.path={path}: {named} is empty; expected one row per line")
    return table


def _read_parquet(files: list[Path], path: str) -> RowTable:
    import datasets

    try:
        with _silence_datasets():
            table: RowTable = datasets.load_dataset(
                "parquet", data_files={"train": [str(file) for file in files]}, split="train", trust_remote_code=False
            )
        _check_utf8(table)
    except (datasets.exceptions.DatasetsError, OSError, ValueError, TypeError, StopIteration) as error:
        named = ", ".join(file.name for file in files)
        raise UserError(
            f"data.path={path}: {named} cannot be read as Parquet: {error.__cause__ or error}. Expected a table whose "
            "text is valid Unicode"
        ) from error
    return table


def _read_saved(folder: Path, path: str) -> RowTable:
    """Reads the rows of a folder written by ``Dataset.save_to_disk``."""
    import datasets

    try:
        with _silence_datasets():
            table = datasets.load_from_disk(str(folder))
        if not isinstance(table, datasets.Dataset):
            raise ValueError("it contains several splits")
        if not len(table):
            raise ValueError("it has no rows")
        _check_utf8(table)
    except (datasets.exceptions.DatasetsError, OSError, ValueError, TypeError, LookupError) as error:
        raise UserError(
            f"data.path={path}: {folder} cannot be read as a saved dataset ({error}): expected a complete, "
            "non-empty dataset written by save_to_disk from the datasets library; save or copy it again"
        ) from error
    saved: RowTable = table
    return saved


def _read_split_names(folder: Path, path: str) -> list[str]:
    """Returns the split names of a saved dataset."""
    file = folder / _SAVED_SPLITS
    try:
        return [str(name) for name in parse_json(file.read_text(encoding="utf-8"))["splits"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"data.path={path}: {file} cannot be read ({type(error).__name__}: {error}); save or copy the data again"
        ) from error


def _check_utf8(table: "datasets.Dataset") -> None:
    """Raises ValueError if a string is not UTF-8; ``datasets`` itself checks only on access."""
    for column in table.data.columns:
        for chunk in column.chunks:
            chunk.validate(full=True)


def _load_from_hub(name: str, split: str, subset: str | None, revision: str | None) -> RowTable:
    import datasets

    try:
        with _silence_datasets(), offline_if_unreachable():
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
            f"data.path={name}: not a local file or folder, and loading it from the hub failed "
            f"(split {split}{details}): {why}. To use local files, set data.path to a folder with "
            f"{split}.jsonl or {split}.parquet"
        ) from error
    return table


# ------------------------------------------------------------------------------------------------ JSON


def read_json(files: Iterable[Path], path: str) -> RowTable:
    """Reads all rows of JSON files with one object per line, or one array of objects per file.

    Columnar readers give each column one type: they reject a whole file for a single lone surrogate, and if they fall
    back to a mixed type, strings with a lone surrogate may become empty (datasets 5.2). Here the adapters handle such
    strings row by row. Rows of uncompressed line files are not kept in memory: the files are scanned, and rows are
    parsed again on access. Bytes that are not UTF-8 become lone surrogates; the adapters reject rows that contain any.

    Raises:
        UserError: a line is not a JSON object; the message names file and line; ``path`` is the value of ``data.path``.
    """
    files = list(files)
    if any(file.suffix == ".gz" or _is_json_array(file, path) for file in files):
        rows = [row for file in files for row in _read_json_rows(file, path)]
        names = list(dict.fromkeys(name for row in rows for name in row))
        return MemoryTable([{name: row.get(name) for name in names} for row in rows], names)
    columns, numbers, begins = dict[str, None](), array("q"), array("q")
    for number, file in enumerate(files):
        with _wrap_read_errors(file, path), file.open("rb") as opened:
            for _, begin, row in _iter_json_lines(opened, file, path):
                columns |= dict.fromkeys(row)
                numbers.append(number)
                begins.append(begin)
    return JsonLinesOnDisk(files, numbers, begins, list(columns), path)


def read_file_bytes(file: Path, path: str) -> bytes:
    """Returns the content of a file as bytes, decompressed if the file name ends in .gz.

    Raises:
        UserError: the file cannot be read; the message contains the file's name and ``path``.
    """
    with _wrap_read_errors(file, path):
        return gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()


@contextmanager
def _wrap_read_errors(file: Path, path: str) -> Iterator[None]:
    try:
        yield
    except (OSError, EOFError, ZlibError) as error:
        raise UserError(f"data.path={path}: {file.name} cannot be read ({error}); write or copy it again") from error


def _is_json_array(file: Path, path: str) -> bool:
    with _wrap_read_errors(file, path), file.open("rb") as opened:
        return next((text for line in opened if (text := _decode(line).strip("\ufeff \t\r\n"))), "").startswith("[")


def _read_json_rows(file: Path, path: str) -> Iterator[dict[str, Json]]:
    content = read_file_bytes(file, path)
    text = _decode(content)
    whole = _parse_json_or_error(text) if text.lstrip().startswith("[") else None
    if not isinstance(whole, list):
        yield from (row for _, _, row in _iter_json_lines(io.BytesIO(content), file, path))
        return
    for number, row in enumerate(whole, 1):
        yield _check_object(row, number, file, path)


def _iter_json_lines(lines: Iterable[bytes], file: Path, path: str) -> Iterator[tuple[int, int, dict[str, Json]]]:
    """Yields (line number, position of the first byte, object) for each line that is not empty."""
    begin = 0
    for number, line in enumerate(lines, 1):  # bytes, because U+2028 and others do not end a line of JSON
        text = _decode(line).removesuffix("\n")
        if text.strip():
            row = _parse_json_or_error(text)
            if isinstance(row, Exception):
                raise UserError(
                    f"data.path={path}: {file.name}, line {number} is not JSON ({row}): {text[:40]!r}; expected one "
                    "JSON object per line, in UTF-8. If the file was truncated, write or copy it again"
                ) from row
            yield number, begin, _check_object(row, number, file, path)
        begin += len(line)


def _check_object(row: Json, number: int, file: Path, path: str) -> dict[str, Json]:
    if not isinstance(row, dict):
        raise UserError(
            f"data.path={path}: {file.name}, line {number} contains {type(row).__name__} {str(row)[:40]!r}; expected "
            "one JSON object per row"
        )
    return row


def _decode(content: bytes) -> str:
    """Decodes UTF-8 and removes any byte order mark; invalid bytes become lone surrogates."""
    return content.decode("utf-8", errors="surrogateescape").removeprefix("\ufeff")


def _parse_json_or_error(text: str) -> Json | Exception:
    """Parses a JSON string; returns the exception if the string is invalid."""
    try:
        value: Json = parse_json(text)
    except ValueError as error:
        return error
    return value


# ------------------------------------------------------------------------------------------------ CSV and TSV


def read_csv(files: Iterable[Path], path: str) -> MemoryTable:
    """Reads all rows of CSV or TSV files with the same header; empty cells become None, as in other libraries.

    Cells are never converted to numbers, dates or missing values: "42" and "NaN" remain strings. Logs the number of
    rows with a cell like "NaN" or "null".

    Raises:
        UserError: a file is not UTF-8; a header is incomplete, repeats a name, uses a different delimiter or differs
            from the first file's header; or a row has more or fewer cells than the header. The message names file and
            line.
    """
    rows: list[dict[str, object]] = []
    names: list[str] | None = None
    for file in files:
        where = f"data.path={path}: {file.name}"
        cells = _iter_csv_rows(file, path, where)
        header = next(cells, None)
        if header is None:
            continue
        found = _parse_header(header[1], _delimiter_for(file), where)
        if names is not None and found != names:
            raise UserError(
                f"{where} has the columns {', '.join(found)}, but the first file has {', '.join(names)}: all "
                "files of a split need the same header"
            )
        names = found
        rows += _rows_to_dicts(cells, names, where)
    _warn_about_null_words(rows, path)
    named = [name for name in names or [] if name]
    return MemoryTable([{name: row[name] for name in named} for row in rows], named, headed=True)


def _delimiter_for(file: Path) -> str:
    return _MARKS[Path(file.name.removesuffix(".gz")).suffix]


def _iter_csv_rows(file: Path, path: str, where: str) -> Iterator[tuple[int, list[str]]]:
    """Yields (number of the row's last line, cells) for each row that is not empty."""
    try:
        text = read_file_bytes(file, path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise UserError(
            f"{where}, line {line} is not UTF-8 (byte {error.object[error.start]:#04x}): save the file as UTF-8, which "
            'spreadsheets call "CSV UTF-8"'
        ) from error
    before = csv.field_size_limit(max(len(text), 1))
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=_delimiter_for(file), strict=True)
    try:
        yield from [(reader.line_num, row) for row in reader if row]
    except csv.Error as error:
        raise UserError(
            f"{where}, line {reader.line_num} cannot be read ({error}): put cells that contain quotes, line breaks or "
            'the delimiter in quotes, and double each quote inside them ("")'
        ) from error
    finally:
        csv.field_size_limit(before)


def _parse_header(header: list[str], mark: str, where: str) -> list[str]:
    """Returns the column names; only the first may be empty because some libraries write the row index there."""
    names = [name.strip() for name in header]
    other = next((one for one in _NAMED if one != mark and len(names) == 1 and one in names[0]), None)
    if other is not None:
        raise UserError(
            f"{where}, line 1: fields are separated by {_NAMED[other]}, not {_NAMED[mark]}: save the file with "
            f"{_NAMED[mark]}" + (", or name it .tsv" if other == "\t" else "")
        )
    unnamed = [place for place, name in enumerate(names[1:], 2) if not name]
    if unnamed:
        raise UserError(
            f"{where}, line 1 has no name for column {unnamed[0]}: the first line must name every column, "
            f"e.g. {mark.join(('prompt', 'chosen', 'rejected'))}"
        )
    twice = sorted(name for name, count in Counter(names).items() if count > 1)
    if twice:
        raise UserError(f"{where}, line 1 repeats {', '.join(twice)}: give every column a unique name")
    return names


def _rows_to_dicts(cells: Iterator[tuple[int, list[str]]], names: list[str], where: str) -> Iterator[dict[str, object]]:
    for line, row in cells:
        if len(row) != len(names):
            raise UserError(
                f"{where}, the row ending on line {line} has {len(row)} cells but the first line names "
                f"{len(names)} columns: put cells that contain the delimiter or a line break in quotes"
            )
        yield {name: cell or None for name, cell in zip(names, row, strict=True)}


def _warn_about_null_words(rows: list[dict[str, object]], path: str) -> None:
    """Warns if cells contain only a word such as "NaN" or "null", because such words are read as strings."""
    like = [
        number
        for number, row in enumerate(rows)
        if any(isinstance(cell, str) and cell.strip().lower() in _LIKE_MISSING for cell in row.values())
    ]
    if like:
        _LOG.warning(
            "data.path=%s: %d rows have a cell containing only NaN, null, None or N/A (first: row %d), which is read "
            "as text; leave cells empty if their values are missing",
            path,
            len(like),
            like[0],
        )
