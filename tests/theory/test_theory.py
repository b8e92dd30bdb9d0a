"""Theory on enumerable policies: exact identities, optima found two ways, bounds that hold, claims that fail."""

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from attnpo import theory
from attnpo.schema import UserError
from experiments.theory.__main__ import main
from experiments.theory.cases import Reads, cases, spread_weights
from experiments.theory.figures import theory_figure, tightness_figure
from experiments.theory.own_statements import existence_rows, freedom_path, lemma_row, policy_row
from experiments.theory.problem import (
    Problem,
    Tree,
    backward_heuristic,
    dpo_policy,
    kl,
    objective,
    optimal_policy,
    position_kl,
    probabilities,
    random_problem,
    reward_deviation,
    reward_error,
    solve_heuristic,
    token_logps,
    total_variation,
    weighted_kl,
    weighted_likelihood,
)
from experiments.theory.study import Study
from experiments.theory.tables import frames, report_markdown, tables


def other(problem: Problem, seed: int = 9) -> Tensor:
    """A policy that has nothing to do with the problem."""
    random = torch.Generator().manual_seed(seed)
    return torch.randn(problem.reference.shape, generator=random, dtype=torch.float64).log_softmax(-1)


# ------------------------------------------------------------------------------------------------ what is listed


def test_every_response_and_context_is_listed_once() -> None:
    tree = Tree(2, 3)
    assert tree.sequences.tolist() == [[a, b, c] for a in (0, 1) for b in (0, 1) for c in (0, 1)]
    assert tree.contexts == 7
    assert tree.nodes[:, 0].tolist() == [0] * 8
    assert tree.nodes[:, 1].tolist() == [1, 1, 1, 1, 2, 2, 2, 2]
    assert tree.nodes[:, 2].tolist() == [3, 3, 4, 4, 5, 5, 6, 6]
    problem = random_problem(2, 3)
    assert float(probabilities(tree, problem.reference).sum()) == pytest.approx(1.0, abs=1e-14)


@pytest.mark.parametrize(("vocab", "length"), [(1, 3), (3, 0), (4, 7)])
def test_what_cannot_be_listed_is_refused(vocab: int, length: int) -> None:
    with pytest.raises(UserError, match=f"got vocab {vocab} and length {length}"):
        Tree(vocab, length)


def test_kl_by_hand_and_by_position() -> None:
    tree = Tree(2, 1)
    first, second = torch.tensor([[0.75, 0.25]]).double().log(), torch.tensor([[0.5, 0.5]]).double().log()
    assert float(kl(tree, first, second)) == pytest.approx(0.75 * math.log(1.5) + 0.25 * math.log(0.5))
    assert total_variation(tree, first, second) == pytest.approx(0.25)
    weights = torch.tensor([[2.0], [3.0]], dtype=torch.float64)
    by_hand = 2 * 0.75 * math.log(1.5) + 3 * 0.25 * math.log(0.5)
    assert float(weighted_kl(tree, first, second, weights)) == pytest.approx(by_hand)
    problem = random_problem()
    assert float(position_kl(problem.tree, other(problem), problem.reference).sum()) == pytest.approx(
        float(kl(problem.tree, other(problem), problem.reference)), rel=1e-12
    )


# ------------------------------------------------------------------------------------------------ three policies


def test_dpos_policy_is_the_tilted_reference() -> None:
    problem = random_problem(seed=1)
    tilted = (token_logps(problem.tree, problem.reference).sum(-1) + problem.rewards / problem.beta).softmax(0)
    torch.testing.assert_close(probabilities(problem.tree, dpo_policy(problem)), tilted, rtol=0, atol=1e-14)


