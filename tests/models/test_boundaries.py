"""Hybrids in packed rows: kernels are told where sequences begin; their doubles cut the library's torch code."""

import inspect
import logging
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from attnpo.models.layouts import packed_layout, padded_layout
from attnpo.models.packed_attention import sequence_boundaries
from attnpo.models.scored import ScoredLM
from attnpo.models.trial import select_layout
from tests.conformance.family_models import tiny_model

ROWS = [([5, 9, 3], [8, 2, 4, 7]), ([11, 2], [6]), ([4], [12, 13, 3]), ([7, 7, 9, 10], [3, 5])]
# The library's functions with a state along the row: the axis of tokens, and the keyword with which they are cut.
KERNELS = {
    "causal_conv1d_fn": (2, "seq_idx"),
    "torch_chunk_gated_delta_rule": (1, "cu_seqlens"),
    "mamba2_chunk_scan": (1, "seq_idx"),
    "mamba2_split_conv1d_scan_combined": (1, "seq_idx"),
}


def each_alone(plain: Callable[..., Any], axis: int, keyword: str) -> Callable[..., Any]:
    """``plain`` for each sequence of a row by itself, as the kernels of fla, causal_conv1d and mamba_ssm compute it."""

    def kernel(*given: Any, seq_idx: Tensor | None = None, cu_seqlens: Tensor | None = None, **named: Any) -> Any:
        told = {"seq_idx": seq_idx, "cu_seqlens": cu_seqlens}[keyword]
        if told is None:
            return plain(*given, **named)
        assert told.dtype == torch.int32
        counts = told.diff() if keyword == "cu_seqlens" else torch.bincount(told[0])
        stretches = torch.arange(int(counts.sum())).split(counts.tolist())

        def cut(value: Any, places: Tensor) -> Any:
            tokens = isinstance(value, Tensor) and value.dim() > 2 and value.shape[axis] == counts.sum()
            return value.index_select(axis, places) if tokens else value

        parts = [
            plain(*(cut(each, places) for each in given), **{name: cut(each, places) for name, each in named.items()})
            for places in stretches
        ]
        if isinstance(parts[0], tuple):
            return torch.cat([part[0] for part in parts], axis), None
        return None if parts[0] is None else torch.cat(parts, axis)

    return kernel


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Callable[..., PreTrainedModel]:
    """A function (type, keep) to its tiny model, whose functions with a state keep sequences apart where ``keep``."""

    def made(kind: str, keep: Callable[[PreTrainedModel], bool] = lambda model: True) -> PreTrainedModel:
        model = tiny_model(kind)
        module = sys.modules[type(model).__module__]
        for name in KERNELS.keys() & vars(module).keys():
            plain = inspect.unwrap(getattr(module, name))
            apart = each_alone(plain, *KERNELS[name])

            def either(*given: Any, plain: Any = plain, apart: Any = apart, **named: Any) -> Any:
                if keep(model):
                    return apart(*given, **named)
                return plain(*given, **{key: named[key] for key in named.keys() - {"seq_idx", "cu_seqlens"}})

            monkeypatch.setattr(module, name, either)
        return model

    return made


def test_a_row_tells_where_its_sequences_begin() -> None:
    told = sequence_boundaries(torch.tensor([[5, 2, 0, 0], [0, 5, 0, 0], [7, 0, 0, 0], [7, 1, 0, 0]]))
    assert told["cu_seq_lens_q"].tolist() == told["cu_seq_lens_k"].tolist() == [0, 5, 7, 8]
    assert told["seq_idx"].tolist() == [[0, 0, 0, 0, 0, 1, 1, 2]] and told["seq_idx"].dtype == torch.int32
    assert sequence_boundaries(torch.tensor([[0, 5, 0, 0], [5, 2, 0, 2]])) == {}, (
        "what follows a shared prefix begins nowhere"
    )


@pytest.mark.parametrize("kind", ["qwen3_next", "bamba", "lfm2_moe"])
def test_kernels_that_keep_sequences_apart_take_packed_rows(
    kind: str, kernels: Callable[..., PreTrainedModel], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "attnpo"):
        assert select_layout("auto", [ScoredLM(tiny_model(kind))]) is padded_layout
    shared, alone = [record.getMessage() for record in caplog.records if record.name.startswith("attnpo")]
    assert "layout shared_prefix: " in shared and "produces different results" in shared
    assert "`causal_conv1d_fn` can't keep packed sequences apart without `causal_conv1d`" in alone

    model = kernels(kind)
    policy = ScoredLM(model)
    assert select_layout("auto", [policy]) is packed_layout
    found = []
    for layout in (padded_layout, packed_layout):
        model.train()
        logps = policy(*layout(ROWS, 0)).logps
        gradients = torch.autograd.grad(
            (logps * torch.tensor([1.0, 0.5, -0.7, -1.2])[:, None]).sum(),
            list(model.parameters()),
            allow_unused=True,
            materialize_grads=True,
        )
        found.append((logps.detach(), gradients))
    torch.testing.assert_close(found[1][0], found[0][0], rtol=0, atol=2e-4)
    for ours, theirs in zip(found[1][1], found[0][1], strict=True):
        assert float((ours - theirs).abs().max()) <= 2e-3 * max(1e-3, float(theirs.abs().max()))


def test_kernels_of_training_are_tried_too(
    kernels: Callable[..., PreTrainedModel], caplog: pytest.LogCaptureFixture
) -> None:
    model = kernels("bamba", keep=lambda model: not model.training)
    with caplog.at_level(logging.INFO, "attnpo"):
        assert select_layout("packed", [ScoredLM(model)]) is padded_layout
    assert "BambaForCausalLM in training mode produces different results" in caplog.text and not model.training
