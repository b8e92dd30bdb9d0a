"""Summary of a run's inputs (rows read, truncated, dropped and weighted), for the log and for the run's result."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, cast

import torch
from transformers import PreTrainedTokenizerBase

from attnpo.cli.progress import phase
from attnpo.data.arrow_rows import get_pair_weights
from attnpo.data.collate import TrainingExample
from attnpo.data.micro_batches import COSTS, SHARED_PREFIX, check_token_budget
from attnpo.data.prepare import (
    CUT,
    CUT_IN_FRONT,
    DROPPED_FOR_COVERAGE,
    EncodedSet,
    ExampleSet,
    Tally,
    prepare_examples,
    sample_as_splits,
    select_calibration_pairs,
)
from attnpo.data.rules import AlignRules, BatchPlan
from attnpo.data.sampler import count_steps
from attnpo.data.weighing import SPLITS, WeightingResult
from attnpo.judge.base import WeightReader
from attnpo.judge.judge import RunJudge
from attnpo.judge.layers import HeadRow, StoredRow
from attnpo.judge.settings import Assembly
from attnpo.judge.verdicts import judge_summary_lines, judge_warning
from attnpo.run.combinations import CHOICE
from attnpo.run.inputs import Inputs
from attnpo.run.resolve import Readers
from attnpo.run.result import OVERLAP
from attnpo.schema import SIDES, Json, UserError
from attnpo.text.alignment import AlignMethod
from attnpo.training.processes import planned_processes
from attnpo.training.settings import CallbackSettings, TrainerSettings, total_steps
from attnpo.weights.arrival import COLUMNS, WeightCoverage
from attnpo.weights.base import WeightSource
from attnpo.weights.capture import WEIGHTS, load_captured
from attnpo.weights.readers import VerbalizerStatistics

log = logging.getLogger(__name__)


@phase("statistics of the inputs")
def example_statistics(inputs: Inputs) -> dict[str, Any]:
    """Returns counts, coverage and weight statistics for both splits, plus the judge's statistics."""
    out: dict[str, Any] = {}
    for split in SPLITS:
        pairs, made = inputs.pairs[split], inputs.examples[split]
        out[split] = {
            "read": pairs.read,
            "pairs": len(made.examples),
            "rows": {**pairs.counts, **{f"note: {name}": count for name, count in pairs.notes.items()}},
            "examples": dict(made.tally.counts),
            "unmatched_share": round(made.unmatched_share, 5),
            **inputs.measured[split].numbers,
        }
        if (warning := describe_lost_weights_of_split(inputs, split)) is not None:
            out[split]["warning"] = warning
    if inputs.overlap is not None:
        out["val"][OVERLAP] = asdict(inputs.overlap)
        if (shared := inputs.overlap.warning()) is not None:
            out["val"][OVERLAP]["warning"] = shared
    weighed = inputs.weighed
    if weighed.report is not None:
        out["weights"] = {"from_store": weighed.report.hits, "computed": weighed.report.computed}
    out.update(_count_cut_prompts(weighed))
    if weighed.answers is not None:
        lost = sum(made.tally.count_starting_with(DROPPED_FOR_COVERAGE) for made in inputs.examples.values())
        out["verbalizer"] = {**weighed.answers.to_dict(), "dropped_pairs": lost}
    if inputs.layer_choice is not None:
        out[CHOICE] = inputs.layer_choice
    if weighed.label_mass is not None:
        out["label_mass"] = weighed.label_mass.to_dict()
    if weighed.traces is not None:
        out["judge_traces"] = weighed.traces.to_dict()
    if weighed.verdicts is not None:
        out["judge"] = {name: round(value, 5) for name, value in vars(weighed.verdicts).items()}
        if (warning := judge_warning(weighed.verdicts)) is not None:
            out["judge"]["warning"] = warning
    return out


def describe_lost_weights_of_split(inputs: Inputs, split: str) -> str | None:
    """Returns a warning if many of a split's weights match no training token, else None."""
    weighed, made = inputs.weighed, inputs.examples[split]
    if not made.examples:
        return None
    arrived = inputs.measured[split].arrival if inputs.measured else WeightCoverage.mean_over(made.examples)
    reader, align = inputs.recipe.reader, inputs.recipe.align.method
    return describe_lost_weights(weighed.source, reader, align, weighed.layers, arrived, made.tally)


