"""Token weights and judge verdicts of one pair: the data behind heat maps, tables and files."""

import math
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from attnpo.display.heat import make_visible
from attnpo.schema import PreferencePair, UserError
from attnpo.weights.postprocess import effective_token_count

Range = tuple[int, int]
Columns = Mapping[str, Float[Tensor, " m"]]


@dataclass(frozen=True)
class WeightedResponse:
    """Response with a weight for each of its m training tokens, including the end of turn.

    ``tokens``: the string of each token, including preceding whitespace; if several tokens form one character (byte
    tokens), the first contains the character and the others are "". ``offsets``: half-open character ranges of
    ``text``, empty for the end of turn; () if unknown. ``length``: |y| as the source counts it, 1 for factors.
    ``coverage``: share of tokens with characters that match a source token. ``source_coverage`` and ``kept_mass``:
    shares of the source's tokens and weights that reached training tokens. All three shares are NaN if unknown.
    ``scores``: additional values per token, e.g. the log-probabilities "logp" (policy) and "reference_logp".
    """

    text: str
    tokens: tuple[str, ...]
    token_ids: tuple[int, ...]
    offsets: tuple[Range, ...]
    weights: Float[Tensor, " m"]
    length: float
    coverage: float = math.nan
    source_coverage: float = math.nan
    kept_mass: float = math.nan
    scores: Columns = field(default_factory=dict)

    def __post_init__(self) -> None:
        counts = {"token ids": len(self.token_ids), **{name: len(row) for name, row in self.columns.items()}}
        counts |= {"offsets": len(self.offsets)} if self.offsets else {}
        for name, count in counts.items():
            if count != len(self.tokens):
                raise UserError(f"{name}: expected one value per token ({len(self.tokens)} tokens), got {count}")

    @property
    def relative(self) -> Float[Tensor, " m"]:
        """Returns the weights relative to uniform, w * |y|: 1 for a token of average weight."""
        return self.weights * self.length

    @property
    def columns(self) -> Columns:
        """Returns all per-token values, by column name."""
        return {"weight": self.weights, "relative": self.relative, **self.scores}

    @property
    def end_flags(self) -> tuple[bool, ...]:
        """Returns for each token whether it ends the turn."""
        return tuple(end <= start for start, end in self.offsets) or (False,) * len(self.tokens)

    @property
    def matched_flags(self) -> tuple[bool, ...]:
        """Returns for each token whether it matches a source token."""
        found = [not self.offsets or self.coverage == 1.0 or weight != 0 for weight in self.weights.tolist()]
        return tuple(partner and not end for partner, end in zip(found, self.end_flags, strict=True))

    @property
    def num_cut_characters(self) -> int:
        """Returns the number of characters after the last training token."""
        return len(self.text) - max((end for start, end in self.offsets if end > start), default=0)

    @property
    def num_effective(self) -> float:
        """Returns the effective number of weights; NaN if there are no weights or if any is not finite."""
        known = len(self.weights) and bool(self.weights.isfinite().all())
        return effective_token_count(self.weights) if known else math.nan

    @property
    def is_right_to_left(self) -> bool:
        """Returns whether the first letter with a direction is right-to-left."""
        texts = (text for text, end in zip(self.tokens, self.end_flags, strict=True) if not end)
        kinds = (unicodedata.bidirectional(char) for text in texts for char in text)
        return next((kind != "L" for kind in kinds if kind in ("L", "R", "AL")), False)

    def heaviest_tokens(self, count: int = 5) -> list[tuple[str, float]]:
        """Returns (text, w * |y|) of the tokens with the largest weights, in descending order."""
        rows = zip(self.tokens, self.weights.tolist(), self.relative.tolist(), strict=True)
        ranked = sorted((row for row in rows if math.isfinite(row[1]) and row[1] > 0), key=lambda row: -row[1])
        return [(" ".join(make_visible(text).split()) or "(empty)", relative) for text, _, relative in ranked[:count]]

    def summary(self) -> str:
        """Describes the token count, the shares aligned with the source and the effective number of weights."""
        count, effective = len(self.tokens), self.num_effective
        parts = [f"{count} token" + ("" if count == 1 else "s")]
        named = ("coverage", self.coverage), ("source coverage", self.source_coverage), ("kept mass", self.kept_mass)
        parts += [f"{name} {100 * share:.1f} %" for name, share in named if not math.isnan(share)]
        if not math.isnan(effective):
            parts.append(f"effective number of weights {effective:.1f}")
        if self.num_cut_characters:
            parts.append(f"{self.num_cut_characters} characters cut")
        return ", ".join(parts)

    def describe_token(self, place: int) -> str:
        """Describes a token: weight, id, characters and log-probabilities."""
        parts = [f"weight {float(self.weights[place]):.4g}", f"id {self.token_ids[place]}"]
        start, end = self.offsets[place] if self.offsets else (0, 0)
        parts += [f"characters {start} to {end}"] if end > start else []
        named = {"policy": self.scores.get("logp"), "reference": self.scores.get("reference_logp")}
        told = [f"{name} {float(row[place]):.3f}" for name, row in named.items() if row is not None]
        return ", ".join([*parts, *([f"log-prob: {', '.join(told)}"] if told else [])])

    def to_dict(self) -> dict[str, object]:
        """Returns JSON-serializable values."""
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
            **({"scores": {name: row.tolist() for name, row in self.scores.items()}} if self.scores else {}),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "WeightedResponse":
        """Restores a response from the output of ``to_dict``.

        Raises:
            KeyError, TypeError or ValueError: ``data`` has a different format.
        """
        return cls(
            data["text"],
            tuple(data["tokens"]),
            tuple(data["token_ids"]),
            tuple((start, end) for start, end in data["offsets"]),
            torch.tensor(data["weights"], dtype=torch.float64),
            data["length"],
            data["coverage"],
            data["source_coverage"],
            data["kept_mass"],
            {name: torch.tensor(row, dtype=torch.float64) for name, row in data.get("scores", {}).items()},
        )


