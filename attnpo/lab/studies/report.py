"""A finished study printed and written: tables, page, tracker and study.json."""

import json
import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from attnpo.display.output import markdown, print_sections, tables_json, terminal
from attnpo.display.page import Paragraph, Section, TableBlock
from attnpo.display.tables import table_csv
from attnpo.lab.studies.benchmark_table import benchmark_digits
from attnpo.lab.studies.cost_table import cost_tables
from attnpo.lab.studies.drift_table import drift_table
from attnpo.lab.studies.exports import EXPORTS
from attnpo.lab.studies.footnotes import footnotes, warnings
from attnpo.lab.studies.left_models import MODEL
from attnpo.lab.studies.predictions import predictions_section
from attnpo.lab.studies.ranking import ranking_table, scores_table
from attnpo.lab.studies.selection import PointResults, gather
from attnpo.lab.studies.study import Outcome, Point
from attnpo.lab.studies.study_page import write_study_report
from attnpo.lab.studies.tables import DIGITS, Row, level_tables, main_table, short_table
from attnpo.run.folders import STUDY_FILES, TABLES
from attnpo.run.report import _table, numbers
from attnpo.run.result import RunResult
from attnpo.system.credentials import redact
from attnpo.system.files import Json, changed, is_sealed, parse_json, seal, write_whole
from attnpo.training.loggers import TrackedRun
from attnpo.training.settings import WandbSettings

log = logging.getLogger(__name__)

SCORES = "benchmarks.csv"


def publish_study(settings: WandbSettings | None, values: Mapping[str, Json], outcome: "Outcome") -> None:
    """Sends a study's table, all its points and its figures to a W&B run of the points' group.

    ``values``: what the run shows as its configuration.
    """
    if settings is None:
        return
    import wandb

    columns, rows = main_table(outcome)
    worlds = ["world"] if outcome.study.worlds else []
    points = [
        [*([point.arm.world] if worlds else []), point.arm.name, point.seed, " ".join(point.values)]
        for point, _ in outcome.points
    ]
    every = [dict(numbers(result.to_json())) for _, result in outcome.points]
    names = list(dict.fromkeys(name for one in every for name in one))
    media: dict[str, Any] = {
        "study/table": _table((columns, [[row.get(name) for name in columns] for row in rows])),
        "study/points": _table(
            (
                [*worlds, "arm", "seed", "values", *names],
                [[*point, *(one.get(name) for name in names)] for point, one in zip(points, every, strict=True)],
            )
        ),
    }
    for image in sorted(outcome.folder.glob("*.png")):
        media[f"study/{image.stem}"] = wandb.Image(str(image))
    settings = replace(settings, group=settings.group or outcome.study.name)
    tracker = TrackedRun(settings, outcome.folder, values, job="study")
    status = "failed"
    try:
        tracker.experiment.summary.update({"digest": outcome.digest, "failed": len(outcome.failed)})
        tracker.log_metrics(media)
        status = "success"
    finally:
        tracker.close(status)


# ------------------------------------------------------------------------------------------------ what is written


def arms_section(outcome: Outcome) -> Section:
    """Returns the study's own table, warnings above and footnotes below it."""
    columns, rows = main_table(outcome)
    above = [Paragraph(line, warning=True) for line in warnings(outcome)]
    below = [Paragraph(line, warning=line.startswith("FAILED")) for line in footnotes(outcome)]
    table = TableBlock(columns, rows, digits={**DIGITS, **benchmark_digits(outcome)})
    return Section("Arms at their best points", [*above, table, *below])


def analysis_sections(outcome: Outcome) -> list[Section]:
    """Returns what the study's analyses show of what they have measured; one that cannot says so and
    keeps the tables.
    """
    sections: list[Section] = []
    for name, analysis in outcome.study.analyses.items():
        if not outcome.measured.get(name):
            continue
        try:
            sections += analysis.sections(outcome, outcome.measured[name])
        except Exception as error:
            log.exception("analysis %s cannot be shown", name)
            sections.append(
                Section(name, [Paragraph(f"FAILED analysis {name} cannot be shown: {error}", warning=True)])
            )
    return sections


