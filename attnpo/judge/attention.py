"""Attention rows of a causal LM's last prompt position, and what rollout needs, read while the model runs.

One layer's attention is a function of its queries and keys: scores (grouped heads, scaling, soft-cap, causal or
windowed mask, attention sinks) without any T x T tensor. Rollout walks down from the last layer with
``r <- r/2 + r A/2`` in blocks of queries, which is exact because the head mean is linear.

An attention function registered with transformers hands them over. It leaves the attention output to the usual fast
kernel and, on the layers asked for, recomputes one softmax row per prompt. Paper section on AttentionPO: the row of the
verdict position, averaged over query heads. Prompts come as a padded batch, or as one row in which common beginnings
lie once (``prefixes``). What a call asks for and what it reads are kept in a ``Probe`` in its keyword arguments; there
is no global state but the registered name.

The last way are the maps that a model gives itself with eager attention, one prompt at a time: for classes whose
attention does not go through transformers' AttentionInterface, or that take their mask apart. All maps of a prompt are
held at once: layers x heads x T x T numbers.
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
from attnpo.models.described import attending_layers, backbone_of
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
    """Mask as a function of (batch, head, query, key) indices; only blocks of it are ever built.

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
        return check_whole_mask(self, index)

    def bounds(self, start: int, stop: int, length: int) -> tuple[int, int]:
        """Returns the half-open range of keys that queries start..stop-1 can see."""
        if not self.causal:
            return 0, length
        return (0 if self.local_size is None else max(0, start - self.local_size + 1)), stop

    def within(self, longest: int) -> bool:
        """Returns whether the mask is plain causal for sequences of at most ``longest`` tokens."""
        return self.causal and self.padding is None and (self.local_size is None or longest <= self.local_size)

    def window(self, longest: int) -> tuple[int, int] | None:
        """Describes the mask as a window for sequences of at most ``longest`` tokens, or None (``describe_window``)."""
        plain = self.causal and self.padding is None
        return describe_window(self.function, self.local_size, longest) if plain else None

    def block(self, batch: int, queries: Tensor, keys: Tensor) -> Tensor:
        """Returns allowed entries [batch 1 q k]; ``queries`` [q] or [batch q], ``keys`` [k] or [batch k], positions."""
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
        """Returns softmax [batch H n k] in float32 or better of n queries [batch H n d] over k keys [batch KV k d]."""
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
        """Returns attention output [batch H T d] by torch's fused causal kernel."""
        return fused_attention(self.query, self.key, value, None, self.scaling)

    def part(self, value: Tensor, queries: slice, keys: slice, allowed: Tensor, fused: bool) -> Tensor:
        """Returns attention output [batch H q d] of some queries over some keys; by the fused kernel, or in float32."""
        query, key, value = self.query[:, :, queries], self.key[:, :, keys], value[:, :, keys]
        if fused:
            return fused_attention(query, key, value, allowed, self.scaling)
        maps = self.probabilities(query, key, allowed).to(value.dtype)
        batch, heads, count, seen = maps.shape
        groups = value.shape[1]
        merged = maps.reshape(batch, groups, heads // groups * count, seen) @ value
        return merged.view(batch, heads, count, value.shape[3])

    def pull(self, weights: Float[Tensor, "batch T"]) -> Float[Tensor, "batch T"]:
        """Returns ``weights @ A`` for the head-mean attention map A, in blocks of queries."""
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


# transformers reads meaning into names that contain "sdpa", "eager" or "flash"; these must not.
TAP_FAST = "attnpo_row_tap"
TAP_BLOCKS = "attnpo_row_tap_blocks"
PROBE = "attention_probe"  # the keyword argument that carries the probe
MAPS = "maps"
KERNELS = {"sdpa": TAP_FAST, "blocks": TAP_BLOCKS, MAPS: "eager"}
"""Ways to compute attention output: torch's fused kernel, float32 blocks of queries (slower), or the model's
own eager attention, which gives whole maps (``attention_maps``)."""


class Enough(Exception):
    """Raised inside a forward to end it when everything asked for is known; caught within this package."""


class SeveralRows(UserError):
    """Layer attends more than once in a forward, so no map of it is the one."""


class Probe:
    """Request to one forward for attention rows, and its results.

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
        self.kept: dict[int, LayerAttention | GivenMap] = {}
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
        """Returns the attention output [1 batch H d] of the last positions of a trimmed forward; else None."""
        if self._end is None:
            return None
        rows, values = self._end
        count, groups, seen = values.shape[:3]
        merged = rows.to(values.dtype).view(count, groups, -1, seen) @ values
        return merged.flatten(1, 2)[None]

    def rollout(self) -> Float[Tensor, "batch T"]:
        """Returns the last position's row of the product of all ``(I + A_l) / 2``; frees the kept tensors."""
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
def tap_attention(backbone: PreTrainedModel, kernel: str) -> Iterator[None]:
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
def trim_last_layer(last: nn.Module) -> Iterator[None]:
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
    """Returns ``value`` with every tensor of a row [1 N ...] in it, N = ``length``, cut down to ``places``."""
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
    segment_plan: SegmentPlan | None = None,
    position_bias: Tensor | None = None,
    in_blocks: bool = False,
    **unused: object,
) -> tuple[Tensor, None]:
    """Returns attention output [batch T H d]; the probe, when there is one, sees the layer first."""
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
    """Returns attention output [n H q d] of one bucket, in blocks of queries where its mask is not plain causal."""
    count, heads, length = attention.query.shape[:3]
    seen = attention.key.shape[2]
    if fused and not bucket.has_prefix and attention.rule.within(seen):
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


