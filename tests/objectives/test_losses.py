"""``attnpo.losses``: a function per objective, equal to what training computes, with examples that run."""

import doctest
import inspect

import pytest
import torch

from attnpo import losses
from attnpo.config.compose import list_groups
from attnpo.models.layouts import padded_layout
from attnpo.models.scored import ScoredLM
from attnpo.objectives.base import PreferenceObjective
from attnpo.schema import ObjectiveOutput, UserError
from tests.models.conftest import tiny_model
from tests.objectives.inputs import Case, call, make_case, objective_of

OPTIONS = list_groups()["objective"]
MEANS = ("ipo", "orpo", "rrhf", "simpo")  # of a response's tokens: no |y|


def arguments(option: str, objective: PreferenceObjective, case: Case) -> dict[str, object]:
    """What a trainer of one's own passes, made of plain tensors and the keys of the objective's config alone."""
    rows, mask, keys = case.batch.main, case.mask, dict(vars(objective))
    made: dict[str, object] = {
        **keys,
        "policy_logps": case.policy.logps,
        "weights": rows.token_weights["reward"],
        "mask": mask,
        "lengths": None if rows.factors or option in MEANS else rows.source_lengths,
        "gamma": keys.get("beta", 0) * keys.get("gamma_beta_ratio", 0),
        "position_kl": next(iter(case.policy.joint.values()), None),
    }
    if case.reference is not None:
        made["reference_logps"] = case.reference.logps
    if "mismatched" in case.ahead:
        policy, reference, _ = case.ahead["mismatched"]
        assert reference is not None
        made["mismatched_mean"] = (policy.logps - reference.logps).sum(-1).mean()
    if "anchor" in case.policy.groups and case.reference is not None:
        anchor = case.policy.groups["anchor"].logps - case.reference.groups["anchor"].logps
        ratios, others = case.policy.logps - case.reference.logps, case.batch.groups["anchor"].response_mask
        made["triplet"] = losses.triplet_term(ratios, mask, anchor, others, keys["triplet_margin"])
    wanted = inspect.signature(getattr(losses, f"{option}_loss")).parameters
    return {name: value for name, value in made.items() if name in wanted}


@pytest.mark.parametrize("option", OPTIONS)
def test_every_objective_has_a_function_that_equals_what_training_computes(option: str) -> None:
    objective = objective_of(option)
    case = make_case(objective)
    found: ObjectiveOutput = getattr(losses, f"{option}_loss")(**arguments(option, objective, case))
    keys, tokens = vars(objective), int(case.mask[: case.batch.pairs].sum())
    if coef := 1.0 if option == "orpo" else keys.get("sft_coef", keys.get("sft_weight")):
        nll = losses.chosen_nll(case.policy.logps, case.mask, keys["sft"], case.batch.pairs / tokens)
        found = losses.add_sft(found, nll, coef)
    expected = call(objective, case)
    assert expected.losses.unique().numel() > 1
    for name in ("losses", "chosen_rewards", "rejected_rewards"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=1e-12, atol=1e-12)


HOMES = ("attnpo.losses", "attnpo.objectives")
FUNCTIONS = [
    name
    for name, thing in vars(losses).items()
    if inspect.isfunction(thing) and thing.__module__.startswith(HOMES) and not name.startswith("_")
]


def test_there_is_nothing_that_no_objective_needs() -> None:
    found = {name.removesuffix("_loss") for name in FUNCTIONS if name.endswith("_loss")}
    assert found == {*OPTIONS, "twdpo_variant"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_equation_is_its_variant_without_options_to_the_bit(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    for trial in range(24):
        rows, length = 2 * (trial % 4 + 1), trial % 9 + 1
        mask = torch.rand(rows, length, generator=generator) < 0.8
        reference, weights = (torch.rand(rows, length, generator=generator, dtype=dtype) for _ in range(2))
        lengths = None if trial % 3 == 0 else mask.sum(-1).float()
        found = []
        for loss in (losses.twdpo_loss, losses.twdpo_variant_loss):
            policy = (-3 * reference.flip(-1)).requires_grad_()
            output = loss(policy, -reference, weights, mask, lengths, 0.3)
            output.losses.sum().backward()
            found.append(
                (output.losses, output.chosen_rewards, output.rejected_rewards, *output.extras.values(), policy.grad)
            )
            assert output.extras.keys() == {"unweighted/chosen", "unweighted/rejected"}
        assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize(
    "name", [*(name for name in FUNCTIONS if "_loss" in name or "token_" in name or name == "add_sft"), ""]
)
def test_examples_run(name: str) -> None:
    thing = getattr(losses, name) if name else losses
    test = doctest.DocTestParser().get_doctest(inspect.getdoc(thing) or "", {}, name, None, None)
    assert test.examples and test.examples[-1].want
    shown: list[str] = []
    result = doctest.DocTestRunner(verbose=False).run(test, out=shown.append)
    assert result.failed == 0, "".join(shown)


# ------------------------------------------------------------------------------------------------ a model's logits


def test_logits_of_a_model_give_the_statistics_of_training() -> None:
    models = [tiny_model("llama") for _ in range(2)]
    with torch.no_grad():
        models[1].lm_head.weight.mul_(0.5)
    sequences = [([5, 6, 7], [8, 9, 10]), ([11, 12], [13]), ([5, 6, 7], [14, 15]), ([11, 12], [16, 17, 18, 19])]
    inputs, ids, mask = padded_layout(sequences, 0)
    policy, reference = (ScoredLM(model) for model in models)
    with torch.no_grad():
        hidden = reference(inputs, ids, mask, {"logps", "hidden"}).hidden
        asked = {"logps", "joint:kl_ref_policy", "joint:kl_policy_ref"}
        expected = policy(inputs, ids, mask, asked, (hidden, reference.head()))
        logits, others = (model(inputs.input_ids, attention_mask=inputs.attention_mask).logits for model in models)
    labels = torch.full_like(inputs.input_ids, -100)
    for row, (prompt, response) in enumerate(sequences):
        labels[row, len(prompt) : len(prompt) + len(response)] = torch.tensor(response)
    logps, places = losses.token_logps(logits, labels)
    assert torch.equal(places, labels != -100) and (logps[~places] == 0).all()
    torch.testing.assert_close(logps[places], expected.logps[mask])
    for kind in ("kl_ref_policy", "kl_policy_ref"):
        found = losses.token_kl(logits, others, labels, kind)
        assert (found[places] > 1e-3).all()
        torch.testing.assert_close(found[places], expected.joint[kind][mask], rtol=1e-4, atol=1e-5)


def test_an_unknown_kl_is_refused() -> None:
    with pytest.raises(UserError, match=r"kind must be one of kl_ref_policy, kl_policy_ref, got 'forward'"):
        losses.token_kl(torch.zeros(1, 2, 3), torch.zeros(1, 2, 3), torch.tensor([[-100, 1]]), "forward")


def test_a_label_that_nothing_predicts_is_refused() -> None:
    with pytest.raises(UserError, match=r"labels: no logit predicts the first token.*row 1"):
        losses.token_logps(torch.zeros(2, 2, 3), torch.tensor([[-100, 1], [2, 1]]))
