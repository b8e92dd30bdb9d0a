"""Heat rows as plain data, written beside a run and read back by the page of the study it belongs to."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import NotRequired, TypedDict

from attnpo.display.heat import HeatRow, HeatSide, HeatToken, Verdict
from attnpo.schema import Message


class TokenData(TypedDict):
    """The fields of a ``HeatToken``."""

    text: str
    weight: float | int
    matched: bool
    end: bool
    token_id: int | None
    begins: int | None
    ends: int | None
    policy_logp: float | int | None
    reference_logp: float | int | None


class SideData(TypedDict):
    """Those of a ``HeatSide``."""

    tokens: list[TokenData]
    length: float | int | None
    coverage: float | int | None
    cut: int
    source_coverage: NotRequired[float | int | None]
    kept_mass: NotRequired[float | int | None]


class VerdictData(TypedDict):
    """Those of a ``Verdict``."""

    chosen_is_a: bool
    logits: list[float | int] | None
    token: str | None


class RowData(TypedDict):
    """Those of a ``HeatRow`` that are kept."""

    pair_id: str
    prompt: list[Message]
    chosen: SideData
    rejected: SideData
    verdicts: list[VerdictData]
    note: str


def heat_record(rows: Sequence[HeatRow]) -> list[dict[str, object]]:
    """Returns the rows as JSON can hold them, without what they can be switched to."""
    return [asdict(replace(row, rounds=())) for row in rows]


def read_heat(rows: Sequence[RowData]) -> list[HeatRow]:
    """Returns the rows that ``heat_record`` gave. KeyError or TypeError for what it did not give."""
    return [
        HeatRow(
            row["pair_id"],
            tuple(row["prompt"]),
            _side(row["chosen"]),
            _side(row["rejected"]),
            tuple(_verdict(one) for one in row["verdicts"]),
            row["note"],
        )
        for row in rows
    ]


def _side(side: SideData) -> HeatSide:
    tokens = tuple(HeatToken(**token) for token in side["tokens"])
    arrived = side.get("source_coverage"), side.get("kept_mass")  # older records have neither
    return HeatSide(tokens, side["length"], side["coverage"], side["cut"], *arrived)


def _verdict(verdict: VerdictData) -> Verdict:
    logits = verdict["logits"]
    return Verdict(verdict["chosen_is_a"], None if logits is None else (logits[0], logits[1]), verdict["token"])
