"""Weights of one pair, or of many, on the training tokens: to read, to hand on and to look at."""

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, overload

from jaxtyping import Float
from rich.console import Console
from torch import Tensor

from attnpo.data.collate import TrainingExample
from attnpo.display.heatmap import heatmap_html, heatmap_terminal, write_svg
from attnpo.display.pair_record import PairRecord, Verdict, WeighedResponse
from attnpo.schema import SIDES, EncodedResponse, PairWeights, PreferencePair, UserError
from attnpo.system.files import write_atomically

if TYPE_CHECKING:
    import pandas as pd


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


class _Shown(ABC):
    """Tables and heat maps of all tokens, for one pair and for several."""

    @property
    @abstractmethod
    def _all(self) -> Sequence["WeighedPair"]: ...

    @property
    def tokens(self) -> list[WeighedToken]:
        """Returns a row per training token of each pair, those of its chosen response first."""
        rows = (row for pair in self._all for row in pair.rows())
        return [WeighedToken(**{name: row[name] for name in WeighedToken._fields}) for row in rows]

    def to_frame(self) -> "pd.DataFrame":
        """Returns a pandas table with the fields of ``WeighedToken`` as columns."""
        from pandas import DataFrame

        return DataFrame(self.tokens)

    def show(self, console: Console | None = None) -> None:
        """Shows the heat map: in a notebook as a coloured page, elsewhere in the terminal (or on ``console``)."""
        if console is None and in_notebook():
            from IPython.display import HTML, display

            display(HTML(self._repr_html_()))  # type: ignore[no-untyped-call]
        else:
            heatmap_terminal(self._all, Console() if console is None else console)

    def html(self, path: Path | str) -> Path:
        """Writes the heat map as a self-contained page to ``path``, and returns that."""
        target = Path(path).expanduser()
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(target, heatmap_html(self._all))
        return target

    def svg(self, path: Path | str) -> Path:
        """Draws the heat map as a picture in ``path``, and returns that."""
        return write_svg(self._all, path)

    def _repr_html_(self) -> str:
        return heatmap_html(self._all, page=False)


