"""Commands on model classes beside Llama's: what runs is exact, what does not is refused in one line."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from attnpo.run import messages
from attnpo.run.memory import MemoryPlan
from attnpo.schema import SIDES
from tests.bad_input.attempts import Attempts
from tests.models.classes import tiny_folder
from tests.run.made import make as make_run
from tests.run.made import make_inputs
from tests.run.worlds import World

Made = Callable[..., World]


@pytest.fixture
def made(attempts: Attempts) -> Made:
    """A function (kind, fields) to the world whose model is a tiny one of that class, with the world's tokenizer."""

    def make(kind: str, **more: Any) -> World:
        tokenizer = AutoTokenizer.from_pretrained(attempts.world.model)
        folder = attempts.new(kind)
        shutil.copytree(attempts.world.model, folder, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
        words = {"vocab_size": len(tokenizer), "max_position_embeddings": 1024}
        per_layer = {"vocab_size_per_layer_input": len(tokenizer)} if kind.startswith(("gemma3n", "gemma4")) else {}
        ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
        tiny_folder(kind, folder, **{**words, **per_layer, **ids, **more})
        return attempts.on(model=folder)

    return make


# ------------------------------------------------------------------------------------------------ what runs


@pytest.mark.parametrize("kind", ["gemma2", "gpt_oss"])
def test_weigh_and_fit_without_sdpa(kind: str, made: Made, attempts: Attempts) -> None:
    world = made(kind)
    attempts.weigh(world=world).noted("model:", "eager attention (its class supports no other)")
    attempts.fit(world=world).noted("weights: 18 of 18 pairs in the store")
    run = make_run(world.config())
    inputs = run.inputs
    key = inputs.weighed.key
    assert key["judge"]["kernel"] == "blocks" and run.base.fingerprint()["kernel"] == "eager"
    model = AutoModelForCausalLM.from_pretrained(world.model, attn_implementation="eager").eval()
    prompts = run.readers.make_judge().prompts
    layer = inputs.weighed.layers[0]
    for pair in inputs.pairs["train"].pairs[:2]:
        for prompt, found in zip(prompts.build(pair), inputs.weighed.captured[pair.pair_id].rounds, strict=True):
            with torch.no_grad():
                maps = model(torch.tensor([list(prompt.input_ids)]), output_attentions=True).attentions
            row = maps[int(str(layer)) - 1][0, :, -1].mean(0)
            for side in SIDES:
                start, stop = prompt.spans[side]
                torch.testing.assert_close(found.side(side).weights[0], row[start:stop], rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["gemma3n_text", "gemma4_text", "modernbert-decoder"])
def test_layers_that_differ_and_heads_of_their_own_train(
    kind: str, made: Made, attempts: Attempts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "_said", set())
    answer = attempts.fit(world=made(kind))
    assert any(line.startswith("memory of training") for line in answer.log), answer
    assert not any("cannot estimate" in line for line in answer.log)


def test_all_layers_of_a_hybrid_are_those_with_attention(made: Made, attempts: Attempts) -> None:
    world = made("qwen3_next")
    answer = attempts.weigh(world=world)
    answer.noted("judge:", "2 of 4 layers of ", "have attention: 2, 4")
    answer.noted("judge pass: reading 2 layers")
    again = attempts.fit("weights.layer=1/2", world=world)
    again.noted("weights: 18 of 18 pairs in the store")
    assert make_inputs(world.config("weights.layer=1/2")).weighed.layers == (2,), "the first half of those with any"
    assert make_inputs(world.config("weights.layer=last")).weighed.layers == (4,)


# ------------------------------------------------------------------------------------------------ what is refused


def test_a_layer_without_attention_names_those_with_some(made: Made, attempts: Attempts) -> None:
    world = made("jamba")
    for override in ("weights.layer=3", "weights.layers=[2,3]"):
        message = attempts.weigh(override, world=world).refused()
        assert (
            "=3: this layer of the judge has no readable softmax attention" in message
            and "one of the layers with attention (2, 4)" in message
        )
    message = attempts.weigh("weights=rollout", world=world).refused()
    assert (
        "weights=rollout multiplies the attention of all layers" in message and "only 2 of 4 layers (2, 4)" in message
    )


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("mamba", ("no layer of ", "MambaForCausalLM", "judge.path")),
        (
            "deepseek_v4",
            ("V4ForCausalLM: the attention of layer ", "does not have one key per token", "judge.path"),
        ),
    ],
)
def test_a_judge_that_cannot_be_read(kind: str, words: tuple[str, ...], made: Made, attempts: Attempts) -> None:
    message = attempts.weigh(f"judge.path={made(kind).model}").refused()
    assert all(word in message for word in words), message


def test_a_model_that_sees_later_tokens(made: Made, attempts: Attempts) -> None:
    world = made("bert")
    for entry, more in (("weigh", ()), ("fit", ("objective=dpo", "weights=uniform"))):
        assert "BertLMHeadModel is not causal" in attempts.run(entry, *more, world=world).refused()


def test_lengths_beyond_which_positions_follow_the_batch(made: Made, attempts: Attempts) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    world = made("llama", rope_parameters=rope, max_position_embeddings=500)
    message = attempts.weigh(world=world).refused()
    assert "lengths.max_length=512: beyond 500 tokens" in message and "rope type dynamic" in message
    assert "set lengths.max_length=500 or lower" in message
    lower = ("lengths.max_length=500", "lengths.max_prompt_length=300")
    message = attempts.weigh(*lower, world=world).refused()
    assert "judge.max_length=512: beyond 500 tokens" in message and "set judge.max_length=500 or lower" in message
    assert attempts.weigh(*lower, "judge.max_length=500", world=world).status == 0


def test_an_attention_that_the_class_does_not_have(made: Made, attempts: Attempts) -> None:
    words = ("model.attn_implementation=flex_attentive", "objective=dpo", "weights=uniform")
    message = attempts.fit(*words, world=made("gemma2")).refused()
    assert message.startswith("model.attn_implementation=flex_attentive: Gemma2ForCausalLM cannot use it here")
    assert "copy or export" not in message


def test_an_estimate_that_fails_is_a_warning(attempts: Attempts, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*given: object, **named: object) -> None:
        raise TypeError("int() argument must be a string or a real number, not 'list'")

    monkeypatch.setattr(MemoryPlan, "estimate", broken)
    answer = attempts.fit()
    line = answer.noted("cannot estimate memory ", "not 'list'")
    assert str(attempts.world.model) in line


def test_a_config_without_layers_is_refused(attempts: Attempts) -> None:
    def no_layers(folder: Path) -> None:
        blt = {"model_type": "blt", "architectures": ["BltForCausalLM"]}
        (folder / "config.json").write_text(json.dumps(blt))

    assert "has no num_hidden_layers" in attempts.weigh(world=attempts.broken_model(no_layers)).refused()
