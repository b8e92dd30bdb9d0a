"""Values that are not finite, in the pairs of a step (which is kept in a file), the model's weights and validations.

A function reads a tensor's values only when it is called for that: on a GPU every read waits for the device.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import lightning as L
import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
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
from attnpo.training.checkpoint_folders import newest
from attnpo.training.gather import from_all_ranks

SHOWN = 8  # pairs named in a message; all of them are in the file


@dataclass(frozen=True)
class Scored:
    """One scored micro-batch as it is kept until the optimiser steps: losses and statistics without their graph."""

    batch: PreferenceBatch
    policy: TokenStats
    reference: TokenStats | None
    losses: Float[Tensor, " pairs"]

    @classmethod
    def of(
        cls, batch: PreferenceBatch, policy: TokenStats, reference: TokenStats | None, output: ObjectiveOutput
    ) -> "Scored":
        """Returns the micro-batch with its pairs' losses as they enter the step; hidden states are not kept."""
        losses = output.losses.detach() * batch.pair_weight
        return cls(batch, _kept(policy), None if reference is None else _kept(reference), losses)


@dataclass(frozen=True)
class NonfiniteStep:
    """What of a step is not finite, over all processes.

    ``pairs``: ids of the pairs whose loss is not finite; ``inputs``: what else is not finite in them; ``step_pairs``:
    all pairs of the step, in its order; ``file``: where the step is kept, None where it could not be written.
    """

    pairs: list[str]
    inputs: list[str]
    step_pairs: list[str]
    file: Path | None


def nonfinite_pairs(scored: Iterable[tuple[Sequence[str], Float[Tensor, " pairs"]]]) -> list[str]:
    """Returns the ids of the pairs whose loss is not finite; of each batch the ids and the losses are given."""
    return [
        pair_id
        for pair_ids, losses in scored
        for pair_id, finite in zip(pair_ids, losses.isfinite().tolist(), strict=True)
        if not finite
    ]


def nonfinite_inputs(scored: Sequence[Scored]) -> list[str]:
    """Names of what the objective read and is not finite in the pairs with a non-finite loss.

    Positions under a false response mask do not count.
    """
    names = [
        name
        for item in scored
        for name, finite in _finite_inputs(item).items()
        if not bool((item.losses.isfinite() | finite).all())
    ]
    return list(dict.fromkeys(names))


def save_step(
    scored: Sequence[Scored], gradients: Mapping[str, Tensor], path: Path, step: int, processes: int, *, leads: bool
) -> NonfiniteStep:
    """Returns what of the step is not finite; also written to ``path`` by the process that ``leads``.

    A collective: every rank must call it.

    The file has ``step``, the ids ``pairs`` and ``inputs`` that are not finite, ``gradients`` (the parameters whose
    gradient is not finite, per process) and ``processes``: per process a list of micro-batches, each with the pairs'
    ids and losses, the batch, and the per-token statistics of policy and reference. Plain containers and tensors, so
    that it loads with ``weights_only=True``.
    """
    bad_gradients = [name for name, gradient in gradients.items() if not bool(gradient.isfinite().all())]
    bad_pairs = from_all_ranks(nonfinite_pairs((item.batch.pair_ids, item.losses) for item in scored), processes)
    bad_inputs = from_all_ranks(nonfinite_inputs(scored), processes)
    pair_ids = from_all_ranks([pair_id for item in scored for pair_id in item.batch.pair_ids], processes)
    pairs, inputs = list(chain(*bad_pairs)), list(dict.fromkeys(chain(*bad_inputs)))
    contents = {
        "step": step,
        "pairs": pairs,
        "inputs": inputs,
        "gradients": from_all_ranks(bad_gradients, processes),
        "processes": from_all_ranks([_plain(item) for item in scored], processes),
    }
    written = from_all_ranks(_write(contents, path) if leads else True, processes)
    return NonfiniteStep(pairs, inputs, list(chain(*pair_ids)), path if all(written) else None)


def message(bad: NonfiniteStep, step: int, norm: float, lr: float, precision: str) -> str:
    """Returns one line for the user: which step and pairs are not finite, where the step is kept, what to try."""
    if bad.pairs:
        what = f"the loss of optimiser step {step} is not finite for {len(bad.pairs)} of {len(bad.step_pairs)} pairs"
        also = ", ".join(bad.inputs) or "nothing that it is computed from"
        what += f": {join_names(bad.pairs, SHOWN)} (not finite there: {also})"
    else:
        what = f"the gradient norm of optimiser step {step} is {norm}, though its loss is finite; the step's pairs: "
        what += join_names(bad.step_pairs, SHOWN)
    where = f"batches and per-token statistics are in {bad.file}" if bad.file else "its batches could not be saved"
    return (
        f"{what}. Training stopped before this step, the weights are those of step {step - 1}; {where}. "
        f"Look at these pairs, or try {_advice(lr, 'another objective.beta', precision)}"
    )


