"""Attention over rows that pack many sequences, without padding and without a mask over the whole row.

A packed row consists of segments: runs of queries that attend causally to their own keys and to a shared prefix
elsewhere in the row (the prompt of both responses). In half precision on CUDA, a layer's attention is a single call to
torch's variable-length kernel if that kernel supports the layer's mask. Otherwise segments of similar size are gathered
into padded calls of torch's fused kernel. Windows and chunks follow the mask function that transformers provides for
the layer. Soft-caps and attention sinks use a plain softmax. Results equal those of a padded batch up to rounding.

The plan is a keyword argument of the forward, and the mask function takes the place of the mask. A backward that
recomputes activations therefore has access to both. Calls without a plan use the model's original attention.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from inspect import signature
from typing import Required, TypedDict, TypeVar, Unpack

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from attnpo.models.description import backbone_of
from attnpo.schema import UserError

PLAN = "segment_plan"  # keyword argument that carries the plan

# transformers treats names that contain "sdpa", "eager" or "flash" specially; these must not contain them.
NAMES = {"sdpa": "attnpo_segments", "eager": "attnpo_segments_plain"}
"""Names of the segment attention by original implementation; calls without a plan run the original (or a softmax)."""

WASTE = 1.3  # maximum ratio of padded to needed entries in a kernel call,
SMALL = 1 << 13  # or maximum number of extra entries, which cost less than another call
FAR = 1 << 40  # position of padding keys, after every query

HALF = (torch.float16, torch.bfloat16)
"""Dtypes supported by the variable-length kernel."""
WIDEST, WIDTHS = 256, 8
"""Maximum head dimension of the variable-length kernel; head dimensions must also be a multiple of the second value."""

HOST = torch.device("cpu")
_Attention = Callable[..., tuple[Tensor, None]]
_WITHOUT_PLAN: _Attention = sdpa_attention_forward


@dataclass(frozen=True)
class Bucket:
    """Segments of similar size, batched into one padded call of n sequences.

    ``queries``, ``keys``: indices into the row; ``query_at``, ``key_at``: positions within the branch (padding keys
    come after all queries); ``shared``: minimum and maximum prefix length.
    """

    queries: Int[Tensor, "n q"]
    keys: Int[Tensor, "n k"]
    query_at: Int[Tensor, "n q"]
    key_at: Int[Tensor, "n k"]
    shared: tuple[int, int]

    @property
    def has_prefix(self) -> bool:
        """Returns whether any segment has a prefix."""
        return self.shared[1] > 0

    def to(self, device: torch.device) -> "Bucket":
        """Moves the bucket to ``device``."""
        queries, keys, query_at, key_at = (
            part.to(device, non_blocking=True) for part in (self.queries, self.keys, self.query_at, self.key_at)
        )
        return Bucket(queries, keys, query_at, key_at, self.shared)


@dataclass(frozen=True)
class VarlenRow:
    """Segments of a row as variable-length sequences, in row order, with the kernel to run.

    ``keys``: indices of the keys, prefix first (None: the row itself). ``query_ends``, ``key_ends``: cumulative ends of
    the sequences, starting with 0. ``longest``: maximum numbers of queries and keys. ``options``: kernel arguments.
    """

    kernel: Callable[..., object]
    keys: Int[Tensor, " K"] | None
    query_ends: Int[Tensor, " ends"]
    key_ends: Int[Tensor, " ends"]
    longest: tuple[int, int]
    options: frozenset[str]


@dataclass(frozen=True)
class SegmentPlan:
    """Plan of the branches in a row, built on the CPU for a row on ``device``; kernel inputs are built on first use.

    ``alone``: start, length and number of preceding tokens of the part of each branch that no other branch contains.
    ``branches``: token indices of each branch, padded by repeating one of them.
    """

    alone: Int[Tensor, "n 3"]
    branches: Int[Tensor, "n T"]
    device: torch.device

    @classmethod
    def from_segments(
        cls, segments: Int[Tensor, "segments 4"], length: int, device: torch.device = HOST
    ) -> "SegmentPlan":
        """Creates a row's plan; raises ValueError unless the segments cover its ``length`` tokens exactly once."""
        lines = segments[segments[:, 1] > 0]
        start, count, prefix, shared = lines.t()[:, :, None]
        seen = shared + count
        step = torch.minimum(torch.arange(int(seen.max()) if len(seen) else 0)[None], seen - 1)
        branches = torch.where(step < shared, prefix + step, start + step - shared)
        return cls.from_branches(lines[:, [0, 1, 3]], branches, length, device)

    @classmethod
    def from_branches(
        cls, alone: Int[Tensor, "n 3"], branches: Int[Tensor, "n T"], length: int, device: torch.device
    ) -> "SegmentPlan":
        """Creates the plan of n branches in a row of ``length`` tokens; each has at least one token of its own.

        Raises ``ValueError`` unless the branches' own tokens cover the row exactly once.
        """
        start, count = alone[alone[:, 0].argsort(), :2].t()
        covered = int(count.sum())
        if covered != length or not torch.equal(start, count.cumsum(0) - count):
            raise ValueError(
                f"segments with {covered} tokens in total do not cover the row's {length} tokens exactly once"
            )
        return cls(alone, branches, device)

    @cached_property
    def bucket_layout(self) -> tuple[tuple[Bucket, ...], Int[Tensor, " N"]]:
        """Groups segments into buckets that contain every token once; also returns the index of each token's output."""
        back = torch.empty(int(self.alone[:, 1].sum()), dtype=torch.long)
        buckets, offset = [], 0
        for members in _group_by_size([_Segment(row, *line) for row, line in enumerate(self.alone.tolist())]):
            bucket, real = _make_bucket(members, self.branches)
            place = torch.arange(offset, offset + real.numel()).view_as(real)
            back[bucket.queries[real]] = place[real]
            offset += real.numel()
            buckets.append(bucket)
        return tuple(bucket.to(self.device) for bucket in buckets), back.to(self.device, non_blocking=True)

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """Returns the buckets of segments of similar size."""
        return self.bucket_layout[0]

    @cached_property
    def varlen(self) -> VarlenRow | None:
        """Returns the segments for the variable-length kernel; None on a device without it."""
        kernel = find_kernel(self.device)
        if kernel is None:
            return None
        order = self.alone[:, 0].argsort()
        _, count, shared = self.alone[order].t()
        seen = shared + count
        keys = None
        if bool((shared > 0).any()):
            inner = torch.arange(self.branches.shape[1]) < seen[:, None]
            keys = self.branches[order][inner].to(self.device, non_blocking=True)
        queried, known = (
            functional.pad(each.cumsum(0), (1, 0)).to(torch.int32).to(self.device, non_blocking=True)
            for each in (count, seen)
        )
        longest = int(count.max()), int(seen.max())
        return VarlenRow(kernel, keys, queried, known, longest, frozenset(signature(kernel).parameters))

    def attend_in_one_call(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        window: Callable[[int], tuple[int, int] | None],
    ) -> Tensor | None:
        """Computes attention [1 N H d] of a row [1 H N d] in one kernel call; None if the kernel cannot compute it."""
        kind, width, parts = query.device.type, query.shape[-1], [query, key, value]
        if (varlen := self.varlen) is None:
            return None
        if torch.is_autocast_enabled(kind) and query.dtype != torch.float64:
            parts = [part.to(torch.get_autocast_dtype(kind)) for part in parts]  # as for the fused kernel
        fits = width <= WIDEST and width % WIDTHS == 0 and all(part.shape[-1] == width for part in parts)
        if not fits or any(part.dtype not in HALF for part in parts):
            return None
        if (seen := window(varlen.longest[1])) is None:
            return None
        more: dict[str, object] = {"scale": scale, "window_size": seen}
        if "num_splits" in varlen.options:
            more["num_splits"] = 1  # otherwise sums are split depending on the lengths of the other sequences
        queries, keys, values = (part[0].transpose(0, 1) for part in parts)
        if varlen.keys is not None:
            keys, values = keys.index_select(0, varlen.keys), values.index_select(0, varlen.keys)
        if (times := queries.shape[1] // keys.shape[1]) > 1 and "enable_gqa" in varlen.options:
            more["enable_gqa"] = True
        elif times > 1:
            keys, values = keys.repeat_interleave(times, 1), values.repeat_interleave(times, 1)
        rows = (part.contiguous() for part in (queries, keys, values))
        output = varlen.kernel(*rows, varlen.query_ends, varlen.key_ends, *varlen.longest, **more)
        assert isinstance(output, Tensor)
        return output[None]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, core: "BucketAttention") -> Tensor:
        """Computes attention [1 N H d] of a row [1 H N d] bucket by bucket; ``core`` computes one bucket."""
        # [N, H*d]: one row per token, as produced by the projections, so that gathering moves whole rows.
        rows = [part[0].transpose(0, 1) for part in (query, key, value)]
        sizes = [part.shape[1:] for part in rows]
        flat = [part.flatten(1) for part in rows]
        outputs = []
        for index, bucket in enumerate(self.buckets):
            places = (bucket.queries, bucket.keys, bucket.keys)
            queries, keys, values = (
                part.index_select(0, place.flatten()).view(*place.shape, *size).transpose(1, 2)
                for part, place, size in zip(flat, places, sizes, strict=True)
            )
            output = core(index, queries, keys, values)
            outputs.append(output.transpose(1, 2).flatten(2).flatten(0, 1))
        joined = torch.cat(outputs) if len(outputs) > 1 else outputs[0]
        return joined.index_select(0, self.bucket_layout[1]).view(1, -1, query.shape[1], value.shape[-1])


