"""A study's tables: arms at their best points, at equal KL, over worlds, on benchmarks, by cost, and how they moved."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean

import numpy as np

from attnpo.display.page import Block, Paragraph, Section, TableBlock
from attnpo.display.tables import Cell, half_up
from attnpo.evaluation.intervals import Interval, average_ranks
from attnpo.evaluation.spreads import grading_noise
from attnpo.lab.analysis.drift import BELOW, DECISIVE, END, NO_WEIGHT, OTHER
from attnpo.lab.studies.frontier import CHORD, ENDS, FAR, AtKL, at_kl, difference
from attnpo.lab.studies.outcome import (
    PointResults,
    best_by_arm,
    by_arm,
    difference_text,
    direction,
    gather,
    has_truth,
    interval_text,
    seeds_mark,
    verdict,
)
from attnpo.lab.studies.study import BASE_ROW, Outcome, Reads, RowScore, ScorerRun, scorers_of, times_trained
from attnpo.run.result import RunResult
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
    rows = by_world(outcome, lambda world: _world_rows(outcome, world, uneven, known))
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


def by_world(outcome: Outcome, rows_of: Callable[[str], Iterable[Row]]) -> list[Row]:
    """Returns the rows of every world, under its name where the study has worlds."""
    return [{**({"world": world} if world else {}), **row} for world in outcome.worlds for row in rows_of(world)]


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
    said = origins(outcome)
    if best and known:
        yield {**base_row(next(iter(best.values()))), **benchmark_cells(outcome, world, BASE_ROW)}
    elif outcome.benchmarks:
        yield {"arm": BASE_ROW, "point": "", **benchmark_cells(outcome, world, BASE_ROW)}
    for arm in (arm for arm in outcome.arms if arm.world == world):
        point = best.get(arm.name)
        if point is None:
            yield lost_row(outcome, arm.name, world)
            continue
        beyond = over_limit(point, outcome) if known else ""
        yield {
            "arm": arm.name,
            "point": point.label + beyond + seeds_mark(len(point.seeds), outcome),
            **({"values": said[arm.name]} if said else {}),
            **(_truth_of(point, best, outcome.study.control) if known else _metrics_of(point)),
            **benchmark_cells(outcome, world, arm.name),
            **_inputs_of(point, uneven),
        }
    for model in outcome.study.published if outcome.benchmarks else ():
        yield {"arm": model, "point": "published", **benchmark_cells(outcome, world, model)}


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
    rows = by_world(outcome, lambda world: _level_rows(outcome, world, chosen[world]))
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
        row: Row = {"arm": name}
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


OVER_SEEDS, GRADING = " ±", " grading"
SHARE_DIGITS, SCORE_DIGITS = 4, 2  # of figures between -1 and 1, and of others


def benchmark_cells(outcome: Outcome, world: str, row: str) -> dict[str, Cell]:
    """Returns the cells of a row: the mean over seeds, its half width where there are several, the
    spread of grading.
    """
    cells: dict[str, Cell] = {}
    for name, rows in outcome.benchmarks.items():
        score = rows.get((world, row))
        if score is None:
            continue
        cells[name] = score.failure or score.mean
        if any(other.half_width is not None for other in rows.values()):
            cells[name + OVER_SEEDS] = score.half_width
        if any(other.grading is not None for other in rows.values()):
            cells[name + GRADING] = None if score.failure else score.grading
    return cells


def benchmark_digits(outcome: Outcome) -> dict[str, int]:
    """Decimals of the benchmarks' columns."""
    digits = {}
    for name, rows in outcome.benchmarks.items():
        largest = max((abs(value) for score in rows.values() for value in score.values), default=0.0)
        for head in (name, name + OVER_SEEDS, name + GRADING):
            digits[head] = SHARE_DIGITS if largest <= 1 else SCORE_DIGITS
    return digits


def benchmark_notes(outcome: Outcome) -> Iterator[str]:
    """Yields what the columns of each benchmark are, what differs by no more than noise, and what was missing."""
    for name, rows in outcome.benchmarks.items():
        known = [score for score in rows.values() if not score.failure]
        if not known:
            continue
        first = known[0]
        rounds = "1 round" if first.rounds == 1 else f"{first.rounds} rounds, their mean"
        parts = [f"{name}: {first.name} of {first.questions} questions in {rounds}"]
        if any(score.half_width is not None for score in known):
            parts.append("± half width of the 95 % interval over seeds (Student's t)")
        if any(score.grading is not None for score in known):
            parts.append("grading: standard deviation from grading the same answers again")
        yield "; ".join(parts)
        yield from _within_noise(outcome, name)
        counts: Counter[str] = Counter()
        for score in rows.values():
            counts.update(score.counts)
        if +counts:
            yield f"{name}, counted over all rows: {', '.join(f'{why} {count}' for why, count in (+counts).items())}"


