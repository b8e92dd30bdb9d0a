"""Where preference pairs come from: files, folders of files or the Hugging Face hub, with every row accounted for.

JSON is read by ``attnpo.data.json_lines``, Parquet and the hub by the ``datasets`` library; rows are turned into pairs
by ``attnpo.data.adapters`` and never lost in silence:
``read == kept + dropped`` holds for every ``PairSet``, with a reason and the first row numbers for what was dropped.
"""

import logging
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from attnpo.data.adapters import Columns, Note, RowProblem, adapt
from attnpo.data.json_lines import Table, read_lines
from attnpo.hub import hub, out_of_reach
from attnpo.schema import PreferencePair, UserError, digest

if TYPE_CHECKING:
    import datasets

_LOG = logging.getLogger(__name__)

SPLITS = ("train", "val")
EXAMPLES = 3  # row numbers named per reason

_SUFFIXES = (".jsonl", ".json", ".jsonl.gz", ".parquet")
_SHARD = re.compile(r"-\d{5}-of-\d{5}$")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_BOUND = re.compile(r"(\d+)(%?)")
# Columns that a user may believe to be read as weights of tokens or pairs.
_LIKE_WEIGHTS = re.compile(r"weight|mask|importance|salien", re.IGNORECASE)


# ------------------------------------------------------------------------------------------------ sets of pairs


@dataclass(frozen=True)
class PairSet:
    """The pairs of one split, in the order of the rows, and an account of every row.

    ``counts`` has the rows dropped per reason, ``notes`` what was noticed on rows that were kept (duplicates, an empty
    side); ``read`` is the number of rows looked at. ``examples`` maps each reason and note to the numbers of the first
    three rows it holds for; the first row of the split is row 0. ``unused``: the table's columns that became no part of
    prompt and responses; a pair's ``extra`` has those of its row.
    """

    pairs: list[PreferencePair]
    counts: Counter[str] = field(default_factory=Counter)
    read: int = 0
    examples: Mapping[str, list[int]] = field(default_factory=dict)
    notes: Counter[str] = field(default_factory=Counter)
    unused: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.pairs)

    @property
    def kept(self) -> int:
        """Rows that became pairs."""
        return len(self.pairs)

    @property
    def dropped(self) -> int:
        """Rows that did not; ``read`` is the sum of both."""
        return sum(self.counts.values())

    @property
    def fingerprint(self) -> str:
        """Digest of the pair ids in their order."""
        return digest([pair.pair_id for pair in self.pairs])

    def summary(self) -> str:
        """One line with all counts, with the first row numbers of each reason and note."""
        events = [*sorted(self.counts.items()), *sorted(self.notes.items())]
        parts = [counted(name, count, self.examples[name]) for name, count in events]
        return "; ".join([f"{self.read} rows read, {self.kept} kept, {self.dropped} dropped", *parts])


def name_unused(pairs: PairSet, read: Collection[str] = ()) -> None:
    """Logs the columns that nothing reads, with a warning where their names promise token or pair weights.

    ``read`` are those that the weight source reads.
    """
    unused = [name for name in pairs.unused if name not in read]
    weights = [name for name in unused if _LIKE_WEIGHTS.search(name)]
    if unused:
        _LOG.info("data: columns that are not used: %s", ", ".join(unused))
    if weights:
        _LOG.warning(
            "data: %s may hold weights and %s not used: weights of tokens are read from columns by weights=column "
            "(weights.chosen, weights.rejected), weights of pairs by weights=pair_column (weights.column)",
            ", ".join(weights),
            "is" if len(weights) == 1 else "are",
        )


def counted(event: str, count: int, rows: Sequence[int]) -> str:
    """How often something happened to rows, with the numbers of the first of them."""
    listed = ", ".join(map(str, rows[:EXAMPLES])) + (", ..." if count > EXAMPLES else "")
    return f"{event}: {count} ({'row' if count == 1 else 'rows'} {listed})"


def pairs_from_rows(rows: Iterable[Mapping[str, object]], columns: Columns | None = None, first: int = 0) -> PairSet:
    """The pairs of an iterable of rows with their account; ``first`` is the number of the first row.

    Raises:
        UserError: a mapped column does not exist.
    """
    columns = columns or Columns()
    pairs: list[PreferencePair] = []
    counts: Counter[str] = Counter()
    notes: Counter[str] = Counter()
    examples: dict[str, list[int]] = {}
    seen: set[str] = set()
    read = 0

    def note(counter: Counter[str], name: str) -> None:
        counter[name] += 1
        if counter[name] <= EXAMPLES:
            examples.setdefault(name, []).append(first + read)

    for row in rows:
        try:
            adapted = adapt(row, columns)
        except RowProblem as problem:
            note(counts, problem.reason.value)
        else:
            pair = adapted.pair
            exchanged = PreferencePair.make(pair.prompt, pair.rejected, pair.chosen).pair_id
            again = [(pair.pair_id, Note.DUPLICATE), (exchanged, Note.EXCHANGED)]
            for noticed in [*adapted.notes, *(kind for pair_id, kind in again if pair_id in seen)]:
                note(notes, noticed.value)
            seen.add(pair.pair_id)
            pairs.append(pair)
        read += 1
    return PairSet(pairs, counts, read, examples, notes)


