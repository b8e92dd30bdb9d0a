"""Pairs in the terminal: both responses side by side, a token and one number per line."""

import math
from collections.abc import Sequence
from itertools import zip_longest

from rich import box
from rich.console import Console
from rich.style import Style
from rich.table import Table
from rich.text import Text

from attnpo.display.heat import WEIGHTS, readable, visible
from attnpo.display.heatmap import shade_style
from attnpo.display.pair_record import WeighedResponse
from attnpo.display.weighed_pair import WeighedPair

MEANING = {
    "relative": "weight times |y|: 1 where all tokens count alike",
    "weight": "share of the response's weight",
    "logp": "log-probability under the policy, nats",
    "reference_logp": "log-probability under the reference, nats",
    "log_ratio": "log-probability under the policy less that under the reference, nats",
    "contribution": "what the token adds to the reward margin of the pair",
}
_NOTHING = 1e-6  # less is rounding of float32
_DIGITS = {"relative": ".2f", "weight": ".4f", "logp": ".3f", "reference_logp": ".3f", "log_ratio": "+.3f"}


def print_pairs(pairs: Sequence[WeighedPair], column: str, console: Console) -> None:
    """Writes the pairs with the numbers of ``column`` to ``console``, in as many columns as that has."""
    previous = None
    for pair in pairs:
        if pair.pair.pair_id != previous:
            _print_head(pair, console)
        previous = pair.pair.pair_id
        console.print(Text(visible(pair.note), style="bold"))
        for line in pair.rounds:
            console.print(Text(visible(line), style="dim"))
        console.print(_table(pair, column))
    console.print(Text(f"{column}: {MEANING[column]}. Underlined: no partner in the judge's prompt.", style="dim"))


def _print_head(one: WeighedPair, console: Console) -> None:
    console.rule(Text(visible(f"pair {one.pair.pair_id[:12]}")), align="left")
    for message in one.pair.prompt:
        console.print(Text(f"{visible(message['role'])}: ", style="bold") + Text(readable(message["content"])))
    for name, side in one.sides:
        console.print(Text(f"{name}: {side.summary()}", style="dim"))
    for number, trace in enumerate(one.traces, 1):
        console.print(Text(f"the judge's trace in round {number}: ", style="bold") + Text(readable(trace)))


def _table(pair: WeighedPair, column: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, expand=True, padding=(0, 1), show_footer=True)
    table.add_column("", justify="right", style="dim", no_wrap=True)
    for name, side in pair.sides:
        head = "green" if name == "chosen" else "red"
        table.add_column(name, ratio=1, overflow="fold", footer="sum", header_style=head)
        total = float(side.columns[column].double().sum())
        table.add_column(column, justify="right", no_wrap=True, footer=_number(total, column))
    chosen, rejected = (_cells(side, column) for _, side in pair.sides)
    for place, (left, right) in enumerate(zip_longest(chosen, rejected, fillvalue=(Text(), Text()))):
        table.add_row(str(place), *left, *right)
    return table


def _cells(side: WeighedResponse, column: str) -> list[tuple[Text, Text]]:
    rows = (side.columns[column].tolist(), side.relative.tolist(), side.has_partner, side.ends)
    return [
        (
            Text(
                " ".join(visible(token).split()) or "▯",
                style="italic" if end else "" if matched else "underline dim",
            ),
            Text(_number(value, column), style=_style(value, shade, column)),
        )
        for token, value, shade, matched, end in zip(side.tokens, *rows, strict=True)
    ]


def _number(value: float, column: str) -> str:
    """Returns ``value`` as the column prints it, rounding noise and all that would print as 0 without a sign."""
    said = f"{0.0 if abs(value) < _NOTHING else value:{_DIGITS.get(column, '+.3g')}}"
    return said.lstrip("+-") if float(said) == 0 else said


def _style(value: float, relative: float, column: str) -> Style:
    if not math.isfinite(value):
        return Style(reverse=True, bold=True)
    if column in WEIGHTS:
        return shade_style(relative) if math.isfinite(relative) else Style()
    return Style(color="green" if value > 0 else "red" if value < 0 else None)
