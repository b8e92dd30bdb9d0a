"""Where preference pairs come from: files, folders of files or the Hugging Face hub, with every row accounted for.

Tables are read by ``attnpo.data.tables``; rows are turned into pairs by ``attnpo.data.adapters`` and never lost in
silence: ``read == kept + dropped`` holds for every ``PairSet``, with a reason and the first row numbers of each drop.
"""

import logging
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Protocol, runtime_checkable

from attnpo.data.adapters import Columns, Note, RowProblem, adapt
from attnpo.data.tables import MemoryTable, RowTable, has_split, is_one_table, read_table, require_validation
from attnpo.schema import PreferencePair, UserError, check_at_least, check_seed, digest, list_pair_ids
from attnpo.text.traces import Traces

_LOG = logging.getLogger(__name__)

SPLITS = ("train", "val")
Taken = Sequence[tuple[str, int]]  # the set and the place in it of each pair of a mixture
Write = Callable[[PreferencePair], object]
EXAMPLES = 3  # row numbers named per reason

_BOUND = re.compile(r"(\d+)(%?)")
# Columns that a user may believe to be read as weights of tokens or pairs.
_LIKE_WEIGHTS = re.compile(r"weight|mask|importance|salien", re.IGNORECASE)
_NAME = re.compile(r"[A-Za-z0-9_-]+")

SET = "data.mix"
"""Key of a pair's ``extra`` that names its set of a mixture."""
AMOUNTS = ("weight", "count")


# ------------------------------------------------------------------------------------------------ sets of pairs


@dataclass(frozen=True)
class SetAccount:
    """Account of the rows of one set: ``read``, ``kept`` as pairs, ``dropped``, and ``taken`` of those kept."""

    path: str
    read: int
    kept: int
    dropped: int
    taken: int

    def __str__(self) -> str:
        return f"{self.read} rows read, {self.kept} kept, {self.dropped} dropped, {self.taken} taken"


@dataclass(frozen=True)
class PairSet:
    """Pairs of one split, in the order of the rows, and an account of every row.

    ``counts`` has the rows dropped per reason, ``notes`` what was noticed on rows that were kept (duplicates, an empty
    side); ``read`` is the number of rows looked at. ``examples`` maps each reason and note to the numbers of the first
    three rows it holds for; the first row of the split is row 0. ``unused``: the table's columns that became no part of
    prompt and responses; a pair's ``extra`` has those of its row. ``sets``: of a mixture, each set's account by name;
    its reasons and notes begin with the name. ``written``: pairs that were handed on and are not held. ``known``: the
    fingerprint, where it was taken before.
    """

    pairs: Sequence[PreferencePair]
    counts: Counter[str] = field(default_factory=Counter)
    read: int = 0
    examples: Mapping[str, list[int]] = field(default_factory=dict)
    notes: Counter[str] = field(default_factory=Counter)
    unused: tuple[str, ...] = ()
    sets: Mapping[str, SetAccount] = field(default_factory=dict)
    written: int = 0
    known: str | None = None

    def __len__(self) -> int:
        return len(self.pairs)

    @property
    def kept(self) -> int:
        """Returns the number of rows that became pairs."""
        return len(self.pairs) + self.written

    @property
    def dropped(self) -> int:
        """Returns the number of rows that did not; ``read`` is the sum of both."""
        return sum(self.counts.values())

    @property
    def fingerprint(self) -> str:
        """Returns the digest of the pair ids in their order, with each one's set in a mixture."""
        if self.known is not None:
            return self.known
        if self.sets:
            return digest([[pair.pair_id, pair.extra[SET]] for pair in self.pairs])
        return digest(list_pair_ids(self.pairs))

    def summary(self) -> str:
        """Returns one line with all counts, with the first row numbers of each reason and note."""
        events = [*sorted(self.counts.items()), *sorted(self.notes.items())]
        parts = [format_count(name, count, self.examples.get(name, ())) for name, count in events]
        parts += ["the first row is row 0"] if parts else []
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


def format_count(event: str, count: int, rows: Sequence[int]) -> str:
    """Returns how often something happened to rows, with the numbers of the first of them."""
    listed = ", ".join(map(str, rows[:EXAMPLES])) + (", ..." if count > EXAMPLES else "")
    return f"{event}: {count}" + (f" ({'row' if count == 1 else 'rows'} {listed})" if rows else "")


