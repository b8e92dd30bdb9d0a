"""Estimates a model's size and a run's memory per device from the config, before any weight is loaded.

Parameters are counted on the meta device. Activation formulas assume a decoder block with rotary attention, two norms
and a gated MLP, and match what autograd saves for Llama in torch 2.13, both uncompiled and compiled. Other blocks use
the same formulas. CUDA context and fragmentation are covered by the share that ``MemoryEstimate.fits`` keeps free.
"""

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from attnpo.models.backbone import layer_stack, parameter_count
from attnpo.models.description import backbone_of, build_on_meta, max_over_layers
from attnpo.models.loading import DTYPES
from attnpo.models.lora import expert_tensor_names, target_names
from attnpo.models.spec import LoraSpec, ModelSpec

GIB, MIB = 1 << 30, 1 << 20
FREE_SHARE = 0.05  # share of a device kept free for CUDA context, library workspaces and fragmentation
ROUND, MOST = 256, 32768  # step and maximum of token budgets; the maximum saturates any device
FP32, BF16 = 4, 2
PROJECTIONS = 7  # of a block, each with an adapter
REPEATS = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 12)
"""True if the kernel for packed rows needs keys and values repeated for every query head, and saves the copies."""
FOUR_BITS = 0.5 + 1 / 64 + FP32 / (64 * 256)  # one scale byte per 64 numbers, and four bytes per 256 scales

# Moments of possible peaks: the reference's forward, the backward of the vocabulary head, the backward of a block, the
# optimizer update, and a forward without backward (validation, a pass over the data).
REFERENCE, HEAD, BLOCK, UPDATE, FORWARD = "reference", "head backward", "block backward", "update", "forward alone"
MOMENTS = (REFERENCE, HEAD, BLOCK, UPDATE, FORWARD)
STEP = (REFERENCE, HEAD, BLOCK)  # moments at which activations are held


@dataclass(frozen=True)
class ModelShape:
    """Parameter counts and widths of a model.

    ``block``: the largest block; ``cast``: matrices of the blocks (copied by autocast); ``linear``: linear layers of
    the blocks (can be quantized); ``largest``: the largest tensor; ``adapters``: LoRA parameters of rank ``rank``.
    """

    parameters: int
    blocks: int
    block: int
    cast: int
    linear: int
    largest: int
    adapters: int
    rank: int
    layers: int
    hidden: int
    inner: int
    queries: int
    keys: int
    heads: int
    vocab: int

    @classmethod
    def from_model_config(cls, config: PretrainedConfig, lora: LoraSpec | None = None) -> "ModelShape":
        """Builds the shape from a causal LM's widest layers; raises UserError if ``config`` defines no causal LM."""
        model = build_on_meta(config)
        stack = layer_stack(backbone_of(model))
        text = config.get_text_config()
        hidden = max_over_layers(text, "hidden_size") or 1
        heads = max_over_layers(text, "num_attention_heads") or 1
        width = max_over_layers(text, "head_dim") or hidden // heads
        inner = max_over_layers(text, "intermediate_size") or 4 * hidden
        return cls(
            parameters=parameter_count(model),
            blocks=parameter_count(stack),
            block=max(map(parameter_count, stack)),
            cast=sum(parameter.numel() for parameter in stack.parameters() if parameter.dim() > 1),
            linear=sum(part.weight.numel() for part in stack.modules() if isinstance(part, nn.Linear | Conv1D)),
            largest=max(parameter.numel() for parameter in model.parameters()),
            adapters=0 if lora is None else count_adapter_parameters(model, lora),
            rank=0 if lora is None else lora.rank,
            layers=len(stack),
            hidden=hidden,
            inner=inner * (max_over_layers(text, "num_experts_per_tok") or 1),
            queries=heads * width,
            keys=(max_over_layers(text, "num_key_value_heads") or heads) * width,
            heads=heads,
            vocab=max_over_layers(text, "vocab_size") or 1,
        )


def count_adapter_parameters(model: PreTrainedModel, lora: LoraSpec) -> int:
    """Counts the parameters added by LoRA: rank x (inputs + outputs) of each linear layer or expert with an adapter."""
    weights = (model.get_submodule(name).get_parameter("weight") for name in target_names(model, lora))
    experts = (model.get_parameter(name).shape for name in expert_tensor_names(model, lora))
    return lora.rank * (sum(sum(weight.shape) for weight in weights) + sum(n * (a + b) for n, a, b in experts))


