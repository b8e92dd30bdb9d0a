"""Weights of one pair, or of many, on the training tokens: to read, to hand on and to look at."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, overload

from jaxtyping import Float
from rich.console import Console
from torch import Tensor

from attnpo.display.heat import HeatRow, Verdict
from attnpo.display.heatmap import heatmap_html, heatmap_terminal
from attnpo.schema import SIDES, PairWeights, PreferencePair, UserError
from attnpo.system.files import write_whole

if TYPE_CHECKING:
    import pandas as pd

Range = tuple[int, int]


class WeighedToken(NamedTuple):
    """One training token of one response, as a row of a table.

    ``start``, ``end``: its characters of the response (none at the end of turn). ``relative``: the weight times |y|, 1
    if uniform. ``matched``: it got a partner among the source's tokens.
    """

    pair_id: str
    side: str
    position: int
    token: str
    token_id: int
    start: int
    end: int
    weight: float
    relative: float
    matched: bool


@dataclass(frozen=True)
class WeighedResponse:
    """A response's m training tokens with a weight each, the end of turn among them.

    ``tokens``: their texts with the blanks before them. ``offsets``: half-open character ranges of ``text``, empty for
    the end of turn. ``length``: |y| as the source counts it, 1 for factors. ``coverage``: the share of the tokens with
    characters that got a partner among the source's tokens. ``matched``: which did. ``source_coverage`` and
    ``kept_mass``: the shares of the source's tokens and of its weights that arrived.
    """

    text: str
    tokens: tuple[str, ...]
    token_ids: tuple[int, ...]
    offsets: tuple[Range, ...]
    weights: Float[Tensor, " m"]
    length: float
    coverage: float
    matched: tuple[bool, ...]
    source_coverage: float = 1.0
    kept_mass: float = 1.0

    @property
    def relative(self) -> Float[Tensor, " m"]:
        """Returns the weights relative to uniform, w * |y|: 1 where a token counts as much as the mean token."""
        return self.weights * self.length

    def to_dict(self) -> dict[str, object]:
        """Plain values, which JSON can hold."""
        return {
            "text": self.text,
            "tokens": list(self.tokens),
            "token_ids": list(self.token_ids),
            "offsets": [list(span) for span in self.offsets],
            "weights": self.weights.tolist(),
            "relative": self.relative.tolist(),
            "length": self.length,
            "coverage": self.coverage,
            "source_coverage": self.source_coverage,
            "kept_mass": self.kept_mass,
        }


@dataclass(frozen=True, repr=False)
class WeighedPair:
    """Both responses of a pair with their weights, as training uses them, and what the judge said.

    ``verdicts``: one per order of the answers, the first with the chosen one as answer A. ``layer``: the number of the
    layer that was read, None for sources without one. ``captured``: the raw rows on the source's tokens.
    """

    pair: PreferencePair
    chosen: WeighedResponse
    rejected: WeighedResponse
    verdicts: tuple[Verdict, ...]
    layer: int | None
    heat: HeatRow
    captured: PairWeights | None
    again: Callable[[int | str | None, int | None], "WeighedPair"]

    @property
    def sides(self) -> tuple[tuple[str, WeighedResponse], tuple[str, WeighedResponse]]:
        """("chosen", its response), ("rejected", its response)."""
        return ("chosen", self.chosen), ("rejected", self.rejected)

    @property
    def tokens(self) -> list[WeighedToken]:
        """Returns a row per training token, those of the chosen response first."""
        return [
            WeighedToken(self.pair.pair_id, side, place, token, token_id, span[0], span[1], weight, relative, matched)
            for side, one in self.sides
            for place, (token, token_id, span, weight, relative, matched) in enumerate(
                zip(
                    *(one.tokens, one.token_ids, one.offsets, one.weights.tolist(), one.relative.tolist(), one.matched),
                    strict=True,
                )
            )
        ]

    def at(self, layer: int | str | None = None, *, round: int | None = None) -> "WeighedPair":
        """Returns the same pair at another layer, or by one of the judge's rounds (1: chosen is A, 2: chosen is B)
        alone.

        Read from the same forward pass of the judge. UserError for a layer or round that was not read.
        """
        return self.again(layer, round)

    def to_dict(self) -> dict[str, object]:
        """Plain values, which JSON can hold."""
        said = [
            {"chosen_is_a": one.chosen_is_a, "p_chosen": one.preference, "token": one.token} for one in self.verdicts
        ]
        return {
            "pair_id": self.pair.pair_id,
            "prompt": [dict(turn) for turn in self.pair.prompt],
            "layer": self.layer,
            "verdicts": said,
            **{side: one.to_dict() for side, one in self.sides},
        }

    def to_frame(self) -> "pd.DataFrame":
        """Returns a pandas table with the fields of ``WeighedToken`` as columns. UserError without pandas."""
        return frame_of(self.tokens)

    def show(self, console: Console | None = None) -> None:
        """Shows the heat map: in a notebook as a coloured page, elsewhere in the terminal (or on ``console``)."""
        show_heat([self.heat], console)

    def html(self, path: Path | str) -> Path:
        """Writes the heat map as a self-contained page to ``path``, and returns that."""
        return write_page([self.heat], path)

    def png(self, path: Path | str) -> Path:
        """Draws the heat map as a picture in ``path`` alone, and returns that."""
        from attnpo.display.heat_figure import heatmap_figure

        return heatmap_figure(self.heat, path, svg=False)

    def _repr_html_(self) -> str:
        return heatmap_html([self.heat], page=False)

    def __repr__(self) -> str:
        counts = ", ".join(f"{side} {len(one.tokens)} tokens" for side, one in self.sides)
        read = "" if self.layer is None else f", layer {self.layer}"
        return f"WeighedPair({self.pair.pair_id[:12]}, {counts}{read})"


class WeighedPairs(Sequence[WeighedPair]):
    """Weighed pairs in the order they were given."""

    def __init__(self, pairs: Sequence[WeighedPair]) -> None:
        self._pairs = tuple(pairs)

    def __len__(self) -> int:
        return len(self._pairs)

    @overload
    def __getitem__(self, place: int) -> WeighedPair: ...
    @overload
    def __getitem__(self, place: slice) -> "WeighedPairs": ...
    def __getitem__(self, place: int | slice) -> "WeighedPair | WeighedPairs":
        return WeighedPairs(self._pairs[place]) if isinstance(place, slice) else self._pairs[place]

    @property
    def tokens(self) -> list[WeighedToken]:
        """Returns a row per training token of every pair."""
        return [token for pair in self for token in pair.tokens]

    def at(self, layer: int | str | None = None, *, round: int | None = None) -> "WeighedPairs":
        """Returns the same pairs at another layer, or by one of the judge's rounds alone."""
        return WeighedPairs([pair.at(layer, round=round) for pair in self])

    def to_dict(self) -> list[dict[str, object]]:
        """Returns one mapping of plain values per pair."""
        return [pair.to_dict() for pair in self]

    def to_frame(self) -> "pd.DataFrame":
        """Returns one pandas table of all pairs' tokens. UserError without pandas."""
        return frame_of(self.tokens)

    def show(self, console: Console | None = None) -> None:
        """Shows the heat maps one below the other, in a notebook or in the terminal."""
        show_heat([pair.heat for pair in self], console)

    def html(self, path: Path | str) -> Path:
        """Writes the heat maps as one self-contained page to ``path``, and returns that."""
        return write_page([pair.heat for pair in self], path)

    def _repr_html_(self) -> str:
        return heatmap_html([pair.heat for pair in self], page=False)

    def __repr__(self) -> str:
        return f"WeighedPairs({len(self)} pairs)"


