"""Small panels over the layers of a model: one number per layer and seed, the seeds thin and their mean thick."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from attnpo.display.look import COLOURS, MARKERS, SOFT, Number, legend, new_figure, panel, save


@dataclass(frozen=True)
class LayerPanel:
    """One panel. ``lines``: by what they show, a row per seed of numbers by layer; NaN where there is none."""

    title: str
    ylabel: str
    lines: Mapping[str, Sequence[Mapping[int, Number]]]


def layer_panels(panels: Sequence[LayerPanel], path: Path | str) -> Path:
    """Draws the panels side by side as a PNG and returns its path."""
    figure = new_figure(3.7 * max(1, len(panels)), 3.6)
    for place, shown in enumerate(panels, 1):
        axes = figure.add_subplot(1, max(1, len(panels)), place)
        panel(axes, shown.title, "layer", shown.ylabel)
        layers = sorted({layer for rows in shown.lines.values() for row in rows for layer in row})
        for number, (name, rows) in enumerate(shown.lines.items()):
            colour = COLOURS[number % len(COLOURS)]
            for row in rows if len(rows) > 1 else ():
                axes.plot(
                    layers, [row.get(layer, math.nan) for layer in layers], color=colour, linewidth=0.8, alpha=0.35
                )
            means = [_mean([row.get(layer, math.nan) for row in rows]) for layer in layers]
            axes.plot(layers, means, color=colour, marker=MARKERS[number % len(MARKERS)], linewidth=1.8, label=name)
        axes.axhline(0, color=SOFT, linewidth=0.8)
        axes.set_xticks(layers if len(layers) <= 8 else layers[:: -(-len(layers) // 8)])
        if len(shown.lines) > 1:
            legend(axes)
    figure.tight_layout()
    return save(figure, path)


def _mean(values: Sequence[Number]) -> float:
    """Returns the mean of what is finite; NaN when nothing is."""
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else math.nan
