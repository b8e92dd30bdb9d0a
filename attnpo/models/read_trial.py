"""The trial on a few short prompts that shows whether a model's attention can be read: prompts, blocks and bounds."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from attnpo.models.backbone import layer_stack, probe_bound
from attnpo.models.layouts import padded_right
from attnpo.models.prompt_rows import WORTH

LOW_PRECISION_SLACK = 10
"""Two kernels in bfloat16 may differ this many times more than a head's product does (``probe_bound``)."""


class Blocks:
    """The number of the block that a forward is in, from 1, and the output of each block by its number."""

    def __init__(self, backbone: nn.Module) -> None:
        self.blocks = layer_stack(backbone)
        self.number = 1
        self.outputs: dict[int, Tensor] = {}

    @contextmanager
    def watched(self) -> Iterator[None]:
        """A context in which forwards are followed."""
        handles = []
        for number, block in enumerate(self.blocks, 1):
            handles.append(block.register_forward_pre_hook(partial(self._enter, number)))
            handles.append(block.register_forward_hook(partial(self._leave, number)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, number: int, module: nn.Module, inputs: object) -> None:
        self.number = number

    def _leave(self, number: int, module: nn.Module, inputs: object, output: object) -> None:
        states = output[0] if isinstance(output, tuple) else output
        if isinstance(states, Tensor):
            self.outputs[number] = states


def differ(actual: Tensor, expected: Tensor) -> bool:
    """Whether numbers differ by more than two kernels may, which is much in low precision."""
    slack = 1 if expected.dtype in (torch.float32, torch.float64) else LOW_PRECISION_SLACK
    return not float((actual - expected).abs().max()) <= slack * probe_bound(expected)  # NaN is no match either


def probe_prompts(words: int) -> list[list[int]]:
    """Four prompts: the first begins like the second, for fewer tokens like the third, and unlike the fourth."""
    start = [(7 * place + 3) % words for place in range(WORTH + 9)]
    ends = [[(11 * place + 5 * index) % words for place in range(6 + 2 * index)] for index in range(4)]
    return [start + ends[0], start + ends[1], start[:WORTH] + ends[2], ends[3]]


def right_padded(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Ids [batch T] and last positions [batch]. Padding is id 0; nothing reads it."""
    ids, mask = padded_right(prompts, 0)
    return ids.to(device), (mask.sum(1) - 1).to(device)
