"""Every objective's formula, called alone on one pair of plain tensors; the numbers are derived by hand."""

import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from attnpo.objectives.cpo import cpo_loss
from attnpo.objectives.dpo import dpo_loss
from attnpo.objectives.ipo import ipo_loss
from attnpo.objectives.kto import kto_loss
from attnpo.objectives.orpo import orpo_loss
from attnpo.objectives.rdpo import rdpo_loss
from attnpo.objectives.rrhf import rrhf_loss
from attnpo.objectives.simpo import simpo_loss
from attnpo.objectives.slic_hf import slic_hf_loss
from attnpo.objectives.tdpo import tdpo1_loss, tdpo2_loss
from attnpo.objectives.terms import Sft, add_sft, chosen_nll, low_shares, with_anchor
from attnpo.objectives.tidpo import Triplet, tidpo_loss, triplet_term
from attnpo.objectives.tis_dpo import tis_dpo_loss
from attnpo.objectives.twdpo import otpo_loss, twdpo_loss, twdpo_variant_loss
from attnpo.schema import ObjectiveOutput, RowGroup

DOCS = Path(__file__).parents[2] / "docs" / "objectives.md"


def double(*rows: list[float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


# Two chosen tokens and one rejected: S(p) = -3 and -4, S(d) = 1 and -2, the padded column holds nonsense.
P = double([-1.0, -2.0], [-4.0, math.nan])
R = double([-1.5, -2.5], [-2.0, math.inf])
MASK = torch.tensor([[True, True], [True, False]])
WEIGHTS = double([0.75, 0.25], [1.0, 9.0])  # sum a p = -1.25 and -4, sum a d = 0.5 and -2
LENGTHS = double([2.0, 3.0])[0]  # |y| sum a p = -2.5 and -12, |y| sum a d = 1 and -6
KL = double([0.1, 0.2], [0.5, math.nan])  # K = 0.3 and 0.5
ROWS = RowGroup(torch.zeros(2, 2, dtype=torch.long), MASK, {"reward": WEIGHTS}, LENGTHS, None)
LOW = low_shares(ROWS)  # n a = 1.5 and 0.5, and 1: shares 0 and 0.5, and 0
NLL = chosen_nll(P, MASK, Sft.SUM)  # 3
TRIPLET = Triplet(double([0.25])[0], torch.ones(1, dtype=torch.bool))


def lsig(z: float) -> float:
    return -math.log1p(math.exp(-z))


def log_odds(mean: float) -> float:
    return mean - math.log(1 - math.exp(mean))


CASES: list[tuple[Callable[[], ObjectiveOutput], float, tuple[float, float]]] = [
    (lambda: dpo_loss(P, R, MASK, 0.4), -lsig(0.4 * 3), (0.4, -0.8)),
    (lambda: add_sft(dpo_loss(P, R, MASK, 0.4), NLL, 0.5), -lsig(0.4 * 3) + 1.5, (0.4, -0.8)),
    (lambda: dpo_loss(P, R, MASK, 0.4, clip_ratio=1.0), -lsig(0.4 * 2), (0.4, -0.4)),
    (lambda: twdpo_variant_loss(P, R, WEIGHTS, MASK, LENGTHS, 0.4, clip_ratio=0.4), -lsig(0.4 * 2), (0.32, -0.48)),
    (lambda: with_anchor(dpo_loss(P, R, MASK, 0.4), KL, MASK, 0.1), -lsig(0.4 * 3) + 0.1 * 0.4, (0.4, -0.8)),
    (lambda: with_anchor(dpo_loss(P, R, MASK, 0.4), KL, MASK, 0.1, LOW), -lsig(0.4 * 3) + 0.1 * 0.05, (0.4, -0.8)),
    (lambda: twdpo_loss(P, R, WEIGHTS, MASK, LENGTHS, 0.4), -lsig(0.4 * 7), (0.4, -2.4)),
    (lambda: twdpo_loss(P, R, WEIGHTS, MASK, None, 0.4), -lsig(0.4 * 2.5), (0.2, -0.8)),
    (lambda: ipo_loss(P, R, WEIGHTS, MASK, None, 0.4), (2.5 - 1.25) ** 2, (0.2, -0.8)),
    (lambda: ipo_loss(P, R, WEIGHTS, MASK, LENGTHS, 0.4), (7 - 1.25) ** 2, (0.4, -2.4)),
    (
        lambda: kto_loss(P, R, WEIGHTS, MASK, LENGTHS, torch.tensor(0.5), 0.4, 3.0, 5.0),
        0.5 * (3 * math.exp(lsig(-0.4 * 0.5)) + 5 * math.exp(lsig(0.4 * -6.5))),
        (0.4, -2.4),
    ),
    (lambda: rdpo_loss(P, R, WEIGHTS, MASK, LENGTHS, 0.4, 0.05), -lsig(0.4 * 7 + 0.05), (0.4, -2.4)),
    (lambda: add_sft(cpo_loss(P, WEIGHTS, MASK, LENGTHS, 0.4), NLL), -lsig(0.4 * 9.5) + 3, (-1.0, -4.8)),
    (lambda: simpo_loss(P, WEIGHTS, MASK, 2.0, 1.0), -lsig(2 * 2.75 - 1), (-2.5, -8.0)),
    (
        lambda: add_sft(orpo_loss(P, WEIGHTS, MASK, 0.1), NLL),
        3 - 0.1 * lsig(log_odds(-1.25) - log_odds(-4.0)),
        (-0.125, -0.4),
    ),
    (lambda: add_sft(rrhf_loss(P, WEIGHTS, MASK, 0.0), NLL, 0.5), 1.5, (-2.5, -4.0)),
    (lambda: add_sft(slic_hf_loss(P, WEIGHTS, MASK, LENGTHS, 10.0), NLL, 0.1), 10 - 9.5 + 0.3, (-2.5, -12.0)),
    (lambda: tdpo1_loss(P, R, WEIGHTS, MASK, LENGTHS, KL, 0.4), -lsig(0.4 * (7 - 0.2)), (0.52, -2.2)),
    (lambda: tdpo2_loss(P, R, WEIGHTS, MASK, LENGTHS, KL, 0.4, 0.5), -lsig(0.4 * (7 - 0.1)), (0.52, -2.2)),
    (
        lambda: tidpo_loss(P, R, WEIGHTS, MASK, KL, TRIPLET, 0.4, 0.5, 0.1),
        -lsig(0.4 * (2.5 - 0.1)) + 0.025,
        (0.32, -0.6),
    ),
    (lambda: tidpo_loss(P, R, WEIGHTS, MASK, None, None, 0.4, 0.5, 0.1), -lsig(0.4 * 2.5), (0.2, -0.8)),
    (lambda: otpo_loss(P, R, WEIGHTS, MASK, 0.4), -lsig(0.4 * 2.5), (0.2, -0.8)),
    (lambda: tis_dpo_loss(P, R, WEIGHTS, MASK, LENGTHS, None, 0.4), -lsig(0.4 * 7), (0.4, -2.4)),
    # sum a KL = 0.125 and 0.5.
    (
        lambda: tis_dpo_loss(P, R, WEIGHTS, MASK, None, KL, 0.4, 0.5),
        -lsig(0.4 * (2.5 - 0.5 * (0.125 - 0.5))),
        (0.4 * (0.5 - 0.125), 0.4 * (-2 - 0.5)),
    ),
]


@pytest.mark.parametrize(("formula", "loss", "rewards"), CASES)
def test_a_formula_by_hand(formula: Callable[[], ObjectiveOutput], loss: float, rewards: tuple[float, float]) -> None:
    out = formula()
    assert out.losses.item() == pytest.approx(loss, rel=1e-12)
    assert (out.chosen_rewards.item(), out.rejected_rewards.item()) == pytest.approx(rewards)


def test_a_token_beyond_the_clip_is_not_pushed_on() -> None:
    """The log-ratios are 0.5, 0.5 and -2: held within 1, the rejected token alone gets no gradient."""
    logps = torch.nan_to_num(P).requires_grad_()
    dpo_loss(logps, torch.nan_to_num(R, posinf=0.0), MASK, 0.4, clip_ratio=1.0).losses.sum().backward()
    assert logps.grad is not None and (logps.grad != 0).tolist() == [[True, True], [False, False]]


def test_factors_are_shares_of_uniform_as_they_are() -> None:
    assert low_shares(replace(ROWS, factors=True)).tolist() == [[0.25, 0.75], [0.0, 0.0]]


def test_a_triplet_by_hand() -> None:
    # d_a = 1, against 0.5 and 0.5 (chosen, one position shared) and -2 (rejected).
    ratios, anchor = torch.where(MASK, P - R, 0.0), double([1.0])
    term = triplet_term(ratios, MASK, anchor, torch.ones(1, 1, dtype=torch.bool), 9.0)
    assert term.losses.item() == pytest.approx(0.5**2 - 3**2 + 9) and term.measured.all()


def test_the_example_of_the_docs_gives_what_it_says() -> None:
    (example,) = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.S)
    names: dict[str, Any] = {}
    exec(example, names)
    (said,) = re.findall(r"# losses: \[([\d.]+)\]", example)
    assert names["output"].losses.item() == pytest.approx(float(said), abs=5e-5)
