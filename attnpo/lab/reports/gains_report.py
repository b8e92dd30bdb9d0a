"""Can it be known before training whether judge weights will gain over uniform weights: tables, figure, an answer."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from attnpo.display.page import Image, Section, TableBlock
from attnpo.display.printed import KeyedTable
from attnpo.display.scatter_figure import ScatterPanel, scatter_figure
from attnpo.display.tables import Cell
from attnpo.evaluation.intervals import Interval, rank_correlation
from attnpo.lab.analysis.prediction import WORLDS_TO_FIT, Case, HeldOut, held_out, over_worlds, within_groups
from attnpo.lab.reports.finished import column_names, read_study
from attnpo.lab.reports.gain_cases import FILE, read_cases, write_cases
from attnpo.lab.reports.gains import AGREEMENT, EFFECTIVE, HIDDEN, KNOWN, LENGTH, SHARE, Harvest, collect
from attnpo.lab.reports.output import publish
from attnpo.lab.reports.report_config import GAINS
from attnpo.run.folders import make_folder
from attnpo.schema import UserError

SAME = 0.95  # numbers whose ranks agree so much are not drawn beside each other


def gains_report(folders: Sequence[Path], level: float, output: Path, mark: str) -> None:
    """Prints which numbers known before training go with the gain at KL ``level``; writes tables, figure and cases.

    ``folders``: of finished studies, or files of cases that another such report wrote. UserError where they hold no
    judge weights beside uniform ones whose paths reach the level.
    """
    studies = {folder: read_study(folder) for folder in folders if not folder.is_file()}
    names = dict(zip(studies, column_names([study.path for study in studies.values()]), strict=True))
    notes, harvest = [], Harvest()
    for path in folders:
        if path not in studies:
            read_cases(path, level, harvest)
            continue
        study, name = studies[path], names[path]
        if not study.finished:
            raise UserError(f"{study.path}: expected a finished study, {study.notes[0]}")
        notes += [f"{name}: {line}" for line in study.notes if line.startswith("left out")]
        notes += collect(study, name, level, harvest)
    cases = list(harvest.cases.values())
    if not cases:
        why = "; ".join(f"{reason}: {count}" for reason, count in harvest.lost.items())
        raise UserError(
            "report gains: expected studies with an arm of judge weights and one of uniform weights of the same plain "
            f"TwDPO, both reaching KL {level:g}, found none{f' ({why})' if why else ''}; try another level= or folder"
        )
    told = {name: Told.of(cases, name) for name in (*KNOWN, *HIDDEN)}
    best = best_two(told, cases)
    tables = [worlds_table(cases), known_table(told, cases, best), hidden_table(told)]
    notes = [*verdict(told, len({case.world for case in cases})), *explained(harvest, level), *notes]
    title = f"Known before training against the gain at KL {level:g}"
    make_folder(output)
    write_cases(output / FILE, level, harvest)
    sections = [Section("Every case", [case_table(cases)])]
    if best:
        panels = [ScatterPanel(name, points_of(cases, name)) for name in best]
        path = scatter_figure(panels, output / "gains.png", ylabel=f"reward less uniform's, KL {level:g}", title=title)
        caption = "gain of judge weights over uniform weights against the two that go with it most; a point per case"
        sections.insert(0, Section("Figure", [Image(path, caption)]))
    publish(title, tables, notes, output, GAINS, mark, sections)


@dataclass(frozen=True)
class Told:
    """What a number tells of the gain: over all cases, within worlds, and of worlds left out; and how many have it."""

    over: Interval
    worlds: int
    within: Interval
    held: HeldOut | None

    @classmethod
    def of(cls, cases: Sequence[Case], name: str) -> "Told":
        """Returns all of it for one number."""
        worlds = len({case.world for case in cases if case.has(name)})
        return cls(over_worlds(cases, name), worlds, within_groups(cases, name), held_out(cases, name))

    @property
    def predicts(self) -> bool:
        """Returns whether its interval excludes 0 and its predictions of worlds left out beat the majority's sign."""
        return self.over.excludes_zero and self.held is not None and self.held.beats_majority


HEADS = ("correlation, 95 %", "cases", "worlds", "within a world, 95 %", "world-seeds")
OUTSIDE = ("sign right", "majority", "left out")


def known_table(told: Mapping[str, Told], cases: Sequence[Case], best: Sequence[str]) -> KeyedTable:
    """Returns what was known before training, a row per number, and the two that go with the gain most as one."""
    rows = [_row(name, told[name]) for name in KNOWN]
    if len(best) == 2:
        rows.append({"number": " + ".join(best), **_outside(held_out(cases, *best))})
    return _table("known", "Known before training, against the gain", rows)


def hidden_table(told: Mapping[str, Told]) -> KeyedTable:
    """Returns the same of what only the testbed knows."""
    return _table(
        "testbed", "Known to the testbed alone, against the gain", [_row(name, told[name]) for name in HIDDEN]
    )


def _table(name: str, title: str, rows: Sequence[Mapping[str, Cell]]) -> KeyedTable:
    return KeyedTable(
        name, title, ("number", *HEADS, *OUTSIDE), tuple(rows), ("number",), None, dict.fromkeys(OUTSIDE, 2)
    )


