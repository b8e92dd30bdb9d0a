"""Tables of a study: arms at their best points and at equal KL, worlds, benchmarks, average ranks, costs and drift."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean

import numpy as np

from attnpo.display.page import Block, Paragraph, Section, TableBlock
from attnpo.display.tables import Cell, round_half_up
from attnpo.evaluation.intervals import Interval, MeanSquares, average_ranks, smallest_effect
from attnpo.evaluation.spreads import grading_noise
from attnpo.lab.light import BELOW, DECISIVE, END, NO_WEIGHT, OTHER
from attnpo.lab.studies.outcome import (
    CHORD,
    ENDS,
    FAR,
    GAP,
    Outcome,
    PointResults,
    RewardAtKL,
    difference_text,
    epochs_trained,
    interval_text,
    reward_difference,
    rewards_at_kl,
    verdict,
)
from attnpo.lab.studies.study import BASE_ROW, scorer_names_by_key
from attnpo.weights.arrival import COLUMNS as ARRIVED

METRICS = {"val loss": "loss", "val accuracy": "rewards/accuracies", "val margin": "rewards/margins"}
TOKENS = {"chosen tokens": "tokens.chosen.p50", "rejected tokens": "tokens.rejected.p50"}
DIGITS = {
    **dict.fromkeys(("sum", "eff. weights/n"), 3),
    **dict.fromkeys(("coverage", "source coverage"), 4),
    **dict.fromkeys(("length", "s/run", "pairs", "steps", *TOKENS), 1),
    "KL": 2,
}
Row = dict[str, Cell]


def main_table(outcome: Outcome) -> tuple[list[str], list[Row]]:
    """Returns the columns and rows of the main table: each arm at its best point, grouped by world.

    If the true reward is known, it contains test scores and a row for the base; otherwise, validation metrics.
    """
    known, uneven = outcome.has_truth, uneven_training_columns(outcome)
    rows = rows_by_world(outcome, lambda world: _main_rows(outcome, world, uneven, known))
    return column_names(rows), rows


SHORT = ("world", "arm", "reward", "win rate", "KL", "val loss", "val accuracy", "val margin")


def short_table(outcome: Outcome) -> TableBlock:
    """Returns the main table, reduced to fit an 80-column terminal; the page and the CSV have all columns.

    Marks on points (above the KL limit, missing seeds) follow the arm; "FAILED" replaces a missing reward.
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
        place = "arm" if reward is not None else "reward"
        made.append({**short, place: f"{short.get(place) or ''} {mark}".strip()} if mark else short)
    return TableBlock(column_names(made), made, digits={**DIGITS, **benchmarks})


def rows_by_world(outcome: Outcome, rows_of: Callable[[str], Iterable[Row]]) -> list[Row]:
    """Returns the rows of all worlds, with a "world" column if the study has worlds."""
    return [{**({"world": world} if world else {}), **row} for world in outcome.worlds for row in rows_of(world)]


def column_names(rows: Sequence[Row]) -> list[str]:
    """Returns the column names of all rows: those of the longest row first, then the rest."""
    fullest = max(rows, key=len)
    return list(dict.fromkeys(name for row in (fullest, *rows) for name in row))


def uneven_training_columns(outcome: Outcome) -> list[str]:
    """Returns which of the columns "pairs" and "steps" differ between arms in any world."""
    every = [[training_amounts(point) for point in outcome.best_points(world).values()] for world in outcome.worlds]
    return [
        name
        for name in ("pairs", "steps")
        if any(len({row[name] for row in rows if not math.isnan(row[name])}) > 1 for rows in every)
    ]


def training_amounts(point: PointResults) -> dict[str, int | float]:
    """Returns the numbers of training pairs and optimizer steps of an arm's runs, as means over seeds."""
    means = {"pairs": point.mean_input("pairs"), "steps": fmean(result.steps for result in point.results)}
    return {name: int(value) if value.is_integer() else value for name, value in means.items()}


