"""Compiled blocks: the same numbers under every layout, recomputation and adapter, and a trial that sees others."""

import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends import registry
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from transformers import PreTrainedModel

from attnpo.models.compiled import check_compiled_blocks, compile_blocks
from attnpo.models.layouts import LAYOUTS, Sequences, shared_prefix_layout
from attnpo.models.loading import load_model
from attnpo.models.lora import add_lora, merge_state_dict
from attnpo.models.scored import ScoredLM
from attnpo.models.spec import LoraSpec
from attnpo.models.trial import select_layout
from attnpo.schema import UserError
from tests.models.varlen import put_operator

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
def register() -> Iterator[Callable[[str, Any], None]]:
    """Registers a backend under a name for this test."""
    names: list[str] = []

    def one(name: str, backend: Any) -> None:
        torch._dynamo.register_backend(backend, name=name)
        names.append(name)

    yield one
    for known in (registry._BACKENDS, registry._COMPILER_FNS):
        for name in names:
            known.pop(name, None)


@pytest.fixture
def graphs(register: Callable[[str, Any], None]) -> list[int]:
    """A backend named "counting": the number of operations of every graph that it is given."""
    found: list[int] = []

    def counting(graph: Any, inputs: Any) -> Any:
        found.append(len(graph.graph.nodes))
        return graph.forward

    register("counting", counting)
    return found


def numbers(policy: ScoredLM, layout: str, batches: Sequence[Sequences] = BATCHES) -> list[Tensor]:
    """Returns log-probabilities and gradients of batches of other shapes."""
    policy.train()
    found = []
    for rows in batches:
        policy.zero_grad()
        logps = policy(*LAYOUTS[layout](rows, 0)).logps
        logps.sum().backward()
        found += [logps.detach(), *(p.grad.clone() for p in policy.parameters() if p.grad is not None)]
    return found


