"""Tiny random models of several families, and a fixture that keeps fp64 models in fp64 throughout."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3Config,
)

from attnpo.judge.causal_judge import CausalJudge
from attnpo.models.scored import ScoredLM
from tests.models.classes import OWN, SHAPE

CONFIGS: dict[str, tuple[type[PretrainedConfig], dict[str, object]]] = {
    "llama": (LlamaConfig, {}),
    "mistral": (MistralConfig, {"sliding_window": 7}),
    "qwen3": (Qwen3Config, {}),
    "gemma2": (Gemma2Config, OWN["gemma2"]),
    "gemma3": (Gemma3TextConfig, {"sliding_window": 6}),
    "gpt_oss": (GptOssConfig, OWN["gpt_oss"]),
}
FAMILIES = tuple(CONFIGS)
EAGER = ("gemma2", "gpt_oss")  # which have no other attention


def tiny_model(family: str, attention: str | None = None, **more: object) -> PreTrainedModel:
    """Makes a seeded model with peaked attention and logits of size 1, so that layers, heads, words differ clearly.

    ``attention``: by default the fastest that the class has.
    """
    kind, own = CONFIGS[family]
    config, attention = kind(**{**SHAPE, **own, **more}), attention or ("eager" if family in EAGER else "sdpa")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(12.0 if name.endswith(("q_proj.weight", "k_proj.weight")) else 5.0)
        if name.endswith("sinks"):
            parameter.data.normal_()
    return model.eval()


@pytest.fixture
def tiny() -> Callable[..., PreTrainedModel]:
    return tiny_model


def _exact_norm(self: nn.Module, hidden: Tensor) -> Tensor:
    mean = hidden.pow(2).mean(-1, keepdim=True)
    return self.weight * (hidden * torch.rsqrt(mean + self.variance_epsilon))


@pytest.fixture
def exact_llama(monkeypatch: pytest.MonkeyPatch) -> Callable[..., PreTrainedModel]:
    """Float64 Llamas whose norm stays in float64 (the library's own computes in float32 even there)."""
    from transformers.models.llama import modeling_llama

    monkeypatch.setattr(modeling_llama.LlamaRMSNorm, "forward", _exact_norm)

    def build(**more: object) -> PreTrainedModel:
        return tiny_model("llama", **more).double()

    return build


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def batch_sizes(monkeypatch: pytest.MonkeyPatch) -> Callable[[CausalJudge], list[int]]:
    """Prompts in each batch that a judge reads from now on."""

    def of(judge: CausalJudge) -> list[int]:
        sizes: list[int] = []
        read = judge._read_batch
        monkeypatch.setattr(
            judge, "_read_batch", lambda prompts, **asked: sizes.append(len(prompts)) or read(prompts, **asked)
        )
        return sizes

    return of


@pytest.fixture
def one_rank() -> Iterator[None]:
    """Starts a process group of this process alone."""
    from torch import distributed

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def shard_all(scored: ScoredLM) -> ScoredLM:
    """Shards every layer and the root over one process."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (1,))
    for layer in (*scored.model.model.layers, scored):
        fully_shard(layer, mesh=mesh)
    return scored


@pytest.fixture
def shape() -> dict[str, int]:
    return dict(SHAPE)
