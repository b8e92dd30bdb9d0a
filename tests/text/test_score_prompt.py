"""The prompt about a response's parts: its slots, what is refused, and the tokens the scores will stand on."""

from pathlib import Path

import pytest

from attnpo.lab.testbed.grammar import Grammar
from attnpo.lab.testbed.tokenizer import build_tokenizer
from attnpo.schema import PreferencePair, UserError
from attnpo.text.chat import ChatFormat, RefusedText
from attnpo.weights.verbalizer_settings import ScorePromptBuilder, ScoreTemplate

PLAIN = ScoreTemplate("score {question} : {answer}")
PAIR = PreferencePair.from_texts([{"role": "user", "content": "the soup"}], "the broth was good .", " ")


@pytest.fixture(scope="module")
def chat() -> ChatFormat:
    return ChatFormat(build_tokenizer(Grammar()))


def test_both_texts_are_put_in_at_once() -> None:
    template = ScoreTemplate("{answer} | {question} {other}", "rules")
    assert template.messages("{answer}", "{question}") == [
        {"role": "system", "content": "rules"},
        {"role": "user", "content": "{question} | {answer} {other}"},
    ]


@pytest.mark.parametrize("text", ["{question}", "{question} {answer} {answer}", "none"])
def test_a_template_without_its_slots_is_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"verbalizer\.template_file: expected the placeholders"):
        ScoreTemplate(text)


def test_files_are_read_as_they_are_or_named(tmp_path: Path) -> None:
    (tmp_path / "user.txt").write_text("{question}\n{answer}\n", encoding="utf-8")
    assert ScoreTemplate.from_files(tmp_path / "user.txt") == ScoreTemplate("{question}\n{answer}\n")
    with pytest.raises(UserError, match=r"verbalizer\.system_file: cannot read .*nowhere\.txt"):
        ScoreTemplate.from_files(tmp_path / "user.txt", tmp_path / "nowhere.txt")


def test_a_chat_without_system_messages_is_named_before_any_pair(chat: ChatFormat) -> None:
    with pytest.raises(UserError, match=r"set verbalizer\.system_file=null"):
        ScorePromptBuilder(ScoreTemplate("{question} {answer}", "rules"), chat, chat)


def test_a_prompt_that_does_not_fit_is_refused_and_never_cut(chat: ChatFormat) -> None:
    count = len(chat.prompt_ids(PLAIN.messages("the soup", PAIR.chosen)))
    assert ScorePromptBuilder(PLAIN, chat, chat, room=count).build_prompt(PAIR, "chosen") == [
        {"role": "user", "content": "score the soup : the broth was good ."}
    ]
    with pytest.raises(
        RefusedText, match=f"the chosen response has {count} tokens, but must have at most {count - 1} to leave room"
    ) as caught:
        ScorePromptBuilder(PLAIN, chat, chat, room=count - 1).build_prompt(PAIR, "chosen")
    assert caught.value.reason == "a prompt is too long for the verbalizer"


def test_a_response_without_text_has_nothing_to_score(chat: ChatFormat) -> None:
    with pytest.raises(RefusedText, match="the rejected response has no text to score"):
        ScorePromptBuilder(PLAIN, chat, chat).build_prompt(PAIR, "rejected")


def test_tokens_are_those_of_training_without_the_end_of_the_turn(chat: ChatFormat) -> None:
    ids, places = ScorePromptBuilder(PLAIN, chat, chat).training_tokens(PAIR, "chosen")
    whole = chat.encode(PAIR.prompt, PAIR.chosen)
    assert (ids, places) == (whole.response_ids[:-1], whole.offsets[:-1])
    assert [PAIR.chosen[start:end] for start, end in places] == ["the", "broth", "was", "good", "."]


def test_the_wording_and_the_room_are_in_the_fingerprint(chat: ChatFormat) -> None:
    def mark(template: ScoreTemplate, room: int | None = None) -> object:
        return ScorePromptBuilder(template, chat, chat, room).fingerprint()

    assert mark(PLAIN) == mark(ScoreTemplate(PLAIN.user))
    assert mark(PLAIN) != mark(ScoreTemplate(PLAIN.user + "?"))
    assert mark(PLAIN) != mark(PLAIN, 100)
