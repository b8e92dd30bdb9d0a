"""Implicit-reward accuracy: share of held-out pairs that a policy's own reward, log pi - log ref, ranks correctly.

Rafailov et al. 2023 (arXiv 2305.18290), section 4: the reward of a DPO policy is beta (log pi - log ref), up to a term
that depends only on the prompt. The ranking does not depend on beta, so none is needed. Lambert et al. 2024
(RewardBench, arXiv 2403.13787) use the same measure, but here the pairs are tokenized as in training (chat format,
length rules).

RewardBench's sections are taken from allenai/reward-bench: ``rewardbench/constants.py`` and
``calculate_scores_per_section`` in ``rewardbench/utils.py`` (commit 05a9005). A section's accuracy is the mean over its
subsets, weighted by number of pairs. The exception is math-prm: its 447 pairs have weight 984, the number of pairs in
the six code subsets together.
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
from attnpo.evaluation.base import Benchmark, BenchmarkScore, EvaluatedModel, UngradedBenchmark, UngradedResult
from attnpo.evaluation.intervals import mean_interval
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
    """Held-out pairs (config node ``benchmark.data``): one split, in any format that ``PairSource`` reads.

    ``group``: column that names each pair's subset (``subset`` in RewardBench). There are no subsets if it is None or
    the column is missing. ``subset`` and ``revision`` are only used for data from the hub. ``path=auto`` selects the
    validation pairs of the run that trained the model, read exactly as in that run.
    """

    path: str
    split: str = "test"
    rows: str | None = None
    columns: Columns = field(default_factory=Columns)
    group: str | None = "subset"
    revision: str | None = None
    subset: str | None = None

    def unused_keys(self) -> dict[str, str]:
        """Returns keys that have no effect, because a run's validation pairs are read with that run's settings."""
        why = f"{KEY}data.path=auto reads the pairs from the run"
        return dict.fromkeys(("split", "rows", "columns", "revision", "subset"), why) if self.path == AUTO else {}

    def load(self) -> PairSet:
        """Loads all usable pairs, and counts the rows that were dropped.

        Raises:
            UserError: the data cannot be read or contain no usable pair.
        """
        source = PairSource(
            self.path, self.split, None, self.rows, None, self.columns, revision=self.revision, subset=self.subset
        )
        try:
            return source.load("train")
        except UserError as error:  # the keys of a pair set are one level deeper here than in training
            text = re.sub(r"\bdata\.(train_)?(?=path=|split|rows|columns)", f"{KEY}data.", str(error))
            raise UserError(text) from error

    def get_subset(self, pair: PreferencePair) -> str | None:
        """Returns the subset of a pair; None if the pair's row does not name one."""
        value = None if self.group is None else pair.extra.get(self.group)
        return None if value is None or not str(value).strip() else str(value).strip()


LOG_EVERY = 10.0  # seconds between progress lines

Logps = Mapping[str, tuple[Float[Tensor, " m"], Float[Tensor, " k"]]]
"""Per-token log-probabilities of the chosen and the rejected response, by pair id."""

PLAIN, NORMALISED, WEIGHTED = "accuracy", "accuracy_normalised", "accuracy_weighted"
POLICY, REFERENCE, PER_TOKEN = "policy_alone", "reference_alone", "_normalised"
GAIN = "gain"
OF_RUN = "required in a study, and if the model is not a run's best/ or last/ (whose run would supply it)"


GAINS = {GAIN: (PLAIN, REFERENCE), GAIN + PER_TOKEN: (NORMALISED, REFERENCE + PER_TOKEN)}
"""Maps a score's name to the two rewards whose accuracies it compares."""

ComputeWeights = Callable[[Sequence[PreferencePair]], Mapping[str, RewardFactors]]
"""Function that maps pair ids to the pairs' token weights; pairs without weights are omitted."""