@dataclass(frozen=True, repr=False)
class WeighedPair(_Shown, PairRecord):
    """Pair with weights that can be looked at, written and weighed again.

    ``layer``: the number of the layer that was read, None for sources without one.
    ``captured``: the raw rows on the source's tokens. ``again`` weighs it at another layer or by one round. ``view``:
    which weights these are, by name, where several are shown. ``traces``: what the judge wrote before its verdicts.
    """

    layer: int | None = None
    captured: PairWeights | None = None
    again: Callable[[int | str | None, int | None], "WeighedPair"] | None = None
    view: Mapping[str, object] = field(default_factory=dict)
    traces: tuple[str, ...] = ()

    @property
    def _all(self) -> Sequence["WeighedPair"]:
        return (self,)

    def rows(self) -> list[dict[str, Any]]:
        """Returns a mapping per token, chosen first: pair, view, token, its characters, and the columns' numbers."""
        found = []
        for name, side in self.sides:
            columns = {column: values.tolist() for column, values in side.columns.items()}
            spans = side.offsets or [(None, None)] * len(side.tokens)
            found += [
                {
                    "pair_id": self.pair.pair_id,
                    "side": name,
                    **self.view,
                    "position": place,
                    "token": token,
                    "token_id": side.token_ids[place],
                    "start": spans[place][0],
                    "end": spans[place][1],
                    "matched": matched,
                    **{column: values[place] for column, values in columns.items()},
                }
                for place, (token, matched) in enumerate(zip(side.tokens, side.has_partner, strict=True))
            ]
        return found

    def at(self, layer: int | str | None = None, *, round: int | None = None) -> "WeighedPair":
        """Returns the same pair at another layer, or by one judge round alone (1: chosen is A, 2: chosen is B).

        Read from the same forward pass of the judge. UserError for a layer or round that was not read.
        """
        if self.again is None:
            raise UserError(f"pair {self.pair.pair_id}: its weights are known at this layer alone")
        return self.again(layer, round)

    def to_dict(self) -> dict[str, object]:
        """Returns plain values, which JSON can hold."""
        said = [
            {"chosen_is_a": one.chosen_is_a, "p_chosen": one.preference, "logits": one.logits, "token": one.token}
            for one in self.verdicts
        ]
        return {
            "pair_id": self.pair.pair_id,
            "prompt": [dict(turn) for turn in self.pair.prompt],
            "layer": self.layer,
            "verdicts": said,
            **{side: one.to_dict() for side, one in self.sides},
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "WeighedPair":
        """Returns the pair that ``to_dict`` gave. KeyError, TypeError or ValueError for what it did not give."""
        chosen, rejected = (WeighedResponse.from_dict(data[side]) for side in SIDES)
        said = (
            Verdict(one["chosen_is_a"], one["logits"] and tuple(one["logits"]), one["token"])
            for one in data["verdicts"]
        )
        pair = PreferencePair(data["pair_id"], tuple(data["prompt"]), chosen.text, rejected.text)
        return cls(pair, chosen, rejected, tuple(said), layer=data["layer"])

    def __repr__(self) -> str:
        counts = ", ".join(f"{side} {len(one.tokens)} tokens" for side, one in self.sides)
        read = "" if self.layer is None else f", layer {self.layer}"
        return f"WeighedPair({self.pair.pair_id[:12]}, {counts}{read})"


class WeighedPairs(_Shown, Sequence[WeighedPair]):
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
    def _all(self) -> Sequence[WeighedPair]:
        return self._pairs

    def at(self, layer: int | str | None = None, *, round: int | None = None) -> "WeighedPairs":
        """Returns the same pairs at another layer, or by one of the judge's rounds alone."""
        return WeighedPairs([pair.at(layer, round=round) for pair in self])

    def to_dict(self) -> list[dict[str, object]]:
        """Returns one mapping of plain values per pair."""
        return [pair.to_dict() for pair in self]

    def __repr__(self) -> str:
        return f"WeighedPairs({len(self)} pairs)"


def pair_with_weights(
    pair: PreferencePair,
    example: TrainingExample,
    decode: Callable[[int], str],
    captured: PairWeights | None = None,
    scores: Sequence[Mapping[str, Float[Tensor, " _"]]] = ({}, {}),
) -> WeighedPair:
    """Returns a pair with the weights of its training example.

    Args:
        pair: texts of prompt and responses.
        example: training ids with their characters, and the weights.
        decode: the text of a single token id, for tokens without characters (end of turn) and verdicts.
        captured: the source's rounds, for their verdicts.
        scores: more numbers of the tokens, chosen and rejected.
    """
    chosen, rejected = (
        WeighedResponse(
            pair.response(side),
            tuple(_texts(pair.response(side), encoded, decode)),
            tuple(encoded.response_ids),
            tuple((start, end) for start, end in encoded.offsets),
            example.weights[i],
            float(example.scales[i]),
            float(example.coverage[i]),
            float(example.source_coverage[i]),
            float(example.kept_mass[i]),
            scores[i],
        )
        for i, (side, encoded) in enumerate(zip(SIDES, example.sides, strict=True))
    )
    verdicts = tuple(
        Verdict(
            one.chosen_is_a,
            None if one.verdict_logits is None else (float(one.verdict_logits[0]), float(one.verdict_logits[1])),
            None if one.verdict_token is None else decode(one.verdict_token),
        )
        for one in (() if captured is None else captured.rounds)
    )
    return WeighedPair(pair, chosen, rejected, verdicts, captured=captured)


def _texts(text: str, encoded: EncodedResponse, decode: Callable[[int], str]) -> Iterator[str]:
    """Yields each token's text; characters between two tokens (spaces that offsets leave out) go with the later one."""
    shown = 0
    for token_id, (start, end) in zip(encoded.response_ids, encoded.offsets, strict=True):
        yield decode(token_id) if end <= start else text[shown : max(shown, end)]
        shown = max(shown, end) if end > start else shown


def in_notebook() -> bool:
    """Returns whether this process is the kernel of a notebook."""
    module = sys.modules.get("IPython")
    shell = None if module is None else module.get_ipython()
    return shell is not None and hasattr(shell, "kernel")
