"""Optimizer steps at the size of Llama-3-8B in several settings, timed by ``gpu.py``.

Uses random weights, uniform token weights, and the policy's own log-probabilities in place of the reference's, which
corresponds to a step with a stored reference. A setting is timed only after it computes the same as padded rows:
layouts and compiled blocks are checked by the product's own trials, float32 by its numbers; rounding of low precision
is reported.
"""

import gc
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from attnpo.data.micro_batches import COSTS, fill_greedily, partition_by_cost
from attnpo.models.backbone import layer_stack
from attnpo.models.compiled import check_compiled_blocks, compile_blocks
from attnpo.models.layouts import LAYOUTS, Layout, padded_layout
from attnpo.models.lora import add_lora, has_adapters
from attnpo.models.memory import UPDATE, MemoryEstimate, estimate_training
from attnpo.models.packed_attention import restore_attention
from attnpo.models.scored import ScoredLM
from attnpo.models.spec import LoraSpec, ModelSpec
from attnpo.models.trial import find_layout_problem
from attnpo.objectives.twdpo import TwDPO
from attnpo.schema import PreferenceBatch, RowGroup, TokenStats
from attnpo.training.optimizer import Optimizer
from experiments.benchmarks.harness import say, timed
from experiments.benchmarks.shapes import PAD, Pair, Shape, causal, random_llama, settle, step_flops

BETA = 5e-3  # the paper's
STILL = 1e-12  # learning rate
SAME = 1e-4  # log-probabilities in float32, mean over tokens
PROBE = 2  # pairs whose log-probabilities are compared
FULL, LORA = "full", "lora"
FLAGS = ("checkpoint", "compile")


@dataclass(frozen=True)
class Setting:
    """Setting of a timed step: ``method:layout:tokens``, optionally followed by ``:checkpoint`` and ``:compile``.

    ``tokens`` is the token budget of a micro-batch, as in ``batch.tokens``.
    """

    method: str
    layout: str
    tokens: int
    recomputed: bool = False
    compiled: bool = False

    @classmethod
    def parse(cls, text: str) -> "Setting":
        """Parses a setting. Raises ``ValueError`` for invalid text."""
        method, layout, tokens, *flags = text.split(":")
        if method not in (FULL, LORA) or layout not in LAYOUTS or not set(flags) <= set(FLAGS):
            raise ValueError(f"expected METHOD:LAYOUT:TOKENS[:checkpoint][:compile], got {text!r}")
        return cls(method, layout, int(tokens), *(flag in flags for flag in FLAGS))

    def __str__(self) -> str:
        words = [
            self.method,
            self.layout,
            f"{self.tokens} tokens",
            "checkpointing" if self.recomputed else "no checkpointing",
        ]
        return ", ".join([*words, *(["compiled"] if self.compiled else [])])


DEFAULT = [
    "full:shared_prefix:4096:compile",
    "full:shared_prefix:8192:compile",
    "full:shared_prefix:16384:checkpoint:compile",
    "full:shared_prefix:16384:checkpoint",
    "full:padded:4096:checkpoint",
    "full:shared_prefix:4096:checkpoint",
    "full:packed:16384:checkpoint",
    "full:padded:16384:checkpoint",
    "full:shared_prefix:4096",
    "lora:shared_prefix:8192:compile",
    "lora:shared_prefix:8192",
    "lora:shared_prefix:16384:checkpoint",
    "lora:padded:8192",
]
"""In the order of interest, should time run out: layouts, micro-batches, recomputation, compiled blocks, adapters."""


class Refused(Exception):
    """Setting that the model does not support, or that gives different numbers."""


# ------------------------------------------------------------------------------------------------ one step


def cut(pairs: Sequence[Pair], layout: str, tokens: int) -> list[list[Pair]]:
    """Splits pairs into micro-batches of at most ``tokens`` tokens with similar lengths, as training does."""
    cost = COSTS[layout]
    sized = [(cost.pair_cost([(pair.prompt, row) for row in pair.rows]), pair) for pair in pairs]
    sized.sort(key=lambda each: -each[0])
    sizes = [size for size, _ in sized]
    parts = partition_by_cost(sizes, len(fill_greedily(sizes, cost, tokens)), cost)
    return [[sized[place][1] for place in part] for part in parts]


def batch_of(pairs: Sequence[Pair], layout: Layout, step_pairs: int) -> PreferenceBatch:
    """Returns a micro-batch with uniform weights and without reference."""
    sides = [pair.chosen for pair in pairs] + [pair.rejected for pair in pairs]
    prompts = [pair.prompt for pair in pairs] * 2
    inputs, ids, mask = layout(list(zip(prompts, sides, strict=True)), PAD)
    lengths = mask.sum(-1).float()
    rows = RowGroup(ids, mask, {"reward": mask / lengths[:, None]}, lengths, None, inputs)
    names = tuple(f"pair{number}" for number in range(len(pairs)))
    return PreferenceBatch({"main": rows}, torch.ones(len(pairs)), names, step_pairs=step_pairs)


