"""What arms can be compared by where no truth is known: how far they rank pairs apart, counted without any weights."""

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from attnpo.display.look import Level, Looks
from attnpo.display.page import Block, Image, Paragraph, Section, TableBlock
from attnpo.evaluation.intervals import Interval, hierarchical_bootstrap, paired_difference
from attnpo.lab.figures import ArmPanel, LayerPoint, arm_figure, layer_curve
from attnpo.lab.studies.selection import PointResults, best_by_arm, by_arm, difference_text, interval_text
from attnpo.lab.studies.study import Outcome
from attnpo.lab.studies.tables import Row, columns_of
from attnpo.run.result import RunResult
from attnpo.schema import SIDES
from attnpo.system.files import clean

WHY = (
    "No truth is known here. An arm's own loss, margin and accuracy are counted with its own weights and its own beta, "
    "so they cannot be compared between arms. What can: on validation pairs the log-probability that the chosen "
    "response gained less what the rejected one gained, summed over all tokens without weights and without beta (the "
    "unweighted margin, in nats), and the share of pairs where it is above 0 (the unweighted accuracy). Neither says "
    "that answers became better: a margin grows with distance from the base, so read it beside the KL."
)
NOTES = {
    "accuracy": "share of validation pairs whose chosen response gained more log-probability than the rejected one, "
    "summed over all tokens without weights; 0.5 is a coin",
    "margin": "mean over validation pairs of that gain's difference, in nats, without weights and without beta",
    "KL": "nats per response from policy to base over the whole vocabulary, on validation pairs",
}


def accuracy_of(result: RunResult) -> float:
    """Returns the unweighted accuracy on validation pairs; NaN where where-the-policy-moved was not measured."""
    return result.moved("ranking_accuracy/validation")


def margin_of(result: RunResult) -> float:
    """Returns the unweighted margin in nats on validation pairs: of what was measured after training, else of
    validation.
    """
    measured = [result.moved(f"displacement/validation_{side}") for side in SIDES]
    if not all(map(math.isfinite, measured)):
        logged = result.metrics
        measured = [
            logged.get(f"val/logps/{side}", math.nan) - logged.get(f"first/val/logps/{side}", math.nan)
            for side in SIDES
        ]
    return measured[0] - measured[1]


def kl_of(result: RunResult) -> float:
    """KL to the base per response of validation pairs."""
    return result.moved("pairs/kl")


NUMBERS: dict[str, Callable[[RunResult], float]] = {"accuracy": accuracy_of, "margin": margin_of, "KL": kl_of}
AXES = {
    "accuracy": ("unweighted accuracy", "share of validation pairs ranked as labelled"),
    "margin": ("unweighted margin", "nats, chosen less rejected"),
    "KL": ("KL to the base", "nats per response"),
}


def interval_of(point: PointResults, number: Callable[[RunResult], float]) -> Interval | None:
    """Returns the mean over seeds with its interval; None where a seed lacks the number."""
    values = _by_seed(point, number)
    return hierarchical_bootstrap(np.array(values)[:, None]) if all(map(math.isfinite, values)) else None


def _by_seed(point: PointResults, number: Callable[[RunResult], float]) -> list[float]:
    return [number(result) for result in point.results]


def _level(found: Interval | None) -> Level:
    return Level(math.nan) if found is None else Level(found.mean, found.low, found.high)


def _known(best: Mapping[str, PointResults]) -> dict[str, dict[str, Interval]]:
    """Of the numbers that any chosen point has, their intervals by arm."""
    every = {name: {arm: interval_of(point, of) for arm, point in best.items()} for name, of in NUMBERS.items()}
    found = {name: {arm: value for arm, value in values.items() if value is not None} for name, values in every.items()}
    return {name: values for name, values in found.items() if values}


def yardstick_section(outcome: Outcome, looks: Looks) -> list[Section]:
    """Why losses cannot be compared, a table and figures of what can; none where no run has measured any of it."""
    rows: list[Row] = []
    images: list[Block] = []
    for world in outcome.worlds:
        best = best_by_arm(outcome, world)
        known = _known(best)
        if known:
            rows += [_row(outcome, world, arm, best, known) for arm in best]
            images += _figures(outcome, world, best, known, looks)
    if not rows:
        return [Section("What arms can be compared by", [Paragraph(WHY)])] if outcome.points else []
    table = TableBlock(columns_of(rows), rows, digits={"KL": 2}, notes=_notes(outcome))
    return [Section("What arms can be compared by", [Paragraph(WHY), table, *images])]


