"""Movement of a trained policy at tokens of each weight: KL(policy || base) per token, by weight decile.

The paper says that tokens of low weight get more freedom. To check this, every response token of held-out rows gets a
weight (relative to uniform: w |y|) and, for each policy, the full-vocabulary KL to the base at its position. Tokens are
sorted by weight into ten groups of equal size, and the mean KL per group is shown. Two confounders are handled: words
of low weight differ in more than their weight (a full stop has few alternatives), so the statement is the ratio to a
policy trained without weights on the same tokens; and policies differ in how far they moved overall, so every KL is
also shown relative to the policy's own mean. Intervals resample whole responses.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas
from jaxtyping import Float, Int
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from attnpo.display.look import COLOURS, MARKERS, SOFT, add_legend, label_axes, new_figure, save_figure, styled
from attnpo.lab.drift import DECILES, score_base, score_policy
from attnpo.models.scored import ScoredLM
from attnpo.schema import RowGroup, TokenStats, UserError

Row = Float[np.ndarray, "_"]  # the tokens of one response


@dataclass(frozen=True)
class Freedom:
    """KL by weight group and policy, and the claim about freedom.

    ``groups``: by number (1 has the lowest weights), the number of tokens and their lowest and highest weight.
    ``measured``: ``mean``, ``low`` and ``high`` by measure, policy and group; "kl" is in nats per token, "relative" is
    divided by the policy's mean KL per token, and "ratio" divides that by the control's, if there is one. ``claim``: by
    policy, the relative KL of the lower half of the groups divided by that of the upper half, and by the same ratio of
    the control if there is one. Low weights have more freedom if the whole interval is above 1.
    """

    groups: pandas.DataFrame
    measured: pandas.DataFrame
    claim: pandas.DataFrame
    control: str | None

    def of(self, measure: str) -> dict[str, pandas.DataFrame]:
        """Returns one measure by policy."""
        found = self.measured[self.measured.index.get_level_values(0) == measure].droplevel(0)
        return {str(name): rows.droplevel(0) for name, rows in found.groupby(level=0, sort=False)}


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
    """Returns KL per token by weight group for every policy in ``kl``, with intervals over resampled responses.

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
    plain = {name: (picks @ one, tokens) for name, one in sums.items()}
    means = {name: _over(top, under) for name, (top, under) in plain.items()}
    relative = {
        name: _over(means[name], _over(top.sum(1), under.sum(1))[:, None]) for name, (top, under) in plain.items()
    }
    claim = {name: _halves(top, under)[:, None] for name, (top, under) in plain.items()}
    found = {"kl": means, "relative": relative}
    if control is not None:
        others = [name for name in kl if name != control]
        found["ratio"] = {name: _over(relative[name], relative[control]) for name in others}
        claim |= {name: _over(claim[name], claim[control]) for name in others}
    measured = {(name, of): _estimates(table, level) for name, tables in found.items() for of, table in tables.items()}
    weight = pandas.Series(flat).groupby(group + 1)
    return Freedom(
        groups=weight.agg(tokens="size", lowest="min", highest="max"),
        measured=pandas.concat(measured),
        claim=pandas.concat({name: _estimates(table, level) for name, table in claim.items()}).droplevel(1),
        control=control,
    )


def measure(policy: ScoredLM, base: ScoredLM, group: RowGroup) -> tuple[list[Row], list[Row]]:
    """Scores the rows with both models, without gradients, and returns the two lists of ``rows_of``.

    Raises:
        UserError: a model has no plain linear head to compare with.
        ValueError: the rows have no model inputs.
    """
    return rows_of(group, score_policy(policy, base, score_base(base, group), group))


def rows_of(group: RowGroup, stats: TokenStats) -> tuple[list[Row], list[Row]]:
    """Returns weights relative to uniform and KL(policy || base) of every response of a batch, on its response tokens.

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
    """Raises UserError if the input cannot be grouped."""
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
    """Sums ``values`` per response and group."""
    flat = np.bincount(owner * groups + group, weights=values, minlength=responses * groups)
    return np.asarray(flat.reshape(responses, groups), dtype=np.float64)


def _over(top: np.ndarray, under: np.ndarray) -> np.ndarray:
    """Returns ``top / under``; NaN if ``under`` is 0, because no token was drawn or the policy did not move."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(np.where(under > 0, top / under, np.nan), dtype=np.float64)


