"""A world for whole runs in seconds: a tiny random Llama with the testbed's tokenizer, and pairs of its grammar."""

import atexit
import random
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig

from attnpo.config.compose import compose, load
from attnpo.judge.judge import RunJudge
from attnpo.lab.studies.config import FitConfig
from attnpo.lab.testbed.grammar import Grammar, ReviewPrompt
from attnpo.lab.testbed.pairs import pair_row, write_jsonl
from attnpo.lab.testbed.pretrain import new_model
from attnpo.lab.testbed.recipes import BaseRecipe
from attnpo.lab.testbed.tokenizer import build_tokenizer

GRAMMAR = Grammar(min_clauses=1, max_clauses=2)
RECIPE = BaseRecipe(layers=2, width=32, heads=2, mlp=32, initializer_range=0.2)
TRAIN, VAL = 12, 6


@dataclass(frozen=True)
class World:
    """Folders of a model, of pairs and of a store."""

    model: Path
    data: Path
    store: Path

    def overrides(self, *more: str) -> list[str]:
        """What names this world on the command line, with three optimiser steps of four pairs."""
        return [
            "setting=real_smoke",
            "judge=testbed",
            "judge.assembly=text",  # the default way, with the testbed's short wording
            f"model.path={self.model}",
            f"data.path={self.data}",
            f"store={self.store}",
            "model.chat_template=null",
            "batch.pairs=4",
            "batch.micro=2",
            "trainer.max_epochs=1",
            "trainer.accelerator=cpu",
            "trainer.threads=1",
            "trainer.progress=false",
            "callbacks.samples=2",
            "callbacks.sample_tokens=6",
            *more,
        ]

    def config(self, *more: str, config_dir: Path | None = None) -> FitConfig:
        """The typed configuration of ``fit`` for this world."""
        root: FitConfig = load("fit", self.overrides(*more), config_dir)
        return root

    def composed(self, *more: str) -> DictConfig:
        """The same as it is composed, not yet read."""
        return compose("fit", self.overrides(*more))


def build_world(folder: Path, train: int = TRAIN, val: int = VAL, layers: int = RECIPE.layers) -> World:
    """A new world under ``folder`` with an empty store, so many pairs, and a model of so many layers."""
    shutil.copytree(_built(train, val, layers), folder, dirs_exist_ok=True)
    return World(folder / "model", folder / "data", folder / "store")


@cache
def _built(train: int, val: int, layers: int) -> Path:
    """Builds the folder that every world of these sizes is a copy of, until this process ends."""
    folder = Path(tempfile.mkdtemp(prefix="world-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    tokenizer = build_tokenizer(GRAMMAR)
    model = new_model(replace(RECIPE, layers=layers), tokenizer, seed=3)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    (folder / "data").mkdir()
    rng = random.Random(7)
    for name, split, count in (("train", "train", train), ("test", "validation", val)):
        rows = [_row(rng, prompt) for prompt in GRAMMAR.prompts(split)[:count]]
        write_jsonl(folder / "data" / f"{name}.jsonl", rows)
    return folder


def _row(rng: random.Random, prompt: ReviewPrompt) -> dict[str, object]:
    while True:
        scored = []
        for _ in range(2):
            text = GRAMMAR.sample_review(rng, prompt)
            scored.append((text, GRAMMAR.true_reward(text, prompt.topic).reward))
        scored.sort(key=lambda item: item[1])
        if scored[1][1] > scored[0][1]:
            return pair_row(prompt, scored[1], scored[0])


@contextmanager
def judge_loads() -> Iterator[list[str]]:
    """A list that gets the judge's path whenever a judge model is loaded."""
    loaded: list[str] = []
    original = RunJudge.load

    def load(room: RunJudge, *arguments: Any, **named: Any) -> Any:
        loaded.append(room.path)
        return original(room, *arguments, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunJudge, "load", load)
        yield loaded
