"""A finished study as a table with a row for every arm at its best point, a lost arm's too; printed and written."""

import json
import logging
import math
from collections.abc import Iterator, Sequence

from rich.console import Console

from attnpo.analysis.page import Paragraph, Section, TableBlock
from attnpo.analysis.tables import Cell, table_csv
from attnpo.files import changed, is_sealed, seal, write_whole
from attnpo.studies.folders import STUDY_FILES
from attnpo.studies.footnotes import footnotes, warnings
from attnpo.studies.runner import Outcome
from attnpo.studies.sections import markdown, print_sections
from attnpo.studies.spots import (
    Spot,
    against,
    best_by_arm,
    difference_text,
    interval_text,
    seeds_mark,
)
from attnpo.studies.spots import gather as gather
from attnpo.studies.spots import has_truth as has_truth

log = logging.getLogger(__name__)

TOKENS = {"chosen tokens": "chosen", "rejected tokens": "rejected"}
DIGITS = {
    **{"sum": 3, "eff. weights/n": 3, "KL": 2, "length": 1, "coverage": 4, "s/run": 1, "pairs": 1, "steps": 1},
    **dict.fromkeys(TOKENS, 1),
}
Row = dict[str, Cell]


def main_table(outcome: Outcome) -> tuple[list[str], list[Row]]:
    """Columns and rows of the table that the setting allows: against the truth, or of validation metrics."""
    return truth_table(outcome) if has_truth(gather(outcome.points)) else metric_table(outcome)


def truth_table(outcome: Outcome) -> tuple[list[str], list[Row]]:
    """Columns and rows for settings with a known truth: the base, then every arm at its best point, on test prompts.

    World by world where there are several.
    """
    uneven = uneven_training(outcome)
    rows = [row for world in outcome.worlds for row in _world_rows(outcome, world, uneven)]
    return columns_of(rows), rows


def columns_of(rows: Sequence[Row]) -> list[str]:
    """The heads of the fullest row, in its order; others that only some rows have come behind."""
    fullest = max(rows, key=len)
    return list(dict.fromkeys(name for row in (fullest, *rows) for name in row))


def uneven_training(outcome: Outcome) -> list[str]:
    """Of "pairs" and "steps" those in which the arms of any world differ."""
    every = [[trained_on(spot) for spot in best_by_arm(outcome, world).values()] for world in outcome.worlds]
    return [
        name
        for name in ("pairs", "steps")
        if any(len({row[name] for row in rows if not math.isnan(row[name])}) > 1 for rows in every)
    ]


def trained_on(spot: Spot) -> dict[str, int | float]:
    """How many pairs and optimiser steps an arm's runs had, means over seeds, whole where they are."""
    found = {"pairs": spot.input("pairs"), "steps": spot.steps}
    return {name: int(value) if value.is_integer() else value for name, value in found.items()}


def _inputs_of(spot: Spot, uneven: Sequence[str]) -> Row:
    """The last columns of every table: what an arm's runs stood on and took."""
    mass = spot.input("mass")
    return {
        **{name: value for name, value in trained_on(spot).items() if name in uneven},
        **({} if math.isnan(mass) else {"sum": mass}),
        "eff. weights/n": spot.input("effective_share"),
        "coverage": spot.input("coverage"),
        "s/run": spot.seconds,
    }


def _world_rows(outcome: Outcome, world: str, uneven: Sequence[str]) -> Iterator[Row]:
    best = best_by_arm(outcome, world)
    control = best.get(outcome.study.control or "")
    named: Row = {"world": world} if world else {}
    said = origins(outcome)
    if best:
        yield {**named, **base_row(next(iter(best.values())))}
    for arm in (arm for arm in outcome.arms if arm.world == world):
        spot = best.get(arm.name)
        if spot is None:
            yield {**named, **lost_row(outcome, arm.name, world)}
            continue
        versus = None if control is None or spot is control else against(spot, control)
        yield {
            **named,
            "arm": arm.name,
            "point": spot.label + over_limit(spot, outcome) + seeds_mark(len(spot.seeds), outcome),
            **({"values": said[arm.name]} if said else {}),
            "reward": spot.truth("test", "reward"),
            "95 %": interval_text(spot.interval),
            **({} if outcome.study.control is None else {f"minus {outcome.study.control}": difference_text(versus)}),
            "win rate": spot.truth("test", "win_rate"),
            "KL": spot.truth("test", "kl"),
            "length": spot.truth("test", "length"),
            "broken": spot.truth("test", "broken"),
            **_inputs_of(spot, uneven),
        }


def origins(outcome: Outcome) -> dict[str, str]:
    """Where the grid values of every arm come from, by arm; nothing where no grid of the study says it."""
    found = {arm.name: (arm.grid or outcome.study.grid).origin for arm in outcome.arms}
    return found if any(found.values()) else {}


def lost_row(outcome: Outcome, arm: str, world: str) -> Row:
    """The row of an arm without results: it has failed, or was not run."""
    errors = [error for point, error in outcome.failed if (point.arm.name, point.arm.world) == (arm, world)]
    ran = [error for error in errors if not error.startswith("not run")]
    return {"arm": arm, "point": f"FAILED, all {len(errors)} points" if ran else "NOT RUN"}


