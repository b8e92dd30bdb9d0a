"""The rows of a golden record as the batch that an objective reads: chosen rows first, uniform weights unless given."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from attnpo.schema import SIDES, PreferenceBatch, RowGroup
from tests.conformance.fields import Fields


def both_sides(inputs: Fields, name: str) -> Float[Tensor, "rows R ..."]:
    """The chosen side's rows and then the rejected side's, padded with zeros to one width."""
    sides = [inputs.at(side).tensor(name) for side in SIDES]
    width = max(side.shape[1] for side in sides)
    return torch.cat([pad(side, [0, 0] * (side.dim() - 2) + [0, width - side.shape[1]]) for side in sides])


def by_side(inputs: Fields, name: str, rows: Float[Tensor, "rows R ..."]) -> dict[str, Float[Tensor, "pairs r ..."]]:
    """Each side's half of ``rows``, cut to the width of the side's own values ``name``."""
    return {
        side: half[:, : inputs.at(side).tensor(name).shape[1]] for side, half in zip(SIDES, rows.chunk(2), strict=True)
    }


def filled(
    values: Float[Tensor, "rows R ..."], mask: Bool[Tensor, "rows R"], filling: float
) -> Float[Tensor, "rows R ..."]:
    """``values`` with ``filling`` where the mask is 0."""
    return torch.where(mask.reshape(*mask.shape, *[1] * (values.dim() - 2)), values, filling)


def row_group(
    mask: Bool[Tensor, "rows R"],
    weights: Float[Tensor, "rows R"] | None = None,
    lengths: Float[Tensor, " rows"] | None = None,
    ids: Int[Tensor, "rows R"] | None = None,
    factors: bool = False,
) -> RowGroup:
    """Rows with weights 1/|y| unless some are given; ``lengths`` are the weight source's, unless the mask's.

    ``factors``: the weights are factors and no distribution.
    """
    counts = mask.sum(-1).double()
    return RowGroup(
        response_ids=torch.zeros(mask.shape, dtype=torch.long) if ids is None else ids,
        response_mask=mask,
        token_weights={"reward": mask / counts.clamp(min=1).unsqueeze(-1) if weights is None else weights},
        source_lengths=counts if lengths is None else lengths,
        reference_logps=None,
        factors=factors,
    )


def pair_batch(rows: RowGroup) -> PreferenceBatch:
    """A batch that is a whole optimiser step."""
    chosen, rejected = rows.response_mask.chunk(2)
    pairs = len(chosen)
    return PreferenceBatch(
        groups={"main": rows},
        pair_weight=torch.ones(pairs, dtype=torch.float64),
        pair_ids=tuple(str(index) for index in range(pairs)),
        step_pairs=pairs,
        step_tokens=(int(chosen.sum()), int(rejected.sum())),
    )
