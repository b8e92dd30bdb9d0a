"""Budgets and estimates, against sums made by hand."""

import random
from pathlib import Path

import pytest

from attnpo.evaluation import session
from attnpo.evaluation.chat import GradingCall, GradingFailure, GradingReply, Price
from attnpo.evaluation.jsonl_store import ReplyStore
from attnpo.evaluation.session import ADDED, GradingLimits, ask_all, estimate_cost, format_dollars
from attnpo.schema import UserError
from tests.evaluation.grading.calls import call
from tests.evaluation.grading.scripted import ScriptedGrader

PRICE = Price(input=100.0, output=1000.0)  # dollars per million: numbers one can see


def of_size(number: int, tokens: int, most: int = 10) -> GradingCall:
    """A call whose input is bounded by so many tokens: 10 bytes of the system's message, and what a template adds."""
    return call(number, "x" * (tokens - ADDED - len("You grade.")), max_tokens=most)


def test_a_dollar_is_counted_per_million_tokens() -> None:
    assert PRICE.cost(1_000_000, 500_000) == 600.0
    assert [format_dollars(amount) for amount in (0.0, 12.346, 0.5, 0.00123)] == ["$0.00", "$12.35", "$0.50", "$0.0012"]


def test_an_estimate_before_the_first_call(tmp_path: Path) -> None:
    found = estimate_cost(
        [of_size(1, 100), of_size(2, 101, 90), of_size(1, 100)], ScriptedGrader({}, PRICE), ReplyStore(tmp_path)
    )
    assert (found.calls, found.stored, found.input_tokens, found.most_output_tokens) == (2, 0, 201, 100)
    assert found.dollars == pytest.approx(201 * 100e-6 + 100 * 1000e-6)
    assert (
        "201 input tokens (upper bound from the bytes of the text; set grader.tokenizer=FOLDER for exact counts)"
        in str(found)
    )
    assert "at most 100 output tokens (upper bound from max_tokens); at most $0.12" in str(found)
    exact = estimate_cost([of_size(1, 100)], ScriptedGrader({}, PRICE, tokens=lambda _: 77), ReplyStore(tmp_path))
    assert exact.input_tokens == 77 and "counted by the grader's tokenizer" in str(exact)
    unknown = estimate_cost([of_size(1, 100)], ScriptedGrader({}, Price(known=False)), ReplyStore(tmp_path))
    assert unknown.dollars is None and "token price unknown" in str(unknown)


def test_no_byte_level_tokenizer_counts_more_than_the_bound(tmp_path: Path) -> None:
    """One that has merged nothing takes a token a byte, a lone surrogate's three bytes included."""
    for text in ("word " * 40, "字" * 40, "é\ud800🙂", "\u2028" * 9, "\x00{}();\n\n"):
        found = estimate_cost([call(1, text)], ScriptedGrader({}), ReplyStore(tmp_path))
        most = len("You grade.") + sum(3 if "\ud800" <= sign < "\ue000" else len(sign.encode()) for sign in text)
        assert found.input_tokens == most + ADDED


def test_a_call_that_the_tokenizer_cannot_count_is_bounded_beside_the_others(tmp_path: Path) -> None:
    grader = ScriptedGrader({}, PRICE, tokens=lambda asked: None if asked.item == "q1" else 7)
    found = estimate_cost([of_size(1, 100), of_size(2, 100), of_size(3, 100)], grader, ReplyStore(tmp_path))
    assert found.input_tokens == 100 + 7 + 7
    assert found.method == (
        "counted by the grader's tokenizer; upper bound from bytes for 1 calls that its chat template rejects"
    )


def test_what_is_stored_is_not_estimated_again(tmp_path: Path) -> None:
    calls = [of_size(number, 100) for number in range(30)]
    grader = ScriptedGrader(lambda _: GradingReply("7", input_tokens=30, output_tokens=1), PRICE)
    ask_all(calls[:20], grader, ReplyStore(tmp_path))
    found = estimate_cost(calls, grader, ReplyStore(tmp_path))
    assert (found.calls, found.stored, found.input_tokens) == (30, 20, 1000)


# ------------------------------------------------------------------------------------------------ budgets