def describe_split(inputs: Inputs, split: str, statistics: dict[str, Any]) -> Iterator[str]:
    """Yields log lines about a split: the number of rows kept, their lengths, and the share of weights retained."""
    pairs, made = inputs.pairs[split], inputs.examples[split]
    dropped = f"{pairs.num_dropped} dropped while reading, {made.dropped} later"
    yield f"{split}: {statistics['pairs']} pairs of {pairs.read} rows ({dropped})"
    for name, one in statistics.get("sets", {}).items():
        yield f"{split}, set {name}: " + ", ".join(f"{value} {key}" for key, value in one.items() if key != "path")
    for event, count in sorted(made.tally.counts.items()):
        first = ", ".join(made.tally.first[event])
        yield f"{split}: {event}: {count} of {made.read} ({count / made.read:.1%}; first: {first})"
    lengths = [f"{name} {'/'.join(map(str, found.values()))}" for name, found in statistics["tokens"].items()]
    yield f"{split}: tokens at p50/p90/p99/max: {', '.join(lengths)}"
    effective = statistics.get("effective_share")
    if effective is None:
        yield f"{split}: coverage {statistics['coverage']:.4f}; weights are computed at each step"
    else:
        arrived = WeightCoverage(*(statistics[name] for name in ("coverage", *COLUMNS)))
        yield f"{split}: {arrived.describe()}, effective share of weights {effective:.3f}"


def describe_plan(pairs: int, plan: BatchPlan, settings: TrainerSettings, kept: CallbackSettings) -> str:
    """Describes how pairs are grouped into optimiser steps, and when the run validates and saves."""
    processes = planned_processes(settings)
    accumulation = plan.accumulation_steps(processes)
    cut = f" = {plan.pairs_per_forward} per forward x {accumulation} accumulated x"
    if plan.tokens is not None:
        cut = f", at most {plan.tokens} tokens per forward on"
    each = count_steps(pairs, plan.pairs, processes)
    epochs, ends = settings.max_epochs, ""
    if settings.max_steps > 0 and epochs > 0:
        ends = f" (trainer.max_steps ends the run; trainer.max_epochs={epochs} would take {epochs * each})"
    saving = f"; last/ also every {kept.save_every} steps" if kept.checkpoints and kept.save_every else ""
    return (
        f"steps: {plan.pairs} pairs each{cut} {processes} process{'' if processes == 1 else 'es'}; "
        f"{each} per epoch, {total_steps(settings, each)} in total{ends}; "
        f"validation{' and saving' if kept.checkpoints else ''} every {settings.validate_every} and at the end{saving}"
    )


def log_inputs(inputs: Inputs, statistics: Mapping[str, Json]) -> None:
    """Logs the statistics from ``example_statistics``: counts, lengths, coverage and the judge's accuracy."""
    for split in SPLITS:
        found = cast(dict[str, Any], statistics[split])
        for line in describe_split(inputs, split, found):
            log.info("%s", line)
        if "warning" in found:
            log.warning("%s: %s", split, found["warning"])
    if inputs.overlap is not None:
        log.log(logging.WARNING if inputs.overlap.warning() else logging.INFO, "val: %s", inputs.overlap.summary())
    log_weight_summary(inputs.weighed)


