"""Weights that a source computes from the policy as it stands: put into a batch, without a gradient."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from attnpo.schema import Kind, PreferenceBatch, TokenStats
from attnpo.weights.base import OnlineSource
from attnpo.weights.pipeline import transformed_batch
from attnpo.weights.transforms import WeightTransform


def weighed(
    batch: PreferenceBatch,
    source: OnlineSource,
    policy: TokenStats,
    reference: TokenStats | None,
    transforms: Sequence[WeightTransform] = (),
) -> PreferenceBatch:
    """Returns the batch with the weights that an online source gives its main rows, and its pairs if it weighs these
    too.

    ``transforms`` change the weights of the rows. Pair weights are logged as ``weights/pair``, and the share of pairs
    that it made void as ``weights/void``.
    """
    with torch.no_grad():
        given = source.weights(detached(policy), None if reference is None else detached(reference), batch)
    weights, pair = given if isinstance(given, tuple) else (given, None)
    if transforms:
        weights = transformed_batch(transforms, weights, batch)
    if pair is not None:
        pair = pair.to(batch.pair_weight.dtype)
        told = {"weights/pair": pair, "weights/void": (pair == 0).to(pair.dtype)}
        batch = replace(batch, pair_weight=batch.pair_weight * pair, pair_values={**batch.pair_values, **told})
    rows = replace(
        batch.main,
        token_weights={**batch.main.token_weights, "reward": weights},
        factors=source.kind is Kind.FACTOR,
    )
    return replace(batch, groups={**batch.groups, "main": rows})


def detached(stats: TokenStats) -> TokenStats:
    """Returns the same statistics without their graph."""
    return replace(
        stats,
        logps=stats.logps.detach(),
        hidden=None if stats.hidden is None else stats.hidden.detach(),
        vocab={name: value.detach() for name, value in stats.vocab.items()},
        joint={name: value.detach() for name, value in stats.joint.items()},
        groups={name: detached(value) for name, value in stats.groups.items()},
    )
