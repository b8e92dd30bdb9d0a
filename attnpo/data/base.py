"""Reads preference pairs from files, folders of files or the Hugging Face hub.

``attnpo.data.tables`` reads the tables and ``attnpo.data.adapters`` converts rows to pairs. No row is dropped silently:
every ``PairSet`` satisfies ``read == num_kept + num_dropped`` and lists the reasons for dropping rows, with the first
affected row numbers for each reason.
"""

import logging
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Protocol, runtime_checkable

from attnpo.data.adapters import Columns, Note, RowError, adapt_row
from attnpo.data.tables import MemoryTable, RowTable, check_validation_rows, has_split, is_single_table, read_table
from attnpo.schema import PreferencePair, UserError, check_at_least, check_seed, digest, list_pair_ids
from attnpo.text.traces import TraceHandling

_LOG = logging.getLogger(__name__)

SPLITS = ("train", "val")
PairPositions = Sequence[tuple[str, int]]  # (set name, position in the set) of each pair of a mixture
Write = Callable[[PreferencePair], object]
EXAMPLES = 3  # row numbers listed per reason

_BOUND = re.compile(r"(\d+)(%?)")
# Columns that users may expect to be used as token or pair weights.
_LIKE_WEIGHTS = re.compile(r"weight|mask|importance|salien", re.IGNORECASE)
_NAME = re.compile(r"[A-Za-z0-9_-]+")

SET = "data.mix"
"""Key in a pair's ``extra`` under which a mixture stores the name of the pair's set."""
AMOUNTS = ("weight", "count")


# ------------------------------------------------------------------------------------------------ sets of pairs


@dataclass(frozen=True)
class SetCounts:
    """Row counts for one set of a mixture: rows read, kept as pairs, dropped, and used in the mixture."""

    path: str
    read: int
    kept: int
    dropped: int
    taken: int

    def __str__(self) -> str:
        return f"{self.read} rows read, {self.kept} kept, {self.dropped} dropped, {self.taken} used"


@dataclass(frozen=True)
class PairSet:
    """Pairs of one split in row order, with counts that account for every row.

    ``counts``: number of dropped rows per reason. ``notes``: number of kept rows per remark (duplicates, an empty
    side). ``read``: number of rows read. ``examples``: for each reason and note, the first three affected rows,
    numbered from 0 within the split. ``unused``: table columns used for neither prompt nor responses; their values are
    in each pair's ``extra``. ``sets``: for a mixture, the row counts of each set by name; reasons and notes then start
    with the set's name. ``written``: number of pairs that were passed to a ``write`` function instead of being kept in
    memory. ``known``: the fingerprint, if already computed.
    """

    pairs: Sequence[PreferencePair]
    counts: Counter[str] = field(default_factory=Counter)
    read: int = 0
    examples: Mapping[str, list[int]] = field(default_factory=dict)
    notes: Counter[str] = field(default_factory=Counter)
    unused: tuple[str, ...] = ()
    sets: Mapping[str, SetCounts] = field(default_factory=dict)
    written: int = 0
    known: str | None = None

    def __len__(self) -> int:
        return len(self.pairs)

    @property
    def num_kept(self) -> int:
        """Returns the number of rows that became pairs."""
        return len(self.pairs) + self.written

    @property
    def num_dropped(self) -> int:
        """Returns the number of dropped rows, i.e. ``read`` minus ``num_kept``."""
        return sum(self.counts.values())

    @property
    def fingerprint(self) -> str:
        """Returns a digest of the ordered pair ids and, in a mixture, of the set name of each pair."""
        if self.known is not None:
            return self.known
        if self.sets:
            return digest([[pair.pair_id, pair.extra[SET]] for pair in self.pairs])
        return digest(list_pair_ids(self.pairs))

    def summary(self) -> str:
        """Returns one line with all counts and, for each reason and note, the first row numbers."""
        events = [*sorted(self.counts.items()), *sorted(self.notes.items())]
        parts = [format_count(name, count, self.examples.get(name, ())) for name, count in events]
        parts += ["rows are numbered from 0"] if parts else []
        return "; ".join([f"{self.read} rows read, {self.num_kept} kept, {self.num_dropped} dropped", *parts])


