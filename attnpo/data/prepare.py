"""Builds training examples from pairs: encodes, truncates and weights them; counts all truncated or dropped pairs."""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress, tee
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from attnpo.data.arrow_rows import EncodedRows
from attnpo.data.collate import TrainingExample
from attnpo.data.rules import AlignRules, KeepSide, LengthRules, OverlongAction
from attnpo.judge.layers import StoredRow
from attnpo.schema import SIDES, EncodedResponse, Message, PairWeights, PreferencePair, UserError, list_pair_ids
from attnpo.text.chat import ChatFormat, EncodedResponses
from attnpo.weights.base import TextSource, WeightSource, required_coverage
from attnpo.weights.capture import UnreadablePair
from attnpo.weights.pipeline import (
    PairInputs,
    SourceWeights,
    TrainingWeights,
    check_transforms,
    fit_transforms_in_order,
    iterate_source_weights,
    iterate_training_weights,
)
from attnpo.weights.transforms import WeightTransform

log = logging.getLogger(__name__)

UNREADABLE = "dropped: the judge cannot read both responses"
UNASKED = "dropped: the verbalizer cannot read both responses"
UNSCORED = "dropped: the scorers cannot read both responses"
UNREWARDED = "dropped: the reward model cannot read both responses"
REFUSED = {"judge": UNREADABLE, "scorers": UNSCORED, "reward": UNREWARDED}
CUT, CUT_PROMPT = "cut: {} response", "cut: beginning of the prompt for the {} response"
CUT_IN_FRONT = "cut: beginning of the {} response, and all of its prompt,"
DROPPED_FOR_COVERAGE = "dropped: coverage"
SILENT = f"{DROPPED_FOR_COVERAGE} 0, a response has no scores"
VOID = "pair weight 0: no effect on training"
APART = "tokenised separately, because its beginning would merge with the prompt's last token"
IN_PROMPT = "special token spelled out in the prompt"
SAME = "dropped: both responses have the same training tokens"


class TruncatedSides(NamedTuple):
    """Parts of a training sequence (prompt, response) that lost tokens to truncation."""

    prompt: bool
    response: bool


def truncate(
    encoded: EncodedResponse, max_prompt_length: int, max_length: int, *, keep_end: bool = False
) -> tuple[EncodedResponse, TruncatedSides]:
    """Truncates prompt and response; also returns which of the two were truncated.

    The prompt keeps its last ``max_prompt_length`` tokens (a BOS at its start is dropped too, as in the paper's run);
    the response keeps as many tokens as still fit within ``max_length``. The response may end up empty; callers drop
    and count such pairs.

    With ``keep_end``, prompt and response together keep their last ``max_length`` tokens instead, as with TRL's
    keep_end. If all of these belong to the response, the first one serves as the prompt, since nothing predicts it.
    """
    prompt = encoded.prompt_ids[max(0, len(encoded.prompt_ids) - max(0, max_prompt_length)) :]
    over = len(prompt) + len(encoded.response_ids) - max_length
    if keep_end and over > 0:
        kept, left = (prompt + encoded.response_ids)[over:], max(1, len(prompt) - over)
        lost = len(encoded.response_ids) - (len(kept) - left)
        return EncodedResponse(kept[:left], kept[left:], encoded.offsets[lost:]), TruncatedSides(
            prompt=True, response=lost > 0
        )
    room = max(0, max_length - len(prompt))
    cut = TruncatedSides(prompt=len(prompt) < len(encoded.prompt_ids), response=room < len(encoded.response_ids))
    return EncodedResponse(prompt, encoded.response_ids[:room], encoded.offsets[:room]), cut


@dataclass
class Tally:
    """Event counts with the first three pair ids of each event; ``words`` contains details of the first occurrence."""

    counts: Counter[str] = field(default_factory=Counter)
    first: dict[str, list[str]] = field(default_factory=dict)
    words: dict[str, str] = field(default_factory=dict)

    def add(self, event: str, pair_id: str) -> None:
        """Counts one occurrence of an event for the given pair."""
        self.counts[event] += 1
        ids = self.first.setdefault(event, [])
        if len(ids) < 3:
            ids.append(pair_id[:8])

    def count_starting_with(self, opening: str) -> int:
        """Returns the number of events whose name starts with ``opening``."""
        return sum(count for event, count in self.counts.items() if event.startswith(opening))

    def format_lines(self) -> list[str]:
        """Returns one line per event, e.g. ``dropped: a response was truncated to zero tokens: 1 (3f2a...)``."""
        return [f"{event}: {count} ({', '.join(self.first[event])})" for event, count in sorted(self.counts.items())]


