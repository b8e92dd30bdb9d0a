"""Adapters: what trains, what the base still says, and what comes out merged."""

import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from attnpo.lab.testbed.grammar import Grammar
from attnpo.lab.testbed.tokenizer import build_tokenizer
from attnpo.models.layouts import padded_layout
from attnpo.models.lora import (
    AdapterDisabledReference,
    add_lora,
    describe_adapter_coverage,
    disable_adapters,
    expert_tensor_names,
    has_adapters,
    merge_state_dict,
    target_names,
    unadaptable_names,
)
from attnpo.models.memory import count_adapter_parameters
from attnpo.models.scored import ScoredLM
from attnpo.models.spec import LoraSpec
from attnpo.schema import ModelInputs, UserError
from attnpo.training.export import Exporter
from tests.conformance.family_models import tiny_model

Build = Callable[..., PreTrainedModel]
Batch = tuple[ModelInputs, Tensor, Tensor]
SPEC = LoraSpec(rank=4, alpha=8.0)
IDS = torch.arange(3, 23)[None]


def batch() -> Batch:
    """Two ragged rows."""
    generator = torch.Generator().manual_seed(0)
    sides = [torch.randint(3, 97, (n,), generator=generator).tolist() for n in (4, 7, 6, 3)]
    laid = padded_layout([(sides[0], sides[1]), (sides[2], sides[3])], 0)
    return laid.inputs, laid.response_ids, laid.response_mask


