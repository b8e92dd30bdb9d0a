"""The weight explorer: many pairs with the weights of several sources, layers and rounds in one self-contained page.

The page asks nothing of the net. Numbers are quantised and packed: a weight is a byte on a logarithmic scale of its own
set (``Scale``), a log-probability two bytes on a linear one. They are unpacked in the browser when they are looked at.
"""

import base64
import json
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from markupsafe import Markup

from attnpo.display.heat import LEGEND, LEVELS, OCTAVES, tint
from attnpo.display.templating import render
from attnpo.schema import SIDES, EncodedResponse, Message, UserError
from attnpo.system.files import write_whole

TOP = 254  # the highest code of a number; 0 is the weight 0
UNKNOWN = 255  # the code of a weight that is not finite or not there
SIGNED_TOP = 127  # codes 1..127 are positive weights and 128..254 negative ones, where a set has any
SPAN = 24.0  # octaves below the largest weight that are told apart
LOGP_TOP = 65534
LOGP_UNKNOWN = 65535

Array = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


@dataclass(frozen=True)
class ExplorerSide:
    """One response: its text, and training ids and characters of its ``tokens`` (empty ranges: end of turn).

    ``ends``: the texts of the tokens without characters by their id. ``logps``: log-probabilities per token by the name
    of the model ("policy", "reference"), where they are known.
    """

    text: str
    token_ids: Sequence[int]
    offsets: Sequence[tuple[int, int]]
    ends: Mapping[int, str] = field(default_factory=dict)
    logps: Mapping[str, Sequence[float]] = field(default_factory=dict)

    @classmethod
    def of(cls, text: str, encoded: EncodedResponse, ends: Mapping[int, str]) -> "ExplorerSide":
        """Returns the side of an encoded response, log-probabilities unknown."""
        return cls(text, encoded.response_ids, encoded.offsets, ends)


@dataclass(frozen=True)
class SideWeights:
    """The weights of one response's tokens. ``length`` makes them relative to uniform: |y|, or 1 for factors.

    ``coverage``: share of the tokens with characters that got a partner on the source's side, ``source_coverage`` and
    ``kept_mass``: shares of the source's tokens and of its weights that arrived. None when not known.
    """

    weights: Sequence[float]
    length: float | int
    coverage: float | int | None = None
    source_coverage: float | int | None = None
    kept_mass: float | int | None = None


@dataclass(frozen=True)
class ExplorerPair:
    """One pair; ``weights`` by view (``View``) hold both sides, a view may lack the pair. ``note``: a line about it."""

    pair_id: str
    prompt: Sequence[Message]
    chosen: ExplorerSide
    rejected: ExplorerSide
    weights: Mapping["View", tuple[SideWeights, SideWeights]]
    note: str = ""

    @property
    def sides(self) -> tuple[ExplorerSide, ExplorerSide]:
        """Chosen, rejected."""
        return self.chosen, self.rejected


@dataclass(frozen=True)
class View:
    """Names one set of weights: a source, a layer of it ("" without layers) and a round ("combined", "round 1")."""

    source: str
    layer: str = ""
    round: str = "combined"


# ------------------------------------------------------------------------------------------------ numbers


