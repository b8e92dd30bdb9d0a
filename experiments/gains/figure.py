"""Figure of gains against numbers known before training: one panel per number, one colour per world."""

from collections.abc import Sequence
from pathlib import Path

import pandas

from attnpo.display.look import COLOURS, INK, MARKERS, add_legend, label_axes, new_figure, save_figure, styled


@styled
def draw_gains(cases: pandas.DataFrame, names: Sequence[str], path: Path, *, ylabel: str, title: str) -> Path:
    """Draws the gains against each number, with a dotted line at 0 and a shared legend; returns the PNG's path."""
    figure = new_figure(4.6 * len(names) + 2.2, 4.2)
    known = cases[cases[[*names]].notna().any(axis=1)]
    for place, name in enumerate(names):
        axes = figure.add_subplot(1, len(names), place + 1)
        label_axes(axes, title if place == 0 else "", name, ylabel if place == 0 else "")
        axes.axhline(0.0, color=INK, linewidth=0.9, linestyle=":")
        for number, (world, rows) in enumerate(known.groupby("world", sort=False)):
            turn, colour = divmod(number, len(COLOURS))
            marker = MARKERS[(colour + 3 * turn) % len(MARKERS)]
            axes.plot(rows[name], rows["gain"], marker, color=COLOURS[colour], markersize=5, alpha=0.75, label=world)
    add_legend(axes, loc="center left", bbox_to_anchor=(1.01, 0.5))
    return save_figure(figure, path)
