"""Names of layers, and of the stored rows of captured weights.

Layers and query heads are numbered from 1 (layers as in the paper: 32 = last of 32).
"""

import logging
import re
from collections.abc import Sequence
from typing import NamedTuple

from attnpo.schema import UserError

log = logging.getLogger(__name__)


class Depth(int):
    """Number of layers in a judge; also records which of them have readable softmax attention.

    ``attending``: 1-based indices of these layers, ascending. A plain int means that all layers have attention.
    """

    attending: tuple[int, ...]

    def __new__(cls, layers: int, attending: Sequence[int] | None = None) -> "Depth":
        """Creates the depth; without ``attending``, all layers have attention."""
        made = super().__new__(cls, layers)
        made.attending = tuple(range(1, layers + 1) if attending is None else attending)
        return made


def layers_with_attention(num_layers: int) -> tuple[int, ...]:
    """Returns the 1-based indices of the layers with softmax attention, ascending; all layers for a plain int."""
    return Depth(num_layers).attending if not isinstance(num_layers, Depth) else num_layers.attending


class HeadRow(NamedTuple):
    """Row of one query head in one layer."""

    layer: int
    head: int


StoredRow = int | HeadRow
"""Key of a stored row: a layer (the mean over its heads), one head of a layer, or 0 for a row without a layer."""


def layer_column(row: StoredRow) -> str:
    """Returns the column name of a stored row: L08, or L08H03 for one head."""
    return f"L{row.layer:02d}H{row.head:02d}" if isinstance(row, HeadRow) else f"L{row:02d}"


def describe_rows(rows: Sequence[StoredRow]) -> str:
    """Describes the rows of a judge pass: "4 layers", "4 layers x 32 heads", or "1 row" without layers."""
    if set(rows) == {0}:
        return "1 row"
    heads = [row for row in rows if isinstance(row, HeadRow)]
    layers = len({row.layer for row in heads}) if heads else len(set(rows))
    words = f"{layers} {'layer' if layers == 1 else 'layers'}"
    return words if not heads else f"{words} x {len({row.head for row in heads})} heads"


_FRACTION = re.compile(r"^\s*(\d+)\s*/\s*(\d+)\s*$")


def resolve_layer(layer: int | str, num_layers: int, key: str = "weights.layer") -> int:
    """Returns the 1-based index of ``layer`` in a model with ``num_layers`` layers.

    ``layer``: a number, "last", or a fraction of the depth, e.g. "1/4" (rounded down, at least 1: 8, 16 and 24 of 32 as
    in the paper). Names and fractions count only layers with softmax attention: "last" is the last of these. "auto"
    must already have been replaced (``attnpo.lab.auto_layer``). Raises UserError naming ``key`` if there is no such
    layer.
    """
    readable = layers_with_attention(num_layers)
    whole = readable == tuple(range(1, num_layers + 1))
    numbers = f"a whole number from 1 to {num_layers}" if whole else describe_layers(readable)
    expected = f'{numbers}, "last", or a fraction such as "1/4"'
    if isinstance(layer, bool) or not isinstance(layer, int | str):
        raise UserError(f"{key}: expected {expected}, got {layer!r}")
    if isinstance(layer, str):
        number = _named_layer(layer.strip().lower(), readable)
        if number is None:
            hint = "; auto is allowed only for weights.layer of a run" if layer.strip().lower() == "auto" else ""
            raise UserError(f"{key}: expected {expected}, got {layer!r}{hint}")
        layer = number
    if not 1 <= layer <= num_layers:
        raise UserError(f"{key}: expected {expected} (layers are counted from 1), got {layer}")
    if layer not in readable:
        raise UserError(
            f"{key}={layer}: this layer of the judge has no readable softmax attention; expected {expected}"
        )
    return layer


def describe_layers(layers: Sequence[int]) -> str:
    """Lists layers for error messages: "one of the layers with attention (4, 8, 12)"."""
    return f"one of the layers with attention ({', '.join(map(str, layers))})"


def distinct_layers(layers: Sequence[int | str], num_layers: int, key: str) -> dict[int, list[str]]:
    """Groups the given layer names by layer index, ascending, in a model with ``num_layers`` layers.

    Different names for the same layer (a fraction or "last" on a shallow model) are merged and logged. Raises UserError
    naming ``key`` if a name is given twice or a layer is out of range.
    """
    named: dict[int, list[str]] = {}
    for layer in layers:
        number = resolve_layer(layer, num_layers, key)
        names, name = named.setdefault(number, []), str(layer).strip().lower()
        if name in names:
            raise UserError(
                f"{key}: expected each layer once, got {name} twice in {[str(item) for item in layers]}; remove one"
            )
        names.append(name)
    for number, names in named.items():
        if len(names) > 1:
            log.info("%s: %s are all the same layer in this model: %d of %d", key, ", ".join(names), number, num_layers)
    return dict(sorted(named.items()))


def _named_layer(name: str, layers: Sequence[int]) -> int | None:
    """Returns the 1-based index of a named layer; fractions count only ``layers``, i.e. those with attention."""
    if name == "last":
        return layers[-1]
    if re.fullmatch(r"-?\d+", name):
        return int(name)
    match = _FRACTION.match(name)
    if match is None:
        return None
    part, whole = int(match.group(1)), int(match.group(2))
    return layers[max(1, len(layers) * part // whole) - 1] if 0 < part <= whole else None