@pytest.mark.parametrize("seed", [0, 1])
def test_position_weights_solved_backwards_give_the_optimum_that_direct_optimisation_finds(seed: int) -> None:
    problem = random_problem(seed=seed)
    weights = spread_weights(problem.tree, Reads.POSITION, 0.5, seed)
    h, best = backward_heuristic(problem, weights[0]), optimal_policy(problem, weights)
    assert h.residual < 1e-12
    assert best.gradient < 1e-10
    assert total_variation(problem.tree, best.policy, h.policy) < 1e-10
    assert best.value == pytest.approx(problem.beta * h.constant, abs=1e-12)
    assert total_variation(problem.tree, h.policy, dpo_policy(problem)) > 0.05


def test_the_numerical_solution_agrees_with_the_backward_one_and_does_not_depend_on_its_start() -> None:
    problem = random_problem(seed=2)
    fixed = spread_weights(problem.tree, Reads.POSITION, 0.6)
    exact = backward_heuristic(problem, fixed[0]).policy
    assert total_variation(problem.tree, solve_heuristic(problem, fixed).policy, exact) < 1e-10
    free = spread_weights(problem.tree, Reads.RESPONSE, 0.9)
    found = [solve_heuristic(problem, free, start) for start in (None, problem.reference, other(problem))]
    assert max(one.residual for one in found) < 1e-10
    assert max(total_variation(problem.tree, one.policy, found[0].policy) for one in found) < 1e-10
    assert reward_error(problem, found[0].policy, free) < 1e-10


def test_weights_that_read_the_response_leave_the_heuristic_policy_below_the_optimum() -> None:
    problem = random_problem(seed=2)
    weights = spread_weights(problem.tree, Reads.RESPONSE, 0.6)
    h, best = solve_heuristic(problem, weights).policy, optimal_policy(problem, weights)
    assert best.gradient < 1e-10
    assert best.value > float(objective(problem, h, weights)) + 1e-4
    assert reward_deviation(problem, best.policy, weights) > 0.01
    # stationary: what the module docstring says is equal for all tokens of a context
    tree, beta = problem.tree, problem.beta
    ratios = token_logps(tree, best.policy) - token_logps(tree, problem.reference)
    gain = problem.rewards - beta * (weights * ratios).sum(-1)
    chances = probabilities(tree, best.policy).reshape(9, 3)
    last = (gain - beta * weights[:, -1]).reshape(9, 3)
    assert ((last - last.mean(-1, keepdim=True)).abs() * chances).max() < 1e-9
    assert ((gain.reshape(9, 3) - gain.reshape(9, 3).mean(-1, keepdim=True)).abs() * chances).max() > 1e-3


def test_the_newton_steps_of_the_optimum_have_the_right_derivatives() -> None:
    problem = random_problem(seed=3)
    weights = spread_weights(problem.tree, Reads.RESPONSE, 0.5)
    best = optimal_policy(problem, weights)
    leaf = best.policy.clone().requires_grad_()
    objective(problem, leaf.log_softmax(-1), weights).backward()
    assert leaf.grad is not None
    assert leaf.grad.abs().max() < 1e-10
    for seed in range(5):
        assert float(objective(problem, other(problem, seed), weights)) < best.value


def test_zero_weights_have_no_heuristic_policy_unless_rewards_agree() -> None:
    with pytest.raises(UserError, match="above 0"):
        backward_heuristic(random_problem(), torch.tensor([1.0, 1.0, 0.0], dtype=torch.float64))
    positive, last, blind, word = existence_rows([random_problem(seed=seed) for seed in range(2)])
    assert positive.highest < 1e-10
    assert positive.starts < 1e-8
    assert last.lowest > 0.5
    assert blind.highest < 1e-10
    assert word.lowest > 0.1


# ------------------------------------------------------------------------------------------------ lemmas, theorem, note


@pytest.mark.parametrize("reads", list(Reads))
@pytest.mark.parametrize("delta", [0.05, 0.3, 0.8])
def test_lemmas_and_theorem_hold_over_delta(reads: Reads, delta: float) -> None:
    problems = [random_problem(seed=seed) for seed in (10, 11)]
    lemma, row = lemma_row(problems, reads, delta), policy_row(cases(problems, reads, delta), reads, delta)
    assert lemma.identity < 1e-10
    assert 0 < lemma.used <= 1
    assert 0 <= row.used_a <= 1
    assert 0 < row.used_b <= 1
    if reads is Reads.POSITION:
        assert lemma.outside == lemma.negative == 0
        assert row.tv_best_h < 1e-9
    else:
        assert lemma.outside > 0  # the sandwich of predictable weights is no law for weights that look ahead
        assert row.tv_best_h > 1e-4


