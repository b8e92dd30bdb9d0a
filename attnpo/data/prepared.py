"""Prepares data: reads pairs, encodes them and builds weighted examples.

For large data, each result is written to the store once and memory-mapped by later runs. Defines the keys of the stored
results, the counts stored with each result, and the size above which results are stored. For smaller data, results are
recomputed quickly and kept in memory.
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
    ArrowRowWriter,
    EncodedRows,
    ExampleRows,
    LazyRows,
    NotSerializableError,
    PairRows,
    count_row_tokens,
    encoded_to_row,
    example_to_row,
    pair_to_row,
    weights_schema,
)
from attnpo.data.base import SPLITS, PairReader, PairSet, PairSource, SetCounts, log_unused_columns
from attnpo.data.collate import TrainingExample
from attnpo.data.example_statistics import ExampleStatistics, SplitStatistics
from attnpo.data.overlap import Overlap, OverlapCounter, count_overlap, digest_prompt
from attnpo.data.prepare import (
    EncodedSet,
    ExampleSet,
    Tally,
    encode_pairs,
    fit_transforms,
    prepare_examples,
    unknown_token_share,
)
from attnpo.data.prepared_rows import Account, load_or_prepare, record_log_lines, repeat_log_lines
from attnpo.data.rules import AlignRules, LengthRules
from attnpo.data.tables import list_files, read_table
from attnpo.data.weighing import REFILL, WeightingResult, load_or_compute_weights
from attnpo.judge.base import WeightReader
from attnpo.judge.judge import LabelCheck, RunJudge
from attnpo.judge.verdicts import JudgeStatistics, LabelMass, TraceStatistics
from attnpo.models.stored_digests import cached_digest
from attnpo.schema import SIDES, EncodedResponse, PreferencePair, UserError, digest, list_pair_ids
from attnpo.system.files import flatten
from attnpo.system.source_digest import PACKAGE, source_digest
from attnpo.system.store import Store, StoreTable
from attnpo.text.chat import ChatFormat
from attnpo.weights.arrival import WeightCoverage
from attnpo.weights.base import WeightSource
from attnpo.weights.capture import WEIGHTS, CapturedRows, CaptureReport, LogpPair, weights_key
from attnpo.weights.readers import VerbalizerStatistics
from attnpo.weights.transforms import WeightTransform

log = logging.getLogger(__name__)

Logps = Sequence[LogpPair]

BYTES = 8 << 20
"""Pairs are stored only if the files they were read from have at least this many bytes in total."""
PER_TEXT = 3
"""Approximate number of bytes of training ids and offsets per byte of text."""
BYTES_OF_WEIGHT = 4
PAIRS_HELD = 4096
"""Maximum number of pairs kept in memory, together with their training ids and examples."""
UNKNOWN = 0.05  # share of the response tokens above which a warning is logged


# ------------------------------------------------------------------------------------------------ pairs


def describe_data(source: object) -> tuple[dict[str, object], int] | None:
    """Returns all inputs that determine a source's pairs, by name, and the size of the data in bytes.

    Returns None if the data are small, or if the source's class is defined outside the package.
    """
    if type(source) is not PairSource:
        return None
    found, size = dict[str, str](), 0
    for path, split, option, subset, revision in source.list_tables():
        files = list_files(path, split, option)
        if files is None:  # a hub dataset, identified by the library's own fingerprint
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
    """Loads both splits' pairs from the store and repeats their log, or reads them with ``load`` and stores them."""

    def write_pairs(write: Callable[[pa.RecordBatch], None]) -> dict[str, object]:
        accounts: dict[str, object] = {}
        with record_log_lines() as lines:
            for split in SPLITS:
                rows = ArrowRowWriter(PAIRS, write)
                found = load(split, lambda pair: rows.add(pair_to_row(pair)))  # noqa: B023  # only called within this iteration
                rows.flush()
                accounts[split] = {
                    **{name: dict(getattr(found, name)) for name in ("counts", "examples", "notes")},
                    **{"read": found.read, "unused": found.unused, "kept": found.num_kept, "known": found.known},
                    "sets": {name: asdict(account) for name, account in found.sets.items()},
                }
        return {**accounts, "lines": lines}

    made = load_or_prepare(store, "pairs", facts, size, write_pairs)
    if not made.anew:
        repeat_log_lines(made.account["lines"])
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
                "sets": {name: SetCounts(**one) for name, one in account["sets"].items()},
            },
        )
        pairs[split] = replace(known, known=known.fingerprint)
        start += kept
    return pairs


# ------------------------------------------------------------------------------------------------ training ids

Take = Callable[[int, PreferencePair, dict[str, EncodedResponse]], None]


