"""What templates ignore, what tokenizers strip, sets and answers with nothing to prefer, as a user types them."""

import json

import pytest

from attnpo import pair
from attnpo.cli.entry import run_entry
from tests.bad_input.attempts import Attempts
from tests.bad_input.conftest import Record

NOT_STARTED = "run not started"


@pytest.mark.parametrize("part", ["model", "judge"])
def test_a_variable_that_the_chat_template_never_reads(attempts: Attempts, record: Record, part: str) -> None:
    given = f"{part}.chat_template_kwargs={{enable_thinking: false}}"
    message = attempts.weigh(given).refused()
    assert message.startswith(f"{part}.chat_template_kwargs.enable_thinking: the chat template never reads ")
    assert "variables of this template: " in message
    record(given, message, NOT_STARTED)


def test_a_prefill_whose_end_is_stripped(attempts: Attempts, record: Record) -> None:
    message = attempts.weigh("judge.prefill='the better review is '", "judge.labels=[' A',' B']").refused()
    assert message.startswith("judge.prefill: the judge's tokenizer strips the end of 'the better review is '")
    record("judge.prefill='... is '", message, NOT_STARTED)


def test_a_mixture_with_an_empty_set(attempts: Attempts, record: Record) -> None:
    """Nothing in it, or no row of it with anything to prefer."""
    sound = attempts.world.data / "train.jsonl"
    for name, content, problem in (
        ("none", "", "none.jsonl is empty"),
        ("same", json.dumps({"prompt": "p", "chosen": "x", "rejected": "x"}) + "\n", "has no usable pairs"),
    ):
        file = attempts.folder / f"{name}.jsonl"
        file.write_text(content, encoding="utf-8")
        mixed = f"data.mix={{sound: {{path: {sound}}}, {name}: {{path: {file}}}}}"
        message = attempts.fit(mixed, "data.val_share=0.2").refused()
        assert message.startswith(f"data.mix.{name}: ") and problem in message
        record(f"data.mix with a set of which {name} is left", message, NOT_STARTED)


def test_answers_that_are_all_equal(attempts: Attempts, record: Record, capsys: pytest.CaptureFixture[str]) -> None:
    file = attempts.folder / "answers.jsonl"
    rows = [
        {"id": name, "prompt": name, "answer": "the same", "points": 1} for name in ("one", "two") for _ in range(4)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    words = [
        f"answers.path={file}",
        "ranker=column",
        "ranker.column=points",
        f"output={attempts.folder / 'pairs.jsonl'}",
    ]
    capsys.readouterr()
    assert run_entry(pair.main, "pair", words, "", "", complete=lambda cfg: True) == 2
    message = capsys.readouterr().err.removeprefix("error: ").strip()
    assert "no pairs can be built (" in message and ": 2" in message and "Traceback" not in message
    assert not (attempts.folder / "pairs.jsonl").exists()
    record("attnpo.pair of answers all equal", message, "nothing is ranked")
