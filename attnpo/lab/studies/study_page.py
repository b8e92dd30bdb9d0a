"""A study's page: its tables with their columns explained, figures, answers and weights of arms side by side, runs."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from attnpo.display.column_notes import column_notes
from attnpo.display.heatmap import heatmap_html
from attnpo.display.page import (
    Beside,
    Block,
    Fragment,
    Image,
    Links,
    Paragraph,
    Section,
    TableBlock,
    report_page,
    svg_beside,
)
from attnpo.display.tables import Cell
from attnpo.lab.studies.selection import PointResults, best_by_arm, gather, has_truth
from attnpo.lab.studies.study import Outcome, Point
from attnpo.lab.studies.study_figures import study_figures, study_looks
from attnpo.lab.studies.yardstick import yardstick_section
from attnpo.run.for_page import ForPage, read_for_page
from attnpo.run.report import REPORT
from attnpo.system.files import write_whole

FILES = {REPORT: "page", "result.json": "result", "metrics.csv": "metrics", "config.yaml": "config", "log.txt": "log"}
SHOWN = 6  # arms whose weights and answers stand on the page; a page of all would grow with the study


def write_study_report(outcome: Outcome, tables: Sequence[Section]) -> list[str]:
    """Draws the study's figures, writes ``report.html``, and returns the figures' names, those in ``tables`` included.

    The page begins with ``tables``; its figures come after the first of them.
    """
    images = study_figures(outcome)
    known = has_truth(gather(outcome.points))
    yardstick = [] if known else yardstick_section(outcome, study_looks(outcome))
    sections = with_notes(
        outcome,
        [
            *tables[:1],
            *yardstick,
            *([Section("Figures", images)] if images else []),
            *tables[1:],
            *answers_sections(outcome),
            runs_section(outcome),
        ],
    )
    title = outcome.study.title or outcome.study.name
    write_whole(outcome.folder / REPORT, report_page(title, sections))
    drawn = [block.source for section in sections for block in section.blocks if isinstance(block, Image)]
    kept = [path for path in drawn if path.parent == outcome.folder]
    return sorted({path.name for png in kept for path in (png, svg_beside(png)) if path.is_file()})


def runs_section(outcome: Outcome) -> Section:
    """Returns the chosen points, and links to the files of all runs."""
    rows: list[list[Cell]] = [
        [*([world] if world else []), name, point.label, ", ".join(map(str, point.seeds))]
        for world in outcome.worlds
        for name, point in best_by_arm(outcome, world).items()
    ]
    heads = [*(["world"] if outcome.study.worlds else []), "arm", "point", "seeds"]
    best = {
        (world, name, point.values) for world in outcome.worlds for name, point in best_by_arm(outcome, world).items()
    }
    chosen = {
        point.label: links
        for point, _ in outcome.points
        if (point.arm.world, point.arm.name, point.values) in best and (links := _files(outcome, point))
    }
    every = {point.label: links for point, _ in outcome.points if (links := _files(outcome, point))}
    blocks: list[Block] = [TableBlock(heads, rows)]
    blocks += [Links(f"files of the {len(chosen)} runs at chosen points", chosen)] if chosen else []
    blocks += [Links(f"files of all {len(every)} runs", every)] if len(every) > len(chosen) else []
    return Section("Runs", blocks)


def _files(outcome: Outcome, point: Point) -> dict[str, str]:
    """Returns the files that a run has, by the words for them."""
    folder = outcome.folders.get(point)
    if folder is None or not folder.is_relative_to(outcome.folder):
        return {}
    at = folder.relative_to(outcome.folder).as_posix()
    return {words: f"{at}/{name}" for name, words in FILES.items() if (folder / name).is_file()}


def answers_sections(outcome: Outcome) -> Iterator[Section]:
    """Weights of one pair and answers to a few prompts, arm beside arm, of the first seed, where runs kept them."""
    for world in outcome.worlds:
        kept = dict(_kept(outcome, best_by_arm(outcome, world)))
        of = f", {world}" if world else ""
        heat = [replace(row, note=name) for name, one in kept.items() for row in one.heat]
        if heat:
            first = heat[0].pair.pair_id
            same = [row for row in heat if row.pair.pair_id == first]
            told = Paragraph("The same training pair as each arm weighs it.")
            yield Section(f"One pair, arm by arm{of}", [told, Fragment(heatmap_html(same, page=False))])
        beside = list(_beside(kept))
        if beside:
            told = Paragraph(
                "Answers sampled after training, of the first seed, at each arm's chosen point; the base's come first. "
                "A few prompts, to read and not to count."
            )
            yield Section(f"Answers side by side{of}", [told, *beside])


def _kept(outcome: Outcome, best: dict[str, PointResults]) -> Iterator[tuple[str, ForPage]]:
    """Yields what the runs of the first seed have kept at the chosen points: the control's first, then the others in
    order.
    """
    order = sorted(best, key=lambda name: name != outcome.study.control)
    for name in order[:SHOWN]:
        point = best[name]
        folder = outcome.folders.get(Point(point.arm, point.values, point.seeds[0]))
        found = None if folder is None else read_for_page(folder)
        if found is not None:
            yield name, found


def _beside(kept: dict[str, ForPage]) -> Iterator[Beside]:
    """Yields the answers to each prompt that any arm has answered."""
    prompts = dict.fromkeys(answer.prompt for one in kept.values() for answer in one.answers)
    for prompt in prompts:
        mine = {name: [one for one in page.answers if one.prompt == prompt] for name, page in kept.items()}
        base = next(answers[0].base for answers in mine.values() if answers)
        yield Beside(prompt, {"base": base, **{name: found[0].policy for name, found in mine.items() if found}})


def with_notes(outcome: Outcome, sections: Sequence[Section]) -> list[Section]:
    """Returns the sections with notes on the columns of their tables; those that a table has of its own stay.

    Columns of worlds are named as such.
    """
    worlds = {world: f"difference to the control in world {world}" for world in outcome.worlds if world}
    return [
        Section(
            section.title,
            [_noted(block, worlds) if isinstance(block, TableBlock) else block for block in section.blocks],
        )
        for section in sections
    ]


def _noted(table: TableBlock, worlds: dict[str, str]) -> TableBlock:
    known = {name: worlds[name] for name in table.columns if name in worlds}
    return replace(table, notes={**column_notes(table.columns), **known, **table.notes})
