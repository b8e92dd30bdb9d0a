"""Judge prompts: the reference's ids and spans, ranges of any text, exact splicing, cuts, labels, refusals."""

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnpo.judge.base import JudgePrompt
from attnpo.judge.prompts import (
    JudgePromptBuilder,
    JudgeTemplate,
    allocate_tokens,
    count_first_tokens,
    last_tokens_start,
    question_text,
)
from attnpo.judge.settings import Assembly, JudgeRules, SpanMode, TraceRules, Turns
from attnpo.schema import SIDES, Message, PreferencePair, UserError
from tests.text.formats import FORMATS, PLAIN, Formats
from tests.text.test_chat import AWKWARD

SMALL = "Asked: {question}\n\n### First\n{answer_a}\n### Second\n{answer_b}\n### Better letter:"


def pair_of(question: str, chosen: str, rejected: str) -> PreferencePair:
    return PreferencePair.from_texts([{"role": "user", "content": question}], chosen, rejected)


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("judge") / "small.txt"
    path.write_text(SMALL)
    return path


@pytest.fixture
def rules(small: Path) -> JudgeRules:
    return JudgeRules(str(small))


def shown_text(prompt: JudgePrompt, side: str, response: str) -> str:
    """The characters of the response that its tokens cover, which must be one run."""
    held = sorted({i for start, end in prompt.offsets[side] for i in range(start, end)})
    assert held == list(range(held[0], held[-1] + 1)) if held else True
    return "".join(response[i] for i in held)


# ---------------------------------------------------------------------------------------------- golden


@pytest.mark.parametrize("mode", list(SpanMode))
def test_ids_and_spans_of_the_reference(
    formats: Formats, golden: Path, golden_pairs: list[dict[str, Any]], mode: SpanMode
) -> None:
    """All rounds with fewer than 2048 tokens; and those two cut pairs for which both length rules cut alike.

    Both rules keep 768 tokens of each response. They differ in what is left to a long question: ours what fits, the
    reference's 300 tokens less than max_length less the responses.
    """
    prompts = JudgePromptBuilder(JudgeRules(str(golden / "template.txt"), span=mode), formats("golden"))
    same = 0
    for pair in golden_pairs:
        built = prompts.build(pair_of(pair["prompt"], pair["chosen"], pair["rejected"]))
        for ours, key, (a, b) in zip(built, ("cr", "rc"), (SIDES, SIDES[::-1]), strict=True):
            theirs = pair["rounds"][key]
            assert ours.chosen_is_a == (theirs["answer_a"] == "chosen") and ours.cut == theirs["truncated"]
            if pair["name"] == "long_prompt_only":
                assert len(theirs["judge_ids"]) < len(ours.input_ids) < 2048
                continue
            assert ours.input_ids == theirs["judge_ids"], (pair["name"], key)
            touch = (theirs["content_a"]["touch"], theirs["content_b"]["touch"])
            expected = touch if mode is SpanMode.TOUCH else (theirs["span_a"], theirs["span_b"])
            assert (list(ours.spans[a]), list(ours.spans[b])) == expected, (pair["name"], key)
            assert all(len(ours.offsets[s]) == ours.spans[s][1] - ours.spans[s][0] for s in SIDES)
            same += 1
    assert same == 2 * (len(golden_pairs) - 1)


def test_awkward_texts_of_the_reference(formats: Formats, golden: Path) -> None:
    cases = json.loads((golden / "span_cases.json").read_text())
    prompts = JudgePromptBuilder(JudgeRules(str(golden / "template.txt"), strip=False), formats("golden"))
    template = JudgeTemplate.from_file(golden / "template.txt")
    assert len(cases) > 10
    for case in cases:
        prompt, _ = prompts.build(pair_of(case["prompt"], case["answer_a"], case["answer_b"]))
        assert prompt.input_ids == case["judge_ids"]
        for name, side in (("a", "chosen"), ("b", "rejected")):
            assert list(prompt.spans[side]) == case[f"tokens_{name}"], case
            answer = case[f"answer_{name}"]
            assert shown_text(prompt, side, answer) == answer
        rendered = template.render(case["prompt"], case["answer_a"], case["answer_b"])
        # The recorded ranges count from the start of the whole chat text; their distance is free of that.
        shift = case["chars_a"][0] - rendered.spans["answer_a"][0]
        for name in ("a", "b"):
            begin, end = rendered.spans[f"answer_{name}"]
            assert [begin + shift, end + shift] == case[f"chars_{name}"]


