"""Judge passport: measures the quality of a judge's verdicts and attention on labelled pairs, before training.

Margins are log-odds (nats) of the chosen answer's label over the rejected answer's label. A matrix of margins has one
row per pair and one column per order: the chosen answer is shown first in the first column and second in the second
column. The verdict on a pair is the mean of its two margins.
"""

import json
import logging
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from jaxtyping import Float

from attnpo.cli.terminal import command_text
from attnpo.config.compose import to_yaml
from attnpo.data.base import PairSet
from attnpo.data.prepare import EncodedSet, ExampleSet, Tally, prepare_examples, sample_as_splits
from attnpo.data.prepared import read_pairs
from attnpo.data.rules import AlignRules
from attnpo.display.output import make_console, print_sections
from attnpo.display.page import Banner, CodeBlock, KeyValues, Paragraph, Section, TableBlock, report_page
from attnpo.display.tables import DEFAULT_DIGITS, Cell, format_cell
from attnpo.evaluation.intervals import t_quantile
from attnpo.judge.base import JudgeModel, JudgeReading, LoadedJudge
from attnpo.judge.judge import RunJudge
from attnpo.judge.layers import StoredRow, distinct_layers, layers_with_attention
from attnpo.judge.verdicts import CUT as TRACE_CUT
from attnpo.judge.verdicts import (
    ENOUGH,
    JudgeStanding,
    JudgeStatistics,
    LabelMass,
    count_most_frequent,
    describe_accuracy,
    describe_texts,
    is_silent,
    judge_standing,
    judge_statistics,
    pairs_with_verdicts,
    trace_statistics,
    verdict_margin,
    wilson_interval,
)
from attnpo.lab.auto_layer import pool_splits, replace_layers
from attnpo.lab.reports.output import MARK, check_output_folder
from attnpo.lab.reports.passport_config import PassportConfig, PassportSettings
from attnpo.lab.reports.weight_report import model_label
from attnpo.lab.studies.faithfulness import decisive_mass, equal_rankings, layer_source
from attnpo.lab.testbed.grammar import Grammar
from attnpo.lab.testbed.importance import is_flipped
from attnpo.run.folders import make_folder
from attnpo.run.input_summary import describe_lost_weights
from attnpo.run.inputs import encode_splits
from attnpo.run.resolve import resolve
from attnpo.schema import SIDES, PairWeights, PreferencePair, UserError, digest
from attnpo.system.files import folder_size, format_bytes, write_atomically, write_record
from attnpo.system.locks import folder_lock
from attnpo.system.machine import package_versions
from attnpo.system.processes import world_size
from attnpo.system.store import Store
from attnpo.weights.arrival import WeightCoverage
from attnpo.weights.base import WeightSource
from attnpo.weights.capture import UnreadablePair, ensure_captured
from attnpo.weights.faithfulness import Rankings, RemovalMode, RemovalSettings, measure_token_removal, rank_tokens
from attnpo.weights.postprocess import effective_token_count

log = logging.getLogger(__name__)

STEM = "passport"
WARM = 2  # warm-up prompts: the first forward also probes how the model can be read
LEVEL = 0.95
IDEAL_DRAWS = 500  # simulated outcomes of a perfectly calibrated judge; their mean is exact to a few percent
Margins = Float[np.ndarray, "pairs 2"]
Passport = dict[str, Any]
"""Content of passport.json by key (see ``measure_judge``); unknown values are NaN or None."""


