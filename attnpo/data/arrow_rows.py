"""Stores pairs, training ids and training examples as rows of Arrow tables, which are read lazily without copying.

Defines the table schemas and converts between objects and rows; does no file I/O. Tables may be
memory-mapped. Each access to a row builds a new object, which is not cached.
"""

import json
from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Generic, TypeVar, overload

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from attnpo.data.collate import TrainingExample
from attnpo.schema import SIDES, EncodedResponse, PreferencePair, list_pair_ids
from attnpo.text.ranges import Offsets, as_array

AT_ONCE = 1024  # rows per record batch
Counts = npt.NDArray[np.int64]
Some = TypeVar("Some")

PAIRS = pa.schema({"pair_id": pa.string(), "pair": pa.large_string()})
_IDS = pa.list_(pa.int32())
ENCODED = pa.schema(
    {
        "row": pa.int64(),  # index of the pair among those read
        "prompt": pa.string(),  # digest of the messages
        "shared": pa.bool_(),  # whether both sides have the same prompt ids, then stored with the chosen side only
        **{f"{side}_{part}": _IDS for side in SIDES for part in ("prompt", "response", "starts", "ends")},
    }
)
_NUMBERS = ("length", "coverage", "source_coverage", "kept_mass")


def weights_schema(dtype: torch.dtype) -> pa.Schema:
    """Returns the schema of example rows with token weights of type ``dtype``.

    Raises:
        KeyError: ``dtype`` is neither float32 nor float64.
    """
    row = pa.list_({torch.float32: pa.float32(), torch.float64: pa.float64()}[dtype])
    numbers = {f"{side}_{name}": pa.float64() for side in SIDES for name in _NUMBERS}
    weights = {f"{side}_weights": row for side in SIDES}
    return pa.schema({"row": pa.int64(), "pair_weight": pa.float64(), "factors": pa.bool_(), **numbers, **weights})


LOGPS = pa.schema({f"{side}_logps": pa.list_(pa.float32()) for side in SIDES})


# ------------------------------------------------------------------------------------------------ columns


class RaggedColumn:
    """Column of variable-length lists of numbers; each list is read as an array without copying."""

    def __init__(self, column: pa.ChunkedArray) -> None:
        chunks = [chunk for chunk in column.chunks if len(chunk)]
        self._values = [chunk.values.to_numpy(zero_copy_only=True) for chunk in chunks]
        self._bounds = [chunk.offsets.to_numpy(zero_copy_only=True) for chunk in chunks]
        self._starts = [0, *accumulate(map(len, chunks))]

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, row: int) -> npt.NDArray[np.generic]:
        chunk = bisect_right(self._starts, row) - 1
        place = row - self._starts[chunk]
        start, end = self._bounds[chunk][place : place + 2]
        found: npt.NDArray[np.generic] = self._values[chunk][start:end]
        return found

    def count_occurrences(self, number: int) -> int:
        """Counts the occurrences of ``number`` across all lists."""
        pieces = zip(self._values, self._bounds, strict=True)
        return sum(int(np.count_nonzero(values[bounds[0] : bounds[-1]] == number)) for values, bounds in pieces)

    @cached_property
    def lengths(self) -> Counts:
        """Returns the length of each list."""
        return np.concatenate([np.diff(bounds) for bounds in self._bounds] or [np.zeros(0)]).astype(np.int64)


class ArrowRowWriter:
    """Buffers rows and writes them as record batches of ``AT_ONCE`` rows; call ``flush`` after the last row."""

    def __init__(self, schema: pa.Schema, write: Callable[[pa.RecordBatch], object]) -> None:
        self._schema, self._write, self.count = schema, write, 0
        self._waiting: list[Mapping[str, object]] = []

    def add(self, row: Mapping[str, object]) -> None:
        """Adds one row."""
        self._waiting.append(row)
        self.count += 1
        if len(self._waiting) == AT_ONCE:
            self.flush()

    def flush(self) -> None:
        """Writes the buffered rows."""
        kinds = zip(self._schema.names, self._schema.types, strict=True)
        columns = [_make_column([row[name] for row in self._waiting], kind) for name, kind in kinds]
        self._write(pa.RecordBatch.from_arrays(columns, schema=self._schema))
        self._waiting.clear()


