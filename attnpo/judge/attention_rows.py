"""One layer's attention as a function of its queries and keys: single rows, blocks of queries, and rollout over layers.

Owns the arithmetic of scores (grouped heads, scaling, soft-cap, causal or windowed mask, attention sinks) without any
T x T tensor. Rollout walks down from the last layer with ``r <- r/2 + r A/2`` in blocks of queries, which is exact
because the head mean is linear. ``attention_tap`` gets the queries and keys.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from attnpo.models.packed_attention import FAR, fused_attention, softmax, whole, window_of

BLOCK_ELEMENTS = 1 << 23  # scores held at once by a block of queries: 32 MiB in float32
SMALLEST_BLOCK, LARGEST_BLOCK = 16, 256


@dataclass(frozen=True)
class MaskRule:
    """A mask as a function of (batch, head, query, key) indices; only blocks of it are ever built.

    ``local_size``: a query sees at most this many last keys; ``causal``: no key after the query. Both only bound the
    keys that a block has to look at. ``rows``: the model's batch; one row may hold several sequences.
    """

    function: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    padding: Bool[Tensor, "batch T"] | None
    local_size: int | None
    causal: bool
    rows: int = 1

    def __getitem__(self, index: object) -> "MaskRule":
        """Returns the rule itself, for models that slice their whole mask; raises ``UserError`` for a part of it."""
        return whole(self, index)

    def bounds(self, start: int, stop: int, length: int) -> tuple[int, int]:
        """Half-open range of keys that queries start..stop-1 can see."""
        if not self.causal:
            return 0, length
        return (0 if self.local_size is None else max(0, start - self.local_size + 1)), stop

    def within(self, longest: int) -> bool:
        """Returns whether the mask is plain causal for sequences of at most ``longest`` tokens."""
        return self.causal and self.padding is None and (self.local_size is None or longest <= self.local_size)

    def window(self, longest: int) -> tuple[int, int] | None:
        """Describes the mask as a window (``window_of``) for sequences of at most ``longest`` tokens, None if none."""
        plain = self.causal and self.padding is None
        return window_of(self.function, self.local_size, longest) if plain else None

    def block(self, batch: int, queries: Tensor, keys: Tensor) -> Tensor:
        """Allowed entries [batch 1 q k]; ``queries`` [q] or [batch q], ``keys`` [k] or [batch k], positions."""
        rows = torch.arange(self.rows, device=keys.device)[:, None, None, None]
        heads = torch.zeros(1, dtype=torch.long, device=keys.device)[:, None, None, None]
        query = queries[None, :] if queries.dim() == 1 else queries
        key = keys[None, :] if keys.dim() == 1 else keys
        allowed = self.function(rows, heads, query[:, None, :, None], key[:, None, None, :])
        if self.padding is not None:
            allowed = allowed & self.padding[:, None, None, :][..., keys]
        if keys.dim() == 2:
            allowed = allowed & (key < FAR)[:, None, None, :]
        return allowed.expand(batch, 1, query.shape[1], key.shape[1])


CAUSAL = MaskRule(lambda batch, head, query, key: key <= query, None, None, True)


@dataclass(frozen=True)
class LayerAttention:
    """Queries and keys of one layer after rotation, and how scores follow from them.

    ``query`` [batch H T d], ``key`` [batch KV T d] with KV dividing H; ``sinks`` [H] are extra scores that take part in
    the softmax and are dropped from it. With ``branches`` [n T] queries and keys are those of one row [1 H N d], and
    ``branches[i]`` holds the places of sequence i in it.
    """

    query: Float[Tensor, "batch heads T d"]
    key: Float[Tensor, "batch groups K d"]
    scaling: float
    softcap: float | None
    sinks: Float[Tensor, " heads"] | None
    rule: MaskRule
    branches: Int[Tensor, "n L"] | None = None

    def probabilities(self, query: Tensor, key: Tensor, allowed: Tensor) -> Tensor:
        """Softmax [batch H n k] in float32 or better of n queries [batch H n d] over k keys [batch KV k d]."""
        batch, heads, count, width = query.shape
        groups, seen = key.shape[1], key.shape[2]
        dtype = torch.promote_types(query.dtype, torch.float32)
        grouped = query.to(dtype).reshape(batch, groups, heads // groups * count, width)
        scores = (grouped @ key.to(dtype).transpose(2, 3)).mul_(self.scaling).view(batch, heads, count, seen)
        if self.softcap is not None:
            scores = scores.div_(self.softcap).tanh_().mul_(self.softcap)
        return softmax(scores.masked_fill_(~allowed, -torch.inf), self.sinks)

    def rows(self, last: Int[Tensor, " batch"]) -> Float[Tensor, "batch heads T"]:
        """Returns the softmax row of each sequence's position ``last``, per query head."""
        batch, length = len(last), self.length
        each = torch.arange(batch, device=last.device)
        if self.branches is None:
            query = self.query[each, :, last]
        else:
            query = self.query[0, :, self.branches[each, last]].transpose(0, 1)
        allowed = self.rule.block(batch, last[:, None], torch.arange(length, device=last.device))
        return self.probabilities(query[:, :, None], self.of_sequences(self.key), allowed)[:, :, 0]

    @property
    def length(self) -> int:
        """Returns tokens of the longest sequence."""
        return self.query.shape[2] if self.branches is None else self.branches.shape[1]

    def of_sequences(self, states: Tensor, part: slice = slice(None)) -> Tensor:
        """Queries, keys or values [batch X n d] of positions ``part`` of every sequence."""
        if self.branches is None:
            return states[:, :, part]
        return states[0][:, self.branches[:, part]].transpose(0, 1)

    def blocks(self) -> Iterator[tuple[slice, slice, Tensor]]:
        """Blocks of queries as (queries, the keys they can see, allowed [batch 1 q k])."""
        batch = self.query.shape[0] if self.branches is None else self.branches.shape[0]
        index = torch.arange(self.length, device=self.query.device)
        for queries in cut(self.length, batch * self.query.shape[1] * self.length):
            low, high = self.rule.bounds(queries.start, queries.stop, self.length)
            yield queries, slice(low, high), self.rule.block(batch, index[queries], index[low:high])

    def causal(self, value: Tensor) -> Tensor:
        """Attention output [batch H T d] by torch's fused causal kernel."""
        return fused_attention(self.query, self.key, value, None, self.scaling)

    def part(self, value: Tensor, queries: slice, keys: slice, allowed: Tensor, fused: bool) -> Tensor:
        """Attention output [batch H q d] of some queries over some keys; by the fused kernel, or in float32."""
        query, key, value = self.query[:, :, queries], self.key[:, :, keys], value[:, :, keys]
        if fused:
            return fused_attention(query, key, value, allowed, self.scaling)
        maps = self.probabilities(query, key, allowed).to(value.dtype)
        batch, heads, count, seen = maps.shape
        groups = value.shape[1]
        merged = maps.reshape(batch, groups, heads // groups * count, seen) @ value
        return merged.view(batch, heads, count, value.shape[3])

    def pull(self, weights: Float[Tensor, "batch T"]) -> Float[Tensor, "batch T"]:
        """``weights @ A`` for the head-mean attention map A, in blocks of queries."""
        pulled = torch.zeros_like(weights)
        key = self.of_sequences(self.key).to(weights.dtype)
        for queries, keys, allowed in self.blocks():
            maps = self.probabilities(self.of_sequences(self.query, queries), key[:, :, keys], allowed)
            # Rows without any allowed key (none in causal models) would be NaN; their weight is 0 anyway.
            pulled[:, keys] += (weights[:, None, None, queries] @ maps)[:, :, 0].mean(1)
        return pulled


def cut(length: int, per_query: int) -> Iterator[slice]:
    """Blocks of ``length`` queries, with ``per_query`` scores each, that hold ``BLOCK_ELEMENTS`` scores at most."""
    size = min(LARGEST_BLOCK, max(SMALLEST_BLOCK, BLOCK_ELEMENTS // per_query))
    for start in range(0, length, size):
        yield slice(start, min(start + size, length))


@runtime_checkable
class AttentionMap(Protocol):
    """One layer's attention map as rollout reads it."""

    def rows(self, last: Int[Tensor, " batch"]) -> Float[Tensor, "batch heads T"]:
        """Returns the softmax row of each sequence's position ``last``, per query head."""

    def pull(self, weights: Float[Tensor, "batch T"]) -> Float[Tensor, "batch T"]:
        """``weights @ A`` for the head-mean attention map A."""


def rollout_row(layers: Iterable[AttentionMap], last: Int[Tensor, " batch"]) -> Float[Tensor, "batch T"]:
    """Returns the row of position ``last`` of the product of ``(I + A_l) / 2``; ``layers`` come from the deepest up.

    No layer is needed twice, so a generator that drops each after use keeps memory low.
    """
    layers = iter(layers)
    first = next(layers).rows(last).mean(1)
    # The deepest layer acts on a unit vector, so one row of it is enough.
    weights = (torch.zeros_like(first).scatter_(1, last[:, None], 1.0) + first) / 2
    for layer in layers:
        weights = (weights + layer.pull(weights)) / 2
    return weights