@dataclass(frozen=True)
class Verdict:
    """Judge's verdict in one round. ``logits``: logits of the labels (A, B); ``token``: the most likely token."""

    chosen_is_a: bool
    logits: tuple[float | int, float | int] | None = None
    token: str | None = None

    @property
    def p_chosen(self) -> float | None:
        """Returns the probability of the chosen response's label; None if the verdict was not read."""
        if self.logits is None:
            return None
        margin = (self.logits[0] - self.logits[1]) * (1 if self.chosen_is_a else -1)
        return 0.5 * (1 + math.tanh(margin / 2))

    def summary(self) -> str:
        """Describes the verdict in words."""
        order = "chosen is A" if self.chosen_is_a else "chosen is B"
        if self.p_chosen is None:
            return f"{order}: verdict not read"
        picks = "a tie" if self.p_chosen == 0.5 else "picks chosen" if self.p_chosen > 0.5 else "picks rejected"
        said = "" if self.token is None else f", says {make_visible(self.token).strip()!r}"
        return f"{order}: {picks}, p(chosen) {self.p_chosen:.3f}{said}"


@dataclass(frozen=True, repr=False)
class PairRecord:
    """Both responses of a pair with their training weights, and the judge's verdicts.

    ``verdicts``: one per answer order; in the first, the chosen response is answer A. ``note``: a line of text, e.g.
    the weight source and the layer.
    """

    pair: PreferencePair
    chosen: WeightedResponse
    rejected: WeightedResponse
    verdicts: tuple[Verdict, ...] = ()
    note: str = ""

    @property
    def sides(self) -> tuple[tuple[str, WeightedResponse], tuple[str, WeightedResponse]]:
        """Returns ("chosen", chosen response), ("rejected", rejected response)."""
        return ("chosen", self.chosen), ("rejected", self.rejected)

    @property
    def round_summaries(self) -> list[str]:
        """Returns the judge's verdicts, one line per round."""
        return [f"round {number}: {one.summary()}" for number, one in enumerate(self.verdicts, 1)]
