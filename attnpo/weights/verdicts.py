"""How good and how steady the judge's verdicts are, from the logits stored beside the weights."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from attnpo.schema import PairWeights, Round


@dataclass(frozen=True)
class JudgeStatistics:
    """Shares between 0 and 1 over ``pairs`` pairs with a verdict in every round; NaN when there is none.

    ``agreement``: rounds whose higher label logit picks the chosen response (a tie counts as half).
    ``pair_accuracy``: pairs whose logit difference, averaged over both orders, picks the chosen one (same).
    ``consistency``: pairs whose orders all pick the same response (a tie picks none).
    ``other_tokens``: rounds whose most likely token is neither label.
    """

    agreement: float
    pair_accuracy: float
    consistency: float
    other_tokens: float
    pairs: int


def judge_statistics(captured: Sequence[PairWeights], label_ids: tuple[int, int]) -> JudgeStatistics:
    """The statistics of all captured pairs that carry verdicts; ``label_ids`` are the tokens of labels (A, B)."""
    read = [pair for pair in captured if pair.rounds and all(item.verdict_logits is not None for item in pair.rounds)]
    margins = [[_margin(item) for item in pair.rounds] for pair in read]
    flat = [margin for pair in margins for margin in pair]
    tokens = [item.verdict_token for pair in read for item in pair.rounds if item.verdict_token is not None]
    return JudgeStatistics(
        agreement=_mean([_won(margin) for margin in flat]),
        pair_accuracy=_mean([_won(_mean(pair)) for pair in margins]),
        consistency=_mean([float(_same_choice(pair)) for pair in margins]),
        other_tokens=_mean([float(token not in label_ids) for token in tokens]),
        pairs=len(read),
    )


def _margin(item: Round) -> float:
    """Logit of the chosen response's label minus that of the rejected one's."""
    assert item.verdict_logits is not None
    difference = float(item.verdict_logits[0]) - float(item.verdict_logits[1])
    return difference if item.chosen_is_a else -difference


def _won(margin: float) -> float:
    return 0.5 if margin == 0 else float(margin > 0)


def _same_choice(margins: Sequence[float]) -> bool:
    return all(margin > 0 for margin in margins) or all(margin < 0 for margin in margins)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan
