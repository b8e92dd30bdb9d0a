"""Terminal tables of pairs: both responses side by side, one token and its value per line."""

import math
from collections.abc import Sequence
from itertools import zip_longest

from rich import box
from rich.console import Console
from rich.style import Style
from rich.table import Table
from rich.text import Text

from attnpo.display.heat import WEIGHTS, make_readable, make_visible
from attnpo.display.heatmap import shade_style
from attnpo.display.pair_record import WeightedResponse
from attnpo.display.weighted_pair import WeightedPair

MEANING = {
    "relative": "weight times |y|: 1 for uniform weights",
    "weight": "share of the response's weight",
    "logp": "log-probability under the policy, in nats",
    "reference_logp": "log-probability under the reference, in nats",
    "log_ratio": "log-probability under the policy minus that under the reference, in nats",
    "contribution": "contribution of the token to the reward margin of the pair",
}
_NOTHING = 1e-6  # smaller values are float32 rounding errors
_DIGITS = {"relative": ".2f", "weight": ".4f", "logp": ".3f", "reference_logp": ".3f", "log_ratio": "+.3f"}


def print_pairs(pairs: Sequence[WeightedPair], column: str, console: Console) -> None:
    """Prints the pairs with the values of ``column`` to ``console``, at full width."""
    previous = None
    for pair in pairs:
        if pair.pair.pair_id != previous:
            _print_head(pair, console)
        previous = pair.pair.pair_id
        console.print(Text(make_visible(pair.note), style="bold"))
        for line in pair.round_summaries:
            console.print(Text(make_visible(line), style="dim"))
        console.print(_make_table(pair, column))
    console.print(Text(f"{column}: {MEANING[column]}. Underlined: no match in the judge's prompt.", style="dim"))


def _print_head(one: WeightedPair, console: Console) -> None:
    console.rule(Text(make_visible(f"pair {one.pair.pair_id[:12]}")), align="left")
    for message in one.pair.prompt:
        console.print(
            Text(f"{make_visible(message['role'])}: ", style="bold") + Text(make_readable(message["content"]))
        )
    for name, side in one.sides:
        console.print(Text(f"{name}: {side.summary()}", style="dim"))
    for number, trace in enumerate(one.traces, 1):
        console.print(
            Text(f"the judge's reasoning trace in round {number}: ", style="bold") + Text(make_readable(trace))
        )


def _make_table(pair: WeightedPair, column: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, expand=True, padding=(0, 1), show_footer=True)
    table.add_column("", justify="right", style="dim", no_wrap=True)
    for name, side in pair.sides:
        head = "green" if name == "chosen" else "red"
        table.add_column(name, ratio=1, overflow="fold", footer="sum", header_style=head)
        total = float(side.columns[column].double().sum())
        table.add_column(column, justify="right", no_wrap=True, footer=_format_number(total, column))
    chosen, rejected = (_format_tokens(side, column) for _, side in pair.sides)
    for place, (left, right) in enumerate(zip_longest(chosen, rejected, fillvalue=(Text(), Text()))):
        table.add_row(str(place), *left, *right)
    return table


def _format_tokens(side: WeightedResponse, column: str) -> list[tuple[Text, Text]]:
    rows = (side.columns[column].tolist(), side.relative.tolist(), side.matched_flags, side.end_flags)
    return [
        (
            Text(
                " ".join(make_visible(token).split()) or "▯",
                style="italic" if end else "" if matched else "underline dim",
            ),
            Text(_format_number(value, column), style=_number_style(value, shade, column)),
        )
        for token, value, shade, matched, end in zip(side.tokens, *rows, strict=True)
    ]


def _format_number(value: float, column: str) -> str:
    """Formats ``value`` for the column; values that round to 0 have no sign."""
    said = f"{0.0 if abs(value) < _NOTHING else value:{_DIGITS.get(column, '+.3g')}}"
    return said.lstrip("+-") if float(said) == 0 else said


def _number_style(value: float, relative: float, column: str) -> Style:
    if not math.isfinite(value):
        return Style(reverse=True, bold=True)
    if column in WEIGHTS:
        return shade_style(relative) if math.isfinite(relative) else Style()
    return Style(color="green" if value > 0 else "red" if value < 0 else None)