def write_passport(cfg: PassportConfig) -> Path:
    """Prints the passport of the configured judge and writes it as an HTML page and a JSON file; returns its folder.

    Neither trains nor writes to the store. Raises UserError if the judge cannot be measured.
    """
    if world_size() > 1:
        raise UserError(f"the passport runs in a single process, but {world_size()} were started: start only one")
    log.info("%s", command_text("evaluate", "benchmark=judge", *cfg.composed.arguments()))
    folder, mark = cfg.report_folder(), cfg.command_digest()
    make_folder(folder)
    with folder_lock(folder, float(cfg.lock_timeout)):
        check_output_folder(folder, mark)
        run, base, readers, built = resolve(cfg)
        judge, grammar = readers.make_judge(), getattr(run.truth, "grammar", None)
        labels = judge.prompts.label_ids  # raises early for invalid labels
        pairs = read_pairs(run.data, run.weights, base.store)
        if not any(found.pairs for found in pairs.values()):
            rows = sum(found.read for found in pairs.values())
            raise UserError(
                f"passport: expected labelled pairs, but found none in {rows} rows of both splits; check data.path, "
                "data.train_rows and data.columns"
            )
        encoded = encode_splits(pairs, base, run.lengths).encoded
        judged = judge_sample(judge, base.device, run.weights, run.align, pool_splits(encoded), run.passport)
        known = grammar if isinstance(grammar, Grammar) else None
        found = measure_judge(judged, labels, pairs, encoded, known, run.passport)
        setting = run.composed.choices.get("setting", "prepared") if built else None
        title = f"Judge passport: {model_label(run.judge, base.spec, setting)}"
        content = {"judge": judge.path, "rule": RULE, **found, "versions": package_versions()}
        text = json.dumps(content, default=asdict)
        write_atomically(folder / MARK, json.dumps({"mark": mark}) + "\n")
        write_record(folder / f"{STEM}.json", json.loads(text, parse_constant=lambda _: None))  # null for NaN
        about = Section("Versions and configuration", [KeyValues(package_versions()), CodeBlock(to_yaml(run.values))])
        write_atomically(folder / f"{STEM}.html", report_page(title, [*passport_sections(found), about]))
        console = make_console()
        console.print(title, highlight=False, markup=False, style="bold")
        print_sections(console, passport_sections(found, short=True))
        console.print(f"  {folder}/{STEM}.html, {STEM}.json", highlight=False, markup=False)
    return folder


# ------------------------------------------------------------------------------------------------ judging a sample


class RecordingJudge:
    """Wrapper around a judge that records prompt lengths, the probability of both labels, and the time in seconds."""

    def __init__(self, judge: JudgeModel) -> None:
        self.judge, self.num_layers = judge, judge.num_layers
        self.lengths: list[int] = []
        self.masses: list[float] = []
        self.seconds = 0.0

    def read(self, prompts: Sequence[Sequence[int]], **how: Any) -> list[JudgeReading]:
        """Reads the prompts with the wrapped judge and returns its readings."""
        if not self.lengths:
            self.judge.read(prompts[:WARM], **how)
        began = time.perf_counter()
        found = self.judge.read(prompts, **how)
        self.seconds += time.perf_counter() - began
        self.lengths += [len(prompt) for prompt in prompts]
        self.masses += [reading.label_mass for reading in found if reading.label_mass is not None]
        return found


@dataclass(frozen=True)
class JudgedSample:
    """Sample of pairs that the judge has read.

    ``layered``: weight source that reads one layer. ``align``: rules that align the weights with the training tokens.
    ``shown``: pairs of the sample that could be shown to the judge. ``rows``: names of the captured attention rows.
    ``recorder``: wrapped judge that recorded the pass. ``cost``: cost of a judge pass over all pairs, extrapolated from
    the ``measured`` prompts of the sample; ``store`` is in bytes, and ``loading`` is the time to load the judge once,
    in seconds.
    """

    layered: WeightSource
    align: AlignRules
    judge: RunJudge
    loaded: LoadedJudge
    sample: list[PreferencePair]
    shown: list[PreferencePair]
    captured: Mapping[str, PairWeights]
    rows: tuple[StoredRow, ...]
    recorder: RecordingJudge
    cost: dict[str, Any]

    @cached_property
    def captured_by_id(self) -> dict[str, PairWeights]:
        """Returns the captured rounds of the pairs that were shown to the judge, by pair id."""
        return {pair.pair_id: self.captured[pair.pair_id] for pair in self.shown}

    def source_for_layer(self, layer: int) -> WeightSource:
        """Returns the run's weight source, set to read ``layer``."""
        return replace_layers(self.layered, layer).resolve(self.judge.num_layers)


def draw_sample(pairs: Sequence[PreferencePair], count: int, seed: int) -> list[PreferencePair]:
    """Draws ``count`` distinct pairs with ``seed``, or all if there are fewer; their order does not affect the draw."""
    unique = {pair.pair_id: pair for pair in pairs}
    return [unique[pair_id] for pair_id in sorted(unique, key=lambda pair_id: digest([seed, pair_id]))[:count]]


