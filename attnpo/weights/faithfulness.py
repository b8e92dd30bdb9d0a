"""Faithfulness of token weights without ground truth: how much removing the top-weighted tokens lowers the log-odds.

The tokens with the largest weights are removed from both responses (or all others are). The run's own prompt builder
then rebuilds the judge prompt with the same chat format and in both orders, and the log-odds of the verdict are read.
The same is done with an equal number of random tokens at similar positions. Only the difference between the two is
meaningful, since any removal damages a response.
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
from attnpo.judge.layers import StoredRow
from attnpo.schema import SIDES, EncodedResponse, PairWeights, PreferencePair, UserError
from attnpo.weights.base import WeightSource
from attnpo.weights.pipeline import compute_source_weights

VERSION = 1  # increase when a number below changes its meaning
TOKENS_PER_BIN, MOST_BINS = 8, 10
EMPTIED, REFUSED = "responses left empty", "pairs skipped because their shortened text cannot be shown"
_AT_ONCE = 4096  # prompts per call of the judge: bounds their memory, changes no result

Range = tuple[int, int]
Array = Float[np.ndarray, "pairs"]


class RemovalMode(Enum):
    """REMOVE removes the selected tokens (comprehensiveness). KEEP removes all other tokens (sufficiency)."""

    REMOVE = "remove"
    KEEP = "keep"


@dataclass(frozen=True)
class RemovalSettings:
    """Settings for token removal: the shares of tokens to remove or keep, and the random removals for comparison.

    ``shares``: fractions of a response's tokens, rounded to whole tokens (at least one). ``draws``: number of random
    removals that are averaged per share. Draws are keyed by (seed, pair id, side, draw), so two weightings that select
    from the same positions are compared with the same draws. The judge reads each draw in only one order of the
    answers, which alternates over draws. With an even number of draws the judge's position bias cancels within each
    pair; with an odd number it cancels only on average over pairs.
    """

    shares: tuple[float, ...] = (0.1, 0.2, 0.4)
    draws: int = 2
    seed: int = 0
    modes: tuple[RemovalMode, ...] = (RemovalMode.REMOVE, RemovalMode.KEEP)

    def __post_init__(self) -> None:
        if not self.shares or not all(0 < share < 1 for share in self.shares):
            raise UserError(f"shares: expected shares of a response's tokens between 0 and 1, got {self.shares}")
        if self.draws < 1:
            raise UserError(f"draws: expected at least 1 random removal for comparison, got {self.draws}")
        if not self.modes:
            raise UserError("modes: expected remove, keep, or both")


@dataclass(frozen=True)
class TokenRanking:
    """Character ranges and weights of the tokens of one response; tokens without characters are excluded."""

    offsets: tuple[Range, ...]
    weights: tuple[float, ...]


Rankings = Mapping[str, Mapping[str, TokenRanking]]  # by pair id, then side


@dataclass(frozen=True)
class RemovalLogOdds:
    """Log-odds of each pair after removing the top-weighted tokens (or all others), and after removing random ones."""

    top: Array
    random: Array


@dataclass(frozen=True)
class RemovalResult:
    """Log-odds (nats, mean over both orders) of the answer that the judge prefers when it sees the full responses.

    ``full``: log-odds given the full responses. ``changes``: log-odds after removal, by weighting, mode and share.
    ``counts``: how many responses became empty (the judge template then shows one space) and how many pairs were
    skipped. ``prompts``: number of prompts that the judge read.
    """

    pair_ids: tuple[str, ...]
    full: Array
    changes: Mapping[str, Mapping[tuple[RemovalMode, float], RemovalLogOdds]]
    counts: Mapping[str, int]
    prompts: int

    def log_odds_drop(self, name: str, share: float) -> Array:
        """Returns the drop in log-odds when the top-weighted tokens are removed."""
        return np.asarray(self.full - self.changes[name][RemovalMode.REMOVE, share].top)

    def advantage_over_random(self, name: str, mode: RemovalMode, share: float) -> Array:
        """Returns the faithfulness of each pair; positive if the top-weighted tokens matter more than random ones.

        REMOVE: drop without the top tokens minus drop without random ones. KEEP: log-odds with only the top tokens
        minus log-odds with only random ones.
        """
        change = self.changes[name][mode, share]
        more: Array = change.top - change.random
        return -more if mode is RemovalMode.REMOVE else more

    def mean_advantages(self, name: str) -> Array:
        """Returns each pair's advantage over random removal, averaged over shares.

        The mean of these values over all pairs is used to select a layer.
        """
        shares = [share for mode, share in self.changes[name] if mode is RemovalMode.REMOVE]
        return np.asarray(
            np.mean([self.advantage_over_random(name, RemovalMode.REMOVE, share) for share in shares], axis=0)
        )


# --------------------------------------------------------------------------------------------- what is removed


def rank_tokens(source: WeightSource, captured: Mapping[str, PairWeights], layers: tuple[StoredRow, ...]) -> Rankings:
    """Returns the post-processed weights of a resolved source on its own tokens, by pair and side.

    ``layers``: the rows of ``captured``, in order. Pairs that could not be shown to the judge are skipped.
    """
    nothing = dict.fromkeys(SIDES, EncodedResponse([], [], []))
    found = {}
    for pair_id, pair in captured.items():
        if not pair.rounds:
            continue
        sides = compute_source_weights(source, pair, nothing, layers=layers)
        found[pair_id] = {
            side: make_ranking(sides[side].row.offsets.tolist(), sides[side].weights.tolist()) for side in SIDES
        }
    return found


def make_ranking(offsets: Sequence[Sequence[int]], weights: Sequence[float]) -> TokenRanking:
    """Builds the ranking of a response's tokens, excluding those without characters, which cannot be removed."""
    whole = [((start, end), weight) for (start, end), weight in zip(offsets, weights, strict=True) if end > start]
    return TokenRanking(tuple(place for place, _ in whole), tuple(float(weight) for _, weight in whole))


