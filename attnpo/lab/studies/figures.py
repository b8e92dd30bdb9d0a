"""Figures of a study, with one colour per arm, and the comparison of arms if the true reward is unknown."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from attnpo.display.look import SOFT, ArmStyle, ArmStyles, ScoreInterval, make_arm_styles
from attnpo.display.page import Block, Image, Paragraph, Section, TableBlock
from attnpo.evaluation.intervals import Interval, mean_interval, paired_difference
from attnpo.lab.figures import (
    ArmPanel,
    FrontierPoint,
    GainPoint,
    LayerPoint,
    arm_figure,
    frontier_figure,
    gain_figure,
    layer_curve,
)
from attnpo.lab.studies.outcome import Outcome, PointResults, difference_text, interval_text
from attnpo.lab.studies.study import BASE_ROW, WorldAxis
from attnpo.lab.studies.tables import Row, arms_at_levels, column_names, rows_by_world
from attnpo.run.result import RunResult
from attnpo.schema import SIDES
from attnpo.system.files import safe_filename

MOST, FEW = 16, 8  # maximum arms in a single figure; arms per figure, besides the control, if there are several
TRANSFORM = "transform="
Number = Callable[[RunResult], float]


def assign_arm_styles(outcome: Outcome) -> dict[str, ArmStyle]:
    """Assigns each arm a colour and markers, used in all worlds and figures."""
    study = outcome.study
    altered = [
        arm.name
        for arm in outcome.arms
        if any(item.startswith(TRANSFORM) and item != f"{TRANSFORM}null" for item in arm.overrides)
    ]
    looks = make_arm_styles(
        (arm.name for arm in outcome.arms), study.control, altered=altered, told=list(study.truth_arms)
    )
    return {**looks, BASE_ROW: ArmStyle(SOFT, "s", ":")}


def base_score_interval(point: PointResults) -> ScoreInterval:
    """Returns the base model's mean reward on test prompts, with an interval if its rewards were stored."""
    rows = [scores.base_rewards for scores in point.truth_scores("test")]
    kept = [row for row in rows if row is not None]
    mean = point.mean_truth_score("test", "base_reward")
    if len(kept) < len(rows):
        return ScoreInterval(mean)
    found = mean_interval(np.array(kept))
    return ScoreInterval(mean, found.low, found.high)


def to_score_interval(found: Interval | None) -> ScoreInterval:
    """Converts an interval to the type used in figures; None becomes NaN."""
    return ScoreInterval(math.nan) if found is None else ScoreInterval(found.mean, found.low, found.high)


def seed_interval(values: Sequence[float]) -> Interval | None:
    """Returns the mean over seeds with its interval; None if a value is not finite."""
    return mean_interval(np.array(values)[:, None]) if all(map(math.isfinite, values)) else None


def _world_suffix(world: str) -> str:
    return f", world {world}" if world else ""


def _figure_title(outcome: Outcome, world: str) -> str:
    return ", ".join(filter(None, [outcome.study.name, world]))


def _figure_path(outcome: Outcome, stem: str, world: str, number: str = "") -> Path:
    return outcome.folder / f"{stem}{f'-{safe_filename(world)}' if world else ''}{number}.png"


def _other_points(
    outcome: Outcome, world: str, best: Mapping[str, PointResults], value: Callable[[PointResults], float]
) -> dict[str, Sequence[float]]:
    return {
        arm: [value(point) for point in points if point.values != best[arm].values]
        for arm, points in outcome.points_by_arm(world).items()
        if arm in best
    }


def _draw_over_layers(
    outcome: Outcome,
    world: str,
    levels: Mapping[str, ScoreInterval],
    path: Path,
    looks: ArmStyles,
    *,
    ylabel: str,
    title: str,
) -> bool:
    """Draws single-layer arms as a curve and others as horizontal lines; returns False if there are too few layers."""
    layer_of = {arm.name: arm.layer for arm in outcome.arms if arm.world == world and arm.layer is not None}
    layers = [
        LayerPoint(layer_of[row], level.score, level.low, level.high, row)
        for row, level in levels.items()
        if row in layer_of
    ]
    if len(layers) > 1:
        rest = {row: level for row, level in levels.items() if row not in layer_of}
        control = outcome.study.control
        layer_curve(layers, path, baselines=rest, ylabel=ylabel, title=title, looks=looks, control=control)
    return len(layers) > 1


