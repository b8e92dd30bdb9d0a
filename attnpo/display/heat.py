"""What a heat map shows: tokens with weights, both responses of a pair, the judge's verdicts; and its colours.

Colour means weight relative to uniform (w * |y|) on one fixed logarithmic scale, so that maps compare: no tint at 1,
warm above up to 8, cool below down to 1/8.
"""

import math
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from attnpo.schema import SIDES, EncodedResponse, Message, PreferencePair, Round, TokenWeights, UserError
from attnpo.weights.postprocess import effective_number

LEVELS = 16  # shades on each side of uniform
OCTAVES = 3.0  # the scale ends at 2^3 = 8 times uniform, and at 1/8

RGBA = tuple[int, int, int, float]
RGB = tuple[int, int, int]


@dataclass(frozen=True)
class HeatToken:
    """One training token: its text, its weight, whether it got a partner on the source's side, whether it ends a turn.

    Several tokens of one character (byte tokens) have the text in the first and "" in the others. ``token_id``, the
    characters it ``begins`` and ``ends`` at and its log-probabilities are None where they are not known.
    """

    text: str
    weight: float | int
    matched: bool = True
    end: bool = False
    token_id: int | None = None
    begins: int | None = None
    ends: int | None = None
    policy_logp: float | int | None = None
    reference_logp: float | int | None = None

    def facts(self) -> str:
        """Returns what is known of it apart from its weight relative to uniform, in words."""
        parts = [] if self.token_id is None else [f"weight {self.weight:.4g}", f"id {self.token_id}"]
        if self.begins is not None and self.ends is not None:
            parts.append(f"characters {self.begins} to {self.ends}")
        logps = {"policy": self.policy_logp, "reference": self.reference_logp}
        told = [f"{name} {value:.3f}" for name, value in logps.items() if value is not None]
        return ", ".join([*parts, *([f"log-prob: {', '.join(told)}"] if told else [])])


@dataclass(frozen=True)
class HeatSide:
    """One response. ``length`` makes weights relative to uniform: |y| as the weight source counts it, 1 for factors.

    It is the number of tokens by default. ``coverage``: share of the tokens that got a partner, ``source_coverage`` and
    ``kept_mass``: shares of the source's tokens and of its weights that arrived, None when not known.
    ``cut``: characters of the response after its last training token.
    """

    tokens: tuple[HeatToken, ...]
    length: float | int | None = None
    coverage: float | int | None = None
    cut: int = 0
    source_coverage: float | int | None = None
    kept_mass: float | int | None = None

    def relative(self, token: HeatToken) -> float:
        """Returns the weight of ``token`` relative to uniform, w * |y|."""
        return token.weight * (len(self.tokens) if self.length is None else self.length)

    @property
    def effective(self) -> float:
        """Effective number of weights; NaN when a weight is not finite or there is none."""
        weights = torch.tensor([token.weight for token in self.tokens], dtype=torch.float64)
        return effective_number(weights) if len(weights) and bool(torch.isfinite(weights).all()) else math.nan

    @property
    def right_to_left(self) -> bool:
        """Returns whether the first letter with a direction is written from right to left."""
        kinds = (unicodedata.bidirectional(char) for token in self.tokens if not token.end for char in token.text)
        return next((kind != "L" for kind in kinds if kind in ("L", "R", "AL")), False)

    def heaviest(self, count: int = 5) -> list[tuple[str, float]]:
        """(text, w * |y|) of the tokens with the largest weights, the largest first."""
        ranked = sorted(
            (one for one in self.tokens if math.isfinite(one.weight)), key=lambda one: one.weight, reverse=True
        )
        return [
            (" ".join(visible(one.text).split()) or "(empty)", self.relative(one))
            for one in ranked[:count]
            if one.weight > 0
        ]

    def summary(self) -> str:
        """Number of tokens, what arrived and effective number of weights, in words."""
        count, effective = len(self.tokens), self.effective
        parts = [f"{count} token" + ("" if count == 1 else "s")]
        named = ("coverage", self.coverage), ("source coverage", self.source_coverage), ("kept mass", self.kept_mass)
        parts += [f"{name} {100 * share:.1f} %" for name, share in named if share is not None]
        if not math.isnan(effective):
            parts.append(f"effective number of weights {effective:.1f}")
        if self.cut:
            parts.append(f"{self.cut} characters cut")
        return ", ".join(parts)


