"""A reward model as a policy: its rewards against the library's own, where they stand, what they are trained with."""

from pathlib import Path

import pytest
import torch
from torch.nn.functional import logsigmoid
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from attnpo.models.layouts import packed_layout, padded_layout
from attnpo.models.loading import load_model
from attnpo.models.reward_policy import RewardPolicy
from attnpo.objectives.cpo import CPO
from attnpo.run.messages import next_commands
from attnpo.run.run import run
from attnpo.schema import PreferenceBatch, RowGroup, UserError
from tests.run.worlds import World, build_world

CONFIG = LlamaConfig(
    vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, num_labels=1,
    pad_token_id=0, bos_token_id=None, eos_token_id=None, initializer_range=0.3,
)  # fmt: skip
ROWS = [([3, 4], [5, 6, 7]), ([3, 4, 8], [9]), ([3, 4], [10, 11]), ([3, 4, 8], [12, 13, 14, 15])]


def policy_of(labels: int = 1) -> RewardPolicy:
    torch.manual_seed(1)
    config = LlamaConfig(**{**CONFIG.to_dict(), "num_labels": labels})
    return RewardPolicy(LlamaForSequenceClassification(config))


def test_the_reward_of_a_row_is_the_librarys_and_stands_on_its_last_token() -> None:
    policy = policy_of()
    inputs, ids, mask = padded_layout(ROWS, 0)
    found = policy(inputs, ids, mask).logps
    for row, (prompt, response) in enumerate(ROWS):
        alone = policy.model(input_ids=torch.tensor([[*prompt, *response]])).logits[0, 0]
        torch.testing.assert_close(found[row, len(response) - 1], alone)
        assert (found[row] != 0).sum() == 1
    assert policy.model.config.pad_token_id == 0


def test_cpos_margin_of_two_rewards_is_the_bradley_terry_loss() -> None:
    policy = policy_of()
    laid = padded_layout(ROWS, 0)
    stats = policy(*laid)
    counts = laid.response_mask.sum(-1, keepdim=True)
    rows = RowGroup(
        laid.response_ids, laid.response_mask, {"reward": laid.response_mask / counts}, counts[:, 0].float(), None
    )
    batch = PreferenceBatch({"main": rows}, torch.ones(2), ("a", "b"))
    losses = CPO(beta=1.0, sft_coef=0.0)(stats, None, batch).losses
    reward = stats.logps.sum(-1)
    torch.testing.assert_close(losses, -logsigmoid(reward[:2] - reward[2:]))
    losses.sum().backward()
    head = policy.model.score.weight.grad
    assert head is not None and float(head.abs().max()) > 0


def test_what_a_reward_model_cannot_give_is_refused() -> None:
    policy = policy_of()
    inputs, ids, mask = padded_layout(ROWS, 0)
    with pytest.raises(UserError, match=r"asked for vocab:entropy"):
        policy(inputs, ids, mask, frozenset({"logps", "vocab:entropy"}))
    with pytest.raises(UserError, match=r"asked for packed rows"):
        policy(*packed_layout(ROWS, 0))
    with pytest.raises(UserError, match=r"has no distribution over tokens"):
        policy.head()
    with pytest.raises(UserError, match=r"has 0 linear heads with a single output"):
        policy_of(labels=2)


def test_a_head_is_drawn_only_where_one_is_lacking(tmp_path: Path) -> None:
    torch.manual_seed(2)
    LlamaForCausalLM(CONFIG).save_pretrained(tmp_path / "base")
    with pytest.raises(UserError, match=r"1 parameters of LlamaForSequenceClassification are missing"):
        load_model(tmp_path / "base", reward=True)
    first, second = (load_model(tmp_path / "base", reward=True, fresh_head=True) for _ in range(2))
    assert not torch.equal(first.score.weight, second.score.weight)
    assert torch.equal(first.model.embed_tokens.weight, second.model.embed_tokens.weight)
    first.save_pretrained(tmp_path / "reward")
    again = load_model(tmp_path / "reward", reward=True, fresh_head=True)
    assert torch.equal(again.score.weight, first.score.weight)


# ------------------------------------------------------------------------------------------------ runs


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return build_world(tmp_path_factory.mktemp("reward"))


REWARD = (
    *("model=reward", "weights=uniform", "objective=cpo", "objective.beta=1", "objective.sft_coef=0"),
    *("callbacks.samples=0",),
)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("objective=dpo", r"objective DPO needs more than the reward margin: set objective=cpo"),
        ("objective.sft_coef=1", r"objective CPO needs more than the reward margin"),
        ("weights=attention", r"Attention returns token weights: set weights=uniform"),
        ("trainer.strategy=fsdp", r"trainer\.strategy=fsdp shards it"),
        ("callbacks.samples=2", r"cannot generate: set callbacks\.samples=0"),
        ("drift.pairs=4", r"cannot generate: set drift\.pairs=0"),
        ("model.compile=inductor", r"set model\.compile=null"),
    ],
)
def test_a_run_that_a_reward_model_cannot_be_trained_by_is_refused(world: World, override: str, message: str) -> None:
    key = override.partition("=")[0]
    given = [item for item in REWARD if item.partition("=")[0] != key and not item.startswith(f"{key}.")]
    with pytest.raises(UserError, match=message):
        world.config(*given, override)


def test_a_run_with_defaults_names_what_to_set(world: World) -> None:
    with pytest.raises(UserError, match=r"set objective=cpo objective\.sft_coef=0 objective\.beta=1"):
        world.config("model=reward", "weights=uniform")


def test_the_page_and_the_last_words_of_a_run_speak_of_no_log_probabilities_and_no_token_weights(
    world: World, tmp_path: Path
) -> None:
    """Rewards stand on tokens, 0 but on the last; other weights are refused. Other pages: ``run/test_run.py``."""
    cfg = world.config(*REWARD, "trainer.max_steps=1", "callbacks.checkpoints=false")
    result = run(cfg, tmp_path / "run")
    assert result is not None
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert "Token weights of the first pairs" in page and "log-prob:" not in page
    commands = next_commands(cfg.composed, cfg.seed, tmp_path / "run")
    assert len(commands) == 2 and not any("weights=attention" in command for command in commands)