def _within_noise(outcome: Outcome, benchmark: str) -> Iterator[str]:
    """Names the rows of each world whose difference to the control, else to the base, is below the grading noise."""
    rows = outcome.benchmarks[benchmark]
    against = outcome.study.control or BASE_ROW
    for world in outcome.worlds:
        control = rows.get((world, against))
        if control is None:
            continue
        names = [
            name for (of, name), score in rows.items() if of == world and name != against and _within(score, control)
        ]
        if names:
            where = f"{world}: " if world else ""
            yield (
                f"{benchmark}: {where}differs from {against} by less than the grading noise of a difference, "
                f"1.96 sqrt(a^2 + b^2), which is no difference: {', '.join(names)}"
            )


def _within(one: RowScore, other: RowScore) -> bool:
    if one.failure or other.failure or one.grading is None or other.grading is None:
        return False
    return abs(one.mean - other.mean) < grading_noise(one.grading, other.grading)


RANK = "average rank"
RANK_DIGITS = {"KL": 2, "length": 1, RANK: 2}


def ranking_table(outcome: Outcome) -> list[Section]:
    """Tables with average ranks, a block of rows per world: by the truth, and by benchmarks, as far as there are any.

    None unless the study asks for them.
    """
    if not outcome.study.ranking:
        return []
    return [*_by_truth(outcome), *_by_benchmarks(outcome)]


def _by_truth(outcome: Outcome) -> list[Section]:
    if not has_truth(gather(outcome.points)):
        return []
    rows = by_world(outcome, lambda world: _ranked_rows(outcome, world))
    levels = ", ".join(f"{level:g}" for level in outcome.study.kl_levels)
    at = (
        f" and the rewards at KL {levels} (as in the table at equal KL; {ENDS} and {CHORD}: not there)"
        if levels
        else ""
    )
    note = (
        f"average rank, 1 the best: over reward, win rate{at}, among the rows that have all of them, the base and the "
        "controls included; KL and length are shown and not ranked. All scores are of test prompts"
    )
    return [
        Section(
            "Methods and their average rank", [TableBlock(columns_of(rows), rows, digits=RANK_DIGITS), Paragraph(note)]
        )
    ]


def _by_benchmarks(outcome: Outcome) -> list[Section]:
    if not outcome.benchmarks:
        return []
    columns, rows = scores_table(outcome)
    directions = _directions(outcome)
    lower = [name for name, higher in directions.items() if not higher]
    better = "a higher score being the better one" + (f" (of {', '.join(lower)} the lower)" if lower else "")
    aimless = [name for name in outcome.benchmarks if name not in directions]
    left = f"; not over {', '.join(aimless)}, of which it is not known whether higher is better" if aimless else ""
    note = (
        f"average rank, 1 the best: over {', '.join(directions) or 'none'} as printed, {better}, among the rows that "
        f"have all of them{left}"
    )
    digits = {**benchmark_digits(outcome), RANK: 2}
    return [Section("Benchmarks and the average rank", [TableBlock(columns, rows, digits=digits), Paragraph(note)])]


def scores_table(outcome: Outcome) -> tuple[list[str], list[Row]]:
    """Columns and rows in the shape of the paper's main table: the score on each benchmark, and the average rank.

    The base first, then the arms in the study's order, then published models, world by world.
    """
    said, digits, directions = origins(outcome), benchmark_digits(outcome), _directions(outcome)

    def rows_of(world: str) -> Iterator[Row]:
        names = [BASE_ROW, *(arm.name for arm in outcome.arms if arm.world == world), *outcome.study.published]
        means = {
            name: [_as_printed(outcome.benchmarks[of].get((world, name)), digits[of]) for of in directions]
            for name in names
            if any((world, name) in scores for scores in outcome.benchmarks.values())
        }
        ranks = mean_ranks(means, list(directions.values()))
        for name in names:
            yield {
                "arm": name,
                **({"values": said.get(name, "")} if said else {}),
                **{
                    benchmark: _score_cell(outcome, world, name, scores.get((world, name)))
                    for benchmark, scores in outcome.benchmarks.items()
                },
                RANK: ranks.get(name, NONE),
            }

    rows = by_world(outcome, rows_of)
    return columns_of(rows), rows