def halved(model: PreTrainedModel) -> PreTrainedModel:
    """The model as it is loaded in bfloat16: its weights, not its rotary frequencies."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    return model


def is_adapter(name: str) -> bool:
    return ".lora_A." in name or ".lora_B." in name


def train(policy: ScoredLM, steps: int = 3, autocast: bool = False) -> dict[str, Tensor]:
    """The last gradients after a few steps that raise the first row's log-probability over the second's."""
    optimizer = torch.optim.AdamW([p for p in policy.parameters() if p.requires_grad], lr=0.05)
    policy.train()
    gradients: dict[str, Tensor] = {}
    for _ in range(steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            sums = policy(*batch()).logps.sum(1)
        torch.nn.functional.softplus(sums[1] - sums[0] - 8).backward()
        gradients = {name: p.grad.clone() for name, p in policy.model.named_parameters() if p.grad is not None}
        optimizer.step()
    policy.eval()
    return gradients


def logits(model: PreTrainedModel) -> Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


def largest(difference: Tensor) -> float:
    return float(difference.abs().max())


# ------------------------------------------------------------------------------------------------------ getting in


def test_every_family_keeps_its_class_its_logits_and_the_fast_path(
    tiny: Build, family: str, caplog: pytest.LogCaptureFixture
) -> None:
    plain, adapted = tiny(family), add_lora(tiny(family), SPEC)
    assert type(adapted) is type(plain) and has_adapters(adapted) and not has_adapters(plain)
    assert torch.equal(logits(adapted), logits(plain))
    scored = ScoredLM(adapted)
    assert torch.equal(scored(*batch()).logps, ScoredLM(plain)(*batch()).logps)
    ours = [record for record in caplog.records if record.name.startswith("attnpo")]
    assert not ours, "backbone and head must fit without the fallback"


def test_all_linear_leaves_the_head_alone_and_names_choose(tiny: Build) -> None:
    names = {
        name.partition(".lora_")[0].rpartition(".")[2]
        for name, p in add_lora(tiny("llama"), SPEC).named_parameters()
        if p.requires_grad
    }
    assert names == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    few = add_lora(tiny("llama"), LoraSpec(rank=2, target_modules=("q_proj", "layers.1.mlp.up_proj")))
    owners = {name.partition(".lora_")[0] for name, p in few.named_parameters() if p.requires_grad}
    assert owners == {f"model.layers.{i}.self_attn.q_proj" for i in range(4)} | {"model.layers.1.mlp.up_proj"}


@pytest.mark.parametrize(
    ("target", "text"),
    [
        (
            "query",
            "'query' matches no linear module; the linear modules of LlamaForCausalLM are q_proj, k_proj, v_proj",
        ),
        ("embed_tokens", "'embed_tokens' matches no linear module"),
        ("lm_head", "'lm_head' is the vocabulary head, which cannot be adapted"),
    ],
)
def test_a_target_that_cannot_be_adapted_is_named_beside_those_that_can(tiny: Build, target: str, text: str) -> None:
    model = tiny("llama")
    with pytest.raises(UserError, match=text):
        add_lora(model, LoraSpec(target_modules=("q_proj", target)))
    assert not has_adapters(model)
    assert all(parameter.requires_grad for parameter in model.parameters()), "refused before anything changed"


def test_modules_that_peft_refuses_are_left_out_and_named() -> None:
    mamba = tiny_model("mamba")
    assert {name.rpartition(".")[2] for name in target_names(mamba, SPEC)} == {"in_proj", "x_proj", "dt_proj"}
    assert describe_adapter_coverage(mamba, SPEC).endswith(
        "; none on out_proj, whose weight is not used as a plain matrix product"
    )
    with pytest.raises(UserError, match="'out_proj' is a module whose weight is not used as a plain"):
        add_lora(mamba, LoraSpec(target_modules=("in_proj", "out_proj")))
    assert has_adapters(add_lora(mamba, SPEC))
    assert unadaptable_names(tiny_model("llama4_text")) == ["router"], (
        "a linear module that gives more than its product"
    )


def test_the_log_says_which_share_adapters_reach() -> None:
    routed = tiny_model("qwen3_moe")
    parameters = dict(routed.named_parameters())
    stacked = sum(part.numel() for name, part in parameters.items() if part.dim() == 3)
    reached = sum(parameters[f"{name}.weight"].numel() for name in target_names(routed, SPEC))
    total = sum(part.numel() for part in parameters.values())
    assert stacked > 0 and reached > 0
    assert (
        f"fused experts, which contain {(reached + stacked) / total:.0%} of the parameters"
        in describe_adapter_coverage(routed, SPEC)
    )
    assert "without an adapter" not in describe_adapter_coverage(routed, SPEC)
    said = describe_adapter_coverage(routed, LoraSpec(dropout=0.1))
    assert said.endswith("; set model.lora.dropout=0 to adapt those that can be")
    assert f"which contain {reached / total:.0%} of the parameters" in said
    assert f"{stacked / total:.0%} are fused expert weights without an adapter" in said and "experts." in said
    assert "experts" not in describe_adapter_coverage(tiny_model("llama"), SPEC)


@pytest.mark.parametrize(("kind", "checkpointing"), [("qwen3_moe", False), ("gpt_oss", True)])
def test_fused_experts_are_adapted_trained_exported_and_read_again(
    kind: str, checkpointing: bool, tmp_path: Path
) -> None:
    """Experts as (outputs, inputs) and as (inputs, outputs): the export is the trained model, and off is the base."""
    model = tiny_model(kind)
    own, before = dict(model.state_dict()), logits(model)
    experts = expert_tensor_names(model, SPEC)
    assert experts and all(name.endswith(("gate_up_proj", "down_proj")) for name in experts)
    counted = count_adapter_parameters(model, SPEC)
    add_lora(model, SPEC)
    assert counted == sum(p.numel() for name, p in model.named_parameters() if is_adapter(name))
    assert torch.equal(logits(model), before)
    policy = ScoredLM(model)
    if checkpointing:
        policy.model.activation_checkpointing_enable()
    gradients = train(policy)
    of_experts = [value for name, value in gradients.items() if ".experts." in name]
    assert len(of_experts) == 2 * len(experts) and all(value.any() for value in of_experts)
    assert all(is_adapter(name) for name in gradients)
    trained = logits(model)
    assert largest(trained - before) > 1e-2
    with disable_adapters(model):
        assert torch.equal(logits(model), before)
    merged = merge_state_dict(model)
    assert merged.keys() == own.keys()
    assert not any(torch.equal(merged[name], own[name]) for name in experts)
    Exporter(build_tokenizer(Grammar())).export(model, tmp_path)
    read = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(logits(read), trained, rtol=1e-4, atol=1e-4)
    fresh = add_lora(tiny_model(kind), SPEC)
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(logits(fresh), trained), "as a resumed run restores it"


def test_experts_are_chosen_by_name_too() -> None:
    assert expert_tensor_names(tiny_model("qwen3_moe"), LoraSpec(target_modules=("q_proj",))) == []
    named = LoraSpec(target_modules=("q_proj", "experts.down_proj"))
    routed = tiny_model("qwen3_moe")
    assert all(name.endswith("experts.down_proj") for name in expert_tensor_names(routed, named))
    assert {name.rpartition(".")[2] for name in target_names(routed, named)} == {"q_proj"}


def test_a_second_adapter_is_refused(tiny: Build) -> None:
    model = add_lora(tiny("llama"), SPEC)
    with pytest.raises(UserError, match="already has an adapter"):
        add_lora(model, SPEC)


def test_without_peft_the_error_says_what_to_install(tiny: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(UserError, match=r"pip install 'attnpo\[lora\]'"):
        add_lora(tiny("llama"), SPEC)


def test_the_settings_are_light_and_checked() -> None:
    for wrong, text in (
        ({"rank": 0}, "model.lora.rank must be at least 1, got 0"),
        ({"alpha": 0.0}, "model.lora.alpha must be above 0"),
        ({"dropout": 1.0}, "model.lora.dropout must be in"),
        ({"target_modules": "q_proj"}, r"write model.lora.target_modules=\[q_proj\]"),
        ({"target_modules": ()}, "model.lora.target_modules is empty"),
    ):
        with pytest.raises(UserError, match=text):
            LoraSpec(**wrong)


# -------------------------------------------------------------------------------------------------------- training


@pytest.mark.parametrize(("autocast", "checkpointing"), [(False, False), (True, True)])
def test_training_moves_adapters_alone(tiny: Build, autocast: bool, checkpointing: bool) -> None:
    """A bfloat16 base with float32 adapters, as on one GPU: every gradient but the first step's of A is non-zero."""
    policy = ScoredLM(add_lora(halved(tiny("llama")), LoraSpec(rank=4, alpha=8.0, dropout=0.1)))
    if checkpointing:
        policy.model.activation_checkpointing_enable()
    before = {name: p.detach().clone() for name, p in policy.model.named_parameters()}
    gradients = train(policy, autocast=autocast)
    assert {name for name in before if is_adapter(name)} == gradients.keys() and gradients
    for name, gradient in gradients.items():
        assert gradient.dtype == torch.float32 and bool(gradient.any()), name
    for name, parameter in policy.model.named_parameters():
        assert torch.equal(parameter, before[name]) != is_adapter(name), name
        assert parameter.dtype == (torch.float32 if is_adapter(name) else torch.bfloat16)


