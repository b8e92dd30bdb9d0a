"""KL per token by weight decile: group means by hand, a planted effect, a control that takes it away, bad input."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from attnpo.data.collate import make_unweighted_rows
from attnpo.models.layouts import padded_layout
from attnpo.models.scored import ScoredLM
from attnpo.schema import RowGroup, TokenStats, UserError
from experiments.theory.kl_by_weight import (
    Row,
    claim_table,
    freedom,
    freedom_figure,
    freedom_table,
    measure,
    rows_of,
)


def planted(power: float, seed: int = 0) -> tuple[list[Row], dict[str, list[Row]]]:
    """Responses whose weighted policy moves as ``weight ** power`` where a plain one moves as the token allows."""
    random = np.random.default_rng(seed)
    weights, plain, weighted = [], [], []
    for length in random.integers(20, 40, 60):
        row = random.gamma(2.0, 0.5, length) + 0.05
        room = 0.1 * row**0.5 * random.lognormal(0, 0.3, length)  # tokens of high weight have more to choose anyway
        weights.append(row)
        plain.append(room)
        weighted.append(3 * room * row**power)
    return weights, {"dpo": plain, "twdpo": weighted}


def test_group_means_by_hand() -> None:
    weights = [np.array([0.1, 0.4]), np.array([0.2, 0.3])]
    result = freedom(weights, {"a": [np.array([1.0, 7.0]), np.array([3.0, 5.0])]}, groups=2, draws=50)
    assert result.groups.index.tolist() == [1, 2] and result.groups.loc[1].tolist() == [2, 0.1, 0.2]
    assert result.of("kl")["a"]["mean"].tolist() == [2.0, 6.0]
    assert result.of("relative")["a"]["mean"].tolist() == [0.5, 1.5]
    assert result.claim.loc["a", "mean"] == pytest.approx(1 / 3)
    assert result.of("ratio") == {}


def test_groups_are_equal_in_size_and_ordered_by_weight_even_where_weights_tie() -> None:
    weights = [np.repeat([0.0, 1.0, 2.0], [50, 30, 20])]
    result = freedom(weights, {"a": [np.ones(100)]}, draws=20)
    assert result.groups["tokens"].tolist() == [10] * 10
    assert result.groups["lowest"].tolist() == [0.0] * 5 + [1.0] * 3 + [2.0] * 2
    assert result.claim.loc["a", "mean"] == 1.0


@pytest.mark.parametrize(("power", "verdict"), [(-0.5, "yes"), (0.5, "no, less")])
def test_a_planted_effect_is_found_against_the_control(power: float, verdict: str) -> None:
    weights, kl = planted(power)
    result = freedom(weights, kl, "dpo", draws=400)
    claim = result.claim.loc["twdpo"]
    assert claim["low"] < claim["mean"] < claim["high"]
    table = claim_table(result)
    assert table.loc["twdpo", "more freedom on low weights"] == verdict
    assert table["lower over upper half"].to_dict() == {"dpo": "of its own", "twdpo": "over dpo"}
    ratios = result.of("ratio")["twdpo"]["mean"].tolist()
    assert ratios == sorted(ratios, reverse=power < 0)
    assert list(result.of("ratio")) == ["twdpo"]


def test_without_an_effect_the_control_takes_the_slope_away() -> None:
    weights, kl = planted(0.0)
    result = freedom(weights, kl, "dpo", draws=400)
    assert result.claim.loc["dpo", "high"] < 1  # tokens of high weight move more, with or without weights in training
    assert result.claim.loc["twdpo", "mean"] == pytest.approx(1.0)


def test_intervals_resample_responses_and_repeat() -> None:
    weights, kl = planted(-0.5)
    first, again = (freedom(weights, kl, "dpo", draws=300) for _ in range(2))
    for name in ("groups", "measured", "claim"):
        assert getattr(first, name).equals(getattr(again, name))
    # tokens of one response that move together say little: fewer responses, wider interval
    few = [np.concatenate(weights[i::6]) for i in range(6)]
    lumped = {name: [np.concatenate(rows[i::6]) * (1 + i) for i in range(6)] for name, rows in kl.items()}
    wide = freedom(few, lumped, draws=300).of("kl")["dpo"].loc[5]
    narrow = first.of("kl")["dpo"].loc[5]
    assert (wide["high"] - wide["low"]) / wide["mean"] > 3 * (narrow["high"] - narrow["low"]) / narrow["mean"]


def test_rows_are_read_off_a_batch_on_response_tokens_relative_to_uniform() -> None:
    mask = torch.tensor([[True, True, False], [True, True, True]])
    weights = torch.tensor([[0.75, 0.25, 9.0], [0.5, 0.0, 0.5]])
    group = RowGroup(
        response_ids=torch.zeros(2, 3, dtype=torch.long),
        response_mask=mask,
        token_weights={"reward": weights},
        source_lengths=torch.tensor([2.0, 4.0]),
        reference_logps=None,
    )
    kl = torch.tensor([[0.1, 0.2, torch.inf], [0.3, 0.4, 0.5]])
    relative, found = rows_of(group, TokenStats(torch.zeros(2, 3), joint={"kl_policy_ref": kl}))
    assert [row.tolist() for row in relative] == [[1.5, 0.5], [2.0, 0.0, 2.0]]
    assert [row.round(6).tolist() for row in found] == [[0.1, 0.2], [0.3, 0.4, 0.5]]
    factors, _ = rows_of(replace(group, factors=True), TokenStats(torch.zeros(2, 3), joint={"kl_policy_ref": kl}))
    assert factors[0].tolist() == [0.75, 0.25]
    with pytest.raises(UserError, match='expected the statistic "joint:kl_policy_ref", got none'):
        rows_of(group, TokenStats(torch.zeros(2, 3)))


def test_both_models_are_measured_on_the_rows() -> None:
    config = LlamaConfig(vocab_size=13, hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    torch.manual_seed(0)
    policy, base = (LlamaForCausalLM(config).eval() for _ in range(2))
    with torch.no_grad():
        policy.lm_head.weight.mul_(20)  # far from the base
    group = replace(
        make_unweighted_rows([([1, 2], [3, 4, 5]), ([6], [7, 8])], padded_layout, 0),
        token_weights={"reward": torch.tensor([[0.5, 0.25, 0.25], [1.0, 0.0, 0.0]])},
    )
    weights, kl = measure(ScoredLM(policy), ScoredLM(base), group)
    assert [row.tolist() for row in weights] == [[1.5, 0.75, 0.75], [2.0, 0.0]]
    with torch.no_grad():
        first, second = (model(torch.tensor([[1, 2, 3, 4, 5]])).logits[0, 1:4] for model in (policy, base))
    first, second = first.double().log_softmax(-1), second.double().log_softmax(-1)
    np.testing.assert_allclose(kl[0], (first.exp() * (first - second)).sum(-1), rtol=1e-4)
    assert kl[0].min() > 0.01
    assert [row.size for row in kl] == [3, 2]
    with pytest.raises(ValueError, match="no model inputs"):
        measure(ScoredLM(policy), ScoredLM(base), replace(group, inputs=None))


def test_table_and_figure(tmp_path: Path) -> None:
    weights, kl = planted(-0.5)
    result = freedom(weights, kl, "dpo", draws=100)
    table = freedom_table(result)
    heads = ["tokens", "weight from", "to", "dpo KL", "dpo relative", "twdpo KL", "twdpo relative", "twdpo over dpo"]
    assert list(table.columns) == heads and len(table) == 10 and not table.isna().any(axis=None)
    assert freedom_figure(result, tmp_path / "two.png").stat().st_size > 20_000
    alone = freedom(weights, {"dpo": kl["dpo"]}, draws=100)
    assert freedom_figure(alone, tmp_path / "one.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("weights", "kl", "control", "message"),
    [
        ([np.ones(12)], {"a": [np.ones(11)]}, None, "freedom, a: expected a value for every weight"),
        ([np.ones(12)], {"a": [np.full(12, np.nan)]}, None, "freedom, a: expected finite"),
        ([np.ones(12)], {"a": [np.ones(12)]}, "dpo", "control among the policies a, got dpo"),
        ([np.ones(4)], {"a": [np.ones(4)]}, None, "got 10 and 4 tokens"),
    ],
)
def test_input_that_does_not_fit_is_refused(
    weights: list[Row], kl: dict[str, list[Row]], control: str | None, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        freedom(weights, kl, control)