# ---------------------------------------------------------------------------------------------- template


def test_one_pass_substitution_and_spans() -> None:
    rendered = JudgeTemplate("{x} {question}|{answer_b}|{answer_a}!").render("{answer_a}", "a{answer_b}", "{question}")
    assert rendered.text == "{x} {answer_a}|{question}|a{answer_b}!"
    assert rendered.spans == {"question": (4, 14), "answer_b": (15, 25), "answer_a": (26, 37)}


@settings(max_examples=25)
@given(question=st.text(max_size=20), a=st.text(max_size=20), b=st.text(max_size=20))
def test_spans_hold_the_texts(question: str, a: str, b: str) -> None:
    rendered = JudgeTemplate(SMALL).render(question, a, b)
    for name, value in (("question", question), ("answer_a", a), ("answer_b", b)):
        begin, end = rendered.spans[name]
        assert rendered.text[begin:end] == value
    assert len(rendered.text) == len(SMALL) - len("{question}{answer_a}{answer_b}") + len(question + a + b)


@pytest.mark.parametrize(
    ("text", "found"),
    [("plain", "none"), ("{question}{answer_a}", "{question}, {answer_a}"), (SMALL + "{answer_a}", "{answer_a}$")],
)
def test_placeholders_missing_or_twice(text: str, found: str) -> None:
    with pytest.raises(
        UserError, match=r"expected the placeholders \{question\}, \{answer_a\}, \{answer_b\}"
    ) as caught:
        JudgeTemplate(text)
    named = str(caught.value).split("found ")[1].split(":")[0]
    assert named.endswith(found.rstrip("$"))


def test_unreadable_template_files(tmp_path: Path, formats: Formats) -> None:
    (tmp_path / "latin").write_bytes(b"\xff\xfe {question}")
    for name in ("missing", "latin", "."):
        with pytest.raises(UserError, match=r"judge\.template_file: cannot read"):
            JudgePromptBuilder(JudgeRules(str(tmp_path / name)), formats("golden"))


def test_questions_of_several_turns() -> None:
    said = (("system", "Be brief."), ("user", "Hi"), ("assistant", "Hello"), ("user", "Why?"))
    turns = [Message(role=role, content=text) for role, text in said]
    assert question_text(turns[1:2]) == "Hi" and question_text(turns[:1]) == "system: Be brief."
    assert question_text(turns) == "system: Be brief.\n\nuser: Hi\n\nassistant: Hello\n\nuser: Why?"


def test_the_last_user_turn_alone_is_shown_if_asked_for(formats: Formats, small: Path) -> None:
    said = (("system", "Be brief."), ("user", "Hi"), ("assistant", "Hello"), ("user", "Why?"))
    turns = [Message(role=role, content=text) for role, text in said]
    several, single = (PreferencePair.from_texts(prompt, "Because.", "No idea.") for prompt in (turns, turns[-1:]))
    whole = JudgeRules(str(small))
    last = replace(whole, turns=Turns.LAST)
    whole_builder, last_builder = (JudgePromptBuilder(rules, formats("golden")) for rules in (whole, last))
    of_last = [prompt.input_ids for prompt in last_builder.build(several)]
    assert of_last == [prompt.input_ids for prompt in whole_builder.build(single)]
    assert of_last != [prompt.input_ids for prompt in whole_builder.build(several)]
    assert last_builder.fingerprint() == {**whole_builder.fingerprint(), "turns": "last"}
    without = PreferencePair.from_texts(turns[:1], "Because.", "No idea.")
    with pytest.raises(UserError, match=r"judge\.turns=last needs a user turn, but the prompt has only system"):
        last_builder.build(without)


# ---------------------------------------------------------------------------------------------- assemblies


