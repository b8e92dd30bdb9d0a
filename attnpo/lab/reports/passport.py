"""The judge's passport: what its verdicts and its attention are worth, measured on labelled pairs before training."""

import json
import logging
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

from attnpo.cli.terminal import command_text
from attnpo.config.compose import as_yaml
from attnpo.data.base import PairReader, PairSet
from attnpo.data.prepare import EncodedSet, ExampleSet, Tally, prepare_examples, sample_of
from attnpo.data.reading import read_pairs
from attnpo.data.rules import AlignRules
from attnpo.display.output import print_sections, terminal
from attnpo.display.page import report_page
from attnpo.judge.base import JudgeModel, JudgeReading, LoadedJudge
from attnpo.judge.judge import RunJudge
from attnpo.judge.label_mass import LabelMass, written
from attnpo.judge.layers import Row, attending, distinct_layers
from attnpo.judge.trace_lengths import CUT as TRACE_CUT
from attnpo.judge.trace_lengths import trace_statistics
from attnpo.judge.verdicts import judge_statistics
from attnpo.lab.analysis.passport import (
    Margins,
    accuracy,
    calibration,
    judge_the_judge,
    layer_level,
    margins,
    mean,
    share,
    won,
)
from attnpo.lab.auto_layer import at_layers, pooled
from attnpo.lab.reports.output import check_free
from attnpo.lab.reports.passport_config import PassportConfig, PassportSettings
from attnpo.lab.reports.passport_page import about, sections
from attnpo.lab.reports.passport_record import Cost, LayerLook, Passport, Truth
from attnpo.lab.reports.report_config import MARK
from attnpo.lab.reports.weight_report import model_label
from attnpo.lab.studies.faithfulness import by_layer, true_mass
from attnpo.lab.testbed.grammar import Grammar
from attnpo.lab.testbed.importance import is_flipped
from attnpo.run.folders import make_folder
from attnpo.run.inputs import encode
from attnpo.run.lost_weights import describe_loss
from attnpo.run.resolve import resolve
from attnpo.schema import SIDES, PairWeights, PreferencePair, UserError, digest
from attnpo.system.files import folder_size, write_record, write_whole
from attnpo.system.locks import locked
from attnpo.system.machine import versions
from attnpo.system.processes import world_size
from attnpo.system.store import Store
from attnpo.weights.arrival import Arrival
from attnpo.weights.base import WeightSource
from attnpo.weights.capture import Unreadable, ensure_captured
from attnpo.weights.faithfulness import Mode, Rankings, Removal, measure, rankings
from attnpo.weights.postprocess import effective_number

log = logging.getLogger(__name__)

STEM = "passport"
WARM = 2  # prompts read before the clock starts: the first forward also tries how the model can be read


# ------------------------------------------------------------------------------------------------ what is measured


class Listening:
    """A judge that passes on what it is asked and keeps account: prompt lengths, mass on the labels, seconds."""

    def __init__(self, judge: JudgeModel) -> None:
        self.judge = judge
        self.lengths: list[int] = []
        self.masses: list[float] = []
        self.seconds = 0.0

    @property
    def num_layers(self) -> int:
        """Depth of the model."""
        return self.judge.num_layers

    def read(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        layers: Sequence[int],
        per_head: bool = False,
        rollout: bool = False,
        verdict: bool = True,
        label_ids: tuple[int, int] | None = None,
    ) -> list[JudgeReading]:
        """Returns the judge's own readings."""
        asked = partial(
            self.judge.read, layers=layers, per_head=per_head, rollout=rollout, verdict=verdict, label_ids=label_ids
        )
        if not self.lengths:
            asked(prompts[:WARM])
        began = time.perf_counter()
        found = asked(prompts)
        self.seconds += time.perf_counter() - began
        self.lengths += [len(prompt) for prompt in prompts]
        self.masses += [reading.label_mass for reading in found if reading.label_mass is not None]
        return found


