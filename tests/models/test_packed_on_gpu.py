"""Packed rows on a GPU: the kernel against its plain reference, models by both, and a step that never waits."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from attnpo.data.collate import collate
from attnpo.models import packed_attention
from attnpo.models.layouts import LAYOUTS
from attnpo.models.packed_attention import find_kernel
from attnpo.models.scored import ScoredLM
from attnpo.objectives.twdpo import TwDPO
from attnpo.training.module import PreferenceModule
from attnpo.training.optimizer import Optimizer
from attnpo.training.pair_values import pair_values, tokens_per_pair
from tests.models.test_packed_attention import loss_and_gradients, rows
from tests.models.varlen import Calls, attend_plainly
from tests.training.tiny import make_examples

Build = Callable[..., PreTrainedModel]
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
QUERIES, KEYS = (5, 130, 1, 64), (5, 200, 70, 64)
CLOSE = 0.05  # of the largest number; bfloat16 rounds to 0.004


def ends(counts: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32, device="cuda")


def attended(
    attend: Callable[..., Tensor], parts: list[Tensor], window: tuple[int, int], dtype: torch.dtype
) -> list[Tensor]:
    """Returns output and gradients of queries, keys and values."""
    leaves = [part.to(dtype).requires_grad_() for part in parts]
    more = {"enable_gqa": True} if leaves[0].shape[1] != leaves[1].shape[1] else {}
    output = attend(
        *leaves, ends(QUERIES), ends(KEYS), max(QUERIES), max(KEYS), scale=0.2, window_size=window, num_splits=1, **more
    )
    weights = torch.linspace(-1, 1, output.numel(), device="cuda").view_as(output)
    return [output.detach().float(), *(g.float() for g in torch.autograd.grad((output * weights).sum(), leaves))]


def apart(one: list[Tensor], other: list[Tensor]) -> float:
    """Returns the largest difference, relative to the largest number of each tensor."""
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("window", [(-1, 0), (6, 0)])
@pytest.mark.parametrize(("heads", "groups", "width"), [(4, 4, 64), (8, 2, 128), (4, 1, 8), (2, 2, 256)])
def test_the_reference_is_the_kernel(window: tuple[int, int], heads: int, groups: int, width: int) -> None:
    kernel = find_kernel(torch.device("cuda"))
    if kernel is None:
        pytest.skip("this torch or GPU has no attention over sequences of any lengths with windows")
    torch.manual_seed(0)
    sizes = ((sum(QUERIES), heads), (sum(KEYS), groups), (sum(KEYS), groups))
    parts = [torch.randn(*size, width, device="cuda").to(torch.bfloat16) for size in sizes]
    found = attended(kernel, parts, window, torch.bfloat16)  # type: ignore[arg-type]
    assert apart(found, attended(attend_plainly, parts, window, torch.float32)) < CLOSE
    shifted = (window[0], 1) if window[0] < 0 else (window[0] + 1, 0)
    assert apart(found, attended(attend_plainly, parts, shifted, torch.float32)) > 5 * CLOSE, "one key more is seen"


@pytest.mark.parametrize("layout", ["packed", "shared_prefix"])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3"])
def test_models_take_the_kernel_and_give_the_references_numbers(
    tiny: Build, monkeypatch: pytest.MonkeyPatch, family: str, layout: str
) -> None:
    model = tiny(family).to("cuda", torch.bfloat16)
    for name, parameter in model.named_parameters():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            parameter.data.div_(6.0)  # of usual size, so that rounding stays small
    inputs, ids, mask = LAYOUTS[layout](rows(), 0)
    read = (inputs.to("cuda"), ids.to("cuda"), mask.to("cuda"))
    kernel = find_kernel(torch.device("cuda"))
    if kernel is None:
        pytest.skip("this torch or GPU has no attention over sequences of any lengths with windows")
    scored = ScoredLM(model)
    found = scored(*read).logps
    _, gradients = loss_and_gradients(model, found)
    calls = Calls().put(monkeypatch)
    expected = scored(*read).logps
    _, wanted = loss_and_gradients(model, expected)
    assert len(calls.told) == 4
    assert float((found - expected).detach().abs().mean()) < 0.05
    norm = torch.nn.utils.get_total_norm(list(wanted.values()))
    gap = torch.nn.utils.get_total_norm([gradients[name] - gradient for name, gradient in wanted.items()])
    assert float(gap / norm) < 0.1
    monkeypatch.setattr(packed_attention, "find_kernel", lambda device: None)
    assert float((scored(*read).logps - expected).detach().abs().mean()) < 0.05, "buckets"


@pytest.mark.parametrize("layout", ["packed", "shared_prefix"])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
def test_a_step_does_not_wait_for_the_gpu(tiny: Build, family: str, layout: str) -> None:
    attention = "eager" if family == "gemma2" else "sdpa"
    models = [ScoredLM(tiny(family, attention).to("cuda", torch.bfloat16)) for _ in range(2)]
    module = PreferenceModule(models[0], models[1].requires_grad_(False), TwDPO(0.5), Optimizer(lr=1e-3), 1)
    made = collate(make_examples(5), LAYOUTS[layout], 0, 5)
    for mode in ("default", "error"):  # whatever is looked up once is looked up in the first step
        torch.cuda.set_sync_debug_mode(mode)
        try:
            batch, policy, _, output = module.score(made.to("cuda"))
            values = {**pair_values(policy, output, batch), "tokens": tokens_per_pair(batch)}
            (output.losses * batch.pair_weight).sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert all(bool(value.isfinite().all()) for value in values.values())
