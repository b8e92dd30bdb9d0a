"""Attention rollout: the verdict position's row in the product of all layers' attention maps (paper, ablations)."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from attnpo.judge.base import JudgeReading
from attnpo.judge.layers import StoredRow, layers_with_attention
from attnpo.schema import PairWeights, PreferencePair, UserError
from attnpo.weights.base import CapturedSource
from attnpo.weights.postprocess import Postprocess
from attnpo.weights.sources.attention import capture_judge_rounds


@dataclass(frozen=True)
class Rollout(CapturedSource):
    """Row of the last prompt token in ``prod_l (A_l + I) / 2`` (last layer leftmost); A_l is averaged over heads.

    Each row already sums to 1, so nothing is renormalised between layers (LOSSES 3.2; Abnar and Zuidema 2020).
    """

    postprocess: Postprocess = field(default_factory=Postprocess)

    requires: ClassVar[frozenset[str]] = frozenset({"judge"})

    def resolve(self, num_layers: int) -> "Rollout":
        """Returns the source itself. UserError if the judge has layers without softmax attention."""
        readable = layers_with_attention(num_layers)
        if len(readable) < num_layers:
            raise UserError(
                f"weights=rollout multiplies the attention of all layers, but this judge has attention in only "
                f"{len(readable)} of {int(num_layers)} layers ({', '.join(map(str, readable))}): set "
                "weights=attention, or choose a different judge"
            )
        return self

    def capture_fingerprint(self) -> dict[str, object]:
        """Returns the settings of the rollout: half identity, half head mean, at the verdict position."""
        return {"source": "rollout", "position": "last_prompt_token", "heads": "mean", "identity": 0.5}

    def capture(
        self, pairs: Sequence[PreferencePair], reader: object, layers: tuple[StoredRow, ...]
    ) -> list[PairWeights]:
        """Returns both judge rounds of each pair, with one float32 row each, from a single judge call."""
        return capture_judge_rounds("rollout", pairs, reader, _rollout_row, (), rollout=True)


def _rollout_row(reading: JudgeReading) -> Float[Tensor, "1 T"]:
    if reading.rollout is None:
        raise ValueError("the judge did not return the requested rollout")
    return reading.rollout.unsqueeze(0)
