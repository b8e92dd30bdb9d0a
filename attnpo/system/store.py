"""Content-addressed store of per-pair arrays, e.g. raw weight rows and reference log-probabilities.

On disk, ``<root>/<kind>/<digest of the key>/`` contains ``key.json`` and, per append, a Parquet shard ``<content
digest>.parquet`` with its entry ``<content digest>.json`` (key, checksum, pairs, columns). Files are renamed into
place, the shard before its entry, so readers only see complete shards. Several processes may append, and folders with
the same name can be merged by copying files. Shards that are damaged, belong to a different key, or have no key
(written by an older version) count as missing, with a warning. Shards may contain different columns of the same pair;
reads merge the columns.
"""

import hashlib
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from attnpo.system.credentials import identify
from attnpo.system.errors import UserError
from attnpo.system.files import digest, file_digest, find_differences, parse_json, write_atomically

logger = logging.getLogger(__name__)

Array = npt.NDArray[np.generic]
Cell = bool | int | float | str | Array | torch.Tensor | Mapping[str, "Cell"]
"""Value of one pair in one column: a number, a string, a one-dimensional array, or a dict of these. Tensors are stored
as arrays."""
Rows = Mapping[str, Mapping[str, Cell]]
PAIR_ID = "pair_id"
KEY_FILE = "key.json"
KEY_MARK = b"attnpo_key"  # in the schema's metadata of a shard


@dataclass(frozen=True)
class Store:
    """Folder of tables; nothing is written until the first append."""

    root: Path
    _tables: dict[Path, "StoreTable"] = field(default_factory=dict, init=False, repr=False, compare=False)

    def table(self, kind: str, key: Mapping[str, object]) -> "StoreTable":
        """Returns the table of ``kind`` for ``key``, the JSON-serialisable settings that determine its values."""
        folder = Path(self.root) / kind / _folder_name(key)
        return self._tables.setdefault(folder, StoreTable(folder, dict(key)))


@dataclass(frozen=True)
class _Shard:
    """Index entry of a shard; ``rows`` maps a pair id to its row in the file."""

    name: str
    sha256: str
    rows: dict[str, int]
    columns: frozenset[str]
    seconds: float | None


class _ForeignShard(Exception):
    """Raised for an intact shard that does not belong to the table; the message states the reason."""