# ------------------------------------------------------------------------------------------------ choice of rows


def row_range(selection: str | None, length: int, option: str = "data.train_rows") -> range:
    """The row numbers that a selection names out of ``length`` rows; None names all of them.

    "500" is the first 500 rows, "100:300" rows 100 to 299, "10%" the first tenth (rounded down), "10%:20%" the second
    tenth; either side of the colon may be left out. Rows past the end are not there: the range is the shorter for it.

    Raises:
        UserError: the text is none of these, or names no row at all.
    """
    if selection is None:
        return range(length)
    sides = selection.replace(" ", "").split(":")
    bounds = [_BOUND.fullmatch(side) for side in sides]
    beyond = any(bound and bound[2] and int(bound[1]) > 100 for bound in bounds)
    wrong = any(side and not bound for side, bound in zip(sides, bounds, strict=True))
    if len(sides) > 2 or wrong or beyond or not any(sides):
        raise UserError(
            f'{option}="{selection}" is no choice of rows; expected a number ("500"), a range ("100:300"), '
            'or a share of at most 100% ("10%", "10%:20%")'
        )
    places = [None if bound is None else _place(bound[1], bool(bound[2]), length) for bound in bounds]
    start, stop = (None, places[0]) if len(places) == 1 else places
    chosen = range(length)[start or 0 : stop]
    if not chosen:
        raise UserError(f'{option}="{selection}" names no row: the split has {length} rows, the first is row 0')
    asked = length if stop is None else stop
    if asked > length:
        _LOG.warning('%s="%s" asks for more than the %d rows there are', option, selection, length)
    return chosen


def _place(number: str, percent: bool, length: int) -> int:
    return length * int(number) // 100 if percent else int(number)


# ------------------------------------------------------------------------------------------------ sources


@dataclass(frozen=True)
class PairSource:
    """Where the pairs of a run come from (config node ``data``).

    ``path`` is a folder with a file per split (``train.jsonl``, ``test.parquet``, shards as the hub names them, also
    inside a sub-folder ``data``), a single file for both splits, or the name of a dataset on the hub.
    ``train_split`` and ``val_split`` are the names of splits or the stems of files. ``train_rows`` and ``val_rows``
    choose rows ("500", "100:300", "10%"); rows are counted before any is dropped. ``revision`` and ``subset`` are for
    the hub. ``exchanged`` puts each response in the other's place, for a model that is to learn the opposite.
    """

    path: str
    train_split: str = "train"
    val_split: str = "test"
    train_rows: str | None = None
    val_rows: str | None = None
    columns: Columns = field(default_factory=Columns)
    revision: str | None = None
    subset: str | None = None
    exchanged: bool = False

    def load(self, split: str) -> PairSet:
        """The pairs of ``split``, "train" or "val".

        Raises:
            UserError: nothing is found at ``path``, a column or split is missing, a file cannot be read, or no row of
                the split is usable.
            ValueError: ``split`` is another word.
        """
        if split not in SPLITS:
            raise ValueError(f"split must be one of {SPLITS}, got {split!r}")
        table = self._read(split)
        where = f"data.path={self.path} ({split})"
        self.columns.check(table.column_names, where)
        asked = self.train_rows if split == "train" else self.val_rows
        rows = row_range(asked, len(table), f"data.{split}_rows")
        columns = self.columns
        if self.exchanged:
            columns = replace(columns, chosen=columns.rejected, rejected=columns.chosen)
        pairs = pairs_from_rows(table.select(rows), columns, first=rows.start)
        if not pairs.pairs:
            raise UserError(
                f"{where} has no usable pair: {pairs.summary()}; columns found: {', '.join(table.column_names)}. "
                "Look at these rows, or map the columns with data.columns.prompt=..., data.columns.chosen=..., "
                "data.columns.rejected=..."
            )
        _LOG.log(logging.WARNING if pairs.dropped else logging.INFO, "%s: %s", where, pairs.summary())
        if split == "val" and self._shares_rows(len(table), rows):
            _LOG.warning("%s: data.val_rows and data.train_rows name some of the same rows", where)
        return replace(pairs, unused=tuple(self.columns.unused(table.column_names)))

    def _shares_rows(self, length: int, rows: range) -> bool:
        if self.train_split != self.val_split and not Path(self.path).expanduser().is_file():
            return False
        train = row_range(self.train_rows, length, "data.train_rows")
        return max(train.start, rows.start) < min(train.stop, rows.stop)

    def _read(self, split: str) -> Table:
        """All rows of a split."""
        if split == "val" and self.val_rows is None and Path(self.path).expanduser().is_file():
            raise UserError(
                f"data.path={self.path} is one file, so its rows must be shared out: set data.train_rows and "
                'data.val_rows (for example "0:90%" and "90%:")'
            )
        name = self.train_split if split == "train" else self.val_split
        return read_table(self.path, name, f"data.{split}_split", self.subset, self.revision)


