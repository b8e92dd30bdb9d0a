"""Attention rows of a causal LM's last prompt position, and what rollout needs, read while the model runs.

Owns an attention function registered with transformers. It leaves the attention output to the usual fast kernel and,
on the layers asked for, recomputes one softmax row per prompt from that layer's queries and keys. Paper section on
AttentionPO: the row of the verdict position, averaged over query heads. Rollout keeps queries and keys per layer.

Prompts come as a padded batch, or as one row in which common beginnings lie once (``prefixes``). What a call
asks for and what it reads are kept in a ``Probe`` in its keyword arguments; there is no global state but the
registered name.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from attnpo.judge.attention_rows import CAUSAL, AttentionMap, LayerAttention, MaskRule, cut, rollout_row
from attnpo.models.packed_attention import Bucket, Plan
from attnpo.schema import UserError

# transformers reads meaning into names that contain "sdpa", "eager" or "flash"; these must not.
TAP_FAST = "attnpo_row_tap"
TAP_BLOCKS = "attnpo_row_tap_blocks"
PROBE = "attention_probe"  # the keyword argument that carries the probe
MAPS = "maps"
KERNELS = {"sdpa": TAP_FAST, "blocks": TAP_BLOCKS, MAPS: "eager"}
"""How attention output is computed: by torch's fused kernel, in float32 blocks of queries (slower), or by the model's
own eager attention, which gives whole maps (``attention_maps``)."""


class Enough(Exception):
    """Raised inside a forward to end it when everything asked for is known; caught within this package."""


class SeveralRows(UserError):
    """A layer attends more than once in a forward, so no map of it is the one."""


class Probe:
    """The request to one forward for attention rows, and its results.

    ``last`` [batch]: the position whose row is wanted, per sequence. ``layers``: 0-based. With ``rollout`` the queries
    and keys of every layer are kept until ``rollout()`` is called. With ``stop`` the forward ends (``Enough``) in the
    attention of the deepest layer needed. ``branches`` [batch T]: the places of each sequence in a row of several.
    """

    def __init__(
        self,
        last: Int[Tensor, " batch"],
        layers: Sequence[int],
        *,
        depth: int,
        per_head: bool,
        rollout: bool,
        stop: bool,
        branches: Int[Tensor, "batch T"] | None = None,
    ) -> None:
        self.last = last
        self.branches = branches
        self.wanted = frozenset(layers)
        self.per_head = per_head
        self.keep = rollout
        self.depth = depth
        self.final = (depth - 1 if rollout else max(layers, default=-1)) if stop else None
        self.rows: dict[int, Tensor] = {}
        self.kept: dict[int, AttentionMap] = {}
        self.trimming = False
        self._end: tuple[Tensor, Tensor] | None = None

    def see(self, layer: int, attention: LayerAttention, value: Tensor) -> None:
        """Stores what is wanted of one layer; raises ``Enough`` when that was the last needed.

        A layer may attend twice with the same queries and keys (to parts of the values). Raises ``SeveralRows`` for a
        layer that attends twice with different ones: it has no single row.
        """
        rows = attention.rows(self.last) if layer in self.wanted or self.trimming else None
        if rows is not None and layer in self.wanted:
            kept = rows if self.per_head else rows.mean(1)
            if not torch.equal(self.rows.setdefault(layer, kept), kept):
                raise SeveralRows(f"judge: layer {layer + 1} attends more than once in a forward, so it has no one row")
        if self.keep:
            self.kept[layer] = attention
        if rows is not None and self.trimming:
            self._end = (rows, attention.of_sequences(value))
        if self.trimming or layer == self.final:
            raise Enough

    def end(self) -> Tensor | None:
        """Returns the attention output [1 batch H d] of the last positions, once the forward is trimmed to them; else
        None.
        """
        if self._end is None:
            return None
        rows, values = self._end
        count, groups, seen = values.shape[:3]
        merged = rows.to(values.dtype).view(count, groups, -1, seen) @ values
        return merged.flatten(1, 2)[None]

    def rollout(self) -> Float[Tensor, "batch T"]:
        """Returns the last position's row of the product of ``(I + A_l) / 2`` over all layers; frees the
        kept tensors.
        """
        self.require(self.kept, range(self.depth))
        return rollout_row((self.kept.pop(layer) for layer in range(self.depth - 1, -1, -1)), self.last)

    def require(self, read: Collection[int], layers: Sequence[int]) -> None:
        """Raises ``UserError`` when one of ``layers`` is not among those ``read``: it gave no attention."""
        silent = [layer + 1 for layer in layers if layer not in read]
        if silent:
            raise UserError(
                f"layer {silent[0]} gave no softmax attention: the model's attention does not go through transformers' "
                "AttentionInterface, or does not pass on what it is called with, or the layer has another kind of "
                "mixing; choose another layer or judge"
            )


@contextmanager
def tapped(backbone: PreTrainedModel, kernel: str) -> Iterator[None]:
    """Opens a context in which ``backbone``'s attention hands its queries and keys to the call's probe.

    ``kernel``: one of ``KERNELS``. The model's own attention implementation is restored, after errors too.
    """
    previous, wanted = backbone.config._attn_implementation, KERNELS[kernel]
    if previous == wanted:
        yield
        return
    backbone.set_attn_implementation(wanted)
    try:
        yield
    finally:
        backbone.set_attn_implementation(previous)


@contextmanager
def trimmed(last: nn.Module) -> Iterator[None]:
    """Opens a context in which the layer ``last`` is run for the probe's last positions of a row only, [1 batch d].

    Of the other positions only keys and values are needed, so the rest of the layer is not computed for them.
    """

    def narrow(
        module: nn.Module, inputs: tuple[object, ...], named: dict[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object]] | None:
        probe = named[PROBE]
        assert isinstance(probe, Probe)
        if probe.trimming or probe.branches is None:
            return None
        probe.trimming = True
        with suppress(Enough):
            module(*inputs, **named)
        places = probe.branches.gather(1, probe.last[:, None])[:, 0]
        length = int(next(part for part in (*inputs, *named.values()) if isinstance(part, Tensor)).shape[1])
        cut_down = {name: _at(part, places, length) for name, part in named.items()}
        return tuple(_at(part, places, length) for part in inputs), cut_down

    handle = last.register_forward_pre_hook(narrow, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def _at(value: object, places: Tensor, length: int) -> object:
    """``value`` with every tensor of a row [1 N ...] in it, N = ``length``, cut down to ``places``."""
    if isinstance(value, Tensor):
        return value[:, places] if value.dim() > 1 and value.shape[:2] == (1, length) else value
    if isinstance(value, tuple):
        return tuple(_at(part, places, length) for part in value)
    return {name: _at(part, places, length) for name, part in value.items()} if isinstance(value, dict) else value


def tap_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    *,
    mask_function: Callable[..., Tensor],
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    **unused: object,
) -> MaskRule | None:
    """Returns the mask as a rule instead of a tensor; None for the plain causal mask.

    Replaces transformers' sdpa mask function, whose windowed masks have T x T entries.
    """
    padding = None if attention_mask is None or bool(attention_mask.all()) else attention_mask
    window = None if local_size is None or kv_length <= local_size else local_size
    if allow_is_causal_skip and padding is None and window is None:
        return None
    return MaskRule(mask_function, padding, window, allow_is_causal_skip, batch_size)


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
    segment_plan: Plan | None = None,
    position_bias: Tensor | None = None,
    in_blocks: bool = False,
    **unused: object,
) -> tuple[Tensor, None]:
    """Attention output [batch T H d]; the probe, when there is one, sees the layer first."""
    output = None if attention_probe is None else attention_probe.end()
    if output is not None:
        return output, None
    if isinstance(attention_mask, Tensor) or position_bias is not None or key.shape[2] != query.shape[2]:
        raise UserError("it builds its own mask, adds position biases or has other keys than one for each token")
    attention = LayerAttention(
        query=query,
        key=key,
        scaling=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        softcap=softcap,
        sinks=s_aux,
        rule=attention_mask or CAUSAL,
        branches=None if attention_probe is None else attention_probe.branches,
    )
    if attention_probe is not None:
        layer = getattr(module, "layer_idx", None)
        if not isinstance(layer, int) or layer < 0:
            raise UserError("attention rows cannot be read from a model whose attention has no layer of its own")
        attention_probe.see(layer, attention, value)
    fused = not in_blocks and softcap is None and s_aux is None
    if segment_plan is not None:
        plan, rule = segment_plan, attention.rule
        output = plan.attend_at_once(query, key, value, attention.scaling, rule.window) if fused else None
        if output is not None:
            return output, None

        def one(index: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            return _bucket_output(
                replace(attention, query=queries, key=keys, branches=None), values, plan.buckets[index], fused
            )

        return plan.attend(query, key, value, one), None
    if fused and attention.rule.within(query.shape[2]):
        return attention.causal(value).transpose(1, 2).contiguous(), None
    output = value.new_empty(*query.shape[:3], value.shape[3])
    for queries, keys, allowed in attention.blocks():
        output[:, :, queries] = attention.part(value, queries, keys, allowed, fused)
    return output.transpose(1, 2).contiguous(), None


def _bucket_output(attention: LayerAttention, value: Tensor, bucket: Bucket, fused: bool) -> Tensor:
    """Attention output [n H q d] of one bucket, in blocks of queries where its mask is not plain causal."""
    count, heads, length = attention.query.shape[:3]
    seen = attention.key.shape[2]
    if fused and not bucket.prefixed and attention.rule.within(seen):
        return attention.causal(value)
    least, most = bucket.shared
    output = value.new_empty(count, heads, length, value.shape[3])
    for queries in cut(length, count * heads * seen):
        # A block's first query stands at least after the shortest prefix, its last one at most after the longest.
        low, _ = attention.rule.bounds(least + queries.start, least + queries.stop, seen)
        _, high = attention.rule.bounds(most + queries.start, most + queries.stop, seen)
        keys = slice(low, min(high, seen))
        allowed = attention.rule.block(count, bucket.query_at[:, queries], bucket.key_at[:, keys])
        output[:, :, queries] = attention.part(value, queries, keys, allowed, fused)
    return output


AttentionInterface.register(TAP_FAST, _attend)
AttentionInterface.register(TAP_BLOCKS, partial(_attend, in_blocks=True))
AttentionMaskInterface.register(TAP_FAST, tap_mask)
AttentionMaskInterface.register(TAP_BLOCKS, tap_mask)
