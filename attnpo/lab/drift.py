"""Where a run's policy moved from its base, measured after training (config node ``drift``).

On validation pairs, on training pairs (ranking alone) and, where a truth samples answers, on those: the policy's answer
to a prompt beside the base's, as a pair that is weighed as the training pairs are. Nothing goes into the store.
"""

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from attnpo.cli.progress import phase
from attnpo.data.arrow_rows import pair_ids_of, pairs_of
from attnpo.data.collate import TrainingExample, bare_rows, collate
from attnpo.lab.analysis.drift import Moved, Row, by_token, mean_gain, quantiles, ranking_accuracy
from attnpo.models.layouts import Sequences, padded
from attnpo.models.scored import ScoredLM
from attnpo.objectives.base import PreferenceObjective
from attnpo.run.components import Truth
from attnpo.run.inputs import Inputs
from attnpo.run.models import load_reference
from attnpo.run.other_pairs import token_factors, weigh_others
from attnpo.run.point_cache import Memory
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

TOKENS_PER_FORWARD = 2048  # padded; on a CPU larger batches are slower
EXAMPLES_AT_ONCE = 256

# The base's numbers on a forward's rows, for the next point of a study; those of a large model are not kept.
_of_base = Memory(entries=64, room=1 << 22)  # bytes


@dataclass(frozen=True)
class TrainedRun:
    """A trained policy with what it was trained on; ``reference``: the kind of its reference."""

    policy: ScoredLM
    inputs: Inputs
    readers: Readers
    objective: PreferenceObjective
    reference: str
    truth: Truth | None


@phase("measuring where the policy moved")
def measure_drift(
    run: TrainedRun, sampled: Sequence[PreferencePair], val_pairs: int, train_pairs: int
) -> dict[str, Json]:
    """Measures where the policy moved, on so many pairs of each split, as ``RunResult.drift`` holds it.

    ``sampled``: prompts with the policy's answer in the place of the chosen and the base's in that of the rejected one.
    UserError for a model without a plain head.
    """
    began = time.perf_counter()
    measured = _measured(run, sampled, {"val": val_pairs, "train": train_pairs})
    seconds = time.perf_counter() - began
    log.info("where the policy moved: measured in %.1f s", seconds)
    return {**measured, "seconds": round(seconds, 2)}


def _measured(run: TrainedRun, sampled: Sequence[PreferencePair], counts: Mapping[str, int]) -> dict[str, Json]:
    inputs, truth, base = run.inputs, run.truth, run.readers.base
    models = _Models(run, load_reference(base, run.reference, run.policy), digest(base.fingerprint()))
    first = {split: _first(inputs.examples[split].examples, count) for split, count in counts.items()}
    pairs = {
        split: pairs_of(inputs.pairs[split].pairs, [example.pair_id for example in examples])
        for split, examples in first.items()
    }
    val = _both_sides(models, first["val"], pairs["val"])
    train = _both_sides(models, first["train"], None)
    out: dict[str, Json] = {"pairs": by_token([*val.chosen, *val.rejected])}
    displacement: dict[str, Json] = {
        f"{split}_{side}": mean_gain(moved)
        for split, sides in (("train", train), ("validation", val))
        for side, moved in zip(SIDES, (sides.chosen, sides.rejected), strict=True)
    }
    accuracy: dict[str, Json] = {
        "train": ranking_accuracy(train.chosen, train.rejected),
        "validation": ranking_accuracy(val.chosen, val.rejected),
    }
    if truth is not None:
        flipped = [truth.is_flipped(pairs["train"][pair_id]) for pair_id in train.pair_ids]
        for name, wanted in (("train_clean", False), ("train_flipped", True)):
            kept = [place for place, one in enumerate(flipped) if one is wanted]
            accuracy[name] = ranking_accuracy([train.chosen[i] for i in kept], [train.rejected[i] for i in kept])
    if sampled:
        answers = _both_sides(
            models,
            weigh_others(inputs.recipe, inputs.weighed, run.readers, sampled),
            {pair.pair_id: pair for pair in sampled},
        )
        out["answers"] = by_token(answers.chosen)
        displacement["base_answers"] = mean_gain(answers.rejected)
    out |= {"ranking_accuracy": accuracy, "displacement": displacement}
    beta = getattr(run.objective, "beta", None)
    if beta is not None and not isinstance(inputs.weighed.source, OnlineSource):
        factors = np.concatenate(list(_factors(run, inputs.examples["train"].examples)) or [np.zeros(0)])
        out["effective_beta"] = quantiles(float(beta) * factors)
    return out


def _first(examples: Sequence[TrainingExample], count: int) -> list[TrainingExample]:
    """Returns the first examples in the order of their pairs' ids."""
    ids = pair_ids_of(examples)
    return [examples[place] for place in sorted(range(len(ids)), key=ids.__getitem__)[:count]]


# ------------------------------------------------------------------------------------------------ the models' numbers


@dataclass(frozen=True)
class _Models:
    """The run and the model it started from; ``of_base``: digest of what makes that one's numbers."""

    run: TrainedRun
    base: ScoredLM
    of_base: str


@dataclass(frozen=True)
class _Sides:
    """What happened to the responses of pairs, in their order."""

    pair_ids: list[str]
    chosen: list[Moved]
    rejected: list[Moved]


