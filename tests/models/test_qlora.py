"""Adapters on weights of 4 bits: what is packed, what comes out merged, and what is refused."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, GPT2Config, GPT2LMHeadModel, PreTrainedModel

from attnpo.models.layouts import shared_prefix_layout
from attnpo.models.loading import load_model
from attnpo.models.lora import AdapterDisabledReference, add_lora, merge_state_dict
from attnpo.models.scored import ScoredLM
from attnpo.models.spec import LoraSpec, ModelSpec
from attnpo.models.trial import select_layout
from attnpo.schema import UserError
from attnpo.training.export import make_empty_model
from tests.models.conftest import tiny_model
from tests.models.test_lora import SPEC, batch, largest, logits, train

Build = Callable[..., PreTrainedModel]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny_model("llama", initializer_range=0.05).save_pretrained(path)
    return path


def packed(model: PreTrainedModel) -> set[str]:
    return {name for name, value in model.named_parameters() if value.dtype == torch.uint8}


@pytest.mark.parametrize("quantize", ["nf4", "fp4"])
def test_matrices_of_the_blocks_are_packed_and_nothing_else(folder: Path, quantize: str) -> None:
    model, whole = load_model(folder, quantize=quantize), load_model(folder)
    matrices = {name for name, value in whole.named_parameters() if ".layers." in name and value.dim() == 2}
    assert packed(model) == matrices and len(matrices) == 4 * 7
    sizes = dict(whole.named_parameters())
    assert all(2 * value.numel() == sizes[name].numel() for name, value in model.named_parameters() if name in matrices)
    unpacked = merge_state_dict(add_lora(model, SPEC))
    for name, value in whole.state_dict().items():
        alike = torch.cosine_similarity(unpacked[name].flatten(), value.flatten(), 0)
        assert 0.95 < alike < 0.9999 if name in matrices else torch.equal(unpacked[name], value)
    assert not model.training


def test_the_merged_state_gives_a_plain_model_the_adapted_logits(folder: Path) -> None:
    """Also of matrices that are packed and carry no adapter."""
    targets = ("q_proj", "down_proj")
    model = load_model(folder, quantize="nf4")
    start = logits(model)
    policy = ScoredLM(add_lora(model, LoraSpec(rank=4, alpha=8.0, target_modules=targets)))
    assert largest(logits(policy.model) - start) < 1e-6
    gradients = train(policy)
    assert gradients and all(".lora_" in name for name in gradients)
    before = {name: value.clone() for name, value in policy.model.state_dict().items()}
    state = merge_state_dict(policy.model)
    assert all(torch.equal(value, before[name]) for name, value in policy.model.state_dict().items())
    plain = load_model(folder)
    plain.load_state_dict(state)
    assert largest(logits(policy.model) - start) > 0.1, "the adapters must have moved"
    assert largest(logits(plain) - logits(policy.model)) < 1e-4


def test_the_merged_state_is_rounded_once_to_the_format_of_the_products(folder: Path) -> None:
    policy = ScoredLM(add_lora(load_model(folder, dtype="bfloat16", quantize="nf4"), SPEC))
    base = merge_state_dict(policy.model)
    train(policy)
    state, name = merge_state_dict(policy.model), "model.layers.2.mlp.down_proj"
    assert {value.dtype for value in state.values()} == {torch.bfloat16}
    layer = policy.model.get_submodule(name)
    moved = 2.0 * (layer.lora_B["default"].weight @ layer.lora_A["default"].weight)
    exact = base[f"{name}.weight"].float() + moved.detach()
    assert torch.equal(state[f"{name}.weight"], exact.to(torch.bfloat16))
    assert not torch.equal(state[f"{name}.weight"], base[f"{name}.weight"])


def test_a_forward_without_gradients_changes_nothing(folder: Path) -> None:
    """On CPUs with bf16 units the library would repack the weights there, and cut the gradient for good."""
    found = []
    for looked in (False, True):
        torch.manual_seed(0)
        policy = ScoredLM(add_lora(load_model(folder, quantize="nf4"), SPEC))
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.05)
        kept = {name: value.clone() for name, value in policy.model.state_dict().items()}
        if looked:
            logits(policy.model)
        policy.train()
        policy(*batch()).logps.sum().backward()
        assert all(torch.equal(value, kept[name]) for name, value in policy.model.state_dict().items())
        found.append([p.grad for p in policy.parameters() if p.grad is not None])
    assert len(found[0]) == 2 * 4 * 7 and all(largest(gradient) > 0 for gradient in found[0])
    assert all(torch.equal(first, second) for first, second in zip(*found, strict=True))


def test_layers_that_lie_the_other_way_round_come_out_so(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=97, n_embd=64, n_layer=2, n_head=4, n_positions=64, initializer_range=0.2)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    policy = ScoredLM(add_lora(load_model(tmp_path, quantize="nf4"), LoraSpec(rank=4, target_modules=("c_attn",))))
    train(policy)
    plain = load_model(tmp_path)
    plain.load_state_dict(merge_state_dict(policy.model))
    assert largest(logits(plain) - logits(policy.model)) < 1e-3


def test_what_is_exported_says_nothing_of_four_bits(folder: Path, tmp_path: Path) -> None:
    policy = add_lora(load_model(folder, quantize="nf4"), SPEC)
    make_empty_model(policy, torch.float32).save_pretrained(tmp_path / "out", state_dict=merge_state_dict(policy))
    assert getattr(AutoConfig.from_pretrained(tmp_path / "out"), "quantization_config", None) is None
    assert largest(logits(load_model(tmp_path / "out")) - logits(policy)) < 1e-5


def test_the_base_under_the_adapters_is_the_reference_and_takes_every_layout(folder: Path) -> None:
    model = load_model(folder, quantize="nf4")
    base = logits(model)
    policy = ScoredLM(add_lora(model, SPEC))
    train(policy)
    off = AdapterDisabledReference(policy)
    assert select_layout("auto", [policy, off]) is shared_prefix_layout
    rows = [([5, 9, 3], [7, 8]), ([5, 9, 3], [4])]
    scores = torch.log_softmax(base, -1)
    assert largest(logits(policy.model) - base) > 0.1
    with torch.no_grad():
        logps = off(*shared_prefix_layout(rows, 0)).logps
        plain = ScoredLM(load_model(folder, quantize="nf4"))(*shared_prefix_layout(rows, 0)).logps
    assert scores.isfinite().all() and torch.equal(logps, plain)


def test_what_cannot_be_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="4-bit weights cannot be trained; set model=qlora"):
        ModelSpec("m", quantize="nf4")
    with pytest.raises(UserError, match=r"model\.quantize must be null or one of nf4, fp4, got 'int4'"):
        ModelSpec("m", quantize="int4", lora=LoraSpec())
    with pytest.raises(UserError, match="4-bit weights cannot be multiplied in float64"):
        ModelSpec("m", quantize="nf4", lora=LoraSpec(), dtype="float64")
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    monkeypatch.setattr("attnpo.models.loading.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"needs the package bitsandbytes: pip install 'attnpo\[qlora\]'"):
        load_model(folder, quantize="nf4")