def judge_sample(
    judge: RunJudge,
    device: torch.device,
    source: WeightSource,
    align: AlignRules,
    pool: EncodedSet,
    settings: PassportSettings,
) -> JudgedSample:
    """Judges a sample of the pairs as a run would, but with a temporary store.

    The temporary store keeps times and sizes independent of the run's own store. Raises UserError if no pair can be
    shown to the judge.
    """
    sample = draw_sample(pool.pairs, settings.pairs, settings.seed)
    pairs = len({pair.pair_id for pair in pool.pairs})
    log.info("passport: judging %d of %d pairs in both orders", len(sample), pairs)
    began = time.perf_counter()
    loaded = replace(judge.load(device, keep=False), verdict=True)
    loading = time.perf_counter() - began
    recorder, layered = RecordingJudge(loaded.model), layer_source(source)
    every = list(layers_with_attention(judge.num_layers))
    source = replace_layers(layered, every[0], every).resolve(judge.num_layers)
    rows = source.rows_to_store(judge.num_layers, lambda: judge.num_heads)
    asked, progress = replace(loaded, model=recorder), partial(log.info, "passport: judged %d of %d pairs")
    with TemporaryDirectory(prefix="attnpo-passport-") as folder:
        store, key = Store(Path(folder)), {"passport": judge.path}
        kept, _ = ensure_captured(sample, source, rows, store, key, lambda: asked, verdicts=True, progress=progress)
        captured = dict(kept)
        size = folder_size(Path(folder))
    shown = [pair for pair in sample if captured[pair.pair_id].rounds]
    if not shown:
        first = captured[sample[0].pair_id]
        story = first.story if isinstance(first, UnreadablePair) else "no verdict was captured"
        raise UserError(
            f"passport: none of the {len(sample)} pairs can be shown to the judge; reason for the first one, pair "
            f"{first.pair_id}: {story}"
        )
    scale = 2 * pairs / len(recorder.lengths)
    cost = {
        "pairs": pairs,
        "prompts": 2 * pairs,
        "tokens": round(scale * sum(recorder.lengths)),
        "seconds": scale * recorder.seconds,
        "store": round(scale * size),
        "measured": len(recorder.lengths),
        "loading": loading,
    }
    return JudgedSample(
        layered, align, judge, loaded, sample, shown, captured, rows, recorder, cost | {"device": str(device)}
    )


# ------------------------------------------------------------------------------------------------ measuring


def measure_judge(
    judged: JudgedSample,
    labels: tuple[int, int],
    pairs: Mapping[str, PairSet],
    encoded: Mapping[str, EncodedSet],
    grammar: Grammar | None,
    settings: PassportSettings,
) -> Passport:
    """Computes the passport of a judge from the sample that it judged. Each pair counts once, with both orders.

    ``grammar``: grammar of the pairs if their true reward is known, else None. Keys of the result:

    - ``no_label``: share of verdicts whose most likely token is not a label.
    - ``label_mass``, ``label_mass_low``: mean and lowest decile of the probability of both labels at the verdict
      position.
    - ``written``: most likely tokens at that position as text, with the number of prompts for each.
    - ``answer_tokens``: share of a prompt's tokens that belong to the answers, which is also their share of uniform
      attention.
    - ``full``: mean log-odds of the judge's verdict on whole responses, an upper bound on the drop.
    - ``coverage``, ``source_coverage``: shares of the training tokens, and of the judge's tokens, that are aligned.
    - ``cost``: cost of a judge pass over all pairs; ``removals`` counts the extra prompts with removed tokens.
    - ``rows``, ``data``: number of rows read, and number of rows dropped before judging, by reason.
    - ``counts``: how often anything in the sample was truncated, skipped or flagged, by kind.
    - ``truth``: label errors and verdict accuracy according to the true reward, and the share of uniform weights on
      decisive tokens.
    """
    judge, read, pool = judged.judge, list(judged.captured_by_id.values()), pool_splits(encoded)
    rounds = [item for pair in read for item in pair.rounds]
    asked = distinct_layers(settings.layers, judge.num_layers, "passport.layers")
    numbers = list(asked) or list(layers_with_attention(judge.num_layers))
    ranked = {
        layer: rank_tokens(judged.source_for_layer(layer), judged.captured_by_id, judged.rows) for layer in numbers
    }
    fits = sample_as_splits(replace(pool, tally=Tally(), read=len(judged.sample)), judged.sample)["train"]
    falls, full, removals = measure_removal(ranked, judged, settings) if settings.removal_pairs else ({}, None, 0)
    looks = []
    for layer in numbers:
        made = prepare_examples(fits, judged.source_for_layer(layer), judged.captured, judged.align, judged.rows)
        looks.append(measure_layer_attention(judged, layer, ranked[layer], grammar, made) | falls.get(layer, {}))
    statistics, found = judge_statistics(read, labels), verdict_margins(read)
    masses = np.array(judged.recorder.masses).reshape(-1, 2).mean(axis=1)  # a pair's two prompts follow each other
    answers = sum(item.side(side).token_ids.numel() for item in rounds for side in SIDES)
    texts = count_most_frequent((item.verdict_token for item in rounds), judge.decode_token)
    low = LabelMass(float(masses.mean()), 2 * len(read), texts).describe_shortfall(judge.settings.min_label_mass)
    left = judged.cost["pairs"] - len(judged.sample)
    silent = [np.mean([item.verdict_token not in labels for item in pair.rounds]) for pair in read]
    dropped = Counter[str]()
    for split, kept in encoded.items():
        dropped.update(pairs[split].counts)
        dropped.update(kept.tally.counts)

    traces = None if judge.settings.trace is None else trace_statistics(read, judge.settings.trace)
    cut = {"judge prompts cut at judge.max_length": sum(item.cut for item in rounds)}
    cut[TRACE_CUT] = 0 if traces is None else traces.cut
    truth = None
    if grammar is not None:  # a verdict is right if its average picks the truly better answer
        flipped = np.array([is_flipped(pair, grammar) for pair in judged.shown])
        right = win_scores(found.mean(axis=1))
        truth = {
            "wrong_labels": estimate_proportion(flipped.astype(np.float64)),
            "accuracy": estimate_proportion(np.where(flipped, 1 - right, right)),
            "equal": decisive_mass(judged.shown, equal_rankings(ranked[numbers[0]]), grammar),
        }
    return {
        "judgement": assess_judge(statistics, {layer: row["gain"] for layer, row in falls.items()}, left, low),
        "statistics": statistics,
        "accuracy": verdict_accuracy(found),
        "calibration": measure_calibration(found, settings.bins, settings.seed),
        "no_label": estimate_proportion(np.array(silent)),
        "label_mass": estimate_mean(masses),
        "label_mass_low": float(np.quantile(masses, 0.1)) if masses.size else math.nan,
        "written": texts,
        "answer_tokens": answers / sum(judged.recorder.lengths),
        "layers": looks,
        "full": full,
        "coverage": 1 - made.unmatched_share if made.content_tokens else math.nan,
        "source_coverage": WeightCoverage.mean_over(made.examples).source_coverage,
        "cost": {**judged.cost, "removals": removals},
        "rows": sum(one.read for one in pairs.values()),
        "data": dropped,
        "counts": {**made.tally.counts, **{reason: count for reason, count in cut.items() if count}},
        "truth": truth,
    }


def measure_layer_attention(
    judged: JudgedSample, layer: int, ranked: Rankings, grammar: Grammar | None, examples: ExampleSet
) -> dict[str, Any]:
    """Measures the attention of one layer. ``examples``: the sample with its weights on the training tokens.

    Keys of the result:

    - ``mass``: attention from the verdict position to the tokens of both answers, mean over rounds; ``first`` and
      ``second``: the parts on the answer shown first and second.
    - ``effective``, ``effective_share``: effective number of final weights per response, absolute and relative.
    - ``kept_mass_chosen``, ``kept_mass_rejected``: share of the weights that reaches the training tokens; ``lost``: a
      warning if much of the weight is lost, else None.
    - ``truth``: share of the weights on tokens that decide the true reward; None if unknown.
    - ``fall``, ``random``, ``gain``: None here; ``measure_removal`` computes them.
    """
    source, arrived = judged.source_for_layer(layer), WeightCoverage.mean_over(examples.examples)
    mass = np.zeros((len(judged.captured_by_id), 2))  # on the answer shown first and second, mean over rounds
    for row, pair in zip(mass, judged.captured_by_id.values(), strict=True):
        rounds = source.select(pair, judged.rows).rounds  # with one row
        for item in rounds:
            sums = [float(item.side(side).weights[0].sum()) for side in SIDES]
            row += sums if item.chosen_is_a else sums[::-1]
        row /= len(rounds)
    weights = [torch.tensor(side.weights) for sides in ranked.values() for side in sides.values() if side.weights]
    effective = [effective_token_count(row) for row in weights]
    shares = [number / row.numel() for number, row in zip(effective, weights, strict=True)]
    return {
        "layer": layer,
        "mass": estimate_mean(mass.sum(axis=1)),
        "first": float(mass[:, 0].mean()),
        "second": float(mass[:, 1].mean()),
        "effective": sum(effective) / max(1, len(effective)),
        "effective_share": sum(shares) / max(1, len(shares)),
        "kept_mass_chosen": arrived.kept_mass_chosen,
        "kept_mass_rejected": arrived.kept_mass_rejected,
        "lost": describe_lost_weights(source, judged.judge, judged.align.method, (layer,), arrived, examples.tally),
        **dict.fromkeys(("fall", "random", "gain")),
        "truth": None if grammar is None else decisive_mass(judged.shown, ranked, grammar),
    }


def measure_removal(
    ranked: Mapping[int, Rankings], judged: JudgedSample, settings: PassportSettings
) -> tuple[dict[int, dict[str, Any]], float, int]:
    """Measures how much the verdict depends on each layer's top-weighted tokens, compared with random tokens.

    Returns the results by layer, the mean log-odds on whole responses, and the number of prompts. ``fall``: drop in the
    verdict's log-odds (nats, mean over shares) when the top-weighted tokens are removed. ``random``: drop when random
    tokens at similar positions are removed instead. ``gain``: their difference, with an interval that holds for all
    layers jointly.
    """
    removal = RemovalSettings(settings.shares, settings.draws, settings.seed, (RemovalMode.REMOVE,))
    sample, judge, prompts = judged.shown[: settings.removal_pairs], judged.loaded.model, judged.loaded.prompts
    log.info("passport: removing tokens from %d pairs in %d layers", len(sample), len(ranked))
    progress = partial(log.info, "passport: %d of %d judge prompts done")
    found = measure_token_removal(
        sample, {str(layer): rows for layer, rows in ranked.items()}, judge, prompts, removal, progress
    )
    falls = {}
    for layer in ranked:
        fall = float(np.mean([found.log_odds_drop(str(layer), share).mean() for share in settings.shares]))
        gain = estimate_mean(found.mean_advantages(str(layer)), bonferroni_level(len(ranked)))
        falls[layer] = {"fall": fall, "random": fall - gain.value, "gain": gain}
    return falls, float(found.full.mean()), found.prompts


# ------------------------------------------------------------------------------------------------ verdicts


@dataclass(frozen=True)
class Estimate:
    """Estimated value with its interval and sample size; both bounds are NaN if there is no interval."""

    value: float
    low: float
    high: float
    count: int

    def interval(self, digits: int = DEFAULT_DIGITS) -> str:
        """Formats the interval as "LOW to HIGH"; empty if there is none."""
        return "" if math.isnan(self.low) else f"{format_cell(self.low, digits)} to {format_cell(self.high, digits)}"

    def table_row(self, name: str) -> list[Cell]:
        """Returns the cells of a table row: name, value, interval, number of pairs."""
        return [name, self.value, self.interval(), f"{self.count} pairs"]


def verdict_margins(captured: Sequence[PairWeights]) -> Margins:
    """Returns the margins of all pairs that have a verdict in both orders."""
    rows = [
        [verdict_margin(item) for item in sorted(pair.rounds, key=lambda item: not item.chosen_is_a)]
        for pair in pairs_with_verdicts(captured)
        if sorted(item.chosen_is_a for item in pair.rounds) == [False, True]
    ]
    return np.array(rows, dtype=np.float64).reshape(-1, 2)


def estimate_proportion(values: Float[np.ndarray, " cases"]) -> Estimate:
    """Returns the mean of values between 0 and 1 with Wilson's 95 % interval."""
    value = float(values.mean()) if values.size else math.nan
    return Estimate(value, *(wilson_interval(value, values.size) if values.size else (math.nan, math.nan)), values.size)


def estimate_mean(values: Float[np.ndarray, " cases"], level: float = LEVEL) -> Estimate:
    """Returns the mean of values with Student's t interval; no interval for fewer than two values."""
    value, reach = float(values.mean()) if values.size else math.nan, math.nan
    if values.size > 1:
        error = float(values.std(ddof=1)) / math.sqrt(values.size)
        reach = t_quantile((1 + level) / 2, values.size - 1) * error
    return Estimate(value, value - reach, value + reach, values.size)


def win_scores(values: Float[np.ndarray, "*shape"]) -> Float[np.ndarray, "*shape"]:
    """Returns 1 for a positive margin, 0 for a negative one, and one half for a tie."""
    return np.asarray((np.sign(values) + 1) / 2)


def verdict_accuracy(found: Margins) -> dict[str, Estimate]:
    """Returns the share of verdicts that pick the chosen answer, by order and averaged; ties count one half.

    ``first_picked``: share of verdicts for the answer shown first; one half if there is no position bias. ``pull``:
    mean log-odds of the first answer over both orders, in nats. ``agree``: share of pairs with the same pick in both
    orders. Intervals are over pairs.
    """
    picked = win_scores(found)
    return {
        "chosen_first": estimate_proportion(picked[:, 0]),
        "chosen_second": estimate_proportion(picked[:, 1]),
        "averaged": estimate_proportion(win_scores(found.mean(axis=1))),
        "first_picked": estimate_mean((picked[:, 0] + 1 - picked[:, 1]) / 2),
        "pull": estimate_mean((found[:, 0] - found[:, 1]) / 2),
        "agree": estimate_proportion((found[:, 0] * found[:, 1] > 0).astype(np.float64)),
    }


def measure_calibration(found: Margins, bins: int = 10, seed: int = 0) -> dict[str, Any]:
    """Measures the judge's calibration in ``bins`` equal confidence bins from one half to 1.

    Confidence is the probability of the answer that the averaged verdict picks, normalised over the two labels. Keys of
    the result: ``bins``: non-empty bins from ``low`` to ``high`` with mean confidence and accuracy. ``error``: expected
    calibration error, the mean over pairs of the distance between their bin's accuracy and confidence (Guo et al. 2017,
    section 2). ``ideal``: the error of a perfectly calibrated judge with the same confidences, which is above 0 by
    chance; its outcomes are drawn with ``seed``. ``excess``: mean confidence minus accuracy; positive for an
    overconfident judge. Raises UserError if there are no bins or no pairs.
    """
    if bins < 1:
        raise UserError(f"calibration: expected at least 1 bin, got {bins}")
    if not len(found):
        raise UserError("calibration: expected at least one pair with verdicts, got none")
    verdict = found.mean(axis=1)
    sure = 1 / (1 + np.exp(-np.abs(verdict)))
    right = win_scores(verdict)
    place = np.minimum(((sure - 0.5) * 2 * bins).astype(int), bins - 1)
    drawn = np.random.default_rng(seed).random((IDEAL_DRAWS, len(sure))) < sure
    error, ideal, rows = 0.0, 0.0, []
    for number in np.unique(place).tolist():
        inside = place == number
        confidence, part = float(sure[inside].mean()), inside.mean()
        low, high = 0.5 + number / (2 * bins), 0.5 + (number + 1) / (2 * bins)
        rows.append(
            {"low": low, "high": high, "confidence": confidence, "accuracy": estimate_proportion(right[inside])}
        )
        error += part * abs(float(right[inside].mean()) - confidence)
        ideal += part * float(np.abs(drawn[:, inside].mean(axis=1) - confidence).mean())
    excess = float(sure.mean() - right.mean())
    return {"bins": rows, "error": float(error), "ideal": float(ideal), "excess": excess}


# ------------------------------------------------------------------------------------------------ assessment


READING, CHANCE, DOUBTFUL = "worth reading", "at chance", "doubtful"
RULE = (
    "worth reading: the 95 % interval (Wilson) of the accuracy over both orders is above one half, at most half of "
    "the verdicts name no label, and in at least one layer the verdict falls more without the top-weighted tokens than "
    "without random tokens at the same positions (joint 95 % interval of all layers above 0). At chance: the interval "
    "of the accuracy contains one half. Doubtful: anything else"
)
ADVICE = {
    JudgeStanding.CHANCE: "try another judge or prompt (judge=..., other_judge.path with judge=other); until one is "
    "above chance, train with weights=uniform",
    JudgeStanding.BELOW: "check which column of the data holds the preferred answer, and check judge.labels",
    JudgeStanding.FEW: f"provide at least {ENOUGH} labelled pairs",
}


@dataclass(frozen=True)
class JudgeAssessment:
    """Overall rating of a judge in words, with reasons and advice."""

    worth: str
    reasons: list[str]
    advice: list[str]


def bonferroni_level(layers: int) -> float:
    """Returns the confidence level per layer at which all intervals jointly hold at 95 % (Bonferroni)."""
    return 1 - (1 - LEVEL) / layers


