"""The TwDPO step at the size of Llama-3-8B on one GPU: random weights, bfloat16, one optimiser step after the other.

    python -m experiments.benchmarks.gpu [--max-length 1024] [--layouts shared_prefix packed padded] [--json FILE]
    python -m experiments.benchmarks.gpu --tiny                    a toy size on any machine, to see that it runs

Needs torch, transformers and of attnpo the files, schema, models and objectives, so that it runs where the rest is not
installed. A time is that of a whole optimiser step of ``--pairs`` pairs: forward and backward of its micro-batches with
the reference's log-probabilities at hand (``--reference live``: a second model runs in every step), and the optimiser.
FLOPs are counted as they are run (on a CPU without those of attention); the floor is what no exact step can do without
(``shapes.floor_flops``).
"""

import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedModel

from attnpo.models.layouts import LAYOUTS, Layout, padded
from attnpo.models.packed_attention import attend_as_before
from attnpo.models.scored import ScoredLM
from attnpo.objectives.twdpo import TwDPO
from attnpo.schema import PreferenceBatch, RowGroup, TokenStats
from experiments.benchmarks.harness import Bar, finish, interleaved, median, new_parser, parsed, table, timed
from experiments.benchmarks.shapes import (
    LLAMA3_8B,
    PAD,
    Pair,
    Shape,
    floor_flops,
    make_pairs,
    matmul_rate,
    random_llama,
    settle,
    typical_lengths,
)

GIB = 1 << 30
TINY = Shape(width=32, layers=2, heads=4, kv_heads=1, mlp=112, vocab=64)
BETA = 5e-3  # the paper's
NOISE = {"bfloat16": 0.1, "float32": 1e-4}  # how far log-probabilities of two kernels may lie apart, mean over tokens
OPTIMIZERS = ("adamw", "none")
RECORD, SHARE, FLOPS = 6.65, 0.45, 1.1  # pairs/s at 1024 tokens, of the matmul rate, of the floor


def batch_of(pairs: Sequence[Pair], layout: Layout, step_pairs: int) -> PreferenceBatch:
    """A micro-batch with uniform weights and without reference."""
    sides = [pair.chosen for pair in pairs] + [pair.rejected for pair in pairs]
    prompts = [pair.prompt for pair in pairs] * 2
    inputs, ids, mask = layout(list(zip(prompts, sides, strict=True)), PAD)
    lengths = mask.sum(-1).float()
    rows = RowGroup(ids, mask, {"reward": mask / lengths[:, None]}, lengths, None, inputs)
    names = tuple(f"pair{number}" for number in range(len(pairs)))
    return PreferenceBatch({"main": rows}, torch.ones(len(pairs)), names, step_pairs=step_pairs)


class Step:
    """One optimiser step over the pairs in a layout; all layouts train the same policy."""

    def __init__(
        self,
        policy: ScoredLM,
        reference: ScoredLM | None,
        layout: Layout,
        cut: Sequence[Sequence[Pair]],
        optimizer: torch.optim.Optimizer | None,
    ) -> None:
        self.policy, self.reference, self.optimizer, self.objective = policy, reference, optimizer, TwDPO(beta=BETA)
        self.device = next(policy.parameters()).device
        total = sum(map(len, cut))
        self.batches = [batch_of(part, layout, total).to(self.device) for part in cut]
        if reference is None:
            attend_as_before(policy.model)
            for number, batch in enumerate(self.batches):
                with torch.no_grad():
                    rows = replace(batch.main, reference_logps=self._stats(policy, batch).logps)
                self.batches[number] = replace(batch, groups={"main": rows})

    @property
    def tokens(self) -> int:
        """Tokens sent through the model, padding included."""
        return sum(batch.main.inputs.input_ids.numel() for batch in self.batches if batch.main.inputs is not None)

    def run(self) -> float:
        """The loss of the step."""
        attend_as_before(self.policy.model)  # rows of another layout may have run before
        loss = torch.zeros((), device=self.device)
        for batch in self.batches:
            reference = (
                TokenStats(logps=batch.main.reference_logps) if self.reference is None else self._reference(batch)
            )
            output = self.objective(self._stats(self.policy, batch), reference, batch)
            part = output.losses.sum() / batch.step_pairs
            part.backward()
            loss += part.detach()
        if self.optimizer is not None:
            self.optimizer.step()
        self.policy.zero_grad()
        settle(self.device)
        return float(loss)

    def _reference(self, batch: PreferenceBatch) -> TokenStats:
        assert self.reference is not None
        with torch.no_grad():
            return self._stats(self.reference, batch)

    @staticmethod
    def _stats(model: ScoredLM, batch: PreferenceBatch) -> TokenStats:
        rows = batch.main
        found: TokenStats = model(rows.inputs, rows.response_ids, rows.response_mask)
        return found


def make_model(options: Namespace, shape: Shape, device: torch.device) -> PreTrainedModel:
    """A random model on ``device``, made in its dtype (a cast would round the rotary frequencies)."""
    with device:
        return random_llama(shape, options.seed, dtype=getattr(torch, options.dtype))