def log_unused_columns(pairs: PairSet, read: Collection[str] = ()) -> None:
    """Logs unused columns; warns if a column's name suggests token or pair weights.

    ``read``: columns used by the weight source.
    """
    unused = [name for name in pairs.unused if name not in read]
    weights = [name for name in unused if _LIKE_WEIGHTS.search(name)]
    if unused:
        _LOG.info("data: unused columns: %s", ", ".join(unused))
    if weights:
        _LOG.warning(
            "data: %s may contain weights but %s not used: to read token weights from columns, set weights=column "
            "(weights.chosen, weights.rejected); for pair weights, set weights=pair_column (weights.column)",
            ", ".join(weights),
            "is" if len(weights) == 1 else "are",
        )


def format_count(event: str, count: int, rows: Sequence[int]) -> str:
    """Formats the number of rows affected by an event, with the first row numbers."""
    listed = ", ".join(map(str, rows[:EXAMPLES])) + (", ..." if count > EXAMPLES else "")
    return f"{event}: {count}" + (f" ({'row' if count == 1 else 'rows'} {listed})" if rows else "")


def pairs_from_rows(
    rows: Iterable[Mapping[str, object]],
    columns: Columns | None = None,
    numbers: Iterable[int] | None = None,
    write: Write | None = None,
) -> PairSet:
    """Converts rows to pairs; counts dropped rows and notes.

    ``numbers``: row numbers to report (None: 0, 1, ...). ``write``: if given, receives the pairs, which are then not
    kept in memory.

    Raises:
        UserError: a mapped column does not exist.
    """
    columns = columns or Columns()
    pairs: list[PreferencePair] = []
    keep = pairs.append if write is None else write
    counts: Counter[str] = Counter()
    notes: Counter[str] = Counter()
    examples: dict[str, list[int]] = {}
    seen: set[str] = set()
    read = 0

    def count_event(counter: Counter[str], name: str) -> None:
        counter[name] += 1
        if counter[name] <= EXAMPLES:
            examples.setdefault(name, []).append(number)

    for row, number in zip(rows, count() if numbers is None else numbers, strict=numbers is not None):  # noqa: B007
        try:
            adapted = adapt_row(row, columns)
        except RowError as problem:
            count_event(counts, problem.reason.value)
        else:
            pair = adapted.pair
            exchanged = PreferencePair.from_texts(pair.prompt, pair.rejected, pair.chosen, apart=pair.apart).pair_id
            again = [(pair.pair_id, Note.DUPLICATE), (exchanged, Note.EXCHANGED)]
            for noticed in [*adapted.notes, *(kind for pair_id, kind in again if pair_id in seen)]:
                count_event(notes, noticed.value)
            seen.add(pair.pair_id)
            keep(pair)
        read += 1
    written = read - counts.total() if write is not None else 0
    return PairSet(pairs, counts, read, examples, notes, written=written)


def merge_mixture_sets(
    sources: "Mapping[str, PairSource]", found: Mapping[str, PairSet], taken: PairPositions
) -> PairSet:
    """Merges the ``taken`` pairs in order, adds the set name to each pair, and logs the counts of each set."""
    counts: Counter[str] = Counter()
    notes: Counter[str] = Counter()
    examples: dict[str, list[int]] = {}
    accounts: dict[str, SetCounts] = {}
    number = Counter(name for name, _ in taken)
    for name, one in found.items():
        left = len(one) - number[name]
        counts.update({f"{name}: {reason}": count for reason, count in one.counts.items()})
        counts.update({f"{name}: not taken": left} if left else {})
        notes.update({f"{name}: {note}": count for note, count in one.notes.items()})
        examples |= {f"{name}: {event}": list(rows) for event, rows in one.examples.items()}
        accounts[name] = SetCounts(sources[name].path, one.read, len(one), one.num_dropped, number[name])
        _LOG.info("data.mix.%s: %s", name, accounts[name])
    rows = [(name, found[name].pairs[place]) for name, place in taken]
    pairs = [replace(pair, extra={**pair.extra, SET: name}) for name, pair in rows]
    homes: dict[str, set[str]] = {}
    for name, pair in rows:
        homes.setdefault(pair.pair_id, set()).add(name)
    if shared := sum(len(names) > 1 for names in homes.values()):
        notes["pair in several sets kept"] = shared
    unused = tuple(dict.fromkeys(name for one in found.values() for name in one.unused))
    return PairSet(pairs, counts, sum(one.read for one in found.values()), examples, notes, unused, accounts)


def _write_pairs(found: PairSet, write: Write | None) -> PairSet:
    """Passes the pairs to ``write``, if given, instead of keeping them in memory."""
    if write is None:
        return found
    for pair in found.pairs:
        write(pair)
    return replace(found, pairs=[], written=len(found), known=found.fingerprint)


