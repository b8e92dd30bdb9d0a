"""Implicit-reward accuracy: does a policy's own reward, log pi - log ref, order unseen pairs as their labels do?

Rafailov et al. 2023 (arXiv 2305.18290), section 4: the reward of a DPO policy is beta (log pi - log ref) up to a term
of the prompt alone. No order depends on beta, so none is asked for. Lambert et al. 2024 (RewardBench, arXiv 2403.13787)
measure it so; tokens here are those of training, with its chat format and length rules.

RewardBench's sections are facts of allenai/reward-bench, ``rewardbench/constants.py`` and
``calculate_scores_per_section`` in ``rewardbench/utils.py`` (commit 05a9005). A section is the mean of its subsets'
accuracies weighted by their numbers of pairs, but for math-prm (447 pairs), which counts 984: as much as the six code
subsets together.
"""

import logging
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from attnpo.data.adapters import Columns
from attnpo.data.base import PairReader, PairSet, PairSource
from attnpo.data.collate import TrainingExample
from attnpo.data.overlap import count_seen_prompts
from attnpo.data.prepare import encode_pairs
from attnpo.data.rules import LengthRules
from attnpo.evaluation.base import Benchmark, BenchmarkScore, Measure, Subject, UngradedResult
from attnpo.evaluation.intervals import hierarchical_bootstrap
from attnpo.models.spec import AUTO, ModelSpec
from attnpo.run.folders import find_run_of_model, load_saved_config
from attnpo.run.identity import make_identity
from attnpo.run.other_pairs import RewardFactors
from attnpo.run.run_config import RunConfig
from attnpo.schema import SIDES, PreferencePair, UserError, digest
from attnpo.weights.base import OnlineSource

if TYPE_CHECKING:
    from pandas import DataFrame, Series

log = logging.getLogger(__name__)

KEY = "benchmark."


@dataclass(frozen=True)
class UnseenPairs:
    """Pairs to be ordered (config node ``benchmark.data``); rows as ``PairSource`` reads them, all of one split.

    ``group``: the column that says which part of the set a pair belongs to, RewardBench's ``subset``; None, or a column
    that the data lack: no parts. ``subset`` and ``revision`` are for the hub. ``path`` auto stands for the validation
    pairs of the run that trained the model, as that run read them.
    """

    path: str
    split: str = "test"
    rows: str | None = None
    columns: Columns = field(default_factory=Columns)
    group: str | None = "subset"
    revision: str | None = None
    subset: str | None = None

    def unread(self) -> dict[str, str]:
        """Keys without effect: a run's own validation pairs are read as the run read them."""
        why = f"{KEY}data.path=auto: the run says which pairs these are"
        return dict.fromkeys(("split", "rows", "columns", "revision", "subset"), why) if self.path == AUTO else {}

    def load(self) -> PairSet:
        """Returns all usable pairs, with the account of every row. UserError when there is none or nothing is read."""
        source = PairSource(
            self.path, self.split, None, self.rows, None, self.columns, revision=self.revision, subset=self.subset
        )
        try:
            return source.load("train")
        except UserError as error:  # the keys of a pair set lie one level deeper here than in training
            text = re.sub(r"\bdata\.(train_)?(?=path=|split|rows|columns)", f"{KEY}data.", str(error))
            raise UserError(text) from error

    def group_of(self, pair: PreferencePair) -> str | None:
        """Returns the part of the set that a pair belongs to; None where its row names none."""
        value = None if self.group is None else pair.extra.get(self.group)
        return None if value is None or not str(value).strip() else str(value).strip()


LOG_EVERY = 10.0  # seconds between two lines on the progress

Logps = Mapping[str, tuple[Float[Tensor, " m"], Float[Tensor, " k"]]]
"""Per-token log-probabilities of chosen and rejected response, by pair id."""

PLAIN, NORMALISED, WEIGHTED = "accuracy", "accuracy_normalised", "accuracy_weighted"
POLICY, REFERENCE, PER_TOKEN = "policy_alone", "reference_alone", "_normalised"
GAIN = "gain"
OF_RUN = "required in a study, and for a model that is no best/ or last/ of a run to take it from"


