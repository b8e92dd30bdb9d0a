"""FSDP2 over a data-parallel mesh: shards every block of the largest layer stack, then the root."""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from attnpo.models.backbone import layer_stack


def shard(model: nn.Module, mesh: DeviceMesh) -> None:
    """Shards ``model`` in place. Its forward, not a submodule's, must be called afterwards."""
    for block in layer_stack(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