@dataclass(frozen=True)
class Verdict:
    """What the judge said in one round. ``logits`` are those of the labels (A, B); ``token`` its most likely token."""

    chosen_is_a: bool
    logits: tuple[float | int, float | int] | None = None
    token: str | None = None

    @property
    def preference(self) -> float | None:
        """Returns the probability of the chosen response between the two labels, or None when the verdict
        was not read.
        """
        if self.logits is None:
            return None
        margin = (self.logits[0] - self.logits[1]) * (1 if self.chosen_is_a else -1)
        return 0.5 * (1 + math.tanh(margin / 2))

    def summary(self) -> str:
        """Returns the round in words."""
        order = "chosen is A" if self.chosen_is_a else "chosen is B"
        if self.preference is None:
            return f"{order}: verdict not read"
        picks = "a tie" if self.preference == 0.5 else "picks chosen" if self.preference > 0.5 else "picks rejected"
        said = "" if self.token is None else f", says {visible(self.token).strip()!r}"
        return f"{order}: {picks}, p(chosen) {self.preference:.3f}{said}"


@dataclass(frozen=True)
class SideView:
    """One response as a source read it: its own tokens, and of every layer their weights relative to uniform."""

    tokens: tuple[tuple[str, int, int, int], ...]
    """Text, id, first character and the one after the last."""
    rows: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class RoundView:
    """One round of a source, before anything was averaged, normalised or aligned; ``layers`` name the rows."""

    name: str
    layers: tuple[str, ...]
    chosen: SideView
    rejected: SideView


@dataclass(frozen=True)
class HeatRow:
    """One pair as a heat map shows it; ``note`` is a free line such as the weight source and its layer.

    ``rounds``: what the source captured, which a page can be switched to.
    """

    pair_id: str
    prompt: tuple[Message, ...]
    chosen: HeatSide
    rejected: HeatSide
    verdicts: tuple[Verdict, ...] = ()
    note: str = ""
    rounds: tuple[RoundView, ...] = ()

    @property
    def sides(self) -> tuple[tuple[str, HeatSide], tuple[str, HeatSide]]:
        """("chosen", its side), ("rejected", its side)."""
        return ("chosen", self.chosen), ("rejected", self.rejected)


# ------------------------------------------------------------------------------------------------ building


def heat_row(
    pair: PreferencePair,
    encoded: tuple[EncodedResponse, EncodedResponse],
    weights: tuple[Float[Tensor, " m"], Float[Tensor, " k"]],
    decode: Callable[[int], str],
    *,
    lengths: tuple[float | int, float | int] | None = None,
    coverage: tuple[float | int, float | int] | None = None,
    source_coverage: tuple[float | int, float | int] | None = None,
    kept_mass: tuple[float | int, float | int] | None = None,
    rounds: Sequence[Round] = (),
    layers: Sequence[str] = (),
    logps: Sequence[tuple[Sequence[float] | None, Sequence[float] | None]] = ((None, None), (None, None)),
    note: str = "",
) -> HeatRow:
    """Returns the heat map's row of one pair; tuples are (chosen, rejected), as a training example holds them.

    Args:
        pair: texts of prompt and responses.
        encoded: training ids with their characters.
        weights: a weight per training token.
        decode: the text of a single token id, for tokens without characters (end of turn) and verdicts.
        lengths: |y| as the source counts it, 1 for factors; the number of training tokens by default.
        coverage: share of matched tokens. Tokens with characters and weight 0 show as unmatched, unless this is 1.
        source_coverage, kept_mass: shares of the source's tokens and of its weights that arrived.
        rounds: the judge's rounds, for their verdicts.
        layers: names of their rows of weights, where the page may be switched to these.
        logps: of both sides the log-probabilities of its tokens under policy and reference, where they are known.
        note: a line shown with the row.
    """
    sides = [
        _heat_side(
            text,
            encoded[i],
            weights[i],
            decode,
            None if lengths is None else float(lengths[i]),
            None if coverage is None else float(coverage[i]),
            f"pair {pair.pair_id}, {name}",
            logps[i],
            None if source_coverage is None else source_coverage[i],
            None if kept_mass is None else kept_mass[i],
        )
        for i, (name, text) in enumerate((("chosen", pair.chosen), ("rejected", pair.rejected)))
    ]
    verdicts = tuple(
        Verdict(
            one.chosen_is_a,
            None if one.verdict_logits is None else (float(one.verdict_logits[0]), float(one.verdict_logits[1])),
            None if one.verdict_token is None else decode(one.verdict_token),
        )
        for one in rounds
    )
    views = tuple(_round_view(pair, place, one, layers) for place, one in enumerate(rounds, 1)) if layers else ()
    return HeatRow(pair.pair_id, pair.prompt, sides[0], sides[1], verdicts, note, views)


def _round_view(pair: PreferencePair, place: int, one: Round, layers: Sequence[str]) -> RoundView:
    order = "chosen is A" if one.chosen_is_a else "chosen is B"
    views = [_side_view(text, one.side(side)) for side, text in zip(SIDES, (pair.chosen, pair.rejected), strict=True)]
    return RoundView(f"{place}, {order}", tuple(layers), views[0], views[1])


