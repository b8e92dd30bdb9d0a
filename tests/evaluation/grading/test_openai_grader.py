"""The OpenAI-compatible grader against the loop-back server: faults, refusals, log-probabilities, counts."""

import configparser
import json
import math
import re
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import openai
import pytest
import tiktoken

from attnpo.config.compose import CONFIG_DIR, instantiate
from attnpo.evaluation import openai_chat
from attnpo.evaluation.chat import Grader, GradingCall, GradingFailure, GradingReply, Price
from attnpo.evaluation.jsonl_store import ReplyStore
from attnpo.evaluation.openai_chat import SERVICE, OpenAIGrader
from attnpo.evaluation.session import GradingLimits, SessionResult, ask_all, estimate_cost
from attnpo.lab.testbed.tokenizer import build_tokenizer
from attnpo.schema import UserError, digest
from tests import own_texts
from tests.evaluation.grading.calls import call
from tests.evaluation.grading.loopback import Body, Fault, Loopback, Reply
from tests.run.worlds import GRAMMAR
from tests.text.formats import FORMATS, TESTS, Formats

CALLS = [call(number) for number in range(9)]
FAULTS = {
    "429": Fault(429),
    "500": Fault(500),
    "dropped": Fault(what="drop"),
    "garbage": Fault(what="garbage"),
    "half JSON": Fault(what="cut"),
    "another JSON": Fault(what="odd"),
}


