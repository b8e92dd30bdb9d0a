"""AlpacaEval 2: calls, replies and rates against the library's own run, against hand calculation and golden figures."""

import json
import logging
import math
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from omegaconf import OmegaConf
from pytest import approx

from attnpo.config.compose import CONFIG_DIR, instantiate
from attnpo.evaluation import alpaca_eval as module
from attnpo.evaluation import alpaca_library
from attnpo.evaluation.alpaca_eval import NO_LENGTHS, NO_REPLY, NO_VERDICT, SAME, TEXT_ONLY, AlpacaEval
from attnpo.evaluation.alpaca_library import DISCRETE, LENGTH_CONTROLLED, RAW, AlpacaRow, check_auxiliary, win_rates
from attnpo.evaluation.base import Benchmark, ModelAnswer
from attnpo.evaluation.chat import GradingCall, GradingReply
from attnpo.evaluation.jsonl_store import ReplyStore
from attnpo.evaluation.openai_chat import OpenAIGrader
from attnpo.evaluation.session import GradingLimits, ask_all
from attnpo.schema import Sampling, UserError, digest
from tests import warm
from tests.conformance.alpaca_eval import records
from tests.conformance.records import Status
from tests.evaluation.grading.loopback import Fault, Loopback, Reply

JUDGE = "weighted_alpaca_eval_gpt-4o-mini-2024-07-18"
COUNT = 12
INSTRUCTIONS = [f"Explain rule {place} of the house." for place in range(COUNT)]
INSTRUCTIONS[5] = "Write {output_1}, then 'M'."  # the words that the library replaces in its template
BASELINES = [f"The house says rule {place}." + " And more." * (place % 4) for place in range(COUNT)]
OUTPUTS = [f"It is number {place}." + " Indeed." * (place % 5) for place in range(COUNT)]
OUTPUTS[3] = ""  # an empty answer is an answer
OUTPUTS[7] = BASELINES[7]  # a tie, which nobody is asked
DIFFICULTIES = np.linspace(-2, 1.5, COUNT)


def reference_rows() -> list[dict[str, str]]:
    return [
        {"instruction": instruction, "output": output, "generator": "gpt4_1106_preview", "dataset": "house"}
        for instruction, output in zip(INSTRUCTIONS, BASELINES, strict=True)
    ]


def written(path: Path, content: object) -> str:
    path.write_text(json.dumps(content), encoding="utf-8")
    return str(path)


@pytest.fixture
def reference(tmp_path: Path) -> str:
    return written(tmp_path / "reference.json", reference_rows())


@pytest.fixture
def auxiliary(tmp_path: Path) -> str:
    """An auxiliary file for the invented instructions, in the form of the official one."""
    lines = ["index,model,preference,std_delta_len,instruction_difficulty,not_gamed_baseline"]
    for model, length in (("verbose", -1.2), ("concise", 0.9)):
        lines += [
            f"{place},gpt4_1106_preview_{model},{0.3 + 0.03 * place},{length},{difficulty},False"
            for place, difficulty in enumerate(DIFFICULTIES)
        ]
    path = tmp_path / "df_gamed.csv"
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def benchmark(reference: str, **values: Any) -> AlpacaEval:
    given = {"length_controlled": "auxiliary" in values, "rows": COUNT, **values}
    return AlpacaEval(sampling=Sampling(), reference_outputs=reference, **given)


def answered(outputs: Sequence[str] = OUTPUTS) -> dict[str, ModelAnswer]:
    return {str(place): ModelAnswer(str(place), (output,)) for place, output in enumerate(outputs)}


def first_shown(call: GradingCall) -> str:
    """The answer under the label m, read off the judge's prompt."""
    return call.messages[-1]["content"].split('"model_identifier": "m"')[1].split('"""')[1]


def replied(
    calls: Sequence[GradingCall], verdict: Callable[[GradingCall], GradingReply]
) -> dict[GradingCall, GradingReply]:
    return {call: verdict(call) for call in calls}


def chances(call: GradingCall) -> dict[str, float]:
    """Log-probabilities that differ from call to call, with tokens that are no label."""
    place = int(call.item)
    return {"m": math.log(0.05 + 0.07 * place), "M": math.log(0.5 - 0.03 * place), "The": -3.0, " m": -0.5}


# ------------------------------------------------------------------------------------------------ calls