class StoreTable:
    """Table of rows by pair id for one key, in append-only shards; safe for concurrent readers and writers."""

    def __init__(self, folder: Path, key: dict[str, object]) -> None:
        self.folder = folder
        self.key = key
        self._digest = digest(key)
        self._shards: dict[str, _Shard] = {}
        self._refused: set[str] = set()
        self._key_checked = False

    # ------------------------------------------------------------------------------------------- looking

    def columns_present(self, pair_ids: Iterable[str]) -> dict[str, set[str]]:
        """Returns the stored columns of each pair id; an empty set for unknown ids."""
        present: dict[str, set[str]] = {pair_id: set() for pair_id in pair_ids}
        for shard in self._load_index():
            for pair_id in present.keys() & shard.rows.keys():
                present[pair_id] |= shard.columns
        return present

    def missing_pairs(self, pair_ids: Sequence[str], columns: Iterable[str]) -> list[str]:
        """Returns the pair ids that lack any of ``columns``, in order and without duplicates."""
        wanted = set(columns)
        present = self.columns_present(pair_ids)
        return [pair_id for pair_id, have in present.items() if wanted - have]

    def seconds_per_pair(self, pair_ids: Iterable[str]) -> float | None:
        """Returns the mean recorded compute time of these pairs in seconds; None if none was recorded."""
        wanted = set(pair_ids)
        timed = [one for one in self._load_index() if one.seconds is not None and wanted & one.rows.keys()]
        pairs = sum(len(one.rows) for one in timed)
        return sum(one.seconds or 0.0 for one in timed) / pairs if pairs else None

    def nearest_difference(self) -> str | None:
        """Returns the first difference from the most similar key of another table of this kind, or None.

        Example: "judge.dtype: stored float32, requested bfloat16".
        """
        paths = sorted(self.folder.parent.glob(f"*/{KEY_FILE}"))
        keys = ((path, key) for path in paths if (key := _read_json(path)) is not None)
        others = [find_differences(key, self.key) for path, key in keys if _folder_name(key) == path.parent.name]
        nearest = min(filter(None, others), key=len, default=None)
        return None if nearest is None else "{}: stored {}, requested {}".format(*nearest[0])

    # ------------------------------------------------------------------------------------------- reading

    def read(
        self, pair_ids: Sequence[str], columns: Sequence[str], where_stored: Sequence[str] = ()
    ) -> dict[str, dict[str, Cell]]:
        """Reads ``columns`` of each pair id: lists as one-dimensional NumPy arrays, numbers as Python numbers.

        ``"column.field"`` reads only that field. Columns in ``where_stored`` are optional.

        Raises:
            UserError: a required column is missing for a pair.
        """
        if not pair_ids:
            return {}
        absent = self.missing_pairs(pair_ids, map(_base_column, columns))
        if absent:
            raise UserError(
                f"store {self.folder}: {len(absent)} of {len(set(pair_ids))} pairs lack some of the columns "
                f"{', '.join(columns)} (first: {', '.join(absent[:3])}): run attnpo.weigh with this config first"
            )
        cells: dict[str, dict[str, Cell]] = {pair_id: {} for pair_id in pair_ids}
        for shard in self._load_index():
            here = cells.keys() & shard.rows.keys()
            take = [
                name
                for name in (*columns, *where_stored)
                if _base_column(name) in shard.columns and any(_base_column(name) not in cells[one] for one in here)
            ]
            if not take:
                continue
            data = self._load(shard, take)
            for name in dict.fromkeys(map(_base_column, take)):
                values = _Column(data.column(name))
                for pair_id in here:
                    if name not in cells[pair_id]:
                        cells[pair_id][name] = values[shard.rows[pair_id]]
        return cells

    def _load(self, shard: _Shard, columns: list[str]) -> pa.Table:
        path = self.folder / f"{shard.name}.parquet"
        try:
            with pq.ParquetFile(path) as stored:  # read_table would import pyarrow's datasets and pandas
                return stored.read(columns=columns)
        except (OSError, pa.ArrowException) as error:
            del self._shards[shard.name]
            raise UserError(
                f"store: shard {path} was intact when this run started but cannot be read now ({error}): restart the "
                "run to recompute the shard's rows"
            ) from error

    # ------------------------------------------------------------------------------------------- writing

    def append(self, rows: Rows, seconds: float | None = None) -> None:
        """Stores ``rows``: pair id -> column -> number, string, one-dimensional array, or dict of these.

        Float32 values are stored bit for bit. Within a call, all values of a column must have one type. ``seconds``:
        total compute time of the rows.

        Raises:
            UserError: the rows cannot be written to disk.
        """
        groups: dict[tuple[str, ...], list[str]] = {}
        for pair_id, row in rows.items():
            groups.setdefault(tuple(sorted(row)), []).append(pair_id)
        for columns, pair_ids in groups.items():
            arrays = [_to_arrow([rows[pair_id][name] for pair_id in pair_ids]) for name in columns]
            data = pa.table([pa.array(pair_ids, pa.string()), *arrays], names=[PAIR_ID, *columns])
            data = data.replace_schema_metadata({KEY_MARK: self._digest})
            share = None if seconds is None else seconds * len(pair_ids) / len(rows)
            self._write_shard(data, pair_ids, columns, share)

    def _write_shard(
        self, data: pa.Table, pair_ids: Sequence[str], columns: Sequence[str], seconds: float | None
    ) -> None:
        buffer = pa.BufferOutputStream()
        pq.write_table(data, buffer, compression="zstd", use_dictionary=False, row_group_size=max(1, len(pair_ids)))
        content = buffer.getvalue().to_pybytes()
        checksum = hashlib.sha256(content).hexdigest()
        name, size, (pairs, names) = checksum[:20], len(content), (list(pair_ids), list(columns))
        entry = {"key": self._digest, "sha256": checksum, "bytes": size, "pairs": pairs, "columns": names}
        if seconds is not None:
            entry["seconds"] = round(seconds, 4)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if not (self.folder / KEY_FILE).exists():
                self._write_key()
            write_atomically(self.folder / f"{name}.parquet", content)
            write_atomically(self.folder / f"{name}.json", json.dumps(entry).encode())
        except OSError as error:
            raise UserError(
                f"store: {len(content)} bytes cannot be written to {self.folder} ({error}); earlier rows are intact: "
                "free up space there, or choose a different folder with store=FOLDER"
            ) from error
        self._refused.discard(name)

    # ------------------------------------------------------------------------------------------- index

    def _load_index(self) -> list[_Shard]:
        """Loads new entries and returns all intact shards, sorted by name; each shard is verified once per process."""
        names = {path.stem for path in self.folder.glob("*.json")} - {Path(KEY_FILE).stem}
        for name in self._shards.keys() - names:
            del self._shards[name]
        strangers: dict[str, list[str]] = {}
        for name in sorted(names - self._shards.keys() - self._refused):
            self._refused.add(name)
            try:
                self._shards[name] = self._check_shard(name)
                self._refused.discard(name)
            except _ForeignShard as stranger:
                strangers.setdefault(str(stranger), []).append(name)
            except (OSError, ValueError, KeyError, TypeError, pa.ArrowException) as error:
                told = "store %s: shard %s.parquet is ignored and its rows count as missing: %s"
                logger.warning(told, self.folder, name, error)
        for reason, shards in strangers.items():
            told = "store %s: %d shards are ignored and their rows count as missing (first: %s.parquet): %s"
            logger.warning(told, self.folder, len(shards), shards[0], reason)
        if names and not self._key_checked:
            self._check_key()
        return [self._shards[name] for name in sorted(self._shards)]

    def _check_key(self) -> None:
        """Rewrites ``key.json``, with a warning, if its content does not match the folder's name."""
        self._key_checked = True
        stored = _read_json(self.folder / KEY_FILE)
        if stored is not None and digest(stored) in (self._digest, digest(identify(self.key))):
            return
        logger.warning("store %s: %s did not contain this table's key; rewriting it", self.folder, KEY_FILE)
        with suppress(OSError):  # the file is only informative, and used to find the most similar table
            self._write_key()

    def _write_key(self) -> None:
        write_atomically(self.folder / KEY_FILE, json.dumps(identify(self.key), indent=1, sort_keys=True))

    def _check_shard(self, name: str) -> _Shard:
        """Reads and verifies an entry and its shard.

        Raises:
            _ForeignShard: the shard is intact and belongs to a different key.
            ValueError: the shard or its entry is damaged.
        """
        path = self.folder / f"{name}.parquet"
        entry: Any = _read_json(self.folder / f"{name}.json")  # missing keys raise errors below
        if entry is None:
            raise ValueError("the shard's entry is not readable JSON")
        rows = {pair_id: place for place, pair_id in enumerate(entry["pairs"])}
        shard = _Shard(name, entry["sha256"], rows, frozenset(entry["columns"]), entry.get("seconds"))
        if file_digest(path) != shard.sha256:
            raise ValueError("the checksum differs from the one in the shard's entry")
        with pq.ParquetFile(path) as stored:
            mark = (stored.schema_arrow.metadata or {}).get(KEY_MARK)
            if mark is None and "key" not in entry:
                raise _ForeignShard("an older version wrote these shards without a key; they can be removed")
            if mark != str(entry.get("key")).encode():
                raise ValueError("the key differs from the one in the shard's entry")
            if entry["key"] != self._digest:
                raise _ForeignShard("these shards belong to a different key and therefore to a different folder")
            if set(stored.schema_arrow.names) != shard.columns | {PAIR_ID}:
                raise ValueError("the columns differ from those in the shard's entry")
            if stored.read(columns=[PAIR_ID]).column(PAIR_ID).to_pylist() != entry["pairs"]:
                raise ValueError("the pairs differ from those in the shard's entry")
            if path.stat().st_size != entry["bytes"]:
                raise ValueError("the file size differs from the one in the shard's entry")
        return shard