def describe_ids(chat: ChatFormat, rules: LengthRules, pairs: Mapping[str, PairSet]) -> dict[str, object] | None:
    """Returns all inputs that determine the pairs' training ids, by name, or None if there are few pairs."""
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
    """Loads both splits' training ids and their overlap from the store, or computes and stores them."""

    def write_ids(write: Callable[[pa.RecordBatch], None]) -> dict[str, object]:
        accounts, overlaps = dict[str, object](), OverlapCounter()
        with record_log_lines() as lines:
            for split in SPLITS:
                rows = ArrowRowWriter(ENCODED, write)

                def add_pair(place: int, pair: PreferencePair, sides: dict[str, EncodedResponse]) -> None:
                    prompt = digest_prompt(pair.prompt)
                    overlaps.add(split, prompt, sides)  # noqa: B023  # only called within this iteration
                    rows.add(encoded_to_row(place, prompt, sides))  # noqa: B023

                found = encode(split, add_pair)
                rows.flush()
                accounts[split] = {"tally": vars(found.tally), "read": found.read, "kept": rows.count}
        return {**accounts, "overlap": asdict(overlaps.count()), "lines": lines}

    texts = sum(PER_TEXT * one.pairs.num_bytes for one in pairs.values() if isinstance(one.pairs, PairRows))
    made = load_or_prepare(store, "encoded", facts, texts, write_ids)
    if not made.anew:
        repeat_log_lines(made.account["lines"])
    start, encoded = 0, {}
    for split in SPLITS:
        account = made.account[split]
        ids, every = EncodedRows(made.table.slice(start, account["kept"])), pairs[split].pairs
        kept = every.select(ids.rows) if isinstance(every, PairRows) else [every[row] for row in ids.rows]
        encoded[split] = EncodedSet(kept, ids, _load_tally(account["tally"]), account["read"])
        start += account["kept"]
    return encoded, Overlap(**made.account["overlap"])


def _load_tally(stored: Account) -> Tally:
    return Tally(Counter(stored["counts"]), stored["first"], stored["words"])


# ------------------------------------------------------------------------------------------------ examples


@dataclass(frozen=True)
class ExampleRecipe:
    """Settings that determine the weights of pairs: source and reader, transforms, alignment.

    ``pairs``: source of the pairs; needed if the weight source reads columns of the data.
    """

    source: WeightSource
    reader: WeightReader | None
    transforms: Sequence[WeightTransform]
    align: AlignRules
    pairs: object = None

    def describe(self, ids: Mapping[str, object] | None) -> dict[str, object] | None:
        """Returns all inputs that determine the examples, by name; ``ids`` are those that determine the training ids.

        Returns None if there are few pairs, or if the weight source or a transform is defined outside the package and
        may therefore depend on unknown inputs.
        """
        parts = [self.source, *self.transforms]
        if ids is None or any(type(part).__module__.partition(".")[0] != PACKAGE.name for part in parts):
            return None
        transforms = {str(place): to_config(one) for place, one in enumerate(self.transforms)}
        named = {"weights": to_config(self.source), "transforms": transforms, "align": to_config(self.align)}
        captured: dict[str, object] = {}
        if self.reader is not None:
            source = self.source.resolve(self.reader.num_layers or 1)
            key = weights_key(source, self.reader.fingerprint(), self.reader.prompts_fingerprint())
            captured = {"key": key, "verdicts": self.reader.verdict}
        if isinstance(self.reader, RunJudge):
            captured["low_label_mass"] = self.reader.settings.low_label_mass
        columns = describe_data(self.pairs) if self.source.columns else ({}, 0)
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
class WeightedSplits:
    """Weights, the examples of both splits built with these weights, and statistics of the examples."""

    weighed: WeightingResult
    sets: dict[str, ExampleSet]
    measured: dict[str, SplitStatistics]


