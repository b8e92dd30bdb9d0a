"""Transforms of post-processed weights on the source's tokens: control conditions, mixtures and fitted profiles.

Transforms run between a source's post-processing and the alignment with training tokens. A transform maps the row of
one response to a row of the same length; a *fitted* transform is first estimated from the rows of the training split.
Random choices depend only on (seed, pair id, side), so a row is transformed identically in every run and in any order.
"""

import copy
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol, TypeVar, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from attnpo.schema import SIDES, UserError, check_at_least, check_choice, check_range, digest

_Some = TypeVar("_Some")


@dataclass(frozen=True)
class WeightRow:
    """Post-processed weights of one response on its n source tokens; ``other``: number of tokens on the other side.

    Rows of factors cover only tokens that contain text, so the factor of the end of turn is never changed.
    """

    weights: Float[Tensor, " n"]
    token_ids: Int[Tensor, " n"]
    pair_id: str
    side: str
    other: int


@runtime_checkable
class WeightTransform(Protocol):
    """Transforms a row of weights; ``fit`` returns the transform fitted on the training rows (or itself)."""

    @property
    def needs_fit(self) -> bool:
        """Returns whether ``fit`` must be called before the first row."""

    def fit(self, rows: Iterable[WeightRow]) -> "WeightTransform":
        """Returns the transform fitted on ``rows``."""

    def __call__(self, row: WeightRow) -> Float[Tensor, " n"]:
        """Returns the transformed weights of ``row``, for the same tokens."""


class _StatelessTransform:
    """Transform without fitted state; ``factors``: whether it also works on factors, not only on distributions."""

    needs_fit: ClassVar[bool] = False
    factors: ClassVar[bool] = False

    def fit(self, rows: Iterable[WeightRow]) -> "_StatelessTransform":
        """Returns the transform itself; there is nothing to fit."""
        return self


def accepts_factors(transform: object) -> bool:
    """Returns whether a transform declares that it also works on factors."""
    return bool(getattr(transform, "factors", False))


def _seeded_generator(seed: int, row: WeightRow) -> torch.Generator:
    return torch.Generator().manual_seed(int(digest([seed, row.pair_id, row.side])[:15], 16))


