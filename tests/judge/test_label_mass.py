"""The probability of a judge's labels at the verdict position, worked out by hand."""

import math

import pytest
import torch

from attnpo.judge.base import JudgeReading
from attnpo.judge.label_check import LabelMass, in_words, mass_of

A, B, TRACE = 5, 6, 7
TEXTS = {A: " A", B: " B", TRACE: "<think>"}


def reading(first: float, second: float, token: int) -> JudgeReading:
    """What a judge gave whose labels have these probabilities, and whose most likely token is ``token``."""
    logps = torch.tensor([first, second, max(first, second, 0.5)]).log()
    return JudgeReading(torch.zeros(0, 3), None, logps[:2], token, logps)


def test_mass_and_texts_by_hand() -> None:
    readings = [reading(0.5, 0.25, A), reading(0.125, 0.0, TRACE), reading(0.0625, 0.0625, TRACE)]
    mass = mass_of(readings, TEXTS.__getitem__)
    assert mass.share == pytest.approx((0.75 + 0.125 + 0.125) / 3) and mass.prompts == 3
    assert mass.written == (("<think>", 2), (" A", 1))
    assert "33.3 % of the probability" in mass.text() and "'<think>' (2 of 3), ' A' (1 of 3)" in mass.text()


def test_a_problem_begins_below_the_minimum() -> None:
    mass = LabelMass(0.5, 4, (("<think>", 4),))
    assert mass.problem(0.5) is None
    told = mass.problem(math.nextafter(0.5, 1))
    assert told is not None and "'<think>' (4 of 4)" in told and "judge.prefill" in told and "judge.labels" in told


def test_what_is_not_known() -> None:
    with pytest.raises(ValueError, match="verdicts"):
        mass_of([JudgeReading(torch.zeros(0, 3))], TEXTS.__getitem__)
    assert in_words((), 4) == "unknown tokens"