@pytest.mark.parametrize("at_once", [1, 7])
@pytest.mark.parametrize("max_cost", [0.0, 0.005, 0.15])
def test_with_exact_counts_a_budget_is_never_overspent(max_cost: float, at_once: int, tmp_path: Path) -> None:
    draw = random.Random(at_once)
    sizes = {f"q{number}": draw.randint(5, 60) for number in range(40)}
    calls = [call(number, max_tokens=draw.randint(1, 8)) for number in range(40)]

    def answer(asked: GradingCall) -> GradingReply:
        used = draw.randint(0, asked.max_tokens)
        return GradingReply("7", input_tokens=sizes[asked.item], output_tokens=used)

    grader = ScriptedGrader(answer, PRICE, at_once=at_once, tokens=lambda asked: sizes[asked.item])
    asked = ask_all(calls, grader, ReplyStore(tmp_path), GradingLimits(max_cost=max_cost))
    spent = sum(PRICE.cost(reply.input_tokens, reply.output_tokens) for reply in asked.replies.values())
    assert asked.spent == pytest.approx(spent) and spent <= max_cost
    assert asked.made == len(asked.replies) == 40 - len(asked.left)
    assert asked.left == tuple(calls[asked.made :]), "the first calls were made, the rest is left"
    assert asked.left, "the case says nothing"
    after = PRICE.cost(sizes[asked.left[0].item], asked.left[0].max_tokens)
    assert spent + after > max_cost, "the next call would have fitted"
    assert asked.stopped == f"limits.max_cost={max_cost:g}" and asked.ahead is not None
    most = sum(PRICE.cost(sizes[each.item], each.max_tokens) for each in asked.left)
    assert asked.ahead.dollars == pytest.approx(most) and asked.ahead.calls == len(asked.left)


@pytest.mark.parametrize("at_once", [1, 8])
def test_a_bound_that_is_four_times_too_high_leaves_less_than_one_call_unspent(at_once: int, tmp_path: Path) -> None:
    """Frees what a call did not cost once its reply is there, for calls that did not fit beside it."""
    grader = ScriptedGrader(lambda _: GradingReply("7", input_tokens=25, output_tokens=10), PRICE, at_once=at_once)
    calls = [of_size(number, 100) for number in range(60)]
    asked = ask_all(calls, grader, ReplyStore(tmp_path), GradingLimits(max_cost=0.5))
    assert 0.5 - PRICE.cost(100, 10) < asked.spent <= 0.5 and asked.left


@pytest.mark.parametrize("at_once", [1, 8])
def test_a_grader_that_counts_wrongly_overspends_the_calls_in_flight_at_most(at_once: int, tmp_path: Path) -> None:
    each = GradingReply("7", input_tokens=300, output_tokens=10)
    grader = ScriptedGrader(lambda _: each, PRICE, at_once=at_once, tokens=lambda _: 100)
    calls = [call(number, max_tokens=10) for number in range(60)]
    asked = ask_all(calls, grader, ReplyStore(tmp_path), GradingLimits(max_cost=0.5))
    cost = PRICE.cost(300, 10)
    assert 0.5 - cost < asked.spent <= 0.5 + at_once * cost and asked.left


def test_what_was_spent_before_counts(tmp_path: Path) -> None:
    grader = ScriptedGrader(lambda _: GradingReply("7", input_tokens=100, output_tokens=10), PRICE)
    calls = [of_size(number, 100) for number in range(10)]
    limits = GradingLimits(max_cost=0.0601)
    assert ask_all(calls, grader, ReplyStore(tmp_path), limits).made == 3
    again = ask_all(calls, grader, ReplyStore(tmp_path), limits)
    assert (again.made, again.spent, len(again.replies), len(again.left)) == (0, 0.0, 3, 7)
    more = ask_all(calls, grader, ReplyStore(tmp_path), GradingLimits(max_cost=1.0))
    assert more.made == 7 and more.is_complete and more.stopped is None and more.ahead is None
    assert more.cost(PRICE) == {
        "calls": 10, "input_tokens": 1000, "output_tokens": 100, "dollars": pytest.approx(0.2), "seconds": 0.0
    }  # fmt: skip