def _directions(outcome: Outcome) -> dict[str, bool]:
    """Of each benchmark whether its higher score is the better one, as far as that is known."""
    said = {name: direction(rows.values()) for name, rows in outcome.benchmarks.items()}
    return {name: higher for name, higher in said.items() if higher is not None}


def _as_printed(score: RowScore | None, digits: int) -> float:
    """Returns a mean as the table shows it, which is what the paper ranks; NaN where there is none."""
    return math.nan if score is None or score.failure else half_up(score.mean, digits)


def _score_cell(outcome: Outcome, world: str, arm: str, score: RowScore | None) -> Cell:
    return str(lost_row(outcome, arm, world)["point"]) if score is None else score.failure or score.mean


def _ranked_rows(outcome: Outcome, world: str) -> Iterator[Row]:
    """Yields the base, then every arm in the study's order; one without results says so and is not ranked."""
    best, every, said = best_by_arm(outcome, world), by_arm(outcome, world), origins(outcome)
    at = {name: {level: at_kl(every[name], level) for level in outcome.study.kl_levels} for name in best}
    base = next(iter(best.values()), None)
    reward = math.nan if base is None else base.truth("test", "base_reward")
    scores = {BASE_ROW: [reward, 0.5, *(reward for _ in outcome.study.kl_levels)]}
    ranks = mean_ranks({**scores, **{name: _scores_of(point, at[name]) for name, point in best.items()}})

    def row(name: str, reward: float, win_rate: float, levels: Iterable[str], kl: float, length: float) -> Row:
        return {
            "arm": name,
            **({"values": said.get(name, "")} if said else {}),
            "reward": reward,
            "win rate": win_rate,
            **{f"reward at KL {level:g}": cell for level, cell in zip(outcome.study.kl_levels, levels, strict=True)},
            "KL": kl,
            "length": length,
            RANK: ranks.get(name, NONE),
        }

    if base is not None:
        shown = [f"{reward:.3f}" for _ in outcome.study.kl_levels]
        yield row(BASE_ROW, reward, 0.5, shown, 0.0, base.truth("test", "base_length"))
    for arm in (arm for arm in outcome.arms if arm.world == world):
        point = best.get(arm.name)
        if point is None:
            origin: Row = {"values": said.get(arm.name, "")} if said else {}
            yield {"arm": arm.name, **origin, RANK: str(lost_row(outcome, arm.name, world)["point"])}
        else:
            numbers = (point.truth("test", name) for name in ("reward", "win_rate", "kl", "length"))
            reward, win_rate, kl, length = numbers
            yield row(arm.name, reward, win_rate, map(_reward_shown, at[arm.name].values()), kl, length)


def _scores_of(point: PointResults, levels: Mapping[float, AtKL | None]) -> list[float]:
    """Returns the scores an arm is ranked by; NaN for one it lacks."""
    at = [math.nan if place is None else place.reward for place in levels.values()]
    return [point.truth("test", "reward"), point.truth("test", "win_rate"), *at]


def _reward_shown(place: AtKL | None) -> str:
    return NONE if place is None else f"{place.reward:.3f}{place.mark}"


def mean_ranks(scores: Mapping[str, list[float]], higher: Sequence[bool] | None = None) -> dict[str, float]:
    """Returns the mean of each name's ranks over its scores, 1 the best; without the names that lack a finite score.

    ``higher``: whether the higher of each column's scores are the better ones (None: of all).
    """
    whole = {name: row for name, row in scores.items() if row and all(map(math.isfinite, row))}
    if not whole:
        return {}
    means = average_ranks(np.array(list(whole.values()), dtype=np.float64), higher)
    return {name: float(mean) for name, mean in zip(whole, means, strict=True)}


FORWARDS, BACKWARDS, WEIGHING = "forwards/pair", "backwards/pair", "ms/pair"
OF_SCORERS = ("scorers", "their forwards/pair", "their backwards/pair", "their s")
TRAINING = "training ms/pair"
ACCURACY = "val/rewards/accuracies"
COST_DIGITS = {
    **{FORWARDS: 1, BACKWARDS: 1, WEIGHING: 2, "their forwards/pair": 1, "their backwards/pair": 1, "their s": 1},
    **{TRAINING: 2, "pairs": 0, "steps": 0, "s": 1, "val accuracy": 3, "reward": 3, "minus base": 3, "KL": 2},
}
COSTS_NOTE = (
    "what an arm's weights ask of models beyond the training that all arms have: sequences read of each training pair "
    "(a prompt with one response, or a judge's prompt with both; a written answer counts once, however long) forward "
    "and backward; milliseconds of what is done before training, the pass that is stored or the source's own work, on "
    "the machine that did it, a judge's pass for all layers it reads; their: the same of the scorers trained for the "
    f"arm, which arms share, with the seconds of those runs; {TRAINING}: of the arm's chosen point, per pair and pass, "
    "where weights computed in every step cost what is more than uniform's"
)


