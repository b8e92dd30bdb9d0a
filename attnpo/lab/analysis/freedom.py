"""How far a trained policy moved at tokens of each weight: KL(policy || base) per token, by weight decile.

The paper says that tokens of low weight get more freedom. Checked so: every response token of held-out rows has a
weight (relative to uniform: w |y|) and, for each policy, the full-vocabulary KL to the base at its position. Tokens are
sorted by weight into ten groups of equal size, and the mean KL per group is shown. Two traps, and what is done:
words with low weight differ in more than their weight (a full stop has little to choose), so a policy trained without
weights is shown on the same tokens and the ratio to it is the statement; and policies differ in how far they went
overall, so every KL is also shown over the policy's own mean. Intervals resample whole responses.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from attnpo.models.scored import ScoredLM
from attnpo.schema import ModelInputs, RowGroup, TokenStats, UserError

DECILES = 10
Row = Float[np.ndarray, "_"]  # the tokens of one response


@dataclass(frozen=True)
class Estimate:
    """A mean with the ends of its bootstrap interval."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Decile:
    """One group of tokens: its number (1 holds the lowest weights), its tokens and weights, and KL by policy.

    ``kl``: nats per token. ``relative``: over the policy's mean KL per token. ``ratio``: ``relative`` over that of the
    control; empty where there is none.
    """

    number: int
    tokens: int
    lowest: float
    highest: float
    kl: dict[str, Estimate]
    relative: dict[str, Estimate]
    ratio: dict[str, Estimate]


@dataclass(frozen=True)
class Freedom:
    """All groups, and for each policy the claim itself.

    ``claim``: relative KL of the lower half of the groups over that of the upper half, over the same for the control
    where there is one. Above 1, its whole interval too: more freedom on low weights.
    """

    deciles: tuple[Decile, ...]
    claim: dict[str, Estimate]
    control: str | None
    responses: int
    level: float


def freedom(
    weights: Sequence[Row],
    kl: Mapping[str, Sequence[Row]],
    control: str | None = None,
    *,
    groups: int = DECILES,
    draws: int = 2000,
    level: float = 0.95,
    seed: int = 0,
) -> Freedom:
    """KL per token by weight group for every policy in ``kl``, with percentile intervals over resampled responses.

    Args:
        weights: for every response the weights of its tokens, relative to uniform (w |y|), so that long and short
            responses can be pooled.
        kl: by policy, the KL(policy || base) at the same tokens, in nats.
        control: the policy trained without weights; every other one is also shown over it.
        groups: number of groups; tokens of equal weight are split in the order they come, so a group of ties (tokens
            without a judge-side partner have weight 0) is a chance split of them.
        draws: resamples of the responses.
        level: nominal coverage of the intervals.
        seed: of the resampling and of the order of ties.

    Raises:
        UserError: rows that do not fit, values that are not finite, an unknown control, fewer tokens than groups.
    """
    _check(weights, kl, control, groups)
    flat, random = np.concatenate(list(weights)), np.random.default_rng(seed)
    order = np.lexsort((random.random(flat.size), flat))
    group = np.empty(flat.size, dtype=np.int64)
    group[order] = np.arange(flat.size) * groups // flat.size
    owner = np.repeat(np.arange(len(weights)), [row.size for row in weights])
    count = _cells(owner, group, np.ones(flat.size), len(weights), groups)
    sums = {name: _cells(owner, group, np.concatenate(list(rows)), len(weights), groups) for name, rows in kl.items()}
    drawn = random.multinomial(len(weights), np.full(len(weights), 1 / len(weights)), size=draws)
    picks = np.vstack([np.ones(len(weights)), drawn])  # the first row is the sample as it is
    tokens = picks @ count
    tail = (1 - level) / 2
    plain = {name: (picks @ one, tokens) for name, one in sums.items()}
    means = {name: _over(top, under) for name, (top, under) in plain.items()}
    relative = {
        name: _over(means[name], _over(top.sum(1), under.sum(1))[:, None]) for name, (top, under) in plain.items()
    }
    halves = {name: _halves(top, under) for name, (top, under) in plain.items()}
    others = [name for name in kl if control is not None and name != control]
    ratio = {name: _over(relative[name], relative[control or name]) for name in others}
    claim = {
        name: half if name not in others else _over(half, halves[control or name]) for name, half in halves.items()
    }
    return Freedom(
        deciles=tuple(
            Decile(
                number=place + 1,
                tokens=int(tokens[0, place]),
                lowest=float(flat[group == place].min()),
                highest=float(flat[group == place].max()),
                kl=_estimates(means, place, tail),
                relative=_estimates(relative, place, tail),
                ratio=_estimates(ratio, place, tail),
            )
            for place in range(groups)
        ),
        claim={name: _estimate(values, tail) for name, values in claim.items()},
        control=control,
        responses=len(weights),
        level=level,
    )


def measure(policy: ScoredLM, base: ScoredLM, group: RowGroup) -> tuple[list[Row], list[Row]]:
    """Returns the two lists of ``rows_of`` for rows that both models score here, without gradients.

    Raises:
        UserError: a model has no plain linear head to compare with.
        ValueError: the rows have no model inputs.
    """
    return rows_of(group, against(policy, base, alone(base, group), group))


def alone(base: ScoredLM, group: RowGroup) -> TokenStats:
    """Statistics of the base on the rows, with the hidden states that ``against`` reads, without gradients.

    Raises ``ValueError`` when the rows have no model inputs.
    """
    with torch.no_grad():
        stats: TokenStats = base(*_read(group), frozenset({"hidden"}))
    return stats


