"""The loop-back server itself, through the client that graders use."""

from collections.abc import Iterator

import openai
import pytest

from tests.evaluation.grading.loopback import MODEL, Body, Fault, Loopback, Reply


def client(server: Loopback, key: str = "k", retries: int = 0) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.base_url, api_key=key, max_retries=retries, timeout=5)


@pytest.fixture
def opened() -> Iterator[list[openai.OpenAI]]:
    made: list[openai.OpenAI] = []
    yield made
    for each in made:
        each.close()


def body(text: str = "How are you?", **more: object) -> Body:
    return {"model": "m", "messages": [{"role": "user", "content": text}], **more}


def test_it_answers_counts_and_cuts(opened: list[openai.OpenAI]) -> None:
    with Loopback(lambda asked: f"You said {asked['messages'][0]['content']}") as server:
        opened.append(client(server))
        whole = opened[0].chat.completions.create(**body())
        short = opened[0].chat.completions.create(**body(max_tokens=2))
        assert [model.id for model in opened[0].models.list()] == [MODEL]
    assert whole.choices[0].message.content == "You said How are you?" and whole.model == "m"
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (7, 5)
    assert (short.choices[0].message.content, short.choices[0].finish_reason) == ("You said", "length")
    assert len(server.requests) == 2 and list(server.answered.values()) == [2]


def test_it_gives_the_most_likely_tokens(opened: list[openai.OpenAI]) -> None:
    with Loopback(lambda _: Reply("m", logprobs={"M": -2.0, "m": -0.1, "x": -5.0})) as server:
        opened.append(client(server))
        reply = opened[0].chat.completions.create(**body(logprobs=True, top_logprobs=2))
        plain = opened[0].chat.completions.create(**body())
    found = reply.choices[0].logprobs.content[0].top_logprobs
    assert [(each.token, each.logprob) for each in found] == [("m", -0.1), ("M", -2.0)]
    assert plain.choices[0].logprobs is None


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (Fault(429, retry_after=0.1), openai.RateLimitError),
        (Fault(500), openai.InternalServerError),
        (Fault(400), openai.BadRequestError),
        (Fault(what="drop"), openai.APIConnectionError),
    ],
)
def test_faults_come_in_their_order(fault: Fault, error: type[Exception], opened: list[openai.OpenAI]) -> None:
    with Loopback(lambda _: "fine", [None, fault]) as server:
        opened.append(client(server))
        assert opened[0].chat.completions.create(**body("a")).choices[0].message.content == "fine"
        with pytest.raises(error):
            opened[0].chat.completions.create(**body("b"))
        assert opened[0].chat.completions.create(**body("b")).choices[0].message.content == "fine"
    assert [request.fault for request in server.requests] == [None, fault, None]
    assert sorted(server.answered.values()) == [1, 1]


def test_it_knows_its_key(opened: list[openai.OpenAI]) -> None:
    with Loopback(lambda _: "fine", key="right") as server:
        opened += [client(server, "wrong"), client(server, "right")]
        with pytest.raises(openai.AuthenticationError):
            opened[0].chat.completions.create(**body())
        opened[1].chat.completions.create(**body())
    assert len(server.requests) == 1


def test_a_reply_that_raises_fails_the_test(opened: list[openai.OpenAI]) -> None:
    with pytest.raises(AssertionError, match="KeyError"), Loopback(lambda asked: str(asked["nothing"])) as server:
        opened.append(client(server))
        with pytest.raises(openai.APIConnectionError):
            opened[0].chat.completions.create(**body())