def find_kernel(device: torch.device) -> Callable[..., object] | None:
    """Returns torch's variable-length causal attention kernel; None if it is not available."""
    if device.type != "cuda" or torch.version.hip or torch.cuda.get_device_capability(device) < (8, 0):
        return None
    try:
        from torch.nn.attention.varlen import varlen_attn  # seconds of import
    except ImportError:  # of earlier releases
        return None
    return varlen_attn if "window_size" in signature(varlen_attn).parameters else None


@lru_cache(maxsize=4)  # layers of the same kind share the function
def describe_window(
    function: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor], local: int | None, longest: int
) -> tuple[int, int] | None:
    """Returns a causal mask's window per query (keys before, keys after; -1: all), or None if it is not a window.

    ``function``: mask function of (batch, head, query, key) positions; ``local``: maximum number of visible keys;
    ``longest``: longest sequence in tokens.
    """
    if local is None or longest <= local:
        return -1, 0
    first = torch.zeros(1, 1, 1, 1, dtype=torch.long)
    key = torch.arange(longest)[None, None, None]
    query = torch.tensor([local - 1, local, (local + longest) // 2, longest - 1])[None, None, :, None]
    plain = (key <= query) & (key > query - local)
    try:
        seen = function(first, first, query, key)
    except RuntimeError:  # the function uses values on another device
        return None
    return (local - 1, 0) if torch.equal(seen.expand_as(plain), plain) else None


def sequence_boundaries(segments: Int[Tensor, "segments 4"], device: torch.device = HOST) -> dict[str, Tensor]:
    """Returns the sequence boundaries of a row as transformers' keyword arguments; empty if a prefix is shared.

    Needed by layers that carry state along the row (convolutions, linear attention).
    """
    lines = segments[segments[:, 1] > 0]
    if bool((lines[:, 3] > 0).any()):
        return {}
    counts = lines[torch.argsort(lines[:, 0]), 1]
    ends = functional.pad(counts.cumsum(0), (1, 0)).to(torch.int32)
    numbers = torch.arange(len(counts), dtype=torch.int32).repeat_interleave(counts)[None]
    told = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "seq_idx": numbers}
    return {name: each.to(device, non_blocking=True) for name, each in told.items()}


BucketAttention = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""Function from (bucket index, queries [n H q d], keys, values [n KV k d]) to the attention output [n H q d]."""


@dataclass(frozen=True)
class _Segment:
    row: int
    start: int
    count: int
    shared: int

    @property
    def num_visible(self) -> int:
        return self.shared + self.count


def _group_by_size(segments: Sequence[_Segment]) -> list[list[_Segment]]:
    """Groups segments of similar size; segments with and without a prefix are kept apart."""
    groups: list[list[_Segment]] = []
    for prefixed in (False, True):
        group: list[_Segment] = []
        for segment in sorted(
            (s for s in segments if (s.shared > 0) == prefixed), key=lambda s: (-s.num_visible, -s.count)
        ):
            together = [*group, segment]
            whole = len(together) * max(s.count for s in together) * together[0].num_visible
            needed = sum(s.count * s.num_visible for s in together)
            if group and whole > WASTE * needed and whole - needed > SMALL:
                groups.append(group)
                together = [segment]
            group = together
        if group:
            groups.append(group)
    return groups


def _make_bucket(members: Sequence[_Segment], branches: Int[Tensor, "n T"]) -> tuple[Bucket, Bool[Tensor, "m q"]]:
    """Builds a bucket from its members, and a mask that is false on padding queries."""
    start, count, shared = torch.tensor([[m.start, m.count, m.shared] for m in members]).t()[:, :, None]
    step = torch.arange(max(m.count for m in members))[None]
    inner = torch.minimum(step, count - 1)
    place = torch.arange(max(m.num_visible for m in members))[None]
    bucket = Bucket(
        queries=start + inner,
        keys=branches[[m.row for m in members], : place.shape[1]],
        query_at=shared + inner,
        key_at=torch.where(place < shared + count, place, FAR),
        shared=(min(m.shared for m in members), max(m.shared for m in members)),
    )
    return bucket, step < count


AnyRule = TypeVar("AnyRule")


def check_whole_mask(rule: AnyRule, index: object) -> AnyRule:
    """Returns ``rule`` if ``index`` selects the whole mask; raises ``UserError`` if it selects a part."""
    parts = index if isinstance(index, tuple) else (index,)
    if any(not isinstance(part, slice) or part.start or part.stop is not None or part.step for part in parts):
        raise UserError("its own code slices the mask, as sparse attention does to select keys")
    return rule


class MaskArguments(TypedDict, total=False):
    """Arguments of transformers' mask functions that are used here."""

    batch_size: Required[int]
    q_length: Required[int]
    kv_length: Required[int]
    mask_function: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    local_size: int | None
    allow_is_causal_skip: bool
    use_vmap: bool


class SegmentMask:
    """Mask of a layer as described by transformers; converted to a tensor only if needed, and cached.

    Stands in for a mask tensor in transformers. Built once per forward and layer type.
    """

    def __init__(self, **described: Unpack[MaskArguments]) -> None:
        self.described = described
        self._whole: dict[bool, Tensor | None] = {}
        self._masks: dict[tuple[int, torch.dtype], Tensor] = {}
        self._window: tuple[tuple[int, int] | None] | None = None

    def __getitem__(self, index: object) -> "SegmentMask":
        """Returns self for models that slice the whole mask; raises ``UserError`` for a partial slice."""
        return check_whole_mask(self, index)

    def full_mask(self, skip: bool) -> Tensor | None:
        """Returns the mask of the whole batch, or None if it is causal and ``skip`` is set."""
        if skip not in self._whole:
            allowed = self.described.get("allow_is_causal_skip", True) and skip
            described: MaskArguments = {**self.described, "allow_is_causal_skip": allowed}
            self._whole[skip] = sdpa_mask(**described)
        return self._whole[skip]

    def is_causal(self, longest: int) -> bool:
        """Returns whether the mask is plain causal for sequences of at most ``longest`` tokens."""
        local = self.described.get("local_size")
        return bool(self.described.get("allow_is_causal_skip", True)) and (local is None or longest <= local)

    def window(self, longest: int) -> tuple[int, int] | None:
        """Returns the mask as a window (cached) for sequences of at most ``longest`` tokens; None if it is not one."""
        if self._window is None:
            told = self.described
            plain = told.get("allow_is_causal_skip", True) and not told.get("use_vmap", False)
            self._window = (describe_window(told["mask_function"], told.get("local_size"), longest) if plain else None,)
        return self._window[0]

    def bucket_mask(self, plan: SegmentPlan, index: int, dtype: torch.dtype, *, skip: bool) -> Tensor | None:
        """Returns a bucket's additive mask [n 1 q k] (0 or -inf) in ``dtype``; None if causal and ``skip`` is set.

        Evaluated at positions within a branch. Raises ``UserError`` if the mask is not a plain function of positions.
        """
        if self.described.get("use_vmap", False):
            raise UserError("its mask is not a plain function of positions")
        bucket = plan.buckets[index]
        if skip and not bucket.has_prefix and self.is_causal(bucket.keys.shape[1]):
            return None
        if (index, dtype) not in self._masks:
            query, key = bucket.query_at[:, None, :, None], bucket.key_at[:, None, None, :]
            if self.is_causal(bucket.keys.shape[1]):
                allowed = key <= query
            else:
                first = torch.zeros(1, 1, 1, 1, dtype=torch.long, device=query.device)
                allowed = self.described["mask_function"](first, first, query, key) & (key < FAR)
            none = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
            made = none.masked_fill_(~allowed, float("-inf"))
            self._masks[index, dtype] = made.expand(-1, 1, query.shape[2], key.shape[3])
        return self._masks[index, dtype]


def enable_segment_attention(model: PreTrainedModel) -> None:
    """Makes the model's attention follow the plan passed to each forward, until ``restore_attention`` is called.

    Not a context manager, because a backward that recomputes activations would run after it exits. Raises ``UserError``
    for a model whose attention cannot be replaced.
    """
    backbone = backbone_of(model)
    before = backbone.config._attn_implementation
    if before in NAMES.values():
        return
    if before not in NAMES:
        raise UserError(f"its attention implementation is {before!r}, expected {' or '.join(NAMES)}")
    if not backbone._can_set_attn_implementation():
        raise UserError("its attention does not go through transformers' AttentionInterface")
    backbone.set_attn_implementation(NAMES[before])


def restore_attention(model: PreTrainedModel) -> None:
    """Restores the attention that the model had before ``enable_segment_attention``."""
    backbone = backbone_of(model)
    for before, name in NAMES.items():
        if backbone.config._attn_implementation == name:
            backbone.set_attn_implementation(before)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: SegmentMask | Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    segment_plan: SegmentPlan | None = None,
    fused: bool = True,
    **more: object,
) -> tuple[Tensor, None]:
    """Computes attention [batch T H d], following the plan if the call has one."""
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    if segment_plan is not None:
        if not isinstance(attention_mask, SegmentMask) or position_bias is not None or key.shape[2] != query.shape[2]:
            raise UserError("it builds its own mask, adds position biases or uses a key-value cache")
        if softcap is None and s_aux is None and not dropout:
            at_once = segment_plan.attend_in_one_call(query, key, value, scale, attention_mask.window)
            if at_once is not None:
                return at_once, None
    core = _SoftmaxAttention(scale, dropout, softcap, s_aux, fused)
    return _outside(module, query, key, value, attention_mask, core, position_bias, segment_plan, **more), None


