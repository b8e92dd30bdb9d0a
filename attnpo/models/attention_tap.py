"""Attention rows of a causal LM's last prompt position, and attention rollout, without any T x T tensor.

Owns an attention function registered with transformers. It leaves the attention output to the usual fast kernel and,
on the layers asked for, recomputes one softmax row per prompt from that layer's queries and keys: grouped heads,
scaling, soft-cap, causal or windowed mask, attention sinks. Paper section on AttentionPO: the row of the verdict
position, averaged over query heads. Rollout keeps queries and keys per layer and walks down from the last layer with
``r <- r/2 + r A/2`` in blocks of queries, which is exact because the head mean is linear.

What a call wants and what it found live in a ``Probe`` that travels in the call's keyword arguments; there is no
global state but the registered name.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from attnpo.schema import UserError

# transformers reads meaning into names that contain "sdpa", "eager" or "flash"; these must not.
TAP_FAST = "attnpo_row_tap"
TAP_BLOCKS = "attnpo_row_tap_blocks"
KERNELS = {"sdpa": TAP_FAST, "blocks": TAP_BLOCKS}
"""Attention output by torch's fused kernel, or in float32 blocks of queries (slower; for comparison)."""

BLOCK_ELEMENTS = 1 << 23  # scores held at once by a block of queries: 32 MiB in float32
SMALLEST_BLOCK, LARGEST_BLOCK = 16, 256


class Enough(Exception):
    """Raised inside a forward when everything asked for is known; ends the forward, never leaves this package."""


@dataclass(frozen=True)
class MaskRule:
    """A mask as a function of (batch, head, query, key) indices, of which only blocks are ever built.

    ``local_size``: a query sees at most this many last keys; ``causal``: no key after the query. Both only bound the
    keys that a block has to look at.
    """

    function: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    padding: Bool[Tensor, "batch T"] | None
    local_size: int | None
    causal: bool

    def bounds(self, start: int, stop: int, length: int) -> tuple[int, int]:
        """Half-open range of keys that queries start..stop-1 can see."""
        if not self.causal:
            return 0, length
        return (0 if self.local_size is None else max(0, start - self.local_size + 1)), stop

    def block(self, batch: int, queries: Tensor, keys: Tensor) -> Tensor:
        """Allowed entries [batch 1 q k]; ``queries`` [q], or [batch 1] for one position per sequence."""
        rows = torch.arange(batch, device=keys.device)[:, None, None, None]
        heads = torch.zeros(1, dtype=torch.long, device=keys.device)[:, None, None, None]
        query = queries[None, :] if queries.dim() == 1 else queries
        allowed = self.function(rows, heads, query[:, None, :, None], keys[None, None, None, :])
        if self.padding is not None:
            allowed = allowed & self.padding[:, None, None, :][..., keys]
        return allowed.expand(batch, 1, query.shape[1], keys.shape[0])


