"""Training ids: the reference's completions, character ranges, exactly one BOS and one end, awkward templates."""

import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from attnpo.data.prepare import truncate
from attnpo.schema import EncodedResponse, UserError
from attnpo.text.chat import NOT_A_PREFIX, ChatFormat, DeadlineExceeded, RefusedText, deadline
from tests.text.formats import EDGE_MERGE, FORMATS, GOLDEN, GPT2, PLAIN, Formats

TURNS = [{"role": "user", "content": "Why is the sky blue?"}]
DIALOGUE = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hi. What is it?"},
    {"role": "user", "content": "Why is the sky blue?\n"},
]
# The token that closes a turn, and how often the template writes BOS.
END = {
    "golden": "<|eot_id|>",
    "edge_merge": "<|end|>",
    "edge_merge_untrimmed": "<|end|>",
    "gpt2_plain": "<|endoftext|>",
    "gpt2_chatml": "<|endoftext|>",
    "mistral": "</s>",
    "stories": "</s>",
}
UNTRIMMED = [name for name in FORMATS if name not in ("golden", "edge_merge")]


def without_surrogates():
    return st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


PIECES = ["</s>", "<|eot_id|>", "<|end|>", "\n", ".\n", " ", "👩🏽‍🔬", "ﬁ", "\x00", "\r\n", "[INST]", "{{ x }}"]
AWKWARD = st.lists(st.one_of(without_surrogates(), st.sampled_from(PIECES)), max_size=5).map("".join)


def covered(encoded: EncodedResponse) -> set[int]:
    return {i for start, end in encoded.offsets for i in range(start, end)}


def test_completions_of_the_reference(formats: Formats, golden_pairs: list[dict[str, Any]]) -> None:
    """Equal but for the second end token that the reference adds, and its edits of training ids for lone judge tokens.

    The reference puts a lone judge token without a partner in front of the completion (pairs with an empty response,
    and the response "." whose sign merges with the newline on the judge's side); training ids are never edited here.
    """
    chat, edited = formats("golden"), []
    eos = chat.tokenizer.eos_token_id
    for pair in golden_pairs:
        for side in ("chosen", "rejected"):
            encoded = chat.encode([{"role": "user", "content": pair["prompt"]}], pair[side])
            expected = pair["training"][side]["completion_ids"]
            assert expected[-1] == eos
            if encoded.response_ids != expected[:-1]:
                assert encoded.response_ids == expected[1:-1]
                edited.append((pair["name"], side))
    assert edited == [("empty_chosen", "chosen"), ("whitespace_rejected", "rejected"), ("lone_stop", "chosen")]
    assert chat.end_ids == {eos, chat.tokenizer.convert_tokens_to_ids("<|eot_id|>")}
    assert not chat.counts


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("turns", [TURNS, DIALOGUE], ids=["one turn", "dialogue"])
def test_one_bos_and_one_end(formats: Formats, name: str, turns: list[dict[str, str]]) -> None:
    chat = formats(name)
    wanted = 0 if name.startswith("gpt2") else 1  # that tokenizer has a BOS token but adds none
    ids = chat.prompt_ids(turns)
    bos = chat.tokenizer.bos_token_id
    assert ids.count(bos) == wanted and (ids[0] == bos) == bool(wanted)
    encoded = chat.encode(turns, "Light is scattered.")
    assert encoded.prompt_ids == ids
    end = chat.tokenizer.convert_tokens_to_ids(END[name])
    assert encoded.response_ids[-1] == end and encoded.response_ids.count(end) == 1
    assert encoded.offsets[-1] == (19, 19)
    assert end in chat.end_ids and chat.tokenizer.eos_token_id in chat.end_ids
    whole = chat.tokenizer.decode(ids + encoded.response_ids)
    assert "Light is scattered." in whole and turns[0]["content"] in whole


def test_bos_that_the_template_leaves_out_is_added_once(formats: Formats) -> None:
    """The tokenizer's post-processor would add it; PLAIN does not write it."""
    for name in ("golden", "mistral", "stories"):
        chat = formats(name, PLAIN)
        bos = chat.tokenizer.bos_token_id
        ids = chat.prompt_ids(TURNS)
        assert ids[0] == bos and ids.count(bos) == 1
        encoded = chat.encode(TURNS, "Yes.")
        assert encoded.prompt_ids == ids and bos not in encoded.response_ids
        assert encoded.response_ids[-1] == chat.tokenizer.eos_token_id