def cost_tables(outcome: Outcome) -> list[Section]:
    """Returns what weights cost, where the study asks for it, and the scorers, where it has any; means over seeds."""
    sections: list[Section] = []
    if outcome.study.costs:
        rows = by_world(outcome, lambda world: _cost_rows(outcome, world))
        shown: list[Block] = [TableBlock(columns_of(rows), rows, digits=COST_DIGITS), Paragraph(COSTS_NOTE)]
        sections.append(Section("What the weights cost", shown))
    if outcome.scorers or outcome.lost_scorers:
        rows = by_world(outcome, lambda world: _scorer_rows(outcome, world))
        lost = [Paragraph(line, warning=True) for line in outcome.lost_scorers]
        tables = [TableBlock(columns_of(rows), rows, digits=COST_DIGITS)] if rows else []
        sections.append(Section("Scorers", [*lost, *tables, Paragraph(_scorers_note(outcome))]))
    return sections


def _cost_rows(outcome: Outcome, world: str) -> Iterator[Row]:
    best = best_by_arm(outcome, world)
    for arm in (arm for arm in outcome.arms if arm.world == world):
        source = arm.name if arm.layer is None else outcome.study.layer_arm
        known = [reads for (of, _, name), reads in outcome.reads.items() if (of, name) == (world, source)]
        row: Row = {"arm": arm.name}
        if not known:
            yield row
            continue
        point = best.get(arm.name)
        again = _again(known[0], point)
        seconds = [reads.seconds for reads in known if reads.seconds is not None]
        weighing = 1000 * fmean(seconds) if seconds else None
        row |= {FORWARDS: known[0].once + again, BACKWARDS: again, WEIGHING: weighing}
        named = list(dict.fromkeys(scorers_of(arm.overrides).values()))
        runs = [[made[name] for name in named if name in made] for made in _made(outcome, world)] if named else []
        row |= dict(zip(OF_SCORERS, [", ".join(named), *_sums(runs)], strict=True)) if outcome.study.scorers else {}
        yield {**row, TRAINING: None if point is None else _training(point, known[0])}


def _again(reads: Reads, point: PointResults | None) -> float:
    """Sequences of a pair that were read forward and backward once more, over the whole training."""
    if not reads.again:
        return 0.0
    results: Sequence[RunResult] = () if point is None else point.results
    return reads.again * fmean([times_trained(result, reads.step_pairs) for result in results] or [math.nan])


def _training(point: PointResults, reads: Reads) -> float:
    """Milliseconds of training per pair and pass, the mean over seeds."""
    return fmean(1000 * r.seconds.get("train", math.nan) / (r.steps * reads.step_pairs) for r in point.results)


def _made(outcome: Outcome, world: str) -> list[dict[str, ScorerRun]]:
    """Returns the trained scorers of each seed."""
    return [made for (of, _), made in outcome.scorers.items() if of == world]


def _sums(runs: list[list[ScorerRun]]) -> tuple[Cell, Cell, Cell]:
    """Forwards, backwards and seconds of an arm's scorers together, means over seeds; nothing where it has none."""
    whole = [made for made in runs if made]
    if not whole:
        return None, None, None
    return (
        fmean(sum(run.forwards for run in made) for made in whole),
        fmean(sum(run.backwards for run in made) for made in whole),
        fmean(sum(run.result.seconds["all"] for run in made) for made in whole),
    )


def _scorer_rows(outcome: Outcome, world: str) -> Iterator[Row]:
    arms = [arm for arm in outcome.arms if arm.world == world]
    for name in outcome.study.scorers:
        runs = [made[name] for made in _made(outcome, world) if name in made]
        if not runs:
            continue
        results = [run.result for run in runs]
        row: Row = {
            "scorer": name,
            "of arms": ", ".join(arm.name for arm in arms if name in scorers_of(arm.overrides).values()),
            "pairs": fmean(result.input("train", "pairs") for result in results),
            "steps": fmean(result.steps for result in results),
            "s": fmean(result.seconds["all"] for result in results),
            "val accuracy": fmean(result.metrics.get(ACCURACY, math.nan) for result in results),
        }
        truths = [result.truth["test"].numbers for result in results if result.truth is not None]
        if truths:
            row |= {
                "reward": fmean(numbers["reward"] for numbers in truths),
                "minus base": fmean(numbers["reward"] - numbers["base_reward"] for numbers in truths),
                "KL": fmean(numbers["kl"] for numbers in truths),
            }
        yield row


