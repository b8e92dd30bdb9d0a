"""Model's blocks through ``torch.compile``, one by one, and the trial that shows them to compute the same.

Blocks of a kind share their code. Adapters are inside; recomputation, layouts, the vocabulary head and its chunks stay
outside, and so do attention in buckets, whose shapes are new in every batch, and calls with a key cache.
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
from attnpo.models.packed_attention import exclude_from_compile, prepare_graph
from attnpo.models.scored import ScoredLM
from attnpo.models.trial import EXACT, make_small_copy
from attnpo.schema import UserError

log = logging.getLogger(__name__)
Taken = ParamSpec("Taken")
Given = TypeVar("Given")

LENGTHS = (48, 640)
"""Tokens of the pairs that blocks are tried on: the second has a shape that the first compilation did not see."""

MOST_GRAPHS = 64
"""Graphs of a block after which torch runs it plain: there is one with and without gradients, prefixes, windows."""

BOUNDS = {torch.float64: 1e-4, torch.float32: 1e-3}  # norms compute in float32 in a float64 model, too
SMALLEST = 0.01  # smaller gradients than this share of the largest are compared with that share: they may be rounding
GRADIENT = "the gradient of layers."


def compile_blocks(model: PreTrainedModel, backend: str) -> None:
    """Compiles every decoder block in place, at its first call; parameters keep their names.

    Call it after ``activation_checkpointing_enable``. Raises ``UserError`` for a backend that torch does not know.
    """
    check_backend(backend)
    exclude_from_compile()
    warnings.filterwarnings("ignore", "TensorFloat32 tensor cores")  # an option named float32 gives float32
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MOST_GRAPHS)
    for block in layer_stack(model):
        run = torch.compile(block.forward, backend=backend, dynamic=True)
        if getattr(block, "gradient_checkpointing", False):
            # The library's own recomputation would be inside the graph.
            block.gradient_checkpointing = False  # type: ignore[assignment]
            run = _checkpoint_forward(block, run)
        block.forward = _without_cache(run, block.forward)


def check_backend(backend: str) -> None:
    """Raises ``UserError`` for a backend that torch does not know."""
    from torch._dynamo import list_backends  # seconds of import

    if backend not in list_backends(exclude_tags=()):
        raise UserError(
            f"model.compile={backend!r} is no backend of torch.compile here; one of {', '.join(list_backends())} "
            "(inductor is the usual one), or null"
        )


def check_compiled_blocks(
    model: PreTrainedModel, backend: str, layout: Layout, device: torch.device, *, autocast: bool
) -> None:
    """Raises ``UserError`` unless compiled blocks give the log-probabilities and gradients of plain ones.

    Tries a few layers of the model's kinds and widths with random weights: in float32, which decides, and as they are
    trained, which has to run and whose rounding is logged. The model and the random state are left as they are.
    """
    what, kind = f"model.compile={backend}", type(model).__name__
    instead = "set model.compile=null, or another backend"
    exact = model.dtype in EXACT
    trials = [(model.dtype if exact else torch.float32, False), *([] if exact and not autocast else [(None, autocast)])]
    for dtype, mixed in trials:
        try:
            worst, gap = _find_problem(make_small_copy(model, device, dtype), backend, layout, autocast=mixed)
        except Exception as error:  # of any compiler, toolchain or model
            # After an empty line torch says how to see more of its own traces.
            reason = str(error).partition("\n\n")[0]
            raise UserError(
                f"{what} cannot run blocks like those of {kind} on {device} ({type(error).__name__}: {reason}); "
                f"{instead}"
            ) from error
        bound = math.inf if dtype is None else BOUNDS[dtype]
        if not gap <= bound:  # NaN is no match either
            raise UserError(
                f"{what} computes {worst} wrong on {device}: blocks like those of {kind} differ from plain ones by "
                f"{gap:.2g} of its norm, rounding allows {bound:g}; {instead}"
            )
        low = ", the rounding of low precision" if dtype is None else ""
        log.info(
            "%s: log-probabilities and gradients of compiled blocks are right to %.1g%s (%s)", what, gap, low, worst
        )


def _find_problem(small: PreTrainedModel, backend: str, layout: Layout, *, autocast: bool) -> tuple[str, float]:
    """Compiles a small model's blocks; returns what they move most, and by how much of its norm."""
    policy = ScoredLM(small)
    expected = _run_probe(policy, layout, autocast)
    compile_blocks(small, backend)
    gaps = _relative_gaps(_run_probe(policy, layout, autocast), expected)
    del policy, small
    gc.collect()  # compiled blocks refer to themselves, which keeps their memory on the device
    return max(gaps.items(), key=lambda pair: pair[1])


def _run_probe(policy: ScoredLM, layout: Layout, autocast: bool) -> dict[str, Tensor]:
    """Returns log-probabilities of pairs of several lengths, and their gradients in every weight of the blocks."""
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
    """Returns the relative norm of each difference by name.

    Relative to the expected norm, or to ``SMALLEST`` times the largest gradient's.
    """
    norms = {name: float(value.double().norm()) for name, value in expected.items()}
    least = SMALLEST * max(norm for name, norm in norms.items() if name.startswith(GRADIENT))
    return {
        name: float((computed[name].double() - value.double()).norm()) / max(norms[name], least, 1e-30)
        for name, value in expected.items()
    }


def _without_cache(run: Callable[Taken, Given], plain: Callable[Taken, Given]) -> Callable[Taken, Given]:
    def forward(*arguments: Taken.args, **more: Taken.kwargs) -> Given:
        # A cache is another object in every layer and grows by a token in every call: each would get a new graph.
        if more.get("past_key_values") is not None:
            return plain(*arguments, **more)
        prepare_graph((*arguments, *more.values()))
        return run(*arguments, **more)

    return forward


def _checkpoint_forward(block: nn.Module, run: Callable[Taken, Given]) -> Callable[Taken, Given]:
    again: Callable[Taken, Given] = partial(checkpoint, run, use_reentrant=False)

    def forward(*arguments: Taken.args, **more: Taken.kwargs) -> Given:
        return (again if block.training and torch.is_grad_enabled() else run)(*arguments, **more)

    return forward
