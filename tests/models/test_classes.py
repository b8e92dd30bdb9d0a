"""Model classes beside Llama's: loaded as a user loads them, then equal to their own eager attention, or refused."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, BloomConfig, LlamaConfig, PreTrainedModel

from attnpo.judge.reader import CausalJudge, kernel_for
from attnpo.models.described import beyond_positions, describe, exact_length, require_exact, stated_positions
from attnpo.models.generate import context_length
from attnpo.models.loading import described, load_model, model_heads
from attnpo.models.memory import count_parameters
from attnpo.models.scored import ScoredLM
from attnpo.models.shape import Shape
from attnpo.models.trial import choose, require_trainable
from attnpo.schema import UserError
from tests.conformance.family_models import tiny_config
from tests.conformance.family_models import tiny_model as family
from tests.models.classes import SHAPE, VOCAB, tiny_folder

# Beginnings in common, a prompt longer than every window here, and one that is not.
START = [(7 * place + 3) % VOCAB for place in range(30)]
PROMPTS = [[*START, 5, 6, 7], [*START, 50, 51, 52, 53], START[:9]]

WITHOUT_SDPA = ("gemma2", "vaultgemma", "gpt_oss", "granite_swa", "mimo_v2_flash", "deepseek_v4")
HYBRIDS = ("jamba", "qwen3_next", "granitemoehybrid", "lfm2")
OTHERS = ("gemma3n_text", "gemma4_text", "modernbert-decoder", "diffllama")
MAPPED = ("deepseek_v32", "glm_moe_dsa", "doge", "stablelm", "falcon")  # read from the maps of eager attention alone
READABLE = (*(kind for kind in WITHOUT_SDPA if kind != "deepseek_v4"), *HYBRIDS, *OTHERS, *MAPPED)


def eager(folder: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    return model.eval()


def last_rows(model: PreTrainedModel, ids: list[int]) -> tuple[list[Tensor], Tensor]:
    """The library's own maps of every layer that has some, cut to the last position's row per head; and all logits."""
    with torch.no_grad():
        output = model(input_ids=torch.tensor([ids]), output_attentions=True, use_cache=False)
    return [maps[0, :, -1] for maps in output.attentions if maps is not None], output.logits[0]


def judge_of(folder: Path) -> CausalJudge:
    """The judge as a run builds it, with the kernel that goes with what the class has."""
    found = described(folder)
    return CausalJudge(load_model(folder, attn_implementation=found.reading), kernel=kernel_for(found))


@pytest.mark.parametrize("kind", READABLE)
def test_judge_rows_and_verdicts_are_those_of_eager_attention(kind: str, tmp_path: Path) -> None:
    folder = tiny_folder(kind, tmp_path)
    layers = described(folder).layers
    readings = judge_of(folder).read(PROMPTS, layers=layers, per_head=True)
    model = eager(folder)
    for ids, reading in zip(PROMPTS, readings, strict=True):
        maps, logits = last_rows(model, ids)
        assert reading.verdict_token == int(logits[-1].argmax())
        assert len(maps) == len(layers), "every layer with maps is known as one that has attention, and no other"
        for ours, theirs in zip(reading.rows, maps, strict=True):
            if kind == "granite_swa":  # its eager maps leave the sink out, which its output does not
                ours = ours / ours.sum(-1, keepdim=True)
            torch.testing.assert_close(ours, theirs.float(), rtol=0, atol=2e-5)


@pytest.mark.parametrize("kind", (*WITHOUT_SDPA, *HYBRIDS, *OTHERS))
def test_policies_have_their_own_log_probabilities_in_the_layout_of_auto(kind: str, tmp_path: Path) -> None:
    folder = tiny_folder(kind, tmp_path)
    policy = ScoredLM(load_model(folder))
    layout = choose("auto", [policy])
    sequences = [(START[:12], START[12:20]), (START[3:7], START[20:25]), (START[:12], START[20:]), (START[3:7], [9, 8])]
    inputs, ids, mask = layout(sequences, 0)
    with torch.no_grad():
        found = policy(inputs, ids, mask).logps
    model = eager(folder)
    for row, (prompt, response) in enumerate(sequences):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([[*prompt, *response]]), use_cache=False).logits[0].float()
        expected = logits.log_softmax(-1)[len(prompt) - 1 : -1].gather(1, torch.tensor(response)[:, None])[:, 0]
        torch.testing.assert_close(found[row, : len(response)], expected, rtol=0, atol=5e-5)


@pytest.mark.parametrize("kind", WITHOUT_SDPA)
def test_a_class_without_sdpa_is_loaded_with_eager_attention_and_known_as_that(kind: str, tmp_path: Path) -> None:
    folder = tiny_folder(kind, tmp_path)
    assert load_model(folder).config._attn_implementation == "eager" == described(folder).attention
    assert kernel_for(described(folder)) == "blocks"


def test_a_class_with_sdpa_keeps_it(tmp_path: Path) -> None:
    folder = tiny_folder("llama", tmp_path)
    assert load_model(folder).config._attn_implementation == "sdpa" == described(folder).attention
    assert kernel_for(described(folder)) == "sdpa"
    assert load_model(folder, attn_implementation="eager").config._attn_implementation == "eager"


def test_an_attention_that_a_class_lacks_is_not_told_as_a_missing_folder(tmp_path: Path) -> None:
    folder = tiny_folder("gemma2", tmp_path)
    with pytest.raises(UserError) as caught:
        load_model(folder, attn_implementation="flex_attentive")
    assert str(caught.value).startswith("model.attn_implementation=flex_attentive: Gemma2ForCausalLM cannot run with")
    assert "set model.attn_implementation=sdpa" in str(caught.value) and "\n" not in str(caught.value)
    (folder / "model.safetensors").write_bytes(b"cut")
    with pytest.raises(UserError, match=r"could not load the model .*copy or export the folder again"):
        load_model(folder, attn_implementation="eager")


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (
            "deepseek_v4",
            r"DeepseekV4ForCausalLM: layer \d has attention that cannot be read \(it builds its own .*stand in",
        ),
    ],
)
def test_attention_that_cannot_be_read_names_layer_and_reason(kind: str, reason: str, tmp_path: Path) -> None:
    judge = judge_of(tiny_folder(kind, tmp_path))
    with pytest.raises(UserError, match=reason) as caught:
        judge.read(PROMPTS, layers=[1])
    assert "\n" not in str(caught.value) and "judge" in str(caught.value)


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
    with pytest.raises(UserError, match=rf"LlamaForCausalLM: layer {place + 1} gives other numbers when its "):
        judge.read(PROMPTS, layers=[1], verdict=False)


def test_a_model_without_attention_to_read_has_no_layer(tmp_path: Path) -> None:
    found = described(tiny_folder("mamba", tmp_path))
    assert found.layers == () and found.why.startswith("it gives no softmax attention: its class has no maps")


@pytest.mark.parametrize(
    ("kind", "words"),
    [("mamba2", "its class has no maps to hand out"), ("rwkv", "1 x 6 x 64, none of tokens x tokens")],
)
def test_the_reason_why_no_layer_can_be_read_says_what_was_looked_for(kind: str, words: str) -> None:
    found = describe(tiny_config(kind))
    assert found.layers == () and words in found.why and "output_attentions" in found.why and "meta" not in found.why


def test_a_model_that_cannot_run_in_training_mode_is_refused_with_the_field(tmp_path: Path) -> None:
    model = family("reformer")
    with pytest.raises(UserError, match=r"ReformerModelWithLMHead cannot run in training mode.*axial_pos_shape"):
        require_trainable(model, "folder")
    assert not any(part.training for part in model.modules())
    dropping = family("llama")
    dropping.model.layers[0].self_attn.attention_dropout = 0.5
    state = torch.get_rng_state()
    require_trainable(dropping, "folder")
    assert torch.equal(torch.get_rng_state(), state) and not dropping.training


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("stablelm", "layer 1 does not pass on what it is called with"),
        ("doge", "layer 1 has attention that cannot be read (its own code computes with the mask)"),
        ("falcon", "none of its layers goes through transformers' AttentionInterface"),
    ],
)
def test_maps_are_taken_where_nothing_better_is_exact_and_that_is_said(
    kind: str, reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    judge = judge_of(tiny_folder(kind, tmp_path))
    with caplog.at_level(logging.INFO):
        readings = judge.read(PROMPTS, layers=[2], rollout=True)
        judge.read(PROMPTS, layers=[2])
    (line,) = [record.getMessage() for record in caplog.records if "the maps of eager attention" in record.msg]
    assert reason in line and "64 B x T x T of memory" in line, "4 layers, 4 heads, 4 bytes"
    for ids, reading in zip(PROMPTS, readings, strict=True):
        with torch.no_grad():
            output = eager(tmp_path)(input_ids=torch.tensor([ids]), output_attentions=True, use_cache=False)
        product = torch.eye(len(ids))
        for maps in output.attentions:
            product = (torch.eye(len(ids)) + maps[0].mean(0)) / 2 @ product
        assert reading.rollout is not None
        torch.testing.assert_close(reading.rollout, product[-1], rtol=0, atol=2e-5)


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


def test_hybrids_are_known_by_the_layers_that_have_attention(tmp_path: Path) -> None:
    for kind in HYBRIDS:
        assert described(tiny_folder(kind, tmp_path / kind)).layers == (2, 4), kind


# ------------------------------------------------------------------------------------------------ refused at loading


@pytest.mark.parametrize("kind", ["bert", "roberta", "electra"])
def test_a_model_that_sees_later_tokens_is_refused(kind: str, tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"is not causal: another last token moves the logits .*is_decoder=true"
    ) as found:
        load_model(tiny_folder(kind, tmp_path / "both"))
    assert "\n" not in str(found.value) and str(tmp_path) in str(found.value)
    load_model(tiny_folder(kind, tmp_path / "decoder", is_decoder=True))


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
    with pytest.raises(UserError, match=r"LlamaForCausalLM change by .* with the longer rows beside them"):
        choose("auto", [policy])
    policy.model.to(torch.bfloat16)
    with caplog.at_level(logging.INFO):
        choose("padded", [policy])
    assert "with the longer rows beside them: rounding of bfloat16, as those of a few layers" in caplog.text


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
    assert exact_length(AutoConfig.from_pretrained(tiny_folder("gemma4_text", tmp_path / "g"))) is None
    judge = judge_of(folder)
    limit = [(5 * place + 2) % VOCAB for place in range(64)]
    short, beyond = START[:9], [*limit, 4, 5]

    def row(*batch: list[int]) -> Tensor:
        return judge.read(list(batch), layers=[4], per_head=True)[0].rows

    alone = row(short)
    torch.testing.assert_close(row(short, limit), alone, rtol=0, atol=1e-6)
    assert float((row(short, beyond) - alone).abs().max()) > 1e-3
    require_exact(config, "here", "judge.max_length", 64)
    with pytest.raises(UserError, match=rf"judge\.max_length=65: beyond 64 tokens .*{rope}.*set judge\.max_length=64"):
        require_exact(config, "here", "judge.max_length", 65)


def test_rope_by_kind_of_layer_is_read(tmp_path: Path) -> None:
    ropes = {
        "full_attention": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    config = AutoConfig.from_pretrained(tiny_folder("gemma4_text", tmp_path))
    config.rope_parameters = ropes
    assert exact_length(config) == (SHAPE["max_position_embeddings"], "dynamic")


def test_positions_are_those_stated_or_those_that_a_stretched_rope_was_made_for() -> None:
    def llama(**more: Any) -> LlamaConfig:
        return LlamaConfig(max_position_embeddings=4096, **more)

    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 2048}
    assert stated_positions(llama()) == 4096
    assert stated_positions(llama(rope_parameters=rope)) == 8192
    assert stated_positions(llama(rope_parameters={**rope, "factor": 1.5})) == 4096
    assert stated_positions(BloomConfig()) is None  # no positions, whose attention falls off with the distance
    assert beyond_positions(llama(), "here", "lengths.max_length", 4096) is None
    said = beyond_positions(llama(), "here", "lengths.max_length", 4097)
    assert said is not None and "here has 4096 positions" in said and "set lengths.max_length=4096 or lower" in said


# ------------------------------------------------------------------------------------------------ configs


@pytest.mark.parametrize("kind", READABLE)
def test_shapes_of_layers_that_differ_are_read(kind: str, tmp_path: Path) -> None:
    folder = tiny_folder(kind, tmp_path)
    config = AutoConfig.from_pretrained(folder)
    shape = Shape.of(config)
    assert shape.parameters == count_parameters(config)[0] and shape.hidden == 32 and shape.layers == 4
    if kind == "gemma3n_text":
        assert shape.inner == 64, "the widest of a list"
    if kind == "gemma4_text":
        assert shape.queries == 4 * 16, "the widest of layers with configs of their own"
    assert model_heads(folder) == 4