class Ties(Enum):
    """Rule for pairs with equal rewards: each counts as half correct, or as wrong.

    RewardBench counts a pair as correct only if the chosen reward is higher (``scripts/run_dpo.py``).
    """

    HALF = "half"
    WRONG = "wrong"


@dataclass(frozen=True)
class ImplicitReward:
    """Share of labelled pairs that the policy's own reward ranks correctly, overall and by subset.

    ``reference``: the model that training started from. "auto" (also accepted by ``data.path``) uses the value from the
    run whose ``best/`` or ``last/`` is evaluated. ``accuracy`` sums log pi - log ref over the response's tokens;
    ``accuracy_normalised`` averages over these tokens. ``policy_alone`` and ``reference_alone`` rank by one model's
    log-probabilities. ``gain`` is the paired difference in accuracy between the reward and the reference alone. With
    ``reference: null`` there is no reward, and only ``policy_alone`` is reported.
    """

    data: UnseenPairs
    reference: str | None
    reference_revision: str | None = None
    lengths: LengthRules = field(default_factory=LengthRules)
    ties: Ties = Ties.HALF
    name: str = "implicit_reward"

    @property
    def scores(self) -> tuple[str, ...]:
        """Returns the names of the scores reported for every data set; RewardBench adds its section scores."""
        alone = (POLICY, POLICY + PER_TOKEN)
        if self.reference is None:
            return alone
        return (PLAIN, NORMALISED, *alone, REFERENCE, REFERENCE + PER_TOKEN, *GAINS)

    def fingerprint(self) -> dict[str, object]:
        """Returns a digest of the pairs, the reference's weights, and the rules for lengths and ties."""
        from attnpo.models.loading import weights_fingerprint

        self.require_paths()
        pairs = self.data.load()
        reference = None if self.reference is None else weights_fingerprint(self.reference, self.reference_revision)
        groups = [self.data.get_subset(pair) for pair in pairs.pairs]
        return {
            "pairs": digest([pairs.fingerprint, groups]),
            "reference": reference,
            "lengths": _lengths_as_dict(self.lengths),
            "ties": self.ties.value,
        }

    def measure(self, subject: EvaluatedModel) -> UngradedResult:
        """Computes accuracies of the plain and the length-normalised reward, and of each model alone.

        Raises:
            UserError: pairs or reference cannot be read, the vocabularies differ, the model has fewer positions than
                ``lengths.max_length``, or a log-probability is not finite.
        """
        return self.measure_weighted(subject)

    def measure_weighted(
        self, subject: EvaluatedModel, compute_weights: ComputeWeights | None = None
    ) -> UngradedResult:
        """Computes the scores of ``measure``; ``compute_weights`` adds the accuracy of token-weighted log-ratios."""
        self.require_paths()
        _check_max_length(subject.model, self.lengths)
        found = self.data.load()
        try:
            encoded = encode_pairs(found.pairs, subject.chat, self.lengths)
        except UserError as error:
            raise UserError(f"implicit reward: {str(error).replace('lengths.', f'{KEY}lengths.')}") from error
        (chosen, rejected), none, zeros = SIDES, torch.zeros(0), (0.0, 0.0)  # these examples carry no weights
        examples = {
            pair.pair_id: TrainingExample(pair.pair_id, sides[chosen], sides[rejected], (none, none), zeros, zeros)
            for pair, sides in zip(encoded.pairs, encoded.encoded, strict=True)
        }
        factors = None if compute_weights is None else _select_matching(compute_weights(encoded.pairs), examples)
        pad_id = subject.chat.rows.pad_id
        policy = self._score_pairs("policy", subject.model, examples, subject.device, pad_id)
        reference, notes = self._score_reference(subject, examples, policy, pad_id)
        if factors is not None:
            notes["pairs without token weights"] = len(examples) - len(factors)
        # Duplicate pairs count twice.
        margins = reward_margins(policy, reference, factors).loc[[pair.pair_id for pair in encoded.pairs]]
        compared = {} if reference is None else GAINS
        if factors is not None:
            compared = {**compared, f"{GAIN}_weighted": (WEIGHTED, REFERENCE)}
        ranking = RankingAccuracy(margins, [self.data.get_subset(pair) for pair in encoded.pairs], self.ties, compared)
        counts = {**found.counts, **found.notes, **encoded.tally.counts, **ranking.counts(), **notes}
        for line in encoded.tally.format_lines():
            log.warning("%s: %s", self.name, line)
        counts |= count_seen_prompts(subject.model.path, (pair.prompt for pair in encoded.pairs))
        return UngradedResult(
            ranking.scores(), {name: count for name, count in counts.items() if count}, ranking.subset_table()
        )

    # -------------------------------------------------------------------------------------------- models

    def require_paths(self) -> None:
        """Checks that neither the pairs nor the reference is still "auto".

        Raises:
            UserError: one of them is.
        """
        for key, value in (("data.path", self.data.path), ("reference", self.reference)):
            if value == AUTO:
                raise UserError(f"{KEY}{key} is {OF_RUN}: set {KEY}{key}=FOLDER_OR_HUB_NAME")

    def _score_reference(
        self, subject: EvaluatedModel, examples: Mapping[str, TrainingExample], policy: Logps, pad_id: int
    ) -> tuple[Logps | None, dict[str, int]]:
        from attnpo.models.loading import weights_fingerprint

        if self.reference is None:
            log.warning(
                "%sreference=null: pairs are ranked by log pi alone, which is not DPO's reward; for DPO's reward, set "
                "%sreference to the model that training started from",
                *(KEY, KEY),
            )
            return None, {"pairs ranked without a reference": len(examples)}
        spec, own = subject.model, weights_fingerprint(subject.model.path, subject.model.revision)
        if weights_fingerprint(self.reference, self.reference_revision) == own:
            log.warning(
                "%sreference=%s has the same weights as model.path=%s: all rewards are 0, so every pair is a tie",
                KEY,
                self.reference,
                spec.path,
            )
            return policy, {"reference with the same weights as the model": 1}
        _require_same_tokens(self.reference, self.reference_revision, subject, examples.values())
        other = ModelSpec(self.reference, self.reference_revision, spec.dtype, spec.attn_implementation)
        return self._score_pairs("reference", other, examples, subject.device, pad_id), {}

    def _score_pairs(
        self, role: str, spec: ModelSpec, examples: Mapping[str, TrainingExample], device: torch.device, pad_id: int
    ) -> Logps:
        """Loads one model, computes its log-probabilities of all pairs, and frees the model."""
        from attnpo.data.scoring import score_examples
        from attnpo.models.loading import load_model
        from attnpo.models.scored import ScoredLM

        model = load_model(
            spec.path, dtype=spec.dtype, attn_implementation=spec.attn_implementation, revision=spec.revision
        )
        scored = ScoredLM(model.to(device))  # type: ignore[arg-type]
        logps: dict[str, tuple[Tensor, Tensor]] = {}
        began = logged = time.perf_counter()
        for pair_id, values in score_examples(scored, list(examples.values()), pad_id):
            logps[pair_id] = values
            now = time.perf_counter()
            if now - logged > LOG_EVERY:
                logged = now
                log.info("%s: %s, %d of %d pairs, %.0f s", self.name, role, len(logps), len(examples), now - began)
        broken = [pair_id for pair_id, sides in logps.items() if not all(bool(side.isfinite().all()) for side in sides)]
        if broken:
            raise UserError(
                f"{self.name}: the {role} {spec.path} returns non-finite log-probabilities for {len(broken)} of "
                f"{len(logps)} pairs (first: {broken[0]}): its weights are broken, or the range of "
                f"model.dtype={spec.dtype} is too small"
            )
        del model, scored
        torch.cuda.empty_cache()  # no effect without a GPU
        return logps


