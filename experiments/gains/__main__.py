"""``python -m experiments.gains FOLDER ...``: can the gain of judge weights be predicted before training?

Writes tables, a figure and a conclusion: which numbers known before training correlate with the gain over uniform
weights.
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
from attnpo.lab.reports.folder_report import unique_folder_names
from attnpo.lab.reports.output import publish_report
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
    collect_study_cases,
    read_cases,
    write_cases,
)
from experiments.gains.figure import draw_gains
from experiments.gains.prediction import (
    WORLDS_TO_FIT,
    HeldOut,
    cases_with_numbers,
    correlation_over_worlds,
    correlation_within_groups,
    predict_held_out,
)
from experiments.report_folder import new_parser, report_folder, run_report_command

SAME = 0.95  # numbers with a higher rank correlation are not drawn side by side
EXAMPLE = """\
example:
  python -m experiments.gains outputs/regimes-testbed outputs/why-testbed --kl 1"""


def report_gains(paths: Sequence[Path], level: float = 1.0, output: Path | None = None) -> None:
    """Prints which numbers known before training correlate with the gain at KL ``level``; writes the report.

    ``paths``: folders of finished studies, or case files written by an earlier report. Raises UserError if they have no
    comparable arms of judge and uniform weights that reach the level.
    """
    if not level > 0:
        raise UserError(f"--kl: expected a KL above 0, got {level:g}")
    with report_folder("gains", paths, output, level=level) as (folder, mark):
        harvest = Harvest()
        notes = collect_cases(paths, level, harvest)
        cases = harvest.cases()
        if cases.empty:
            why = "; ".join(f"{reason}: {count}" for reason, count in harvest.lost.items())
            raise UserError(
                "gains: expected studies with an arm of judge weights and one of uniform weights under the same plain "
                f"TwDPO, both reaching KL {level:g}, found none{f' ({why})' if why else ''}; try another --kl or folder"
            )
        told = {name: NumberSummary.of(cases, name) for name in NUMBERS}
        best = best_two(told, cases)
        tables = [worlds_table(cases), known_table(told, cases, best), hidden_table(told)]
        notes = [*conclusions(told, cases["world"].nunique()), *explain_numbers(harvest, level), *notes]
        title = f"Known before training against the gain at KL {level:g}"
        make_folder(folder)
        write_cases(folder / FILE, level, harvest)
        columns = ["group", "gain", *NUMBERS]
        rows = cases[columns].astype(object).where(cases[columns].notna(), None).to_numpy().tolist()
        sections = [Section("Every case", [TableBlock(["world and seed", *columns[1:]], rows)])]
        if best:
            ylabel = f"reward minus uniform's, KL {level:g}"
            path = draw_gains(cases, best, folder / "gains.png", ylabel=ylabel, title=title)
            caption = (
                "gain of judge weights over uniform weights against the two best-correlated numbers; one point per case"
            )
            sections.insert(0, Section("Figure", [Image(path, caption)]))
        publish_report(title, tables, notes, folder, "gains", mark, sections)


def collect_cases(paths: Sequence[Path], level: float, harvest: Harvest) -> list[str]:
    """Adds the cases of all folders and files to ``harvest``; returns notes."""
    studies = {path: read_study(path) for path in paths if not path.is_file()}
    names = dict(zip(studies, unique_folder_names([study.path for study in studies.values()]), strict=True))
    notes = []
    for path in paths:
        if path not in studies:
            read_cases(path, level, harvest)
            continue
        study, name = studies[path], names[path]
        if not study.is_finished:
            raise UserError(f"{study.path}: expected a finished study, but it is {study.notes[0]}")
        notes += [f"{name}: {line}" for line in study.notes if line.startswith("left out")]
        notes += collect_study_cases(study, name, level, harvest)
    return notes


@dataclass(frozen=True)
class NumberSummary:
    """Relation of a number to the gain: over all cases, within worlds, and in held-out worlds."""

    over: Interval
    worlds: int
    within: Interval
    held: HeldOut | None

    @classmethod
    def of(cls, cases: pandas.DataFrame, name: str) -> "NumberSummary":
        """Computes the relation of the number ``name`` to the gain."""
        worlds = cases_with_numbers(cases, name)["world"].nunique()
        return cls(
            correlation_over_worlds(cases, name),
            worlds,
            correlation_within_groups(cases, name),
            predict_held_out(cases, name),
        )

    @property
    def predicts(self) -> bool:
        """Returns whether the interval excludes 0 and predictions of held-out worlds beat the majority's sign."""
        return self.over.excludes_zero and self.held is not None and self.held.beats_majority


HEADS = ("correlation, 95 %", "cases", "worlds", "within a world, 95 %", "world-seeds")
OUTSIDE = ("sign right", "majority", "left out")


def known_table(told: Mapping[str, NumberSummary], cases: pandas.DataFrame, best: Sequence[str]) -> KeyedTable:
    """Builds a table with one row per number known before training, and one for the best two combined."""
    rows = [_number_row(name, told[name]) for name in KNOWN]
    if len(best) == 2:
        rows.append({"number": " + ".join(best), **_held_out_cells(predict_held_out(cases, *best))})
    return _make_table("known", "Known before training, against the gain", rows)


