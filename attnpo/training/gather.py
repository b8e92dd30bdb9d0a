"""Collectives across the processes of a job: gathers plain values and the full policy of a sharded run."""

from typing import TypeVar

import lightning as L
from torch import Tensor
from torch import distributed as dist
from torch.distributed.tensor import DTensor

from attnpo.data.datamodule import PreferenceDataModule
from attnpo.models.logps import to_full_tensor
from attnpo.schema import UserError

Value = TypeVar("Value")


def all_gather_values(value: Value, processes: int) -> list[Value]:
    """Returns the ``value`` of every process, ordered by rank (a collective: every rank must call it)."""
    values = [value] * processes
    if processes > 1:
        dist.all_gather_object(values, value)
    return values


class RankConsistencyCheck(L.Callback):
    """Stops training if the processes of a job chose different values for ``what``, so that none waits forever."""

    def __init__(self, what: str, value: str, instead: str) -> None:
        self.what, self.value, self.instead = what, value, instead

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Compares the choices (a collective: every rank takes part). Raises UserError on every rank if they differ."""
        values = all_gather_values(self.value, trainer.world_size)
        if len(set(values)) > 1:
            first = {value: values.index(value) for value in reversed(values)}
            told = ", ".join(f"process {rank}: {value}" for value, rank in first.items())
            raise UserError(f"{self.what}: processes made different choices ({told}); {self.instead}")


class SmallestTokenBudgets(L.Callback):
    """Sets the token budgets of ``data`` on every process to the smallest chosen by any process."""

    def __init__(self, data: PreferenceDataModule) -> None:
        self.data = data

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Reduces the budgets to their minimum over ranks (a collective: every rank takes part)."""
        if trainer.world_size > 1:
            found = all_gather_values(self.data.token_budgets, trainer.world_size)
            self.data.set_budgets([min(of_ranks) for of_ranks in zip(*found, strict=True)])
            trainer.accumulate_grad_batches = self.data.accumulation_steps(trainer.world_size)


class FullPolicyGather(L.Callback):
    """Gathers a sharded policy at the end of training, before Lightning moves the shards to the CPU.

    Afterwards ``state`` contains the full weights on the first process and is empty on the others; it is None if
    nothing is sharded.
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
