"""Reasoning traces under templates that parse, keep or drop them: what is trained on, and where its characters are."""

import pytest

from attnpo.schema import EncodedResponse, Message, PreferencePair
from attnpo.text.chat import ChatFormat, RefusedText
from attnpo.text.traces import (
    add_trace,
    count_tokens_before,
    get_trace,
    has_trace,
    is_unclosed,
    judged_text,
    strip_trace,
    weighted_start,
)
from tests.text.formats import CHATML, Formats

TURNS = [Message(role="user", content="Why is the sky blue?")]
ANSWER = "Light is scattered."
TRACE = "Rayleigh, not Mie."
SPELLINGS = [
    f"<think>\n{TRACE}\n</think>\n\n{ANSWER}",
    f"<think>{TRACE}</think>{ANSWER}",
    f"\n<think> {TRACE} </think>\n{ANSWER}",
]
PARSES = (  # as Qwen3's: the variable, else the text in front of </think>; the last turn alone keeps it
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% set thought, answer = '', m.content %}"
    "{% if m.reasoning_content is string %}{% set thought = m.reasoning_content %}"
    "{% elif '</think>' in m.content %}{% set thought = m.content.split('</think>')[0].split('<think>')[-1] %}"
    "{% set answer = m.content.split('</think>')[-1] %}{% endif %}"
    "{% if loop.last %}<think>\n{{ thought.strip() }}\n</think>\n\n{% endif %}{{ answer.lstrip('\n') }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
OPENS = PARSES.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")  # as Qwen3.5's
DROPS = CHATML.replace("{{ m['content'] }}", "{{ m['content'].split('</think>')[-1].strip() }}")


def chat(formats: Formats, template: str) -> ChatFormat:
    return ChatFormat(formats.mark_turns(["<|im_start|>", "<|im_end|>", "<think>", "</think>"]), template)


def held(encoded: EncodedResponse, response: str) -> list[str]:
    return [response[start:end] for start, end in encoded.offsets]


@pytest.mark.parametrize("response", SPELLINGS)
def test_a_template_that_parses_traces_trains_on_them_whatever_their_spelling(formats: Formats, response: str) -> None:
    format_ = chat(formats, PARSES)
    encoded = format_.encode(TURNS, response)
    text = format_.tokenizer.decode(encoded.response_ids)
    assert text == f"<think>\n{TRACE}\n</think>\n\n{ANSWER}<|im_end|>"
    assert encoded.prompt_ids == format_.prompt_ids(TURNS)
    assert "".join(held(encoded, response)) == f"<think>{TRACE}</think>{ANSWER}"
    assert encoded.offsets[-1] == (len(response), len(response))
    assert "".join(held(format_.encode(TURNS, response + "\n"), response + "\n")).endswith(ANSWER + "\n")


@pytest.mark.parametrize("response", SPELLINGS)
def test_the_opening_tag_may_stand_in_the_prompt(formats: Formats, response: str) -> None:
    format_ = chat(formats, OPENS)
    encoded = format_.encode(TURNS, response)
    assert encoded.prompt_ids == format_.prompt_ids(TURNS)
    assert format_.tokenizer.decode(encoded.response_ids) == f"{TRACE}\n</think>\n\n{ANSWER}<|im_end|>"
    assert "".join(held(encoded, response)) == f"{TRACE}</think>{ANSWER}"


def test_a_template_without_a_word_of_traces_has_them_as_given(formats: Formats) -> None:
    for response in SPELLINGS:
        encoded = chat(formats, CHATML).encode(TURNS, response)
        assert "".join(held(encoded, response)) == response


def test_a_template_that_drops_them_names_the_option(formats: Formats) -> None:
    with pytest.raises(RefusedText, match=r"set data\.columns\.traces=strip to train on the answer without"):
        chat(formats, DROPS).encode(TURNS, SPELLINGS[0])
    off = PARSES.replace("assistant\n{% endif %}", "assistant\n<think>\n\n</think>\n\n{% endif %}")
    with pytest.raises(RefusedText, match=r"prompt differently.*set data\.columns\.traces=strip"):
        chat(formats, off).encode(TURNS, SPELLINGS[0])
    assert chat(formats, off).encode(TURNS, ANSWER) == chat(formats, DROPS).encode(TURNS, ANSWER)._replace(
        prompt_ids=chat(formats, off).prompt_ids(TURNS)
    )


def test_the_trace_of_an_earlier_turn_reaches_the_template(formats: Formats) -> None:
    shows = CHATML.replace("{{ m['content'] }}", "{{ m.reasoning_content }}|{{ m['content'] }}")
    earlier = Message(role="assistant", content="Hi.", reasoning_content="A greeting.")
    text = chat(formats, shows).render([*TURNS, earlier, *TURNS], True)
    assert "assistant\nA greeting.|Hi.<|im_end|>" in text and text.count("A greeting.") == 1


def test_words_of_traces() -> None:
    for response in SPELLINGS:
        assert has_trace(response) and not is_unclosed(response)
        assert get_trace(response) == TRACE and strip_trace(response).strip() == ANSWER
    assert add_trace(TRACE, ANSWER) == SPELLINGS[0]
    assert is_unclosed(f" <think>{TRACE}") and not has_trace(f"<think>{TRACE}")
    inside = f"{ANSWER} <think>no</think>"
    assert not has_trace(inside) and not is_unclosed(inside) and strip_trace(inside) == inside


@pytest.mark.parametrize("response", SPELLINGS)
def test_what_a_judge_reads_of_a_trace_weighed_apart(response: str) -> None:
    apart = PreferencePair.from_texts(TURNS, response, ANSWER, apart=True)
    assert judged_text(apart, "chosen") == judged_text(apart, "rejected") == ANSWER
    assert response[weighted_start(apart, "chosen") :] == ANSWER and weighted_start(apart, "rejected") == 0
    assert judged_text(PreferencePair.from_texts(TURNS, response, ANSWER), "chosen") == response


def test_the_tokens_before_an_answer() -> None:
    # A blank of the template stands in the trace.
    offsets = [(0, 7), (7, 12), (30, 30), (12, 20), (20, 24), (24, 30), (30, 30)]
    assert [count_tokens_before(start, offsets) for start in (0, 21, 20, 24, 29, 30)] == [0, 4, 4, 5, 5, 7]