def _rescale_to_total(new: Float[Tensor, " n"], old: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    """Rescales ``new`` to the sum of ``old``; returns uniform weights if ``new`` sums to 0."""
    total = new.sum()
    if total == 0:
        return torch.full_like(old, float(old.sum()) / max(1, old.numel()))
    return new * (old.sum() / total)


@dataclass(frozen=True)
class UniformOnSupport(_StatelessTransform):
    """Equal weights on all source tokens; only the source's support is kept.

    The end of turn and unmatched tokens still get no weight.
    """

    factors: ClassVar[bool] = True

    def __call__(self, row: WeightRow) -> Float[Tensor, " n"]:
        """Returns the row's mean for each token."""
        return torch.full_like(row.weights, float(row.weights.mean()) if row.weights.numel() else 0.0)


@dataclass(frozen=True)
class Shuffled(_StatelessTransform):
    """Permutes the weights of a row at random, which keeps sharpness and length but destroys placement."""

    seed: int = 0

    factors: ClassVar[bool] = True

    def __call__(self, row: WeightRow) -> Float[Tensor, " n"]:
        """Returns the permuted row."""
        return row.weights[torch.randperm(row.weights.numel(), generator=_seeded_generator(self.seed, row))]


@dataclass(frozen=True)
class Inverse(_StatelessTransform):
    """Reverses the ranking of the weights: the token with the smallest weight gets the largest, and so on.

    Keeps the multiset of weights. Ties are broken at random, by (seed, pair id, side). Breaking ties by position would
    assign the largest weights to the first tokens that had no weight.
    """

    seed: int = 0

    factors: ClassVar[bool] = True

    def __call__(self, row: WeightRow) -> Float[Tensor, " n"]:
        """Returns the row with its values assigned in reverse order of size."""
        mixed = torch.randperm(row.weights.numel(), generator=_seeded_generator(self.seed, row))
        order = mixed[torch.argsort(row.weights[mixed], stable=True)]
        out = torch.empty_like(row.weights)
        out[order] = row.weights[order].flip(0)
        return out


@dataclass(frozen=True)
class Mixture(_StatelessTransform):
    """Mixture with uniform weights, ``(1 - share) / n + share * w``, over the tokens that the weights cover.

    Other tokens, such as the end of turn, still get no weight.
    """

    share: float = 0.5

    factors: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_range("transform Mixture", "[0, 1]", share=self.share)

    def __call__(self, row: WeightRow) -> Float[Tensor, " n"]:
        """Returns the mixture of the row and its mean."""
        return (1 - self.share) * row.weights.mean() + self.share * row.weights


@dataclass(frozen=True)
class Smeared(_StatelessTransform):
    """Spreads weights over preceding tokens with geometric decay, to credit tokens that led up to a weighted one.

    The total is preserved; with decay 0 the row is unchanged. Away from the start, a weight moves back by decay / (1 -
    decay) tokens on average.
    """

    decay: float = 0.5

    def __post_init__(self) -> None:
        check_range("transform Smeared", "[0, 1)", decay=self.decay)

    def __call__(self, row: WeightRow) -> Float[Tensor, " n"]:
        """Returns the smeared row."""
        places = torch.arange(1, row.weights.numel() + 1, dtype=torch.float64)
        shares = row.weights.double() * (1 - self.decay) / (1 - self.decay**places)  # the part left on each own token
        carried, smeared = 0.0, []
        for share in reversed(shares.tolist()):
            carried = share + self.decay * carried
            smeared.append(carried)
        return torch.tensor(smeared[::-1], dtype=row.weights.dtype)


@dataclass(frozen=True)
class Sharpness(_StatelessTransform):
    """Raises weights to the power ``tau`` (0: uniform on the support, 1: unchanged) and rescales to the same total."""

    tau: float = 2.0

    def __post_init__(self) -> None:
        check_at_least("transform Sharpness", 0, tau=self.tau)

    def __call__(self, row: WeightRow) -> Float[Tensor, " n"]:
        """Returns the sharpened row; zeros stay zeros."""
        scaled = row.weights / row.weights.max().clamp(min=torch.finfo(row.weights.dtype).tiny)
        powered = torch.where(row.weights > 0, scaled**self.tau, torch.zeros_like(scaled))
        return _rescale_to_total(powered, row.weights)


@dataclass(frozen=True)
class OneSide(_StatelessTransform):
    """Keeps the weights on one side of a pair and flattens the other, to show which side's weights matter."""

    side: str = "chosen"

    factors: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_choice("transform OneSide.side", self.side, SIDES)

    def __call__(self, row: WeightRow) -> Float[Tensor, " n"]:
        """Returns a row of ``side`` unchanged; for the other side, returns the row's mean for each token."""
        return row.weights if row.side == self.side else UniformOnSupport()(row)


@dataclass(frozen=True)
class TailCut(_StatelessTransform):
    """Scales weights beyond the shorter response's length by ``alpha`` (LD-DPO; 0 cuts them off) without rescaling."""

    alpha: float = 0.0

    factors: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_range("transform TailCut", "[0, 1]", alpha=self.alpha)

    def __call__(self, row: WeightRow) -> Float[Tensor, " n"]:
        """Returns the row with its tail scaled."""
        kept = torch.arange(row.weights.numel()) < row.other
        return torch.where(kept, row.weights, self.alpha * row.weights)


# --------------------------------------------------------------------------------------------- fitted


def resample(weights: Float[Tensor, " k"], length: int) -> Float[Tensor, " n"]:
    """Resamples the mass of ``weights`` over relative position to ``length`` tokens; the total is preserved.

    Token i of n covers the interval [i/n, (i+1)/n) of the response; within a token, the mass is spread evenly.
    """
    total = torch.cat([weights.new_zeros(1), weights.cumsum(0)])
    edges = torch.linspace(0, weights.numel(), length + 1, dtype=weights.dtype)
    low = edges.floor().long().clamp(max=weights.numel() - 1)
    at_edges = total[low] + (edges - low) * weights[low]
    return at_edges.diff()


def _check_fitted(fitted: bool, transform: object) -> None:
    if not fitted:
        raise ValueError(f"{type(transform).__name__} must be fitted on training rows before use")


def _copy_with_state(transform: _Some, **state: object) -> _Some:
    """Returns a copy of a transform with fitted ``state`` in fields that are not config keys (``init=False``)."""
    fitted = copy.copy(transform)
    for name, value in state.items():
        object.__setattr__(fitted, name, value)
    return fitted


@dataclass(frozen=True)
class CrossPair:
    """Uses another response's weights, resampled to fit. Keeps position profile and smoothness but not content.

    The donor is the same side's row from a different training pair, drawn by (seed, pair id, side).
    """

    seed: int = 0
    pool: dict[str, list[tuple[str, Float[Tensor, " _"]]]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    needs_fit: ClassVar[bool] = True

    def fit(self, rows: Iterable[WeightRow]) -> "CrossPair":
        """Returns a copy with the training rows of each side, ordered by pair id."""
        pool: defaultdict[str, list[tuple[str, Float[Tensor, " _"]]]] = defaultdict(list)
        for row in rows:
            if row.weights.numel():
                pool[row.side].append((row.pair_id, row.weights))
        return _copy_with_state(self, pool={side: sorted(pool[side], key=_get_pair_id) for side in pool})

    def __call__(self, row: WeightRow) -> Float[Tensor, " n"]:
        """Returns a donor's weights, resampled to this row's tokens and rescaled to its total."""
        _check_fitted(bool(self.pool), self)
        rows = self.pool.get(row.side, [])
        own = bisect_left(rows, row.pair_id, key=_get_pair_id)  # the first row of this pair, which is no donor
        count = bisect_right(rows, row.pair_id, key=_get_pair_id) - own
        if len(rows) == count:
            raise UserError("transform CrossPair needs at least two training pairs: add pairs or remove the transform")
        place = int(torch.randint(len(rows) - count, (1,), generator=_seeded_generator(self.seed, row)))
        donor = rows[place if place < own else place + count][1]
        return _rescale_to_total(resample(donor.to(row.weights.dtype), row.weights.numel()), row.weights)


def _get_pair_id(item: tuple[str, Float[Tensor, " _"]]) -> str:
    return item[0]


@dataclass(frozen=True)
class PositionProfile:
    """Mean training-set mass by relative position (``bins`` bins): tests whether weights depend only on position."""

    bins: int = 20
    profile: tuple[float, ...] = field(default=(), init=False, repr=False)

    needs_fit: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_at_least("transform PositionProfile", 1, bins=self.bins)

    def fit(self, rows: Iterable[WeightRow]) -> "PositionProfile":
        """Returns a copy with the mean mass of each bin; all rows count equally."""
        masses = [resample(_normalize_row(row.weights), self.bins) for row in rows if row.weights.numel()]
        if not masses:
            raise UserError("transform PositionProfile has no training rows to fit on: check the training data")
        return _copy_with_state(self, profile=tuple(torch.stack(masses).double().mean(0).tolist()))

    def __call__(self, row: WeightRow) -> Float[Tensor, " n"]:
        """Returns the profile over this row's tokens, rescaled to the row's total."""
        _check_fitted(bool(self.profile), self)
        profile = torch.tensor(self.profile, dtype=row.weights.dtype)
        return _rescale_to_total(resample(profile, row.weights.numel()), row.weights)


@dataclass(frozen=True)
class TokenProfile:
    """Mean of ``n * w`` by token id over the training set: tests whether weights depend only on the token.

    Unseen ids get 1, the overall mean. With ``position``, the token's factor is multiplied by the position profile.
    """

    position: bool = False
    bins: int = 20
    words: dict[int, float] = field(default_factory=dict, init=False, repr=False)
    places: PositionProfile | None = field(default=None, init=False, repr=False)

    needs_fit: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_at_least("transform TokenProfile", 1, bins=self.bins)

    def fit(self, rows: Iterable[WeightRow]) -> "TokenProfile":
        """Returns a copy with the mean factor of each token id in the training rows."""
        kept: Sequence[WeightRow] = [row for row in rows if row.weights.numel()]
        sums: defaultdict[int, float] = defaultdict(float)
        counts: defaultdict[int, int] = defaultdict(int)
        for row in kept:
            scaled = _normalize_row(row.weights) * row.weights.numel()
            for token, value in zip(row.token_ids.tolist(), scaled.tolist(), strict=True):
                sums[token] += value
                counts[token] += 1
        if not sums:
            raise UserError("transform TokenProfile has no training rows to fit on: check the training data")
        places = PositionProfile(self.bins).fit(kept) if self.position else None
        return _copy_with_state(self, words={token: sums[token] / counts[token] for token in sums}, places=places)

    def __call__(self, row: WeightRow) -> Float[Tensor, " n"]:
        """Returns the factors of this row's tokens, rescaled to the row's total."""
        _check_fitted(bool(self.words), self)
        factors = [self.words.get(token, 1.0) for token in row.token_ids.tolist()]
        new = torch.tensor(factors, dtype=row.weights.dtype)
        if self.places is not None:
            new = new * self.places(row)
        return _rescale_to_total(new, row.weights)


@dataclass(frozen=True)
class Branched:
    """Moves each weight to the least predictable token nearby, to credit the choice rather than its outcome.

    Candidates are the token's own position and the ``reach`` positions before it. The weight moves to the candidate
    whose token was least predictable from the previous token, measured by entropy over the training responses; ties go
    to the nearest candidate. Positions after unseen tokens have entropy 0; they get weight only if all candidates have
    entropy 0.
    """

    reach: int = 4
    entropies: dict[int, float] = field(default_factory=dict, init=False, repr=False)

    needs_fit: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_at_least("transform Branched", 1, reach=self.reach)

    def fit(self, rows: Iterable[WeightRow]) -> "Branched":
        """Returns a copy with the entropy (in nats) of the token after each token id; START precedes a response."""
        follows: defaultdict[int, Counter[int]] = defaultdict(Counter)
        for row in rows:
            ids = row.token_ids.tolist()
            for before, word in zip([START, *ids], ids, strict=False):
                follows[before][word] += 1
        if not follows:
            raise UserError("transform Branched has no training rows to fit on: check the training data")
        return _copy_with_state(self, entropies={before: _entropy(counts) for before, counts in follows.items()})

    def __call__(self, row: WeightRow) -> Float[Tensor, " n"]:
        """Returns the row with its weights moved; the total is preserved."""
        _check_fitted(bool(self.entropies), self)
        ids = row.token_ids.tolist()
        open_to = [self.entropies.get(before, 0.0) for before in [START, *ids][: len(ids)]]
        new = torch.zeros_like(row.weights)
        for place, weight in enumerate(row.weights.tolist()):
            near = range(place, max(-1, place - self.reach - 1), -1)
            new[max(near, key=lambda at: open_to[at])] += weight
        return new


START = -1  # pseudo token id before the first token of a response


def _entropy(counts: Counter[int]) -> float:
    shares = torch.tensor(list(counts.values()), dtype=torch.float64)
    return float(torch.special.entr(shares / shares.sum()).sum())


def _normalize_row(weights: Float[Tensor, " k"]) -> Float[Tensor, " k"]:
    total = weights.sum()
    return weights / total if total != 0 else torch.full_like(weights, 1.0 / weights.numel())