def test_the_weights_of_the_study_have_mean_one_and_the_delta_they_name() -> None:
    for reads in Reads:
        weights = spread_weights(Tree(3, 4), reads, 0.4)
        torch.testing.assert_close(weights.mean(-1), torch.ones(81, dtype=torch.float64))
        assert float((weights - 1).abs().max()) == pytest.approx(0.4)


def test_the_normalised_weighted_likelihood_of_the_heuristic_policy_is_the_tilted_one() -> None:
    problem = random_problem(seed=8)
    ones = torch.ones(27, 3, dtype=torch.float64)
    assert abs(float(weighted_likelihood(problem.tree, problem.reference, ones)[1])) < 1e-12
    weights = spread_weights(problem.tree, Reads.RESPONSE, 0.6)
    h = solve_heuristic(problem, weights).policy
    logs, mass = weighted_likelihood(problem.tree, h, weights)
    base, _ = weighted_likelihood(problem.tree, problem.reference, weights)
    torch.testing.assert_close(logs, (base + problem.rewards / problem.beta).log_softmax(0), rtol=0, atol=1e-10)
    assert abs(float(mass)) > 1e-3  # the weighted likelihood itself is no distribution
    assert float((logs.exp() - probabilities(problem.tree, h)).abs().max()) > 1e-3


def test_low_weights_are_freer_at_the_optimum_and_held_at_the_first_step() -> None:
    path = freedom_path([random_problem(seed=seed) for seed in range(3)], marks=(1, 400))
    low, middle, high = path.limit.tolist()
    assert low > middle > high
    first = path.ratios[0].tolist()
    assert first == pytest.approx([weight**2 for weight in path.weights], rel=0.05)  # a step is as long as the weight
    assert path.ratios[1, 0] > 1 > path.ratios[1, 2]


# ------------------------------------------------------------------------------------------------ what is shown


def test_every_table_is_in_every_report(study: Study) -> None:
    shown = tables(study)
    assert [one.caption for one in shown][:2] == ["statements", "constants, the paper's quantities and bounds"]
    assert len(shown) == 10
    for one, frame in zip(shown, frames(study).values(), strict=True):
        assert (*frame.columns,) == tuple(one.columns) and len(frame) == len(one.rows)
        assert frame.iloc[:, 0].tolist() == [row[0] for row in one.rows]
    assert report_markdown(study).count("### ") == len(shown)
    assert all(len(row) == len(one.columns) for one in shown for row in one.rows)


def test_the_place_of_before_says_where_it_went() -> None:
    with pytest.raises(AttributeError, match=r"attnpo\.theory\.run_study: .* python -m experiments\.theory"):
        theory.run_study  # type: ignore[attr-defined]  # noqa: B018
    done = subprocess.run([sys.executable, "-m", "attnpo.theory"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr == f"error: {theory.MOVED}\n"


def test_the_figures_and_the_command(
    study: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert theory_figure(study, tmp_path / "a.png").stat().st_size > 20_000
    assert tightness_figure(study, tmp_path / "b.png").stat().st_size > 20_000
    monkeypatch.setattr("experiments.theory.study.run_study", lambda: study)
    assert main([str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "theory.png").is_file()
    assert (tmp_path / "out" / "tightness.png").is_file()
    text = capsys.readouterr().out
    assert text.startswith("statements\n")
    assert [one.caption for one in tables(study) if f"{one.caption}\n" not in text] == []
    assert main([str(tmp_path / "out"), "--markdown"]) == 0
    assert capsys.readouterr().out.startswith("### statements\n| section |")
