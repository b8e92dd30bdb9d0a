"""Faithfulness of token weights without ground truth: what the verdict loses with a response's top-weighted tokens.

The top-weighted share of both responses' tokens is removed from (or alone kept in) the responses' text, the judge
prompt is built anew by the very builder of the run, so that the chat frame and both orders stay as they are, and the
verdict's log-odds are read. The same is done with as many random tokens from the same places; the difference is what
counts, since any removal spoils a response somewhat.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from itertools import islice, pairwise
from random import Random
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from attnpo.judge.base import JudgeModel, JudgePrompt, PromptBuilder
from attnpo.judge.layers import Row
from attnpo.schema import SIDES, EncodedResponse, PairWeights, PreferencePair, UserError
from attnpo.weights.base import WeightSource
from attnpo.weights.pipeline import finished_weights

VERSION = 1  # raise when a number below changes its meaning
TOKENS_PER_BIN, MOST_BINS = 8, 10
EMPTIED, REFUSED = "responses left empty", "pairs left out, their shortened text cannot be shown"
_AT_ONCE = 4096  # prompts per call of the judge: bounds their memory, changes no result

Range = tuple[int, int]
Array = Float[np.ndarray, "pairs"]


class Mode(Enum):
    """REMOVE: all but the chosen tokens stay (comprehensiveness). KEEP: only they stay (sufficiency)."""

    REMOVE = "remove"
    KEEP = "keep"


@dataclass(frozen=True)
class Removal:
    """Removed tokens, and what they are compared with.

    ``shares`` of a response's tokens, rounded to whole tokens, at least one. ``draws`` random removals per share are
    averaged; they are keyed by (seed, pair id, side, draw), so that weights which take from the same places meet the
    same ones; each is read in one of the two orders, in turn over draws, beginning with either: with an even number the
    judge's liking for a place cancels in every pair, with an odd one only over pairs.
    """

    shares: tuple[float, ...] = (0.1, 0.2, 0.4)
    draws: int = 2
    seed: int = 0
    modes: tuple[Mode, ...] = (Mode.REMOVE, Mode.KEEP)

    def __post_init__(self) -> None:
        if not self.shares or not all(0 < share < 1 for share in self.shares):
            raise UserError(f"shares: expected shares of a response's tokens between 0 and 1, got {self.shares}")
        if self.draws < 1:
            raise UserError(f"draws: expected at least 1 random removal to compare with, got {self.draws}")
        if not self.modes:
            raise UserError("modes: expected remove, keep, or both")


@dataclass(frozen=True)
class Ranking:
    """Tokens of one response that hold characters of it, by these characters, and the weight of each."""

    offsets: tuple[Range, ...]
    weights: tuple[float, ...]


Rankings = Mapping[str, Mapping[str, Ranking]]  # by pair id, then side


@dataclass(frozen=True)
class Change:
    """Log-odds of every pair with the top-weighted tokens removed (or alone kept), and with random ones instead."""

    top: Array
    random: Array


@dataclass(frozen=True)
class RemovalResult:
    """Log-odds in nats, averaged over both orders, towards the answer that the judge prefers with the whole responses.

    ``full``: with the whole responses. ``changes``: by name of the weights, mode and share. ``counts``: responses that
    were left empty (the judge template's rule then shows one space), pairs left out. ``prompts``: prompts read.
    """

    pair_ids: tuple[str, ...]
    full: Array
    changes: Mapping[str, Mapping[tuple[Mode, float], Change]]
    counts: Mapping[str, int]
    prompts: int

    def fall(self, name: str, share: float) -> Array:
        """Returns by how much the log-odds fall without the top-weighted tokens."""
        return np.asarray(self.full - self.changes[name][Mode.REMOVE, share].top)

    def advantage(self, name: str, mode: Mode, share: float) -> Array:
        """Faithfulness per pair, positive when the top-weighted tokens matter more than random ones.

        REMOVE: fall without the top tokens minus fall without random ones. KEEP: log-odds with only the top tokens
        minus those with only random ones.
        """
        change = self.changes[name][mode, share]
        more: Array = change.top - change.random
        return -more if mode is Mode.REMOVE else more

    def scores(self, name: str) -> Array:
        """Returns the mean over shares of the advantage under removal, per pair.

        Layers are chosen by its mean over pairs.
        """
        shares = [share for mode, share in self.changes[name] if mode is Mode.REMOVE]
        return np.asarray(np.mean([self.advantage(name, Mode.REMOVE, share) for share in shares], axis=0))


# --------------------------------------------------------------------------------------------- what is removed


def rankings(source: WeightSource, captured: Mapping[str, PairWeights], layers: tuple[Row, ...]) -> Rankings:
    """Returns the finished weights of a resolved source on its own tokens, by pair and side.

    ``layers`` names the rows of ``captured``. Pairs that the judge could not be shown are left out.
    """
    nothing = dict.fromkeys(SIDES, EncodedResponse([], [], []))
    found = {}
    for pair_id, pair in captured.items():
        if not pair.rounds:
            continue
        sides = finished_weights(source, pair, nothing, layers=layers)
        found[pair_id] = {
            side: ranking(sides[side].row.offsets.tolist(), sides[side].weights.tolist()) for side in SIDES
        }
    return found


def ranking(offsets: Sequence[Sequence[int]], weights: Sequence[float]) -> Ranking:
    """Returns the tokens that hold characters; what holds none cannot be removed from a text."""
    whole = [((start, end), weight) for (start, end), weight in zip(offsets, weights, strict=True) if end > start]
    return Ranking(tuple(place for place, _ in whole), tuple(float(weight) for _, weight in whole))


def count_of(share: float, tokens: int) -> int:
    """Returns how many of ``tokens`` tokens a share is: rounded half up, at least one, at most all."""
    return min(tokens, max(1, math.floor(share * tokens + 0.5)))


def top_tokens(row: Ranking, count: int, tie_breaker: Random) -> set[int]:
    """Returns the places of the ``count`` largest weights; equal ones in random order, so that no place is favoured."""
    ties = [tie_breaker.random() for _ in row.weights]
    return set(sorted(range(len(ties)), key=lambda place: (-row.weights[place], ties[place]))[:count])


def bins_of(tokens: int) -> list[int]:
    """Returns the bin of relative position of each token: bins of at least eight tokens, ten at most."""
    bins = min(MOST_BINS, max(1, tokens // TOKENS_PER_BIN))
    return [place * bins // tokens for place in range(tokens)]


def matched_tokens(chosen: set[int], tokens: int, draw: Random) -> set[int]:
    """Returns random places of ``tokens``: in every bin of relative position as many as ``chosen`` has there."""
    bins = bins_of(tokens)
    wanted = Counter(bins[place] for place in chosen)
    order = sorted(range(tokens), key=[draw.random() for _ in range(tokens)].__getitem__)
    drawn = set()
    for place in order:
        if wanted[bins[place]] > 0:
            wanted[bins[place]] -= 1
            drawn.add(place)
    return drawn


def remaining_text(text: str, offsets: Sequence[Range], kept: set[int]) -> str:
    """Returns ``text`` with the characters of the ``kept`` tokens alone, and the blanks between kept neighbours.

    Where tokens are gone, one run of blanks joins what is left if there was any blank: the run before the gap or the
    one after it, whichever breaks a line, else a single space; so words neither merge nor drift apart. Characters
    that a removed token shares with its neighbour go. Blanks at both ends go, and so does what no token holds.
    """
    pieces: list[Range] = []
    last = -1
    for place in sorted(kept):
        start, end = offsets[place]
        if place > 0 and place - 1 not in kept:
            start = max(start, offsets[place - 1][1])
        if place + 1 < len(offsets) and place + 1 not in kept:
            end = min(end, offsets[place + 1][0])
        if start >= end:
            continue
        if pieces and last == place - 1 and not text[pieces[-1][1] : start].strip():
            pieces[-1] = (pieces[-1][0], max(end, pieces[-1][1]))
        else:
            pieces.append((start, end))
        last = place
    visible = [(start, end) for start, end in (_visible(text, piece) for piece in pieces) if end > start]
    seams = [_seam(text[left[1] : right[0]]) for left, right in pairwise(visible)]
    return "".join(text[start:end] + seam for (start, end), seam in zip(visible, [*seams, ""], strict=False))


def _visible(text: str, piece: Range) -> Range:
    """Returns the range without blanks at its ends."""
    inner = text[piece[0] : piece[1]]
    return piece[0] + len(inner) - len(inner.lstrip()), piece[1] - len(inner) + len(inner.rstrip())


def _seam(stretch: str) -> str:
    """Returns what stands in the place of a removed stretch and the blanks around it."""
    if not any(letter.isspace() for letter in stretch):
        return ""
    runs = stretch[: len(stretch) - len(stretch.lstrip())], stretch[len(stretch.rstrip()) :]
    return next((run for run in runs if "\n" in run), " ")


# --------------------------------------------------------------------------------------------- measuring


Asked = tuple[int, str, str, int]  # the pair's place, both texts, and the order to read them in (0: chosen is A)


def measure(
    pairs: Sequence[PreferencePair],
    sources: Mapping[str, Rankings],
    judge: JudgeModel,
    prompts: PromptBuilder,
    removal: Removal,
    progress: Callable[[int, int], None] | None = None,
) -> RemovalResult:
    """Returns the verdicts' log-odds with and without the tokens that each of ``sources`` weighs most.

    Pairs without a ranking in every source are left out, as are those whose shortened text the judge cannot be shown.
    Every prompt is read once, verdict only, whoever asks for it. ``progress`` hears (prompts read, prompts in all).
    UserError when no pair is left.
    """
    usable = [pair for pair in pairs if all(pair.pair_id in found for found in sources.values())]
    asked: dict[Asked, int] = {}

    def numbers(prompts: Sequence[Asked]) -> list[int]:
        return [asked.setdefault(one, len(asked)) for one in prompts]

    whole = [numbers(_in_both_orders(place, pair.chosen, pair.rejected)) for place, pair in enumerate(usable)]
    blank = _blanks(asked)
    changed = {
        name: {
            (mode, share): [
                tuple(map(numbers, _without(place, pair, found[pair.pair_id], removal, mode, share)))
                for place, pair in enumerate(usable)
            ]
            for mode in removal.modes
            for share in removal.shares
        }
        for name, found in sources.items()
    }
    margins = _margins(usable, list(asked), judge, prompts, progress)
    full = np.array([margins[row].mean() for row in whole])
    sign = np.where(full < 0, -1.0, 1.0)
    means = {
        name: {
            key: sign * np.array([[margins[row].mean() for row in pair] for pair in rows]).reshape(-1, 2).T
            for key, rows in found.items()
        }
        for name, found in changed.items()
    }
    rows = [full, *(row for found in means.values() for both in found.values() for row in both)]
    sound: Bool[np.ndarray, " pairs"] = np.isfinite(np.array(rows)).all(axis=0)
    if not sound.any():
        raise UserError(
            f"faithfulness: expected pairs that the judge can be shown with tokens removed, got none of {len(pairs)}; "
            "see the log for pairs that cannot be judged"
        )
    return RemovalResult(
        pair_ids=tuple(pair.pair_id for pair, good in zip(usable, sound, strict=True) if good),
        full=(sign * full)[sound],
        changes={name: {key: Change(*both[:, sound]) for key, both in found.items()} for name, found in means.items()},
        counts={EMPTIED: _blanks(asked) - blank, REFUSED: int((~sound).sum())},
        prompts=len(asked),
    )


def _blanks(asked: Iterable[Asked]) -> int:
    """Returns how many different shortened pairs have how many empty responses."""
    texts = {one[:3] for one in asked}
    return sum((not chosen.strip()) + (not rejected.strip()) for _, chosen, rejected in texts)


def _in_both_orders(place: int, chosen: str, rejected: str) -> list[Asked]:
    return [(place, chosen, rejected, order) for order in (0, 1)]


def _without(
    place: int, pair: PreferencePair, rows: Mapping[str, Ranking], removal: Removal, mode: Mode, share: float
) -> tuple[list[Asked], list[Asked]]:
    """Returns a pair's prompts without the top tokens, and those without random ones, in either order in turn."""
    key = f"{removal.seed}/{pair.pair_id}"
    picked = {side: _top(rows[side], share, f"{key}/{side}/ties") for side in SIDES}
    chosen, rejected = (_shorten(pair.response(side), rows[side], picked[side], mode) for side in SIDES)
    order, random = Random(f"{key}/order").randrange(2), []
    for draw in range(removal.draws):
        drawn = {
            side: matched_tokens(picked[side], len(rows[side].offsets), Random(f"{key}/{side}/{draw}"))
            for side in SIDES
        }
        one, other = (_shorten(pair.response(side), rows[side], drawn[side], mode) for side in SIDES)
        random.append((place, one, other, (order + draw) % 2))
    return _in_both_orders(place, chosen, rejected), random


def _top(row: Ranking, share: float, key: str) -> set[int]:
    size = len(row.offsets)
    return top_tokens(row, count_of(share, size), Random(key)) if size else set()


def _shorten(text: str, row: Ranking, picked: set[int], mode: Mode) -> str:
    every = set(range(len(row.offsets)))
    return remaining_text(text, row.offsets, picked if mode is Mode.KEEP else every - picked) if every else text


def _margins(
    pairs: Sequence[PreferencePair],
    asked: Sequence[Asked],
    judge: JudgeModel,
    prompts: PromptBuilder,
    progress: Callable[[int, int], None] | None,
) -> Float[np.ndarray, " prompts"]:
    """Returns log-odds of the chosen answer's label per prompt, NaN where its text cannot be shown."""
    margins = np.full(len(asked), np.nan)
    rest, done = iter(enumerate(asked)), 0
    while batch := list(islice(rest, _AT_ONCE)):
        built = list(_built(pairs, batch, prompts))
        readings = judge.read(
            [prompt.input_ids for _, prompt in built], layers=(), verdict=True, label_ids=prompts.label_ids
        )
        for (number, prompt), reading in zip(built, readings, strict=True):
            if reading.verdict_logits is None:
                raise ValueError("the judge was asked for the verdict's logits and gave none")
            first, second = reading.verdict_logits.tolist()
            margins[number] = first - second if prompt.chosen_is_a else second - first
        done += len(batch)
        if progress is not None:
            progress(done, len(asked))
    return margins


def _built(
    pairs: Sequence[PreferencePair], asked: Sequence[tuple[int, Asked]], prompts: PromptBuilder
) -> Iterator[tuple[int, JudgePrompt]]:
    """Yields the prompts of the texts that can be shown, with their numbers."""
    last, rounds = None, None
    for number, (place, chosen, rejected, order) in asked:
        if (place, chosen, rejected) != last:
            last, rounds = (place, chosen, rejected), None
            with suppress(UserError):  # characters that only meet now may spell what no prompt may hold
                text = PreferencePair.from_texts(pairs[place].prompt, chosen, rejected, apart=pairs[place].apart)
                rounds = prompts.build(text)
        if rounds is not None:
            yield number, rounds[order]


# ------------------------------------------------------------------------------------------------ numbers


def score_of(values: Mapping[str, Any]) -> float:
    """Faithfulness in one number, as ``weights.layer=auto`` takes it: the mean under removal over pairs and shares."""
    means = [sum(row) / len(row) for row in values["remove"].values()]
    return float(sum(means) / len(means))
