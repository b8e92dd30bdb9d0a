"""Records of weight rules: rounds, normalisation, sink rule and alignment on given numbers, in float64."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial

import torch
from jaxtyping import Float
from torch import Tensor

from attnpo.judge.attention import EagerAttentionMap, rollout_row
from attnpo.schema import SIDES, EncodedResponse, JudgeRound, PairWeights, TokenWeights
from attnpo.text.alignment import AlignMethod, align
from attnpo.weights.base import WeightSource
from attnpo.weights.pipeline import TrainingWeights, training_weights
from attnpo.weights.sources.reward_attention import response_attention
from tests.conformance.fields import Fields, Record
from tests.conformance.records import Check, Comparison, Item, built, compare_expected

ORDERS = {"official": "normalize_then_mean", "paper_order": "mean_then_normalize"}
EXACT = 1e-12  # absolute and relative, for numbers that one float64 formula gives

EDITED = (
    "the reference puts a lone judge token without a partner in front of the training ids; ours are never edited, "
    "weights checked on the unedited ids"
)
ZERO_MASS = "the reference divides by zero; here the remaining mass is shared equally, which was checked"
BAD_LENGTHS = "the reference ignores weights that do not fit their tokens; here they are refused, which was checked"


@cache
def weight_source(
    option: str,
    sink_tokens: int,
    *,
    layer: int | str | None = None,
    sink_min_length: int = 5,
    round_order: str = "normalize_then_mean",
) -> WeightSource:
    """The source of configs/weights/``option`` with the given post-processing, not yet resolved for a judge."""
    source: WeightSource = built(
        "weights",
        f"weights={option}",
        postprocess__sink_tokens=sink_tokens,
        postprocess__sink_min_length=sink_min_length,
        postprocess__round_order=round_order,
        **({} if layer is None else {"layer": layer}),
    )
    return source


@cache
def align_method() -> AlignMethod:
    """The method of ``align.method=levenshtein`` as the config gives it."""
    method: AlignMethod = built("align", method="levenshtein").method
    return method


def on_training_tokens(
    source: WeightSource, captured: PairWeights, ids: dict[str, list[int]], layers: tuple[int, ...]
) -> TrainingWeights:
    """The captured weights on given training ids, through the run's pipeline and its configured alignment.

    Every training token counts as holding one character of the response.
    """
    encoded = {side: EncodedResponse([], ids[side], _places(len(ids[side]))) for side in SIDES}
    return training_weights(source, captured, encoded, align_method(), layers=layers)


def _places(count: int) -> list[tuple[int, int]]:
    return [(place, place + 1) for place in range(count)]


def _row(ids: Sequence[int], weights: Float[Tensor, " n"]) -> TokenWeights:
    places = torch.tensor(_places(len(ids)), dtype=torch.long).reshape(-1, 2)
    return TokenWeights(torch.tensor(ids, dtype=torch.long), places, weights.unsqueeze(0))


# --------------------------------------------------------------------------------------------- losses.json


def recompute_layer(record: Record, comparison: Comparison) -> None:
    """Compares the weights of one layer, from per-head rows of two rounds: both orders, with and without K."""
    rounds = []
    for number in (1, 2):
        heads = [record.inputs.tensor(f"round{number}_{side}_attention_per_head") for side in SIDES]
        chosen, rejected = (_row(range(rows.shape[1]), rows.mean(0)) for rows in heads)
        rounds.append(JudgeRound(number == 1, chosen, rejected))
    compare_combined("attention", 1, tuple(rounds), {}, record, comparison)


def recompute_rollout(record: Record, comparison: Comparison) -> None:
    """Compares rollout from whole head-mean maps of two rounds: the product's last row, and the weights."""
    rounds, last_rows = [], {}
    for number in (1, 2):
        maps = record.inputs.tensor(f"round{number}_attention_head_mean_per_layer")
        last = torch.tensor([maps.shape[-1] - 1])
        row = rollout_row((EagerAttentionMap(layer[None, None]) for layer in maps.flip(0)), last)[0]
        spans = [record.inputs[f"round{number}_{side}_span"] for side in SIDES]
        chosen, rejected = (_row(range(end - start), row[start:end]) for start, end in spans)
        rounds.append(JudgeRound(number == 1, chosen, rejected))
        last_rows[f"round{number}_last_row"] = row
    compare_combined("rollout", None, tuple(rounds), last_rows, record, comparison)


