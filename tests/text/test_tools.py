"""Tools, calls and results in conversations: what a template writes of them, or what else becomes of them."""

import json
import logging
from typing import Any

import pytest

from attnpo.judge.prompts import question_text
from attnpo.schema import Message, PreferencePair
from attnpo.text.chat import ChatFormat, RefusedText
from attnpo.text.template import functions_to_json, get_tools, to_template_turns
from tests.text.formats import CHATML, Formats

WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
TOOLS = json.dumps([WEATHER])
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"town": "Ulm"}}}
PLAIN = [Message(role="user", content="Rain?")]
ASKED = [Message(role="user", content="Rain?", tools=TOOLS)]
CALLED = [
    *ASKED,
    Message(role="assistant", content="", tool_calls=json.dumps([CALL])),
    Message(role="tool", content="wet", tool_call_id="c1", name="weather"),
]
# As the templates of Qwen and Hermes: tools in front, calls and results in turns of their own.
USES = (
    "{% if tools %}<|im_start|>tools\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.name }}({{ call.function.arguments | tojson }}){% endfor %}"
    "{% if m.tool_call_id %} [{{ m.tool_call_id }} {{ m.name }}]{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HIDES = USES.replace("{% for m in messages %}", "{% for m in messages if m.role != 'tool' %}")
QUOTES = USES.replace("{{ m.content }}", "{{ m.content | tojson if m.role == 'tool' else m.content }}")


def chat(formats: Formats, template: str) -> ChatFormat:
    return ChatFormat(formats.mark_turns(["<|im_start|>", "<|im_end|>"]), template)


def test_a_template_writes_the_tools_the_calls_and_the_results(formats: Formats) -> None:
    format_ = chat(formats, USES)
    text = format_.render(CALLED, add_generation_prompt=True)
    assert text == (
        f"<|im_start|>tools\n{json.dumps(WEATHER)}\n<|im_end|>\n<|im_start|>user\nRain?<|im_end|>\n"
        '<|im_start|>assistant\nweather({"town": "Ulm"})<|im_end|>\n<|im_start|>tool\nwet [c1 weather]<|im_end|>\n'
        "<|im_start|>assistant\n"
    )
    # They are prompt on the training side, and the response is what it is without them.
    with_tools, bare = format_.encode(ASKED, "No."), format_.encode(PLAIN, "No.")
    assert (with_tools.response_ids, with_tools.offsets) == (bare.response_ids, bare.offsets)
    assert with_tools.prompt_ids == format_.prompt_ids(ASKED) and len(with_tools.prompt_ids) > len(bare.prompt_ids)
    assert format_.render(PLAIN, True) == chat(formats, CHATML).render(PLAIN, True)


def test_a_template_that_ignores_tools_is_told_once(formats: Formats, caplog: pytest.LogCaptureFixture) -> None:
    format_ = chat(formats, CHATML)
    with caplog.at_level(logging.WARNING):
        assert format_.prompt_ids(PLAIN) == format_.prompt_ids(PLAIN) and not caplog.text
        for _ in range(3):
            assert format_.prompt_ids(ASKED) == format_.prompt_ids(PLAIN)
        chat(formats, USES).prompt_ids(ASKED)
    assert caplog.text.count("never reads tools") == 1


def test_a_template_that_would_lose_calls_or_results_refuses_them(formats: Formats) -> None:
    with pytest.raises(RefusedText, match="never reads tool_calls") as problem:
        chat(formats, CHATML).prompt_ids(CALLED)
    assert problem.value.reason == "the chat template omits tool calls"
    format_ = chat(formats, HIDES)
    for _ in range(2):
        with pytest.raises(RefusedText, match="omits turns with the role tool"):
            format_.prompt_ids(CALLED)
    assert format_.prompt_ids(ASKED)
    assert '"wet"' in chat(formats, QUOTES).render(CALLED, True)


def test_the_judge_reads_calls_and_results_and_not_the_tools() -> None:
    assert question_text(ASKED) == "Rain?"
    assert question_text(CALLED) == f"user: Rain?\n\nassistant: {json.dumps([CALL])}\n\ntool: wet"


def test_tools_are_part_of_a_pairs_id_and_move_no_other() -> None:
    plain, asked = (PreferencePair.from_texts(turns, "No.", "Yes.") for turns in (PLAIN, ASKED))
    assert plain.pair_id == "ed8fd198c755998e3c0ab3da5745d469" != asked.pair_id
    assert PreferencePair.from_texts(asked.prompt, "No.", "Yes.") == asked


def test_words_of_tools() -> None:
    assert get_tools(ASKED) == [WEATHER] and get_tools(PLAIN) is None
    assert to_template_turns(CALLED)[:2] == [*PLAIN, {"role": "assistant", "content": "", "tool_calls": [CALL]}]
    filled: dict[str, Any] = {**WEATHER, "strict": None}  # as a table fills it up
    assert functions_to_json([filled]) == functions_to_json(TOOLS) == TOOLS
    assert functions_to_json('[{"strict": null}]') == '[{"strict": null}]'
    assert functions_to_json(None) is functions_to_json("") is functions_to_json([]) is functions_to_json("[]") is None
    for wrong in ("weather", '{"a": 1}', ["weather"], [{"a": b"x"}], 3):
        with pytest.raises(ValueError, match=r"."):
            functions_to_json(wrong)