def pairs_from_rows(
    rows: Iterable[Mapping[str, object]],
    columns: Columns | None = None,
    numbers: Iterable[int] | None = None,
    write: Write | None = None,
) -> PairSet:
    """Returns the pairs of an iterable of rows with their account; ``numbers`` are those of the rows (None: 0, 1, ...).

    Pairs that ``write`` is given are not held.

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

    def note(counter: Counter[str], name: str) -> None:
        counter[name] += 1
        if counter[name] <= EXAMPLES:
            examples.setdefault(name, []).append(number)

    for row, number in zip(rows, count() if numbers is None else numbers, strict=numbers is not None):  # noqa: B007
        try:
            adapted = adapt(row, columns)
        except RowProblem as problem:
            note(counts, problem.reason.value)
        else:
            pair = adapted.pair
            exchanged = PreferencePair.from_texts(pair.prompt, pair.rejected, pair.chosen, apart=pair.apart).pair_id
            again = [(pair.pair_id, Note.DUPLICATE), (exchanged, Note.EXCHANGED)]
            for noticed in [*adapted.notes, *(kind for pair_id, kind in again if pair_id in seen)]:
                note(notes, noticed.value)
            seen.add(pair.pair_id)
            keep(pair)
        read += 1
    written = read - counts.total() if write is not None else 0
    return PairSet(pairs, counts, read, examples, notes, written=written)


def merge_sets(sources: "Mapping[str, PairSource]", found: Mapping[str, PairSet], taken: Taken) -> PairSet:
    """Returns one set of pairs, those ``taken`` in their order with the name of their set; says what each gave."""
    counts: Counter[str] = Counter()
    notes: Counter[str] = Counter()
    examples: dict[str, list[int]] = {}
    accounts: dict[str, SetAccount] = {}
    number = Counter(name for name, _ in taken)
    for name, one in found.items():
        left = len(one) - number[name]
        counts.update({f"{name}: {reason}": count for reason, count in one.counts.items()})
        counts.update({f"{name}: not taken": left} if left else {})
        notes.update({f"{name}: {note}": count for note, count in one.notes.items()})
        examples |= {f"{name}: {event}": list(rows) for event, rows in one.examples.items()}
        accounts[name] = SetAccount(sources[name].path, one.read, len(one), one.dropped, number[name])
        _LOG.info("data.mix.%s: %s", name, accounts[name])
    rows = [(name, found[name].pairs[place]) for name, place in taken]
    pairs = [replace(pair, extra={**pair.extra, SET: name}) for name, pair in rows]
    homes: dict[str, set[str]] = {}
    for name, pair in rows:
        homes.setdefault(pair.pair_id, set()).add(name)
    if shared := sum(len(names) > 1 for names in homes.values()):
        notes["pair that stands in several sets kept"] = shared
    unused = tuple(dict.fromkeys(name for one in found.values() for name in one.unused))
    return PairSet(pairs, counts, sum(one.read for one in found.values()), examples, notes, unused, accounts)


def _written(found: PairSet, write: Write | None) -> PairSet:
    """Hands on the pairs of a set, where they are to be."""
    if write is None:
        return found
    for pair in found.pairs:
        write(pair)
    return replace(found, pairs=[], written=len(found), known=found.fingerprint)


# ------------------------------------------------------------------------------------------------ choice of rows


def row_range(selection: str | None, length: int, option: str = "data.train_rows") -> range:
    """Returns the row numbers that a selection names out of ``length`` rows; None names all of them.

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
    places = [
        None if bound is None else length * int(bound[1]) // 100 if bound[2] else int(bound[1]) for bound in bounds
    ]
    start, stop = (None, places[0]) if len(places) == 1 else places
    chosen = range(length)[start or 0 : stop]
    if not chosen:
        raise UserError(f'{option}="{selection}" names no row: the split has {length} rows, the first is row 0')
    asked = length if stop is None else stop
    if asked > length:
        _LOG.warning('%s="%s" asks for more than the %d rows there are', option, selection, length)
    return chosen


# ------------------------------------------------------------------------------------------------ shares