@pytest.mark.parametrize("name", FORMATS)
def test_both_assemblies_of_any_texts(formats: Formats, rules: JudgeRules, name: str) -> None:
    """TEXT covers the whole responses without outer blanks; IDS holds exactly the training tokens with characters."""
    chat = formats(name)
    blank = chat.tokenize(" ", start=False)[0]
    whole, spliced = (JudgePromptBuilder(replace(rules, assembly=one), chat) for one in Assembly)

    @settings(max_examples=12)
    @given(question=AWKWARD, chosen=AWKWARD, rejected=AWKWARD)
    def check(question: str, chosen: str, rejected: str) -> None:
        pair = pair_of(question, chosen, rejected)
        rounds = whole.build(pair)
        assert [prompt.chosen_is_a for prompt in rounds] == [True, False] and not rounds[0].cut
        for prompt in rounds:
            for side in SIDES:
                response, (begin, end) = pair.response(side), prompt.spans[side]
                assert 0 < begin < end < len(prompt.input_ids)
                assert shown_text(prompt, side, response) == response.strip()
                assert response.strip() or set(prompt.offsets[side]) == {(0, 0)}
            assert (prompt.spans["chosen"][1] <= prompt.spans["rejected"][0]) == prompt.chosen_is_a
        rounds = spliced.build(pair)
        for side in SIDES:
            encoded = chat.encode(pair.prompt, pair.response(side))
            content = [i for i, (start, end) in enumerate(encoded.offsets) if end > start]
            for prompt in rounds:
                begin, end = prompt.spans[side]
                assert prompt.input_ids[begin:end] == ([encoded.response_ids[i] for i in content] or blank)
                assert prompt.offsets[side] == ([encoded.offsets[i] for i in content] or [(0, 0)] * len(blank))
        # Both rounds are the same parts in another order.
        assert sorted(rounds[0].input_ids) == sorted(rounds[1].input_ids)

    check()


@pytest.mark.parametrize("name", FORMATS)
def test_prompts_with_and_without_chat_template_and_prefill(formats: Formats, rules: JudgeRules, name: str) -> None:
    """Exactly one BOS; labels are the tokens after the prompt; a prefill ends the prompt and moves no span."""
    chat, pair = formats(name), pair_of("Which?", "the first one", "the second one, longer")
    bos, wanted = chat.tokenizer.bos_token_id, 0 if name.startswith("gpt2") else 1
    for assembly, plain in product(Assembly, (True, False)):
        bare = replace(rules, assembly=assembly, chat=plain)
        without, with_it = (
            JudgePromptBuilder(bare, chat),
            JudgePromptBuilder(replace(bare, prefill="\nThe better letter:"), chat),
        )
        # After a special token Mistral's vocabulary opens a word; after a colon it does not.
        labels = ["▁A", "▁B"] if name == "mistral" and plain else ["A", "B"]
        assert chat.tokenizer.convert_ids_to_tokens(list(without.label_ids)) == labels
        assert [chat.tokenizer.decode([index]).strip() for index in with_it.label_ids] == ["A", "B"]
        for one, longer in zip(without.build(pair), with_it.build(pair), strict=True):
            assert one.input_ids.count(bos) == wanted and one.input_ids[:wanted] == [bos] * wanted
            text, written = (chat.tokenizer.decode(prompt.input_ids) for prompt in (one, longer))
            assert "Better letter:" in text and text.endswith("Better letter:") == (not plain)
            assert len(longer.input_ids) > len(one.input_ids) and written.endswith("The better letter:")
            assert written.removesuffix("The better letter:").rstrip() == text.rstrip()
            assert (longer.spans, longer.offsets) == (one.spans, one.offsets)


def test_ids_assembly_of_a_letter_by_letter_prompt(formats: Formats, rules: JudgeRules) -> None:
    """With the edge_merge vocabulary the text assembly loses the sign before a newline, the id assembly does not."""
    chat = formats("edge_merge")
    pair = pair_of("Why?", "It is so.", "No")
    stop = chat.tokenizer.convert_tokens_to_ids(".")
    whole, _ = JudgePromptBuilder(rules, chat).build(pair)
    spliced, _ = JudgePromptBuilder(replace(rules, assembly=Assembly.IDS), chat).build(pair)
    (begin, end), (begin_spliced, end_spliced) = whole.spans["chosen"], spliced.spans["chosen"]
    assert chat.tokenizer.decode(whole.input_ids[begin:end]) == "It is so.\n"
    assert whole.offsets["chosen"][-1] == spliced.offsets["chosen"][-1] == (8, 9)
    assert whole.input_ids[end - 1] != stop and spliced.input_ids[end_spliced - 1] == stop
    assert whole.input_ids[: end - 1] == spliced.input_ids[: end_spliced - 1] and begin == begin_spliced
    text = chat.tokenizer.decode(spliced.input_ids)
    assert text == chat.tokenizer.decode(whole.input_ids)


