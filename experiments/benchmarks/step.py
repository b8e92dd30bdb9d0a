"""Benchmarks forward and backward of a TwDPO step: ours against a plain implementation and TRL's DPOTrainer, in turn.

    make trl                                      creates TRL's environment, once; without it its rows are left out
    python -m experiments.benchmarks.step [--short] [--micro 4] [--batches 2] [--json FILE]
    python -m experiments.benchmarks.step --sweep micro [--values 1 2 4 8]        also length, vocab, layers

Model and reference are random Llamas whose vocabulary head takes 7 % of the matrix work, as in Llama-3-8B; lengths are
those of the paper's data. A time covers ``--batches`` prepared micro-batches with accumulated gradients. Timing starts
only after all agree: our loss with uniform weights equals TRL's on the same batch, our loss with random weights equals
the plain implementation's in every layout, and the shared layout sends P + C + R tokens through the model.
"""

import logging
import sys
import tempfile
import warnings
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median as middle
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils import logging as library

from attnpo.data.collate import TrainingExample
from attnpo.models.layouts import LAYOUTS
from attnpo.models.scored import ScoredLM
from experiments.benchmarks.harness import (
    MIB,
    ROOT,
    Bar,
    Times,
    Worker,
    finish,
    interleaved,
    new_parser,
    parsed,
    peak,
    profiled,
    ratio,
    slope,
    table,
    timed,
    times_rows,
)
from experiments.benchmarks.shapes import (
    Pair,
    Shape,
    add_shape,
    floor_flops,
    make_pairs,
    matmul_rate,
    padded_tokens,
    random_llama,
    text_of,
    typical_lengths,
    word_tokenizer,
)
from experiments.benchmarks.systems import BETA, Ours, Plain, examples, with_reference

SAME_AS_TRL = 1e-6  # relative, on the loss
SAME_AS_PLAIN = 5e-6
NAIVE, TRL = "plain", "TRL"
SWEEPS: dict[str, tuple[str, tuple[float, ...]]] = {
    "micro": ("micro", (1, 2, 4, 8)),
    "length": ("scale", (0.5, 1.0, 2.0)),
    "vocab": ("vocab", (2048, 8192, 32768)),
    "layers": ("layers", (2, 4, 8)),
}
BARS = (  # what, who, over whom, at least
    ("ours with cached reference vs TRL with live", "shared_prefix, cached", f"{TRL}, live", 2.5),
    ("both with live reference", "shared_prefix, live", f"{TRL}, live", 2.0),
    ("both with cached reference", "shared_prefix, cached", f"{TRL}, cached", 2.0),
)
MEMORY_BAR = 0.5


class Unequal(SystemExit):
    """Error for two systems that should compute the same loss but do not; its text shows both."""


@dataclass(frozen=True)
class Measured:
    """One measurement: seconds, peak bytes and forwarded tokens per competitor, and the floor in seconds."""

    times: Times
    peaks: dict[str, int]
    tokens: dict[str, int]
    floor: float
    trl: Mapping[str, Any]

    def plain(self) -> dict[str, Any]:
        """Returns the measurement as JSON data."""
        return {"seconds": self.times, "peak_bytes": self.peaks, "tokens": self.tokens, "floor_seconds": self.floor}


# ------------------------------------------------------------------------------------------------ measuring


def require_same(what: str, ours: Sequence[float], theirs: Sequence[float], bound: float) -> float:
    """Returns the largest relative difference of losses. Raises ``Unequal`` above ``bound``."""
    gap = max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))
    if not gap <= bound:
        shown = [", ".join(f"{loss:.9f}" for loss in losses) for losses in (ours, theirs)]
        raise Unequal(
            f"{what}: losses differ by {gap:.3g} relative, expected at most {bound:.0e}; nothing was timed\n"
            f"  ours   {shown[0]}\n  theirs {shown[1]}"
        )
    return gap


def pairs_of(options: Namespace) -> list[Pair]:
    """Returns the pairs of all micro-batches."""
    lengths = typical_lengths(options.micro * options.batches, options.micro, options.seed, scale=options.scale)
    return make_pairs(lengths, options.vocab, options.seed)