def assess_judge(
    verdicts: JudgeStatistics, gains: Mapping[int, Estimate], left: int = 0, problem: str | None = None
) -> JudgeAssessment:
    """Rates the judge by ``RULE``.

    ``gains``: for each layer, how much more the verdict's log-odds drop when the top-weighted tokens are removed than
    when random tokens are. Empty if this was not measured, which does not lower the rating. ``left``: number of
    labelled pairs that are not in the sample. ``problem``: a further reason for doubt.
    """
    standing, silent = judge_standing(verdicts), is_silent(verdicts)
    tied = [layer for layer, gain in gains.items() if gain.low > 0]
    reasons, advice = [describe_accuracy(verdicts)], [ADVICE[standing]] if standing in ADVICE else []
    if standing in (JudgeStanding.CHANCE, JudgeStanding.FEW) and left:
        advice.append(f"judge more pairs (passport.pairs): {left} have not been judged yet")
    if silent:
        reasons.append(f"{100 * verdicts.other_tokens:.0f} % of its verdicts name no label")
        advice.append(
            "try a different prompt or different labels (judge=..., judge.template_file, judge.labels), because the "
            "judge does not answer as asked"
        )
    depends = "depends on the top-weighted tokens more than on random ones"
    if not gains:
        reasons.append("the verdict's dependence on the attended tokens was not measured (passport.removal_pairs=0)")
    elif tied:
        which = f"in {len(tied)} of {len(gains)} layers ({', '.join(map(str, tied))})"
        reasons.append(f"its verdict {depends} {which}")
    else:
        reasons.append(f"its verdict {depends} in none of the {len(gains)} layers")
    worth = CHANCE if standing is JudgeStanding.CHANCE else DOUBTFUL
    if standing is JudgeStanding.ABOVE and gains and not tied:
        advice.append(
            "measuring more pairs (passport.removal_pairs) may reveal a layer that matters; until then, compare with "
            "transform=shuffled, or use weights=uniform"
        )
    elif standing is JudgeStanding.ABOVE and not silent:
        worth = READING
        best = max(tied, key=lambda layer: (gains[layer].value, layer), default=None)
        begin = f"start with weights.layer={best}, the layer whose top-weighted tokens the verdict depends on most; "
        compare = "also train with weights=uniform and transform=shuffled, since a good judge does not guarantee a gain"
        advice.append(compare if best is None else begin + compare)
    return JudgeAssessment(worth, [*reasons, *([problem] if problem else [])], advice)


# ------------------------------------------------------------------------------------------------ page


OF_VERDICTS = {
    "averaged": "correct, both orders averaged",
    "chosen_first": "correct, chosen answer first",
    "chosen_second": "correct, chosen answer second",
    "agree": "same pick in both orders",
    "first_picked": "picks the first answer",
    "pull": "log-odds of the first answer",
}


def passport_sections(found: Passport, *, short: bool = False) -> list[Section]:
    """Returns the passport as page sections, rating first. ``short``: whether to fit an 80-column terminal."""
    shown = [
        _assessment_section(found["judgement"], short),
        _verdicts_section(found),
        _layers_section(found, short),
        _cost_section(found),
    ]
    if short:
        return shown
    return [
        *shown[:2],
        _calibration_section(found["calibration"]),
        *shown[2:],
        Section(f"Rows dropped before judging (of {found['rows']} read)", [_counts_block(found["data"])]),
        Section("Truncated, skipped or flagged in the sample", [_counts_block(found["counts"])]),
    ]


def _counts_block(counts: Mapping[str, int]) -> KeyValues | Paragraph:
    return KeyValues(counts) if counts else Paragraph("None.")


def _assessment_section(told: JudgeAssessment, short: bool) -> Section:
    lines = [("why", reason) for reason in told.reasons] + [("next", advice) for advice in told.advice]
    texts = [f"{word if short else word.capitalize()}: {text}" for word, text in lines]
    texts += [] if short else [f"The rule. {RULE[0].upper()}{RULE[1:]}."]
    banner = Banner(told.worth.capitalize(), told.worth == READING)
    return Section("Is the judge worth reading?", [banner, *map(Paragraph, texts)])