def study_figures(outcome: Outcome) -> list[Image]:
    """Draws the study's figures and saves them in its folder: arms' rewards and KL, reward against KL, layer curves.

    Figures of rewards require a known true reward. Each world has its own figures.
    """
    looks, axis = assign_arm_styles(outcome), outcome.study.world_axis
    over_layers = [image for world in outcome.worlds for image in benchmark_layer_figures(outcome, world, looks)]
    if not outcome.has_truth:
        return over_layers
    of_worlds = (image for world in outcome.worlds for image in _world_figures(outcome, world, looks))
    return [*([] if axis is None else [_gain_figure(outcome, axis, looks)]), *of_worlds, *over_layers]


def _gain_figure(outcome: Outcome, axis: WorldAxis, looks: ArmStyles) -> Image:
    """Draws the arms' differences from the control along the world axis, one panel per KL level."""
    found = {world: arms_at_levels(outcome, world) for world in axis.at}
    scale = sorted(axis.at.items(), key=lambda item: item[1])
    panels = {
        f"at KL {level:g} to the base": {
            arm: [
                GainPoint(place, at.versus.mean, at.versus.low, at.versus.high, at.is_at_equal_kl)
                for world, place in scale
                if (at := found[world].get((arm, level))) is not None and at.versus is not None
            ]
            for arm in axis.arms
        }
        for level in outcome.study.kl_levels
    }
    path = gain_figure(
        panels,
        outcome.folder / "gains.png",
        xlabel=axis.label,
        ylabel=f"true reward minus that of {outcome.study.control}",
        title=f"{outcome.study.name}: {axis.title or f'gain over {axis.label}'}",
        looks=looks,
    )
    return Image(
        path,
        f"difference in true reward from {outcome.study.control} at equal KL over {axis.label}, with 95 % intervals; "
        "hollow: not at equal KL, because an arm's path ends below this KL or has no point near it",
    )


def _world_figures(outcome: Outcome, world: str, looks: ArmStyles) -> Iterator[Image]:
    best = outcome.best_points(world)
    if not best:
        return
    title, base = _figure_title(outcome, world), base_score_interval(next(iter(best.values())))
    levels = {arm: to_score_interval(point.reward_interval) for arm, point in best.items()}
    moves = {arm: [scores.numbers["kl"] for scores in point.truth_scores("test")] for arm, point in best.items()}
    kls = {arm: to_score_interval(seed_interval(values)) for arm, values in moves.items()}
    rewards, moved = (
        _other_points(outcome, world, best, partial(PointResults.mean_truth_score, split="test", name=name))
        for name in ("reward", "kl")
    )
    path = arm_figure(
        [
            ArmPanel("true reward", "test prompts", levels, rewards, ("base", base)),
            ArmPanel("KL to the base", "nats", kls, moved),
        ],
        _figure_path(outcome, "arms", world),
        title=f"{title}: each arm at the point selected on validation",
        note="bars: 95 % intervals; small marks: other grid points",
        control=outcome.study.control,
        looks=looks,
    )
    band = "" if outcome.study.control is None else f"; the band is the interval of {outcome.study.control}"
    of = f", {world}" if world else ""
    yield Image(path, f"true reward on test prompts, and KL to the base{of}{band}")
    points = [
        FrontierPoint(
            point.arm.name,
            point.mean_truth_score("test", "kl"),
            point.reward_interval.mean,
            point.label,
            point.reward_interval.low,
            point.reward_interval.high,
            best[point.arm.name].values == point.values,
        )
        for points in outcome.points_by_arm(world).values()
        for point in points
    ]
    for place, group in enumerate(split_arms_into_figures(list(best), outcome.study.control)):
        path = frontier_figure(
            [point for point in points if point.arm in group],
            _figure_path(outcome, "frontier", world, f"-{place + 1}" if place else ""),
            limits=sorted({*outcome.study.kl_levels, outcome.study.kl_limit}),
            base_reward=base,
            ylabel="true reward, test prompts",
            title=f"{title}: reward against KL",
            looks=looks,
        )
        told = "ringed: selected on validation; bars: 95 % intervals over seeds and prompts; dotted line and band: base"
        yield Image(path, f"true reward on test prompts against KL to the base{_world_suffix(world)}; {told}")
    path, title = _figure_path(outcome, "layers", world), f"{title}: each arm at its best point"
    levels = {**levels, BASE_ROW: base}
    if _draw_over_layers(outcome, world, levels, path, looks, ylabel="true reward, test prompts", title=title):
        told = "each at its best grid point, with the other arms as horizontal lines"
        yield Image(path, f"true reward by layer{_world_suffix(world)}, {told}")