@dataclass(frozen=True)
class Scale:
    """How the weights of a view, relative to uniform, become bytes: evenly in log2 from ``low`` to ``high``."""

    low: float
    high: float
    signed: bool

    @property
    def step(self) -> float:
        """Octaves between neighbouring codes."""
        return (self.high - self.low) / ((SIGNED_TOP if self.signed else TOP) - 1)

    @property
    def error(self) -> float:
        """Largest relative error of a weight within the scale: half a step."""
        return 2 ** (self.step / 2) - 1

    @classmethod
    def over(cls, relative: Array) -> "Scale":
        """Returns the scale from the smallest to the largest finite weight apart from 0, at most 24 octaves."""
        sizes = np.abs(relative[np.isfinite(relative) & (relative != 0)])
        high = math.log2(float(sizes.max())) if sizes.size else 0.0
        low = max(math.log2(float(sizes.min())), high - SPAN) if sizes.size else 0.0
        return cls(low, high, bool((relative[np.isfinite(relative)] < 0).any()))

    def encode(self, relative: Array) -> bytes:
        """Returns a byte per weight."""
        top = SIGNED_TOP if self.signed else TOP
        finite = np.isfinite(relative)
        present = finite & (relative != 0)
        logs = np.log2(np.abs(np.where(present, relative, 1.0)))
        places = np.round((logs - self.low) / self.step) if self.step else np.zeros_like(logs)
        codes = np.where(present, 1 + np.clip(places, 0, top - 1), 0)
        codes = np.where(finite, codes + np.where(present & (relative < 0), SIGNED_TOP, 0), UNKNOWN)
        return codes.astype(np.uint8).tobytes()

    def decode(self, packed: bytes) -> Array:
        """Returns the weights of the codes, NaN where unknown; the page's script does the same."""
        codes = np.frombuffer(packed, dtype=np.uint8).astype(np.float64)
        negative = self.signed & (codes > SIGNED_TOP) & (codes < UNKNOWN)
        places = codes - 1 - np.where(negative, SIGNED_TOP, 0)
        sizes = np.exp2(self.low + places * self.step) * np.where(negative, -1, 1)
        return np.where(codes == 0, 0.0, np.where(codes == UNKNOWN, np.nan, sizes))


def encode_logps(logps: Array) -> tuple[bytes, float]:
    """Two bytes per log-probability (little end first), and the nats between neighbouring codes; NaN has its own."""
    known = np.isfinite(logps)
    step = float(-logps[known].min(initial=0.0)) / LOGP_TOP or 1.0
    codes = np.where(known, np.clip(np.round(-np.where(known, logps, 0.0) / step), 0, LOGP_TOP), LOGP_UNKNOWN)
    return codes.astype("<u2").tobytes(), step


def packed(data: bytes) -> Markup:
    """Returns bytes as the page holds them: deflated, in base64."""
    return Markup(base64.b64encode(zlib.compress(data, 6)).decode("ascii"))


# ------------------------------------------------------------------------------------------------ the page