def prepare_weighted_examples(
    store: Store,
    facts: Mapping[str, object],
    encoded: Mapping[str, EncodedSet],
    recipe: ExampleRecipe,
    make_all: Callable[[Callable[[str, int, TrainingExample], None]], WeightedSplits],
) -> WeightedSplits:
    """Loads the examples of both splits from the store, or builds them with ``make_all`` and stores them."""
    just: list[WeightedSplits] = []

    def write_examples(write: Callable[[pa.RecordBatch], None]) -> dict[str, object]:
        rows: dict[str, ArrowRowWriter] = {}

        def add_example(split: str, place: int, example: TrainingExample) -> None:
            if split not in rows:
                for other in rows.values():
                    other.flush()
                rows[split] = ArrowRowWriter(weights_schema(example.weights[0].dtype), write)
            rows[split].add(example_to_row(place, example))

        just.append(make_all(add_example))
        for one in rows.values() or [ArrowRowWriter(weights_schema(torch.float32), write)]:
            one.flush()
        return {
            "weighed": _describe_weights(just[0].weighed),
            **{split: _summarize_split(just[0], split, rows) for split in SPLITS},
        }

    tokens = sum(int(np.sum(count_row_tokens(one.encoded).responses)) for one in encoded.values())
    made = load_or_prepare(Path(store.root), "weighed", facts, BYTES_OF_WEIGHT * tokens, write_examples)
    start, sets, measured = 0, {}, {}
    for split in SPLITS:
        account, ids = made.account[split], encoded[split].encoded
        assert isinstance(ids, EncodedRows)
        table = made.table.slice(start, account["kept"])
        rows = ExampleRows(table, ids, list_pair_ids(encoded[split].pairs), f"{digest(facts)[:20]} {split}")
        numbers = {name: account[name] for name in ("read", "dropped", "content_tokens", "unmatched_tokens")}
        sets[split] = ExampleSet(rows, _load_tally(account["tally"]), **numbers)
        measured[split] = SplitStatistics(account["numbers"], WeightCoverage(**account["arrival"]))
        start += account["kept"]
    weighed = just.pop().weighed if just else _restore_weights(store, made.account["weighed"], encoded, recipe)
    if recipe.reader is not None:
        weighed = replace(weighed, captured=_find_captured(store, weighed, encoded))
    return WeightedSplits(weighed, sets, measured)


def _find_captured(store: Store, weighed: WeightingResult, encoded: Mapping[str, EncodedSet]) -> CapturedRows:
    ids = dict.fromkeys(pair_id for split in SPLITS for pair_id in list_pair_ids(encoded[split].pairs))
    return CapturedRows(store.table(WEIGHTS, weighed.key), list(ids), weighed.layers)


def _summarize_split(made: WeightedSplits, split: str, rows: Mapping[str, ArrowRowWriter]) -> dict[str, object]:
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


def _describe_weights(weighed: WeightingResult) -> dict[str, object]:
    """Returns the weight statistics that are stored with the examples."""
    found = {name: getattr(weighed, name) for name in _STATISTICS}
    statistics = {name: None if one is None else asdict(one) for name, one in found.items()}
    return {**{name: getattr(weighed, name) for name in _PLAIN}, **statistics, "pairs": len(weighed.captured)}


def _restore_weights(
    store: Store, told: Account, encoded: Mapping[str, EncodedSet], recipe: ExampleRecipe
) -> WeightingResult:
    """Restores the weighting result of the stored examples, without captured rows; checks the judge's label mass."""
    statistics: dict[str, Any] = {
        name: None if told[name] is None else kind(**{key: _to_tuples(value) for key, value in told[name].items()})
        for name, kind in _STATISTICS.items()
    }
    if isinstance(recipe.reader, RunJudge) and statistics["label_mass"] is not None:
        LabelCheck(recipe.reader, store).enforce_minimum(statistics["label_mass"])
    source = recipe.source.resolve(told["depth"] or 1)
    weighed = WeightingResult(
        source=source,
        captured={},
        report=None if recipe.reader is None else CaptureReport(told["pairs"], 0, 0.0, None),
        **{name: told[name] for name in _PLAIN},
        layers=source.rows_to_read() if recipe.reader is not None else (),
        **statistics,
    )
    chosen = list(recipe.transforms)

    def fit_captured() -> Sequence[WeightTransform]:
        captured = {} if recipe.reader is None else _find_captured(store, weighed, encoded)
        return fit_transforms(chosen, encoded["train"], source, captured, weighed.layers, recipe.align)

    fitted = LazyTransforms(fit_captured) if any(one.needs_fit for one in chosen) else tuple(chosen)
    return replace(weighed, transforms=fitted)


def _to_tuples(value: object) -> object:
    return tuple(map(_to_tuples, value)) if isinstance(value, list) else value


class LazyTransforms(LazyRows[WeightTransform]):
    """Transforms that are fitted on the training pairs when first accessed, since few runs need them."""

    def __init__(self, fit: Callable[[], Sequence[WeightTransform]]) -> None:
        self._fit = cache(fit)

    def __len__(self) -> int:
        return len(self._fit())

    def _make_row(self, row: int) -> WeightTransform:
        return self._fit()[row]


# ---------------------------------------------------------------------------------------- reference log-probabilities


def prepare_logps(
    store: Path, table: StoreTable, rows: ExampleRows, load: Callable[[Sequence[int]], Logps]
) -> ExampleRows:
    """Loads the examples' reference log-probabilities from the store, or calls ``load`` and stores its result."""

    def write_logps(write: Callable[[pa.RecordBatch], None]) -> dict[str, object]:
        out = ArrowRowWriter(LOGPS, write)
        for begin in range(0, len(rows), AT_ONCE):
            places = range(begin, min(begin + AT_ONCE, len(rows)))
            for pair in load(places):
                out.add({f"{side}_logps": one.numpy() for side, one in zip(SIDES, pair, strict=True)})
        out.flush()
        return {}

    size = BYTES_OF_WEIGHT * int(np.sum(rows.token_counts().responses))
    made = load_or_prepare(store, "reference", {"examples": rows.name, "reference": table.key}, size, write_logps)
    return replace(rows, logps=made.table)