def _side_view(text: str, found: TokenWeights) -> SideView:
    """Returns the source's tokens and its rows of weights as multiples of their mean."""
    tokens, shown = [], 0
    for token_id, (start, end) in zip(found.token_ids.tolist(), found.offsets.tolist(), strict=True):
        tokens.append((text[shown : max(shown, end)], token_id, start, end))
        shown = max(shown, end)
    weights = found.weights.double().nan_to_num()
    rows = weights / weights.abs().mean(-1, keepdim=True).clamp_min(1e-30)
    return SideView(tuple(tokens), tuple(tuple(round(value, 3) for value in row) for row in rows.tolist()))


def _heat_side(
    text: str,
    encoded: EncodedResponse,
    weights: Float[Tensor, " m"],
    decode: Callable[[int], str],
    length: float | None,
    coverage: float | None,
    where: str,
    logps: tuple[Sequence[float] | None, Sequence[float] | None],
    source_coverage: float | None,
    kept_mass: float | None,
) -> HeatSide:
    if weights.numel() != len(encoded.response_ids):
        raise UserError(
            f"{where}: expected a weight per training token, got {weights.numel()} weights for "
            f"{len(encoded.response_ids)} tokens"
        )
    tokens, shown = [], 0
    for place, (token_id, (start, end), weight) in enumerate(
        zip(encoded.response_ids, encoded.offsets, weights.tolist(), strict=True)
    ):
        policy, reference = (None if row is None else float(row[place]) for row in logps)
        if end <= start:
            tokens.append(HeatToken(decode(token_id), weight, True, True, token_id, None, None, policy, reference))
            continue
        # Characters between two tokens (spaces that offsets leave out) are shown with the later one.
        matched = weight != 0 or coverage == 1.0
        part = text[shown : max(shown, end)]
        tokens.append(HeatToken(part, weight, matched, False, token_id, start, end, policy, reference))
        shown = max(shown, end)
    return HeatSide(tuple(tokens), length, coverage, len(text) - shown, source_coverage, kept_mass)


_MARKS = {"\n": "↵\n", "\t": "⇥\t", "\r": "␍"}


def visible(text: str) -> str:
    """``text`` safe to show: line breaks and tabs carry a mark, what cannot be seen or would act is named.

    Control characters become their pictures (escape sequences never reach a terminal), characters that reorder text
    become [U+202E] and the like, lone surrogates the replacement character, spaces alone visible spaces.
    """
    if text and not text.strip(" "):
        return "␣" * len(text)
    return "".join(_visible(char) for char in text)


def readable(text: str) -> str:
    """``text`` as safe as ``visible`` makes it, with plain line breaks and spaces: for prompts."""
    return "\n".join("".join(_visible(char) for char in line) for line in text.split("\n"))


def _visible(char: str) -> str:
    if char in _MARKS:
        return _MARKS[char]
    code, kind = ord(char), unicodedata.category(char)
    if kind == "Cc":
        return chr(0x2400 + code) if code < 0x20 else f"[U+{code:04X}]"
    if kind == "Cs":
        return "\ufffd"
    if kind in ("Zl", "Zp") or code in (0x200E, 0x200F, 0x061C) or 0x202A <= code <= 0x202E or 0x2066 <= code <= 0x2069:
        return f"[U+{code:04X}]"
    return char


# ------------------------------------------------------------------------------------------------ colours


def level(relative: float | int) -> int:
    """Returns the shade of a weight relative to uniform, from -16 (1/8 or less, 0 included) over 0 (uniform) to 16 (8
    or more).

    Negative weights have the shade of their size; NaN has 0.
    """
    size = abs(relative)
    if math.isnan(size):
        return 0
    if size == 0:
        return -LEVELS
    return round(LEVELS * max(-1.0, min(1.0, math.log2(size) / OCTAVES))) if math.isfinite(size) else LEVELS


def tint(shade: int, negative: bool = False) -> RGBA:
    """Red, green, blue (0-255) and opacity (0-1) of a shade, to be laid over any background."""
    share = abs(shade) / LEVELS
    if negative:
        return 150, 80, 205, 0.12 + 0.68 * (shade + LEVELS) / (2 * LEVELS)
    if shade > 0:
        return 255 - round(15 * share), 178 - round(92 * share), 66 - round(48 * share), 0.10 + 0.85 * share
    return 70, 130, 215, 0.30 * share


def over(colour: RGBA, background: RGB) -> RGB:
    """``colour`` laid over an opaque ``background``."""
    red, green, blue, opacity = colour
    mixed = [
        round(opacity * top + (1 - opacity) * below) for top, below in zip((red, green, blue), background, strict=True)
    ]
    return mixed[0], mixed[1], mixed[2]


LEGEND: tuple[tuple[str, float], ...] = (
    ("0", 0.0), ("1/4", 0.25), ("1/2", 0.5), ("1", 1.0), ("2", 2.0), ("4", 4.0), ("8 or more", 8.0)
)  # fmt: skip
