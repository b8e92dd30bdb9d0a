"""Lightning module with a policy, a frozen reference and one objective; averages exactly over each optimiser step."""

import itertools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import lightning as L
import torch
import torchmetrics
from jaxtyping import Float
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from attnpo.models.backbone import freeze, layer_stack
from attnpo.models.input_gradient import input_gradient
from attnpo.models.loading import check_rotary
from attnpo.models.logps import to_full_tensor
from attnpo.models.lora import parent_paths
from attnpo.models.router import ROUTER, load_balancing_loss
from attnpo.models.scored import ScoredLM
from attnpo.objectives.base import PreferenceObjective, StepObjective
from attnpo.schema import Kind, ObjectiveOutput, PreferenceBatch, RowGroup, TokenStats, UserError, join_names
from attnpo.training.gather import all_gather_values
from attnpo.training.nonfinite import (
    SHOWN,
    MicroBatchRecord,
    detach_stats,
    nonfinite_pairs,
    save_nonfinite_step,
    suggest_settings,
)
from attnpo.training.optimizer import Optimizer, norm_and_bias_parameters
from attnpo.training.pair_values import pair_values, tokens_per_pair
from attnpo.training.resume_state import Checkpoint
from attnpo.weights.base import OnlineSource
from attnpo.weights.pipeline import transform_batch
from attnpo.weights.transforms import WeightTransform

log = logging.getLogger(__name__)