def _input_cells(point: PointResults, uneven: Sequence[str]) -> Row:
    """Returns a row's last cells: statistics of the arm's training examples and the time per run."""
    mass, share = point.mean_input("mass"), point.mean_input("effective_share")
    return {
        **{name: value for name, value in training_amounts(point).items() if name in uneven},
        **({} if math.isnan(mass) else {"sum": mass}),
        "eff. weights/n": point.mean_metric("val/weights/effective_share") if math.isnan(share) else share,
        "coverage": point.mean_input("coverage"),
        **{head: value for name, head in ARRIVED.items() if not math.isnan(value := point.mean_input(name))},
        "s/run": float(np.mean([result.seconds["all"] for result in point.results])),
    }


def _main_rows(outcome: Outcome, world: str, uneven: Sequence[str], known: bool) -> Iterator[Row]:
    best = outcome.best_points(world)
    said = grid_origins(outcome)
    base: Row = {}
    for first in [*best.values()][:1] if known else []:
        base = {"reward": first.mean_truth_score("test", "base_reward"), "win rate": 0.5, "KL": 0.0}
        base |= {name: first.mean_truth_score("test", f"base_{name}") for name in ("length", "broken")}
    if base or outcome.benchmarks:
        yield {"arm": BASE_ROW, "point": "", **base, **benchmark_cells(outcome, world, BASE_ROW)}
    for arm in outcome.arms_in_world(world):
        point = best.get(arm.name)
        if point is None:
            yield {"arm": arm.name, "point": describe_missing_results(outcome, arm.name, world)}
            continue
        chosen = known and len((arm.grid or outcome.study.grid).point_overrides()) > 1
        far = chosen and point.mean_truth_score("validation", "kl") > outcome.study.kl_limit
        beyond = " (above the KL limit)" if far else ""
        metrics: Row = {head: point.mean_metric(f"val/{name}") for head, name in METRICS.items()}
        metrics |= {head: point.mean_input(median) for head, median in TOKENS.items()}
        yield {
            "arm": arm.name,
            "point": point.label + beyond + outcome.missing_seeds_mark(len(point.seeds)),
            **({"values": said[arm.name]} if said else {}),
            **(_truth_cells(point, best, outcome.study.control) if known else metrics),
            **benchmark_cells(outcome, world, arm.name),
            **_input_cells(point, uneven),
        }
    for model in outcome.study.published if outcome.benchmarks else ():
        yield {"arm": model, "point": "published", **benchmark_cells(outcome, world, model)}


def _truth_cells(point: PointResults, best: Mapping[str, PointResults], control: str | None) -> Row:
    other = best.get(control or "")
    versus = None if other is None or point is other else reward_difference(point, other)
    shown = {"win rate": "win_rate", "KL": "kl", "length": "length", "broken": "broken"}
    return {
        "reward": point.mean_truth_score("test", "reward"),
        "95 %": interval_text(point.reward_interval),
        **({} if control is None else {f"minus {control}": difference_text(versus)}),
        **{head: point.mean_truth_score("test", name) for head, name in shown.items()},
    }


def grid_origins(outcome: Outcome) -> dict[str, str]:
    """Returns the origin of each arm's grid values, by arm; empty if no grid has a stated origin."""
    by_arm = {arm.name: (arm.grid or outcome.study.grid).origin for arm in outcome.arms}
    return by_arm if any(by_arm.values()) else {}


def describe_missing_results(outcome: Outcome, arm: str, world: str) -> str:
    """Returns the table cell for an arm without results, which either failed or was not run."""
    errors = [error for point, error in outcome.failed if (point.arm.name, point.arm.world) == (arm, world)]
    ran = any(not error.startswith("not run") for error in errors)
    return f"FAILED, all {len(errors)} points" if ran else "NOT RUN"


NONE = "-"
NOT_EQUAL = "not at equal KL"