@pytest.fixture(autouse=True)
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client's settings are the test's own, and it waits little before it repeats a call."""
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL", "OPENAI_ORG_ID", "OPENAI_PROJECT_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(openai._base_client, "INITIAL_RETRY_DELAY", 0.02)


def echo(body: Body) -> str:
    """A reply that says which call it is to."""
    return "Rating: " + body["messages"][1]["content"].split()[2]


def grader_of(server: Loopback, **values: object) -> OpenAIGrader:
    return OpenAIGrader(**{"base_url": server.base_url, "concurrency": 4, "timeout": 30.0, **values})  # type: ignore[arg-type]


def ask(server: Loopback, folder: Path, calls: Iterable[GradingCall] = CALLS, **values: object) -> SessionResult:
    return ask_all(calls, grader_of(server, **values), ReplyStore(folder))


def name_of(asked: GradingCall) -> str:
    """What the server calls a request of this call."""
    return digest(list(asked.messages))


# ------------------------------------------------------------------------------------------------ faults


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_repeated_and_each_item_has_its_own_reply_once(name: str, tmp_path: Path) -> None:
    faults = [FAULTS[name] if number % 3 == 1 else None for number in range(20)]
    with Loopback(echo, faults) as server:
        asked = ask(server, tmp_path)
    assert {each.item: reply.text for each, reply in asked.replies.items()} == {
        f"q{number}": f"Rating: {number}" for number in range(9)
    }
    assert server.answered == {name_of(each): 1 for each in CALLS}
    assert len(server.requests) == 9 + sum(request.fault is not None for request in server.requests) > 11
    assert asked.is_complete and server.at_once <= 4
    lines = [json.loads(line) for line in (tmp_path / "grades.jsonl").read_text().splitlines()]
    assert sorted(line["item"] for line in lines) == sorted(each.item for each in CALLS)


def test_slow_answers_are_waited_for(tmp_path: Path) -> None:
    with Loopback(echo, [Fault(what="slow", seconds=0.1)]) as server:
        (reply,) = ask(server, tmp_path, CALLS[:1]).replies.values()
    assert reply.seconds >= 0.1 and len(server.requests) == 1


@pytest.mark.parametrize("what", ["drip", "drip headers"])
def test_a_server_that_drips_is_given_up_at_the_deadline_and_asked_again(what: str, tmp_path: Path) -> None:
    drips = Fault(what=what, seconds=1.2)
    with Loopback(echo, [drips, None, drips]) as server:
        assert ask(server, tmp_path, CALLS[:1], timeout=0.4).is_complete and len(server.requests) == 2
        stays = ask(server, tmp_path, CALLS[1:2], timeout=0.4, max_retries=0)
    assert "no complete reply within 0.4 s" in stays.failures[CALLS[1]]


def test_retry_after_is_honoured(tmp_path: Path) -> None:
    with Loopback(echo, [Fault(429, retry_after=0.3)]) as server:
        assert ask(server, tmp_path, CALLS[:1]).is_complete
    first, second = server.requests
    assert second.began - first.began >= 0.3, "the client's own delay would be 0.02 s"


def test_a_fault_that_stays_is_a_failure_of_its_call_and_is_asked_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    faults = [*[Fault(500, message="no memory")] * 3, *[Fault(what="garbage")] * 3, None, Fault(500), Fault(500)]
    with Loopback(echo, faults) as server, caplog.at_level("INFO"):
        first = ask(server, tmp_path, CALLS[:3], max_retries=2, concurrency=1)
        assert list(first.failures) == CALLS[:2] and "no memory" in first.failures[CALLS[0]]
        assert "not a completion: '<html>gateway</html>'" in first.failures[CALLS[1]]
        assert "2 grading calls failed: 1 times: " in caplog.text and len(server.requests) == 7
        assert ask(server, tmp_path, CALLS[:3], concurrency=1).is_complete
        assert "1 calls succeeded only after retries, 2 retries in total" in caplog.text
    assert len(server.requests) == 7 + 4


def test_a_refused_prompt_is_a_failure_of_that_call_alone(tmp_path: Path, record_property: Callable[..., None]) -> None:
    with Loopback(echo, [None, Fault(400, message="the prompt is too long")]) as server:
        asked = ask(server, tmp_path, CALLS[:4], concurrency=1)
    assert len(asked.replies) == 3 and len(server.requests) == 4, "a refusal is not repeated"
    (problem,) = asked.failures.values()
    assert "400" in problem and "the prompt is too long" in problem
    record_property("bad input", ("endpoint: 400 for one prompt", problem, "that call"))


def test_text_that_is_no_unicode_costs_its_call(tmp_path: Path) -> None:
    calls = [call(0, "odd \ud800"), CALLS[1]]
    with Loopback(echo) as server:
        asked = ask(server, tmp_path, calls)
    assert list(asked.replies) == calls[1:] and list(asked.failures) == calls[:1]


# ------------------------------------------------------------------------------------------------ other types

PART = {"type": "text", "text": "one, "}
OTHER_TYPES = {
    "number": Reply("", message={"content": 7}),
    "zero": Reply("", message={"content": 0}),
    "boolean": Reply("", message={"content": True}),
    "object": Reply("", message={"content": PART}),
    "list of texts": Reply("", message={"content": ["7"]}),
    "list with an image": Reply("", message={"content": [PART, {"type": "image_url", "image_url": {"url": "u"}}]}),
    "text part without a text": Reply("", message={"content": [{"type": "text", "text": 7}]}),
    "finish reason": Reply("7", choice={"finish_reason": ["stop"]}),
    "model": Reply("7", model=["mine"]),
}


LOGPROBS: list[object] = [
    ["m"],
    {"content": 7},
    {"content": [{"top_logprobs": 7}]},
    {"content": [{"top_logprobs": [{"token": 7, "logprob": -1}]}]},
    {"content": [{"top_logprobs": [{"token": "m"}]}]},
    {"content": [{"top_logprobs": [{"token": "m", "logprob": "-1"}]}]},
    {"content": [{"top_logprobs": [{"token": "m", "logprob": None}]}]},
    {"content": [{"top_logprobs": [{"token": "m", "logprob": math.nan}]}]},
    {"content": [{"top_logprobs": [{"token": "m", "logprob": 0.7}]}]},
]


def check_failures(replies: Sequence[Reply], folder: Path, problem: str, **more: object) -> None:
    """Each call fails in each command that gets its reply; nothing of it is stored, and another reply mends it."""
    calls = [call(number, **more) for number in range(len(replies) + 1)]
    fine = Reply("m", logprobs={"m": -1})
    given = {name_of(each): reply for each, reply in zip(calls, [*replies, fine], strict=True)}
    with Loopback(lambda body: given[digest(body["messages"])]) as server:
        for _ in range(2):
            found = ask(server, folder, calls)
            assert set(found.failures) == set(calls[:-1])
            assert [text for text in found.failures.values() if problem not in text] == []
            assert list(found.replies) == calls[-1:] and len(ReplyStore(folder)) == 1
        assert len(server.requests) == 2 * len(replies) + 1, "none is repeated, as another would be paid for too"
    with Loopback(lambda _: fine) as server:
        assert ask(server, folder, calls).is_complete


def test_replies_of_another_type_are_failures_of_their_calls(tmp_path: Path) -> None:
    check_failures(list(OTHER_TYPES.values()), tmp_path, "must be a string, got ")


def test_log_probabilities_of_another_type_are_failures_of_their_calls(tmp_path: Path) -> None:
    replies = [Reply("m", choice={"logprobs": wrong}) for wrong in LOGPROBS]
    check_failures(replies, tmp_path, "log", max_tokens=1, top_logprobs=5)


def test_a_call_without_a_text_has_no_log_probabilities_either(tmp_path: Path) -> None:
    reply = Reply("", message={"content": None}, choice={"finish_reason": "content_filter"})
    check_failures([reply], tmp_path, "no text, finish reason content_filter", top_logprobs=5)


def test_lone_surrogates_are_escaped_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Loopback(lambda _: Reply("7 \ud83d", model="mine\udfff", finish_reason="\ud800")) as server:
        asked = ask(server, tmp_path, CALLS[:2], model="mine")
    for reply in asked.replies.values():
        assert (reply.text, reply.model, reply.finish_reason) == ("7 \\ud83d", "mine\\udfff", "\\ud800")
    assert "2 replies: lone surrogates" in caplog.text


# ------------------------------------------------------------------------------------------------ what ends it


def refused(server: Loopback, folder: Path, calls: Iterable[GradingCall] = CALLS, **values: object) -> str:
    with pytest.raises(UserError) as caught:
        ask(server, folder, calls, **values)
    return str(caught.value)


def test_a_wrong_key_ends_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_property: Callable[..., None]
) -> None:
    monkeypatch.setenv("MY_KEY", "wrong")
    with Loopback(echo, key="right") as server:
        text = refused(server, tmp_path, key_variable="MY_KEY")
        assert f"{server.base_url} rejected the key in MY_KEY" in text and "wrong" not in text
        assert server.requests == [] and len(ReplyStore(tmp_path)) == 0
        monkeypatch.setenv("MY_KEY", "right")
        assert ask(server, tmp_path, CALLS[:2], key_variable="MY_KEY").is_complete
    record_property("bad input", ("endpoint: 401", text, "nothing"))


@pytest.mark.parametrize("given", [{}, {"key_variable": "OPENAI_API_KEY"}, {"key_variable": "MY_KEY"}])
def test_a_server_of_ones_own_gets_no_key_but_the_one_that_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, str]
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "openai's own")
    monkeypatch.setenv("MY_KEY", "mine")
    with Loopback(echo) as server:
        assert ask(server, tmp_path, CALLS[:1], **given).is_complete
    expected = {"OPENAI_API_KEY": "openai's own", "MY_KEY": "mine"}.get(given.get("key_variable", ""), "none")
    (request,) = server.requests
    assert {name.lower(): value for name, value in request.headers.items()}["authorization"] == f"Bearer {expected}"


def test_the_clients_own_variables_go_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "right")
    with Loopback(echo, key="right") as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.base_url)
        assert ask(server, tmp_path, CALLS[:1], base_url=None).is_complete
        text = refused(server, tmp_path, CALLS[1:2])
    assert "rejected a request without a key" in text and "grader.key_variable=NAME" in text
    with pytest.raises(UserError, match=r"grader\.key_variable=NOT_SET: the environment variable"):
        grader_of(server, key_variable="NOT_SET").check_ready()


def test_a_model_that_is_not_served_ends_the_command(tmp_path: Path) -> None:
    with Loopback(echo, [None, Fault(404, message="no such model")]) as server:
        text = refused(server, tmp_path, model="mine", concurrency=1)
    assert "does not serve grader.model=mine" in text and "no such model" in text
    assert len(server.requests) == 2 and len(ReplyStore(tmp_path)) == 1


def test_no_credit_ends_the_command(tmp_path: Path) -> None:
    with Loopback(echo, [Fault(429, code="insufficient_quota", message="no credit")] * 9) as server:
        assert "is out of credit" in refused(server, tmp_path, CALLS[:1], max_retries=1)


def test_no_key_and_no_package_are_said_before_anything_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"environment variable OPENAI_API_KEY is not set.*grader\.base_url="):
        OpenAIGrader().check_ready()
    OpenAIGrader(base_url="http://127.0.0.1:1/v1").check_ready()
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    OpenAIGrader().check_ready()
    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(UserError, match=r"extra `eval`"):
        OpenAIGrader().check_ready()


def test_the_extra_brings_the_client_that_the_grader_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    extra = configparser.ConfigParser()
    extra.read(Path(__file__).parents[3] / "setup.cfg", encoding="utf-8")
    (bounds,) = re.findall(r"^openai(.*)$", extra["options.extras_require"]["eval"], flags=re.MULTILINE)
    monkeypatch.setattr(openai_chat, "find_spec", lambda package: None)
    with pytest.raises(UserError, match=r"openai \((\d+) or later\)") as caught:
        OpenAIGrader().check_ready()
    least = re.search(r"openai \((\d+) or later\)", str(caught.value))
    assert least is not None and bounds == f">={least[1]},<{int(least[1]) + 1}"


# ------------------------------------------------------------------------------------------------ requests


def test_requests_hold_what_the_call_and_the_grader_say(tmp_path: Path) -> None:
    asked = call(1, max_tokens=16, temperature=0.5, top_p=0.9)
    with Loopback(echo) as server:
        ask(server, tmp_path, [asked], model="mine", extra_body={"chat_template_kwargs": {"thinking": False}})
        ask(server, tmp_path, [asked], model="mine", length_key="max_completion_tokens")
    body, other = (request.body for request in server.requests)
    assert body == {
        "model": "mine",
        "messages": list(asked.messages),
        "temperature": 0.5,
        "top_p": 0.9,
        "max_tokens": 16,
        "chat_template_kwargs": {"thinking": False},
    }
    assert other["max_completion_tokens"] == 16 and "max_tokens" not in other


def test_a_reply_holds_the_servers_account(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Loopback(lambda _: Reply("too many words for it", model="mine-2"), input_tokens=lambda _: 33) as server:
        asked = ask(server, tmp_path, [call(number, max_tokens=2) for number in range(3)], model="mine")
    for reply in asked.replies.values():
        assert (reply.text, reply.finish_reason, reply.model) == ("too many", "length", "mine-2")
        assert (reply.input_tokens, reply.output_tokens, reply.logprobs) == (33, 2, None) and 0 < reply.seconds < 5
    assert caplog.text.count("grader.model=mine is served by mine-2") == 1 and asked.replies_by_model == {"mine-2": 3}


UNKNOWN = [
    None, {}, {"prompt_tokens": 5}, {"prompt_tokens": "5", "completion_tokens": 1},
    {"prompt_tokens": 5.5, "completion_tokens": 1}, {"prompt_tokens": -1, "completion_tokens": 1},
    {"prompt_tokens": 5, "completion_tokens": None}, {"prompt_tokens": True, "completion_tokens": 1},
]  # fmt: skip


def test_a_budget_holds_where_replies_carry_no_account(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each call may cost a dollar of output, so that eight fit into 8.5 dollars, however often they are asked for."""
    calls, given = [call(number, max_tokens=1_000_000) for number in range(10)], iter(UNKNOWN)
    priced = {"price_model": "mine", "model": "mine", "price_input": 0.0, "price_output": 1.0, "concurrency": 1}
    with Loopback(lambda _: Reply("7", usage=next(given))) as server:
        for _ in range(2):
            grader = grader_of(server, **priced)
            asked = ask_all(calls, grader, ReplyStore(tmp_path), GradingLimits(max_cost=8.5))
            assert asked.stopped == "limits.max_cost=8.5" and len(asked.replies) == len(server.requests) == 8
            assert "8 of 8 replies have no token counts (usage)" in caplog.text
            cost = asked.cost(grader.price)
            assert cost["dollars"] == cost["estimated_calls"] == 8 and cost["output_tokens"] == 8_000_000


