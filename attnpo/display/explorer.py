"""Weight explorer: a self-contained page with the weights of many pairs for several sources, layers and rounds.

The page loads nothing from the network. Numbers are quantised: a weight is stored in one byte on a logarithmic scale
(``WeightScale``, one per set of weights), a log-probability in two bytes on a linear scale. The browser decodes them on
demand.
"""

import base64
import json
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from markupsafe import Markup

from attnpo.display.heat import LEGEND, LEVELS, OCTAVES, shade_rules
from attnpo.display.templating import render
from attnpo.display.weighted_pair import WeightedPair
from attnpo.schema import SIDES, UserError
from attnpo.system.files import write_atomically

TOP = 254  # largest code of a number; 0 is the weight 0
UNKNOWN = 255  # code of a weight that is missing or not finite
SIGNED_TOP = 127  # codes 1..127 are positive weights and 128..254 negative ones, if there are any
SPAN = 24.0  # octaves below the largest weight that are distinguished
LOGP_TOP = 65534
LOGP_UNKNOWN = 65535
FACTS = {"lengths": "length", **{name: name for name in ("coverage", "source_coverage", "kept_mass")}}
LOGPS = {"policy": "logp", "reference": "reference_logp"}  # columns of log-probabilities by model

Array = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


@dataclass(frozen=True)
class ExplorerView:
    """Name of one set of weights: source, layer ("" without layers) and round ("combined", "round 1")."""

    source: str
    layer: str = ""
    round: str = "combined"


ExplorerPair = Mapping[ExplorerView, WeightedPair]
"""One pair with the same training tokens in all views; different pairs may have different views."""


# ------------------------------------------------------------------------------------------------ numbers


@dataclass(frozen=True)
class WeightScale:
    """Logarithmic scale, from 2^``low`` to 2^``high``, that encodes relative weights of a view as bytes."""

    low: float
    high: float
    signed: bool

    @property
    def octaves_per_code(self) -> float:
        """Returns the number of octaves between adjacent codes."""
        return (self.high - self.low) / ((SIGNED_TOP if self.signed else TOP) - 1)

    @property
    def relative_error(self) -> float:
        """Returns the maximum relative error of a weight within the scale: half the distance between codes."""
        return 2 ** (self.octaves_per_code / 2) - 1

    @classmethod
    def fit(cls, relative: Array) -> "WeightScale":
        """Fits the scale to the smallest and largest non-zero finite weights, spanning at most 24 octaves."""
        sizes = np.abs(relative[np.isfinite(relative) & (relative != 0)])
        high = math.log2(float(sizes.max())) if sizes.size else 0.0
        low = max(math.log2(float(sizes.min())), high - SPAN) if sizes.size else 0.0
        return cls(low, high, bool((relative[np.isfinite(relative)] < 0).any()))

    def encode(self, relative: Array) -> bytes:
        """Encodes each weight as one byte."""
        top = SIGNED_TOP if self.signed else TOP
        finite = np.isfinite(relative)
        present = finite & (relative != 0)
        logs = np.log2(np.abs(np.where(present, relative, 1.0)))
        places = np.round((logs - self.low) / self.octaves_per_code) if self.octaves_per_code else np.zeros_like(logs)
        codes = np.where(present, 1 + np.clip(places, 0, top - 1), 0)
        codes = np.where(finite, codes + np.where(present & (relative < 0), SIGNED_TOP, 0), UNKNOWN)
        return codes.astype(np.uint8).tobytes()


def encode_logps(logps: Array) -> tuple[bytes, float]:
    """Encodes each log-probability in two bytes (little endian); also returns the distance between codes in nats.

    NaN has a separate code.
    """
    known = np.isfinite(logps)
    step = float(-logps[known].min(initial=0.0)) / LOGP_TOP or 1.0
    codes = np.where(known, np.clip(np.round(-np.where(known, logps, 0.0) / step), 0, LOGP_TOP), LOGP_UNKNOWN)
    return codes.astype("<u2").tobytes(), step


# ------------------------------------------------------------------------------------------------ the page


