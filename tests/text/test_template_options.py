"""Options in front of a chat template: values of its variables, a folded system turn, and what is refused."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnpo.lab.testbed.grammar import Grammar
from attnpo.lab.testbed.tokenizer import build_tokenizer
from attnpo.schema import UserError
from attnpo.text.chat import ChatFormat
from attnpo.text.template import jinja_literal, template_variables
from tests.text.formats import GPT2, PLAIN, Formats

# Begins with a newline and an indented block, which the renderer drops at the beginning of a line alone; the macro
# looks the variable up from inside.
THINKING = (
    "\n  {% macro turn(m) %}{{ m['role'] }}: {{ m['content'] }}{{ ' /on' if enable_thinking else '' }}\n{% endmacro %}"
    "{% for m in messages %}{{ turn(m) }}{% endfor %}{% if add_generation_prompt %}assistant:"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{% endif %}"
)
NO_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
TURNS = [{"role": "user", "content": "Hello"}]
SYSTEM = [{"role": "system", "content": "Be brief."}]
LATER = [{"role": "assistant", "content": "Hi."}, {"role": "user", "content": "Why?"}]


def chat(formats: Formats, template: str, **options: object) -> ChatFormat:
    return ChatFormat(formats.tokenizer(GPT2), template, **options)  # type: ignore[arg-type]


def test_values_reach_every_rendering(formats: Formats) -> None:
    plain, off, on = (
        chat(formats, THINKING, kwargs=kwargs) for kwargs in ({}, {"enable_thinking": False}, {"enable_thinking": True})
    )
    assert plain.render(TURNS, True) == "\nuser: Hello\nassistant:"
    assert off.render(TURNS, True) == plain.render(TURNS, True) + "<think></think>"
    assert on.render(TURNS, True) == "\nuser: Hello /on\nassistant:"
    assert off.tokenizer.decode(off.prompt_ids(TURNS)) == off.render(TURNS, True)


def test_the_fingerprint_is_that_of_today_without_options_and_another_with_each(formats: Formats) -> None:
    bare = chat(formats, THINKING).fingerprint()
    assert bare == chat(formats, THINKING, kwargs={}, fold_system=False).fingerprint()
    others = [{"enable_thinking": False}, {"enable_thinking": True}]
    prints = [bare, *(chat(formats, THINKING, kwargs=kwargs).fingerprint() for kwargs in others)]
    prints.append(chat(formats, THINKING, fold_system=True).fingerprint())
    assert len({one["chat_template"] for one in prints}) == 4


def test_the_exported_template_sets_them_and_its_caller_may_say_otherwise(formats: Formats) -> None:
    off = chat(formats, THINKING, kwargs={"enable_thinking": False}, fold_system=True)
    given = {"chat_template": off.inference_template(), "tokenize": False, "add_generation_prompt": True}
    turns = [*SYSTEM, *TURNS]
    assert off.tokenizer.apply_chat_template(turns, **given) == off.render(turns, True)
    asked = off.tokenizer.apply_chat_template(turns, **given, enable_thinking=True)
    assert asked == "\nuser: Be brief.\n\nHello /on\nassistant:"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "enable_thinkin",
            r"kwargs\.enable_thinkin: the chat template never reads .*; correct .* template: enable_thinking$",
        ),
        ("messages", r"kwargs\.messages: messages is already set by the renderer; variables .*: enable_thinking$"),
        ("bos_token", r"kwargs\.bos_token: bos_token is already set by the renderer"),
        ("tokenize", r"kwargs\.tokenize: tokenize is already set by the renderer"),
    ],
)
def test_what_the_template_does_not_read_is_refused(formats: Formats, name: str, message: str) -> None:
    with pytest.raises(UserError, match=r"^judge\.chat_template_" + message):
        chat(formats, THINKING + "{{ bos_token }}", kwargs={name: True}, part="judge")
    with pytest.raises(UserError, match="none that can be set"):
        chat(formats, PLAIN, kwargs={name: True})


def test_variables_see_through_the_tags_of_transformers() -> None:
    template = "{% for m in messages %}{% generation %}{{ m.content + x }}{% endgeneration %}{% break %}{% endfor %}"
    assert template_variables(template + "{% set y = 1 %}{{ y }}{{ range(2) }}") == {"messages", "x"}


PLAIN_DATA = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
    lambda some: st.lists(some, max_size=3) | st.dictionaries(st.text("ab%}'\"\\", max_size=4), some, max_size=3),
    max_leaves=6,
)  # fmt: skip


@settings(max_examples=25)
@given(value=PLAIN_DATA)
def test_any_plain_data_arrives_as_it_is(formats: Formats, value: object) -> None:
    found = chat(formats, "{{ [value] | tojson }}", kwargs={"value": value}).render(TURNS, False)
    assert json.loads(found) == [value]


def test_other_values_are_named() -> None:
    with pytest.raises(UserError, match=r"key: expected a number, a string, .*got \{1\}"):
        jinja_literal([{1}], "key")


def test_a_system_turn_goes_in_front_of_the_first_user_turn(formats: Formats) -> None:
    folds, plain = chat(formats, NO_SYSTEM + PLAIN, fold_system=True), chat(formats, PLAIN)
    merged = [{"role": "user", "content": "Be brief.\n\nHello"}]
    assert folds.render([*SYSTEM, *TURNS, *LATER], True) == plain.render([*merged, *LATER], True)
    assert folds.render([*TURNS, *LATER], True) == plain.render([*TURNS, *LATER], True)
    alone = [{"role": "user", "content": "Be brief."}]
    assert folds.render(SYSTEM, True) == plain.render(alone, True)
    assert folds.render([*SYSTEM, *LATER], True) == plain.render([*alone, *LATER], True)
    assert folds.encode([*SYSTEM, *TURNS], "Yes.") == plain.encode(merged, "Yes.")


def test_the_refusal_of_a_system_turn_names_the_option(formats: Formats) -> None:
    refuses = chat(formats, NO_SYSTEM + PLAIN)
    with pytest.raises(UserError, match=r"System role not supported; .*set model\.fold_system=true to move"):
        refuses.render([*SYSTEM, *TURNS], True)
    always = chat(formats, PLAIN + "{{ raise_exception('no') }}")
    with pytest.raises(UserError) as refused:
        always.render(TURNS, True)
    assert "fold_system" not in str(refused.value)


def test_a_template_in_place_of_the_tokenizers_own_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = build_tokenizer(Grammar())
    own, tokenizer.name_or_path = str(tokenizer.chat_template), "a model"
    by_name = {"default": own, "tool_use": PLAIN}
    for templates, asked, words in (
        (own, PLAIN, ["a model: chat_template replaces the tokenizer's own chat template"]),
        (own, own, []),
        (own, None, []),
        (None, PLAIN, []),
        (by_name, None, []),
        (by_name, own, []),
    ):
        tokenizer.chat_template = templates
        caplog.clear()
        assert ChatFormat(tokenizer, asked).chat_template == (asked or own)
        assert [record.getMessage() for record in caplog.records] == words


def test_templates_by_name_without_a_default_are_refused() -> None:
    tokenizer = build_tokenizer(Grammar())
    tokenizer.chat_template = {"tool_use": PLAIN}
    with pytest.raises(UserError, match="has no chat template"):
        ChatFormat(tokenizer)