def equal_kl_sections(outcome: Outcome) -> list[Section]:
    """Returns tables of rewards at equal KL and, for studies with worlds, of differences from the control.

    Returns an empty list if the true reward is unknown, there are no KL levels, or all arms have a single point.
    """
    study = outcome.study
    tuned = any(len((arm.grid or study.grid).point_overrides()) > 1 for arm in outcome.arms)
    if not study.kl_levels or not tuned or not outcome.has_truth:
        return []
    chosen = {world: arms_at_levels(outcome, world) for world in outcome.worlds}
    note = (
        "test reward on the path of each arm and seed: the base, then by ascending KL the grid points whose validation "
        "reward is higher than that of all points with lower KL; interpolated linearly in the square root of KL. In "
        "brackets: KL of the path's last point, if no point with higher KL is better on validation. "
        f"{ENDS}: the path ends below this KL; {CHORD}: its first point has more than {FAR:g} times this KL; neither "
        f"is a comparison at equal KL. {GAP}: interpolated between trained points whose KLs differ by more than a "
        f"factor of {FAR:g}. Intervals do not include the uncertainty of the paths"
    )
    if study.control is not None:
        note += f"; differences from {study.control} are at the same KL, paired by seed and prompt"
    rows = rows_by_world(outcome, lambda world: _level_rows(outcome, world, chosen[world]))
    power = [Paragraph(line) for level in study.kl_levels if (line := _power_note(level, chosen.values()))]
    sections = [Section("Reward at equal KL", [TableBlock(column_names(rows), rows), Paragraph(note), *power])]
    if not study.worlds or study.control is None:
        return sections
    tables = [
        TableBlock(["arm", *outcome.worlds], _world_difference_rows(outcome, chosen, level), f"at KL {level:g}")
        for level in study.kl_levels
    ]
    note = (
        f"difference from {study.control} in the same world at equal KL; helps or harms: the 95 % interval excludes "
        "0, not corrected for the number of cells. If some seeds lack an arm at this KL, the number of seeds is "
        "shown instead of a verdict"
    )
    return [*sections, Section(f"Worlds: difference from {study.control} at equal KL", [*tables, Paragraph(note)])]


@dataclass(frozen=True)
class ArmAtLevel:
    """Arm at a KL level: its rewards (``place``) and difference from the control (``versus``); None if unavailable.

    ``mark``: mark of the arm's or the control's ``RewardAtKL``; empty if the difference is at equal KL.
    """

    place: RewardAtKL | None
    versus: Interval | None
    mark: str = ""

    @property
    def is_at_equal_kl(self) -> bool:
        """Returns whether the arm has a difference from the control at equal KL."""
        return self.versus is not None and not self.mark

    @property
    def difference_cell(self) -> str:
        """Formats the difference, with a mark if the arms are not at equal KL."""
        return NONE if self.versus is None else difference_text(self.versus) + self.mark


def arms_at_levels(outcome: Outcome, world: str) -> dict[tuple[str, float], ArmAtLevel]:
    """Returns a world's arms at each KL level, with their differences from the control."""
    out = {}
    for level in outcome.study.kl_levels:
        places = {name: rewards_at_kl(mine, level) for name, mine in outcome.points_by_arm(world).items()}
        control = places.get(outcome.study.control or "")
        for name, place in places.items():
            if place is None or control is None or name == outcome.study.control:
                out[name, level] = ArmAtLevel(place, None)
            else:
                out[name, level] = ArmAtLevel(place, reward_difference(place, control), place.mark or control.mark)
    return out


def _power_note(level: float, worlds: Iterable[Mapping[tuple[str, float], ArmAtLevel]]) -> str:
    """Describes the smallest difference that such a study can detect, given the mean variances of its differences."""
    places = [at.versus for world in worlds for (_, of), at in world.items() if of == level and at.is_at_equal_kl]
    known = [versus.squares for versus in places if versus is not None and versus.squares is not None]
    most = max((squares.seeds for squares in known), default=0)
    parts = [squares.variances for squares in known if squares.seeds == most]
    spreads = [math.sqrt(fmean(part)) for part in zip(*parts, strict=True)]
    if not any(spreads):  # one seed, or all differences are equal
        return ""
    smallest = smallest_effect(MeanSquares.from_spreads(spreads, most, known[0].prompts))
    seed, prompt, residual = (f"{spread:.3f}" for spread in spreads)
    return (
        f"KL {level:g}: with {most} seeds and {known[0].prompts} prompts, 80 % of studies detect a true difference of "
        f"{smallest:.3f} (standard deviations of the differences: between seeds {seed}, between prompts {prompt}, "
        f"residual {residual})"
    )


