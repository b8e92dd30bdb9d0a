"""Detects non-finite values in a step's pairs, in weights and in validation metrics; saves a non-finite step to a file.

Reading a tensor's values waits for the GPU, so callers use these functions only when needed.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, cast

import lightning as L
import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.distributed.tensor import DTensor

from attnpo.schema import (
    InputGradient,
    ModelInputs,
    ObjectiveOutput,
    PreferenceBatch,
    RowGroup,
    TokenStats,
    UserError,
    join_names,
)
from attnpo.training.checkpoint_folders import latest_checkpoint
from attnpo.training.gather import all_gather_values

SHOWN = 8  # pairs named in a message; the file has all of them


@dataclass(frozen=True)
class MicroBatchRecord:
    """Scored micro-batch, kept until the optimiser steps: losses and statistics without their autograd graph."""

    batch: PreferenceBatch
    policy: TokenStats
    reference: TokenStats | None
    losses: Float[Tensor, " pairs"]

    @classmethod
    def from_output(
        cls, batch: PreferenceBatch, policy: TokenStats, reference: TokenStats | None, output: ObjectiveOutput
    ) -> "MicroBatchRecord":
        """Builds the record with losses times pair weights; drops hidden states."""
        losses = output.losses.detach() * batch.pair_weight
        kept = [None if stats is None else detach_stats(stats, hidden=False) for stats in (policy, reference)]
        return cls(batch, cast(TokenStats, kept[0]), kept[1], losses)


def nonfinite_pairs(scored: Iterable[tuple[Sequence[str], Float[Tensor, " pairs"]]]) -> list[str]:
    """Returns the ids of the pairs with a non-finite loss. ``scored``: pair ids and losses of each batch."""
    return [
        pair_id
        for pair_ids, losses in scored
        for pair_id, finite in zip(pair_ids, losses.isfinite().tolist(), strict=True)
        if not finite
    ]


def nonfinite_inputs(scored: Sequence[MicroBatchRecord]) -> list[str]:
    """Names the objective's inputs that are not finite in the pairs with a non-finite loss; ignores masked tokens."""
    names = [
        name
        for item in scored
        for name, finite in _finite_inputs(item).items()
        if not bool((item.losses.isfinite() | finite).all())
    ]
    return list(dict.fromkeys(names))


def save_nonfinite_step(
    scored: Sequence[MicroBatchRecord],
    gradients: Mapping[str, Tensor],
    path: Path,
    step: int,
    processes: int,
    *,
    leads: bool,
    norm: float = math.nan,
) -> str:
    """Saves a non-finite step to ``path`` if this process ``leads``; returns the error message to raise.

    A collective: every rank must call it. ``norm``: the gradient norm. The file, which loads with
    ``weights_only=True``, contains ``step``, the non-finite ``pairs`` and ``inputs``, ``gradients`` (names of
    non-finite ones, per process) and ``processes``: lists of micro-batches with ids, losses, batch and statistics.
    """
    bad_gradients = [name for name, gradient in gradients.items() if not bool(gradient.isfinite().all())]
    bad_pairs = all_gather_values(nonfinite_pairs((item.batch.pair_ids, item.losses) for item in scored), processes)
    bad_inputs = all_gather_values(nonfinite_inputs(scored), processes)
    pair_ids = all_gather_values([pair_id for item in scored for pair_id in item.batch.pair_ids], processes)
    pairs, inputs = list(chain(*bad_pairs)), list(dict.fromkeys(chain(*bad_inputs)))
    contents = {
        "step": step,
        "pairs": pairs,
        "inputs": inputs,
        "gradients": all_gather_values(bad_gradients, processes),
        "processes": all_gather_values([_to_plain(item) for item in scored], processes),
    }
    written = all(all_gather_values(_try_save(contents, path) if leads else True, processes))
    whole = list(chain(*pair_ids))
    if pairs:
        what = f"the loss of optimiser step {step} is not finite for {len(pairs)} of {len(whole)} pairs"
        also = ", ".join(inputs) or "none of its inputs"
        what += f": {join_names(pairs, SHOWN)} (not finite there: {also})"
    else:
        what = f"the gradient norm of optimiser step {step} is {norm}, though its loss is finite; the step's pairs: "
        what += join_names(whole, SHOWN)
    where = f"batches and per-token statistics are in {path}" if written else "its batches could not be saved"
    return f"{what}. Training stopped before this step, with the weights of step {step - 1}; {where}"


def suggest_settings(lr: float, other: str, precision: str) -> str:
    """Suggests settings that may prevent non-finite values."""
    exact = "" if precision.startswith("32") else f", trainer.precision=32-true (now {precision})"
    return f"a smaller optimizer.lr (now {lr:g}), {other}{exact}"


def max_magnitude(value: Tensor) -> Tensor:
    """Returns the largest magnitude in float32 (NaN if any value is NaN); several times faster than a norm on a CPU."""
    return torch.stack(torch.aminmax(value.detach())).abs().amax().float()