def test_ranges_by_hand(formats: Formats) -> None:
    """Word-level reading of the edge_merge vocabulary: " w", two bytes of "ö" on one character, "r", "ld"."""
    chat = formats("edge_merge")
    encoded = chat.encode(TURNS, "He wörld.")
    pieces = chat.tokenizer.convert_ids_to_tokens(encoded.response_ids)
    assert pieces == ["H", "e", "Ġw", "Ã", "¶", "r", "ld", ".", "<|end|>"]
    assert encoded.offsets == [(0, 1), (1, 2), (2, 4), (4, 5), (4, 5), (5, 6), (6, 8), (8, 9), (9, 9)]


def test_a_template_that_trims_keeps_ranges_of_the_text_as_given(formats: Formats) -> None:
    """Three blanks in front and two after it are gone from the ids; ranges still count them."""
    trimmed, plain = formats("edge_merge"), formats("edge_merge_untrimmed")
    text = " \n Yes it is.\n\t"
    encoded = trimmed.encode(TURNS, text)
    assert encoded.response_ids == trimmed.encode(TURNS, "Yes it is.").response_ids
    assert encoded.offsets[0][0] == 3 and encoded.offsets[-2] == (12, 13) and encoded.offsets[-1] == (15, 15)
    assert covered(encoded) == set(range(3, 13))
    assert covered(plain.encode(TURNS, text)) == set(range(15))


def test_text_of_special_tokens_inside_a_response(formats: Formats) -> None:
    """ "a</s>b</s>" holds two real EOS tokens with this tokenizer; the end of turn is the third."""
    chat = formats("mistral")
    encoded = chat.encode(TURNS, "a</s>b</s>")
    assert encoded.response_ids.count(2) == 3
    ends = [place for token, place in zip(encoded.response_ids, encoded.offsets, strict=True) if token == 2]
    assert ends == [(1, 5), (6, 10), (10, 10)]
    plain = formats("mistral", PLAIN)  # nothing closes the turn: EOS is appended although the text ends with one
    assert plain.encode(TURNS, "a</s>").response_ids.count(2) == 2


def test_what_follows_the_end_of_turn_is_cut(formats: Formats) -> None:
    """ChatML with a real end token: the newline after it is never generated, so it is not trained on."""
    tokenizer = formats.tokenizer(GPT2, fresh=True)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    chat = ChatFormat(tokenizer, FORMATS["gpt2_chatml"][1])
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert chat.end_ids == {tokenizer.eos_token_id, end}
    encoded = chat.encode(DIALOGUE, "Rayleigh.")
    assert tokenizer.decode(encoded.response_ids) == "Rayleigh.<|im_end|>"
    assert encoded.response_ids[-1] == end
    assert formats("gpt2_chatml").encode(DIALOGUE, "Rayleigh.").response_ids[-1] == tokenizer.eos_token_id


@pytest.mark.parametrize("name", FORMATS)
def test_an_empty_response_is_the_end_of_turn(formats: Formats, name: str) -> None:
    chat = formats(name)
    encoded = chat.encode(TURNS, "")
    assert chat.tokenizer.convert_ids_to_tokens(encoded.response_ids)[-1] == END[name]
    assert set(encoded.offsets) == {(0, 0)}
    if name in ("golden", "edge_merge"):  # the other templates write a blank or a newline around it
        assert len(encoded.response_ids) == 1


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=20)
@given(text=AWKWARD)
def test_ranges_of_any_text(formats: Formats, name: str, text: str) -> None:
    chat = formats(name)
    encoded = chat.encode(TURNS, text)
    assert len(encoded.offsets) == len(encoded.response_ids) and encoded.prompt_ids == chat.prompt_ids(TURNS)
    assert all(0 <= start <= end <= len(text) for start, end in encoded.offsets)
    held = [place for place in encoded.offsets if place[1] > place[0]]
    assert held == sorted(held) and encoded.offsets[-1] == (len(text), len(text))
    assert encoded.response_ids[-1] in chat.end_ids
    lead = 0 if name in UNTRIMMED else len(text) - len(text.lstrip())
    kept = text if name in UNTRIMMED else text.strip()
    assert covered(encoded) == set(range(lead, lead + len(kept)))


