"""FSDP2 over a data-parallel mesh: every block of the largest layer stack, then the root."""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard


def layer_stack(model: nn.Module) -> nn.ModuleList:
    """The module list with the most parameters: the decoder blocks of a causal LM.

    Raises:
        ValueError: the model has no module list.
    """
    stacks = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module)]
    if not stacks:
        raise ValueError(f"{type(model).__name__} has no list of layers to shard")
    return max(stacks, key=lambda stack: sum(parameter.numel() for parameter in stack.parameters()))


def shard(model: nn.Module, mesh: DeviceMesh) -> None:
    """Nothing; shards ``model`` in place. Its forward, not a submodule's, must be called afterwards."""
    for block in layer_stack(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
