"""Steps before training: pairs read, their training ids, and the weighed examples that are made of these.

Those of large data are prepared once as rows of the store, and mapped from there. Owns what decides each of them (its
facts), the account that is kept beside it, and from which size on rows are prepared at all: smaller sets are made anew
in moments, and held in memory.
"""

import datetime
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from attnpo.cli.progress import phase
from attnpo.config.fields import to_config
from attnpo.config.named_files import digest_named_files as named_files
from attnpo.data.arrow_rows import (
    AT_ONCE,
    ENCODED,
    LOGPS,
    PAIRS,
    ArrowRows,
    EncodedRows,
    ExampleRows,
    NoJson,
    PairRows,
    RowsOnDemand,
    encoded_row,
    pair_row,
    schema_of_weights,
    sizes_of,
    weighed_row,
)
from attnpo.data.base import SPLITS, PairReader, PairSet, PairSource, SetAccount, name_unused
from attnpo.data.collate import TrainingExample
from attnpo.data.example_numbers import ExampleNumbers, SplitNumbers
from attnpo.data.overlap import Overlap, Overlaps, count_overlap, key_of_prompt
from attnpo.data.prepare import (
    EncodedSet,
    ExampleSet,
    Tally,
    encode_pairs,
    fit_transforms,
    prepare_examples,
    unknown_share,
)
from attnpo.data.prepared_rows import Account, prepared_rows, record_lines, repeat_lines
from attnpo.data.rules import AlignRules, LengthRules
from attnpo.data.tables import files_of, read_table
from attnpo.data.weighing import REFILL, Weighed, weigh
from attnpo.judge.base import WeightReader
from attnpo.judge.judge import LabelCheck, RunJudge
from attnpo.judge.verdicts import JudgeStatistics, LabelMass, TraceStatistics
from attnpo.models.kept_digests import cached_digest
from attnpo.schema import SIDES, EncodedResponse, PreferencePair, UserError, digest, list_pair_ids
from attnpo.system.files import flatten
from attnpo.system.source_digest import PACKAGE, source_digest
from attnpo.system.store import Store, StoreTable
from attnpo.text.chat import ChatFormat
from attnpo.weights.arrival import Arrival
from attnpo.weights.base import WeightSource
from attnpo.weights.capture import WEIGHTS, CapturedRows, CaptureReport, LogpPair, weights_key
from attnpo.weights.readers import VerbalizerStatistics
from attnpo.weights.transforms import WeightTransform

log = logging.getLogger(__name__)

Logps = Sequence[LogpPair]

BYTES = 8 << 20
"""Of the data's files: from here on their pairs are prepared."""
PER_TEXT = 3
"""Bytes of training ids with their places for each byte of text, about."""
BYTES_OF_WEIGHT = 4
PAIRS_HELD = 4096
"""Pairs that are held in memory with all that is made of them, if they are no more."""
UNKNOWN = 0.05  # of the response tokens; above it, a warning


# ------------------------------------------------------------------------------------------------ pairs


def facts_of_data(source: object) -> tuple[dict[str, object], int] | None:
    """Returns what decides the pairs of a data set, by name, and how many bytes they are.

    None for few of them, and for sources from outside the package.
    """
    if type(source) is not PairSource:
        return None
    found, size = dict[str, str](), 0
    for path, split, option, subset, revision in source.places():
        files = files_of(path, split, option)
        if files is None:  # the library's own copy of a dataset on the hub, by the library's own digest
            table: Any = read_table(path, split, option, subset, revision)
            found[f"{path} {split}"] = table._fingerprint
            size += table.data.nbytes
        for file in files or ():
            found[str(file)] = cached_digest(file)
            size += file.stat().st_size
    facts = {"data": to_config(source), "files": found, "code": source_digest()}
    return (facts, size) if size >= BYTES else None