def check_weights(trainer: L.Trainer) -> None:
    """Raises ``UserError`` on every rank unless all trained weights are finite.

    A collective: every rank must call it. Reads every trained weight once, without copies.
    """
    policy = trainer.lightning_module.get_submodule("policy.model")
    trained = {name: value for name, value in policy.named_parameters() if value.requires_grad}
    shards = {
        name: value.to_local() if isinstance(value, DTensor) else value.detach() for name, value in trained.items()
    }
    held = [name for name, value in shards.items() if value.numel()]  # a rank may hold no part of a small parameter
    peaks = [max_magnitude(shards[name]) for name in held]  # the device is read once for all parameters
    finite = torch.stack(peaks).isfinite().tolist() if peaks else []
    bad_here = [name for name, good in zip(held, finite, strict=True) if not good]
    of_ranks = {name for names in all_gather_values(bad_here, trainer.world_size) for name in names}
    if bad := [name for name in trained if name in of_ranks]:
        raise UserError(
            f"the weights are not finite after optimiser step {trainer.global_step}: {len(bad)} of {len(trained)} "
            f"trained parameters (first: {bad[0]}); {_describe_last_checkpoint(trainer)}"
        )


def check_validation(trainer: L.Trainer) -> None:
    """Raises ``UserError`` unless all ``val/*`` metrics of the last validation (over all ranks) are finite."""
    bad = [
        f"{name} {float(value):g}"
        for name, value in trainer.callback_metrics.items()
        if name.startswith("val/") and not bool(value.isfinite())
    ]
    if not bad:
        return
    listed = join_names(bad, SHOWN)
    if trainer.state.fn == "validate":
        raise UserError(
            f"the validation metrics before the first step are not finite ({listed}), so training cannot work: inspect "
            "the validation pairs named above, their weights and the reference's log-probs"
        )
    raise UserError(
        f"the validation metrics after optimiser step {trainer.global_step} are not finite ({listed}), so there is no "
        f"result; {_describe_last_checkpoint(trainer)}"
    )


def _describe_last_checkpoint(trainer: L.Trainer) -> str:
    """Names the last checkpoint and suggests settings, for errors about non-finite weights or metrics."""
    module: Any = trainer.lightning_module
    saved = latest_checkpoint(Path(trainer.default_root_dir))
    stands = "no checkpoint was saved" if saved is None else f"the last saved step is {saved[0]}, in {saved[1]}"
    return (
        f"{stands}. Try "
        f"{suggest_settings(module.recipe.lr, 'a smaller trainer.gradient_clip_val', str(trainer.precision))}"
    )


def _finite_inputs(item: MicroBatchRecord) -> dict[str, Bool[Tensor, " pairs"]]:
    rows = item.batch.main
    per_token = {"policy log-probs": item.policy.logps}
    if item.reference is not None:
        per_token["reference log-probs"] = item.reference.logps
    for channel, weights in rows.token_weights.items():
        per_token["token weights" if channel == "reward" else f"token weights ({channel})"] = weights
    finite = {name: _finite_pairs(value.isfinite() | ~rows.response_mask) for name, value in per_token.items()}
    finite["source lengths"] = _finite_pairs(rows.source_lengths.isfinite().unsqueeze(-1))
    finite["pair weights"] = item.batch.pair_weight.isfinite()
    for name, value in item.batch.state.items():
        finite[f"{name} over the step"] = value.isfinite().expand(item.losses.shape)
    return finite


def _finite_pairs(finite: Bool[Tensor, "rows R"]) -> Bool[Tensor, " pairs"]:
    chosen, rejected = finite.all(-1).chunk(2)
    return chosen & rejected


def detach_stats(stats: TokenStats, *, hidden: bool = True) -> TokenStats:
    """Returns the statistics without their autograd graph, and without hidden states unless ``hidden`` is set."""
    return replace(
        stats,
        logps=stats.logps.detach(),
        hidden=stats.hidden.detach() if hidden and stats.hidden is not None else None,
        vocab={name: value.detach() for name, value in stats.vocab.items()},
        joint={name: value.detach() for name, value in stats.joint.items()},
        groups={name: detach_stats(value, hidden=hidden) for name, value in stats.groups.items()},
    )


def _to_plain(value: object) -> object:
    """Converts a value to plain containers: dataclasses to dicts, tuples to lists, tensors to the CPU."""
    if isinstance(value, Tensor):
        return value.detach().cpu()
    if isinstance(value, MicroBatchRecord):
        return {"pair_ids": list(value.batch.pair_ids), **{name: _to_plain(item) for name, item in vars(value).items()}}
    if isinstance(value, PreferenceBatch | RowGroup | ModelInputs | TokenStats | InputGradient):
        return {name: _to_plain(item) for name, item in vars(value).items()}
    if isinstance(value, Mapping):
        return {str(name): _to_plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_to_plain(item) for item in value]
    return value


def _try_save(contents: Mapping[str, object], path: Path) -> bool:
    """Saves the file; returns False if that fails, so a full disk does not hide the non-finite loss."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(contents, path)
    except (OSError, RuntimeError):
        return False
    return True
