"""Attention rollout: the verdict position's row of the product of all layers' attention (paper, ablations)."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from attnpo.schema import Kind, PairWeights, PreferencePair, UserError
from attnpo.weights.base import Tools
from attnpo.weights.layers import Row, attending
from attnpo.weights.postprocess import Postprocess
from attnpo.weights.sources.spans import cut_round

ONLY = (0,)


@dataclass(frozen=True)
class Rollout:
    """The last prompt token's row of ``prod_l (A_l + I) / 2``, newest layer from the left, A_l the head mean.

    Rows already sum to 1, so nothing is renormalised between layers (LOSSES 3.2; Abnar and Zuidema 2020).
    """

    postprocess: Postprocess = field(default_factory=Postprocess)

    kind: ClassVar[Kind] = Kind.DISTRIBUTION
    signed: ClassVar[bool] = False
    tokens: ClassVar[str] = "source"
    requires: ClassVar[frozenset[str]] = frozenset({"judge"})

    def resolve(self, num_layers: int) -> "Rollout":
        """The source itself: all layers take part. UserError for a judge that has layers without softmax attention."""
        readable = attending(num_layers)
        if len(readable) < num_layers:
            raise UserError(
                f"weights=rollout multiplies the attention of every layer, and this judge has attention in "
                f"{len(readable)} of {int(num_layers)} layers only ({', '.join(map(str, readable))}): set "
                "weights=attention, or take another judge"
            )
        return self

    def capture_layers(self, num_layers: int) -> tuple[int, ...]:
        """One row, under the number 0 of what belongs to no single layer."""
        return ONLY

    def wanted(self) -> tuple[int, ...]:
        """The one row."""
        return ONLY

    def capture_fingerprint(self) -> dict[str, object]:
        """What is read: half identity, half head mean, at the verdict position."""
        return {"source": "rollout", "position": "last_prompt_token", "heads": "mean", "identity": 0.5}

    def capture(self, pairs: Sequence[PreferencePair], tools: Tools, layers: tuple[Row, ...]) -> list[PairWeights]:
        """Both judge rounds of each pair, one float32 row each; all prompts go to the judge in one call."""
        if tools.judge is None or tools.prompts is None:
            raise UserError("weights=rollout reads a judge: set judge.path and judge.template_file")
        prompts = [prompt for pair in pairs for prompt in tools.prompts.build(pair)]
        readings = tools.judge.read(
            [prompt.input_ids for prompt in prompts],
            layers=(),
            rollout=True,
            verdict=tools.verdict,
            label_ids=tools.prompts.label_ids if tools.verdict else None,
        )
        rounds = []
        for prompt, reading in zip(prompts, readings, strict=True):
            if reading.rollout is None:
                raise ValueError("the judge was asked for rollout and gave none")
            rounds.append(cut_round(prompt, reading.rollout.unsqueeze(0), reading))
        return [PairWeights(pair.pair_id, (rounds[2 * i], rounds[2 * i + 1])) for i, pair in enumerate(pairs)]

    def select(self, captured: PairWeights, layers: tuple[Row, ...]) -> PairWeights:
        """``captured`` as it is: it has one row."""
        return captured
