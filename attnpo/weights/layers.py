"""How layers and the stored rows of captured weights are named.

Layers and query heads are counted from 1 (layers as in the paper: 32 = last of 32).
"""

import logging
import re
from collections.abc import Sequence
from typing import NamedTuple

from attnpo.schema import UserError

log = logging.getLogger(__name__)


class HeadRow(NamedTuple):
    """The row of one query head of one layer."""

    layer: int
    head: int


Row = int | HeadRow
"""What names a stored row: a layer (the mean over its heads), one head of a layer, or 0 for no single layer."""


def layer_column(row: Row) -> str:
    """The name of the column that holds a stored row: L08, or L08H03 for one head."""
    return f"L{row.layer:02d}H{row.head:02d}" if isinstance(row, HeadRow) else f"L{row:02d}"


def rows_in_words(rows: Sequence[Row]) -> str:
    """What a judge pass reads, for the log: "4 layers", "4 layers x 32 heads", or "1 row" of no single layer."""
    if set(rows) == {0}:
        return "1 row"
    heads = [row for row in rows if isinstance(row, HeadRow)]
    layers = len({row.layer for row in heads}) if heads else len(set(rows))
    words = f"{layers} {'layer' if layers == 1 else 'layers'}"
    return words if not heads else f"{words} x {len({row.head for row in heads})} heads"


_FRACTION = re.compile(r"^\s*(\d+)\s*/\s*(\d+)\s*$")


def resolve_layer(layer: int | str, num_layers: int, key: str = "weights.layer") -> int:
    """The 1-based number of ``layer`` in a model of ``num_layers`` layers.

    ``layer``: a number, "last", or a fraction of the depth such as "1/4" (rounded down, at least 1: 8, 16 and 24
    of 32 as in the paper). "auto" has been replaced by then (``attnpo.studies.auto_layer``). UserError naming ``key``
    otherwise.
    """
    expected = f'a whole number from 1 to {num_layers}, "last", or a fraction such as "1/4"'
    if isinstance(layer, bool) or not isinstance(layer, int | str):
        raise UserError(f"{key}: expected {expected}, got {layer!r}")
    if isinstance(layer, str):
        number = _named_layer(layer.strip().lower(), num_layers)
        if number is None:
            hint = "; auto is for weights.layer of a run alone" if layer.strip().lower() == "auto" else ""
            raise UserError(f"{key}: expected {expected}, got {layer!r}{hint}")
        layer = number
    if not 1 <= layer <= num_layers:
        raise UserError(f"{key}: expected {expected} (layers are counted from 1), got {layer}")
    return layer


def distinct_layers(layers: Sequence[int | str], num_layers: int, key: str) -> dict[int, list[str]]:
    """The names given for each layer, by its number in a model of ``num_layers`` layers, rising.

    Names that differ but mean one layer here (a fraction or "last" on a shallow model) are merged and logged.
    UserError naming ``key`` for one name given twice, and for a layer out of range.
    """
    named: dict[int, list[str]] = {}
    for layer in layers:
        number = resolve_layer(layer, num_layers, key)
        names, name = named.setdefault(number, []), str(layer).strip().lower()
        if name in names:
            raise UserError(
                f"{key}: expected every layer once, got {name} twice in {[str(item) for item in layers]}; remove one"
            )
        names.append(name)
    for number, names in named.items():
        if len(names) > 1:
            log.info("%s: %s are one and the same here: layer %d of %d", key, ", ".join(names), number, num_layers)
    return dict(sorted(named.items()))


def _named_layer(name: str, num_layers: int) -> int | None:
    if name == "last":
        return num_layers
    if re.fullmatch(r"-?\d+", name):
        return int(name)
    match = _FRACTION.match(name)
    if match is None:
        return None
    part, whole = int(match.group(1)), int(match.group(2))
    return max(1, num_layers * part // whole) if 0 < part <= whole else None
