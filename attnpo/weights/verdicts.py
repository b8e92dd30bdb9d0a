"""How good and steady the judge's verdicts are, from the logits stored beside the weights; when they say nothing."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from attnpo.schema import PairWeights, Round

ENOUGH = 20  # pairs: with fewer, the interval of a judge that is right four times of five may hold one half
Z95 = 1.959964  # standard deviations on either side of a 95 % interval


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


def judge_warning(verdicts: JudgeStatistics) -> str | None:
    """What is wrong with a judge whose verdicts tell nothing of preference, in words; None for any other.

    It does not know which answer is better where the 95 % interval of its accuracy (both orders averaged) holds one
    half: that of Wilson, which holds it exactly where a test of size 5 % cannot tell the judge from a coin. It does not
    answer where more than half of its verdicts name no label. How often the orders agree is no criterion of its own: a
    judge drawn to one place may be right in every pair in which it is not. Accuracy over fewer than 20 pairs is not
    judged.
    """
    unlabelled = f"{100 * verdicts.other_tokens:.0f} % of its verdicts name no label"
    silent = verdicts.other_tokens > 0.5  # false where no verdict has a token
    advice = "choose another judge or wording (judge=...)"
    low, high = wilson(verdicts.pair_accuracy, verdicts.pairs) if verdicts.pairs >= ENOUGH else (1.0, 1.0)
    if low <= 0.5 <= high:
        told = f"{100 * verdicts.pair_accuracy:.0f} % right of {verdicts.pairs} pairs"
        told += f", 95 % interval {100 * low:.0f} to {100 * high:.0f}" + (f"; {unlabelled}" if silent else "")
        what = f"the judge does not know which answer is better ({told})"
        return f"{what}: its weights say nothing about preference; {advice}"
    if silent:
        return f"the judge does not answer as it is asked to: {unlabelled}; {advice}"
    return None


def wilson(share: float, count: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share observed over ``count`` cases."""
    spread = Z95 * math.sqrt(share * (1 - share) / count + Z95**2 / (4 * count**2))
    middle, scale = share + Z95**2 / (2 * count), 1 + Z95**2 / count
    return (middle - spread) / scale, (middle + spread) / scale


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