def share_out(prompts: Sequence[str | None], share: float, where: str) -> tuple[set[str], int]:
    """Returns ``share`` of the different prompts, rounded, for validation, and how many different ones there are.

    ``prompts`` are those of the rows, None for what is no pair. Those with the smallest digests are taken, so the order
    of the rows moves none; one at least is on either side.

    Raises:
        UserError: fewer than two different prompts; ``where`` names the data.
    """
    different = sorted({prompt for prompt in prompts if prompt is not None})
    if len(different) < 2:
        raise UserError(
            f"{where}: data.val_share={share} shares out whole prompts, and its {len(prompts)} rows have "
            f"{len(different)} usable: give data of more prompts, or a file of its own for validation"
        )
    count = min(max(round(share * len(different)), 1), len(different) - 1)
    return set(different[:count]), len(different)


def _prompt_of(row: Mapping[str, object], columns: Columns) -> str | None:
    """Returns the digest of all messages of a row's prompt; None for a row that is no pair."""
    try:
        return digest([[turn["role"], turn["content"]] for turn in adapt(row, columns).pair.prompt])
    except RowProblem:
        return None


# ------------------------------------------------------------------------------------------------ mixtures


@dataclass(frozen=True)
class MixedSet:
    """Set of a mixture (config node ``data.mix.NAME``).

    ``weight``: its part of the training pairs, relative to the other sets' weights. ``count``: so many training pairs
    of it. None of both, in every set, takes all. The other keys are those of ``data``; None takes the mixture's.
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
            raise UserError(f"weight: expected a number above 0, got {self.weight:g}; leave the set out instead")
        if self.weight is not None and self.count is not None:
            raise UserError(f"weight={self.weight:g} and count={self.count} both say how much is taken: give one")

    def own(self) -> dict[str, object]:
        """Returns the keys of ``data`` that it does not take from the mixture."""
        return {name: value for name, value in vars(self).items() if value is not None and name not in AMOUNTS}


def check_mixture(sets: Mapping[str, MixedSet]) -> None:
    """Raises UserError for no set, a name that is none, and amounts that some sets have and others lack."""
    if not sets:
        raise UserError("data.mix: expected at least one set, as in data.mix={chat: {path: FILE}}; null: data.path")
    wrong = next((name for name in sets if not _NAME.fullmatch(str(name))), None)
    if wrong is not None:
        raise UserError(f"data.mix: {wrong!r} is no name of a set; expected letters, digits, _ and -")
    for key in AMOUNTS:
        lacking = [name for name, one in sets.items() if getattr(one, key) is None]
        if lacking and len(lacking) < len(sets):
            raise UserError(
                f"data.mix.{lacking[0]} has no {key}, and other sets have one: give every set a {key}, or none"
            )


def amounts(kept: Mapping[str, int], sets: Mapping[str, MixedSet]) -> dict[str, int]:
    """Returns how many of the ``kept`` pairs of each set are taken; none is taken twice.

    Counts as they are. With weights as many as there can be: the set that is scarcest for its weight gives all it has.

    Raises:
        UserError: a count is above what its set has, or a weight is so small that its set would give no pair.
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
                f"data.mix.{name}.count={number}: the set has {kept[name]} usable pairs, and none is taken twice; "
                "lower it"
            )
        if not number:
            raise UserError(
                f"data.mix.{name}.weight={sets[name].weight:g} takes none of its {kept[name]} pairs beside those of "
                "the other sets: raise it, or leave the set out"
            )
    return counts


def draws(name: str, kept: int, seed: int) -> list[tuple[str, str, int]]:
    """Returns a number drawn for each pair of a set, with set and place, in order: the first ones are taken."""
    return sorted((digest([seed, name, place]), name, place) for place in range(kept))


@contextmanager
def of_set(name: str) -> Iterator[None]:
    """Opens a context whose errors name the set of the mixture that they are about."""
    try:
        yield
    except UserError as error:
        raise UserError(f"data.mix.{name}: {error}") from error


# ------------------------------------------------------------------------------------------------ sources


@runtime_checkable
class PairReader(Protocol):
    """Where pairs come from (config node ``data``)."""

    def load(self, split: str) -> PairSet:
        """Returns the pairs of a split, "train" or "val"."""


@dataclass(frozen=True)
class PairSource:
    """Where the pairs of a run come from (config node ``data``).

    ``path`` is a folder with a file per split (``train.jsonl``, ``test.csv``, shards as the hub names them, also
    inside a sub-folder ``data``), a folder that ``save_to_disk`` wrote, a single file for both splits, or the name of a
    dataset on the hub. ``train_split`` and ``val_split`` are the names of splits or the stems of files. ``train_rows``
    and ``val_rows`` choose rows ("500", "100:300", "10%") of a split; rows are counted before any is dropped.
    ``val_share`` makes both splits of one: this share of its prompts, more than 0 and less than 1, is for validation.
    It goes without a validation split: ``val_split`` is None, or the default where no split has that name.
    ``revision`` and ``subset`` are for the hub. ``exchanged`` puts each response in the other's place, for a model
    that is to learn the opposite.

    ``mix`` takes several sets in place of ``path``, by name; what a set leaves out is as the mixture has it, and
    ``val_share`` shares out the prompts of all together. ``mix_seed`` draws which training pairs are taken, and their
    order. Validation has every pair of each set.
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
    mix: dict[str, MixedSet] | None = None
    mix_seed: int = 0

    def __post_init__(self) -> None:
        check_seed("data.mix_seed", self.mix_seed)
        if self.mix is not None:
            check_mixture(self.mix)
        if self.val_share is not None and not 0 < self.val_share < 1:
            hint = f", such as {self.val_share / 100:g} for {self.val_share:g} %" if 1 < self.val_share < 100 else ""
            raise UserError(
                f"data.val_share={self.val_share:g}: expected a share of the prompts of more than 0 and less than 1"
                f"{hint}; a run needs both training and validation pairs (null: take data.val_split)"
            )

    def unread(self) -> dict[str, str]:
        """Keys without effect: the path beside a mixture, what draws from one where there is none."""
        return {"path": "data.mix names its sets"} if self.mix else {"mix_seed": "data.mix=null: one set"}

    @property
    def weighs_apart(self) -> bool:
        """Returns whether reasoning traces of any of its sets are weighed apart from their answers."""
        every = [self.columns, *(one.columns for one in (self.mix or {}).values() if one.columns is not None)]
        return any(columns.traces is Traces.WEIGH_APART for columns in every)

    @property
    def place(self) -> str:
        """Returns where the pairs are, for readers: the path, or the sets of the mixture with theirs."""
        named = ", ".join(f"{name} ({one.path})" for name, one in (self.mix or {}).items())
        return f"mixture of {named}" if self.mix else self.path

    def load(self, split: str, write: Write | None = None) -> PairSet:
        """Returns the pairs of ``split``, "train" or "val"; those that ``write`` is given are not held.

        Raises:
            UserError: nothing is found at ``path``, a column or split is missing, a file cannot be read, or no row of
                the split, or of a set of the mixture, is usable.
            ValueError: ``split`` is another word.
        """
        if split not in SPLITS:
            raise ValueError(f"split must be one of {SPLITS}, got {split!r}")
        if self.mix:
            return _written(self._load_mixture(self.mix, split), write)
        table = self._table(split)
        there: Sequence[int] = range(len(table))
        if self.val_share is not None:
            (there,) = self._split_prompts(split, {"": self}, {"": table}, self._where(split)).values()
        return self._pairs(table, split, there, write)

    def places(self) -> list[tuple[str, str, str, str | None, str | None]]:
        """Returns what ``read_table`` is given for both splits, of every set of a mixture. UserError as ``load``."""
        sources = [self] if not self.mix else [self._of_set(one) for one in self.mix.values()]
        return list(
            dict.fromkeys(
                (one.path, *one._split(split), one.subset, one.revision) for one in sources for split in SPLITS
            )
        )

    def _of_set(self, one: MixedSet) -> "PairSource":
        return replace(self, mix=None, **one.own())  # type: ignore[arg-type]

    def _where(self, split: str) -> str:
        return f"data.path={self.path} ({split})"

    def _table(self, split: str) -> RowTable:
        """Returns all rows of a split, with the columns that are asked for."""
        table = read_table(self.path, *self._split(split), self.subset, self.revision)
        first_line = "the first line of " if isinstance(table, MemoryTable) and table.headed else ""
        self.columns.check(table.column_names, first_line + self._where(split))
        return table

    def _pairs(self, table: RowTable, split: str, there: Sequence[int], write: Write | None = None) -> PairSet:
        """Returns the pairs of the rows ``there``, as far as the split's choice of rows has them."""
        where = self._where(split)
        asked = self.train_rows if split == "train" else self.val_rows
        rows = row_range(asked, len(there), f"data.{split}_rows")
        if split == "val":
            self._check_apart(where, len(table), rows)
        numbers = there[rows.start : rows.stop]
        columns = self.columns
        if self.exchanged:
            columns = replace(columns, chosen=columns.rejected, rejected=columns.chosen)
        pairs = pairs_from_rows(table.select(numbers), columns, numbers, write)
        if not pairs.kept:
            raise UserError(
                f"{where} has no usable pair: {pairs.summary()}; columns found: {', '.join(table.column_names)}. "
                "Look at these rows, or map the columns with data.columns.prompt=..., data.columns.chosen=..., "
                "data.columns.rejected=..."
            )
        _LOG.log(logging.WARNING if pairs.dropped else logging.INFO, "%s: %s", where, pairs.summary())
        return replace(pairs, unused=tuple(self.columns.unused(table.column_names)))

    # -------------------------------------------------------------------------------------------- mixtures

    def _load_mixture(self, mix: Mapping[str, MixedSet], split: str) -> PairSet:
        """Returns the pairs of all sets: of training those that are taken, in an order drawn by the seed."""
        sources = {name: self._of_set(one) for name, one in mix.items()}
        tables = {}
        for name, source in sources.items():
            with of_set(name):
                tables[name] = source._table(split)
        there: dict[str, Sequence[int]] = {name: range(len(table)) for name, table in tables.items()}
        if self.val_share is not None:
            there = self._split_prompts(split, sources, tables, "data.mix")
        found = {}
        for name, source in sources.items():
            with of_set(name):
                if split == "train" or there[name]:
                    found[name] = source._pairs(tables[name], split, there[name])
        if not found:
            raise UserError(f"data.mix: no set has a pair for {split}; see data.val_share={self.val_share}")
        if split == "val":
            return merge_sets(
                sources, found, [(name, place) for name, one in found.items() for place in range(len(one))]
            )
        taken = amounts({name: len(one) for name, one in found.items()}, mix)
        drawn = [draw for name, one in found.items() for draw in draws(name, len(one), self.mix_seed)[: taken[name]]]
        return merge_sets(sources, found, [(name, place) for _, name, place in sorted(drawn)])

    def _split_prompts(
        self, split: str, sources: Mapping[str, "PairSource"], tables: Mapping[str, RowTable], where: str
    ) -> dict[str, Sequence[int]]:
        """Returns the numbers of each set's rows in a split, prompts being shared out over all sets at once."""
        prompts = {
            name: [_prompt_of(row, sources[name].columns) for row in table.select(range(len(table)))]
            for name, table in tables.items()
        }
        every = [prompt for rows in prompts.values() for prompt in rows]
        aside, different = share_out(every, self.val_share or 0.0, where)
        if split == "train":
            _LOG.info(
                "data.val_share=%g: %d of %d prompts (%d of %d rows) are kept for validation, by digest of the prompt",
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

    def _check_apart(self, where: str, length: int, rows: range) -> None:
        """Warns of validation rows that are training rows too. UserError where both are the same rows of one split."""
        if self.val_share is not None or (self.train_split != self.val_split and not is_one_table(self.path)):
            return
        train = row_range(self.train_rows, length, "data.train_rows")
        if train == rows:
            raise UserError(
                f"{where}: training and validation are the same {len(rows)} rows, so validation would measure no "
                "unseen pairs: set data.val_share=0.1 with data.val_split=null, other rows "
                "(data.train_rows, data.val_rows), or another data.val_split"
            )
        if max(train.start, rows.start) < min(train.stop, rows.stop):
            _LOG.warning("%s: data.val_rows and data.train_rows name some of the same rows", where)

    def _split(self, split: str) -> tuple[str, str]:
        """Returns the name under which a split lies there, and the key that gives it."""
        option = f"data.{split}_split"
        if self.val_share is not None:
            self._check_shared(is_one_table(self.path))
            name, option = self.train_split, "data.train_split"
        elif split == "val":
            require_validation(self.path, self.val_split, self.val_rows is not None)
            name = self.val_split or ""
        else:
            name = self.train_split
        return name, option

    def _check_shared(self, one: bool) -> None:
        """Raises UserError where a validation split is named, or is there by its default name, beside ``val_share``."""
        named = self.val_split is not None and self.val_split != PairSource.val_split
        there = not one and self.val_split is not None and has_split(self.path, self.val_split)
        if named or there:
            raise UserError(
                f"data.val_share={self.val_share:g} and data.val_split={self.val_split}: expected one of them; set "
                f"data.val_share=null to validate on that split, or data.val_split=null to share out {self.train_split}"
            )