def test_a_response_that_merges_with_the_prompt_is_tokenised_alone_and_counted(formats: Formats) -> None:
    """The prompt ends with a blank, which the whole conversation has in the response's first token."""
    chat = formats("gpt2_plain", PLAIN.replace("assistant:{%", "assistant: {%"))
    encoded = chat.encode(TURNS, "Yes.")
    assert chat.counts == {NOT_A_PREFIX: 1}
    assert encoded.prompt_ids == chat.prompt_ids(TURNS)
    assert chat.tokenizer.decode(encoded.response_ids) == "Yes.\n<|endoftext|>"
    assert encoded.offsets == [(0, 3), (3, 4), (4, 4), (4, 4)]
    assert chat.end_ids == {chat.tokenizer.eos_token_id} and chat.counts == {NOT_A_PREFIX: 1}, "no probe is counted"


def pad_left(tokenizer: Any) -> None:
    tokenizer.padding_side, tokenizer.pad_token = "left", tokenizer.eos_token
    tokenizer(["a b", "c"], padding="max_length", truncation=True, max_length=16)


def cut_left(tokenizer: Any) -> None:
    tokenizer.truncation_side = "left"
    tokenizer(["a b", "c"], truncation=True, max_length=1)


def split_special(tokenizer: Any) -> None:
    tokenizer("a b", split_special_tokens=True)


@pytest.mark.parametrize(
    ("call", "name", "saved"),
    [(pad_left, "gpt2_plain", True), (pad_left, "golden", False), (pad_left, "mistral", True),
     (cut_left, "golden", False), (cut_left, "golden", True), (split_special, "mistral", False)],
)  # fmt: skip
def test_what_a_call_or_a_file_left_in_the_tokenizer_is_not_read_and_stays(
    formats: Formats, tmp_path: Path, name: str, saved: bool, call: Callable[[Any], None]
) -> None:
    """transformers keeps what a call asked for in the tokenizer, and writes padding and truncation into its file.

    Padding on the left puts the pad token where a BOS would be, which may be the same token.
    """
    expected, (folder, template) = formats(name), FORMATS[name]
    tokenizer = formats.tokenizer(folder, fresh=True)
    call(tokenizer)
    if saved:
        tokenizer.save_pretrained(tmp_path)
        tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    state = left_in(tokenizer)
    chat = ChatFormat(tokenizer, template)
    assert chat.fingerprint() == expected.fingerprint()
    assert chat.encode(TURNS, "A long answer </s> to this.") == expected.encode(TURNS, "A long answer </s> to this.")
    assert chat.prompt_ids(DIALOGUE) == expected.prompt_ids(DIALOGUE)
    assert chat.inference_template() == expected.inference_template()
    assert left_in(tokenizer) == state


def left_in(tokenizer: Any) -> tuple[object, ...]:
    backend = tokenizer.backend_tokenizer
    return backend.padding, backend.truncation, backend.encode_special_tokens


def test_fingerprint_sees_template_and_vocabulary(formats: Formats) -> None:
    prints = [formats("golden"), formats("golden", PLAIN), formats("edge_merge"), formats("gpt2_plain")]
    keys = [(chat.fingerprint()["tokenizer"], chat.fingerprint()["chat_template"]) for chat in prints]
    assert keys[0][0] == keys[1][0] and keys[1][1] == keys[3][1]
    assert len(set(keys)) == 4
    tokenizer = formats.tokenizer(EDGE_MERGE, fresh=True)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|new|>"]})
    assert ChatFormat(tokenizer).fingerprint()["tokenizer"] != keys[2][0]


# ---------------------------------------------------------------------------------------------- refusals


def test_a_tokenizer_without_template_names_the_option(formats: Formats) -> None:
    with pytest.raises(UserError, match=r"model\.chat_template"):
        ChatFormat(formats.tokenizer(GPT2))