def test_checkpointing_changes_no_gradient(tiny: Build) -> None:
    found = []
    for when in ("never", "before", "after"):
        torch.manual_seed(1)
        model = tiny("llama")
        if when == "before":
            model.activation_checkpointing_enable()
        torch.manual_seed(1)
        policy = ScoredLM(add_lora(model, SPEC))
        if when == "after":
            model.activation_checkpointing_enable()
        found.append(train(policy))
    for other in found[1:]:
        assert other.keys() == found[0].keys()
        assert all(torch.allclose(other[name], found[0][name], atol=1e-6) for name in other)


# ---------------------------------------------------------------------------------------------------------- merged


@pytest.mark.parametrize("tied", [False, True])
def test_the_merged_state_gives_a_plain_model_the_adapted_logits(tiny: Build, tied: bool) -> None:
    policy = ScoredLM(add_lora(tiny("llama", tie_word_embeddings=tied), SPEC))
    train(policy)
    kept = {name: value.clone() for name, value in policy.model.state_dict().items()}
    plain = tiny("llama", tie_word_embeddings=tied)
    start, adapted = logits(plain), logits(policy.model)
    state = merge_state_dict(policy.model)
    assert list(state) == list(plain.state_dict())
    plain.load_state_dict(state)
    assert largest(adapted - start) > 0.1, "the adapters must have moved"
    assert largest(logits(plain) - adapted) < 1e-5
    assert merge_state_dict(policy.model, keep=False) == {}
    now = policy.model.state_dict()
    assert all(torch.equal(now[name], value) for name, value in kept.items()), "the model itself is left as it is"