@dataclass(frozen=True)
class ExampleSet:
    """Examples of one split, with counts that account for every pair: ``read == len(examples) + dropped``."""

    examples: Sequence[TrainingExample]
    tally: Tally
    read: int
    dropped: int
    content_tokens: int
    unmatched_tokens: int

    @property
    def unmatched_share(self) -> float:
        """Returns the share of the responses' content tokens that match no source token."""
        return self.unmatched_tokens / max(1, self.content_tokens)


def encode_pair(
    pair: PreferencePair, chat: ChatFormat, rules: LengthRules, tally: Tally, *, keep_same: bool = False
) -> dict[str, EncodedResponse] | None:
    """Encodes and truncates both branches of a pair; returns None if the pair is dropped. Counts events in ``tally``.

    A pair is dropped if the chat template rejects or rewrites its text (the first case of each kind is logged in full),
    or if both responses have the same token ids after trimming or truncation, so that no preference is left.
    ``keep_same`` keeps pairs with the same token ids, for uses other than training.
    """
    return _apply_length_rules(pair, chat.encode_responses(*_prompt_and_responses(pair)), chat, rules, tally, keep_same)


def _prompt_and_responses(pair: PreferencePair) -> tuple[Sequence[Message], list[str]]:
    return pair.prompt, [pair.response(side) for side in SIDES]


def _apply_length_rules(
    pair: PreferencePair, found: EncodedResponses, chat: ChatFormat, rules: LengthRules, tally: Tally, keep_same: bool
) -> dict[str, EncodedResponse] | None:
    if found.problem is not None:
        event = f"dropped: {found.problem.reason}"
        if event not in tally.words:
            tally.words[event] = f"pair {pair.pair_id}: {found.problem}"
            log.warning("dropped (similar pairs are only counted): %s", tally.words[event])
        tally.add(event, pair.pair_id)
        return None
    encoded, cut_prompt, cut_sides, special = {}, False, dict[str, str](), []
    keep_end = rules.keep is KeepSide.END
    for side, whole in zip(SIDES, found.encoded, strict=True):
        encoded[side], cut = truncate(whole, rules.max_prompt_length, rules.max_length, keep_end=keep_end)
        if chat.count_special_inside(encoded[side], pair.response(side)):
            special.append(side)
        cut_prompt = cut_prompt or len(whole.prompt_ids) > rules.max_prompt_length
        if min(len(whole.prompt_ids), rules.max_prompt_length) + len(whole.response_ids) > rules.max_length:
            cut_sides[side] = CUT if not keep_end else CUT_IN_FRONT if cut.response else CUT_PROMPT
    if cut_prompt and rules.overlong is OverlongAction.DROP:
        tally.add(f"dropped: prompt longer than lengths.max_prompt_length {rules.max_prompt_length}", pair.pair_id)
        return None
    if cut_sides and rules.overlong is OverlongAction.DROP:
        tally.add(f"dropped: prompt and response longer than lengths.max_length {rules.max_length}", pair.pair_id)
        return None
    if any(not encoded[side].response_ids for side in SIDES):
        tally.add("dropped: a response was truncated to zero tokens", pair.pair_id)
        return None
    if not keep_same and encoded["chosen"].response_ids == encoded["rejected"].response_ids:
        tally.add(SAME, pair.pair_id)
        return None
    if cut_prompt:
        tally.add(f"cut: prompt to its last {rules.max_prompt_length} tokens", pair.pair_id)
    for side, words in cut_sides.items():
        tally.add(f"{words.format(side)} at lengths.max_length {rules.max_length}", pair.pair_id)
    if chat.has_special_tokens(pair.prompt):
        tally.add(IN_PROMPT, pair.pair_id)
    for side in special:
        tally.add(f"special token spelled out in the {side} response", pair.pair_id)
    for side in compress(SIDES, found.apart):
        tally.add(f"{side} response {APART}", pair.pair_id)
    return encoded


def make_example(
    pair_id: str, encoded: Mapping[str, EncodedResponse], weights: TrainingWeights, pair_weight: float = 1.0
) -> TrainingExample:
    """Builds the training example of an encoded pair; the pair weight is 0 if all token weights of both sides are 0."""
    void = not (bool(weights.chosen.any()) or bool(weights.rejected.any()))
    return TrainingExample(
        pair_id=pair_id,
        chosen=encoded["chosen"],
        rejected=encoded["rejected"],
        weights=(weights.chosen, weights.rejected),
        lengths=weights.lengths,
        coverage=weights.coverage,
        pair_weight=0.0 if void else pair_weight,
        factors=weights.factors,
        source_coverage=weights.source_coverage,
        kept_mass=weights.kept_mass,
    )


