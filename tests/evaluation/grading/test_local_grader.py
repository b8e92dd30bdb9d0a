"""A local grader against plain forwards of transformers, and what it makes of prompts that do not fit."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from attnpo.config.compose import CONFIG_DIR
from attnpo.data.base import PreferencePair
from attnpo.evaluation.chat import Grader, GradingCall, GradingFailure, GradingReply, Price
from attnpo.evaluation.local_chat import LocalGrader
from attnpo.evaluation.pairwise import Comparison, PairwiseRules
from attnpo.judge.causal_judge import CausalJudge
from attnpo.judge.prompts import JudgePromptBuilder
from attnpo.judge.settings import JudgeRules
from attnpo.models.loading import load_model, load_tokenizer
from attnpo.schema import Message, UserError
from attnpo.text.chat import ChatFormat
from tests.run.worlds import GRAMMAR, World

PLAIN = "{% for m in messages %}{{ m['role'] + ' : ' + m['content'] + '\n' }}{% endfor %}assistant :"
WITHOUT_SYSTEM = (
    "{% for m in messages %}{% if m['role'] != 'system' %}{{ m['role'] + ' : ' + m['content'] + '\n' }}{% endif %}"
    "{% endfor %}assistant :"
)
PROMPTS = [prompt.text for prompt in GRAMMAR.prompts("test")[:6]]


@pytest.fixture(scope="module")
def grader(world: World) -> LocalGrader:
    return LocalGrader(str(world.model), accelerator="cpu")


def call(text: str, *, system: str | None = None, labels: tuple[str, ...] = (), **more: object) -> GradingCall:
    turns = [Message(role="user", content=text)]
    if system is not None:
        turns.insert(0, Message(role="system", content=system))
    values: dict[str, object] = {"max_tokens": 1 if labels else 6, "item": text, **more}
    return GradingCall("bench", part="1", round=0, messages=tuple(turns), labels=labels, **values)  # type: ignore[arg-type]


def replies(grader: LocalGrader, calls: Iterable[GradingCall]) -> dict[GradingCall, GradingReply]:
    found = dict(grader.ask(calls))
    assert all(isinstance(reply, GradingReply) for reply in found.values()), found
    return found  # type: ignore[return-value]


def plain_logps(folder: Path, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return load_model(folder)(input_ids=torch.tensor([ids])).logits[0, -1].log_softmax(-1)


# ------------------------------------------------------------------------------------------------ labels


def test_labels_have_the_log_probabilities_of_a_plain_forward(world: World, grader: LocalGrader) -> None:
    asked = [call(text, labels=("A", "B"), top_logprobs=5) for text in PROMPTS]
    found = replies(grader, asked)
    tokenizer = load_tokenizer(world.model)
    assert list(found) == asked
    for one, reply in found.items():
        turns = [{"role": "user", "content": one.messages[0]["content"]}]
        text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        logps = plain_logps(world.model, ids)
        a, b = (float(logps[tokenizer.convert_tokens_to_ids(label)]) for label in "AB")
        assert reply.logprobs is not None
        assert (reply.logprobs["A"], reply.logprobs["B"]) == pytest.approx((a, b), abs=1e-5)
        assert reply.text == ("A" if a > b else "B")
        assert (reply.input_tokens, reply.output_tokens) == (len(ids), 1)
        assert grader.count_tokens(one) == len(ids)
        # The random model's likeliest token is none of the two letters: it is told, with its own log-probability.
        most = int(logps.argmax())
        assert set(reply.logprobs) == {"A", "B", tokenizer.convert_ids_to_tokens(most)}
        assert max(reply.logprobs.values()) == pytest.approx(float(logps.max()), abs=1e-5)


def test_a_likeliest_token_that_is_a_label_is_named_once(world: World, grader: LocalGrader) -> None:
    ids = ChatFormat(load_tokenizer(world.model)).prompt_ids([Message(role="user", content=PROMPTS[0])])
    top = load_tokenizer(world.model).convert_ids_to_tokens(int(plain_logps(world.model, ids).argmax()))
    other = "A" if top != "A" else "B"
    one = call(PROMPTS[0], labels=(other, top))
    (reply,) = replies(grader, [one]).values()
    assert reply.logprobs is not None
    assert set(reply.logprobs) == {other, top} and reply.text == top


def test_batches_decide_no_label_probability(world: World, grader: LocalGrader) -> None:
    asked = [call(text, labels=("A", "B")) for text in PROMPTS]
    whole = replies(grader, asked)
    for settings in ({"batch_size": 1}, {"batch_size": 4}, {"token_budget": 1}):
        other = replies(replace(grader, **settings), asked[::-1])
        for one in asked:
            first, second = whole[one].logprobs, other[one].logprobs
            assert first is not None and second is not None
            assert first == pytest.approx(second, abs=1e-5)


def test_the_prompt_of_a_comparison_is_that_of_attentionpos_judge(world: World, grader: LocalGrader) -> None:
    """Both orders: the very ids of ``JudgePromptBuilder``, so the verdict is the one that training reads."""
    file = str(CONFIG_DIR / "judge" / "testbed.txt")
    answers = ("the broth was nice .", " it had a poor bread .\n")
    pair = PreferencePair.from_texts([Message(role="user", content=PROMPTS[0])], *answers)
    prompts = JudgePromptBuilder(JudgeRules(file, max_length=512), ChatFormat(load_tokenizer(world.model)))
    built = [prompt.input_ids for prompt in prompts.build(pair)]
    asked = PairwiseRules(file).grading_calls("bench", 0, [Comparison("q", PROMPTS[0], *answers)])
    assert [grader._prompt_ids(one.messages) for one in asked] == built
    readings = CausalJudge(load_model(world.model)).read(built, layers=(), label_ids=prompts.label_ids)
    for reading, reply in zip(readings, replies(grader, asked).values(), strict=True):
        assert reading.verdict_logits is not None and reply.logprobs is not None
        expected = float(reading.verdict_logits[0] - reading.verdict_logits[1])
        assert reply.logprobs["A"] - reply.logprobs["B"] == pytest.approx(expected, abs=1e-5)


def test_labels_of_several_tokens_are_refused(grader: LocalGrader) -> None:
    with pytest.raises(UserError, match=r"grader\.path=.*labels: 'after lunch' is 2 tokens"):
        list(grader.ask([call(PROMPTS[0], labels=("after lunch", "B"))]))


def test_three_labels_are_a_failure(grader: LocalGrader) -> None:
    ((_, failure),) = grader.ask([call(PROMPTS[0], labels=("A", "B", "today"))])
    assert isinstance(failure, GradingFailure) and "two labels" in failure.problem


# ------------------------------------------------------------------------------------------------ written replies


def test_written_replies_are_the_models_own(world: World, grader: LocalGrader) -> None:
    """Greedy replies against a loop of plain forwards."""
    tokenizer, model = load_tokenizer(world.model), load_model(world.model)
    for one, reply in replies(grader, [call(text) for text in PROMPTS[:3]]).items():
        ids = ChatFormat(tokenizer).prompt_ids(one.messages)
        new: list[int] = []
        while len(new) < 6 and (not new or new[-1] != tokenizer.eos_token_id):
            with torch.no_grad():
                new.append(int(model(input_ids=torch.tensor([ids + new])).logits[0, -1].argmax()))
        ended = new[-1] == tokenizer.eos_token_id
        assert reply.text == tokenizer.decode(new, skip_special_tokens=True)
        assert reply.finish_reason == ("stop" if ended else "length")
        assert (reply.input_tokens, reply.output_tokens) == (len(ids), len(new) - ended)
        assert reply.logprobs is None


def test_drawn_replies_hang_on_prompt_round_and_repeat_alone(grader: LocalGrader) -> None:
    asked = [call(text, temperature=1.0, repeat=repeat) for text in PROMPTS[:3] for repeat in (0, 1)]
    asked += [replace(one, round=1) for one in asked[::2]]
    whole = replies(grader, asked)
    alone = {one: reply for one in asked[::-1] for reply in replies(replace(grader, batch_size=1), [one]).values()}
    assert {one: reply.text for one, reply in alone.items()} == {one: reply.text for one, reply in whole.items()}
    first, again, later = (whole[asked[place]].text for place in (0, 1, 6))
    assert len({first, again, later}) == 3


def test_kinds_of_calls_may_be_mixed(grader: LocalGrader) -> None:
    asked = [call(PROMPTS[0]), call(PROMPTS[1], labels=("A", "B")), call(PROMPTS[2], max_tokens=3)]
    found = replies(grader, asked)
    assert set(found) == set(asked)
    assert [found[one].logprobs is None for one in asked] == [True, False, True]
    assert found[asked[2]].output_tokens <= 3


# ------------------------------------------------------------------------------------------------ bounds


def test_calls_are_pulled_a_batch_at_a_time(grader: LocalGrader) -> None:
    """Whoever yields the calls can stop them: no more than one batch is in flight."""
    pulled = 0

    def calls() -> Iterator[GradingCall]:
        nonlocal pulled
        for text in PROMPTS:
            pulled += 1
            yield call(text, labels=("A", "B"))

    outcomes = replace(grader, batch_size=2).ask(calls())
    assert pulled == 0
    for done in range(len(PROMPTS)):
        next(outcomes)
        assert pulled == 2 * (done // 2 + 1)


def test_nothing_asked_loads_nothing(tmp_path: Path) -> None:
    assert list(LocalGrader(str(tmp_path / "nowhere")).ask([])) == []


def test_prompts_too_long_are_failures_naming_their_tokens(world: World, grader: LocalGrader) -> None:
    long, short = call(" ".join(PROMPTS), labels=("A", "B")), call(PROMPTS[0], labels=("A", "B"))
    tokens = grader.count_tokens(long)
    room = grader.count_tokens(short)
    found = dict(replace(grader, max_length=room).ask([long, short, call(PROMPTS[0])]))
    assert found[long] == GradingFailure(f"the prompt has {tokens} tokens, but {world.model} allows {room}")
    assert isinstance(found[short], GradingReply)  # a label needs no place of its own
    assert found[call(PROMPTS[0])] == GradingFailure(
        f"the prompt has {room} tokens, but {world.model} allows {room} including the reply"
    )


def test_failures_stand_among_replies(grader: LocalGrader) -> None:
    """A runner that stops after so many failures in a row is not misled by a batch's order."""
    long = [call(" ".join(PROMPTS), item=str(place), labels=("A", "B")) for place in range(4)]
    short = [call(text, labels=("A", "B")) for text in PROMPTS[:3]]
    limited = replace(grader, max_length=grader.count_tokens(long[0]) or 0)
    limited = replace(limited, max_length=(limited.max_length or 0) - 1)
    outcomes = [isinstance(reply, GradingFailure) for _, reply in limited.ask([*long, *short])]
    assert outcomes == [False, True, False, True, False, True, True]


