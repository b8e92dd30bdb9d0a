"""A tiny base, trained for a few steps only: enough for mechanics, useless as a judge."""

import random
from pathlib import Path

import pytest
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from attnpo.lab.testbed.grammar import Grammar
from attnpo.lab.testbed.prepare import Testbed, load_base
from attnpo.lab.testbed.recipes import BaseRecipe, PairRecipe
from attnpo.run.components import BuiltFolders

TINY = Testbed(
    grammar=Grammar(min_clauses=1, max_clauses=2, p_sentiment=0.8),  # short reviews are learnt soonest
    base=BaseRecipe(
        layers=2, width=64, heads=2, mlp=64, steps=120, warmup=10, learning_rate=6e-3, answer_rows=16, judge_rows=1,
        score_rows=1, judge_gate=0.0, judge_pairs=20,
    ),
    pairs=PairRecipe(train=40, validation=12, margin=0.25),
)  # fmt: skip


@pytest.fixture(scope="session")
def tiny_testbed() -> Testbed:
    return TINY


@pytest.fixture(scope="session")
def built_folders(tmp_path_factory: pytest.TempPathFactory) -> BuiltFolders:
    return TINY.prepare(tmp_path_factory.mktemp("testbed"))


@pytest.fixture(scope="session")
def loaded_base(built_folders: BuiltFolders) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    return load_base(built_folders.model_path)


@pytest.fixture
def rng() -> random.Random:
    return random.Random(5)


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    return tmp_path / "scratch"