# ------------------------------------------------------------------------------------------------ rewards


def reward_margins(
    policy: Logps, reference: Logps | None, weights: Mapping[str, RewardFactors] | None = None
) -> "DataFrame":
    """Computes each pair's reward margin (chosen minus rejected) in nats, one column per reward.

    Each reward is both summed and averaged over tokens. With a reference, the first rewards use log pi - log ref,
    computed per token before summing. With ``weights``, the first column is ``sum_t f_t (log pi - log ref)_t``, which
    is NaN for pairs without factors f.
    """
    from pandas import DataFrame

    rows: dict[str, dict[str, float]] = {}
    for pair_id, sides in policy.items():
        row: dict[str, float] = {}
        ours = [side.double() for side in sides]
        if reference is not None:
            theirs = [side.double() for side in reference[pair_id]]
            ratios = [one - other for one, other in zip(ours, theirs, strict=True)]
            if weights is not None:
                factors = weights[pair_id].factors if pair_id in weights else (torch.tensor(float("nan")),) * 2
                made = [(f.double() * ratio).sum() for f, ratio in zip(factors, ratios, strict=True)]
                row[WEIGHTED] = float(made[0] - made[1])
            row |= _margins(PLAIN, NORMALISED, ratios)
        row |= _margins(POLICY, POLICY + PER_TOKEN, ours)
        if reference is not None:
            row |= _margins(REFERENCE, REFERENCE + PER_TOKEN, theirs)
        rows[pair_id] = row
    return DataFrame.from_dict(rows, orient="index")