def gap(found: list[Tensor], expected: list[Tensor]) -> float:
    assert len(found) == len(expected) > 20
    assert min(float(value.norm()) for value in expected) > 1e-7, "a gradient that is all rounding shows nothing"
    return max(float((a - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True))


def count_kept(policy: ScoredLM, layout: str) -> int:
    """Numbers that a forward keeps for its backward."""
    sizes = []

    def pack(value: Tensor) -> Tensor:
        sizes.append(value.numel())
        return value

    policy.train()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        policy(*LAYOUTS[layout](BATCHES[0], 0))
    return sum(sizes)


@pytest.mark.parametrize(("layout", "recomputed"), [("padded", False), ("shared_prefix", True)])
def test_compiled_blocks_give_the_same_numbers(
    exact_llama: Build, layout: str, recomputed: bool, graphs: list[int]
) -> None:
    model = exact_llama(num_hidden_layers=2)
    policy = ScoredLM(model)
    expected, whole = numbers(policy, layout), count_kept(policy, layout)
    if recomputed:
        model.activation_checkpointing_enable()
    compile_blocks(model, "counting")
    assert gap(numbers(policy, layout), expected) < 1e-10
    assert graphs and max(graphs) > 20, "something must have been compiled"
    assert (count_kept(policy, layout) < 0.8 * whole) == recomputed
    assert len(graphs) < 30, "blocks share their graphs"
    made = len(graphs)
    numbers(policy, layout)
    assert len(graphs) == made, "lengths do not make new ones"


@pytest.mark.parametrize(
    ("family", "layout", "recomputed", "count"),
    [("llama", "shared_prefix", True, 1), ("mistral", "packed", False, 2)],
)
def test_attention_in_one_call_is_inside_the_graph(
    tiny: Build,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    layout: str,
    recomputed: bool,
    count: int,
    register: Callable[[str, Any], None],
) -> None:
    """One graph for all blocks and batches, whatever their lengths; another where no row is as long as the window."""
    put_operator(monkeypatch, torch.float32)
    model, names = tiny(family, num_hidden_layers=2), list[str]()
    policy = ScoredLM(model)

    def keeping(graph: Any, inputs: Any) -> Any:
        names.append(str(graph.graph))
        return graph.forward

    register("keeping", keeping)
    generator = torch.Generator().manual_seed(0)

    def draw() -> list[int]:
        return torch.randint(3, 97, (int(torch.randint(1, 20, (), generator=generator)),), generator=generator).tolist()

    prompts = [[draw() for _ in range(pairs)] for pairs in (1, 3, 5)]
    batches = [*BATCHES, *([(prompt, draw()) for prompt in some * 2] for some in prompts)]

    expected = numbers(policy, layout, batches)
    if recomputed:
        model.activation_checkpointing_enable()
    compile_blocks(model, "keeping")
    torch._dynamo.utils.counters.clear()
    assert all(
        torch.allclose(a, b, rtol=1e-4, atol=1e-6)
        for a, b in zip(numbers(policy, layout, batches), expected, strict=True)
    )
    assert not torch._dynamo.utils.counters["graph_break"]
    assert len(names) == count and all("_varlen_attn" in name for name in names)


@pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++"))), reason="inductor needs a C++ compiler")
@pytest.mark.filterwarnings("default")  # the compiler's
def test_the_usual_backend_gives_the_same_numbers(exact_llama: Build) -> None:
    import torch._inductor.config

    model = exact_llama(num_hidden_layers=2)
    policy = ScoredLM(model)
    expected = numbers(policy, "shared_prefix", BATCHES[:1])
    compile_blocks(model, "inductor")
    with torch._inductor.config.patch(compile_threads=1):
        assert gap(numbers(policy, "shared_prefix", BATCHES[:1]), expected) < 1e-10


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.filterwarnings("default")  # the compiler's
def test_the_usual_backend_gives_the_same_numbers_on_a_gpu(tiny: Build) -> None:
    """By the trial of a run: a few layers in float32, which decide, and in bfloat16."""
    model = tiny("llama").to("cuda", torch.bfloat16)
    check_compiled_blocks(model, "inductor", shared_prefix_layout, torch.device("cuda"), autocast=False)


@pytest.mark.parametrize("quantize", [None, "nf4"])
def test_adapters_are_compiled_with_their_block(
    tiny: Build, graphs: list[int], quantize: str | None, tmp_path: Path
) -> None:
    tiny("llama", num_hidden_layers=2).save_pretrained(tmp_path)
    model = add_lora(load_model(tmp_path, quantize=quantize), LoraSpec(rank=2))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    policy = ScoredLM(model)
    names, expected = list(merge_state_dict(model)), numbers(policy, "padded")
    compile_blocks(model, "counting")
    assert gap(numbers(policy, "padded"), expected) < 2e-5 and graphs
    assert list(merge_state_dict(model)) == names, "names in checkpoints and exports stay"


def test_sampling_with_a_cache_compiles_nothing(tiny: Build, graphs: list[int]) -> None:
    model = tiny("llama")
    ids = torch.tensor([[1, 5, 9, 3]])
    wanted = model.generate(ids, max_new_tokens=6, do_sample=False)
    compile_blocks(model, "counting")
    assert torch.equal(model.generate(ids, max_new_tokens=6, do_sample=False), wanted) and not graphs


def test_a_compiled_model_takes_the_usual_layout(tiny: Build, graphs: list[int]) -> None:
    model = tiny("qwen3", num_hidden_layers=1)
    compile_blocks(model, "counting")
    assert select_layout("auto", [ScoredLM(model)]) is shared_prefix_layout and graphs


# ------------------------------------------------------------------------------------------------ the trial


def tried(model: PreTrainedModel, backend: str, *, autocast: bool = False) -> None:
    check_compiled_blocks(model, backend, shared_prefix_layout, torch.device("cpu"), autocast=autocast)


@pytest.mark.parametrize(("family", "autocast"), [("llama", True), ("gemma2", False)])
def test_right_gradients_pass_and_nothing_is_touched(
    tiny: Build, family: str, autocast: bool, graphs: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny(family)
    before, state = {name: value.clone() for name, value in model.state_dict().items()}, torch.get_rng_state()
    with caplog.at_level("INFO", "attnpo"):
        tried(model, "counting", autocast=autocast)
    assert graphs and "model.compile=counting: log-probabilities and gradients of compiled blocks agree" in caplog.text
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("where", ["fw_compiler", "bw_compiler"])
def test_a_compiler_that_is_wrong_is_not_used(tiny: Build, where: str, register: Callable[[str, Any], None]) -> None:
    """Half a per cent more in the results of every graph, of the forward or of the backward alone."""

    def right(graph: Any, inputs: Any) -> Any:
        return make_boxed_func(graph.forward)

    def wrong(graph: Any, inputs: Any) -> Any:
        def run(*arguments: Any) -> Any:
            results = graph.forward(*arguments)
            return [1.005 * x if isinstance(x, Tensor) and x.is_floating_point() else x for x in results]

        return make_boxed_func(run)

    register("wrong", aot_autograd(**{"fw_compiler": right, "bw_compiler": right, where: wrong}))
    what = "log-probabilities of|the gradient of layers" if where == "fw_compiler" else "the gradient of layers"
    with pytest.raises(UserError, match=f"model.compile=wrong computes (?:{what}).* incorrectly on cpu: .*LlamaForC"):
        tried(tiny("llama"), "wrong")


def test_a_compiler_that_breaks_is_named_with_its_reason(tiny: Build, register: Callable[[str, Any], None]) -> None:
    def broken(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no toolchain here")

    register("broken", broken)
    with pytest.raises(
        UserError, match=r"(?s)model.compile=broken cannot run blocks .*no toolchain here\): set .*null"
    ):
        tried(tiny("llama"), "broken")


def test_a_backend_that_is_not_there_is_named(tiny: Build) -> None:
    with pytest.raises(UserError, match=r"model.compile='induktor' is not an available torch.compile backend: .*ind"):
        compile_blocks(tiny("llama"), "induktor")
