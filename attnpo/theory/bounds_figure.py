"""The figure of tightness: how many times the paper's bounds are larger than what they bound."""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from attnpo.display.look import COLOURS, MARKERS, SOFT, legend, new_figure, panel, save
from attnpo.theory.study import Study
from attnpo.theory.tightness import TightnessRow

PANELS = {"delta": "delta, largest |w - 1|", "beta": "beta", "length": "tokens of a response"}


def tightness_figure(study: Study, path: Path | str) -> Path:
    """Draws bound over actual along delta, beta and length as a PNG and returns its path."""
    figure = new_figure(11.4, 3.9)
    for axes, (varied, label) in zip(figure.subplots(1, len(PANELS), sharey=True), PANELS.items(), strict=True):
        rows = [row for row in study.tightness if row.varied == varied]
        panel(axes, f"over {varied}", label, "bound over actual" if varied == "delta" else "")
        _lines(axes, rows)
        axes.set(yscale="log", xscale="linear" if varied == "length" else "log")
        axes.xaxis.set_major_locator(FixedLocator([row.value for row in rows]))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.axhline(1.0, color=SOFT, linewidth=0.9)
        if varied == "delta":
            legend(axes, loc="best")
    figure.tight_layout(w_pad=1.8)
    return save(figure, path)


def _lines(axes: Axes, rows: list[TightnessRow]) -> None:
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
