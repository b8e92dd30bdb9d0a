"""Answers from an OpenAI-compatible server: a loop-back one, which fails as it is told to."""

import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from attnpo.config.compose import load
from attnpo.evaluation.answers import AnswerConfig, answer_questions, round_path
from attnpo.evaluation.base import Question
from attnpo.evaluation.chat import ChatRequest
from attnpo.evaluation.openai_chat import TOO_LONG, OpenAIAnswering, ServedChatModel
from attnpo.generate import main
from attnpo.models.spec import ModelSpec
from attnpo.schema import Message, Sampling, UserError
from tests.evaluation.answers.tiny import rows_of
from tests.evaluation.grading.loopback import MODEL, Body, Fault, Loopback, Reply
from tests.run.worlds import GRAMMAR, World

TEXTS = [prompt.text for prompt in GRAMMAR.prompts("train")[:8]]
CPU = torch.device("cpu")
SAMPLING = Sampling(40, 0.7, 0.9, 50, 3, presence_penalty=0.1, frequency_penalty=0.2, stop_ids=(11, 7))


def echo(body: Body) -> str:
    """Answers that tell conversations, their order of turns and seeds apart."""
    said = " / ".join(message["content"][:30] for message in body["messages"])
    return f"{len(body['messages'])} turns of {said} with {body['seed']}"


def connect_model(server: Loopback, path: str = MODEL, **settings: Any) -> ServedChatModel:
    chat_model = OpenAIAnswering(base_url=server.base_url, **settings).open(ModelSpec(path), CPU)
    assert isinstance(chat_model, ServedChatModel)
    return chat_model


def make_requests(*texts: str) -> list[ChatRequest]:
    return [ChatRequest((Message(role="user", content=text),)) for text in texts]


def answers(chat_model: ServedChatModel, some: list[ChatRequest], sampling: Sampling = SAMPLING) -> list[str]:
    found = {index: reply.text for replies in chat_model.answer(some, sampling) for index, reply in replies.items()}
    return [found[index] for index in range(len(some))]


# ------------------------------------------------------------------------------------------------ what is sent


def test_every_setting_is_sent(world: World) -> None:
    with Loopback(echo) as server:
        chat_model = connect_model(server, str(world.model), model="mine")
        assert chat_model.chat is not None
        answers(chat_model, make_requests("hello"))
    (request,) = server.requests
    seed = request.body.pop("seed")
    assert 0 <= seed < 2**31
    assert request.body == {
        "model": "mine",
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 40,
        "temperature": 0.7,
        "top_p": 0.9,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.2,
        "top_k": 50,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "stop_token_ids": sorted({7, 11} | set(chat_model.chat.end_ids)),
    }
    assert {name.lower(): value for name, value in request.headers.items()}["authorization"] == "Bearer none"