def prepare_pairs(
    store: Path,
    facts: Mapping[str, object],
    size: int,
    load: Callable[[str, Callable[[PreferencePair], object]], PairSet],
) -> dict[str, PairSet]:
    """Prepares the pairs of both splits: ``load`` reads those of a split and hands each on. Repeats what it said."""

    def make(write: Callable[[pa.RecordBatch], None]) -> dict[str, object]:
        accounts: dict[str, object] = {}
        with record_lines() as lines:
            for split in SPLITS:
                rows = ArrowRows(PAIRS, write)
                found = load(split, lambda pair: rows.add(pair_row(pair)))  # noqa: B023  # called in this round alone
                rows.flush()
                accounts[split] = {
                    **{name: dict(getattr(found, name)) for name in ("counts", "examples", "notes")},
                    **{"read": found.read, "unused": found.unused, "kept": found.kept, "known": found.known},
                    "sets": {name: asdict(account) for name, account in found.sets.items()},
                }
        return {**accounts, "lines": lines}

    made = prepared_rows(store, "pairs", facts, size, make)
    if not made.anew:
        repeat_lines(made.account["lines"])
    start, pairs = 0, {}
    for split in SPLITS:
        account = dict(made.account[split])
        kept = account.pop("kept")
        known = PairSet(
            PairRows(made.table.slice(start, kept)),
            **{
                **account,
                "counts": Counter(account["counts"]),
                "notes": Counter(account["notes"]),
                "unused": tuple(account["unused"]),
                "sets": {name: SetAccount(**one) for name, one in account["sets"].items()},
            },
        )
        pairs[split] = replace(known, known=known.fingerprint)
        start += kept
    return pairs


# ------------------------------------------------------------------------------------------------ training ids

Take = Callable[[int, PreferencePair, dict[str, EncodedResponse]], None]


def facts_of_ids(chat: ChatFormat, rules: LengthRules, pairs: Mapping[str, PairSet]) -> dict[str, object] | None:
    """Returns what decides the training ids of pairs, by name; None for few of them."""
    if sum(map(len, pairs.values())) <= PAIRS_HELD:
        return None
    return {
        "pairs": {split: found.fingerprint for split, found in pairs.items()},
        "tokenizer and chat template": chat.fingerprint(),
        "date": str(datetime.date.today()) if "strftime_now" in chat.chat_template else None,
        "embeddings": chat.rows.count,
        "lengths": to_config(rules),
        "code": source_digest(),
        "versions": {name: version(name) for name in ("tokenizers", "transformers", "jinja2")},
    }


def prepare_ids(
    store: Path, facts: Mapping[str, object], pairs: Mapping[str, PairSet], encode: Callable[[str, Take], EncodedSet]
) -> tuple[dict[str, EncodedSet], Overlap]:
    """Prepares the training ids of both splits, with what the splits share; ``encode`` hands on those of a split."""

    def make(write: Callable[[pa.RecordBatch], None]) -> dict[str, object]:
        accounts, overlaps = dict[str, object](), Overlaps()
        with record_lines() as lines:
            for split in SPLITS:
                rows = ArrowRows(ENCODED, write)

                def take(place: int, pair: PreferencePair, sides: dict[str, EncodedResponse]) -> None:
                    prompt = key_of_prompt(pair.prompt)
                    overlaps.add(split, prompt, sides)  # noqa: B023  # called in this round alone
                    rows.add(encoded_row(place, prompt, sides))  # noqa: B023

                found = encode(split, take)
                rows.flush()
                accounts[split] = {"tally": vars(found.tally), "read": found.read, "kept": rows.count}
        return {**accounts, "overlap": asdict(overlaps.count()), "lines": lines}

    texts = sum(PER_TEXT * one.pairs.size for one in pairs.values() if isinstance(one.pairs, PairRows))
    made = prepared_rows(store, "encoded", facts, texts, make)
    if not made.anew:
        repeat_lines(made.account["lines"])
    start, encoded = 0, {}
    for split in SPLITS:
        account = made.account[split]
        ids, every = EncodedRows(made.table.slice(start, account["kept"])), pairs[split].pairs
        kept = every.take(ids.rows) if isinstance(every, PairRows) else [every[row] for row in ids.rows]
        encoded[split] = EncodedSet(kept, ids, _tally(account["tally"]), account["read"])
        start += account["kept"]
    return encoded, Overlap(**made.account["overlap"])


def _tally(stored: Account) -> Tally:
    return Tally(Counter(stored["counts"]), stored["first"], stored["words"])


