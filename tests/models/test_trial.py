"""Trials in low precision: a leak is refused however deep it is, and what rounding does is no leak."""

import logging
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaModel

from attnpo.judge.causal_judge import CausalJudge
from attnpo.models import packed_attention, trial
from attnpo.models.layouts import LAYOUTS, padded_layout
from attnpo.models.scored import ScoredLM
from attnpo.models.trial import make_small_copy, select_layout
from tests.models.varlen import Calls, attend_plainly

Build = Callable[..., PreTrainedModel]
DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
    ),
]


@pytest.fixture(scope="module", params=DEVICES)
def deep(request: pytest.FixtureRequest) -> PreTrainedModel:
    """Llama of 32 layers with random weights, whose final states in bfloat16 are far from those of padded rows."""
    torch.manual_seed(0)
    config = LlamaConfig(
        num_hidden_layers=32,
        hidden_size=512,
        num_attention_heads=8,
        num_key_value_heads=2,
        intermediate_size=1024,
        vocab_size=2048,
        initializer_range=0.06,
    )
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model.to(request.param).eval()


LEAKS = (7, 30)
"""Layers that mix neighbours, one at a time."""


def mix_neighbours(module: object, inputs: object, output: Tensor) -> Tensor:
    """A block that adds a hundredth of the state before to each."""
    return output + 0.01 * output.roll(1, dims=1)


def test_deep_models_in_bfloat16_share_prompts_unless_a_layer_leaks(
    deep: PreTrainedModel, caplog: pytest.LogCaptureFixture
) -> None:
    scored = ScoredLM(deep)
    assert select_layout("auto", [scored], device=deep.device) is LAYOUTS["shared_prefix"]
    for layer in LEAKS:
        handle = deep.model.layers[layer].register_forward_hook(mix_neighbours)
        with caplog.at_level(logging.INFO, "attnpo"):
            assert select_layout("auto", [scored], device=deep.device) is padded_layout
        handle.remove()
        assert "LlamaForCausalLM mixes sequences: the results of " in caplog.text
        caplog.clear()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_positions_that_run_on_are_refused(
    tiny: Build, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    forward = LlamaModel.forward

    def running_on(self: LlamaModel, *, position_ids: Tensor | None = None, **more: object) -> object:
        if position_ids is not None and len(position_ids) == 1:
            position_ids = torch.arange(position_ids.shape[1])[None]
        return forward(self, position_ids=position_ids, **more)

    monkeypatch.setattr(LlamaModel, "forward", running_on)
    with caplog.at_level(logging.INFO, "attnpo"):
        assert select_layout("shared_prefix", [ScoredLM(tiny("llama").to(dtype))]) is padded_layout
    assert "produces different results" in caplog.text


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["packed", "shared_prefix"])
def test_a_mask_off_by_one_is_refused(
    tiny: Build, name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    mask = packed_attention.SegmentMask.bucket_mask

    def off_by_one(self: packed_attention.SegmentMask, *args: object, **more: object) -> Tensor | None:
        made = mask(self, *args, **{**more, "skip": False})  # type: ignore[arg-type]
        return None if made is None else made.roll(1, dims=-1).masked_fill(made == 0, 0)

    monkeypatch.setattr(packed_attention.SegmentMask, "bucket_mask", off_by_one)
    with caplog.at_level(logging.INFO, "attnpo"):
        assert select_layout(name, [ScoredLM(tiny("llama").to(dtype))]) is padded_layout
    assert "some layer does not respect the segments of a row" in caplog.text


def test_every_family_in_bfloat16_shares_prompts(tiny: Build, family: str) -> None:
    """With experts, too, whose calls grow with the other sequences' tokens, so that bits cannot tell.

    So do a few layers in bfloat16, which are tried where a GPU trains.
    """
    model, state = tiny(family).to(torch.bfloat16), torch.get_rng_state()
    assert select_layout("auto", [ScoredLM(model)]) is LAYOUTS["shared_prefix"]
    assert trial._find_problem("packed", ScoredLM(make_small_copy(model, torch.device("cpu")))) is None
    assert torch.equal(torch.get_rng_state(), state)


def test_few_layers_are_the_same_each_time_and_have_a_small_vocabulary(tiny: Build) -> None:
    model = tiny("qwen3")
    model.resize_token_embeddings(5000)
    one, two = (make_small_copy(model, torch.device("cpu"), torch.float32) for _ in range(2))
    assert type(one) is type(model) and one.get_input_embeddings().num_embeddings == 1024
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))


def test_a_deep_judge_in_bfloat16_reads_rows_of_several_prompts_unless_a_layer_leaks(
    deep: PreTrainedModel, caplog: pytest.LogCaptureFixture
) -> None:
    prompts = [[1, 5, 9, 3], [4, 6, 2]]
    with caplog.at_level(logging.INFO, "attnpo"):
        CausalJudge(deep).read(prompts, layers=[32])
        assert "prompts are padded instead" not in caplog.text
        for layer in LEAKS:
            handle = deep.model.layers[layer].register_forward_hook(mix_neighbours)
            CausalJudge(deep).read(prompts, layers=[32])
            handle.remove()
            told = "changes its verdict on a prompt when other prompts share its row; prompts are padded"
            assert told in caplog.text
            caplog.clear()


def test_a_kernel_that_aligns_queries_with_the_first_keys_is_refused(
    tiny: Build, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In low precision alone, where the kernel is: a few layers in float32 do not meet it."""

    def misaligned(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seq_q: Tensor,
        cu_seq_k: Tensor,
        max_q: int,
        max_k: int,
        *,
        scale: float,
        window_size: tuple[int, int],
    ) -> Tensor:
        starts = zip(cu_seq_k[:-1].tolist(), cu_seq_q.diff().tolist(), strict=True)
        first = torch.cat([torch.arange(start, start + count) for start, count in starts])
        ends = (cu_seq_q, cu_seq_q, max_q, max_q)
        return attend_plainly(query, key[first], value[first], *ends, scale=scale, window_size=window_size)

    policy = ScoredLM(tiny("llama", initializer_range=0.2).to(torch.bfloat16))
    Calls(latest=False).put(monkeypatch)
    assert select_layout("shared_prefix", [policy]) is LAYOUTS["shared_prefix"]
    monkeypatch.setattr(packed_attention, "find_kernel", lambda device: misaligned)
    with caplog.at_level(logging.INFO, "attnpo"):
        assert select_layout("shared_prefix", [policy]) is padded_layout
    assert "ignores the prompt in the results of 3 of 6 sequences" in caplog.text