@pytest.mark.parametrize("assembly", list(Assembly))
def test_reference_spans_end_early_but_keep_one_token(formats: Formats, rules: JudgeRules, assembly: Assembly) -> None:
    """Behind the response stand a newline and "###": the official span ends two tokens before "###"."""
    chat = formats("gpt2_plain")  # keeps every newline apart
    prompts = JudgePromptBuilder(replace(rules, assembly=assembly, span=SpanMode.REFERENCE), chat)
    touch = JudgePromptBuilder(replace(rules, assembly=assembly), chat)
    pair = pair_of("Why?", "one two three", "one")
    for short, full in zip(prompts.build(pair), touch.build(pair), strict=True):
        assert short.input_ids == full.input_ids
        begin, end = full.spans["chosen"]
        assert end - begin == 3 and short.spans["chosen"] == (begin, end - 1)
        assert short.offsets["chosen"] == [(0, 3), (3, 7)]
        assert short.spans["rejected"] == full.spans["rejected"]


@pytest.mark.parametrize("assembly", list(Assembly))
@pytest.mark.parametrize(("closing", "drop", "kept"), [("\n###", 2, 1), ("##", 0, 3), ("\n", 1, 2), (None, 3, 1)])
def test_where_reference_spans_end(
    formats: Formats, rules: JudgeRules, assembly: Assembly, closing: str | None, drop: int, kept: int
) -> None:
    """Tokens after the three of "one two three": a newline and "###". The span ends ``drop`` before ``closing``."""
    asked = replace(rules, assembly=assembly, span=SpanMode.REFERENCE, span_closing=closing, span_drop=drop)
    rounds = JudgePromptBuilder(asked, formats("gpt2_plain"))
    for prompt in rounds.build(pair_of("Why?", "one two three", "one")):
        assert len(prompt.offsets["chosen"]) == kept == prompt.spans["chosen"][1] - prompt.spans["chosen"][0]


@pytest.mark.parametrize(("text", "closing"), [("{question} {answer_a} or {answer_b}\n", None), (SMALL, "### Second")])
def test_reference_spans_need_text_after_the_answers(
    formats: Formats, tmp_path: Path, text: str, closing: str | None
) -> None:
    path = tmp_path / "t.txt"
    path.write_text(text)
    with pytest.raises(UserError, match=r"judge\.span"):
        JudgePromptBuilder(JudgeRules(str(path), span=SpanMode.REFERENCE, span_closing=closing), formats("golden"))


def test_answers_at_the_edges_of_a_trimming_template(formats: Formats, tmp_path: Path) -> None:
    """The chat template trims the message, so blanks of the answers at its two ends are not shown."""
    path = tmp_path / "t.txt"
    path.write_text("{answer_a}|{question}|{answer_b}")
    prompts = JudgePromptBuilder(JudgeRules(str(path), strip=False), formats("edge_merge"))
    first, second = prompts.build(pair_of("Why?", "  red \n", " blue  "))
    assert shown_text(first, "chosen", "  red \n") == "red \n"
    assert shown_text(first, "rejected", " blue  ") == " blue"
    assert shown_text(second, "rejected", " blue  ") == "blue  "
    assert shown_text(second, "chosen", "  red \n") == "  red"


def test_a_chat_template_that_rewrites_messages_is_refused(formats: Formats, rules: JudgeRules) -> None:
    chat = formats("gpt2_plain", PLAIN.replace("m['content']", "m['content'] | replace('two', '2')"))
    prompts = JudgePromptBuilder(rules, chat)
    prompts.build(pair_of("Why?", "one", "three"))
    with pytest.raises(UserError, match=r"^pair [0-9a-f]{32}: the chat template changes a user message"):
        prompts.build(pair_of("Why?", "one", "two"))


@pytest.mark.parametrize("assembly", list(Assembly))
def test_lone_surrogates_name_the_pair(formats: Formats, rules: JudgeRules, assembly: Assembly) -> None:
    prompts = JudgePromptBuilder(replace(rules, assembly=assembly), formats("golden"))
    for texts, where in (
        (("\ud800", "a", "b"), "the prompt"),
        (("q", "\ud800", "b"), "the chosen response"),
        (("q", "a", "b\udfff"), "the rejected response"),
    ):
        pair = pair_of(*texts)
        with pytest.raises(UserError, match=f"pair {pair.pair_id}: {where} contains the lone surrogate"):
            prompts.build(pair)


# ---------------------------------------------------------------------------------------------- length