@pytest.mark.parametrize("at_once", [1, 16])
def test_calls_are_bounded(at_once: int, tmp_path: Path) -> None:
    grader = ScriptedGrader(lambda _: "7", at_once=at_once)
    calls = [call(number) for number in range(12)]
    asked = ask_all(calls, grader, ReplyStore(tmp_path), GradingLimits(max_calls=5))
    assert grader.asked == calls[:5] and asked.stopped == "limits.max_calls=5" and len(asked.left) == 7


def test_nothing_is_asked_in_a_dry_run(tmp_path: Path) -> None:
    grader = ScriptedGrader(lambda _: "7")
    asked = ask_all([call(1), call(2)], grader, ReplyStore(tmp_path / "new"), GradingLimits(dry_run=True))
    assert grader.asked == [] and len(asked.left) == 2 and asked.stopped == "limits.dry_run"
    assert not (tmp_path / "new").exists()
    asked = ask_all([], grader, ReplyStore(tmp_path))
    assert asked.is_complete and asked.replies == {} and asked.made == 0


def test_a_budget_without_a_price_is_refused(tmp_path: Path) -> None:
    grader = ScriptedGrader(lambda _: "7", Price(known=False))
    with pytest.raises(UserError, match=r"limits\.max_cost=1 needs the grader's token price.*grader\.price_input"):
        ask_all([call(1)], grader, ReplyStore(tmp_path), GradingLimits(max_cost=1.0))
    assert grader.asked == []
    assert ask_all([call(1)], grader, ReplyStore(tmp_path), GradingLimits(max_calls=1)).is_complete
    free = ScriptedGrader(lambda _: "7", name="free")
    assert ask_all([call(1)], free, ReplyStore(tmp_path), GradingLimits(max_cost=0.0)).is_complete, (
        "known to cost nothing"
    )


def test_limits_are_checked() -> None:
    for name, value in {"max_cost": -1.0, "max_calls": -1, "max_items": 0, "max_failed": -1}.items():
        with pytest.raises(UserError, match=rf"limits\.{name} must be at least"):
            GradingLimits(**{name: value})  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------ failures


def test_failures_are_named_and_asked_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    calls = [call(number) for number in range(6)]
    broken = ScriptedGrader(lambda asked: GradingFailure("broke") if asked.item in ("q1", "q4") else "7")
    with caplog.at_level("INFO"):
        asked = ask_all(calls, broken, ReplyStore(tmp_path))
    assert (
        asked.failures == {calls[1]: "broke", calls[4]: "broke"} and len(asked.replies) == 4 and not asked.is_complete
    )
    assert "2 grading calls failed: 2 times: broke" in caplog.text
    mended = ScriptedGrader(lambda _: "7")
    assert ask_all(calls, mended, ReplyStore(tmp_path)).is_complete and mended.asked == [calls[1], calls[4]]


def test_too_many_failures_in_a_row_end_the_command(tmp_path: Path) -> None:
    good = {"q0", "q3"}
    grader = ScriptedGrader(lambda asked: "7" if asked.item in good else GradingFailure(f"no {asked.item}"))
    calls = [call(number) for number in range(9)]
    with pytest.raises(
        UserError, match=r"3 grading calls in a row failed .*max_failed=2.* no q6\. The 2 replies so far"
    ):
        ask_all(calls, grader, ReplyStore(tmp_path), GradingLimits(max_failed=2))
    assert len(grader.asked) == 7 and len(ReplyStore(tmp_path)) == 2


def test_progress_is_logged_with_time_and_money(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    grader = ScriptedGrader(
        lambda asked: GradingFailure("broke") if asked.item == "q1" else GradingReply("7", output_tokens=500), PRICE
    )
    calls = [call(number) for number in range(4)]
    with caplog.at_level("INFO"):
        ask_all(calls[3:], grader, ReplyStore(tmp_path))
        assert "left" not in caplog.text, "nothing is said within ten seconds"
        monkeypatch.setattr(session, "LOG_EVERY", 0.0)
        ask_all(calls, grader, ReplyStore(tmp_path))
    said = [record.message for record in caplog.records if record.message.endswith(" s left")]
    assert said == [
        "grading: 2 of 4, $1.00 spent, 0 s left",
        "grading: 2 of 4, 1 failed, $1.00 spent, 0 s left",
        "grading: 3 of 4, 1 failed, $1.50 spent, 0 s left",
    ]