# ------------------------------------------------------------------------------------------------ examples


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the weights of pairs: source and its reader, transforms, rules of alignment.

    ``pairs``: where the pairs come from, for a source that reads columns of the data.
    """

    source: WeightSource
    reader: WeightReader | None
    transforms: Sequence[WeightTransform]
    align: AlignRules
    pairs: object = None

    def facts(self, ids: Mapping[str, object] | None) -> dict[str, object] | None:
        """Returns what decides the examples that this makes of training ids with these facts, by name.

        None for few of them, and for weights or transforms from outside the package, which may read what nobody knows.
        """
        parts = [self.source, *self.transforms]
        if ids is None or any(type(part).__module__.partition(".")[0] != PACKAGE.name for part in parts):
            return None
        transforms = {str(place): to_config(one) for place, one in enumerate(self.transforms)}
        named = {"weights": to_config(self.source), "transforms": transforms, "align": to_config(self.align)}
        captured: dict[str, object] = {}
        if self.reader is not None:
            source = self.source.resolve(self.reader.num_layers or 1)
            key = weights_key(source, self.reader.fingerprint(), self.reader.fingerprint_of_prompts())
            captured = {"key": key, "verdicts": self.reader.verdict}
        if isinstance(self.reader, RunJudge):
            captured["low_label_mass"] = self.reader.settings.low_label_mass
        columns = facts_of_data(self.pairs) if self.source.columns else ({}, 0)
        if columns is None:
            return None
        return {
            "ids": dict(ids),
            **named,
            "columns": columns[0],
            "captured": captured,
            "files": named_files(dict(flatten(named))),
            "versions": {name: version(name) for name in ("torch", "numpy", "Levenshtein")},
        }


@dataclass(frozen=True)
class Examples:
    """Weights, the examples that they make of both splits, and what these are like."""

    weighed: Weighed
    sets: dict[str, ExampleSet]
    measured: dict[str, SplitNumbers]


def prepare_examples_of(
    store: Store,
    facts: Mapping[str, object],
    encoded: Mapping[str, EncodedSet],
    recipe: Recipe,
    make_all: Callable[[Callable[[str, int, TrainingExample], None]], Examples],
) -> Examples:
    """Prepares the weighed examples of both splits: ``make_all`` hands on each with its split and place there."""
    just: list[Examples] = []

    def make(write: Callable[[pa.RecordBatch], None]) -> dict[str, object]:
        rows: dict[str, ArrowRows] = {}

        def take(split: str, place: int, example: TrainingExample) -> None:
            if split not in rows:
                for other in rows.values():
                    other.flush()
                rows[split] = ArrowRows(schema_of_weights(example.weights[0].dtype), write)
            rows[split].add(weighed_row(place, example))

        just.append(make_all(take))
        for one in rows.values() or [ArrowRows(schema_of_weights(torch.float32), write)]:
            one.flush()
        return {"weighed": _describe(just[0].weighed), **{split: _account(just[0], split, rows) for split in SPLITS}}

    tokens = sum(int(np.sum(sizes_of(one.encoded).responses)) for one in encoded.values())
    made = prepared_rows(Path(store.root), "weighed", facts, BYTES_OF_WEIGHT * tokens, make)
    start, sets, measured = 0, {}, {}
    for split in SPLITS:
        account, ids = made.account[split], encoded[split].encoded
        assert isinstance(ids, EncodedRows)
        table = made.table.slice(start, account["kept"])
        rows = ExampleRows(table, ids, list_pair_ids(encoded[split].pairs), f"{digest(facts)[:20]} {split}")
        numbers = {name: account[name] for name in ("read", "dropped", "content_tokens", "unmatched_tokens")}
        sets[split] = ExampleSet(rows, _tally(account["tally"]), **numbers)
        measured[split] = SplitNumbers(account["numbers"], Arrival(**account["arrival"]))
        start += account["kept"]
    weighed = just.pop().weighed if just else _recall(store, made.account["weighed"], encoded, recipe)
    if recipe.reader is not None:
        weighed = replace(weighed, captured=_find_stored(store, weighed, encoded))
    return Examples(weighed, sets, measured)


def _find_stored(store: Store, weighed: Weighed, encoded: Mapping[str, EncodedSet]) -> CapturedRows:
    ids = dict.fromkeys(pair_id for split in SPLITS for pair_id in list_pair_ids(encoded[split].pairs))
    return CapturedRows(store.table(WEIGHTS, weighed.key), list(ids), weighed.layers)


def _account(made: Examples, split: str, rows: Mapping[str, ArrowRows]) -> dict[str, object]:
    found, measured = made.sets[split], made.measured[split]
    numbers = {name: getattr(found, name) for name in ("read", "dropped", "content_tokens", "unmatched_tokens")}
    told = {"numbers": measured.numbers, "arrival": asdict(measured.arrival), "tally": vars(found.tally)}
    return {**numbers, **told, "kept": rows[split].count if split in rows else 0}


_STATISTICS: dict[str, type[Any]] = {
    "verdicts": JudgeStatistics,
    "answers": VerbalizerStatistics,
    "label_mass": LabelMass,
    "traces": TraceStatistics,
}
_PLAIN = ("depth", "key", "reads", "seconds", "rounds", "cut")


def _describe(weighed: Weighed) -> dict[str, object]:
    """Returns what is kept of weights beside the examples that they made."""
    found = {name: getattr(weighed, name) for name in _STATISTICS}
    statistics = {name: None if one is None else asdict(one) for name, one in found.items()}
    return {**{name: getattr(weighed, name) for name in _PLAIN}, **statistics, "pairs": len(weighed.captured)}


def _recall(store: Store, told: Account, encoded: Mapping[str, EncodedSet], recipe: Recipe) -> Weighed:
    """Makes the weights of prepared examples again, without rows; says what the judge does with its labels."""
    statistics: dict[str, Any] = {
        name: None if told[name] is None else kind(**{key: _frozen(value) for key, value in told[name].items()})
        for name, kind in _STATISTICS.items()
    }
    if isinstance(recipe.reader, RunJudge) and statistics["label_mass"] is not None:
        LabelCheck(recipe.reader, store).enforce(statistics["label_mass"])
    source = recipe.source.resolve(told["depth"] or 1)
    weighed = Weighed(
        source=source,
        captured={},
        report=None if recipe.reader is None else CaptureReport(told["pairs"], 0, 0.0, None),
        **{name: told[name] for name in _PLAIN},
        layers=source.rows_read() if recipe.reader is not None else (),
        **statistics,
    )
    chosen = list(recipe.transforms)

    def fit() -> Sequence[WeightTransform]:
        captured = {} if recipe.reader is None else _find_stored(store, weighed, encoded)
        return fit_transforms(chosen, encoded["train"], source, captured, weighed.layers, recipe.align)

    fitted = FittedLater(fit) if any(one.needs_fit for one in chosen) else tuple(chosen)
    return replace(weighed, transforms=fitted)


def _frozen(value: object) -> object:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


class FittedLater(RowsOnDemand[WeightTransform]):
    """Transforms that are fitted on the training pairs when they are asked for, which few runs do."""

    def __init__(self, fit: Callable[[], Sequence[WeightTransform]]) -> None:
        self._fit = cache(fit)

    def __len__(self) -> int:
        return len(self._fit())

    def _make(self, row: int) -> WeightTransform:
        return self._fit()[row]


# ------------------------------------------------------------------------------------------------ the reference


def prepare_logps(
    store: Path, table: StoreTable, rows: ExampleRows, load: Callable[[Sequence[int]], Logps]
) -> ExampleRows:
    """Prepares the reference's log-probabilities of examples: ``load`` gives those of some of ``rows``."""

    def make(write: Callable[[pa.RecordBatch], None]) -> dict[str, object]:
        out = ArrowRows(LOGPS, write)
        for begin in range(0, len(rows), AT_ONCE):
            places = range(begin, min(begin + AT_ONCE, len(rows)))
            for pair in load(places):
                out.add({f"{side}_logps": one.numpy() for side, one in zip(SIDES, pair, strict=True)})
        out.flush()
        return {}

    size = BYTES_OF_WEIGHT * int(np.sum(rows.sizes().responses))
    made = prepared_rows(store, "reference", {"examples": rows.name, "reference": table.key}, size, make)
    return replace(rows, logps=made.table)