@dataclass(frozen=True)
class Judged:
    """The sample as the judge read it: ``shown`` are the pairs it could be shown, ``rows`` names what was captured.

    ``layered``: weights that read a layer. ``align``: the rules by which they are carried onto the training tokens.
    ``size``: bytes that the rows took on disk; ``loading``: seconds.
    """

    layered: WeightSource
    align: AlignRules
    device: torch.device
    judge: RunJudge
    loaded: LoadedJudge
    sample: list[PreferencePair]
    shown: list[PreferencePair]
    captured: Mapping[str, PairWeights]
    rows: tuple[Row, ...]
    heard: Listening
    size: int
    loading: float

    @property
    def read(self) -> dict[str, PairWeights]:
        """Returns what was captured of the pairs shown, by id."""
        return {pair.pair_id: self.captured[pair.pair_id] for pair in self.shown}

    def source(self, layer: int) -> WeightSource:
        """Returns the run's weights where they read ``layer``."""
        return at_layers(self.layered, layer).resolve(self.judge.num_layers)

    def ranked(self, layer: int) -> Rankings:
        """Returns the finished weights of ``layer`` on the judge's tokens."""
        return rankings(self.source(layer), self.read, self.rows)


# ------------------------------------------------------------------------------------------------ the command


def write_passport(cfg: PassportConfig) -> Path:
    """Prints the passport of the configured judge and writes it as one page and one JSON; returns its folder.

    Nothing is trained, and nothing is put into the store. UserError for what cannot be measured.
    """
    if world_size() > 1:
        raise UserError(f"the passport was started with {world_size()} processes; it works alone: start it as one")
    log.info("%s", command_text("evaluate", "benchmark=judge", *cfg.composed.arguments()))
    folder = cfg.folder()
    make_folder(folder)
    with locked(folder, float(cfg.lock_timeout)):
        check_free(folder, cfg.mark())
        run, base, readers, built = resolve(cfg)
        judge, truth = readers.make_judge(), getattr(run.truth, "grammar", None)
        labels = judge.prompts.label_ids  # refuses labels before anything is read
        pairs = labelled_pairs(run.data, run.weights, base.store)
        encoded = encode(pairs, base, run.lengths).encoded
        judged = judge_sample(judge, base.device, run.weights, run.align, pooled(encoded), run.passport)
        found = take(judged, labels, pairs, encoded, truth if isinstance(truth, Grammar) else None, run.passport)
        setting = run.composed.choices.get("setting", "prepared") if built else None
        title = f"Judge passport: {model_label(run.judge, base.spec, setting)}"
        _publish(title, judge.path, found, as_yaml(run.values), folder, cfg.mark())
    return folder


def _publish(title: str, judge: str, found: Passport, configuration: str, folder: Path, mark: str) -> None:
    write_whole(folder / MARK, json.dumps({"mark": mark}) + "\n")
    write_record(folder / f"{STEM}.json", {"judge": judge, **found.to_json(), "versions": versions()})
    page = report_page(title, [*sections(found), about(configuration)])
    write_whole(folder / f"{STEM}.html", page)
    console = terminal()
    console.print(title, highlight=False, markup=False, style="bold")
    print_sections(console, sections(found, short=True))
    console.print(f"  {folder}/{STEM}.html, {STEM}.json", highlight=False, markup=False)


# ------------------------------------------------------------------------------------------------ measuring


def labelled_pairs(data: PairReader, source: WeightSource, store: Store) -> dict[str, PairSet]:
    """Reads the pairs of both splits. UserError when there is none."""
    pairs = read_pairs(data, source, store)
    if not any(found.pairs for found in pairs.values()):
        rows = sum(found.read for found in pairs.values())
        raise UserError(
            f"passport: expected labelled pairs, got none from {rows} rows of both splits: see data.path, "
            "data.train_rows and data.columns"
        )
    return pairs


