"""What a weight source is, what it works with, and how a layer is named.

Layers are counted from 1 as in the paper (32 = last of 32).
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from attnpo.schema import (
    EncodedResponse,
    JudgeModel,
    JudgePrompt,
    Kind,
    PairWeights,
    PreferencePair,
    UserError,
)
from attnpo.weights.postprocess import Postprocess


@runtime_checkable
class PromptBuilder(Protocol):
    """Builds the judge rounds of a pair; ``attnpo.text.judge_template.JudgePrompts`` is the one in use."""

    @property
    def label_ids(self) -> tuple[int, int]:
        """Token ids of the two labels (A, B)."""
        ...

    def build(self, pair: PreferencePair) -> tuple[JudgePrompt, JudgePrompt]:
        """Round 0 with the chosen response as answer A, round 1 with the rejected one."""
        ...

    def fingerprint(self) -> dict[str, Any]:
        """Every setting of the prompts that changes a number."""
        ...


@dataclass(frozen=True)
class Tools:
    """What sources may call while capturing. ``verdict`` also reads the two label logits (full depth).

    ``progress`` is called with (pairs done, pairs in all) after each stored chunk.
    """

    judge: JudgeModel | None = None
    prompts: PromptBuilder | None = None
    verdict: bool = True
    progress: Callable[[int, int], None] | None = None


@runtime_checkable
class WeightSource(Protocol):
    """Where token weights come from: captured once, stored raw, selected on every use."""

    @property
    def kind(self) -> Kind:
        """Whether a row is a distribution over the response or a factor used as it is."""
        ...

    @property
    def signed(self) -> bool:
        """Whether negative weights are legal."""
        ...

    @property
    def tokens(self) -> str:
        """ "source": rows live on the source's own tokens and are aligned; "train": on the training ids."""
        ...

    @property
    def requires(self) -> frozenset[str]:
        """What capturing needs: a subset of {"judge", "generator", "scorers"}; empty means nothing is captured."""
        ...

    @property
    def postprocess(self) -> Postprocess | None:
        """How the rounds become one distribution; None takes the mean over rounds as it is."""
        ...

    def resolve(self, num_layers: int) -> "WeightSource":
        """The same source with every layer name turned into a 1-based number; UserError when outside the range."""
        ...

    def capture_layers(self, num_layers: int) -> tuple[int, ...]:
        """The 1-based layers to store, rising; (0,) for the one row of a source without layers; () stores nothing."""
        ...

    def wanted(self) -> tuple[int, ...]:
        """The stored layers that ``select`` reads, of a resolved source; empty for a source without layers."""
        ...

    def capture_fingerprint(self) -> dict[str, Any]:
        """Every setting that changes a stored number; never the layer, the heads or the post-processing."""
        ...

    def capture(self, pairs: Sequence[PreferencePair], tools: Tools, layers: tuple[int, ...]) -> list[PairWeights]:
        """Raw weights of ``pairs`` in their order, a row for each of ``layers``."""
        ...

    def select(self, captured: PairWeights, layers: tuple[int, ...]) -> PairWeights:
        """``captured`` (rows of ``layers``) with the one row left that this source is about."""
        ...


@runtime_checkable
class NativeSource(WeightSource, Protocol):
    """A source that needs no capture: it weighs the training tokens from what they are."""

    def weigh(self, pair_id: str, side: str, encoded: EncodedResponse) -> Float[Tensor, "m"]:
        """A weight for every training token of one response."""
        ...


_FRACTION = re.compile(r"^\s*(\d+)\s*/\s*(\d+)\s*$")


def resolve_layer(layer: int | str, num_layers: int) -> int:
    """The 1-based number of ``layer`` in a model of ``num_layers`` layers.

    ``layer``: a number, "last", or a fraction of the depth such as "1/4" (rounded down, at least 1: 8, 16 and 24
    of 32 as in the paper). "auto" belongs to a study, which replaces it first. UserError otherwise.
    """
    expected = f'a whole number from 1 to {num_layers}, "last", or a fraction such as "1/4"'
    if isinstance(layer, bool) or not isinstance(layer, int | str):
        raise UserError(f"weights.layer: expected {expected}, got {layer!r}")
    if isinstance(layer, str):
        number = _named_layer(layer.strip().lower(), num_layers)
        if number is None:
            hint = "; only a study resolves auto" if layer.strip().lower() == "auto" else ""
            raise UserError(f"weights.layer: expected {expected}, got {layer!r}{hint}")
        layer = number
    if not 1 <= layer <= num_layers:
        raise UserError(f"weights.layer: expected {expected} (layers are counted from 1), got {layer}")
    return layer


def _named_layer(name: str, num_layers: int) -> int | None:
    if name == "last":
        return num_layers
    if re.fullmatch(r"-?\d+", name):
        return int(name)
    match = _FRACTION.match(name)
    if match is None:
        return None
    part, whole = int(match.group(1)), int(match.group(2))
    return max(1, num_layers * part // whole) if 0 < part <= whole else None


def fingerprint_of(thing: Any) -> dict[str, Any]:
    """The fingerprint of ``thing``: a mapping as it is, otherwise what its ``fingerprint()`` returns."""
    return dict(thing) if isinstance(thing, Mapping) else dict(thing.fingerprint())
