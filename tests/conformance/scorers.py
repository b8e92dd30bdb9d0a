"""Records of weights from two scorers' numbers: TIS-DPO, cDPO, SePO, with the losses that read them.

The given log-ratios or logits stand where a run's scorers have theirs. From there on it is the run's way: the source
that config builds, its pipeline onto training tokens, the objective that config builds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from attnpo.objectives.base import PreferenceObjective
from attnpo.schema import SIDES, EncodedResponse, JudgeRound, Kind, PairWeights, TokenStats, TokenWeights
from attnpo.text.alignment import AlignMethod
from attnpo.training.pair_values import pair_values
from attnpo.weights.base import WeightSource
from attnpo.weights.pipeline import training_weights
from tests.conformance.batches import both_sides, by_side, filled, pair_batch, row_group
from tests.conformance.distributions import WAYS, LogitRows
from tests.conformance.fields import Fields, Record
from tests.conformance.records import Comparison, built, compare_expected

TWO = {"positive__path": "positive", "negative__path": "negative"}  # never looked at: the records hold their numbers
TRANSFORMS = {"threshold_and_scale": "scale", "rank_based": "rank", "threshold": "threshold", "binary": "binary"}
PARAMETERS = {
    **{"min_val": "low", "max_val": "high", "lower_threshold": "low", "upper_threshold": "high"},
    **{"min_scale": "least", "max_scale": "most", "top_percent": "top_percent"},
}
PAPER = {"paper_k": "k", "paper_mu": "mu", "paper_L": "low", "paper_U": "high"}
COLUMNS = ("official_tokenwise_loss_matrix", "official_loss")


def response_weights(
    source: WeightSource, raw: Float[Tensor, "rows R"], mask: Bool[Tensor, "rows R"]
) -> Float[Tensor, "rows R"]:
    """The weights that ``source`` gives for raw numbers of its scorers; 0 off the responses.

    The last token of each response ends its turn, every other holds a character.
    """
    rows = [values[kept] for values, kept in zip(raw, mask, strict=True)]
    half, weighed = len(rows) // 2, []
    for chosen, rejected in zip(rows[:half], rows[half:], strict=True):
        sides = dict(zip(SIDES, (chosen, rejected), strict=True))
        encoded = {side: _response(len(row)) for side, row in sides.items()}
        parts = [
            TokenWeights(
                torch.tensor(encoded[side].response_ids), torch.tensor(encoded[side].offsets), row.unsqueeze(0)
            )
            for side, row in sides.items()
        ]
        captured = PairWeights("golden", (JudgeRound(True, parts[0], parts[1]),))
        weighed.append(training_weights(source, captured, encoded, AlignMethod.LEVENSHTEIN, layers=(0,)))
    found = [pair.chosen for pair in weighed] + [pair.rejected for pair in weighed]
    padded = pad_sequence(found, batch_first=True)
    return F.pad(padded, (0, mask.shape[1] - padded.shape[1]))


def _response(count: int) -> EncodedResponse:
    places = [(place, place + 1) for place in range(count - 1)]
    return EncodedResponse([], list(range(count)), [*places, (count - 1, count - 1)])


# --------------------------------------------------------------------------------------------- TIS-DPO


def recompute_tis_dpo(record: Record, comparison: Comparison) -> None:
    """Compares weights, weighted KLs, losses and rewards of weights=contrast with objective=tis_dpo, both ways."""
    given = record.hyperparameters
    parameters = {f"form__{PARAMETERS[name]}": value for name, value in given["transform_params"].items()}
    source = built("weights", "weights=contrast", form__transform=TRANSFORMS[given["transform"]], **TWO, **parameters)
    paper = {f"form__{key}": given[name] for name, key in PAPER.items()}
    formula = built("weights", "weights=contrast", form__transform="paper", **TWO, **paper)
    keys = {"beta": given["beta"], "alpha": given["alpha"]}
    steps = [built("objective", "objective=tis_dpo", token_level=kl, **keys) for kl in (given["token_level_kl"], True)]
    for way in WAYS:
        compare_expected(record, comparison, partial(_tis_dpo, source, formula, steps, record, way), way)


def _tis_dpo(
    source: WeightSource,
    formula: WeightSource,
    steps: Sequence[PreferenceObjective],
    record: Record,
    way: str,
    filling: float,
) -> dict[str, Tensor]:
    """Every quantity of a TIS-DPO record by its name there; ``steps``: its objective, and the one that sums the KL.

    Records give log pi_negative - log pi_positive. Their paper's formula also stands off the responses, where their
    difference is 0.
    """
    inputs, given = record.inputs, LogitRows.of(record.inputs)
    mask = given.batch.main.response_mask
    raw = filled(-both_sides(inputs, "logp_model2_minus_model1"), mask, filling)
    policy, reference = given.scored(WAYS[way], ("kl_policy_ref",), filling)
    batch = pair_batch(row_group(mask, response_weights(source, raw, mask), factors=source.kind is Kind.FACTOR))
    output, summed = (objective(policy, reference, batch) for objective in steps)
    paper = filled(response_weights(formula, raw, mask), mask, record.hyperparameters["paper_k"])
    return {
        **{f"{side}_weights": half for side, half in _by_side(inputs, batch.main.token_weights["reward"]).items()},
        **{f"paper_style_{side}_weights": half for side, half in _by_side(inputs, paper).items()},
        **{f"{side}_weighted_kl": summed.extras[f"weighted_kl/{side}"] for side in SIDES},
        "loss_per_example": output.losses,
        "loss": pair_values(policy, output, batch)["loss"].mean(),
        "chosen_rewards": output.chosen_rewards,
        "rejected_rewards": output.rejected_rewards,
    }


def _by_side(inputs: Fields, rows: Float[Tensor, "rows R"]) -> Mapping[str, Float[Tensor, "pairs r"]]:
    return by_side(inputs, "mask", rows)


# --------------------------------------------------------------------------------------------- cDPO


def recompute_cdpo(record: Record, comparison: Comparison) -> None:
    """Compares weights and losses of weights=contrast_cdpo with objective=twdpo, both ways."""
    source, objective = _of_cdpo(record, comparison)
    for way in WAYS:
        compare_expected(record, comparison, partial(_cdpo, source, objective, record.inputs, way), way)


def columns_of_cdpo(record: Record, comparison: Comparison) -> None:
    """Compares the code's loss of token columns with ours of sums, after the sums were taken apart."""
    kept = {name: value for name, value in record.expected.items() if name in COLUMNS}
    only = replace(record, expected=Fields(kept))
    source, objective = _of_cdpo(record, comparison)

    def evaluate(filling: float) -> dict[str, Tensor]:
        inputs = record.inputs
        mask, ratios, weights = _cdpo_rows(source, inputs, "chunks", filling)
        terms = record.hyperparameters["beta"] * torch.where(mask, weights * ratios, 0.0)
        chosen, rejected = terms.chunk(2)
        width = max(inputs.at(side).tensor("mask").shape[1] for side in SIDES)
        prompt = torch.zeros(len(chosen), inputs["prompt_tokens"] - 1, dtype=terms.dtype)
        matrix = -F.logsigmoid(torch.cat([prompt, (chosen - rejected)[:, :width]], dim=1))
        return {"official_tokenwise_loss_matrix": matrix, "official_loss": matrix.mean()}

    compare_expected(only, comparison, evaluate)
    comparison.require("token_weights" in objective.requires, "objective=twdpo reads no weights")
    comparison.vary("the code's loss is a mean over token columns and the prompt's; ours is of sums, as the paper's")