# ------------------------------------------------------------------------------------------------ the steps


@dataclass(frozen=True)
class Texts:
    """Pairs of both splits, their training ids, and what validation shares with training.

    ``facts``: what decides the training ids, where they are prepared in the store.
    """

    pairs: dict[str, PairSet]
    encoded: dict[str, EncodedSet]
    overlap: Overlap
    facts: Mapping[str, object] | None = None


@phase("reading the pairs")
def read_pairs(source: PairReader, weights: WeightSource, store: Store | None) -> dict[str, PairSet]:
    """Returns the pairs of both splits; logs which columns of the training data neither pairs nor ``weights`` read."""
    found, pairs = None if store is None else facts_of_data(source), None
    if found is not None and store is not None and isinstance(source, PairSource):
        with suppress(NoJson):  # such pairs are held in memory
            pairs = prepare_pairs(Path(store.root), *found, source.load)
    if pairs is None:
        pairs = {split: source.load(split) for split in SPLITS}
    name_unused(pairs["train"], weights.columns)
    return pairs


@phase("tokenising the pairs")
def encode(pairs: Mapping[str, PairSet], chat: ChatFormat, rules: LengthRules, store: Store | None) -> Texts:
    """Returns both splits with their training ids under the length rules, and what they share.

    Warns of text that the tokenizer does not know. UserError naming the split when nothing is left of it.
    """

    def encode_split(split: str, take: Take | None = None) -> EncodedSet:
        try:
            return encode_pairs(pairs[split].pairs, chat, rules, write=take)
        except UserError as error:
            raise UserError(f"{split}: {error}") from error

    facts = None if store is None else facts_of_ids(chat, rules, pairs)
    if facts is None or store is None:
        encoded = {split: encode_split(split) for split in pairs}
        overlap = count_overlap(encoded["train"], encoded["val"])
    else:
        encoded, overlap = prepare_ids(Path(store.root), facts, pairs, encode_split)
    for split, found in encoded.items():
        share = unknown_share(found, chat.tokenizer)
        if share > UNKNOWN:
            log.warning(
                "%s: %.0f %% of the response tokens are %s, text that the tokenizer does not know: neither judge nor "
                "policy can tell such words apart; take a model whose tokenizer fits the data",
                split,
                100 * share,
                chat.tokenizer.unk_token,
            )
    return Texts(dict(pairs), encoded, overlap, facts)


