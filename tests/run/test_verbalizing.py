"""Verbalised weights as a run: what the store keeps, what the account says, who cannot be asked, who may not."""

import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from attnpo.data.prepare import SILENT, UNASKED
from attnpo.lab.testbed.forced_scores import ForcedScores
from attnpo.run.input_summary import example_statistics
from attnpo.run.resolve import resolve
from attnpo.run.run import run
from attnpo.schema import Message, Sampling, UserError
from attnpo.system.store import Store
from attnpo.weigh import fill_store
from attnpo.weights.readers import ANSWERS, CachedGenerator, RunVerbalizer
from attnpo.weights.score_parser import NO_PARTS
from tests.run.made import make_inputs
from tests.run.worlds import TRAIN, VAL, World

PAIRS = TRAIN + VAL
KNOWN = (
    "weights=verbalized",
    "verbalizer=testbed",
    "verbalizer.known_parts.grammar={min_clauses: 1, max_clauses: 2}",
)
FREE = (
    "weights=verbalized",
    "verbalizer=testbed",
    "verbalizer.known_parts=null",
    "verbalizer.sampling.max_new_tokens=8",
)


@contextmanager
def loads() -> Iterator[list[str]]:
    """A list that gets the model's path whenever a verbalizer's model is loaded."""
    loaded: list[str] = []
    original = RunVerbalizer._load_generator

    def generator(room: RunVerbalizer, *arguments: Any) -> Any:
        loaded.append(str(room.path))
        return original(room, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunVerbalizer, "_load_generator", generator)
        yield loaded


def test_a_whole_run_on_known_parts(world: World, tmp_path: Path) -> None:
    """Every part gets a digit, so nothing is dropped, and the account of it is in the run's result."""
    with loads() as loaded:
        result = run(world.config(*KNOWN, f"store={tmp_path}"), tmp_path / "one")
    assert len(loaded) == 1
    account = result.inputs["verbalizer"]
    assert (account["pairs"], account["answers"], account["parse_rate"]) == (PAIRS, 2 * PAIRS, 1.0)
    assert (account["coverage"], account["problems"], account["dropped_pairs"]) == (1.0, {}, 0)
    assert account["parts"] >= 2 * PAIRS
    assert result.inputs["train"]["pairs"] == TRAIN
    assert "judge_prompts" not in result.inputs and "judge" not in result.inputs
    stored = json.loads((tmp_path / "one" / "result.json").read_text(encoding="utf-8"))
    assert stored["inputs"]["verbalizer"] == account