GAINS = {GAIN: (PLAIN, REFERENCE), GAIN + PER_TOKEN: (NORMALISED, REFERENCE + PER_TOKEN)}
"""From the name of a score to the two rewards whose accuracies it compares."""

Weigh = Callable[[Sequence[PreferencePair]], Mapping[str, RewardFactors]]
"""Token weights of pairs by their ids; what it leaves out has none."""


class Ties(Enum):
    """Count of a pair whose answers have equal rewards: one half, or that of one that is ordered wrongly.

    RewardBench counts a pair as right where the chosen reward is above the rejected one, and as wrong otherwise
    (``scripts/run_dpo.py``).
    """

    HALF = "half"
    WRONG = "wrong"


@dataclass(frozen=True)
class ImplicitReward:
    """Share of labelled pairs that the policy's own reward orders as the label does, over all and by subset.

    ``reference``: the model that training started from; auto, as a path of ``data``, is the run's whose ``best/`` or
    ``last/`` is measured (``weighted_implicit_reward``). ``accuracy`` sums log pi - log ref over the response,
    ``accuracy_normalised`` is their mean; ``policy_alone`` and ``reference_alone`` order by log-probabilities, and
    ``gain`` is how much more the reward orders rightly than the reference alone, paired. With ``reference: null`` there
    is no such reward and ``policy_alone`` is all there is.
    """

    data: UnseenPairs
    reference: str | None
    reference_revision: str | None = None
    lengths: LengthRules = field(default_factory=LengthRules)
    ties: Ties = Ties.HALF
    name: str = "implicit_reward"

    @property
    def scores(self) -> tuple[str, ...]:
        """Returns names of the figures that every set gives; RewardBench's sections come after them."""
        alone = (POLICY, POLICY + PER_TOKEN)
        if self.reference is None:
            return alone
        return (PLAIN, NORMALISED, *alone, REFERENCE, REFERENCE + PER_TOKEN, *GAINS)

    def versions(self) -> dict[str, object]:
        """Returns the pairs themselves, the reference's weights, and the rules."""
        from attnpo.models.loading import weights_fingerprint

        self.require_paths()
        pairs = self.data.load()
        reference = None if self.reference is None else weights_fingerprint(self.reference, self.reference_revision)
        groups = [self.data.group_of(pair) for pair in pairs.pairs]
        return {
            "pairs": digest([pairs.fingerprint, groups]),
            "reference": reference,
            "lengths": _plain(self.lengths),
            "ties": self.ties.value,
        }

    def measure(self, subject: Subject) -> UngradedResult:
        """Accuracies of the plain and the length-normalised reward, with those of each model alone.

        Raises:
            UserError: pairs or reference cannot be read or have another vocabulary, the model's positions are fewer
                than ``lengths.max_length``, or a log-probability is no number.
        """
        return self.measure_with(subject)

    def measure_with(self, subject: Subject, weigh: Weigh | None = None) -> UngradedResult:
        """Returns the same; with ``weigh`` the reward whose log-ratios it weighs comes first, ``accuracy_weighted``."""
        self.require_paths()
        _require_room(subject.model, self.lengths)
        found = self.data.load()
        try:
            encoded = encode_pairs(found.pairs, subject.chat, self.lengths)
        except UserError as error:
            raise UserError(f"implicit reward: {str(error).replace('lengths.', f'{KEY}lengths.')}") from error
        (chosen, rejected), none, zeros = SIDES, torch.zeros(0), (0.0, 0.0)  # nothing weighs these examples
        examples = {
            pair.pair_id: TrainingExample(pair.pair_id, sides[chosen], sides[rejected], (none, none), zeros, zeros)
            for pair, sides in zip(encoded.pairs, encoded.encoded, strict=True)
        }
        weighed = None if weigh is None else _matching(weigh(encoded.pairs), examples)
        pad_id = subject.chat.rows.pad_id
        policy = self._score("policy", subject.model, examples, subject.device, pad_id)
        reference, notes = self._reference(subject, examples, policy, pad_id)
        if weighed is not None:
            notes["pairs without token weights"] = len(examples) - len(weighed)
        # A pair that stands there twice counts twice.
        gaps = reward_gaps(policy, reference, weighed).loc[[pair.pair_id for pair in encoded.pairs]]
        compared = {} if reference is None else GAINS
        if weighed is not None:
            compared = {**compared, f"{GAIN}_weighted": (WEIGHTED, REFERENCE)}
        orders = Orders(gaps, [self.data.group_of(pair) for pair in encoded.pairs], self.ties, compared)
        counts = {**found.counts, **found.notes, **encoded.tally.counts, **orders.account(), **notes}
        for line in encoded.tally.format_lines():
            log.warning("%s: %s", self.name, line)
        counts |= count_seen_prompts(subject.model.path, (pair.prompt for pair in encoded.pairs))
        return UngradedResult(orders.scores(), {name: count for name, count in counts.items() if count}, orders.table())

    # -------------------------------------------------------------------------------------------- models

    def require_paths(self) -> None:
        """Raises UserError where pairs or reference are still to be taken from a run."""
        for key, value in (("data.path", self.data.path), ("reference", self.reference)):
            if value == AUTO:
                raise UserError(f"{KEY}{key}: {OF_RUN}; give {KEY}{key}=FOLDER_OR_HUB_NAME")

    def _reference(
        self, subject: Subject, examples: Mapping[str, TrainingExample], policy: Logps, pad_id: int
    ) -> tuple[Logps | None, dict[str, int]]:
        from attnpo.models.loading import weights_fingerprint

        if self.reference is None:
            log.warning(
                "%sreference=null: pairs are ordered by log pi alone, which is no reward of DPO; name the model that "
                "training started from for one",
                KEY,
            )
            return None, {"pairs ordered without a reference": len(examples)}
        spec, own = subject.model, weights_fingerprint(subject.model.path, subject.model.revision)
        if weights_fingerprint(self.reference, self.reference_revision) == own:
            log.warning(
                "%sreference=%s has the same weights as model.path=%s: all rewards are 0 and every pair is a tie",
                KEY,
                self.reference,
                spec.path,
            )
            return policy, {"reference with the weights of the model": 1}
        _require_same_tokens(self.reference, self.reference_revision, subject, examples.values())
        other = ModelSpec(self.reference, self.reference_revision, spec.dtype, spec.attn_implementation)
        return self._score("reference", other, examples, subject.device, pad_id), {}

    def _score(
        self, what: str, spec: ModelSpec, examples: Mapping[str, TrainingExample], device: torch.device, pad_id: int
    ) -> Logps:
        """Returns the log-probabilities of all pairs under one model, which is let go again."""
        from attnpo.data.scoring import score_examples
        from attnpo.models.loading import load_model
        from attnpo.models.scored import ScoredLM

        model = load_model(
            spec.path, dtype=spec.dtype, attn_implementation=spec.attn_implementation, revision=spec.revision
        )
        scored = ScoredLM(model.to(device))  # type: ignore[arg-type]
        logps: dict[str, tuple[Tensor, Tensor]] = {}
        began = said = time.perf_counter()
        for pair_id, values in score_examples(scored, list(examples.values()), pad_id):
            logps[pair_id] = values
            now = time.perf_counter()
            if now - said > LOG_EVERY:
                said = now
                log.info("%s: %s, %d of %d pairs, %.0f s", self.name, what, len(logps), len(examples), now - began)
        broken = [pair_id for pair_id, sides in logps.items() if not all(bool(side.isfinite().all()) for side in sides)]
        if broken:
            raise UserError(
                f"{self.name}: the {what} {spec.path} gives log-probabilities that are no numbers for {len(broken)} of "
                f"{len(logps)} pairs (first: {broken[0]}); its weights are broken, or model.dtype={spec.dtype} is too "
                "narrow for them"
            )
        del model, scored
        torch.cuda.empty_cache()  # without effect where there is no GPU
        return logps