def test_a_template_that_changes_the_prompt_is_refused_for_training_only(formats: Formats) -> None:
    """As reasoning templates do: the generation prompt opens a thought that a finished turn does not have."""
    template = FORMATS["gpt2_chatml"][1]
    assert template is not None
    chat = formats("gpt2_chatml", template.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}"))
    assert chat.tokenizer.decode(chat.prompt_ids(TURNS)).endswith("<think>\n")
    assert chat.end_ids == {chat.tokenizer.eos_token_id}
    with pytest.raises(UserError, match=r"renders the prompt differently.*'<think>"):
        chat.encode(TURNS, "Yes.")


def thinking(formats: Formats, opening: str, thought: str, folder: str = GOLDEN) -> ChatFormat:
    """ChatML whose answers begin with ``thought``, as Qwen3's and Qwen3.5's do, and prompts end with ``opening``."""
    template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' and loop.last %}"
        f"{thought}{{% endif %}}{{{{ m['content'] }}}}<|im_end|>\n{{% endfor %}}"
        f"{{% if add_generation_prompt %}}<|im_start|>assistant\n{opening}{{% endif %}}"
    )
    return ChatFormat(formats.mark_turns(["<|im_start|>", "<|im_end|>", "<think>", "</think>"], folder), template)


@pytest.mark.parametrize("opening", ["", "<think>\n", "<think>\n\n</think>\n\n"])
def test_text_between_prompt_and_response_is_part_of_the_prompt(
    formats: Formats, opening: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The same ids whether the generation prompt has all of the empty thought, opens it, or leaves it to the answer."""
    thought = "<think>\n\n</think>\n\n"
    chat = thinking(formats, opening, thought)
    plain = thinking(formats, "", "")
    with caplog.at_level("INFO"):
        both = [chat.encode(DIALOGUE, text) for text in ("Rayleigh.", "", "\nDust.", " It is 5.")]
    bare = plain.encode(DIALOGUE, "Rayleigh.")
    assert both[0].response_ids == bare.response_ids and both[0].offsets == bare.offsets
    assert both[0].prompt_ids == bare.prompt_ids + chat.tokenizer.encode(thought, add_special_tokens=False)
    assert both[1].prompt_ids == both[0].prompt_ids and both[1].response_ids == bare.response_ids[-1:]
    for one, text in zip(both, ("Rayleigh.", "", "\nDust.", " It is 5."), strict=True):
        assert covered(one) == set(range(len(text)))
        whole = chat.render([*DIALOGUE, {"role": "assistant", "content": text}], False)
        assert whole.startswith(chat.tokenizer.decode((one.prompt_ids + one.response_ids)[1:]))
    assert chat.tokenizer.decode(chat.prompt_ids(DIALOGUE)).endswith("assistant\n" + opening)
    told = opening != thought
    assert caplog.text.count("this text counts as part of the prompt") == told
    assert ("part_of_the_prompt" in chat.fingerprint()) == told and "part_of_the_prompt" not in plain.fingerprint()
    assert not chat.counts


def test_a_blank_that_the_first_token_takes_stays_with_it(formats: Formats) -> None:
    """Behind "</think>" and a blank, " Yes" is one token; it is the response's, and both prompts end before it."""
    chat = thinking(formats, "", "<think></think> ", GPT2)
    one, other = chat.encode(TURNS, "Yes."), chat.encode(TURNS, "No.")
    assert chat.tokenizer.convert_ids_to_tokens(one.response_ids) == ["ĠYes", ".", "<|im_end|>"]
    assert one.offsets == [(0, 3), (3, 4), (4, 4)] and one.prompt_ids == other.prompt_ids
    assert chat.tokenizer.decode(one.prompt_ids).endswith("<think></think>") and not chat.counts


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("m['content']", "m['content'] | upper", "changes the text of an assistant turn"),
        ("m['content']", "m['content'] + m['content']", "2 times instead of exactly once"),
        ("{% for", "{{ raise_exception('roles must alternate') }}{% for", "roles must alternate"),
    ],
)
def test_templates_that_rewrite_or_refuse(formats: Formats, old: str, new: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        formats("gpt2_plain", PLAIN.replace(old, new)).encode(TURNS, "Yes.")


def test_a_range_above_the_sandboxs_limit_is_the_templates_fault(formats: Formats) -> None:
    chat = formats("gpt2_plain", "{% for i in range(100001) %}{% endfor %}{{ messages[0].content }}")
    with pytest.raises(RefusedText, match=r"too large .*Range too big.*; set model.chat_template to") as caught:
        chat.prompt_ids(TURNS)
    assert (
        "roles" not in str(caught.value)
        and caught.value.reason == "the chat template computes a number that is too large"
    )


def test_no_token_to_end_the_turn_with(formats: Formats) -> None:
    tokenizer = formats.tokenizer(GPT2, fresh=True)
    tokenizer.eos_token = None
    with pytest.raises(UserError, match="no EOS token"):
        ChatFormat(tokenizer, PLAIN).encode(TURNS, "Yes.")


@pytest.mark.parametrize("name", FORMATS)
def test_lone_surrogates_are_named_and_nul_is_text(formats: Formats, name: str) -> None:
    chat = formats(name)
    with pytest.raises(UserError, match=r"the response contains the lone surrogate U\+D83D at character 2"):
        chat.encode(TURNS, "ab\ud83d")
    with pytest.raises(UserError, match=r"lone surrogate U\+DC00"):
        chat.prompt_ids([{"role": "user", "content": "\udc00"}])
    assert covered(chat.encode(TURNS, "a\x00b")) == {0, 1, 2}


# ---------------------------------------------------------------------------------------------- truncation


def test_truncation_keeps_the_prompts_end_and_the_responses_beginning() -> None:
    encoded = EncodedResponse([1, 2, 3, 4, 5], [10, 11, 12], [(0, 1), (1, 2), (2, 2)])
    same, cut = truncate(encoded, 5, 8)
    assert same == encoded and cut == (False, False)
    short, cut = truncate(encoded, 3, 5)
    assert short == EncodedResponse([3, 4, 5], [10, 11], [(0, 1), (1, 2)]) and cut == (True, True)
    none, cut = truncate(encoded, 4, 4)
    assert none.response_ids == [] and none.offsets == [] and cut == (True, True)
    nothing, cut = truncate(encoded, 0, 3)
    assert nothing.prompt_ids == [] and nothing.response_ids == [10, 11, 12] and cut == (True, False)
    over, cut = truncate(encoded, 5, 2)
    assert over.response_ids == [] and cut == (False, True)


def test_truncation_that_keeps_the_end_is_that_of_trl() -> None:
    """TRL's keep_end: the last tokens of prompt and response; the first of them is predicted by nothing."""
    encoded = EncodedResponse([1, 2, 3, 4, 5], [10, 11, 12], [(0, 1), (1, 2), (2, 2)])
    for max_prompt, max_length in ((5, 8), (5, 7), (5, 4), (3, 6), (3, 5), (5, 3), (5, 2), (1, 2)):
        found, cut = truncate(encoded, max_prompt, max_length, keep_end=True)
        whole = [1, 2, 3, 4, 5][-max_prompt:] + encoded.response_ids
        assert found.prompt_ids + found.response_ids == whole[-max_length:]
        scored = [token for token in whole[-max_length:][1:] if token >= 10]
        assert found.response_ids == scored
        assert found.offsets == encoded.offsets[-len(scored) :]
        assert cut == (found.prompt_ids != [1, 2, 3, 4, 5], scored != encoded.response_ids)
        if len(whole) <= max_length:
            assert (found, cut) == truncate(encoded, max_prompt, max_length)


# ----------------------------------------------------------------------- a template's time limit


def compute(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def test_computing_is_stopped_and_waiting_is_not() -> None:
    began = time.thread_time()
    with pytest.raises(DeadlineExceeded), deadline(0.1):
        compute(60)
    assert time.thread_time() - began < 5
    with deadline(0.05):
        time.sleep(0.2)


def test_timers_and_handlers_of_others_are_left_as_they_were() -> None:
    def ring(number: int, frame: object) -> None:
        raise AssertionError

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, 300)
    try:
        with deadline(10.0):
            pass
        assert signal.getsignal(signal.SIGALRM) is ring
        assert 200 < signal.getitimer(signal.ITIMER_REAL)[0] <= 300
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_other_threads_compute_as_long_as_they_want() -> None:
    done = []

    def work() -> None:
        with deadline(0.01):
            compute(0.1)
        done.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done == [True]
