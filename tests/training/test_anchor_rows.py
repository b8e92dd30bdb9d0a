"""Anchors: sampled as a plain loop would, by nothing but seed, step and pair; and a TI-DPO run from end to end."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from attnpo.data.collate import collate
from attnpo.data.datamodule import PreferenceDataModule
from attnpo.data.rules import BatchPlan
from attnpo.models.backbone import freeze
from attnpo.models.generate import GenerationRequest, draw_uniforms
from attnpo.models.input_gradient import input_gradient
from attnpo.models.layouts import packed_layout, padded_layout
from attnpo.models.scored import ScoredLM
from attnpo.objectives.tidpo import TIDPO
from attnpo.schema import PreferenceBatch, Sampling, UserError
from attnpo.training.anchor_rows import AnchoredObjective, AnchorSampler, _response_seed, pair_prompt_ids
from attnpo.training.module import PreferenceModule
from attnpo.training.optimizer import Optimizer
from attnpo.weights.sources.gradient import Gradient
from tests.training.tiny import Copies, Fit, column, make_data, make_examples, tiny_model

SAMPLING = Sampling(max_new_tokens=6, temperature=0.8, top_p=0.9, top_k=12, seed=3)
ENDS = (7, 8, 9)
MAKER = AnchorSampler(SAMPLING, ENDS)


def batch_of(count: int, places: list[int] | None = None) -> PreferenceBatch:
    examples = make_examples(count)
    return collate([examples[i] for i in places or range(count)], padded_layout, 0, count)


def responses(maker: AnchorSampler, policy: ScoredLM, batch: PreferenceBatch, step: int = 0) -> list[list[int]]:
    """The tokens of each anchor, after a look at how they lie in their rows."""
    rows = maker(policy, batch, step)
    assert rows.inputs is not None and rows.factors
    picked = rows.inputs.input_ids.flatten()[rows.inputs.predict_index + 1]
    assert torch.equal(picked[rows.response_mask], rows.response_ids[rows.response_mask])
    return [ids[mask].tolist() for ids, mask in zip(rows.response_ids, rows.response_mask, strict=True)]


def by_hand(model: torch.nn.Module, request: GenerationRequest, sampling: Sampling) -> list[int]:
    """One answer without batch, padding or cache: temperature, top-k, top-p, then the place of a uniform number."""
    ids = list(request.ids)
    for uniform in draw_uniforms(request, sampling).tolist():
        logits = model(torch.tensor([ids])).logits[0, -1].double() / sampling.temperature
        order = logits.argsort(descending=True)[: sampling.top_k]
        p = logits[order].softmax(0)
        kept = order[(p.cumsum(0) - p) < sampling.top_p]
        kept = kept.sort().values
        reached = logits[kept].softmax(0).cumsum(0)
        ids.append(int(kept[int((reached <= uniform * reached[-1]).sum())]))
        if ids[-1] in ENDS:
            break
    return ids[len(request.ids) :]


@torch.no_grad()
def test_an_anchor_is_what_a_plain_loop_samples() -> None:
    """For the very prompt of its pair, with the end token as its last; some reach it, some do not."""
    policy, batch = ScoredLM(tiny_model()), batch_of(6)
    prompts = [example.chosen.prompt_ids for example in make_examples(6)]
    assert pair_prompt_ids(batch) == prompts
    found = responses(MAKER, policy, batch, 4)
    for pair_id, prompt, response in zip(batch.pair_ids, prompts, found, strict=True):
        assert response == by_hand(policy.model, GenerationRequest(prompt, _response_seed(4, pair_id)), SAMPLING)
    ended = [response[-1] in ENDS for response in found]
    assert any(ended) and not all(ended) and not any(token in ENDS for r in found for token in r[:-1])
    assert all(end or len(response) == 6 for end, response in zip(ended, found, strict=True))


def test_batches_and_their_order_change_nothing() -> None:
    policy = ScoredLM(tiny_model())
    whole = responses(MAKER, policy, batch_of(6))
    for places in ([0], [3, 1], [5, 4, 3, 2, 1, 0], [2, 2]):
        assert responses(MAKER, policy, batch_of(6, places)) == [whole[i] for i in places]


def test_seed_step_and_pair_decide() -> None:
    policy, batch = ScoredLM(tiny_model()), batch_of(6)
    first = responses(MAKER, policy, batch)
    assert responses(MAKER, policy, batch) == first
    assert responses(MAKER, policy, batch, 1) != first
    assert responses(replace(MAKER, sampling=replace(SAMPLING, seed=4)), policy, batch) != first
    other = replace(batch, pair_ids=tuple(f"other{i}" for i in range(6)))
    assert responses(MAKER, policy, other) != first


def test_sampling_leaves_everything_as_it_was() -> None:
    model = tiny_model().train()
    model.model.layers[1].eval()
    policy = ScoredLM(model)
    before = {name: part.training for name, part in policy.named_modules()}
    settings, state = model.generation_config, torch.random.get_rng_state()
    rows = MAKER(policy, batch_of(3), 0)
    assert {name: part.training for name, part in policy.named_modules()} == before
    assert model.generation_config is settings and torch.equal(torch.random.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not rows.token_weights["reward"].requires_grad


def test_rows_stay_within_their_limit() -> None:
    """A prompt with little room gets a short anchor, one without any room an empty one; the others lose nothing."""
    policy, batch = ScoredLM(tiny_model()), batch_of(6)
    endless = AnchorSampler(SAMPLING, ())
    lengths = [len(prompt) for prompt in pair_prompt_ids(batch)]
    limit = max(lengths)
    assert min(lengths) + 2 <= limit
    found = responses(replace(endless, limit=limit), policy, batch)
    assert [len(response) for response in found] == [min(6, limit - length) for length in lengths]
    assert [] in found
    free = responses(endless, policy, batch)
    roomy = responses(replace(endless, limit=limit + 6), policy, batch)
    assert roomy == free and all(len(response) == 6 for response in free)
    nowhere = MAKER(policy, batch, 0).response_mask, replace(MAKER, limit=1)(policy, batch, 0)
    assert nowhere[0].any() and nowhere[1].response_mask.shape == (6, 0)


def test_other_layouts_and_sharded_weights_are_refused() -> None:
    policy = ScoredLM(tiny_model())
    with pytest.raises(UserError, match="need the padded layout"):
        MAKER(policy, collate(make_examples(3), packed_layout, 0, 3), 0)
    with torch.device("meta"):
        spread = ScoredLM(tiny_model().to("meta"))
    with pytest.raises(UserError, match=r"but the policy's weights are sharded: set trainer\.strategy=auto"):
        MAKER(spread, batch_of(3), 0)


# ------------------------------------------------------------------------------------------------ the whole way


def make_module(steps: int, objective: TIDPO) -> PreferenceModule:
    assert isinstance(objective, AnchoredObjective)
    makers = {"anchor": AnchorSampler(objective.anchor, ENDS)} if objective.gamma_triplet else {}
    optimizer = Optimizer(lr=1e-2, warmup=2.0)
    reference = freeze(ScoredLM(tiny_model()))
    return PreferenceModule(ScoredLM(tiny_model()), reference, objective, optimizer, steps, Gradient(), makers)


OBJECTIVE = TIDPO(beta=0.5, gamma_triplet=0.5, triplet_margin=0.2, anchor=replace(SAMPLING, max_new_tokens=3))


def test_a_run_from_end_to_end_however_it_is_split(fit: Fit) -> None:
    """Policy and reference start alike: the first validation sees ln 2 and the margin of every triplet."""
    results = []
    for micro in (4, 1):
        data = make_data(make_examples(9), BatchPlan(4, micro), val=2)
        results.append(fit(make_module(3, OBJECTIVE), data, steps=3, epochs=1))
    first = results[0][0]
    assert first["val/rewards/triplet"] == pytest.approx(0.2, abs=1e-6)
    assert first["val/loss"] == pytest.approx(0.6931472 + 0.5 * 0.2, abs=1e-5)
    assert first["val/rewards/triplet_unmeasured"] == 0.0
    assert column(results[1]) == pytest.approx(column(results[0]), rel=1e-4)
    assert len(column(results[0])) == 3
    for row in results[0]:
        if "train/loss" in row:
            assert row["train/rewards/seq_kl/rejected"] >= 0 and row["train/weights/max"] > 0.2


def test_a_resumed_run_samples_the_same_anchors(fit: Fit, tmp_path: Path) -> None:
    def data() -> PreferenceDataModule:
        return make_data(make_examples(6), BatchPlan(2, 2), val=1)

    whole = fit(
        make_module(3, OBJECTIVE), data(), steps=3, epochs=1, validate_every=1, callbacks=(Copies(tmp_path, 1),)
    )
    more = fit(make_module(3, OBJECTIVE), data(), steps=3, epochs=1, validate_every=1, resume=tmp_path / "1.ckpt")
    assert column(more) == pytest.approx(column(whole)[1:], rel=1e-6) and len(column(more)) == 2
    triplets = column(whole, "train/rewards/triplet")[1:]
    assert column(more, "train/rewards/triplet") == pytest.approx(triplets, rel=1e-6) and len(set(triplets)) == 2


def test_the_module_reads_the_policy_s_own_gradient() -> None:
    """The weights in the batch are those of the statistic, detached; the objective's gradient is the step's alone."""
    module, batch = make_module(2, replace(OBJECTIVE, gamma_triplet=0.0)), batch_of(3)
    module.set_modes(training=True)
    scored = module.score(batch)
    found = input_gradient(module.policy, batch.main)
    expected = Gradient().weights(replace(scored[1], input_gradient=found), None, batch)
    weights: Tensor = scored[0].main.token_weights["reward"]
    torch.testing.assert_close(weights, expected, rtol=1e-6, atol=0)
    assert scored[0].main.factors and not weights.requires_grad and scored[3].losses.requires_grad
    assert all(parameter.grad is None for parameter in module.policy.parameters())
