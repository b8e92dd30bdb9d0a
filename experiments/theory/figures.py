"""Draws the theory study's figures: theorem, sandwich of KL_w, KL per token along training, and looseness of bounds."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from attnpo.display.look import COLOURS, INK, MARKERS, SOFT, add_legend, label_axes, new_figure, save_figure, styled
from experiments.theory.cases import Reads
from experiments.theory.own_statements import FreedomPath, LemmaRow, PolicyRow
from experiments.theory.study import Study
from experiments.theory.tightness import TightnessRow

LOOK = {Reads.POSITION: (COLOURS[0], MARKERS[0]), Reads.RESPONSE: (COLOURS[1], MARKERS[1])}
NAMES = {Reads.POSITION: "weights of the position", Reads.RESPONSE: "weights that read the response"}
LEAST = 1e-3  # total variation below which a panel does not reach
PANELS = {"delta": "delta, largest |w - 1|", "beta": "beta", "length": "tokens of a response"}
FREEDOM = (COLOURS[2], COLOURS[6], COLOURS[3])


@styled
def theory_figure(study: Study, path: Path | str) -> Path:
    """Draws the four panels as a PNG and returns its path."""
    figure = new_figure(10.4, 7.8)
    grid = figure.subplots(2, 2)
    _optimum(grid[0, 0], study.policies)
    _dpo(grid[0, 1], study.policies)
    _sandwich(grid[1, 0], study.lemmas)
    _freedom(grid[1, 1], study.freedom)
    return save_figure(figure, path, h_pad=2.2, w_pad=2.2)


def _of(rows: Sequence[PolicyRow], reads: Reads) -> list[PolicyRow]:
    return [row for row in rows if row.reads is reads]


def _optimum(axes: Axes, rows: Sequence[PolicyRow]) -> None:
    label_axes(axes, "optimum of J_w and heuristic policy h", "delta, largest |w - 1|", "total variation")
    loose = _of(rows, Reads.RESPONSE)
    deltas = [row.delta for row in loose]
    colour, marker = LOOK[Reads.RESPONSE]
    axes.plot(deltas, [row.tv_best_h for row in loose], "-", color=colour, marker=marker, label=NAMES[Reads.RESPONSE])
    axes.plot(deltas, [row.bound_a for row in loose], "--", color=colour, label="our bound (a)")
    most = max((row.tv_best_h for row in _of(rows, Reads.POSITION)), default=0.0)
    axes.text(
        0.98,
        0.05,
        f"weights of the position: at most {most:.0e}",
        transform=axes.transAxes,
        ha="right",
        fontsize=8,
        color=LOOK[Reads.POSITION][0],
    )
    _logs(axes, deltas)
    add_legend(axes, loc="upper left")


def _dpo(axes: Axes, rows: Sequence[PolicyRow]) -> None:
    label_axes(axes, "heuristic policy h and DPO's policy", "delta, largest |w - 1|", "total variation")
    for reads, (colour, marker) in LOOK.items():
        kind = _of(rows, reads)
        deltas = [row.delta for row in kind]
        axes.plot(deltas, [row.tv_h_dpo for row in kind], "-", color=colour, marker=marker, label=NAMES[reads])
        axes.plot(deltas, [row.bound_b for row in kind], "--", color=colour, label="our bound (b)")
    _logs(axes, [row.delta for row in rows])
    add_legend(axes, loc="lower right")


def _logs(axes: Axes, deltas: Sequence[float]) -> None:
    """Sets both axes to log scale, up to a total variation of 1, beyond which no bound is useful."""
    axes.set(xscale="log", yscale="log", ylim=(LEAST, 1.15))
    axes.axhline(1.0, color=SOFT, linewidth=0.9)
    axes.xaxis.set_major_locator(FixedLocator(sorted(set(deltas))))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _sandwich(axes: Axes, rows: Sequence[LemmaRow]) -> None:
    label_axes(axes, "weighted over plain KL, from random policies to h", "delta, largest |w - 1|", "KL_w / KL")
    for reads in (Reads.RESPONSE, Reads.POSITION):
        kind = [row for row in rows if row.reads is reads]
        deltas, colour = [row.delta for row in kind], LOOK[reads][0]
        low, high = [row.lowest for row in kind], [row.highest for row in kind]
        axes.fill_between(deltas, low, high, color=colour, alpha=0.18, linewidth=0, label=f"range, {NAMES[reads]}")
        axes.plot(deltas, low, color=colour, linewidth=1.2)
        axes.plot(deltas, high, color=colour, linewidth=1.2)
    deltas = sorted({row.delta for row in rows})
    axes.plot(deltas, [1 + delta for delta in deltas], "--", color=INK, linewidth=1.1, label="1 - delta, 1 + delta")
    axes.plot(deltas, [1 - delta for delta in deltas], "--", color=INK, linewidth=1.1)
    axes.axhline(0.0, color=SOFT, linewidth=0.9)
    add_legend(axes, loc="lower left")


def _freedom(axes: Axes, path: FreedomPath) -> None:
    label_axes(axes, "how far tokens move: KL per token over DPO's", "gradient steps on TwDPO's loss", "KL over DPO's")
    for place, weight in enumerate(path.weights):
        colour = FREEDOM[place % len(FREEDOM)]
        axes.plot(
            path.steps, path.ratios[:, place].tolist(), "-", color=colour, linewidth=1.7, label=f"w = {weight:.1f}"
        )
        axes.plot([path.steps[-1] * 1.5], [float(path.limit[place])], "D", color=colour, markersize=6, clip_on=False)
    axes.plot([], [], "D", color=SOFT, markersize=6, label="at the optimum", linestyle="none")
    axes.set(xscale="log", yscale="log", ylim=(0.09, None))
    axes.axhline(1.0, color=SOFT, linewidth=0.9)
    axes.yaxis.set_major_locator(FixedLocator([0.1, 0.2, 0.5, 1, 2, 4]))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    add_legend(axes, loc="lower right")


@styled
def tightness_figure(study: Study, path: Path | str) -> Path:
    """Draws bound over actual along delta, beta and length as a PNG and returns its path."""
    figure = new_figure(11.4, 3.9)
    for axes, (varied, label) in zip(figure.subplots(1, len(PANELS), sharey=True), PANELS.items(), strict=True):
        rows = [row for row in study.tightness if row.varied == varied]
        label_axes(axes, f"over {varied}", label, "bound over actual" if varied == "delta" else "")
        _draw_looseness(axes, rows)
        axes.set(yscale="log", xscale="linear" if varied == "length" else "log")
        axes.xaxis.set_major_locator(FixedLocator([row.value for row in rows]))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.axhline(1.0, color=SOFT, linewidth=0.9)
        if varied == "delta":
            add_legend(axes)
    return save_figure(figure, path, w_pad=1.8)


def _draw_looseness(axes: Axes, rows: list[TightnessRow]) -> None:
    values = [row.value for row in rows]
    lines = {
        "lemma 1": [row.paper.lemma_1.looseness for row in rows],
        "lemma 2": [row.paper.lemma_2.looseness for row in rows],
        "theorem": [row.paper.theorem.looseness for row in rows],
        "our theorem (a)": [row.ours / row.paper.theorem.actual for row in rows],
    }
    for place, (name, heights) in enumerate(lines.items()):
        style = "--" if name.startswith("our") else "-"
        axes.plot(values, heights, style, color=COLOURS[place], marker=MARKERS[place], label=name)