def _make_column(cells: Sequence[object], kind: pa.DataType) -> pa.Array:
    if not pa.types.is_list(kind):
        return pa.array(cells, kind)
    dtype = kind.value_type.to_pandas_dtype()
    rows = [np.asarray(cell, dtype) for cell in cells]
    numbers = np.concatenate([np.zeros(0, dtype), *rows])
    bounds = np.cumsum([0, *map(len, rows)], dtype=np.int32)
    return pa.ListArray.from_arrays(pa.array(bounds), pa.array(numbers, kind.value_type))


class LazyRows(Sequence[Some], Generic[Some]):
    """Sequence whose rows are built on access."""

    @abstractmethod
    def _make_row(self, row: int) -> Some: ...

    @overload
    def __getitem__(self, place: int) -> Some: ...
    @overload
    def __getitem__(self, place: slice) -> list[Some]: ...
    def __getitem__(self, place: int | slice) -> Some | list[Some]:
        if isinstance(place, slice):
            return [self._make_row(row) for row in range(*place.indices(len(self)))]
        row = place + len(self) if place < 0 else place
        if not 0 <= row < len(self):
            raise IndexError(place)
        return self._make_row(row)


# ------------------------------------------------------------------------------------------------ pairs


class NotSerializableError(Exception):
    """Raised when a pair's extra columns cannot be stored as JSON."""


def pair_to_row(pair: PreferencePair) -> dict[str, object]:
    """Converts a pair to a table row.

    Raises:
        NotSerializableError: an extra column cannot be stored as JSON.
    """
    parts = [list(pair.prompt), pair.chosen, pair.rejected, dict(pair.extra), pair.apart]
    try:
        return {"pair_id": pair.pair_id, "pair": json.dumps(parts)}
    except (TypeError, ValueError) as error:
        raise NotSerializableError from error


class PairRows(LazyRows[PreferencePair]):
    """Pairs stored in a table, restricted to the indices in ``rows`` if given."""

    def __init__(self, table: pa.Table, rows: npt.NDArray[np.int64] | None = None) -> None:
        self._table, self._rows = table, rows
        self._ids, self._pairs = table.column("pair_id"), table.column("pair")

    def __len__(self) -> int:
        return self._table.num_rows if self._rows is None else len(self._rows)

    def _make_row(self, row: int) -> PreferencePair:
        at = row if self._rows is None else int(self._rows[row])
        prompt, chosen, rejected, extra, apart = json.loads(self._pairs[at].as_py())
        return PreferencePair(self._ids[at].as_py(), tuple(prompt), chosen, rejected, extra, apart)

    @property
    def num_bytes(self) -> int:
        """Returns the total size of all strings in bytes."""
        return int(self._pairs.nbytes)

    def select(self, rows: Counts) -> "PairRows":
        """Returns the pairs at the given indices of the full table."""
        return PairRows(self._table, rows)

    @cached_property
    def ids(self) -> list[str]:
        """Returns all pair ids."""
        every: list[str] = self._ids.to_pylist()
        return every if self._rows is None else [every[row] for row in self._rows]


class ConcatenatedPairs(LazyRows[PreferencePair]):
    """Concatenation of several sequences of pairs."""

    def __init__(self, parts: Sequence[Sequence[PreferencePair]]) -> None:
        self._parts, self._starts = parts, np.cumsum([0, *map(len, parts)])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def _make_row(self, row: int) -> PreferencePair:
        part = int(np.searchsorted(self._starts, row, side="right")) - 1
        return self._parts[part][row - int(self._starts[part])]

    @cached_property
    def ids(self) -> list[str]:
        """Returns all pair ids."""
        return [pair_id for part in self._parts for pair_id in list_pair_ids(part)]


class PairSubset(LazyRows[PreferencePair]):
    """Subset of another sequence of pairs, in the order of the given positions."""

    def __init__(self, pairs: Sequence[PreferencePair], places: Sequence[int]) -> None:
        self._pairs, self._places = pairs, places

    def __len__(self) -> int:
        return len(self._places)

    def _make_row(self, row: int) -> PreferencePair:
        return self._pairs[self._places[row]]

    @cached_property
    def ids(self) -> list[str]:
        """Returns all pair ids."""
        every = list_pair_ids(self._pairs)
        return [every[place] for place in self._places]


def find_pairs(pairs: Sequence[PreferencePair], ids: Collection[str]) -> dict[str, PreferencePair]:
    """Maps the given ids to their pairs. If the pairs are in a table, only their rows are read."""
    wanted = set(ids)
    return {pair_id: pairs[place] for place, pair_id in enumerate(list_pair_ids(pairs)) if pair_id in wanted}