def show_so_far(outcome: Outcome) -> None:
    """Prints the table of the points that a study has until now."""
    seeds = ", ".join(str(seed) for seed in sorted({point.seed for point, _ in outcome.points}))
    title = f"{outcome.study.name} so far: {len(outcome.points)} points, seeds {seeds}"
    print_sections(terminal(), [Section(title, [short_table(outcome)])])
    sys.stdout.flush()


def finish_study(outcome: Outcome) -> None:
    """Prints the study's tables and writes table.md, tables.json, results.csv, study.json, figures and report.html."""
    folder = outcome.folder
    arms = arms_section(outcome)
    tables = [
        *cost_tables(outcome),
        *ranking_table(outcome),
        *level_tables(outcome),
        *predictions_section(outcome),
        *drift_table(outcome),
    ]
    sections = [arms, *tables, *analysis_sections(outcome)]
    console = terminal()
    title = outcome.study.title or outcome.study.name
    shown = [short_table(outcome) if isinstance(block, TableBlock) else block for block in arms.blocks]
    print_sections(console, [Section(title, shown), *sections[1:]])
    write_whole(folder / "table.md", markdown(sections))
    write_whole(folder / TABLES, tables_json(sections))
    write_whole(folder / "results.csv", all_points(gather(outcome.points)))
    _write_scores(outcome)
    keep_record(outcome, write_study_report(outcome, sections))
    seal(folder, only=STUDY_FILES)
    console.print(f"  {folder}/report.html, table.md, {TABLES}, results.csv; {outcome.seconds:.0f} s", highlight=False)
    for place in sorted([*folder.glob("points/*/best"), *folder.glob(f"{EXPORTS}/*/{MODEL}")]):
        console.print(f"  Hugging Face folder: {place}", highlight=False, markup=False)


def _write_scores(outcome: Outcome) -> None:
    """Writes the scores of benchmarks with their ranks to benchmarks.csv, where there are any."""
    path = outcome.folder / SCORES
    if outcome.benchmarks:
        write_whole(path, table_csv(*scores_table(outcome)))
    else:
        path.unlink(missing_ok=True)


def keep_record(outcome: Outcome, figures: Sequence[str]) -> None:
    """Writes study.json, and removes figures that an earlier command left in the folder.

    ``figures``: the names of those that belong to this one.
    """
    path = outcome.folder / "study.json"
    damaged = is_sealed(outcome.folder) and changed(outcome.folder, only=(path.name,)) is not None
    try:
        earlier = [] if damaged else parse_json(path.read_text(encoding="utf-8"))["figures"]
    except (OSError, ValueError, KeyError, TypeError):  # there is none, or it was cut short
        earlier = []
    for name in earlier:
        if name not in figures:
            (outcome.folder / name).unlink(missing_ok=True)
    runs = [
        {
            **{"world": point.arm.world, "arm": point.arm.name, "layer": point.arm.layer, "values": [*point.values]},
            **{"seed": seed, "folder": place.relative_to(outcome.folder).as_posix()},
        }
        for point in gather(outcome.points)
        for seed in point.seeds
        if (place := outcome.folders.get(Point(point.arm, point.values, seed))) is not None
    ]
    told = {"digest": outcome.digest, "seconds": round(outcome.seconds, 1), "figures": [*figures], "runs": runs}
    record = {**outcome.record, **told}
    write_whole(path, json.dumps(redact(record), indent=1) + "\n")


# ------------------------------------------------------------------------------------------------ every run


def all_points(points: Sequence[PointResults]) -> str:
    """Returns every run of the study as CSV."""
    rows = [
        _run_row(point, seed, result)
        for point in points
        for seed, result in zip(point.seeds, point.results, strict=True)
    ]
    return table_csv(list(dict.fromkeys(name for row in rows for name in row)), rows)


def _run_row(point: PointResults, seed: int, result: RunResult) -> Row:
    pairs = result.split("train").get("pairs")
    return {
        **({"world": point.arm.world} if point.arm.world else {}),
        "arm": point.arm.name,
        "seed": seed,
        **dict(value.split("=", 1) for value in point.values),
        **{
            f"{split}/{name}": value
            for split, scores in (result.truth or {}).items()
            for name, value in scores.numbers.items()
        },
        **{name: value for name, value in result.metrics.items() if name.startswith("val/")},
        **{f"drift/{name}": value for name, value in numbers(result.drift)},
        "pairs": pairs if isinstance(pairs, int) else None,
        "steps": result.steps,
        "seconds": result.seconds["all"],
    }
