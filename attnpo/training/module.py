"""Lightning module: policy and frozen reference, one objective, exact normalisation over the optimiser step."""

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
from attnpo.training.gather import from_all_ranks
from attnpo.training.nonfinite import SHOWN, MicroBatchRecord, advice, detach, nonfinite_pairs, save_step
from attnpo.training.optimizer import Optimizer, norms_and_biases
from attnpo.training.pair_values import pair_values, read_tokens
from attnpo.training.resume_state import Checkpoint
from attnpo.weights.base import OnlineSource
from attnpo.weights.pipeline import transformed_batch
from attnpo.weights.transforms import WeightTransform

log = logging.getLogger(__name__)


class PairMeans(torchmetrics.Metric):
    """Means over pairs of named per-pair values, summed over micro-batches and ranks before dividing."""

    full_state_update = False
    pairs: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.add_state("pairs", default=torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, values: Mapping[str, Float[Tensor, " pairs"]]) -> None:
        """Adds one micro-batch. The first call fixes the names."""
        for name, value in values.items():
            state = self._state(name)
            if name not in self.names:
                self.names.append(name)
                self.add_state(state, torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
                setattr(self, state, getattr(self, state).to(self.device))
            setattr(self, state, getattr(self, state) + value.detach().double().sum())
        self.pairs = self.pairs + len(next(iter(values.values())))

    def compute(self) -> dict[str, Tensor]:
        """Returns the mean of every name seen so far."""
        return {name: getattr(self, self._state(name)) / self.pairs.clamp(min=1) for name in self.names}

    @staticmethod
    def _state(name: str) -> str:
        return "sum_" + name.replace("/", "_")


RowMaker = Callable[[ScoredLM, PreferenceBatch, int], RowGroup]
"""Row group for a batch, from the policy as it stands and the number of optimiser steps taken."""


class PreferenceModule(L.LightningModule):
    """Trains ``policy`` on preference batches against a frozen ``reference``, which is no submodule.

    A step whose loss or gradient norm is not finite is never taken: training ends with a ``UserError`` that names its
    pairs, and the step is saved as ``nonfinite-step-N.pt`` in the run's folder (steps counted from 1).

    Args:
        policy: the model to train, of transformers or wrapped already.
        reference: a copy of it, which is frozen, or None (stored log-probabilities, or an objective that needs none).
        objective: asked for ``requires``; exactly that is computed.
        optimizer: optimiser and schedule; None takes ``Optimizer()``.
        total_steps: optimiser steps of the whole run, for the schedule; None asks the Trainer.
        online: a source that weighs each batch from what the step computes; None leaves the batch's weights.
        makers: make the further row groups that the objective asks for, by the groups' names.
        kept: called with each batch and the log-probabilities [rows R] that the reference model gives it.
        transforms: change the weights of the online source in every step.
        router_coef: what the load-balancing loss of each pair, ``losses/router``, adds to its loss, if not 0.

    Raises:
        UserError: trained weights that are not float32, under an optimizer that does not round stochastically.
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
        self.one_fit = False  # whether nothing but the policy is asked for after training, which then ends sooner
        self.updated = False  # whether an update has begun since training did
        self._scored: list[MicroBatchRecord] = []  # the micro-batches of the current optimiser step
        self._losses: list[tuple[tuple[str, ...], Tensor]] = []  # of the pairs of the current validation
        self._state: dict[str, Tensor] = {}  # what the objective summed over the rows ahead of the current step
        self._warned = False  # of a validation loss that is not finite
        self._began = 0.0  # when the current optimiser step began, in seconds
        self._amounts: dict[str, Tensor] = {}  # pairs and tokens of the current optimiser step

    reference: ScoredLM | None

    @property
    def total_steps(self) -> int:
        """Returns the run's number of optimiser steps, which the Trainer estimates where it was not given."""
        return int(self.trainer.estimated_stepping_batches) if self._total_steps is None else self._total_steps

    def configure_model(self) -> None:
        """Shards policy and reference over the data-parallel mesh when the strategy has one (FSDP2)."""
        mesh = self.device_mesh
        if mesh is None or self.sharded:
            return
        shard(self.policy, mesh["data_parallel"])
        # A reference without weights of its own (a policy run without its adapters) is sharded with the policy.
        if self.reference is not None and any(True for _ in self.reference.parameters()):
            shard(self.reference, mesh["data_parallel"])
        self.sharded = True

    def setup(self, stage: str) -> None:
        """Puts the reference on this rank's device (sharding does so itself)."""
        # Frozen weights are left out of checkpoints; check_saved asks for the others.
        self.strict_loading = not frozen_names(self)
        if self.reference is not None and self.device_mesh is None:
            # Lightning moves the module itself only later, so self.device is still where it was built.
            self.reference.to(self.trainer.strategy.root_device)

    def train(self, mode: bool = True) -> "PreferenceModule":
        """Returns self, with the policy in ``mode`` and the reference in eval mode."""
        super().train(mode)
        if self.reference is not None:
            self.reference.eval()
        return self

    def cpu(self) -> "PreferenceModule":
        """Moves to the CPU; with ``one_fit`` it stays, as Lightning asks for this after each validation and fit."""
        return self if self.one_fit else super().cpu()

    def on_train_end(self) -> None:
        """Lets go of gradients and moments with ``one_fit``: Lightning would move them to the CPU."""
        for optimizer in self.trainer.optimizers if self.one_fit else ():
            optimizer.zero_grad()
            optimizer.state.clear()

    def establish(self, training: bool) -> None:
        """Sets the policy's mode (from_pretrained leaves it in eval mode) and freezes the reference."""
        self.train(training)
        if self.reference is not None:
            freeze(self.reference)

    def on_fit_start(self) -> None:
        """Starts an empty step; refuses models that are not as training needs them."""
        self._scored.clear()
        self.window.reset()
        self.updated = False
        self.establish(training=True)
        check_ready(self.policy, self.reference, rounding=self.recipe.stochastic_rounding)

    def on_train_batch_start(self, batch: PreferenceBatch, batch_idx: int) -> None:
        """Sets the modes again at the start of an optimiser step: a callback may have changed them."""
        if not self._scored:
            self.establish(training=True)
            self._began = time.perf_counter()

    # ------------------------------------------------------------------------------------------------ checkpoints
    def on_save_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Keeps of the weights those that are trained."""
        keep_trained(self, checkpoint)

    def on_load_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Refuses a checkpoint whose weights are not those trained here."""
        check_saved(self, checkpoint)

    # ------------------------------------------------------------------------------------------------ the step
    def score(self, batch: PreferenceBatch) -> tuple[PreferenceBatch, TokenStats, TokenStats | None, ObjectiveOutput]:
        """Returns the batch with the weights that were read, statistics of policy and reference, and the output."""
        if batch.ahead:
            self._state = self._look_ahead(batch)
        batch = replace(batch, ahead={}, state=self._state, step=self.global_step if self.training else None)
        # Before the main rows are scored, so that its graph is gone when theirs is held.
        gradient = input_gradient(self.policy, batch.main) if "input_gradient" in self.reads else None
        policy, reference = self._statistics(batch.main, self.reads)
        if self.kept is not None and reference is not None and batch.main.reference_logps is None:
            self.kept(batch, reference.logps)
        policy = replace(policy, input_gradient=gradient)
        for name in sorted(self.makers):
            rows = self.makers[name](self.policy, batch, self.trainer.global_step)
            batch = replace(batch, groups={**batch.groups, name: rows})
            of_policy, of_reference = self._statistics(rows, self.reads & {"reference"})
            policy = replace(policy, groups={**policy.groups, name: of_policy})
            if reference is not None and of_reference is not None:
                reference = replace(reference, groups={**reference.groups, name: of_reference})
        if self.online is not None:
            batch = weigh_online(batch, self.online, policy, reference, self.transforms)
        output = self.objective(policy, reference, batch)
        if policy.routing is not None:
            load = load_balancing_loss(policy.routing)
            extras = {**output.extras, "losses/router": load.detach()}
            output = replace(output, losses=output.losses + self.router_coef * load, extras=extras)
        return batch, policy, reference, output

    def _statistics(self, rows: RowGroup, reads: frozenset[str]) -> tuple[TokenStats, TokenStats | None]:
        """Returns the statistics of a group's rows that ``reads`` names: policy's, and reference's if it is read."""
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
            raise ValueError("the objective needs the reference, and neither a model nor stored log-probs are there")
        with torch.no_grad():
            stats: TokenStats = self.reference(rows.inputs, rows.response_ids, rows.response_mask, requests)
        return stats

    def _look_ahead(self, batch: PreferenceBatch) -> dict[str, Tensor]:
        """Returns the objective's sums over the rows scored before the step, over all ranks."""
        assert isinstance(self.objective, StepObjective)
        sums: dict[str, Tensor] = {}
        with torch.no_grad():
            for rows in itertools.chain.from_iterable(batch.ahead.values()):
                for name, value in self.objective.step_sums(
                    *self._statistics(rows, self.reads & {"reference"}), rows
                ).items():
                    sums[name] = sums[name] + value if name in sums else value
        torch.clear_autocast_cache()  # in older releases, weights cast under no_grad would pass no gradient later
        if self.trainer.world_size > 1:
            sums = {name: self.all_gather(value).sum() for name, value in sums.items()}  # type: ignore[union-attr]
        return sums

    def training_step(self, batch: PreferenceBatch, batch_idx: int) -> Tensor:
        """Returns the micro-batch's share of the optimiser step's mean loss.

        Lightning's division by the accumulation and its average over ranks are undone here, also in a short last step.
        """
        batch, policy, reference, output = self.score(batch)
        with torch.no_grad():
            self._scored.append(MicroBatchRecord.of(batch, policy, reference, output))
            self.window.update({**pair_values(policy, output, batch), "tokens": read_tokens(batch)})
        scale = self.trainer.accumulate_grad_batches * self.trainer.world_size / batch.step_pairs
        return (output.losses * batch.pair_weight).sum() * scale

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Logs the window's means, gradient norm before clipping and rate; UserError, on all ranks, if not finite."""
        self.updated = True
        lr = float(optimizer.param_groups[0]["lr"])  # some optimisers keep it as a tensor
        values = {f"train/{name}": value for name, value in self.window.compute().items()}
        self.window.reset()
        norm = to_full_tensor(
            torch.nn.utils.get_total_norm([p.grad.detach() for p in self.policy.parameters() if p.grad is not None])
        )
        if not bool((values["train/loss"].isfinite() & norm.isfinite()).item()):
            self._stop(norm.item(), lr)
        pairs = self._scored[-1].batch.step_pairs
        self._scored.clear()
        self._amounts = {"pairs": norm.new_tensor(pairs), "tokens": values.pop("train/tokens") * pairs}
        values["train/grad_norm"] = norm
        values["train/lr"] = torch.tensor(lr)
        self.log_dict({name: value.float() for name, value in values.items()})
        self.log("loss", values["train/loss"].float(), prog_bar=True, logger=False)

    def _stop(self, norm: float, lr: float) -> None:
        step = self.trainer.global_step + 1
        gradients = {
            name: p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad
            for name, p in self.policy.named_parameters()
            if p.grad is not None
        }
        path = Path(self.trainer.default_root_dir) / f"nonfinite-step-{step}.pt"
        world, leads = self.trainer.world_size, self.trainer.is_global_zero
        wrong = save_step(self._scored, gradients, path, step, world, leads=leads, norm=norm)
        instead = advice(lr, "another objective.beta", str(self.trainer.precision))
        raise UserError(f"{wrong}. Look at these pairs, or try {instead}")

    def optimizer_step(
        self,
        epoch: int,
        batch_idx: int,
        optimizer: torch.optim.Optimizer | LightningOptimizer,
        optimizer_closure: Callable[[], object] | None = None,
    ) -> None:
        """Steps, then logs the step's speed over all ranks, without waiting for a GPU."""
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        seconds = time.perf_counter() - self._began
        self.log_dict({f"train/{name}_per_s": amount.float() / seconds for name, amount in self._amounts.items()})
        if self.device.type == "cuda":
            self.log("train/gpu_mem_gib", torch.cuda.max_memory_allocated(self.device) / 2**30)

    # ------------------------------------------------------------------------------------------------ validation
    def on_validation_epoch_start(self) -> None:
        """Sets policy and reference to eval mode: a callback may have changed them."""
        self.establish(training=False)

    def validation_step(self, batch: PreferenceBatch, batch_idx: int) -> None:
        """Adds the batch to the validation means."""
        batch, policy, _, output = self.score(batch)
        self.validation.update(pair_values(policy, output, batch))
        self._losses.append((batch.pair_ids, output.losses * batch.pair_weight))

    def on_validation_epoch_end(self) -> None:
        """Logs ``val/*`` over all ranks, with the number of pairs whose loss is not finite, warned of once."""
        if self.validation.names:
            values = {f"val/{name}": value.float() for name, value in self.validation.compute().items()}
            if not bool(values["val/loss"].isfinite()):
                values["val/nonfinite_pairs"] = torch.tensor(float(self._warn_nonfinite()))
            self.log_dict(values, prog_bar=False)
            # Lightning would log this under the step before, and the one after step 1 over the one before training.
            self.log_dict({"step": float(self.trainer.global_step), "epoch": float(self.trainer.current_epoch)})
        self.validation.reset()
        self._losses.clear()

    def _warn_nonfinite(self) -> int:
        """Counts the validation pairs with a non-finite loss over all ranks; the first time a warning names them."""
        of_ranks = from_all_ranks(nonfinite_pairs(self._losses), self.trainer.world_size)
        pairs = [pair_id for pair_ids in of_ranks for pair_id in pair_ids]
        if not self._warned and self.trainer.is_global_zero:
            log.warning(
                "the validation loss is not finite for %d pairs (%s), nor is val/loss; val/nonfinite_pairs counts them",
                len(pairs),
                join_names(pairs, SHOWN),
            )
        self._warned = True
        return len(pairs)

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        """Returns AdamW and its per-step schedule in Lightning's dictionary form."""
        recipe = self.recipe
        trained = (parameter for parameter in self.policy.parameters() if parameter.requires_grad)
        optimizer = recipe.make(trained, norms_and_biases(self.policy))
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: recipe.factor(step, self.total_steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def shard(model: nn.Module, mesh: DeviceMesh) -> None:
    """Shards ``model`` in place (FSDP2): every block, then the root, whose forward must be called afterwards."""
    for block in layer_stack(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def weigh_online(
    batch: PreferenceBatch,
    source: OnlineSource,
    policy: TokenStats,
    reference: TokenStats | None,
    transforms: Sequence[WeightTransform] = (),
) -> PreferenceBatch:
    """Returns the batch with the weights that an online source gives its main rows, and its pairs if it weighs them.

    Pair weights are logged as ``weights/pair``, the share of pairs that it made void as ``weights/void``.
    """
    with torch.no_grad():
        given = source.weights(detach(policy), None if reference is None else detach(reference), batch)
    weights, pair = given if isinstance(given, tuple) else (given, None)
    if transforms:
        weights = transformed_batch(transforms, weights, batch)
    if pair is not None:
        pair = pair.to(batch.pair_weight.dtype)
        told = {"weights/pair": pair, "weights/void": (pair == 0).to(pair.dtype)}
        batch = replace(batch, pair_weight=batch.pair_weight * pair, pair_values={**batch.pair_values, **told})
    rows = replace(
        batch.main, token_weights={**batch.main.token_weights, "reward": weights}, factors=source.kind is Kind.FACTOR
    )
    return replace(batch, groups={**batch.groups, "main": rows})


def check_ready(policy: nn.Module, reference: nn.Module | None, *, rounding: bool) -> None:
    """Raises ``UserError`` unless modes, gradients and number formats of policy and reference are what training needs.

    Called once the strategy has moved them. ``rounding``: the optimiser rounds stochastically, so trained weights may
    be shorter.
    """
    # Classes of the library may share an activation among all their models, which has one mode and needs none.
    others = set() if reference is None else set(policy.modules()) & set(reference.modules())
    common = {part for part in others if not list(part.parameters())}
    still = [name or "the whole" for name, part in policy.named_modules() if not part.training and part not in common]
    if still:
        raise UserError(
            f"{len(still)} modules of the policy stay in eval mode (first: {still[0]}), where dropout and gradient "
            "checkpointing are off; let that module's train() pass the mode on"
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
            "the reference must be in eval mode and without gradients; give it as models.backbone.frozen(reference)"
        )


def require_full_precision(policy: nn.Module, *, rounding: bool) -> None:
    """Raises ``UserError`` where nothing is trained, or weights that lose small updates, as ``check_ready`` says."""
    trained = [(name, value) for name, value in policy.named_parameters() if value.requires_grad]
    if not trained:
        raise UserError("the policy has no parameter with requires_grad: nothing would be trained; unfreeze some")
    short = [(name, value.dtype) for name, value in trained if value.dtype not in (torch.float32, torch.float64)]
    if short and not rounding:
        raise UserError(
            f"{len(short)} of {len(trained)} trained parameters are not float32 (first: {short[0][0]}, {short[0][1]}), "
            "which loses the small updates of a usual lr; set model.dtype=float32, or load the policy by "
            'from_pretrained(MODEL, dtype="float32") (precision bf16-mixed computes in bf16 all the same), or take an '
            "optimizer with stochastic_rounding"
        )


def frozen_names(module: nn.Module) -> set[str]:
    """Returns the names of all parameters that are not trained, tied ones under each of their names."""
    return {name for name, value in module.named_parameters(remove_duplicate=False) if not value.requires_grad}


def keep_trained(module: nn.Module, checkpoint: Checkpoint) -> None:
    """Removes what is not trained from ``checkpoint["state_dict"]``, and notes names and shapes of what is left."""
    state = checkpoint["state_dict"]
    frozen = frozen_names(module)
    for name in [name for name in state if not frozen.isdisjoint({name, *parent_paths(name)})]:
        del state[name]
    checkpoint["trained"] = {name: list(value.shape) for name, value in state.items()}


def check_saved(module: nn.Module, checkpoint: Checkpoint) -> None:
    """Raises ``UserError`` unless the checkpoint has every trained weight of ``module`` and none that it lacks."""
    if "trained" not in checkpoint:
        raise UserError("resume: the file does not name the weights it holds, so it is no state.ckpt of this program")
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
            f"resume: the checkpoint's weights do not fit the {len(needed)} trained ones of this model: "
            f"{', '.join(problems)}. Resume with the model and adapter settings of the saved run"
        )
