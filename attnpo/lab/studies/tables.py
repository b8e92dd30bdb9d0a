"""A study's tables: every arm at its best point, and arms at equal KL, level by level and over worlds."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from attnpo.display.page import Paragraph, Section, TableBlock
from attnpo.display.tables import Cell
from attnpo.evaluation.intervals import Interval
from attnpo.lab.studies.benchmark_scores import BASE_ROW
from attnpo.lab.studies.benchmark_table import benchmark_cells, benchmark_digits
from attnpo.lab.studies.frontier import CHORD, ENDS, FAR, AtKL, at_kl, difference
from attnpo.lab.studies.selection import (
    PointResults,
    best_by_arm,
    by_arm,
    difference_text,
    gather,
    has_truth,
    interval_text,
    seeds_mark,
    verdict,
)
from attnpo.lab.studies.study import Outcome
from attnpo.weights.arrival import COLUMNS as ARRIVED

TOKENS = {"chosen tokens": "tokens.chosen.p50", "rejected tokens": "tokens.rejected.p50"}
DIGITS = {
    **dict.fromkeys(("sum", "eff. weights/n"), 3),
    **dict.fromkeys(("coverage", "source coverage"), 4),
    **dict.fromkeys(("length", "s/run", "pairs", "steps", *TOKENS), 1),
    "KL": 2,
}
Row = dict[str, Cell]


def main_table(outcome: Outcome) -> tuple[list[str], list[Row]]:
    """Columns and rows: every arm at its best point, world by world where there are several.

    Against the truth, on test prompts and with the base above; of validation metrics in settings without a truth.
    """
    known, uneven = has_truth(gather(outcome.points)), uneven_training(outcome)
    rows = [row for world in outcome.worlds for row in _world_rows(outcome, world, uneven, known)]
    return columns_of(rows), rows


SHORT = ("world", "arm", "reward", "win rate", "KL", "val loss", "val accuracy", "val margin")


def short_table(outcome: Outcome) -> TableBlock:
    """Returns the main table as it fits a terminal of 80 columns; benchmarks stay, the rest is on the page and in the
    CSV.

    What marks a point (above the KL limit, fewer seeds, failed) has a column of its own where it is needed.
    """
    columns, rows = main_table(outcome)
    control = f"minus {outcome.study.control}"
    benchmarks = benchmark_digits(outcome)
    kept = [name for name in columns if name in SHORT or name == control or name in benchmarks]
    made: list[Row] = []
    for row in rows:
        short = {name: row.get(name) for name in kept}
        reward, interval = row.get("reward"), row.get("95 %")
        if isinstance(reward, float) and interval:
            short["reward"] = f"{reward:.3f} {interval}"
        point = str(row.get("point") or "")
        mark = point[point.index("(") :] if "(" in point else point if point.isupper() or point[:6] == "FAILED" else ""
        made.append({**short, **({"note": mark} if mark else {})})
    return TableBlock(columns_of(made), made, digits={**DIGITS, **benchmarks})


def columns_of(rows: Sequence[Row]) -> list[str]:
    """Returns the heads of the fullest row, in its order; others that only some rows have come after."""
    fullest = max(rows, key=len)
    return list(dict.fromkeys(name for row in (fullest, *rows) for name in row))


def uneven_training(outcome: Outcome) -> list[str]:
    """Of "pairs" and "steps" those in which the arms of any world differ."""
    every = [[trained_on(point) for point in best_by_arm(outcome, world).values()] for world in outcome.worlds]
    return [
        name
        for name in ("pairs", "steps")
        if any(len({row[name] for row in rows if not math.isnan(row[name])}) > 1 for rows in every)
    ]


def trained_on(point: PointResults) -> dict[str, int | float]:
    """Returns how many pairs and optimiser steps an arm's runs had, means over seeds, whole where they are."""
    means = {"pairs": point.input("pairs"), "steps": point.steps}
    return {name: int(value) if value.is_integer() else value for name, value in means.items()}


def _inputs_of(point: PointResults, uneven: Sequence[str]) -> Row:
    """Returns the last columns of every table: what an arm's runs stood on and took."""
    mass = point.input("mass")
    return {
        **{name: value for name, value in trained_on(point).items() if name in uneven},
        **({} if math.isnan(mass) else {"sum": mass}),
        "eff. weights/n": _effective(point),
        "coverage": point.input("coverage"),
        **{head: value for name, head in ARRIVED.items() if not math.isnan(value := point.input(name))},
        "s/run": point.seconds,
    }