def split_arms_into_figures(arms: Sequence[str], control: str | None) -> list[list[str]]:
    """Splits the arms across several figures to keep them readable; each figure includes the control."""
    if len(arms) <= MOST:
        return [list(arms)]
    shared = [arm for arm in arms if arm == control]
    others = [arm for arm in arms if arm != control]
    size = math.ceil(len(others) / math.ceil(len(others) / FEW))
    return [[*shared, *others[start : start + size]] for start in range(0, len(others), size)]


def benchmark_layer_figures(outcome: Outcome, world: str, looks: ArmStyles) -> Iterator[Image]:
    """Yields a figure of the score by layer for each benchmark; none if the study has no single-layer arms."""
    for name, rows in outcome.benchmarks.items():
        scored = {row: score for (at, row), score in rows.items() if at == world and not score.failure_text}
        levels = {row: ScoreInterval(score.mean, *score.interval_bounds) for row, score in scored.items()}
        path = _figure_path(outcome, f"layers-{safe_filename(name)}", world)
        title = f"{_figure_title(outcome, world)}: {name}, each arm at its best point"
        ylabel = f"{name} ({scored[next(iter(scored))].name})" if scored else name
        if _draw_over_layers(outcome, world, levels, path, looks, ylabel=ylabel, title=title):
            bars = "seeds" if any(score.half_width is not None for score in scored.values()) else "questions"
            told = f"each at its best grid point, with 95 % intervals over {bars}"
            yield Image(path, f"{name} by layer{_world_suffix(world)}, {told}")


# ------------------------------------------------------------------------------------------------ without a truth


WHY = (
    "The true reward is not known here. Losses, margins and accuracies of different arms cannot be compared, because "
    "each is computed with the arm's own weights and beta. Two measures on validation pairs can be compared: the "
    "unweighted margin in nats (the gain in log-probability of the chosen response minus that of the rejected one, "
    "summed over all tokens without weights and beta), and the unweighted accuracy (the share of pairs with a margin "
    "above 0). Neither shows that responses improved: margins grow with the distance from the base, so read them "
    "together with the KL."
)
NOTES = {
    "accuracy": "share of validation pairs whose chosen response gained more log-probability than the rejected one, "
    "summed over all tokens without weights; 0.5 is chance",
    "margin": "difference between these gains in nats, without weights and beta, averaged over validation pairs",
    "KL": "nats per response from policy to base over the whole vocabulary, on validation pairs",
}


def unweighted_accuracy(result: RunResult) -> float:
    """Returns the unweighted accuracy on validation pairs; NaN if the run did not measure its drift."""
    return result.drift_value("ranking_accuracy/validation")


def unweighted_margin(result: RunResult) -> float:
    """Returns the unweighted margin on validation pairs in nats, from the run's drift if measured, else its metrics."""
    measured = [result.drift_value(f"displacement/validation_{side}") for side in SIDES]
    if not all(map(math.isfinite, measured)):
        logged = result.metrics
        measured = [
            logged.get(f"val/logps/{side}", math.nan) - logged.get(f"first/val/logps/{side}", math.nan)
            for side in SIDES
        ]
    return measured[0] - measured[1]


NUMBERS: dict[str, Number] = {
    "accuracy": unweighted_accuracy,
    "margin": unweighted_margin,
    "KL": lambda result: result.drift_value("pairs/kl"),
}
AXES = {
    "accuracy": ("unweighted accuracy", "share of validation pairs ranked as labelled"),
    "margin": ("unweighted margin", "nats, chosen minus rejected"),
    "KL": ("KL to the base", "nats per response"),
}
Known = Mapping[str, Mapping[str, Interval | None]]  # by measure and arm, for measures that any best point has


