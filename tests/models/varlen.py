"""A plain reference of torch's attention over sequences of any lengths, which does not exist on a CPU."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from inspect import signature, unwrap
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface

from attnpo.models import packed_attention


def attend_plainly(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    num_splits: int | None = None,
) -> Tensor:
    """Attends sequence by sequence, in the precision of its inputs, as ``torch.nn.attention.varlen.varlen_attn``."""
    assert query.dtype == key.dtype == value.dtype and cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    assert query.shape[2] == key.shape[2] == value.shape[2] and query.shape[2] % 8 == 0 and query.shape[2] <= 256
    assert all(part.is_contiguous() for part in (query, key, value, cu_seq_q, cu_seq_k))
    assert isinstance(max_q, int) and isinstance(max_k, int)
    assert max_q == int(cu_seq_q.diff().max()) and max_k == int(cu_seq_k.diff().max())
    assert len(query) == int(cu_seq_q[-1]) and len(key) == len(value) == int(cu_seq_k[-1])
    times = query.shape[1] // key.shape[1]
    assert times == 1 or enable_gqa
    before, after = window_size
    outputs = []
    for queries, keys, values in zip(
        query.tensor_split(cu_seq_q[1:-1].tolist()),
        key.tensor_split(cu_seq_k[1:-1].tolist()),
        value.tensor_split(cu_seq_k[1:-1].tolist()),
        strict=True,
    ):
        apart = len(keys) - len(queries)  # the last query stands at the last key
        place = torch.arange(len(queries), device=query.device)[:, None] + apart
        at = torch.arange(len(keys), device=query.device)[None]
        seen = torch.ones(len(queries), len(keys), dtype=torch.bool, device=query.device)
        seen &= (at >= place - before) if before >= 0 else True
        seen &= (at <= place + after) if after >= 0 else True
        scores = torch.einsum("qhd,khd->hqk", queries, keys.repeat_interleave(times, 1))
        scores = scores * (query.shape[2] ** -0.5 if scale is None else scale)
        weights = torch.softmax(scores.masked_fill(~seen, -torch.inf), -1)
        outputs.append(torch.einsum("hqk,khd->qhd", weights, values.repeat_interleave(times, 1)))
    return torch.cat(outputs)


def put_operator(monkeypatch: pytest.MonkeyPatch, *dtypes: torch.dtype) -> None:
    """Puts torch's own operator in the kernel's place, which compilers know, with a plain one behind it on a CPU."""
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    if "window_size" not in signature(varlen.varlen_attn).parameters:
        pytest.skip("an earlier release's operator knows no windows")
    varlen._varlen_attn.register_kernel("cpu")(_forward)
    varlen._varlen_attn_backward.register_kernel("cpu")(_backward)
    monkeypatch.setattr(packed_attention, "find_kernel", lambda device: varlen.varlen_attn, raising=False)
    monkeypatch.setattr(packed_attention, "HALF", (torch.float16, torch.bfloat16, *dtypes), raising=False)
    # Compilers cannot trace the checks of shapes that tests put around the package's functions.
    for owner, name in ((packed_attention.SegmentPlan, "attend_in_one_call"), (packed_attention.SegmentMask, "window")):
        monkeypatch.setattr(owner, name, unwrap(getattr(owner, name, None) or len), raising=False)
    mapping = AttentionInterface._global_mapping
    monkeypatch.setitem(mapping, packed_attention.NAMES["sdpa"], unwrap(packed_attention._attend))


def _forward(query: Tensor, key: Tensor, value: Tensor, *more: Any, **named: Any) -> tuple[Tensor, Tensor, Tensor]:
    ends, (_, scale, window, gqa) = more[:4], more[4:8]
    output = attend_plainly(query, key, value, *ends, scale=scale, window_size=tuple(window), enable_gqa=gqa)
    return output, query.new_zeros(query.shape[1::-1], dtype=torch.float), torch.zeros(2, dtype=torch.uint64)


def _backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *more: Any) -> tuple[Tensor, ...]:
    """Differentiates in a thread of its own: inside an operator autograd is off."""
    ends, (scale, window) = more[2:6], more[8:10]

    def differentiate() -> tuple[Tensor, ...]:
        rows = [part.detach().requires_grad_() for part in (query, key, value)]
        output = attend_plainly(*rows, *ends, scale=scale, window_size=tuple(window), enable_gqa=True)
        return torch.autograd.grad(output, rows, grad)

    with ThreadPoolExecutor(1) as threads:
        return threads.submit(differentiate).result()


@dataclass
class Calls:
    """Kernel's place on a CPU, with the options of each call; ``latest``: it knows grouped heads and splits."""

    latest: bool = True
    told: list[dict[str, object]] = field(default_factory=list)

    def put(self, monkeypatch: pytest.MonkeyPatch, *dtypes: torch.dtype) -> "Calls":
        """Puts the reference in the kernel's place, for these dtypes too."""
        monkeypatch.setattr(packed_attention, "find_kernel", lambda device: self.kernel())
        monkeypatch.setattr(packed_attention, "HALF", (*packed_attention.HALF, *dtypes))
        return self

    def kernel(self) -> Callable[..., Tensor]:
        """Returns the reference with the signature of the release that knows these arguments."""

        def first(
            query: Tensor,
            key: Tensor,
            value: Tensor,
            cu_seq_q: Tensor,
            cu_seq_k: Tensor,
            max_q: int,
            max_k: int,
            *,
            scale: float | None = None,
            window_size: tuple[int, int] = (-1, -1),
        ) -> Tensor:
            self.told.append({"scale": scale, "window_size": window_size})
            ends = (cu_seq_q, cu_seq_k, max_q, max_k)
            return attend_plainly(query, key, value, *ends, scale=scale, window_size=window_size)

        def latest(*rows: Tensor, enable_gqa: bool = False, num_splits: int | None = None, **more: object) -> Tensor:
            self.told.append({**more, "enable_gqa": enable_gqa, "num_splits": num_splits})
            return attend_plainly(*rows, enable_gqa=enable_gqa, num_splits=num_splits, **more)  # type: ignore[arg-type]

        return latest if self.latest else first