def _level_rows(outcome: Outcome, world: str, chosen: dict[tuple[str, float], ArmAtLevel]) -> Iterator[Row]:
    study = outcome.study
    for name, points in outcome.points_by_arm(world).items():
        row: Row = {"arm": name}
        for level in study.kl_levels:
            at = chosen[name, level]
            row[f"KL {level:g}"] = NONE if points else describe_missing_results(outcome, name, world)
            if at.place is not None:
                kl = "" if at.place.kl == level else f" ({at.place.kl:.2f})"
                row[f"KL {level:g}"] = f"{reward_text(at.place)}{kl}{outcome.missing_seeds_mark(len(at.place.seeds))}"
            if study.control is not None:
                few = "" if at.versus is None else outcome.missing_seeds_mark(at.versus.seeds)
                row[f"minus {study.control}, KL {level:g}"] = "" if name == study.control else at.difference_cell + few
        yield row


def reward_text(place: RewardAtKL | None) -> str:
    """Formats the reward at a KL level with its mark."""
    return NONE if place is None else f"{place.mean_reward:.3f}{place.mark}{GAP * place.gap}"


def _world_difference_rows(
    outcome: Outcome, chosen: dict[str, dict[tuple[str, float], ArmAtLevel]], level: float
) -> list[Row]:
    results = {world: outcome.points_by_arm(world) for world in outcome.worlds}
    rows: list[Row] = []
    for name in dict.fromkeys(arm.name for arm in outcome.arms if arm.name != outcome.study.control):
        row: Row = {"arm": name}
        for world in outcome.worlds:
            at = chosen[world].get((name, level))
            if name not in results[world]:
                row[world] = ""
            elif at is None or at.versus is None:
                row[world] = NONE if results[world].get(name) else describe_missing_results(outcome, name, world)
            else:
                few = outcome.missing_seeds_mark(at.versus.seeds)
                row[world] = (
                    f"{at.difference_cell}{few or f' {verdict(at.versus) if at.is_at_equal_kl else NOT_EQUAL}'}"
                )
        rows.append(row)
    return rows


OVER_SEEDS, GRADING = " ±", " grading"
SHARE_DIGITS, SCORE_DIGITS = 4, 2  # decimals of scores between -1 and 1, and of other scores


def benchmark_cells(outcome: Outcome, world: str, row: str) -> dict[str, Cell]:
    """Returns a row's benchmark cells: mean over seeds and, if known, interval half width and grading noise."""
    cells: dict[str, Cell] = {}
    for name, rows in outcome.benchmarks.items():
        score = rows.get((world, row))
        if score is None:
            continue
        cells[name] = score.failure_text or score.mean
        if any(other.half_width is not None for other in rows.values()):
            cells[name + OVER_SEEDS] = score.half_width
        if any(other.grading is not None for other in rows.values()):
            cells[name + GRADING] = None if score.failure_text else score.grading
    return cells


def benchmark_digits(outcome: Outcome) -> dict[str, int]:
    """Returns the number of decimals of each benchmark column."""
    digits = {}
    for name, rows in outcome.benchmarks.items():
        largest = max((abs(value) for score in rows.values() for value in score.values), default=0.0)
        for head in (name, name + OVER_SEEDS, name + GRADING):
            digits[head] = SHARE_DIGITS if largest <= 1 else SCORE_DIGITS
    return digits


def benchmark_notes(outcome: Outcome) -> Iterator[str]:
    """Yields notes on each benchmark: its columns, differences within grading noise, and missing answers."""
    for name, rows in outcome.benchmarks.items():
        known = [score for score in rows.values() if not score.failure_text]
        if not known:
            continue
        first = known[0]
        rounds = "1 round" if first.rounds == 1 else f"{first.rounds} rounds, their mean"
        parts = [f"{name}: {first.name} on {first.questions} questions in {rounds}"]
        if any(score.half_width is not None for score in known):
            parts.append("±: half width of the 95 % interval over seeds (Student's t)")
        if any(score.grading is not None for score in known):
            parts.append("grading: standard deviation when grading the same answers again")
        yield "; ".join(parts)
        against = outcome.study.control or BASE_ROW
        for world in outcome.worlds:
            control = rows.get((world, against))
            if control is None or control.failure_text or control.grading is None:
                continue
            names = [
                row
                for (of, row), score in rows.items()
                if of == world
                and row != against
                and not score.failure_text
                and score.grading is not None
                and abs(score.mean - control.mean) < grading_noise(score.grading, control.grading)
            ]
            if names:
                yield (
                    f"{name}: {f'{world}: ' if world else ''}not different from {against} beyond the grading noise of "
                    f"a difference, 1.96 sqrt(a^2 + b^2): {', '.join(names)}"
                )
        counts = +sum((Counter(score.counts) for score in rows.values()), Counter[str]())
        if counts:
            yield f"{name}, counted over all rows: {', '.join(f'{why} {count}' for why, count in counts.items())}"


