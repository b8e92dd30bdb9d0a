"""Prints and saves the results of a finished study: tables, HTML page, study.json and a W&B run."""

import json
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from attnpo.display.column_notes import column_notes
from attnpo.display.heatmap import heatmap_html
from attnpo.display.output import make_console, print_sections, tables_to_json, to_markdown
from attnpo.display.page import (
    Block,
    Image,
    Links,
    Paragraph,
    RawHtml,
    Section,
    SideBySide,
    TableBlock,
    report_page,
    svg_path,
)
from attnpo.display.tables import Cell, table_csv
from attnpo.lab.studies.benchmarks import EXPORTS
from attnpo.lab.studies.figures import assign_arm_styles, study_figures, unweighted_section
from attnpo.lab.studies.notes import footnotes, result_lines, selection_note, study_warnings
from attnpo.lab.studies.outcome import Outcome, PointResults
from attnpo.lab.studies.predictions import predictions_section
from attnpo.lab.studies.records import RECORDS, study_record
from attnpo.lab.studies.scorers import MODEL
from attnpo.lab.studies.study import Point, make_points
from attnpo.lab.studies.tables import (
    DIGITS,
    Row,
    benchmark_digits,
    cost_sections,
    drift_sections,
    equal_kl_sections,
    main_table,
    ranking_sections,
    scores_table,
    short_table,
)
from attnpo.run.folders import STUDY_FILES, TABLES
from attnpo.run.for_page import PageExamples, load_page_examples
from attnpo.run.report import REPORT, flat_numbers, make_wandb_table
from attnpo.run.result import RunResult
from attnpo.system.credentials import redact
from attnpo.system.files import Json, describe_change, has_checksums, parse_json, write_atomically, write_checksums
from attnpo.training.loggers import WandbRunLogger
from attnpo.training.settings import WandbSettings

log = logging.getLogger(__name__)

SCORES = "benchmarks.csv"


def publish_study(settings: WandbSettings | None, values: Mapping[str, Json], outcome: "Outcome") -> None:
    """Logs a study's main table, points and figures to a W&B run, in the same group as its points.

    ``values``: config to show for the W&B run.
    """
    if settings is None:
        return
    import wandb

    every = []
    for point, result in outcome.points:
        row: Row = {"world": point.arm.world} if outcome.study.worlds else {}
        row |= {"arm": point.arm.name, "seed": point.seed, "values": " ".join(point.values)}
        every.append({**dict.fromkeys(row), **dict(flat_numbers(result.to_json())), **row})
    tables: dict[str, tuple[list[str], Sequence[Mapping[str, object]]]] = {
        "table": main_table(outcome),
        "points": (list(dict.fromkeys(name for one in every for name in one)), every),
    }
    media: dict[str, Any] = {
        f"study/{name}": make_wandb_table(columns, [[row.get(column) for column in columns] for row in rows])
        for name, (columns, rows) in tables.items()
    }
    media |= {f"study/{image.stem}": wandb.Image(str(image)) for image in sorted(outcome.folder.glob("*.png"))}
    settings = replace(settings, group=settings.group or outcome.study.name)
    tracker = WandbRunLogger(settings, outcome.folder, values, job="study")
    status = "failed"
    try:
        tracker.experiment.summary.update({"digest": outcome.digest, "failed": len(outcome.failed)})
        tracker.log_metrics(media)
        status = "success"
    finally:
        tracker.close(status)


# ------------------------------------------------------------------------------------------------ sections and files


def arms_section(outcome: Outcome) -> Section:
    """Returns the main table, with warnings above and footnotes below it."""
    columns, rows = main_table(outcome)
    above = [Paragraph(line, warning=True) for line in study_warnings(outcome)]
    below = [Paragraph(line, warning=line.startswith("FAILED")) for line in footnotes(outcome)]
    table = TableBlock(columns, rows, digits={**DIGITS, **benchmark_digits(outcome)})
    return Section("Arms at their best points", [*above, table, *below])


def analysis_sections(outcome: Outcome) -> list[Section]:
    """Returns the report sections of the study's analyses; failures are reported as warnings."""
    sections: list[Section] = []
    for name, analysis in outcome.study.analyses.items():
        if not outcome.measured.get(name):
            continue
        try:
            sections += analysis.sections(outcome, outcome.measured[name])
        except Exception as error:
            log.exception("the report of analysis %s failed", name)
            sections.append(Section(name, [Paragraph(f"FAILED report of analysis {name}: {error}", warning=True)]))
    return sections