ROUNDING = 2e-2  # by how much a row's sum may pass 1, in bfloat16


@dataclass(frozen=True)
class GivenMap:
    """One layer's attention map as the model gives it."""

    maps: Float[Tensor, "batch heads T T"]

    def rows(self, last: Int[Tensor, " batch"]) -> Float[Tensor, "batch heads T"]:
        """Returns the softmax row of each sequence's position ``last``, per query head; float32 or better."""
        rows = self.maps[torch.arange(len(last), device=last.device), :, last]
        return rows.to(torch.promote_types(rows.dtype, torch.float32))

    def pull(self, weights: Float[Tensor, "batch T"]) -> Float[Tensor, "batch T"]:
        """Returns ``weights @ A`` for the head-mean attention map A."""
        pulled = torch.zeros_like(weights)
        for head in self.maps.unbind(1):
            pulled += (weights[:, None] @ head.to(weights.dtype))[:, 0]
        return pulled / self.maps.shape[1]


def rollout_row(layers: Iterable[LayerAttention | GivenMap], last: Int[Tensor, " batch"]) -> Float[Tensor, "batch T"]:
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


def take_maps(
    model: PreTrainedModel, parts: ModelParts | None, inputs: dict[str, object], probe: Probe, verdict: bool
) -> Tensor | None:
    """Fills the probe from one prompt's maps; its last logits [1 vocab] when the verdict is wanted.

    Args:
        model: with eager attention.
        parts: backbone and head, if they give the model's logits.
        inputs: keyword arguments with ``input_ids`` [1 T].
        probe: what is asked for, some layer at least.
        verdict: whether logits are wanted.

    Raises:
        UserError: the model gives maps that belong to no layer.
    """
    backbone = backbone_of(model)
    output = (model if verdict and parts is None else backbone)(**inputs, output_attentions=True)
    found = _number_maps(output.get("attentions") or (), probe, attending_layers(backbone))
    rows = {layer: found[layer].rows(probe.last) for layer in probe.wanted if layer in found}
    probe.rows = rows if probe.per_head else {layer: each.mean(1) for layer, each in rows.items()}
    probe.kept = dict(found) if probe.keep else {}
    if not verdict:
        return None
    if parts is None:
        return output.logits[:, -1]  # type: ignore[no-any-return]
    return compute_logits(output.last_hidden_state[:, -1], parts.projection())


def _number_maps(given: Sequence[object], probe: Probe, attending: Sequence[int]) -> dict[int, GivenMap]:
    """Maps by their layer, 0-based: one for each layer, or one for each of the layers that are known to attend."""
    length = int(probe.last.max()) + 1
    maps = [each if isinstance(each, Tensor) and each.shape[2:] == (length, length) else None for each in given]
    if len(given) != probe.depth:
        if len(given) != len(attending):
            raise UserError(f"they are {len(given)}, for {probe.depth} layers, {len(attending)} of them with attention")
        return {layer - 1: GivenMap(each) for layer, each in zip(attending, maps, strict=True) if each is not None}
    return {layer: GivenMap(each) for layer, each in enumerate(maps) if each is not None}


def require_distributions(probe: Probe, attending: Sequence[int]) -> None:
    """Raises ``UserError`` unless the probe has rows [batch heads T] that are at least 0 and sum to 1 at most.

    ``attending``: numbers, from 1, of the layers that must have one.
    """
    absent = [layer for layer in attending if layer - 1 not in probe.rows]
    if absent or not probe.rows:
        raise UserError(f"that of layer {absent[0] if absent else 1} has not one key for each token")
    for layer, rows in sorted(probe.rows.items()):
        if not (float(rows.min()) >= 0 and float(rows.sum(-1).max()) <= 1 + ROUNDING):
            raise UserError(f"that of layer {layer + 1} is no softmax")
