"""Reads the attention row of each prompt's last position, and the inputs of attention rollout, while a causal LM runs.

A layer's attention is recomputed from its queries and keys (grouped heads, scaling, soft-cap, causal or windowed mask,
attention sinks), without a T x T tensor. Rollout iterates from the last layer to the first with ``r <- r/2 + r A/2`` in
blocks of queries; this is exact because the mean over heads is linear.

An attention function registered with transformers receives queries and keys. It leaves the attention output to the
usual fast kernel and, on the requested layers, recomputes one softmax row per prompt: the row of the verdict position,
averaged over query heads (see the paper's section on AttentionPO). Prompts are padded to a batch, or packed into one
row that stores common prefixes once (``prefixes``). Each call passes an ``AttentionProbe`` in its keyword arguments,
which carries the requests and collects the results. The registered name is the only global state.

The fallback is to read the attention maps that a model returns with eager attention, one prompt at a time. It is used
for model classes whose attention bypasses transformers' AttentionInterface or inspects the attention mask. All maps of
a prompt are in memory at once (layers x heads x T x T values).
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from attnpo.models.backbone import ModelParts
from attnpo.models.description import attending_layers, backbone_of
from attnpo.models.logps import compute_logits
from attnpo.models.packed_attention import (
    FAR,
    Bucket,
    SegmentPlan,
    check_whole_mask,
    describe_window,
    fused_attention,
    softmax,
)
from attnpo.schema import UserError

BLOCK_ELEMENTS = 1 << 23  # scores held at once by a block of queries: 32 MiB in float32
SMALLEST_BLOCK, LARGEST_BLOCK = 16, 256


@dataclass(frozen=True)
class MaskRule:
    """Attention mask as a function of (batch, head, query, key) indices; only blocks of it are ever materialised.

    With ``local_size``, a query sees at most that many of the most recent keys; with ``causal``, it sees no later keys.
    Both only limit which keys a block has to visit. ``rows`` is the model's batch size; one row may contain several
    sequences.
    """

    function: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    padding: Bool[Tensor, "batch T"] | None
    local_size: int | None
    causal: bool
    rows: int = 1

    def __getitem__(self, index: object) -> "MaskRule":
        """Returns the rule itself for a full slice, as some models need; raises ``UserError`` for other slices."""
        return check_whole_mask(self, index)

    def visible_keys(self, start: int, stop: int, length: int) -> tuple[int, int]:
        """Returns the half-open range of keys that queries start..stop-1 can see."""
        if not self.causal:
            return 0, length
        return (0 if self.local_size is None else max(0, start - self.local_size + 1)), stop

    def is_causal_within(self, longest: int) -> bool:
        """Returns whether the mask is plain causal for sequences of at most ``longest`` tokens."""
        return self.causal and self.padding is None and (self.local_size is None or longest <= self.local_size)

    def describe_window(self, longest: int) -> tuple[int, int] | None:
        """Describes the mask as a window for sequences of at most ``longest`` tokens; None if it is not a window."""
        plain = self.causal and self.padding is None
        return describe_window(self.function, self.local_size, longest) if plain else None

    def allowed_block(self, batch: int, queries: Tensor, keys: Tensor) -> Tensor:
        """Returns the mask [batch 1 q k] for the given ``queries`` [q] or [batch q] and ``keys`` [k] or [batch k]."""
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
    """Queries and keys of one layer after rotary embedding, and how its attention scores are computed.

    ``query`` [batch H T d], ``key`` [batch KV T d], where KV divides H; ``sinks`` [H] are extra logits that enter the
    softmax and are dropped afterwards. With ``branches`` [n T], queries and keys come from one packed row [1 H N d] in
    which ``branches[i]`` lists the positions of sequence i.
    """

    query: Float[Tensor, "batch heads T d"]
    key: Float[Tensor, "batch groups K d"]
    scaling: float
    softcap: float | None
    sinks: Float[Tensor, " heads"] | None
    rule: MaskRule
    branches: Int[Tensor, "n L"] | None = None

    def probabilities(self, query: Tensor, key: Tensor, allowed: Tensor) -> Tensor:
        """Returns the softmax [batch H n k] of queries [batch H n d] over keys [batch KV k d], in float32 or higher."""
        batch, heads, count, width = query.shape
        groups, seen = key.shape[1], key.shape[2]
        dtype = torch.promote_types(query.dtype, torch.float32)
        grouped = query.to(dtype).reshape(batch, groups, heads // groups * count, width)
        scores = (grouped @ key.to(dtype).transpose(2, 3)).mul_(self.scaling).view(batch, heads, count, seen)
        if self.softcap is not None:
            scores = scores.div_(self.softcap).tanh_().mul_(self.softcap)
        return softmax(scores.masked_fill_(~allowed, -torch.inf), self.sinks)

    def rows_at(self, last: Int[Tensor, " batch"]) -> Float[Tensor, "batch heads T"]:
        """Returns the softmax row at position ``last`` of each sequence, per query head."""
        batch, length = len(last), self.sequence_length
        each = torch.arange(batch, device=last.device)
        if self.branches is None:
            query = self.query[each, :, last]
        else:
            query = self.query[0, :, self.branches[each, last]].transpose(0, 1)
        allowed = self.rule.allowed_block(batch, last[:, None], torch.arange(length, device=last.device))
        return self.probabilities(query[:, :, None], self.split_sequences(self.key), allowed)[:, :, 0]

    @property
    def sequence_length(self) -> int:
        """Returns the number of tokens in the longest sequence."""
        return self.query.shape[2] if self.branches is None else self.branches.shape[1]

    def split_sequences(self, states: Tensor, part: slice = slice(None)) -> Tensor:
        """Returns the queries, keys or values [batch X n d] at positions ``part`` of each sequence."""
        if self.branches is None:
            return states[:, :, part]
        return states[0][:, self.branches[:, part]].transpose(0, 1)

    def query_blocks(self) -> Iterator[tuple[slice, slice, Tensor]]:
        """Yields blocks of queries as (queries, visible keys, mask [batch 1 q k])."""
        batch = self.query.shape[0] if self.branches is None else self.branches.shape[0]
        index = torch.arange(self.sequence_length, device=self.query.device)
        for queries in split_queries(self.sequence_length, batch * self.query.shape[1] * self.sequence_length):
            low, high = self.rule.visible_keys(queries.start, queries.stop, self.sequence_length)
            yield queries, slice(low, high), self.rule.allowed_block(batch, index[queries], index[low:high])

    def fused_causal_output(self, value: Tensor) -> Tensor:
        """Computes the attention output [batch H T d] with torch's fused causal kernel."""
        return fused_attention(self.query, self.key, value, None, self.scaling)

    def block_output(self, value: Tensor, queries: slice, keys: slice, allowed: Tensor, fused: bool) -> Tensor:
        """Computes the attention output [batch H q d] of a block, with the fused kernel or in float32."""
        query, key, value = self.query[:, :, queries], self.key[:, :, keys], value[:, :, keys]
        if fused:
            return fused_attention(query, key, value, allowed, self.scaling)
        maps = self.probabilities(query, key, allowed).to(value.dtype)
        batch, heads, count, seen = maps.shape
        groups = value.shape[1]
        merged = maps.reshape(batch, groups, heads // groups * count, seen) @ value
        return merged.view(batch, heads, count, value.shape[3])

    def left_multiply(self, weights: Float[Tensor, "batch T"]) -> Float[Tensor, "batch T"]:
        """Returns ``weights @ A`` for the head-averaged attention map A, computed in blocks of queries."""
        pulled = torch.zeros_like(weights)
        key = self.split_sequences(self.key).to(weights.dtype)
        for queries, keys, allowed in self.query_blocks():
            maps = self.probabilities(self.split_sequences(self.query, queries), key[:, :, keys], allowed)
            # Rows without allowed keys (there are none in causal models) would be NaN; their weight is 0 anyway.
            pulled[:, keys] += (weights[:, None, None, queries] @ maps)[:, :, 0].mean(1)
        return pulled


def split_queries(length: int, per_query: int) -> Iterator[slice]:
    """Splits ``length`` queries with ``per_query`` scores each into blocks of at most ``BLOCK_ELEMENTS`` scores."""
    size = min(LARGEST_BLOCK, max(SMALLEST_BLOCK, BLOCK_ELEMENTS // per_query))
    for start in range(0, length, size):
        yield slice(start, min(start + size, length))


# transformers reads meaning into names that contain "sdpa", "eager" or "flash"; these must not.
TAP_FAST = "attnpo_row_tap"
TAP_BLOCKS = "attnpo_row_tap_blocks"
PROBE = "attention_probe"  # the keyword argument that carries the probe
MAPS = "maps"
KERNELS = {"sdpa": TAP_FAST, "blocks": TAP_BLOCKS, MAPS: "eager"}
"""Ways to compute attention output: torch's fused kernel, float32 blocks of queries (slower), or the model's
own eager attention, which returns full maps (``attention_maps``)."""


class StopForward(Exception):
    """Raised inside a forward pass to stop it once all requested rows are known; caught within this package."""


class AmbiguousAttention(UserError):
    """Raised if a layer attends more than once per forward pass, which makes its attention row ambiguous."""


class AttentionProbe:
    """Requests attention rows from one forward pass and collects them.

    ``last`` [batch]: the position whose row is requested, per sequence. ``layers``: 0-based indices of the requested
    layers. With ``rollout``, the queries and keys of every layer are kept until ``compute_rollout()`` is called. With
    ``stop``, the forward pass stops (``StopForward``) in the attention of the deepest requested layer. ``branches``
    [batch T]: the positions of each sequence in a packed row.
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
        self.kept: dict[int, LayerAttention | EagerAttentionMap] = {}
        self.trimming = False
        self._end: tuple[Tensor, Tensor] | None = None

    def record_layer(self, layer: int, attention: LayerAttention, value: Tensor) -> None:
        """Stores the requested rows of one layer; raises ``StopForward`` if it was the last layer needed.

        A layer may attend twice with the same queries and keys (to different parts of the values). Raises
        ``AmbiguousAttention`` if the queries or keys differ, because the layer then has no single row.
        """
        rows = attention.rows_at(self.last) if layer in self.wanted or self.trimming else None
        if rows is not None and layer in self.wanted:
            kept = rows if self.per_head else rows.mean(1)
            if not torch.equal(self.rows.setdefault(layer, kept), kept):
                raise AmbiguousAttention(
                    f"judge: layer {layer + 1} attends more than once per forward pass, which makes its row ambiguous"
                )
        if self.keep:
            self.kept[layer] = attention
        if rows is not None and self.trimming:
            self._end = (rows, attention.split_sequences(value))
        if self.trimming or layer == self.final:
            raise StopForward

    def trimmed_output(self) -> Tensor | None:
        """Returns the attention output [1 batch H d] at the last positions; None if the pass is not trimmed."""
        if self._end is None:
            return None
        rows, values = self._end
        count, groups, seen = values.shape[:3]
        merged = rows.to(values.dtype).view(count, groups, -1, seen) @ values
        return merged.flatten(1, 2)[None]

    def compute_rollout(self) -> Float[Tensor, "batch T"]:
        """Returns the last position's row in the product of all ``(I + A_l) / 2`` and frees the kept tensors."""
        self.check_layers_read(self.kept, range(self.depth))
        return rollout_row((self.kept.pop(layer) for layer in range(self.depth - 1, -1, -1)), self.last)

    def check_layers_read(self, read: Collection[int], layers: Sequence[int]) -> None:
        """Raises ``UserError`` if one of ``layers`` is missing from ``read``, i.e. produced no attention."""
        silent = [layer + 1 for layer in layers if layer not in read]
        if silent:
            raise UserError(
                f"layer {silent[0]} has no softmax attention to read: the model's attention does not use transformers' "
                "AttentionInterface or does not forward its keyword arguments, or the layer mixes tokens in some "
                "other way; choose a different layer or judge"
            )


@contextmanager
def tap_attention(backbone: PreTrainedModel, kernel: str) -> Iterator[None]:
    """Patches ``backbone`` inside the context so that its attention passes queries and keys to the call's probe.

    ``kernel``: one of ``KERNELS``. The model's own attention implementation is restored on exit, even after an error.
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
def trim_last_layer(last: nn.Module) -> Iterator[None]:
    """Makes the layer ``last`` run only at the probe's last positions [1 batch d] of a packed row inside the context.

    The other positions only need keys and values, so the rest of the layer is skipped for them.
    """

    def narrow(
        module: nn.Module, inputs: tuple[object, ...], named: dict[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object]] | None:
        probe = named[PROBE]
        assert isinstance(probe, AttentionProbe)
        if probe.trimming or probe.branches is None:
            return None
        probe.trimming = True
        with suppress(StopForward):
            module(*inputs, **named)
        places = probe.branches.gather(1, probe.last[:, None])[:, 0]
        length = int(next(part for part in (*inputs, *named.values()) if isinstance(part, Tensor)).shape[1])
        cut_down = {name: _select_positions(part, places, length) for name, part in named.items()}
        return tuple(_select_positions(part, places, length) for part in inputs), cut_down

    handle = last.register_forward_pre_hook(narrow, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def _select_positions(value: object, places: Tensor, length: int) -> object:
    """Reduces each row tensor [1 N ...] inside ``value`` to the positions ``places``; N is ``length``."""
    if isinstance(value, Tensor):
        return value[:, places] if value.dim() > 1 and value.shape[:2] == (1, length) else value
    if isinstance(value, tuple):
        return tuple(_select_positions(part, places, length) for part in value)
    return (
        {name: _select_positions(part, places, length) for name, part in value.items()}
        if isinstance(value, dict)
        else value
    )


def make_mask_rule(
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


def _attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: MaskRule | Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    attention_probe: AttentionProbe | None = None,
    segment_plan: SegmentPlan | None = None,
    position_bias: Tensor | None = None,
    in_blocks: bool = False,
    **unused: object,
) -> tuple[Tensor, None]:
    """Lets the probe, if any, record the layer; returns the attention output [batch T H d]."""
    output = None if attention_probe is None else attention_probe.trimmed_output()
    if output is not None:
        return output, None
    if isinstance(attention_mask, Tensor) or position_bias is not None or key.shape[2] != query.shape[2]:
        raise UserError("it builds its own mask, adds position biases or does not have one key per token")
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
            raise UserError("attention rows cannot be read from a model whose attention modules have no layer index")
        attention_probe.record_layer(layer, attention, value)
    fused = not in_blocks and softcap is None and s_aux is None
    if segment_plan is not None:
        plan, rule = segment_plan, attention.rule
        output = plan.attend_in_one_call(query, key, value, attention.scaling, rule.describe_window) if fused else None
        if output is not None:
            return output, None

        def attend_bucket(index: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            return _bucket_output(
                replace(attention, query=queries, key=keys, branches=None), values, plan.buckets[index], fused
            )

        return plan.attend(query, key, value, attend_bucket), None
    if fused and attention.rule.is_causal_within(query.shape[2]):
        return attention.fused_causal_output(value).transpose(1, 2).contiguous(), None
    output = value.new_empty(*query.shape[:3], value.shape[3])
    for queries, keys, allowed in attention.query_blocks():
        output[:, :, queries] = attention.block_output(value, queries, keys, allowed, fused)
    return output.transpose(1, 2).contiguous(), None


def _bucket_output(attention: LayerAttention, value: Tensor, bucket: Bucket, fused: bool) -> Tensor:
    """Computes the attention output [n H q d] of a bucket, in blocks of queries unless its mask is plain causal."""
    count, heads, length = attention.query.shape[:3]
    seen = attention.key.shape[2]
    if fused and not bucket.has_prefix and attention.rule.is_causal_within(seen):
        return attention.fused_causal_output(value)
    least, most = bucket.shared
    output = value.new_empty(count, heads, length, value.shape[3])
    for queries in split_queries(length, count * heads * seen):
        # A block's first query stands at least after the shortest prefix, its last one at most after the longest.
        low, _ = attention.rule.visible_keys(least + queries.start, least + queries.stop, seen)
        _, high = attention.rule.visible_keys(most + queries.start, most + queries.stop, seen)
        keys = slice(low, min(high, seen))
        allowed = attention.rule.allowed_block(count, bucket.query_at[:, queries], bucket.key_at[:, keys])
        output[:, :, queries] = attention.block_output(value, queries, keys, allowed, fused)
    return output


AttentionInterface.register(TAP_FAST, _attention_forward)
AttentionInterface.register(TAP_BLOCKS, partial(_attention_forward, in_blocks=True))
AttentionMaskInterface.register(TAP_FAST, make_mask_rule)
AttentionMaskInterface.register(TAP_BLOCKS, make_mask_rule)


ROUNDING = 2e-2  # by how much a row's sum may exceed 1, in bfloat16


@dataclass(frozen=True)
class EagerAttentionMap:
    """Attention map of one layer, as returned by the model."""

    maps: Float[Tensor, "batch heads T T"]

    def rows_at(self, last: Int[Tensor, " batch"]) -> Float[Tensor, "batch heads T"]:
        """Returns the softmax row at position ``last`` of each sequence, per query head, in float32 or higher."""
        rows = self.maps[torch.arange(len(last), device=last.device), :, last]
        return rows.to(torch.promote_types(rows.dtype, torch.float32))

    def left_multiply(self, weights: Float[Tensor, "batch T"]) -> Float[Tensor, "batch T"]:
        """Returns ``weights @ A`` for the head-averaged attention map A."""
        pulled = torch.zeros_like(weights)
        for head in self.maps.unbind(1):
            pulled += (weights[:, None] @ head.to(weights.dtype))[:, 0]
        return pulled / self.maps.shape[1]


def rollout_row(
    layers: Iterable[LayerAttention | EagerAttentionMap], last: Int[Tensor, " batch"]
) -> Float[Tensor, "batch T"]:
    """Returns the row of position ``last`` in the product of ``(I + A_l) / 2``; ``layers`` are ordered deepest first.

    Each layer is used only once, so a generator that drops it after use keeps memory low.
    """
    layers = iter(layers)
    first = next(layers).rows_at(last).mean(1)
    # The deepest layer acts on a unit vector, so one row of it is enough.
    weights = (torch.zeros_like(first).scatter_(1, last[:, None], 1.0) + first) / 2
    for layer in layers:
        weights = (weights + layer.left_multiply(weights)) / 2
    return weights


def read_eager_maps(
    model: PreTrainedModel, parts: ModelParts | None, inputs: dict[str, object], probe: AttentionProbe, verdict: bool
) -> Tensor | None:
    """Fills the probe from the attention maps of one prompt; returns its last logits [1 vocab] if requested.

    Args:
        model: the model, with eager attention.
        parts: backbone and head, if they reproduce the model's logits.
        inputs: keyword arguments with ``input_ids`` [1 T].
        probe: the request, with at least one layer.
        verdict: whether logits are requested.

    Raises:
        UserError: the number of maps does not match the layers.
    """
    backbone = backbone_of(model)
    output = (model if verdict and parts is None else backbone)(**inputs, output_attentions=True)
    found = _maps_by_layer(output.get("attentions") or (), probe, attending_layers(backbone))
    rows = {layer: found[layer].rows_at(probe.last) for layer in probe.wanted if layer in found}
    probe.rows = rows if probe.per_head else {layer: each.mean(1) for layer, each in rows.items()}
    probe.kept = dict(found) if probe.keep else {}
    if not verdict:
        return None
    if parts is None:
        return output.logits[:, -1]  # type: ignore[no-any-return]
    return compute_logits(output.last_hidden_state[:, -1], parts.projection())


def _maps_by_layer(
    given: Sequence[object], probe: AttentionProbe, attending: Sequence[int]
) -> dict[int, EagerAttentionMap]:
    """Returns the maps by 0-based layer; the model may return one for every layer or only for those with attention."""
    length = int(probe.last.max()) + 1
    maps = [each if isinstance(each, Tensor) and each.shape[2:] == (length, length) else None for each in given]
    if len(given) != probe.depth:
        if len(given) != len(attending):
            raise UserError(
                f"the model returns {len(given)} attention maps, but {len(attending)} of its {probe.depth} layers have "
                "attention"
            )
        return {
            layer - 1: EagerAttentionMap(each) for layer, each in zip(attending, maps, strict=True) if each is not None
        }
    return {layer: EagerAttentionMap(each) for layer, each in enumerate(maps) if each is not None}


def check_attention_rows(probe: AttentionProbe, attending: Sequence[int]) -> None:
    """Raises ``UserError`` unless the probe's rows [batch heads T] are non-negative and sum to at most 1.

    ``attending``: 1-based indices of the layers that must have rows.
    """
    absent = [layer for layer in attending if layer - 1 not in probe.rows]
    if absent or not probe.rows:
        raise UserError(f"the attention map of layer {absent[0] if absent else 1} does not have one key per token")
    for layer, rows in sorted(probe.rows.items()):
        if not (float(rows.min()) >= 0 and float(rows.sum(-1).max()) <= 1 + ROUNDING):
            raise UserError(
                f"the attention map of layer {layer + 1} has a negative weight or a row that sums to more than 1"
            )
