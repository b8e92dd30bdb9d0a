"""A step that compares whole distributions, against whole logits of each response alone, in double precision."""

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from attnpo.data.collate import TrainingExample, collate
from attnpo.data.rules import BatchPlan
from attnpo.models.backbone import freeze
from attnpo.models.layouts import padded_layout
from attnpo.models.lora import AdapterDisabledReference, add_lora
from attnpo.models.scored import ScoredLM
from attnpo.models.spec import LoraSpec
from attnpo.objectives.base import PreferenceObjective
from attnpo.objectives.tdpo import TDPO1, TDPO2
from attnpo.objectives.terms import AnchorOn
from attnpo.objectives.twdpo import TwDPO
from attnpo.schema import UserError
from attnpo.training.module import PreferenceModule, shard_model
from attnpo.training.optimizer import Optimizer
from tests.training.tiny import SHAPE, VOCAB, Fit, make_data, make_examples

BETA, ALPHA, ANCHOR = 0.3, 0.4, 0.2
OBJECTIVES: dict[str, PreferenceObjective] = {
    "tdpo1": TDPO1(BETA),
    "tdpo2": TDPO2(BETA, ALPHA),
    "anchored": TwDPO(beta=BETA, anchor=ANCHOR),
    "anchored low": TwDPO(beta=BETA, anchor=ANCHOR, anchor_on=AnchorOn.LOW),
}


def tied(seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=True)).double().eval()


def biased(seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE))
    model.lm_head = nn.Linear(32, VOCAB)
    return model.double().eval()