def _advice(lr: float, other: str, precision: str) -> str:
    exact = "" if precision.startswith("32") else f", trainer.precision=32-true (now {precision})"
    return f"a smaller optimizer.lr (now {lr:g}), {other}{exact}"


def nonfinite_weights(model: nn.Module, processes: int) -> tuple[list[str], int]:
    """Names of the trained parameters that hold a value which is not finite, in the model's order, and how many train.

    Reads every trained weight once and makes no copy; each process reads its shards (a collective: every rank must
    call it).
    """
    trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
    shards = {
        name: value.to_local() if isinstance(value, DTensor) else value.detach() for name, value in trained.items()
    }
    held = [name for name, value in shards.items() if value.numel()]  # a process may have no part of a short one
    peaks = [peak(shards[name]) for name in held]  # the device is read once for all parameters
    finite = torch.stack(peaks).isfinite().tolist() if peaks else []
    bad_here = [name for name, good in zip(held, finite, strict=True) if not good]
    bad = {name for names in from_all_ranks(bad_here, processes) for name in names}
    return [name for name in trained if name in bad], len(trained)


def peak(value: Tensor) -> Tensor:
    """Returns the largest magnitude in float32, NaN where a value is; several times as fast on a CPU as a norm."""
    return torch.stack(torch.aminmax(value.detach())).abs().amax().float()


def check_weights(trainer: L.Trainer) -> None:
    """Raises ``UserError`` on every rank unless all trained weights are finite (a collective: every rank must call it).

    Called where weights are about to leave the run: after the last optimiser step and before each checkpoint.
    """
    policy = trainer.lightning_module.get_submodule("policy.model")
    bad, trained = nonfinite_weights(policy, trainer.world_size)
    if bad:
        raise UserError(
            f"the weights are not finite after optimiser step {trainer.global_step}: {len(bad)} of {trained} trained "
            f"parameters (first: {bad[0]}); {_what_stands(trainer)}"
        )


def check_validation(trainer: L.Trainer) -> None:
    """Raises ``UserError`` unless every ``val/*`` metric logged last (over all ranks) is finite."""
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
            f"the validation before the first step is not finite ({listed}), so no run can end well: look at the "
            "validation pairs that are named above, their weights and the reference's log-probs"
        )
    raise UserError(
        f"the validation after optimiser step {trainer.global_step} is not finite ({listed}), so this is no result; "
        f"{_what_stands(trainer)}"
    )


def _what_stands(trainer: L.Trainer) -> str:
    """For a message: which checkpoint stands when weights or validation are not finite, and what to try."""
    module: Any = trainer.lightning_module
    saved = newest(Path(trainer.default_root_dir))
    stands = "no checkpoint is saved" if saved is None else f"saved last is step {saved[0]}, in {saved[1]}"
    return f"{stands}. Try {_advice(module.recipe.lr, 'a smaller trainer.gradient_clip_val', str(trainer.precision))}"


def _finite_inputs(item: Scored) -> dict[str, Bool[Tensor, " pairs"]]:
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


def detach(stats: TokenStats) -> TokenStats:
    """Returns the same statistics without their graph."""
    return replace(
        stats,
        logps=stats.logps.detach(),
        hidden=None if stats.hidden is None else stats.hidden.detach(),
        vocab={name: value.detach() for name, value in stats.vocab.items()},
        joint={name: value.detach() for name, value in stats.joint.items()},
        groups={name: detach(value) for name, value in stats.groups.items()},
    )


def _kept(stats: TokenStats) -> TokenStats:
    """Returns the statistics as they are kept until the optimiser steps: without their graph and hidden states."""
    return replace(detach(stats), hidden=None, groups={name: _kept(value) for name, value in stats.groups.items()})


def _plain(value: object) -> object:
    """Returns the value as plain containers: dataclasses as dicts, tuples as lists, tensors on the CPU."""
    if isinstance(value, Tensor):
        return value.detach().cpu()
    if isinstance(value, Scored):
        return {"pair_ids": list(value.batch.pair_ids), **{name: _plain(item) for name, item in vars(value).items()}}
    if isinstance(value, PreferenceBatch | RowGroup | ModelInputs | TokenStats | InputGradient):
        return {name: _plain(item) for name, item in vars(value).items()}
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _write(contents: Mapping[str, object], path: Path) -> bool:
    """Returns whether the file could be written: a full disk must not hide what is wrong with the loss."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(contents, path)
    except (OSError, RuntimeError):
        return False
    return True
