"""A model's blocks through ``torch.compile``, one by one, with everything else around them.

Owns what is compiled. Blocks of a kind share their code, so there is little to compile; adapters are inside, and
recomputation, layouts, the vocabulary head and its chunks stay outside. Attention over segments is left out of the
graphs: its shapes are new in every batch.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from attnpo.models.parts import layer_stack
from attnpo.models.segments import keep_out_of_graphs
from attnpo.schema import UserError


def compile_blocks(model: PreTrainedModel, backend: str) -> None:
    """Nothing; compiles every decoder block in place, at its first call. Names of parameters stay what they were.

    Call it behind ``activation_checkpointing_enable``: blocks that are to be recomputed are, their graphs inside.
    Raises ``UserError`` for a backend that torch does not know.
    """
    require_backend(backend)
    keep_out_of_graphs()
    for block in layer_stack(model):
        run = torch.compile(block.forward, backend=backend, dynamic=True)
        if getattr(block, "gradient_checkpointing", False):
            # The library's own would lie inside the graph.
            block.gradient_checkpointing = False  # type: ignore[assignment]
            run = _recomputed(block, run)
        block.forward = run


def require_backend(backend: str) -> None:
    """Nothing; raises ``UserError`` for a backend that torch does not know."""
    from torch._dynamo import list_backends  # seconds of import

    if backend not in list_backends(exclude_tags=()):
        raise UserError(
            f"model.compile={backend!r} is no backend of torch.compile here; one of {', '.join(list_backends())} "
            "(inductor is the usual one), or null"
        )


def _recomputed(block: nn.Module, run: Callable[..., Any]) -> Callable[..., Any]:
    def forward(*arguments: Any, **more: Any) -> Any:
        if not (block.training and torch.is_grad_enabled()):
            return run(*arguments, **more)
        return checkpoint(run, *arguments, use_reentrant=False, **more)

    return forward