# ------------------------------------------------------------------------------------------------ row ranges


def parse_row_range(selection: str | None, length: int, option: str = "data.train_rows") -> range:
    """Parses a selection from ``length`` rows; None selects all rows.

    Examples: "500" (first 500 rows), "100:300" (rows 100 to 299), "10%" (first tenth, rounded down), "10%:20%" (second
    tenth). Either side of the colon may be omitted. Rows past the end are ignored, so the range may be shorter than
    requested.

    Raises:
        UserError: ``selection`` has none of these forms, or selects no rows.
    """
    if selection is None:
        return range(length)
    sides = selection.replace(" ", "").split(":")
    bounds = [_BOUND.fullmatch(side) for side in sides]
    beyond = any(bound and bound[2] and int(bound[1]) > 100 for bound in bounds)
    wrong = any(side and not bound for side, bound in zip(sides, bounds, strict=True))
    if len(sides) > 2 or wrong or beyond or not any(sides):
        raise UserError(
            f'{option}="{selection}" is not a row selection; expected a number ("500"), a range ("100:300"), '
            'or a percentage up to 100% ("10%", "10%:20%")'
        )
    places = [
        None if bound is None else length * int(bound[1]) // 100 if bound[2] else int(bound[1]) for bound in bounds
    ]
    start, stop = (None, places[0]) if len(places) == 1 else places
    chosen = range(length)[start or 0 : stop]
    if not chosen:
        raise UserError(f'{option}="{selection}" selects no rows: the split has {length} rows, numbered from 0')
    asked = length if stop is None else stop
    if asked > length:
        _LOG.warning('%s="%s" asks for more rows than the %d available', option, selection, length)
    return chosen


# ------------------------------------------------------------------------------------------------ validation share


def pick_validation_prompts(prompts: Sequence[str | None], share: float, where: str) -> tuple[set[str], int]:
    """Selects a share of the distinct prompts for validation; also returns the total number of distinct prompts.

    ``prompts``: prompt digest of each row, or None if the row is not a pair. The prompts with the smallest digests are
    selected, so row order does not matter. Training and validation each get at least one prompt.

    Raises:
        UserError: there are fewer than two distinct prompts; ``where`` names the data in the message.
    """
    different = sorted({prompt for prompt in prompts if prompt is not None})
    if len(different) < 2:
        raise UserError(
            f"{where}: data.val_share={share} needs at least 2 distinct prompts, but the {len(prompts)} rows have "
            f"only {len(different)}: use data with more prompts, or a separate file for validation"
        )
    count = min(max(round(share * len(different)), 1), len(different) - 1)
    return set(different[:count]), len(different)


def _prompt_digest(row: Mapping[str, object], columns: Columns) -> str | None:
    """Returns the digest of all messages of a row's prompt; None if the row is not a usable pair."""
    try:
        return digest([[turn["role"], turn["content"]] for turn in adapt_row(row, columns).pair.prompt])
    except RowError:
        return None


# ------------------------------------------------------------------------------------------------ mixtures


@dataclass(frozen=True)
class MixtureSet:
    """One set of a mixture (config node ``data.mix.NAME``).

    ``weight``: share of the training pairs, relative to the weights of the other sets. ``count``: number of training
    pairs. If no set has a weight or a count, all pairs are used. The other keys are those of ``data``; a key set to
    None inherits the mixture's value.
    """

    path: str
    weight: float | None = None
    count: int | None = None
    train_split: str | None = None
    val_split: str | None = None
    train_rows: str | None = None
    val_rows: str | None = None
    revision: str | None = None
    subset: str | None = None
    exchanged: bool | None = None
    columns: Columns | None = None

    def __post_init__(self) -> None:
        check_at_least("data.mix", 1, count=self.count)
        if self.weight is not None and not self.weight > 0:
            raise UserError(f"weight: expected a number above 0, got {self.weight:g}; to omit a set, remove it")
        if self.weight is not None and self.count is not None:
            raise UserError(
                f"weight={self.weight:g} and count={self.count} both set the number of pairs: set only one of them"
            )

    def overrides(self) -> dict[str, object]:
        """Returns the ``data`` keys for which this set has its own value."""
        return {name: value for name, value in vars(self).items() if value is not None and name not in AMOUNTS}