def against(policy: ScoredLM, base: ScoredLM, of_base: TokenStats, group: RowGroup) -> TokenStats:
    """Statistics of the policy on the rows, with "kl_policy_ref", without gradients; ``of_base``: of ``alone``.

    Raises as ``measure`` does.
    """
    with torch.no_grad():
        stats: TokenStats = policy(*_read(group), frozenset({"joint:kl_policy_ref"}), (of_base.hidden, base.head()))
    return stats


def _read(group: RowGroup) -> tuple[ModelInputs, Tensor, Tensor]:
    if group.inputs is None:
        raise ValueError("the rows have no model inputs")
    return group.inputs, group.response_ids, group.response_mask


def rows_of(group: RowGroup, stats: TokenStats) -> tuple[list[Row], list[Row]]:
    """Weights relative to uniform and KL(policy || base) of every response of a batch, on its response tokens.

    ``stats``: the policy's, with the joint statistic "kl_policy_ref" (``ScoredLM`` forms it from both heads in chunks).

    Raises:
        UserError: the statistic was not asked for.
    """
    if "kl_policy_ref" not in stats.joint:
        raise UserError(
            'freedom: expected the statistic "joint:kl_policy_ref", got '
            f"{', '.join(sorted(stats.joint)) or 'none'}; ask the policy for it with the base as the other model"
        )
    weights = group.token_weights["reward"]
    if not group.factors:
        weights = weights * group.source_lengths.to(weights.dtype).unsqueeze(-1)
    rows: tuple[list[Row], list[Row]] = ([], [])
    for values, found in zip((weights, stats.joint["kl_policy_ref"]), rows, strict=True):
        for row, mask in zip(values.detach().double().cpu(), group.response_mask.cpu(), strict=True):
            found.append(row[mask].numpy())
    return rows


def _check(weights: Sequence[Row], kl: Mapping[str, Sequence[Row]], control: str | None, groups: int) -> None:
    """Raises UserError for input that cannot be grouped."""
    if control is not None and control not in kl:
        raise UserError(f"freedom: expected the control among the policies {', '.join(kl)}, got {control}")
    if groups < 2 or sum(row.size for row in weights) < groups:
        count = sum(row.size for row in weights)
        raise UserError(f"freedom: expected at least 2 groups and a token for each, got {groups} and {count} tokens")
    for name, rows in {"weights": weights, **kl}.items():
        if [row.size for row in rows] != [row.size for row in weights]:
            raise UserError(f"freedom, {name}: expected a value for every weight of every response; rows do not fit")
        if not all(bool(np.isfinite(row).all()) for row in rows):
            raise UserError(f"freedom, {name}: expected finite values, got some that are not")


def _cells(
    owner: Int[np.ndarray, "all"], group: Int[np.ndarray, "all"], values: Row, responses: int, groups: int
) -> Float[np.ndarray, "responses groups"]:
    """Sums of ``values`` per response and group."""
    flat = np.bincount(owner * groups + group, weights=values, minlength=responses * groups)
    return np.asarray(flat.reshape(responses, groups), dtype=np.float64)


def _over(top: np.ndarray, under: np.ndarray) -> np.ndarray:
    """``top / under``; NaN where ``under`` is 0: no token was drawn, or the policy did not move."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(np.where(under > 0, top / under, np.nan), dtype=np.float64)


def _halves(top: np.ndarray, under: np.ndarray) -> np.ndarray:
    """Mean KL of the lower half of the groups over that of the upper half; a middle group is in neither."""
    half = top.shape[1] // 2
    low = _over(top[:, :half].sum(1), under[:, :half].sum(1))
    return _over(low, _over(top[:, -half:].sum(1), under[:, -half:].sum(1)))


def _estimates(tables: Mapping[str, np.ndarray], place: int, tail: float) -> dict[str, Estimate]:
    return {name: _estimate(table[:, place], tail) for name, table in tables.items()}


def _estimate(values: Row, tail: float) -> Estimate:
    """Returns the first value with the quantiles of the others; those that could not be formed are left out."""
    rest = values[1:][np.isfinite(values[1:])]
    low, high = np.quantile(rest, (tail, 1 - tail)) if rest.size else (np.nan, np.nan)
    return Estimate(float(values[0]), float(low), float(high))


# ------------------------------------------------------------------------------------------------ table and figure


def freedom_table(result: Freedom) -> tuple[list[str], list[list[str | float | int]]]:
    """Columns and rows, one per group: weights, tokens, and by policy its KL, relative KL and ratio with interval."""
    names = list(result.claim)
    columns = ["decile", "tokens", "weight from", "to"]
    columns += [head for name in names for head in (f"{name} KL", f"{name} relative")]
    columns += [f"{name} over {result.control}" for name in result.deciles[0].ratio]
    rows: list[list[str | float | int]] = []
    for one in result.deciles:
        row: list[str | float | int] = [one.number, one.tokens, one.lowest, one.highest]
        for name in names:
            row += [one.kl[name].mean, _text(one.relative[name])]
        rows.append([*row, *(_text(ratio) for ratio in one.ratio.values())])
    return columns, rows


def claim_table(result: Freedom) -> tuple[list[str], list[list[str | float | int]]]:
    """Columns and rows, one per policy: lower over upper half, and what that says of more freedom on low weights."""
    rows: list[list[str | float | int]] = []
    for name, one in result.claim.items():
        against = f"over {result.control}" if name in result.deciles[0].ratio else "of its own"
        rows.append([name, against, one.mean, one.low, one.high, _verdict(one)])
    return ["policy", "lower over upper half", "ratio", "low", "high", "more freedom on low weights"], rows


def _verdict(one: Estimate) -> str:
    if one.low > 1:
        return "yes"
    return "no, less" if one.high < 1 else "open"


def _text(one: Estimate) -> str:
    return f"{one.mean:.2f} [{one.low:.2f}, {one.high:.2f}]"