def weighed_responses(heat: HeatRow, pair: PreferencePair, ids: Sequence[tuple[Sequence[int], Sequence[Range]]],
                      weights: Sequence[Float[Tensor, " _"]]) -> tuple[WeighedResponse, WeighedResponse]:  # fmt: skip
    """Returns both responses of ``heat`` with token ids, characters and weights; sequences are (chosen, rejected)."""
    made = [
        WeighedResponse(
            text=pair.response(side),
            tokens=tuple(token.text for token in shown.tokens),
            token_ids=tuple(token_ids),
            offsets=tuple(offsets),
            weights=row,
            length=float(len(shown.tokens) if shown.length is None else shown.length),
            coverage=1.0 if shown.coverage is None else float(shown.coverage),
            matched=tuple(token.matched and not token.end for token in shown.tokens),
            source_coverage=1.0 if shown.source_coverage is None else float(shown.source_coverage),
            kept_mass=1.0 if shown.kept_mass is None else float(shown.kept_mass),
        )
        for side, (_, shown), (token_ids, offsets), row in zip(SIDES, heat.sides, ids, weights, strict=True)
    ]
    return made[0], made[1]


def frame_of(rows: Sequence[object]) -> "pd.DataFrame":
    """Returns a pandas table of named tuples or mappings. UserError without pandas."""
    try:
        import pandas as pd
    except ImportError as error:
        raise UserError(
            "to_frame() needs the package pandas, which is not installed: pip install pandas, or read .tokens or "
            ".to_dict(), which hold the same"
        ) from error
    return pd.DataFrame(rows)


def write_page(rows: Sequence[HeatRow], path: Path | str) -> Path:
    """Writes the heat maps of ``rows`` as one page to ``path``, and returns that."""
    target = Path(path).expanduser()
    target.parent.mkdir(parents=True, exist_ok=True)
    write_whole(target, heatmap_html(rows))
    return target


def show_heat(rows: Sequence[HeatRow], console: Console | None = None) -> None:
    """Shows the heat maps of ``rows``: coloured HTML in a notebook, else in the terminal."""
    if console is None and in_notebook():
        from IPython.display import HTML, display

        display(HTML(heatmap_html(rows, page=False)))  # type: ignore[no-untyped-call]
    else:
        heatmap_terminal(rows, Console() if console is None else console)


def in_notebook() -> bool:
    """Returns whether this process is the kernel of a notebook."""
    module = sys.modules.get("IPython")
    shell = None if module is None else module.get_ipython()
    return shell is not None and hasattr(shell, "kernel")