def take(
    judged: Judged,
    labels: tuple[int, int],
    pairs: Mapping[str, PairSet],
    encoded: Mapping[str, EncodedSet],
    grammar: Grammar | None,
    settings: PassportSettings,
) -> Passport:
    """Returns everything the passport says of a judge that has read its sample.

    ``grammar``: of pairs whose truth is known.
    """
    judge, pool = judged.judge, pooled(encoded)
    depth = judge.num_layers
    numbers = list(distinct_layers(settings.layers, depth, "passport.layers")) or list(attending(depth))
    ranked = {layer: judged.ranked(layer) for layer in numbers}
    fits = sample_of(replace(pool, tally=Tally(), read=len(judged.sample)), judged.sample)["train"]
    fitted = {
        layer: prepare_examples(fits, judged.source(layer), judged.captured, judged.align, judged.rows)
        for layer in numbers
    }
    looks = [look_at(judged, layer, ranked[layer], grammar, fitted[layer]) for layer in numbers]
    full, removals = None, 0
    if settings.removal_pairs:
        looks, full, removals = remove(looks, ranked, judged, settings)
    read = list(judged.read.values())
    statistics, found = judge_statistics(read, labels), margins(read)
    silent = [np.mean([item.verdict_token not in labels for item in pair.rounds]) for pair in read]
    masses = np.array(judged.heard.masses).reshape(-1, 2).mean(axis=1)  # a pair's two prompts follow each other
    answers = sum(item.side(side).token_ids.numel() for pair in read for item in pair.rounds for side in SIDES)
    coverage, source_coverage, counts = match(judged, fitted[numbers[-1]])
    dropped = Counter[str]()
    for split, made in encoded.items():
        dropped.update(pairs[split].counts)
        dropped.update(made.tally.counts)
    gains = {one.layer: one.gain for one in looks if one.gain is not None}
    texts = written((item.verdict_token for pair in read for item in pair.rounds), judge.written)
    low = LabelMass(float(masses.mean()), 2 * len(read), texts).problem(judge.settings.min_label_mass)
    judgement = judge_the_judge(statistics, gains, left=different(pool) - len(judged.sample))
    return Passport(
        judgement=judgement if low is None else replace(judgement, reasons=(*judgement.reasons, low)),
        statistics=statistics,
        accuracy=accuracy(found),
        calibration=calibration(found, settings.bins, settings.seed),
        no_label=share(np.array(silent)),
        label_mass=mean(masses),
        label_mass_low=float(np.quantile(masses, 0.1)) if masses.size else math.nan,
        written=texts,
        answer_tokens=answers / sum(judged.heard.lengths),
        layers=tuple(looks),
        full=full,
        coverage=coverage,
        source_coverage=source_coverage,
        cost=cost_of(judged, pool, removals),
        rows=sum(found.read for found in pairs.values()),
        data=dict(dropped),
        counts=counts,
        truth=None if grammar is None else against_truth(judged, found, ranked[numbers[0]], grammar),
    )


def drawn(pairs: Sequence[PreferencePair], count: int, seed: int) -> list[PreferencePair]:
    """``count`` different pairs, drawn by ``seed`` whatever their order; all where there are fewer."""
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
    sample = drawn(pool.pairs, settings.pairs, settings.seed)
    log.info("passport: judging %d of %d pairs in both orders", len(sample), different(pool))
    began = time.perf_counter()
    loaded = replace(judge.load(device, keep=False), verdict=True)
    loading = time.perf_counter() - began
    heard = Listening(loaded.model)
    asked, progress = replace(loaded, model=heard), partial(log.info, "passport: %d of %d pairs")
    layered = by_layer(source)
    every = list(attending(judge.num_layers))
    source = at_layers(layered, every[0], every).resolve(judge.num_layers)
    rows = source.rows_to_store(judge.num_layers, lambda: judge.num_heads)
    with TemporaryDirectory(prefix="attnpo-passport-") as folder:
        store, key = Store(Path(folder)), {"passport": judge.path}
        kept, _ = ensure_captured(sample, source, rows, store, key, lambda: asked, verdicts=True, progress=progress)
        captured = dict(kept)
        size = folder_size(Path(folder))
    shown = [pair for pair in sample if captured[pair.pair_id].rounds]
    if not shown:
        first = captured[sample[0].pair_id]
        story = first.story if isinstance(first, Unreadable) else "it has no rounds"
        raise UserError(
            f"passport: the judge can be shown none of {len(sample)} pairs; the first, pair {first.pair_id}: {story}"
        )
    return Judged(layered, align, device, judge, loaded, sample, shown, captured, rows, heard, size, loading)


def different(pool: EncodedSet) -> int:
    """Returns how many different pairs there are."""
    return len({pair.pair_id for pair in pool.pairs})