@pytest.fixture
def hub_cache(reference: str, auxiliary: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub's cache with the two files of the library's data set."""
    from huggingface_hub import constants

    folder = tmp_path / "hub" / "datasets--tatsu-lab--alpaca_eval"
    (folder / "snapshots" / "abc").mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("abc")
    (folder / "snapshots" / "abc" / "df_gamed.csv").write_text(Path(auxiliary).read_text())
    (folder / "snapshots" / "abc" / "alpaca_eval_gpt4_baseline.json").write_text(Path(reference).read_text())
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))


@pytest.mark.usefixtures("hub_cache")
def test_calls_and_rates_are_those_of_the_librarys_own_run(reference: str, auxiliary: str, tmp_path: Path) -> None:
    """``alpaca_eval.evaluate`` with its own client on the loop-back server asks the same and comes to the same.

    It takes its auxiliary file from the hub's cache, we take ours from the path.
    """
    ours = benchmark(reference, auxiliary=auxiliary)
    answers = answered()
    calls = ours.grading_calls(answers, 0)
    by_prompt = {json.dumps(call.messages, sort_keys=True): chances(call) for call in calls}

    def judge(body: dict[str, Any]) -> Reply:
        return Reply("m", logprobs=by_prompt[json.dumps(body["messages"], sort_keys=True)])

    library = alpaca_library.import_alpaca_eval()
    outputs = [
        {"instruction": instruction, "output": output, "generator": "mine"}
        for instruction, output in zip(INSTRUCTIONS, OUTPUTS, strict=True)
    ]
    with Loopback(judge) as server, alpaca_library.silence_alpaca_eval():

        def annotator(**settings: Any) -> object:
            made = library.annotators.PairwiseAnnotator(**settings)
            address = {"openai_api_base": server.base_url, "openai_api_keys": ["none"], "client_config_path": "none"}
            made.annotators[JUDGE].completions_kwargs.update(address)
            return made

        leaderboard, annotations = library.evaluate(
            model_outputs=outputs,
            reference_outputs=reference_rows(),
            annotators_config=JUDGE,
            output_path=None,
            precomputed_leaderboard=None,
            is_return_instead_of_print=True,
            metric_kwargs={"save_weights_dir": str(tmp_path / "weights")},
            caching_path=str(tmp_path / "cache.json"),
            Annotator=annotator,
        )
    assert len(server.requests) == len(calls) == COUNT - 1
    assert {json.dumps(request.body["messages"], sort_keys=True) for request in server.requests} == set(by_prompt)
    call = calls[0]
    assert {
        "max_tokens": call.max_tokens,
        "temperature": call.temperature,
        "top_p": call.top_p,
        "top_logprobs": call.top_logprobs,
        "logprobs": True,
    }.items() <= server.requests[0].body.items()
    assert call.labels == ("m", "M") and [message["role"] for message in call.messages] == ["system", "user"]

    graded = ours.grade(answers, replied(calls, lambda call: GradingReply("m", logprobs=chances(call))))
    row = leaderboard.loc["mine"]
    assert graded.values[RAW] == approx([(annotation["preference"] - 1) * 100 for annotation in annotations])
    assert graded.scores[RAW] == approx(row["win_rate"]) and graded.scores[DISCRETE] == approx(row["discrete_win_rate"])
    assert graded.scores[LENGTH_CONTROLLED] == approx(row["length_controlled_winrate"])
    assert graded.errors[RAW] == approx(row["standard_error"])
    assert tuple(graded.scores) == ours.scores


def test_the_order_of_the_answers_is_undone(reference: str) -> None:
    """y is the probability of the label that stands for the model's answer, among the two labels."""
    ours, answers = benchmark(reference), answered()
    calls = ours.grading_calls(answers, 1)
    shown_first = {call.item: first_shown(call) == OUTPUTS[int(call.item)] for call in calls if call.item != "5"}
    assert set(shown_first.values()) == {True, False}
    graded = ours.grade(answers, replied(calls, lambda call: GradingReply("m", logprobs=chances(call))))
    for call in calls:
        if call.item in shown_first:
            m, other = math.exp(chances(call)["m"]), math.exp(chances(call)["M"])
            share = (m if shown_first[call.item] else other) / (m + other)
            assert graded.values[RAW][int(call.item)] == approx(100 * share)
    assert graded.values[RAW][7] == 50 and graded.counts == {SAME: 1}
    assert graded.scores[RAW] == approx(graded.values[RAW].mean())
    assert graded.scores[DISCRETE] == approx(graded.values[DISCRETE].mean())
    assert graded.questions == tuple(str(place) for place in range(COUNT))


def test_a_call_has_the_same_name_again_and_another_in_another_round_or_for_another_answer(reference: str) -> None:
    """What a resumed evaluation finds in its store: the order of the answers stays, the round is part of the key."""
    grader: dict[str, object] = {"model": "judge"}
    first = [call.key(grader) for call in benchmark(reference).grading_calls(answered(), 0)]
    assert [call.key(grader) for call in benchmark(reference).grading_calls(answered(), 0)] == first
    later = benchmark(reference).grading_calls(answered(), 1)
    assert not set(first) & {call.key(grader) for call in later}
    assert [call.key(grader) for call in (replace(call, round=0) for call in later)] == first, "the same words"
    changed = benchmark(reference).grading_calls(answered(["Otherwise.", *OUTPUTS[1:]]), 0)
    assert sum(call.key(grader) not in first for call in changed) == 1


# ------------------------------------------------------------------------------------------------ replies


def test_a_grader_without_logprobs_counts_by_its_text(reference: str) -> None:
    ours, answers = benchmark(reference), answered()
    calls = ours.grading_calls(answers, 0)

    def prefers_model(call: GradingCall) -> GradingReply:
        return GradingReply(" m\n" if first_shown(call) == OUTPUTS[int(call.item)] else "M")

    graded = ours.grade(answers, replied(calls, prefers_model))
    assert [graded.values[RAW][place] for place in range(COUNT) if place not in (5, 7)] == [100.0] * (COUNT - 2)
    assert graded.counts == {TEXT_ONLY: COUNT - 1, SAME: 1}


def test_replies_without_a_verdict_are_counted_and_left_out(reference: str) -> None:
    ours, answers = benchmark(reference), answered()
    calls = ours.grading_calls(answers, 0)
    none = {
        "0": GradingReply("Both", logprobs={"Both": -0.1, "The": -3.0}),
        "1": GradingReply("I think"),
        "2": GradingReply(""),
    }
    graded = ours.grade(
        answers, replied(calls, lambda call: none.get(call.item, GradingReply("m", logprobs={"m": -0.1, "M": -2.4})))
    )
    assert graded.counts == {NO_VERDICT: 3, TEXT_ONLY: 2, SAME: 1}
    assert np.isnan(graded.values[RAW][:3]).all() and (graded.weights[RAW] == [0] * 3 + [1] * (COUNT - 3)).all()
    assert graded.scores[RAW] == approx(np.nanmean(graded.values[RAW]))
    assert graded.scores[DISCRETE] == approx(np.nanmean(graded.values[DISCRETE]))


def test_what_has_no_reply_is_left_out_and_counted(reference: str, auxiliary: str) -> None:
    """A length-controlled rate of some rows uses the difficulties of these rows, not of the first ones."""
    ours, answers = benchmark(reference, auxiliary=auxiliary), answered()
    calls = [call for call in ours.grading_calls(answers, 0) if int(call.item) in (1, 2, 6, 9, 11)]
    graded = ours.grade(answers, replied(calls, lambda call: GradingReply("m", logprobs=chances(call))))
    assert graded.questions == ("1", "2", "6", "7", "9", "11") and graded.counts[NO_REPLY] == COUNT - 6
    places = [1, 2, 6, 7, 9, 11]
    rows = [AlpacaRow(INSTRUCTIONS[place], BASELINES[place], OUTPUTS[place]) for place in places]
    file = Path(auxiliary)
    preferences = graded.values[RAW] / 100 + 1
    assert graded.scores == win_rates(rows, preferences, file, places).scores
    assert graded.scores[LENGTH_CONTROLLED] != win_rates(rows, preferences, file).scores[LENGTH_CONTROLLED]


def test_answers_to_some_questions_are_graded_alone(reference: str, auxiliary: str) -> None:
    """As for the first questions, or for those that are graded twice; a tie elsewhere does not count."""
    ours, answers = benchmark(reference, auxiliary=auxiliary), answered()
    replies = replied(ours.grading_calls(answers, 0), lambda call: GradingReply("m", logprobs=chances(call)))
    some = {id_: answers[id_] for id_ in ("2", "4", "8", "11")}
    graded = ours.grade(some, {call: reply for call, reply in replies.items() if call.item in some})
    whole = ours.grade(answers, replies)
    assert graded.questions == ("2", "4", "8", "11") and graded.counts == {}
    assert graded.values[RAW] == approx(whole.values[RAW][[2, 4, 8, 11]])
    assert math.isfinite(graded.scores[LENGTH_CONTROLLED])


def test_without_any_reply_there_is_no_rate(reference: str, auxiliary: str) -> None:
    ours = benchmark(reference, auxiliary=auxiliary)
    graded = ours.grade(answered([f"Other {place}" for place in range(COUNT)]), {})
    assert graded.questions == () and graded.counts[NO_REPLY] == COUNT
    assert all(math.isnan(value) for value in graded.scores.values()) and set(graded.scores) == set(ours.scores)


def test_a_stopped_evaluation_goes_on_and_asks_every_item_once(
    reference: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through the grader and the store: a 429, a dropped connection, no JSON; stopped, half a line written."""
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    ours, answers = benchmark(reference), answered()
    calls = ours.grading_calls(answers, 0)
    by_prompt = {digest(list(call.messages)): chances(call) for call in calls}
    faults = [None, Fault(429, retry_after=0.01), None, Fault(what="drop"), Fault(what="garbage")]
    with Loopback(lambda body: Reply("m", logprobs=by_prompt[digest(body["messages"])]), faults) as server:
        grader = OpenAIGrader(base_url=server.base_url, concurrency=2)
        first = ask_all(calls, grader, ReplyStore(tmp_path), GradingLimits(max_calls=5))
        assert len(first.replies) == 5
        assert ours.grade(answers, first.replies).counts[NO_REPLY] == COUNT - 6
        with ReplyStore(tmp_path).path.open("a") as file:
            file.write('{"key": "half a li')
        second = ask_all(calls, grader, ReplyStore(tmp_path))
        assert second.is_complete and ask_all(calls, grader, ReplyStore(tmp_path)).made == 0
    assert set(server.answered.values()) <= {0, 1} and sum(server.answered.values()) == len(calls)
    expected = ours.grade(answers, replied(calls, lambda call: GradingReply("m", logprobs=chances(call))))
    graded = ours.grade(answers, second.replies)
    assert graded.scores == approx(expected.scores) and graded.counts == expected.counts


def test_a_reply_to_other_answers_is_refused(reference: str) -> None:
    ours = benchmark(reference)
    old = replied(ours.grading_calls(answered(), 0), lambda call: GradingReply("m"))
    with pytest.raises(ValueError, match="reply to question 0 belongs to a different prompt"):
        ours.grade(answered(["Otherwise.", *OUTPUTS[1:]]), old)


# ------------------------------------------------------------------------------------------------ rates


def test_the_baseline_against_itself_is_at_50(reference: str, auxiliary: str) -> None:
    ours, answers = benchmark(reference, auxiliary=auxiliary), answered(BASELINES)
    assert ours.grading_calls(answers, 0) == []
    graded = ours.grade(answers, {})
    assert graded.scores == {LENGTH_CONTROLLED: 50, RAW: 50, DISCRETE: 50}
    assert graded.counts == {SAME: COUNT} and graded.errors[LENGTH_CONTROLLED] == 0


def test_equal_lengths_are_said_in_the_counts(reference: str, auxiliary: str) -> None:
    ours = benchmark(reference, auxiliary=auxiliary)
    answers = answered(["z" + text[1:] for text in BASELINES])
    calls = ours.grading_calls(answers, 0)
    graded = ours.grade(answers, replied(calls, lambda call: GradingReply("m", logprobs=chances(call))))
    assert graded.counts == {NO_LENGTHS: 1} and math.isnan(graded.scores[LENGTH_CONTROLLED])
    assert graded.scores[RAW] == approx(np.mean(graded.values[RAW]))


def test_a_wrong_golden_figure_fails(vectors: Path, tmp_path: Path) -> None:
    golden = vectors / "evaluation" / "alpaca_eval"
    expected = json.loads((golden / "expected.json").read_text())
    figures = expected["close"]
    figures["leaderboard"]["win_rate"] += 1e-5
    figures["library_with_reconstructed_aux"]["length_controlled_winrate"] += 0.03
    written(tmp_path / "expected.json", {"close": figures, "unheard of": figures})
    for name in ("close.csv", "df_gamed_drawn.csv"):
        (tmp_path / name).symlink_to(golden / name)
    assert [record.run().status for record in records(tmp_path)] == [Status.FAIL] * 4


def test_records_name_the_extra_that_is_not_installed(vectors: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alpaca_library.import_alpaca_eval.cache_clear()
    monkeypatch.setitem(sys.modules, "alpaca_eval", None)
    try:
        outcome = next(iter(records(vectors / "evaluation" / "alpaca_eval"))).run()
    finally:
        alpaca_library.import_alpaca_eval.cache_clear()
    assert outcome.status is Status.NOT_BUILT and "extra `eval`" in outcome.note


def test_the_standard_error_is_that_of_resampled_questions(vectors: Path) -> None:
    """Of the library's own, of predictions whose fit is taken as certain, is half as large."""
    golden = vectors / "evaluation" / "alpaca_eval"
    file = check_auxiliary(golden / "df_gamed_drawn.csv", 805, "drawn")
    table = np.genfromtxt(golden / "close.csv", delimiter=",", names=True)
    preferences = table["preference"]
    rows = [AlpacaRow("", "x" * int(line["len_baseline"]), "x" * int(line["len_model"])) for line in table]
    stated = win_rates(rows, preferences, file).errors[LENGTH_CONTROLLED]
    draws, rates = np.random.default_rng(0), []
    for _ in range(20):
        drawn = draws.integers(805, size=805)
        found = win_rates([rows[place] for place in drawn], preferences[drawn], file, drawn.tolist())
        rates.append(found.scores[LENGTH_CONTROLLED])
    assert stated == approx(np.std(rates, ddof=1), rel=0.3)  # the spread of 20 draws is known to 16 %


# ------------------------------------------------------------------------------------------------ the auxiliary file


def test_without_the_auxiliary_file_only_the_raw_rates_and_said_once(
    reference: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "download_data_file", lambda file: "the hub is closed")
    ours = benchmark(reference, length_controlled=True)
    with caplog.at_level(logging.WARNING, logger="attnpo"):
        answers = answered()
        graded = ours.grade(answers, replied(ours.grading_calls(answers, 0), lambda call: GradingReply("m")))
        assert ours.scores == (RAW, DISCRETE) == tuple(graded.scores)
        assert ours.fingerprint()["auxiliary"] is None
    (said,) = [record.getMessage() for record in caplog.records]
    assert "df_gamed.csv" in said and "benchmark.auxiliary" in said and "the hub is closed" in said


@pytest.mark.usefixtures("hub_cache")
def test_the_hubs_cache_serves_offline(reference: str, auxiliary: str) -> None:
    ours = AlpacaEval(sampling=Sampling(), rows=COUNT)
    assert ours.scores[0] == LENGTH_CONTROLLED and len(ours.questions()) == COUNT
    assert ours.fingerprint() == benchmark(reference, auxiliary=auxiliary).fingerprint()


def test_auxiliary_files_that_do_not_fit_are_refused(reference: str, auxiliary: str, tmp_path: Path) -> None:
    def hold_refusal(text: str, says: str, path: Path = tmp_path / "aux.csv") -> None:
        (tmp_path / "aux.csv").write_text(text)
        with pytest.raises(UserError, match=says):
            _ = benchmark(reference, auxiliary=str(path)).scores

    missing = "benchmark.auxiliary=.*no such file.*hf download tatsu-lab/alpaca_eval df_gamed"
    lines = Path(auxiliary).read_text().splitlines()
    hold_refusal("", missing, tmp_path / "none.csv")
    hold_refusal("\n".join([*lines[:-1], "12,more,1,1,1,False"]), "13 instructions, but the reference set has 12")
    hold_refusal("\n".join([lines[0], *reversed(lines[1:])]), "by position")
    hold_refusal(lines[0].replace("std_delta_len", "length") + "\n1,a,1,1,1,False\n", "no column std_delta_len")
    hold_refusal("", "is not a CSV table")
    with pytest.raises(UserError, match="length_controlled=false turns off"):
        benchmark(reference, auxiliary=auxiliary, length_controlled=False)


# ------------------------------------------------------------------------------------------------ answers


def test_answers_that_do_not_fit_the_questions_are_named(reference: str) -> None:
    """In what they may not fit, the tests of MT-Bench say."""
    ours, answers = benchmark(reference), answered()
    with pytest.raises(UserError, match=r"the 12 questions of alpaca_eval: 2 without an answer \(3, 9\)"):
        ours.grading_calls({id_: answer for id_, answer in answers.items() if id_ not in ("3", "9")}, 0)


# ------------------------------------------------------------------------------------------------ the reference set


def test_questions_are_the_instructions_in_their_order(reference: str) -> None:
    found = [(question.id, question.turns, question.category) for question in benchmark(reference).questions()]
    assert found == [(str(place), (text,), "house") for place, text in enumerate(INSTRUCTIONS)]


def test_reference_files_that_do_not_fit_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "reference.json"
    rows = reference_rows()

    def hold_refusal(says: str, **values: Any) -> None:
        with pytest.raises(UserError, match=says):
            benchmark(str(path), **values).questions()

    hold_refusal("is missing.*alpaca_eval_gpt4_baseline.json.*results/gpt4_1106_preview/model_outputs.json")
    path.write_text('[{"instruction": ')
    hold_refusal("is not JSON")
    written(path, {"rows": rows})
    hold_refusal("reference.json must be a list, got")
    written(path, rows[:-1])
    hold_refusal("has 11 rows, expected 12.*benchmark.rows=11")
    written(path, [{**rows[0], "generator": "other"}, *rows[1:]])
    hold_refusal("2 generators")
    written(path, [*rows[:-1], "text"])
    hold_refusal(r"reference.json\[11\] must be an object, got 'text'")
    written(path, [*rows[:-1], {"instruction": "x"}])
    hold_refusal(r"reference.json\[11\]: output must be a string, it is missing")
    with pytest.raises(UserError, match="rows must be at least 1"):
        benchmark(str(path), rows=0)
    monkeypatch.setattr(module, "download_data_file", lambda file: "the hub is closed")
    with pytest.raises(
        UserError, match=r"not set, and .* cannot be downloaded .*the hub is closed.*model_outputs.json"
    ):
        AlpacaEval(sampling=Sampling()).questions()


def test_versions_change_with_every_source(reference: str, auxiliary: str, tmp_path: Path) -> None:
    plain = benchmark(reference).fingerprint()
    other = written(tmp_path / "other.json", [{**row, "output": row["output"] + "!"} for row in reference_rows()])
    changed = {
        "reference": benchmark(other).fingerprint(),
        "annotator_digest": benchmark(reference, annotator="alpaca_eval_gpt4").fingerprint(),
        "auxiliary": benchmark(reference, auxiliary=auxiliary).fingerprint(),
    }
    assert all(versions[name] != plain[name] for name, versions in changed.items())
    assert plain["baseline"] == "gpt4_1106_preview" and plain == benchmark(reference).fingerprint()


def test_the_config_has_the_papers_sampling() -> None:
    built: AlpacaEval = instantiate(OmegaConf.load(CONFIG_DIR / "benchmark" / "alpaca_eval.yaml"))
    paper = {"max_new_tokens": 4096, "temperature": 0.7, "top_k": 50, "top_p": 0.9}
    assert paper.items() <= asdict(built.sampling).items()
    assert (built.sampling.presence_penalty, built.sampling.frequency_penalty) == (0.1, 0.1)
    assert built == AlpacaEval(sampling=built.sampling) and isinstance(built, Benchmark)


# ------------------------------------------------------------------------------------------------ annotators


def test_an_annotator_that_reads_a_text_works(reference: str) -> None:
    """alpaca_eval_gpt4 has the judge rank model_1 and model_2 in its text; a text it cannot read is no verdict."""
    ours, answers = benchmark(reference, annotator="alpaca_eval_gpt4"), answered()
    calls = ours.grading_calls(answers, 0)
    assert calls[0].labels == () and calls[0].top_logprobs == 0 and calls[0].temperature == 0
    ranks = "[{'model': 'model_1', 'rank': 1}, {'model': 'model_2', 'rank': 2}]"
    graded = ours.grade(answers, replied(calls, lambda call: GradingReply(ranks if call.item != "0" else "Both!")))
    assert graded.counts == {NO_VERDICT: 1, SAME: 1}
    assert set(graded.values[RAW][1:]) == {0.0, 50.0, 100.0}


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("gpt5", "cannot load this annotator.*evaluators_configs"),
        ("cohere", "cannot load this annotator.*cohere"),
        ("alpaca_eval_gpt4_fn", "it needs tool_choice, tools"),
        ("alpaca_farm", "a pool of 13 annotators"),
        ("weighted_alpaca_eval_cot_gpt4_turbo", "parts of a reply other than the text and the first token"),
    ],
)
def test_annotators_that_cannot_be_asked_are_refused(reference: str, name: str, says: str) -> None:
    with pytest.raises(UserError, match=f"benchmark.annotator={name}.*{says}"):
        benchmark(reference, annotator=name).grading_calls(answered(), 0)