def explorer_html(pairs: Sequence[ExplorerPair], *, title: str = "Token weights", note: str = "") -> str:
    """Renders the explorer of ``pairs`` as one HTML page; ``note`` is a line below the title.

    Relative weights are accurate to half a step of their ``WeightScale`` (at most 3.4 %, or 6.8 % if some weights are
    negative), as stated on the page; weights of exactly 0 are exact. Log-probabilities are accurate to 1/131068 of the
    lowest one.

    Raises:
        UserError: there are no pairs, or a pair has no weights.
    """
    views = list(dict.fromkeys(view for pair in pairs for view in pair))
    if not views or not all(pairs):
        raise UserError("the weight explorer needs at least one pair, and at least one view per pair")
    blobs: dict[str, Markup] = {}

    def add_blob(name: str, data: bytes) -> None:
        blobs[name] = Markup(base64.b64encode(zlib.compress(data, 6)).decode("ascii"))

    firsts = [next(iter(pair.values())) for pair in pairs]
    sides = [side for pair in firsts for _, side in pair.sides]
    add_blob("ids", np.array([one for side in sides for one in side.token_ids], dtype="<i4").tobytes())
    bounds = [np.array(side.offsets, dtype=np.int64).reshape(-1, 2) for side in sides]
    gaps = [np.diff(one.reshape(-1), prepend=0) for one in bounds]  # gap in front of a token, its characters, ...
    add_blob("characters", np.concatenate(gaps).astype("<i4").tobytes())
    described = []
    for number, view in enumerate(views):
        rows = [None if (row := pair.get(view)) is None else (row.chosen, row.rejected) for pair in pairs]
        relative = np.concatenate(
            [
                np.full(len(side.tokens), np.nan)
                if row is None
                else row[place].weights.double().numpy() * row[place].length
                for first, row in zip(firsts, rows, strict=True)
                for place, (_, side) in enumerate(first.sides)
            ]
        )
        scale = WeightScale.fit(relative)
        add_blob(f"weights-{number}", scale.encode(relative))
        described.append(
            {
                **{"source": view.source, "layer": view.layer, "round": view.round},
                **{
                    "low": scale.low,
                    "step": scale.octaves_per_code,
                    "signed": scale.signed,
                    "error": scale.relative_error,
                },
                **{
                    heads: [
                        None if row is None else [_nan_to_none(getattr(side, name)) for side in row] for row in rows
                    ]
                    for heads, name in FACTS.items()
                },
            }
        )
    models = []
    known = [(name, key) for name, key in LOGPS.items() if any(key in side.scores for side in sides)]
    for number, (name, key) in enumerate(known):
        logps = [side.scores.get(key, torch.full_like(side.weights, math.nan)).double().numpy() for side in sides]
        data, step = encode_logps(np.concatenate(logps))
        add_blob(f"logps-{number}", data)
        models.append({"name": name, "step": step})
    texts = {
        "pairs": [
            {
                "id": one.pair.pair_id,
                "note": "; ".join(next((row.round_summaries for row in pair.values() if row.round_summaries), [])),
                "prompt": [[message["role"], message["content"]] for message in one.pair.prompt],
                "texts": [side.text for _, side in one.sides],
                "counts": [len(side.tokens) for _, side in one.sides],
            }
            for pair, one in zip(pairs, firsts, strict=True)
        ],
        "ends": {
            token_id: text
            for side in sides
            for token_id, text, end in zip(side.token_ids, side.tokens, side.end_flags, strict=True)
            if end
        },
        "views": described,
        "logps": models,
        "legend": LEGEND,
        "levels": LEVELS,
        "octaves": OCTAVES,
        "sides": SIDES,
        "note": note,
    }
    add_blob("texts", json.dumps(texts, separators=(",", ":")).encode("ascii"))
    # The page opens with the first view and one to compare: the first view of another source, or else the second.
    other = next((number for number, view in enumerate(views) if view.source != views[0].source), 1)
    at_first = {"texts", "ids", "characters", "weights-0", f"weights-{other}"}
    return render(
        "explorer.html",
        title=title,
        blobs_at_first=[blob for blob in blobs.items() if blob[0] in at_first],
        blobs_later=[blob for blob in blobs.items() if blob[0] not in at_first],
        shades=Markup(shade_rules()),
    )


def write_explorer(path: Path, pairs: Sequence[ExplorerPair], *, title: str = "Token weights", note: str = "") -> Path:
    """Writes ``explorer_html`` atomically to ``path`` and returns the path."""
    write_atomically(path, explorer_html(pairs, title=title, note=note))
    return path


def _nan_to_none(value: float) -> float | None:
    """Converts NaN to None for JSON."""
    return None if math.isnan(value) else float(value)