def log_plan(
    examples: ExampleSet,
    plan: BatchPlan,
    settings: TrainerSettings,
    kept: CallbackSettings,
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    """Logs the number of training steps, the validation schedule, and the first example with its weights."""
    log.info("%s", describe_plan(len(examples.examples), plan, settings, kept))
    for line in describe_example(examples.examples[0], tokenizer) if examples.examples else []:
        log.info("%s", line)


def _count_cut_prompts(weighed: WeightingResult) -> dict[str, dict[str, int]]:
    """Counts the judge's or scorers' prompts, and how many of them were truncated."""
    if weighed.report is None:
        return {}
    found: dict[str, dict[str, int]] = {}
    if "judge" in weighed.source.requires:
        found["judge_prompts"] = {"read": weighed.rounds, "cut": weighed.cut}
    if "scorers" in weighed.source.requires:
        found["scorers"] = {"pairs": len(weighed.captured), "cut": weighed.cut}
    return found


def log_weight_summary(weighed: WeightingResult) -> None:
    """Logs statistics of the weighting: truncated prompts, thinking traces, judge accuracy and verbalizer answers."""
    cut_prompts = _count_cut_prompts(weighed)
    if (cut := cut_prompts.get("judge_prompts", {})).get("cut"):
        log.warning("%(cut)d of %(read)d judge prompts were truncated to judge.max_length", cut)
    if (cut := cut_prompts.get("scorers", {})).get("cut"):
        log.warning(
            "%(cut)d of %(pairs)d prompts were truncated after the scorer instruction was added (see lengths)", cut
        )
    if weighed.traces is not None:
        log.info("%s", weighed.traces.describe_lengths())
        if (problem := weighed.traces.describe_cut_traces()) is not None:
            log.warning("%s", problem)
    verdicts = weighed.verdicts
    if verdicts is not None and verdicts.pairs:
        for line in judge_summary_lines(verdicts):
            log.info("%s", line)
        if (warning := judge_warning(verdicts)) is not None:
            log.warning("warning: %s", warning)
    if weighed.answers is not None:
        for line in describe_answers(weighed.answers):
            log.info("%s", line)


def require_examples(split: str, made: ExampleSet, processes: int) -> None:
    """Checks that a split can be trained on.

    Raises UserError if no pairs are left, if all pairs have weight 0, or if there are fewer pairs than processes.
    """
    if made.read and not made.examples:
        events = "; ".join(f"{event}: {count}" for event, count in sorted(made.tally.counts.items()))
        raise UserError(
            f"{split}: all {made.read} pairs were dropped ({events}): change the settings that dropped them (weights, "
            "align.min_coverage, lengths) or the data"
        )
    pairs = len(made.examples)
    if pairs and not get_pair_weights(made.examples).any():
        nothing = "trained" if split == "train" else "measured and best/ would be selected based on a loss of 0"
        raise UserError(
            f"{split}: all {pairs} pairs have weight 0 (either the pair weight is 0, or all token weights in both "
            f"responses are 0), so nothing would be {nothing}: choose other weights or data"
        )
    if 0 < pairs < processes:
        raise UserError(
            f"{split}: {pairs} {'pair' if pairs == 1 else 'pairs'} for {processes} processes, but each process needs "
            f"at least one: use more pairs (data.{split}_rows), or start fewer processes"
        )


def require_budgets(examples: Mapping[str, ExampleSet], layout: str, plan: BatchPlan) -> None:
    """Checks the token budgets before the data module does; assumes the cheapest layout for ``auto``."""
    budgets = {"train": ("tokens", plan.token_budget), "val": ("eval_tokens", plan.eval_token_budget)}
    for split, (key, budget) in budgets.items():
        check_token_budget(examples[split].examples, COSTS.get(layout, SHARED_PREFIX), budget, f"batch.{key}")


def describe_answers(answers: VerbalizerStatistics) -> Iterator[str]:
    """Yields log lines about how many of the verbalizer's answers are usable, and why the rest are not."""
    yield (
        f"verbalizer: {answers.parse_rate:.1%} of {answers.answers} answers contain a usable part ({answers.parts} "
        f"parts in total); on average, {answers.coverage:.1%} of a response's tokens have a score"
    )
    for reason, count in answers.problems.items():
        yield f"verbalizer: {reason}: {count}"
    if answers.lost:
        yield f"verbalizer: {answers.lost} answers are no longer in the store, but their scores still are"


ROW_WIDTH = 24  # tokens


def describe_example(example: TrainingExample, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Describes an example: the end of the prompt, then each response's first ``ROW_WIDTH`` tokens as text|weight.

    Weights are relative to uniform: a distribution is multiplied by |y|, and a factor is shown as is. A dot marks a
    token of weight 0.
    """
    lines = [
        f"row 0, pair {example.pair_id[:8]}, prompt (masked): ...{tokenizer.decode(example.chosen.prompt_ids[-40:])!r}"
    ]
    both = zip(SIDES, example.sides, example.weights, example.lengths, example.weight_scales, strict=True)
    for name, side, row, length, scale in both:
        scaled = (row * scale).tolist()
        parts = [
            f"{tokenizer.decode([token])!r}|{'.' if weight == 0 else f'{weight:.2f}'}"
            for token, weight in zip(side.response_ids[:ROW_WIDTH], scaled, strict=False)
        ]
        more = f" ... {len(scaled) - ROW_WIDTH} more" if len(scaled) > ROW_WIDTH else ""
        lines.append(
            f"row 0, {name}, {len(scaled)} tokens, weights w sum to {float(torch.sum(row)):.3f}, |y| is {length:g}; "
            f"each token is shown with {'its factor' if example.factors else '|y| w'} (uniform: 1): "
            f"{' '.join(parts)}{more}"
        )
    return lines


log = logging.getLogger(__name__)

SAMPLE = 200
"""Number of pairs used to measure stored layers. Measuring 32 layers takes seconds, however large the store is."""


def describe_lost_weights(
    source: WeightSource,
    reader: WeightReader | None,
    align: AlignMethod,
    rows: Sequence[StoredRow],
    arrived: WeightCoverage,
    tally: Tally,
) -> str | None:
    """Returns a warning if many of the weights of ``rows`` match no training token, else None.

    The warning names settings that can help. Weights computed on the training tokens can only be lost to length limits,
    which are logged separately.
    """
    if source.tokens == "train" or not arrived.is_low:
        return None
    helps = []
    if isinstance(reader, RunJudge):
        same = reader.settings.assembly is Assembly.TEXT
        helps += ["judge.assembly=ids (for a judge with the model's tokenizer)"] * same
        helps.append("a different judge prompt (judge.template_file)")
    if align is AlignMethod.LEVENSHTEIN:
        helps.append("align.method=characters")
    cut = sum(tally.count_starting_with(words.format(side)) for words in (CUT, CUT_IN_FRONT) for side in SIDES)
    cuts = f", and so are the weights of the {cut} pieces that lengths.max_length cut from responses" if cut else ""
    what = f". These settings can help: {', '.join(helps)}" if helps else ""
    return (
        f"weights of {describe_weight_origin(source, rows)}: {arrived.describe()}; the weights of tokens that match no "
        f"training token are lost{cuts}{what}"
    )


def describe_weight_origin(source: WeightSource, rows: Sequence[StoredRow]) -> str:
    """Describes the weight source, with its layers if it has any."""
    layers = sorted({row.layer if isinstance(row, HeadRow) else row for row in rows} - {0})
    name = type(source).__name__
    return f"{name}, layer{'s' * (len(layers) > 1)} {', '.join(map(str, layers))}" if layers else name


def log_coverage_by_layer(readers: Readers, weighed: WeightingResult, encoded: EncodedSet, align: AlignRules) -> None:
    """Logs each stored layer's coverage and share of weights retained, on a sample of pairs and without transforms."""
    pairs = select_calibration_pairs([pair for pair in encoded.pairs if pair.pair_id in weighed.captured], SAMPLE)
    sample = sample_as_splits(encoded, pairs)["train"]
    source, rows, captured = weighed.source, weighed.layers, weighed.captured
    reader = readers.make_reader(source)
    stored = source.layers_to_store(weighed.depth)
    sources = [source]
    if rows == (getattr(source, "layer", None),) and len(stored) > 1:
        sources = [replace(source, layer=layer) for layer in stored]  # type: ignore[type-var]
        table = readers.base.store.table(WEIGHTS, weighed.key)
        rows, captured = stored, load_captured(table, [pair.pair_id for pair in pairs], stored)
    for one in sources if pairs else ():
        made = prepare_examples(sample, one, captured, align, rows)
        if not made.examples:
            continue  # the data's counts already show why all were dropped
        arrived, read = WeightCoverage.mean_over(made.examples), one.rows_to_read()
        log.info(
            "weights of %s: %s (%d pairs)", describe_weight_origin(one, read), arrived.describe(), len(made.examples)
        )
        if (lost := describe_lost_weights(one, reader, align.method, read, arrived, made.tally)) is not None:
            log.warning("%s", lost)
