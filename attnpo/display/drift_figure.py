"""The figure of where a policy moved: KL per token over deciles of weight and over the response."""

from collections.abc import Mapping
from pathlib import Path

from attnpo.display.look import COLOURS, MARKERS, Number, legend, new_figure, panel, save

Lines = Mapping[str, Mapping[str, Number]]
"""By name of a line its values by the number of their group."""


def drift_figure(deciles: Lines, places: Lines, path: Path | str) -> Path:
    """Draws a panel for each of the two that has lines; returns the PNG's path."""
    panels = [
        (title, label, lines)
        for title, label, lines in (
            ("KL to the base by token weight", "weight decile, 1 is the lowest", deciles),
            ("KL to the base by place", "tenth of the response", places),
        )
        if lines
    ]
    figure = new_figure(5.6 * max(1, len(panels)), 3.4)
    grid = figure.subplots(1, max(1, len(panels)), squeeze=False)[0]
    for axes, (title, label, lines) in zip(grid, panels, strict=False):
        for number, (name, values) in enumerate(lines.items()):
            axes.plot(
                [int(group) for group in values],
                list(values.values()),
                color=COLOURS[number],
                marker=MARKERS[number],
                markersize=5,
                linewidth=1.5,
                label=name,
            )
        panel(axes, title, label, "nats per token").set_ylim(bottom=0)
        axes.set_xticks(range(1, 11))
        legend(axes)
    figure.tight_layout(w_pad=2.0)
    return save(figure, path)