def _margins(total: str, mean: str, sides: Sequence[Tensor]) -> dict[str, float]:
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

Values = Float[np.ndarray, "pairs"]


def section_shares(section: str) -> dict[str, float]:
    """Returns the weight of each subset in its section's accuracy; the weights sum to 1."""
    counts = SECTIONS[section]
    return {subset: count / sum(counts.values()) for subset, count in counts.items()}


@dataclass(frozen=True)
class RankingAccuracy:
    """Accuracy with which rewards rank labelled pairs, computed from reward margins.

    ``margins``: chosen minus rejected reward, one row per pair and one column per reward, the main reward first; NaN
    if a pair has no such reward. ``groups``: the subset of each pair. ``compared``: maps a score's name to the two
    rewards whose accuracies it compares.
    """

    margins: "DataFrame"
    groups: Sequence[str | None]
    ties: Ties = Ties.HALF
    compared: Mapping[str, tuple[str, str]] = field(default_factory=dict)

    @property
    def main_reward(self) -> str:
        """Returns the name of the main reward."""
        return str(self.margins.columns[0])

    @cached_property
    def correct(self) -> "DataFrame":
        """Returns whether each reward ranks each pair correctly.

        Values are 1 (correct), 0 (wrong), the tie value, or NaN (missing reward).
        """
        tie, margins = 0.5 if self.ties is Ties.HALF else 0.0, self.margins
        return (margins > 0).astype(float).mask(margins == 0, tie).where(margins.notna()).reset_index(drop=True)

    @cached_property
    def _correct_by_subset(self) -> "dict[str, DataFrame]":
        """Returns the rows of ``correct`` by subset, with the subsets in alphabetical order."""
        return {str(group): rows for group, rows in self.correct.groupby(np.array(self.groups, dtype=object))}

    def scores(self) -> tuple[BenchmarkScore, ...]:
        """Returns the accuracies of all rewards, the ``compared`` differences, and all complete RewardBench sections.

        Sections use the main reward. The overall RewardBench score is the unweighted mean over sections; it excludes
        the older test sets, which count as half a section on the leaderboard. Intervals are 95 % intervals over pairs,
        or None if all pairs have the same value.
        """
        right = self.correct
        found = [mean_score(name, drop_missing(right[name])) for name in right.columns]
        found += [
            mean_score(name, drop_missing(right[one] - right[other])) for name, (one, other) in self.compared.items()
        ]
        parts = {
            group: of
            for group, rows in self._correct_by_subset.items()
            if len(of := drop_missing(rows[self.main_reward]))
        }
        shares = {name: section_shares(name) for name, subsets in SECTIONS.items() if subsets.keys() <= parts.keys()}
        if len(shares) == len(SECTIONS):
            every = {subset: share / len(SECTIONS) for of in shares.values() for subset, share in of.items()}
            found.append(stratified_score("rewardbench", parts, every))
        return (*found, *(stratified_score(f"rewardbench_{name}", parts, of) for name, of in shares.items()))

    def subset_table(self) -> tuple[dict[str, object], ...]:
        """Returns one row per subset: pairs, ties, the accuracy of each reward, and the main reward's interval."""
        rows: list[dict[str, object]] = []
        for group, right in self._correct_by_subset.items():
            low, high = accuracy_interval(drop_missing(right[self.main_reward])) or (None, None)
            row: dict[str, object] = {"subset": group, "section": SECTION_OF.get(group, ""), "pairs": len(right)}
            row |= {"ties": int((self.margins[self.main_reward].iloc[right.index] == 0).sum())}
            row |= {name: float(of.mean()) if len(of := drop_missing(right[name])) else None for name in right.columns}
            rows.append({**row, "low": low, "high": high})
        return tuple(rows)

    def counts(self) -> dict[str, int]:
        """Returns the number of ties, of pairs without a subset, and of RewardBench subsets without pairs."""
        there = {group for group in self.groups if group is not None}
        counts = {
            f"ties in {self.main_reward}, counted as {self.ties.value}": int(
                (self.margins[self.main_reward] == 0).sum()
            )
        }
        if there:
            counts["pairs without a subset"] = sum(group is None for group in self.groups)
        if there & SECTION_OF.keys():
            counts["RewardBench subsets without pairs"] = len(SECTION_OF.keys() - there)
        return {reason: count for reason, count in counts.items() if count}