def test_greedy_decoding_and_no_top_k(world: World) -> None:
    body = served_body(OpenAIAnswering("http://localhost:1/v1"), Sampling(8, 0.0))
    assert (body["temperature"], body["top_p"]) == (0.0, 1.0)
    assert body["extra_body"] == {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
    plain = served_body(OpenAIAnswering("http://localhost:1/v1", extensions=False), Sampling(8))
    assert "extra_body" not in plain and plain["model"] == MODEL
    for sampling in (Sampling(8, top_k=3), Sampling(8, stop_ids=(3,))):
        with pytest.raises(UserError, match=r"sampling\.top_k=.* cannot be sent with answering\.extensions=false"):
            served_body(OpenAIAnswering("http://localhost:1/v1", extensions=False), sampling)


def test_options_of_the_template_go_to_the_server_or_are_refused() -> None:
    off = ModelSpec(MODEL, chat_template_kwargs={"enable_thinking": False})
    settings = OpenAIAnswering("http://localhost:1/v1")
    body = served_body(settings, Sampling(8), off)
    assert body["extra_body"]["chat_template_kwargs"] == {"enable_thinking": False}
    assert settings.open(off, CPU).key() != settings.open(ModelSpec(MODEL), CPU).key()
    with pytest.raises(
        UserError, match=r"model\.chat_template_kwargs cannot be sent to the server with answering\.extensions=false"
    ):
        served_body(OpenAIAnswering("http://localhost:1/v1", extensions=False), Sampling(8), off)
    with pytest.raises(UserError, match=r"model\.fold_system=true has no effect on a server"):
        settings.open(ModelSpec(MODEL, fold_system=True), CPU)


def served_body(settings: OpenAIAnswering, sampling: Sampling, model: ModelSpec | None = None) -> dict[str, Any]:
    chat_model = settings.open(model or ModelSpec(MODEL), CPU)
    assert isinstance(chat_model, ServedChatModel)
    return chat_model.parameters(make_requests("a")[0], sampling)


def test_seeds_follow_from_seed_conversation_and_draw_alone() -> None:
    with Loopback(echo) as server:
        chat_model = connect_model(server)
        conversations = [*make_requests("a", "b"), ChatRequest(make_requests("a")[0].messages, draw=1)]
        first = answers(chat_model, conversations)
        assert answers(chat_model, conversations[::-1]) == first[::-1]
        other = answers(chat_model, conversations, Sampling(40, 0.7, seed=4))
    seeds = [int(text.rsplit(maxsplit=1)[1]) for text in (*first, *other)]
    assert len(set(seeds)) == 6


def test_requests_are_open_at_once_and_no_more_than_allowed() -> None:
    texts = [str(number) for number in range(12)]
    with Loopback(echo, faults=[Fault(seconds=0.08)] * 12) as server:
        assert len(answers(connect_model(server, concurrency=4), make_requests(*texts))) == 12
    assert server.at_once == 4 and len(server.requests) == 12


def test_lengths_and_reasons_are_the_servers(tmp_path: Path) -> None:
    replies = {"cut": Reply("one two three four"), "odd": Reply("a b", "content_filter"), "none": Reply("")}
    with Loopback(lambda body: replies[body["messages"][-1]["content"]]) as server:
        questions = [Question(name, (name,)) for name in replies]
        found = answer_questions(questions, Sampling(3, 0.0), connect_model(server), tmp_path)
    told = {name: (answer.turns, answer.tokens, answer.finish_reasons) for name, answer in found.answers.items()}
    assert told == {
        "cut": (("one two three",), (3,), ("length",)),
        "odd": (("a b",), (2,), ("content_filter",)),
        "none": (("",), (0,), ("stop",)),
    }
    statistics = found.statistics
    assert (statistics.cut, statistics.empty, statistics.refused) == (1 / 3, 1, {})
    assert statistics.counted_by == f"{MODEL} (the server's usage)"
    assert found.greedy == {"cut", "odd", "none"}


# ------------------------------------------------------------------------------------------------ what is no text

NULL = {"content": None}
WITHOUT_TEXT = {
    "refusal": (Reply("", message={**NULL, "refusal": "I cannot."}), "the server's model refused"),
    "tool calls": (
        Reply("", "tool_calls", message={**NULL, "tool_calls": [{"id": "1"}]}),
        "tool calls in place of a text",
    ),
    "a function call": (Reply("", message={**NULL, "function_call": {"name": "f"}}), "tool calls in place of a text"),
    "spent tokens": (Reply("", "length", message=NULL), "no text, finish reason length"),
    "spent tokens, empty": (Reply("", "length"), "no text, finish reason length"),
    "filter": (Reply("", "content_filter", message=NULL), "no text, finish reason content_filter"),
    "null": (Reply("", message=NULL), "no text, finish reason stop"),
    "no parts": (Reply("", message={"content": []}), "no text, finish reason stop"),
}


def test_answers_without_a_text_are_counted_by_their_reasons(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    given = iter(reply for reply, _ in WITHOUT_TEXT.values())
    with Loopback(lambda _: next(given)) as server:
        assert main(config(world, server, tmp_path, "answering.concurrency=1")) == 0
        assert main(config(world, server, tmp_path)) == 0
        assert len(server.requests) == len(TEXTS) == 8, "each is asked once"
    reasons = [reason for _, reason in WITHOUT_TEXT.values()]
    rows = rows_of(tmp_path / "answers.jsonl")
    assert [(row["answer"], row["refused"]) for row in rows] == [("", reason) for reason in reasons]
    told = json.loads((tmp_path / "answers.json").read_text(encoding="utf-8"))["refused"]
    assert told == dict(sorted(Counter(reasons).items()))
    assert all(f"{count} empty answers: {reason} (" in caplog.text for reason, count in told.items())


def test_tokens_that_a_server_does_not_count_are_said(caplog: pytest.LogCaptureFixture) -> None:
    with Loopback(lambda _: Reply("fine", usage={"completion_tokens": "5"})) as server:
        ((reply,),) = [found.values() for found in connect_model(server).answer(make_requests("a"), SAMPLING)]
    assert (reply.text, reply.tokens) == ("fine", 0) and "1 replies: no token count" in caplog.text


# ------------------------------------------------------------------------------------------------ a server that fails


@pytest.mark.parametrize("fault", [Fault(500), Fault(what="garbage")])
def test_what_stays_without_an_answer_is_asked_for_by_the_next_command(
    world: World, tmp_path: Path, fault: Fault
) -> None:
    """The fourth request and the sixth one fail for good, which are fewer than are asked at once; turn 2 waits."""
    questions = [Question(f"q{number}", (text, "and then?")) for number, text in enumerate(TEXTS)]
    whole = tmp_path / "whole"
    with Loopback(echo) as server:
        expected = answer_questions(questions, SAMPLING, connect_model(server, str(world.model)), whole)
    faults = [None, None, None, fault, None, fault]
    with Loopback(echo, faults=faults) as server:
        with pytest.raises(UserError, match=r"did not answer 2 of 8 conversations\. .*run the command again"):
            answer_questions(
                questions, SAMPLING, connect_model(server, str(world.model), retries=0, concurrency=3), tmp_path
            )
        assert len(server.requests) == 8
        found = answer_questions(questions, SAMPLING, connect_model(server, str(world.model)), tmp_path)
        assert len(server.requests) == 8 + 2 + 8
        assert answer_questions(questions, SAMPLING, connect_model(server, str(world.model)), tmp_path) == found
        assert len(server.requests) == 18
    assert found == expected
    assert set(server.answered.values()) == {1}, "no conversation was answered twice"
    rows = round_path(tmp_path, 0).read_bytes()
    assert rows == round_path(whole, 0).read_bytes()


def test_a_server_that_is_gone_is_not_asked_for_everything() -> None:
    with Loopback(echo, faults=[Fault(500)] * 40) as server:
        with pytest.raises(UserError, match=r"did not answer \d+ of \d+ conversations; the other \d+ were not sent"):
            answers(connect_model(server, retries=0, concurrency=3), make_requests(*map(str, range(40))))
        assert len(server.requests) < 12
        url = server.base_url
    nobody = OpenAIAnswering(url, retries=0, concurrency=1).open(ModelSpec(MODEL), CPU)
    with pytest.raises(UserError, match=rf"base_url={url} did not answer 1 of 1 .*[Cc]onnect"):
        list(nobody.answer(make_requests("a"), SAMPLING))


@pytest.mark.parametrize(
    ("message", "code", "ended", "reason"),
    [
        ("This model's maximum context length is 8 tokens, you requested 48.", None, "length", TOO_LONG),
        ("The response was filtered.", "content_filter", "content_filter", "filtered by the server"),
    ],
)
def test_a_prompt_that_the_server_does_not_take_is_an_empty_answer(
    tmp_path: Path, message: str, code: str | None, ended: str, reason: str
) -> None:
    with Loopback(echo, faults=[Fault(400, message=message, code=code)]) as server:
        questions = [Question("a", ("first",)), Question("b", ("second",))]
        found = answer_questions(questions, SAMPLING, connect_model(server, concurrency=1), tmp_path)
        assert found.answers["a"].turns == ("",) and found.answers["b"].turns[0]
        assert found.answers["a"].finish_reasons == (ended,) and found.statistics.refused == {reason: 1}
        assert answer_questions(questions, SAMPLING, connect_model(server), tmp_path) == found
        assert len(server.requests) == 2


@pytest.mark.parametrize(
    ("status", "told"),
    [
        (400, r"with status 400: .*not so.*answering\.extensions=false"),
        (404, rf"does not serve answering\.model={MODEL} \(.*not so.*\): it serves {MODEL};"),
        (403, r"rejected a request without a key \(.*not so.*\): .*answering\.key_variable=NAME"),
    ],
)
def test_a_refusal_ends_the_command_at_once(status: int, told: str) -> None:
    with Loopback(echo, faults=[Fault(status, message="not so")] * 30) as server:
        with pytest.raises(UserError, match=told):
            answers(connect_model(server, concurrency=2), make_requests(*map(str, range(30))))
        assert len(server.requests) <= 6, "a refusal is not tried again"


def test_an_interruption_does_not_wait_for_the_server() -> None:
    with Loopback(echo, faults=[None, *[Fault(seconds=0.3)] * 7]) as server:
        replies = connect_model(server, concurrency=2).answer(make_requests(*map(str, range(8))), SAMPLING)
        next(replies)
        replies.close()
        assert len(server.requests) <= 4
        time.sleep(0.4)
        assert len(server.requests) <= 4, "nothing is asked after that"


# ------------------------------------------------------------------------------------------------ keys


def test_the_key_comes_from_the_variable_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "not for this server")
    monkeypatch.setenv("MY_KEY", "secret")
    with Loopback(echo, key="secret") as server:
        chat_model = connect_model(server, key_variable="MY_KEY")
        assert answers(chat_model, make_requests("a")) and "secret" not in str(chat_model.key())
        with pytest.raises(UserError, match=r"without a key .*answering\.key_variable=NAME") as refused:
            answers(connect_model(server), make_requests("a"))
        assert "not for this server" not in str(refused.value)
        monkeypatch.setenv("MY_KEY", "wrong")
        with pytest.raises(UserError, match=r"rejected the key in MY_KEY"):
            answers(connect_model(server, key_variable="MY_KEY"), make_requests("a"))
        monkeypatch.delenv("MY_KEY")
        with pytest.raises(UserError, match="the environment variable MY_KEY is not set"):
            connect_model(server, key_variable="MY_KEY")


def test_settings_out_of_range() -> None:
    with pytest.raises(UserError, match=r"answering\.base_url=localhost:8000 is not a server address"):
        OpenAIAnswering("localhost:8000")
    for name, value, least in (("concurrency", 0, 1), ("retries", -1, 0), ("max_length", 0, 1)):
        with pytest.raises(UserError, match=f"answering.{name} must be at least {least}"):
            OpenAIAnswering("http://localhost:1/v1", **{name: value})  # type: ignore[arg-type]


def test_a_folder_stands_for_its_weights_and_a_name_for_itself(world: World) -> None:
    settings = OpenAIAnswering("http://localhost:1/v1", model="served")
    folder = settings.open(ModelSpec(str(world.model)), CPU).key()
    assert len(folder["model"]["weights"]) == 64 and "served" not in json.dumps(folder)  # type: ignore[index,call-overload]
    assert settings.open(ModelSpec("org/model"), CPU).key() == {"answering": "server", "model": {"served": "served"}}


# ------------------------------------------------------------------------------------------------ the command


def config(world: World, server: Loopback, folder: Path, *more: str) -> AnswerConfig:
    data = folder / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in TEXTS), encoding="utf-8")
    overrides = [f"model.path={world.model}", f"data.path={data}", f"output={folder / 'answers.jsonl'}"]
    served_at = ["answering=openai", f"answering.base_url={server.base_url}", "trainer.accelerator=cpu"]
    root: AnswerConfig = load("generate", [*overrides, *served_at, *more])
    return root


