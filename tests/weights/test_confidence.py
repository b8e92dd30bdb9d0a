"""Selections by the policy's own numbers, and weights of whole pairs: by hand, at edges, under every objective."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from attnpo.config.compose import list_groups
from attnpo.run.combinations import require_usable_weights
from attnpo.schema import Kind, PreferenceBatch, PreferencePair, TokenStats, UserError
from attnpo.training.module import apply_online_weights
from attnpo.training.pair_values import pair_values
from attnpo.weights.base import OnlineSource, online_statistics
from attnpo.weights.sources.confidence import (
    Confidence,
    Entropy,
    Selective,
    mark_above_quantile,
    mark_below_mean,
    mark_highest,
)
from attnpo.weights.sources.pair_strength import MWPO, WPO, PairColumn
from tests.conformance.records import built
from tests.objectives.inputs import Case, Maker, call, make_batch, make_rows, objective_of, part

GARBAGE = (math.nan, math.inf, -math.inf)


def row(*values: float, width: int = 5, fill: float = 0.0) -> Tensor:
    return torch.tensor([*values, *[fill] * (width - len(values))], dtype=torch.float64)


def rows_of(*given: list[float], fill: float = 0.0) -> tuple[Tensor, Tensor]:
    """Values and mask of rows of different lengths, ``fill`` behind them."""
    width = max(map(len, given))
    mask = torch.tensor([[place < len(one) for place in range(width)] for one in given])
    return torch.stack([row(*one, width=width, fill=fill) for one in given]), mask


def batch_of(*lengths: int, **fields: Any) -> PreferenceBatch:
    """A batch with responses of these lengths, all chosen ones first, equal weights."""
    return make_batch(make_rows(lengths), **fields)


# --------------------------------------------------------------------------------------------- selections, by hand


@pytest.mark.parametrize("fill", [0.0, *GARBAGE])
def test_confpo_keeps_what_is_less_probable_than_the_mean_probability(fill: float) -> None:
    """Probabilities .5 .1 .2 have the mean .2667; .25 .75 the mean .5. Means of logarithms would keep other tokens."""
    logps, mask = rows_of([math.log(0.5), math.log(0.1), math.log(0.2)], [math.log(0.25), math.log(0.75)], fill=fill)
    assert mark_below_mean(logps, mask).tolist() == [[False, True, True], [True, False, False]]
    # .9 .9 .7: mean .8333 in probability; 0.7 alone is below. Their geometric mean .828 would say the same of .7, so:
    # .02 .9 .5 has the mean .473 (keeps .02 alone) and the geometric mean .208.
    logps, mask = rows_of([math.log(0.02), math.log(0.3), math.log(0.5)], fill=fill)
    assert mark_below_mean(logps, mask).tolist() == [[True, False, False]]  # mean .2733, geometric mean .144


def test_confpo_keeps_none_of_equal_tokens_and_none_of_one() -> None:
    for count in (1, 2, 3, 7, 10):
        for probability in (0.1, 0.3, 1.0):
            logps = torch.full((1, count), math.log(probability), dtype=torch.float32)
            assert not mark_below_mean(logps, torch.ones(1, count, dtype=torch.bool)).any()


def test_confpo_weighs_kept_tokens_alike_and_voids_pairs_with_an_empty_side() -> None:
    logps, _ = rows_of(*[[math.log(x) for x in one] for one in ([0.5, 0.1, 0.2], [0.5, 0.5], [0.25, 0.75], [0.3, 0.1])])
    weights, pair = Confidence().weights(TokenStats(logps), None, batch_of(3, 2, 2, 2))
    assert weights.tolist() == [[0, 0.5, 0.5], [0, 0, 0], [1, 0, 0], [0, 1, 0]]
    assert pair.tolist() == [1, 0]  # the second pair's chosen side has equal tokens alone


def test_confpo_under_simpo_is_a_mean_over_the_kept_tokens() -> None:
    """beta 2, gamma 1: chosen mean of log .1 and log .2, rejected log .25."""
    logps, _ = rows_of(*[[math.log(x) for x in one] for one in ([0.5, 0.1, 0.2], [0.25, 0.75])])
    policy = TokenStats(logps)
    batch = apply_online_weights(batch_of(3, 2), Confidence(), policy, None)
    out = objective_of("simpo", ("beta", 2.0), ("gamma_beta_ratio", 0.5))(policy, None, batch)
    margin = 2 * ((math.log(0.1) + math.log(0.2)) / 2 - math.log(0.25)) - 1
    assert float(out.losses[0]) == pytest.approx(math.log1p(math.exp(-margin)), rel=1e-12)


@pytest.mark.parametrize("fill", [0.0, *GARBAGE])
def test_selective_keeps_scores_from_their_quantile_on(fill: float) -> None:
    """Scores 1 2 3 4 5 at .6: place 2.4 between 3 and 4, 3.4. Of two tokens 0 and 1 it is .6."""
    scores, mask = rows_of([3.0, 5.0, 1.0, 2.0, 4.0], [0.0, 1.0], fill=fill)
    assert mark_above_quantile(scores, mask, 0.6).int().tolist() == [[0, 1, 0, 0, 1], [0, 1, 0, 0, 0]]
    assert mark_above_quantile(scores, mask, 0.5)[0].int().tolist() == [1, 1, 0, 0, 1], "the quantile itself stays"
    assert torch.equal(mark_above_quantile(scores, mask, 0.0), mask)


def test_selective_scores_the_lag_of_the_chosen_and_the_lead_of_the_rejected() -> None:
    """Chosen: r - p = (1, -1). Rejected: p - r = (1, -1) from the opposite numbers."""
    policy = TokenStats(torch.tensor([[-2.0, -1.0], [-1.0, -2.0]]))
    reference = TokenStats(torch.tensor([[-1.0, -2.0], [-2.0, -1.0]]))
    weights = Selective(0.6).weights(policy, reference, batch_of(2, 2))
    assert weights.tolist() == [[1, 0], [1, 0]]


def test_selective_keeps_every_token_while_the_policy_is_the_reference() -> None:
    stats = TokenStats(-torch.rand(4, 5, generator=torch.Generator().manual_seed(0)))
    batch = batch_of(5, 1, 3, 2)
    assert torch.equal(Selective().weights(stats, stats, batch).bool(), batch.main.response_mask)


@pytest.mark.parametrize(("share", "kept"), [(0.2, 1), (0.21, 2), (0.4, 2), (0.6, 3), (1.0, 5), (0.01, 1)])
def test_entropy_keeps_the_share_of_the_tokens_rounded_up(share: float, kept: int) -> None:
    scores, mask = rows_of([3.0, 5.0, 1.0, 2.0, 4.0])
    order = [1, 4, 0, 3, 2]
    assert mark_highest(scores, mask, share)[0].nonzero()[:, 0].tolist() == sorted(order[:kept])


def test_entropy_keeps_equals_and_never_padding() -> None:
    scores, _ = rows_of([2.0, 2.0, 2.0, 1.0], [0.0], fill=9.0)
    stats = TokenStats(torch.zeros(2, 4), vocab={"entropy": scores})
    weights = Entropy(0.25).weights(stats, None, batch_of(4, 1))
    torch.testing.assert_close(weights, torch.tensor([[1 / 3, 1 / 3, 1 / 3, 0], [1.0, 0, 0, 0]]))


@pytest.mark.parametrize("source", [Selective(), Entropy(), WPO(), MWPO()])
def test_what_was_not_computed_is_an_error(source: OnlineSource) -> None:
    with pytest.raises(ValueError, match=r"not computed|none were computed"):
        source.weights(TokenStats(torch.zeros(2, 2)), None, batch_of(2, 2))


# --------------------------------------------------------------------------------------------- pairs, by hand


def test_wpo_compares_the_tokens_with_what_the_policy_draws() -> None:
    """Distributions (.5 .5): collision .5; (.9 .1): .82. Chosen takes .5 and .9, rejected .1 once."""
    logps, _ = rows_of([math.log(0.5), math.log(0.9)], [math.log(0.1)])
    collision, _ = rows_of([math.log(0.5), math.log(0.82)], [math.log(0.82)], fill=-math.inf)
    stats = TokenStats(logps, vocab={"collision": collision})
    tokens, pair = WPO().weights(stats, None, batch_of(2, 1))
    assert float(pair[0]) == pytest.approx(math.sqrt(1 * 0.9 / 0.82) * 0.1 / 0.82, rel=1e-6)
    assert tokens.tolist() == [[0.5, 0.5], [1.0, 0.0]]
    # A policy that is sure of both answers: above 1 without the clamp.
    sure = TokenStats(torch.full((2, 2), math.log(0.9)), vocab={"collision": torch.full((2, 2), math.log(0.82))})
    assert float(WPO().weights(sure, None, batch_of(1, 1))[1][0]) == 1.0
    unclamped = WPO(clamp=False).weights(sure, None, batch_of(1, 1))[1]
    assert float(unclamped[0]) == pytest.approx((0.9 / 0.82) ** 2, rel=1e-6)


def sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value))


def test_mwpo_weighs_margins_and_lengths() -> None:
    """Log-ratios (1, 2) chosen and (-3) rejected: margin .1 (3 + 3); per token 2 x .1 (1.5 + 3); lengths 1 - 2."""
    policy, _ = rows_of([-1.0, -1.0], [-4.0])
    reference, _ = rows_of([-2.0, -3.0], [-1.0])
    stats, other, batch = TokenStats(policy), TokenStats(reference), batch_of(2, 1)
    length = sigmoid(0.01 * (1 - 2)) ** 0.4
    assert float(MWPO().weights(stats, other, batch)[1][0]) == pytest.approx(sigmoid(0.6) ** 0.6 * length, rel=1e-6)
    each = MWPO(per_token=True, margin_scale=2.0).weights(stats, other, batch)[1]
    assert float(each[0]) == pytest.approx(sigmoid(0.9) ** 0.6 * length, rel=1e-6)
    assert MWPO(alpha=0.0, gamma=0.0).weights(stats, other, batch)[1].tolist() == [1.0]
    assert MWPO(gamma=0.0).unused_keys() == {
        "margin_scale": "weights.per_token=false",
        "length_scale": "weights.gamma=0",
    }
    far = MWPO(beta=1e4, gamma=0.0).weights(other, stats, batch)[1]  # a margin of minus sixty thousand
    assert far.tolist() == [0.0]


def pair_with(**extra: object) -> PreferencePair:
    return PreferencePair.from_texts([{"role": "user", "content": "q"}], "yes", "no", extra)


def test_a_column_weighs_pairs_as_it_is() -> None:
    source = PairColumn("trust")
    assert [source.pair_weight(pair_with(trust=value)) for value in (0, 2, 0.25, True)] == [0.0, 2.0, 0.25, 1.0]
    assert source.columns == ("trust",)


@pytest.mark.parametrize("value", [None, "1", math.nan, math.inf, -0.5, [1.0]])
def test_a_value_that_is_no_weight_names_pair_and_column(value: object) -> None:
    pair = pair_with(trust=value)
    with pytest.raises(
        UserError, match=rf"weights\.column=trust: pair {pair.pair_id}: expected a finite number of at least 0"
    ):
        PairColumn("trust").pair_weight(pair)


def test_a_pair_without_the_column_names_those_that_are_there() -> None:
    with pytest.raises(UserError, match=r"weights\.column=trust: pair \w+ has no such column; it has: score, topic"):
        PairColumn("trust").pair_weight(pair_with(topic="a", score=1))


# --------------------------------------------------------------------------------------------- in a step

PAIRS = ("wpo", "mwpo")
ONLINE = ("confidence", "selective", "entropy", "wpo", "mwpo")


def source_of(option: str) -> OnlineSource:
    source: OnlineSource = built("weights", f"weights={option}")
    return source


def read(option: str, objective: str) -> tuple[Case, PreferenceBatch]:
    """A case with what objective and source read, and its batch once the source has weighed it."""
    source, loss = source_of(option), objective_of(objective)
    case = Maker(loss.requires | online_statistics(source)).case().with_state(loss)
    rows = case.batch.main
    uniform = rows.response_mask.double() / rows.response_mask.sum(-1, keepdim=True)
    case = case.with_rows(token_weights={"reward": uniform}, source_lengths=rows.response_mask.sum(-1).double())
    return case, apply_online_weights(case.batch, source, case.policy, case.reference)


@pytest.mark.parametrize("objective", list_groups()["objective"])
@pytest.mark.parametrize("option", ["confidence", "selective"])  # tokens and pairs, and factors
def test_it_works_with_every_objective(option: str, objective: str) -> None:
    """Weights are numbers of 0 or more on the response alone, and the losses they make are finite."""
    case, batch = read(option, objective)
    weights, kind = batch.main.token_weights["reward"], source_of(option).kind
    assert bool((weights >= 0).all()) and not weights[~batch.main.response_mask].any() and not weights.requires_grad
    if kind is Kind.DISTRIBUTION:
        assert all(total == pytest.approx(1) or total == 0 for total in weights.sum(-1).tolist())
    assert batch.main.factors is (kind is Kind.FACTOR)
    assert bool((batch.pair_weight >= 0).all()) and batch.pair_weight.isfinite().all()
    loss = objective_of(objective)
    if "factors" in loss.requires and kind is not Kind.FACTOR:
        with pytest.raises(UserError, match="needs weights that are factors"):
            require_usable_weights(source_of(option), loss)
        return
    require_usable_weights(source_of(option), loss) if "token_weights" in loss.requires or option in PAIRS else None
    out = call(loss, Case(case.policy, case.reference, batch, case.ahead))
    assert out.losses.isfinite().all() and out.losses.shape == (batch.pairs,)


@pytest.mark.parametrize("option", ONLINE)
def test_weights_of_one_pair_do_not_depend_on_its_batch(option: str) -> None:
    case, batch = read(option, "twdpo")
    for place in range(batch.pairs):
        own = part(case, [place])
        alone = apply_online_weights(own.batch, source_of(option), own.policy, own.reference)
        both = batch.main.token_weights["reward"][[place, place + batch.pairs]]
        torch.testing.assert_close(alone.main.token_weights["reward"], both)
        torch.testing.assert_close(alone.pair_weight, batch.pair_weight[[place]])


def test_pair_weights_multiply_those_of_the_batch_and_are_logged() -> None:
    logps, _ = rows_of(*[[math.log(x) for x in one] for one in ([0.5, 0.1], [0.5, 0.5], [0.25, 0.75], [0.3, 0.1])])
    policy = TokenStats(logps)
    batch = batch_of(2, 2, 2, 2, pair_weight=torch.tensor([3.0, 1.0], dtype=torch.float64))
    batch = apply_online_weights(batch, Confidence(), policy, None)
    assert batch.pair_weight.tolist() == [3.0, 0.0]
    out = objective_of("simpo")(policy, None, batch)
    logged = pair_values(policy, out, batch)
    assert logged["weights/void"].tolist() == [0.0, 1.0] and logged["weights/pair"].tolist() == [1.0, 0.0]
    assert logged["loss"].tolist() == [3 * float(out.losses[0]), 0.0]
