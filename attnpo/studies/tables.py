"""A finished study as a table and figures: one row per arm at its best point, chosen on validation prompts."""

import json
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float
from rich.console import Console

from attnpo.analysis.tables import Cell, table_csv, table_markdown, table_rich
from attnpo.studies.grid import Arm, Point
from attnpo.studies.intervals import Interval, hierarchical_bootstrap, paired_difference
from attnpo.studies.runner import Outcome, last_line

log = logging.getLogger(__name__)

Result = dict[str, Any]


@dataclass(frozen=True)
class Spot:
    """All results of one arm at one grid point, one per seed in rising order."""

    arm: Arm
    values: tuple[str, ...]
    seeds: tuple[int, ...]
    results: tuple[Result, ...]

    def truth(self, split: str, name: str) -> float:
        """The mean over seeds of a truth score."""
        return float(np.mean([result["truth"]["scores"][split][name] for result in self.results]))

    def rewards(self, split: str) -> Float[np.ndarray, "seeds prompts"]:
        """True rewards, a row per seed and a column per held-out prompt."""
        return np.array([result["truth"]["scores"][split]["rewards"] for result in self.results])

    def metric(self, name: str) -> float:
        """The mean over seeds of a last logged metric; NaN where it is missing."""
        return float(np.mean([result["metrics"].get(name, math.nan) for result in self.results]))

    def input(self, name: str, split: str = "train") -> float:
        """The mean over seeds of a statistic of the training examples."""
        return float(np.mean([result["inputs"][split][name] for result in self.results]))

    @property
    def label(self) -> str:
        """The grid values, as in "lr 5e-05 beta 0.1"."""
        pairs = [value.split("=", 1) for value in self.values]
        return " ".join(f"{key.rpartition('.')[-1]} {value}" for key, value in pairs)


def gather(points: Sequence[tuple[Point, Result]]) -> list[Spot]:
    """The results by arm and grid point, in the order the study lists them."""
    groups: dict[tuple[str, tuple[str, ...]], list[tuple[Point, Result]]] = {}
    for point, result in points:
        groups.setdefault((point.arm.name, point.values), []).append((point, result))
    out = []
    for members in groups.values():
        members.sort(key=lambda item: item[0].seed)
        first = members[0][0]
        seeds = tuple(point.seed for point, _ in members)
        out.append(Spot(first.arm, first.values, seeds, tuple(result for _, result in members)))
    return out


def has_truth(spots: Sequence[Spot]) -> bool:
    """Whether every result carries scores against a known truth."""
    return all(result.get("truth") for spot in spots for result in spot.results)


def best_point(spots: Sequence[Spot], kl_limit: float) -> Spot:
    """The point that stands for an arm, chosen on validation data alone.

    With a known truth: the highest validation reward among points with validation KL up to ``kl_limit`` (if none, the
    one with the smallest KL). Otherwise the highest validation accuracy of the rewards.
    """
    most = max(len(spot.results) for spot in spots)
    whole = [spot for spot in spots if len(spot.results) == most]
    if not has_truth(whole):
        return max(whole, key=lambda spot: spot.metric("val/rewards/accuracies"))
    within = [spot for spot in whole if spot.truth("validation", "kl") <= kl_limit]
    if not within:
        return min(whole, key=lambda spot: spot.truth("validation", "kl"))
    return max(within, key=lambda spot: spot.truth("validation", "reward"))


def best_by_arm(outcome: Outcome) -> dict[str, Spot]:
    """The best point of every arm that has results, in the study's order."""
    spots = gather(outcome.points)
    out = {}
    for arm in outcome.arms:
        mine = [spot for spot in spots if spot.arm.name == arm.name]
        if mine:
            out[arm.name] = best_point(mine, outcome.study.kl_limit)
    return out