def count_tokens(share: float, tokens: int) -> int:
    """Returns the number of tokens in a ``share`` of ``tokens``, rounded half up; at least one and at most all."""
    return min(tokens, max(1, math.floor(share * tokens + 0.5)))


def top_tokens(row: TokenRanking, count: int, tie_breaker: Random) -> set[int]:
    """Returns the positions of the ``count`` largest weights; ties are broken at random."""
    ties = [tie_breaker.random() for _ in row.weights]
    return set(sorted(range(len(ties)), key=lambda place: (-row.weights[place], ties[place]))[:count])


def position_bins(tokens: int) -> list[int]:
    """Assigns each token to a bin of relative position: at least eight tokens per bin, at most ten bins."""
    bins = min(MOST_BINS, max(1, tokens // TOKENS_PER_BIN))
    return [place * bins // tokens for place in range(tokens)]


def draw_matched_tokens(chosen: set[int], tokens: int, draw: Random) -> set[int]:
    """Draws random positions from ``tokens``, matching the number of ``chosen`` positions in each position bin."""
    bins = position_bins(tokens)
    wanted = Counter(bins[place] for place in chosen)
    order = sorted(range(tokens), key=[draw.random() for _ in range(tokens)].__getitem__)
    drawn = set()
    for place in order:
        if wanted[bins[place]] > 0:
            wanted[bins[place]] -= 1
            drawn.add(place)
    return drawn


def remaining_text(text: str, offsets: Sequence[Range], kept: set[int]) -> str:
    """Returns ``text`` reduced to the characters of the ``kept`` tokens and the whitespace between kept neighbours.

    A gap that contained whitespace becomes a single space. If the whitespace at the start or end of the gap contains a
    line break, that whitespace is kept instead. Words therefore neither merge nor drift apart. Characters that a
    removed token shares with its neighbour are removed. Whitespace at both ends of the text and characters that belong
    to no token are removed too.
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
    visible = [(start, end) for start, end in (_trim_whitespace(text, piece) for piece in pieces) if end > start]
    seams = [_joining_whitespace(text[left[1] : right[0]]) for left, right in pairwise(visible)]
    return "".join(text[start:end] + seam for (start, end), seam in zip(visible, [*seams, ""], strict=False))


def _trim_whitespace(text: str, piece: Range) -> Range:
    """Returns the range without leading and trailing whitespace."""
    inner = text[piece[0] : piece[1]]
    return piece[0] + len(inner) - len(inner.lstrip()), piece[1] - len(inner) + len(inner.rstrip())


def _joining_whitespace(stretch: str) -> str:
    """Returns the whitespace that replaces a removed span; empty if the span contained none."""
    if not any(letter.isspace() for letter in stretch):
        return ""
    runs = stretch[: len(stretch) - len(stretch.lstrip())], stretch[len(stretch.rstrip()) :]
    return next((run for run in runs if "\n" in run), " ")


# --------------------------------------------------------------------------------------------- measuring


Asked = tuple[int, str, str, int]  # the pair's index, both texts, and their order in the prompt (0: chosen is A)


def measure_token_removal(
    pairs: Sequence[PreferencePair],
    sources: Mapping[str, Rankings],
    judge: JudgeModel,
    prompts: PromptBuilder,
    removal: RemovalSettings,
    progress: Callable[[int, int], None] | None = None,
) -> RemovalResult:
    """Measures the verdicts' log-odds with and without the tokens to which each of ``sources`` assigns the most weight.

    Skips pairs that any source has not ranked, and pairs whose shortened responses cannot be shown to the judge. The
    judge reads each distinct prompt once, only for its verdict. ``progress`` is called with (prompts read, total
    prompts). UserError if no pair remains.
    """
    usable = [pair for pair in pairs if all(pair.pair_id in found for found in sources.values())]
    asked: dict[Asked, int] = {}

    def register_prompts(prompts: Sequence[Asked]) -> list[int]:
        return [asked.setdefault(one, len(asked)) for one in prompts]

    whole = [
        register_prompts(_prompts_in_both_orders(place, pair.chosen, pair.rejected))
        for place, pair in enumerate(usable)
    ]
    blank = _count_empty_responses(asked)
    changed = {
        name: {
            (mode, share): [
                tuple(map(register_prompts, _shortened_prompts(place, pair, found[pair.pair_id], removal, mode, share)))
                for place, pair in enumerate(usable)
            ]
            for mode in removal.modes
            for share in removal.shares
        }
        for name, found in sources.items()
    }
    margins = _read_margins(usable, list(asked), judge, prompts, progress)
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
            f"faithfulness: none of the {len(pairs)} pairs can be judged with tokens removed; see the log for "
            "the reasons"
        )
    return RemovalResult(
        pair_ids=tuple(pair.pair_id for pair, good in zip(usable, sound, strict=True) if good),
        full=(sign * full)[sound],
        changes={
            name: {key: RemovalLogOdds(*both[:, sound]) for key, both in found.items()} for name, found in means.items()
        },
        counts={EMPTIED: _count_empty_responses(asked) - blank, REFUSED: int((~sound).sum())},
        prompts=len(asked),
    )


def _count_empty_responses(asked: Iterable[Asked]) -> int:
    """Counts the empty responses among the distinct shortened pairs."""
    texts = {one[:3] for one in asked}
    return sum((not chosen.strip()) + (not rejected.strip()) for _, chosen, rejected in texts)


def _prompts_in_both_orders(place: int, chosen: str, rejected: str) -> list[Asked]:
    return [(place, chosen, rejected, order) for order in (0, 1)]


def _shortened_prompts(
    place: int,
    pair: PreferencePair,
    rows: Mapping[str, TokenRanking],
    removal: RemovalSettings,
    mode: RemovalMode,
    share: float,
) -> tuple[list[Asked], list[Asked]]:
    """Returns a pair's prompts without the top tokens (in both orders) and without random tokens (one order each)."""
    key = f"{removal.seed}/{pair.pair_id}"
    picked = {side: _pick_top_tokens(rows[side], share, f"{key}/{side}/ties") for side in SIDES}
    chosen, rejected = (_shorten_response(pair.response(side), rows[side], picked[side], mode) for side in SIDES)
    order, random = Random(f"{key}/order").randrange(2), []
    for draw in range(removal.draws):
        drawn = {
            side: draw_matched_tokens(picked[side], len(rows[side].offsets), Random(f"{key}/{side}/{draw}"))
            for side in SIDES
        }
        one, other = (_shorten_response(pair.response(side), rows[side], drawn[side], mode) for side in SIDES)
        random.append((place, one, other, (order + draw) % 2))
    return _prompts_in_both_orders(place, chosen, rejected), random


def _pick_top_tokens(row: TokenRanking, share: float, key: str) -> set[int]:
    size = len(row.offsets)
    return top_tokens(row, count_tokens(share, size), Random(key)) if size else set()


def _shorten_response(text: str, row: TokenRanking, picked: set[int], mode: RemovalMode) -> str:
    every = set(range(len(row.offsets)))
    return remaining_text(text, row.offsets, picked if mode is RemovalMode.KEEP else every - picked) if every else text


def _read_margins(
    pairs: Sequence[PreferencePair],
    asked: Sequence[Asked],
    judge: JudgeModel,
    prompts: PromptBuilder,
    progress: Callable[[int, int], None] | None,
) -> Float[np.ndarray, " prompts"]:
    """Returns the log-odds of the chosen answer's label for each prompt; NaN for a prompt that cannot be built."""
    margins = np.full(len(asked), np.nan)
    rest, done = iter(enumerate(asked)), 0
    while batch := list(islice(rest, _AT_ONCE)):
        built = list(_build_prompts(pairs, batch, prompts))
        readings = judge.read(
            [prompt.input_ids for _, prompt in built], layers=(), verdict=True, label_ids=prompts.label_ids
        )
        for (number, prompt), reading in zip(built, readings, strict=True):
            if reading.verdict_logits is None:
                raise ValueError("the judge did not return the requested verdict logits")
            first, second = reading.verdict_logits.tolist()
            margins[number] = first - second if prompt.chosen_is_a else second - first
        done += len(batch)
        if progress is not None:
            progress(done, len(asked))
    return margins


def _build_prompts(
    pairs: Sequence[PreferencePair], asked: Sequence[tuple[int, Asked]], prompts: PromptBuilder
) -> Iterator[tuple[int, JudgePrompt]]:
    """Yields (index, prompt) for each item of ``asked`` that can be shown to the judge."""
    last, rounds = None, None
    for number, (place, chosen, rejected, order) in asked:
        if (place, chosen, rejected) != last:
            last, rounds = (place, chosen, rejected), None
            with suppress(UserError):  # characters that are adjacent only now may form a forbidden text
                text = PreferencePair.from_texts(pairs[place].prompt, chosen, rejected, apart=pairs[place].apart)
                rounds = prompts.build(text)
        if rounds is not None:
            yield number, rounds[order]


# ------------------------------------------------------------------------------------------------ numbers


def faithfulness_score(values: Mapping[str, Any]) -> float:
    """Returns the score that ``weights.layer=auto`` compares: mean faithfulness under removal over pairs and shares."""
    means = [sum(row) / len(row) for row in values["remove"].values()]
    return float(sum(means) / len(means))
