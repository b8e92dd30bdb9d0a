"""Compiled blocks: the same numbers under every layout, recomputation and adapter."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends import registry
from transformers import PreTrainedModel

from attnpo.models.compiled import compile_blocks
from attnpo.models.layouts import LAYOUTS, choose, shared_prefix
from attnpo.models.loading import load_model
from attnpo.models.lora import add_lora, merged_state
from attnpo.models.scored import ScoredLM
from attnpo.models.spec import LoraSpec
from attnpo.schema import UserError

Build = Callable[..., PreTrainedModel]
# What torch warns of while it traces is an error there under this project's rules.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf Tensor"),
    pytest.mark.filterwarnings("ignore:.*autograd.function.Function.*should not be instantiated"),
]
BATCHES = (
    [([5, 9, 3], [7, 8]), ([4, 4], [9, 1, 6]), ([5, 9, 3], [4]), ([4, 4], [2, 2, 8, 3])],
    [([5, 9], [7, 8, 3, 3, 1]), ([5, 9], [4, 6])],
    [([8, 5, 9, 11, 2, 6], [7]), ([8, 5, 9, 11, 2, 6], [4, 10, 12, 13, 14, 15, 16])],
)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def graphs() -> list[int]:
    """A backend named "counting": the number of operations of every graph that it is given."""
    found: list[int] = []

    def counting(graph: Any, inputs: Any) -> Any:
        found.append(len(graph.graph.nodes))
        return graph.forward

    torch._dynamo.register_backend(counting, name="counting")
    yield found
    for known in (registry._BACKENDS, registry._COMPILER_FNS):
        known.pop("counting", None)


def numbers(model: PreTrainedModel, layout: str) -> list[Tensor]:
    """Log-probabilities and gradients of several batches of other shapes."""
    policy = ScoredLM(model)
    policy.train()
    found = []
    for rows in BATCHES:
        policy.zero_grad()
        logps = policy(*LAYOUTS[layout](rows, 0)).logps
        logps.sum().backward()
        found += [logps.detach(), *(p.grad.clone() for p in policy.parameters() if p.grad is not None)]
    return found


def gap(found: list[Tensor], expected: list[Tensor]) -> float:
    assert len(found) == len(expected) > 20
    return max(float((a - b).norm() / b.norm().clamp(min=1e-6)) for a, b in zip(found, expected, strict=True))


def kept(model: PreTrainedModel, layout: str) -> int:
    """Numbers that a forward keeps for its backward."""
    sizes = []

    def pack(value: Tensor) -> Tensor:
        sizes.append(value.numel())
        return value

    policy = ScoredLM(model)
    policy.train()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        policy(*LAYOUTS[layout](BATCHES[0], 0))
    return sum(sizes)


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_compiled_blocks_give_the_same_numbers(tiny: Build, layout: str, recomputed: bool, graphs: list[int]) -> None:
    model = tiny("llama", initializer_range=0.2)
    expected, whole = numbers(model, layout), kept(model, layout)
    if recomputed:
        model.activation_checkpointing_enable(every_n_layers=2)
    compile_blocks(model, "counting")
    assert gap(numbers(model, layout), expected) < 5e-6
    assert graphs and max(graphs) > 20, "something must have been compiled"
    assert (kept(model, layout) < 0.8 * whole) == recomputed
    assert len(graphs) < 20, "blocks share their graphs, and lengths do not make new ones"


@pytest.mark.parametrize("quantize", [None, "nf4"])
def test_adapters_are_compiled_with_their_block(
    tiny: Build, graphs: list[int], quantize: str | None, tmp_path: Path
) -> None:
    tiny("llama", initializer_range=0.2).save_pretrained(tmp_path)
    model = add_lora(load_model(tmp_path, quantize=quantize), LoraSpec(rank=2))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    names, expected = list(merged_state(model)), numbers(model, "shared_prefix")
    compile_blocks(model, "counting")
    assert gap(numbers(model, "shared_prefix"), expected) < 5e-6 and graphs
    assert list(merged_state(model)) == names, "names in checkpoints and exports stay"


def test_a_compiled_model_takes_the_usual_layout(tiny: Build) -> None:
    model = tiny("qwen3")
    compile_blocks(model, "aot_eager")
    assert choose("auto", [ScoredLM(model)]) is shared_prefix


@pytest.mark.slow
def test_the_usual_backend_gives_the_same_numbers(tiny: Build) -> None:
    model = tiny("llama", initializer_range=0.2)
    expected = numbers(model, "shared_prefix")
    compile_blocks(model, "inductor")
    assert gap(numbers(model, "shared_prefix"), expected) < 1e-5


def test_a_backend_that_is_not_there_is_named(tiny: Build) -> None:
    with pytest.raises(UserError, match=r"model.compile='induktor' is no backend of torch.compile here; .*inductor"):
        compile_blocks(tiny("llama"), "induktor")
