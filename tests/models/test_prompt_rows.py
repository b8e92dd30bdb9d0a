"""Prompts that begin alike in one row: the layout by hand, the same readings as one by one, and the work it saves."""

import logging
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Llama4TextConfig, PreTrainedModel

from attnpo.judge.causal_judge import CausalJudge
from attnpo.models.prompt_rows import WORTH, pack_prompts, row_batches
from tests.models.classes import SHAPE
from tests.models.conftest import FAMILIES

Build = Callable[..., PreTrainedModel]
LAYERS = (1, 2, 3, 4)
CPU = torch.device("cpu")


def drawn(count: int, seed: int) -> list[int]:
    return torch.randint(3, 97, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def judged(pairs: int = 3) -> list[list[int]]:
    """Two rounds of several pairs: an instruction, a prompt, two answers in both orders, the closing words."""
    prompts = []
    for pair in range(pairs):
        before = drawn(30, 0) + drawn(25 + 3 * pair, 10 + pair)
        one, two = drawn(9 + 8 * pair, 20 + pair), drawn(21 - 4 * pair, 30 + pair)
        prompts += [before + one + two + [4, 5], before + two + one + [4, 5]]
    return prompts


def test_one_row_by_hand() -> None:
    base = list(range(3, 3 + WORTH))
    prompts = [base, [*base, 7, 8], [*base, 7, 9, 9], [*base[:-1], 90, 91]]
    row = pack_prompts(prompts, CPU)
    count = WORTH
    # The third shares the 7 as well; the last begins like the others for one token less than is worth it.
    assert row.input_ids.tolist() == [[*base, 7, 8, 9, 9, *base[:-1], 90, 91]]
    assert row.position_ids.tolist() == [[*range(count), count, count + 1, count + 1, count + 2, *range(count + 1)]]
    assert row.last.tolist() == [count - 1, count + 1, count + 2, count]
    for prompt, places, last in zip(prompts, row.branches, row.last.tolist(), strict=True):
        assert row.input_ids[0, places[: last + 1]].tolist() == prompt
        assert row.position_ids[0, places[: last + 1]].tolist() == list(range(len(prompt)))
        assert (places[last:] == places[last]).all()


def test_batches_hold_the_budget_and_every_prompt_once() -> None:
    prompts = judged(6)
    whole = sum(map(len, prompts))
    assert sorted(i for batch in row_batches(prompts, whole) for i in batch) == list(range(12))
    (batch,) = row_batches(prompts, whole)
    assert pack_prompts([prompts[i] for i in batch], CPU).input_ids.shape[1] < 0.7 * whole
    for budget in (1, 100, 200, 300):
        batches = list(row_batches(prompts, budget))
        assert sorted(i for batch in batches for i in batch) == list(range(12))
        sizes = [pack_prompts([prompts[i] for i in batch], CPU).input_ids.shape[1] for batch in batches]
        assert all(size <= budget or len(batch) == 1 for size, batch in zip(sizes, batches, strict=True))
    assert list(row_batches([], 10)) == []


def test_both_rounds_of_a_pair_come_together() -> None:
    (batch,) = row_batches(judged(4), 10_000)
    assert [index // 2 for index in batch[::2]] == [index // 2 for index in batch[1::2]]


@pytest.mark.parametrize("more", [0, 40, 90])
def test_rounds_of_a_pair_are_not_parted_where_both_fit(more: int) -> None:
    """With 40 or 90 tokens of room after a pair the first round of the next would often fit without its second."""
    prompts = judged(6)
    batches = list(row_batches(prompts, 2 * max(map(len, prompts)) + more))
    assert len(batches) > 2 and sorted(i for batch in batches for i in batch) == list(range(12))
    for batch in batches:
        assert [index // 2 for index in batch[::2]] == [index // 2 for index in batch[1::2]]


def test_rows_of_wide_models_are_short_on_a_cpu(
    tiny: Build, monkeypatch: pytest.MonkeyPatch, batch_sizes: Callable[[CausalJudge], list[int]]
) -> None:
    model, prompts = tiny("llama"), judged(5)
    whole = CausalJudge(model).read(prompts, layers=LAYERS, label_ids=(4, 5))
    monkeypatch.setattr("attnpo.judge.causal_judge.ROW_BYTES", 1)
    judge = CausalJudge(model)
    sizes = batch_sizes(judge)
    short = judge.read(prompts, layers=LAYERS, label_ids=(4, 5))
    assert len(sizes) > 2 and all(size % 2 == 0 for size in sizes), "a pair has both rounds in one row"
    for one, other in zip(short, whole, strict=True):
        assert torch.allclose(one.rows, other.rows, rtol=0, atol=1e-5) and one.verdict_token == other.verdict_token
    sizes.clear()
    monkeypatch.setattr("attnpo.judge.causal_judge.ROW_BYTES", 48 * 4 * sum(map(len, prompts)))
    judge.read(prompts, layers=LAYERS)
    assert sizes == [10]
    judge.token_budget = 1
    judge.read(prompts, layers=LAYERS)
    assert sizes[1:] == [1] * 10, "the budget holds"


@pytest.mark.parametrize(
    ("family", "kernel"),
    [
        *((family, "blocks") for family in FAMILIES if family != "qwen3"),
        *((family, "sdpa") for family in ("mistral", "gemma3")),
        ("mistral", "maps"),
    ],
)
def test_readings_equal_those_of_single_prompts(tiny: Build, family: str, kernel: str) -> None:
    prompts = judged()
    prompts += [prompts[0], prompts[1][:50]]  # the same again, and the beginning of another
    model = tiny(family, "eager")
    judge = CausalJudge(model, kernel=kernel)
    asked = {"layers": LAYERS, "rollout": True, "label_ids": (40, 41)}
    single = [judge.read([prompt], **asked)[0] for prompt in prompts]  # type: ignore[arg-type]
    heads = judge.read(prompts, layers=(1, 4), per_head=True, verdict=False)
    for index, (one, found) in enumerate(zip(single, judge.read(prompts, **asked), strict=True)):  # type: ignore[arg-type]
        with torch.no_grad():
            output = model(input_ids=torch.tensor([prompts[index]]), output_attentions=True)
        for layer in LAYERS:
            expected = output.attentions[layer - 1][0, :, -1].mean(0)
            assert torch.allclose(found.rows[layer - 1], expected, rtol=0, atol=1e-5)
        assert torch.allclose(heads[index].rows[1], output.attentions[3][0, :, -1], rtol=0, atol=1e-5)
        assert found.rollout is not None and one.rollout is not None
        assert torch.allclose(found.rollout, one.rollout, rtol=0, atol=1e-5)
        assert found.verdict_logits is not None
        assert torch.allclose(found.verdict_logits, output.logits[0, -1, [40, 41]], rtol=0, atol=2e-5)
        assert found.verdict_token == one.verdict_token == int(output.logits[0, -1].argmax())


def watched(model: PreTrainedModel, which: Callable[[PreTrainedModel], nn.Module]) -> list[int]:
    """The token positions that a module of the model is given, call by call."""
    seen: list[int] = []
    which(model).register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].shape[0] * inputs[0].shape[1]))
    return seen