RANK = "average rank"
RANK_DIGITS = {"KL": 2, "length": 1, RANK: 2}


def ranking_sections(outcome: Outcome) -> list[Section]:
    """Returns tables of average ranks, by true reward and by benchmarks; empty unless ``study.ranking`` is set."""
    if not outcome.study.ranking:
        return []
    sections = []
    if outcome.has_truth:
        rows = rows_by_world(outcome, partial(_ranking_rows, outcome))
        levels = ", ".join(f"{level:g}" for level in outcome.study.kl_levels)
        at = f" and rewards at KL {levels} (as in the table at equal KL; {ENDS} and {CHORD}: not at this KL)"
        note = (
            f"average rank (1 is best) over reward, win rate{at if levels else ''}, among the rows with all of "
            "them, including the base and controls; KL and length are shown but not ranked. All scores are on test "
            "prompts"
        )
        table = TableBlock(column_names(rows), rows, digits=RANK_DIGITS)
        sections.append(Section("Methods and their average rank", [table, Paragraph(note)]))
    if outcome.benchmarks:
        directions = _score_directions(outcome)
        lower = [name for name, higher in directions.items() if not higher]
        better = "higher is better" + (f" (for {', '.join(lower)}, lower is better)" if lower else "")
        aimless = [name for name in outcome.benchmarks if name not in directions]
        left = f"; excluding {', '.join(aimless)}, for which it is unknown whether higher is better" if aimless else ""
        note = (
            f"average rank (1 is best) over the printed scores on {', '.join(directions) or 'no benchmark'}; {better}; "
            f"among the rows with all of them{left}"
        )
        table = TableBlock(*scores_table(outcome), digits={**benchmark_digits(outcome), RANK: 2})
        sections.append(Section("Benchmarks and the average rank", [table, Paragraph(note)]))
    return sections


def scores_table(outcome: Outcome) -> tuple[list[str], list[Row]]:
    """Returns columns and rows laid out like the paper's main table: the score on each benchmark and the mean rank.

    For each world, the rows are the base, the arms in the study's order, and the published models.
    """
    said, digits, directions = grid_origins(outcome), benchmark_digits(outcome), _score_directions(outcome)

    def world_rows(world: str) -> Iterator[Row]:
        names = [BASE_ROW, *(arm.name for arm in outcome.arms_in_world(world)), *outcome.study.published]
        found = {name: {of: scores.get((world, name)) for of, scores in outcome.benchmarks.items()} for name in names}
        # Rounded as in the table, since the paper ranks printed scores; NaN for missing scores.
        means = {
            name: [
                math.nan if (score := mine[of]) is None or score.failure_text else round_half_up(score.mean, digits[of])
                for of in directions
            ]
            for name, mine in found.items()
        }
        ranks = mean_ranks(means, list(directions.values()))
        for name, mine in found.items():
            lost = describe_missing_results(outcome, name, world)
            cells = {of: lost if score is None else score.failure_text or score.mean for of, score in mine.items()}
            yield {
                "arm": name,
                **({"values": said.get(name, "")} if said else {}),
                **cells,
                RANK: ranks.get(name, NONE),
            }

    rows = rows_by_world(outcome, world_rows)
    return column_names(rows), rows


def _score_directions(outcome: Outcome) -> dict[str, bool]:
    said = {
        name: {score.higher_is_better for score in rows.values() if not score.failure_text}
        for name, rows in outcome.benchmarks.items()
    }
    alike = {name: next(iter(found)) for name, found in said.items() if len(found) == 1}
    return {name: higher for name, higher in alike.items() if higher is not None}