def print_interim_table(outcome: Outcome) -> None:
    """Prints the main table for the points finished so far."""
    seeds = sorted({point.seed for point, _ in outcome.points})
    over = {point for point, _ in [*outcome.points, *outcome.failed]}
    planned = make_points(outcome.study, outcome.arms, seeds)
    title = f"{outcome.study.name} so far: {len(outcome.points)} points, seeds {', '.join(map(str, seeds))}"
    if not over.issuperset(planned):
        early = f"{len(over.intersection(planned))} of {len(planned)} points: the arms cannot be compared yet"
        print_sections(make_console(), [Section(title, [Paragraph(early)])])
    else:
        print_sections(make_console(), [Section(title, [short_table(outcome)])])
    sys.stdout.flush()


def finish_study(outcome: Outcome) -> None:
    """Prints the study's tables and writes table.md, tables.json, results.csv, study.json, figures and report.html."""
    folder = outcome.folder
    arms = arms_section(outcome)
    tables = [
        *cost_sections(outcome),
        *ranking_sections(outcome),
        *equal_kl_sections(outcome),
        *predictions_section(outcome),
        *drift_sections(outcome),
    ]
    sections = [arms, *tables, *analysis_sections(outcome)]
    console = make_console()
    title = outcome.study.title or outcome.study.name
    result = [Paragraph(line) for line in result_lines(outcome)]
    blocks = [block for section in sections for block in section.blocks]
    warned = [block for block in blocks if isinstance(block, Paragraph) and block.warning]
    shown: list[Block] = [*result, *warned, short_table(outcome), Paragraph(selection_note(outcome))]
    print_sections(console, [Section(title, shown)])
    write_atomically(folder / "table.md", to_markdown(sections))
    write_atomically(folder / TABLES, tables_to_json(sections))
    write_atomically(folder / "results.csv", points_csv(outcome.results))
    if outcome.has_truth:
        write_atomically(folder / RECORDS, json.dumps(study_record(outcome), indent=1) + "\n")
    if outcome.benchmarks:
        write_atomically(folder / SCORES, table_csv(*scores_table(outcome)))
    else:
        (folder / SCORES).unlink(missing_ok=True)
    write_study_record(outcome, write_study_report(outcome, [Section("Result", result), *sections]))
    write_checksums(folder, only=STUDY_FILES)
    console.print(
        f"  all tables: {folder}/report.html, table.md, {TABLES}, results.csv; {outcome.seconds:.0f} s", highlight=False
    )
    for place in sorted([*folder.glob("points/*/best"), *folder.glob(f"{EXPORTS}/*/{MODEL}")]):
        console.print(f"  Hugging Face folder: {place}", highlight=False, markup=False)


def write_study_record(outcome: Outcome, figures: Sequence[str]) -> None:
    """Writes study.json and deletes the figures of earlier commands that are not in ``figures`` (file names)."""
    path = outcome.folder / "study.json"
    damaged = has_checksums(outcome.folder) and describe_change(outcome.folder, only=(path.name,)) is not None
    try:
        earlier = [] if damaged else parse_json(path.read_text(encoding="utf-8"))["figures"]
    except (OSError, ValueError, KeyError, TypeError):  # missing or truncated
        earlier = []
    for name in earlier:
        if name not in figures:
            (outcome.folder / name).unlink(missing_ok=True)
    runs = [
        {
            **{"world": point.arm.world, "arm": point.arm.name, "layer": point.arm.layer, "values": [*point.values]},
            **{"seed": seed, "folder": place.relative_to(outcome.folder).as_posix()},
        }
        for point in outcome.results
        for seed in point.seeds
        if (place := outcome.folders.get(Point(point.arm, point.values, seed))) is not None
    ]
    told = {"digest": outcome.digest, "seconds": round(outcome.seconds, 1), "figures": [*figures], "runs": runs}
    record = {**outcome.record, **told}
    write_atomically(path, json.dumps(redact(record), indent=1) + "\n")


# ------------------------------------------------------------------------------------------------ every run


def points_csv(points: Sequence[PointResults]) -> str:
    """Returns all runs of the study as CSV."""
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
        **{f"drift/{name}": value for name, value in flat_numbers(result.drift)},
        "pairs": pairs if isinstance(pairs, int) else None,
        "steps": result.steps,
        "seconds": result.seconds["all"],
    }


FILES = {REPORT: "page", "result.json": "result", "metrics.csv": "metrics", "config.yaml": "config", "log.txt": "log"}
SHOWN = 6  # maximum number of arms whose weights and answers are on the page, to limit its size