def test_common_beginnings_are_run_once_and_the_last_layer_for_verdicts_only(tiny: Build) -> None:
    model, prompts = tiny("llama"), judged()
    judge = CausalJudge(model)
    judge.read(prompts, layers=(1,))  # what is tried once
    first = watched(model, lambda m: m.model.layers[0].mlp)
    last = watched(model, lambda m: m.model.layers[3].mlp)
    judge.read(prompts, layers=(4,), label_ids=(3, 4))
    before = [25 + 3 * pair for pair in range(3)]
    answers = [(9 + 8 * pair) + (21 - 4 * pair) + 2 for pair in range(3)]
    assert first == [30 + sum(before) + 2 * sum(answers)]
    assert last == [6]


def test_many_short_ends_of_one_long_beginning_are_held_to_the_budget() -> None:
    """Their rows are short, but each prompt looks up all of its keys."""
    start = drawn(160, 0)
    prompts = [start + drawn(3, 1 + number) for number in range(60)]
    batches = list(row_batches(prompts, 400))
    assert sorted(i for batch in batches for i in batch) == list(range(60))
    assert all(len(batch) * 163 <= 800 for batch in batches)


def test_a_model_of_half_precision_reads_rows(tiny: Build) -> None:
    """Its logits are float32, and differ by what its states were rounded to."""
    model = tiny("llama").to(torch.bfloat16)
    seen = watched(model, lambda m: m.model.layers[0].mlp)
    judge, prompts = CausalJudge(model), judged()
    judge.read(prompts, layers=(1,))
    seen.clear()
    judge.read(prompts, layers=(1,), per_head=True)
    assert seen and sum(seen) < 0.8 * sum(map(len, prompts))