def test_a_second_reading_asks_nobody_and_reports_the_same(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = world.config(*KNOWN, f"store={tmp_path}")
    caplog.set_level(logging.INFO)
    fill_store(config)
    assert [line for line in caplog.messages if line.startswith("verbalizer: 100.0% of 36 answers")]
    first = example_statistics(make_inputs(config))["verbalizer"]
    with loads() as loaded:
        inputs = make_inputs(world.config(*KNOWN, f"store={tmp_path}", "weights.postprocess.sink_tokens=1"))
    assert (loaded, inputs.weighed.report and inputs.weighed.report.computed) == ([], 0)
    assert example_statistics(inputs)["verbalizer"] == first


def test_a_model_that_says_nothing_usable_ends_with_every_pair_named(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The random model's free words hold no part: all of it is counted, and nothing becomes uniform."""
    caplog.set_level(logging.INFO)
    inputs = make_inputs(world.config(*FREE, f"store={tmp_path}"))
    account = example_statistics(inputs)["verbalizer"]
    assert (account["answers"], account["parsed"], account["coverage"]) == (2 * PAIRS, 0, 0.0)
    assert account["problems"] == {NO_PARTS: 2 * PAIRS}
    assert account["dropped_pairs"] == PAIRS
    assert inputs.examples["train"].tally.counts == {SILENT: TRAIN}
    assert inputs.examples["train"].examples == []
    with pytest.raises(UserError, match=rf"train: all {TRAIN} pairs were dropped \({SILENT}: {TRAIN}\)"):
        run(world.config(*FREE, f"store={tmp_path}"), tmp_path / "run")
    assert f"verbalizer: {NO_PARTS}: {2 * PAIRS}" in caplog.messages, "said before the error"


def test_what_does_not_fit_is_dropped_and_counted_and_none_at_all_is_an_error(world: World, tmp_path: Path) -> None:
    cfg, base, *_ = resolve(world.config(*KNOWN, f"store={tmp_path}"))
    room = RunVerbalizer(cfg.verbalizer, base.spec, base.chat, base.store)
    pairs = cfg.data.load("train").pairs
    sizes = sorted(
        max(len(base.chat.prompt_ids(room.questions.messages(pair, side))) for side in ("chosen", "rejected"))
        for pair in pairs
    )
    middle = sizes[TRAIN // 2]
    assert sizes[0] < middle < sizes[-1]
    limit = f"verbalizer.max_length={middle + 128}"
    inputs = make_inputs(world.config(*KNOWN, f"store={tmp_path}", limit))
    lost = sum(size > middle for size in sizes)
    assert inputs.examples["train"].tally.counts == {f"{UNASKED}: a prompt is too long for the verbalizer": lost}
    assert len(inputs.examples["train"].examples) == TRAIN - lost
    assert example_statistics(inputs)["verbalizer"]["unasked"] >= lost
    with pytest.raises(UserError, match=f"the verbalizer cannot read any of the {PAIRS} pairs, e.g. pair "):
        make_inputs(world.config(*KNOWN, f"store={tmp_path}", "verbalizer.max_length=129"))
    with pytest.raises(UserError, match="max_new_tokens=128 leaves no room for a prompt within 128 tokens"):
        make_inputs(world.config(*KNOWN, f"store={tmp_path}", "verbalizer.max_length=128"))


def test_true_importance_trains(world: World, tmp_path: Path) -> None:
    overrides = ("weights=true_importance", "weights.grammar={min_clauses: 1, max_clauses: 2}")
    result = run(world.config(*overrides, f"store={tmp_path}"), tmp_path / "truth")
    assert result.inputs["train"]["pairs"] == TRAIN
    assert result.inputs["train"]["effective_share"] < 0.5


def test_what_changes_an_answer_changes_the_key(world: World) -> None:
    def keys(*more: str) -> tuple[str, str]:
        cfg, base, *_ = resolve(world.config(*KNOWN, *more))
        room = RunVerbalizer(cfg.verbalizer, base.spec, base.chat, base.store)
        return json.dumps(room.fingerprint(), sort_keys=True), json.dumps(room.questions.fingerprint(), sort_keys=True)

    plain = keys()
    assert keys("verbalizer.batch_size=3", "verbalizer.known_parts.batch_size=7") == plain
    assert keys("verbalizer.sampling.temperature=1")[0] != plain[0]
    assert keys("verbalizer.known_parts=null")[0] != plain[0]
    assert keys("verbalizer.template_file=verbalizer/default.txt") == (plain[0], keys(
        "verbalizer.template_file=verbalizer/default.txt")[1])  # fmt: skip
    assert keys("verbalizer.template_file=verbalizer/default.txt")[1] != plain[1]


class Echo:
    """Answers with the prompt and its number; ``asked`` has every prompt."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def generate(self, prompts: Sequence[Sequence[Message]], sampling: Sampling) -> list[str]:
        self.asked += [prompt[0]["content"] for prompt in prompts]
        return [f"{prompt[0]['content']} {len(self.asked)}" for prompt in prompts]


def test_kept_answers_are_asked_for_once(tmp_path: Path) -> None:
    def prompts(*texts: str) -> list[list[Message]]:
        return [[Message(role="user", content=text)] for text in texts]

    echo, table = Echo(), Store(tmp_path).table(ANSWERS, {"model": "echo"})
    first = CachedGenerator(table, lambda: echo).generate(prompts("a", "b", "a"), Sampling())
    assert (first, echo.asked) == (["a 2", "b 2", "a 2"], ["a", "b"])
    later = CachedGenerator(Store(tmp_path).table(ANSWERS, {"model": "echo"}), lambda: echo)
    assert later.generate(prompts("b", "c"), Sampling()) == ["b 2", "c 3"]
    assert echo.asked == ["a", "b", "c"]
    nobody = CachedGenerator(
        Store(tmp_path).table(ANSWERS, {"model": "echo"}), lambda: pytest.fail("all of it is kept")
    )
    assert nobody.generate(prompts("c", "a"), Sampling()) == ["c 3", "a 2"]


class Failing(Echo):
    """Fails in its call number ``last``."""

    def __init__(self, last: int) -> None:
        super().__init__()
        self.last, self.calls = last, 0

    def generate(self, prompts: Sequence[Sequence[Message]], sampling: Sampling) -> list[str]:
        self.calls += 1
        if self.calls == self.last:
            raise KeyboardInterrupt
        return super().generate(prompts, sampling)


def test_an_interruption_within_one_call_loses_its_last_slice_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    prompts = [[Message(role="user", content=letter * (1 + place))] for place, letter in enumerate("abcdefghij")]

    def answers(generator: Echo) -> list[str]:
        table = Store(tmp_path).table(ANSWERS, {"model": "echo"})
        return CachedGenerator(table, lambda: generator, at_once=3).generate(prompts, Sampling())

    first, rest = Failing(3), Echo()
    with pytest.raises(KeyboardInterrupt):
        answers(first)
    assert first.asked == [turn[0]["content"] for turn in prompts[:3:-1]], "two slices of three, the longest first"
    said = [line.partition(" answers")[0] for line in caplog.messages if line.startswith("verbalizer: ")]
    assert said == ["verbalizer: 3 of 10", "verbalizer: 6 of 10"]
    found = answers(rest)
    assert sorted(rest.asked) == sorted(turn[0]["content"] for turn in prompts[:4])
    assert [text.split()[0] for text in found] == [turn[0]["content"] for turn in prompts]


def test_an_interrupted_pass_goes_on_where_it_stopped(world: World, tmp_path: Path) -> None:
    config = world.config(*KNOWN, f"store={tmp_path}")
    base = resolve(config).base
    room = RunVerbalizer(config.verbalizer, base.spec, base.chat, base.store)
    pairs = config.data.load("train").pairs[:3]
    import torch

    reader = room.load(torch.device("cpu"))
    reader.generator.generate([reader.questions.build_prompt(pair, "chosen") for pair in pairs], reader.sampling)
    asked = 0
    original = ForcedScores.generate

    def counted(self: ForcedScores, prompts: Any, sampling: Any) -> list[str]:
        nonlocal asked
        asked += len(prompts)
        return original(self, prompts, sampling)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ForcedScores, "generate", counted)
        inputs = make_inputs(config)
    account = example_statistics(inputs)["verbalizer"]
    assert (asked, account["answers"]) == (2 * PAIRS - 3, 2 * PAIRS)
    assert replace(inputs.weighed.answers, lost=0) == inputs.weighed.answers


def test_a_run_stores_its_answers_every_few_batches(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """36 answers in slices of four batches of two."""
    caplog.set_level(logging.INFO)
    fill_store(world.config(*KNOWN, f"store={tmp_path}", "verbalizer.batch_size=2"))
    said = [line.partition(" answers")[0] for line in caplog.messages if " answers, " in line and " s" in line]
    assert said == [f"verbalizer: {done} of {2 * PAIRS}" for done in (8, 16, 24, 32, 36)]