def test_an_annotator_of_the_users_own_is_a_path(reference: str, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "prompt.txt").write_text("<|im_start|>user\n{instruction}: {output_1} or {output_2}?\n<|im_end|>")
    (folder / "configs.yaml").write_text(
        "mine:\n  prompt_template: mine/prompt.txt\n  fn_completions: openai_completions\n"
        "  completions_kwargs: {model_name: x, max_tokens: 4, temperature: 0}\n"
        "  fn_completion_parser: regex_parser\n  completion_parser_kwargs: {outputs_to_match: {1: First, 2: Second}}\n"
    )
    ours = benchmark(reference, annotator=str(folder))
    calls = ours.grading_calls(answered(), 0)
    assert {OUTPUTS[0], BASELINES[0]} <= set(
        calls[0].messages[0]["content"].replace("?", ": ").replace(" or ", ": ").split(": ")
    )
    before = ours.fingerprint()["annotator_digest"]
    (folder / "prompt.txt").write_text("<|im_start|>user\n{instruction}! {output_1} or {output_2}?\n<|im_end|>")
    assert benchmark(reference, annotator=str(folder)).fingerprint()["annotator_digest"] != before


# ------------------------------------------------------------------------------------------------ no traces

TRACES = """
import warnings
warnings.simplefilter("error")
import logging, os, sys
import sklearn, torch  # these set variables of their own
before, level = dict(os.environ), logging.getLogger().level
from pathlib import Path
from attnpo.evaluation import alpaca_library
package = Path(alpaca_library.import_alpaca_eval().__file__).parent
files = sorted(path for path in package.rglob("*") if "__pycache__" not in path.parts)
import numpy as np
rows = [alpaca_library.AlpacaRow(f"{n}", "a" * n, "b" * 2 * n) for n in range(1, 13)]
found = alpaca_library.annotate(sys.argv[2], rows, {})
alpaca_library.win_rates(rows, np.linspace(1.0, 2.0, 12), Path(sys.argv[1]))
root = logging.getLogger()
assert dict(os.environ) == before, "the environment"
assert (root.level, root.handlers, root.filters) == (level, [], []), "the log"
assert not sklearn.get_config()["enable_metadata_routing"], "scikit-learn"
assert files == sorted(path for path in package.rglob("*") if "__pycache__" not in path.parts), "files of the library"
"""


def test_the_library_leaves_no_traces_and_says_nothing(auxiliary: str, tmp_path: Path) -> None:
    """In a process that has imported none of it, where warnings are errors, without a user's name, beside a .env."""
    (tmp_path / ".env").write_text("OPENAI_API_KEY=from-a-file\n")
    script, told = tmp_path / "traces.py", tmp_path / "told"
    script.write_text(TRACES)
    kept = {name: value for name, value in os.environ.items() if name not in ("LOGNAME", "USER", "LNAME", "USERNAME")}
    process = warm.start([str(script), auxiliary, JUDGE], kept, told, tmp_path)
    assert (process.wait(120), told.read_text()) == (0, "")


def test_an_incompatible_setuptools_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    alpaca_library.import_alpaca_eval.cache_clear()
    for name in [name for name in sys.modules if name.partition(".")[0] == "alpaca_eval"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "pkg_resources", None)
    try:
        with pytest.raises(UserError, match="pip install 'setuptools<81'"):
            alpaca_library.import_alpaca_eval()
    finally:
        alpaca_library.import_alpaca_eval.cache_clear()