def make_chunked(size: int, attention: str = "sdpa", **more: object) -> PreTrainedModel:
    """Makes a Llama 4 that sees chunks of positions, by a rule that asks which row of the batch it is about."""
    torch.manual_seed(0)
    shape = {**SHAPE, "intermediate_size_mlp": 48, "num_local_experts": 2, "attn_temperature_tuning": False}
    config = Llama4TextConfig(**shape, attention_chunk_size=size, initializer_range=0.2, **more)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()


def test_attention_in_chunks_counts_positions(caplog: pytest.LogCaptureFixture) -> None:
    model = make_chunked(16, "eager")
    prompts = judged()
    with caplog.at_level(logging.INFO, "attnpo"):
        readings = CausalJudge(model).read(prompts, layers=LAYERS)
    assert "padded instead" not in caplog.text
    for prompt, reading in zip(prompts, readings, strict=True):
        with torch.no_grad():
            maps = model(input_ids=torch.tensor([prompt]), output_attentions=True).attentions
        for layer in LAYERS:
            assert torch.allclose(reading.rows[layer - 1], maps[layer - 1][0, :, -1].mean(0), rtol=0, atol=1e-5)
    assert any(float((reading.rows[0] > 0).float().mean()) < 0.5 for reading in readings), "chunks are seen"


def test_a_model_that_mixes_tokens_elsewhere_gets_padded_prompts(tiny: Build, caplog: pytest.LogCaptureFixture) -> None:
    """A running mean over the sequence is causal, so padded batches are right and rows of several prompts are not."""

    def mix(module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
        steps = torch.arange(1, output.shape[1] + 1, dtype=output.dtype)[None, :, None]
        return output + output.cumsum(1) / steps

    model, prompts = tiny("llama", "eager"), judged(2)
    model.model.layers[1].mlp.register_forward_hook(mix)
    judge = CausalJudge(model)
    with caplog.at_level(logging.INFO, "attnpo"):
        readings = judge.read(prompts, layers=LAYERS, label_ids=(40, 41))
        judge.read(prompts, layers=(1,))
    assert caplog.text.count("gives different logits in rows of several prompts") == 1
    assert "prompts are padded instead" in caplog.text
    for prompt, reading in zip(prompts, readings, strict=True):
        with torch.no_grad():
            output = model(input_ids=torch.tensor([prompt]), output_attentions=True)
        assert torch.allclose(reading.rows[3], output.attentions[3][0, :, -1].mean(0), rtol=0, atol=1e-5)
        assert reading.verdict_token == int(output.logits[0, -1].argmax())


def test_a_model_whose_last_layer_takes_no_probe_is_read_by_its_maps(
    tiny: Build, caplog: pytest.LogCaptureFixture
) -> None:
    model, prompts = tiny("llama"), judged(1)
    with torch.no_grad():
        expected = [int(model(input_ids=torch.tensor([prompt])).logits[0, -1].argmax()) for prompt in prompts]
    model.model.layers[3] = Wrapped(model.model.layers[3])
    with caplog.at_level(logging.INFO, "attnpo"):
        readings = CausalJudge(model).read(prompts, layers=(1,))
    assert "layer 4 does not forward its keyword arguments; the maps of eager attention are read" in caplog.text
    assert [reading.verdict_token for reading in readings] == expected


class Wrapped(nn.Module):
    """A layer that hands on what it knows by name, and no probe."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden_states: Tensor, position_embeddings: object, **unused: object) -> Tensor:
        return self.layer(hidden_states, position_embeddings=position_embeddings)  # type: ignore[no-any-return]
