"""The Lightning module: policy and frozen reference, one objective, exact normalisation over the optimiser step."""

from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from attnpo.models.scored import ScoredLM
from attnpo.objectives.base import PreferenceObjective
from attnpo.schema import ObjectiveOutput, PreferenceBatch, TokenStats
from attnpo.training.metrics import PairMeans, pair_values
from attnpo.training.optimizer import Optimizer
from attnpo.training.sharding import shard


class PreferenceModule(L.LightningModule):
    """Trains ``policy`` on preference batches against a frozen ``reference``.

    The reference is no submodule: it stays out of the state dict, the optimiser and any wrapper of the strategy.
    Without one, batches must carry the reference's log-probabilities if the objective asks for them.

    Args:
        policy: the model to train.
        reference: a frozen copy (live) or None (cached, or an objective that needs none).
        objective: asked for ``requires``; exactly that is computed.
        optimizer: optimiser and schedule.
        total_steps: optimiser steps of the whole run, for the schedule.
    """

    def __init__(
        self,
        policy: ScoredLM,
        reference: ScoredLM | None,
        objective: PreferenceObjective,
        optimizer: Optimizer,
        total_steps: int,
    ) -> None:
        super().__init__()
        self.policy = policy
        object.__setattr__(self, "reference", reference)
        self.objective = objective
        self.recipe = optimizer
        self.total_steps = total_steps
        self.window = PairMeans()
        self.validation = PairMeans()
        self.sharded = False

    reference: ScoredLM | None

    def configure_model(self) -> None:
        """Nothing; shards policy and reference over the data-parallel mesh when the strategy has one (FSDP2)."""
        mesh = self.device_mesh
        if mesh is None or self.sharded:
            return
        shard(self.policy, mesh["data_parallel"])
        if self.reference is not None:
            shard(self.reference, mesh["data_parallel"])
        self.sharded = True

    def setup(self, stage: str) -> None:
        """Nothing; puts the reference on this rank's device (sharding does so itself)."""
        if self.reference is not None and self.device_mesh is None:
            # Lightning moves the module itself only later, so self.device is still where it was built.
            self.reference.to(self.trainer.strategy.root_device)

    def train(self, mode: bool = True) -> "PreferenceModule":
        """Self, with the policy in ``mode`` and the reference in eval mode."""
        super().train(mode)
        if self.reference is not None:
            self.reference.eval()
        return self

    def on_fit_start(self) -> None:
        """Nothing; puts the policy in train mode (from_pretrained leaves it in eval mode)."""
        self.train()

    # ------------------------------------------------------------------------------------------------ the step
    def score(self, batch: PreferenceBatch) -> tuple[TokenStats, TokenStats | None, ObjectiveOutput]:
        """Policy statistics, reference statistics (if required) and the objective's output for a batch."""
        rows = batch.main
        if rows.inputs is None:
            raise ValueError("the batch has no model inputs")
        policy: TokenStats = self.policy(rows.inputs, rows.response_ids, rows.response_mask)
        reference = self._reference_stats(batch) if "reference" in self.objective.requires else None
        return policy, reference, self.objective(policy, reference, batch)

    def _reference_stats(self, batch: PreferenceBatch) -> TokenStats:
        rows = batch.main
        if rows.reference_logps is not None:
            return TokenStats(logps=rows.reference_logps)
        if self.reference is None:
            raise ValueError("the objective needs the reference, and neither a model nor stored log-probs are there")
        with torch.no_grad():
            stats: TokenStats = self.reference(rows.inputs, rows.response_ids, rows.response_mask)
        return stats

    def training_step(self, batch: PreferenceBatch, batch_idx: int) -> Tensor:
        """The micro-batch's share of the optimiser step's mean loss.

        Lightning divides by the accumulation and averages gradients over ranks; both are undone here, so the gradient
        of a step is exactly that of the mean over its ``step_pairs`` pairs, also in a short last step.
        """
        policy, _, output = self.score(batch)
        with torch.no_grad():
            self.window.update(pair_values(policy, output, batch))
        scale = self.trainer.accumulate_grad_batches * self.trainer.world_size / batch.step_pairs
        return (output.losses * batch.pair_weight).sum() * scale

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Nothing; logs the window's means, the gradient norm before clipping and the learning rate."""
        values = {f"train/{name}": value for name, value in self.window.compute().items()}
        self.window.reset()
        norms = [p.grad.detach() for p in self.policy.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(norms)
        values["train/grad_norm"] = norm.full_tensor() if isinstance(norm, DTensor) else norm
        values["train/lr"] = torch.tensor(optimizer.param_groups[0]["lr"])
        self.log_dict({name: value.float() for name, value in values.items()})
        self.log("loss", values["train/loss"].float(), prog_bar=True, logger=False)

    def validation_step(self, batch: PreferenceBatch, batch_idx: int) -> None:
        """Nothing; adds the batch to the validation means."""
        policy, _, output = self.score(batch)
        self.validation.update(pair_values(policy, output, batch))

    def on_validation_epoch_end(self) -> None:
        """Nothing; logs ``val/*`` over all ranks."""
        if self.validation.names:
            values = {f"val/{name}": value.float() for name, value in self.validation.compute().items()}
            self.log_dict(values, prog_bar=False)
            # Lightning would file this under the step before, and the one behind step 1 over the one before training.
            self.log_dict({"step": float(self.trainer.global_step), "epoch": float(self.trainer.current_epoch)})
        self.validation.reset()

    def configure_optimizers(self) -> Any:
        """AdamW and its per-step schedule in Lightning's dictionary form."""
        recipe = self.recipe
        trainable = [parameter for parameter in self.policy.parameters() if parameter.requires_grad]
        optimizer = recipe.make(trainable)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: recipe.factor(step, self.total_steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def frozen(model: nn.Module) -> nn.Module:
    """The same model in eval mode with every gradient switched off."""
    return model.eval().requires_grad_(False)
