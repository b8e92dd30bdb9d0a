"""Records of weight rules: rounds, normalisation, sink rule and alignment on given numbers, in float64."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from attnpo.conformance.records import Check, Comparison, Item, as_double, built
from attnpo.models.attention_rows import rolled
from attnpo.schema import SIDES, EncodedResponse, PairWeights, Round, TokenWeights
from attnpo.text.alignment import AlignMethod, align
from attnpo.weights.base import WeightSource
from attnpo.weights.pipeline import TrainingWeights, training_weights

ORDERS = {"official": "normalize_then_mean", "paper_order": "mean_then_normalize"}
EXACT = 1e-12  # absolute and relative, for numbers that one float64 formula gives

EDITED = (
    "the reference puts a lone judge token without a partner in front of the training ids; ours are never edited, "
    "weights checked on the unedited ids"
)
ZERO_MASS = "the reference divides by zero; here the remaining mass is shared equally, which was checked"
BAD_LENGTHS = "the reference ignores weights that do not fit their tokens; here they are refused, which was checked"


def rollout_source(**postprocess: Any) -> WeightSource:
    """The source of ``weights=rollout`` with the given post-processing."""
    values = {f"postprocess__{key}": value for key, value in postprocess.items()}
    source: WeightSource = built("weights", ["weights=rollout"], **values)
    return source


def attention_source(layer: int | str = 1, depth: int = 1, **postprocess: Any) -> WeightSource:
    """The source of ``weights=attention`` with the given post-processing, resolved for a judge of ``depth`` layers."""
    values = {f"postprocess__{key}": value for key, value in postprocess.items()}
    source: WeightSource = built("weights", ["weights=attention"], layer=layer, **values)
    return source.resolve(depth)


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


def _row(ids: Sequence[int], weights: Float[Tensor, "n"]) -> TokenWeights:
    places = torch.tensor(_places(len(ids)), dtype=torch.long).reshape(-1, 2)
    return TokenWeights(torch.tensor(ids, dtype=torch.long), places, weights.unsqueeze(0))


# --------------------------------------------------------------------------------------------- losses.json


def layer_record(record: dict[str, Any], found: Comparison) -> None:
    """Nothing; compares the weights of one layer, from per-head rows of two rounds: both orders, with and without K."""
    inputs = record["inputs"]
    rounds = []
    for number in (1, 2):
        heads = {side: as_double(inputs[f"round{number}_{side}_attention_per_head"]) for side in SIDES}
        rows = {side: _row(list(range(heads[side].shape[1])), heads[side].mean(0)) for side in SIDES}
        rounds.append(Round(number == 1, rows["chosen"], rows["rejected"]))
    compare_combined(PairWeights("golden", tuple(rounds)), attention_source, (1,), record, found)


def rollout_record(record: dict[str, Any], found: Comparison) -> None:
    """Nothing; compares rollout from whole head-mean maps of two rounds: the product's last row, and the weights."""
    inputs, expected, rtol = record["inputs"], record["expected"], float(record["rtol"])
    rounds = []
    for number in (1, 2):
        maps = as_double(inputs[f"round{number}_attention_head_mean_per_layer"])
        last = torch.tensor([maps.shape[-1] - 1])
        row = rolled((GivenMap(layer) for layer in maps.flip(0)), last)[0]
        found.numbers(f"round{number}_last_row", row, expected[f"round{number}_last_row"], rtol=rtol, atol=EXACT)
        spans = {side: slice(*inputs[f"round{number}_{side}_span"]) for side in SIDES}
        sides = {side: _row(list(range(spans[side].stop - spans[side].start)), row[spans[side]]) for side in SIDES}
        rounds.append(Round(number == 1, sides["chosen"], sides["rejected"]))
    compare_combined(PairWeights("golden", tuple(rounds)), rollout_source, (0,), record, found, ROUND_ROWS)


ROUND_ROWS = ("round1_last_row", "round2_last_row")


@dataclass(frozen=True)
class GivenMap:
    """A layer whose head-mean attention is known as a whole."""

    map: Float[Tensor, "T T"]

    def rows(self, last: Int[Tensor, "batch"]) -> Float[Tensor, "batch heads T"]:
        """The rows of ``last`` as those of a single head."""
        return self.map[last][:, None]

    def pull(self, weights: Float[Tensor, "batch T"]) -> Float[Tensor, "batch T"]:
        """``weights`` times the map."""
        return weights @ self.map


def compare_combined(
    captured: PairWeights,
    make: Callable[..., WeightSource],
    layers: tuple[int, ...],
    record: dict[str, Any],
    found: Comparison,
    compared_before: Sequence[str] = (),
) -> None:
    """Nothing; compares the two rounds combined in both orders, with and without the sink rule."""
    expected, rtol = record["expected"], float(record["rtol"])
    ids = {side: captured.rounds[0].side(side).token_ids.tolist() for side in SIDES}
    sinks = {"": 0, "_sink_fixed": int(record["hyperparameters"]["K"])}
    shortest = int(record["hyperparameters"]["K_min_len"])
    compared = set(compared_before)
    for order_name, order in ORDERS.items():
        for suffix, first in sinks.items():
            source = make(round_order=order, sink_tokens=first, sink_min_length=shortest)
            weights = on_training_tokens(source, captured, ids, layers)
            for side in SIDES:
                name = f"{side}_{order_name}{suffix}"
                found.numbers(name, getattr(weights, side), expected[name], rtol=rtol, atol=EXACT)
                compared.add(name)
            found.same("source lengths", list(weights.lengths), [float(len(ids[side])) for side in SIDES])
    found.same("quantities", sorted(compared), sorted(expected))