class PairMeans(torchmetrics.Metric):
    """Computes means of named per-pair values; sums over micro-batches and ranks before dividing."""

    full_state_update = False
    pairs: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.add_state("pairs", default=torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, values: Mapping[str, Float[Tensor, " pairs"]]) -> None:
        """Adds one micro-batch. The first call fixes the names."""
        for name, value in values.items():
            state = self._state_name(name)
            if name not in self.names:
                self.names.append(name)
                self.add_state(state, torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
                setattr(self, state, getattr(self, state).to(self.device))
            setattr(self, state, getattr(self, state) + value.detach().double().sum())
        self.pairs = self.pairs + len(next(iter(values.values())))

    def compute(self) -> dict[str, Tensor]:
        """Returns the mean for each name seen so far."""
        return {name: getattr(self, self._state_name(name)) / self.pairs.clamp(min=1) for name in self.names}

    @staticmethod
    def _state_name(name: str) -> str:
        return "sum_" + name.replace("/", "_")


RowMaker = Callable[[ScoredLM, PreferenceBatch, int], RowGroup]
"""Function that makes a row group from the current policy, a batch and the number of optimiser steps so far."""


class PreferenceModule(L.LightningModule):
    """Trains ``policy`` on preference batches against a frozen ``reference``, which is not a submodule.

    If the loss or gradient norm of a step is not finite, training stops before that step with a ``UserError`` that
    names the step's pairs, and the step is saved as ``nonfinite-step-N.pt`` in the run's folder (steps count from 1).

    Args:
        policy: model to train, as a transformers model or a ``ScoredLM``.
        reference: copy of the policy, frozen here; None if log-probabilities are stored or the objective needs none.
        objective: its ``requires`` decides what is computed.
        optimizer: optimiser and schedule; None means ``Optimizer()``.
        total_steps: optimiser steps of the whole run, for the schedule; None asks the Trainer.
        online: source that computes token weights from the statistics of each step; None keeps the batch's weights.
        makers: functions that make the objective's additional row groups, by group name.
        kept: called with each batch and the reference model's log-probabilities [rows R].
        transforms: applied to the online source's weights in every step.
        router_coef: coefficient of the load-balancing loss ``losses/router`` in each pair's loss; 0 turns it off.

    Raises:
        UserError: trained weights are not float32 and the optimizer does not round stochastically.
    """

    def __init__(
        self,
        policy: PreTrainedModel | ScoredLM,
        reference: PreTrainedModel | ScoredLM | None,
        objective: PreferenceObjective,
        optimizer: Optimizer | None = None,
        total_steps: int | None = None,
        online: OnlineSource | None = None,
        makers: Mapping[str, RowMaker] | None = None,
        kept: Callable[[PreferenceBatch, Tensor], None] | None = None,
        transforms: Sequence[WeightTransform] = (),
        router_coef: float = 0.0,
    ) -> None:
        super().__init__()
        self.policy = policy if isinstance(policy, ScoredLM) else ScoredLM(policy)
        if isinstance(reference, PreTrainedModel):
            reference = ScoredLM(reference)
        object.__setattr__(self, "reference", reference)
        self.kept = kept
        self.objective = objective
        self.online, self.makers, self.transforms = online, dict(makers or {}), tuple(transforms)
        self.router_coef = router_coef
        self.reads = objective.requires | (online.statistics if online is not None else frozenset())
        self.reads |= {ROUTER} if router_coef else frozenset()
        self.recipe = Optimizer() if optimizer is None else optimizer
        require_full_precision(self.policy, rounding=self.recipe.stochastic_rounding)  # before the data is weighed
        self._total_steps = total_steps
        self.window = PairMeans()
        self.validation = PairMeans()
        self.sharded = False
        self.one_fit = False  # True if only the policy is needed after training, which then ends sooner
        self.updated = False  # whether training has begun an update
        self._scored: list[MicroBatchRecord] = []  # micro-batches of the current optimiser step
        self._losses: list[tuple[tuple[str, ...], Tensor]] = []  # pair ids and losses of the current validation
        self._state: dict[str, Tensor] = {}  # the objective's sums over the rows ahead of the current step
        self._warned = False  # about a validation loss that is not finite
        self._began = 0.0  # start of the current optimiser step, in seconds
        self._amounts: dict[str, Tensor] = {}  # pairs and tokens of the current optimiser step

    reference: ScoredLM | None

    @property
    def total_steps(self) -> int:
        """Returns the number of optimiser steps of the run; if not set, the Trainer estimates it."""
        return int(self.trainer.estimated_stepping_batches) if self._total_steps is None else self._total_steps

    def configure_model(self) -> None:
        """Shards policy and reference over the data-parallel mesh (FSDP2) if the strategy has one."""
        mesh = self.device_mesh
        if mesh is None or self.sharded:
            return
        shard_model(self.policy, mesh["data_parallel"])
        # A reference without its own weights (the policy without adapters) is sharded together with the policy.
        if self.reference is not None and any(True for _ in self.reference.parameters()):
            shard_model(self.reference, mesh["data_parallel"])
        self.sharded = True

    def setup(self, stage: str) -> None:
        """Moves the reference to this rank's device, unless sharding has already moved it there."""
        # Checkpoints have no frozen weights; check_checkpoint_weights requires all others.
        self.strict_loading = not frozen_parameter_names(self)
        if self.reference is not None and self.device_mesh is None:
            # Lightning moves the module later, so self.device is not yet this rank's device.
            self.reference.to(self.trainer.strategy.root_device)

    def train(self, mode: bool = True) -> "PreferenceModule":
        """Sets the policy to ``mode`` and the reference to eval mode; returns self."""
        super().train(mode)
        if self.reference is not None:
            self.reference.eval()
        return self

    def cpu(self) -> "PreferenceModule":
        """Moves the module to the CPU unless ``one_fit`` is set. Lightning calls this after each validation and fit."""
        return self if self.one_fit else super().cpu()

    def on_train_end(self) -> None:
        """Frees gradients and moments if ``one_fit`` is set, because Lightning would move them to the CPU."""
        for optimizer in self.trainer.optimizers if self.one_fit else ():
            optimizer.zero_grad()
            optimizer.state.clear()

    def set_modes(self, training: bool) -> None:
        """Sets the policy to training or eval mode (from_pretrained leaves it in eval) and freezes the reference."""
        self.train(training)
        if self.reference is not None:
            freeze(self.reference)

    def on_fit_start(self) -> None:
        """Resets the current step and checks that both models are ready for training."""
        self._scored.clear()
        self.window.reset()
        self.updated = False
        self.set_modes(training=True)
        check_models(self.policy, self.reference, rounding=self.recipe.stochastic_rounding)

    def on_train_batch_start(self, batch: PreferenceBatch, batch_idx: int) -> None:
        """Sets the modes again at the start of an optimiser step, in case a callback changed them."""
        if not self._scored:
            self.set_modes(training=True)
            self._began = time.perf_counter()

    # ------------------------------------------------------------------------------------------------ checkpoints
    def on_save_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Removes frozen weights from the checkpoint."""
        drop_frozen_weights(self, checkpoint)

    def on_load_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Raises UserError if the checkpoint's weights are not the trained weights of this module."""
        check_checkpoint_weights(self, checkpoint)

    # ------------------------------------------------------------------------------------------------ the step
    def score(self, batch: PreferenceBatch) -> tuple[PreferenceBatch, TokenStats, TokenStats | None, ObjectiveOutput]:
        """Scores a batch; returns it with final weights, statistics of policy and reference, and objective output."""
        if batch.ahead:
            self._state = self._sum_rows_ahead(batch)
        batch = replace(batch, ahead={}, state=self._state, step=self.global_step if self.training else None)
        # Computed before the main rows are scored, so that the two graphs are never in memory together.
        gradient = input_gradient(self.policy, batch.main) if "input_gradient" in self.reads else None
        policy, reference = self._score_rows(batch.main, self.reads)
        if self.kept is not None and reference is not None and batch.main.reference_logps is None:
            self.kept(batch, reference.logps)
        policy = replace(policy, input_gradient=gradient)
        for name in sorted(self.makers):
            rows = self.makers[name](self.policy, batch, self.trainer.global_step)
            batch = replace(batch, groups={**batch.groups, name: rows})
            of_policy, of_reference = self._score_rows(rows, self.reads & {"reference"})
            policy = replace(policy, groups={**policy.groups, name: of_policy})
            if reference is not None and of_reference is not None:
                reference = replace(reference, groups={**reference.groups, name: of_reference})
        if self.online is not None:
            batch = apply_online_weights(batch, self.online, policy, reference, self.transforms)
        output = self.objective(policy, reference, batch)
        if policy.routing is not None:
            load = load_balancing_loss(policy.routing)
            extras = {**output.extras, "losses/router": load.detach()}
            output = replace(output, losses=output.losses + self.router_coef * load, extras=extras)
        return batch, policy, reference, output

    def _score_rows(self, rows: RowGroup, reads: frozenset[str]) -> tuple[TokenStats, TokenStats | None]:
        """Computes a row group's statistics (``reads``) for the policy and, if requested, for the reference."""
        if rows.inputs is None:
            raise ValueError("the rows have no model inputs")
        read = (rows.inputs, rows.response_ids, rows.response_mask)
        joint = {name for name in reads if name.startswith("joint:")}
        reference = None
        if "reference" in reads:
            reference = self._reference_stats(rows, frozenset({"logps", "hidden"} if joint else {"logps"}))
        other = None
        if joint and reference is not None and self.reference is not None and reference.hidden is not None:
            other = (reference.hidden, self.reference.head())
            reference = replace(reference, hidden=None)
        requests = joint | {name for name in reads if name in ("hidden", ROUTER) or name.startswith("vocab:")}
        policy: TokenStats = self.policy(*read, frozenset({"logps"} | requests), other)
        return policy, reference

    def _reference_stats(self, rows: RowGroup, requests: frozenset[str]) -> TokenStats:
        if rows.reference_logps is not None and requests == {"logps"}:
            return TokenStats(logps=rows.reference_logps)
        if self.reference is None:
            raise ValueError("the objective needs a reference model or stored log-probs, but has neither")
        with torch.no_grad():
            stats: TokenStats = self.reference(rows.inputs, rows.response_ids, rows.response_mask, requests)
        return stats

    def _sum_rows_ahead(self, batch: PreferenceBatch) -> dict[str, Tensor]:
        """Returns the objective's sums over the rows that all ranks score before the step."""
        assert isinstance(self.objective, StepObjective)
        sums: dict[str, Tensor] = {}
        with torch.no_grad():
            for rows in itertools.chain.from_iterable(batch.ahead.values()):
                for name, value in self.objective.step_sums(
                    *self._score_rows(rows, self.reads & {"reference"}), rows
                ).items():
                    sums[name] = sums[name] + value if name in sums else value
        torch.clear_autocast_cache()  # in older torch, weights cast under no_grad would get no gradient later
        if self.trainer.world_size > 1:
            sums = {name: self.all_gather(value).sum() for name, value in sums.items()}  # type: ignore[union-attr]
        return sums

    def training_step(self, batch: PreferenceBatch, batch_idx: int) -> Tensor:
        """Returns the micro-batch's share of the mean loss over the optimiser step.

        Undoes Lightning's division by the number of accumulation steps and its averaging over ranks, including when the
        last step is short.
        """
        batch, policy, reference, output = self.score(batch)
        with torch.no_grad():
            self._scored.append(MicroBatchRecord.from_output(batch, policy, reference, output))
            self.window.update({**pair_values(policy, output, batch), "tokens": tokens_per_pair(batch)})
        scale = self.trainer.accumulate_grad_batches * self.trainer.world_size / batch.step_pairs
        return (output.losses * batch.pair_weight).sum() * scale

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Logs the step's means, its unclipped gradient norm and its learning rate.

        Raises UserError on all ranks if loss or gradient norm is not finite.
        """
        self.updated = True
        lr = float(optimizer.param_groups[0]["lr"])  # some optimisers keep it as a tensor
        values = {f"train/{name}": value for name, value in self.window.compute().items()}
        self.window.reset()
        norm = to_full_tensor(
            torch.nn.utils.get_total_norm([p.grad.detach() for p in self.policy.parameters() if p.grad is not None])
        )
        if not bool((values["train/loss"].isfinite() & norm.isfinite()).item()):
            self._raise_nonfinite(norm.item(), lr)
        pairs = self._scored[-1].batch.step_pairs
        self._scored.clear()
        self._amounts = {"pairs": norm.new_tensor(pairs), "tokens": values.pop("train/tokens") * pairs}
        values["train/grad_norm"] = norm
        values["train/lr"] = torch.tensor(lr)
        self.log_dict({name: value.float() for name, value in values.items()})
        self.log("loss", values["train/loss"].float(), prog_bar=True, logger=False)

    def _raise_nonfinite(self, norm: float, lr: float) -> None:
        step = self.trainer.global_step + 1
        gradients = {
            name: p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad
            for name, p in self.policy.named_parameters()
            if p.grad is not None
        }
        path = Path(self.trainer.default_root_dir) / f"nonfinite-step-{step}.pt"
        world, leads = self.trainer.world_size, self.trainer.is_global_zero
        wrong = save_nonfinite_step(self._scored, gradients, path, step, world, leads=leads, norm=norm)
        instead = suggest_settings(lr, "another objective.beta", str(self.trainer.precision))
        raise UserError(f"{wrong}. Inspect these pairs, or try {instead}")

    def optimizer_step(
        self,
        epoch: int,
        batch_idx: int,
        optimizer: torch.optim.Optimizer | LightningOptimizer,
        optimizer_closure: Callable[[], object] | None = None,
    ) -> None:
        """Runs the step, then logs its speed over all ranks without waiting for a GPU."""
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        seconds = time.perf_counter() - self._began
        self.log_dict({f"train/{name}_per_s": amount.float() / seconds for name, amount in self._amounts.items()})
        if self.device.type == "cuda":
            self.log("train/gpu_mem_gib", torch.cuda.max_memory_allocated(self.device) / 2**30)

    # ------------------------------------------------------------------------------------------------ validation
    def on_validation_epoch_start(self) -> None:
        """Sets policy and reference to eval mode, in case a callback changed them."""
        self.set_modes(training=False)

    def validation_step(self, batch: PreferenceBatch, batch_idx: int) -> None:
        """Adds the batch to the validation means."""
        batch, policy, _, output = self.score(batch)
        self.validation.update(pair_values(policy, output, batch))
        self._losses.append((batch.pair_ids, output.losses * batch.pair_weight))

    def on_validation_epoch_end(self) -> None:
        """Logs ``val/*`` over all ranks. Counts pairs with a non-finite loss, and warns about them once."""
        if self.validation.names:
            values = {f"val/{name}": value.float() for name, value in self.validation.compute().items()}
            if not bool(values["val/loss"].isfinite()):
                values["val/nonfinite_pairs"] = torch.tensor(float(self._warn_nonfinite()))
            self.log_dict(values, prog_bar=False)
            # Lightning would log this one step too early, and step 1 would overwrite the validation before training.
            self.log_dict({"step": float(self.trainer.global_step), "epoch": float(self.trainer.current_epoch)})
        self.validation.reset()
        self._losses.clear()

    def _warn_nonfinite(self) -> int:
        """Counts the validation pairs with a non-finite loss over all ranks; the first time, logs their ids."""
        of_ranks = all_gather_values(nonfinite_pairs(self._losses), self.trainer.world_size)
        pairs = [pair_id for pair_ids in of_ranks for pair_id in pair_ids]
        if not self._warned and self.trainer.is_global_zero:
            log.warning(
                "val/loss is not finite because of %d pairs (%s); val/nonfinite_pairs counts them",
                len(pairs),
                join_names(pairs, SHOWN),
            )
        self._warned = True
        return len(pairs)

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        """Returns AdamW and its per-step schedule in Lightning's dictionary format."""
        recipe = self.recipe
        trained = (parameter for parameter in self.policy.parameters() if parameter.requires_grad)
        optimizer = recipe.build(trained, norm_and_bias_parameters(self.policy))
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: recipe.lr_factor(step, self.total_steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def shard_model(model: nn.Module, mesh: DeviceMesh) -> None:
    """Shards ``model`` in place (FSDP2): every block, then the root. Call only the root's forward afterwards."""
    for block in layer_stack(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def apply_online_weights(
    batch: PreferenceBatch,
    source: OnlineSource,
    policy: TokenStats,
    reference: TokenStats | None,
    transforms: Sequence[WeightTransform] = (),
) -> PreferenceBatch:
    """Returns the batch with the token weights, and any pair weights, computed for it by an online source.

    Logs pair weights as ``weights/pair``, and the share of pairs with weight 0 as ``weights/void``.
    """
    with torch.no_grad():
        given = source.weights(detach_stats(policy), None if reference is None else detach_stats(reference), batch)
    weights, pair = given if isinstance(given, tuple) else (given, None)
    if transforms:
        weights = transform_batch(transforms, weights, batch)
    if pair is not None:
        pair = pair.to(batch.pair_weight.dtype)
        told = {"weights/pair": pair, "weights/void": (pair == 0).to(pair.dtype)}
        batch = replace(batch, pair_weight=batch.pair_weight * pair, pair_values={**batch.pair_values, **told})
    rows = replace(
        batch.main, token_weights={**batch.main.token_weights, "reward": weights}, factors=source.kind is Kind.FACTOR
    )
    return replace(batch, groups={**batch.groups, "main": rows})


def check_models(policy: nn.Module, reference: nn.Module | None, *, rounding: bool) -> None:
    """Raises ``UserError`` unless modes, gradients and dtypes of policy and reference are suitable for training.

    Call this after the strategy has moved the models. ``rounding``: the optimiser rounds stochastically, so trained
    weights may have a dtype shorter than float32.
    """
    # transformers may share one activation module between models; it has no parameters and its mode is irrelevant.
    others = set() if reference is None else set(policy.modules()) & set(reference.modules())
    common = {part for part in others if not list(part.parameters())}
    still = [name or "the whole" for name, part in policy.named_modules() if not part.training and part not in common]
    if still:
        raise UserError(
            f"{len(still)} modules of the policy stay in eval mode (first: {still[0]}), which turns off dropout and "
            "gradient checkpointing; make that module's train() set the mode of its children"
        )
    check_rotary(policy)
    require_full_precision(policy, rounding=rounding)
    if reference is None:
        return
    check_rotary(reference)
    if any(part.training for part in reference.modules() if part not in common) or any(
        p.requires_grad for p in reference.parameters()
    ):
        raise UserError(
            "the reference must be in eval mode and without gradients; pass it as models.backbone.freeze(reference)"
        )


def require_full_precision(policy: nn.Module, *, rounding: bool) -> None:
    """Raises ``UserError`` if no parameter is trained, or if trained weights would lose small updates.

    ``rounding``: as in ``check_models``.
    """
    trained = [(name, value) for name, value in policy.named_parameters() if value.requires_grad]
    if not trained:
        raise UserError("no parameter of the policy has requires_grad, so nothing would be trained: unfreeze some")
    short = [(name, value.dtype) for name, value in trained if value.dtype not in (torch.float32, torch.float64)]
    if short and not rounding:
        raise UserError(
            f"{len(short)} of {len(trained)} trained parameters are not float32 (first: {short[0][0]}, {short[0][1]}), "
            "so the small updates of a typical learning rate would be lost; set model.dtype=float32, or load the "
            'policy with from_pretrained(MODEL, dtype="float32") (precision bf16-mixed still computes in bf16), or '
            "use an optimizer with stochastic_rounding"
        )


def frozen_parameter_names(module: nn.Module) -> set[str]:
    """Returns the names of all parameters that are not trained; a tied parameter has several names."""
    return {name for name, value in module.named_parameters(remove_duplicate=False) if not value.requires_grad}


def drop_frozen_weights(module: nn.Module, checkpoint: Checkpoint) -> None:
    """Removes frozen weights from ``checkpoint["state_dict"]``; records names and shapes of the others."""
    state = checkpoint["state_dict"]
    frozen = frozen_parameter_names(module)
    for name in [name for name in state if not frozen.isdisjoint({name, *parent_paths(name)})]:
        del state[name]
    checkpoint["trained"] = {name: list(value.shape) for name, value in state.items()}


def check_checkpoint_weights(module: nn.Module, checkpoint: Checkpoint) -> None:
    """Raises ``UserError`` unless the checkpoint has all trained weights of ``module`` and no unknown weights."""
    if "trained" not in checkpoint:
        raise UserError("resume: the file has no list of trained weights, so it is not a state.ckpt written by attnpo")
    saved = checkpoint["trained"]
    shapes = {name: list(value.shape) for name, value in module.state_dict().items() if isinstance(value, Tensor)}
    needed = [name for name, value in module.named_parameters(remove_duplicate=False) if value.requires_grad]
    missing = [name for name in needed if name not in saved]
    unexpected = [name for name in saved if name not in shapes]
    other = [
        f"{name} {list(saved[name])}, here {shape}"
        for name, shape in shapes.items()
        if list(saved.get(name, shape)) != shape
    ]
    problems = [
        f"{len(names)} {what} (first: {names[0]})"
        for names, what in ((missing, "missing"), (unexpected, "unexpected"), (other, "of another shape"))
        if names
    ]
    if problems:
        raise UserError(
            f"resume: the checkpoint does not match the {len(needed)} trained weights of this model: "
            f"{', '.join(problems)}. Resume with the model and adapter settings of the saved run"
        )
