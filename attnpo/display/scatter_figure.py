"""The figure of gains against numbers that were known before training: a panel per number, a colour per world."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from attnpo.display.look import COLOURS, INK, MARKERS, Number, legend, new_figure, panel, save


@dataclass(frozen=True)
class ScatterPanel:
    """One panel: points (across, up) by the name of their colour."""

    xlabel: str
    points: Mapping[str, Sequence[tuple[Number, Number]]]


def scatter_figure(panels: Sequence[ScatterPanel], path: Path | str, *, ylabel: str, title: str = "") -> Path:
    """Draws the panels side by side with a dotted line at 0, one legend for all, and returns the PNG's path."""
    figure = new_figure(4.6 * max(1, len(panels)) + 2.2, 4.2)
    names = list(dict.fromkeys(name for shown in panels for name in shown.points))
    for place, shown in enumerate(panels):
        axes = figure.add_subplot(1, len(panels), place + 1)
        panel(axes, title if place == 0 else "", shown.xlabel, ylabel if place == 0 else "")
        axes.axhline(0.0, color=INK, linewidth=0.9, linestyle=":")
        for number, name in enumerate(names):
            turn, colour = divmod(number, len(COLOURS))
            points = shown.points.get(name, ())
            across, up = [point[0] for point in points], [point[1] for point in points]
            marker = MARKERS[(colour + 3 * turn) % len(MARKERS)]
            axes.plot(across, up, marker, color=COLOURS[colour], markersize=5, alpha=0.75, label=name)
        if place == len(panels) - 1:
            legend(axes, loc="center left", bbox_to_anchor=(1.01, 0.5))
    figure.tight_layout()
    return save(figure, path)