def _row(name: str, told: Told) -> dict[str, Cell]:
    cells = (_text(told.over), told.over.prompts, told.worlds, _text(told.within), told.within.seeds)
    return {"number": name, **dict(zip(HEADS, cells, strict=True)), **_outside(told.held)}


def _text(interval: Interval) -> str:
    return "" if math.isnan(interval.mean) else interval.text(2)


def _outside(held: HeldOut | None) -> dict[str, Cell]:
    cells = (None,) * len(OUTSIDE) if held is None else (held.right, held.majority, held.correlation)
    return dict(zip(OUTSIDE, cells, strict=True))


def worlds_table(cases: Sequence[Case]) -> KeyedTable:
    """Returns every world with its cases and their gains."""
    rows: list[dict[str, Cell]] = []
    for world in dict.fromkeys(case.world for case in cases):
        mine = [case for case in cases if case.world == world]
        gains = [case.gain for case in mine]
        rows.append(
            {
                "world": world,
                "cases": len(mine),
                "seeds": len({case.seed for case in mine}),
                "mean gain": sum(gains) / len(gains),
                "least": min(gains),
                "most": max(gains),
                "above 0": sum(gain > 0 for gain in gains),
            }
        )
    return KeyedTable("worlds", "Gain of judge weights over uniform weights", tuple(rows[0]), tuple(rows), ("world",))


def case_table(cases: Sequence[Case]) -> TableBlock:
    """Returns every case with all that is known of it."""
    rows = [[case.group, case.gain, *(case.known.get(name) for name in (*KNOWN, *HIDDEN))] for case in cases]
    return TableBlock(["world and seed", "gain", *KNOWN, *HIDDEN], rows)


def points_of(cases: Sequence[Case], name: str) -> dict[str, list[tuple[float, float]]]:
    """Returns the cases as points of a figure, by world."""
    points: dict[str, list[tuple[float, float]]] = {}
    for case in cases:
        if case.has(name):
            points.setdefault(case.world, []).append((case.known[name], case.gain))
    return points


def best_two(told: Mapping[str, Told], cases: Sequence[Case]) -> list[str]:
    """Returns the number known before training that goes with the gain most, and the next that is not
    nearly the same.
    """
    ranked = [name for name in KNOWN if math.isfinite(told[name].over.mean)]
    ranked.sort(key=lambda name: -abs(told[name].over.mean))
    columns = {name: [case.known.get(name, math.nan) for case in cases] for name in ranked}
    others = [name for name in ranked[1:] if abs(rank_correlation(columns[ranked[0]], columns[name])) < SAME]
    return [*ranked[:1], *others[:1]]


def verdict(told: Mapping[str, Told], worlds: int) -> list[str]:
    """Returns what follows for a user from the intervals and the worlds left out, and from nothing else."""
    if worlds < WORLDS_TO_FIT:
        few = "1 world" if worlds == 1 else f"{worlds} worlds"
        return [
            f"{few}: {'no interval over worlds, and ' if worlds == 1 else ''}no world can be predicted from others; "
            "whether anything known before training predicts the gain cannot be said"
        ]
    names = [
        f"{name} ({told[name].over.text(2)}; {100 * held.right:.0f} % of signs against {100 * held.majority:.0f} %)"
        for name in KNOWN
        if told[name].predicts and (held := told[name].held) is not None
    ]
    inside = [f"{name} ({told[name].within.text(2)})" for name in KNOWN if told[name].within.excludes_zero]
    return [
        f"known before training and predicts the gain here: {', '.join(names)}"
        if names
        else "nothing known before training predicts the gain here",
        f"known before training and orders the weights of one judge by their gain: {', '.join(inside)}"
        if inside
        else "nothing known before training orders the weights of one judge by their gain",
    ]


def explained(harvest: Harvest, level: float) -> list[str]:
    """Returns what the numbers are, and what was left out."""
    return [
        f"gain: test reward at KL {level:g} less that of uniform weights, one case per seed and arm, each on its own "
        "path over its grid. Worlds that are configured alike are one world, whichever study they are in",
        "correlation: Spearman's; 95 %: bootstrap over worlds and seeds, widened for few worlds, too narrow where "
        "worlds share base and prompts (one world at several shares of wrong labels). Within a world: "
        "mean over world-seeds of the correlation over the weights of each",
        "sign right: each world predicted from a line through the ranks of all others; majority: one sign for all; "
        "left out: the correlation of these predictions with the gain, below 0 for a number that tells nothing, "
        "since leaving out high gains lowers the prediction",
        "predicts: its interval excludes 0, and its signs are right more often than one sign for all. orders: its "
        f"interval within worlds excludes 0. {len(KNOWN)} numbers are tried, so by chance alone up "
        f"to {0.05 * len(KNOWN):.1f} intervals exclude 0",
        f"{AGREEMENT}: the judge's, both orders averaged, over training and validation pairs; 1 minus it mixes the "
        "judge's errors with wrong labels, and the testbed's validation labels are all right, so that with few "
        "training pairs it tells less of theirs",
        f"{EFFECTIVE}: {SHARE} times {LENGTH} (median tokens, mean of both sides)",
        *([f"counted once, though several studies have them: {harvest.merged}"] if harvest.merged else []),
        *(f"left out: {reason}: {count}" for reason, count in sorted(harvest.lost.items())),
    ]
