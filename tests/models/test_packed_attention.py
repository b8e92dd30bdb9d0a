"""Every layout against padded rows of the whole model: log-probabilities and gradients in float64."""

import sys
from collections.abc import Callable
from contextlib import nullcontext
from importlib import import_module
from threading import Thread
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from attnpo.data.collate import collate
from attnpo.judge.causal_judge import CausalJudge
from attnpo.models import packed_attention
from attnpo.models.layouts import LAYOUTS, Sequences, packed_layout, padded_layout, shared_prefix_layout
from attnpo.models.packed_attention import (
    SegmentMask,
    SegmentPlan,
    describe_window,
    enable_segment_attention,
    find_kernel,
    restore_attention,
)
from attnpo.models.scored import ScoredLM
from attnpo.objectives.twdpo import TwDPO
from attnpo.schema import UserError
from attnpo.training.module import PreferenceModule
from attnpo.training.optimizer import Optimizer
from attnpo.training.pair_values import pair_values, tokens_per_pair
from tests.models.classes import SHAPE
from tests.models.test_prompt_rows import judged, make_chunked
from tests.models.varlen import Calls, attend_plainly
from tests.training.tiny import make_examples

Build = Callable[..., PreTrainedModel]
NORMS = {"llama": "LlamaRMSNorm", "mistral": "MistralRMSNorm", "qwen3": "Qwen3RMSNorm", "gemma2": "Gemma2RMSNorm"}


def _norm(self: nn.Module, hidden: Tensor) -> Tensor:
    scale = 1.0 + self.weight if hasattr(self, "eps") else self.weight
    epsilon = self.eps if hasattr(self, "eps") else self.variance_epsilon
    return scale * (hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + epsilon))


@pytest.fixture
def exact(tiny: Build, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], PreTrainedModel]:
    """Float64 models whose norm and plain softmax stay in float64 (the library's own drop to float32 even there)."""
    softmax = functional.softmax
    monkeypatch.setattr(functional, "softmax", lambda x, dim, dtype=None: softmax(x, dim))
    for family, name in NORMS.items():
        module = import_module(f"transformers.models.{family}.modeling_{family}")
        monkeypatch.setattr(getattr(module, name), "forward", _norm)
    return lambda family: tiny(family).double()


def rows(seed: int = 0) -> Sequences:
    """Three pairs of 2P rows, ragged, longer than any tiny model's window; the last has no rejected token."""
    generator = torch.Generator().manual_seed(seed)

    def draw(count: int) -> list[int]:
        return torch.randint(3, 97, (count,), generator=generator).tolist()

    prompts = [draw(9), draw(3), draw(12)]
    return [
        *zip(prompts, [draw(14), draw(5), draw(1)], strict=True),
        *zip(prompts, [draw(4), draw(17), []], strict=True),
    ]