def unweighted_section(outcome: Outcome, looks: ArmStyles) -> list[Section]:
    """Compares arms when the true reward is unknown: unweighted accuracy, margin and KL, as a table and figures.

    Returns only an explanation if no run measured these, and an empty list if there are no points.
    """
    found: dict[str, tuple[Mapping[str, PointResults], Known]] = {}
    for world in outcome.worlds:
        best = outcome.best_points(world)
        every = {
            name: {arm: seed_interval([*map(of, point.results)]) for arm, point in best.items()}
            for name, of in NUMBERS.items()
        }
        found[world] = best, {name: values for name, values in every.items() if any(values.values())}
    rows = rows_by_world(
        outcome,
        lambda world: (_unweighted_row(outcome, arm, *found[world]) for arm in found[world][0] if found[world][1]),
    )
    if not rows:
        return [Section("Comparison without a known true reward", [Paragraph(WHY)])] if outcome.points else []
    images = [
        image
        for world, (best, known) in found.items()
        for image in (_unweighted_figures(outcome, world, best, known, looks) if known else ())
    ]
    paired = f"difference from {outcome.study.control}, paired by seed, with its 95 % interval"
    told = {"95 %": "interval of the accuracy over seeds", "95 % ": "interval of the margin over seeds"}
    told |= {f"{name} minus {outcome.study.control}": paired for name in ("accuracy", "margin")}
    table = TableBlock(column_names(rows), rows, digits={"KL": 2}, notes={**NOTES, **told})
    blocks: list[Block] = [Paragraph(WHY), table, *images]
    return [Section("Comparison without a known true reward", blocks)]


def _unweighted_row(outcome: Outcome, arm: str, best: Mapping[str, PointResults], known: Known) -> Row:
    row: Row = {"arm": arm, "point": best[arm].label}
    for name, values in known.items():
        found = values[arm]
        row[name] = None if found is None else found.mean
        if name != "KL":
            row["95 %" if name == "accuracy" else "95 % "] = "" if found is None else interval_text(found)
            if outcome.study.control is not None:
                row[f"{name} minus {outcome.study.control}"] = _difference_cell(outcome, arm, best, NUMBERS[name])
    return row


def _difference_cell(outcome: Outcome, arm: str, best: Mapping[str, PointResults], number: Number) -> str:
    control = best.get(outcome.study.control or "")
    if control is None or arm == outcome.study.control:
        return ""
    mine, other = (dict(zip(one.seeds, map(number, one.results), strict=True)) for one in (best[arm], control))
    seeds = [seed for seed in mine if seed in other and math.isfinite(mine[seed]) and math.isfinite(other[seed])]
    if not seeds:
        return ""
    first, second = (np.array([values[seed] for seed in seeds])[:, None] for values in (mine, other))
    return difference_text(paired_difference(first, second))


def _unweighted_figures(
    outcome: Outcome, world: str, best: Mapping[str, PointResults], known: Known, looks: ArmStyles
) -> Iterator[Image]:
    named = f"{outcome.study.name}{_world_suffix(world)}"
    panels = [
        ArmPanel(
            *AXES[name],
            {arm: to_score_interval(found) for arm, found in values.items()},
            _other_points(outcome, world, best, partial(_mean_over_runs, NUMBERS[name])),
            ("chance", ScoreInterval(0.5)) if name == "accuracy" else None,
        )
        for name, values in known.items()
    ]
    path = arm_figure(
        panels,
        _figure_path(outcome, "yardstick", world),
        title=f"{named}: validation pairs, without weights",
        note="bars: 95 % intervals over seeds; small marks: other grid points",
        control=outcome.study.control,
        looks=looks,
    )
    caption = "unweighted accuracy, margin and KL on validation pairs, each arm at its best point"
    yield Image(path, f"{caption}{_world_suffix(world)}; the band is the control's interval")
    first = next(iter(known))
    shown = {arm: found for arm, found in known[first].items() if found is not None or best[arm].arm.layer is None}
    levels = {arm: to_score_interval(found) for arm, found in shown.items()}
    path, title = _figure_path(outcome, "yardstick-layers", world), f"{named}: each arm at its best point"
    if _draw_over_layers(outcome, world, levels, path, looks, ylabel=AXES[first][0], title=title):
        yield Image(
            path, f"{AXES[first][0]} on validation pairs by layer{_world_suffix(world)}, with 95 % intervals over seeds"
        )


def _mean_over_runs(number: Number, point: PointResults) -> float:
    return float(np.mean([number(result) for result in point.results]))