def test_shares_of_the_room() -> None:
    # Decision 10: 768 tokens each, the question keeps the rest.
    assert allocate_tokens(1900, 5000, [3000, 900], 768) == (364, [768, 768])
    assert allocate_tokens(1900, 5000, [3000, 20], 768) == (1112, [768, 20])
    assert allocate_tokens(1900, 10, [3000, 3000], 768) == (10, [768, 768])
    # A small room: an eighth (50) stays the question's, the responses share 350.
    assert allocate_tokens(400, 100, [600, 700], 768) == (50, [175, 175])
    assert allocate_tokens(400, 100, [600, 100], 768) == (50, [250, 100])
    assert allocate_tokens(400, 100, [100, 600], 768) == (50, [100, 250])
    assert allocate_tokens(400, 8, [600, 600], 768) == (8, [196, 196])
    assert allocate_tokens(3, 9, [9, 9], 768) == (0, [1, 1])


@given(st.integers(3, 60), st.integers(0, 90), *[st.integers(1, 90)] * 3)
def test_shares_fit_and_leave_something(room: int, question: int, a: int, b: int, most: int) -> None:
    keep, (kept_a, kept_b) = allocate_tokens(room, question, [a, b], most)
    assert keep + kept_a + kept_b <= room
    assert 0 <= keep <= question and 1 <= kept_a <= min(a, most) and 1 <= kept_b <= min(b, most)
    assert allocate_tokens(room, question, [b, a], most) == (keep, [kept_b, kept_a])


def test_cuts_never_split_a_character() -> None:
    """Tokens: two on character 0, one on character 1, three on character 2, two that overlap (as in gpt2)."""
    places = [(0, 1), (0, 1), (1, 2), (2, 3), (2, 3), (2, 3), (3, 5), (4, 5)]
    assert [count_first_tokens(places, keep) for keep in range(9)] == [2, 2, 2, 3, 3, 3, 6, 6, 8]
    assert [last_tokens_start(places, keep, 5) for keep in range(9)] == [5, 5, 3, 3, 3, 2, 1, 1, 0]


@pytest.mark.parametrize("assembly", list(Assembly))
@pytest.mark.parametrize("name", ["golden", "gpt2_plain", "mistral", "stories"])
@settings(max_examples=8)
@given(data=st.data())
def test_long_prompts_are_cut_at_characters(formats, small, name, assembly, data) -> None:
    """Whatever the texts: fewer than max_length tokens, a prefix of each response, both rounds alike."""
    chat = formats(name)
    alphabet = st.sampled_from(["word ", "長城", "🎉", "👩🏽‍🔬", ".\n", "x", " "])
    texts = st.lists(alphabet, min_size=1, max_size=120).map("".join)
    pair = pair_of(data.draw(texts), "c" + data.draw(texts) + "c", "r" + data.draw(texts))
    limit = data.draw(st.integers(110, 300))
    rules = JudgeRules(str(small), assembly=assembly, max_length=limit, max_response_length=90)
    prompts = JudgePromptBuilder(rules, chat)
    whole = JudgePromptBuilder(replace(rules, max_length=10**6), chat).build(pair)
    rounds = prompts.build(pair)
    too_long = max(len(prompt.input_ids) for prompt in whole) >= rules.max_length
    assert [prompt.cut for prompt in rounds] == [too_long, too_long]
    assert too_long or rounds == whole
    for side in SIDES:
        response = pair.response(side)
        kept = {shown_text(prompt, side, response) for prompt in rounds}
        assert len(kept) == 1
        (text,) = kept
        assert text and response.startswith(text)
    for prompt in rounds:
        assert len(prompt.input_ids) < rules.max_length
        assert "\ufffd" not in chat.tokenizer.decode(prompt.input_ids)


def test_what_a_cut_keeps(formats: Formats, rules: JudgeRules) -> None:
    """gpt2, words of one token: the responses keep 20 tokens, the question its last ones up to the limit."""
    prompts = JudgePromptBuilder(replace(rules, max_length=120, max_response_length=20), formats("gpt2_plain"))
    pair = pair_of("start" + " why" * 100, "good" + " yes" * 49, "bad" + " no" * 9)
    first, second = prompts.build(pair)
    assert first.cut and second.cut
    assert [end - begin for begin, end in (first.spans[s] for s in SIDES)] == [20, 10]
    assert len(first.input_ids) == len(second.input_ids) == 119
    text = prompts.chat.tokenizer.decode(first.input_ids)
    assert "start" not in text and "\n### First\ngood" + " yes" * 19 + "\n### Second\nbad" + " no" * 9 + "\n###" in text
    # A round of exactly max_length tokens is cut, one of a token less is not.
    free = JudgePromptBuilder(replace(rules, max_length=10**6), formats("gpt2_plain")).build(pair)
    length = max(len(prompt.input_ids) for prompt in free)
    for limit, cut in ((length, True), (length + 1, False)):
        built = JudgePromptBuilder(replace(rules, max_length=limit), formats("gpt2_plain")).build(pair)
        assert [prompt.cut for prompt in built] == [cut, cut]