def make_steps(options: Namespace, shape: Shape, device: torch.device, pairs: Sequence[Pair]) -> dict[str, Step]:
    """A step per layout. Raises ``SystemExit`` for one whose numbers are others than those of padded rows."""
    model = make_model(options, shape, device)
    if options.checkpointing:
        # Newer transformers call it activation checkpointing, and warn under the older name.
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable()
    policy, reference = ScoredLM(model, chunk=options.chunk).train(), None
    if options.reference == "live":
        reference = ScoredLM(make_model(options, shape, device), chunk=options.chunk).eval().requires_grad_(False)
    optimizer = None
    if options.optimizer == "adamw":
        optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-6, fused=device.type == "cuda")
    cut = [pairs[start : start + options.micro] for start in range(0, len(pairs), options.micro)]
    bound = NOISE[options.dtype]
    for name in options.layouts:
        gap = apart(policy, cut[0], LAYOUTS[name])
        print(f"{name}: log-probabilities {gap:.2g} from those of padded rows, in the mean over tokens")
        if not gap <= bound:
            raise SystemExit(f"{name}: expected at most {bound:g} by rounding in {options.dtype}; nothing was timed")
    return {name: Step(policy, reference, LAYOUTS[name], cut, optimizer) for name in options.layouts}


@torch.no_grad()
def apart(policy: ScoredLM, pairs: Sequence[Pair], layout: Layout) -> float:
    """The mean over response tokens of how far the log-probabilities lie from those of padded rows."""
    device = next(policy.parameters()).device
    rows = [batch_of(pairs, one, len(pairs)).to(device).main for one in (layout, padded)]
    ours, theirs = (policy(row.inputs, row.response_ids, row.response_mask).logps for row in rows)
    return float((ours - theirs).abs()[rows[0].response_mask].mean())


def held(step: Step) -> int | None:
    """Bytes allocated on the GPU at the peak of a step, weights included; None on a CPU."""
    if step.device.type != "cuda":
        return None
    torch.cuda.reset_peak_memory_stats(step.device)
    step.run()
    return torch.cuda.max_memory_allocated(step.device)


def counted_flops(step: Step) -> int:
    """Floating-point operations of a step's matrix products and attention, backward included."""
    with FlopCounterMode(display=False) as counter:
        step.run()
    return int(counter.get_total_flops())


def main(arguments: Sequence[str] | None = None) -> int:
    """0; prints the table and, at full size, the bars."""
    parser = new_parser(__doc__, rounds=3)
    parser.add_argument("--tiny", action="store_true", help="a toy model and short pairs")
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=["shared_prefix", "packed", "padded"])
    parser.add_argument("--reference", choices=("cached", "live"), default="cached")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw", help="adamw: both moments in the dtype")
    parser.add_argument("--checkpointing", action="store_true", help="recompute activations in the backward")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--pairs", type=int, default=32, help="pairs per optimiser step")
    parser.add_argument("--micro", type=int, default=8, help="pairs per forward")
    parser.add_argument("--max-length", type=int, default=1024, help="tokens of prompt and response")
    parser.add_argument("--chunk", type=int, default=1024, help="tokens through the vocabulary head at once")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parsed(parser, arguments)
    if options.tiny:
        options.pairs, options.micro, options.rounds = 4, 2, 1
    shape, device = TINY if options.tiny else LLAMA3_8B, torch.device(options.device)
    scale = 0.1 if options.tiny else 1.0
    lengths = typical_lengths(options.pairs, options.micro, options.seed, scale=scale, limit=options.max_length)
    pairs = make_pairs(lengths, shape.vocab, options.seed)
    floor = floor_flops(shape, pairs)
    real = sum(pair.tokens + len(pair.prompt) for pair in pairs)
    print(f"{shape}, {options.dtype} on {torch.cuda.get_device_name() if device.type == 'cuda' else 'CPU'}")
    print(f"steps of {options.pairs} pairs, {options.micro} per forward: {real} tokens, floor {floor / 1e12:.4g} TFLOP")
    rate = matmul_rate(shape, min(real, 8192), getattr(torch, options.dtype), device)
    print(f"matrix products of these shapes: {rate / 1e12:.4g} TFLOP/s", flush=True)
    steps = make_steps(options, shape, device, pairs)
    flops = {name: counted_flops(step) for name, step in steps.items()}
    memory = {name: held(step) for name, step in steps.items()}
    competitors: dict[str, Callable[[], float]] = {n: lambda s=s: timed(s.run) for n, s in steps.items()}  # type: ignore[misc]
    times = interleaved(competitors, options.rounds)
    rows = []
    speed = {name: options.pairs / median(times, name) for name in times}
    share = {name: floor / median(times, name) / rate for name in times}
    for name in times:
        used = memory[name]
        run = f"{flops[name] / median(times, name) / 1e12:.4g}"
        row = [name, f"{median(times, name):.3f}", f"{speed[name]:.2f}", f"{steps[name].tokens:,}", run]
        row += [
            f"{flops[name] / floor:.2f}",
            f"{100 * share[name]:.1f} %",
            "-" if used is None else f"{used / GIB:.1f}",
        ]
        rows.append(row)
    head = (
        "layout",
        "seconds per step",
        "pairs/s",
        "tokens",
        "TFLOP/s",
        "FLOPs x floor",
        "floor of matmul rate",
        "GiB",
    )
    print(f"\n{table(head, rows)}")
    bars = []
    if not options.tiny and times:
        best = max(times, key=speed.__getitem__)
        bars = [
            Bar(f"GPU: {best}, max_length {options.max_length}", RECORD, speed[best], True, unit=" pairs/s"),
            Bar(f"GPU: {best}, FLOPs of the floor's", FLOPS, flops[best] / floor, False),
            Bar(f"GPU: {best}, floor's FLOP/s of the matmul rate", SHARE, share[best], True),
        ]
    results = {"seconds": times, "flops": flops, "floor_flops": floor, "matmul_flops_per_s": rate, "peak_bytes": memory}
    finish("gpu", options, results, bars)
    return 0


if __name__ == "__main__":
    sys.exit(main())
