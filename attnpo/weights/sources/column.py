"""Token weights and masks from the dataset: a column with numbers or character spans for each response."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from math import isfinite
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from attnpo.schema import EncodedResponse, Kind, PreferencePair, UserError
from attnpo.system.files import shorten
from attnpo.weights.base import TextSource
from attnpo.weights.postprocess import normalize


class ColumnForm(Enum):
    """Format of the lists in a column: one number per training token, or character spans."""

    TOKENS = "tokens"
    SPANS = "spans"


@dataclass(frozen=True)
class Column(TextSource):
    """Weights from the data columns ``chosen`` and ``rejected``: factors or a distribution, depending on ``kind``.

    TOKENS: a list with one number for each training token that contains response text, before truncation; true and
    false count as 1 and 0. If a long response is truncated, the numbers of the remaining tokens are used. SPANS: a list
    of ``[start, end]``, ``[start, end, weight]`` or mappings with these keys. Spans are half-open character ranges of
    the response as stored in the pair, they must not overlap, and their default weight is 1. A token gets the mean
    weight of its characters; characters outside all spans get ``elsewhere``.

    ``end_token``: the weight of tokens that contain no response text (end of turn); None means that TOKENS lists
    include numbers for these tokens. A distribution is normalised over the remaining training tokens. ``signed``:
    factors may be negative.
    """

    chosen: str = "chosen_weights"
    rejected: str = "rejected_weights"
    form: ColumnForm = ColumnForm.TOKENS
    kind: Kind = Kind.FACTOR  # type: ignore[misc]
    signed: bool = False  # type: ignore[misc]
    elsewhere: float = 0.0
    end_token: float | None = 0.0

    name: ClassVar[str] = "column"

    def __post_init__(self) -> None:
        if self.signed and self.kind is Kind.DISTRIBUTION:
            raise UserError(
                "weights.signed=true works only for factors, but weights.kind is distribution: set weights.kind=factor"
            )
        if self.end_token is None and self.form is ColumnForm.SPANS:
            raise UserError(
                "weights.end_token=null means that the lists include the end of turn, but weights.form=spans "
                "covers only characters: set weights.end_token to a number"
            )
        for name, value in (("elsewhere", self.elsewhere), ("end_token", self.end_token)):
            if value is not None and not (isfinite(value) and (self.signed or value >= 0)):
                least = "finite" if self.signed else "finite and at least 0"
                raise UserError(f"weights.{name} must be {least}, got {value}")

    @property
    def columns(self) -> tuple[str, str]:  # type: ignore[override]
        """Returns the columns of the chosen and the rejected response."""
        return self.chosen, self.rejected

    def unused_keys(self) -> dict[str, str]:
        """Lists the key that affects only spans."""
        return {"elsewhere": "weights.form=tokens"} if self.form is ColumnForm.TOKENS else {}

    def weigh(self, pair: PreferencePair, side: str, encoded: EncodedResponse) -> Float[Tensor, " m"]:
        """Returns the weights of the m training tokens, float32.

        UserError naming pair, side and column if an entry is missing, has the wrong length, is not a number, is
        negative without ``signed``, or leaves a distribution without mass.
        """
        name = self.chosen if side == "chosen" else self.rejected
        where = f"pair {pair.pair_id}, {side}, column {name!r}"
        cell = _read_cell(pair, name, where, f"weights.{side}")
        if self.form is ColumnForm.TOKENS:
            row = self._token_weights(cell, pair.response(side), encoded, where)
        else:
            row = self._span_weights(cell, pair.response(side), encoded, where)
        if self.kind is Kind.FACTOR:
            return row.float()
        if not bool(row.any()):
            raise UserError(
                f"{where}: weights.kind=distribution needs a weight above 0 on at least one training token, but "
                f"all {row.numel()} weights are 0: drop the pair, add weights, or set weights.kind=factor, which "
                "allows zeros"
            )
        return normalize(row).float()

    def _token_weights(self, cell: Sequence[object], text: str, encoded: EncodedResponse, where: str) -> Tensor:
        """Returns the column's values for the training tokens that remain after truncation."""
        values = [self._check_weight(value, f"{where}, entry {place}") for place, value in enumerate(cell)]
        own = [place for place, (start, end) in enumerate(encoded.offsets) if end > start or self.end_token is None]
        held = [(start, end) for start, end in encoded.offsets if end > start]
        cut_front = bool(held) and held[0][0] > len(text) - len(text.lstrip())
        cut_end = bool(held) and held[-1][1] < len(text.rstrip())
        lost_end = self.end_token is None and len(own) == len(held) and len(values) == len(own) + 1
        fits = len(values) >= len(own) if cut_front or cut_end else len(values) == len(own) or lost_end
        if not fits:
            least = "at least " if cut_front or cut_end else ""
            raise UserError(
                f"{where}: expected {least}{len(own)} numbers, one for each of this run's training tokens "
                f"{'including end tokens' if self.end_token is None else 'that contain text'}, got {len(values)}; "
                "create the lists with this model's tokenizer, or set weights.form=spans, which needs no tokenizer"
            )
        row = torch.full((len(encoded.offsets),), self.end_token or 0.0, dtype=torch.float64)
        kept = values[len(values) - len(own) :] if cut_front else values[: len(own)]
        row[torch.tensor(own, dtype=torch.long)] = torch.tensor(kept, dtype=torch.float64)
        return row

    def _span_weights(self, cell: Sequence[object], text: str, encoded: EncodedResponse, where: str) -> Tensor:
        """Returns the mean weight of each token's characters."""
        characters = torch.full((len(text),), self.elsewhere, dtype=torch.float64)
        taken = torch.zeros(len(text), dtype=torch.bool)
        for place, entry in enumerate(cell):
            at = f"{where}, span {place}"
            start, end, weight = _read_span(entry, at)
            if not 0 <= start < end <= len(text):
                raise UserError(
                    f"{at}: expected a range within the response's {len(text)} characters, got [{start}, {end})"
                )
            if bool(taken[start:end].any()):
                raise UserError(f"{at}: [{start}, {end}) overlaps an earlier span; give each character only one weight")
            taken[start:end] = True
            characters[start:end] = self._check_weight(weight, at)
        end_token = self.end_token or 0.0
        row = [characters[start:end].mean() if end > start else end_token for start, end in encoded.offsets]
        return torch.tensor(row, dtype=torch.float64)

    def _check_weight(self, value: object, at: str) -> float:
        """Checks a weight against the declared kind and returns it."""
        if not isinstance(value, int | float) or not isfinite(value):
            raise UserError(f"{at}: expected a finite number, got {shorten(repr(value))}")
        if value < 0 and not self.signed:
            raise UserError(
                f"{at}: expected at least 0 with weights.kind={self.kind.value}, got {value:g}; negative weights need "
                "weights.kind=factor weights.signed=true"
            )
        return float(value)


