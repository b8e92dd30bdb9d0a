"""Model classes beside Llama's: loaded as a user loads them, then equal to their own eager attention, or refused."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, BloomConfig, LlamaConfig

from attnpo.judge.causal_judge import CausalJudge, kernel_for
from attnpo.models.description import check_exact_length, describe_model, exact_length, max_positions, position_warning
from attnpo.models.generate import context_length
from attnpo.models.loading import inspect_model, load_model, num_heads
from attnpo.models.memory import ModelShape, count_parameters
from attnpo.models.scored import ScoredLM
from attnpo.models.trial import check_trainable, select_layout
from attnpo.schema import UserError
from tests.conformance.family_models import tiny_config
from tests.conformance.family_models import tiny_model as family
from tests.models.classes import VOCAB, tiny_folder

# Beginnings in common, a prompt longer than every window here, and one that is not.
START = [(7 * place + 3) % VOCAB for place in range(30)]
PROMPTS = [[*START, 5, 6, 7], [*START, 50, 51, 52, 53], START[:9]]


def judge_of(folder: Path) -> CausalJudge:
    """The judge as a run builds it, with the kernel that goes with what the class has."""
    found = inspect_model(folder)
    return CausalJudge(load_model(folder, attn_implementation=found.judge_attention), kernel=kernel_for(found))


def test_rows_of_keys_that_an_indexer_keeps_are_those_of_eager_attention(tmp_path: Path) -> None:
    """Fewer than the prompt has; other classes: ``tests/conformance/test_families.py``."""
    folder = tiny_folder("deepseek_v32", tmp_path)
    readings = judge_of(folder).read(PROMPTS, layers=(1, 2, 3, 4), per_head=True)
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    for ids, reading in zip(PROMPTS, readings, strict=True):
        with torch.no_grad():
            output = model(input_ids=torch.tensor([ids]), output_attentions=True, use_cache=False)
        assert reading.verdict_token == int(output.logits[0, -1].argmax())
        for ours, maps in zip(reading.rows, output.attentions, strict=True):
            assert int((maps[0, :, -1] > 0).sum(-1).max()) == 4
            torch.testing.assert_close(ours, maps[0, :, -1].float(), rtol=0, atol=2e-5)


@pytest.mark.parametrize(("kind", "attention", "kernel"), [("gemma2", "eager", "blocks"), ("llama", "sdpa", "sdpa")])
def test_a_class_is_loaded_with_the_attention_that_it_has(
    kind: str, attention: str, kernel: str, tmp_path: Path
) -> None:
    folder = tiny_folder(kind, tmp_path)
    assert load_model(folder).config._attn_implementation == attention == inspect_model(folder).attention
    assert kernel_for(inspect_model(folder)) == kernel
    assert load_model(folder, attn_implementation="eager").config._attn_implementation == "eager"


def test_an_attention_that_a_class_lacks_is_not_told_as_a_missing_folder(tmp_path: Path) -> None:
    folder = tiny_folder("gemma2", tmp_path)
    with pytest.raises(UserError) as caught:
        load_model(folder, attn_implementation="flex_attentive")
    assert str(caught.value).startswith("model.attn_implementation=flex_attentive: Gemma2ForCausalLM cannot use it")
    assert "set model.attn_implementation=sdpa" in str(caught.value) and "\n" not in str(caught.value)
    (folder / "model.safetensors").write_bytes(b"cut")
    with pytest.raises(UserError, match=r"could not load the model .*copy or export the folder again"):
        load_model(folder, attn_implementation="eager")


@pytest.mark.parametrize("place", [0, 1])
def test_attention_with_something_beside_what_is_read_is_refused(
    place: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge = judge_of(tiny_folder("llama", tmp_path))
    kernel = judge.model.model.layers[1].self_attn
    original = type(kernel).forward

    def scaled(self: Any, hidden_states: Tensor, **named: Any) -> Any:
        output, maps = original(self, hidden_states, **named)
        return output * (1.0 if self.config._attn_implementation == "sdpa" or self.layer_idx != place else 0.5), maps

    monkeypatch.setattr(type(kernel), "forward", scaled)
    with pytest.raises(UserError, match=rf"LlamaForCausalLM: reading the attention of layer {place + 1} changes"):
        judge.read(PROMPTS, layers=[1], verdict=False)


@pytest.mark.parametrize(
    ("kind", "words"),
    [("mamba2", "its class cannot return attention maps"), ("rwkv", "1 x 6 x 64 instead of tokens x tokens")],
)
def test_the_reason_why_no_layer_can_be_read_says_what_was_looked_for(kind: str, words: str) -> None:
    found = describe_model(tiny_config(kind))
    assert found.layers == () and words in found.why and "output_attentions" in found.why and "meta" not in found.why


def test_a_model_that_cannot_run_in_training_mode_is_refused_with_the_field(tmp_path: Path) -> None:
    model = family("reformer")
    with pytest.raises(UserError, match=r"ReformerModelWithLMHead cannot run in training mode.*axial_pos_shape"):
        check_trainable(model, "folder")
    assert not any(part.training for part in model.modules())
    dropping = family("llama")
    dropping.model.layers[0].self_attn.attention_dropout = 0.5
    state = torch.get_rng_state()
    check_trainable(dropping, "folder")
    assert torch.equal(torch.get_rng_state(), state) and not dropping.training


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("stablelm", "layer 1 does not forward its keyword arguments"),
        ("doge", "the attention of layer 1 cannot be read (the model's own code operates on the mask)"),
        ("falcon", "none of its layers uses transformers' AttentionInterface"),
    ],
)
def test_maps_are_taken_where_nothing_better_is_exact_and_that_is_said(
    kind: str, reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    judge = judge_of(tiny_folder(kind, tmp_path))
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            judge.read(PROMPTS[-1:], layers=[2])
    (line,) = [record.getMessage() for record in caplog.records if "the maps of eager attention" in record.msg]
    assert reason in line and "64 * T * T bytes of memory" in line, "4 layers, 4 heads, 4 bytes"


def test_maps_and_rows_are_the_same_numbers(tmp_path: Path) -> None:
    folder = tiny_folder("llama", tmp_path)
    by_rows, by_maps = (
        CausalJudge(load_model(folder), kernel=kernel).read(PROMPTS, layers=[1, 4], rollout=True, label_ids=(3, 4))
        for kernel in ("sdpa", "maps")
    )
    for one, other in zip(by_rows, by_maps, strict=True):
        torch.testing.assert_close(one.rows, other.rows, rtol=0, atol=2e-5)
        torch.testing.assert_close(one.rollout, other.rollout, rtol=0, atol=2e-5)
        torch.testing.assert_close(one.verdict_logits, other.verdict_logits, rtol=0, atol=2e-5)


# ------------------------------------------------------------------------------------------------ refused at loading


def test_a_model_that_sees_later_tokens_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"is not causal: changing the last token changes the logits .*is_decoder=true"
    ) as found:
        load_model(tiny_folder("bert", tmp_path / "both"))
    assert "\n" not in str(found.value) and str(tmp_path) in str(found.value)
    load_model(tiny_folder("bert", tmp_path / "decoder", is_decoder=True))


def test_causal_models_in_short_formats_are_not_refused(tmp_path: Path) -> None:
    for kind in ("gpt_oss", "qwen3_next", "llama"):
        load_model(tiny_folder(kind, tmp_path / kind), dtype="bfloat16")


def test_numbers_that_change_with_padding_are_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    policy = ScoredLM(load_model(tiny_folder("llama", tmp_path)))
    original = policy.model.model.forward

    def by_width(**named: Any) -> Any:
        output = original(**named)
        output.last_hidden_state = output.last_hidden_state * (1 + named["input_ids"].shape[1])
        return output

    policy.model.model.forward = by_width
    with pytest.raises(UserError, match=r"LlamaForCausalLM change by .* with longer rows in the batch"):
        select_layout("auto", [policy])
    policy.model.to(torch.bfloat16)
    with caplog.at_level(logging.INFO):
        select_layout("padded", [policy])
    assert "with longer rows in the batch; this is rounding error in bfloat16, because" in caplog.text


# ------------------------------------------------------------------------------------------------ lengths

LONG = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 64}
ROPES: dict[str, tuple[str, dict[str, Any]]] = {
    "longrope": (
        "phi3",
        {
            "rope_parameters": {**LONG, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4},
            "original_max_position_embeddings": 64,
        },
    ),
    "dynamic": (
        "llama",
        {
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
            "max_position_embeddings": 64,
        },
    ),
}


@pytest.mark.parametrize("rope", ROPES)
def test_rows_do_not_depend_on_their_batch_up_to_the_exact_length_and_would_beyond(rope: str, tmp_path: Path) -> None:
    kind, more = ROPES[rope]
    folder = tiny_folder(kind, tmp_path, **more)
    config = AutoConfig.from_pretrained(folder)
    assert exact_length(config) == (64, rope) and context_length(config) == 64
    assert exact_length(tiny_config("gemma4_text")) is None
    judge = judge_of(folder)
    limit = [(5 * place + 2) % VOCAB for place in range(64)]
    short, beyond = START[:9], [*limit, 4, 5]

    def row(*batch: list[int]) -> Tensor:
        return judge.read(list(batch), layers=[4], per_head=True)[0].rows

    alone = row(short)
    torch.testing.assert_close(row(short, limit), alone, rtol=0, atol=1e-6)
    assert float((row(short, beyond) - alone).abs().max()) > 1e-3
    check_exact_length(config, "here", "judge.max_length", 64)
    with pytest.raises(UserError, match=rf"judge\.max_length=65: beyond 64 tokens .*{rope}.*set judge\.max_length=64"):
        check_exact_length(config, "here", "judge.max_length", 65)


def test_rope_by_kind_of_layer_is_read() -> None:
    ropes = {
        "full_attention": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    config = tiny_config("gemma4_text")
    config.rope_parameters = ropes
    assert exact_length(config) == (config.max_position_embeddings, "dynamic")


def test_positions_are_those_stated_or_those_that_a_stretched_rope_was_made_for() -> None:
    def llama(**more: Any) -> LlamaConfig:
        return LlamaConfig(max_position_embeddings=4096, **more)

    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 2048}
    assert max_positions(llama()) == 4096
    assert max_positions(llama(rope_parameters=rope)) == 8192
    assert max_positions(llama(rope_parameters={**rope, "factor": 1.5})) == 4096
    assert max_positions(BloomConfig()) is None  # no positions, whose attention falls off with the distance
    assert position_warning(llama(), "here", "lengths.max_length", 4096) is None
    said = position_warning(llama(), "here", "lengths.max_length", 4097)
    assert (
        said is not None
        and "here was trained on only 4096 positions" in said
        and "set lengths.max_length=4096 or lower" in said
    )


# ------------------------------------------------------------------------------------------------ configs


def test_shapes_of_layers_that_differ_are_read(tmp_path: Path) -> None:
    found = {}
    for kind in ("gemma3n_text", "gemma4_text"):
        folder = tiny_folder(kind, tmp_path / kind)
        config = AutoConfig.from_pretrained(folder)
        found[kind] = shape = ModelShape.from_model_config(config)
        assert shape.parameters == count_parameters(config)[0] and shape.hidden == 32 and shape.layers == 4
        assert num_heads(folder) == 4
    assert found["gemma3n_text"].inner == 64, "the widest of a list"
    assert found["gemma4_text"].queries == 4 * 16, "the widest of layers with configs of their own"