def compare_combined(
    option: str,
    layer: int | None,
    rounds: tuple[JudgeRound, ...],
    others: Mapping[str, Tensor],
    record: Record,
    comparison: Comparison,
) -> None:
    """Compares the two rounds combined in both orders, with and without the sink rule, and the ``others``."""
    given, captured = record.hyperparameters, PairWeights("golden", rounds)
    shortest = given["K_min_len"]
    ids = {side: rounds[0].side(side).token_ids.tolist() for side in SIDES}
    results = dict(others)
    for order_name, order in ORDERS.items():
        for suffix, first in {"": 0, "_sink_fixed": given["K"]}.items():
            source = weight_source(option, first, layer=layer, sink_min_length=shortest, round_order=order).resolve(1)
            weights = on_training_tokens(source, captured, ids, source.layers_to_store(1))
            results |= {f"{side}_{order_name}{suffix}": getattr(weights, side) for side in SIDES}
            comparison.same("source lengths", list(weights.lengths), [float(len(ids[side])) for side in SIDES])
    comparison.same("quantities", sorted(results), sorted(record.expected))
    compare_expected(record, comparison, lambda filling: results)


def recompute_credit(record: Record, comparison: Comparison) -> None:
    """Compares ABC's credit, from a reward model's last attention map, and the dense rewards that follow from it.

    Every token of the response counts as holding one character of it, the last one too.
    """
    inputs, given = record.inputs, record.hyperparameters
    before, count = inputs["query_len"], inputs["response_len"]
    maps = inputs.tensor("reward_model_attention_last_layer_head_mean")
    comparison.same("tokens", list(maps.shape), [before + count] * 2)
    ids = list(range(count))
    row = response_attention(maps[-1:], EncodedResponse(list(range(before)), ids, _places(count)))
    source = weight_source("reward_attention", 0, layer=1).resolve(1)
    captured = PairWeights("golden", (JudgeRound(True, row, row),))
    found = on_training_tokens(source, captured, dict.fromkeys(SIDES, ids), source.layers_to_store(1)).chosen
    beta, reward = given["beta"], given["terminal_reward"]
    dense = beta * reward * found
    dense[-1] += (1 - beta) * reward
    compare_expected(record, comparison, lambda filling: {"credit_distribution": found, "dense_rewards": dense})


def recompute_alignment(record: Record, comparison: Comparison) -> None:
    """Compares weights moved onto training ids, times their count, and the share of judge tokens matched."""
    inputs, expected = record.inputs, record.expected
    ids, after = inputs["training_token_ids"], expected["training_token_ids_after"]
    judge_ids, weights = inputs["judge_token_ids"], inputs.tensor("judge_weights")
    added = _added(ids, after, comparison)
    carried = align_weights(judge_ids, weights, ids)
    target = expected.tensor("aligned_weights_times_judge_count")
    comparison.numbers("aligned weights", carried, target[added:], rtol=record.rtol, atol=EXACT)
    share = align(judge_ids, _places(len(judge_ids)), weights, ids, _places(len(ids)), align_method())
    matched = expected["matched_fraction_of_judge_tokens"] - added / len(judge_ids)
    comparison.numbers("matched share", share.source_coverage, matched, rtol=record.rtol, atol=EXACT)
    _check_added(judge_ids, weights, after[:added], target[:added], comparison)


def _added(ids: list[int], after: list[int], comparison: Comparison) -> int:
    """How many ids the reference put in front; the record is a variant when it did."""
    added = len(after) - len(ids)
    if after == ids:
        return 0
    comparison.variant = EDITED
    comparison.require(
        added > 0 and after[added:] == ids, f"training ids: expected {ids} with ids in front, got {after}"
    )
    return max(0, added)


def _check_added(judge_ids: list[int], weights: Tensor, ids: list[int], target: Tensor, comparison: Comparison) -> None:
    """Notes a problem unless what the reference put in front is the beginning of the judge's tokens and weights."""
    if ids:
        comparison.same("ids put in front", ids, judge_ids[: len(ids)])
        expected = weights[: len(ids)] * len(judge_ids)
        comparison.numbers("weights put in front", target, expected, rtol=EXACT, atol=EXACT)


def align_weights(judge_ids: list[int], weights: Float[Tensor, " n"], ids: list[int]) -> Float[Tensor, " m"]:
    """Weights of judge tokens on training ids, times the judge's token count."""
    row = _row(judge_ids, weights)
    captured = PairWeights("golden", (JudgeRound(True, row, row),))
    source = weight_source("attention", 0, layer=1).resolve(1)
    aligned = on_training_tokens(source, captured, dict.fromkeys(SIDES, ids), (1,))
    # The source makes a distribution of its row; a record's weights are moved as they are.
    return aligned.chosen * weights.sum() * aligned.lengths[0]