def look_at(judged: Judged, layer: int, ranked: Rankings, grammar: Grammar | None, made: ExampleSet) -> LayerLook:
    """Measures a layer: mass on the answers, effective number, and mass on what decides where that is known.

    And how much of its weights arrives on the training tokens: ``made`` is the sample with these.
    """
    source, arrived = judged.source(layer), Arrival.of(made.examples)
    selected = [source.select(pair, judged.rows) for pair in judged.read.values()]
    mass = np.array([[_on_answer(pair, first=first) for first in (True, False)] for pair in selected])
    weights = [torch.tensor(side.weights) for sides in ranked.values() for side in sides.values() if side.weights]
    effective = [effective_number(row) for row in weights]
    shares = [number / row.numel() for number, row in zip(effective, weights, strict=True)]
    return LayerLook(
        layer=layer,
        mass=mean(mass.sum(axis=1)),
        first=float(mass[:, 0].mean()),
        second=float(mass[:, 1].mean()),
        effective=sum(effective) / max(1, len(effective)),
        effective_share=sum(shares) / max(1, len(shares)),
        kept_mass_chosen=arrived.kept_mass_chosen,
        kept_mass_rejected=arrived.kept_mass_rejected,
        lost=describe_loss(source, judged.judge, judged.align.method, (layer,), arrived, made.tally),
        truth=None if grammar is None else true_mass(judged.shown, ranked, grammar),
    )


def _on_answer(pair: PairWeights, *, first: bool) -> float:
    """Attention on the answer shown first, or second, mean over rounds; ``pair`` has one row."""
    sides = ["chosen" if item.chosen_is_a is first else "rejected" for item in pair.rounds]
    sums = [float(item.side(side).weights[0].sum()) for item, side in zip(pair.rounds, sides, strict=True)]
    return sum(sums) / len(sums)


def remove(
    looks: Sequence[LayerLook], ranked: Mapping[int, Rankings], judged: Judged, settings: PassportSettings
) -> tuple[list[LayerLook], float, int]:
    """Returns the looks with what the verdict loses without top-weighted and without random tokens.

    Beside them the mean log-odds with whole responses, and how many prompts it took.
    """
    removal = Removal(settings.shares, settings.draws, settings.seed, (Mode.REMOVE,))
    sample, judge, prompts = judged.shown[: settings.removal_pairs], judged.loaded.model, judged.loaded.prompts
    log.info("passport: removing tokens of %d pairs in %d layers", len(sample), len(ranked))
    progress = partial(log.info, "passport: %d of %d judge prompts")
    sources = {str(layer): rows for layer, rows in ranked.items()}
    found = measure(sample, sources, judge, prompts, removal, progress)
    told = []
    for look in looks:
        name = str(look.layer)
        fall = float(np.mean([found.fall(name, share).mean() for share in settings.shares]))
        gain = mean(found.scores(name), layer_level(len(ranked)))
        told.append(replace(look, fall=fall, random=fall - gain.value, gain=gain))
    return told, float(found.full.mean()), found.prompts


def match(judged: Judged, made: ExampleSet) -> tuple[float, float, dict[str, int]]:
    """Returns coverage and source coverage of the sample, and what was cut, left out or noticed, by reason."""
    counts = dict(made.tally.counts)
    cut = sum(item.cut for pair in judged.read.values() for item in pair.rounds)
    if cut:
        counts["judge prompts cut at judge.max_length"] = cut
    rules = judged.judge.settings.trace
    traces = None if rules is None else trace_statistics(list(judged.read.values()), rules)
    if traces is not None and traces.cut:
        counts[TRACE_CUT] = traces.cut
    coverage = 1 - made.unmatched_share if made.content_tokens else math.nan
    return coverage, Arrival.of(made.examples).source_coverage if made.examples else math.nan, counts


def cost_of(judged: Judged, pool: EncodedSet, removals: int) -> Cost:
    """Returns what the pass over all pairs takes, by the number of prompts."""
    measured, pairs = len(judged.heard.lengths), different(pool)
    scale = 2 * pairs / measured
    return Cost(
        pairs=pairs,
        prompts=2 * pairs,
        tokens=round(scale * sum(judged.heard.lengths)),
        seconds=scale * judged.heard.seconds,
        store=round(scale * judged.size),
        measured=measured,
        loading=judged.loading,
        removals=removals,
        device=str(judged.device),
    )


def against_truth(judged: Judged, found: Margins, ranked: Rankings, grammar: Grammar) -> Truth:
    """Returns the sample against the grammar; ``found`` holds the margins of the pairs shown, in their order."""
    flipped = np.array([is_flipped(pair, grammar) for pair in judged.shown])
    right = won(found.mean(axis=1))
    equal = {
        name: {side: replace(row, weights=(1.0,) * len(row.weights)) for side, row in sides.items()}
        for name, sides in ranked.items()
    }
    return Truth(
        wrong_labels=share(flipped.astype(np.float64)),
        accuracy=share(np.where(flipped, 1 - right, right)),
        equal=true_mass(judged.shown, equal, grammar),
    )
