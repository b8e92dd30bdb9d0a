"""Faithfulness analysis: how much the judge's verdict depends on the tokens that a layer weights most.

It runs once per world and seed and needs no trained policy. It scores every layer, the attention rollout, equal weights
(whose score must be near 0) and, if known, true importance. Across layers, the scores are compared with true importance
and with the reward after training at equal KL; the three need not agree.
"""

import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from attnpo.data.prepare import EncodedSet, sample_as_splits, select_calibration_pairs
from attnpo.display.page import Block, Image, Paragraph, Section, TableBlock
from attnpo.display.tables import Cell
from attnpo.evaluation.intervals import mean_interval
from attnpo.lab.auto_layer import layer_rankings, pool_splits
from attnpo.lab.studies.outcome import Outcome, PointResults, group_by_point, has_truth, rewards_at_kl
from attnpo.lab.studies.study import MeasuredBy
from attnpo.lab.testbed.grammar import Grammar
from attnpo.lab.testbed.importance import mark_decisive_tokens
from attnpo.run.components import Truth
from attnpo.run.resolve import Readers
from attnpo.schema import PreferencePair, UserError, check_at_least
from attnpo.system.files import safe_filename
from attnpo.weights.base import WeightSource
from attnpo.weights.faithfulness import (
    Rankings,
    RemovalMode,
    RemovalSettings,
    faithfulness_score,
    measure_token_removal,
    rank_tokens,
)
from attnpo.weights.sources.attention import Attention
from attnpo.weights.sources.rollout import Rollout

if TYPE_CHECKING:
    import pandas

log = logging.getLogger(__name__)


ROLLOUT, EQUAL, TRUTH = "rollout", "equal weights", "true importance"


@dataclass(frozen=True)
class Faithfulness:
    """Measures how faithful each layer is, on ``pairs`` pairs sorted by pair id, training pairs first.

    For each share in ``shares``, the judge is queried with the top-weighted tokens of both responses removed, and with
    only these tokens kept. The verdicts are compared with those for ``draws`` random sets of the same number of tokens
    at the same positions, drawn with ``seed``; an even number of draws cancels the judge's position bias. ``layers``:
    layers to measure; empty for all. Layers use the heads and post-processing of the study's weights; the rollout uses
    the same post-processing. ``kl_limit``: KL to the base at which the rewards of trained models are compared,
    interpolated on each layer's reward-KL path.
    """

    pairs: int = 250
    shares: tuple[float, ...] = (0.1, 0.2, 0.4)
    draws: int = 2
    seed: int = 0
    layers: tuple[int | str, ...] = ()
    kl_limit: float = 1.0

    def __post_init__(self) -> None:
        check_at_least("faithfulness", 2, pairs=self.pairs)
        check_at_least("faithfulness", 1, draws=self.draws)
        if not self.kl_limit > 0:
            raise UserError(f"faithfulness.kl_limit: expected a KL above 0, got {self.kl_limit}")
        if not self.shares or not all(0 < share < 1 for share in self.shares):
            raise UserError(f"faithfulness.shares: expected shares between 0 and 1, got {list(self.shares)}")

    def measure(
        self,
        source: WeightSource,
        readers: Readers,
        truth: Truth | None,
        encoded: dict[str, EncodedSet],
        folder: Path,
    ) -> dict[str, object]:
        """Measures, for each weight source, how much more the top-weighted tokens matter than random ones.

        Returns plain data: ``weights`` maps the name of each source to ``layer``, ``mass`` (share of weight on decisive
        tokens), ``remove`` and ``keep`` (by share, one number per pair) and ``fall`` (by share, a mean). Other keys:
        the mean log-odds of whole responses (``full``), the numbers of pairs, judge prompts and skipped pairs, and the
        time in seconds.
        """
        began, pool = time.perf_counter(), pool_splits(encoded)
        first = select_calibration_pairs(encoded["train"].pairs, self.pairs)
        known = {pair.pair_id for pair in first}
        rest = [pair for pair in pool.pairs if pair.pair_id not in known] if len(first) < self.pairs else []
        sample = [*first, *select_calibration_pairs(rest, self.pairs - len(first))]
        own = getattr(truth, "grammar", None)
        grammar = own if isinstance(own, Grammar) else None
        layers = layer_rankings(layer_source(source), readers, pool, sample, self.layers)
        tokens = next(iter(layers.values()))
        ranked: dict[str, tuple[int | None, Rankings]] = {
            f"layer {layer}": (layer, rows) for layer, rows in layers.items()
        }
        ranked[ROLLOUT] = None, rollout_rankings(source, readers, pool, sample)
        ranked[EQUAL] = None, equal_rankings(tokens)
        if grammar is not None:
            ranked[TRUTH] = None, true_rankings(sample, tokens, grammar)
        loaded = readers.make_judge().load(readers.base.device)
        removal = RemovalSettings(self.shares, self.draws, self.seed)
        log.info("faithfulness: measuring %d weight sources on %d pairs", len(ranked), len(sample))
        sources = {name: rows for name, (_, rows) in ranked.items()}
        progress = partial(log.info, "faithfulness: %d of %d judge prompts done")
        found = measure_token_removal(sample, sources, loaded.model, loaded.prompts, removal, progress)
        kept = [pair for pair in sample if pair.pair_id in set(found.pair_ids)]
        return {
            "pairs": len(found.pair_ids),
            "full": round(float(found.full.mean()), 4),
            "counts": dict(found.counts),
            "prompts": found.prompts,
            "seconds": round(time.perf_counter() - began, 1),
            "weights": {
                name: {
                    "layer": layer,
                    "mass": None if grammar is None else decisive_mass(kept, rows, grammar),
                    "fall": {
                        str(share): round(float(found.log_odds_drop(name, share).mean()), 4) for share in self.shares
                    },
                    **{
                        mode.value: {
                            str(share): found.advantage_over_random(name, mode, share).round(4).tolist()
                            for share in self.shares
                        }
                        for mode in RemovalMode
                    },
                }
                for name, (layer, rows) in ranked.items()
            },
        }

    def sections(self, outcome: Outcome, measured: MeasuredBy) -> list[Section]:
        """Returns each world's tables over all seeds and by seed, its rank correlations over layers, and a figure."""
        found = []
        for world in dict.fromkeys(world for world, _ in measured):
            by_seed = {seed: values for (of, seed), values in sorted(measured.items()) if of == world}
            found += _WorldReport(self, outcome, world, by_seed).sections()
        return found