def test_the_merged_state_keeps_the_number_format_and_rounds_once(tiny: Build) -> None:
    policy = ScoredLM(add_lora(halved(tiny("llama")), SPEC))
    train(policy)
    state = merge_state_dict(policy.model)
    assert {value.dtype for value in state.values()} == {torch.bfloat16}
    layer = policy.model.model.layers[2].mlp.down_proj
    exact = layer.base_layer.weight.double() + 2.0 * (
        layer.lora_B["default"].weight.double() @ layer.lora_A["default"].weight.double()
    )
    assert torch.equal(state["model.layers.2.mlp.down_proj.weight"], exact.float().to(torch.bfloat16))


def test_transposed_linear_layers_merge_too() -> None:
    """GPT-2 keeps its linear weights the other way round."""
    from transformers import GPT2Config, GPT2LMHeadModel

    def build() -> PreTrainedModel:
        torch.manual_seed(0)
        config = GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=64, initializer_range=0.2)
        return GPT2LMHeadModel(config).eval()

    policy = ScoredLM(add_lora(build(), SPEC))
    start = logits(policy.model)
    train(policy)
    plain = build()
    plain.load_state_dict(merge_state_dict(policy.model))
    assert largest(logits(policy.model) - start) > 0.1
    assert largest(logits(plain) - logits(policy.model)) < 1e-4


def test_without_adapters_the_merged_state_is_the_state_and_needs_no_peft(
    tiny: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("peft", "peft.tuners.lora"):
        monkeypatch.setitem(sys.modules, name, None)
    model = tiny("llama")
    state = merge_state_dict(model)
    assert list(state) == list(model.state_dict())
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())


# ------------------------------------------------------------------------------------------------- the reference


@pytest.mark.parametrize("autocast", [False, True])
def test_the_policy_without_adapters_is_the_base_to_the_bit(tiny: Build, autocast: bool) -> None:
    """In a policy in train mode, with dropout in the base and in the adapters."""
    base = ScoredLM(tiny("llama", attention_dropout=0.5))
    policy = ScoredLM(add_lora(tiny("llama", attention_dropout=0.5), LoraSpec(rank=4, dropout=0.5)))
    reference = AdapterDisabledReference(policy)
    context = torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext()
    requests = {"hidden", "vocab:entropy"}
    for trained in (False, True):
        if trained:
            train(policy)
        policy.train()
        with context:
            wanted, found = base(*batch(), requests), reference(*batch(), requests)
            assert policy.training and policy.model.training, "the mode is restored"
            own = policy.eval()(*batch()).logps
        assert torch.equal(found.logps, wanted.logps) and torch.equal(found.hidden, wanted.hidden)
        assert torch.equal(found.vocab["entropy"], wanted.vocab["entropy"])
        assert not found.logps.requires_grad and own.requires_grad
        assert torch.equal(own, wanted.logps) != trained, "fresh adapters change nothing, trained ones do"


def test_the_reference_owns_nothing_and_stays_in_eval_mode(tiny: Build) -> None:
    policy = ScoredLM(add_lora(tiny("llama"), SPEC))
    reference = AdapterDisabledReference(policy)
    assert isinstance(reference, ScoredLM), "takes a reference's place"
    assert not list(reference.parameters()) and not reference.state_dict() and len(list(reference.modules())) == 1
    policy.train()
    assert reference.train() is reference.eval() is reference.to("cpu") is reference.requires_grad_(False)
    assert not reference.training and policy.training
    assert any(parameter.requires_grad for parameter in policy.parameters())


