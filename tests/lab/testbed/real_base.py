"""The testbed's base as its recipe has it, by `make base`: four minutes of one core, so not among the daily tests.

Each study that builds a base measures it the same way, and warns where its judge is under the recipe's gate.
"""

import sys
from pathlib import Path

import pytest

from attnpo.lab.testbed.grammar import Grammar
from attnpo.lab.testbed.pretrain import build_base
from attnpo.lab.testbed.recipes import BaseRecipe


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", [0, 1])
def test_the_real_base_passes_its_gate_in_both_assemblies(seed: int, tmp_path: Path) -> None:
    recipe = BaseRecipe()
    report = build_base(Grammar(), recipe, tmp_path, seed=seed)
    said = (
        f"seed {seed}: {report['steps']} steps, judge {report['judge_text']:.3f} (text) {report['judge_ids']:.3f} (ids)"
    )
    sys.stdout.write(said + "\n")
    assert report["gate_passed"] and min(report["judge_text"], report["judge_ids"]) >= recipe.judge_gate
    assert report["broken_rate"] < 0.1 and report["ended_rate"] > 0.95
