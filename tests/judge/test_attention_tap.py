"""The tap against eager attention maps of the same models, and what it must not allocate or run."""

from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from attnpo.judge import attention
from attnpo.judge.attention import KERNELS, AttentionProbe, MaskRule
from attnpo.judge.causal_judge import CausalJudge
from attnpo.schema import UserError
from tests.models.conftest import tiny_model

Build = Callable[..., PreTrainedModel]
LENGTHS = (5, 23, 12, 40, 1, 23)
LAYERS = (1, 2, 3, 4)


def prompts(lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(3, 97, (length,), generator=generator).tolist() for length in lengths]


def eager_maps(model: PreTrainedModel, ids: list[int]) -> Tensor:
    """Attention maps [layers heads T T] of one unpadded prompt."""
    with torch.no_grad():
        maps = model(input_ids=torch.tensor([ids]), output_attentions=True).attentions
    assert len(maps) == len(LAYERS)
    return torch.cat(maps)


@cache
def eager_readings(family: str) -> list[tuple[Tensor, int]]:
    """Maps of each prompt by the model itself, and its most likely next token."""
    model, found = tiny_model(family, "eager"), []
    for ids in prompts():
        with torch.no_grad():
            output = model(input_ids=torch.tensor([ids]), output_attentions=True)
        found.append((torch.cat(output.attentions), int(output.logits[0, -1].argmax())))
    return found


def dense_rollout(maps: Tensor) -> Tensor:
    """Last row of the product of (I + A) / 2, highest layer first."""
    eye = torch.eye(maps.shape[-1])
    product = eye
    for layer in maps.mean(1).flip(0):
        product = product @ (eye + layer) / 2
    return product[-1]


@pytest.mark.parametrize("kernel", sorted(KERNELS))
def test_rows_and_rollout_equal_eager_attention(tiny: Build, family: str, kernel: str) -> None:
    judge = CausalJudge(tiny(family, "eager"), token_budget=100, kernel=kernel)
    means = judge.read(prompts(), layers=LAYERS, rollout=True)
    heads = judge.read(prompts(), layers=LAYERS, per_head=True, verdict=False)
    for (maps, token), mean, head in zip(eager_readings(family), means, heads, strict=True):
        assert torch.allclose(mean.rows, maps[:, :, -1].mean(1), rtol=0, atol=1e-5)
        assert torch.allclose(head.rows, maps[:, :, -1], rtol=0, atol=1e-5)
        assert mean.rollout is not None
        assert torch.allclose(mean.rollout, dense_rollout(maps), rtol=0, atol=1e-5)
        assert mean.verdict_token == token