def test_a_template_that_does_not_fit(formats: Formats, rules: JudgeRules) -> None:
    with pytest.raises(UserError, match=r"judge\.max_length is 20, but the judge template alone needs about"):
        JudgePromptBuilder(replace(rules, max_length=20), formats("golden"))
    with pytest.raises(UserError, match=r"judge\.max_response_length must be at least 1"):
        replace(rules, max_response_length=0)


# ---------------------------------------------------------------------------------------------- labels, fingerprint


def test_labels_follow_the_prefill(formats: Formats, rules: JudgeRules) -> None:
    """GPT-2 writes a letter after an open bracket without a blank, and after a word with one."""
    chat = formats("gpt2_chatml")
    after = {"The better answer is (": ("A", "B"), "The better answer is": (" A", " B")}
    for prefill, labels in after.items():
        prompts = JudgePromptBuilder(replace(rules, prefill=prefill, labels=labels), chat)
        assert chat.tokenizer.convert_ids_to_tokens(list(prompts.label_ids)) == [
            label.replace(" ", "\u0120") for label in labels
        ]
        last = prompts.build(pair_of("Which?", "one", "two"))[0].input_ids[-1]
        assert chat.tokenizer.decode([last]).strip() == prefill.split()[-1]


def test_refused_prefills(formats: Formats, rules: JudgeRules) -> None:
    with pytest.raises(UserError, match=r"judge\.prefill: .* or null"):
        replace(rules, prefill="")
    blank = r"the label 'A' become one token.*judge\.prefill='The better answer is'"
    for name, prefill, story in (
        ("gpt2_chatml", "The better answer is ", blank),
        ("gpt2_chatml", "  ", r"strips the end of '  '"),
        ("gpt2_plain", "Answer: A", r"the label 'A' become one token.*"),
    ):
        with pytest.raises(UserError, match=story):
            JudgePromptBuilder(replace(rules, prefill=prefill), formats(name))


def test_labels_with_a_blank_and_refused_labels(formats: Formats, rules: JudgeRules) -> None:
    chat = formats("gpt2_plain")
    found = JudgePromptBuilder(replace(rules, labels=(" A", " B")), chat).label_ids
    assert chat.tokenizer.convert_ids_to_tokens(list(found)) == ["ĠA", "ĠB"]
    with pytest.raises(UserError, match=r"judge\.labels: 'Answer A' is 2 tokens"):
        _ = JudgePromptBuilder(replace(rules, labels=("Answer A", "B")), chat).label_ids
    with pytest.raises(UserError, match=r"judge\.labels: expected two different labels, got A twice"):
        replace(rules, labels=("A", "A"))


def test_every_rule_changes_the_fingerprint(formats: Formats, rules: JudgeRules, tmp_path: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text(SMALL + " ")
    same = tmp_path / "same.txt"
    same.write_text(SMALL)
    changes: dict[str, Any] = {
        "template_file": str(other),
        "assembly": Assembly.IDS,
        "span": SpanMode.REFERENCE,
        "max_length": 2000,
        "max_response_length": 700,
        "labels": ("1", "2"),
        "strip": False,
        "chat": False,
        "turns": Turns.LAST,
        "prefill": "The better letter:",
        "trace": TraceRules(16),
    }
    reference = {"span_closing": "\n###", "span_drop": 1}  # without a reference span they change nothing
    assert set(changes) | set(reference) == set(JudgeRules.__dataclass_fields__)
    chat = formats("golden")
    prints = [JudgePromptBuilder(rules, chat).fingerprint()]
    prints += [JudgePromptBuilder(replace(rules, **{key: value}), chat).fingerprint() for key, value in changes.items()]
    spans = replace(rules, span=SpanMode.REFERENCE)
    prints += [
        JudgePromptBuilder(replace(spans, **{key: value}), chat).fingerprint() for key, value in reference.items()
    ]
    prints += [JudgePromptBuilder(rules, formats("golden", PLAIN)).fingerprint()]
    assert len({json.dumps(value, sort_keys=True) for value in prints}) == len(prints)
    assert JudgePromptBuilder(replace(rules, template_file=str(same)), chat).fingerprint() == prints[0]
    assert JudgePromptBuilder(replace(rules, **reference), chat).fingerprint() == prints[0]