def _causal(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return key <= query


CAUSAL = MaskRule(_causal, None, None, True)


@dataclass(frozen=True)
class LayerAttention:
    """Queries and keys of one layer after rotation, and how scores follow from them.

    ``query`` [batch H T d], ``key`` [batch KV T d] with KV dividing H; ``sinks`` [H] are extra scores that take part in
    the softmax and are dropped from it.
    """

    query: Float[Tensor, "batch heads T d"]
    key: Float[Tensor, "batch groups T d"]
    scaling: float
    softcap: float | None
    sinks: Float[Tensor, "heads"] | None
    rule: MaskRule

    def probabilities(self, query: Tensor, start: int, stop: int, allowed: Tensor) -> Tensor:
        """Softmax [batch H n k] in float32 or better of n queries [batch H n d] over the keys start..stop-1."""
        batch, heads, count, width = query.shape
        groups = self.key.shape[1]
        dtype = torch.promote_types(query.dtype, torch.float32)
        key = self.key[:, :, start:stop].to(dtype)
        grouped = query.to(dtype).reshape(batch, groups, heads // groups * count, width)
        scores = (grouped @ key.transpose(2, 3)).mul_(self.scaling).view(batch, heads, count, stop - start)
        if self.softcap is not None:
            scores = scores.div_(self.softcap).tanh_().mul_(self.softcap)
        scores = scores.masked_fill_(~allowed, -torch.inf)
        if self.sinks is None:
            return torch.softmax(scores, -1)
        sinks = self.sinks.to(dtype)[None, :, None, None].expand(batch, heads, count, 1)
        return torch.softmax(torch.cat((scores, sinks), -1), -1)[..., :-1]

    def rows(self, last: Int[Tensor, "batch"]) -> Float[Tensor, "batch heads T"]:
        """The softmax row of each sequence's position ``last``, per query head."""
        batch, _, length, _ = self.query.shape
        query = self.query[torch.arange(batch, device=last.device), :, last][:, :, None]
        keys = torch.arange(length, device=last.device)
        allowed = self.rule.block(batch, last[:, None], keys)
        return self.probabilities(query, 0, length, allowed)[:, :, 0]

    def blocks(self) -> Iterator[tuple[slice, slice, Tensor]]:
        """Blocks of queries as (queries, the keys they can see, allowed [batch 1 q k])."""
        batch, heads, length, _ = self.query.shape
        size = min(LARGEST_BLOCK, max(SMALLEST_BLOCK, BLOCK_ELEMENTS // (batch * heads * length)))
        index = torch.arange(length, device=self.query.device)
        for start in range(0, length, size):
            stop = min(start + size, length)
            low, high = self.rule.bounds(start, stop, length)
            yield slice(start, stop), slice(low, high), self.rule.block(batch, index[start:stop], index[low:high])

    def pull(self, weights: Float[Tensor, "batch T"]) -> Float[Tensor, "batch T"]:
        """``weights @ A`` for the head-mean attention map A, in blocks of queries."""
        pulled = torch.zeros_like(weights)
        wide = LayerAttention(self.query, self.key.to(weights.dtype), self.scaling, self.softcap, self.sinks, self.rule)
        for queries, keys, allowed in self.blocks():
            maps = wide.probabilities(self.query[:, :, queries], keys.start, keys.stop, allowed)
            # Rows without any allowed key (none in causal models) would be NaN; their weight is 0 anyway.
            pulled[:, keys] += (weights[:, None, None, queries] @ maps)[:, :, 0].mean(1)
        return pulled


@runtime_checkable
class AttentionMap(Protocol):
    """What rollout needs of a layer."""

    def rows(self, last: Int[Tensor, "batch"]) -> Float[Tensor, "batch heads T"]:
        """The softmax row of each sequence's position ``last``, per query head."""
        ...

    def pull(self, weights: Float[Tensor, "batch T"]) -> Float[Tensor, "batch T"]:
        """``weights @ A`` for the head-mean attention map A."""
        ...


def rolled(layers: Iterable[AttentionMap], last: Int[Tensor, "batch"]) -> Float[Tensor, "batch T"]:
    """The row of position ``last`` of the product of ``(I + A_l) / 2``; ``layers`` come from the deepest up.

    Each layer may be forgotten once it was used, so a generator that drops them keeps memory low.
    """
    layers = iter(layers)
    first = next(layers).rows(last).mean(1)
    # The deepest layer acts on a unit vector: its one row is all that is needed of it.
    weights = (torch.zeros_like(first).scatter_(1, last[:, None], 1.0) + first) / 2
    for layer in layers:
        weights = (weights + layer.pull(weights)) / 2
    return weights


class Probe:
    """What one forward is asked for, and what it found.

    ``last`` [batch]: the position whose row is wanted, per sequence. ``layers``: 0-based. With ``rollout`` the queries
    and keys of every layer are kept until ``rollout()`` is called. With ``stop`` the forward ends (``Enough``) in the
    attention of the deepest layer needed.
    """

    def __init__(
        self,
        last: Int[Tensor, "batch"],
        layers: Sequence[int],
        *,
        depth: int,
        per_head: bool,
        rollout: bool,
        stop: bool,
    ) -> None:
        self.last = last
        self.wanted = frozenset(layers)
        self.per_head = per_head
        self.keep = rollout
        self.depth = depth
        self.final = (depth - 1 if rollout else max(layers, default=-1)) if stop else None
        self.rows: dict[int, Tensor] = {}
        self.kept: dict[int, LayerAttention] = {}

    def see(self, layer: int, attention: LayerAttention) -> None:
        """Takes what is wanted of one layer; raises ``Enough`` when that was the last needed."""
        if layer in self.wanted:
            rows = attention.rows(self.last)
            self.rows[layer] = rows if self.per_head else rows.mean(1)
        if self.keep:
            self.kept[layer] = attention
        if layer == self.final:
            raise Enough

    def rollout(self) -> Float[Tensor, "batch T"]:
        """The last position's row of the product of ``(I + A_l) / 2`` over all layers; frees the kept tensors."""
        self.require(self.kept, range(self.depth))
        return rolled((self.kept.pop(layer) for layer in range(self.depth - 1, -1, -1)), self.last)

    def require(self, found: dict[int, Any], layers: Sequence[int]) -> None:
        """Nothing; raises ``UserError`` when a layer wanted gave no attention."""
        silent = [layer + 1 for layer in layers if layer not in found]
        if silent:
            raise UserError(
                f"layer {silent[0]} gave no softmax attention: the model's attention does not go through transformers' "
                "AttentionInterface, or the layer has another kind of mixing; choose another layer or judge"
            )


@contextmanager
def tapped(backbone: PreTrainedModel, kernel: str) -> Iterator[None]:
    """A context in which ``backbone``'s attention hands its queries and keys to the call's probe.

    ``kernel``: "sdpa" or "blocks". The model's own attention implementation is restored, after errors too.
    """
    previous = backbone.config._attn_implementation
    backbone.set_attn_implementation(KERNELS[kernel])
    try:
        yield
    finally:
        backbone.set_attn_implementation(previous)


def tap_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    *,
    mask_function: Callable[..., Tensor],
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    **unused: Any,
) -> MaskRule | None:
    """The mask as a rule instead of a tensor; None for the plain causal mask.

    Stands in for transformers' sdpa mask function, whose windowed masks have T x T entries.
    """
    padding = None if attention_mask is None or bool(attention_mask.all()) else attention_mask
    window = None if local_size is None or kv_length <= local_size else local_size
    if allow_is_causal_skip and padding is None and window is None:
        return None
    return MaskRule(mask_function, padding, window, allow_is_causal_skip)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: MaskRule | Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    attention_probe: Probe | None = None,
    position_bias: Tensor | None = None,
    in_blocks: bool = False,
    **unused: Any,
) -> tuple[Tensor, None]:
    """Attention output [batch T H d]; the probe, when there is one, sees the layer first."""
    if isinstance(attention_mask, Tensor) or position_bias is not None or key.shape[2] != query.shape[2]:
        raise UserError(
            "attention rows cannot be read from a model that builds its own mask, adds position biases or runs with a "
            "key cache; use another judge"
        )
    attention = LayerAttention(
        query=query,
        key=key,
        scaling=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        softcap=softcap,
        sinks=s_aux,
        rule=attention_mask or CAUSAL,
    )
    if attention_probe is not None:
        attention_probe.see(int(module.layer_idx), attention)  # type: ignore[arg-type]
    fused = not in_blocks and softcap is None and s_aux is None
    if fused and attention.rule is CAUSAL:
        output = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=attention.scaling, enable_gqa=key.shape[1] != query.shape[1]
        )
        return output.transpose(1, 2).contiguous(), None
    return _blocked_output(attention, value, fused), None


def _blocked_output(attention: LayerAttention, value: Tensor, fused: bool) -> Tensor:
    """Attention output [batch T H d] in blocks of queries: for windows (fused kernel), soft-cap and sinks."""
    batch, heads, length, _ = attention.query.shape
    groups, width = value.shape[1], value.shape[3]
    output = value.new_empty(batch, length, heads, width)
    for queries, keys, allowed in attention.blocks():
        query = attention.query[:, :, queries]
        if fused:
            block = functional.scaled_dot_product_attention(
                query,
                attention.key[:, :, keys],
                value[:, :, keys],
                attn_mask=allowed,
                scale=attention.scaling,
                enable_gqa=groups != heads,
            )
        else:
            maps = attention.probabilities(query, keys.start, keys.stop, allowed).to(value.dtype)
            count = query.shape[2]
            merged = maps.reshape(batch, groups, heads // groups * count, maps.shape[-1]) @ value[:, :, keys]
            block = merged.view(batch, heads, count, width)
        output[:, queries] = block.transpose(1, 2)
    return output


AttentionInterface.register(TAP_FAST, _attend)
AttentionInterface.register(TAP_BLOCKS, partial(_attend, in_blocks=True))
AttentionMaskInterface.register(TAP_FAST, tap_mask)
AttentionMaskInterface.register(TAP_BLOCKS, tap_mask)