def count_parameters(config: PretrainedConfig, lora: LoraSpec | None = None) -> tuple[int, int]:
    """Counts a causal LM's parameters and those added by LoRA; raises UserError if ``config`` defines no causal LM."""
    model = build_on_meta(config)
    return parameter_count(model), 0 if lora is None else count_adapter_parameters(model, lora)


@dataclass(frozen=True)
class MemoryRow:
    """Row of the memory table: bytes per device, how they were computed, and when they are in use.

    ``moments``: moments of the step at which the bytes are in use; () means always.
    """

    name: str
    size: int
    how: str
    moments: tuple[str, ...] = ()

    def bytes_at(self, moment: str) -> int:
        """Returns the bytes in use at the given moment of the step."""
        return self.size if not self.moments or moment in self.moments else 0

    @property
    def moments_summary(self) -> str:
        """Returns a short description of when the bytes are in use."""
        if set(self.moments) >= set(STEP):
            return ", ".join(["forward and backward", *(one for one in self.moments if one not in STEP)])
        return ", ".join(self.moments) or "always"


@dataclass(frozen=True)
class MemoryEstimate:
    """Memory estimate per device for ``devices`` devices; ``title`` names the workload."""

    title: str
    rows: tuple[MemoryRow, ...]
    devices: int = 1

    def __getitem__(self, name: str) -> MemoryRow:
        return next(row for row in self.rows if row.name == name)

    @property
    def peak(self) -> str:
        """Returns the moment of peak memory use."""
        return max(MOMENTS, key=self.bytes_at)

    @property
    def total(self) -> int:
        """Returns the bytes per device at the peak."""
        return self.bytes_at(self.peak)

    def bytes_at(self, moment: str) -> int:
        """Returns the bytes per device at the given moment of the step."""
        return sum(row.bytes_at(moment) for row in self.rows)

    def fits(self, capacity: int) -> bool:
        """Returns whether the estimate fits devices of ``capacity`` bytes while leaving a share of them free."""
        return self.total <= capacity * (1 - FREE_SHARE)

    def lines(self, capacity: int | None = None, others: "Mapping[str, MemoryEstimate] | None" = None) -> list[str]:
        """Formats the table for the log, in GiB, and states whether the total fits ``capacity``.

        Less than 1 GiB that fits takes a single line, in MiB.

        ``others``: estimates for other options, which are suggested if they fit and this one does not.
        """
        where = "" if self.devices == 1 else f", each of {self.devices} devices"
        width = max(len(row.name) for row in (*self.rows, MemoryRow("total", 0, "")))
        if self.total < GIB and (capacity is None or self.fits(capacity)):
            return [f"memory of {self.title} (estimate{where}): {self.total / MIB:.1f} MiB at its peak, {self.peak}"]
        lines = [f"memory of {self.title} (estimate{where}, GiB)"]
        lines += [f"  {row.name:{width}} {row.size / GIB:8.2f}  {row.how} [{row.moments_summary}]" for row in self.rows]
        lines.append(f"  {'total':{width}} {self.total / GIB:8.2f}  at its peak: {self.peak}")
        if capacity is None:
            return lines
        spare = capacity / GIB - self.total / GIB
        if self.fits(capacity):
            return [*lines, f"  fits: the device has {capacity / GIB:.1f} GiB, {spare:.1f} to spare"]
        options = [name for name, other in (others or {}).items() if other.fits(capacity)]
        advice = f"these would: {', '.join(options)}" if options else "none of the hardware= options would"
        kept = f"{FREE_SHARE:.0%} are kept free"
        return [*lines, f"  does not fit: the device has {capacity / GIB:.1f} GiB, of which {kept}; {advice}"]


def activation_bytes_per_token(shape: ModelShape, compute: int, stream: int) -> int:
    """Returns the bytes per token that one block saves for its backward pass.

    ``compute`` and ``stream``: bytes per element in matrix products and on the residual stream; autocast copies a
    float32 stream for each projection. Frozen layers do not save their input.
    """
    measured = {(FP32, FP32): 24, (BF16, FP32): 26, (BF16, BF16): 16}
    if shape.rank:
        measured = {(FP32, FP32): 16, (BF16, FP32): 18, (BF16, BF16): 18}
    norms = measured.get((compute, stream), 6 * stream) * shape.hidden  # float64: twice those of float32
    attention = compute * (2 * shape.queries + 2 * shape.keys) + FP32 * shape.heads
    return norms + 2 * FP32 + attention + compute * 4 * shape.inner + adapter_bytes_per_token(shape, compute)