def _ranking_rows(outcome: Outcome, world: str) -> Iterator[Row]:
    """Yields the rows for the base and all arms, in the study's order; arms without results are not ranked."""
    best, every, said = outcome.best_points(world), outcome.points_by_arm(world), grid_origins(outcome)
    levels = outcome.study.kl_levels
    heads = [f"reward at KL {level:g}" for level in levels]
    rows: dict[str, Row] = {}
    scores: dict[str, list[float]] = {}
    for first in [*best.values()][:1]:
        reward, length = (first.mean_truth_score("test", f"base_{name}") for name in ("reward", "length"))
        scores[BASE_ROW] = [reward, 0.5, *(reward for _ in levels)]
        rows[BASE_ROW] = {"reward": reward, "win rate": 0.5, **dict.fromkeys(heads, f"{reward:.3f}"), "KL": 0.0}
        rows[BASE_ROW]["length"] = length
    for arm in outcome.arms_in_world(world):
        point = best.get(arm.name)
        if point is None:
            rows[arm.name] = {RANK: describe_missing_results(outcome, arm.name, world)}
            continue
        at = [rewards_at_kl(every[arm.name], level) for level in levels]
        reward, win_rate, kl, length = (
            point.mean_truth_score("test", name) for name in ("reward", "win_rate", "kl", "length")
        )
        scores[arm.name] = [reward, win_rate, *(math.nan if place is None else place.mean_reward for place in at)]
        rows[arm.name] = {"reward": reward, "win rate": win_rate, **dict(zip(heads, map(reward_text, at), strict=True))}
        rows[arm.name] |= {"KL": kl, "length": length}
    ranks = mean_ranks(scores)
    for name, row in rows.items():
        origin: Row = {"values": said.get(name, "")} if said else {}
        yield {"arm": name, **origin, **row, RANK: row.get(RANK, ranks.get(name, NONE))}