def test_log_probabilities_of_the_first_token(tmp_path: Path) -> None:
    with Loopback(lambda _: Reply("m", logprobs={"M": -2.5, "m": -0.1, "n": -9.0})) as server:
        (reply,) = ask(server, tmp_path, [call(1, max_tokens=1, top_logprobs=2)]).replies.values()
    assert reply.logprobs == {"m": -0.1, "M": -2.5}
    assert server.requests[0].body["logprobs"] is True and server.requests[0].body["top_logprobs"] == 2


def test_an_endpoint_without_log_probabilities(tmp_path: Path, record_property: Callable[..., None]) -> None:
    with Loopback(lambda _: "m", [None, Fault(400, param="logprobs", message="not supported")]) as server:
        none = refused(server, tmp_path, [call(1, top_logprobs=5)])
        refuses = refused(server, tmp_path, [call(1, top_logprobs=5)])
    for text, what in ((none, "returns none"), (refuses, "rejects them")):
        assert server.base_url in text and what in text and "grader=local" in text
    assert len(ReplyStore(tmp_path)) == 0
    record_property("bad input", ("endpoint without log-probabilities", none, "nothing"))


# ------------------------------------------------------------------------------------------------ identity, price


def test_identity_and_price(monkeypatch: pytest.MonkeyPatch) -> None:
    grader = OpenAIGrader()
    assert isinstance(grader, Grader) and grader.identity()["base_url"] == SERVICE
    assert grader.price == Price(0.15, 0.60)
    assert OpenAIGrader(model="mine").price == Price(known=False)
    assert OpenAIGrader(model="mine", price_model="mine", price_input=0.0, price_output=0.0).price == Price()
    assert OpenAIGrader(base_url="http://h/v1/").identity() == OpenAIGrader(base_url="http://h/v1").identity()
    keys = {
        CALLS[0].key(each.identity())
        for each in (
            grader,
            OpenAIGrader(model="mine"),
            OpenAIGrader(base_url="http://h/v1"),
            OpenAIGrader(extra_body={"a": 1}),
        )
    }
    assert len(keys) == 4
    assert grader.identity() == OpenAIGrader(concurrency=1, timeout=1.0, max_retries=0).identity()
    monkeypatch.setenv("OPENAI_BASE_URL", "http://h/v1")
    assert grader.identity() == OpenAIGrader(base_url="http://h/v1").identity()


