"""The account of a run's inputs: what was read, cut, dropped and weighed, as log lines and as plain data."""

import logging
import platform
from importlib import metadata
from typing import Any

import torch

from attnpo import __version__
from attnpo.analysis.weight_stats import effective_number
from attnpo.data.collate import TrainingExample
from attnpo.data.prepare import length_percentiles
from attnpo.studies.inputs import SPLITS, Inputs

log = logging.getLogger(__name__)

PACKAGES = ("torch", "lightning", "transformers", "datasets", "torchmetrics", "hydra-core", "Levenshtein")


def versions() -> dict[str, str]:
    """Versions of Python and of the packages whose change can change a number."""
    found = {name: metadata.version(name) for name in PACKAGES}
    return {"attnpo": __version__, "python": platform.python_version(), **found}


def effective_share(example: TrainingExample) -> float:
    """Effective number of weighted tokens over |y|, mean of both sides; 1 for uniform weights."""
    shares = [
        effective_number(row) / max(1.0, length) for row, length in zip(example.weights, example.lengths, strict=True)
    ]
    return sum(shares) / 2


def example_statistics(inputs: Inputs) -> dict[str, Any]:
    """Counts, coverage and weight statistics of both splits, and of the judge."""
    out: dict[str, Any] = {}
    for split in SPLITS:
        pairs, made = inputs.pairs[split], inputs.examples[split]
        kept = made.examples
        out[split] = {
            "read": pairs.read,
            "pairs": len(kept),
            "rows": {**pairs.counts, **{f"note: {name}": count for name, count in pairs.notes.items()}},
            "examples": dict(made.tally.counts),
            "unmatched_share": round(made.unmatched_share, 5),
            "coverage": round(sum(sum(e.coverage) / 2 for e in kept) / max(1, len(kept)), 5),
            "effective_share": round(sum(map(effective_share, kept)) / max(1, len(kept)), 5),
            "lengths": length_percentiles(kept),
        }
    weighed = inputs.weighed
    if weighed.report is not None:
        out["weights"] = {"from_store": weighed.report.hits, "computed": weighed.report.computed}
        rounds = [item for pair in weighed.captured.values() for item in pair.rounds]
        out["judge_prompts"] = {"read": len(rounds), "cut": sum(item.cut for item in rounds)}
    if weighed.verdicts is not None:
        out["judge"] = {name: round(value, 5) for name, value in vars(weighed.verdicts).items()}
    return out


def log_inputs(inputs: Inputs) -> None:
    """Nothing; logs what the run stands on: counts, lengths, coverage, the judge, row 0 as it will be trained."""
    statistics = example_statistics(inputs)
    for split in SPLITS:
        made, stats = inputs.examples[split], statistics[split]
        log.info(
            "%s: %d pairs of %d rows; tokens of the longer branch %s; coverage %.4f, effective share of weights %.3f",
            split,
            stats["pairs"],
            stats["read"],
            " ".join(f"{name} {value}" for name, value in stats["lengths"].items()),
            stats["coverage"],
            stats["effective_share"],
        )
        for line in made.tally.lines():
            log.warning("%s: %s", split, line)
    for event, count in inputs.ground.chat.counts.items():
        log.info("%s: %d", event, count)
    if statistics.get("judge_prompts", {}).get("cut"):
        log.warning("judge prompts cut at judge.max_length: %(cut)d of %(read)d", statistics["judge_prompts"])
    verdicts = inputs.weighed.verdicts
    if verdicts is not None and verdicts.pairs:
        log.info(
            "judge: picks the chosen answer in %.1f %% of the rounds, %.1f %% with both orders averaged; the orders "
            "agree in %.1f %%; %.1f %% of the verdicts are neither label",
            100 * verdicts.agreement,
            100 * verdicts.pair_accuracy,
            100 * verdicts.consistency,
            100 * verdicts.other_tokens,
        )
    for line in row_lines(inputs, inputs.examples["train"].examples[0]) if inputs.examples["train"].examples else []:
        log.info("%s", line)


def row_lines(inputs: Inputs, example: TrainingExample, width: int = 24) -> list[str]:
    """An example as it is trained: prompt tail, then the first ``width`` tokens of each side as text|weight times |y|.

    Prompt tokens are outside the loss; a token without a partner on the judge's side shows a dot.
    """
    tokenizer = inputs.ground.tokenizer
    lines = [
        f"row 0, pair {example.pair_id[:8]}, prompt (masked): ...{tokenizer.decode(example.chosen.prompt_ids[-40:])!r}"
    ]
    for name, side, row, length in zip(
        ("chosen", "rejected"), example.sides, example.weights, example.lengths, strict=True
    ):
        scaled = (row * length).tolist()
        parts = [
            f"{tokenizer.decode([token])!r}|{'.' if weight == 0 else f'{weight:.2f}'}"
            for token, weight in zip(side.response_ids[:width], scaled, strict=False)
        ]
        more = f" ... {len(scaled) - width} more" if len(scaled) > width else ""
        lines.append(
            f"row 0, {name}, {len(scaled)} tokens, sum of weights {float(torch.sum(row)):.3f}: {' '.join(parts)}{more}"
        )
    return lines