def read_table(path: str, split: str, option: str, subset: str | None = None, revision: str | None = None) -> Table:
    """All rows of a file, of a split of a folder, or of a dataset on the hub.

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
    if place.is_dir():
        return _from_files(_split_files(place, split, option), path)
    if _suffix(place) is not None or not _HUB_NAME.fullmatch(path):
        raise UserError(f"data.path={path}: no such file or folder. {_neighbours(place)}")
    return _from_hub(path, split, subset, revision)


def _suffix(file: Path) -> str | None:
    """The ending of a file that can be read, None for others."""
    return next((suffix for suffix in _SUFFIXES if file.name.endswith(suffix)), None)


def _split_files(folder: Path, split: str, option: str) -> list[Path]:
    """The files of one split: one file, or its shards in order."""
    readable = [file for place in (folder, folder / "data") if place.is_dir() for file in sorted(place.iterdir())]
    readable = [file for file in readable if file.is_file() and _suffix(file) is not None]
    stems = {file: _SHARD.sub("", file.name[: -len(_suffix(file) or "")]) for file in readable}
    files = [file for file in readable if stems[file] == split]
    if not files:
        listed = ", ".join(sorted({str(file.relative_to(folder)) for file in readable})) or "none"
        raise UserError(
            f"{option}={split}: {folder} has no file {split}.jsonl, {split}.json or {split}.parquet; files it has: "
            f"{listed}. Name one of them without its ending with {option}=NAME"
        )
    shards = [file for file in files if _SHARD.search(file.name[: -len(_suffix(file) or "")])]
    if (len(files) > 1 and shards != files) or len({(_suffix(file), file.parent) for file in files}) > 1:
        listed = ", ".join(str(file.relative_to(folder)) for file in files)
        raise UserError(f"{option}={split} in {folder} could be any of {listed}; set data.path to the one you mean")
    return files


def _neighbours(place: Path) -> str:
    """A sentence on what does exist near a path that does not."""
    parent = next(parent for parent in place.absolute().parents if parent.is_dir())
    names = sorted(entry.name + ("/" if entry.is_dir() else "") for entry in parent.iterdir())
    shown = ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")
    return f"{parent} holds: {shown or 'nothing'}"


# ------------------------------------------------------------------------------------------------ the library


@contextmanager
def _quiet() -> Iterator[None]:
    """The library without progress bars and log lines (what matters in them is raised), and back afterwards."""
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


def _from_files(files: list[Path], path: str) -> Table:
    suffix = _suffix(files[0])
    if suffix is None:
        raise UserError(f"data.path={path}: expected a file ending in {', '.join(_SUFFIXES)}, got {files[0].name}")
    table = _from_parquet(files, path) if suffix == ".parquet" else read_lines(files, path)
    if not len(table):
        named = ", ".join(file.name for file in files)
        raise UserError(f"data.path={path}: {named} is empty; expected one row per line")
    return table


def _from_parquet(files: list[Path], path: str) -> Table:
    import datasets

    try:
        with _quiet():
            table: Table = datasets.load_dataset(
                "parquet",
                data_files={"train": [str(file) for file in files]},
                split="train",
                trust_remote_code=False,
            )
        _check_utf8(table)
    except (datasets.exceptions.DatasetsError, OSError, ValueError, TypeError, StopIteration) as error:
        named = ", ".join(file.name for file in files)
        raise UserError(
            f"data.path={path}: {named} cannot be read as parquet: {error.__cause__ or error}. Expected a table with "
            "text that is valid Unicode"
        ) from error
    return table


def _check_utf8(table: "datasets.Dataset") -> None:
    """Raises ValueError where a text of the table is not UTF-8, which ``datasets`` itself notices only on use."""
    for column in table.data.columns:
        for chunk in column.chunks:
            chunk.validate(full=True)


def _from_hub(name: str, split: str, subset: str | None, revision: str | None) -> Table:
    import datasets

    try:
        with _quiet(), hub():
            table: Table = datasets.load_dataset(name, subset, split=split, revision=revision, trust_remote_code=False)
    except (datasets.exceptions.DatasetsError, OSError, ValueError) as error:
        details = "".join(f", {key} {value}" for key, value in (("subset", subset), ("revision", revision)) if value)
        why = f"there is no complete copy in the hub's cache, and {out_of_reach()}" if out_of_reach() else str(error)
        raise UserError(
            f"data.path={name}: neither a file or folder here nor a dataset that could be loaded from the hub "
            f"(split {split}{details}): {why}. To work from files, point data.path at a folder holding "
            f"{split}.jsonl or {split}.parquet"
        ) from error
    return table