def test_what_the_folders_positions_do_not_take_is_not_sent(world: World, tmp_path: Path) -> None:
    with Loopback(echo) as server:
        with pytest.raises(UserError, match="none of the 8 prompts can be answered: too long: prompt and 6 new tokens"):
            main(config(world, server, tmp_path, "answering.max_length=8", "sampling.max_new_tokens=6"))
        assert server.requests == []


def test_the_command_answers_through_a_server_alone_and_in_shares(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = ("answers.per_prompt=2", "sampling.max_new_tokens=30")
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    with Loopback(echo) as server:
        assert main(config(world, server, tmp_path / "a", *more)) == 0
    rows = rows_of(tmp_path / "a" / "answers.jsonl")
    assert [row["prompt"][-1]["content"] for row in rows] == [text for text in TEXTS for _ in range(2)]
    assert all(row["answer"].startswith("1 turns of ") and row["finish_reason"] == "stop" for row in rows)
    assert len({row["answer"] for row in rows}) == 16, "the draws have seeds of their own"
    account = json.loads((tmp_path / "a" / "answers.json").read_text(encoding="utf-8"))
    assert account["key"]["answering"] == "server" and len(account["key"]["model"]["weights"]) == 64
    assert account["tokens"] == sum(row["tokens"] for row in rows) and account["refused"] == {}
    data, out = tmp_path / "a" / "prompts.jsonl", tmp_path / "a" / "answers.jsonl"
    own = [f"model.path={world.model}", f"data.path={data}", f"output={out}", "trainer.accelerator=cpu"]
    with pytest.raises(UserError, match=r"answers\.jsonl contains answers with (answering|model\.dtype)"):
        main(load("generate", own))
    monkeypatch.setenv("WORLD_SIZE", "2")
    with Loopback(echo, faults=[Fault(429, retry_after=0.05)]) as server:
        for rank in ("0", "1"):
            monkeypatch.setenv("RANK", rank)
            main(config(world, server, tmp_path / "b", *more))
    assert rows_of(tmp_path / "b" / "answers.jsonl") == rows