# ------------------------------------------------------------------------------------------------ weights


def layer_source(source: WeightSource) -> WeightSource:
    """Returns ``source`` if it reads attention layers, else attention weights with default settings."""
    return source if hasattr(source, "layer") else Attention()


def rollout_rankings(
    source: WeightSource, readers: Readers, pool: EncodedSet, sample: list[PreferencePair]
) -> Rankings:
    """Computes rollout weights for ``sample``, post-processed like the study's. Judges pairs not yet in the store."""
    own = getattr(layer_source(source), "postprocess", None)
    rollout = Rollout() if own is None else Rollout(postprocess=own)
    weighed = readers.weigh(rollout, sample_as_splits(pool, sample))
    return rank_tokens(weighed.source, weighed.captured, weighed.layers)


def equal_rankings(rows: Rankings) -> Rankings:
    """Returns the tokens of ``rows``, each with a weight of 1."""
    return {
        name: {side: replace(row, weights=(1.0,) * len(row.weights)) for side, row in sides.items()}
        for name, sides in rows.items()
    }


def true_rankings(sample: Sequence[PreferencePair], tokens: Rankings, grammar: Grammar) -> Rankings:
    """Returns a weight of 1 for each token that contains a decisive character, else 0."""
    return {
        pair.pair_id: {
            side: replace(row, weights=tuple(map(float, mark_decisive_tokens(pair, side, row.offsets, grammar))))
            for side, row in tokens[pair.pair_id].items()
        }
        for pair in sample
        if pair.pair_id in tokens
    }


def decisive_mass(sample: Sequence[PreferencePair], rows: Rankings, grammar: Grammar) -> float:
    """Returns the share of weight on decisive tokens, averaged over responses that contain any; else NaN."""
    shares = []
    for pair in sample:
        for side, row in rows[pair.pair_id].items():
            marks, total = mark_decisive_tokens(pair, side, row.offsets, grammar), sum(row.weights)
            if any(marks) and total > 0:
                shares.append(sum(w for w, mark in zip(row.weights, marks, strict=True) if mark) / total)
    return round(sum(shares) / len(shares), 4) if shares else math.nan


# ------------------------------------------------------------------------------------------------ tables and figure