# ------------------------------------------------------------------------------------------------ rewards


def reward_gaps(
    policy: Logps, reference: Logps | None, weighed: Mapping[str, RewardFactors] | None = None
) -> "DataFrame":
    """Returns how far each pair's chosen response is ahead in nats, by reward: summed over tokens, and as means.

    The first are of log pi - log ref, where there is a reference; log-ratios are formed per token before any sum. With
    ``weighed`` that of ``sum_t f_t (log pi - log ref)_t`` stands before them, NaN for a pair without factors f.
    """
    from pandas import DataFrame

    rows: dict[str, dict[str, float]] = {}
    for pair_id, sides in policy.items():
        row: dict[str, float] = {}
        ours = [side.double() for side in sides]
        if reference is not None:
            theirs = [side.double() for side in reference[pair_id]]
            ratios = [one - other for one, other in zip(ours, theirs, strict=True)]
            if weighed is not None:
                factors = weighed[pair_id].factors if pair_id in weighed else (torch.tensor(float("nan")),) * 2
                made = [(f.double() * ratio).sum() for f, ratio in zip(factors, ratios, strict=True)]
                row[WEIGHTED] = float(made[0] - made[1])
            row |= _ahead(PLAIN, NORMALISED, ratios)
        row |= _ahead(POLICY, POLICY + PER_TOKEN, ours)
        if reference is not None:
            row |= _ahead(REFERENCE, REFERENCE + PER_TOKEN, theirs)
        rows[pair_id] = row
    return DataFrame.from_dict(rows, orient="index")


