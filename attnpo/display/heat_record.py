"""Heat rows as plain data, written beside a run and read back by the page of the study it belongs to."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from attnpo.display.heat import HeatRow, HeatSide, HeatToken, Verdict


def heat_record(rows: Sequence[HeatRow]) -> list[dict[str, Any]]:
    """The rows as JSON can hold them, without what they can be switched to."""
    return [asdict(replace(row, rounds=())) for row in rows]


def read_heat(rows: Sequence[Mapping[str, Any]]) -> list[HeatRow]:
    """The rows that ``heat_record`` gave. KeyError or TypeError for what it did not give."""
    return [
        HeatRow(
            str(row["pair_id"]),
            tuple(row["prompt"]),
            _side(row["chosen"]),
            _side(row["rejected"]),
            tuple(_verdict(one) for one in row["verdicts"]),
            str(row["note"]),
        )
        for row in rows
    ]


def _side(side: Mapping[str, Any]) -> HeatSide:
    return HeatSide(**{**side, "tokens": tuple(HeatToken(**token) for token in side["tokens"])})


def _verdict(verdict: Mapping[str, Any]) -> Verdict:
    logits = verdict["logits"]
    return Verdict(**{**verdict, "logits": None if logits is None else (logits[0], logits[1])})
