"""Per-token log-probabilities and other statistics of the vocabulary distribution, computed in chunks of tokens.

No tensor of size tokens x vocabulary outlives its chunk: the forward keeps only the log normalisers, and the backward
recomputes the logits of a chunk and turns them into their gradient in place. Statistics are computed for part of a
chunk at a time, and chunks are half as long when two models are compared. Results are exact up to rounding;
log-probabilities, normalisers and the head's gradient are float32 (float64 for float64 models).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from attnpo.schema import UserError


@dataclass(frozen=True)
class LMHead:
    """Map from hidden states to logits: ``cap(scale * (hidden @ weight.T + bias))``.

    ``cap(x) = softcap * tanh(x / softcap)`` when ``softcap`` is set (Gemma-2), else the identity.
    """

    weight: Float[Tensor, "vocab d"]
    bias: Float[Tensor, " vocab"] | None = None
    scale: float = 1.0
    softcap: float | None = None

    @classmethod
    def from_linear(cls, module: nn.Linear, *, scale: float = 1.0, softcap: float | None = None) -> "LMHead":
        """Creates the head from a linear layer; sharded parameters are gathered once, here."""
        bias = None if module.bias is None else to_full_tensor(module.bias)
        return cls(weight=to_full_tensor(module.weight), bias=bias, scale=scale, softcap=softcap)

    def cast(self, dtype: torch.dtype) -> "LMHead":
        """Returns the head with its parameters in ``dtype``."""
        return replace(self, weight=self.weight.to(dtype), bias=None if self.bias is None else self.bias.to(dtype))


def to_full_tensor(tensor: Tensor) -> Tensor:
    """Gathers a sharded tensor (a collective: every rank must call it); returns other tensors unchanged."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


PARTS = 8  # parts per chunk; temporary tensors of the statistics then add at most about half a chunk's size


class Distributions(NamedTuple):
    """Log-probabilities and probabilities of a chunk [n vocab], and its ``labels`` [n].

    ``other``: log-probabilities of the second model.
    """

    logp: Tensor
    p: Tensor
    other: Tensor | None
    labels: Tensor


class Statistic(NamedTuple):
    """Per-token statistic and its gradient with respect to the (capped, scaled) logits."""

    value: Callable[[Distributions], Tensor]
    gradient: Callable[[Distributions, Tensor], Tensor]


def _other_logps(d: Distributions) -> Tensor:
    if d.other is None:
        raise UserError("a joint statistic compares two models: pass the second model as other=(hidden, head)")
    return d.other


def _contrast_logp(d: Distributions) -> Tensor:
    return torch.log_softmax(2 * d.logp - _other_logps(d), -1)


STATISTICS: Mapping[str, Statistic] = {
    "vocab:entropy": Statistic(
        value=lambda d: -(d.p * d.logp).sum(-1),
        gradient=lambda d, value: -d.p * (d.logp + value[:, None]),
    ),
    "vocab:collision": Statistic(
        value=lambda d: torch.logsumexp(2 * d.logp, -1),
        gradient=lambda d, value: 2 * ((2 * d.logp - value[:, None]).exp() - d.p),
    ),
    "vocab:top_prob": Statistic(
        value=lambda d: d.p.amax(-1),
        gradient=lambda d, value: (-value[:, None] * d.p).scatter_add_(1, d.p.argmax(-1, keepdim=True), value[:, None]),
    ),
    "joint:kl_ref_policy": Statistic(
        value=lambda d: (_other_logps(d).exp() * (_other_logps(d) - d.logp)).sum(-1),
        gradient=lambda d, value: d.p - _other_logps(d).exp(),
    ),
    "joint:kl_policy_ref": Statistic(
        value=lambda d: (d.p * (d.logp - _other_logps(d))).sum(-1),
        gradient=lambda d, value: d.p * (d.logp - _other_logps(d) - value[:, None]),
    ),
    "joint:contrast": Statistic(
        value=lambda d: _contrast_logp(d).gather(1, d.labels[:, None])[:, 0],
        gradient=lambda d, value: (
            _contrast_logp(d).exp_().mul_(-2).scatter_add_(1, d.labels[:, None], torch.full_like(value[:, None], 2.0))
        ),
    ),
}
"""Statistics of one distribution: entropy in nats, log of the sum of squared probabilities, largest probability.
Statistics of two distributions at the same position: KL(reference || policy) and KL(policy || reference) in nats; the
label's log-probability in nats under the contrast softmax(2 z - z'), where z and z' are the logits of the two
models."""