@dataclass(frozen=True)
class EncodedSet:
    """Pairs of one split that fit the length rules, with their training ids by side."""

    pairs: Sequence[PreferencePair]
    encoded: Sequence[dict[str, EncodedResponse]]
    tally: Tally
    read: int


def encode_pairs(
    pairs: Iterable[PreferencePair],
    chat: ChatFormat,
    rules: LengthRules,
    *,
    keep_same: bool = False,
    write: Callable[[int, PreferencePair, dict[str, EncodedResponse]], object] | None = None,
) -> EncodedSet:
    """Encodes ``pairs``, truncating or dropping those that exceed the limits, and counts these cases.

    If given, ``write`` receives each pair with its position and training ids, which are then not kept in memory. Call
    this before any judge runs, so that no judge forward pass is wasted on dropped pairs. One bad pair never aborts a
    run.

    Raises:
        UserError: there are pairs but all were dropped; the message lists the counts by reason.
    """
    held: tuple[list[PreferencePair], list[dict[str, EncodedResponse]]] = ([], [])
    tally, read, left = Tally(), 0, 0
    asked, given = tee(pairs)  # the two iterators are a few batches apart
    for pair, found in zip(given, chat.encode_many(map(_prompt_and_responses, asked)), strict=True):
        encoded = _apply_length_rules(pair, found, chat, rules, tally, keep_same)
        if encoded is not None and write is not None:
            write(read, pair, encoded)
        elif encoded is not None:
            held[0].append(pair)
            held[1].append(encoded)
        read += 1
        left += encoded is not None
    if read and not left:
        raise UserError(
            f"none of the {read} pairs is usable ({'; '.join(tally.format_lines())}): a pair needs different "
            "responses, must fit lengths.max_length and must be accepted by the chat template; change these settings "
            "or the data" + "".join(f"; {words}" for words in list(tally.words.values())[:1])
        )
    warn_about_special_tokens(tally.counts[IN_PROMPT], left, tally.first.get(IN_PROMPT, []))
    return EncodedSet(*held, tally, read)


def warn_about_special_tokens(count: int, prompts: int, first: Sequence[str]) -> None:
    """Warns if most prompts (``count`` of ``prompts``) contain special tokens; ``first`` lists some of their ids."""
    if 2 * count > prompts:
        log.warning(
            "%d of %d prompts (first: %s) contain special tokens as text: they seem to have been rendered with "
            "a chat template already, but the template is applied again; provide prompts as plain text or messages",
            *(count, prompts, ", ".join(first[:3])),
        )


def unknown_token_share(encoded: EncodedSet, tokenizer: PreTrainedTokenizerBase) -> float:
    """Returns the share of unknown tokens in the responses; 0 if the tokenizer has no unknown token."""
    unknown = tokenizer.unk_token_id
    if unknown is None or unknown == tokenizer.eos_token_id:
        return 0.0
    if isinstance(encoded.encoded, EncodedRows):
        found, tokens = encoded.encoded.count_token(unknown)
        return found / max(1, tokens)
    ids = [token for sides in encoded.encoded for side in SIDES for token in sides[side].response_ids]
    return ids.count(unknown) / max(1, len(ids))


def fit_transforms(
    transforms: Sequence[WeightTransform],
    encoded: EncodedSet,
    source: WeightSource,
    captured: Mapping[str, PairWeights],
    layers: tuple[StoredRow, ...] = (),
    align: AlignRules | None = None,
) -> tuple[WeightTransform, ...]:
    """Fits the transforms that have ``needs_fit`` on ``encoded`` (the training split); returns all transforms.

    Pairs with a coverage below that required by ``align`` are not used for fitting because they will be dropped.
    """
    check_transforms(source, transforms)
    if not any(transform.needs_fit for transform in transforms):
        return tuple(transforms)
    least = required_coverage(source, None if align is None else align.min_coverage)
    readable = [asked for asked in _iter_pairs_to_weight(encoded, captured) if _is_readable(asked)]
    finished = {}
    for asked, rows in zip(readable, iterate_source_weights(source, readable, layers), strict=True):
        if all(_has_coverage(row, least) for row in rows.values()):
            finished[asked.pair_id] = rows
    return fit_transforms_in_order(transforms, finished)


def _iter_pairs_to_weight(encoded: EncodedSet, captured: Mapping[str, PairWeights]) -> Iterator[PairInputs]:
    for pair, sides in zip(encoded.pairs, encoded.encoded, strict=True):
        yield PairInputs(captured.get(pair.pair_id), sides, pair)


def _is_readable(asked: PairInputs) -> bool:
    return asked.captured is None or bool(asked.captured.rounds)


