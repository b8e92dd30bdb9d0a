"""Scorers of training tokens against plain transformers."""

from collections.abc import Collection, Mapping, Sequence

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from attnpo.data import scoring
from attnpo.data.scoring import ModelScorer
from attnpo.models.scored import ScoredLM
from attnpo.schema import EncodedResponse, UserError
from attnpo.weights.sources.scorers import Scorer

ROWS = [
    EncodedResponse([3, 4, 5], [6, 7, 8, 9], [(0, 1)] * 4),
    EncodedResponse([3], [10], [(0, 1)]),
    EncodedResponse([11, 12, 13, 14, 15, 16], [17, 18], [(0, 1)] * 2),
]


def model(seed: int, words: int = 40) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    made = LlamaForCausalLM(LlamaConfig(vocab_size=words, initializer_range=0.5, **shape))
    made.train(True)  # scorers see to their mode themselves
    return made


def scorer(made: LlamaForCausalLM) -> ModelScorer:
    return ModelScorer(ScoredLM(made), 0)


@torch.no_grad()
def logits(made: LlamaForCausalLM, row: EncodedResponse) -> Tensor:
    """Of each response token, by a forward of this row alone."""
    made.train(False)
    whole = made(torch.tensor([[*row.prompt_ids, *row.response_ids]])).logits[0]
    start = len(row.prompt_ids) - 1
    return whole[start : start + len(row.response_ids)].double()


@pytest.mark.parametrize("budget", [1, 16, 16384])
def test_scores_are_those_of_each_row_alone_in_the_order_asked(budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "TOKENS_PER_FORWARD", budget)
    made = model(1)
    found = scorer(made).scores(ROWS, {"logps", "vocab:entropy"})
    for row, scores in zip(ROWS, found, strict=True):
        logp = torch.log_softmax(logits(made, row), -1)
        expected = logp.gather(1, torch.tensor(row.response_ids)[:, None])[:, 0]
        torch.testing.assert_close(scores["logps"].double(), expected, rtol=0, atol=2e-5)
        torch.testing.assert_close(scores["vocab:entropy"].double(), -(logp.exp() * logp).sum(-1), rtol=0, atol=2e-5)
        assert scores.keys() == {"logps", "vocab:entropy"} and scores["logps"].dtype == torch.float32


def test_a_contrast_is_the_softmax_of_both_models_logits() -> None:
    first, second = model(1), model(2)
    found = scorer(first).scores(ROWS, {"joint:contrast"}, scorer(second))
    for row, scores in zip(ROWS, found, strict=True):
        expected = torch.log_softmax(2 * logits(first, row) - logits(second, row), -1)
        picked = expected.gather(1, torch.tensor(row.response_ids)[:, None])[:, 0]
        torch.testing.assert_close(scores["joint:contrast"].double(), picked, rtol=0, atol=4e-5)


def test_what_cannot_be_scored_is_refused() -> None:
    one = scorer(model(1))
    assert one.scores([], {"logps"}) == []
    with pytest.raises(UserError, match="unknown token statistic 'surprise'"):
        one.scores(ROWS, {"surprise"})
    with pytest.raises(UserError, match="their heads have 40 and 44 rows: use models with the same vocabulary"):
        one.scores(ROWS, {"joint:contrast"}, scorer(model(2, 44)))

    class Other:
        def scores(
            self, ids: Sequence[EncodedResponse], names: Collection[str], other: Scorer | None = None
        ) -> list[Mapping[str, Tensor]]:
            return []

    with pytest.raises(TypeError, match="Other has none"):
        one.scores(ROWS, {"joint:contrast"}, Other())