def _attend_by_parts(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: SegmentMask | Tensor | None,
    core: "_SoftmaxAttention",
    position_bias: Tensor | None,
    plan: SegmentPlan | None,
    **more: object,
) -> Tensor:
    """Computes attention bucket by bucket, or directly for a call without a plan."""
    fused = (core.fused or plan is not None) and core.softcap is None and core.sinks is None
    core = replace(core, fused=fused)
    if plan is None:
        whole = mask.full_mask(fused) if isinstance(mask, SegmentMask) else mask
        if not fused and position_bias is None:
            return core(query, key, value, whole).transpose(1, 2).contiguous()
        rest = {"position_bias": position_bias, "softcap": core.softcap, **more}
        return _WITHOUT_PLAN(module, query, key, value, whole, core.dropout, core.scale, **rest)[0]
    assert isinstance(mask, SegmentMask)
    rule = mask

    def attend_bucket(index: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return core(queries, keys, values, rule.bucket_mask(plan, index, queries.dtype, skip=core.fused))

    return plan.attend(query, key, value, attend_bucket)


def fused_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, dropout: float = 0.0
) -> Tensor:
    """Computes attention [n H q d] with torch's fused kernel; a mask of None means causal."""
    grouped = key.shape[1] != query.shape[1]
    if grouped and mask is not None and query.device.type != "cpu":
        # Grouped heads with a mask have no fused kernel on a GPU.
        times = query.shape[1] // key.shape[1]
        key, value, grouped = repeat_kv(key, times), repeat_kv(value, times), False
    return functional.scaled_dot_product_attention(
        query, key, value, mask, dropout, is_causal=mask is None, scale=scale, enable_gqa=grouped
    )


def softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Computes the softmax of scores [n H q k] over the keys; ``sinks`` [H] add a score that is then dropped."""
    if sinks is None:
        return torch.softmax(scores, -1)
    beside = sinks.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:3], 1)
    return torch.softmax(torch.cat((scores, beside), -1), -1)[..., :-1]


@dataclass(frozen=True)
class _SoftmaxAttention:
    """Softmax attention [n H q d] of one call; a mask of None means causal."""

    scale: float
    dropout: float
    softcap: float | None
    sinks: Tensor | None
    fused: bool

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        if self.fused:
            return fused_attention(query, key, value, mask, self.scale, self.dropout)
        count, heads, width = query.shape[0], query.shape[1], query.shape[2]
        groups, seen = key.shape[1], key.shape[2]
        grouped = query.reshape(count, groups, heads // groups * width, query.shape[3])
        scores = (grouped @ key.transpose(2, 3)).view(count, heads, width, seen) * self.scale
        if self.softcap is not None:
            scores = torch.tanh(scores / self.softcap) * self.softcap
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        if mask is not None:
            # The smallest number instead of -inf: fully masked rows of left padding must not become NaN.
            least = torch.finfo(scores.dtype).min
            scores = scores.masked_fill(~mask, least) if mask.dtype == torch.bool else scores + mask
        weights = functional.dropout(softmax(scores, self.sinks).to(value.dtype), self.dropout)
        return (weights.view(count, groups, -1, seen) @ value).view(count, heads, width, value.shape[3])


def exclude_buckets_from_compile() -> None:
    """Makes ``torch.compile`` trace single-call attention but not bucketed attention, whose shapes vary."""
    import torch.compiler

    global _outside
    _outside = torch.compiler.disable(_attend_by_parts)  # type: ignore[no-untyped-call]


def prepare_compiled_attention(arguments: Iterable[object]) -> None:
    """Precomputes the row data for single-call attention, so that a graph sees only tensors and plain numbers."""
    told = list(arguments)
    for plan in told:
        if isinstance(plan, SegmentPlan) and (varlen := plan.varlen) is not None:
            for rule in told:
                if isinstance(rule, SegmentMask):
                    rule.window(varlen.longest[1])


_outside: Callable[..., Tensor] = _attend_by_parts
_FUNCTIONS: dict[str, _Attention] = {NAMES["sdpa"]: _attend, NAMES["eager"]: partial(_attend, fused=False)}
_register: Callable[[str, _Attention], None] = AttentionInterface.register
for _name, _function in _FUNCTIONS.items():
    _register(_name, _function)
    AttentionMaskInterface.register(_name, SegmentMask)