def write_study_report(outcome: Outcome, tables: Sequence[Section]) -> list[str]:
    """Draws the study's figures and writes ``report.html``; returns the file names of all figures.

    The page shows the result and the main table (the first two of ``tables``), then the figures, then the other tables.
    The returned file names include figures within ``tables``.
    """
    images = study_figures(outcome)
    known = outcome.has_truth
    compared = [] if known else unweighted_section(outcome, assign_arm_styles(outcome))
    figures = [Section("Figures", images)] if images else []
    below = [*tables[2:], *answers_sections(outcome), runs_section(outcome)]
    sections = add_column_notes(outcome, [*tables[:2], *compared, *figures, *below])
    title = outcome.study.title or outcome.study.name
    write_atomically(outcome.folder / REPORT, report_page(title, sections))
    drawn = [block.source for section in sections for block in section.blocks if isinstance(block, Image)]
    kept = [path for path in drawn if path.parent == outcome.folder]
    return sorted({path.name for png in kept for path in (png, svg_path(png)) if path.is_file()})


def runs_section(outcome: Outcome) -> Section:
    """Returns a section listing the best points, with links to the files of all runs."""
    best = [point for world in outcome.worlds for point in outcome.best_points(world).values()]
    rows: list[list[Cell]] = [
        [*filter(None, [point.arm.world]), point.arm.name, point.label, ", ".join(map(str, point.seeds))]
        for point in best
    ]
    heads = [*(["world"] if outcome.study.worlds else []), "arm", "point", "seeds"]
    every = {point: links for point, _ in outcome.points if (links := _file_links(outcome, point))}
    places = {(point.arm.label, point.values) for point in best}
    chosen = {point.label: links for point, links in every.items() if (point.arm.label, point.values) in places}
    blocks: list[Block] = [TableBlock(heads, rows)]
    blocks += [Links(f"files of the {len(chosen)} runs at best points", chosen)] if chosen else []
    if len(every) > len(chosen):
        blocks.append(Links(f"files of all {len(every)} runs", {point.label: one for point, one in every.items()}))
    return Section("Runs", blocks)


def _file_links(outcome: Outcome, point: Point) -> dict[str, str]:
    folder = outcome.folders.get(point)
    if folder is None or not folder.is_relative_to(outcome.folder):
        return {}
    at = folder.relative_to(outcome.folder).as_posix()
    return {words: f"{at}/{name}" for name, words in FILES.items() if (folder / name).is_file()}


def answers_sections(outcome: Outcome) -> Iterator[Section]:
    """Yields sections that compare the arms' weights on one pair and a few of their responses, for the first seed."""
    for world in outcome.worlds:
        best = outcome.best_points(world)
        kept: dict[str, PageExamples] = {}  # by arm, the control first
        for name in sorted(best, key=lambda name: name != outcome.study.control)[:SHOWN]:
            folder = outcome.folders.get(Point(best[name].arm, best[name].values, best[name].seeds[0]))
            if folder is not None and (found := load_page_examples(folder)) is not None:
                kept[name] = found
        of = f", {world}" if world else ""
        heat = [replace(row, note=name) for name, one in kept.items() for row in one.heat]
        if heat:
            first = heat[0].pair.pair_id
            same = [row for row in heat if row.pair.pair_id == first]
            told = Paragraph("The same training pair with each arm's weights.")
            yield Section(f"One pair, arm by arm{of}", [told, RawHtml(heatmap_html(same, page=False))])
        beside = []
        for prompt in dict.fromkeys(answer.prompt for one in kept.values() for answer in one.answers):
            mine = {name: [one for one in page.answers if one.prompt == prompt] for name, page in kept.items()}
            base = next(found[0].base for found in mine.values() if found)
            beside.append(SideBySide(prompt, {"base": base} | {name: of[0].policy for name, of in mine.items() if of}))
        if beside:
            told = Paragraph(
                "Responses sampled after training, from the first seed at each arm's best point; the base's responses "
                "come first. These few prompts are only examples, too few to draw conclusions from."
            )
            yield Section(f"Responses side by side{of}", [told, *beside])


def add_column_notes(outcome: Outcome, sections: Sequence[Section]) -> list[Section]:
    """Adds notes on table columns, including those named after worlds, to all sections; existing notes are kept."""
    worlds = {world: f"difference from the control in world {world}" for world in outcome.worlds if world}

    def with_notes(block: Block) -> Block:
        if not isinstance(block, TableBlock):
            return block
        known = {name: note for name, note in worlds.items() if name in block.columns}
        return replace(block, notes={**column_notes(block.columns), **known, **block.notes})

    return [Section(section.title, [*map(with_notes, section.blocks)]) for section in sections]