def _has_coverage(row: SourceWeights, least: float) -> bool:
    share = 1.0 if row.weighted is None else float(row.weighted[row.changeable_tokens].double().mean())
    return share > 0 and share >= least


def prepare_examples(
    encoded: EncodedSet,
    source: WeightSource,
    captured: Mapping[str, PairWeights],
    align: AlignRules,
    layers: tuple[StoredRow, ...] = (),
    transforms: Sequence[WeightTransform] = (),
    write: Callable[[int, TrainingExample], object] | None = None,
) -> ExampleSet:
    """Builds training examples in order, and counts all truncated and dropped pairs.

    Args:
        encoded: pairs of one split.
        source: resolved weight source.
        captured: the source's stored rows by pair id (empty if the source stores none); a pair that the model could not
            read has no rounds and is dropped.
        align: settings for mapping weights to training tokens, and the coverage required of a pair.
        layers: layer of each captured row.
        transforms: weight transforms, fitted with ``fit_transforms``.
        write: if given, receives each example with the pair's position in ``encoded``; examples are then not kept in
            memory.
    """
    tally = Tally(encoded.tally.counts.copy(), {event: list(ids) for event, ids in encoded.tally.first.items()})
    examples: list[TrainingExample] = []
    content, unmatched, left = 0, 0, 0
    least = required_coverage(source, align.min_coverage)
    uncovered = f"{DROPPED_FOR_COVERAGE} below {'weights' if align.min_coverage is None else 'align'}.min_coverage"
    unreadable = next((words for need, words in REFUSED.items() if need in source.requires), UNASKED)
    weigher = source if isinstance(source, TextSource) else None
    told, again = tee(_iter_pairs_to_weight(encoded, captured))
    weighed = iterate_training_weights(source, filter(_is_readable, again), align.method, transforms, layers=layers)
    for place, asked in enumerate(told):
        pair, raw = asked.pair, asked.captured
        assert pair is not None  # ``_iter_pairs_to_weight`` always sets it
        pair_id = pair.pair_id
        if raw is not None and not raw.rounds:
            tally.add(f"{unreadable}: {raw.reason}" if isinstance(raw, UnreadablePair) else unreadable, pair_id)
            continue
        weights = next(weighed)
        content += sum(weights.content)
        unmatched += sum(weights.unmatched)
        if weights.realigned:
            tally.add("judge rounds tokenised a response differently; aligned by characters", pair_id)
        if source.partial and min(weights.coverage) == 0:
            tally.add(SILENT, pair_id)
            continue
        if min(weights.coverage) < least:
            tally.add(f"{uncovered} {least:g}", pair_id)
            continue
        for side in weights.flat:
            tally.add(f"all raw weights of the {side} response are 0: uniform weights are used", pair_id)
        example = make_example(pair_id, asked.encoded, weights, 1.0 if weigher is None else weigher.pair_weight(pair))
        for side, row in zip(SIDES, example.weights, strict=True):
            if not bool(row.any()):
                tally.add(f"no weighted token in the {side} response", pair_id)
        if example.pair_weight == 0:
            tally.add(VOID, pair_id)
        left += 1
        if write is None:
            examples.append(example)
        else:
            write(place, example)
    return ExampleSet(examples, tally, encoded.read, encoded.read - left, content, unmatched)


def percentiles(counts: Sequence[int]) -> dict[str, int]:
    """Returns the 50th, 90th and 99th percentiles and the maximum of ``counts``; empty if there are no counts."""
    ordered = sorted(counts)
    if not ordered:
        return {}
    at = {f"p{q}": ordered[min(len(ordered) - 1, q * len(ordered) // 100)] for q in (50, 90, 99)}
    return {**at, "max": ordered[-1]}


def select_calibration_pairs(pairs: Sequence[PreferencePair], count: int) -> list[PreferencePair]:
    """Selects the first ``count`` distinct pairs in order of their ids, regardless of file order."""
    unique = {pair_id: place for place, pair_id in enumerate(list_pair_ids(pairs))}
    return [pairs[unique[pair_id]] for pair_id in sorted(unique)[:count]]


def sample_as_splits(encoded: EncodedSet, sample: list[PreferencePair]) -> dict[str, EncodedSet]:
    """Returns ``sample``, a subset of the pairs in ``encoded``, as a training split with an empty validation split."""
    place = {pair.pair_id: number for number, pair in enumerate(encoded.pairs)}
    rows = [encoded.encoded[place[pair.pair_id]] for pair in sample]
    nothing = replace(encoded, pairs=[], encoded=[])
    return {"train": replace(encoded, pairs=list(sample), encoded=rows), "val": nothing}
