"""Studies of a tiny world: their configuration, and one run to its end."""

from dataclasses import dataclass
from pathlib import Path

from attnpo.lab.studies.config import FitConfig
from attnpo.lab.studies.outcome import Outcome
from attnpo.lab.studies.page import finish_study
from attnpo.lab.studies.runner import run_study
from tests.run.worlds import World, build_world, judge_loads

STUDY = """
# @package study
_target_: attnpo.lab.studies.study.Study
name: tiny
arms:
  uniform: [weights=uniform]
  broken: [weights=uniform, data.val_split=nowhere]
  attention: [weights=attention]
layers: []
grid:
  _target_: attnpo.lab.studies.study.Grid
  lr: [1.0e-3]
  beta: [0.2]
seeds: 1
workers: 1
shared: [callbacks=none, reference=cached, trainer.max_steps=1]
"""
TRUTH = """
_target_: attnpo.lab.testbed.scoring.TruthScorer
prompts: 4
grammar: {_target_: attnpo.lab.testbed.grammar.Grammar, min_clauses: 1, max_clauses: 2}
"""


def write_configs(folder: Path, study: str = STUDY) -> Path:
    """Writes a folder of configurations with ``experiment=tiny`` and ``truth=known``, and returns it."""
    for name, text in (("experiment/tiny", study), ("truth/known", TRUTH)):
        (folder / name).parent.mkdir(parents=True)
        (folder / f"{name}.yaml").write_text(text)
    return folder


@dataclass(frozen=True)
class Finished:
    """Study that ran and wrote its tables; nobody may change its folder so that others would notice."""

    cfg: FitConfig
    world: World
    outcome: Outcome
    judges: list[str]  # the judges that were loaded for it

    @property
    def folder(self) -> Path:
        return self.outcome.folder


def finish(folder: Path, study: str, *words: str) -> Finished:
    world = build_world(folder)
    cfg = world.config("experiment=tiny", *words, config_dir=write_configs(folder / "configs", study))
    with judge_loads() as loaded:
        outcome = run_study(cfg, folder / "out")
    finish_study(outcome)
    return Finished(cfg, world, outcome, loaded)
