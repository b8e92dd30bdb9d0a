"""The figure of what weights leave free: bounds on the policy's divergence, and where policies lie."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from attnpo.display.look import COLOURS, MARKERS, SOFT, legend, new_figure, panel, save
from attnpo.lab.analysis.freedom import Estimate, Freedom


def freedom_figure(result: Freedom, path: Path | str, title: str = "KL to the base by token weight") -> Path:
    """Draws relative KL per group and policy and, where there is a control, the ratio to it; returns the PNG's path."""
    panels = 2 if result.deciles[0].ratio else 1
    figure = new_figure(5.6 * panels, 4.2)
    axes = figure.subplots(1, panels, squeeze=False)[0]
    names = list(result.claim)
    _lines(axes[0], [one.relative for one in result.deciles], names)
    panel(axes[0], title, "weight decile, 1 is the lowest", "KL per token over the policy's mean")
    if panels == 2:
        _lines(axes[1], [one.ratio for one in result.deciles], names)
        panel(axes[1], f"the same over {result.control}", "weight decile, 1 is the lowest", "ratio of relative KL")
    for one in axes:
        one.axhline(1.0, color=SOFT, linewidth=0.9)
        legend(one, loc="best")
    figure.tight_layout(w_pad=2.0)
    return save(figure, path)


def _lines(axes: Axes, groups: Sequence[Mapping[str, Estimate]], names: Sequence[str]) -> None:
    """Draws a line with its interval for every policy that the groups hold."""
    places = list(range(1, len(groups) + 1))
    for number, name in enumerate(names):
        if name not in groups[0]:
            continue
        look: dict[str, Any] = {"color": COLOURS[number % len(COLOURS)], "marker": MARKERS[number % len(MARKERS)]}
        line = [one[name] for one in groups]
        shift = 0.08 * (number - (len(names) - 1) / 2)
        for place, one in zip(places, line, strict=True):
            axes.plot([place + shift] * 2, [one.low, one.high], color=look["color"], linewidth=2, alpha=0.4)
        axes.plot(
            [place + shift for place in places],
            [one.mean for one in line],
            linewidth=1.5,
            markersize=5,
            label=name,
            **look,
        )
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 1.5, 2.0, 3.0, 5.0, 7.0), numticks=20))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.2g}"))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_xticks(places)
