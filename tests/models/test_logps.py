from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from attnpo.models.logps import LMHead, compute_logits, statistics_from_logits, token_statistics
from attnpo.schema import UserError

VOCAB_NAMES = ("entropy", "collision", "top_prob")
JOINT_NAMES = ("kl_ref_policy", "kl_policy_ref", "contrast")


def problem(count: int = 11, bias: bool = True) -> tuple[Tensor, nn.Linear, Tensor, Tensor, nn.Linear]:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(count, 6, generator=generator, dtype=torch.float64, requires_grad=True)
    other = torch.randn(count, 5, generator=generator, dtype=torch.float64)
    torch.manual_seed(5)
    head, second = nn.Linear(6, 23, bias=bias).double(), nn.Linear(5, 23).double()
    return hidden, head, torch.randint(0, 23, (count,), generator=generator), other, second


def token_logps(
    hidden: Tensor, head: nn.Linear, labels: Tensor, chunk: int = 1024, softcap: float | None = None
) -> Tensor:
    return token_statistics(hidden, LMHead.from_linear(head, softcap=softcap), labels, chunk=chunk)["logps"]


def test_two_words_by_hand() -> None:
    # Logits (0, ln 3): p = (1/4, 3/4).
    head = LMHead(torch.tensor([[0.0], [float(torch.log(torch.tensor(3.0)))]]))
    found = token_statistics(torch.ones(2, 1), head, torch.tensor([0, 1]), vocab=VOCAB_NAMES)
    log = torch.log
    quarter, most = torch.tensor(0.25), torch.tensor(0.75)
    assert torch.allclose(found["logps"], torch.stack([log(quarter), log(most)]))
    assert torch.allclose(found["vocab:entropy"], -(quarter * log(quarter) + most * log(most)).expand(2))
    assert torch.allclose(found["vocab:collision"], log(torch.tensor(10 / 16)).expand(2))
    assert torch.allclose(found["vocab:top_prob"], most.expand(2))
    # Second model: both words 1/2. KL(r||p) = ln(1/2) - (ln(1/4) + ln(3/4)) / 2.
    even = (torch.ones(2, 1), LMHead(torch.zeros(2, 1)))
    joint = token_statistics(torch.ones(2, 1), head, torch.tensor([0, 1]), joint=JOINT_NAMES, other=even)
    half = torch.tensor(0.5)
    assert torch.allclose(joint["joint:kl_ref_policy"], (log(half) - (log(quarter) + log(most)) / 2).expand(2))
    expected = quarter * log(quarter / half) + most * log(most / half)
    assert torch.allclose(joint["joint:kl_policy_ref"], expected.expand(2))
    # softmax(2 (0, ln 3) - (0, 0)) = (1, 9) / 10.
    assert torch.allclose(joint["joint:contrast"], log(torch.tensor([0.1, 0.9])))


@pytest.mark.parametrize("chunk", [1, 4, 11, 1024])
@pytest.mark.parametrize(("scale", "softcap", "bias"), [(1.0, None, False), (0.5, None, True), (2.0, 3.0, True)])
def test_values_and_gradients_equal_autograd_on_full_logits(
    chunk: int, scale: float, softcap: float | None, bias: bool
) -> None:
    hidden, head, labels, other, second = problem(bias=bias)

    def shaped(logits: Tensor) -> Tensor:
        return scale * logits if softcap is None else softcap * torch.tanh(scale * logits / softcap)

    beside = shaped(second(other))
    expected = statistics_from_logits(shaped(head(hidden)), labels, vocab=VOCAB_NAMES, joint=JOINT_NAMES, other=beside)
    found = token_statistics(
        hidden,
        LMHead.from_linear(head, scale=scale, softcap=softcap),
        labels,
        vocab=VOCAB_NAMES,
        joint=JOINT_NAMES,
        other=(other, LMHead.from_linear(second, scale=scale, softcap=softcap)),
        chunk=chunk,
    )
    assert found.keys() == expected.keys()
    generator = torch.Generator().manual_seed(1)
    inputs = [hidden, *head.parameters()]
    for name in expected:
        assert torch.allclose(found[name], expected[name], rtol=0, atol=1e-13), name
        weights = torch.randn(len(labels), generator=generator, dtype=torch.float64)
        ours = torch.autograd.grad((found[name] * weights).sum(), inputs, retain_graph=True)
        theirs = torch.autograd.grad((expected[name] * weights).sum(), inputs, retain_graph=True)
        for mine, reference in zip(ours, theirs, strict=True):
            assert torch.allclose(mine, reference, rtol=0, atol=1e-12), name


def test_log_probabilities_alone_take_the_short_way_to_the_same_gradient() -> None:
    hidden, head, labels, _, _ = problem()
    weights = torch.linspace(-1, 2, len(labels), dtype=torch.float64)
    inputs = [hidden, *head.parameters()]
    ours = torch.autograd.grad((token_logps(hidden, head, labels, chunk=3, softcap=1.5) * weights).sum(), inputs)
    full = torch.log_softmax(1.5 * torch.tanh(head(hidden) / 1.5), -1).gather(1, labels[:, None])[:, 0]
    theirs = torch.autograd.grad((full * weights).sum(), inputs)
    for mine, reference in zip(ours, theirs, strict=True):
        assert torch.allclose(mine, reference, rtol=0, atol=1e-13)


