"""Measures where a run's policy has drifted from its base after training (config node ``drift``).

Uses validation pairs, training pairs (for ranking accuracy only) and, if the true reward is known, sampled answers. The
policy's answer and the base's answer to the same prompt form a pair, which is weighted like a training pair. Nothing is
written to the store. Weight classes mean different things in different arms. To compare arms, use the decisive tokens,
which are the same for all.
"""

import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from attnpo.cli.progress import phase
from attnpo.data.arrow_rows import find_pairs, get_pair_ids
from attnpo.data.collate import TrainingExample, collate, make_unweighted_rows
from attnpo.lab.light import BELOW, DECISIVE, END, NO_WEIGHT, OTHER, WEIGHTED
from attnpo.models.layouts import Sequences, padded_layout
from attnpo.models.scored import ScoredLM
from attnpo.objectives.base import PreferenceObjective
from attnpo.run.components import Truth
from attnpo.run.inputs import Inputs
from attnpo.run.models import load_reference
from attnpo.run.other_pairs import token_factors, weigh_other_pairs
from attnpo.run.point_cache import PointCache
from attnpo.run.resolve import Readers
from attnpo.schema import (
    SIDES,
    EncodedResponse,
    Json,
    Kind,
    ModelInputs,
    PreferencePair,
    RowGroup,
    TokenStats,
    digest,
)
from attnpo.weights.base import OnlineSource, WeightSource

log = logging.getLogger(__name__)

Row = Float[np.ndarray, "_"]  # the tokens of one response
Flags = Bool[np.ndarray, "_"]

DECILES = 10
ROUNDING = 1e-6  # |y| w of uniform weights is 1 up to rounding
QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
TOKENS_PER_FORWARD = 2048  # padded; on a CPU larger batches are slower
EXAMPLES_AT_ONCE = 256

# Caches the base's statistics for the next sweep point; those of a large model are too large to keep.
_of_base = PointCache(entries=64, room=1 << 22)  # bytes


@dataclass(frozen=True)
class ResponseShift:
    """Per-token shift of the policy from its base on one response.

    ``kl``: KL(policy || base) over the whole vocabulary, in nats, per token. ``gain``: log-probability of the response
    under the policy minus that under the base, in nats. ``ends``: mask of the end-of-turn tokens. ``weights``: weights
    relative to uniform (|y| w); None if unknown. ``decisive``: mask of the tokens that decide the true reward; None if
    it is unknown.
    """

    kl: Row
    gain: float
    ends: Flags
    weights: Row | None = None
    decisive: Flags | None = None


@dataclass(frozen=True)
class TrainedRun:
    """Trained policy with its training inputs and the base it started from.

    ``of_base``: digest that identifies the statistics of the base.
    """

    policy: ScoredLM
    inputs: Inputs
    readers: Readers
    truth: Truth | None
    base: ScoredLM
    of_base: str


