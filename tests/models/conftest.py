"""Tiny random models of several families, and a fixture that keeps fp64 models in fp64 throughout."""

from collections.abc import Callable

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

from attnpo.judge.reader import CausalJudge
from tests.models.classes import SHAPE

CONFIGS: dict[str, Callable[..., PretrainedConfig]] = {
    "llama": lambda **more: LlamaConfig(**SHAPE, **more),
    "mistral": lambda **more: MistralConfig(**SHAPE, sliding_window=7, **more),
    "qwen3": lambda **more: Qwen3Config(**SHAPE, **more),
    "gemma2": lambda **more: Gemma2Config(
        **SHAPE, sliding_window=6, attn_logit_softcapping=3.0, final_logit_softcapping=2.0, **more
    ),
    "gemma3": lambda **more: Gemma3TextConfig(**SHAPE, sliding_window=6, **more),
    "gpt_oss": lambda **more: GptOssConfig(
        **SHAPE,
        sliding_window=6,
        num_local_experts=2,
        num_experts_per_tok=1,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        **more,
    ),
}
FAMILIES = tuple(CONFIGS)


def tiny_model(family: str, attention: str = "sdpa", **more: object) -> PreTrainedModel:
    """A seeded random model with peaked attention and logits of size 1, so that layers, heads, words differ clearly."""
    config = CONFIGS[family](**more)
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
        read = judge._read
        monkeypatch.setattr(
            judge, "_read", lambda prompts, **asked: sizes.append(len(prompts)) or read(prompts, **asked)
        )
        return sizes

    return of


@pytest.fixture
def shape() -> dict[str, int]:
    return dict(SHAPE)
