"""Every arm of a study on one line: what its chosen point scores, with its interval, and its other points behind it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from matplotlib.axes import Axes

from attnpo.display.look import INK, SOFT, Level, Looks, Number, fitting, looks_of, new_figure, panel, save


@dataclass(frozen=True)
class ArmPanel:
    """One number of every arm. ``levels``: at its chosen point; ``others``: at the other points of its grid.

    ``line``: a value to mark by a dotted line, with what it is.
    """

    title: str
    xlabel: str
    levels: Mapping[str, Level]
    others: Mapping[str, Sequence[Number]] = field(default_factory=dict)
    line: tuple[str, Level] | None = None


def arm_figure(
    panels: Sequence[ArmPanel],
    path: Path | str,
    *,
    title: str = "",
    note: str = "",
    control: str | None = None,
    looks: Looks | None = None,
) -> Path:
    """Draws the panels side by side, a row per arm in the order of the first, and returns the PNG's path.

    The interval of the ``control`` is a band behind all arms. Values that are not finite are left out; small marks far
    off all others too, by ``fitting``, since they would press them together, and ``note`` says what else is shown.
    """
    arms = list(dict.fromkeys(arm for shown in panels for arm in shown.levels))
    seen = looks or looks_of(arms, control)
    figure = new_figure(2.6 + 3.6 * max(1, len(panels)), 1.5 + 0.34 * max(3, len(arms)))
    figure.suptitle(title, fontsize=12, color=INK, x=0.012, ha="left", parse_math=False)
    grid = figure.subplots(1, max(1, len(panels)), squeeze=False, sharey=True)[0]
    for place, (axes, shown) in enumerate(zip(grid, panels, strict=False)):
        marked = f"; dotted: {shown.line[0]}" if shown.line is not None and math.isfinite(shown.line[1].score) else ""
        panel(axes, shown.title, shown.xlabel + marked + (f"\n{note}" if note and place == 0 else ""))
        _draw(axes, shown, arms, seen, control)
    for axes in grid[:1]:
        axes.set_yticks(range(len(arms)), [seen[arm].named(arm) for arm in arms], parse_math=False)
        axes.set_ylim(len(arms) - 0.4, -0.6)
    figure.tight_layout()
    return save(figure, path)


def _draw(axes: Axes, shown: ArmPanel, arms: Sequence[str], looks: Looks, control: str | None) -> None:
    line = [] if shown.line is None or not math.isfinite(shown.line[1].score) else [shown.line[1]]
    levels = {arm: level for arm, level in shown.levels.items() if math.isfinite(level.score)}
    ends = [end for level in [*levels.values(), *line] for end in (level.low, level.high)]
    limits = fitting([level.score for level in [*levels.values(), *line]], ends)
    behind = [value for values in shown.others.values() for value in values]
    inner = fitting([*behind, *(level.score for level in levels.values())])
    low, high = min(limits[0], inner[0]), max(limits[1], inner[1])
    for place, arm in enumerate(arms):
        look, level = looks[arm], levels.get(arm)
        others = [value for value in shown.others.get(arm, ()) if low <= value <= high]
        axes.plot(others, [place] * len(others), "|", color=look.colour, markersize=6, alpha=0.45)
        if level is None:
            continue
        if level.bounded:
            axes.plot([level.low, level.high], [place] * 2, color=look.colour, linewidth=2.4, alpha=0.65)
        axes.plot([level.score], [place], look.marker, color=look.colour, markerfacecolor=look.face, markersize=7)
    if control in levels and levels[control].bounded:
        axes.axvspan(levels[control].low, levels[control].high, color=SOFT, alpha=0.18, linewidth=0)
    for marked in line:
        axes.axvline(marked.score, color=INK, linewidth=0.9, linestyle=":")
    axes.set_xlim(low, high)