# --------------------------------------------------------------------------------------------- unit_cases.json


def unit_items(cases: Fields, prefix: str) -> Iterator[Item]:
    """One item per case of the sink rule and of the alignment."""
    for index, case in enumerate(map(Fields, cases["sink_fix"])):
        yield Check(f"{prefix}sink_fix", f"{index:02d}", partial(sink_case, case))
    for index, case in enumerate(map(Fields, cases["alignment"])):
        yield Check(f"{prefix}alignment", f"{index:02d} {case['name']}", partial(alignment_case, case))


def sink_case(case: Fields, comparison: Comparison) -> None:
    """Compares the sink rule (K = 1, K' = 5) on one row, or checks ours where the reference fails."""
    weights = case.tensor("weights")
    postprocess = weight_source("attention", 1, layer=1).postprocess
    if postprocess is None:
        comparison.mismatch("weights=attention has no postprocess")
        return
    fixed = postprocess([weights])
    if case.get("reference_error") is not None:
        comparison.variant = ZERO_MASS
        comparison.require(
            case.get("fixed") is None and not weights[1:].any(),
            "an error is expected for a row without mass only",
        )
        comparison.numbers("fixed", fixed, torch.full_like(weights, 1.0 / len(weights)), atol=EXACT)
        return
    # The source normalises first; the rule itself keeps the total.
    comparison.numbers("fixed", fixed * weights.sum(), case.tensor("fixed"), rtol=EXACT, atol=EXACT)


def alignment_case(case: Fields, comparison: Comparison) -> None:
    """Compares one alignment; where several are best, asks only that the reference's is one of them."""
    ids, after = [*case["completion_ids"], case["eos_id"]], case["expected_completion_ids"]
    judge_ids, weights, target = case["judge_ids"], case.tensor("weights"), case.tensor("expected_weights")
    if len(weights) != len(judge_ids):
        comparison.variant = BAD_LENGTHS
        comparison.same("completion ids", ids, after)
        comparison.numbers("weights of the reference", target, torch.zeros(len(ids)))
        refused = _refused(judge_ids, weights, ids)
        comparison.require(refused, "weights that do not fit their tokens: expected a ValueError")
        return
    added = _added(ids, after, comparison)
    comparison.same("ids_changed", added > 0, case["ids_changed"])
    carried = align_weights(judge_ids, weights, ids)
    if case["unique_alignment"] or not is_tied(carried, target[added:], judge_ids, weights, ids):
        comparison.numbers("aligned weights", carried, target[added:], rtol=EXACT, atol=EXACT)
    _check_added(judge_ids, weights, after[:added], target[:added], comparison)


def _refused(judge_ids: list[int], weights: Tensor, ids: list[int]) -> bool:
    try:
        align(judge_ids, _places(len(judge_ids)), weights, ids, _places(len(ids)), align_method())
    except ValueError:
        return True
    return False


def is_tied(
    ours: Float[Tensor, " m"],
    theirs: Float[Tensor, " m"],
    judge_ids: Sequence[int],
    weights: Float[Tensor, " n"],
    ids: Sequence[int],
    tolerance: float = EXACT,
) -> bool:
    """Whether two different rows of weights on ``ids`` come from edit alignments of the same cost.

    Ours come from one of lowest cost, so that theirs do then. ``weights`` are the judge's, before they are multiplied
    by their count.
    """
    if torch.allclose(ours, theirs, rtol=tolerance, atol=tolerance):
        return False
    costs = {_alignment_cost(row, judge_ids, weights, ids, tolerance) for row in (ours, theirs)}
    return len(costs) == 1 and None not in costs


def _alignment_cost(
    row: Tensor, judge_ids: Sequence[int], weights: Tensor, ids: Sequence[int], tolerance: float
) -> int | None:
    """Edits of the alignment that carried n times the judge's weights to ``row``; None when none did, in order.

    A judge token whose weight is 0 counts as one without a partner.
    """
    if row.shape != (len(ids),):
        return None
    given = (weights * len(judge_ids)).tolist()
    cost, i, j = 0, -1, -1  # the last pair of partners
    for place, value in enumerate(row.tolist()):
        if value == 0:
            continue
        equal = (k for k in range(i + 1, len(judge_ids)) if judge_ids[k] == ids[place])
        partner = next((k for k in equal if abs(given[k] - value) <= tolerance * (1 + abs(value))), None)
        if partner is None:
            return None
        cost += max(partner - i, place - j) - 1
        i, j = partner, place
    return cost + max(len(judge_ids) - i, len(ids) - j) - 1
