"""Tables and figure of the faithfulness analysis, from its plain data and the study's finished points."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float

from attnpo.display.layer_panels import LayerPanel, layer_panels
from attnpo.display.page import Block, Image, Paragraph, Section, TableBlock
from attnpo.display.tables import Cell
from attnpo.evaluation.intervals import Prompts, hierarchical_bootstrap, rank_correlation
from attnpo.lab.studies.frontier import at_kl
from attnpo.lab.studies.selection import gather, has_truth
from attnpo.lab.studies.study import Outcome
from attnpo.system.files import clean
from attnpo.weights.faithfulness import score_of

Values = dict[str, Any]
BySeed = Mapping[int, Values]
Row = dict[str, Cell]

MODES = {"remove": "without", "keep": "only"}  # in words


@runtime_checkable
class Rules(Protocol):
    """What the analysis was asked to measure, as far as the pages say it."""

    @property
    def shares(self) -> tuple[float, ...]:
        """Shares of the tokens that were removed or kept."""

    @property
    def draws(self) -> int:
        """Random sets of tokens for each."""

    @property
    def kl_limit(self) -> float:
        """KL to the base at which trained rewards are read."""


def world_sections(rules: Rules, outcome: Outcome, world: str, by_seed: BySeed) -> list[Section]:
    """Returns all sections of one world; with a single layer there is nothing to rank and no figure over layers."""
    suffix = f", {world}" if world else ""
    rewards = {seed: layer_rewards(outcome, world, seed, rules.kl_limit) for seed in by_seed}
    names = list(dict.fromkeys(name for values in by_seed.values() for name in values["weights"]))
    over = [over_seeds(rules, name, by_seed, rewards) for name in names]
    columns = list(dict.fromkeys(column for row in over for column in row))
    blocks: list[Block] = [TableBlock(columns, over), *map(Paragraph, notes(rules, by_seed))]
    ranked = layer_count(by_seed) > 1
    figure = [draw(rules, outcome, world, by_seed, rewards)] if ranked else []
    seeds = [row for seed, values in by_seed.items() for row in seed_rows(rules, seed, values, rewards[seed])]
    sections = [
        Section(f"Faithfulness of token weights{suffix}", blocks),
        Section(f"Faithfulness by seed{suffix}", [TableBlock(list(seeds[0]), seeds, digits=2), *figure]),
    ]
    if ranked:
        correlations = correlation_rows(by_seed, rewards)
        ranks: list[Block] = [TableBlock(list(correlations[0]), correlations, digits=2)]
        ranks += map(Paragraph, correlation_notes(rules, by_seed))
        sections.append(Section(f"Rank correlation over layers{suffix}", ranks))
    return sections


def layer_count(by_seed: BySeed) -> int:
    """Returns the largest number of layers that a seed has measured."""
    return max(sum(found["layer"] is not None for found in values["weights"].values()) for values in by_seed.values())


def layer_rewards(outcome: Outcome, world: str, seed: int, kl_limit: float) -> dict[int, float]:
    """Test reward by layer at one KL, of one seed, each layer on its own path over the grid.

    A layer is left out where its path does not go as far, where no point is finished, and where no truth is known.
    """
    found = {}
    points = gather([item for item in outcome.points if item[0].seed == seed and item[0].arm.world == world])
    for layer in sorted({point.arm.layer for point in points if point.arm.layer is not None}):
        arm = [point for point in points if point.arm.layer == layer]
        place = at_kl(arm, kl_limit) if has_truth(arm) else None
        if place is not None and not place.mark:
            found[layer] = place.reward
    return found


def advantages(by_seed: BySeed, name: str, mode: str, share: float) -> Float[np.ndarray, "seeds pairs"]:
    """Per seed and pair how much more the top-weighted tokens matter than random ones; as many pairs for each seed."""
    rows = [values["weights"][name][mode][str(share)] for values in by_seed.values() if name in values["weights"]]
    width = min(map(len, rows))
    return np.array([row[:width] for row in rows], dtype=float)


def over_seeds(rules: Rules, name: str, by_seed: BySeed, rewards: Mapping[int, Mapping[int, float]]) -> Row:
    """Returns one weights' row of the table over seeds: means with intervals over seeds and pairs."""
    mine = {seed: values["weights"][name] for seed, values in by_seed.items() if name in values["weights"]}
    row: Row = {"weights": name}
    for mode, word in MODES.items():
        for share in rules.shares:
            scores = advantages(by_seed, name, mode, share)
            row[f"{word} {100 * share:g} %"] = hierarchical_bootstrap(
                scores, draws=2000, prompts=Prompts.PER_SEED
            ).text(2)
    row["score"] = round(_mean([score_of(values) for values in mine.values()]), 2)
    masses = [values["mass"] for values in mine.values() if values["mass"] is not None]
    if masses:
        row["true mass"] = round(_mean(masses), 3)
    layer = next(iter(mine.values()))["layer"]
    if any(rewards.values()):
        found = [rewards[seed].get(layer, math.nan) for seed in mine] if layer is not None else []
        reached = [value for value in found if math.isfinite(value)]
        row[f"reward at KL {rules.kl_limit:g}"] = (
            f"{_mean(reached):.3f}{'' if len(reached) == len(found) else f' ({len(reached)} of {len(found)} seeds)'}"
            if reached
            else ""
        )
    return row


