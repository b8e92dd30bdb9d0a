"""Passport of the judge: what its verdicts and its attention are worth, measured on labelled pairs before training.

Margins are log-odds in nats of the chosen answer's label over the rejected one's: a row per pair, the first column with
the chosen answer shown first, the second with it shown second. A verdict of a pair is the mean of its two margins.
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
from attnpo.lab.auto_layer import at_layers, pool_splits
from attnpo.lab.reports.output import MARK, check_free
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
WARM = 2  # prompts read before the clock starts: the first forward also tries how the model can be read
LEVEL = 0.95
IDEAL_DRAWS = 500  # of the outcomes of a perfectly calibrated judge: the mean over them is good to a few percent
Margins = Float[np.ndarray, "pairs 2"]
Passport = dict[str, Any]
"""Content of passport.json, by its keys (``measure_judge``); numbers that are not known are NaN or None."""


def write_passport(cfg: PassportConfig) -> Path:
    """Prints the passport of the configured judge and writes it as one page and one JSON; returns its folder.

    Nothing is trained, and nothing is put into the store. UserError for what cannot be measured.
    """
    if world_size() > 1:
        raise UserError(f"the passport was started with {world_size()} processes; it works alone: start it as one")
    log.info("%s", command_text("evaluate", "benchmark=judge", *cfg.composed.arguments()))
    folder, mark = cfg.folder(), cfg.mark()
    make_folder(folder)
    with folder_lock(folder, float(cfg.lock_timeout)):
        check_free(folder, mark)
        run, base, readers, built = resolve(cfg)
        judge, grammar = readers.make_judge(), getattr(run.truth, "grammar", None)
        labels = judge.prompts.label_ids  # refuses labels before anything is read
        pairs = read_pairs(run.data, run.weights, base.store)
        if not any(found.pairs for found in pairs.values()):
            rows = sum(found.read for found in pairs.values())
            raise UserError(
                f"passport: expected labelled pairs, got none from {rows} rows of both splits: see data.path, "
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
        write_atomically(folder / f"{STEM}.html", report_page(title, [*sections(found), about]))
        console = make_console()
        console.print(title, highlight=False, markup=False, style="bold")
        print_sections(console, sections(found, short=True))
        console.print(f"  {folder}/{STEM}.html, {STEM}.json", highlight=False, markup=False)
    return folder


# ------------------------------------------------------------------------------------------------ judging a sample


class RecordingJudge:
    """Judge that passes on what it is asked and records prompt lengths, the mass on the labels and the seconds."""

    def __init__(self, judge: JudgeModel) -> None:
        self.judge, self.num_layers = judge, judge.num_layers
        self.lengths: list[int] = []
        self.masses: list[float] = []
        self.seconds = 0.0

    def read(self, prompts: Sequence[Sequence[int]], **how: Any) -> list[JudgeReading]:
        """Returns the judge's own readings."""
        if not self.lengths:
            self.judge.read(prompts[:WARM], **how)
        began = time.perf_counter()
        found = self.judge.read(prompts, **how)
        self.seconds += time.perf_counter() - began
        self.lengths += [len(prompt) for prompt in prompts]
        self.masses += [reading.label_mass for reading in found if reading.label_mass is not None]
        return found


@dataclass(frozen=True)
class Judged:
    """Sample as the judge read it: ``shown`` are the pairs it could be shown, ``rows`` names what was captured.

    ``layered``: weights that read a layer. ``align``: the rules by which they are carried onto the training tokens.
    ``cost``: what the pass over all pairs takes, extrapolated from the ``measured`` prompts of the sample by their
    number; ``store`` in bytes, ``loading`` the seconds to load the judge, once.
    """

    layered: WeightSource
    align: AlignRules
    judge: RunJudge
    loaded: LoadedJudge
    sample: list[PreferencePair]
    shown: list[PreferencePair]
    captured: Mapping[str, PairWeights]
    rows: tuple[StoredRow, ...]
    heard: RecordingJudge
    cost: dict[str, Any]

    @cached_property
    def read(self) -> dict[str, PairWeights]:
        """Returns what was captured of the pairs shown, by id."""
        return {pair.pair_id: self.captured[pair.pair_id] for pair in self.shown}

    def source(self, layer: int) -> WeightSource:
        """Returns the run's weights where they read ``layer``."""
        return at_layers(self.layered, layer).resolve(self.judge.num_layers)