def hidden_table(told: Mapping[str, NumberSummary]) -> KeyedTable:
    """Builds the same table for numbers that only the testbed knows."""
    return _make_table(
        "testbed", "Known only to the testbed, against the gain", [_number_row(name, told[name]) for name in HIDDEN]
    )


def _make_table(name: str, title: str, rows: Sequence[Mapping[str, Cell]]) -> KeyedTable:
    return KeyedTable(
        name, title, ("number", *HEADS, *OUTSIDE), tuple(rows), ("number",), None, dict.fromkeys(OUTSIDE, 2)
    )


def _number_row(name: str, told: NumberSummary) -> dict[str, Cell]:
    cells = (_interval_text(told.over), told.over.prompts, told.worlds, _interval_text(told.within), told.within.seeds)
    return {"number": name, **dict(zip(HEADS, cells, strict=True)), **_held_out_cells(told.held)}


def _interval_text(interval: Interval) -> str:
    return "" if math.isnan(interval.mean) else interval.text(2)


def _held_out_cells(held: HeldOut | None) -> dict[str, Cell]:
    cells = (None,) * len(OUTSIDE) if held is None else (held.right, held.majority, held.correlation)
    return dict(zip(OUTSIDE, cells, strict=True))


def worlds_table(cases: pandas.DataFrame) -> KeyedTable:
    """Builds a table of worlds with their cases and gains."""
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


def best_two(told: Mapping[str, NumberSummary], cases: pandas.DataFrame) -> list[str]:
    """Returns the number best correlated with the gain, and the next one that is not nearly the same."""
    ranked = [name for name in KNOWN if math.isfinite(told[name].over.mean)]
    ranked.sort(key=lambda name: -abs(told[name].over.mean))
    alike = cases[ranked].corr("spearman", min_periods=3).abs()
    return [*ranked[:1], *[name for name in ranked[1:] if alike.loc[ranked[0], name] < SAME][:1]]


def conclusions(told: Mapping[str, NumberSummary], worlds: int) -> list[str]:
    """States the conclusions that follow from the intervals and the held-out worlds."""
    if worlds < WORLDS_TO_FIT:
        few = "1 world" if worlds == 1 else f"{worlds} worlds"
        return [
            f"{few}: {'no interval over worlds, and ' if worlds == 1 else ''}no world can be predicted from others; "
            "it cannot be decided whether anything known before training predicts the gain"
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


def explain_numbers(harvest: Harvest, level: float) -> list[str]:
    """Lists notes that define the numbers and say what was left out."""
    merged = len(harvest.found) - len(harvest.cases())
    return [
        f"gain: test reward at KL {level:g} minus that of uniform weights, one case per seed and arm, each "
        "interpolated over its own grid. Worlds with the same configuration count as one, whichever study they are in",
        "correlation: Spearman's; 95 %: bootstrap over worlds and seeds, widened for few worlds, too narrow if "
        "worlds share base and prompts (one world at several shares of wrong labels). Within a world: "
        "mean over world-seeds of the correlation over the weights of each",
        "sign right: share of signs predicted for each world from a line through the ranks of all others; majority: "
        "the same with one sign for all; left out: correlation of these predictions with the gain, below 0 for an "
        "uninformative number, since leaving out high gains lowers the prediction",
        "predicts: its interval excludes 0, and its signs are right more often than one sign for all. orders: its "
        f"interval within worlds excludes 0. {len(KNOWN)} numbers are tried, so up to {0.05 * len(KNOWN):.1f} "
        "intervals exclude 0 by chance alone",
        f"{AGREEMENT}: the judge's, both orders averaged, over training and validation pairs; 1 minus it mixes the "
        "judge's errors with wrong labels, and the testbed's validation labels are all right, so with few training "
        "pairs it says less about the training labels",
        f"{EFFECTIVE}: {SHARE} times {LENGTH} (median tokens, mean of both sides)",
        *([f"counted once although several studies have them: {merged}"] if merged else []),
        *(f"left out: {reason}: {count}" for reason, count in sorted(harvest.lost.items())),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints and writes the report on the given studies; returns 0, or 2 if nothing can be compared."""
    about = "Compare numbers known before training with the gain of judge weights over uniform weights."
    parser = new_parser("experiments.gains", about, EXAMPLE)
    parser.add_argument(
        "paths", nargs="+", type=Path, metavar="FOLDER", help=f"a finished study, or the {FILE} of an earlier report"
    )
    parser.add_argument("--kl", type=float, default=1.0, help="KL to the base at which to compare rewards (default: 1)")
    chosen = parser.parse_args(arguments)
    return run_report_command(lambda: report_gains(chosen.paths, chosen.kl, chosen.output))


if __name__ == "__main__":
    install_signal_handlers()
    sys.exit(main())