def count_attended(pairs: Sequence[Pair], layout: str) -> int:
    """Counts the query-key pairs that causal attention computes over a micro-batch."""
    branches = [len(pair.prompt) + len(row) for pair in pairs for row in pair.rows]
    if layout == "padded":
        return len(branches) * causal(max(branches))
    again = sum(causal(len(pair.prompt)) for pair in pairs) if layout == "shared_prefix" else 0
    return sum(map(causal, branches)) - again


class Step:
    """One optimizer step over micro-batches; without an update if ``optimizer`` is None."""

    def __init__(
        self, policy: ScoredLM, layout: str, parts: Sequence[Sequence[Pair]], optimizer: torch.optim.Optimizer | None
    ) -> None:
        self.policy, self.optimizer, self.objective = policy, optimizer, TwDPO(beta=BETA)
        self.device = next(policy.parameters()).device
        total = sum(map(len, parts))
        self.batches = [batch_of(part, LAYOUTS[layout], total).to(self.device) for part in parts]
        self.seen = sum(count_attended(part, layout) for part in parts)

    @property
    def sizes(self) -> list[int]:
        """Returns the number of tokens per micro-batch that go through the model, padding included."""
        return [batch.main.inputs.input_ids.numel() for batch in self.batches if batch.main.inputs is not None]

    def run(self) -> float:
        """Runs the step and returns its loss."""
        restore_attention(self.policy.model)  # rows of another layout may have run before
        loss = torch.zeros((), device=self.device)
        for batch in self.batches:
            stats = stats_of(self.policy, batch)
            output = self.objective(stats, TokenStats(logps=stats.logps.detach()), batch)
            part = output.losses.sum() / batch.step_pairs
            part.backward()
            loss += part.detach()
        if self.optimizer is not None:
            self.optimizer.step()
        self.policy.zero_grad()
        settle(self.device)
        return float(loss)


def stats_of(policy: ScoredLM, batch: PreferenceBatch) -> TokenStats:
    """Returns the log-probabilities of a micro-batch as in training, under autocast (bf16-mixed) in half precision."""
    rows, half = batch.main, policy.model.dtype == torch.bfloat16
    kind = rows.response_ids.device.type
    with torch.autocast(kind, torch.bfloat16, enabled=half, cache_enabled=False):  # as Lightning's
        found: TokenStats = policy(rows.inputs, rows.response_ids, rows.response_mask)
    return found


# ------------------------------------------------------------------------------------------------ a model in settings


def make_model(options: Namespace, shape: Shape, device: torch.device, **more: Any) -> PreTrainedModel:
    """Makes a random model on ``device`` directly in its dtype (a cast would round the rotary frequencies)."""
    with device:
        return random_llama(shape, options.seed, dtype=getattr(torch, options.dtype), **more)


@dataclass(frozen=True)
class Timed:
    """Measurements of a setting: seconds per step, its work, and peak bytes (None on a CPU)."""

    seconds: list[float]
    sizes: list[int]
    flops: float
    peak: int | None
    estimate: int
    gap: float