@phase("measuring where the policy moved")
def measure_drift(
    policy: ScoredLM,
    inputs: Inputs,
    readers: Readers,
    objective: PreferenceObjective,
    reference: str,
    truth: Truth | None,
    sampled: Sequence[PreferencePair],
    counts: Mapping[str, int],
) -> dict[str, Json]:
    """Measures where the policy has drifted from its base, and returns the content of ``RunResult.drift``.

    ``counts``: number of pairs per split. ``sampled``: pairs with the policy's answer as chosen and the base's as
    rejected. ``reference``: kind of the run's reference. Raises UserError for a model without a plain output head.
    """
    began = time.perf_counter()
    base = readers.base
    run = TrainedRun(
        policy, inputs, readers, truth, load_reference(base, reference, policy), digest(base.fingerprint())
    )
    first = {split: _first_examples(inputs.examples[split].examples, count) for split, count in counts.items()}
    pairs = {
        split: find_pairs(inputs.pairs[split].pairs, [example.pair_id for example in examples])
        for split, examples in first.items()
    }
    val, train = _measure_movement(run, first["val"], pairs["val"]), _measure_movement(run, first["train"], None)
    out: dict[str, Json] = {"pairs": summarize_kl([*val["chosen"], *val["rejected"]])}
    displacement: dict[str, Json] = {
        f"{split}_{side}": mean_gain(sides[side])
        for split, sides in (("train", train), ("validation", val))
        for side in SIDES
    }
    accuracy: dict[str, Json] = {"train": ranking_accuracy(**train), "validation": ranking_accuracy(**val)}
    if truth is not None:
        flipped = [truth.is_flipped(pairs["train"][example.pair_id]) for example in first["train"]]
        for name, wanted in (("train_clean", False), ("train_flipped", True)):
            kept = {
                side: [one for one, of in zip(moved, flipped, strict=True) if of is wanted]
                for side, moved in train.items()
            }
            accuracy[name] = ranking_accuracy(**kept)
    if sampled:
        others = weigh_other_pairs(inputs.recipe, inputs.weighed, readers, sampled)
        answers = _measure_movement(run, others, {pair.pair_id: pair for pair in sampled})
        out["answers"] = summarize_kl(answers["chosen"])
        displacement["base_answers"] = mean_gain(answers["rejected"])
    out |= {"ranking_accuracy": accuracy, "displacement": displacement}
    beta = getattr(objective, "beta", None)
    if beta is not None and not isinstance(inputs.weighed.source, OnlineSource):
        factors = np.concatenate(list(_token_factors(objective, inputs)) or [np.zeros(0)])
        out["effective_beta"] = quantiles(float(beta) * factors)
    seconds = time.perf_counter() - began
    log.info("measured the drift from the base in %.1f s", seconds)
    return {**out, "seconds": round(seconds, 2)}


def _first_examples(examples: Sequence[TrainingExample], count: int) -> list[TrainingExample]:
    ids = get_pair_ids(examples)
    return [examples[place] for place in sorted(range(len(ids)), key=ids.__getitem__)[:count]]


# ------------------------------------------------------------------------------------------------ models


def _measure_movement(
    run: TrainedRun, examples: Sequence[TrainingExample], pairs: Mapping[str, PreferencePair] | None
) -> dict[str, list[ResponseShift]]:
    """Returns each response's shift, grouped by side. ``pairs``: source pairs by id, needed for decisive tokens."""
    scored = _score_responses(run, [side for example in examples for side in example.sides])
    moved: dict[str, list[ResponseShift]] = {side: [] for side in SIDES}
    for number, example in enumerate(examples):
        for place, side in enumerate(SIDES):
            kl, gain = scored[2 * number + place]
            offsets, known = example.sides[place].offsets, None
            if run.truth is not None and pairs is not None:
                known = np.array(run.truth.mark_decisive(pairs[example.pair_id], side, offsets), dtype=bool)
            ends = np.array([start >= end for start, end in offsets], dtype=bool)
            moved[side].append(
                ResponseShift(kl, gain, ends, _relative_weights(run.inputs.weighed.source, example, place), known)
            )
    return moved


def _score_responses(run: TrainedRun, sides: Sequence[EncodedResponse]) -> list[tuple[Row, float]]:
    """Returns the per-token KL and the gain in log-probability of each response, in input order."""
    base = run.readers.base
    for model in (run.policy, run.base):
        model.eval().to(base.device)
    lengths = [len(side.prompt_ids) + len(side.response_ids) for side in sides]
    order = sorted(range(len(sides)), key=lambda place: lengths[place])
    numbers: dict[int, tuple[Row, float]] = {}
    while order:
        size = len(order)
        while size > 1 and size * lengths[order[size - 1]] > TOKENS_PER_FORWARD:
            size -= 1
        chunk, order = order[:size], order[size:]
        group, stats = _score_on_base(run, [(sides[i].prompt_ids, sides[i].response_ids) for i in chunk])
        with base.autocast():
            policy = score_policy(run.policy, run.base, stats, group)
        gains = (policy.logps.double() - stats.logps.double()).sum(-1).tolist()  # exactly 0 off the response
        kl, mask = policy.joint["kl_policy_ref"].double().cpu(), group.response_mask.cpu()
        for row, i in enumerate(chunk):
            numbers[i] = kl[row][mask[row]].numpy(), gains[row]
    return [numbers[i] for i in range(len(sides))]