def check_mixture(sets: Mapping[str, MixtureSet]) -> None:
    """Checks the set names, and that all sets have a weight, all have a count, or none has either.

    Raises:
        UserError: there are no sets, a name is invalid, or only some sets have a weight or a count.
    """
    if not sets:
        raise UserError(
            "data.mix: expected at least one set, e.g. data.mix={chat: {path: FILE}}; "
            "to use data.path, set data.mix=null"
        )
    wrong = next((name for name in sets if not _NAME.fullmatch(str(name))), None)
    if wrong is not None:
        raise UserError(f"data.mix: {wrong!r} is not a valid set name; use letters, digits, _ and -")
    for key in AMOUNTS:
        lacking = [name for name, one in sets.items() if getattr(one, key) is None]
        if lacking and len(lacking) < len(sets):
            raise UserError(
                f"data.mix.{lacking[0]} has no {key}, but other sets have one: set {key} for all sets or for none"
            )


def allocate_pairs(kept: Mapping[str, int], sets: Mapping[str, MixtureSet]) -> dict[str, int]:
    """Computes how many of each set's ``kept`` pairs are used; no pair is used twice.

    Counts are used as given. With weights, as many pairs as possible are used: the set with the fewest pairs per unit
    of weight contributes all its pairs.

    Raises:
        UserError: a count exceeds the set's size, or a weight is so small that the set would contribute no pairs.
    """
    first = next(iter(sets.values()))
    if first.count is None and first.weight is None:
        return dict(kept)
    if first.weight is None:
        counts = {name: one.count or 0 for name, one in sets.items()}
    else:
        weights = {name: one.weight or 0.0 for name, one in sets.items()}
        most = min(kept[name] / weight for name, weight in weights.items())
        counts = {name: min(kept[name], round(most * weight)) for name, weight in weights.items()}
    for name, number in counts.items():
        if number > kept[name]:
            raise UserError(
                f"data.mix.{name}.count={number}: the set has only {kept[name]} usable pairs, and none is used "
                "twice; lower the count"
            )
        if not number:
            raise UserError(
                f"data.mix.{name}.weight={sets[name].weight:g} selects none of its {kept[name]} pairs; "
                "raise the weight, or remove the set"
            )
    return counts


def shuffle_positions(name: str, kept: int, seed: int) -> list[tuple[str, str, int]]:
    """Returns one (random digest, set, position) per pair of a set, sorted; the mixture uses the first entries."""
    return sorted((digest([seed, name, place]), name, place) for place in range(kept))


@contextmanager
def name_set_in_errors(name: str) -> Iterator[None]:
    """Prefixes errors raised inside the context with the name of the mixture set."""
    try:
        yield
    except UserError as error:
        raise UserError(f"data.mix.{name}: {error}") from error


# ------------------------------------------------------------------------------------------------ sources


@runtime_checkable
class PairReader(Protocol):
    """Source of preference pairs (config node ``data``)."""

    def load(self, split: str) -> PairSet:
        """Loads the pairs of a split, "train" or "val"."""


