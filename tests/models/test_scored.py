import logging
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from attnpo.models.layouts import LAYOUTS, padded_layout
from attnpo.models.scored import ScoredLM
from attnpo.schema import ModelInputs, TokenStats, UserError
from tests.models.conftest import shard_all

Build = Callable[..., PreTrainedModel]


def batch(seed: int = 0) -> tuple[ModelInputs, Tensor, Tensor, Tensor]:
    """Four ragged rows, with a weight per response token; the third row has a single response token."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [(5, 9), (3, 4), (11, 1), (2, 17)]
    draw = [torch.randint(3, 97, (a + b,), generator=generator).tolist() for a, b in lengths]
    laid = padded_layout([(ids[:a], ids[a:]) for ids, (a, _) in zip(draw, lengths, strict=True)], 0)
    weights = torch.rand(laid.response_mask.shape, generator=generator, dtype=torch.float64) * laid.response_mask
    return laid.inputs, laid.response_ids, laid.response_mask, weights


def naive_logps(model: PreTrainedModel, inputs: ModelInputs, ids: Tensor, mask: Tensor) -> Tensor:
    """Log-softmax of all logits of the masked, padded batch."""
    logits = model(input_ids=inputs.input_ids, attention_mask=inputs.attention_mask).logits
    every = torch.log_softmax(logits, -1).flatten(0, 1)[inputs.predict_index.flatten()]
    return every.gather(1, ids.flatten()[:, None])[:, 0].view(ids.shape) * mask


def preference_loss(logps: Tensor, weights: Tensor) -> Tensor:
    """DPO-like loss of two pairs: rows 0, 1 chosen, 2, 3 rejected."""
    sums = (logps * weights).sum(1)
    return -torch.nn.functional.logsigmoid(0.5 * (sums[:2] - sums[2:])).sum()


def gradients(model: PreTrainedModel, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_tied_heads_equal_the_naive_step_in_double(exact_llama: Build) -> None:
    """One token at a time; other heads, chunks and layouts: ``test_packed_attention.py``."""
    model = exact_llama(tie_word_embeddings=True)
    inputs, ids, mask, weights = batch()
    expected_loss = preference_loss(naive_logps(model, inputs, ids, mask), weights)
    expected = gradients(model, expected_loss)
    model.activation_checkpointing_enable()
    model.train()
    stats = ScoredLM(model, chunk=1)(inputs, ids, mask)
    loss = preference_loss(stats.logps, weights)
    found = gradients(model, loss)
    assert abs(loss.item() - expected_loss.item()) < 1e-12
    assert found.keys() == expected.keys()
    assert max(float(g.abs().max()) for g in expected.values()) > 1e-2, "the comparison must see real gradients"
    for name, gradient in expected.items():
        assert float((found[name] - gradient).abs().max()) < 1e-10, name


def test_masked_positions_are_zero_without_gradient(exact_llama: Build) -> None:
    model = exact_llama()
    inputs, ids, mask, _ = batch()
    scored = ScoredLM(model)
    stats = scored(inputs, ids, mask, {"logps", "hidden", "vocab:entropy"})
    assert not stats.logps[~mask].any() and not stats.vocab["entropy"][~mask].any()
    assert stats.hidden is not None and not stats.hidden[~mask].any()
    assert stats.logps[mask].all()
    stats.logps[~mask].sum().backward()
    assert not any(p.grad is not None and p.grad.any() for p in model.parameters())


def test_padding_garbage_and_order_change_nothing(exact_llama: Build) -> None:
    model = exact_llama()
    inputs, ids, mask, weights = batch()
    scored = ScoredLM(model)
    clean = scored(inputs, ids, mask).logps
    expected = gradients(model, preference_loss(clean, weights))
    assert inputs.attention_mask is not None
    pad = inputs.attention_mask == 0
    dirty = replace(inputs, input_ids=inputs.input_ids.masked_fill(pad, 55))
    found = scored(dirty, ids.masked_fill(~mask, 44), mask).logps
    for name, gradient in gradients(model, preference_loss(found, weights)).items():
        assert float((gradient - expected[name]).abs().max()) < 1e-14, name
    assert (found - clean).abs().max().item() < 1e-13
    # Each row alone, without any padding, gives the same numbers.
    for row in range(4):
        length, count = int(inputs.attention_mask[row].sum()), int(mask[row].sum())
        tokens = inputs.input_ids[row, :length].tolist()
        laid = padded_layout([(tokens[: length - count], tokens[length - count :])], 0)
        alone = scored(*laid).logps[0]
        assert (alone - clean[row, :count]).abs().max().item() < 1e-13


def test_left_padding_keeps_its_mask(exact_llama: Build) -> None:
    scored = ScoredLM(exact_llama())
    laid = padded_layout([([4, 5], [6, 7])], 0)
    shifted = ModelInputs(
        input_ids=torch.tensor([[9, 9, 4, 5, 6, 7]]),
        # Counting on through the padding: positions that restart would make transformers cut there by itself.
        position_ids=torch.tensor([[-2, -1, 0, 1, 2, 3]]),
        attention_mask=torch.tensor([[0, 0, 1, 1, 1, 1]]),
        predict_index=torch.tensor([[3, 4]]),
    )
    left = scored(shifted, laid.response_ids, laid.response_mask).logps
    assert torch.allclose(left, scored(*laid).logps, atol=1e-13)


def test_statistics_by_name(exact_llama: Build) -> None:
    policy, reference = exact_llama(), exact_llama(hidden_act="gelu")
    inputs, ids, mask, _ = batch()
    with torch.no_grad():
        other = ScoredLM(reference)
        state = other(inputs, ids, mask, {"hidden"}).hidden
        requests = {"vocab:entropy", "joint:kl_ref_policy", "joint:kl_policy_ref"}
        stats = ScoredLM(policy, chunk=5)(inputs, ids, mask, requests, (state, other.head()))
        p, r = (
            torch.log_softmax(m(input_ids=inputs.input_ids, attention_mask=inputs.attention_mask).logits, -1).flatten(
                0, 1
            )[inputs.predict_index]
            for m in (policy, reference)
        )
    assert stats.hidden is None and set(stats.vocab) == {"entropy"}
    assert torch.allclose(stats.vocab["entropy"], -(p.exp() * p).sum(-1) * mask, atol=1e-12)
    assert torch.allclose(stats.joint["kl_ref_policy"], (r.exp() * (r - p)).sum(-1) * mask, atol=1e-12)
    assert torch.allclose(stats.joint["kl_policy_ref"], (p.exp() * (p - r)).sum(-1) * mask, atol=1e-12)
    assert float(stats.joint["kl_ref_policy"].max()) > 1e-3


def pairs() -> list[tuple[list[int], list[int]]]:
    """Rows of two pairs: chosen, then rejected."""
    prompts = [[5, 9, 3, 8], [40, 11]]
    return [*zip(prompts, [[7, 60, 33], [21] * 6], strict=True), *zip(prompts, [[90] * 5, [4]], strict=True)]


@pytest.mark.parametrize("split", [True, False])
def test_every_statistic_and_its_gradient_where_prompts_are_shared(exact_llama: Build, split: bool) -> None:
    """Statistics of two models, with the whole logits where the head does not follow the backbone at once."""
    requests = {"logps", "hidden", "vocab:entropy", "joint:kl_ref_policy", "joint:kl_policy_ref"}
    found: dict[str, tuple[TokenStats, dict[str, Tensor]]] = {}
    for layout in ("padded", "shared_prefix"):
        policy, reference = exact_llama(), exact_llama(hidden_act="gelu")
        if not split:
            policy.lm_head.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 0.7,))
        laid = LAYOUTS[layout](pairs(), 0)
        with torch.no_grad():
            other = ScoredLM(reference)
            state = other(*laid, {"hidden"}).hidden
        stats = ScoredLM(policy)(*laid, requests, (state, other.head()))
        loss = preference_loss(stats.logps, torch.ones_like(stats.logps)) + stats.joint["kl_ref_policy"].sum()
        found[layout] = stats, gradients(policy, loss)
    (ours, our_gradients), (theirs, their_gradients) = found["shared_prefix"], found["padded"]
    assert theirs.hidden is not None and float(theirs.joint["kl_policy_ref"].detach().max()) > 1e-3
    for value, expected in (
        (ours.logps, theirs.logps),
        (ours.hidden, theirs.hidden),
        (ours.vocab["entropy"], theirs.vocab["entropy"]),
        (ours.joint["kl_ref_policy"], theirs.joint["kl_ref_policy"]),
        (ours.joint["kl_policy_ref"], theirs.joint["kl_policy_ref"]),
    ):
        assert value is not None and expected is not None
        assert torch.allclose(value, expected, rtol=0, atol=1e-11)
    for parameter, gradient in their_gradients.items():
        assert float((our_gradients[parameter] - gradient).abs().max()) < 1e-10, parameter


def test_low_precision_autocast_is_close(tiny: Build) -> None:
    model = tiny("llama")
    inputs, ids, mask, weights = batch()
    scored = ScoredLM(model)
    exact = scored(inputs, ids, mask).logps
    expected = gradients(model, preference_loss(exact, weights.float()))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rough = scored(inputs, ids, mask).logps
    found = gradients(model, preference_loss(rough, weights.float()))
    assert rough.dtype == torch.float32
    assert 0 < (rough - exact).abs().max().item() < 0.15
    for name, gradient in expected.items():
        assert found[name].dtype == torch.float32
        assert float((found[name] - gradient).norm() / gradient.norm()) < 0.15, name


def test_a_model_with_a_hidden_step_before_its_head_falls_back_to_its_own_logits(
    tiny: Build, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny("llama")
    model.lm_head.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 0.7,))
    inputs, ids, mask, weights = batch()
    with caplog.at_level(logging.WARNING, "attnpo"):
        scored = ScoredLM(model)
        stats = scored(inputs, ids, mask, {"logps", "hidden", "vocab:entropy"})
    assert [r for r in caplog.records if "full logits are used" in r.message], "one line says so"
    assert len(caplog.records) == 1
    assert torch.allclose(stats.logps, naive_logps(model, inputs, ids, mask), atol=1e-5)
    assert stats.hidden is not None and stats.hidden.shape == (*mask.shape, 32)
    preference_loss(stats.logps, weights.float()).backward()


def test_requests_are_checked(tiny: Build) -> None:
    inputs, ids, mask, _ = batch()
    scored = ScoredLM(tiny("llama"))
    with pytest.raises(
        UserError, match="unknown token statistic 'entropy'; choose from hidden, joint:contrast, joint:kl_policy_ref"
    ):
        scored(inputs, ids, mask, {"entropy"})
    with pytest.raises(UserError, match=r"joint:kl_ref_policy compares two models"):
        scored(inputs, ids, mask, {"joint:kl_ref_policy"})


def test_names_no_parameter_twice(tiny: Build) -> None:
    scored = ScoredLM(tiny("llama"))
    assert set(scored.state_dict()) == {f"model.{name}" for name in scored.model.state_dict()}


def test_construction_leaves_modes_as_they_are(tiny: Build) -> None:
    model = tiny("llama", attention_dropout=0.5).train()
    model.model.layers[1].eval()
    ScoredLM(model)
    assert model.training and not model.model.layers[1].training and not model.model.layers[1].mlp.training
    assert model.model.layers[0].training


@pytest.mark.parametrize("name", ["padded", "shared_prefix"])
def test_autocast_and_sharding_in_every_layout(tiny: Build, name: str, one_rank: None) -> None:
    plain = ScoredLM(tiny("llama"))
    loss = preference_loss(plain(*LAYOUTS["padded"](pairs(), 0)).logps, torch.ones(4, 6))
    expected = gradients(plain.model, loss)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rough = plain(*LAYOUTS[name](pairs(), 0)).logps
    assert abs(float((preference_loss(rough, torch.ones(4, 6)) - loss).detach())) < 0.3
    scored = shard_all(ScoredLM(tiny("llama")))
    found = preference_loss(scored(*LAYOUTS[name](pairs(), 0)).logps, torch.ones(4, 6))
    found.backward()
    assert torch.allclose(found, loss, atol=1e-5)
    for parameter, value in scored.model.named_parameters():
        assert torch.allclose(value.grad.full_tensor(), expected[parameter], atol=1e-5), parameter


@pytest.mark.parametrize("scaled", ["divides", "multiplies"])
def test_scaled_logits_need_no_fallback(scaled: str, shape: dict[str, int], caplog: pytest.LogCaptureFixture) -> None:
    from transformers import AutoModelForCausalLM, CohereConfig, GraniteConfig

    plain = {key: value for key, value in shape.items() if key != "head_dim"}
    divides = scaled == "divides"
    config = GraniteConfig(**plain, logits_scaling=0.1) if divides else CohereConfig(**plain, logit_scale=4.0)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    inputs, ids, mask, _ = batch()
    with torch.no_grad(), caplog.at_level(logging.WARNING, "attnpo"):
        found = ScoredLM(model)(inputs, ids, mask).logps
        expected = naive_logps(model, inputs, ids, mask)
    assert not [record for record in caplog.records if "full logits" in record.message]
    assert float(expected[mask].std()) > 0.3, "logits must not be flat"
    assert torch.allclose(found, expected, rtol=0, atol=2e-5)