def _notes(outcome: Outcome) -> dict[str, str]:
    paired = f"the difference to {outcome.study.control}, paired by seed, with its 95 % interval"
    return {**NOTES, "95 %": "interval of the accuracy over seeds", f"accuracy minus {outcome.study.control}": paired,
            "95 % ": "interval of the margin over seeds", f"margin minus {outcome.study.control}": paired}  # fmt: skip


def _row(
    outcome: Outcome,
    world: str,
    arm: str,
    best: Mapping[str, PointResults],
    known: Mapping[str, Mapping[str, Interval]],
) -> Row:
    row: Row = {**({"world": world} if world else {}), "arm": arm, "point": best[arm].label}
    for name, head in (("accuracy", "95 %"), ("margin", "95 % ")):
        found = known.get(name, {}).get(arm)
        if name in known:
            row |= {name: None if found is None else found.mean, head: "" if found is None else interval_text(found)}
            if outcome.study.control is not None:
                row[f"{name} minus {outcome.study.control}"] = _difference(outcome, arm, best, NUMBERS[name])
    if "KL" in known:
        value = known["KL"].get(arm)
        row["KL"] = None if value is None else value.mean
    return row


def _difference(
    outcome: Outcome, arm: str, best: Mapping[str, PointResults], number: Callable[[RunResult], float]
) -> str:
    """Returns the difference to the control over the seeds that both have."""
    control = best.get(outcome.study.control or "")
    if control is None or arm == outcome.study.control:
        return ""
    mine, other = (dict(zip(one.seeds, _by_seed(one, number), strict=True)) for one in (best[arm], control))
    seeds = [seed for seed in mine if seed in other and math.isfinite(mine[seed]) and math.isfinite(other[seed])]
    if not seeds:
        return ""
    first, second = (np.array([values[seed] for seed in seeds])[:, None] for values in (mine, other))
    return difference_text(paired_difference(first, second))


def _figures(
    outcome: Outcome,
    world: str,
    best: Mapping[str, PointResults],
    known: Mapping[str, Mapping[str, Interval]],
    looks: Looks,
) -> list[Image]:
    """Returns every arm's numbers; and over layers, where arms are layers."""
    of, stem = (f", world {world}", f"-{clean(world)}") if world else ("", "")
    named = f"{outcome.study.name}{of}"
    panels = [
        ArmPanel(
            *AXES[name],
            {arm: _level(values.get(arm)) for arm in best},
            _others(outcome, world, best, NUMBERS[name]),
            ("a coin", Level(0.5)) if name == "accuracy" else None,
        )
        for name, values in known.items()
    ]
    path = arm_figure(
        panels,
        outcome.folder / f"yardstick{stem}.png",
        title=f"{named}: validation pairs, counted without weights",
        note="bars: 95 % over seeds; small marks: other grid points",
        control=outcome.study.control,
        looks=looks,
    )
    caption = "unweighted accuracy, margin and KL on validation pairs, each arm at its chosen point"
    images = [Image(path, f"{caption}{of}; the band is the control's interval")]
    first = next(iter(known))
    layers = [
        LayerPoint(point.arm.layer, found.mean, found.low, found.high, arm)
        for arm, point in best.items()
        if point.arm.layer is not None and (found := known[first].get(arm)) is not None
    ]
    if len(layers) > 1:
        rest = {arm: _level(known[first].get(arm)) for arm, point in best.items() if point.arm.layer is None}
        path = layer_curve(
            layers,
            outcome.folder / f"yardstick-layers{stem}.png",
            baselines=rest,
            ylabel=AXES[first][0],
            title=f"{named}: each arm at its chosen point",
            looks=looks,
            control=outcome.study.control,
        )
        images.append(Image(path, f"{AXES[first][0]} on validation pairs by layer{of}, with 95 % intervals over seeds"))
    return images


def _others(
    outcome: Outcome, world: str, best: Mapping[str, PointResults], number: Callable[[RunResult], float]
) -> dict[str, Sequence[float]]:
    """Returns the means over seeds at an arm's grid points that were not chosen."""
    return {
        arm: [float(np.mean(_by_seed(point, number))) for point in points if point.values != best[arm].values]
        for arm, points in by_arm(outcome, world).items()
        if arm in best
    }