@dataclass(frozen=True)
class PairSource:
    """Source of a run's pairs: a file, a folder or a dataset on the hub (config node ``data``).

    ``path`` is a folder with one file per split (``train.jsonl``, ``test.csv``, shards named as on the hub; files may
    be in a sub-folder ``data``), a folder written by ``save_to_disk``, a single file for both splits, or the name of a
    dataset on the hub. ``train_split`` and ``val_split`` are split names or file stems. ``train_rows`` and ``val_rows``
    select rows ("500", "100:300", "10%") of a split, counted before any are dropped. ``val_share`` is the share of
    prompts in ``train_split``, between 0 and 1, that is used for validation instead of training. ``val_split`` must
    then be None; its default value is also accepted if the data have no split of that name. ``revision`` and ``subset``
    apply to datasets on the hub. ``exchanged`` swaps the two responses, to train a model on the opposite preference.

    ``mix`` replaces ``path`` with several named sets; a set inherits every key that it does not set itself, and
    ``val_share`` applies to the prompts of all sets together. ``mix_seed`` determines which training pairs are used and
    in what order. Validation uses all pairs of every set.
    """

    path: str
    train_split: str = "train"
    val_split: str | None = "test"
    train_rows: str | None = None
    val_rows: str | None = None
    columns: Columns = field(default_factory=Columns)
    revision: str | None = None
    subset: str | None = None
    exchanged: bool = False
    val_share: float | None = None
    mix: dict[str, MixtureSet] | None = None
    mix_seed: int = 0

    def __post_init__(self) -> None:
        check_seed("data.mix_seed", self.mix_seed)
        if self.mix is not None:
            check_mixture(self.mix)
        if self.val_share is not None and not 0 < self.val_share < 1:
            hint = f", such as {self.val_share / 100:g} for {self.val_share:g} %" if 1 < self.val_share < 100 else ""
            raise UserError(
                f"data.val_share={self.val_share:g}: expected a share of the prompts between 0 and 1"
                f"{hint}; a run needs both training and validation pairs "
                "(to use data.val_split, set data.val_share=null)"
            )

    def unused_keys(self) -> dict[str, str]:
        """Returns the keys that have no effect, with reasons: ``path`` if a mixture is set, otherwise ``mix_seed``."""
        return {"path": "data.mix gives a path for each set"} if self.mix else {"mix_seed": "no mixture is set"}

    @property
    def has_separate_traces(self) -> bool:
        """Returns whether any set weights only the answer that follows a reasoning trace."""
        every = [self.columns, *(one.columns for one in (self.mix or {}).values() if one.columns is not None)]
        return any(columns.traces is TraceHandling.WEIGH_APART for columns in every)

    @property
    def location(self) -> str:
        """Returns a description of where the pairs come from: the path, or the mixture's sets."""
        named = ", ".join(f"{name} ({one.path})" for name, one in (self.mix or {}).items())
        return f"mixture of {named}" if self.mix else self.path

    def load(self, split: str, write: Write | None = None) -> PairSet:
        """Loads the pairs of ``split``, "train" or "val"; pairs passed to ``write`` are not kept in memory.

        Raises:
            UserError: nothing is found at ``path``, a column or split is missing, a file cannot be read, or the split
                or one of the mixture's sets has no usable rows.
            ValueError: ``split`` is neither "train" nor "val".
        """
        if split not in SPLITS:
            raise ValueError(f"split must be one of {SPLITS}, got {split!r}")
        if self.mix:
            return _write_pairs(self._load_mixture(self.mix, split), write)
        table = self._read_split(split)
        there: Sequence[int] = range(len(table))
        if self.val_share is not None:
            (there,) = self._split_prompts(split, {"": self}, {"": table}, self._describe_split(split)).values()
        return self._read_pairs(table, split, there, write)

    def list_tables(self) -> list[tuple[str, str, str, str | None, str | None]]:
        """Returns the arguments of ``read_table`` for both splits of every set.

        Raises:
            UserError: see ``load``.
        """
        sources = [self] if not self.mix else [self._make_set_source(one) for one in self.mix.values()]
        return list(
            dict.fromkeys(
                (one.path, *one._split_and_key(split), one.subset, one.revision) for one in sources for split in SPLITS
            )
        )

    def _make_set_source(self, one: MixtureSet) -> "PairSource":
        return replace(self, mix=None, **one.overrides())  # type: ignore[arg-type]

    def _describe_split(self, split: str) -> str:
        return f"data.path={self.path} ({split})"

    def _read_split(self, split: str) -> RowTable:
        """Reads all rows of a split and checks that the mapped columns exist."""
        table = read_table(self.path, *self._split_and_key(split), self.subset, self.revision)
        first_line = "the first line of " if isinstance(table, MemoryTable) and table.headed else ""
        self.columns.check(table.column_names, first_line + self._describe_split(split))
        return table

    def _read_pairs(self, table: RowTable, split: str, there: Sequence[int], write: Write | None = None) -> PairSet:
        """Applies the split's row selection to the row numbers ``there`` and converts the selected rows to pairs."""
        where = self._describe_split(split)
        asked = self.train_rows if split == "train" else self.val_rows
        rows = parse_row_range(asked, len(there), f"data.{split}_rows")
        if split == "val":
            self._check_val_rows(where, len(table), rows)
        numbers = there[rows.start : rows.stop]
        columns = self.columns
        if self.exchanged:
            columns = replace(columns, chosen=columns.rejected, rejected=columns.chosen)
        pairs = pairs_from_rows(table.select(numbers), columns, numbers, write)
        if not pairs.num_kept:
            raise UserError(
                f"{where} has no usable pairs: {pairs.summary()}; columns found: {', '.join(table.column_names)}. "
                "Check these rows, or map the columns with data.columns.prompt=..., data.columns.chosen=..., "
                "data.columns.rejected=..."
            )
        _LOG.log(logging.WARNING if pairs.num_dropped else logging.INFO, "%s: %s", where, pairs.summary())
        return replace(pairs, unused=tuple(self.columns.find_unmapped(table.column_names)))

    # -------------------------------------------------------------------------------------------- mixtures

    def _load_mixture(self, mix: Mapping[str, MixtureSet], split: str) -> PairSet:
        """Loads the pairs of all sets; training pairs are sampled and shuffled with ``mix_seed``."""
        sources = {name: self._make_set_source(one) for name, one in mix.items()}
        tables = {}
        for name, source in sources.items():
            with name_set_in_errors(name):
                tables[name] = source._read_split(split)
        there: dict[str, Sequence[int]] = {name: range(len(table)) for name, table in tables.items()}
        if self.val_share is not None:
            there = self._split_prompts(split, sources, tables, "data.mix")
        found = {}
        for name, source in sources.items():
            with name_set_in_errors(name):
                if split == "train" or there[name]:
                    found[name] = source._read_pairs(tables[name], split, there[name])
        if not found:
            raise UserError(f"data.mix: no set has any pairs for {split}; check data.val_share={self.val_share}")
        if split == "val":
            return merge_mixture_sets(
                sources, found, [(name, place) for name, one in found.items() for place in range(len(one))]
            )
        taken = allocate_pairs({name: len(one) for name, one in found.items()}, mix)
        drawn = [
            draw
            for name, one in found.items()
            for draw in shuffle_positions(name, len(one), self.mix_seed)[: taken[name]]
        ]
        return merge_mixture_sets(sources, found, [(name, place) for _, name, place in sorted(drawn)])

    def _split_prompts(
        self, split: str, sources: Mapping[str, "PairSource"], tables: Mapping[str, RowTable], where: str
    ) -> dict[str, Sequence[int]]:
        """Splits the combined prompts of all sets by ``val_share``; returns each set's row numbers for ``split``."""
        prompts = {
            name: [_prompt_digest(row, sources[name].columns) for row in table.select(range(len(table)))]
            for name, table in tables.items()
        }
        every = [prompt for rows in prompts.values() for prompt in rows]
        aside, different = pick_validation_prompts(every, self.val_share or 0.0, where)
        if split == "train":
            _LOG.info(
                "data.val_share=%g: %d of %d prompts (%d of %d rows) are selected by digest for validation",
                self.val_share,
                len(aside),
                different,
                sum(prompt in aside for prompt in every),
                len(every),
            )
        return {
            name: [number for number, prompt in enumerate(rows) if (prompt in aside) == (split == "val")]
            for name, rows in prompts.items()
        }

    def _check_val_rows(self, where: str, length: int, rows: range) -> None:
        """Warns if validation and training rows overlap.

        Raises:
            UserError: both use the same rows of one split.
        """
        if self.val_share is not None or (self.train_split != self.val_split and not is_single_table(self.path)):
            return
        train = parse_row_range(self.train_rows, length, "data.train_rows")
        if train == rows:
            raise UserError(
                f"{where}: training and validation use the same {len(rows)} rows, so no validation pair would be "
                "unseen: set data.val_share=0.1 with data.val_split=null, select different rows "
                "(data.train_rows, data.val_rows), or choose a different data.val_split"
            )
        if max(train.start, rows.start) < min(train.stop, rows.stop):
            _LOG.warning("%s: data.val_rows and data.train_rows overlap", where)

    def _split_and_key(self, split: str) -> tuple[str, str]:
        """Returns the name of a split in the data, and the config key that sets it."""
        option = f"data.{split}_split"
        if self.val_share is not None:
            self._check_val_share(is_single_table(self.path))
            name, option = self.train_split, "data.train_split"
        elif split == "val":
            check_validation_rows(self.path, self.val_split, self.val_rows is not None)
            name = self.val_split or ""
        else:
            name = self.train_split
        return name, option

    def _check_val_share(self, one: bool) -> None:
        """Checks that ``val_share`` is not combined with a validation split.

        Raises:
            UserError: a validation split is set, or a split with the default name exists.
        """
        named = self.val_split is not None and self.val_split != PairSource.val_split
        there = not one and self.val_split is not None and has_split(self.path, self.val_split)
        if named or there:
            raise UserError(
                f"data.val_share={self.val_share:g} and data.val_split={self.val_split}: set only one of them; set "
                "data.val_share=null to validate on that split, or data.val_split=null to use a share of "
                f"{self.train_split} for validation"
            )
