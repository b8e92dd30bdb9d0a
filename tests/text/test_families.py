"""The public families' chat templates, rebuilt here to their structure: trained, or refused with what makes them so."""

import re
from pathlib import Path

import pytest

from attnpo.schema import EncodedResponse, Message, UserError
from attnpo.text.chat import ChatFormat
from attnpo.text.traces import strip_trace
from tests.text.formats import Formats

FOLDER = Path(__file__).parent / "templates"
FAMILIES = sorted(path.stem for path in FOLDER.glob("*.jinja"))
USER = Message(role="user", content="Why is the sky blue?")
ANSWER = "Light is scattered."
TRACED = f"<think>\nRayleigh, not Mie.\n</think>\n\n{ANSWER}"
CASES: dict[str, tuple[list[Message], str]] = {
    "plain": ([USER], ANSWER),
    "system": ([Message(role="system", content="Be brief."), USER], ANSWER),
    "earlier": ([USER, Message(role="assistant", content="Hm."), USER], ANSWER),
    "trace": ([USER], TRACED),
}
# What a family refuses as it stands, and the option that the message names. All else is trained on.
OFF = {"enable_thinking": False}
REFUSED = {
    ("gemma", "system"): r"model\.fold_system=true",
    ("deepseek_v3", "trace"): r"data\.columns\.traces=strip",
    ("nemotron", "plain"): r"set model\.chat_template_kwargs \(the template reads enable_thinking\)",
    ("nemotron", "system"): r"set model\.chat_template_kwargs \(the template reads enable_thinking\)",
    ("nemotron", "earlier"): r"set model\.chat_template_kwargs \(the template reads enable_thinking\)",
}
# What a family writes by itself in front of an answer, in training.
HEADS = {
    "qwen3": "<think>\n\n</think>\n\n",
    "qwen3_5": "\n</think>\n\n",
    "gpt_oss": "<|channel|>final<|message|>",
    "glm4": "\n<think></think>\n",
    "cohere": "<|START_RESPONSE|>",
}


def chat(formats: Formats, family: str, **options: object) -> ChatFormat:
    template = (FOLDER / f"{family}.jinja").read_text(encoding="utf-8").removesuffix("\n")
    words = re.findall(r"<[|\uff5c]?[\w\u2581/]+[|\uff5c]?>|\[/?\w+\]", template)
    return ChatFormat(formats.mark_turns(word for word in words if word != "[0]"), template, **options)  # type: ignore[arg-type]


def check(format_: ChatFormat, messages: list[Message], response: str, head: str) -> None:
    """The answer's characters are all held by its tokens, and the prompt is the generation prompt and ``head``."""
    encoded = format_.encode(messages, response)
    assert isinstance(encoded, EncodedResponse)
    shown = "".join(response[start:end] for start, end in encoded.offsets)
    assert shown.endswith(strip_trace(response)) and "Rayleigh" in shown if response == TRACED else shown == response
    opened = str(format_.tokenizer.decode(format_.prompt_ids(messages)))
    assert format_.tokenizer.decode(encoded.prompt_ids) == opened + head
    assert encoded.response_ids[-1] in format_.end_ids and not format_.counts


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_trained_on_or_names_what_it_needs(formats: Formats, family: str, case: str) -> None:
    messages, response = CASES[case]
    head = "" if case == "trace" and family not in ("gpt_oss", "cohere") else HEADS.get(family, "")
    named = REFUSED.get((family, case))
    if named is None:
        check(chat(formats, family), messages, response, head)
        return
    with pytest.raises(UserError, match=named):
        chat(formats, family).encode(messages, response)
    if "fold" in named:
        check(chat(formats, family, fold_system=True), messages, response, head)
    elif "kwargs" in named:
        check(chat(formats, family, kwargs=OFF), messages, response, head)
    else:
        check(chat(formats, family), messages, strip_trace(response), HEADS.get(family, ""))


def test_the_families_are_those_of_the_table() -> None:
    assert len(FAMILIES) == 13 and {family for family, _ in REFUSED} | HEADS.keys() <= set(FAMILIES)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5", "glm4", "nemotron"])
def test_with_thinking_off_answers_follow_their_prompt(formats: Formats, family: str) -> None:
    """The prompt of training is that of generation, but for the line break that GLM writes in front of an answer."""
    for case in ("plain", "system", "earlier"):
        check(chat(formats, family, kwargs=OFF), *CASES[case], "")