def token_statistics(
    hidden: Float[Tensor, "N d"],
    head: LMHead,
    labels: Int[Tensor, " N"],
    *,
    vocab: Sequence[str] = (),
    joint: Sequence[str] = (),
    other: tuple[Float[Tensor, "N e"], LMHead] | None = None,
    chunk: int = 1024,
) -> dict[str, Float[Tensor, " N"]]:
    """Computes statistics per token under the keys "logps", "vocab:<name>" and "joint:<name>", in one chunk loop.

    Gradients flow to ``hidden`` and the head, but not to the second model in ``other`` (hidden states and head).
    ``chunk`` is the number of tokens per chunk (halved for joint statistics); it affects only memory. Under autocast
    the projection runs in the autocast dtype. Raises ``UserError`` for joint statistics without ``other``.
    """
    names = ["logps", *(f"vocab:{name}" for name in vocab), *(f"joint:{name}" for name in joint)]
    statistics = [STATISTICS[name] for name in names[1:]]
    if chunk < 1:
        raise UserError(f"the chunk size of the vocabulary head must be at least one token, got {chunk}")
    first, second = (
        _LogitSettings.from_tensors(hidden, head),
        None if other is None or not joint else _LogitSettings.from_tensors(*other),
    )
    plan = _ChunkPlan(tuple(statistics), max(1, chunk // 2) if joint else chunk, first, second)
    beside = (None, None, None) if second is None or other is None else (other[0], other[1].weight, other[1].bias)
    detached = [None if tensor is None else tensor.detach() for tensor in beside]
    arguments = (hidden, head.weight, head.bias, labels, *detached, plan)
    stacked: Tensor = _ChunkedStatistics.apply(*arguments)  # type: ignore[no-untyped-call]
    return dict(zip(names, stacked.unbind(0), strict=True))


def statistics_from_logits(
    logits: Float[Tensor, "N vocab"],
    labels: Int[Tensor, " N"],
    *,
    vocab: Sequence[str] = (),
    joint: Sequence[str] = (),
    other: Float[Tensor, "N vocab"] | None = None,
) -> dict[str, Float[Tensor, " N"]]:
    """Computes the statistics of ``token_statistics`` from full logits with autograd, for heads that are not plain."""
    logp = torch.log_softmax(logits.to(_accumulation_dtype(logits.dtype)), -1)
    second = None if other is None else torch.log_softmax(other.detach().to(logp.dtype), -1)
    distributions = Distributions(logp, logp.exp(), second, labels)
    values = {"logps": logp.gather(1, labels[:, None])[:, 0]}
    for name in (*(f"vocab:{key}" for key in vocab), *(f"joint:{key}" for key in joint)):
        values[name] = STATISTICS[name].value(distributions)
    return values


def compute_logits(hidden: Float[Tensor, "N d"], head: LMHead) -> Float[Tensor, "N vocab"]:
    """Computes logits of a few positions in float32 (float64 for float64 models), with scale and soft-cap."""
    return _logits(hidden, head.cast(_compute_dtype(hidden, head.weight)))


def _accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _compute_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    device = hidden.device.type
    if torch.is_autocast_enabled(device) and hidden.dtype != torch.float64:
        return torch.get_autocast_dtype(device)
    return torch.promote_types(hidden.dtype, weight.dtype)


class _LogitSettings(NamedTuple):
    """Logit settings of one model, without its tensors. ``compute``: dtype of the matrix product."""

    scale: float
    softcap: float | None
    compute: torch.dtype

    @classmethod
    def from_tensors(cls, hidden: Tensor, head: LMHead) -> "_LogitSettings":
        return cls(head.scale, head.softcap, _compute_dtype(hidden, head.weight))

    def head(self, weight: Tensor, bias: Tensor | None) -> LMHead:
        """Returns the head in the compute dtype, cast once for all chunks."""
        return LMHead(weight, bias, self.scale, self.softcap).cast(self.compute)


@dataclass(frozen=True)
class _ChunkPlan:
    statistics: tuple[Statistic, ...]
    chunk: int
    model: _LogitSettings
    second: _LogitSettings | None

    @property
    def dtype(self) -> torch.dtype:
        """Returns the dtype of log-probabilities, normalisers and the head's gradient."""
        return _accumulation_dtype(self.model.compute)

    @property
    def part(self) -> int:
        """Returns the number of tokens processed at once: the whole chunk if only log-probabilities are needed."""
        more = bool(self.statistics) or self.model.softcap is not None
        return -(-self.chunk // PARTS) if more else self.chunk

    def second_logits(
        self, hidden: Tensor | None, weight: Tensor | None, bias: Tensor | None
    ) -> Callable[[slice], Tensor | None]:
        """Returns a function that computes the second model's logits for a token slice, or None if there is none."""
        if self.second is None or hidden is None or weight is None:
            return lambda rows: None
        head = self.second.head(weight, bias)
        return lambda rows: _logits(hidden[rows], head).to(self.dtype)


def _logits(hidden: Tensor, head: LMHead) -> Tensor:
    """Computes the final logits of a chunk in the accumulation dtype; only this function multiplies by the head."""
    dtype = head.weight.dtype
    logits = nn.functional.linear(hidden.to(dtype), head.weight, head.bias).to(_accumulation_dtype(dtype))
    if head.scale != 1.0:
        logits.mul_(head.scale)
    if head.softcap is not None:
        logits.div_(head.softcap).tanh_()
        # Under autograd (``compute_logits``) tanh saves its result, which must not be overwritten.
        logits = logits * head.softcap if logits.requires_grad else logits.mul_(head.softcap)
    return logits


def _normaliser(logits: Tensor) -> Tensor:
    """Returns the log-sum-exp per row [n 1]; overwrites ``logits``."""
    top = logits.amax(-1, keepdim=True)
    return logits.sub_(top).exp_().sum(-1, keepdim=True).log_().add_(top)


def _slices(count: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


class _ChunkedStatistics(torch.autograd.Function):
    """Autograd function for statistics [K N]; row 0 is the label's log-probability. Saves no logits."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        other_hidden: Tensor | None,
        other_weight: Tensor | None,
        other_bias: Tensor | None,
        plan: _ChunkPlan,
    ) -> Tensor:
        count = hidden.shape[0]
        values = torch.zeros(1 + len(plan.statistics), count, dtype=plan.dtype, device=hidden.device)
        normalisers = torch.zeros(1 if other_hidden is None else 2, count, 1, dtype=plan.dtype, device=hidden.device)
        with torch.autocast(hidden.device.type, enabled=False):
            head, second = plan.model.head(weight, bias), plan.second_logits(other_hidden, other_weight, other_bias)
            for rows in _slices(count, plan.chunk):
                logits, other = _logits(hidden[rows], head), second(rows)
                values[0, rows] = logits.gather(1, labels[rows, None])[:, 0]
                _fill_statistics(logits, other, labels[rows], values[1:, rows], normalisers[:, rows], plan)
                del logits, other  # free before the next chunk
            values[0] -= normalisers[0, :, 0]
        ctx.plan = plan
        ctx.save_for_backward(hidden, weight, bias, labels, other_hidden, other_weight, other_bias, normalisers, values)
        return values

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (coefficients,) = gradients
        hidden, weight, bias, labels, other_hidden, other_weight, other_bias, normalisers, values = ctx.saved_tensors
        plan: _ChunkPlan = ctx.plan
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        d_hidden = torch.empty_like(hidden) if need_hidden else None
        d_weight = torch.zeros(weight.shape, dtype=plan.dtype, device=weight.device) if need_weight else None
        d_bias = torch.zeros(bias.shape, dtype=plan.dtype, device=bias.device) if need_bias else None
        with torch.autocast(hidden.device.type, enabled=False):
            head, second = plan.model.head(weight, bias), plan.second_logits(other_hidden, other_weight, other_bias)
            for rows in _slices(hidden.shape[0], plan.chunk):
                states = hidden[rows].to(plan.model.compute)
                logits, other = _logits(states, head), second(rows)
                _fill_logit_gradient(
                    logits, other, labels[rows], coefficients[:, rows], values[:, rows], normalisers[:, rows], plan
                )
                del other
                grad = (logits if head.scale == 1.0 else logits.mul_(head.scale)).to(plan.model.compute)
                del logits
                if d_hidden is not None:
                    d_hidden[rows] = (grad @ head.weight).to(hidden.dtype)
                if d_weight is not None and d_weight.dtype == grad.dtype:
                    d_weight.addmm_(grad.T, states)
                elif d_weight is not None:
                    d_weight += grad.T @ states
                if d_bias is not None:
                    d_bias += grad.sum(0, dtype=plan.dtype)
                del grad
        cast_weight = None if d_weight is None else d_weight.to(weight.dtype)
        cast_bias = None if d_bias is None else d_bias.to(bias.dtype)
        return d_hidden, cast_weight, cast_bias, None, None, None, None, None


def _fill_statistics(
    logits: Tensor, other: Tensor | None, labels: Tensor, values: Tensor, normalisers: Tensor, plan: _ChunkPlan
) -> None:
    """Fills in the statistics and normalisers of one chunk, part by part. Overwrites the logits of both models."""
    if not plan.statistics:
        normalisers[0] = _normaliser(logits)
        return
    for part in _slices(len(logits), plan.part):
        second = None if other is None else other[part]
        distributions = _distributions(logits[part], second, labels[part], normalisers[:, part], True)
        for index, statistic in enumerate(plan.statistics):
            values[index, part] = statistic.value(distributions)


def _distributions(
    logits: Tensor, other: Tensor | None, labels: Tensor, normalisers: Tensor, unknown: bool
) -> Distributions:
    """Turns logits into distributions in place; fills in the normalisers first if they are ``unknown``."""
    for index, mine in enumerate((logits,) if other is None else (logits, other)):
        if unknown:
            normalisers[index] = _normaliser(mine.clone())
        mine.sub_(normalisers[index])
    return Distributions(logits, logits.exp(), other, labels)


def _fill_logit_gradient(
    logits: Tensor,
    other: Tensor | None,
    labels: Tensor,
    coefficients: Tensor,
    values: Tensor,
    normalisers: Tensor,
    plan: _ChunkPlan,
) -> None:
    """Replaces a chunk's final logits with the gradient before cap and scale; also overwrites ``other``, if any."""
    for part in _slices(len(logits), plan.part):
        mine, softcap = logits[part], plan.model.softcap
        slope = None if softcap is None else mine.div(softcap).square_().neg_().add_(1)  # 1 - (y / cap)^2
        first, labels_of = coefficients[0, part, None], labels[part, None]
        if plan.statistics:
            second = None if other is None else other[part]
            d = _distributions(mine, second, labels[part], normalisers[:, part], False)
            gradient = (d.p * -first).scatter_add_(1, labels_of, first)
            for index, statistic in enumerate(plan.statistics, start=1):
                gradient += statistic.gradient(d, values[index, part]).mul_(coefficients[index, part, None])
            mine.copy_(gradient)
        else:
            mine.sub_(normalisers[0, part]).exp_().mul_(-first).scatter_add_(1, labels_of, first)
        if slope is not None:
            mine.mul_(slope)