def test_a_reference_between_forward_and_backward_changes_no_gradient(tiny: Build) -> None:
    """As in a training step, activations recomputed after the reference's forward."""
    torch.manual_seed(2)
    policy = ScoredLM(add_lora(tiny("llama"), SPEC))
    train(policy)
    policy.model.activation_checkpointing_enable()
    policy.train()
    reference, found = AdapterDisabledReference(policy), []
    for between in (False, True):
        policy.zero_grad()
        loss = policy(*batch()).logps.sum()
        if between:
            reference(*batch())
        loss.backward()
        found.append([p.grad.clone() for p in policy.parameters() if p.requires_grad])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert max(float(gradient.abs().max()) for gradient in found[0]) > 1e-3


def test_adapters_and_modes_come_back_after_an_error(tiny: Build) -> None:
    policy = ScoredLM(add_lora(tiny("llama"), SPEC))
    train(policy)
    policy.train()
    before = policy(*batch()).logps
    with pytest.raises(UserError, match="unknown token statistic"):
        AdapterDisabledReference(policy)(*batch(), {"nonsense"})
    assert policy.training and torch.equal(policy(*batch()).logps, before)


def test_contexts_nest_and_leave_a_frozen_policy_frozen(tiny: Build) -> None:
    policy = ScoredLM(add_lora(tiny("llama"), SPEC))
    train(policy)
    policy.requires_grad_(False)
    base, adapted = logits(tiny("llama")), logits(policy.model)
    with disable_adapters(policy.model):
        with disable_adapters(policy.model):
            pass
        assert torch.equal(logits(policy.model), base)
    assert torch.equal(logits(policy.model), adapted) and largest(adapted - base) > 0.1
    assert not any(parameter.requires_grad for parameter in policy.parameters())


def test_a_policy_without_adapters_is_no_reference(tiny: Build) -> None:
    with pytest.raises(UserError, match=r"needs a policy with a new adapter: set model=lora"):
        AdapterDisabledReference(ScoredLM(tiny("llama")))


def test_shards_give_the_same_reference_gradients_and_merged_state(tiny: Build, one_rank: None) -> None:
    """FSDP2; the first forward of all is the reference's, another falls between the policy's and its backward."""
    from torch.distributed.device_mesh import init_device_mesh

    from attnpo.training.module import shard_model

    found = []
    for sharded in (False, True):
        torch.manual_seed(3)
        policy = ScoredLM(add_lora(halved(tiny("llama")), SPEC))
        if sharded:
            shard_model(policy, init_device_mesh("cpu", (1,)))
        first = AdapterDisabledReference(policy)(*batch()).logps
        policy.train()
        loss = policy(*batch()).logps.sum()
        second = AdapterDisabledReference(policy)(*batch()).logps
        loss.backward()
        gradients = {name: p.grad for name, p in policy.model.named_parameters() if p.grad is not None}
        assert all(isinstance(gradient, DTensor) == sharded for gradient in gradients.values()) and gradients
        whole = {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in gradients.items()}
        torch.nn.init.constant_(policy.model.model.layers[1].mlp.up_proj.lora_B["default"].weight, 0.5)
        found.append((first, second, whole, merge_state_dict(policy.model)))
    (first, second, gradients, state), other = found
    assert torch.equal(first, second) and torch.equal(first, other[0]) and torch.equal(first, other[1])
    assert gradients.keys() == other[2].keys()
    assert all(torch.allclose(gradients[name], other[2][name], atol=1e-5) for name in gradients)
    assert list(state) == list(other[3]) and not any(isinstance(value, DTensor) for value in other[3].values())
    assert all(torch.equal(state[name], other[3][name]) for name in state)
    start = halved(tiny("llama")).state_dict()
    assert [name for name in state if not torch.equal(state[name], start[name])] == [
        "model.layers.1.mlp.up_proj.weight"
    ]