def against(one: Spot, other: Spot) -> Interval | None:
    """The difference of two arms' test rewards, paired by seed and prompt; None when they share no seed."""
    shared = [seed for seed in one.seeds if seed in other.seeds]
    if not shared:
        return None
    rows = [one.rewards("test")[[one.seeds.index(seed) for seed in shared]]]
    rows.append(other.rewards("test")[[other.seeds.index(seed) for seed in shared]])
    return paired_difference(rows[0], rows[1])


def truth_table(outcome: Outcome) -> tuple[list[str], list[dict[str, Cell]]]:
    """Columns and rows for settings with a known truth: the base, then every arm at its best point, on test prompts."""
    best = best_by_arm(outcome)
    control = best.get(outcome.study.control)
    first = next(iter(best.values()))
    rows: list[dict[str, Cell]] = [base_row(first)]
    for name, spot in best.items():
        versus = None if control is None or spot is control else against(spot, control)
        rows.append(
            {
                "arm": name,
                "point": spot.label + over_limit(spot, outcome),
                "reward": spot.truth("test", "reward"),
                "95 %": interval_text(hierarchical_bootstrap(spot.rewards("test"))),
                f"minus {outcome.study.control}": ""
                if versus is None
                else f"{versus.mean:+.3f} {interval_text(versus)}",
                "win rate": spot.truth("test", "win_rate"),
                "KL": spot.truth("test", "kl"),
                "length": spot.truth("test", "length"),
                "broken": spot.truth("test", "broken"),
                "eff. weights/n": spot.input("effective_share"),
                "coverage": spot.input("coverage"),
                "s/run": float(np.mean([result["seconds"]["all"] for result in spot.results])),
            }
        )
    return list(rows[-1]), rows


def over_limit(spot: Spot, outcome: Outcome) -> str:
    """A mark on an arm none of whose points kept the KL limit; empty where there was nothing to choose."""
    chosen = len(outcome.study.grid.overrides()) > 1
    return " (above the KL limit)" if chosen and spot.truth("validation", "kl") > outcome.study.kl_limit else ""


def base_row(spot: Spot) -> dict[str, Cell]:
    """The row of the base model: its samples on the same test prompts."""
    return {
        "arm": "base",
        "point": "",
        "reward": spot.truth("test", "base_reward"),
        "win rate": 0.5,
        "KL": 0.0,
        "length": spot.truth("test", "base_length"),
        "broken": spot.truth("test", "base_broken"),
    }


def metric_table(outcome: Outcome) -> tuple[list[str], list[dict[str, Cell]]]:
    """Columns and rows for settings without a truth: validation metrics of every arm's best point."""
    rows: list[dict[str, Cell]] = []
    for name, spot in best_by_arm(outcome).items():
        rows.append(
            {
                "arm": name,
                "point": spot.label,
                "val loss": spot.metric("val/loss"),
                "val accuracy": spot.metric("val/rewards/accuracies"),
                "val margin": spot.metric("val/rewards/margins"),
                "eff. weights/n": spot.input("effective_share"),
                "coverage": spot.input("coverage"),
                "s/run": float(np.mean([result["seconds"]["all"] for result in spot.results])),
            }
        )
    return list(rows[0]), rows


def interval_text(interval: Interval) -> str:
    """Both ends, or a remark where there is none."""
    return "[no interval]" if math.isnan(interval.low) else f"[{interval.low:.3f}, {interval.high:.3f}]"


DIGITS = {"eff. weights/n": 3, "KL": 2, "length": 1, "coverage": 4, "s/run": 1}


