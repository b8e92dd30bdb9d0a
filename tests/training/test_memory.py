"""The memory estimate against the numbers of Llama-3-8B and against what small models really hold."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, T5Config

from attnpo.models import memory
from attnpo.models.compiled import compile_blocks
from attnpo.models.layouts import padded_layout
from attnpo.models.loading import load_model
from attnpo.models.lora import add_lora
from attnpo.models.memory import (
    BLOCK,
    FORWARD,
    GIB,
    HEAD,
    STEP,
    UPDATE,
    MemoryEstimate,
    ModelShape,
    activation_bytes_per_token,
    estimate_pass,
    estimate_training,
)
from attnpo.models.scored import ScoredLM
from attnpo.models.spec import LoraSpec, ModelSpec
from attnpo.schema import UserError
from attnpo.training.optimizer import Optimizer

LLAMA3_8B = LlamaConfig(
    vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
    num_key_value_heads=8, max_position_embeddings=8192,
)  # fmt: skip
EIGHT_BIT = Optimizer(moments="8bit")
ROUNDED = Optimizer(moments="8bit", stochastic_rounding=True)
# Weights, whether autocast is on: the three number formats a run can have.
FORMATS = {"float32": ("float32", False), "mixed": ("float32", True), "bfloat16": ("bfloat16", True)}


def spec(
    dtype: str = "float32", *, checkpointing: bool = False, every: int = 1, lora: LoraSpec | None = None,
    chunk: int = 1024,
) -> ModelSpec:  # fmt: skip
    blocks = {"gradient_checkpointing": checkpointing, "checkpoint_every": every, "logps_chunk": chunk}
    return ModelSpec("nowhere", dtype=dtype, lora=lora, **blocks)


def estimate_with(config: LlamaConfig, model: ModelSpec, moments: str = "float32", **named: Any) -> MemoryEstimate:
    named = {"precision": "32-true", "max_length": 64, "reference": "cached", **named}
    return estimate_training(config, model, moments, **named)


def of_8b(model: ModelSpec | None = None, optimizer: Optimizer | None = None, **named: Any) -> MemoryEstimate:
    named = {"precision": "bf16-mixed", "max_length": 2048, "reference": "cached", **named}
    return estimate_training(LLAMA3_8B, model or spec(), (optimizer or Optimizer()).moments, **named)


def states(estimate: MemoryEstimate) -> float:
    return sum(estimate[name].size for name in ("weights", "gradients", "optimiser moments")) / GIB


def small(layers: int = 2, *, vocab: int = 500, head_dim: int | None = None) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=vocab, hidden_size=128, intermediate_size=448, num_hidden_layers=layers, num_attention_heads=8,
        num_key_value_heads=2, head_dim=head_dim, max_position_embeddings=1024,
    )  # fmt: skip


def made(config: LlamaConfig, dtype: str) -> Any:
    return AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).train()


def autocast(enabled: bool) -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16, enabled=enabled, cache_enabled=False)  # as Lightning's bf16-mixed


# ------------------------------------------------------------------------------------------------ Llama-3-8B


def test_bytes_per_parameter_of_llama3_8b() -> None:
    assert ModelShape.from_model_config(LLAMA3_8B).parameters == 8_030_261_248
    assert states(of_8b()) == pytest.approx(119.7, abs=0.05)  # 16 bytes per parameter
    assert states(of_8b(optimizer=EIGHT_BIT)) == pytest.approx(74.8, rel=0.01)  # 10, and the scales of the blocks
    assert states(of_8b(spec("bfloat16"), ROUNDED)) == pytest.approx(44.9, rel=0.01)  # 6
    sharded = of_8b(strategy="fsdp", devices=2)
    assert states(sharded) == pytest.approx(59.8, abs=0.05)
    assert of_8b(spec("bfloat16"), ROUNDED, reference="live")["reference"].size / GIB == pytest.approx(15.0, abs=0.05)


def test_activations_of_llama3_8b() -> None:
    def per_token(model: ModelSpec) -> float:
        return of_8b(model, ROUNDED)["activations"].size / 4096 / (1 << 20)

    assert per_token(spec("bfloat16")) == pytest.approx(6.8, rel=0.1)
    assert per_token(spec("bfloat16", checkpointing=True)) == pytest.approx(0.25, rel=0.1)
    # Under bf16-mixed the residual stream is float32: checkpoints are twice as large.
    assert per_token(spec(checkpointing=True)) == pytest.approx(0.5, rel=0.1)


def test_copies_of_the_weights_wait_for_the_backward_unless_checkpointed() -> None:
    whole, one = of_8b()["bf16 weight copies"], of_8b(spec(checkpointing=True))["bf16 block copies"]
    assert whole.size == 2 * 32 * (4096 * (4096 * 2 + 1024 * 2) + 3 * 4096 * 14336)
    assert whole.moments == STEP
    assert (one.size, one.moments) == (whole.size // 32, (BLOCK,))
    assert of_8b(strategy="fsdp", devices=2)["bf16 weight copies"].size == whole.size
    for without in (of_8b(precision="32-true"), of_8b(spec("bfloat16"), ROUNDED)):
        assert "bf16 weight copies" not in [row.name for row in without.rows]


def test_reference_kinds() -> None:
    cached, live = of_8b(), of_8b(reference="live")
    assert live.total - cached.total == live["reference"].size
    assert of_8b(reference="first_epoch").rows == live.rows  # until the first epoch is over
    assert not any("reference" in row.name for row in (*cached.rows, *of_8b(reference=None).rows))
    lora = of_8b(spec("bfloat16", lora=LoraSpec()), reference="adapter_off")
    assert [row.name for row in lora.rows if "reference" in row.name] == ["reference forward"]


def test_what_devices_exchange() -> None:
    shape = ModelShape.from_model_config(LLAMA3_8B)
    sharded = of_8b(strategy="fsdp", devices=2)
    rest = shape.parameters - shape.blocks
    assert sharded["gathered weights"].size == 4 * (rest + 2 * shape.block)
    assert of_8b(strategy="ddp", devices=2)["gradient buckets"].size == 4 * shape.parameters
    assert of_8b(strategy="ddp", devices=2)["weights"].size == 2 * sharded["weights"].size


def test_longer_or_more_rows_cost_activations_only() -> None:
    one, two, longer = of_8b(), of_8b(micro=2), of_8b(max_length=4096)
    assert two["activations"].size == longer["activations"].size == 2 * one["activations"].size
    assert two["weights"] == one["weights"]
    assert of_8b(eval_micro=2).bytes_at(FORWARD) > one.bytes_at(FORWARD)
    assert of_8b(spec(chunk=4096)).bytes_at(HEAD) > one.bytes_at(HEAD)
    assert of_8b(optimizer=EIGHT_BIT).bytes_at(UPDATE) > states(of_8b(optimizer=EIGHT_BIT)) * GIB


def test_a_budget_of_tokens_stands_for_the_rows_it_holds() -> None:
    counted, budget = of_8b(micro=2, eval_micro=3), of_8b(tokens=8192, eval_tokens=12288)
    assert [(row.name, row.size, row.moments) for row in budget.rows] == [
        (row.name, row.size, row.moments) for row in counted.rows
    ]
    assert budget["validation forward"].how == "12,288 tokens without gradients"
    assert of_8b(tokens=2048)["activations"].size * 4 == budget["activations"].size
    assert of_8b(micro=4, tokens=8192).total == budget.bytes_at(budget.peak) == of_8b(tokens=8192).total
    assert of_8b(eval_tokens=65536).bytes_at(FORWARD) > budget.bytes_at(FORWARD)


def test_the_judge_pass() -> None:
    judge = estimate_pass(LLAMA3_8B, dtype="bfloat16", tokens=16384)
    assert judge["weights"].size / GIB == pytest.approx(14.96, abs=0.01)
    assert judge.total == judge["weights"].size + judge["activations"].size
    assert judge.fits(24 * GIB)
    assert not estimate_pass(LLAMA3_8B, dtype="float32", tokens=16384).fits(24 * GIB)


# ------------------------------------------------------------------------------------------------ reality


@pytest.mark.parametrize("optimizer", [Optimizer(), EIGHT_BIT], ids=["float32", "8bit"])
def test_weights_gradients_and_moments_are_what_a_model_holds(optimizer: Optimizer) -> None:
    if optimizer.moments == "8bit":
        pytest.importorskip("torchao")
    model = made(small(), "float32")
    made_optimizer = optimizer.build(model.parameters())
    model(input_ids=torch.zeros(1, 4, dtype=torch.long)).logits.sum().backward()
    if optimizer.moments == "8bit":
        from torchao.optim.subclass_8bit import OptimState8bit

        held = 0
        for parameter in model.parameters():
            state = OptimState8bit.zeros(parameter.shape) if parameter.numel() >= 4096 else torch.zeros_like(parameter)
            parts = [state.codes, state.scale] if isinstance(state, OptimState8bit) else [state]
            held += 2 * sum(part.nbytes for part in parts)
    else:
        made_optimizer.step()
        moments = [state[name] for state in made_optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
        held = sum(moment.nbytes for moment in moments)
    estimate = estimate_with(small(), spec(), optimizer.moments)
    assert estimate["weights"].size == sum(p.nbytes for p in model.parameters())
    assert estimate["gradients"].size == sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
    # Tensors below 4,096 entries (the norms) stay in float32 under 8 bits.
    assert estimate["optimiser moments"].size == pytest.approx(held, rel=0 if optimizer == Optimizer() else 0.02)


def test_weights_of_four_bits_are_what_a_model_holds(tmp_path: Path) -> None:
    config = small()
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    held = load_model(tmp_path, quantize="nf4").state_dict()
    real = sum(value.nbytes for name, value in held.items() if not name.endswith("bitsandbytes__nf4"))
    model = ModelSpec("nowhere", lora=LoraSpec(), quantize="nf4")
    made = estimate_with(config, model, reference="live")
    assert made["weights"].size == made["reference"].size == pytest.approx(real, rel=0.03)  # code books are not counted
    whole = estimate_with(config, replace(model, quantize=None), reference="live")
    assert made["weights"].size < 0.5 * whole["weights"].size


@pytest.mark.parametrize("targets", ["all-linear", ("q_proj", "down_proj")])
def test_adapters_are_those_that_lora_adds(targets: str | tuple[str, ...]) -> None:
    lora = LoraSpec(rank=4, target_modules=targets)
    model = add_lora(made(small(), "bfloat16"), lora)
    trained = [p for p in model.parameters() if p.requires_grad]
    estimate = estimate_with(small(), spec("bfloat16", lora=lora), precision="bf16-mixed", reference="adapter_off")
    assert estimate["adapters"].size == estimate["gradients"].size == sum(p.nbytes for p in trained)
    assert estimate["weights"].size == sum(p.nbytes for p in model.parameters() if not p.requires_grad)


def saved_bytes(model: Any, width: int, mixed: bool) -> int:
    """Bytes that autograd keeps of a forward over two rows, weights and their copies left out."""
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    shapes = {shape for p in model.parameters() for shape in (p.shape, p.shape[::-1])}
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        place = tensor.untyped_storage().data_ptr()
        if place not in own and tensor.shape not in shapes:
            kept[place] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), autocast(mixed):
        ids, places = torch.zeros(2, width, dtype=torch.long), torch.arange(width).repeat(2, 1)
        model.get_decoder()(input_ids=ids, position_ids=places, use_cache=False)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def with_adapters(model: Any, lora: LoraSpec | None) -> Any:
    return (model if lora is None else add_lora(model, lora)).train()


@pytest.mark.parametrize("lora", [None, LoraSpec(rank=4)], ids=["full", "lora"])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("width", [None, 48])
def test_a_block_saves_what_is_counted(name: str, width: int | None, lora: LoraSpec | None) -> None:
    dtype, mixed = FORMATS[name]

    def config(layers: int) -> LlamaConfig:
        return small(layers, head_dim=width)

    def per_token(layers: int) -> float:
        model = with_adapters(made(config(layers), dtype), lora)
        return (saved_bytes(model, 40, mixed) - saved_bytes(model, 24, mixed)) / (2 * 16)

    compute, stream = 2 if mixed else 4, getattr(torch, dtype).itemsize
    assert per_token(3) - per_token(2) == activation_bytes_per_token(
        ModelShape.from_model_config(config(2), lora), compute, stream
    )


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf Tensor")  # torch's, as it traces
@pytest.mark.parametrize(
    ("name", "recomputed", "lora"),
    [
        *((name, False, None) for name in FORMATS),
        ("mixed", True, None),
        ("mixed", False, LoraSpec(rank=4)),
        ("mixed", True, LoraSpec(rank=4)),
    ],
)
def test_a_compiled_block_saves_what_is_estimated(name: str, recomputed: bool, lora: LoraSpec | None) -> None:
    """By the partitioner that inductor takes as well; no compiler is needed for it."""
    dtype, mixed = FORMATS[name]

    torch._dynamo.reset()

    def per_token(layers: int) -> float:
        model = with_adapters(made(small(layers), dtype), lora)
        if recomputed:
            model.activation_checkpointing_enable()
        compile_blocks(model, "aot_eager")
        return (saved_bytes(model, 40, mixed) - saved_bytes(model, 24, mixed)) / (2 * 16)

    def estimate_layers(layers: int) -> int:
        asked = replace(spec(dtype, checkpointing=recomputed, lora=lora), compile="inductor")
        named = {"precision": "bf16-mixed" if mixed else "32-true", "max_length": 2, "tokens": 1}
        return estimate_with(small(layers), asked, **named)["activations"].size

    assert per_token(3) - per_token(2) == estimate_layers(3) - estimate_layers(2)


def test_compiled_blocks_take_what_they_took_on_a_card() -> None:
    """One H100, torch 2.11, 32 pairs of an 8B Llama without an optimiser: GiB at the peak of a step."""
    for tokens, again, peak in ((4026, False, 52.6), (8053, False, 71.7), (16000, True, 37.7)):
        asked = replace(spec("bfloat16", checkpointing=again), compile="inductor")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(memory, "REPEATS", True, raising=False)
            found = of_8b(asked, ROUNDED, tokens=tokens, eval_tokens=1)
        held = max(found.bytes_at(moment) for moment in STEP) - found["optimiser moments"].size
        assert 0.98 * peak < held / GIB < 1.05 * peak, tokens


CARD = [
    (3967, False, True, None, 66.93),
    (7415, False, True, None, 83.08),
    (11140, True, True, None, 51.48),
    (11140, True, False, None, 51.46),
    (3608, True, False, None, 49.35),
    (7415, False, True, LoraSpec(), 53.11),
    (7415, False, False, LoraSpec(), 68.56),
]
"""Tokens, whether recomputed and compiled, adapters, and GiB at the peak of `make gpu` on one H200 with torch 2.11."""


@pytest.mark.parametrize(("tokens", "again", "compiled", "lora", "peak"), CARD)
def test_steps_take_what_they_took_on_a_card(
    tokens: int, again: bool, compiled: bool, lora: LoraSpec | None, peak: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "REPEATS", True)
    asked = spec("bfloat16", checkpointing=again, lora=lora)
    asked = replace(asked, compile="inductor" if compiled else None)
    found = of_8b(asked, Optimizer() if lora else ROUNDED, tokens=tokens, eval_tokens=1).total / GIB
    assert 0.98 * peak < found < 1.04 * peak


def live_bytes(events: Any) -> Iterator[int]:
    """Bytes allocated since the start, over time."""
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    return accumulate(size for _, size in changes)


@pytest.mark.parametrize("lora", [None, LoraSpec(rank=4)], ids=["full", "lora"])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    ("layers", "vocab", "width", "every"),
    [(6, 1000, 512, 0), (6, 1000, 512, 1), (6, 1000, 512, 2), (2, 6000, 256, 1)],
    ids=["blocks", "blocks, all recomputed", "blocks, every 2nd recomputed", "head"],
)
def test_peak_of_a_step(layers: int, vocab: int, width: int, every: int, name: str, lora: LoraSpec | None) -> None:
    """What a forward and backward allocate beside weights and gradients: never more than estimated, at least 4/5."""
    dtype, mixed = FORMATS[name]
    config = small(layers, vocab=vocab)
    step = step_of(with_adapters(made(config, dtype), lora), every, width, mixed)
    step()  # gradients exist from here on
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    assert profiler.profiler is not None
    assert profiler.profiler.kineto_results is not None
    peak = max(live_bytes(profiler.profiler.kineto_results.events()))
    asked = spec(dtype, checkpointing=every > 0, every=max(1, every), chunk=128, lora=lora)
    counted = counted_bytes(config, asked, width, mixed)
    assert 0.99 * peak <= counted <= 1.25 * peak


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("every", [0, 1], ids=["none", "full"])
@pytest.mark.parametrize("name", ["mixed", "bfloat16"])
def test_peak_of_a_step_on_a_gpu(name: str, every: int) -> None:
    """As above, of a model whose activations are far larger than what the allocator rounds up."""
    dtype, mixed = FORMATS[name]
    config = LlamaConfig(
        vocab_size=8000, hidden_size=1024, intermediate_size=3584, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=2, max_position_embeddings=2048,
    )  # fmt: skip
    step = step_of(made(config, dtype).to("cuda"), every, 2048, mixed)
    step()  # gradients exist from here on, and the workspaces of libraries
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    peak = torch.cuda.max_memory_allocated() - before
    counted = counted_bytes(config, spec(dtype, checkpointing=every > 0, chunk=128), 2048, mixed)
    assert 0.9 * peak <= counted <= 1.3 * peak


def step_of(model: Any, every: int, width: int, mixed: bool) -> Callable[[], None]:
    """Forward and backward of two rows of ``width`` tokens where the model is; each ``every``-th block recomputed."""
    policy = ScoredLM(model, chunk=128).train()
    if every:
        model.activation_checkpointing_enable(every_n_layers=every)
    half = list(range(1, width // 2 + 1))
    laid = padded_layout([(half, half)] * 2, pad_id=0)
    inputs, ids, mask = (part.to(model.device) for part in laid)

    def step() -> None:
        with torch.autocast(model.device.type, torch.bfloat16, enabled=mixed, cache_enabled=False):
            loss = policy(inputs, ids, mask).logps.sum()
        loss.backward()

    return step


def counted_bytes(config: LlamaConfig, model: ModelSpec, width: int, mixed: bool) -> int:
    """Returns what the estimate counts of a step beside weights, gradients and moments."""
    estimate = estimate_with(config, model, precision="bf16-mixed" if mixed else "32-true", max_length=width)
    held = sum(row.size for row in estimate.rows if not row.moments)
    return max(estimate.bytes_at(moment) for moment in STEP) - held


# ------------------------------------------------------------------------------------------------ the log


def test_lines_are_an_aligned_table_with_the_total() -> None:
    lines = of_8b(strategy="fsdp", devices=2).lines()
    assert lines[0] == "memory of training (estimate, each of 2 devices, GiB)"
    assert lines[1].startswith("  weights               14.96  8,030,261,248 parameters x 4 B (float32) / 2 devices")
    assert lines[-1].startswith("  total ")
    assert len({line.index(".") for line in lines[1:]}) == 1  # decimal points in one column


def test_lines_say_whether_the_device_holds_it_and_what_would() -> None:
    h200, a100 = int(139.8 * GIB), int(79.2 * GIB)
    fitting = of_8b(spec(checkpointing=True))
    assert fitting.lines(h200)[-1] == f"  fits: the device has 139.8 GiB, {139.8 - fitting.total / GIB:.1f} to spare"
    others = {"hardware=a": of_8b(spec("bfloat16"), ROUNDED), "hardware=b": of_8b(spec(checkpointing=True))}
    assert fitting.lines(a100, others)[-1] == (
        "  does not fit: the device has 79.2 GiB, of which 5% are kept free; these would: hardware=a"
    )
    assert fitting.lines(a100)[-1].endswith("none of the hardware= options would")
    assert not fitting.fits(fitting.total)  # nothing would be left for the CUDA context


def test_a_config_without_a_causal_model_is_refused_in_one_line() -> None:
    with pytest.raises(UserError, match=r"^model\.path: t5 is not a causal language model") as caught:
        estimate_pass(T5Config(), dtype="float32", tokens=16)
    assert "\n" not in str(caught.value)


def test_other_families_are_laid_out_too() -> None:
    config = GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=128)
    shape = ModelShape.from_model_config(config, LoraSpec(rank=2))
    assert (shape.layers, shape.hidden, shape.inner, shape.keys) == (2, 32, 128, 32)
    assert shape.adapters == 2 * 2 * ((32 + 96) + (32 + 32) + 2 * (32 + 128))
    estimate = estimate_pass(config, dtype="float32", tokens=64)
    peak = f"{estimate.total / 2**20:.1f} MiB at its peak, {estimate.peak}"
    assert estimate.lines() == [f"memory of the judge pass (estimate): {peak}"]
    assert len(estimate.lines(estimate.total)) > 3, "too large for the device: by parts"