def _ahead(total: str, mean: str, sides: Sequence[Tensor]) -> dict[str, float]:
    chosen, rejected = (float(side.sum()) for side in sides)
    return {total: chosen - rejected, mean: chosen / len(sides[0]) - rejected / len(sides[1])}


# ------------------------------------------------------------------------------------------------ accuracies

SECTIONS: Mapping[str, Mapping[str, int]] = {
    "chat": {
        "alpacaeval-easy": 100,
        "alpacaeval-length": 95,
        "alpacaeval-hard": 95,
        "mt-bench-easy": 28,
        "mt-bench-med": 40,
    },
    "chat_hard": {
        "mt-bench-hard": 37,
        "llmbar-natural": 100,
        "llmbar-adver-neighbor": 134,
        "llmbar-adver-GPTInst": 92,
        "llmbar-adver-GPTOut": 47,
        "llmbar-adver-manual": 46,
    },
    "safety": {
        "refusals-dangerous": 100,
        "refusals-offensive": 100,
        "xstest-should-refuse": 154,
        "xstest-should-respond": 250,
        "donotanswer": 136,
    },
    "reasoning": {
        "math-prm": 984,
        "hep-cpp": 164,
        "hep-go": 164,
        "hep-java": 164,
        "hep-js": 164,
        "hep-python": 164,
        "hep-rust": 164,
    },
}
SECTION_OF = {subset: section for section, subsets in SECTIONS.items() for subset in subsets}
DRAWS = 2000
"""Resamples of the pairs."""

Values = Float[np.ndarray, "pairs"]


def section_shares(section: str) -> dict[str, float]:
    """Returns how much each subset counts in the accuracy of its section; the shares sum to 1."""
    counts = SECTIONS[section]
    return {subset: count / sum(counts.values()) for subset, count in counts.items()}