def seed_rows(rules: Rules, seed: int, values: Values, rewards: Mapping[int, float]) -> list[Row]:
    """Returns the rows of one seed."""
    return [
        {
            "seed": seed,
            "weights": name,
            **{
                f"{word} {100 * share:g} %": _mean(found[mode][str(share)])
                for mode, word in MODES.items()
                for share in rules.shares
            },
            "score": score_of(found),
            "true mass": "" if found["mass"] is None else found["mass"],
            f"reward at KL {rules.kl_limit:g}": rewards.get(found["layer"], ""),
        }
        for name, found in values["weights"].items()
    ]


def correlation_rows(by_seed: BySeed, rewards: Mapping[int, Mapping[int, float]]) -> list[Row]:
    """Spearman's correlations over the layers of each seed, their mean and their spread over seeds."""
    rows: list[Row] = []
    columns: dict[str, list[float]] = {}
    for seed, values in by_seed.items():
        layers = [found for found in values["weights"].values() if found["layer"] is not None]
        scores = [score_of(found) for found in layers]
        masses = [math.nan if found["mass"] is None else found["mass"] for found in layers]
        trained = [rewards[seed].get(found["layer"], math.nan) for found in layers]
        numbers = {
            "faithfulness and true mass": rank_correlation(scores, masses),
            "faithfulness and reward": rank_correlation(scores, trained),
            "true mass and reward": rank_correlation(masses, trained),
        }
        for name, value in numbers.items():
            columns.setdefault(name, []).append(value)
        counts: Row = {"layers": len(layers), "with reward": sum(map(math.isfinite, trained))}
        best = layers[int(np.argmax(scores))]["layer"]
        top = max(rewards[seed], key=rewards[seed].__getitem__) if rewards[seed] else ""
        rows.append({"seed": str(seed), **numbers, **counts, "most faithful": best, "best reward": top})
    if len(rows) > 1:
        finite = {name: [value for value in found if math.isfinite(value)] for name, found in columns.items()}
        rows.append({"seed": "mean", **{name: _mean(found) for name, found in finite.items()}})
        spread = {name: float(np.std(found, ddof=1)) if len(found) > 1 else math.nan for name, found in finite.items()}
        rows.append({"seed": "standard deviation", **spread})
    return [{name: row.get(name, "") for name in rows[0]} for row in rows]


def notes(rules: Rules, by_seed: BySeed) -> list[str]:
    """Returns what the numbers of the table are."""
    shares = ", ".join(f"{100 * share:g}" for share in rules.shares)
    pairs = sorted({values["pairs"] for values in by_seed.values()})
    full = ", ".join(f"{values['full']:.2f}" for values in by_seed.values())
    lines = [
        f"without: the top-weighted {shares} % of both responses' tokens are removed from the judge's prompt; shown is "
        "the fall of the log-odds of the judge's own verdict (nats, both orders averaged) minus the fall without as "
        "many random tokens from the same places. only: they alone are kept; shown are the log-odds minus those with "
        "random tokens kept. Positive is faithful; equal weights must come out near 0",
        f"score: mean of the shares under removal, what weights.layer=auto goes by. Log-odds with whole responses: "
        f"{full}; {' or '.join(map(str, pairs))} pairs per seed, {rules.draws} random draws; intervals over "
        "seeds and pairs",
        "true mass: share of the weights on the tokens that carry the true reward"
        if any(found["mass"] is not None for values in by_seed.values() for found in values["weights"].values())
        else "no truth is known in this setting, so there is no true mass",
        "measured in " + ", ".join(f"{v['seconds']:.0f} s ({v['prompts']} judge prompts)" for v in by_seed.values()),
    ]
    for seed, values in by_seed.items():
        lines += [f"seed {seed}: {what}: {count}" for what, count in values["counts"].items() if count]
    return lines


def correlation_notes(rules: Rules, by_seed: BySeed) -> list[str]:
    """Returns how little a correlation over a few layers says."""
    layers = layer_count(by_seed)
    return [
        f"Spearman over {layers} layers of one seed: with so few, an exchange of two neighbours moves it by "
        f"{12 / (layers * (layers * layers - 1)):.2g} and more, and chance alone gives 1 once in "
        f"{math.factorial(layers):.3g} orders; the spread over seeds says more than any one value",
        f"reward: on test prompts at KL {rules.kl_limit:g}, read off each layer's own path over the grid; layers whose "
        "points do not go as far are left out. That a layer is faithful, that it finds the truth, and that "
        "it trains best are three statements",
    ]


def draw(
    rules: Rules,
    outcome: Outcome,
    world: str,
    by_seed: BySeed,
    rewards: Mapping[int, Mapping[int, float]],
) -> Image:
    """Returns the figure over layers, drawn into the study's folder."""

    def layers(values: Values) -> list[Values]:
        return [found for found in values["weights"].values() if found["layer"] is not None]

    falls = {
        f"without {100 * share:g} %": [
            {found["layer"]: _mean(found["remove"][str(share)]) for found in layers(values)}
            for values in by_seed.values()
        ]
        for share in rules.shares
    }
    panels = [LayerPanel("faithfulness", "fall beyond random removal (nats)", falls)]
    masses = [
        {found["layer"]: found["mass"] for found in layers(values) if found["mass"] is not None}
        for values in by_seed.values()
    ]
    if any(masses):
        panels.append(LayerPanel("true importance", "share of weights on decisive tokens", {"true mass": masses}))
    if any(rewards.values()):
        shown = [dict(rewards[seed]) for seed in by_seed]
        panels.append(LayerPanel("training", f"test reward at KL {rules.kl_limit:g}", {"reward": shown}))
    name = f"faithfulness-{clean(world)}.png" if world else "faithfulness.png"
    caption = "by layer: faithfulness, true importance and trained reward, as far as known; thin lines are seeds"
    return Image(layer_panels(panels, outcome.folder / name), caption)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan
