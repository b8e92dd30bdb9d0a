"""Numbers that are none: what is kept of a step to tell its pairs, the file that holds it, weights and validations.

Nothing here looks at a value before it is asked to: on a GPU every look waits for the device.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lightning as L
import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.tensor import DTensor

from attnpo.schema import InputGradient, ModelInputs, ObjectiveOutput, PreferenceBatch, RowGroup, TokenStats, UserError
from attnpo.training.checkpoint_folders import newest

SHOWN = 8  # pairs named in a message; all of them are in the file


@dataclass(frozen=True)
class PairLosses:
    """Losses of pairs as they enter a mean, without their graph."""

    pair_ids: tuple[str, ...]
    losses: Float[Tensor, "pairs"]


@dataclass(frozen=True)
class Scored:
    """One scored micro-batch as it is kept until the optimiser steps: losses and statistics without their graph."""

    batch: PreferenceBatch
    policy: TokenStats
    reference: TokenStats | None
    losses: Float[Tensor, "pairs"]

    @property
    def pair_ids(self) -> tuple[str, ...]:
        """The pairs' ids."""
        return self.batch.pair_ids

    @classmethod
    def of(
        cls, batch: PreferenceBatch, policy: TokenStats, reference: TokenStats | None, output: ObjectiveOutput
    ) -> "Scored":
        """The micro-batch with its pairs' losses as they enter the step; hidden states are not kept."""
        losses = output.losses.detach() * batch.pair_weight
        return cls(batch, _kept(policy), None if reference is None else _kept(reference), losses)


@dataclass(frozen=True)
class Trouble:
    """What of a step is not finite, over all processes: ids of pairs in the step's order, and kinds of input."""

    pairs: list[str]
    inputs: list[str]
    whole: list[str]
    file: Path | None


def unsound(scored: Sequence[PairLosses | Scored]) -> list[str]:
    """The ids of the pairs whose loss is not finite."""
    return [
        pair_id
        for item in scored
        for pair_id, fine in zip(item.pair_ids, item.losses.isfinite().tolist(), strict=True)
        if not fine
    ]


def unsound_inputs(scored: Sequence[Scored]) -> list[str]:
    """What else is not finite in the pairs with a non-finite loss: names of what the objective read.

    Positions under a false response mask are never looked at.
    """
    found: dict[str, None] = {}
    for item in scored:
        bad = ~item.losses.isfinite()
        for name, fine in _fine_inputs(item).items():
            if bool((bad & ~fine).any()):
                found[name] = None
    return list(found)


def everywhere(own: Any, processes: int) -> list[Any]:
    """``own`` of every process in the order of their ranks (a collective: every rank must call it)."""
    if processes == 1:
        return [own]
    gathered: list[Any] = [None] * processes
    dist.all_gather_object(gathered, own)
    return gathered


def save_step(
    scored: Sequence[Scored], gradients: Mapping[str, Tensor], path: Path, step: int, processes: int
) -> Trouble:
    """The step's trouble; also written to ``path`` by the first process (a collective: every rank must call it).

    The file has ``step``, the ids ``pairs`` and ``inputs`` that are not finite, ``gradients`` (the parameters whose
    gradient is not finite, per process) and ``processes``: per process a list of micro-batches, each with the pairs'
    ids and losses, the batch, and the per-token statistics of policy and reference. Plain containers and tensors, so
    that it loads with ``weights_only=True``.
    """
    own = {
        "pairs": unsound(scored),
        "inputs": unsound_inputs(scored),
        "gradients": [name for name, gradient in gradients.items() if not bool(gradient.isfinite().all())],
        "batches": [_plain(item) for item in scored],
    }
    shares = everywhere(own, processes)
    pairs = [pair_id for share in shares for pair_id in share["pairs"]]
    inputs = list(dict.fromkeys(name for share in shares for name in share["inputs"]))
    whole = [pair_id for share in shares for batch in share["batches"] for pair_id in batch["pair_ids"]]
    contents = {
        "step": step,
        "pairs": pairs,
        "inputs": inputs,
        "gradients": [share["gradients"] for share in shares],
        "processes": [share["batches"] for share in shares],
    }
    written = everywhere(_written(contents, path) if processes == 1 or dist.get_rank() == 0 else True, processes)
    return Trouble(pairs, inputs, whole, path if all(written) else None)


def message(trouble: Trouble, step: int, norm: float, lr: float, precision: str) -> str:
    """One line for the user: which step, which pairs, what else, where it lies, what to try."""
    if trouble.pairs:
        what = f"the loss of optimiser step {step} is not finite for {len(trouble.pairs)} of {len(trouble.whole)} pairs"
        also = ", ".join(trouble.inputs) or "nothing that it is computed from"
        what += f": {named(trouble.pairs)} (not finite there: {also})"
    else:
        what = f"the gradient norm of optimiser step {step} is {norm}, though its loss is finite; the step's pairs: "
        what += named(trouble.whole)
    where = (
        f"batches and per-token statistics are in {trouble.file}" if trouble.file else "its batches could not be saved"
    )
    advice = [f"a smaller optimizer.lr (now {lr:g})", "another objective.beta"]
    if not precision.startswith("32"):
        advice.append(f"trainer.precision=32-true (now {precision})")
    return (
        f"{what}. Training stopped before this step, the weights are those of step {step - 1}; {where}. "
        f"Look at these pairs, or try {', '.join(advice)}"
    )


def unsound_weights(model: nn.Module, processes: int) -> tuple[list[str], int]:
    """The trained parameters that hold a value which is not finite, and how many are trained.

    Reads every trained weight once and makes no copy. Shards are read where they lie (a collective: every rank must
    call it); the names are in the model's order.
    """
    trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
    shards = {
        name: value.to_local() if isinstance(value, DTensor) else value.detach() for name, value in trained.items()
    }
    held = [name for name, value in shards.items() if value.numel()]  # a process may have no part of a short one
    # The largest magnitude is NaN where a value is; one look at the device for all parameters.
    peaks = [torch.linalg.vector_norm(shards[name].detach(), float("inf")).float() for name in held]
    fine = torch.stack(peaks).isfinite().tolist() if peaks else []
    own = [name for name, good in zip(held, fine, strict=True) if not good]
    bad = {name for share in everywhere(own, processes) for name in share}
    return [name for name in trained if name in bad], len(trained)


def check_weights(trainer: L.Trainer) -> None:
    """Raises ``UserError`` on every rank unless all trained weights are finite (a collective: every rank must call it).

    Asked where weights are about to leave the run: after the last optimiser step and before each checkpoint.
    """
    module: Any = trainer.lightning_module
    bad, trained = unsound_weights(module.policy.model, trainer.world_size)
    if bad:
        raise UserError(
            f"the weights are not finite after optimiser step {trainer.global_step}: {len(bad)} of {trained} trained "
            f"parameters (first: {bad[0]}); {_what_stands(trainer)}"
        )


def check_validation(trainer: L.Trainer) -> None:
    """Raises ``UserError`` unless every ``val/*`` metric at hand is finite; they are those of all ranks."""
    bad = [
        f"{name} {float(value):g}"
        for name, value in trainer.callback_metrics.items()
        if name.startswith("val/") and not bool(value.isfinite())
    ]
    if not bad:
        return
    listed = ", ".join(bad[:SHOWN]) + (f" and {len(bad) - SHOWN} more" if len(bad) > SHOWN else "")
    if trainer.state.fn == "validate":
        raise UserError(
            f"the validation before the first step is not finite ({listed}), so no run can end well: look at the "
            "validation pairs that are named above, their weights and the reference's log-probs"
        )
    raise UserError(
        f"the validation after optimiser step {trainer.global_step} is not finite ({listed}), so this is no result; "
        f"{_what_stands(trainer)}"
    )


def _what_stands(trainer: L.Trainer) -> str:
    """What is saved of a run that ends with weights that are no use, and what to try."""
    module: Any = trainer.lightning_module
    saved = newest(Path(trainer.default_root_dir), ("last", "best"))
    stands = "no checkpoint is saved" if saved is None else f"saved last is step {saved[0]}, in {saved[1]}"
    advice = [f"a smaller optimizer.lr (now {module.recipe.lr:g})", "a smaller trainer.gradient_clip_val"]
    if not str(trainer.precision).startswith("32"):
        advice.append(f"trainer.precision=32-true (now {trainer.precision})")
    return f"{stands}. Try {', '.join(advice)}"


def named(pair_ids: Sequence[str]) -> str:
    """The ids for a message: all if few, else the first and how many more."""
    more = f" and {len(pair_ids) - SHOWN} more" if len(pair_ids) > SHOWN else ""
    return ", ".join(pair_ids[:SHOWN]) + more


def _fine_inputs(item: Scored) -> dict[str, Bool[Tensor, "pairs"]]:
    rows = item.batch.main
    perhaps = {"policy log-probs": item.policy.logps}
    if item.reference is not None:
        perhaps["reference log-probs"] = item.reference.logps
    for channel, weights in rows.token_weights.items():
        perhaps["token weights" if channel == "reward" else f"token weights ({channel})"] = weights
    fine = {name: _pairs_fine(value.isfinite() | ~rows.response_mask) for name, value in perhaps.items()}
    fine["source lengths"] = _pairs_fine(rows.source_lengths.isfinite().unsqueeze(-1))
    fine["pair weights"] = item.batch.pair_weight.isfinite()
    for name, value in item.batch.state.items():
        fine[f"{name} over the step"] = value.isfinite().expand(item.losses.shape)
    return fine


def _pairs_fine(fine: Bool[Tensor, "rows R"]) -> Bool[Tensor, "pairs"]:
    chosen, rejected = fine.all(-1).chunk(2)
    return chosen & rejected


def detached(stats: TokenStats) -> TokenStats:
    """The same statistics without their graph."""
    return replace(
        stats,
        logps=stats.logps.detach(),
        hidden=None if stats.hidden is None else stats.hidden.detach(),
        vocab={name: value.detach() for name, value in stats.vocab.items()},
        joint={name: value.detach() for name, value in stats.joint.items()},
        groups={name: detached(value) for name, value in stats.groups.items()},
    )


def _kept(stats: TokenStats) -> TokenStats:
    """What is kept of statistics until the optimiser steps: numbers per token, no graph and no hidden states."""
    return replace(detached(stats), hidden=None, groups={name: _kept(value) for name, value in stats.groups.items()})


def _plain(value: Any) -> Any:
    """Dataclasses as dicts, tuples as lists, tensors on the CPU."""
    if isinstance(value, Tensor):
        return value.detach().cpu()
    if isinstance(value, Scored):
        made: dict[str, Any] = {name: _plain(item) for name, item in vars(value).items()}
        return {"pair_ids": list(value.batch.pair_ids), **made}
    if isinstance(value, PreferenceBatch | RowGroup | ModelInputs | TokenStats | InputGradient):
        return {name: _plain(item) for name, item in vars(value).items()}
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _written(contents: dict[str, Any], path: Path) -> bool:
    """Whether the file could be written; a full disk must not hide what is wrong with the loss."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(contents, path)
    except (OSError, RuntimeError):
        return False
    return True
