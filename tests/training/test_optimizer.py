"""The optimiser's recipe: which optimiser it makes, with which numbers, and what it refuses."""

import math
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Trainer, get_scheduler

from attnpo.config.compose import compose, load, validate
from attnpo.data.rules import BatchPlan
from attnpo.models.lora import add_lora
from attnpo.models.scored import ScoredLM
from attnpo.models.spec import LoraSpec
from attnpo.objectives.twdpo import TwDPO
from attnpo.run import combinations as settings
from attnpo.schema import UserError
from attnpo.training.optimizer import Optimizer, can_fuse
from tests.conformance.family_models import tiny_model
from tests.training.tiny import Fit, make_data, make_examples, make_module

NUMBERS = {"lr": 3e-3, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}


def weights(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(*shape, generator=generator).to(dtype)) for shape in ((6, 5), (5,))]


def descend(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], steps: int = 20) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        sum((parameter**4).sum() for parameter in parameters).backward()
        optimizer.step()


@pytest.fixture
def torchao(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What a stand-in for torchao's AdamW8bit was made with, under the library's own signature.

    Like the library's, it keeps its learning rate as a tensor and refuses another kind.
    """
    made: list[dict[str, Any]] = []

    class AdamW8bit(torch.optim.AdamW):
        def __init__(
            self,
            params: Any,
            lr: float = 1e-3,
            betas: tuple[float, float] = (0.9, 0.999),
            eps: float = 1e-8,
            weight_decay: float = 1e-2,
            amsgrad: bool = False,
            *,
            block_size: int = 256,
            bf16_stochastic_round: bool = False,
        ) -> None:
            made.append({key: value for key, value in locals().items() if key not in ("self", "made", "__class__")})
            super().__init__(params, torch.tensor(lr), betas, eps, weight_decay, amsgrad)

        def step(self, closure: Any = None) -> Any:
            assert all(isinstance(group["lr"], torch.Tensor) for group in self.param_groups)
            return super().step(closure)

    package, room = ModuleType("torchao"), ModuleType("torchao.optim")
    room.AdamW8bit = AdamW8bit  # type: ignore[attr-defined]
    package.optim = room  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torchao", package)
    monkeypatch.setitem(sys.modules, "torchao.optim", room)
    return made


# --------------------------------------------------------------------------------------------------- full precision


def test_the_default_is_plain_adamw_with_the_numbers_of_the_recipe() -> None:
    parameters, twins = weights(), weights()
    optimizer = Optimizer(**NUMBERS).build(parameters)
    assert type(optimizer) is torch.optim.AdamW and optimizer.defaults["fused"] is True
    descend(optimizer, parameters)
    descend(torch.optim.AdamW(twins, **NUMBERS), twins)
    assert all(torch.allclose(a, b, rtol=1e-6, atol=1e-7) for a, b in zip(parameters, twins, strict=True))


def test_one_kernel_takes_plain_tensors_of_one_device() -> None:
    plain, elsewhere = weights(), [torch.nn.Parameter(torch.empty(2, device="meta"))]
    assert can_fuse(plain) and not can_fuse(plain + elsewhere) and not can_fuse(elsewhere)
    optimizer = Optimizer(**NUMBERS).build(elsewhere)
    assert not optimizer.defaults["fused"]


def test_lightning_clips_under_bf16_mixed_with_the_fused_kernel() -> None:
    """Its plugin for mixed precision refuses to clip for optimisers that say they unscale gradients themselves."""
    from lightning.pytorch.plugins.precision import MixedPrecision

    parameters = weights()
    optimizer = Optimizer().build(parameters)
    sum(parameter.sum() for parameter in parameters).backward()
    MixedPrecision("bf16-mixed", "cpu").clip_gradients(optimizer, 1.0)
    assert torch.nn.utils.get_total_norm([p.grad for p in parameters]).item() == pytest.approx(1.0, rel=1e-4)


# --------------------------------------------------------------------------------------------------------- schedule


def hugging_face(schedule: str, warmup: int, total: int) -> list[float]:
    """The learning rate of every update under transformers' own schedule, of 1."""
    name = {"cosine": "cosine", "constant": "constant_with_warmup"}[schedule]
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = get_scheduler(name, optimizer, num_warmup_steps=warmup, num_training_steps=total)
    rates = []
    for _ in range(total):
        rates.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("schedule", ["cosine", "constant"])
@pytest.mark.parametrize(("warmup", "steps", "total"), [(0.1, 2, 13), (0.1, 192, 1911), (10.0, 10, 24), (0.0, 0, 5)])
def test_a_warm_up_from_zero_is_hugging_faces(schedule: str, warmup: float, steps: int, total: int) -> None:
    """In every step of warm-up and decay; from the first on it is one step ahead until the warm-up is over."""
    theirs = hugging_face(schedule, steps, total)
    zero, first = (Optimizer(warmup=warmup, schedule=schedule, warmup_from=start) for start in ("zero", "first"))
    assert [zero.lr_factor(step, total) for step in range(total)] == pytest.approx(theirs, abs=1e-12)
    ahead = [*theirs[1 : steps + 1], *theirs[steps:]]
    assert [first.lr_factor(step, total) for step in range(total)] == pytest.approx(ahead, abs=1e-12)
    assert Optimizer() == Optimizer(warmup_from="first")


def test_the_first_update_from_zero_moves_nothing(fit: Fit) -> None:
    module = make_module(4)
    before = {name: value.clone() for name, value in module.policy.named_parameters()}
    module.recipe = Optimizer(lr=1e-2, warmup=2.0, warmup_from="zero")
    rows = fit(module, make_data(make_examples(8), BatchPlan(pairs=4, micro=2)), steps=4, epochs=2)
    rates = [row["train/lr"] for row in rows if "train/lr" in row]
    assert rates == pytest.approx([1e-2 * rate for rate in hugging_face("cosine", 2, 4)]) and rates[0] == 0
    losses = [row["train/loss"] for row in rows if "train/loss" in row]
    assert losses[:2] == pytest.approx([math.log(2)] * 2, abs=1e-6) and abs(losses[2] - math.log(2)) > 1e-4
    assert any(not value.equal(before[name]) for name, value in module.policy.named_parameters())


@pytest.mark.parametrize(
    ("setting", "start"),
    [("testbed", "first"), ("real_smoke", "first"), ("llama3_8b_base_sft", "zero"), ("llama3_8b_instruct", "zero"),
     ("mistral_7b_base_sft", "zero")],
)  # fmt: skip
def test_the_papers_settings_warm_up_as_the_authors_did(setting: str, start: str) -> None:
    cfg = load("fit", [f"setting={setting}"])
    assert cfg.optimizer.warmup_from == start
    with pytest.raises(UserError, match=r"optimizer.warmup_from must be one of first, zero, got 'one'"):
        validate(compose("fit", [f"setting={setting}", "optimizer.warmup_from=one"]), complete=False)


# ------------------------------------------------------------------------------------------------------ weight decay

CLASSES = ("llama", "qwen3", "gemma3_text", "gpt2", "opt", "bloom", "gpt_neox", "olmo2", "phi", "cohere",
           "mixtral", "gpt_oss", "mamba", "falcon_h1")  # fmt: skip


def decays(model: nn.Module, recipe: Optimizer) -> dict[str, float]:
    """Returns the weight decay of every trained parameter of a model, by name, in the optimiser that training makes."""
    module = make_module(4, live=False)
    module.policy, module.recipe = ScoredLM(model), recipe  # type: ignore[arg-type]
    groups = module.configure_optimizers()["optimizer"].param_groups
    found = {id(parameter): group["weight_decay"] for group in groups for parameter in group["params"]}
    assert len(found) == sum(len(group["params"]) for group in groups)
    return {name: found[id(value)] for name, value in model.named_parameters() if value.requires_grad}


@pytest.mark.parametrize("name", CLASSES)
def test_norms_and_biases_are_left_out_of_weight_decay_as_by_hugging_faces_trainer(name: str) -> None:
    model = tiny_model(name)
    theirs = set(Trainer.get_decay_parameter_names(None, model))
    found = decays(model, Optimizer(weight_decay=0.1))
    assert found == {name: 0.1 if name in theirs else 0.0 for name in found}
    assert 0.0 in found.values() and 0.1 in found.values()


@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt_oss"])
def test_adapters_decay_as_by_hugging_faces_trainer(name: str) -> None:
    """All of them; where more is trained beside them, its norms and biases do not."""
    model = add_lora(tiny_model(name), LoraSpec(rank=2))
    assert set(decays(model, Optimizer(weight_decay=0.1)).values()) == {0.1}
    model.requires_grad_(True)
    theirs = set(Trainer.get_decay_parameter_names(None, model))
    found = decays(model, Optimizer(weight_decay=0.1))
    assert found == {name: 0.1 if name in theirs else 0.0 for name in found} and 0.0 in found.values()


@pytest.mark.parametrize("recipe", [{"weight_decay": 0.0}, {"weight_decay": 0.1, "decay_all": True}])
def test_without_weight_decay_or_with_all_decaying_there_is_one_group(recipe: dict[str, Any]) -> None:
    """Keeps the form of the state that runs were saved in before weights were told apart."""
    module = make_module(4, live=False)
    module.recipe = Optimizer(**recipe)
    (group,) = module.configure_optimizers()["optimizer"].param_groups
    assert group["weight_decay"] == recipe["weight_decay"]
    assert all(one is other for one, other in zip(group["params"], module.policy.parameters(), strict=True))


@pytest.mark.parametrize("rounding", [False, True])
def test_8bit_moments_take_both_groups(torchao: list[dict[str, Any]], rounding: bool) -> None:
    module = make_module(4, live=False)
    module.policy.to(torch.bfloat16)
    module.recipe = Optimizer(weight_decay=0.1, moments="8bit", stochastic_rounding=rounding)
    groups = module.configure_optimizers()["optimizer"].param_groups
    norms = [value for name, value in module.policy.named_parameters() if "norm" in name]
    assert [(group["weight_decay"], group["params"] == norms) for group in groups] == [(0.1, False), (0.0, True)]
    assert torchao[0]["bf16_stochastic_round"] is rounding


# ------------------------------------------------------------------------------------------------------------ 8 bits


@pytest.mark.parametrize("rounding", [False, True])
def test_8bit_moments_are_torchaos_with_every_number_of_the_recipe(
    torchao: list[dict[str, Any]], rounding: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """That the library compiles in the first step is said before it."""
    parameters = weights(torch.bfloat16)
    with caplog.at_level("INFO", "attnpo"):
        Optimizer(**NUMBERS, moments="8bit", stochastic_rounding=rounding).build(iter(parameters))
    assert "torchao compiles its update in the first step, which takes up to a minute" in caplog.text
    (group,) = torchao[0].pop("params")
    assert len(torchao) == 1 and all(a is b for a, b in zip(group["params"], parameters, strict=True))
    rest = {"amsgrad": False, "block_size": 256, "bf16_stochastic_round": rounding}
    assert torchao[0] == {**NUMBERS, **rest}


def test_without_torchao_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(UserError, match=r"pip install 'attnpo\[opt8bit\]'"):
        Optimizer(moments="8bit").build(weights())


def test_stochastic_rounding_needs_bfloat16_weights_and_8bit_moments(torchao: list[dict[str, Any]]) -> None:
    mixed = [*weights(torch.bfloat16), *weights()]
    with pytest.raises(UserError, match=r"needs trained weights in bfloat16, but they are float32: set model.dtype"):
        Optimizer(moments="8bit", stochastic_rounding=True).build(mixed)
    assert torchao == []
    with pytest.raises(UserError, match=r"needs optimizer.moments=8bit, got moments=float32"):
        Optimizer(stochastic_rounding=True)
    with pytest.raises(UserError, match=r"optimizer.moments must be one of float32, 8bit, got '4bit'"):
        Optimizer(moments="4bit")


def test_the_config_reaches_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "find_spec", lambda package: package)  # torchao is an extra
    given = ["model.dtype=bfloat16", "optimizer=adamw8bit", "optimizer.stochastic_rounding=true"]
    cfg = load("fit", ["setting=real_smoke", *given])
    assert cfg.optimizer == Optimizer(lr=1e-4, moments="8bit", stochastic_rounding=True)
    assert load("fit", ["setting=real_smoke"]).optimizer == Optimizer(lr=1e-4)


def test_a_whole_fit_with_a_tensor_learning_rate(torchao: list[dict[str, Any]], fit: Fit) -> None:
    plan = BatchPlan(pairs=4, micro=2)
    data = make_data(make_examples(8), plan)
    found = []
    for moments in ("8bit", "float32"):
        module = make_module(4, TwDPO(0.5))
        module.recipe = Optimizer(lr=1e-2, warmup=2.0, moments=moments)
        found.append(fit(module, data, steps=4, epochs=2))
    assert len(torchao) == 1
    for one, other in zip(*found, strict=True):
        one, other = ({name: value for name, value in row.items() if "_per_s" not in name} for row in (one, other))
        assert one == pytest.approx(other, rel=1e-5), "the stand-in is AdamW: same numbers, same learning rates"