def _effective(point: PointResults) -> float:
    """Returns the effective share of the training weights; of validation's last ones where training computes them."""
    share = point.input("effective_share")
    return point.metric("val/weights/effective_share") if math.isnan(share) else share


def _world_rows(outcome: Outcome, world: str, uneven: Sequence[str], known: bool) -> Iterator[Row]:
    best = best_by_arm(outcome, world)
    named: Row = {"world": world} if world else {}
    said = origins(outcome)
    if best and known:
        yield {**named, **base_row(next(iter(best.values()))), **benchmark_cells(outcome, world, BASE_ROW)}
    elif outcome.benchmarks:
        yield {**named, "arm": BASE_ROW, "point": "", **benchmark_cells(outcome, world, BASE_ROW)}
    for arm in (arm for arm in outcome.arms if arm.world == world):
        point = best.get(arm.name)
        if point is None:
            yield {**named, **lost_row(outcome, arm.name, world)}
            continue
        beyond = over_limit(point, outcome) if known else ""
        yield {
            **named,
            "arm": arm.name,
            "point": point.label + beyond + seeds_mark(len(point.seeds), outcome),
            **({"values": said[arm.name]} if said else {}),
            **(_truth_of(point, best, outcome.study.control) if known else _metrics_of(point)),
            **benchmark_cells(outcome, world, arm.name),
            **_inputs_of(point, uneven),
        }
    for model in outcome.study.published if outcome.benchmarks else ():
        yield {**named, "arm": model, "point": "published", **benchmark_cells(outcome, world, model)}


def _truth_of(point: PointResults, best: Mapping[str, PointResults], control: str | None) -> Row:
    """Scores on test prompts, and the difference to the control of the same world."""
    other = best.get(control or "")
    versus = None if other is None or point is other else difference(point, other)
    return {
        "reward": point.truth("test", "reward"),
        "95 %": interval_text(point.interval),
        **({} if control is None else {f"minus {control}": difference_text(versus)}),
        "win rate": point.truth("test", "win_rate"),
        "KL": point.truth("test", "kl"),
        "length": point.truth("test", "length"),
        "broken": point.truth("test", "broken"),
    }


def _metrics_of(point: PointResults) -> Row:
    """Validation metrics."""
    return {
        "val loss": point.metric("val/loss"),
        "val accuracy": point.metric("val/rewards/accuracies"),
        "val margin": point.metric("val/rewards/margins"),
        **{name: point.input(median) for name, median in TOKENS.items()},
    }


def origins(outcome: Outcome) -> dict[str, str]:
    """Returns where the grid values of every arm come from, by arm; nothing where no grid of the study says it."""
    by_arm = {arm.name: (arm.grid or outcome.study.grid).origin for arm in outcome.arms}
    return by_arm if any(by_arm.values()) else {}


def lost_row(outcome: Outcome, arm: str, world: str) -> Row:
    """Returns the row of an arm without results: it has failed, or was not run."""
    errors = [error for point, error in outcome.failed if (point.arm.name, point.arm.world) == (arm, world)]
    ran = [error for error in errors if not error.startswith("not run")]
    return {"arm": arm, "point": f"FAILED, all {len(errors)} points" if ran else "NOT RUN"}


def over_limit(point: PointResults, outcome: Outcome) -> str:
    """Returns a mark on an arm none of whose points kept the KL limit; empty where there was nothing to choose."""
    chosen = len((point.arm.grid or outcome.study.grid).overrides()) > 1
    return " (above the KL limit)" if chosen and point.truth("validation", "kl") > outcome.study.kl_limit else ""


def base_row(point: PointResults) -> Row:
    """Returns the row of the base model: its samples on the same test prompts."""
    return {
        "arm": "base",
        "point": "",
        "reward": point.truth("test", "base_reward"),
        "win rate": 0.5,
        "KL": 0.0,
        "length": point.truth("test", "base_length"),
        "broken": point.truth("test", "base_broken"),
    }


NONE = "-"
NOT_EQUAL = "not at equal KL"


