"""Token weights for the theory study: mean 1 over a response, and a largest distance delta from 1."""

from enum import Enum

import torch
from jaxtyping import Float
from torch import Tensor

from attnpo.theory.problem import Tree


class Reads(Enum):
    """What a weight may depend on: the position alone, or the whole response, later tokens included."""

    POSITION = "position"
    RESPONSE = "response"


def spread_weights(tree: Tree, reads: Reads, delta: float, seed: int = 0) -> Float[Tensor, "responses length"]:
    """Weights with mean 1 over every response and largest distance ``delta`` from 1.

    POSITION: rising over the positions for an even seed, falling for an odd one. RESPONSE: drawn for every token of
    every response on its own, as of a judge that has read it all.
    """
    if reads is Reads.POSITION:
        slope = torch.linspace(-1.0, 1.0, tree.length, dtype=torch.float64) * (1 - 2 * (seed % 2))
        return (1 + delta * slope).expand(tree.vocab**tree.length, -1)
    random = torch.Generator().manual_seed(1000 + seed)
    drawn = torch.randn(tree.vocab**tree.length, tree.length, generator=random, dtype=torch.float64)
    centred = drawn - drawn.mean(-1, keepdim=True)
    return 1 + delta * centred / centred.abs().max()
