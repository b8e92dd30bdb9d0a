"""A pair as it is shown: tokens of both responses, and per token the numbers of one view."""

from collections.abc import Mapping
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from attnpo.display.heat import HeatRow, HeatToken, Verdict
from attnpo.schema import Message


@dataclass(frozen=True)
class View:
    """Which weights are looked at; ``layer`` None for sources without layers.

    ``round``: mean, 1 or 2. ``stage``: captured (raw), source (post-processed), or the transform that came last.
    """

    layer: int | None
    round: str
    stage: str

    def words(self) -> str:
        """Returns the view in words."""
        layer = [] if self.layer is None else [f"layer {self.layer}"]
        rounds = "mean of the rounds" if self.round == "mean" else f"round {self.round}"
        return ", ".join([*layer, rounds, f"stage {self.stage}"])


@dataclass(frozen=True)
class ShownSide:
    """One response: m tokens, their ids and characters (None where they are not known), and columns of m numbers."""

    tokens: tuple[HeatToken, ...]
    ids: tuple[int, ...]
    offsets: tuple[tuple[int, int], ...] | None
    columns: Mapping[str, Float[Tensor, " m"]]
    summary: str


@dataclass(frozen=True)
class ShownPair:
    """One pair under one view; ``heat`` is its heat map where the weights are known as such.

    ``traces``: what the judge wrote before its verdicts, by round.
    """

    pair_id: str
    prompt: tuple[Message, ...]
    view: View | None
    chosen: ShownSide
    rejected: ShownSide
    verdicts: tuple[Verdict, ...] = ()
    note: str = ""
    heat: HeatRow | None = None
    traces: tuple[str, ...] = ()

    @property
    def sides(self) -> tuple[tuple[str, ShownSide], tuple[str, ShownSide]]:
        """("chosen", its side), ("rejected", its side)."""
        return ("chosen", self.chosen), ("rejected", self.rejected)

    def rows(self) -> list[dict[str, object]]:
        """Returns a mapping per token, chosen first: pair, view, token, its characters, and the columns' numbers."""
        view = {} if self.view is None else vars(self.view)
        return [
            {
                "pair_id": self.pair_id,
                "side": name,
                **view,
                "position": place,
                "token": token.text,
                "token_id": side.ids[place],
                "start": None if side.offsets is None else side.offsets[place][0],
                "end": None if side.offsets is None else side.offsets[place][1],
                "matched": token.matched and not token.end,
                **{column: float(values[place]) for column, values in side.columns.items()},
            }
            for name, side in self.sides
            for place, token in enumerate(side.tokens)
        ]


WEIGHTS = ("relative", "weight")
