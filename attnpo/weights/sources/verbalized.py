"""Verbalised importance: a model splits each response into parts and scores them from 1 to 5 (paper, ablations).

The paper specifies neither the prompt nor a rule for distributing scores over tokens; both are ours. Scores are
assigned to the training tokens of the response, so alignment is exact.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from attnpo.judge.layers import StoredRow
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
from attnpo.weights.capture import prepare_pairs
from attnpo.weights.postprocess import Postprocess
from attnpo.weights.score_parser import ScoredSpan, parse_scores
from attnpo.weights.verbalizer_settings import ScorePromptBuilder

# Increase by hand when the same answer would give different raw scores; see CAPTURE_VERSION for the reasons.
READER = "2"


@dataclass(frozen=True)
class LoadedVerbalizer:
    """Generator with its prompts and decoding settings."""

    generator: Generator
    questions: ScorePromptBuilder
    sampling: Sampling


@dataclass(frozen=True)
class Verbalized(CapturedSource):
    """Score that the model assigned to the part that contains a token; 0 for tokens outside all parts.

    ``min_coverage``: share of a response's tokens that must have a score (paper: 0.9); pairs in which either response
    falls below it are dropped and counted.
    """

    postprocess: Postprocess = field(default_factory=lambda: Postprocess(sink_tokens=0))
    min_coverage: float = 0.9

    partial: ClassVar[bool] = True
    requires: ClassVar[frozenset[str]] = frozenset({"generator"})

    def __post_init__(self) -> None:
        check_range("weights", "[0, 1]", min_coverage=self.min_coverage)

    def capture_fingerprint(self) -> dict[str, object]:
        """Returns the rules for converting answers into rows."""
        return {"source": "verbalized", "spread": "mean over the token's characters", "reader": READER}

    def capture(
        self, pairs: Sequence[PreferencePair], reader: object, layers: tuple[StoredRow, ...]
    ) -> list[PairWeights]:
        """Returns one round per pair, with a float32 row of scores for each response.

        The generator is called once for all prompts. A pair that the generator cannot be asked about is returned as
        ``UnreadablePair``.
        """
        if not isinstance(reader, LoadedVerbalizer):
            raise UserError("weights=verbalized needs a generator: set the config group verbalizer")
        questions = reader.questions
        asked, refused = prepare_pairs(pairs, lambda pair: [questions.build_prompt(pair, side) for side in SIDES])
        prompts = [prompt for both in asked.values() for prompt in both]
        answers = iter(reader.generator.generate(prompts, reader.sampling) if prompts else [])
        found: dict[str, PairWeights] = {**refused}
        for pair in {pair.pair_id: pair for pair in pairs if pair.pair_id in asked}.values():
            chosen, rejected = (_score_row(pair, side, next(answers), questions) for side in SIDES)
            found[pair.pair_id] = PairWeights(pair.pair_id, (JudgeRound(True, chosen, rejected),))
        return [found[pair.pair_id] for pair in pairs]


def _score_row(pair: PreferencePair, side: str, answer: str, questions: ScorePromptBuilder) -> TokenWeights:
    """Returns the scores that ``answer`` assigns to the tokens of one response."""
    text, begins = judged_text(pair, side), weighted_start(pair, side)
    ids, places = questions.training_tokens(pair, side)
    shown = [(max(start, begins) - begins, end - begins) for start, end in places]
    row = spread_scores(parse_scores(answer, text).spans, text, shown)
    return TokenWeights(
        torch.tensor(ids, dtype=torch.long), torch.tensor(places, dtype=torch.long).reshape(-1, 2), row.unsqueeze(0)
    )


def spread_scores(spans: Sequence[ScoredSpan], response: str, places: Sequence[tuple[int, int]]) -> Float[Tensor, " n"]:
    """Returns the score of each token: the mean over its scored characters, or 0 if it has no scored characters.

    A whitespace token inside a part gets the score of that part. Parts are quoted without the whitespace between them,
    so a whitespace token after a part gets the score of the part before it.
    """
    scores = torch.zeros(len(response), dtype=torch.float64)
    after = torch.zeros(len(response), dtype=torch.float64)
    for span in spans:
        end = len(response) - len(response[span.end :].lstrip())
        scores[span.start : span.end] = span.score
        after[span.end : end] = span.score
    filled = torch.where(scores > 0, scores, after)
    row = [_mean_score((scores if response[start:end].strip() else filled)[start:end]) for start, end in places]
    return torch.tensor(row, dtype=torch.float32)


def _mean_score(scores: Float[Tensor, " characters"]) -> float:
    """Returns the mean of the positive scores; 0 if no score is positive."""
    scored = scores[scores > 0]
    return float(scored.mean()) if scored.numel() else 0.0