def _score_on_base(run: TrainedRun, sequences: Sequences) -> tuple[RowGroup, TokenStats]:
    """Returns one batch's rows with the base's statistics, which are cached because most sweep points share them."""
    base = run.readers.base
    group = make_unweighted_rows(sequences, padded_layout, base.chat.rows.pad_id).to(base.device)

    def make() -> TokenStats:
        with base.autocast():
            return score_base(run.base, group)

    def key() -> dict[str, object]:
        return {"model": run.of_base, "device": str(base.device), "rows": sequences}

    return group, _of_base.get_or_make(key, make, lambda stats: 0 if stats.hidden is None else stats.hidden.nbytes)


def score_base(base: ScoredLM, group: RowGroup) -> TokenStats:
    """Runs the base without gradients and returns token statistics, including the hidden states for ``score_policy``.

    Raises ``ValueError`` when the rows have no model inputs.
    """
    with torch.no_grad():
        stats: TokenStats = base(*_model_inputs(group), frozenset({"hidden"}))
    return stats


def score_policy(policy: ScoredLM, base: ScoredLM, of_base: TokenStats, group: RowGroup) -> TokenStats:
    """Runs the policy without gradients and returns token statistics that include "kl_policy_ref".

    ``of_base``: result of ``score_base``. Raises UserError for a model without a plain output head and ``ValueError``
    for rows without model inputs.
    """
    with torch.no_grad():
        stats: TokenStats = policy(
            *_model_inputs(group), frozenset({"joint:kl_policy_ref"}), (of_base.hidden, base.head())
        )
    return stats


def _model_inputs(group: RowGroup) -> tuple[ModelInputs, Tensor, Tensor]:
    if group.inputs is None:
        raise ValueError("the rows have no model inputs")
    return group.inputs, group.response_ids, group.response_mask


# ------------------------------------------------------------------------------------------------ weights


def _relative_weights(source: WeightSource, example: TrainingExample, place: int) -> Row | None:
    """Returns a response's weights relative to uniform (|y| w, or factors); None for those computed in training."""
    if isinstance(source, OnlineSource) or not example.weights[place].numel():
        return None
    weights = example.weights[place].double().numpy()
    return weights * example.weight_scales[place]


def _token_factors(objective: PreferenceObjective, inputs: Inputs) -> Iterator[Row]:
    examples = inputs.examples["train"].examples
    for start in range(0, len(examples), EXAMPLES_AT_ONCE):
        chunk = examples[start : start + EXAMPLES_AT_ONCE]
        rows = collate(chunk, padded_layout, 0, len(chunk)).main
        rows = replace(rows, factors=inputs.weighed.source.kind is Kind.FACTOR)
        yield token_factors(objective, rows)[rows.response_mask].double().numpy()


# ------------------------------------------------------------------------------------------------ arithmetic


