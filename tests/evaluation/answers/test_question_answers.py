"""Questions of several turns, answered in rounds by a tiny random model: what is asked, kept, copied and refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from attnpo.data.prompts import REFUSED
from attnpo.evaluation.answers import RoundAnswers, answer_questions, round_path
from attnpo.evaluation.base import Question
from attnpo.evaluation.chat import ChatModel
from attnpo.evaluation.local_chat import HFAnswering, describe_model
from attnpo.models.generate import make_chat_generator
from attnpo.models.loading import load_model
from attnpo.models.spec import ModelSpec
from attnpo.schema import Message, Sampling, UserError
from attnpo.system.files import add_row_digest, digest, pop_row_digest
from tests.evaluation.answers.tiny import batches, rows_of
from tests.run.worlds import GRAMMAR, World

TEXTS = [prompt.text for prompt in GRAMMAR.prompts("train")[:8]]
TWO = [
    Question("q1", (TEXTS[0], TEXTS[1])),
    Question("q2", (TEXTS[2],), temperature=0.0),
    Question("q3", (TEXTS[3], TEXTS[4]), temperature=0.0),
    Question("q4", (TEXTS[5], TEXTS[6]), temperature=0.4),
]
SAMPLING = Sampling(max_new_tokens=5, temperature=0.8, seed=10)


def open_model(world: World, **settings: Any) -> ChatModel:
    return HFAnswering(**settings).open(ModelSpec(str(world.model)), torch.device("cpu"))


def answered(world: World, folder: Path, round_: int = 0, **settings: Any) -> RoundAnswers:
    return answer_questions(TWO, SAMPLING, open_model(world, **settings), folder, round_)


# ------------------------------------------------------------------------------------------------ what is asked


def test_a_second_turn_stands_on_the_models_own_first_one(world: World, tmp_path: Path) -> None:
    """The same answers come of asking the generator by hand, one conversation at a time."""
    found = answered(world, tmp_path)
    assert list(found.answers) == ["q1", "q2", "q3", "q4"]
    spec, chat = describe_model(ModelSpec(str(world.model)))
    generator = make_chat_generator(load_model(spec.path), chat)
    for question in TWO:
        temperature = 0.8 if question.temperature is None else question.temperature
        talk: list[Message] = []
        for text, answer in zip(question.turns, found.answers[question.id].turns, strict=True):
            talk.append(Message(role="user", content=text))
            assert generator.generate([talk], Sampling(5, temperature, seed=10)) == [answer]
            talk.append(Message(role="assistant", content=answer))
    assert found.greedy == {"q2", "q3"}


def test_statistics_are_those_of_the_rows(world: World, tmp_path: Path) -> None:
    found = answered(world, tmp_path)
    rows = rows_of(round_path(tmp_path, 0))
    assert [(row["id"], row["draw"]) for row in rows] == [
        *(("q1", 0), ("q1", 1), ("q2", 0), ("q3", 0), ("q3", 1), ("q4", 0), ("q4", 1))
    ]
    told = found.statistics
    assert (told.questions, told.turns, told.counted_by) == (4, 7, str(world.model))
    assert told.tokens == pytest.approx(sum(row["tokens"] for row in rows) / 4)
    assert told.characters == pytest.approx(sum(len(row["answer"]) for row in rows) / 4)
    assert told.cut == pytest.approx(sum(row["finish_reason"] == "length" for row in rows) / 7)
    assert told.empty == sum(row["answer"].strip() == "" for row in rows) and told.refused == {}
    account = json.loads((tmp_path / "answers-round0.json").read_text(encoding="utf-8"))
    assert account["statistics"]["tokens"] == told.tokens and account["greedy"] == ["q2", "q3"]


def test_a_system_message_is_the_first_turn(world: World, tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m['role'] + m['content'] + eos_token }}{% endfor %}"
    chat_model = HFAnswering().open(ModelSpec(str(world.model), chat_template=template), torch.device("cpu"))
    answer_questions([Question("q", (TEXTS[0], " "), "be kind")], SAMPLING, chat_model, tmp_path)
    (first, second) = rows_of(round_path(tmp_path, 0))
    assert [turn["role"] for turn in second["prompt"]] == ["system", "user", "assistant", "user"]
    assert second["prompt"][:2] == first["prompt"] and second["prompt"][2]["content"] == first["answer"]
    assert second["prompt"][3]["content"] == " ", "an empty turn of a protocol is asked as it is"


# ------------------------------------------------------------------------------------------------ rounds


def test_rounds_have_seeds_of_their_own_and_greedy_answers_in_common(world: World, tmp_path: Path) -> None:
    with batches() as made:
        first = answered(world, tmp_path, 0)
        assert {sampling.seed for _, sampling in made} == {10}
        made.clear()
        second = answered(world, tmp_path, 1)
        assert {(sampling.seed, sampling.temperature) for _, sampling in made} == {(11, 0.8), (11, 0.4)}
        assert sum(size for size, _ in made) == 4, "the three greedy turns are copied"
        made.clear()
        assert answered(world, tmp_path, 1) == second and made == []
    assert all(first.answers[name] == second.answers[name] for name in first.greedy)
    assert first.answers["q1"] != second.answers["q1"]
    alone = answered(world, tmp_path / "alone", 1)
    assert alone == second, "a round does not need the others"


# ------------------------------------------------------------------------------------------------ stopped


@pytest.mark.parametrize("calls", [3, 6])
def test_a_stopped_round_goes_on_to_the_same_answers(world: World, tmp_path: Path, calls: int) -> None:
    """Of one conversation a batch: stopped in first turns, and in second ones, which are the fifth to the seventh."""
    unbroken = answered(world, tmp_path / "whole")
    with batches(stop_after=calls), pytest.raises(KeyboardInterrupt):
        answered(world, tmp_path, batch_size=1)
    path = round_path(tmp_path, 0)
    assert len(rows_of(path)) == calls
    path.write_text(path.read_text(encoding="utf-8")[:-9], encoding="utf-8")
    with batches() as made:
        assert answered(world, tmp_path) == unbroken
    assert sum(size for size, _ in made) == 7 - calls + 1
    assert path.read_bytes() == round_path(tmp_path / "whole", 0).read_bytes()


def test_an_answer_given_anew_takes_the_later_turns_with_it(world: World, tmp_path: Path) -> None:
    unbroken = answered(world, tmp_path)
    path = round_path(tmp_path, 0)
    of = digest(json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))["key"])
    rows = rows_of(path)
    assert pop_row_digest(rows[0], of)
    rows[0] = add_row_digest({**rows[0], "answer": "another first answer"}, of)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    with batches() as made:
        found = answered(world, tmp_path)
    assert [size for size, _ in made] == [1]
    assert found.answers["q1"].turns[0] == "another first answer"
    assert rows_of(path)[1]["prompt"][1]["content"] == "another first answer"
    assert {name: found.answers[name] for name in ("q2", "q3", "q4")} == {
        name: unbroken.answers[name] for name in ("q2", "q3", "q4")
    }


# ------------------------------------------------------------------------------------------------ no answer


def test_what_cannot_be_answered_is_an_empty_text_in_its_place(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    chat = open_model(world).chat
    assert chat is not None
    room = len(chat.prompt_ids([Message(role="user", content=TEXTS[0])])) + 5
    long = " ".join([TEXTS[0]] * 9)
    questions = [Question("long", (long, TEXTS[1])), Question("fits", (TEXTS[0], TEXTS[0])), Question("x", (long,))]
    found = answer_questions(questions, SAMPLING, open_model(world, max_length=room), tmp_path)
    assert [(name, answer.turns[0] == "") for name, answer in found.answers.items()] == [
        *(("long", True), ("fits", False), ("x", True))
    ]
    assert found.answers["long"].finish_reasons == ("length", "length") and found.answers["long"].tokens == (0, 0)
    assert found.answers["fits"].turns[1] == ""
    reason = f"too long: prompt and 5 new tokens exceed {room}"
    assert found.statistics.refused == {reason: 4} and found.statistics.empty == 4
    fits = found.answers["fits"]
    assert found.statistics.tokens == fits.tokens[0] / 3
    assert found.statistics.cut == (fits.finish_reasons[0] == "length") / 5
    said = [record.message for record in caplog.records if reason in record.message]
    assert said == [f"4 empty answers: {reason} (long, fits, x)"]
    with pytest.raises(UserError, match=rf"max_length {room}, but this command has .*a different output=FOLDER"):
        answer_questions(questions, SAMPLING, open_model(world), tmp_path)


def test_a_template_that_refuses_some_questions_leaves_them_empty(world: World, tmp_path: Path) -> None:
    strict = (
        "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system turns') }}{% endif %}"
        "{{ m['content'] + eos_token }}{% endfor %}"
    )
    chat_model = HFAnswering().open(ModelSpec(str(world.model), chat_template=strict), torch.device("cpu"))
    kind, plain = Question("kind", (TEXTS[0],), system="be kind"), Question("plain", (TEXTS[0],))
    found = answer_questions([kind, plain], SAMPLING, chat_model, tmp_path)
    assert found.answers["kind"].turns == ("",) and found.statistics.refused == {REFUSED: 1}
    with pytest.raises(UserError, match=r"none of the 1 questions can be answered: .*no system turns"):
        answer_questions([kind], SAMPLING, chat_model, tmp_path / "other")


def test_no_question_that_fits_is_an_error(world: World, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="none of the 4 questions can be answered: too long"):
        answered(world, tmp_path, max_length=7)
    assert not list(tmp_path.glob("*.jsonl"))


# ------------------------------------------------------------------------------------------------ refusals


def test_a_question_cannot_change_under_its_id(world: World, tmp_path: Path) -> None:
    answered(world, tmp_path)
    for question, message in (
        (Question("q1", (TEXTS[7], TEXTS[1])), "an answer to a different prompt for question 'q1'"),
        (Question("q1", (TEXTS[0], TEXTS[7])), "an answer to a different prompt for question 'q1'"),
        (Question("q1", (TEXTS[0], TEXTS[1]), system="s"), "an answer to a different prompt for question 'q1'"),
        (Question("q1", (TEXTS[0], TEXTS[1]), temperature=0.1), "sampled at a different temperature for question 'q1'"),
        (Question("q1", ()), "question 'q1' has no turns"),
    ):
        with pytest.raises(UserError, match=message):
            answer_questions([question], SAMPLING, open_model(world), tmp_path)


def test_fewer_questions_keep_the_rest_and_ids_are_unique(world: World, tmp_path: Path) -> None:
    whole = answered(world, tmp_path)
    some = answer_questions(TWO[1:3], SAMPLING, open_model(world), tmp_path)
    assert list(some.answers) == ["q2", "q3"] and some.statistics.turns == 3
    assert answered(world, tmp_path) == whole
    with pytest.raises(UserError, match="two questions have the id 'q1'"):
        answer_questions([TWO[0], TWO[0]], SAMPLING, open_model(world), tmp_path)
    empty = answer_questions([], SAMPLING, open_model(world), tmp_path / "none")
    assert empty.answers == {} and empty.statistics.tokens == 0