def measure(options: Namespace, trl: Worker | None) -> Measured:
    """Checks and times all competitors on one shape. Raises ``Unequal``."""
    shape = Shape.of(options)
    pairs = pairs_of(options)
    cut = [pairs[start : start + options.micro] for start in range(0, len(pairs), options.micro)]
    random = [examples(batch, weighted=options.seed + number) for number, batch in enumerate(cut)]
    uniform = [examples(batch) for batch in cut]

    def models() -> tuple[PreTrainedModel, PreTrainedModel]:
        return random_llama(shape, options.seed), random_llama(shape, options.seed + 1)

    scorer = ScoredLM(models()[1])
    own: dict[str, Plain | Ours] = {NAIVE: Plain(*models(), random)}
    for layout in ["shared_prefix"] if options.short else reversed(LAYOUTS):
        own[f"{layout}, live"] = Ours(*models(), layout, random)
        own[f"{layout}, cached"] = Ours(models()[0], None, layout, [with_reference(batch, scorer) for batch in random])
    for name, system in own.items():
        if name != NAIVE:
            require_same(f"{name} and the plain way", system.losses(), own[NAIVE].losses(), SAME_AS_PLAIN)
    tokens = {name: system.tokens() for name, system in own.items()}
    whole = sum(pair.tokens for pair in pairs)
    assert tokens["shared_prefix, live"] == tokens["shared_prefix, cached"] == whole, (tokens, whole)
    competitors: dict[str, Callable[[], float]] = {n: lambda s=s: timed(s.step) for n, s in own.items()}  # type: ignore[misc]
    report: Mapping[str, Any] = {}
    if trl is not None:
        report = join(trl, options, models(), cut, uniform, competitors)
        tokens |= {f"{TRL}, live": trl.ask("tokens"), f"{TRL}, cached": trl.ask("tokens")}
    size = shape, max(1, whole // options.batches), torch.float32, torch.device("cpu")
    rates = [matmul_rate(*size)]
    times = interleaved(competitors, options.rounds)
    rates.append(matmul_rate(*size))
    peaks = {name: peak(system.step) for name, system in own.items()}
    if trl is not None:
        peaks |= {f"{TRL}, {kind}": trl.ask("memory", reference=kind) for kind in ("live", "cached")}
    if options.profile:
        for name, system in own.items():
            print(f"\n{name}\n\n{profiled(system.step)}")
    return Measured(times, peaks, tokens, floor_flops(shape, pairs) / max(rates), report)


def join(
    trl: Worker,
    options: Namespace,
    models: tuple[PreTrainedModel, PreTrainedModel],
    cut: Sequence[Sequence[Pair]],
    uniform: list[list[TrainingExample]],
    competitors: dict[str, Callable[[], float]],
) -> Mapping[str, Any]:
    """Adds TRL to the competitors once its losses equal ours, and returns its report. Raises ``Unequal``."""
    policy, reference = models
    with tempfile.TemporaryDirectory() as folder:
        names = [f"{folder}/{name}" for name in ("policy", "reference")]
        for name, model in zip(names, models, strict=True):
            model.save_pretrained(name)
            word_tokenizer(options.vocab).save_pretrained(name)
        report: Mapping[str, Any] = trl.ask(
            "prepare",
            policy=names[0],
            reference=names[1],
            batches=cut,
            texts=[
                [[text_of(pair.prompt), *(f" {text_of(row)}" for row in pair.rows)] for pair in batch] for batch in cut
            ],
            beta=BETA,
            threads=torch.get_num_threads(),
        )
    ours = Ours(policy, reference, "shared_prefix", uniform).losses()
    gaps = {}
    for kind in ("live", "cached"):
        name = f"{TRL}, {kind}"
        gaps[kind] = require_same(
            f"twdpo with uniform weights and {name}", ours, trl.ask("losses", reference=kind), SAME_AS_TRL
        )
        competitors[name] = lambda kind=kind: trl.ask("step", reference=kind)  # type: ignore[misc]
    return {**report, "loss_gap": gaps, "losses": ours}


# ------------------------------------------------------------------------------------------------ showing


def show(found: Measured) -> None:
    """Prints the table of one measurement."""
    rows = []
    for row in times_rows(found.times, NAIVE):
        name = row[0]
        floors = middle(found.times[name]) / found.floor
        rows.append([*row, f"{found.peaks[name] / MIB:.0f}", f"{found.tokens[name]:,}", f"{floors:.2f}"])
    head = ("step", "seconds, median (range)", "of plain", "peak MiB", "tokens", "x FLOP floor")
    print(f"\n{table(head, rows)}", flush=True)


def bars(found: Measured, missing: str) -> list[Bar]:
    """Returns DESIGN's bars for one measurement; ``missing`` is the reason why TRL is absent."""
    made = [
        Bar(f"step: {what}", least, ratio(found.times, over, who), True, missing) for what, who, over, least in BARS
    ]
    for kind in ("live", "cached"):
        mine, theirs = found.peaks[f"shared_prefix, {kind}"], found.peaks.get(f"{TRL}, {kind}")
        share = None if theirs is None else mine / theirs
        made.append(Bar(f"step: peak memory, both {kind}, ours of TRL's", MEMORY_BAR, share, False, missing))
    return made


def sweep(options: Namespace, trl: Worker | None) -> dict[str, Any]:
    """Measures over the values of one setting; prints the measurements and the exponents of time and memory."""
    key, usual = SWEEPS[options.sweep]
    values = [type(usual[0])(value) for value in options.values or usual]
    found = []
    for value in values:
        print(f"\n{options.sweep} {value:g}")
        found.append(measure(Namespace(**{**vars(options), key: value}), trl))
        show(found[-1])
    exponents = {}
    if len(values) > 1:
        for name in found[0].times:
            seconds = slope(values, [middle(one.times[name]) for one in found])
            exponents[name] = {"time": seconds, "memory": slope(values, [one.peaks[name] for one in found])}
        rows = [[name, f"{one['time']:.2f}", f"{one['memory']:.2f}"] for name, one in exponents.items()]
        print(f"\n{table((f'exponent in {options.sweep}', 'time', 'peak memory'), rows)}")
    return {"values": values, "measured": [one.plain() for one in found], "exponents": exponents}


def trl_python(options: Namespace) -> tuple[Path | None, str]:
    """Returns the Python of TRL's environment, or None and the reason why it is missing."""
    if options.no_trl:
        return None, "left out (--no-trl)"
    if not options.trl_python.is_file():
        return None, "no TRL environment; `make trl` builds it"
    return options.trl_python, ""


def add_trl(parser: ArgumentParser) -> None:
    """Adds the options that locate TRL's environment."""
    default = ROOT / ".venv-trl" / "bin" / "python"
    parser.add_argument("--trl-python", type=Path, default=default, help="Python of an environment with trl==1.16.0")
    parser.add_argument("--no-trl", action="store_true", help="leave TRL out")


def quiet() -> None:
    """Turns off progress bars and library advice, which would clutter the tables."""
    warnings.filterwarnings("ignore", module="lightning")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    library.disable_progress_bar()


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the tables, with the bars unless a setting is swept; returns 0."""
    parser = new_parser(__doc__, rounds=5)
    add_shape(parser, layers=4)
    add_trl(parser)
    parser.add_argument("--micro", type=int, default=4, help="pairs per micro-batch")
    parser.add_argument("--batches", type=int, default=2, help="micro-batches per timing")
    parser.add_argument("--scale", type=float, default=1.0, help="lengths relative to the paper's data")
    parser.add_argument("--sweep", choices=SWEEPS, help="vary one setting and fit exponents")
    parser.add_argument("--values", type=float, nargs="+", help="values of the swept setting")
    options = parsed(parser, arguments)
    if options.short:
        options.rounds, options.batches = min(options.rounds, 3), 1
    quiet()
    python, missing = trl_python(options)
    with ExitStack() as stack:
        trl = None
        if python is not None:
            trl = stack.enter_context(Worker([str(python), "-m", "experiments.benchmarks.trl_worker", "serve"]))
        shape = Shape.of(options)
        print(f"{shape}, head {100 * shape.head_share():.1f} % of the matrix work")
        print(f"{torch.get_num_threads()} threads, float32")
        print(f"TRL: {missing}" if missing else f"TRL: {python}")
        if options.sweep:
            finish("step", options, sweep(options, trl), [])
            return 0
        found = measure(options, trl)
        describe(options, found)
        show(found)
        finish(
            "step",
            options,
            found.plain() | {"trl": found.trl},
            bars(found, missing),
            {"trl": found.trl.get("versions")},
        )
    return 0


def describe(options: Namespace, found: Measured) -> None:
    """Prints the machine and versions, and TRL's arguments."""
    pairs = pairs_of(options)
    real = sum(pair.tokens + len(pair.prompt) for pair in pairs)
    padded = padded_tokens([pair.lengths for pair in pairs], options.micro)
    print(
        f"{options.batches} x {options.micro} pairs: {padded} tokens padded, {real} real, "
        f"{sum(pair.tokens for pair in pairs)} with the prompt once; FLOP floor {found.floor:.3f} s"
    )
    if found.trl:
        print(f"TRL {found.trl['versions'].get('trl')}, DPOConfig: {found.trl['arguments']}")
        print(f"loss equal to ours with uniform weights, relative: {found.trl['loss_gap']}")


if __name__ == "__main__":
    sys.exit(main())