def summarize_kl(responses: Sequence[ResponseShift]) -> dict[str, Json]:
    """Breaks the KL down by token class, by weight decile and by tenth of the response.

    Omits weight deciles if all weights are equal, and weight classes if any response has no weights.
    """
    kl, ends = (np.concatenate([getattr(one, name) for one in responses]) for name in ("kl", "ends"))
    rows = [one.weights for one in responses if one.weights is not None]
    flags = [one.decisive for one in responses if one.decisive is not None]
    places = [(np.arange(len(one.kl)) + 0.5) / max(1, len(one.kl)) for one in responses]
    out: dict[str, Json] = {
        "responses": len(responses),
        "tokens": int(kl.size),
        "kl": _ratio(float(kl.sum()), float(len(responses))),
    }
    weights = np.concatenate(rows) if len(rows) == len(responses) else None
    out["classes"] = kl_by_class(kl, {END: ends, OTHER: ~ends} if weights is None else weight_classes(weights, ends))
    if len(flags) == len(responses):
        decisive = np.concatenate(flags)
        out["truth"] = kl_by_class(kl, {DECISIVE: decisive, OTHER: ~decisive})
    if kl.size < DECILES:
        return out
    if weights is not None and np.ptp(weights) > ROUNDING:
        out["deciles"] = dict(decile_means(weights, {"weight": weights, "kl": kl}))
    out["position"] = dict(decile_means(np.concatenate(places), {"kl": kl}))
    return out


def decile_means(order: Row, values: Mapping[str, Row]) -> dict[str, dict[str, Json]]:
    """Returns the mean of each of ``values`` in each decile (1 to 10) of the tokens sorted by ``order``.

    Ties in ``order`` are split between deciles at random.
    """
    tokens = np.lexsort((np.random.default_rng(0).random(order.size), order))
    groups = np.split(tokens, [-(-number * order.size // DECILES) for number in range(1, DECILES)])
    return {
        name: {str(number): _round_finite(float(row[group].mean())) for number, group in enumerate(groups, start=1)}
        for name, row in values.items()
    }


def weight_classes(weights: Row, ends: Flags) -> dict[str, Flags]:
    """Returns a token mask per weight class; every token is in exactly one class.

    Classes: end of turn; no weight (the token matches none of the judge's tokens, or its weight is 0); below uniform;
    uniform or above.
    """
    low = weights < 1 - ROUNDING
    none = np.abs(weights) <= ROUNDING
    return {END: ends, NO_WEIGHT: ~ends & none, BELOW: ~ends & low & ~none, WEIGHTED: ~ends & ~low & ~none}


def kl_by_class(kl: Row, classes: Mapping[str, Flags]) -> dict[str, Json]:
    """Returns each class's share of the tokens, share of the KL, and KL per token; None if undefined."""
    every, total = float(kl.size), float(kl.sum())
    counts = {name: (float(flags.sum()), float(kl[flags].sum())) for name, flags in classes.items()}
    return {
        name: {"tokens": _ratio(tokens, every), "kl": _ratio(moved, total), "kl_per_token": _ratio(moved, tokens)}
        for name, (tokens, moved) in counts.items()
    }


def ranking_accuracy(chosen: Sequence[ResponseShift], rejected: Sequence[ResponseShift]) -> float | None:
    """Returns the share of pairs whose chosen response gained more than the rejected one; None if there are no pairs.

    Ties count one half. Gains are unweighted sums of log-ratios, as in DPO's reward accuracy.
    """
    if not chosen:
        return None
    ahead = [one.gain - other.gain for one, other in zip(chosen, rejected, strict=True)]
    return _round_finite(float(np.mean([0.5 + 0.5 * np.sign(gap) for gap in ahead])))


def mean_gain(responses: Sequence[ResponseShift]) -> float | None:
    """Returns the mean change in log-probability per response, in nats; None if there are no responses."""
    return _round_finite(float(np.mean([one.gain for one in responses]))) if responses else None


def quantiles(values: Row) -> dict[str, Json]:
    """Returns the median, the 90th and 99th percentiles and the maximum; an empty dict if there are no values."""
    if not values.size:
        return {}
    return {name: _round_finite(float(np.quantile(values, level))) for name, level in QUANTILES.items()}


def _ratio(top: float, under: float) -> float | None:
    return _round_finite(top / under) if under > 0 else None


def _round_finite(value: float) -> float | None:
    return round(value, 6) if math.isfinite(value) else None
