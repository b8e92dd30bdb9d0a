"""A study's figures: reward against KL, scores over layers, gains over worlds; of one arm always in one colour."""

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from attnpo.display.look import SOFT, Level, Look, Looks, looks_of
from attnpo.display.page import Image
from attnpo.evaluation.intervals import hierarchical_bootstrap
from attnpo.lab.figures import (
    ArmPanel,
    FrontierPoint,
    GainPoint,
    LayerPoint,
    arm_figure,
    frontier,
    gains,
    layer_curve,
)
from attnpo.lab.studies.benchmark_scores import BASE_ROW
from attnpo.lab.studies.benchmark_table import layer_figures
from attnpo.lab.studies.selection import PointResults, best_by_arm, by_arm, gather, has_truth
from attnpo.lab.studies.study import Outcome, WorldAxis
from attnpo.lab.studies.tables import at_levels
from attnpo.system.files import clean

MOST, FEW = 16, 8  # arms in one figure; other arms beside the control in each of several
TRANSFORM = "transform="


def study_looks(outcome: Outcome) -> dict[str, Look]:
    """Returns how every arm of the study is drawn, in each of its worlds and figures."""
    study = outcome.study
    altered = [
        arm.name
        for arm in outcome.arms
        if any(item.startswith(TRANSFORM) and item != f"{TRANSFORM}null" for item in arm.overrides)
    ]
    looks = looks_of((arm.name for arm in outcome.arms), study.control, altered=altered, told=list(study.truth_arms))
    return {**looks, BASE_ROW: Look(SOFT, "s", ":")}


def base_level(point: PointResults) -> Level:
    """Returns the base's mean reward on test prompts, with its interval where its rewards were kept."""
    rows = [scores.base_rewards for scores in point.scores("test")]
    kept = [row for row in rows if row is not None]
    mean = point.truth("test", "base_reward")
    if len(kept) < len(rows):
        return Level(mean)
    found = hierarchical_bootstrap(np.array(kept))
    return Level(mean, found.low, found.high)


def chosen_level(point: PointResults) -> Level:
    """Returns an arm's mean reward on test prompts at its chosen point, with its interval."""
    return Level(point.interval.mean, point.interval.low, point.interval.high)


def _kl_level(point: PointResults) -> Level:
    """KL on test prompts, means over seeds with their interval; without one where a run has diverged."""
    values = np.array([[scores.numbers["kl"]] for scores in point.scores("test")])
    if not np.isfinite(values).all():
        return Level(math.nan)
    found = hierarchical_bootstrap(values)
    return Level(found.mean, found.low, found.high)


def study_figures(outcome: Outcome) -> list[Image]:
    """Returns the study's figures, written to its folder: reward against KL, and over layers where arms are layers.

    Of each world its own; of rewards none without a known truth.
    """
    looks = study_looks(outcome)
    over_layers = [image for world in outcome.worlds for image in layer_figures(outcome, world, looks)]
    if not has_truth(gather(outcome.points)):
        return over_layers
    over_worlds = [] if outcome.study.world_axis is None else [_gain_figure(outcome, outcome.study.world_axis, looks)]
    of_worlds = (image for world in outcome.worlds for image in _world_figures(outcome, world, looks))
    return [*over_worlds, *of_worlds, *over_layers]


def _gain_figure(outcome: Outcome, axis: WorldAxis, looks: Looks) -> Image:
    """Returns every arm's difference to the control of the same world over the scale of the worlds, a panel per KL
    level.
    """
    found = {world: at_levels(outcome, world) for world in axis.at}
    scale = sorted(axis.at.items(), key=lambda item: item[1])
    panels = {
        f"at KL {level:g} to the base": {
            arm: [
                GainPoint(place, at.versus.mean, at.versus.low, at.versus.high, at.equal)
                for world, place in scale
                if (at := found[world].get((arm, level))) is not None and at.versus is not None
            ]
            for arm in axis.arms
        }
        for level in outcome.study.kl_levels
    }
    path = gains(
        panels,
        outcome.folder / "gains.png",
        xlabel=axis.label,
        ylabel=f"true reward less that of {outcome.study.control}",
        title=f"{outcome.study.name}: {axis.title or f'gain over {axis.label}'}",
        looks=looks,
    )
    return Image(
        path,
        f"difference of true reward to {outcome.study.control} at equal KL over {axis.label}, 95 % intervals; "
        "hollow: not at equal KL, the path of an arm ends before it or has nothing near it",
    )