def _read_cell(pair: PreferencePair, name: str, where: str, key: str) -> Sequence[object]:
    """Returns the list in one column of a pair's data row."""
    if name not in pair.extra:
        found = ", ".join(sorted(pair.extra)) or "none"
        raise UserError(
            f"{where}: the data has no such column; columns besides prompt and responses: {found}. Choose one with "
            f"{key}=COLUMN"
        )
    cell = pair.extra[name]
    if not isinstance(cell, Sequence) or isinstance(cell, str | bytes):
        raise UserError(f"{where}: expected a list, got {shorten(repr(cell))}; every row needs weights")
    return cell


def _read_span(entry: object, at: str) -> tuple[int, int, object]:
    """Returns the start, end and weight of one span entry."""
    weight: object = None
    if isinstance(entry, Mapping) and {"start", "end"} <= set(entry) <= {"start", "end", "weight"}:
        start, end, weight = entry["start"], entry["end"], entry.get("weight")
    elif isinstance(entry, Sequence) and not isinstance(entry, str | bytes) and len(entry) in (2, 3):
        start, end, weight = (*entry, None)[:3]
    else:
        raise UserError(f"{at}: expected [start, end], [start, end, weight] or a mapping with these keys, got "
                        f"{shorten(repr(entry))}")  # fmt: skip
    if not isinstance(start, int) or not isinstance(end, int):
        raise UserError(f"{at}: expected integers for start and end, got {start!r} and {end!r}")
    return start, end, 1.0 if weight is None else weight