def test_replies_get_the_room_there_is(grader: LocalGrader, caplog: pytest.LogCaptureFixture) -> None:
    asked = [call(text, max_tokens=400) for text in PROMPTS[:2]]
    limit = max(grader.count_tokens(one) or 0 for one in asked) + 4
    found = replies(replace(grader, max_length=limit), asked)
    for one, reply in found.items():
        assert reply.input_tokens + reply.output_tokens <= limit
        whole = replies(grader, [replace(one, max_tokens=limit - reply.input_tokens)])
        assert [reply.text] == [other.text for other in whole.values()]
    assert [record.message.count("less room for a reply") for record in caplog.records].count(1) == 1


# ------------------------------------------------------------------------------------------------ chat templates


@pytest.mark.parametrize("template", [None, WITHOUT_SYSTEM], ids=["refuses", "leaves it out"])
def test_a_system_turn_without_a_place_begins_the_users(
    world: World, template: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    grader = LocalGrader(str(world.model), chat_template=template, accelerator="cpu")
    asked = [call(text, system="judge two reviews", labels=("A", "B")) for text in PROMPTS[:2]]
    found = replies(grader, asked)
    folded = replies(grader, [call(f"judge two reviews\n\n{text}", labels=("A", "B")) for text in PROMPTS[:2]])
    assert [reply.logprobs for reply in found.values()] == [reply.logprobs for reply in folded.values()]
    assert sum("has no system turn" in record.message for record in caplog.records) == 1


def test_a_template_with_a_system_turn_keeps_it(world: World, caplog: pytest.LogCaptureFixture) -> None:
    grader = LocalGrader(str(world.model), chat_template=PLAIN, accelerator="cpu")
    one = call(PROMPTS[0], system="judge two reviews", labels=("A", "B"))
    text = f"system : judge two reviews\nuser : {PROMPTS[0]}\nassistant :"
    assert grader._prompt_ids(one.messages) == grader._chat.tokenize(text)[0]
    assert "system turn" not in caplog.text


def test_turns_a_template_refuses_are_failures(grader: LocalGrader) -> None:
    odd = replace(call(PROMPTS[0]), messages=(Message(role="critic", content=PROMPTS[0]),))
    ((_, failure),) = grader.ask([odd])
    assert isinstance(failure, GradingFailure) and "critic" in failure.problem
    assert "grader.chat_template" in failure.problem and "model.chat_template" not in failure.problem
    assert grader.count_tokens(odd) is None


# ------------------------------------------------------------------------------------------------ what it is


def test_identity_follows_what_moves_replies_and_nothing_else(world: World, grader: LocalGrader) -> None:
    own = grader.identity()
    assert replace(grader, batch_size=1, token_budget=9).identity() == own
    moved = [
        replace(grader, dtype="bfloat16"),
        replace(grader, chat_template=PLAIN),
        replace(grader, max_length=100),
    ]
    keys = {call("x").key(one.identity()) for one in (grader, *moved)}
    assert len(keys) == 4
    assert isinstance(grader, Grader) and grader.price == Price() and grader.price.cost(10**6, 10**6) == 0


def test_other_weights_are_another_grader(world: World, tmp_path: Path, grader: LocalGrader) -> None:
    model = load_model(world.model)
    with torch.no_grad():
        model.lm_head.weight[0, 0] += 1
    model.save_pretrained(tmp_path)
    load_tokenizer(world.model).save_pretrained(tmp_path)
    assert LocalGrader(str(tmp_path)).identity() != grader.identity()


def test_settings_out_of_range() -> None:
    with pytest.raises(UserError, match=r"grader\.dtype must be one of float64"):
        LocalGrader("model", dtype="int8")
    with pytest.raises(UserError, match=r"grader\.accelerator must be one of auto, cpu"):
        LocalGrader("model", accelerator="quantum")
    for name in ("batch_size", "token_budget", "max_length"):
        with pytest.raises(UserError, match=f"grader.{name} must be at least 1"):
            LocalGrader("model", **{name: 0})  # type: ignore[arg-type]


def test_a_tokenizer_without_a_template_is_told_by_the_graders_key(babbler: Path) -> None:
    with pytest.raises(UserError, match=r"grader\.path=.*set grader\.chat_template"):
        LocalGrader(str(babbler)).identity()
