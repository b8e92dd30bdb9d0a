"""Pairs in the terminal: both responses side by side, a token and one number per line."""

import math
from collections.abc import Sequence
from itertools import zip_longest

from rich import box
from rich.console import Console
from rich.style import Style
from rich.table import Table
from rich.text import Text

from attnpo.display.heat import HeatToken, readable, visible
from attnpo.display.heatmap import shade_style
from attnpo.display.shown_pair import WEIGHTS, ShownPair, ShownSide

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


def print_pairs(pairs: Sequence[ShownPair], column: str, console: Console) -> None:
    """Writes the pairs with the numbers of ``column`` to ``console``, in as many columns as that has."""
    previous = None
    for pair in pairs:
        if pair.pair_id != previous:
            _print_head(pair, console)
        previous = pair.pair_id
        console.print(Text(visible(f"{pair.note}"), style="bold"))
        for number, one in enumerate(pair.verdicts, 1):
            console.print(
                Text(
                    visible(f"round {number}: {one.summary()}" if len(pair.verdicts) > 1 else one.summary()),
                    style="dim",
                )
            )
        console.print(_table(pair, column))
    console.print(Text(f"{column}: {MEANING[column]}. Underlined: no partner in the judge's prompt.", style="dim"))


def _print_head(pair: ShownPair, console: Console) -> None:
    console.rule(Text(visible(f"pair {pair.pair_id[:12]}")), align="left")
    for message in pair.prompt:
        console.print(Text(f"{visible(message['role'])}: ", style="bold") + Text(readable(message["content"])))
    for name, side in pair.sides:
        console.print(Text(f"{name}: {side.summary}", style="dim"))
    for number, trace in enumerate(pair.traces, 1):
        console.print(Text(f"the judge's trace in round {number}: ", style="bold") + Text(readable(trace)))


def _table(pair: ShownPair, column: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, expand=True, padding=(0, 1), show_footer=True)
    table.add_column("", justify="right", style="dim", no_wrap=True)
    for name, side in pair.sides:
        table.add_column(
            name, ratio=1, overflow="fold", footer="sum", header_style="green" if name == "chosen" else "red"
        )
        total = float(side.columns[column].double().sum())
        table.add_column(column, justify="right", no_wrap=True, footer=_number(total, column))
    chosen, rejected = (_cells(side, column) for _, side in pair.sides)
    none = (Text(), Text())
    for place, (left, right) in enumerate(zip_longest(chosen, rejected, fillvalue=none)):
        table.add_row(str(place), *left, *right)
    return table


def _cells(side: ShownSide, column: str) -> list[tuple[Text, Text]]:
    values = side.columns[column].tolist()
    shades = side.columns["relative"].tolist()
    return [
        (_token(token), Text(_number(value, column), style=_style(value, shade, column)))
        for token, value, shade in zip(side.tokens, values, shades, strict=True)
    ]


def _token(token: HeatToken) -> Text:
    words = " ".join(visible(token.text).split()) or "▯"
    style = "italic" if token.end else "" if token.matched else "underline dim"
    return Text(words, style=style)


def _number(value: float, column: str) -> str:
    """``value`` as the column prints it, rounding noise and all that would print as 0 without a sign."""
    said = f"{0.0 if abs(value) < _NOTHING else value:{_DIGITS.get(column, '+.3g')}}"
    return said.lstrip("+-") if float(said) == 0 else said


def _style(value: float, relative: float, column: str) -> Style:
    if not math.isfinite(value):
        return Style(reverse=True, bold=True)
    if column in WEIGHTS:
        return shade_style(relative) if math.isfinite(relative) else Style()
    return Style(color="green" if value > 0 else "red" if value < 0 else None)