def test_a_few_logits_pass_gradient_through_scale_and_cap() -> None:
    hidden, head, _, _, _ = problem()
    weights = torch.randn(11, 23, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    inputs = [hidden, *head.parameters()]
    found = compute_logits(hidden, LMHead.from_linear(head, scale=0.5, softcap=2.0))
    full = 2.0 * torch.tanh(0.5 * head(hidden) / 2.0)
    assert torch.allclose(found, full, rtol=0, atol=1e-14)
    ours = torch.autograd.grad((found * weights).sum(), inputs)
    theirs = torch.autograd.grad((full * weights).sum(), inputs)
    for mine, reference in zip(ours, theirs, strict=True):
        assert torch.allclose(mine, reference, rtol=0, atol=1e-13)


def test_no_token_gives_empty_values_and_a_usable_graph() -> None:
    hidden, head, labels, _, _ = problem()
    found = token_logps(hidden[:0], head, labels[:0])
    assert found.shape == (0,)
    found.sum().backward()
    assert head.weight.grad is not None and not head.weight.grad.any()


def test_frozen_head_gets_no_gradient_and_none_is_formed() -> None:
    hidden, head, labels, _, _ = problem()
    head.requires_grad_(False)
    with Shapes() as seen:
        token_logps(hidden, head, labels, chunk=4).sum().backward()
    assert head.weight.grad is None
    assert tuple(head.weight.shape) not in seen.created, "a buffer for the head's gradient was made"


class Shapes(TorchDispatchMode):
    """Shapes of every tensor that an operation creates."""

    def __init__(self) -> None:
        super().__init__()
        self.created: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            if not func._schema.name.startswith(("aten::detach", "aten::view", "aten::t", "aten::_to_copy")):
                self.created.add(tuple(tensor.shape))
        return result


def _tensors(result: object) -> Iterator[Tensor]:
    for item in result if isinstance(result, tuple | list) else (result,):
        if isinstance(item, Tensor):
            yield item


def test_no_tensor_of_tokens_times_vocabulary() -> None:
    torch.manual_seed(0)
    hidden, head = torch.randn(300, 8, requires_grad=True), nn.Linear(8, 211)
    labels = torch.randint(0, 211, (300,))
    with Shapes() as seen:
        token_logps(hidden, head, labels, chunk=64).sum().backward()
    assert (64, 211) in seen.created, "the watcher sees the chunks"
    assert not [shape for shape in seen.created if 300 in shape and 211 in shape]


def test_low_precision_autocast_is_close_and_backward_uses_its_dtype() -> None:
    torch.manual_seed(0)
    hidden, head = torch.randn(40, 32, requires_grad=True), nn.Linear(32, 101)
    labels = torch.randint(0, 101, (40,))
    exact = token_logps(hidden, head, labels, chunk=16)
    gradient = torch.autograd.grad(exact.sum(), [hidden, head.weight])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rough = token_logps(hidden, head, labels, chunk=16)
    assert rough.dtype == torch.float32
    found = torch.autograd.grad(rough.sum(), [hidden, head.weight])
    assert 0 < float((rough - exact).detach().abs().max()) < 0.03  # bfloat16 keeps 8 bits of logits of size 1 to 2
    for mine, reference in zip(found, gradient, strict=True):
        assert mine.dtype == torch.float32
        assert 0 < float((mine - reference).norm() / reference.norm()) < 0.02


def test_the_heads_gradient_is_summed_in_float32_over_chunks() -> None:
    # 600 equal terms, one per chunk: a bfloat16 sum stops growing when a term is below half its last bit (8 bits).
    hidden, head = torch.ones(600, 4), nn.Linear(4, 7, bias=False)
    labels = torch.zeros(600, dtype=torch.long)
    (exact,) = torch.autograd.grad(token_logps(hidden, head, labels).sum(), [head.weight])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rough = token_logps(hidden, head, labels, chunk=1)
    (found,) = torch.autograd.grad(rough.sum(), [head.weight])
    assert float((found - exact).norm() / exact.norm()) < 0.01


def test_half_precision_model_sums_in_float32() -> None:
    torch.manual_seed(0)
    hidden, head = torch.randn(8, 16), nn.Linear(16, 50, bias=False)
    low = token_logps(hidden.bfloat16(), head.bfloat16(), torch.arange(8))
    logits = head(hidden.bfloat16()).float()
    assert low.dtype == torch.float32
    assert torch.allclose(low, torch.log_softmax(logits, -1).gather(1, torch.arange(8)[:, None])[:, 0], atol=1e-6)


def test_a_missing_second_model_and_an_empty_chunk_are_user_errors() -> None:
    hidden, head, labels, _, _ = problem()
    with pytest.raises(UserError, match=r"as other=\(hidden, head\)"):
        token_statistics(hidden, LMHead.from_linear(head), labels, joint=["kl_ref_policy"])
    with pytest.raises(UserError, match="at least one token, got 0"):
        token_statistics(hidden, LMHead.from_linear(head), labels, chunk=0)