# ------------------------------------------------------------------------------------------------ preparation steps


@dataclass(frozen=True)
class EncodedTexts:
    """Pairs and training ids of both splits, and the overlap of validation data with training data.

    ``facts``: description of the inputs, if the training ids are in the store.
    """

    pairs: dict[str, PairSet]
    encoded: dict[str, EncodedSet]
    overlap: Overlap
    facts: Mapping[str, object] | None = None


@phase("reading the pairs")
def read_pairs(source: PairReader, weights: WeightSource, store: Store | None) -> dict[str, PairSet]:
    """Reads the pairs of both splits; logs training columns that neither the pairs nor ``weights`` use."""
    found, pairs = None if store is None else describe_data(source), None
    if found is not None and store is not None and isinstance(source, PairSource):
        with suppress(NotSerializableError):  # such pairs stay in memory
            pairs = prepare_pairs(Path(store.root), *found, source.load)
    if pairs is None:
        pairs = {split: source.load(split) for split in SPLITS}
    log_unused_columns(pairs["train"], weights.columns)
    return pairs


@phase("tokenising the pairs")
def encode(pairs: Mapping[str, PairSet], chat: ChatFormat, rules: LengthRules, store: Store | None) -> EncodedTexts:
    """Encodes both splits under the length rules and counts the overlap of validation with training data.

    Warns if many tokens of the responses are unknown to the tokenizer.

    Raises:
        UserError: all pairs of a split were dropped; the message names the split.
    """

    def encode_split(split: str, take: Take | None = None) -> EncodedSet:
        try:
            return encode_pairs(pairs[split].pairs, chat, rules, write=take)
        except UserError as error:
            raise UserError(f"{split}: {error}") from error

    facts = None if store is None else describe_ids(chat, rules, pairs)
    if facts is None or store is None:
        encoded = {split: encode_split(split) for split in pairs}
        overlap = count_overlap(encoded["train"], encoded["val"])
    else:
        encoded, overlap = prepare_ids(Path(store.root), facts, pairs, encode_split)
    for split, found in encoded.items():
        share = unknown_token_share(found, chat.tokenizer)
        if share > UNKNOWN:
            log.warning(
                "%s: %.0f %% of the response tokens are %s (unknown to the tokenizer): neither judge nor policy can "
                "distinguish these words; use a model whose tokenizer fits the data",
                split,
                100 * share,
                chat.tokenizer.unk_token,
            )
    return EncodedTexts(dict(pairs), encoded, overlap, facts)


@phase("weights of the training tokens")
def make_examples(
    recipe: ExampleRecipe, texts: EncodedTexts, store: Store | None, device: torch.device, refill: str = REFILL
) -> WeightedSplits:
    """Builds the examples of both splits; runs the reader's model to compute weights missing from the store."""
    make = partial(_make_examples, recipe, texts, store, device, refill)
    facts = recipe.describe(texts.facts)
    return (
        make()
        if facts is None or store is None
        else prepare_weighted_examples(store, facts, texts.encoded, recipe, make)
    )


def _make_examples(
    recipe: ExampleRecipe,
    texts: EncodedTexts,
    store: Store | None,
    device: torch.device,
    refill: str,
    take: Callable[[str, int, TrainingExample], None] | None = None,
) -> WeightedSplits:
    """Builds the examples of both splits; examples passed to ``take`` are not kept in memory."""
    encoded = texts.encoded
    weighed = load_or_compute_weights(recipe.source, recipe.reader, store, encoded, device, refill=refill)
    align, source, captured, layers = recipe.align, weighed.source, weighed.captured, weighed.layers
    transforms = fit_transforms(recipe.transforms, encoded["train"], source, captured, layers, align)
    sets, measured = dict[str, ExampleSet](), dict[str, SplitStatistics]()
    for split in SPLITS:
        numbers, places = ExampleStatistics(texts.pairs[split], source), list[int]()
        examples: list[TrainingExample] = []

        def add_example(place: int, example: TrainingExample) -> None:
            numbers.add(example)  # noqa: B023  # only called within this iteration
            places.append(place)  # noqa: B023
            examples.append(example) if take is None else take(split, place, example)  # noqa: B023

        found = prepare_examples(encoded[split], source, captured, align, layers, transforms, add_example)
        sets[split] = replace(found, examples=examples)
        sizes = count_row_tokens(encoded[split].encoded).select(np.array(places, dtype=np.int64))
        measured[split] = numbers.compute(sizes)
    return WeightedSplits(replace(weighed, transforms=transforms), sets, measured)