# --------------------------------------------------------------------------------------------- files


def _folder_name(key: Mapping[str, object]) -> str:
    """Returns the folder name for a key."""
    return digest(dict(key))[:20]


def _read_json(path: Path) -> dict[str, object] | None:
    """Reads a JSON object from a file; None if the file cannot be read or contains something else."""
    try:
        value = parse_json(path.read_text())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


# --------------------------------------------------------------------------------------------- columns


def _base_column(column: str) -> str:
    """Returns the column part of ``"column.field"``."""
    return column.partition(".")[0]


def expect_array(cell: Cell) -> Array:
    """Returns the cell as an array; raises TypeError if it is something else."""
    if not isinstance(cell, np.ndarray):
        raise TypeError(f"expected a column of arrays, got {type(cell).__name__}")
    return cell


def expect_mapping(cell: Cell) -> Mapping[str, Cell]:
    """Returns the cell as a mapping; raises TypeError if it is something else."""
    if not isinstance(cell, Mapping):
        raise TypeError(f"expected a column of dicts, got {type(cell).__name__}")
    return cell


def _to_arrow(values: Sequence[Cell]) -> pa.Array:
    """Builds an Arrow column from scalars, one-dimensional arrays (lists) or dicts of these (structs)."""
    if isinstance(values[0], Mapping):
        names = list(values[0])
        return pa.StructArray.from_arrays(
            [_to_arrow([expect_mapping(row)[name] for row in values]) for name in names], names=names
        )
    if isinstance(values[0], str | bool | int | float):
        return pa.array(list(values))
    arrays = [np.asarray(row.detach().cpu() if isinstance(row, torch.Tensor) else row) for row in values]
    kinds = {(array.ndim, array.dtype) for array in arrays}
    if len(kinds) != 1 or arrays[0].ndim != 1:
        raise ValueError(f"expected one-dimensional arrays of one type in a column, got {sorted(map(str, kinds))}")
    ends = np.cumsum([0] + [array.size for array in arrays])
    return pa.LargeListArray.from_arrays(pa.array(ends, pa.int64()), pa.array(np.concatenate(arrays)))


def _to_numpy(array: pa.Array) -> Array:
    """Converts an Arrow array to NumPy.

    Arrow's own ``to_numpy`` is used only for nulls and booleans, because it imports pandas, which takes a second.
    """
    if array.null_count or pa.types.is_boolean(array.type):
        numbers: Array = array.to_numpy(zero_copy_only=False)
        return numbers
    return np.from_dlpack(array)


class _Column:
    """Random access to the rows of a column built by ``_to_arrow``."""

    def __init__(self, column: pa.ChunkedArray | pa.Array) -> None:
        array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
        self._fields: dict[str, _Column] | None = None
        self._scalars: list[Cell] | None = None
        if pa.types.is_struct(array.type):
            self._fields = {field.name: _Column(array.field(field.name)) for field in array.type}
        elif pa.types.is_large_list(array.type):
            self._ends = _to_numpy(array.offsets)
            self._values = _to_numpy(array.values)
        else:
            self._scalars = array.to_pylist()

    def __getitem__(self, place: int) -> Cell:
        if self._fields is not None:
            return {name: column[place] for name, column in self._fields.items()}
        if self._scalars is not None:
            return self._scalars[place]
        values: Array = self._values[self._ends[place] : self._ends[place + 1]].copy()
        return values