def mean_ranks(scores: Mapping[str, list[float]], higher: Sequence[bool] | None = None) -> dict[str, float]:
    """Returns each name's mean rank over its scores (1 is best); omits names with a non-finite score.

    ``higher``: whether higher is better, for each column of scores (None: higher is better in all columns).
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
    "cost of an arm's weights, in addition to ordinary training. Forward and backward passes count sequences per "
    "training pair: a prompt with one response, or a judge's prompt with both; a generated response counts once, "
    "whatever its length. ms/pair: time to compute weights before training (by models or by the source itself), on the "
    "machine that did it; a judge reads all its layers in a single pass. Columns named their: the same for the scorers "
    f"trained for the arm, which arms share, and their run time in seconds. {TRAINING}: training time at the arm's "
    "best point, per pair and epoch; if weights are computed in each step, it is longer than for uniform"
)


SCORERS_NOTE = (
    "runs that the study trains for its arms on the pairs of the same world and seed, once for all grid points and not "
    "included in s/run; val accuracy: share of validation pairs that the scorer's own reward ranks as in its training "
    "data (reversed if the responses are exchanged)"
)


def cost_sections(outcome: Outcome) -> list[Section]:
    """Returns a table of weight costs if ``study.costs`` is set, and a table of scorers if there are any."""
    sections: list[Section] = []
    if outcome.study.costs:
        rows = rows_by_world(outcome, lambda world: _cost_rows(outcome, world))
        shown: list[Block] = [TableBlock(column_names(rows), rows, digits=COST_DIGITS), Paragraph(COSTS_NOTE)]
        sections.append(Section("What the weights cost", shown))
    if outcome.scorers or outcome.lost_scorers:
        rows = rows_by_world(outcome, lambda world: _scorer_rows(outcome, world))
        lost = [Paragraph(line, warning=True) for line in outcome.lost_scorers]
        tables = [TableBlock(column_names(rows), rows, digits=COST_DIGITS)] if rows else []
        truth = any(run.result.truth is not None for made in outcome.scorers.values() for run in made.values())
        note = Paragraph(SCORERS_NOTE + ("; reward and KL are from its own responses to test prompts" if truth else ""))
        sections.append(Section("Scorers", [*lost, *tables, note]))
    return sections


def _cost_rows(outcome: Outcome, world: str) -> Iterator[Row]:
    best = outcome.best_points(world)
    for arm in outcome.arms_in_world(world):
        source = arm.name if arm.layer is None else outcome.study.layer_arm
        known = [reads for (of, _, name), reads in outcome.reads.items() if (of, name) == (world, source)]
        row: Row = {"arm": arm.name}
        if not known:
            yield row
            continue
        reads, results = known[0], best[arm.name].results if arm.name in best else ()
        again = 0.0
        if reads.again:  # over the whole training
            again = reads.again * fmean([epochs_trained(one, reads.step_pairs) for one in results] or [math.nan])
        seconds = [one.seconds for one in known if one.seconds is not None]
        row |= {FORWARDS: reads.once + again, BACKWARDS: again, WEIGHING: 1000 * fmean(seconds) if seconds else None}
        if outcome.study.scorers:
            named = list(dict.fromkeys(scorer_names_by_key(arm.overrides).values()))
            made = [[found[name] for name in named if name in found] for found in outcome.scorers_in_world(world)]
            spent = [
                [(run.forwards, run.backwards, run.result.seconds["all"]) for run in runs] for runs in made if runs
            ]
            means: list[Cell] = [None, None, None]
            if spent:
                means = [fmean(sum(run[place] for run in runs) for runs in spent) for place in range(3)]
            row |= dict(zip(OF_SCORERS, [", ".join(named), *means], strict=True))
        train = [1000 * one.seconds.get("train", math.nan) / (one.steps * reads.step_pairs) for one in results]
        yield {**row, TRAINING: fmean(train) if train else None}


def _scorer_rows(outcome: Outcome, world: str) -> Iterator[Row]:
    for name in outcome.study.scorers:
        results = [made[name].result for made in outcome.scorers_in_world(world) if name in made]
        if not results:
            continue
        arms = [arm.name for arm in outcome.arms_in_world(world) if name in scorer_names_by_key(arm.overrides).values()]
        row: Row = {
            "scorer": name,
            "of arms": ", ".join(arms),
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


PER_TOKEN = "KL per token; answers"
# By caption and column: paths of the ``RunResult.drift`` values to sum; {} is "answers" or "pairs".
DRIFT_TABLES: dict[str, dict[str, tuple[str, ...]]] = {
    "KL, and shares of it": {
        "drift KL": ("{}/kl",),
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
DRIFT_DIGITS = {"drift KL": 2, "chosen": 2, "rejected": 2, "base's": 2}
DRIFT_NOTES = (
    "drift KL: nats per response from policy to base over the whole vocabulary. The next columns are shares of it: on "
    "decisive tokens (given by the grammar, the same for every arm; of tokens: their share of all tokens), on the end "
    "of the turn, and on tokens with less than uniform weight (|y| w below 1)",
    "ranked as labelled: share of pairs whose chosen response gained more log-probability than the rejected one, "
    "summed without weights; on training pairs with clean and with wrong labels (a high value there means that labels "
    "were memorized), and on validation pairs",
    "moved by: mean change of log-probability in nats per response, for the responses of training pairs and for "
    "answers sampled from the base; beta of a token: beta |y| w over the training tokens",
)


def drift_sections(outcome: Outcome) -> list[Section]:
    """Returns the section "Where the policy moved"; empty if no run measured this."""
    points = outcome.results
    measured = [result.drift for point in points for result in point.results if result.drift]
    if not measured:
        return []
    part = "answers" if any("answers" in one for one in measured) else "pairs"
    blocks: list[Block] = []
    for caption in DRIFT_TABLES:
        rows = rows_by_world(outcome, partial(_drift_rows, outcome, caption=caption, part=part))
        blocks.append(TableBlock(column_names(rows), rows, caption, DRIFT_DIGITS))
    where = "of responses sampled from the policy" if part == "answers" else "of the responses in validation pairs"
    first = f"each arm at its best point, means over seeds; tokens are those {where}"
    return [Section("Where the policy moved", [*blocks, *map(Paragraph, (first, *DRIFT_NOTES))])]


def _drift_rows(outcome: Outcome, world: str, caption: str, part: str) -> Iterator[Row]:
    known = caption == PER_TOKEN and outcome.has_truth
    for name, point in outcome.best_points(world).items():
        numbers = {
            head: sum(point.mean_drift(path.format(part)) for path in paths)
            for head, paths in DRIFT_TABLES[caption].items()
        }
        yield {
            "arm": name,
            **{head: NONE if math.isnan(number) else number for head, number in numbers.items()},
            **({name: point.mean_truth_score("test", name) for name in ("polarity", "broken")} if known else {}),
        }
