"""The store of replies: what is written is found, cut lines go, changed ones are refused."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from attnpo.evaluation.chat import GradingCall, GradingReply
from attnpo.evaluation.jsonl_store import GRADES, ReplyStore
from attnpo.evaluation.session import ask_all
from attnpo.schema import Message, UserError, digest
from tests.evaluation.grading.calls import call
from tests.evaluation.grading.scripted import ScriptedGrader

GRADER: dict[str, object] = {"kind": "scripted", "name": "a"}
REPLY = GradingReply("8", logprobs={"8": -0.1, "é\ud800": float("-inf")}, input_tokens=5, output_tokens=1, model="m")


def write(folder: Path, *calls: GradingCall, reply: GradingReply = REPLY) -> ReplyStore:
    store = ReplyStore(folder)
    with store.open_for_writing():
        for each in calls:
            store.add(each, GRADER, reply)
    return store


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    wrote = write(tmp_path / "new", call(1), call(2))
    read = ReplyStore(tmp_path / "new")
    for store in (wrote, read):
        assert [store.reply(call(number), GRADER) for number in (1, 2, 3)] == [REPLY, REPLY, None]
        assert len(store) == 2
    line = json.loads((tmp_path / "new" / GRADES).read_text().splitlines()[0])
    assert (line["key"], line["item"], line["part"], line["round"]) == (call(1).key(GRADER), "q1", "turn1", 0)
    assert line["messages"] == digest(list(call(1).messages)) and line["grader"] == GRADER


def test_another_call_has_another_key(tmp_path: Path) -> None:
    store = write(tmp_path, call(1))
    for other in (
        call(1, "Another prompt."),
        call(1, repeat=1),
        call(1, temperature=1.0),
        call(1, max_tokens=9),
        replace(call(1), round=1),
        replace(call(1), part="turn2"),
        replace(call(1), benchmark="other"),
        replace(call(1), messages=(Message(role="user", content="You grade."), *call(1).messages[1:])),
    ):
        assert store.reply(other, GRADER) is None, other


def test_another_grader_has_other_replies(tmp_path: Path) -> None:
    store, other = write(tmp_path, call(1)), {**GRADER, "name": "b"}
    assert store.reply(call(1), other) is None and store.replies(other) == []
    assert store.replies(dict(reversed(GRADER.items()))) == [REPLY]


UNUSABLE: dict[str, object] = {
    **{"text": ["7"], "finish_reason": 7, "model": ["m"], "input_tokens": "5", "output_tokens": None, "seconds": "1"},
    "logprobs": {"7": None},
}


def test_stored_replies_of_another_type_are_asked_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Earlier versions sealed what an endpoint sent."""
    grader, calls = ScriptedGrader(lambda _: "8", name="a"), [call(number) for number in range(len(UNUSABLE) + 1)]
    for each, (name, value) in zip(calls, UNUSABLE.items(), strict=False):
        write(tmp_path, each, reply=replace(REPLY, **{name: value}))  # type: ignore[arg-type]
    write(tmp_path, calls[-1])
    store = ReplyStore(tmp_path)
    assert len(store) == 1 and all(store.reply(each, GRADER) is None for each in calls[:-1])
    assert f"{GRADES}: {len(UNUSABLE)} replies have invalid fields" in caplog.text
    asked = ask_all(calls, grader, ReplyStore(tmp_path))
    assert asked.is_complete and grader.asked == calls[:-1] and asked.replies[calls[0]].text == "8"
    assert asked.cost(grader.price)["calls"] == len(calls) and asked.replies_by_model == {"m": 1}
    caplog.clear()
    assert ask_all(calls, grader, ReplyStore(tmp_path)).is_complete
    assert len(grader.asked) == len(UNUSABLE) and not caplog.records


def test_a_grader_of_ones_own_that_replies_in_another_type_fails_those_calls(tmp_path: Path) -> None:
    wrong = {f"q{at}": replace(REPLY, **{name: UNUSABLE[name]}) for at, name in enumerate(UNUSABLE)}  # type: ignore[arg-type]
    calls = [call(number) for number in range(len(wrong) + 1)]
    asked = ask_all(calls, ScriptedGrader({**wrong, calls[-1].item: REPLY}, name="a"), ReplyStore(tmp_path))
    assert list(asked.failures) == calls[:-1] and all("a reply with" in text for text in asked.failures.values())
    assert len(ReplyStore(tmp_path)) == len((tmp_path / GRADES).read_text().splitlines()) == 1