def test_the_config_has_the_defaults_of_the_class() -> None:
    from omegaconf import OmegaConf

    assert instantiate(OmegaConf.load(CONFIG_DIR / "grader" / "openai.yaml")) == OpenAIGrader()


def test_its_settings_are_checked() -> None:
    for name, value in {
        "concurrency": 0,
        "timeout": 0.0,
        "max_retries": -1,
        "price_input": -1.0,
        "length_key": "l",
    }.items():
        with pytest.raises(UserError, match=rf"grader\.{name}"):
            OpenAIGrader(**{name: value})  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------ counts


def test_with_the_servers_tokenizer_the_estimate_is_right_before_the_first_call(tmp_path: Path) -> None:
    """Of conversations in plain English and in four other languages."""
    texts = [call(number, json.dumps(row, ensure_ascii=False)) for number, row in enumerate(own_texts.rows(16))]
    chat = Formats()("edge_merge")
    with Loopback(lambda _: "7", input_tokens=lambda body: len(chat.prompt_ids(body["messages"]))) as server:
        grader = grader_of(server, tokenizer=str(TESTS / FORMATS["edge_merge"][0]))
        before = estimate_cost(texts, grader, ReplyStore(tmp_path))
        asked = ask_all(texts, grader, ReplyStore(tmp_path))
    actual = sum(reply.input_tokens for reply in asked.replies.values())
    assert before.input_tokens == actual, "it counts the same"
    assert sum(reply.output_tokens for reply in asked.replies.values()) <= before.most_output_tokens