def drop_missing(values: "Series[float]") -> Values:
    """Returns an array of all values that are not NaN."""
    return np.asarray(values.dropna().to_numpy(), dtype=float)


def mean_score(name: str, values: Values) -> BenchmarkScore:
    """Builds a score from the mean over pairs, with its interval."""
    figure = float(values.mean()) if values.size else float("nan")
    return BenchmarkScore(name, figure, (figure,), accuracy_interval(values), None, int(values.size))


def accuracy_interval(values: Values) -> tuple[float, float] | None:
    """Returns the 95 % interval of the mean over pairs; None if all values are equal."""
    if not values.size or np.ptp(values) == 0:
        return None
    found = mean_interval(values[None])
    return found.low, found.high


def stratified_score(name: str, parts: Mapping[str, Values], shares: Mapping[str, float]) -> BenchmarkScore:
    """Builds a score from the weighted mean of subset means, with ``shares`` as weights.

    The interval is computed from one linearized term per pair: f + n s / n_k (v - f_k). Here n is the number of pairs,
    f the weighted mean, v the pair's value, s the share of the pair's subset, n_k the number of pairs in the subset and
    f_k their mean value. The shares are fixed, so only the spread within subsets counts.
    """
    figure = sum(share * float(parts[group].mean()) for group, share in shares.items())
    pairs = sum(len(parts[group]) for group in shares)
    terms = [
        figure + pairs * share / len(parts[group]) * (parts[group] - parts[group].mean())
        for group, share in shares.items()
    ]
    return BenchmarkScore(name, figure, (figure,), accuracy_interval(np.concatenate(terms)), None, pairs)


# ------------------------------------------------------------------------------------------------ checks


def _lengths_as_dict(lengths: LengthRules) -> dict[str, object]:
    return {name: getattr(value, "value", value) for name, value in asdict(lengths).items()}