def level_tables(outcome: Outcome) -> list[Section]:
    """Rewards at equal KL, and over worlds; none without a truth, without levels or where no arm has a choice."""
    study = outcome.study
    tuned = any(len((arm.grid or study.grid).overrides()) > 1 for arm in outcome.arms)
    if not study.kl_levels or not tuned or not has_truth(gather(outcome.points)):
        return []
    chosen = {world: at_levels(outcome, world) for world in outcome.worlds}
    note = (
        "test reward on the path of each arm and seed: the base, then the grid points by KL whose validation reward is "
        "above those of all with less; linear in the root of KL between neighbours. In brackets the KL of the best "
        f"point of the path where nothing beyond is better on validation; {ENDS} the path ends there, {CHORD} its "
        f"first point has more than {FAR:g} times the KL: neither is a comparison at equal KL. Intervals take the "
        "paths as given"
    )
    if study.control is not None:
        note += f"; differences to {study.control} at the same level, paired by seed and prompt"
    rows = [row for world in outcome.worlds for row in _level_rows(outcome, world, chosen[world])]
    tables = [Section("Reward at equal KL", [TableBlock(columns_of(rows), rows), Paragraph(note)])]
    if study.worlds and study.control is not None:
        tables.append(_worlds_table(outcome, chosen))
    return tables


@dataclass(frozen=True)
class AtLevel:
    """An arm at a KL level: its place on its path and its difference to the control; each None where there is none.

    ``mark``: that of ``AtKL`` of the arm or of the control, empty where the difference is one at equal KL.
    """

    place: AtKL | None
    versus: Interval | None
    mark: str = ""

    @property
    def equal(self) -> bool:
        """Returns whether the difference is one at equal KL."""
        return self.versus is not None and not self.mark

    @property
    def difference(self) -> str:
        """Returns the difference as text, marked where the arms are not at equal KL."""
        return NONE if self.versus is None else difference_text(self.versus) + self.mark


def at_levels(outcome: Outcome, world: str) -> dict[tuple[str, float], AtLevel]:
    """Returns a world's arms at every KL level, with their differences to the control."""
    points = by_arm(outcome, world)
    out = {}
    for level in outcome.study.kl_levels:
        places = {name: at_kl(mine, level) for name, mine in points.items()}
        control = places.get(outcome.study.control or "")
        for name, place in places.items():
            if place is None or control is None or name == outcome.study.control:
                out[name, level] = AtLevel(place, None)
            else:
                out[name, level] = AtLevel(place, difference(place, control), place.mark or control.mark)
    return out


def _level_rows(outcome: Outcome, world: str, chosen: dict[tuple[str, float], AtLevel]) -> Iterator[Row]:
    study = outcome.study
    for name, points in by_arm(outcome, world).items():
        row: Row = {**({"world": world} if world else {}), "arm": name}
        for level in study.kl_levels:
            at = chosen[name, level]
            lost = str(lost_row(outcome, name, world)["point"]) if not points else NONE
            row[f"KL {level:g}"] = lost if at.place is None else _reward(at.place, level, outcome)
            if study.control is not None:
                few = "" if at.versus is None else seeds_mark(at.versus.seeds, outcome)
                row[f"minus {study.control}, KL {level:g}"] = "" if name == study.control else at.difference + few
        yield row


def _reward(place: AtKL, level: float, outcome: Outcome) -> str:
    at = "" if place.kl == level else f" ({place.kl:.2f})"
    return f"{place.reward:.3f}{place.mark}{at}{seeds_mark(len(place.seeds), outcome)}"


def _worlds_table(outcome: Outcome, chosen: dict[str, dict[tuple[str, float], AtLevel]]) -> Section:
    """Arms by worlds, a table per KL level: the difference to the control, with what its interval says."""
    control = outcome.study.control
    tables = [
        TableBlock(["arm", *outcome.worlds], _worlds_rows(outcome, chosen, level), f"at KL {level:g}")
        for level in outcome.study.kl_levels
    ]
    note = (
        f"difference to {control} of the same world at one KL; helps or harms: its 95 % interval excludes "
        "0, not corrected for the number of cells. Where not all seeds have both arms at this KL, their number stands "
        "instead of a verdict"
    )
    return Section(f"Worlds: difference to {control} at equal KL", [*tables, Paragraph(note)])


def _worlds_rows(outcome: Outcome, chosen: dict[str, dict[tuple[str, float], AtLevel]], level: float) -> list[Row]:
    results = {world: by_arm(outcome, world) for world in outcome.worlds}
    rows: list[Row] = []
    for name in dict.fromkeys(arm.name for arm in outcome.arms if arm.name != outcome.study.control):
        row: Row = {"arm": name}
        for world in outcome.worlds:
            at = chosen[world].get((name, level))
            if name not in results[world]:
                row[world] = ""
            elif at is None or at.versus is None:
                row[world] = NONE if results[world].get(name) else str(lost_row(outcome, name, world)["point"])
            else:
                few = seeds_mark(at.versus.seeds, outcome)
                row[world] = f"{at.difference}{few or f' {verdict(at.versus) if at.equal else NOT_EQUAL}'}"
        rows.append(row)
    return rows
