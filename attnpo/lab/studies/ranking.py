"""A study in the shape of the paper's main table: scores of every arm side by side, and the average of its ranks."""

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from attnpo.display.page import Paragraph, Section, TableBlock
from attnpo.display.tables import Cell, half_up
from attnpo.evaluation.intervals import average_ranks
from attnpo.lab.studies.benchmark_scores import BASE_ROW, RowScore, direction
from attnpo.lab.studies.benchmark_table import benchmark_digits
from attnpo.lab.studies.frontier import CHORD, ENDS, AtKL, at_kl
from attnpo.lab.studies.selection import PointResults, best_by_arm, by_arm, gather, has_truth
from attnpo.lab.studies.study import Outcome
from attnpo.lab.studies.tables import NONE, Row, columns_of, lost_row, origins

RANK = "average rank"
DIGITS = {"KL": 2, "length": 1, RANK: 2}


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
    rows = [row for world in outcome.worlds for row in _world_rows(outcome, world)]
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
        Section("Methods and their average rank", [TableBlock(columns_of(rows), rows, digits=DIGITS), Paragraph(note)])
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
    rows: list[Row] = []
    for world in outcome.worlds:
        arms = [arm.name for arm in outcome.arms if arm.world == world]
        names = [BASE_ROW, *arms, *outcome.study.published]
        means = {
            name: [_printed(outcome.benchmarks[of].get((world, name)), digits[of]) for of in directions]
            for name in names
            if any((world, name) in scores for scores in outcome.benchmarks.values())
        }
        ranks = ranked(means, list(directions.values()))
        for name in names:
            rows.append(
                {
                    **({"world": world} if world else {}),
                    "arm": name,
                    **({"values": said.get(name, "")} if said else {}),
                    **{
                        benchmark: _score_cell(outcome, world, name, scores.get((world, name)))
                        for benchmark, scores in outcome.benchmarks.items()
                    },
                    RANK: ranks.get(name, NONE),
                }
            )
    return columns_of(rows), rows


def _directions(outcome: Outcome) -> dict[str, bool]:
    """Of each benchmark whether its higher score is the better one, as far as that is known."""
    said = {name: direction(rows.values()) for name, rows in outcome.benchmarks.items()}
    return {name: higher for name, higher in said.items() if higher is not None}


def _printed(score: RowScore | None, digits: int) -> float:
    """Returns a mean as the table shows it, which is what the paper ranks; NaN where there is none."""
    return math.nan if score is None or score.failed else half_up(score.mean, digits)


def _score_cell(outcome: Outcome, world: str, arm: str, score: RowScore | None) -> Cell:
    return str(lost_row(outcome, arm, world)["point"]) if score is None else score.failed or score.mean


def _world_rows(outcome: Outcome, world: str) -> Iterator[Row]:
    """Yields the base, then every arm in the study's order; one without results says so and is not ranked."""
    best, every = best_by_arm(outcome, world), by_arm(outcome, world)
    named: Row = {"world": world} if world else {}
    said = origins(outcome)
    levels = {
        name: {level: at_kl(points, level) for level in outcome.study.kl_levels}
        for name, points in every.items()
        if name in best
    }
    scores = {name: _scores(point, levels[name]) for name, point in best.items()}
    base = next(iter(best.values()), None)
    if base is not None:
        reward = base.truth("test", "base_reward")
        scores = {"base": [reward, 0.5, *(reward for _ in outcome.study.kl_levels)], **scores}
        ranks = ranked(scores)
        yield {
            **named,
            "arm": "base",
            **({"values": ""} if said else {}),
            "reward": reward,
            "win rate": 0.5,
            **{f"reward at KL {level:g}": f"{reward:.3f}" for level in outcome.study.kl_levels},
            "KL": 0.0,
            "length": base.truth("test", "base_length"),
            RANK: ranks.get("base", NONE),
        }
    for arm in (arm for arm in outcome.arms if arm.world == world):
        point = best.get(arm.name)
        origin: Row = {"values": said.get(arm.name, "")} if said else {}
        if point is None:
            yield {**named, "arm": arm.name, **origin, RANK: str(lost_row(outcome, arm.name, world)["point"])}
            continue
        yield {
            **named,
            "arm": arm.name,
            **origin,
            "reward": point.truth("test", "reward"),
            "win rate": point.truth("test", "win_rate"),
            **{f"reward at KL {level:g}": _shown(place) for level, place in levels[arm.name].items()},
            "KL": point.truth("test", "kl"),
            "length": point.truth("test", "length"),
            RANK: ranks.get(arm.name, NONE),
        }


def _scores(point: PointResults, levels: Mapping[float, AtKL | None]) -> list[float]:
    """Returns the scores an arm is ranked by; NaN for one it lacks."""
    at = [math.nan if place is None else place.reward for place in levels.values()]
    return [point.truth("test", "reward"), point.truth("test", "win_rate"), *at]


def _shown(place: AtKL | None) -> str:
    return NONE if place is None else f"{place.reward:.3f}{place.mark}"


def ranked(scores: Mapping[str, list[float]], higher: Sequence[bool] | None = None) -> dict[str, float]:
    """Returns the mean of each name's ranks over its scores, 1 the best; without the names that lack a finite score.

    ``higher``: whether the higher of each column's scores are the better ones (None: of all).
    """
    whole = {name: row for name, row in scores.items() if row and all(map(math.isfinite, row))}
    if not whole:
        return {}
    means = average_ranks(np.array(list(whole.values()), dtype=np.float64), higher)
    return {name: float(mean) for name, mean in zip(whole, means, strict=True)}