def _check_max_length(model: ModelSpec, lengths: LengthRules) -> None:
    from attnpo.models.generate import max_sequence_length

    key = f"{KEY}lengths.max_length"
    max_sequence_length(model.path, model.revision, key, lengths.max_length)
    positions = max_sequence_length(model.path, model.revision, key, None)
    if positions is not None and positions < lengths.max_length:
        raise UserError(
            f"{key}={lengths.max_length} is too long: {model.path} has {positions} positions; set {key}={positions} "
            f"and {KEY}lengths.max_prompt_length to less than that"
        )


def _require_same_tokens(
    reference: str, revision: str | None, subject: EvaluatedModel, examples: Iterable[TrainingExample]
) -> None:
    """Checks that each token in the pairs has the same id in the reference's vocabulary, and an embedding row.

    Raises:
        UserError: at least one token differs.
    """
    from attnpo.models.description import config_vocabulary_size
    from attnpo.models.loading import load_text_config, load_tokenizer

    own, other = subject.chat.tokenizer, load_tokenizer(reference, revision)
    rows = config_vocabulary_size(load_text_config(reference, revision))
    used = {index for one in examples for side in one.sides for index in (*side.prompt_ids, *side.response_ids)}
    known = other.get_vocab()
    wrong = [
        token
        for index in sorted(used)
        if known.get(token := str(own.convert_ids_to_tokens(index))) != index or (rows is not None and index >= rows)
    ]
    if wrong:
        raise UserError(
            f"{KEY}reference={reference} has a different vocabulary from {subject.model.path}: {len(wrong)} of "
            f"{len(used)} tokens in the pairs have different ids (first: {wrong[0]!r}); use the model that training "
            "started from"
        )


def _select_matching(
    weights: Mapping[str, RewardFactors], examples: Mapping[str, TrainingExample]
) -> Mapping[str, RewardFactors]:
    """Selects the weights of the evaluated pairs.

    Raises:
        UserError: a pair's weights were computed for different tokens.
    """
    found = {pair_id: pair for pair_id, pair in weights.items() if pair_id in examples}
    for pair_id, pair in found.items():
        ids = tuple(side.response_ids for side in examples[pair_id].sides)
        if ids != pair.response_ids:
            raise UserError(
                f"implicit reward: the token weights of pair {pair_id} do not match the model's tokens; weights and "
                "model must share tokenizer, chat template and length rules: use the run that trained the model"
            )
    return found


@dataclass(frozen=True, kw_only=True)
class ValidationPairs(UnseenPairs):
    """Validation pairs of a run, read from the run's own ``source``."""

    source: PairReader

    def load(self) -> PairSet:
        """Loads the run's validation split, raising the same errors as training does."""
        return self.source.load("val")


