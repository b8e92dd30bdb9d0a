"""The loads of a mixture's experts and their loss, against the library's own on plain batches."""

import logging
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3MoeConfig
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from attnpo.data.collate import collate
from attnpo.models.layouts import LAYOUTS, Layout, padded_layout
from attnpo.models.lora import add_lora
from attnpo.models.router import ROUTER, check_router, load_balancing_loss, log_unused_coefficient
from attnpo.models.scored import ScoredLM
from attnpo.models.spec import LoraSpec, ModelSpec
from attnpo.objectives.simpo import SimPO
from attnpo.schema import UserError
from attnpo.training.module import PreferenceModule
from attnpo.training.optimizer import Optimizer
from tests.models.classes import SHAPE
from tests.training.tiny import make_examples

Build = Callable[..., PreTrainedModel]
ROWS = [([5, 9, 3], [11, 2, 14, 7]), ([8, 4], [6]), ([5, 9, 3], [12, 6]), ([8, 4], [13, 3, 2])]


def mixture(**more: object) -> PreTrainedModel:
    """A random Qwen3 of two blocks with four experts, two of them per token."""
    torch.manual_seed(0)
    shape = {**SHAPE, "num_hidden_layers": 2, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    model = AutoModelForCausalLM.from_config(Qwen3MoeConfig(**{**shape, **more}))
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


def routed() -> PreTrainedModel:
    return mixture(router_aux_loss_coef=0.0)


def library(model: PreTrainedModel, pair: int) -> Tensor:
    """The library's own loss of one pair's two sequences, in a plain padded batch of the whole model."""
    rows = [[*ROWS[row][0], *ROWS[row][1]] for row in (pair, pair + 2)]
    width = max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    logits = model(input_ids=ids, attention_mask=mask, output_router_logits=True, use_cache=False).router_logits
    loss = load_balancing_loss_func(logits, 4, 2, mask)
    assert isinstance(loss, Tensor)
    return loss


def ours(policy: ScoredLM, layout: Layout) -> Tensor:
    stats = policy(*layout(ROWS, 0), frozenset({"logps", ROUTER}))
    assert stats.routing is not None
    return load_balancing_loss(stats.routing)


@pytest.mark.parametrize("name", list(LAYOUTS))
def test_each_pair_has_the_librarys_loss_and_gradient_in_every_layout(name: str) -> None:
    model = routed()
    policy = ScoredLM(model)
    expected = torch.stack([library(model, 0), library(model, 1)])
    assert (expected[0] - expected[1]).abs() > 1e-3 and bool((expected > 2.0).all()), "even loads give 2"
    expected.sum().backward()
    wanted = {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    for checkpointing in (False, True):
        if checkpointing:
            model.activation_checkpointing_enable()
            policy.train()
        loss = ours(policy, LAYOUTS[name])
        torch.testing.assert_close(loss, expected.detach())
        loss.sum().backward()
        for key, parameter in model.named_parameters():
            if key in wanted:
                torch.testing.assert_close(parameter.grad, wanted[key], rtol=1e-3, atol=1e-5, msg=key)
        assert any("gate" in key for key in wanted)
        model.zero_grad()


def test_adapters_get_a_gradient() -> None:
    policy = ScoredLM(add_lora(routed(), LoraSpec(rank=2)))
    ours(policy, padded_layout).sum().backward()
    moved = [name for name, p in policy.model.named_parameters() if p.grad is not None and bool(p.grad.any())]
    assert moved and all("lora_B" in name for name in moved)


def test_rows_with_an_empty_answer_and_unshared_prompts_keep_their_places() -> None:
    policy = ScoredLM(routed())
    rows = [([5, 9, 3], [11, 2]), ([8, 4], [6]), ([5, 9, 3], []), ([8, 5], [13, 3, 2])]
    given = [policy(*layout(rows, 0), frozenset({"logps", ROUTER})).routing for layout in LAYOUTS.values()]
    assert all(routing is not None for routing in given)
    for routing in given[1:]:
        torch.testing.assert_close(routing, given[0])
    assert given[0] is not None and given[0][:, 0].sum(-1).tolist() == [5 * 4, 3 * 4, 3 * 4, 5 * 4]


def test_a_step_adds_the_coefficient_times_the_loss_of_each_pair() -> None:
    outputs = {}
    model, examples = routed(), make_examples(4)
    for coef in (0.0, 0.5):
        module = PreferenceModule(ScoredLM(model), None, SimPO(), Optimizer(), 1, router_coef=coef)
        for micro in (1, 4):
            parts = [examples[start : start + micro] for start in range(0, 4, micro)]
            scored = [module.score(collate(part, padded_layout, 0, 4))[3] for part in parts]
            outputs[coef, micro] = torch.cat([one.losses for one in scored])
            if coef:
                load = torch.cat([one.extras["losses/router"] for one in scored])
                torch.testing.assert_close(outputs[coef, micro], outputs[0.0, micro] + coef * load)
            else:
                assert "losses/router" not in scored[0].extras
    torch.testing.assert_close(outputs[0.5, 1], outputs[0.5, 4])


def test_a_model_without_a_router_is_refused_with_the_field(tiny: Build) -> None:
    check_router(routed())
    with pytest.raises(UserError, match="LlamaForCausalLM has no router_aux_loss_coef in its config"):
        check_router(tiny("llama"))
    with pytest.raises(UserError, match="returns no router logits"):
        check_router(mixture(num_hidden_layers=1, mlp_only_layers=[0]))


def test_a_coefficient_of_the_models_own_is_said_once(tiny: Build, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        log_unused_coefficient(mixture(router_aux_loss_coef=0.25))
        assert "sets a coefficient of 0.25" in caplog.text and len(caplog.records) == 1
        log_unused_coefficient(routed())
        log_unused_coefficient(tiny("llama"))
    assert len(caplog.records) == 1


def test_the_setting_is_checked() -> None:
    for wrong, text in (
        ({"router_aux_loss_coef": -0.1}, "model.router_aux_loss_coef must be at least 0"),
        ({"router_aux_loss_coef": 0.1, "compile": "inductor"}, "set model.compile=null"),
        ({"router_aux_loss_coef": 0.1, "reward": True}, "set model.router_aux_loss_coef=0"),
    ):
        with pytest.raises(UserError, match=text):
            ModelSpec("folder", **wrong)