@dataclass(frozen=True)
class Orders:
    """Gaps by which the chosen response of each pair is ahead of the rejected one, a column for each reward.

    ``gaps`` hold NaN where a pair has no such reward; the first column is the one that counts. ``groups``: the part of
    the set that each pair belongs to. ``compared``: from the name of a score to the two rewards it compares.
    """

    gaps: "DataFrame"
    groups: Sequence[str | None]
    ties: Ties = Ties.HALF
    compared: Mapping[str, tuple[str, str]] = field(default_factory=dict)

    @property
    def main(self) -> str:
        """Returns the reward that counts."""
        return str(self.gaps.columns[0])

    @cached_property
    def right(self) -> "DataFrame":
        """Returns 1 for a pair that a reward orders as its label does, 0 for one it does not; NaN where it has none."""
        tie = 0.5 if self.ties is Ties.HALF else 0.0
        return (self.gaps > 0).astype(float).mask(self.gaps == 0, tie).where(self.gaps.notna()).reset_index(drop=True)

    @cached_property
    def _parts(self) -> "dict[str, DataFrame]":
        """Returns the rows of ``right`` by part, the parts in order of their names."""
        return {str(group): rows for group, rows in self.right.groupby(np.array(self.groups, dtype=object))}

    def scores(self) -> tuple[BenchmarkScore, ...]:
        """Returns accuracies of every reward, their differences, and the sections of RewardBench that are whole.

        The sections are those of the reward that counts, and alike in their mean, which the leaderboard's older test
        sets, at half a section's weight, are no part of. Intervals: 95 % over pairs, None where all pairs agree.
        """
        right = self.right
        found = [mean_score(name, present(right[name])) for name in right.columns]
        found += [mean_score(name, present(right[one] - right[other])) for name, (one, other) in self.compared.items()]
        parts = {group: of for group, rows in self._parts.items() if len(of := present(rows[self.main]))}
        shares = {name: section_shares(name) for name, subsets in SECTIONS.items() if subsets.keys() <= parts.keys()}
        if len(shares) == len(SECTIONS):
            every = {subset: share / len(SECTIONS) for of in shares.values() for subset, share in of.items()}
            found.append(stratified_score("rewardbench", parts, every))
        return (*found, *(stratified_score(f"rewardbench_{name}", parts, of) for name, of in shares.items()))

    def table(self) -> tuple[dict[str, object], ...]:
        """Returns a row for each part: pairs, ties, the accuracy of every reward, the interval of the main one."""
        rows: list[dict[str, object]] = []
        for group, right in self._parts.items():
            low, high = interval(present(right[self.main])) or (None, None)
            row: dict[str, object] = {"subset": group, "section": SECTION_OF.get(group, ""), "pairs": len(right)}
            row |= {"ties": int((self.gaps[self.main].iloc[right.index] == 0).sum())}
            row |= {name: float(of.mean()) if len(of := present(right[name])) else None for name in right.columns}
            rows.append({**row, "low": low, "high": high})
        return tuple(rows)

    def account(self) -> dict[str, int]:
        """Returns what is worth knowing of the pairs, by reason: ties, and which parts are missing."""
        there = {group for group in self.groups if group is not None}
        counts = {f"ties in {self.main}, counted {self.ties.value}": int((self.gaps[self.main] == 0).sum())}
        if there:
            counts["pairs without a subset"] = sum(group is None for group in self.groups)
        if there & SECTION_OF.keys():
            counts["RewardBench subsets without a pair"] = len(SECTION_OF.keys() - there)
        return {reason: count for reason, count in counts.items() if count}


def present(values: "Series[float]") -> Values:
    """Returns the values of the pairs that have one."""
    return np.asarray(values.dropna().to_numpy(), dtype=float)


def mean_score(name: str, values: Values) -> BenchmarkScore:
    """Returns the mean of what pairs give."""
    figure = float(values.mean()) if values.size else float("nan")
    return BenchmarkScore(name, figure, (figure,), interval(values), None, int(values.size))


def interval(values: Values) -> tuple[float, float] | None:
    """Returns 95 % over pairs of their mean; None where all pairs have the same value, which says nothing of it."""
    if not values.size or np.ptp(values) == 0:
        return None
    found = hierarchical_bootstrap(values[None], draws=DRAWS)
    return found.low, found.high


def stratified_score(name: str, parts: Mapping[str, Values], shares: Mapping[str, float]) -> BenchmarkScore:
    """Returns a mean of the means of parts, each with its share.

    The interval is that of the mean's linear terms f + n s / n_k (v - f_k) of the n pairs, with a part's share s, its
    n_k pairs and their mean f_k: only the scatter within parts counts, the shares being fixed.
    """
    figure = sum(share * float(parts[group].mean()) for group, share in shares.items())
    pairs = sum(len(parts[group]) for group in shares)
    terms = [
        figure + pairs * share / len(parts[group]) * (parts[group] - parts[group].mean())
        for group, share in shares.items()
    ]
    return BenchmarkScore(name, figure, (figure,), interval(np.concatenate(terms)), None, pairs)


# ------------------------------------------------------------------------------------------------ checks


def _plain(lengths: LengthRules) -> dict[str, object]:
    return {name: getattr(value, "value", value) for name, value in asdict(lengths).items()}