def footnotes(outcome: Outcome) -> list[str]:
    """What a reader must know under the table: seeds, choice of points, what was fixed before, what failed."""
    grid = outcome.study.grid
    seeds = sorted({point.seed for point, _ in outcome.points})
    lines = [
        f"seeds {', '.join(map(str, seeds))}; {len(outcome.points)} runs, each scored after its last step",
        how_chosen(outcome),
        f"grid, the same for every arm: lr {list(grid.lr) or 'as set'}, beta {list(grid.beta) or 'as set'}",
        f"digest of world, grid and arms, fixed before the runs: {outcome.digest}",
    ]
    if len(seeds) == 1:
        lines.append("one seed: the intervals hold for the choice of prompts only, not for the noise of training")
    judged = {point.seed: r["inputs"]["judge"] for point, r in outcome.points if "judge" in r["inputs"]}
    for seed, judge in sorted(judged.items()):
        lines.append(
            f"judge, seed {seed}, on the study's pairs: {100 * judge['pair_accuracy']:.1f} % agree with the labels "
            f"(both orders averaged), {100 * judge['agreement']:.1f} % of single rounds, orders agree in "
            f"{100 * judge['consistency']:.1f} %, {100 * judge['other_tokens']:.1f} % of verdicts are neither label"
        )
    lines += [f"FAILED {point.label}: {last_line(error)}" for point, error in outcome.failed]
    return lines


def how_chosen(outcome: Outcome) -> str:
    """How the shown point of an arm was chosen and on what its numbers stand."""
    one = len(outcome.study.grid.overrides()) == 1
    if not has_truth(gather(outcome.points)):
        chosen = "one point per arm" if one else "points chosen by validation accuracy"
        return f"{chosen}; the numbers are of the same validation pairs, so slightly optimistic"
    if one:
        return "one point per arm, nothing tuned; reward and intervals on held-out test prompts"
    return (
        f"points chosen on validation prompts with KL up to {outcome.study.kl_limit:g}; reward and intervals on other, "
        "held-out test prompts"
    )


def finish_study(outcome: Outcome) -> None:
    """Nothing; prints the study's table and writes table.md, results.csv, study.json and the figures."""
    from attnpo.studies.pages import write_study_report

    spots = gather(outcome.points)
    columns, rows = truth_table(outcome) if has_truth(spots) else metric_table(outcome)
    notes = footnotes(outcome)
    console = Console(width=None if Console().is_terminal else 190)
    console.print(table_rich(columns, rows, digits=DIGITS, title=outcome.study.title or outcome.study.name))
    for line in notes:
        console.print(f"  {line}", highlight=False, markup=False)
    folder = outcome.folder
    text = table_markdown(columns, rows, digits=DIGITS)
    (folder / "table.md").write_text(text + "\n\n" + "\n".join(f"- {line}" for line in notes) + "\n", encoding="utf-8")
    (folder / "results.csv").write_text(all_points(spots), encoding="utf-8")
    (folder / "study.json").write_text(
        json.dumps({**outcome.record, "digest": outcome.digest, "seconds": round(outcome.seconds, 1)}, indent=1) + "\n",
        encoding="utf-8",
    )
    write_study_report(outcome, spots, columns, rows, notes)
    console.print(f"  {folder}/report.html, table.md, results.csv; {outcome.seconds:.0f} s", highlight=False)
    for place in sorted(folder.glob("points/*/best")):
        console.print(f"  Hugging Face folder: {place}", highlight=False, markup=False)


def all_points(spots: Sequence[Spot]) -> str:
    """Every run of the study as CSV."""
    rows: list[dict[str, Cell]] = []
    for spot in spots:
        for seed, result in zip(spot.seeds, spot.results, strict=True):
            row: dict[str, Cell] = {"arm": spot.arm.name, "seed": seed}
            row.update({key: value for key, value in (item.split("=", 1) for item in spot.values)})
            for split, scores in (result["truth"] or {"scores": {}})["scores"].items():
                row.update({f"{split}/{name}": value for name, value in scores.items() if name != "rewards"})
            row.update({name: value for name, value in result["metrics"].items() if name.startswith("val/")})
            row["seconds"] = result["seconds"]["all"]
            rows.append(row)
    columns = list(dict.fromkeys(name for row in rows for name in row))
    return table_csv(columns, rows)