@phase("weights of the training tokens")
def make_examples(
    recipe: Recipe, texts: Texts, store: Store | None, device: torch.device, refill: str = REFILL
) -> Examples:
    """Returns the examples that ``recipe`` makes of both splits; reads with its model what the store lacks."""
    make = partial(_make_examples, recipe, texts, store, device, refill)
    facts = recipe.facts(texts.facts)
    return make() if facts is None or store is None else prepare_examples_of(store, facts, texts.encoded, recipe, make)


def _make_examples(
    recipe: Recipe,
    texts: Texts,
    store: Store | None,
    device: torch.device,
    refill: str,
    take: Callable[[str, int, TrainingExample], None] | None = None,
) -> Examples:
    """Makes the examples of both splits; those that ``take`` is given are not held."""
    encoded = texts.encoded
    weighed = weigh(recipe.source, recipe.reader, store, encoded, device, refill=refill)
    align, source, captured, layers = recipe.align, weighed.source, weighed.captured, weighed.layers
    transforms = fit_transforms(recipe.transforms, encoded["train"], source, captured, layers, align)
    sets, measured = dict[str, ExampleSet](), dict[str, SplitNumbers]()
    for split in SPLITS:
        numbers, places = ExampleNumbers(texts.pairs[split], source), list[int]()
        examples: list[TrainingExample] = []

        def keep(place: int, example: TrainingExample) -> None:
            numbers.add(example)  # noqa: B023  # called in this round alone
            places.append(place)  # noqa: B023
            examples.append(example) if take is None else take(split, place, example)  # noqa: B023

        found = prepare_examples(encoded[split], source, captured, align, layers, transforms, keep)
        sets[split] = replace(found, examples=examples)
        sizes = sizes_of(encoded[split].encoded).take(np.array(places, dtype=np.int64))
        measured[split] = numbers.of(sizes)
    return Examples(replace(weighed, transforms=transforms), sets, measured)
