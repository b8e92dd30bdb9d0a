"""``python -m experiments.gains FOLDER ...``: can it be known before training whether judge weights will gain?

Tables, a figure and an answer: which numbers that a run knows before training go with the gain over uniform weights.
"""

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas

from attnpo.cli.terminal import install_signal_handlers
from attnpo.display.page import Image, Section, TableBlock
from attnpo.display.printed import KeyedTable
from attnpo.display.tables import Cell
from attnpo.evaluation.intervals import Interval
from attnpo.lab.reports.folder_report import column_names
from attnpo.lab.reports.output import publish
from attnpo.lab.results import read_study
from attnpo.run.folders import make_folder
from attnpo.schema import UserError
from experiments.gains.cases import (
    AGREEMENT,
    EFFECTIVE,
    FILE,
    HIDDEN,
    KNOWN,
    LENGTH,
    NUMBERS,
    SHARE,
    Harvest,
    collect,
    read_cases,
    write_cases,
)
from experiments.gains.figure import draw_gains
from experiments.gains.prediction import WORLDS_TO_FIT, HeldOut, held_out, over_worlds, with_numbers, within_groups
from experiments.report_folder import new_parser, report_folder, write_report

SAME = 0.95  # numbers whose ranks agree so much are not drawn beside each other
EXAMPLE = """\
example:
  python -m experiments.gains outputs/regimes-testbed outputs/why-testbed --kl 1"""


def report_gains(paths: Sequence[Path], level: float = 1.0, output: Path | None = None) -> None:
    """Prints which numbers known before training go with the gain at KL ``level``; writes tables, figure and cases.

    ``paths``: folders of finished studies, or files of cases that another such report wrote. UserError where they hold
    no judge weights beside uniform ones whose paths reach the level.
    """
    if not level > 0:
        raise UserError(f"--kl: expected a KL above 0, got {level:g}")
    with report_folder("gains", paths, output, level=level) as (folder, mark):
        harvest = Harvest()
        notes = read_all(paths, level, harvest)
        cases = harvest.cases()
        if cases.empty:
            why = "; ".join(f"{reason}: {count}" for reason, count in harvest.lost.items())
            raise UserError(
                "gains: expected studies with an arm of judge weights and one of uniform weights of the same plain "
                f"TwDPO, both reaching KL {level:g}, found none{f' ({why})' if why else ''}; try another --kl or folder"
            )
        told = {name: Told.of(cases, name) for name in NUMBERS}
        best = best_two(told, cases)
        tables = [worlds_table(cases), known_table(told, cases, best), hidden_table(told)]
        notes = [*verdict(told, cases["world"].nunique()), *explained(harvest, level), *notes]
        title = f"Known before training against the gain at KL {level:g}"
        make_folder(folder)
        write_cases(folder / FILE, level, harvest)
        columns = ["group", "gain", *NUMBERS]
        rows = cases[columns].astype(object).where(cases[columns].notna(), None).to_numpy().tolist()
        sections = [Section("Every case", [TableBlock(["world and seed", *columns[1:]], rows)])]
        if best:
            ylabel = f"reward less uniform's, KL {level:g}"
            path = draw_gains(cases, best, folder / "gains.png", ylabel=ylabel, title=title)
            caption = (
                "gain of judge weights over uniform weights against the two that go with it most; a point per case"
            )
            sections.insert(0, Section("Figure", [Image(path, caption)]))
        publish(title, tables, notes, folder, "gains", mark, sections)


def read_all(paths: Sequence[Path], level: float, harvest: Harvest) -> list[str]:
    """Adds the cases of all folders and files to ``harvest``; returns what must be said of them."""
    studies = {path: read_study(path) for path in paths if not path.is_file()}
    names = dict(zip(studies, column_names([study.path for study in studies.values()]), strict=True))
    notes = []
    for path in paths:
        if path not in studies:
            read_cases(path, level, harvest)
            continue
        study, name = studies[path], names[path]
        if not study.is_finished:
            raise UserError(f"{study.path}: expected a finished study, {study.notes[0]}")
        notes += [f"{name}: {line}" for line in study.notes if line.startswith("left out")]
        notes += collect(study, name, level, harvest)
    return notes


@dataclass(frozen=True)
class Told:
    """Relation of a number to the gain: over all cases, within worlds, and of worlds left out; and how many have it."""

    over: Interval
    worlds: int
    within: Interval
    held: HeldOut | None

    @classmethod
    def of(cls, cases: pandas.DataFrame, name: str) -> "Told":
        """Returns all of it for one number."""
        worlds = with_numbers(cases, name)["world"].nunique()
        return cls(over_worlds(cases, name), worlds, within_groups(cases, name), held_out(cases, name))

    @property
    def predicts(self) -> bool:
        """Returns whether its interval excludes 0 and its predictions of worlds left out beat the majority's sign."""
        return self.over.excludes_zero and self.held is not None and self.held.beats_majority


HEADS = ("correlation, 95 %", "cases", "worlds", "within a world, 95 %", "world-seeds")
OUTSIDE = ("sign right", "majority", "left out")


def known_table(told: Mapping[str, Told], cases: pandas.DataFrame, best: Sequence[str]) -> KeyedTable:
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


def worlds_table(cases: pandas.DataFrame) -> KeyedTable:
    """Returns every world with its cases and their gains."""
    gains = cases.assign(above=cases["gain"] > 0).groupby("world", sort=False)
    columns = {
        "cases": ("gain", "size"),
        "seeds": ("seed", "nunique"),
        "mean gain": ("gain", "mean"),
        "least": ("gain", "min"),
        "most": ("gain", "max"),
        "above 0": ("above", "sum"),
    }
    rows = gains.agg(**columns).reset_index().to_dict("records")
    title = "Gain of judge weights over uniform weights"
    return KeyedTable("worlds", title, ("world", *columns), tuple(rows), ("world",))


def best_two(told: Mapping[str, Told], cases: pandas.DataFrame) -> list[str]:
    """Returns the number known before training closest to the gain, and the next that is not nearly the same."""
    ranked = [name for name in KNOWN if math.isfinite(told[name].over.mean)]
    ranked.sort(key=lambda name: -abs(told[name].over.mean))
    alike = cases[ranked].corr("spearman", min_periods=3).abs()
    return [*ranked[:1], *[name for name in ranked[1:] if alike.loc[ranked[0], name] < SAME][:1]]


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
    merged = len(harvest.found) - len(harvest.cases())
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
        *([f"counted once, though several studies have them: {merged}"] if merged else []),
        *(f"left out: {reason}: {count}" for reason, count in sorted(harvest.lost.items())),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints and writes the report on the studies named; returns 0, or 2 where nothing can be compared."""
    about = "Hold what finished studies knew before training against the gain of judge over uniform weights."
    parser = new_parser("experiments.gains", about, EXAMPLE)
    parser.add_argument(
        "paths", nargs="+", type=Path, metavar="FOLDER", help=f"a finished study, or the {FILE} of an earlier report"
    )
    parser.add_argument("--kl", type=float, default=1.0, help="KL to the base at which rewards are compared (1)")
    chosen = parser.parse_args(arguments)
    return write_report(lambda: report_gains(chosen.paths, chosen.kl, chosen.output))


if __name__ == "__main__":
    install_signal_handlers()
    sys.exit(main())
