"""FSDP2: shards a model over the mesh of processes, and gathers it whole after training."""

import lightning as L
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from attnpo.models.backbone import layer_stack
from attnpo.training.export import policy_state


def shard(model: nn.Module, mesh: DeviceMesh) -> None:
    """Nothing; shards ``model`` in place. Its forward, not a submodule's, must be called afterwards."""
    for block in layer_stack(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


class WholePolicy(L.Callback):
    """Gathers a sharded policy at the end of training, before Lightning moves the shards to the CPU.

    There a collective breaks: the processes of a job on GPUs talk over NCCL, which knows no CPU tensor. Afterwards
    ``state`` holds the whole weights (adapters merged in) on the first process and is empty on the others; it is None
    where the policy is not sharded, so whole anyway, or where training did not end.
    """

    def __init__(self) -> None:
        self.state: dict[str, Tensor] | None = None

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Nothing; gathers (a collective: every rank takes part)."""
        policy = pl_module.get_submodule("policy.model")
        if not any(isinstance(parameter, DTensor) for parameter in policy.parameters()):
            return
        assert isinstance(policy, PreTrainedModel)
        self.state = policy_state(policy, keep=trainer.is_global_zero)