def fill_from_run(
    measure: Benchmark | UngradedBenchmark, model: str, overrides: tuple[str, ...]
) -> Benchmark | UngradedBenchmark:
    """Fills in an implicit reward's reference, pairs and lengths from the run that trained the evaluated model.

    If ``model`` is a run's ``best/`` or ``last/`` folder, that run is used. Otherwise, the run that supplies the token
    weights is used, if there is one. Keys set in ``overrides`` are kept, and the log lists the values taken from the
    run. Other benchmarks are returned unchanged.

    Raises:
        UserError: a key is "auto" and the run's configuration cannot be read.
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
        log.warning("%slengths cannot be taken from the run: %s", KEY, problem)
        return measure
    taken = []
    if isinstance(measure, WeightedImplicitReward) and measure.run == AUTO:
        measure = replace(measure, run=str(folder))
        taken.append("token weights")
    if measure.reference == AUTO:
        revision = measure.reference_revision or run.model.revision
        measure = replace(measure, reference=run.model.path, reference_revision=revision)
        taken.append(f"reference {run.model.path}")
        if run.model.quantize is not None:
            log.warning(
                "%sreference=%s is loaded without quantization, but the run trained on a 4-bit version of it "
                "(model.quantize=%s): the reward includes the effect of quantization",
                *(KEY, run.model.path, run.model.quantize),
            )
    if measure.data.path == AUTO:
        place = str(getattr(run.data, "location", "its data"))
        measure = replace(measure, data=ValidationPairs(place, group=measure.data.group, source=run.data))
        taken.append(f"validation pairs of {place}")
    lengths = merge_length_rules(run.lengths, measure.lengths, overrides)
    if lengths != measure.lengths:
        taken.append("lengths " + ", ".join(f"{key}={value}" for key, value in _lengths_as_dict(lengths).items()))
    if taken:
        log.info("%s uses these settings from the run in %s: %s", measure.name, folder, "; ".join(taken))
    return replace(measure, lengths=lengths)


def merge_length_rules(run: LengthRules, asked: LengthRules, overrides: tuple[str, ...]) -> LengthRules:
    """Returns the run's length rules, except for those set by overrides or by a custom benchmark."""
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
    """Implicit-reward accuracy plus ``accuracy_weighted``, which ranks pairs by ``sum_t f_t (log pi - log ref)_t``.

    ``run``: folder of the run that supplies the weights, usually the one that trained the model. The run's source,
    judge and transforms weight these pairs just as they weighted the training pairs. f is the factor that the run's
    objective applies to beta. The run's length rules replace ``lengths``.
    """

    run: str = AUTO

    @property
    def scores(self) -> tuple[str, ...]:
        """Returns the score names: the weighted accuracy (main score), the plain scores and the weighted gain."""
        return (WEIGHTED, *super().scores, f"{GAIN}_weighted")

    def fingerprint(self) -> dict[str, object]:
        """Returns the plain benchmark's fingerprint and the run's settings that affect weights."""
        cfg = self._run_config()
        return {**ImplicitReward.fingerprint(replace_lengths(self, cfg.lengths)), "weights": make_identity(cfg).inputs}

    def measure(self, subject: EvaluatedModel) -> UngradedResult:
        """Computes accuracies of the plain, length-normalised and token-weighted rewards, and of each model alone.

        Raises:
            UserError: see ``ImplicitReward.measure``; also if the folder contains no run, the run's objective uses no
                token weights, the run's source computes weights only during training, or its data, model or judge have
                been moved.
        """
        from attnpo.run.inputs import read_inputs
        from attnpo.run.other_pairs import reward_factors
        from attnpo.run.resolve import resolve

        if self.reference is None:
            raise UserError(
                f"{KEY}reference=null leaves no log-ratio to weight: set {KEY}reference to the run's initial model"
            )
        cfg = self._run_config()
        if "token_weights" not in cfg.objective.requires or isinstance(cfg.weights, OnlineSource):
            what = type(cfg.weights).__name__ if "token_weights" in cfg.objective.requires else "its objective"
            raise UserError(
                f"{KEY}run={self.run} has no token weights to reuse, because of {what}: use a run whose weights are "
                "computed before training, or set benchmark=implicit_reward"
            )
        cfg, base, readers, _ = resolve(cfg)
        inputs = read_inputs(cfg, base, readers)
        factors = partial(reward_factors, cfg.objective, inputs.recipe, inputs.weighed, readers)
        return replace_lengths(self, cfg.lengths).measure_weighted(subject, factors)

    def _run_config(self) -> RunConfig:
        if self.run == AUTO:
            raise UserError(f"{KEY}run is {OF_RUN}: set {KEY}run=outputs/RUN, the run that supplies the token weights")
        return load_saved_config(Path(self.run), f"{KEY}run={self.run}")


def replace_lengths(measure: WeightedImplicitReward, lengths: LengthRules) -> WeightedImplicitReward:
    """Returns the benchmark with the length rules of its run; logs a message if that changes them."""
    if asdict(measure.lengths) != asdict(lengths):
        log.info("%slengths: using the length rules that the token weights of %s were computed with", KEY, measure.run)
    return replace(measure, lengths=lengths)
