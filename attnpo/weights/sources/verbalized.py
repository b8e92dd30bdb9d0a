"""Verbalised importance: a model splits each response into parts and scores them 1 to 5 (paper, ablation of sources).

The paper gives no wording and no rule for spreading scores over tokens; both are ours. Scores stand on the training
tokens of the response themselves, so that alignment is exact.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from attnpo.judge.layers import Row
from attnpo.schema import (
    SIDES,
    Generator,
    JudgeRound,
    PairWeights,
    PreferencePair,
    Sampling,
    TokenWeights,
    UserError,
    check_range,
)
from attnpo.text.traces import judged_text, weighted_start
from attnpo.weights.base import CapturedSource
from attnpo.weights.capture import show_pairs
from attnpo.weights.postprocess import Postprocess
from attnpo.weights.score_parser import ScoredSpan, read_answer
from attnpo.weights.verbalizer_settings import ScoreQuestions

# Raised by hand when the same answer would give other raw scores; why by hand, and who notices, as CAPTURE_VERSION.
READER = "2"


@dataclass(frozen=True)
class LoadedVerbalizer:
    """Generator at hand with the questions that it is asked and how it decodes its answers."""

    generator: Generator
    questions: ScoreQuestions
    sampling: Sampling


@dataclass(frozen=True)
class Verbalized(CapturedSource):
    """Score of the part a token belongs to, from the model's own words; 0 where no part was found.

    ``min_coverage``: the share of a response's tokens that must have a score (paper: 0.9); pairs with a side below it
    are dropped and counted.
    """

    postprocess: Postprocess = field(default_factory=lambda: Postprocess(sink_tokens=0))
    min_coverage: float = 0.9

    partial: ClassVar[bool] = True
    requires: ClassVar[frozenset[str]] = frozenset({"generator"})

    def __post_init__(self) -> None:
        check_range("weights", "[0, 1]", min_coverage=self.min_coverage)

    def capture_fingerprint(self) -> dict[str, object]:
        """Returns how answers become rows."""
        return {"source": "verbalized", "spread": "mean over the token's characters", "reader": READER}

    def capture(self, pairs: Sequence[PreferencePair], reader: object, layers: tuple[Row, ...]) -> list[PairWeights]:
        """Returns one round per pair, a float32 row of scores per response.

        All prompts go to the generator in one call.

        A pair that the generator cannot be asked about comes back ``Unreadable``.
        """
        if not isinstance(reader, LoadedVerbalizer):
            raise UserError("weights=verbalized asks a generator: set the group verbalizer")
        questions = reader.questions
        asked, refused = show_pairs(pairs, lambda pair: [questions.ask(pair, side) for side in SIDES])
        prompts = [prompt for both in asked.values() for prompt in both]
        answers = iter(reader.generator.generate(prompts, reader.sampling) if prompts else [])
        found: dict[str, PairWeights] = {**refused}
        for pair in {pair.pair_id: pair for pair in pairs if pair.pair_id in asked}.values():
            chosen, rejected = (_row(pair, side, next(answers), questions) for side in SIDES)
            found[pair.pair_id] = PairWeights(pair.pair_id, (JudgeRound(True, chosen, rejected),))
        return [found[pair.pair_id] for pair in pairs]


def _row(pair: PreferencePair, side: str, answer: str, questions: ScoreQuestions) -> TokenWeights:
    """Returns the scores that ``answer`` gives to the tokens of one response."""
    text, begins = judged_text(pair, side), weighted_start(pair, side)
    ids, places = questions.tokens(pair, side)
    shown = [(max(start, begins) - begins, end - begins) for start, end in places]
    row = spread(read_answer(answer, text).spans, text, shown)
    return TokenWeights(
        torch.tensor(ids, dtype=torch.long), torch.tensor(places, dtype=torch.long).reshape(-1, 2), row.unsqueeze(0)
    )


def spread(spans: Sequence[ScoredSpan], response: str, places: Sequence[tuple[int, int]]) -> Float[Tensor, " n"]:
    """Returns a score per token: the mean over those of its characters that have one; 0 for a token without any.

    A token of blanks alone takes the score of the part it stands in or, since parts are quoted without what is between
    them, of the part that ends before it.
    """
    scores = torch.zeros(len(response), dtype=torch.float64)
    after = torch.zeros(len(response), dtype=torch.float64)
    for span in spans:
        end = len(response) - len(response[span.end :].lstrip())
        scores[span.start : span.end] = span.score
        after[span.end : end] = span.score
    filled = torch.where(scores > 0, scores, after)
    row = [_mean((scores if response[start:end].strip() else filled)[start:end]) for start, end in places]
    return torch.tensor(row, dtype=torch.float32)


def _mean(scores: Float[Tensor, " characters"]) -> float:
    """Returns the mean of the scores above 0; 0 where there is none."""
    scored = scores[scores > 0]
    return float(scored.mean()) if scored.numel() else 0.0
