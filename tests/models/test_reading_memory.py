"""Peak memory of reading attention grows no faster than the prompt."""

import math
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig, MistralConfig, PretrainedConfig

from attnpo.judge.attention import LayerAttention
from attnpo.judge.causal_judge import CausalJudge

LENGTHS = (512, 1024, 2048)
BOUND = 1.1
SHAPE = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": max(LENGTHS),
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# Windows are shorter than every prompt: a longer one changes the kernel between two lengths, which is no growth.
CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": lambda: LlamaConfig(**SHAPE),
    "window": lambda: MistralConfig(**SHAPE, sliding_window=256),
    "softcap": lambda: Gemma2Config(**SHAPE, sliding_window=256, attn_logit_softcapping=3.0),
}
WHAT: dict[str, dict[str, Any]] = {
    "rollout": {"layers": (), "rollout": True},
    "rows": {"layers": (1, 2, 3)},
    "heads": {"layers": (1, 2, 3), "per_head": True},
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def peak(work: Callable[[], object]) -> int:
    """Bytes that ``work`` holds at its peak beyond what it found; every allocation counts, those inside kernels too."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    assert profiler.profiler is not None
    assert profiler.profiler.kineto_results is not None
    events = profiler.profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    return max(accumulate(size for _, size in changes))


def slope(peaks: dict[int, int]) -> float:
    """The least-squares slope of log peak over log length."""
    xs, ys = [math.log(length) for length in peaks], [math.log(size) for size in peaks.values()]
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    return sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / sum((x - mean_x) ** 2 for x in xs)


def reading_peaks(
    family: str, what: str, lengths: tuple[int, ...] = LENGTHS, orders: int = 1, **shape: int
) -> dict[int, int]:
    """Of one prompt, or of two that begin alike, which lie in one row; ``shape`` changes the family's."""
    config = CONFIGS[family]()
    config.update(shape)
    judge = CausalJudge(AutoModelForCausalLM.from_config(config).eval())
    prompts = {}
    for length in lengths:
        ids, start = [5 + place % 80 for place in range(length)], 2 * length // 5
        prompts[length] = [ids, ids[:start] + ids[start:][::-1]][:orders]
    judge.read(prompts[min(lengths)], verdict=False, **WHAT[what])  # what is made once does not count
    return {
        length: peak(lambda ids=ids: judge.read(ids, verdict=False, **WHAT[what])) for length, ids in prompts.items()
    }


@pytest.mark.parametrize("orders", [1, 2])
@pytest.mark.parametrize("what", WHAT)
@pytest.mark.parametrize("family", CONFIGS)
def test_peak_memory_is_linear_in_the_length(family: str, what: str, orders: int) -> None:
    peaks = reading_peaks(family, what, orders=orders)
    assert slope(peaks) <= BOUND, peaks
    # Not a trick of a constant that hides the growth: the longest prompt stays below one map of a single head.
    least = max(LENGTHS) * SHAPE["hidden_size"] * 4  # the hidden states alone
    assert least < peaks[max(LENGTHS)] < orders * max(LENGTHS) ** 2 * 4


def test_prompts_of_8k_and_16k_tokens_are_read_in_linear_memory() -> None:
    """A model of one narrow head, for the time that attention takes; a map of it would be 1 GiB."""
    narrow = {"hidden_size": 16, "num_attention_heads": 1, "num_key_value_heads": 1}
    peaks = reading_peaks("llama", "rows", (8192, 16384), max_position_embeddings=16384, **narrow)
    assert slope(peaks) <= BOUND, peaks
    assert 16384 * narrow["hidden_size"] * 4 < peaks[16384] < 16384**2 * 4 / 10, peaks


def test_a_map_of_length_times_length_breaks_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    def whole(self: LayerAttention) -> Iterator[tuple[slice, slice, torch.Tensor]]:
        index = torch.arange(self.query.shape[2])
        yield slice(0, len(index)), slice(0, len(index)), self.rule.allowed_block(self.query.shape[0], index, index)

    monkeypatch.setattr(LayerAttention, "query_blocks", whole)
    assert slope(reading_peaks("llama", "rollout")) > 1.5