@dataclass(frozen=True)
class _WorldReport:
    """Report on one world: measurements by seed, with the rewards of the study's trained models."""

    rules: Faithfulness
    outcome: Outcome
    world: str
    by_seed: Mapping[int, Mapping[str, Any]]

    def sections(self) -> list[Section]:
        """Returns all sections; rank correlations and the figure need at least two layers."""
        suffix = f", {self.world}" if self.world else ""
        layers = self.rows.dropna(subset="layer")
        count = int(layers.groupby("seed").size().max())
        over = [self._summary_row(name, mine) for name, mine in self.rows.groupby("weights", sort=False)]
        table = TableBlock(list(dict.fromkeys(column for row in over for column in row)), over)
        cells = self.rows.drop(columns="layer").astype(object).fillna("")
        seeds: list[Block] = [TableBlock(list(cells.columns), cells.to_dict("records"), digits=2)]
        found = [
            Section(f"Faithfulness of token weights{suffix}", [table, *map(Paragraph, self._notes())]),
            Section(f"Faithfulness by seed{suffix}", seeds),
        ]
        if count > 1:
            seeds.append(self._layer_figure(layers))
            ranks: list[Block] = [self._correlation_table(layers), *map(Paragraph, self._correlation_notes(count))]
            found.append(Section(f"Rank correlation over layers{suffix}", ranks))
        return found

    @property
    def reward_column(self) -> str:
        """Returns the name of the column with the rewards of trained models."""
        return f"reward at KL {self.rules.kl_limit:g}"

    @cached_property
    def rows(self) -> "pandas.DataFrame":
        """Returns one row per seed and weight source: means over pairs, score, true mass and reward."""
        import pandas

        rows = [
            {
                "seed": seed,
                "weights": name,
                "layer": found["layer"],
                **{head: float(np.mean(found[mode][share])) for head, mode, share in self._removal_columns()},
                "score": faithfulness_score(found),
                "true mass": found["mass"],
                self.reward_column: self.layer_rewards[seed].get(found["layer"]),
            }
            for seed, values in self.by_seed.items()
            for name, found in values["weights"].items()
        ]
        return pandas.DataFrame(rows).astype({"layer": float, "true mass": float, self.reward_column: float})

    @cached_property
    def layer_rewards(self) -> dict[int, dict[int, float]]:
        """Returns each layer's test reward at ``kl_limit``, by seed, interpolated on the layer's reward-KL path.

        Layers are omitted if they have no value at this KL, no finished points or no known true reward.
        """
        found: dict[int, dict[int, float]] = {seed: {} for seed in self.by_seed}
        for seed, rewards in found.items():
            mine = [one for one in self.outcome.points if (one[0].seed, one[0].arm.world) == (seed, self.world)]
            arms: dict[int, list[PointResults]] = {}
            for point in group_by_point(mine):
                if point.arm.layer is not None:
                    arms.setdefault(point.arm.layer, []).append(point)
            for layer, arm in sorted(arms.items()):
                place = rewards_at_kl(arm, self.rules.kl_limit) if has_truth(arm) else None
                if place is not None and not place.mark:
                    rewards[layer] = place.mean_reward
        return found

    def _removal_columns(self) -> list[tuple[str, str, str]]:
        return [
            (f"{word} {100 * share:g} %", mode, str(share))
            for mode, word in {"remove": "without", "keep": "only"}.items()
            for share in self.rules.shares
        ]

    def _summary_row(self, name: str, mine: "pandas.DataFrame") -> dict[str, Cell]:
        """Returns a weight source's row in the table over all seeds: means with intervals over seeds and pairs."""
        row: dict[str, Cell] = {"weights": name}
        for head, mode, share in self._removal_columns():
            found = [self.by_seed[seed]["weights"][name][mode][share] for seed in mine["seed"]]
            scores = np.array([one[: min(map(len, found))] for one in found], dtype=float)  # as many pairs of each
            row[head] = mean_interval(scores, same_prompts=False).text(2)
        row["score"] = round(float(mine["score"].mean()), 2)
        if mine["true mass"].notna().any():
            row["true mass"] = round(float(mine["true mass"].mean()), 3)
        if any(self.layer_rewards.values()):
            reached, seeds = int(mine[self.reward_column].count()), len(mine)
            some = "" if reached == seeds else f" ({reached} of {seeds} seeds)"
            row[self.reward_column] = f"{mine[self.reward_column].mean():.3f}{some}" if reached else ""
        return row

    def _notes(self) -> list[str]:
        values = self.by_seed.values()
        shares = ", ".join(f"{100 * share:g}" for share in self.rules.shares)
        full = ", ".join(f"{one['full']:.2f}" for one in values)
        pairs = " or ".join(map(str, sorted({one["pairs"] for one in values})))
        return [
            f"without: the top-weighted {shares} % of the tokens of both responses are removed from the judge's "
            f"prompt; the "
            "value is the drop in log-odds of the judge's own verdict (nats, mean of both orders) minus the drop when "
            "equally many random tokens at the same positions are removed. only: all other tokens are removed; the "
            "value is the log-odds minus those with random tokens kept. Positive values mean faithful weights; equal "
            "weights must be near 0",
            f"score: mean over the shares under removal, used by weights.layer=auto to choose a layer. Log-odds with "
            f"whole responses: {full}; {pairs} pairs per seed, {self.rules.draws} random draws; intervals over seeds "
            "and pairs",
            "true mass: share of the weights on the tokens that determine the true reward"
            if self.rows["true mass"].notna().any()
            else "the true reward is not known in this setting, so there is no true mass",
            "measured in " + ", ".join(f"{one['seconds']:.0f} s ({one['prompts']} judge prompts)" for one in values),
            *(
                f"seed {seed}: {what}: {count}"
                for seed, one in self.by_seed.items()
                for what, count in one["counts"].items()
                if count
            ),
        ]

    def _correlation_table(self, layers: "pandas.DataFrame") -> TableBlock:
        """Returns Spearman correlations over the layers of each seed, with mean and standard deviation over seeds."""
        import pandas

        names = {"score": "faithfulness", "true mass": "true mass", self.reward_column: "reward"}
        rows: list[dict[str, Cell]] = []
        for seed, mine in layers.set_index("layer").groupby("seed"):
            ranks, trained = mine[[*names]].corr("spearman", min_periods=3), mine[self.reward_column].dropna()
            pairs = {f"{names[one]} and {names[other]}": ranks.loc[one, other] for one, other in combinations(names, 2)}
            rows.append(
                {
                    "seed": str(seed),
                    **{name: float(value) for name, value in pairs.items()},
                    **{"layers": len(mine), "with reward": len(trained), "most faithful": int(mine["score"].idxmax())},
                    "best reward": int(trained.idxmax()) if len(trained) else "",
                }
            )
        if len(rows) > 1:
            numbers = pandas.DataFrame(rows)[[*pairs]]
            rows.append({"seed": "mean", **numbers.mean().to_dict()})
            rows.append({"seed": "standard deviation", **numbers.std().to_dict()})
        return TableBlock(list(rows[0]), [{name: row.get(name, "") for name in rows[0]} for row in rows], digits=2)

    def _correlation_notes(self, layers: int) -> list[str]:
        return [
            f"Spearman correlation over the {layers} layers of one seed: with so few layers, swapping two neighbours "
            f"changes it by at least {12 / (layers * (layers * layers - 1)):.2g}, and a random order gives 1 with "
            f"probability 1 in {math.factorial(layers):.3g}; the spread over seeds says more than any single value",
            f"reward: on test prompts at KL {self.rules.kl_limit:g}, interpolated on each layer's path over the grid; "
            "layers whose points do not reach this KL are omitted. A layer can be faithful without finding the "
            "decisive tokens, and neither implies that training with it works best",
        ]

    def _layer_figure(self, layers: "pandas.DataFrame") -> Image:
        from attnpo.lab.figures import LayerPanel, layer_panels

        def values_by_seed(column: str) -> list[dict[int, float]]:
            seeds = layers.dropna(subset=column).groupby("seed")
            return [dict(zip(mine["layer"].astype(int), mine[column], strict=True)) for _, mine in seeds]

        falls = {head: values_by_seed(head) for head, mode, _ in self._removal_columns() if mode == "remove"}
        panels = [LayerPanel("faithfulness", "drop beyond random removal (nats)", falls)]
        others = {
            "true mass": ("true importance", "share of weights on decisive tokens", "true mass"),
            self.reward_column: ("training", f"test {self.reward_column}", "reward"),
        }
        for column, (title, ylabel, name) in others.items():
            if layers[column].notna().any():
                panels.append(LayerPanel(title, ylabel, {name: values_by_seed(column)}))
        path = self.outcome.folder / (
            f"faithfulness-{safe_filename(self.world)}.png" if self.world else "faithfulness.png"
        )
        caption = "faithfulness, true importance and reward after training by layer, if known; thin lines: single seeds"
        return Image(layer_panels(panels, path), caption)
