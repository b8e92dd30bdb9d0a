"""Attention rollout: the verdict position's row of the product of all layers' attention (paper, ablations)."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from attnpo.judge.base import JudgeReading
from attnpo.judge.layers import Row, attending
from attnpo.schema import PairWeights, PreferencePair, UserError
from attnpo.weights.base import CapturedSource
from attnpo.weights.postprocess import Postprocess
from attnpo.weights.sources.attention import judge_rounds


@dataclass(frozen=True)
class Rollout(CapturedSource):
    """Last prompt token's row of ``prod_l (A_l + I) / 2``, newest layer from the left, A_l the head mean.

    Rows already sum to 1, so nothing is renormalised between layers (LOSSES 3.2; Abnar and Zuidema 2020).
    """

    postprocess: Postprocess = field(default_factory=Postprocess)

    requires: ClassVar[frozenset[str]] = frozenset({"judge"})

    def resolve(self, num_layers: int) -> "Rollout":
        """Returns the source itself. UserError for a judge that has layers without softmax attention."""
        readable = attending(num_layers)
        if len(readable) < num_layers:
            raise UserError(
                f"weights=rollout multiplies the attention of every layer, and this judge has attention in "
                f"{len(readable)} of {int(num_layers)} layers only ({', '.join(map(str, readable))}): set "
                "weights=attention, or take another judge"
            )
        return self

    def capture_fingerprint(self) -> dict[str, object]:
        """Returns what is read: half identity, half head mean, at the verdict position."""
        return {"source": "rollout", "position": "last_prompt_token", "heads": "mean", "identity": 0.5}

    def capture(self, pairs: Sequence[PreferencePair], reader: object, layers: tuple[Row, ...]) -> list[PairWeights]:
        """Returns both judge rounds of each pair, one float32 row each; all prompts go to the judge in one call."""
        return judge_rounds("rollout", pairs, reader, _row, (), rollout=True)


def _row(reading: JudgeReading) -> Float[Tensor, "1 T"]:
    if reading.rollout is None:
        raise ValueError("the judge was asked for rollout and gave none")
    return reading.rollout.unsqueeze(0)