def _both_sides(
    models: _Models, examples: Sequence[TrainingExample], pairs: Mapping[str, PreferencePair] | None
) -> _Sides:
    """Returns how far the policy moved at each token of the examples' responses. UserError for a model without a plain
    head.

    ``pairs``: theirs, where it is of interest which tokens are decisive.
    """
    truth, source = models.run.truth, models.run.inputs.weighed.source
    scored = _scored(models, [side for example in examples for side in example.sides])
    moved: dict[str, list[Moved]] = {side: [] for side in SIDES}
    for number, example in enumerate(examples):
        for place, side in enumerate(SIDES):
            kl, gain = scored[2 * number + place]
            offsets = example.sides[place].offsets
            known = None if truth is None or pairs is None else truth.decisive(pairs[example.pair_id], side, offsets)
            moved[side].append(
                Moved(
                    kl,
                    gain,
                    np.array([start >= end for start, end in offsets], dtype=bool),
                    _relative(source, example, place),
                    None if known is None else np.array(known, dtype=bool),
                )
            )
    return _Sides([example.pair_id for example in examples], moved["chosen"], moved["rejected"])


def _scored(models: _Models, sides: Sequence[EncodedResponse]) -> list[tuple[Row, float]]:
    """Of each response the KL at its tokens and the gain in log-probability, in the order given."""
    base = models.run.readers.base
    for model in (models.run.policy, models.base):
        model.eval().to(base.device)
    lengths = [len(side.prompt_ids) + len(side.response_ids) for side in sides]
    order = sorted(range(len(sides)), key=lambda place: lengths[place])
    numbers: dict[int, tuple[Row, float]] = {}
    while order:
        size = len(order)
        while size > 1 and size * lengths[order[size - 1]] > TOKENS_PER_FORWARD:
            size -= 1
        chunk, order = order[:size], order[size:]
        group, stats = _on_base(models, [(sides[i].prompt_ids, sides[i].response_ids) for i in chunk])
        with base.autocast():
            policy = score_policy(models.run.policy, models.base, stats, group)
        gains = (policy.logps.double() - stats.logps.double()).sum(-1).tolist()  # exactly 0 off the response
        kl, mask = policy.joint["kl_policy_ref"].double().cpu(), group.response_mask.cpu()
        for row, i in enumerate(chunk):
            numbers[i] = kl[row][mask[row]].numpy(), gains[row]
    return [numbers[i] for i in range(len(sides))]


def _on_base(models: _Models, sequences: Sequences) -> tuple[RowGroup, TokenStats]:
    """Returns the rows of one forward with the base's statistics, which most points of a study ask for again."""
    base = models.run.readers.base
    group = bare_rows(sequences, padded, base.chat.rows.pad_id).to(base.device)

    def make() -> TokenStats:
        with base.autocast():
            return score_base(models.base, group)

    def key() -> dict[str, object]:
        return {"model": models.of_base, "device": str(base.device), "rows": sequences}

    return group, _of_base.recall(key, make, _bytes_of)


def score_base(base: ScoredLM, group: RowGroup) -> TokenStats:
    """Returns the base's statistics on the rows, with the hidden states that ``score_policy`` reads, without gradients.

    Raises ``ValueError`` when the rows have no model inputs.
    """
    with torch.no_grad():
        stats: TokenStats = base(*_read(group), frozenset({"hidden"}))
    return stats


def score_policy(policy: ScoredLM, base: ScoredLM, of_base: TokenStats, group: RowGroup) -> TokenStats:
    """Returns the policy's statistics on the rows, with "kl_policy_ref", without gradients.

    ``of_base``: of ``score_base``. UserError for a model without a plain head, ``ValueError`` for rows without inputs.
    """
    with torch.no_grad():
        stats: TokenStats = policy(*_read(group), frozenset({"joint:kl_policy_ref"}), (of_base.hidden, base.head()))
    return stats


def _read(group: RowGroup) -> tuple[ModelInputs, Tensor, Tensor]:
    if group.inputs is None:
        raise ValueError("the rows have no model inputs")
    return group.inputs, group.response_ids, group.response_mask


def _bytes_of(stats: TokenStats) -> int:
    return 0 if stats.hidden is None else stats.hidden.nbytes


# ------------------------------------------------------------------------------------------------ weights


def _relative(source: WeightSource, example: TrainingExample, place: int) -> Row | None:
    """Returns a response's weights relative to uniform (|y| w; factors as they are); None where
    training computes them.
    """
    if isinstance(source, OnlineSource) or not example.weights[place].numel():
        return None
    weights = example.weights[place].double().numpy()
    return weights * example.scales[place]


def _factors(run: TrainedRun, examples: Sequence[TrainingExample]) -> Iterator[Row]:
    """Yields what multiplies beta at each response token of the examples, as the objective has it."""
    for start in range(0, len(examples), EXAMPLES_AT_ONCE):
        chunk = examples[start : start + EXAMPLES_AT_ONCE]
        rows = collate(chunk, padded, 0, len(chunk)).main
        rows = replace(rows, factors=run.inputs.weighed.source.kind is Kind.FACTOR)
        yield token_factors(run.objective, rows)[rows.response_mask].double().numpy()