def _scorers_note(outcome: Outcome) -> str:
    note = (
        "runs that the study trains for its arms on the pairs of the same world and seed, once for all grid points and "
        "not in s/run; val accuracy: share of validation pairs that the scorer's own reward orders as it was taught to "
        "(with exchanged responses the other way round)"
    )
    truth = any(run.result.truth is not None for made in outcome.scorers.values() for run in made.values())
    return note + ("; reward, KL: of its own answers to test prompts" if truth else "")


PER_TOKEN = "KL per token; answers"
# By caption and column the numbers of ``RunResult.drift`` that are added up; {} is where tokens were looked at.
DRIFT_TABLES: dict[str, dict[str, tuple[str, ...]]] = {
    "KL, and shares of it": {
        "KL": ("{}/kl",),
        "decisive": (f"{{}}/truth/{DECISIVE}/kl",),
        "of tokens": (f"{{}}/truth/{DECISIVE}/tokens",),
        "end": (f"{{}}/classes/{END}/kl",),
        "below 1": (f"{{}}/classes/{NO_WEIGHT}/kl", f"{{}}/classes/{BELOW}/kl"),
    },
    PER_TOKEN: {
        "decisive": (f"{{}}/truth/{DECISIVE}/kl_per_token",),
        "other": (f"{{}}/truth/{OTHER}/kl_per_token",),
    },
    "pairs ranked as labelled": {
        "clean": ("ranking_accuracy/train_clean",),
        "wrong": ("ranking_accuracy/train_flipped",),
        "validation": ("ranking_accuracy/validation",),
    },
    "moved by; beta of a token": {
        "chosen": ("displacement/train_chosen",),
        "rejected": ("displacement/train_rejected",),
        "base's": ("displacement/base_answers",),
        "p50": ("effective_beta/p50",),
        "max": ("effective_beta/max",),
    },
}
DRIFT_DIGITS = {"KL": 2, "chosen": 2, "rejected": 2, "base's": 2}
DRIFT_NOTES = (
    "KL: nats per response, policy to base over the whole vocabulary. Of it the shares on decisive tokens (by the "
    "grammar, the same for every arm; beside it their share of the tokens), on the end of the turn, and on tokens "
    "weighted below uniform (|y| w below 1)",
    "ranked as labelled: the chosen response gained more log-probability than the rejected one, summed without "
    "weights; training pairs with clean and with wrong labels (high there: learnt by heart), and validation pairs",
    "moved by: mean change of log-probability, nats per response, of training pairs' responses and of answers sampled "
    "from the base; beta of a token: beta |y| w over the training tokens",
)


def drift_table(outcome: Outcome) -> list[Section]:
    """Returns the section "Where the policy moved"; none for a study whose runs did not measure it."""
    points = gather(outcome.points)
    measured = [result.drift for point in points for result in point.results if result.drift]
    if not measured:
        return []
    part = "answers" if any("answers" in one for one in measured) else "pairs"
    blocks: list[Block] = []
    for caption in DRIFT_TABLES:
        rows = by_world(outcome, partial(_drift_rows, outcome, caption=caption, part=part))
        blocks.append(TableBlock(columns_of(rows), rows, caption, DRIFT_DIGITS))
    where = "on answers sampled from the policy" if part == "answers" else "on the responses of validation pairs"
    first = f"each arm at its chosen point, means over seeds; tokens are looked at {where}"
    return [Section("Where the policy moved", [*blocks, *map(Paragraph, (first, *DRIFT_NOTES))])]


def _drift_rows(outcome: Outcome, world: str, caption: str, part: str) -> Iterator[Row]:
    known = caption == PER_TOKEN and has_truth(gather(outcome.points))
    for name, point in best_by_arm(outcome, world).items():
        yield {
            "arm": name,
            **{head: _describe_movement(point, paths, part) for head, paths in DRIFT_TABLES[caption].items()},
            **({name: point.truth("test", name) for name in ("polarity", "broken")} if known else {}),
        }


def _describe_movement(point: PointResults, paths: tuple[str, ...], part: str) -> float | str:
    value = sum(point.drift(path.format(part)) for path in paths)
    return NONE if math.isnan(value) else value