def _require_room(model: ModelSpec, lengths: LengthRules) -> None:
    from attnpo.models.generate import max_sequence_length

    key = f"{KEY}lengths.max_length"
    max_sequence_length(model.path, model.revision, key, lengths.max_length)
    positions = max_sequence_length(model.path, model.revision, key, None)
    if positions is not None and positions < lengths.max_length:
        raise UserError(
            f"{key}={lengths.max_length}: {model.path} has {positions} positions; set {key}={positions} and "
            f"{KEY}lengths.max_prompt_length below it"
        )


def _require_same_tokens(
    reference: str, revision: str | None, subject: Subject, examples: Iterable[TrainingExample]
) -> None:
    """Raises UserError where a token of the pairs is another one for the reference, or one without a row there."""
    from attnpo.models.described import token_rows
    from attnpo.models.loading import load_text_config, load_tokenizer

    own, other = subject.chat.tokenizer, load_tokenizer(reference, revision)
    rows = token_rows(load_text_config(reference, revision))
    used = {index for one in examples for side in one.sides for index in (*side.prompt_ids, *side.response_ids)}
    known = other.get_vocab()
    wrong = [
        token
        for index in sorted(used)
        if known.get(token := str(own.convert_ids_to_tokens(index))) != index or (rows is not None and index >= rows)
    ]
    if wrong:
        raise UserError(
            f"{KEY}reference={reference} has another vocabulary than {subject.model.path}: {len(wrong)} of "
            f"{len(used)} tokens of the pairs have other ids there (first: {wrong[0]!r}); name the model that its "
            "training started from"
        )


def _matching(
    weighed: Mapping[str, RewardFactors], examples: Mapping[str, TrainingExample]
) -> Mapping[str, RewardFactors]:
    """Returns the weights, as far as there is such a pair; UserError where they were made for other tokens."""
    found = {pair_id: pair for pair_id, pair in weighed.items() if pair_id in examples}
    for pair_id, pair in found.items():
        ids = tuple(side.response_ids for side in examples[pair_id].sides)
        if ids != pair.response_ids:
            raise UserError(
                f"implicit reward: token weights of pair {pair_id} belong to other tokens than the model's; weights "
                "and model must have one tokenizer, chat template and length rules: name the run that trained the model"
            )
    return found


@dataclass(frozen=True, kw_only=True)
class ValidationPairs(UnseenPairs):
    """Validation pairs of a run, as its own ``source`` gives them."""

    source: PairReader

    def load(self) -> PairSet:
        """Reads the run's validation split. UserError as training raises it."""
        return self.source.load("val")


def fill_from_run(measure: Benchmark | Measure, model: str, overrides: tuple[str, ...]) -> Benchmark | Measure:
    """Fills in an implicit reward's reference, pairs and lengths from the run whose ``best/`` or ``last/`` is measured.

    For any other ``model`` from the run that its token weights are of, if one is named. What ``overrides`` name is
    kept; one line says what was taken. Any other benchmark stays as it is. UserError where something is auto and the
    run's configuration cannot be read.
    """
    folder = find_run_of_model(model)
    if isinstance(measure, WeightedImplicitReward) and measure.run != AUTO:
        folder = folder or Path(measure.run)
    if not isinstance(measure, ImplicitReward) or folder is None:
        return measure
    try:
        run = load_saved_config(folder, f"model.path={model}")
    except UserError as problem:
        if AUTO in (measure.reference, measure.data.path):
            raise
        log.warning("%slengths are not taken from the run: %s", KEY, problem)
        return measure
    told = []
    if isinstance(measure, WeightedImplicitReward) and measure.run == AUTO:
        measure = replace(measure, run=str(folder))
        told.append("token weights")
    if measure.reference == AUTO:
        revision = measure.reference_revision or run.model.revision
        measure = replace(measure, reference=run.model.path, reference_revision=revision)
        told.append(f"reference {run.model.path}")
        if run.model.quantize is not None:
            log.warning(
                "%sreference=%s is read whole, and the run trained on it in 4 bits (model.quantize=%s): the reward "
                "holds what that changed, too",
                *(KEY, run.model.path, run.model.quantize),
            )
    if measure.data.path == AUTO:
        place = str(getattr(run.data, "location", "its data"))
        measure = replace(measure, data=ValidationPairs(place, group=measure.data.group, source=run.data))
        told.append(f"validation pairs of {place}")
    lengths = lengths_of(run.lengths, measure.lengths, overrides)
    if lengths != measure.lengths:
        told.append("lengths " + ", ".join(f"{key}={value}" for key, value in _plain(lengths).items()))
    if told:
        log.info("%s takes from the run in %s: %s", measure.name, folder, "; ".join(told))
    return replace(measure, lengths=lengths)


