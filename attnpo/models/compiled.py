"""Compiles a model's blocks one by one with ``torch.compile``, and checks that the results stay the same.

Blocks of the same kind share their compiled code. Adapters are compiled too. The following are not compiled: activation
checkpointing, layouts, the vocabulary head with its chunk loop, calls with a KV cache, and bucketed attention (because
its shapes change with every batch).
"""

import gc
import logging
import math
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from attnpo.models.backbone import layer_stack, vocabulary_size
from attnpo.models.layouts import Layout
from attnpo.models.packed_attention import exclude_buckets_from_compile, prepare_compiled_attention
from attnpo.models.scored import ScoredLM
from attnpo.models.trial import EXACT, make_small_copy
from attnpo.schema import UserError

log = logging.getLogger(__name__)
P = ParamSpec("P")
R = TypeVar("R")

LENGTHS = (48, 640)
"""Lengths in tokens of the two pairs used in the check; code compiled for the first must also work for the second."""

MOST_GRAPHS = 64
"""Maximum number of graphs per block, after which torch stops compiling.

Gradients, prefixes and windows each require a separate graph.
"""

BOUNDS = {torch.float64: 1e-4, torch.float32: 1e-3}  # norms are computed in float32 even in a float64 model
SMALLEST = 0.01  # gradients below this share of the largest one may be rounding and are compared with that share
GRADIENT = "the gradient of layers."


def compile_blocks(model: PreTrainedModel, backend: str) -> None:
    """Sets up every decoder block to be compiled in place on its first call; parameter names do not change.

    Call it after ``activation_checkpointing_enable``. Raises ``UserError`` if torch does not know the backend.
    """
    check_backend(backend)
    exclude_buckets_from_compile()
    warnings.filterwarnings("ignore", "TensorFloat32 tensor cores")  # an option named float32 gives float32
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MOST_GRAPHS)
    for block in layer_stack(model):
        run = torch.compile(block.forward, backend=backend, dynamic=True)
        if getattr(block, "gradient_checkpointing", False):
            # The library's own checkpointing would end up inside the graph.
            block.gradient_checkpointing = False  # type: ignore[assignment]
            run = _checkpoint_forward(block, run)
        block.forward = _without_cache(run, block.forward)


def check_backend(backend: str) -> None:
    """Raises ``UserError`` if torch does not know the backend."""
    from torch._dynamo import list_backends  # seconds of import

    if backend not in list_backends(exclude_tags=()):
        raise UserError(
            f"model.compile={backend!r} is not an available torch.compile backend: choose one of "
            f"{', '.join(list_backends())} (inductor is the default), or set model.compile=null"
        )


def check_compiled_blocks(
    model: PreTrainedModel, backend: str, layout: Layout, device: torch.device, *, autocast: bool
) -> None:
    """Checks that compiled blocks produce the same log-probabilities and gradients as uncompiled ones.

    Runs a few layers of the same kinds and widths as the model's, with random weights. The float32 results must match;
    the run in the training precision only has to complete, and its rounding error is logged. The model and the random
    state are not changed.

    Raises:
        UserError: the compiled blocks fail, or their results differ.
    """
    what, kind = f"model.compile={backend}", type(model).__name__
    instead = "set model.compile=null, or another backend"
    exact = model.dtype in EXACT
    trials = [(model.dtype if exact else torch.float32, False), *([] if exact and not autocast else [(None, autocast)])]
    for dtype, mixed in trials:
        try:
            worst, gap = _find_largest_change(make_small_copy(model, device, dtype), backend, layout, autocast=mixed)
        except Exception as error:  # of any compiler, toolchain or model
            # After the first empty line, torch only explains how to get more traces.
            reason = str(error).partition("\n\n")[0]
            raise UserError(
                f"{what} cannot run blocks like those of {kind} on {device} ({type(error).__name__}: {reason}): "
                f"{instead}"
            ) from error
        bound = math.inf if dtype is None else BOUNDS[dtype]
        if not gap <= bound:  # NaN is no match either
            raise UserError(
                f"{what} computes {worst} incorrectly on {device}: for blocks like those of {kind}, the result differs "
                f"from that of uncompiled blocks by {gap:.2g} of the norm (rounding explains at most {bound:g}): "
                f"{instead}"
            )
        low = ", due to rounding in low precision" if dtype is None else ""
        log.info(
            "%s: log-probabilities and gradients of compiled blocks agree with those of uncompiled blocks to within "
            "%.1g%s (%s)",
            *(what, gap, low, worst),
        )


def _find_largest_change(small: PreTrainedModel, backend: str, layout: Layout, *, autocast: bool) -> tuple[str, float]:
    """Compiles a small model's blocks; returns the tensor that changes most and its relative change."""
    policy = ScoredLM(small)
    expected = _run_probe(policy, layout, autocast)
    compile_blocks(small, backend)
    gaps = _relative_gaps(_run_probe(policy, layout, autocast), expected)
    del policy, small
    gc.collect()  # compiled blocks contain reference cycles that hold device memory
    return max(gaps.items(), key=lambda pair: pair[1])


def _run_probe(policy: ScoredLM, layout: Layout, autocast: bool) -> dict[str, Tensor]:
    """Computes log-probabilities of pairs of several lengths, and the gradients of the blocks' weights."""
    names, weights = zip(*layer_stack(policy.model).named_parameters(), strict=True)
    words, device = vocabulary_size(policy.model), weights[0].device
    probed = {}
    for length in LENGTHS:
        ids = [(7 * place + place // 5) % words for place in range(length)]
        prompt, cut = ids[: length // 2], length // 4 * 3
        inputs, response, mask = layout([(prompt, ids[length // 2 : cut]), (prompt, ids[cut:])], 0)
        context = torch.autocast(device.type, torch.bfloat16) if autocast else nullcontext()
        with torch.enable_grad(), context:
            logps = policy(inputs.to(device), response.to(device), mask.to(device)).logps
        gradients = torch.autograd.grad(logps.sum(), weights, materialize_grads=True)
        probed[f"log-probabilities of {length} tokens"] = logps.detach()
        for name, gradient in zip(names, gradients, strict=True):
            probed[f"{GRADIENT}{name} over {length} tokens"] = gradient
    return probed


def _relative_gaps(computed: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """Returns each tensor's relative difference by name: the norm of the difference divided by the expected norm.

    The divisor is at least ``SMALLEST`` times the largest gradient norm.
    """
    norms = {name: float(value.double().norm()) for name, value in expected.items()}
    least = SMALLEST * max(norm for name, norm in norms.items() if name.startswith(GRADIENT))
    return {
        name: float((computed[name].double() - value.double()).norm()) / max(norms[name], least, 1e-30)
        for name, value in expected.items()
    }


def _without_cache(run: Callable[P, R], plain: Callable[P, R]) -> Callable[P, R]:
    def forward(*arguments: P.args, **more: P.kwargs) -> R:
        # Each layer has its own cache object, which grows with every call; every call would trigger a recompilation.
        if more.get("past_key_values") is not None:
            return plain(*arguments, **more)
        prepare_compiled_attention((*arguments, *more.values()))
        return run(*arguments, **more)

    return forward


def _checkpoint_forward(block: nn.Module, run: Callable[P, R]) -> Callable[P, R]:
    again: Callable[P, R] = partial(checkpoint, run, use_reentrant=False)

    def forward(*arguments: P.args, **more: P.kwargs) -> R:
        return (again if block.training and torch.is_grad_enabled() else run)(*arguments, **more)

    return forward
