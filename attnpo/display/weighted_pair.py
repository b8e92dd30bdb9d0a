"""Token weights of one or many pairs, for tables, files and heat maps."""

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
from attnpo.display.pair_record import PairRecord, Verdict, WeightedResponse
from attnpo.schema import SIDES, EncodedResponse, PairWeights, PreferencePair, UserError
from attnpo.system.files import write_atomically

if TYPE_CHECKING:
    import pandas as pd


class WeightedToken(NamedTuple):
    """One training token of a response, as a table row.

    ``start``, ``end``: the token's character range in the response (empty for the end of turn). ``relative``: weight
    times |y|, 1 if uniform. ``matched``: whether the token matches a token of the weight source.
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


class _PairViews(ABC):
    """Tables and heat maps of all tokens, for one or several pairs."""

    @property
    @abstractmethod
    def _all_pairs(self) -> Sequence["WeightedPair"]: ...

    @property
    def tokens(self) -> list[WeightedToken]:
        """Returns one row per training token of each pair, chosen response first."""
        rows = (row for pair in self._all_pairs for row in pair.rows())
        return [WeightedToken(**{name: row[name] for name in WeightedToken._fields}) for row in rows]

    def to_frame(self) -> "pd.DataFrame":
        """Returns a pandas DataFrame with the fields of ``WeightedToken`` as columns."""
        from pandas import DataFrame

        return DataFrame(self.tokens)

    def show(self, console: Console | None = None) -> None:
        """Displays the heat map: as HTML in a notebook, else in the terminal (or on ``console``)."""
        if console is None and in_notebook():
            from IPython.display import HTML, display

            display(HTML(self._repr_html_()))  # type: ignore[no-untyped-call]
        else:
            heatmap_terminal(self._all_pairs, Console() if console is None else console)

    def html(self, path: Path | str) -> Path:
        """Writes the heat map as a self-contained page to ``path``; returns the path."""
        target = Path(path).expanduser()
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(target, heatmap_html(self._all_pairs))
        return target

    def svg(self, path: Path | str) -> Path:
        """Draws the heat map as an SVG at ``path``; returns the path."""
        return write_svg(self._all_pairs, path)

    def _repr_html_(self) -> str:
        return heatmap_html(self._all_pairs, page=False)


@dataclass(frozen=True, repr=False)
class WeightedPair(_PairViews, PairRecord):
    """Pair with token weights that can be displayed, saved and recomputed at other layers.

    ``layer``: layer number, None for sources without layers. ``captured``: raw weights on the source's tokens.
    ``again``: recomputes the weights at another layer or for one round. ``view``: names that distinguish these weights
    from other weights of the same pair, if several are shown. ``traces``: reasoning traces that the judge generated
    before the verdicts.
    """

    layer: int | None = None
    captured: PairWeights | None = None
    again: Callable[[int | str | None, int | None], "WeightedPair"] | None = None
    view: Mapping[str, object] = field(default_factory=dict)
    traces: tuple[str, ...] = ()

    @property
    def _all_pairs(self) -> Sequence["WeightedPair"]:
        return (self,)

    def rows(self) -> list[dict[str, Any]]:
        """Returns one mapping per token, chosen response first: pair, view, token, character range and values."""
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
                for place, (token, matched) in enumerate(zip(side.tokens, side.matched_flags, strict=True))
            ]
        return found

    def at(self, layer: int | str | None = None, *, round: int | None = None) -> "WeightedPair":
        """Returns the same pair at another layer, or for one judge round (1: chosen is A, 2: chosen is B).

        Needs no additional forward pass of the judge.

        Raises:
            UserError: the layer or round was not captured.
        """
        if self.again is None:
            raise UserError(f"pair {self.pair.pair_id}: weights of other layers were not stored")
        return self.again(layer, round)

    def to_dict(self) -> dict[str, object]:
        """Returns JSON-serializable values."""
        said = [
            {"chosen_is_a": one.chosen_is_a, "p_chosen": one.p_chosen, "logits": one.logits, "token": one.token}
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
    def from_dict(cls, data: Mapping[str, Any]) -> "WeightedPair":
        """Restores a pair from the output of ``to_dict``.

        Raises:
            KeyError, TypeError or ValueError: ``data`` has a different format.
        """
        chosen, rejected = (WeightedResponse.from_dict(data[side]) for side in SIDES)
        said = (
            Verdict(one["chosen_is_a"], one["logits"] and tuple(one["logits"]), one["token"])
            for one in data["verdicts"]
        )
        pair = PreferencePair(data["pair_id"], tuple(data["prompt"]), chosen.text, rejected.text)
        return cls(pair, chosen, rejected, tuple(said), layer=data["layer"])

    def __repr__(self) -> str:
        counts = ", ".join(f"{side} {len(one.tokens)} tokens" for side, one in self.sides)
        read = "" if self.layer is None else f", layer {self.layer}"
        return f"WeightedPair({self.pair.pair_id[:12]}, {counts}{read})"


class WeightedPairs(_PairViews, Sequence[WeightedPair]):
    """Weighted pairs in the given order."""

    def __init__(self, pairs: Sequence[WeightedPair]) -> None:
        self._pairs = tuple(pairs)

    def __len__(self) -> int:
        return len(self._pairs)

    @overload
    def __getitem__(self, place: int) -> WeightedPair: ...
    @overload
    def __getitem__(self, place: slice) -> "WeightedPairs": ...
    def __getitem__(self, place: int | slice) -> "WeightedPair | WeightedPairs":
        return WeightedPairs(self._pairs[place]) if isinstance(place, slice) else self._pairs[place]

    @property
    def _all_pairs(self) -> Sequence[WeightedPair]:
        return self._pairs

    def at(self, layer: int | str | None = None, *, round: int | None = None) -> "WeightedPairs":
        """Returns the same pairs at another layer, or for one judge round."""
        return WeightedPairs([pair.at(layer, round=round) for pair in self])

    def to_dict(self) -> list[dict[str, object]]:
        """Returns one JSON-serializable mapping per pair."""
        return [pair.to_dict() for pair in self]

    def __repr__(self) -> str:
        return f"WeightedPairs({len(self)} pairs)"


def pair_with_weights(
    pair: PreferencePair,
    example: TrainingExample,
    decode: Callable[[int], str],
    captured: PairWeights | None = None,
    scores: Sequence[Mapping[str, Float[Tensor, " _"]]] = ({}, {}),
) -> WeightedPair:
    """Combines a pair with the weights from its training example.

    Args:
        pair: texts of prompt and responses.
        example: training ids with character ranges, and weights.
        decode: returns the text of a single token id, for tokens without characters (end of turn) and verdicts.
        captured: the source's weights by judge round, which include the verdicts.
        scores: additional per-token values by name, for the chosen and the rejected response.
    """
    chosen, rejected = (
        WeightedResponse(
            pair.response(side),
            tuple(_iter_token_texts(pair.response(side), encoded, decode)),
            tuple(encoded.response_ids),
            tuple((start, end) for start, end in encoded.offsets),
            example.weights[i],
            float(example.weight_scales[i]),
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
    return WeightedPair(pair, chosen, rejected, verdicts, captured=captured)


def _iter_token_texts(text: str, encoded: EncodedResponse, decode: Callable[[int], str]) -> Iterator[str]:
    """Yields each token's text, including preceding characters not covered by any offsets, e.g. spaces."""
    shown = 0
    for token_id, (start, end) in zip(encoded.response_ids, encoded.offsets, strict=True):
        yield decode(token_id) if end <= start else text[shown : max(shown, end)]
        shown = max(shown, end) if end > start else shown


def in_notebook() -> bool:
    """Returns whether this process is a notebook kernel."""
    module = sys.modules.get("IPython")
    shell = None if module is None else module.get_ipython()
    return shell is not None and hasattr(shell, "kernel")