def _verdicts_section(found: Passport) -> Section:
    told, mass, truth = found["calibration"], found["label_mass"], found["truth"]
    rows: list[list[Cell]] = [
        *(found["accuracy"][key].table_row(name) for key, name in OF_VERDICTS.items()),
        found["no_label"].table_row("verdict is not a label"),
        mass.table_row("probability of both labels"),
        ["the same, lowest decile", found["label_mass_low"], "", f"{mass.count} pairs"],
        ["calibration error (ECE)", told["error"], "", f"perfect: {told['ideal']:.3f}"],
        ["confidence minus accuracy", told["excess"], "", f"{found['accuracy']['averaged'].count} pairs"],
    ]
    if truth is not None:
        rows.append(truth["wrong_labels"].table_row("wrong labels by the true reward"))
        rows.append(truth["accuracy"].table_row("correct by the true reward"))
    texts = Paragraph(f"Most likely text at the verdict position: {describe_texts(found['written'], 2 * mass.count)}.")
    return Section("Verdicts against the labels", [TableBlock(("", "value", "95 % interval", "of"), rows), texts])


def _calibration_section(told: Mapping[str, Any]) -> Section:
    rows: list[list[Cell]] = [
        [f"{one['low']:.2f} to {one['high']:.2f}", right.count, one["confidence"], right.value, right.interval()]
        for one in told["bins"]
        for right in [one["accuracy"]]
    ]
    about = (
        "Pairs by confidence of the averaged verdict (over the two labels only), and their share of correct verdicts. "
        f"Expected calibration error {told['error']:.3f}; a perfectly calibrated judge with the same confidences "
        f"would show {told['ideal']:.3f} by chance on as many pairs."
    )
    table = TableBlock(("confidence", "pairs", "mean confidence", "correct", "95 % interval"), rows)
    return Section("Calibration", [Paragraph(about), table])


def _layers_section(found: Passport, short: bool) -> Section:
    rows = [_layer_cells(look, short) for look in found["layers"]]
    notes = [
        "answers: attention from the verdict position to both answers, which make up "
        f"{100 * found['answer_tokens']:.0f} % of the prompt's tokens; effective: effective number of weights divided "
        "by the number of tokens"
    ]
    if (full := found["full"]) is not None:
        notes.append(
            f"fall: drop in the verdict's log-odds ({full:.3f} nats) without the top-weighted tokens; random: drop "
            "without random tokens at the same positions; gain: the difference, with an interval that holds for all "
            "layers jointly"
        )
    if (truth := found["truth"]) is not None:
        notes.append(f"true: share of the weights on decisive tokens; for equal weights it is {truth['equal']:.3f}")
    lost = [Paragraph(f"WARNING: {look['lost']}", warning=True) for look in found["layers"] if look["lost"] is not None]
    return Section("Layers", [TableBlock(list(rows[0]), rows), *map(Paragraph, notes), *lost])


def _layer_cells(look: Mapping[str, Any], short: bool) -> dict[str, Cell]:
    mass, gain = look["mass"], look["gain"]
    cells: dict[str, Cell] = {"layer": look["layer"], "answers": mass.value}
    if not short:
        cells |= {"95 % interval": mass.interval(), "on the first": look["first"], "on the second": look["second"]}
        cells |= {"effective number": look["effective"]}
        cells |= {f"kept {side}": look[f"kept_mass_{side}"] for side in SIDES}
    cells["effective"] = look["effective_share"]
    if gain is not None:
        cells |= {"fall": look["fall"], "random": look["random"], "gain": gain.value}
        cells["its interval"] = gain.interval(2 if short else DEFAULT_DIGITS)
    return cells if look["truth"] is None else {**cells, "true": look["truth"]}


def _cost_section(found: Passport) -> Section:
    cost = found["cost"]
    cells: dict[str, Cell] = {
        "prompts (two per pair)": cost["prompts"],
        "prompt tokens": cost["tokens"],
        "seconds": f"{cost['seconds']:.1f} on {cost['device']}, plus {cost['loading']:.1f} to load the judge",
        "size in the store": format_bytes(cost["store"]),
        "coverage of the training tokens": found["coverage"],
        "coverage of the judge's tokens": found["source_coverage"],
    }
    more = f"the passport itself read another {cost['removals']} prompts with tokens removed"
    return Section(
        f"Estimated judge pass over all {cost['pairs']} usable pairs of {found['rows']} rows, "
        f"from {cost['measured']} prompts",
        [KeyValues(cells), *([Paragraph(more)] if cost["removals"] else [])],
    )