def _world_figures(outcome: Outcome, world: str, looks: Looks) -> Iterator[Image]:
    best = best_by_arm(outcome, world)
    if not best:
        return
    name = f"{outcome.study.name}, {world}" if world else outcome.study.name
    of = f", world {world}" if world else ""
    stem = f"-{clean(world)}" if world else ""
    base = base_level(next(iter(best.values())))
    yield _arms_figure(outcome, world, best, base, looks)
    points = [
        FrontierPoint(
            point.arm.name,
            point.truth("test", "kl"),
            point.interval.mean,
            point.label,
            point.interval.low,
            point.interval.high,
            best[point.arm.name].values == point.values,
        )
        for points in by_arm(outcome, world).values()
        for point in points
    ]
    for place, group in enumerate(drawn_together(list(best), outcome.study.control)):
        path = frontier(
            [point for point in points if point.arm in group],
            outcome.folder / f"frontier{stem}{f'-{place + 1}' if place else ''}.png",
            limits=sorted({*outcome.study.kl_levels, outcome.study.kl_limit}),
            base_reward=base,
            ylabel="true reward, test prompts",
            title=f"{name}: reward against KL",
            looks=looks,
        )
        told = "ringed: chosen on validation; bars: 95 % intervals over seeds and prompts; dotted: the base, its band"
        yield Image(path, f"true reward on test prompts against KL to the base{of}; {told}")
    layers = [
        LayerPoint(point.arm.layer, point.interval.mean, point.interval.low, point.interval.high, point.arm.name)
        for point in best.values()
        if point.arm.layer is not None
    ]
    if len(layers) > 1:
        levels = {name: chosen_level(point) for name, point in best.items() if point.arm.layer is None}
        path = layer_curve(
            layers,
            outcome.folder / f"layers{stem}.png",
            baselines={**levels, BASE_ROW: base},
            ylabel="true reward, test prompts",
            title=f"{name}: each arm at its best point",
            looks=looks,
            control=outcome.study.control,
        )
        yield Image(path, f"true reward by layer{of}, each at its best grid point, and of the arms that are no layers")


def _arms_figure(outcome: Outcome, world: str, best: Mapping[str, PointResults], base: Level, looks: Looks) -> Image:
    """Reward and KL of every arm, at its chosen point and at the others of its grid."""
    of, stem = (f", {world}", f"-{clean(world)}") if world else ("", "")
    others = {
        arm: [point for point in points if point.values != best[arm].values]
        for arm, points in by_arm(outcome, world).items()
        if arm in best
    }
    kl = {arm: _kl_level(point) for arm, point in best.items()}
    panels = [
        ArmPanel(
            "true reward",
            "test prompts",
            {arm: chosen_level(point) for arm, point in best.items()},
            {arm: [point.truth("test", "reward") for point in points] for arm, points in others.items()},
            ("base", base),
        ),
        ArmPanel(
            "KL to the base",
            "nats",
            kl,
            {arm: [point.truth("test", "kl") for point in points] for arm, points in others.items()},
        ),
    ]
    path = arm_figure(
        panels,
        outcome.folder / f"arms{stem}.png",
        title=f"{outcome.study.name}{of}: each arm at the point chosen on validation",
        note="bars: 95 % intervals; small marks: other grid points",
        control=outcome.study.control,
        looks=looks,
    )
    band = "" if outcome.study.control is None else f"; the band is the interval of {outcome.study.control}"
    return Image(path, f"true reward on test prompts, and what it cost in KL to the base{of}{band}")


def drawn_together(arms: Sequence[str], control: str | None) -> list[list[str]]:
    """Returns the arms of each figure: all in one, or as many as a figure can tell apart with the control in each."""
    if len(arms) <= MOST:
        return [list(arms)]
    shared = [arm for arm in arms if arm == control]
    others = [arm for arm in arms if arm != control]
    size = math.ceil(len(others) / math.ceil(len(others) / FEW))
    return [[*shared, *others[start : start + size]] for start in range(0, len(others), size)]