def test_a_prompt_that_the_tokenizers_chat_template_refuses_is_bounded_by_its_bytes(tmp_path: Path) -> None:
    tokenizer = build_tokenizer(GRAMMAR)
    tokenizer.chat_template = (
        "{% for m in messages %}{% if 'odd' in m.content %}{{ raise_exception('no odd turns') }}{% endif %}"
        "{{ m.content }} {% endfor %}"
    )
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    calls = [call(0, "an odd turn"), call(1), call(2, "a rather odd turn"), call(3)]
    with Loopback(lambda _: "7") as server:
        grader = grader_of(server, tokenizer=str(tmp_path / "tokenizer"))
        before = estimate_cost(calls, grader, ReplyStore(tmp_path))
        plain = estimate_cost([calls[1], calls[3]], grader, ReplyStore(tmp_path))
        assert ask_all(calls, grader, ReplyStore(tmp_path)).is_complete
    assert before.input_tokens > plain.input_tokens and plain.method == "counted by the grader's tokenizer"
    assert "upper bound from bytes for 2 calls that its chat template rejects" in before.method


@pytest.fixture
def vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenAI's service has a vocabulary of bytes and one merge."""
    ranks = {**{bytes([byte]): byte for byte in range(256)}, b"ab": 256}
    encoding = tiktoken.Encoding("bytes", pat_str=r"\w+|\W+", mergeable_ranks=ranks, special_tokens={"<|end|>": 257})

    def by_name(model: str) -> tiktoken.Encoding:
        if not model.startswith("gpt-"):
            raise KeyError(model)
        return encoding

    monkeypatch.setattr(tiktoken, "encoding_for_model", by_name)
    openai_chat._load_vocabulary.cache_clear()