# ------------------------------------------------------------------------------------------------ training ids


def encoded_to_row(row: int, prompt: str, sides: Mapping[str, EncodedResponse]) -> dict[str, object]:
    """Converts a pair's training ids to a table row that contains the pair's index and the prompt's digest."""
    chosen, rejected = (sides[side] for side in SIDES)
    shared = chosen.prompt_ids == rejected.prompt_ids
    found: dict[str, object] = {"row": row, "prompt": prompt, "shared": shared}
    for side, one in sides.items():
        places = as_array(one.offsets)
        ids = [] if shared and side == SIDES[1] else one.prompt_ids
        found |= {f"{side}_prompt": ids, f"{side}_response": one.response_ids}
        found |= {f"{side}_starts": places[:, 0], f"{side}_ends": places[:, 1]}
    return found


class EncodedRows(LazyRows[dict[str, EncodedResponse]]):
    """Training ids of each pair by side, read from a table with the schema ``ENCODED``."""

    def __init__(self, table: pa.Table) -> None:
        self.rows: Counts = table.column("row").to_numpy()
        self._shared: npt.NDArray[np.bool_] = table.column("shared").to_numpy()
        self._prompts = table.column("prompt")
        self._lists = {name: RaggedColumn(table.column(name)) for name in ENCODED.names[3:]}

    def __len__(self) -> int:
        return len(self.rows)

    def _make_row(self, row: int) -> dict[str, EncodedResponse]:
        of, shared, found = self._lists, self._shared[row], dict[str, EncodedResponse]()
        for side in SIDES:
            starts = of[f"{side}_starts"][row]
            places = np.empty((len(starts), 2), dtype=np.int64)
            places[:, 0], places[:, 1] = starts, of[f"{side}_ends"][row]
            prompt = found[SIDES[0]].prompt_ids if shared and found else of[f"{side}_prompt"][row].tolist()
            found[side] = EncodedResponse(prompt, of[f"{side}_response"][row].tolist(), Offsets(places))
        return found

    def prompt_digests(self) -> list[str]:
        """Returns the prompt digest of each row."""
        found: list[str] = self._prompts.to_pylist()
        return found

    def count_token(self, token: int) -> tuple[int, int]:
        """Returns how often ``token`` occurs in the responses, and the total number of response tokens."""
        responses = [self._lists[f"{side}_response"] for side in SIDES]
        return sum(one.count_occurrences(token) for one in responses), int(sum(one.lengths.sum() for one in responses))

    def token_counts(self) -> "TokenCounts":
        """Returns the token counts of all rows."""
        of = {name: self._lists[name].lengths for name in self._lists}
        prompts = of["chosen_prompt"], np.where(self._shared, of["chosen_prompt"], of["rejected_prompt"])
        return TokenCounts(prompts, (of["chosen_response"], of["rejected_response"]), self._shared)


@dataclass(frozen=True)
class TokenCounts:
    """Prompt and response token counts for each side (chosen, rejected) of each pair.

    ``shared``: for each pair, whether both sides have the same prompt ids.
    """

    prompts: tuple[Counts, Counts]
    responses: tuple[Counts, Counts]
    shared: npt.NDArray[np.bool_]

    @property
    def branch_tokens(self) -> Counts:
        """Returns the token counts of whole branches (prompt and response), shape [2, pairs]."""
        return np.stack([prompt + response for prompt, response in zip(self.prompts, self.responses, strict=True)])

    @property
    def longest_branch(self) -> Counts:
        """Returns the token count of the longer branch of each pair."""
        longest: Counts = self.branch_tokens.max(axis=0)
        return longest

    def select(self, rows: Counts) -> "TokenCounts":
        """Returns the counts at the given indices."""
        prompts, responses = ((both[0][rows], both[1][rows]) for both in (self.prompts, self.responses))
        return TokenCounts(prompts, responses, self.shared[rows])