def loss_and_gradients(model: PreTrainedModel, logps: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """A DPO-like loss of the pairs' sums, with a weight per token."""
    weights = torch.linspace(0.2, 1.7, logps.shape[1], dtype=logps.dtype)
    sums = (logps * weights).sum(1)
    pairs = len(sums) // 2
    loss = -functional.logsigmoid(0.05 * (sums[:pairs] - sums[pairs:])).sum()
    model.zero_grad()
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def naive(model: PreTrainedModel) -> Tensor:
    """Log-probabilities of ``rows`` by log-softmax of all logits of the padded and masked batch."""
    inputs, ids, mask = padded_layout(rows(), 0)
    logits = model(input_ids=inputs.input_ids, attention_mask=inputs.attention_mask).logits
    every = torch.log_softmax(logits, -1).flatten(0, 1)[inputs.predict_index]
    return every.gather(2, ids[..., None])[..., 0] * mask


@pytest.mark.parametrize(("every", "chunk"), [(0, 1024), (2, 7)], ids=["kept", "every 2nd"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", NORMS)
def test_layouts_equal_the_naive_step(
    exact: Callable[[str], PreTrainedModel], family: str, layout: str, every: int, chunk: int
) -> None:
    """In every layout, with activations kept or computed again, the vocabulary in one chunk or in many."""
    model = exact(family)
    logps = naive(model)
    loss, gradients = loss_and_gradients(model, logps)
    assert max(float(g.abs().max()) for g in gradients.values()) > 1e-2, "the comparison must see real gradients"
    if every:
        model.activation_checkpointing_enable(every_n_layers=every)
        model.train()
    found = ScoredLM(model, chunk=chunk)(*LAYOUTS[layout](rows(), 0)).logps
    found_loss, found_gradients = loss_and_gradients(model, found)
    assert float((found - logps).detach().abs().max()) < 1e-10
    assert abs(float(found_loss - loss)) < 1e-12
    assert found_gradients.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert float((found_gradients[name] - gradient).abs().max()) < 1e-10, name


def test_single_precision_is_within_rounding(tiny: Build, family: str) -> None:
    model = tiny(family)
    # Of usual size: the fixture's peaked attention makes rounding itself larger than the bound.
    for name, parameter in model.named_parameters():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            parameter.data.div_(6.0)
    _, expected = loss_and_gradients(model, ScoredLM(model)(*padded_layout(rows(), 0)).logps)
    _, found = loss_and_gradients(model, ScoredLM(model)(*shared_prefix_layout(rows(), 0)).logps)
    norm = torch.nn.utils.get_total_norm(list(expected.values()))
    gap = torch.nn.utils.get_total_norm([found[name] - gradient for name, gradient in expected.items()])
    assert float(gap / norm) < 5e-6


def test_segments_that_do_not_cover_the_row_are_refused() -> None:
    for segments in ([[0, 3, 0, 0]], [[0, 3, 0, 0], [2, 3, 0, 0]], [[0, 3, 0, 0], [4, 1, 0, 0]]):
        with pytest.raises(ValueError, match="do not cover the row's 5 tokens exactly once"):
            SegmentPlan.from_segments(torch.tensor(segments), 5)


def test_a_window_reaches_into_the_prompt_by_positions() -> None:
    window = 3
    sizes: dict[str, int] = {"batch_size": 1, "q_length": 8, "kv_length": 8}
    rule = SegmentMask(**sizes, mask_function=lambda b, h, q, k: (k <= q) & (k > q - window), local_size=window)
    # A prompt of 4, two chosen tokens, two rejected ones: the rejected see back to the prompt, past the chosen.
    plan = SegmentPlan.from_segments(torch.tensor([[0, 6, 0, 0], [6, 2, 0, 4]]), 8)
    assert [bucket.has_prefix for bucket in plan.buckets] == [False, True]
    mask = rule.bucket_mask(plan, 1, torch.float64, skip=True)
    assert mask is not None
    assert plan.buckets[1].keys.tolist() == [[0, 1, 2, 3, 6, 7]]
    assert mask.dtype == torch.float64 and rule.bucket_mask(plan, 1, torch.float64, skip=True) is mask
    assert (mask == 0)[0, 0].int().tolist() == [[0, 0, 1, 1, 1, 0], [0, 0, 0, 1, 1, 1]]
    causal = SegmentMask(**sizes, mask_function=lambda b, h, q, k: k <= q, local_size=None)
    assert causal.bucket_mask(plan, 0, torch.float64, skip=True) is None, "a causal sequence needs no mask"


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gpt_oss"])
def test_other_forwards_are_as_before(tiny: Build, family: str) -> None:
    model = tiny(family)
    before = model.config._attn_implementation
    inputs = padded_layout(rows(), 0).inputs
    left = {"input_ids": inputs.input_ids.flip(1), "attention_mask": inputs.attention_mask.flip(1)}
    prompt = {"input_ids": inputs.input_ids[:1, :9], "max_new_tokens": 12, "do_sample": False}
    with torch.no_grad():
        right_before, left_before = model(input_ids=inputs.input_ids).logits, model(**left).logits
        written_before = model.generate(**prompt)
        enable_segment_attention(model)
        enable_segment_attention(model)
        assert model.config._attn_implementation != before
        assert "attnpo" not in str(model.config.to_dict()), "no name of ours may reach a saved folder"
        seen = left["attention_mask"].bool()
        assert torch.allclose(model(input_ids=inputs.input_ids).logits, right_before, atol=1e-5)
        assert torch.allclose(model(**left).logits[seen], left_before[seen], atol=1e-5)
        assert model(**left).logits.isfinite().all()
        assert torch.equal(model.generate(**prompt), written_before)
    restore_attention(model)
    assert model.config._attn_implementation == before


def test_another_attention_is_not_replaced(tiny: Build) -> None:
    model = tiny("llama")
    model.config._attn_implementation_internal = "flex_attention"
    with pytest.raises(UserError, match="attention implementation is 'flex_attention', expected sdpa or eager"):
        enable_segment_attention(model)


def test_threads_do_not_meet(tiny: Build) -> None:
    scored = ScoredLM(tiny("mistral"))
    laid = [layout(rows(seed), 0) for seed, layout in enumerate((packed_layout, shared_prefix_layout, padded_layout))]
    with torch.no_grad():
        expected = [scored(*one).logps for one in laid]
    found: dict[int, list[Tensor]] = {}

    def work(index: int) -> None:
        with torch.no_grad():
            found[index] = [scored(*laid[index]).logps for _ in range(5)]

    threads = [Thread(target=work, args=(index,)) for index in range(len(laid))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, one in enumerate(expected):
        assert all(torch.allclose(again, one, atol=1e-5) for again in found[index])


# ------------------------------------------------------------------------------------ one call a layer, as on a GPU


@pytest.mark.parametrize(
    ("every", "latest"), [(0, True), (2, False)], ids=["grouped heads, kept", "keys repeated, every 2nd"]
)
@pytest.mark.parametrize("layout", ["packed", "shared_prefix"])
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_one_call_a_layer_equals_padded_rows(
    exact: Callable[[str], PreTrainedModel],
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    layout: str,
    every: int,
    latest: bool,
) -> None:
    model = exact(family)
    logps = ScoredLM(model)(*padded_layout(rows(), 0)).logps
    loss, gradients = loss_and_gradients(model, logps)
    if every:
        model.activation_checkpointing_enable(every_n_layers=every)
        model.train()
    calls = Calls(latest).put(monkeypatch, torch.float64)
    found = ScoredLM(model)(*LAYOUTS[layout](rows(), 0)).logps
    assert len(calls.told) == 4
    found_loss, found_gradients = loss_and_gradients(model, found)
    assert len(calls.told) == 4 + every
    assert {call["window_size"] for call in calls.told} == {(6, 0) if family == "mistral" else (-1, 0)}
    assert not latest or all(call["enable_gqa"] and call["num_splits"] == 1 for call in calls.told)
    assert float((found - logps).detach().abs().max()) < 1e-10
    assert abs(float(found_loss - loss)) < 1e-12
    for name, gradient in gradients.items():
        assert float((found_gradients[name] - gradient).abs().max()) < 1e-10, name


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_a_judges_rows_take_one_call_a_layer(tiny: Build, monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    model, asked = tiny(family), {"layers": (1, 2, 3, 4), "rollout": True, "label_ids": (40, 41)}
    expected = [CausalJudge(model).read([prompt], **asked)[0] for prompt in judged()]  # type: ignore[arg-type]
    calls = Calls().put(monkeypatch, torch.float32)
    judge = CausalJudge(model)
    for one, found in zip(expected, judge.read(judged(), **asked), strict=True):  # type: ignore[arg-type]
        assert torch.allclose(found.rows, one.rows, rtol=0, atol=1e-5)
        assert found.rollout is not None and one.rollout is not None
        assert torch.allclose(found.rollout, one.rollout, rtol=0, atol=1e-5)
        assert found.verdict_token == one.verdict_token
    calls.told.clear()
    judge.read(judged(), **asked)  # type: ignore[arg-type]
    assert len(calls.told) == 3, "the last layer ends with its attention rows"


def untouched(tiny: Build, case: str) -> PreTrainedModel:
    """Makes a model none of whose layers the kernel may have."""
    if case == "chunks":
        return make_chunked(6, no_rope_layers=[1] * 4)
    if case == "dropout":
        return tiny("llama", attention_dropout=0.1).train()
    if case == "odd width":
        return AutoModelForCausalLM.from_config(LlamaConfig(**{**SHAPE, "head_dim": 12}))
    return tiny({"soft-caps": "gemma2", "sinks": "gpt_oss"}.get(case, "llama"))


@pytest.mark.parametrize("case", ["soft-caps", "sinks", "chunks", "dropout", "odd width", "float32"])
def test_other_attention_keeps_the_buckets(tiny: Build, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    model = untouched(tiny, case)
    calls = Calls().put(monkeypatch, *([] if case == "float32" else [torch.float32]))
    with torch.no_grad():
        assert ScoredLM(model)(*packed_layout(rows(), 0)).logps.isfinite().all()
    assert calls.told == []


def test_autocast_brings_queries_and_keys_to_the_kernels_dtype(tiny: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rotary positions leave float32 queries and keys beside values in half precision."""
    calls = Calls().put(monkeypatch)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        ScoredLM(tiny("llama"))(*packed_layout(rows(), 0))
    assert len(calls.told) == 4


def test_the_kernel_is_asked_for_by_device_and_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "torch.nn.attention.varlen"
    module, older = ModuleType(name), ModuleType(name)
    module.varlen_attn = attend_plainly  # type: ignore[attr-defined]
    older.varlen_attn = lambda query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False: query  # type: ignore[attr-defined]
    capability = (9, 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    cuda = torch.device("cuda")
    for modules, expected in ((module, attend_plainly), (older, None), (None, None)):
        monkeypatch.setitem(sys.modules, name, modules)
        assert find_kernel(cuda) is expected
        assert find_kernel(torch.device("cpu")) is None and find_kernel(torch.device("mps")) is None
    monkeypatch.setitem(sys.modules, name, module)
    capability = (7, 5)
    assert find_kernel(cuda) is None


def test_only_plain_windows_are_windows() -> None:
    def slides(window: int, after: int = 0) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
        return lambda b, h, q, k: (k <= q + after) & (k > q - window)

    assert describe_window(slides(4), 4, 20) == (3, 0)
    assert describe_window(slides(4), 4, 4) == (-1, 0), "no sequence is longer than the window"
    assert describe_window(lambda b, h, q, k: k <= q, None, 20) == (-1, 0)
    for other in (slides(5), slides(3), slides(4, after=1), lambda b, h, q, k: (q // 4 == k // 4) & (k <= q)):
        assert describe_window(other, 4, 20) is None
    elsewhere = torch.zeros(1, device="meta", dtype=torch.long)
    assert describe_window(lambda b, h, q, k: (k <= q) & (k > q - 4 + elsewhere), 4, 20) is None
    sizes: dict[str, int] = {"batch_size": 1, "q_length": 20, "kv_length": 20, "local_size": 4}
    assert SegmentMask(**sizes, mask_function=slides(4)).window(20) == (3, 0)
    assert SegmentMask(**sizes, mask_function=slides(4), allow_is_causal_skip=False).window(20) is None
    assert SegmentMask(**sizes, mask_function=slides(4), use_vmap=True).window(3) is None


@pytest.mark.parametrize("kernel", [True, False], ids=["one call", "buckets"])
@pytest.mark.parametrize("layout", ["packed", "shared_prefix"])
def test_a_step_reads_nothing_back_from_the_device(
    tiny: Build, monkeypatch: pytest.MonkeyPatch, layout: str, kernel: bool
) -> None:
    """Tensors on "meta" have no values: whatever waits for a GPU's raises there, as do operands on two devices."""
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *device: False)  # which knows no such device
    monkeypatch.setattr(torch, "autocast", lambda device, enabled: nullcontext())
    models = [ScoredLM(tiny("mistral").to("meta")) for _ in range(2)]
    for model in models:
        model._split = True  # found out at the first forward, from values
    module = PreferenceModule(models[0], models[1].requires_grad_(False), TwDPO(0.5), Optimizer(lr=1e-3), 1)
    batch = collate(make_examples(5), LAYOUTS[layout], 0, 5).to("meta")
    if kernel:
        monkeypatch.setattr(packed_attention, "find_kernel", lambda device: shape_only)
        monkeypatch.setattr(packed_attention, "HALF", (torch.float32,))
    batch, policy, _, output = module.score(batch)
    values = {**pair_values(policy, output, batch), "tokens": tokens_per_pair(batch)}
    (output.losses * batch.pair_weight).sum().backward()
    assert all(value.device.type == "meta" for value in values.values())


def shape_only(query: Tensor, *rest: Tensor, enable_gqa: bool = False, **more: object) -> Tensor:
    return query * 1