def lengths_of(run: LengthRules, asked: LengthRules, overrides: tuple[str, ...]) -> LengthRules:
    """Returns the run's length rules, but those that the command names, or that a benchmark of one's own sets."""
    named = [override.partition("=")[0].lstrip("+") for override in overrides]
    default, taken = asdict(LengthRules()), asdict(run)
    own = {
        key: value
        for key, value in asdict(asked).items()
        if value != default[key] or f"{KEY}lengths.{key}" in named or f"{KEY}lengths" in named
    }
    return LengthRules(**{**taken, **own})


@dataclass(frozen=True)
class WeightedImplicitReward(ImplicitReward):
    """Plain measure, and ``accuracy_weighted``: the order by ``sum_t f_t (log pi - log ref)_t``.

    ``run`` is the folder of the run whose weights are taken (as a rule, of the one that trained the model): its source,
    judge and transforms weigh the pairs as they weighed its training pairs, and f is what its objective multiplies beta
    by. The run's lengths hold instead of ``lengths``.
    """

    run: str = AUTO

    @property
    def scores(self) -> tuple[str, ...]:
        """Returns the weighted accuracy, which counts, the plain measure's, and what the weighted one is ahead by."""
        return (WEIGHTED, *super().scores, f"{GAIN}_weighted")

    def versions(self) -> dict[str, object]:
        """Returns those of the plain measure, and the settings of the run that touch weights."""
        cfg = self._config()
        return {**ImplicitReward.versions(replace_lengths(self, cfg.lengths)), "weights": make_identity(cfg).inputs}

    def measure(self, subject: Subject) -> UngradedResult:
        """Accuracies of the plain, the length-normalised and the token-weighted reward, and of each model alone.

        Raises:
            UserError: as the plain measure does; there is no run in the folder, its objective reads no token weights,
                its source computes them in training alone, or its data, model or judge are no longer where they were.
        """
        from attnpo.run.inputs import read_inputs
        from attnpo.run.other_pairs import reward_factors
        from attnpo.run.resolve import resolve

        if self.reference is None:
            raise UserError(
                f"{KEY}reference=null: there is no log-ratio to weigh; name the model training started from"
            )
        cfg = self._config()
        if "token_weights" not in cfg.objective.requires or isinstance(cfg.weights, OnlineSource):
            what = type(cfg.weights).__name__ if "token_weights" in cfg.objective.requires else "its objective"
            raise UserError(
                f"{KEY}run={self.run}: {what} leaves no token weights to take; name a run with weights that are read "
                "before training, or set benchmark=implicit_reward"
            )
        cfg, base, readers, _ = resolve(cfg)
        inputs = read_inputs(cfg, base, readers)
        factors = partial(reward_factors, cfg.objective, inputs.recipe, inputs.weighed, readers)
        return replace_lengths(self, cfg.lengths).measure_with(subject, factors)

    def _config(self) -> RunConfig:
        if self.run == AUTO:
            raise UserError(f"{KEY}run: {OF_RUN}; give {KEY}run=outputs/RUN, the run whose token weights are taken")
        return load_saved_config(Path(self.run), f"{KEY}run={self.run}")


def replace_lengths(measure: WeightedImplicitReward, lengths: LengthRules) -> WeightedImplicitReward:
    """Returns the measure with the length rules of its run; logs where they differ."""
    if asdict(measure.lengths) != asdict(lengths):
        log.info("%slengths: those of %s hold, since its weights are on tokens that they cut", KEY, measure.run)
    return replace(measure, lengths=lengths)