def count_row_tokens(rows: Sequence[TrainingExample] | Sequence[Mapping[str, EncodedResponse]]) -> TokenCounts:
    """Returns the token counts of examples, or of training ids by side, without building table rows."""
    if isinstance(rows, EncodedRows | ExampleRows):
        return rows.token_counts()
    both = [row.sides if isinstance(row, TrainingExample) else tuple(row[side] for side in SIDES) for row in rows]

    def count(place: int, part: int) -> Counts:
        return np.array([len(sides[place][part]) for sides in both], dtype=np.int64)

    shared = np.array([sides[0].prompt_ids == sides[1].prompt_ids for sides in both], dtype=bool)
    return TokenCounts((count(0, 0), count(1, 0)), (count(0, 1), count(1, 1)), shared)


# ------------------------------------------------------------------------------------------------ examples


def example_to_row(row: int, example: TrainingExample) -> dict[str, object]:
    """Converts an example to a table row without its training ids; ``row`` is the index of those ids."""
    found: dict[str, object] = {"row": row, "pair_weight": example.pair_weight, "factors": example.factors}
    numbers = (example.lengths, example.coverage, example.source_coverage, example.kept_mass)
    for place, side in enumerate(SIDES):
        found[f"{side}_weights"] = example.weights[place].numpy()
        found |= {f"{side}_{name}": both[place] for name, both in zip(_NUMBERS, numbers, strict=True)}
    return found


@dataclass(eq=False)
class ExampleRows(LazyRows[TrainingExample]):
    """Training examples whose weights are stored in a table with the schema of ``weights_schema``.

    ``encoded``: training ids of the examples. ``ids``: pair ids. ``name``: unique identifier of these weights.
    ``logps``: reference log-probabilities, one row per example, if stored.
    """

    weighed: pa.Table
    encoded: EncodedRows
    ids: Sequence[str]
    name: str = ""
    logps: pa.Table | None = None
    _lists: dict[str, RaggedColumn] = field(default_factory=dict, init=False, repr=False)
    _numbers: dict[str, npt.NDArray[np.generic]] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        for table in (self.weighed, *([] if self.logps is None else [self.logps])):
            for name in table.column_names:
                column = table.column(name)
                if pa.types.is_list(column.type):
                    self._lists[name] = RaggedColumn(column)
                else:
                    self._numbers[name] = column.to_numpy()

    def __len__(self) -> int:
        return int(self.weighed.num_rows)

    def _get_side_values(self, name: str, row: int) -> tuple[float, float]:
        chosen, rejected = (float(self._numbers[f"{side}_{name}"][row]) for side in SIDES)
        return chosen, rejected

    def _get_side_tensors(self, name: str, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        chosen, rejected = (torch.from_numpy(self._lists[f"{side}_{name}"][row].copy()) for side in SIDES)
        return chosen, rejected

    def _make_row(self, row: int) -> TrainingExample:
        at = int(self._numbers["row"][row])
        return TrainingExample(
            pair_id=self.ids[at],
            **self.encoded[at],
            weights=self._get_side_tensors("weights", row),
            lengths=self._get_side_values("length", row),
            coverage=self._get_side_values("coverage", row),
            pair_weight=float(self._numbers["pair_weight"][row]),
            reference_logps=None if self.logps is None else self._get_side_tensors("logps", row),
            factors=bool(self._numbers["factors"][row]),
            source_coverage=self._get_side_values("source_coverage", row),
            kept_mass=self._get_side_values("kept_mass", row),
        )

    def token_counts(self) -> TokenCounts:
        """Returns the token counts of all examples."""
        return self.encoded.token_counts().select(self._numbers["row"])  # type: ignore[arg-type]

    def prompt_digests(self) -> list[str]:
        """Returns the prompt digest of each example."""
        found = self.encoded.prompt_digests()
        return [found[row] for row in self._numbers["row"]]

    @property
    def pair_weights(self) -> npt.NDArray[np.float64]:
        """Returns the weight of each pair."""
        return self._numbers["pair_weight"]  # type: ignore[return-value]

    @cached_property
    def pair_ids(self) -> list[str]:
        """Returns all pair ids."""
        return [self.ids[row] for row in self._numbers["row"]]


def get_pair_ids(examples: Sequence[TrainingExample]) -> list[str]:
    """Returns the pair id of each example without building table rows."""
    return examples.pair_ids if isinstance(examples, ExampleRows) else [example.pair_id for example in examples]


def get_pair_weights(examples: Sequence[TrainingExample]) -> npt.NDArray[np.float64]:
    """Returns the weight of each pair without building table rows."""
    if isinstance(examples, ExampleRows):
        return examples.pair_weights
    return np.array([example.pair_weight for example in examples], dtype=np.float64)