def test_rollout_in_many_blocks_equals_the_dense_product(
    tiny: Build, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several blocks of queries, the last one not full, windows far shorter than the prompt, rows of two lengths."""
    monkeypatch.setattr(attention, "SMALLEST_BLOCK", 16)
    monkeypatch.setattr(attention, "LARGEST_BLOCK", 16)
    ids, reference = prompts((90, 71)), tiny(family, "eager")
    readings = CausalJudge(tiny(family, "eager")).read(ids, layers=LAYERS, rollout=True, verdict=False)
    for prompt, reading in zip(ids, readings, strict=True):
        maps = eager_maps(reference, prompt)
        expected = dense_rollout(maps)
        assert reading.rollout is not None
        assert torch.allclose(reading.rollout, expected, rtol=0, atol=1e-5)
        assert float((expected - dense_rollout(maps.flip(0))).abs().max()) > 1e-3, "the order of layers matters"
        assert float((expected - maps[-1].mean(0)[-1]).abs().max()) > 1e-2, "and so do the layers below"
        assert torch.allclose(reading.rows, maps[:, :, -1].mean(1), rtol=0, atol=1e-5)


def test_the_cases_reach_what_they_claim(tiny: Build) -> None:
    names = ("llama", "mistral", "gemma2", "gpt_oss")
    judges = {name: CausalJudge(tiny(name, "eager")) for name in names}
    rows = {name: one.read(prompts((40,)), layers=LAYERS, verdict=False)[0].rows for name, one in judges.items()}
    sums = {name: row.sum(-1) for name, row in rows.items()}
    assert rows["llama"].min() > 0 and float((rows["llama"][0] - rows["llama"][3]).abs().max()) > 0.05
    assert (rows["mistral"] > 0).sum(-1).tolist() == [7, 7, 7, 7]
    assert (rows["gemma2"] > 0).sum(-1).tolist() == [6, 40, 6, 40]
    assert torch.allclose(sums["llama"], torch.ones(4)) and float(sums["gpt_oss"].max()) < 0.999, (
        "sinks take their share"
    )


def test_one_layer_with_early_stop_equals_all_layers(tiny: Build, family: str) -> None:
    judge, ids = CausalJudge(tiny(family, "eager"), token_budget=100), prompts()
    every = judge.read(ids, layers=LAYERS)
    for layer in LAYERS:
        for alone, full in zip(judge.read(ids, layers=(layer,), verdict=False), every, strict=True):
            assert torch.allclose(alone.rows[0], full.rows[layer - 1], rtol=0, atol=1e-6)
    turned = judge.read(ids, layers=(3, 1), verdict=False)
    assert torch.allclose(turned[3].rows, every[3].rows[[2, 0]], rtol=0, atol=1e-6)


def test_early_stop_runs_nothing_above(tiny: Build) -> None:
    model = tiny("llama")
    judge = CausalJudge(model)
    judge.read(prompts((6,)), layers=(1,))  # the first verdict also compares backbone and head with the model
    ran: list[int] = []
    for number, layer in enumerate(model.model.layers, start=1):
        layer.mlp.register_forward_hook(lambda *_, number=number: ran.append(number))
    judge.read(prompts((6,)), layers=(2, 1), verdict=False)
    assert ran == [1], "the MLP of the deepest wanted layer and all above are skipped"
    ran.clear()
    judge.read(prompts((6,)), layers=(1,), rollout=True, verdict=False)
    assert ran == [1, 2, 3]
    ran.clear()
    judge.read(prompts((6,)), layers=(1,))
    assert ran == [1, 2, 3, 4]


class Watcher(TorchDispatchMode):
    """Remembers created tensors with two axes of at least ``size``, inside composite operations too."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self.found: list[tuple[str, tuple[int, ...]]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = kwargs or {}
        if func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd):
            with self:
                return func.decompose(*args, **kwargs)
        result = func(*args, **kwargs)
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor) and sum(axis >= self.size for axis in tensor.shape) >= 2:
                self.found.append((str(func), tuple(tensor.shape)))
        return result


def test_no_tensor_of_length_times_length(tiny: Build, family: str) -> None:
    length = 300
    ids = prompts((length, length - 20))
    model = tiny(family, "eager")
    with Watcher(length - 20) as seen:
        CausalJudge(model, token_budget=4096).read(ids, layers=LAYERS, rollout=True)
    assert seen.found == []
    with Watcher(length - 20) as seen:
        eager_maps(model, ids[0])
    assert any(shape[-2:] == (length, length) for _, shape in seen.found), "the watcher sees dense maps"


def test_mask_rule_blocks_and_bounds_by_hand() -> None:
    rule = MaskRule(lambda b, h, q, k: (k <= q) & (k > q - 2), None, 2, True)
    index = torch.arange(4)
    assert rule.allowed_block(1, index[1:3], index).int()[0, 0].tolist() == [[1, 1, 0, 0], [0, 1, 1, 0]]
    assert rule.allowed_block(2, torch.tensor([[0], [3]]), index).int()[:, 0, 0].tolist() == [
        [1, 0, 0, 0],
        [0, 0, 1, 1],
    ]
    assert rule.visible_keys(3, 6, 10) == (2, 6)
    padded = MaskRule(lambda b, h, q, k: k <= q, torch.tensor([[True, False, True]]), None, True)
    assert padded.allowed_block(1, torch.tensor([2]), index[:3]).int()[0, 0].tolist() == [[1, 0, 1]]
    assert MaskRule(rule.function, None, None, False).visible_keys(3, 6, 10) == (0, 10)


def test_a_silent_layer_is_named() -> None:
    probe = AttentionProbe(torch.tensor([0]), [1, 2], depth=4, per_head=False, rollout=False, stop=False)
    with pytest.raises(UserError, match="layer 3 has no softmax attention to read"):
        probe.check_layers_read({1: None}, [1, 2])


def test_a_prepared_mask_is_refused(tiny: Build) -> None:
    from attnpo.judge.attention import tap_attention

    model = tiny("llama")
    with tap_attention(model.model, "sdpa"), pytest.raises(UserError, match="builds its own mask"):
        model(input_ids=torch.tensor([[3, 4]]), attention_mask=torch.ones(1, 1, 2, 2, dtype=torch.bool))
