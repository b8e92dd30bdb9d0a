"""The look of a panel, one for all figures."""

from typing import Any

from matplotlib.axes import Axes

INK, SOFT, GRID = "#33363c", "#9aa0aa", "#dfe2e7"


def panel(axes: Axes, title: str, xlabel: str = "", ylabel: str = "") -> Axes:
    """``axes`` with titles, a light grid and two spines."""
    axes.set_title(title, fontsize=10.5, color=INK, loc="left", parse_math=False)
    axes.set_xlabel(xlabel, fontsize=9, color=INK, parse_math=False)
    axes.set_ylabel(ylabel, fontsize=9, color=INK, parse_math=False)
    axes.grid(True, color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=8, colors=INK, length=3)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(SOFT)
    return axes


def legend(axes: Axes, **place: Any) -> None:
    """Nothing; names the labelled lines of ``axes``, if there are any, as plain text."""
    if axes.get_legend_handles_labels()[0]:
        for text in axes.legend(fontsize=8, frameon=False, **place).get_texts():
            text.set_parse_math(False)
