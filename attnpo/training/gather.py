"""Gathering over the processes of a job: plain values, and the whole policy of a sharded run."""

from typing import TypeVar

import lightning as L
from torch import Tensor
from torch import distributed as dist
from torch.distributed.tensor import DTensor

from attnpo.data.datamodule import PreferenceDataModule
from attnpo.models.logps import to_full_tensor
from attnpo.schema import UserError

Value = TypeVar("Value")


def from_all_ranks(value: Value, processes: int) -> list[Value]:
    """Returns the ``value`` of every process in the order of their ranks (a collective: every rank must call it)."""
    values = [value] * processes
    if processes > 1:
        dist.all_gather_object(values, value)
    return values


class SameEverywhere(L.Callback):
    """Refuses to train where the processes of a job have decided ``what`` otherwise: they would wait for each other."""

    def __init__(self, what: str, value: str, instead: str) -> None:
        self.what, self.value, self.instead = what, value, instead

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Compares the decisions (a collective: every rank takes part). UserError on every rank where they differ."""
        values = from_all_ranks(self.value, trainer.world_size)
        if len(set(values)) > 1:
            first = {value: values.index(value) for value in reversed(values)}
            told = ", ".join(f"process {rank}: {value}" for value, rank in first.items())
            raise UserError(f"{self.what} became another choice on another device ({told}); {self.instead}")


class LeastBudgets(L.Callback):
    """Gives every process of a job the least budgets of tokens that any of them has chosen for ``data``."""

    def __init__(self, data: PreferenceDataModule) -> None:
        self.data = data

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Brings the budgets together (a collective: every rank takes part)."""
        if trainer.world_size > 1:
            found = from_all_ranks(self.data.token_budgets, trainer.world_size)
            self.data.set_budgets([min(of_ranks) for of_ranks in zip(*found, strict=True)])
            trainer.accumulate_grad_batches = self.data.accumulation_steps(trainer.world_size)


class WholePolicy(L.Callback):
    """Gathers a sharded policy at the end of training, before Lightning moves the shards to the CPU.

    ``state`` then holds the whole weights on the first process and is empty on the others; None where nothing is
    sharded.
    """

    def __init__(self) -> None:
        self.state: dict[str, Tensor] | None = None

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Gathers the weights (a collective: every rank takes part)."""
        policy = pl_module.get_submodule("policy.model")
        if not any(isinstance(parameter, DTensor) for parameter in policy.parameters()):
            return
        self.state = {}
        for name, value in policy.state_dict().items():
            whole = to_full_tensor(value).detach()
            if trainer.is_global_zero:
                self.state[name] = whole.cpu()