def _of_cdpo(record: Record, comparison: Comparison) -> tuple[WeightSource, PreferenceObjective]:
    given = record.hyperparameters
    comparison.same("contrast_coef (ours is fixed)", given["contrast_coef"], 1.0)
    source: WeightSource = built("weights", "weights=contrast_cdpo", form__only_neg=given["only_neg"], **TWO)
    objective: PreferenceObjective = built("objective", "objective=twdpo", beta=given["beta"])
    return source, objective


def _cdpo_rows(
    source: WeightSource, inputs: Fields, way: str, filling: float
) -> tuple[Bool[Tensor, "rows R"], Float[Tensor, "rows R"], Float[Tensor, "rows R"]]:
    """Mask, log-ratios of policy and reference, and weights from both scorers' logits."""
    mask = both_sides(inputs, "mask") == 1
    labels = both_sides(inputs, "tokens").long()[mask]
    positive, negative = (both_sides(inputs, f"{model}_logits")[mask] for model in ("positive", "negative"))
    found = WAYS[way](positive, labels, negative, ("contrast",))["joint:contrast"]
    raw = found.new_full(mask.shape, filling).masked_scatter(mask, found)
    ratios = filled(both_sides(inputs, "policy_logps") - both_sides(inputs, "ref_logps"), mask, filling)
    return mask, ratios, response_weights(source, raw, mask)