def explorer_html(pairs: Sequence[ExplorerPair], *, title: str = "Token weights", note: str = "") -> str:
    """Returns the explorer of ``pairs`` as one HTML page; ``note`` is a line below its title.

    Weights relative to uniform are kept to half a step of their ``Scale`` (at most 3.4 %, 6.8 % where there are
    negative ones), which the page states; weights of exactly 0 are exact. Log-probabilities are kept to 1/131068 of the
    lowest one.

    Raises:
        UserError: no pairs, a pair without weights, or weights or log-probabilities of another number than the tokens.
    """
    views = list(dict.fromkeys(view for pair in pairs for view in pair.weights))
    if not views:
        raise UserError("the explorer got no pairs with weights; expected at least one pair and one view of it")
    _check(pairs)
    blobs: list[tuple[str, Markup]] = []

    def keep(name: str, data: bytes) -> None:
        blobs.append((name, packed(data)))

    sides = [side for pair in pairs for side in pair.sides]
    keep("ids", np.array([one for side in sides for one in side.token_ids], dtype="<i4").tobytes())
    bounds = [np.array(side.offsets, dtype=np.int64).reshape(-1, 2) for side in sides]
    gaps = [np.diff(one.reshape(-1), prepend=0) for one in bounds]  # gap in front of a token, its characters, ...
    keep("characters", np.concatenate(gaps).astype("<i4").tobytes())
    described = []
    for number, view in enumerate(views):
        rows = [pair.weights.get(view) for pair in pairs]
        relative = np.concatenate(
            [
                np.full(len(side.token_ids), np.nan) if row is None else _relative(row[place])
                for pair, row in zip(pairs, rows, strict=True)
                for place, side in enumerate(pair.sides)
            ]
        )
        scale = Scale.over(relative)
        keep(f"weights-{number}", scale.encode(relative))
        described.append(
            {
                **{"source": view.source, "layer": view.layer, "round": view.round},
                **{"low": scale.low, "step": scale.step, "signed": scale.signed, "error": scale.error},
                "lengths": [None if row is None else [side.length for side in row] for row in rows],
                **{
                    name: [None if row is None else [getattr(side, name) for side in row] for row in rows]
                    for name in ("coverage", "source_coverage", "kept_mass")
                },
            }
        )
    models = []
    for number, name in enumerate(dict.fromkeys(name for side in sides for name in side.logps)):
        logps = [np.array(side.logps.get(name, [math.nan] * len(side.token_ids)), dtype=float) for side in sides]
        data, step = encode_logps(np.concatenate(logps))
        keep(f"logps-{number}", data)
        models.append({"name": name, "step": step})
    texts = {
        "pairs": [
            {
                "id": pair.pair_id,
                "note": pair.note,
                "prompt": [[message["role"], message["content"]] for message in pair.prompt],
                "texts": [side.text for side in pair.sides],
                "counts": [len(side.token_ids) for side in pair.sides],
            }
            for pair in pairs
        ],
        "ends": {number: text for side in sides for number, text in side.ends.items()},
        "views": described,
        "logps": models,
        "legend": [[name, value] for name, value in LEGEND],
        "levels": LEVELS,
        "octaves": OCTAVES,
        "sides": SIDES,
        "note": note,
    }
    keep("texts", json.dumps(texts, separators=(",", ":")).encode("ascii"))
    at_first = {"texts", "ids", "characters", *(f"weights-{number}" for number in _looked_at_first(views))}
    return render(
        "explorer.html",
        title=title,
        blobs_at_first=[blob for blob in blobs if blob[0] in at_first],
        blobs_later=[blob for blob in blobs if blob[0] not in at_first],
        shades=Markup(_shades()),
    )


def write_explorer(path: Path, pairs: Sequence[ExplorerPair], *, title: str = "Token weights", note: str = "") -> Path:
    """Writes ``explorer_html`` to ``path``, whole or not at all, and returns it."""
    write_whole(path, explorer_html(pairs, title=title, note=note))
    return path


def _looked_at_first(views: Sequence[View]) -> set[int]:
    """Returns the view that the page opens with and the one it is compared with: the next source's
    first, or the next.
    """
    return {0, next((number for number, view in enumerate(views) if view.source != views[0].source), 1)}


def _relative(row: SideWeights) -> Array:
    return np.array(row.weights, dtype=np.float64) * row.length


def _check(pairs: Sequence[ExplorerPair]) -> None:
    for pair in pairs:
        if not pair.weights:
            raise UserError(f"explorer, pair {pair.pair_id}: expected weights of at least one view, got none")
        for place, (name, side) in enumerate(zip(SIDES, pair.sides, strict=True)):
            counts = {f"weights of {view}": len(rows[place].weights) for view, rows in pair.weights.items()}
            counts |= {f"log-probs of {model}": len(row) for model, row in side.logps.items()}
            counts["offsets"] = len(side.offsets)
            for what, count in counts.items():
                if count != len(side.token_ids):
                    raise UserError(
                        f"explorer, pair {pair.pair_id}, {name}: expected one of the {what} for each of the "
                        f"{len(side.token_ids)} tokens, got {count}"
                    )


def _shades() -> str:
    """Style rules of the shades, those of negative weights included."""
    rules = []
    for prefix, negative in (("h", False), ("v", True)):
        for shade in range(-LEVELS, LEVELS + 1):
            red, green, blue, opacity = tint(shade, negative)
            ink = ";color:#1b1205" if shade >= 9 and not negative else ""
            rules.append(f".{prefix}{shade + LEVELS}{{background:rgba({red},{green},{blue},{opacity:.3f}){ink}}}")
    return "\n".join(rules)