def _halves(top: np.ndarray, under: np.ndarray) -> np.ndarray:
    """Returns the mean KL of the lower half of the groups divided by that of the upper half, without a middle group."""
    half = top.shape[1] // 2
    low = _over(top[:, :half].sum(1), under[:, :half].sum(1))
    return _over(low, _over(top[:, -half:].sum(1), under[:, -half:].sum(1)))


def _estimates(values: Float[np.ndarray, "draws columns"], level: float) -> pandas.DataFrame:
    """Returns the first row with quantiles of the other rows, which ignore undefined values."""
    low, high = pandas.DataFrame(values[1:]).quantile([(1 - level) / 2, (1 + level) / 2]).to_numpy()
    numbers = range(1, values.shape[1] + 1)
    return pandas.DataFrame({"mean": values[0], "low": low, "high": high}, index=numbers)


# ------------------------------------------------------------------------------------------------ table and figure


def freedom_table(result: Freedom) -> pandas.DataFrame:
    """Builds a table with one row per group: weights, tokens, and each policy's KL, relative KL and ratio."""
    table = result.groups.rename(columns={"lowest": "weight from", "highest": "to"})
    kl, relative = result.of("kl"), result.of("relative")
    for name in kl:
        table[f"{name} KL"], table[f"{name} relative"] = kl[name]["mean"], _texts(relative[name])
    return table.assign(**{f"{name} over {result.control}": _texts(rows) for name, rows in result.of("ratio").items()})


def claim_table(result: Freedom) -> pandas.DataFrame:
    """Builds a table with one row per policy: lower over upper half, and whether low weights have more freedom."""
    of = [f"over {result.control}" if name in result.of("ratio") else "of its own" for name in result.claim.index]
    verdicts = np.select([result.claim["low"] > 1, result.claim["high"] < 1], ["yes", "no, less"], "open")
    return result.claim.assign(**{"lower over upper half": of, "more freedom on low weights": verdicts})


def _texts(rows: pandas.DataFrame) -> list[str]:
    return [f"{mean:.2f} [{low:.2f}, {high:.2f}]" for mean, low, high in rows.to_numpy()]


@styled
def freedom_figure(result: Freedom, path: Path | str, title: str = "KL to the base by token weight") -> Path:
    """Draws relative KL per group and policy, and the ratio to the control if there is one; returns the PNG's path."""
    panels = {title: "relative", **({} if result.control is None else {f"the same over {result.control}": "ratio"})}
    labels = {"relative": "KL per token over the policy's mean", "ratio": "ratio of relative KL"}
    figure = new_figure(5.6 * len(panels), 4.2)
    for axes, (head, measure) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        _lines(axes, result.of(measure), list(result.claim.index))
        label_axes(axes, head, "weight decile, 1 is the lowest", labels[measure])
        axes.axhline(1.0, color=SOFT, linewidth=0.9)
        add_legend(axes)
    return save_figure(figure, path, w_pad=2.0)


def _lines(axes: Axes, policies: Mapping[str, pandas.DataFrame], names: Sequence[str]) -> None:
    """Draws a line with intervals for every policy, styled by its position in ``names``."""
    for name, rows in policies.items():
        number = names.index(name)
        colour, marker = COLOURS[number % len(COLOURS)], MARKERS[number % len(MARKERS)]
        places = rows.index + 0.08 * (number - (len(names) - 1) / 2)
        axes.vlines(places, rows["low"], rows["high"], color=colour, linewidth=2, alpha=0.4)
        axes.plot(places, rows["mean"], color=colour, marker=marker, linewidth=1.5, markersize=5, label=name)
        axes.set_xticks(rows.index)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 1.5, 2.0, 3.0, 5.0, 7.0), numticks=20))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.2g}"))
    axes.yaxis.set_minor_locator(NullLocator())