def test_of_two_replies_the_last_counts(tmp_path: Path) -> None:
    write(tmp_path, call(1))
    later = write(tmp_path, call(1), reply=GradingReply("9"))
    assert later.reply(call(1), GRADER) == ReplyStore(tmp_path).reply(call(1), GRADER) == GradingReply("9")
    assert len(later) == 1 and len((tmp_path / GRADES).read_bytes().splitlines()) == 2


@pytest.mark.parametrize("cut", [1, 40, 400])
def test_a_line_that_was_cut_off_is_removed_when_writing_goes_on(cut: int, tmp_path: Path) -> None:
    write(tmp_path, call(1), call(2))
    file = tmp_path / GRADES
    whole = file.read_bytes()
    file.write_bytes(whole[:-cut])
    assert len(ReplyStore(tmp_path)) == 1 and file.read_bytes() == whole[:-cut], "reading changes nothing"
    write(tmp_path, call(3))
    store = ReplyStore(tmp_path)
    assert [store.reply(call(number), GRADER) for number in (1, 2, 3)] == [REPLY, None, REPLY]


@pytest.mark.parametrize("damage", ["garbage", "edited", "key", "list", "empty"])
def test_a_damaged_line_is_named(damage: str, tmp_path: Path, record_property: pytest.Function) -> None:
    write(tmp_path, call(1), call(2), call(3))
    file = tmp_path / GRADES
    lines = file.read_text().splitlines()
    swapped = {**json.loads(lines[1]), "key": call(9).key(GRADER)}
    lines[1] = {
        "garbage": "{not json",
        "edited": lines[1].replace('"text": "8"', '"text": "9"'),
        "key": json.dumps(swapped),
        "list": "[1]",
        "empty": "",
    }[damage]
    file.write_text("\n".join(lines) + "\n")
    with pytest.raises(UserError) as refused:
        ReplyStore(tmp_path)
    assert str(refused.value).startswith(f"{file}, line 2: ") and "delete the line" in str(refused.value)
    record_property("bad input", (f"store of grades: line {damage}", str(refused.value), "nothing, once deleted"))


BEFORE = (
    '{"key": "b5112bb7201575e65036aa37d68ae5d5", "benchmark": "quiz", "item": "q1", "part": "turn1", "round": 0, '
    '"repeat": 0, "messages": "684d16528e3c8856de6a84127aa356576d426729cef3cd421ba34c941586c05d", "grader": '
    '{"kind": "scripted", "name": "a"}, "reply": {"text": "8", "finish_reason": "stop", "logprobs": null, '
    '"input_tokens": 5, "output_tokens": 1, "seconds": 0.5, "model": "m", "estimated": false}, '
    '"time": "2026-11-01 10:00:00", "digest": "98e4c8ae5101f62b"}'
)


def test_a_reply_of_an_earlier_version_is_found_and_goes_on(tmp_path: Path) -> None:
    """As attnpo wrote it when answers, scores and replies had a class of files each."""
    (tmp_path / GRADES).write_text(BEFORE + "\n")
    found = ReplyStore(tmp_path).reply(call(1), GRADER)
    assert found == GradingReply("8", input_tokens=5, output_tokens=1, seconds=0.5, model="m")
    assert found is not None
    write(tmp_path, call(1), reply=found)
    before, again = map(json.loads, (tmp_path / GRADES).read_text().splitlines())
    assert {**again, "time": "", "digest": ""} == {**before, "time": "", "digest": ""}


def test_an_empty_folder_is_an_empty_store_and_stays_one(tmp_path: Path) -> None:
    assert len(ReplyStore(tmp_path / "none")) == 0 and not (tmp_path / "none").exists()


def test_two_cannot_write_at_once(tmp_path: Path) -> None:
    first, second = ReplyStore(tmp_path), ReplyStore(tmp_path)
    with first.open_for_writing():
        first.add(call(1), GRADER, REPLY)
        with pytest.raises(UserError, match="in use by process"), second.open_for_writing():
            pass
        assert len(ReplyStore(tmp_path)) == 1, "reading needs no lock"
    with second.open_for_writing():
        assert second.reply(call(1), GRADER) == REPLY, "what the other wrote is read"


def test_adding_without_writing_is_a_fault(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="not open for writing"):
        ReplyStore(tmp_path).add(call(1), GRADER, REPLY)
