"""Packs prompts into one row without padding; a prefix shared by several prompts is stored once (``segments``).

Both rounds of a judged pair share everything up to the first answer, and all pairs share the instruction.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from attnpo.models.packed_attention import PLAN, SegmentPlan

WORTH = 24
"""Minimum length of a shared prefix in tokens; sharing a shorter one costs more than it saves."""


@dataclass(frozen=True)
class PackedPrompts:
    """``n`` prompts packed into one row of ``N`` tokens.

    ``branches``: positions of each prompt's tokens in the row (padding repeats the last one); ``last``: index of each
    prompt's last token.
    """

    input_ids: Int[Tensor, "1 N"]
    position_ids: Int[Tensor, "1 N"]
    branches: Int[Tensor, "n T"]
    last: Int[Tensor, " n"]
    plan: SegmentPlan

    def inputs(self) -> dict[str, Tensor | SegmentPlan]:
        """Returns the keyword arguments for a backbone; without the mask, transformers would split the row itself."""
        ones = torch.ones_like(self.input_ids)
        return {"input_ids": self.input_ids, "position_ids": self.position_ids, "attention_mask": ones, PLAN: self.plan}


def sort_by_prefix(prompts: Sequence[Sequence[int]]) -> list[int]:
    """Returns indices of ``prompts`` in an order that puts prompts with the same prefix next to each other."""
    return sorted(range(len(prompts)), key=lambda index: tuple(prompts[index]))


def row_batches(prompts: Sequence[Sequence[int]], budget: int) -> Iterator[list[int]]:
    """Yields batches of indices, in order, whose rows have at most ``budget`` tokens (but at least one prompt).

    The two rounds of a pair share a long prefix and stay in one batch if they fit. The padded ``branches`` of a batch
    have at most twice as many entries as the budget.
    """
    order = sort_by_prefix(prompts)
    lengths = [len(prompts[index]) for index in order]
    begun = [0, *(_shared_prefix_length(prompts[one], prompts[other]) for one, other in pairwise(order)), 0]
    batch: list[int] = []
    total, longest = 0, 0
    for place, index in enumerate(order):
        new, after = lengths[place] - (begun[place] if batch else 0), 0
        if begun[place] < begun[place + 1]:
            after = lengths[place + 1] - begun[place + 1]
        longest = max(longest, lengths[place])
        if batch and (total + new + after > budget or (len(batch) + 1) * longest > 2 * budget):
            yield batch
            batch, total, new, longest = [], 0, lengths[place], lengths[place]
        batch.append(index)
        total += new
    if batch:
        yield batch


def pack_prompts(prompts: Sequence[Sequence[int]], device: torch.device) -> PackedPrompts:
    """Packs prompts, sorted by ``sort_by_prefix``, into one row; each shares its prefix with the previous prompt."""
    ids: list[int] = []
    positions: list[int] = []
    places: list[Tensor] = []
    stretches: list[tuple[int, int, int]] = []
    for index, prompt in enumerate(prompts):
        shared = _shared_prefix_length(prompts[index - 1], prompt) if index else 0
        start, count = len(ids), len(prompt) - shared
        before = places[-1][:shared] if index else torch.zeros(0, dtype=torch.long)
        places.append(torch.cat((before, torch.arange(start, start + count))))
        stretches.append((start, count, shared))
        ids += prompt[shared:]
        positions += range(shared, len(prompt))
    last = torch.tensor([len(place) - 1 for place in places])
    step = torch.minimum(torch.arange(int(last.max()) + 1)[None], last[:, None])
    branches = torch.nn.utils.rnn.pad_sequence(places, batch_first=True).gather(1, step)
    return PackedPrompts(
        input_ids=torch.tensor([ids], device=device),
        position_ids=torch.tensor([positions], device=device),
        branches=branches.to(device),
        last=last.to(device),
        plan=SegmentPlan.from_branches(torch.tensor(stretches), branches, len(ids), device),
    )


def _shared_prefix_length(one: Sequence[int], other: Sequence[int]) -> int:
    """Returns the length of the common prefix, or 0 if it is too short to share; always less than ``len(other)``."""
    width = min(len(one), len(other) - 1)
    differing = np.flatnonzero(np.asarray(one[:width]) != np.asarray(other[:width]))
    common = int(differing[0]) if differing.size else width
    return common if common >= WORTH else 0