class Bench:
    """Model and optimizer state shared by all settings; adapters are added once, after the full-weight settings."""

    def __init__(self, options: Namespace, shape: Shape, device: torch.device, pairs: Sequence[Pair]) -> None:
        self.options, self.shape, self.device, self.pairs = options, shape, device, pairs
        self.policy = ScoredLM(make_model(options, shape, device), chunk=options.chunk).train()
        self.probe = sorted(pairs, key=lambda pair: pair.tokens)[-PROBE:]
        self.expected = self._logps(padded_layout)
        self.optimizers: dict[str, torch.optim.Optimizer] = {}
        self.tried: dict[tuple[str, ...], str | None] = {}

    def measure(self, setting: Setting) -> Timed:
        """Times steps in a setting. Raises ``Refused``."""
        self._prepare(setting)
        gap = float((self._logps(LAYOUTS[setting.layout]) - self.expected).abs().mean())
        if self.options.dtype == "float32" and not gap <= SAME:
            raise Refused(f"log-probabilities differ from padded rows by {gap:.2g}, more than rounding ({SAME:g})")
        recipe = self.recipe(setting.method)
        optimizer = None if recipe is None else self._optimizer(setting.method, recipe)
        step = Step(self.policy, setting.layout, cut(self.pairs, setting.layout, setting.tokens), optimizer)
        step.run()  # makes what is made once
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        seconds = [timed(step.run) for _ in range(self.options.rounds)]
        peak = torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else None
        scored = sum(len(row) for pair in self.pairs for row in pair.rows)
        trained = setting.method == FULL
        flops = step_flops(
            self.shape, sum(step.sizes), scored, step.seen, trained=trained, recomputed=setting.recomputed
        )
        return Timed(seconds, step.sizes, flops, peak, self.estimate(setting, max(step.sizes), recipe).total, gap)

    def release(self) -> None:
        """Frees gradients and the memory of a failed step."""
        self.policy.zero_grad()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def recipe(self, method: str) -> Optimizer | None:
        """Makes the optimizer of ``hardware=1x80gb``, AdamW on float32 weights and adapters; None without an update.

        The learning rate is almost 0, so that all settings are checked against the same numbers.
        """
        if self.options.optimizer == "none":
            return None
        if method == LORA or self.options.dtype == "float32":
            return Optimizer(lr=STILL)
        return Optimizer(lr=STILL, moments="8bit", stochastic_rounding=True) if find_spec("torchao") else None

    def estimate(self, setting: Setting, tokens: int, recipe: Optimizer | None) -> MemoryEstimate:
        """Estimates the memory of a step with micro-batches of ``tokens`` tokens by ``attnpo.models.memory``."""
        lora = LoraSpec() if setting.method == LORA else None
        spec = ModelSpec(
            "random",
            dtype=self.options.dtype,
            gradient_checkpointing=setting.recomputed,
            logps_chunk=self.options.chunk,
            lora=lora,
            compile=self.options.backend if setting.compiled else None,
        )
        made = estimate_training(
            self.shape.config(),
            spec,
            (recipe or Optimizer()).moments,
            precision="bf16-mixed" if self.options.dtype == "bfloat16" else "32-true",
            max_length=self.options.max_length,
            reference="cached",
            tokens=tokens,
            eval_tokens=1,  # nothing is validated
        )
        if recipe is not None:
            return made
        return MemoryEstimate(
            made.title, tuple(row for row in made.rows if "moments" not in row.name and UPDATE not in row.moments)
        )

    def _prepare(self, setting: Setting) -> None:
        """Applies a setting to the model: compiled or plain blocks, recomputation, adapters."""
        model = self.policy.model
        for block in layer_stack(model):
            block.__dict__.pop("forward", None)  # of compiled blocks
        if setting.method == LORA and not has_adapters(model):
            self.optimizers.clear()
            self.release()
            torch._dynamo.reset()
            add_lora(model, LoraSpec())
        elif setting.method == FULL and has_adapters(model):
            raise Refused("the model already has adapters")
        self._try(
            ("layout", setting.layout), partial(find_layout_problem, setting.layout, [self.policy], (), self.device)
        )
        if setting.compiled:
            backend, layout = self.options.backend, LAYOUTS[setting.layout]
            say(f"compiling with {backend}: takes about a minute on a GPU the first time")
            restore_attention(model)
            half = self.options.dtype == "bfloat16"
            check = partial(check_compiled_blocks, model, backend, layout, self.device, autocast=half)
            self._try(("compiled", setting.layout), check)
        # Newer transformers call it activation checkpointing, and warn under the older name.
        names = ("activation_checkpointing_enable", "activation_checkpointing_disable")
        if not hasattr(model, names[0]):
            names = ("gradient_checkpointing_enable", "gradient_checkpointing_disable")
        getattr(model, names[0 if setting.recomputed else 1])()
        if setting.compiled:
            compile_blocks(model, self.options.backend)

    def _try(self, what: tuple[str, ...], trial: "partial[str | None]") -> None:
        """Runs a trial once. Raises ``Refused`` with its reason."""
        if what[1] == "padded" and what[0] == "layout":
            return
        if what not in self.tried:
            try:
                self.tried[what] = trial()
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # noqa: BLE001  # of any compiler or kernel
                self.tried[what] = str(error)
        if (reason := self.tried[what]) is not None:
            raise Refused(reason)

    def _optimizer(self, method: str, recipe: Optimizer) -> torch.optim.Optimizer:
        if method not in self.optimizers:
            trained = [one for one in self.policy.parameters() if one.requires_grad]
            self.optimizers[method] = recipe.build(trained)
        return self.optimizers[method]

    def _logps(self, layout: Layout) -> Tensor:
        """Returns the log-probabilities of the probe's response tokens with a graph, as compiled blocks need it."""
        restore_attention(self.policy.model)
        batch = batch_of(self.probe, layout, len(self.probe)).to(self.device)
        return stats_of(self.policy, batch).logps.detach()[batch.main.response_mask].float()