@pytest.mark.usefixtures("vocabulary")
def test_calls_to_openais_service_are_counted_by_tiktoken(tmp_path: Path) -> None:
    """4 tokens for each turn and 3 ahead of the reply; a special token in a text is text."""
    one = call(1, "abab <|end|>")  # 2 + 1 + 7, after the 10 of "You grade."
    assert OpenAIGrader().count_tokens(one) == 3 + (4 + 10) + (4 + 10)
    assert "counted by the grader's tokenizer" in estimate_cost([one], OpenAIGrader(), ReplyStore(tmp_path)).method
    assert OpenAIGrader(model="another").count_tokens(one) is None
    assert OpenAIGrader(base_url="http://127.0.0.1:1/v1").count_tokens(one) is None


def test_a_vocabulary_that_cannot_be_downloaded_leaves_the_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(model: str) -> None:
        raise OSError("no route to host")

    monkeypatch.setattr(tiktoken, "encoding_for_model", fail)
    openai_chat._load_vocabulary.cache_clear()
    with caplog.at_level("INFO"):
        found = estimate_cost(CALLS, OpenAIGrader(), ReplyStore(tmp_path))
    assert found.method.startswith("upper bound from the bytes of the text") and found.dollars is not None
    assert caplog.text.count("no route to host") == 1


def test_replies_come_as_they_are_ready_and_calls_are_pulled_lazily() -> None:
    pulled: list[GradingCall] = []

    def pulling() -> Iterable[GradingCall]:
        for each in CALLS:
            pulled.append(each)
            yield each

    go = threading.Event()

    def first_is_late(body: Body) -> str:
        if echo(body).endswith(" 0"):
            go.wait(30)
        return echo(body)

    with Loopback(first_is_late) as server:
        replies = grader_of(server, concurrency=2).ask(pulling())
        first, reply = next(replies)
        assert first == CALLS[1] and isinstance(reply, GradingReply) and pulled == CALLS[:2]
        go.set()
        found = dict([(first, reply), *replies])
    assert found.keys() == set(CALLS) and not any(isinstance(each, GradingFailure) for each in found.values())


def test_a_reply_that_raises_fails_the_test(tmp_path: Path) -> None:
    """Guards these tests: the server's own faults are not taken for a client's."""
    with pytest.raises(AssertionError, match="KeyError"), Loopback(lambda body: str(body["nothing"])) as server:
        ask(server, tmp_path, CALLS[:1], max_retries=0)