def draw_sample(pairs: Sequence[PreferencePair], count: int, seed: int) -> list[PreferencePair]:
    """Returns ``count`` different pairs, drawn by ``seed`` whatever their order; all where there are fewer."""
    unique = {pair.pair_id: pair for pair in pairs}
    return [unique[pair_id] for pair_id in sorted(unique, key=lambda pair_id: digest([seed, pair_id]))[:count]]


def judge_sample(
    judge: RunJudge,
    device: torch.device,
    source: WeightSource,
    align: AlignRules,
    pool: EncodedSet,
    settings: PassportSettings,
) -> Judged:
    """Returns the judge pass over a sample of the pairs, as a run makes it, into a store that is thrown away.

    So that times and sizes are measured whatever the run's own store holds. UserError when the judge can be shown no
    pair.
    """
    sample = draw_sample(pool.pairs, settings.pairs, settings.seed)
    pairs = len({pair.pair_id for pair in pool.pairs})
    log.info("passport: judging %d of %d pairs in both orders", len(sample), pairs)
    began = time.perf_counter()
    loaded = replace(judge.load(device, keep=False), verdict=True)
    loading = time.perf_counter() - began
    heard, layered = RecordingJudge(loaded.model), layer_source(source)
    every = list(layers_with_attention(judge.num_layers))
    source = at_layers(layered, every[0], every).resolve(judge.num_layers)
    rows = source.rows_to_store(judge.num_layers, lambda: judge.num_heads)
    asked, progress = replace(loaded, model=heard), partial(log.info, "passport: %d of %d pairs")
    with TemporaryDirectory(prefix="attnpo-passport-") as folder:
        store, key = Store(Path(folder)), {"passport": judge.path}
        kept, _ = ensure_captured(sample, source, rows, store, key, lambda: asked, verdicts=True, progress=progress)
        captured = dict(kept)
        size = folder_size(Path(folder))
    shown = [pair for pair in sample if captured[pair.pair_id].rounds]
    if not shown:
        first = captured[sample[0].pair_id]
        story = first.story if isinstance(first, UnreadablePair) else "it has no rounds"
        raise UserError(
            f"passport: the judge can be shown none of {len(sample)} pairs; the first, pair {first.pair_id}: {story}"
        )
    scale = 2 * pairs / len(heard.lengths)
    cost = {
        "pairs": pairs,
        "prompts": 2 * pairs,
        "tokens": round(scale * sum(heard.lengths)),
        "seconds": scale * heard.seconds,
        "store": round(scale * size),
        "measured": len(heard.lengths),
        "loading": loading,
    }
    return Judged(layered, align, judge, loaded, sample, shown, captured, rows, heard, cost | {"device": str(device)})


# ------------------------------------------------------------------------------------------------ measuring


def measure_judge(
    judged: Judged,
    labels: tuple[int, int],
    pairs: Mapping[str, PairSet],
    encoded: Mapping[str, EncodedSet],
    grammar: Grammar | None,
    settings: PassportSettings,
) -> Passport:
    """Returns everything the passport says of a judge that has read its sample; pairs count once, with both orders.

    ``grammar``: of pairs whose truth is known. ``no_label``: verdicts whose most likely token is no label.
    ``label_mass``: probability of both labels at the verdict position, and what its lowest tenth lies below.
    ``written``: the texts that the judge would write there, most likely tokens alone, with the number of prompts.
    ``answer_tokens``: the answers' share of a prompt's tokens, which attention spread evenly would give them. ``full``:
    mean log-odds of the judge's own verdict, the most that can fall. ``coverage``, ``source_coverage``: shares of the
    training tokens, and of the judge's, with a partner. ``cost``: of the judge pass over all pairs; ``removals`` are
    prompts with tokens removed, which belong to the passport alone. ``rows`` were read, and ``data`` tells by reason
    what became of them before any was judged; ``counts`` what was cut, left out or noticed on the sample. ``truth``:
    the labels and the verdicts by the truth, and equal weights on what decides.
    """
    judge, read, pool = judged.judge, list(judged.read.values()), pool_splits(encoded)
    rounds = [item for pair in read for item in pair.rounds]
    asked = distinct_layers(settings.layers, judge.num_layers, "passport.layers")
    numbers = list(asked) or list(layers_with_attention(judge.num_layers))
    ranked = {layer: rank_tokens(judged.source(layer), judged.read, judged.rows) for layer in numbers}
    fits = sample_as_splits(replace(pool, tally=Tally(), read=len(judged.sample)), judged.sample)["train"]
    falls, full, removals = measure_removal(ranked, judged, settings) if settings.removal_pairs else ({}, None, 0)
    looks = []
    for layer in numbers:
        made = prepare_examples(fits, judged.source(layer), judged.captured, judged.align, judged.rows)
        looks.append(look_at(judged, layer, ranked[layer], grammar, made) | falls.get(layer, {}))
    statistics, found = judge_statistics(read, labels), margins(read)
    masses = np.array(judged.heard.masses).reshape(-1, 2).mean(axis=1)  # a pair's two prompts follow each other
    answers = sum(item.side(side).token_ids.numel() for item in rounds for side in SIDES)
    texts = count_most_frequent((item.verdict_token for item in rounds), judge.decode_token)
    low = LabelMass(float(masses.mean()), 2 * len(read), texts).describe_shortfall(judge.settings.min_label_mass)
    left = judged.cost["pairs"] - len(judged.sample)
    silent = [np.mean([item.verdict_token not in labels for item in pair.rounds]) for pair in read]
    dropped = Counter[str]()
    for split, kept in encoded.items():
        dropped.update(pairs[split].counts)
        dropped.update(kept.tally.counts)
    # What was cut, left out or noticed on the sample, by reason.
    traces = None if judge.settings.trace is None else trace_statistics(read, judge.settings.trace)
    cut = {"judge prompts cut at judge.max_length": sum(item.cut for item in rounds)}
    cut[TRACE_CUT] = 0 if traces is None else traces.cut
    truth = None
    if grammar is not None:  # a pair is right where the averaged verdict picks the answer that is truly better
        flipped = np.array([is_flipped(pair, grammar) for pair in judged.shown])
        right = wins(found.mean(axis=1))
        truth = {
            "wrong_labels": share(flipped.astype(np.float64)),
            "accuracy": share(np.where(flipped, 1 - right, right)),
            "equal": decisive_mass(judged.shown, equal_rankings(ranked[numbers[0]]), grammar),
        }
    return {
        "judgement": assess_judge(statistics, {layer: row["gain"] for layer, row in falls.items()}, left, low),
        "statistics": statistics,
        "accuracy": accuracy(found),
        "calibration": calibration(found, settings.bins, settings.seed),
        "no_label": share(np.array(silent)),
        "label_mass": mean(masses),
        "label_mass_low": float(np.quantile(masses, 0.1)) if masses.size else math.nan,
        "written": texts,
        "answer_tokens": answers / sum(judged.heard.lengths),
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


def look_at(judged: Judged, layer: int, ranked: Rankings, grammar: Grammar | None, made: ExampleSet) -> dict[str, Any]:
    """Measures a layer: ``made`` is the sample with its weights on the training tokens.

    ``mass``: attention of the verdict position on the tokens of both answers, mean over rounds; ``first`` and
    ``second``: its parts by place. ``effective``: effective number of finished weights on a response's tokens, and
    ``effective_share`` over their number. ``kept_mass_chosen``, ``kept_mass_rejected``: share of the weights that
    arrives on training tokens; ``lost``: a warning where much of it does not. ``truth``: share of the weights on tokens
    that truly decide, where that is known. ``fall``, ``random`` and ``gain`` are left to ``measure_removal``.
    """
    source, arrived = judged.source(layer), WeightCoverage.mean_over(made.examples)
    mass = np.zeros((len(judged.read), 2))  # on the answer shown first and second, mean over rounds
    for row, pair in zip(mass, judged.read.values(), strict=True):
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
        "mass": mean(mass.sum(axis=1)),
        "first": float(mass[:, 0].mean()),
        "second": float(mass[:, 1].mean()),
        "effective": sum(effective) / max(1, len(effective)),
        "effective_share": sum(shares) / max(1, len(shares)),
        "kept_mass_chosen": arrived.kept_mass_chosen,
        "kept_mass_rejected": arrived.kept_mass_rejected,
        "lost": describe_lost_weights(source, judged.judge, judged.align.method, (layer,), arrived, made.tally),
        **dict.fromkeys(("fall", "random", "gain")),
        "truth": None if grammar is None else decisive_mass(judged.shown, ranked, grammar),
    }


def measure_removal(
    ranked: Mapping[int, Rankings], judged: Judged, settings: PassportSettings
) -> tuple[dict[int, dict[str, Any]], float, int]:
    """Measures by layer what the verdict loses without the tokens weighted most and without random ones.

    ``fall``, ``random``: by how many nats the verdict's log-odds fall without the top-weighted tokens and without
    random ones of the same places, means over shares; ``gain``: their difference, at the level that holds for all
    layers together. Beside them the mean log-odds with whole responses, and how many prompts it took.
    """
    removal = RemovalSettings(settings.shares, settings.draws, settings.seed, (RemovalMode.REMOVE,))
    sample, judge, prompts = judged.shown[: settings.removal_pairs], judged.loaded.model, judged.loaded.prompts
    log.info("passport: removing tokens of %d pairs in %d layers", len(sample), len(ranked))
    progress = partial(log.info, "passport: %d of %d judge prompts")
    found = measure_token_removal(
        sample, {str(layer): rows for layer, rows in ranked.items()}, judge, prompts, removal, progress
    )
    falls = {}
    for layer in ranked:
        fall = float(np.mean([found.log_odds_drop(str(layer), share).mean() for share in settings.shares]))
        gain = mean(found.mean_advantages(str(layer)), layer_level(len(ranked)))
        falls[layer] = {"fall": fall, "random": fall - gain.value, "gain": gain}
    return falls, float(found.full.mean()), found.prompts


# ------------------------------------------------------------------------------------------------ verdicts


@dataclass(frozen=True)
class Estimate:
    """Number with its interval and the units it stands on; NaN at both ends where nothing gives an interval."""

    value: float
    low: float
    high: float
    count: int

    def interval(self, digits: int = DEFAULT_DIGITS) -> str:
        """Returns the interval in words, empty where there is none."""
        return "" if math.isnan(self.low) else f"{format_cell(self.low, digits)} to {format_cell(self.high, digits)}"

    def cells(self, name: str) -> list[Cell]:
        """Returns a row of a table: the number under its name, its interval and how many pairs."""
        return [name, self.value, self.interval(), f"{self.count} pairs"]


def margins(captured: Sequence[PairWeights]) -> Margins:
    """Returns the margins of the pairs with a verdict in each of two orders."""
    rows = [
        [verdict_margin(item) for item in sorted(pair.rounds, key=lambda item: not item.chosen_is_a)]
        for pair in pairs_with_verdicts(captured)
        if sorted(item.chosen_is_a for item in pair.rounds) == [False, True]
    ]
    return np.array(rows, dtype=np.float64).reshape(-1, 2)


def share(values: Float[np.ndarray, " cases"]) -> Estimate:
    """Returns the mean of values from 0 to 1 with Wilson's 95 % interval."""
    value = float(values.mean()) if values.size else math.nan
    return Estimate(value, *(wilson_interval(value, values.size) if values.size else (math.nan, math.nan)), values.size)


def mean(values: Float[np.ndarray, " cases"], level: float = LEVEL) -> Estimate:
    """Returns the mean of any values with Student's t interval; without one for fewer than two values."""
    value, reach = float(values.mean()) if values.size else math.nan, math.nan
    if values.size > 1:
        error = float(values.std(ddof=1)) / math.sqrt(values.size)
        reach = t_quantile((1 + level) / 2, values.size - 1) * error
    return Estimate(value, value - reach, value + reach, values.size)


def wins(values: Float[np.ndarray, "*shape"]) -> Float[np.ndarray, "*shape"]:
    """Returns 1 for a margin above 0, 0 below, one half for a tie."""
    return np.asarray((np.sign(values) + 1) / 2)


def accuracy(found: Margins) -> dict[str, Estimate]:
    """Returns the shares of verdicts that pick the chosen answer (a tie counts as half), by order and over both.

    ``first_picked``: verdicts that pick the answer shown first; one half for a judge without a liking for a place.
    ``pull``: the mean log-odds of the first answer over both orders, in nats. ``agree``: pairs whose orders pick the
    same answer. Intervals are over pairs.
    """
    picked = wins(found)
    return {
        "chosen_first": share(picked[:, 0]),
        "chosen_second": share(picked[:, 1]),
        "averaged": share(wins(found.mean(axis=1))),
        "first_picked": mean((picked[:, 0] + 1 - picked[:, 1]) / 2),
        "pull": mean((found[:, 0] - found[:, 1]) / 2),
        "agree": share((found[:, 0] * found[:, 1] > 0).astype(np.float64)),
    }


def calibration(found: Margins, bins: int = 10, seed: int = 0) -> dict[str, Any]:
    """Measures whether the judge is right as often as it is sure, in ``bins`` equal bins from one half to 1.

    Confidence is the probability that the logits give to the answer the averaged verdict picks, of the two labels
    alone. ``bins``: those that hold pairs, from ``low`` to ``high``, with mean confidence and the share that is right.
    ``error``: the expected calibration error, the mean over pairs of the distance of their bin's accuracy from its
    confidence (Guo et al. 2017, section 2). ``ideal``: what a perfectly calibrated judge of the same confidences shows
    on as many pairs, which is above 0 by chance alone; ``seed`` draws its outcomes. ``excess``: mean confidence minus
    accuracy; above 0 the judge is too sure. UserError for fewer than one bin, or no pair.
    """
    if bins < 1:
        raise UserError(f"calibration: expected at least 1 bin, got {bins}")
    if not len(found):
        raise UserError("calibration: expected at least one pair with verdicts, got none")
    verdict = found.mean(axis=1)
    sure = 1 / (1 + np.exp(-np.abs(verdict)))
    right = wins(verdict)
    place = np.minimum(((sure - 0.5) * 2 * bins).astype(int), bins - 1)
    drawn = np.random.default_rng(seed).random((IDEAL_DRAWS, len(sure))) < sure
    error, ideal, rows = 0.0, 0.0, []
    for number in np.unique(place).tolist():
        inside = place == number
        confidence, part = float(sure[inside].mean()), inside.mean()
        low, high = 0.5 + number / (2 * bins), 0.5 + (number + 1) / (2 * bins)
        rows.append({"low": low, "high": high, "confidence": confidence, "accuracy": share(right[inside])})
        error += part * abs(float(right[inside].mean()) - confidence)
        ideal += part * float(np.abs(drawn[:, inside].mean(axis=1) - confidence).mean())
    excess = float(sure.mean() - right.mean())
    return {"bins": rows, "error": float(error), "ideal": float(ideal), "excess": excess}


# ------------------------------------------------------------------------------------------------ the answer


READING, CHANCE, DOUBTFUL = "worth reading", "at chance", "doubtful"
RULE = (
    "worth reading: the 95 % interval (Wilson) of the accuracy over both orders lies above one half, at most half of "
    "the verdicts name no label, and in at least one layer the verdict falls more without the top-weighted tokens than "
    "without random ones of the same places (95 % interval over all layers together above 0). At chance: the interval "
    "of the accuracy holds one half. Doubtful: anything else"
)
ADVICE = {
    JudgeStanding.CHANCE: "take another judge or wording (judge=..., other_judge.path with judge=other); until one is "
    "above chance, train with weights=uniform",
    JudgeStanding.BELOW: "check which column of the data holds the preferred answer, and judge.labels",
    JudgeStanding.FEW: f"give at least {ENOUGH} labelled pairs",
}


@dataclass(frozen=True)
class Judgement:
    """Verdict on a judge in words, with its reasons and what to do next."""

    worth: str
    reasons: list[str]
    advice: list[str]


def layer_level(layers: int) -> float:
    """Returns the level of each layer's interval at which all of them together hold at 95 % (Bonferroni)."""
    return 1 - (1 - LEVEL) / layers


def assess_judge(
    verdicts: JudgeStatistics, gains: Mapping[int, Estimate], left: int = 0, problem: str | None = None
) -> Judgement:
    """Returns the verdict by ``RULE``.

    ``gains``: by layer how much more the verdict falls without top-weighted than without random tokens; empty where
    that was not measured, which is said and does not count against the judge. ``left``: labelled pairs that are not in
    the sample. ``problem``: one more reason for doubt.
    """
    standing, silent = judge_standing(verdicts), is_silent(verdicts)
    tied = [layer for layer, gain in gains.items() if gain.low > 0]
    reasons, advice = [describe_accuracy(verdicts)], [ADVICE[standing]] if standing in ADVICE else []
    if standing in (JudgeStanding.CHANCE, JudgeStanding.FEW) and left:
        advice.append(f"judge more pairs: {left} are left (passport.pairs)")
    if silent:
        reasons.append(f"{100 * verdicts.other_tokens:.0f} % of its verdicts name no label")
        advice.append(
            "try another wording or labels (judge=..., judge.template_file, judge.labels): it does not answer as it is "
            "asked to"
        )
    hangs = "on the top-weighted tokens more than on random ones"
    if not gains:
        reasons.append("whether its verdict hangs on what it looks at was not measured (passport.removal_pairs=0)")
    elif tied:
        which = f"in {len(tied)} of {len(gains)} layers ({', '.join(map(str, tied))})"
        reasons.append(f"its verdict hangs {hangs} {which}")
    else:
        reasons.append(f"in none of {len(gains)} layers does its verdict hang {hangs}")
    worth = CHANCE if standing is JudgeStanding.CHANCE else DOUBTFUL
    if standing is JudgeStanding.ABOVE and gains and not tied:
        advice.append(
            "more pairs may show a layer that counts (passport.removal_pairs); until then compare with "
            "transform=shuffled, or take weights=uniform"
        )
    elif standing is JudgeStanding.ABOVE and not silent:
        worth = READING
        best = max(tied, key=lambda layer: (gains[layer].value, layer), default=None)
        begin = f"begin with weights.layer={best}, whose top-weighted tokens the verdict hangs on most; "
        compare = "train beside weights=uniform and transform=shuffled, since a good judge does not promise a gain"
        advice.append(compare if best is None else begin + compare)
    return Judgement(worth, [*reasons, *([problem] if problem else [])], advice)


# ------------------------------------------------------------------------------------------------ the page


OF_VERDICTS = {
    "averaged": "right, both orders averaged",
    "chosen_first": "right, chosen answer first",
    "chosen_second": "right, chosen answer second",
    "agree": "orders pick the same answer",
    "first_picked": "picks the first answer",
    "pull": "log-odds of the first answer",
}


def sections(found: Passport, *, short: bool = False) -> list[Section]:
    """Returns the passport for a page, or ``short`` for a terminal of 80 columns: the verdict first."""
    shown = [_verdict(found["judgement"], short), _verdicts(found), _layers(found, short), _cost(found)]
    if short:
        return shown
    return [
        *shown[:2],
        _calibration(found["calibration"]),
        *shown[2:],
        Section(f"What became of {found['rows']} rows before judging", [_counts(found["data"])]),
        Section("What was cut, left out or noticed in the sample", [_counts(found["counts"])]),
    ]


def _counts(counts: Mapping[str, int]) -> KeyValues | Paragraph:
    return KeyValues(counts) if counts else Paragraph("Nothing was dropped or cut.")


def _verdict(told: Judgement, short: bool) -> Section:
    lines = [("why", reason) for reason in told.reasons] + [("next", advice) for advice in told.advice]
    texts = [f"{word if short else word.capitalize()}: {text}" for word, text in lines]
    texts += [] if short else [f"The rule. {RULE[0].upper()}{RULE[1:]}."]
    banner = Banner(told.worth.capitalize(), told.worth == READING)
    return Section("Is the judge worth reading?", [banner, *map(Paragraph, texts)])


def _verdicts(found: Passport) -> Section:
    told, mass, truth = found["calibration"], found["label_mass"], found["truth"]
    rows: list[list[Cell]] = [
        *(found["accuracy"][key].cells(name) for key, name in OF_VERDICTS.items()),
        found["no_label"].cells("verdict is no label"),
        mass.cells("probability of both labels"),
        ["the same, lowest tenth below", found["label_mass_low"], "", f"{mass.count} pairs"],
        ["calibration error (ECE)", told["error"], "", f"perfect: {told['ideal']:.3f}"],
        ["confidence minus accuracy", told["excess"], "", f"{found['accuracy']['averaged'].count} pairs"],
    ]
    if truth is not None:
        rows.append(truth["wrong_labels"].cells("labels that are truly wrong"))
        rows.append(truth["accuracy"].cells("right by the truth, averaged"))
    texts = Paragraph(f"Written at the verdict position: {describe_texts(found['written'], 2 * mass.count)}.")
    return Section("Verdicts against the labels", [TableBlock(("", "value", "95 % interval", "of"), rows), texts])


def _calibration(told: Mapping[str, Any]) -> Section:
    rows: list[list[Cell]] = [
        [f"{one['low']:.2f} to {one['high']:.2f}", right.count, one["confidence"], right.value, right.interval()]
        for one in told["bins"]
        for right in [one["accuracy"]]
    ]
    about = (
        "Pairs by how sure the averaged verdict is (of the two labels alone), against the share that is right. "
        f"Expected calibration error {told['error']:.3f}; a perfectly calibrated judge of the same confidences "
        f"shows {told['ideal']:.3f} on so many pairs by chance."
    )
    table = TableBlock(("confidence", "pairs", "mean confidence", "right", "95 % interval"), rows)
    return Section("Calibration", [Paragraph(about), table])


def _layers(found: Passport, short: bool) -> Section:
    rows = [_layer_cells(look, short) for look in found["layers"]]
    notes = [
        f"answers: attention of the verdict position on both answers, which have {100 * found['answer_tokens']:.0f} % "
        "of the prompt's tokens; effective: effective number of weights over the number of tokens"
    ]
    if (full := found["full"]) is not None:
        notes.append(
            f"fall: nats that the verdict's log-odds ({full:.3f}) fall without the top-weighted tokens, beside "
            "random ones of the same places; gain: the difference, with the interval that holds for all layers together"
        )
    if (truth := found["truth"]) is not None:
        notes.append(f"true: share of the weights on what decides; equal weights have {truth['equal']:.3f}")
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


def _cost(found: Passport) -> Section:
    cost = found["cost"]
    cells: dict[str, Cell] = {
        "prompts (two a pair)": cost["prompts"],
        "prompt tokens": cost["tokens"],
        "seconds": f"{cost['seconds']:.1f} on {cost['device']}, and {cost['loading']:.1f} to load the judge",
        "in the store": format_bytes(cost["store"]),
        "coverage of the training tokens": found["coverage"],
        "coverage of the judge's tokens": found["source_coverage"],
    }
    more = f"the passport itself read {cost['removals']} more prompts, with tokens removed"
    return Section(
        f"Judge pass over all {cost['pairs']} pairs that fit ({found['rows']} rows), from {cost['measured']} prompts",
        [KeyValues(cells), *([Paragraph(more)] if cost["removals"] else [])],
    )