def _cdpo(
    source: WeightSource, objective: PreferenceObjective, inputs: Fields, way: str, filling: float
) -> dict[str, Tensor]:
    mask, ratios, weights = _cdpo_rows(source, inputs, way, filling)
    batch = pair_batch(row_group(mask, weights, factors=source.kind is Kind.FACTOR))
    policy = TokenStats(logps=ratios)
    output = objective(policy, TokenStats(logps=torch.zeros_like(ratios)), batch)
    return {
        **{f"{side}_weights": half for side, half in _by_side(inputs, weights).items()},
        "loss_per_example": output.losses,
        "loss": pair_values(policy, output, batch)["loss"].mean(),
    }


# --------------------------------------------------------------------------------------------- SePO


def recompute_sepo(record: Record, comparison: Comparison) -> None:
    """Compares selected tokens and losses of weights=selection with objective=simpo without a margin."""
    given = record.hyperparameters
    source = built("weights", "weights=selection", top_fraction=given["top_fraction"], oracle__path="oracle")
    objective = built("objective", "objective=simpo", beta=given["scale"], gamma_beta_ratio=0.0)
    weights = response_weights(source, *_sepo_rows(record.inputs))
    for side, half in _by_side(record.inputs, weights).items():
        kept = [torch.where(row != 0)[0].tolist() for row in half]
        comparison.same(f"{side}_selected", kept, record.expected[f"{side}_selected"])
    selected = record.without(tuple(f"{side}_selected" for side in SIDES))
    compare_expected(selected, comparison, partial(_sepo, source, objective, record.inputs))


def _sepo_rows(inputs: Fields) -> tuple[Float[Tensor, "rows R"], Bool[Tensor, "rows R"]]:
    """The scores and the mask; the first token, which is never selected, has none in the records."""
    mask = both_sides(inputs, "mask") == 1
    raw = torch.zeros(mask.shape, dtype=torch.float64)
    given = [row for side in SIDES for row in inputs[side]["advantage_tokens_2_to_n"]]
    for row, values in zip(raw, given, strict=True):
        row[1 : 1 + len(values)] = torch.tensor(values, dtype=torch.float64)
    return raw, mask


def _sepo(source: WeightSource, objective: PreferenceObjective, inputs: Fields, filling: float) -> dict[str, Tensor]:
    raw, mask = _sepo_rows(inputs)
    weights = response_weights(source, filled(raw, mask, filling), mask)
    policy = TokenStats(logps=filled(both_sides(inputs, "policy_logps"), mask, filling))
    batch = pair_batch(row_group(mask, weights, factors=source.kind is Kind.FACTOR))
    output = objective(policy, None, batch)
    return {"loss_per_example": output.losses, "loss": pair_values(policy, output, batch)["loss"].mean()}