def compiled_bytes_per_token(shape: ModelShape, compute: int, stream: int) -> int:
    """Returns the bytes per token that one compiled block saves, as decided by torch's partitioner."""
    attention = compute * (2 * shape.queries + 2 * shape.keys) + FP32 * shape.heads
    products = compute * 3 * (shape.hidden + shape.inner)
    return stream * shape.hidden + 2 * FP32 + attention + products + adapter_bytes_per_token(shape, compute)


def adapter_bytes_per_token(shape: ModelShape, compute: int) -> int:
    """Returns the bytes per token that a block's adapters save, including another copy of the attention output."""
    copied = shape.queries if compute == BF16 else 0
    return compute * (PROJECTIONS * shape.rank + copied) if shape.rank else 0


def max_token_budget(fits: Callable[[int], bool], least: int, most: int = MOST) -> int:
    """Finds the largest token budget from ``least`` to ``most`` for which ``fits`` is true; assumes ``least`` fits."""
    steps = range(1, max(0, most - least) // ROUND + 1)
    return least + ROUND * bisect_left(steps, True, key=lambda step: not fits(least + ROUND * step))


def estimate_training(
    config: PretrainedConfig,
    model: ModelSpec,
    moments: str,
    *,
    precision: str,
    max_length: int,
    reference: str | None,
    strategy: str = "auto",
    devices: int = 1,
    micro: int = 1,
    eval_micro: int = 1,
    tokens: int | None = None,
    eval_tokens: int | None = None,
) -> MemoryEstimate:
    """Estimates training memory per device for the longest micro-batch: 2 x ``micro`` rows of ``max_length`` tokens.

    ``tokens`` and ``eval_tokens`` are token budgets that replace these rows. ``reference``: kind of reference, or None;
    the other values come from the run's config. Raises UserError if ``config`` does not define a causal LM.
    """
    shape, chunk = ModelShape.from_model_config(config, model.lora), model.chunk
    weight = DTYPES[model.dtype].itemsize
    compute = BF16 if precision == "bf16-mixed" else weight
    step = _MicroBatch(
        shape,
        weight,
        max(compute, BF16),
        tokens or 2 * micro * max_length,
        *_checkpointed_blocks(shape, model),
        quantized=model.quantize is not None,
        compiled=model.is_compiled,
    )
    validated = eval_tokens or 2 * eval_micro * max_length
    rows_of = f"{2 * eval_micro} rows of {max_length} tokens" if eval_tokens is None else f"{eval_tokens:,} tokens"
    whole, several = model.lora is None, devices > 1  # whether all weights are trained, and by several devices
    fsdp = several and strategy == "fsdp"
    sharded, over = (devices, f" / {devices} devices") if fsdp else (1, "")
    copied = reference in ("live", "first_epoch")
    gathered = weight * (shape.parameters - shape.blocks + 2 * shape.block) if fsdp else 0
    buckets = (shape.parameters * weight if whole else shape.adapters * FP32) if several and not fsdp else 0
    # A compiled block returns all its gradients at the end of its backward; sharded ones are among those gathered.
    of_block = weight * shape.block if whole else FP32 * shape.adapters // shape.layers
    logits = _logit_bytes(shape, chunk, step.compute)
    rows = [
        *_state_rows(step, model, moments, sharded, over),
        MemoryRow("gradient buckets", buckets, "DDP's copy of all gradients"),
        MemoryRow(
            "gathered weights", gathered, f"unsharded embeddings, head and two blocks x {weight} B", (*STEP, FORWARD)
        ),
        MemoryRow(
            "gathered gradients", gathered * whole, "gradients of the gathered weights, before scattering", (BLOCK,)
        ),
        MemoryRow("reference", copied * step.weight_bytes // sharded, f"a frozen copy in the weights' dtype{over}"),
        MemoryRow(
            "reference forward",
            _forward_bytes(step, step.tokens) * (copied or reference == "adapter_off"),
            f"{step.tokens:,} tokens without gradients",
            (REFERENCE,),
        ),
        *_step_rows(step),
        MemoryRow(
            "compiled block's gradients",
            of_block * (step.compiled and sharded == 1),
            "gradients of the block's weights, all at once at the end of its backward",
            (BLOCK,),
        ),
        _head_row(step, chunk, trained=whole),
        # Nothing for the fused float32 kernel; one tensor at a time for 8-bit moments.
        MemoryRow(
            "moments unpacked",
            3 * FP32 * shape.largest // sharded * (moments != "float32"),
            "moments of the largest tensor, in float32",
            (UPDATE,),
        ),
        MemoryRow(
            "validation forward", _forward_bytes(step, validated) + logits, f"{rows_of} without gradients", (FORWARD,)
        ),
    ]
    return MemoryEstimate("training", tuple(row for row in rows if row.size), devices)


def estimate_pass(
    config: PretrainedConfig,
    *,
    dtype: str,
    tokens: int,
    mapped: int = 0,
) -> MemoryEstimate:
    """Estimates the judge pass's memory (without gradients) for weights in ``dtype`` and ``tokens`` tokens per forward.

    ``mapped``: length of the longest prompt whose full attention maps are kept, or 0. Raises UserError if ``config``
    does not define a causal LM.
    """
    shape = ModelShape.from_model_config(config)
    weight = DTYPES[dtype].itemsize
    step = _MicroBatch(shape, weight, weight, tokens, recomputed=0, last_recomputed=False)
    how = f"{tokens:,} tokens at the widest point of one block"
    rows = (
        MemoryRow("weights", shape.parameters * weight, f"{shape.parameters:,} parameters x {weight} B ({dtype})"),
        MemoryRow("activations", _forward_bytes(step, tokens), how, (FORWARD,)),
        MemoryRow(
            "attention maps",
            shape.layers * shape.heads * mapped**2 * weight,
            f"{shape.layers} layers x {shape.heads} heads x {mapped:,} x {mapped:,} tokens x {weight} B ({dtype})",
            (FORWARD,),
        ),
    )
    return MemoryEstimate("the judge pass", tuple(row for row in rows if row.size))


# ------------------------------------------------------------------------------------------------ the parts


@dataclass(frozen=True)
class _MicroBatch:
    """Micro-batch for the estimate: model shape, bytes per weight and product element, tokens, recomputed blocks."""

    shape: ModelShape
    weight: int
    compute: int
    tokens: int
    recomputed: int
    last_recomputed: bool
    quantized: bool = False
    compiled: bool = False

    @property
    def saved_bytes(self) -> int:
        """Returns the bytes per token saved by a block that is not recomputed."""
        count = compiled_bytes_per_token if self.compiled else activation_bytes_per_token
        repeated = 2 * (self.shape.queries - self.shape.keys) if REPEATS and self.compute == BF16 else 0
        return count(self.shape, self.compute, self.weight) + self.compute * repeated

    @property
    def weight_bytes(self) -> int:
        """Returns the bytes of the model's weights."""
        packed = self.shape.linear if self.quantized else 0
        return int(packed * FOUR_BITS) + (self.shape.parameters - packed) * self.weight

    @property
    def dequantized_bytes(self) -> int:
        """Returns the bytes of the largest dequantized 4-bit matrix; under autocast it exists in two dtypes."""
        size = self.weight + (self.compute if self.has_weight_copies else 0)
        return size * self.shape.hidden * self.shape.inner if self.quantized else 0

    @property
    def has_weight_copies(self) -> bool:
        """Returns whether autocast copies the weights, because they are wider than the products."""
        return self.weight > self.compute


def _checkpointed_blocks(shape: ModelShape, model: ModelSpec) -> tuple[int, bool]:
    """Returns the number of blocks that save only their input, and whether the last block is one of them."""
    if not model.uses_checkpointing:
        return 0, False
    return -(-shape.layers // model.checkpoint_every), (shape.layers - 1) % model.checkpoint_every == 0


def _state_rows(step: _MicroBatch, model: ModelSpec, moments: str, sharded: int, over: str) -> list[MemoryRow]:
    """Returns the rows for weights, gradients and optimizer moments, sharded over ``sharded`` devices."""
    shape, weight = step.shape, step.weight
    base = f"{shape.parameters:,} parameters x {weight} B ({model.dtype}){over}"
    if model.quantize is not None:
        base = f"{shape.linear:,} weights x {FOUR_BITS:.3f} B ({model.quantize}), others x {weight} B ({model.dtype})"
    trained, size, what = shape.parameters, weight, "parameters"
    rows = [MemoryRow("weights", step.weight_bytes // sharded, base)]
    if step.dequantized_bytes:
        rows.append(
            MemoryRow("unpacked matrix", step.dequantized_bytes, f"the largest, x {weight} B", (*STEP, FORWARD))
        )
    if model.lora is not None:
        trained, size, what = shape.adapters, FP32, "adapter parameters"
        rows.append(MemoryRow("adapters", trained * size // sharded, f"{trained:,} {what} x {size} B (float32){over}"))
    both = 2 * FP32 if moments == "float32" else 2 * (1 + FP32 / 256)  # bytes of the two
    said = f"{trained:,} {what} x {both:g} B (two moments, {moments}){over}"
    return [
        *rows,
        MemoryRow("gradients", trained * size // sharded, f"{trained:,} {what} x {size} B{over}"),
        MemoryRow("optimiser moments", int(trained * both) // sharded, said),
    ]


def _step_rows(step: _MicroBatch) -> list[MemoryRow]:
    """Returns the rows for activations of the longest micro-batch and half-precision weight copies."""
    shape, tokens = step.shape, step.tokens
    stream = step.weight
    each = step.saved_bytes
    outside = (2 * stream if stream == FP32 else 3 * stream) * shape.hidden
    # At its widest a block's backward holds one gradient of the MLP's width and two of the residual stream's.
    copied = FP32 if shape.rank else 0  # adapters are float32, and so are copies of what they read
    flowing = (step.compute + copied) * shape.inner + (2 * stream + copied) * shape.hidden
    half = BF16 * shape.cast
    whole = shape.layers - step.recomputed
    kept = whole * each + step.recomputed * stream * shape.hidden + outside
    how = f"{tokens:,} tokens x {kept / MIB:.2f} MiB"
    if step.recomputed:
        how += f" (checkpointing: only the inputs of {step.recomputed if whole else 'all'} blocks)"
    rows = [MemoryRow("activations", tokens * kept, how, STEP)]
    # The backward starts at the last block, which frees its saved activations before another block is recomputed.
    if step.last_recomputed:
        rows.append(MemoryRow("recomputed block", tokens * (each + flowing), "one block and its gradients", (BLOCK,)))
    else:
        rows.append(MemoryRow("block's gradients", tokens * flowing, "gradients of one block's activations", (BLOCK,)))
    if step.has_weight_copies and whole and not step.quantized:
        waiting = f"autocast's copies of {'all' if not step.recomputed else whole} blocks, kept for the backward"
        rows.append(MemoryRow("bf16 weight copies", half * whole // shape.layers, waiting, STEP))
    if step.has_weight_copies and step.recomputed and not step.quantized:
        rows.append(MemoryRow("bf16 block copies", half // shape.layers, "autocast's copies of one block", (BLOCK,)))
    return rows


def _head_row(step: _MicroBatch, chunk: int, *, trained: bool) -> MemoryRow:
    """Estimates memory for the vocabulary head's backward: logits of a chunk, hidden states, and gradients."""
    shape = step.shape
    matrix = shape.vocab * shape.hidden
    size = _logit_bytes(shape, chunk, step.compute) + step.tokens * 3 * FP32 * shape.hidden
    if step.has_weight_copies:
        size += step.compute * matrix
    if trained:
        # Accumulated in float32, next to a chunk's product in a shorter dtype.
        size += FP32 * matrix + (step.compute * matrix if step.compute < FP32 else 0)
    return MemoryRow("vocabulary head", size, f"{chunk} tokens x {shape.vocab:,} ids, the head's gradient", (HEAD,))


def _forward_bytes(step: _MicroBatch, tokens: int) -> int:
    """Returns the bytes of a forward without gradients: one block's MLP and autocast's copy of the widest weight."""
    shape = step.shape
    copy = step.compute * shape.hidden * shape.inner if step.has_weight_copies and not step.quantized else 0
    return tokens * (3 * step.compute * shape.inner + (2 * step.weight + step.compute) * shape.hidden) + copy


def _logit_bytes(shape: ModelShape, chunk: int, compute: int) -> int:
    """Returns the bytes of one chunk of logits in float32, plus a copy in the compute dtype if that is shorter."""
    return chunk * shape.vocab * (FP32 + (compute if compute < FP32 else 0))
