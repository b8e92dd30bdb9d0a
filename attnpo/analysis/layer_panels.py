"""Small panels over the layers of a model: one number per layer and seed, the seeds thin and their mean thick."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from attnpo.analysis.figures import COLOURS, MARKERS, Number, new_figure, save

_INK, _GRID = "#33363c", "#dfe2e7"


@dataclass(frozen=True)
class LayerPanel:
    """One panel. ``lines``: by what they show, a row per seed of numbers by layer; NaN where there is none."""

    title: str
    ylabel: str
    lines: Mapping[str, Sequence[Mapping[int, Number]]]


def layer_panels(panels: Sequence[LayerPanel], path: Path | str) -> Path:
    """The path of a PNG with the panels side by side."""
    figure = new_figure(3.7 * max(1, len(panels)), 3.6)
    for place, panel in enumerate(panels, 1):
        axes = figure.add_subplot(1, max(1, len(panels)), place)
        axes.set_title(panel.title, fontsize=10, color=_INK, loc="left", parse_math=False)
        axes.set_xlabel("layer", fontsize=9, color=_INK)
        axes.set_ylabel(panel.ylabel, fontsize=9, color=_INK, parse_math=False)
        axes.grid(True, color=_GRID, linewidth=0.7)
        axes.set_axisbelow(True)
        axes.tick_params(labelsize=8, colors=_INK, length=3)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        layers = sorted({layer for rows in panel.lines.values() for row in rows for layer in row})
        for number, (name, rows) in enumerate(panel.lines.items()):
            colour = COLOURS[number % len(COLOURS)]
            for row in rows if len(rows) > 1 else ():
                axes.plot(
                    layers, [row.get(layer, math.nan) for layer in layers], color=colour, linewidth=0.8, alpha=0.35
                )
            means = [_mean([row.get(layer, math.nan) for row in rows]) for layer in layers]
            axes.plot(layers, means, color=colour, marker=MARKERS[number % len(MARKERS)], linewidth=1.8, label=name)
        axes.axhline(0, color="#9aa0aa", linewidth=0.8)
        axes.set_xticks(layers if len(layers) <= 8 else layers[:: -(-len(layers) // 8)])
        if len(panel.lines) > 1:
            for text in axes.legend(fontsize=8, frameon=False).get_texts():
                text.set_parse_math(False)
    figure.tight_layout()
    return save(figure, path)


def _mean(values: Sequence[Number]) -> float:
    """The mean of what is finite; NaN when nothing is."""
    found = [value for value in values if math.isfinite(value)]
    return sum(found) / len(found) if found else math.nan