def capped(seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = Gemma2Config(**SHAPE, head_dim=8, final_logit_softcapping=2.0, attn_implementation="eager")
    return Gemma2ForCausalLM(config).double().eval()


@pytest.fixture(autouse=True)
def exact_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms in the model's own precision; the library's compute in float32 even in float64 models."""
    from transformers.models.gemma2 import modeling_gemma2
    from transformers.models.llama import modeling_llama

    def scaled(hidden: Tensor, eps: float) -> Tensor:
        return hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + eps)

    def llama(self: nn.Module, hidden: Tensor) -> Tensor:
        return self.weight * scaled(hidden, self.variance_epsilon)

    def gemma(self: nn.Module, hidden: Tensor) -> Tensor:
        return (1.0 + self.weight) * scaled(hidden, self.eps)

    monkeypatch.setattr(modeling_llama.LlamaRMSNorm, "forward", llama)
    monkeypatch.setattr(modeling_gemma2.Gemma2RMSNorm, "forward", gemma)


def module_of(policy: ScoredLM, reference: ScoredLM, name: str = "tdpo2") -> PreferenceModule:
    freeze(reference)
    return PreferenceModule(policy, reference, OBJECTIVES[name], Optimizer(lr=1e-3, warmup=0.0), 1)


def naive_loss(
    policy: PreTrainedModel, reference: PreTrainedModel, examples: list[TrainingExample], name: str = "tdpo2"
) -> Tensor:
    """The mean loss over the pairs, every response alone and from its whole logits."""
    losses = []
    for example in examples:
        sums, kls, pulls = [], [], []
        for side, weights, length in zip(example.sides, example.weights, example.lengths, strict=True):
            ids = torch.tensor([[*side.prompt_ids, *side.response_ids]])
            start = len(side.prompt_ids)
            p = F.log_softmax(policy(input_ids=ids).logits[0, start - 1 : -1], -1)
            with torch.no_grad():
                q = F.log_softmax(reference(input_ids=ids).logits[0, start - 1 : -1], -1)
            picked = (p - q).gather(1, ids[0, start:, None])[:, 0]
            sums.append(((weights * length).to(p.dtype) * picked).sum())
            kls.append((q.exp() * (q - p)).sum())
            held = (1 - weights * len(weights)).clamp(min=0) if name == "anchored low" else torch.ones(len(weights))
            pulls.append((held.to(p.dtype) * (p.exp() * (p - q)).sum(-1)).sum())
        margin, pull = sums[0] - sums[1], torch.zeros(())
        if name == "tdpo1":
            margin = margin - (kls[1] - kls[0])
        elif name == "tdpo2":
            margin = margin - ALPHA * (kls[1] - kls[0].detach())
        else:
            pull = ANCHOR * (pulls[0] + pulls[1]) / 2
        losses.append(-F.logsigmoid(BETA * margin) + pull)
    return torch.stack(losses).mean()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: (g.full_tensor() if isinstance(g, DTensor) else g).clone() for name, g in found.items()}


def assert_same_step(
    module: PreferenceModule, reference: PreTrainedModel, examples: list[TrainingExample], atol: float = 1e-12
) -> None:
    """One batch of all pairs gives the naive loss and the naive gradients."""
    model = module.policy.model
    found = module.score(collate(examples, padded_layout, 0, len(examples)))[3].losses.mean()
    found.backward()
    ours = gradients(model)
    model.zero_grad()
    expected = naive_loss(model, reference, examples)
    expected.backward()
    theirs = gradients(model)
    assert abs(found.item() - expected.item()) < atol
    assert ours.keys() == theirs.keys() and ours
    for name, gradient in theirs.items():
        assert float((ours[name] - gradient).abs().max()) < atol, name
    assert max(float(g.abs().max()) for g in theirs.values()) > 1e-3


class Gradients(L.Callback):
    """Keeps the gradient of the first step, before anything clips it."""

    found: dict[str, Tensor]

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: object) -> None:
        assert isinstance(pl_module, PreferenceModule)
        self.found = gradients(pl_module.policy.model)


@pytest.mark.parametrize(("name", "micro"), list(zip(OBJECTIVES, (4, 1, 4, 1), strict=True)))
def test_a_training_step_is_the_naive_one_however_it_is_cut(fit: Fit, name: str, micro: int) -> None:
    """Tied head, grouped-query attention, a head chunk that cuts through responses, random token weights."""
    examples, kept = make_examples(4, seed=2), Gradients()
    module = module_of(ScoredLM(tied(0), chunk=7), ScoredLM(tied(1), chunk=5), name)
    rows = fit(module, make_data(examples, BatchPlan(4, micro)), steps=1, epochs=1, callbacks=(kept,))
    model = tied(0)
    expected = naive_loss(model, tied(1), examples, name)
    expected.backward()
    (loss,) = [row["train/loss"] for row in rows if "train/loss" in row]
    assert loss == pytest.approx(expected.item(), abs=1e-6), "logged in float32"
    theirs = gradients(model)
    assert kept.found.keys() == theirs.keys()
    for key, gradient in theirs.items():
        assert float((kept.found[key] - gradient).abs().max()) < 1e-12, key
    assert max(float(g.abs().max()) for g in theirs.values()) > 1e-3


@pytest.mark.parametrize("build", [biased, capped])
def test_heads_of_every_form_give_the_naive_step(build: Callable[[int], PreTrainedModel]) -> None:
    module = module_of(ScoredLM(build(0), chunk=7), ScoredLM(build(1), chunk=7))
    assert_same_step(module, build(1), make_examples(3))


def test_the_base_of_an_adapted_policy_is_a_reference() -> None:
    policy = ScoredLM(add_lora(tied(0), LoraSpec(rank=4)).double(), chunk=7)
    for name, parameter in policy.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    assert_same_step(module_of_adapted(policy), tied(0), make_examples(3))


def module_of_adapted(policy: ScoredLM) -> PreferenceModule:
    return PreferenceModule(policy, AdapterDisabledReference(policy), OBJECTIVES["tdpo2"], Optimizer(lr=1e-3), 1)


def test_a_policy_without_a_plain_head_takes_its_whole_logits() -> None:
    policy = tied(0)
    policy.lm_head.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 0.7,))
    assert_same_step(module_of(ScoredLM(policy), ScoredLM(tied(1), chunk=5)), tied(1), make_examples(3))


def test_a_reference_whose_head_does_not_give_its_logits_is_refused() -> None:
    reference = tied(1)
    reference.lm_head.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 0.7,))
    module = module_of(ScoredLM(tied(0)), ScoredLM(reference))
    with pytest.raises(UserError, match="do not come from a plain linear vocabulary head"):
        module.score(collate(make_examples(2), padded_layout, 0, 2))


@pytest.mark.parametrize(("autocast", "adapted"), [(False, True), (True, False), (True, True)])
def test_before_the_first_step_there_is_no_kl_at_all(autocast: bool, adapted: bool) -> None:
    """Policy and reference go the same way in the same number format, so both models' logits differ in no bit.

    Log-probabilities may: the reference's come from a pass of its own, with other chunks.
    """
    if adapted:
        module = module_of_adapted(ScoredLM(add_lora(tied(0).float(), LoraSpec(rank=4)), chunk=7))
    else:
        module = module_of(ScoredLM(tied(0).float(), chunk=7), ScoredLM(tied(0).float(), chunk=7))
    with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
        _, policy, _, output = module.score(collate(make_examples(3), padded_layout, 0, 3))
    assert not policy.joint["kl_ref_policy"].any()
    assert output.losses.tolist() == pytest.approx([math.log(2)] * 3, abs=1e-6)


def test_low_precision_autocast_is_close() -> None:
    found = []
    for autocast in (False, True):
        module = module_of(ScoredLM(tied(0).float(), chunk=7), ScoredLM(tied(1).float(), chunk=7))
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            _, policy, _, output = module.score(collate(make_examples(4), padded_layout, 0, 4))
            output.losses.mean().backward()
        assert policy.joint["kl_ref_policy"].dtype == output.losses.dtype == torch.float32
        found.append((policy.joint["kl_ref_policy"].detach(), gradients(module.policy.model)))
    (kl, exact), (rough_kl, rough) = found
    assert 0 < float((rough_kl - kl).abs().max()) < 0.1 * float(kl.max())
    for name, gradient in exact.items():
        assert rough[name].dtype == torch.float32
        assert float((rough[name] - gradient).norm() / gradient.norm()) < 0.2, name


def test_void_pairs_and_rows_without_a_token_add_nothing() -> None:
    examples = make_examples(3)
    module = module_of(ScoredLM(tied(0), chunk=7), ScoredLM(tied(1), chunk=7))
    loss = naive_loss(module.policy.model, tied(1), examples[:2])
    loss.backward()
    expected = gradients(module.policy.model)
    for emptied in (False, True):
        module.policy.zero_grad()
        batch = collate([*examples[:2], replace(examples[2], pair_weight=0.0)], padded_layout, 0, 2)
        if emptied:
            mask = batch.main.response_mask.clone()
            mask[[2, 5]] = False
            inputs = replace(batch.main.inputs, scored=None)
            batch = replace(batch, groups={"main": replace(batch.main, inputs=inputs, response_mask=mask)})
        batch, policy, _, output = module.score(batch)
        (output.losses * batch.pair_weight).sum().div(2).backward()
        assert bool(policy.joint["kl_ref_policy"][[2, 5]].any()) != emptied
        for name, gradient in gradients(module.policy.model).items():
            assert float((gradient - expected[name]).abs().max()) < 1e-12, name


def test_a_batch_without_any_token_has_a_loss_and_no_gradient() -> None:
    module = module_of(ScoredLM(tied(0)), ScoredLM(tied(1)))
    batch = collate(make_examples(2), padded_layout, 0, 2)
    nothing = torch.zeros_like(batch.main.response_mask)
    inputs = replace(batch.main.inputs, scored=None)
    batch = replace(batch, groups={"main": replace(batch.main, inputs=inputs, response_mask=nothing)})
    losses = module.score(batch)[3].losses
    losses.sum().backward()
    assert losses.tolist() == pytest.approx([math.log(2)] * 2, abs=1e-12)
    assert not any(g.any() for g in gradients(module.policy.model).values())


@pytest.fixture
def one_rank() -> Iterator[None]:
    from torch import distributed

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.parametrize("adapted", [False, True])
def test_shards_give_the_same_step(one_rank: None, adapted: bool) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    examples, found = make_examples(3), []
    for sharded in (False, True):
        torch.manual_seed(4)
        policy = ScoredLM(add_lora(tied(0), LoraSpec(rank=4)).double() if adapted else tied(0), chunk=7)
        reference = AdapterDisabledReference(policy) if adapted else ScoredLM(tied(1), chunk=7)
        for parameter in (p for name, p in policy.named_parameters() if "lora_B" in name):
            nn.init.normal_(parameter, std=0.1)
        if sharded:
            mesh = init_device_mesh("cpu", (1,))
            for scored in (policy,) if adapted else (policy, reference):
                shard_model(scored, mesh)
        module = PreferenceModule(policy, reference, OBJECTIVES["tdpo2"], Optimizer(lr=1e-3), 1)
        module.set_modes(training=True)
        loss = module.score(collate(examples, padded_layout, 0, 3))[3].losses.mean()
        loss.backward()
        found.append((loss.item(), gradients(policy.model)))
    (loss_whole, whole), (loss_sharded, parts) = found
    assert loss_sharded == pytest.approx(loss_whole, abs=1e-12) and whole.keys() == parts.keys()
    assert all(torch.allclose(parts[name], whole[name], rtol=0, atol=1e-12) for name in whole)