def over_limit(spot: Spot, outcome: Outcome) -> str:
    """A mark on an arm none of whose points kept the KL limit; empty where there was nothing to choose."""
    chosen = len((spot.arm.grid or outcome.study.grid).overrides()) > 1
    return " (above the KL limit)" if chosen and spot.truth("validation", "kl") > outcome.study.kl_limit else ""


def base_row(spot: Spot) -> Row:
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


def metric_table(outcome: Outcome) -> tuple[list[str], list[Row]]:
    """Columns and rows for settings without a truth: validation metrics of every arm's best point."""
    uneven, said, rows = uneven_training(outcome), origins(outcome), []
    for arm in outcome.arms:
        named: Row = {"world": arm.world} if arm.world else {}
        spot = best_by_arm(outcome, arm.world).get(arm.name)
        if spot is None:
            rows.append({**named, **lost_row(outcome, arm.name, arm.world)})
            continue
        rows.append(
            {
                **named,
                "arm": arm.name,
                "point": spot.label + seeds_mark(len(spot.seeds), outcome),
                **({"values": said[arm.name]} if said else {}),
                "val loss": spot.metric("val/loss"),
                "val accuracy": spot.metric("val/rewards/accuracies"),
                "val margin": spot.metric("val/rewards/margins"),
                **{name: spot.tokens(side) for name, side in TOKENS.items()},
                **_inputs_of(spot, uneven),
            }
        )
    return columns_of(rows), rows


# ------------------------------------------------------------------------------------------------ what is written


def arms_section(outcome: Outcome) -> Section:
    """The study's own table, warnings above and footnotes below it."""
    columns, rows = main_table(outcome)
    above = [Paragraph(line, warning=True) for line in warnings(outcome)]
    below = [Paragraph(line, warning=line.startswith("FAILED")) for line in footnotes(outcome)]
    table = TableBlock(columns, rows, digits=DIGITS)
    return Section("Arms at their best points", [*above, table, *below])


def analysis_sections(outcome: Outcome) -> list[Section]:
    """What the study's analyses show of what they have measured; one that cannot says so and keeps the tables."""
    found: list[Section] = []
    for name, analysis in outcome.study.analyses.items():
        if not outcome.measured.get(name):
            continue
        try:
            found += analysis.sections(outcome, outcome.measured[name])
        except Exception as error:
            log.exception("analysis %s cannot be shown", name)
            found.append(Section(name, [Paragraph(f"FAILED analysis {name} cannot be shown: {error}", warning=True)]))
    return found


def finish_study(outcome: Outcome) -> None:
    """Nothing; prints the study's tables and writes table.md, results.csv, study.json, the figures and report.html."""
    from attnpo.studies.levels import level_tables
    from attnpo.studies.pages import write_study_report
    from attnpo.studies.ranking import ranking_table

    folder = outcome.folder
    sections = [arms_section(outcome), *ranking_table(outcome), *level_tables(outcome), *analysis_sections(outcome)]
    console = Console(width=None if Console().is_terminal else 190)
    print_sections(console, outcome.study.title or outcome.study.name, sections)
    write_whole(folder / "table.md", "\n\n".join(markdown(sections)) + "\n")
    write_whole(folder / "results.csv", all_points(gather(outcome.points)))
    keep_record(outcome, write_study_report(outcome, sections))
    seal(folder, only=STUDY_FILES)
    console.print(f"  {folder}/report.html, table.md, results.csv; {outcome.seconds:.0f} s", highlight=False)
    for place in sorted(folder.glob("points/*/best")):
        console.print(f"  Hugging Face folder: {place}", highlight=False, markup=False)


def keep_record(outcome: Outcome, figures: Sequence[str]) -> None:
    """Nothing; writes study.json, and removes the figures of an earlier command in the folder that are none of these.

    ``figures``: the names of those that belong to this one.
    """
    path = outcome.folder / "study.json"
    damaged = is_sealed(outcome.folder) and changed(outcome.folder, only=(path.name,)) is not None
    try:
        earlier = [] if damaged else json.loads(path.read_text(encoding="utf-8"))["figures"]
    except (OSError, ValueError, KeyError, TypeError):  # there is none, or it was cut short
        earlier = []
    for name in earlier:
        if name not in figures:
            (outcome.folder / name).unlink(missing_ok=True)
    record = {**outcome.record, "digest": outcome.digest, "seconds": round(outcome.seconds, 1), "figures": [*figures]}
    write_whole(path, json.dumps(record, indent=1) + "\n")


# ------------------------------------------------------------------------------------------------ every run


def all_points(spots: Sequence[Spot]) -> str:
    """Every run of the study as CSV."""
    rows: list[Row] = []
    for spot in spots:
        for seed, result in zip(spot.seeds, spot.results, strict=True):
            row: Row = {**({"world": spot.arm.world} if spot.arm.world else {}), "arm": spot.arm.name, "seed": seed}
            row.update({key: value for key, value in (item.split("=", 1) for item in spot.values)})
            for split, scores in (result["truth"] or {"scores": {}})["scores"].items():
                row.update({f"{split}/{name}": value for name, value in scores.items() if name != "rewards"})
            row.update({name: value for name, value in result["metrics"].items() if name.startswith("val/")})
            row["pairs"], row["steps"] = result["inputs"]["train"].get("pairs"), result["steps"]
            row["seconds"] = result["seconds"]["all"]
            rows.append(row)
    columns = list(dict.fromkeys(name for row in rows for name in row))
    return table_csv(columns, rows)