def align_record(record: dict[str, Any], found: Comparison) -> None:
    """Nothing; compares weights moved onto training ids, times their count, and the share of judge tokens matched."""
    inputs, expected = record["inputs"], record["expected"]
    ids, after = inputs["training_token_ids"], expected["training_token_ids_after"]
    judge_ids, weights = inputs["judge_token_ids"], as_double(inputs["judge_weights"])
    added = _added(ids, after, found)
    carried = moved(judge_ids, weights, ids)
    rtol = float(record["rtol"])
    target = expected["aligned_weights_times_judge_count"]
    found.numbers("aligned weights", carried, target[added:], rtol=rtol, atol=EXACT)
    matched = float(expected["matched_fraction_of_judge_tokens"])
    share = align(judge_ids, _places(len(judge_ids)), weights, ids, _places(len(ids)), align_method())
    found.numbers("matched share", share.source_coverage, matched - added / len(judge_ids), rtol=rtol, atol=EXACT)
    _check_added(judge_ids, weights, after[:added], target[:added], found)


def _added(ids: list[int], after: list[int], found: Comparison) -> int:
    """How many ids the reference put in front; the record is a variant when it did."""
    added = len(after) - len(ids)
    if after == ids:
        return 0
    found.variant = EDITED
    found.require(added > 0 and after[added:] == ids, f"training ids: expected {ids} with ids in front, got {after}")
    return max(0, added)


def _check_added(judge_ids: list[int], weights: Tensor, ids: list[int], target: list[float], found: Comparison) -> None:
    """Nothing; a problem unless what the reference put in front is the beginning of the judge's tokens and weights."""
    if ids:
        found.same("ids put in front", ids, judge_ids[: len(ids)])
        expected = weights[: len(ids)] * len(judge_ids)
        found.numbers("weights put in front", target, expected, rtol=EXACT, atol=EXACT)


def moved(judge_ids: list[int], weights: Float[Tensor, "n"], ids: list[int]) -> Float[Tensor, "m"]:
    """Weights of judge tokens on training ids, times the judge's token count."""
    row = _row(judge_ids, weights)
    captured = PairWeights("golden", (Round(True, row, row),))
    found = on_training_tokens(attention_source(sink_tokens=0), captured, {side: ids for side in SIDES}, (1,))
    # The source makes a distribution of its row; a record's weights are moved as they are.
    return found.chosen * weights.sum() * found.lengths[0]


# --------------------------------------------------------------------------------------------- unit_cases.json


def unit_items(cases: dict[str, list[dict[str, Any]]], prefix: str) -> Iterator[Item]:
    """One item per case of the sink rule and of the alignment."""
    for index, case in enumerate(cases["sink_fix"]):
        yield Check(f"{prefix}sink_fix", f"{index:02d}", partial(sink_case, case))
    for index, case in enumerate(cases["alignment"]):
        yield Check(f"{prefix}alignment", f"{index:02d} {case['name']}", partial(alignment_case, case))


def sink_case(case: dict[str, Any], found: Comparison) -> None:
    """Nothing; compares the sink rule (K = 1, K' = 5) on one row, or checks ours where the reference fails."""
    weights = as_double(case["weights"])
    postprocess = attention_source(sink_tokens=1, sink_min_length=5).postprocess
    if postprocess is None:
        found.mismatch("weights=attention has no postprocess")
        return
    fixed = postprocess([weights])
    if case["reference_error"] is not None:
        found.variant = ZERO_MASS
        found.require(
            case["fixed"] is None and not weights[1:].any(), "an error is expected for a row without mass only"
        )
        found.numbers("fixed", fixed, torch.full_like(weights, 1.0 / len(weights)), atol=EXACT)
        return
    # The source normalises first; the rule itself keeps the total.
    found.numbers("fixed", fixed * weights.sum(), case["fixed"], rtol=EXACT, atol=EXACT)


def alignment_case(case: dict[str, Any], found: Comparison) -> None:
    """Compares one alignment; where several are best, asks only that the reference's is one of them."""
    ids, after = [*case["completion_ids"], case["eos_id"]], case["expected_completion_ids"]
    judge_ids, weights, target = case["judge_ids"], as_double(case["weights"]), case["expected_weights"]
    if len(weights) != len(judge_ids):
        found.variant = BAD_LENGTHS
        found.same("completion ids", ids, after)
        found.numbers("weights of the reference", target, torch.zeros(len(ids)))
        found.require(_refused(judge_ids, weights, ids), "weights that do not fit their tokens: expected a ValueError")
        return
    added = _added(ids, after, found)
    found.same("ids_changed", added > 0, case["ids_changed"])
    carried = moved(judge_ids, weights, ids)
    if case["unique_alignment"] or not is_tied(carried, as_double(target)[added:], judge_ids, weights, ids):
        found.numbers("aligned weights", carried, target[added:], rtol=EXACT, atol=EXACT)
    _check_added(judge_ids, weights, after[:added], target[:added], found)


def _refused(judge_ids: list[int], weights: Tensor, ids: list[int]) -> bool:
    try:
        align(judge_ids, _places(len(judge_ids)), weights, ids, _places(len(ids)), align_method())
    except ValueError:
        return True
    return False


def is_tied(
    ours: Float[Tensor, "m"],
    theirs: Float[Tensor, "m"],
    judge_ids: Sequence[int],
    weights: Float[Tensor, "n"],
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
