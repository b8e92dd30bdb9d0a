"""Pairs of ranked answers: what is written, what is counted, what a repeated command does, what is refused."""

import json
import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForSequenceClassification

from attnpo.config.compose import compose, load, validate
from attnpo.data.base import PairSource
from attnpo.evaluation import rankers
from attnpo.evaluation.chat import GradingCall, GradingFailure, GradingReply
from attnpo.evaluation.pairs import (
    EQUAL,
    NARROW,
    REPEATED,
    TIES,
    UNPAIRED,
    UNRANKED,
    AnswerSet,
    AnswerSource,
    Candidate,
    PairConfig,
    PairRules,
    PairSelection,
    Ranker,
    ScoreRow,
    build_pairs,
    make_pairs,
)
from attnpo.evaluation.rankers import ColumnRanker, JudgeRanker, RewardRanker
from attnpo.evaluation.session import GradingLimits
from attnpo.models.loading import load_tokenizer
from attnpo.models.reward_policy import score_conversations
from attnpo.pair import main
from attnpo.schema import UserError
from attnpo.text.chat import ChatFormat
from tests.bad_input.table import PROPERTY
from tests.evaluation.answers.tiny import rows_of
from tests.evaluation.grading.scripted import ScriptedGrader
from tests.run.worlds import World

Row = dict[str, object]
PROMPTS = {
    "name a colour": [("red", 3.0), ("two", 1.0), ("blue", 2.0), ("blue", 2.0)],
    "say hi": [("hi", 1.0), ("hi", 1.0), ("hi", 1.0), ("hi", 1.0)],
    "count": [("one", 5.0), ("zero", 5.0), ("none", 5.0), ("void", 5.0)],
    "sing": [("la", 0.25), ("lo", 0.0), ("li", 0.5), ("lu", 0.375)],
}


def write(path: Path, rows: Sequence[Row]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def account(path: Path) -> Row:
    found: Row = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
    return found


@pytest.fixture
def answers(tmp_path: Path) -> str:
    rows = [{"prompt": p, "answer": text, "points": at} for p, some in PROMPTS.items() for text, at in some]
    return str(write(tmp_path / "answers.jsonl", rows))


def config(answers: str, out: Path, ranker: Ranker | None = None, rules: PairRules | None = None) -> PairConfig:
    cpu = {"accelerator": "cpu"}
    return PairConfig(AnswerSource(answers), ranker or ColumnRanker("points"), rules or PairRules(), cpu, str(out))


def asked(found: Row) -> str:
    turns = found["prompt"]
    assert isinstance(turns, list)
    return str(turns[-1]["content"])


# ------------------------------------------------------------------------------------------------ what is written


def test_pairs_name_ranker_and_scores_and_are_read_as_data(
    answers: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out = tmp_path / "made" / "pairs.jsonl"
    with caplog.at_level(logging.INFO):
        assert make_pairs(config(answers, out)) == out
    rows = rows_of(out)
    told = [(asked(row), row["chosen_score"], row["rejected_score"], row["ranker"]) for row in rows]
    assert told == [("name a colour", 3.0, 1.0, "column points"), ("sing", 0.5, 0.0, "column points")]
    assert (rows[0]["chosen_draw"], rows[0]["rejected_draw"]) == (0, 1)
    pairs = PairSource(str(out), train_rows="2").load("train").pairs
    assert [(pair.chosen, pair.rejected) for pair in pairs] == [("red", "two"), ("li", "lo")]
    counts = account(out)["counts"]
    assert counts == {EQUAL: 1, REPEATED: 1, TIES: 1, UNPAIRED: 1}
    assert f"{EQUAL}: 1" in caplog.text and f"{TIES}: 1" in caplog.text


def test_which_pairs_a_prompt_gives() -> None:
    draws = [0.0, 4.0, 1.0, 4.0]
    found = AnswerSet("p", ({"role": "user", "content": "?"},), tuple(Candidate(n, f"a{n}") for n in range(4)))
    scores = {n: ScoreRow(id="p", draw=n, score=at) for n, at in enumerate(draws)}

    def gaps(rules: PairRules) -> tuple[list[float], Counter[str]]:
        counts: Counter[str] = Counter()
        made = build_pairs(found, scores, rules, "r", counts)
        return [float(str(one["chosen_score"])) - float(str(one["rejected_score"])) for one in made], +counts

    assert gaps(PairRules()) == ([4.0], Counter())
    assert gaps(PairRules(PairSelection.BEST_REST)) == ([4.0, 3.0], Counter({TIES: 1}))
    assert gaps(PairRules(PairSelection.ALL)) == ([4.0, 4.0, 3.0, 3.0, 1.0], Counter({TIES: 1}))
    assert gaps(PairRules(PairSelection.ALL, min_gap=2.0)) == ([4.0, 4.0, 3.0, 3.0], Counter({TIES: 1, NARROW: 1}))
    assert gaps(PairRules(min_gap=5.0)) == ([], Counter({NARROW: 1, UNPAIRED: 1}))


# ------------------------------------------------------------------------------------------------ the judge


def judged(answer: Callable[[GradingCall], GradingReply | GradingFailure]) -> JudgeRanker:
    return JudgeRanker(ScriptedGrader(answer))


def longest(call: GradingCall) -> GradingReply | GradingFailure:
    """The judge prefers what has more letters than the other, by 0.75 to 0.25."""
    text = call.messages[0]["content"]
    first, second = (text.partition(f"[answer {at}]\n")[2].partition(" [end")[0] for at in "AB")
    better = 0.75 if len(first) > len(second) else 0.25 if len(first) < len(second) else 0.5
    return GradingReply("", logprobs={"A": math.log(better), "B": math.log(1 - better)})


def test_a_judge_compares_every_two_in_both_orders(tmp_path: Path) -> None:
    rows = [{"prompt": "say a", "answer": "a" * n} for n in (2, 4, 1)] + [{"prompt": "b", "answer": a} for a in "xy"]
    ranker = judged(longest)
    out = tmp_path / "pairs.jsonl"
    assert make_pairs(config(str(write(tmp_path / "answers.jsonl", rows)), out, ranker)) == out
    (pair,) = rows_of(out)
    assert (pair["chosen_draw"], pair["rejected_draw"]) == (1, 2)
    assert (pair["chosen_score"], pair["rejected_score"]) == (pytest.approx(0.75), pytest.approx(0.25))
    assert account(out)["counts"] == {TIES: 1, UNPAIRED: 1}
    calls = ranker.grader.asked  # type: ignore[attr-defined]
    assert len(calls) == 3 * 2 + 2  # K (K - 1)
    assert make_pairs(config(str(tmp_path / "answers.jsonl"), out, ranker)) == out and len(calls) == 8


def test_a_judge_that_likes_a_place_ranks_nothing(answers: str, tmp_path: Path) -> None:
    ranker = judged(lambda call: GradingReply("", logprobs={"A": -0.1, "B": -3.0}))
    with pytest.raises(UserError, match=r"no pairs can be built from the answers to 3 prompts: .*ties: 3"):
        make_pairs(config(answers, tmp_path / "pairs.jsonl", ranker))


def test_calls_that_failed_are_asked_again_or_given_up(answers: str, tmp_path: Path) -> None:
    broken = True

    def answer(call: GradingCall) -> GradingReply | GradingFailure:
        return GradingFailure("busy") if broken and "sing" in call.messages[0]["content"] else longest(call)

    out = tmp_path / "pairs.jsonl"
    ranker = judged(answer)
    assert make_pairs(config(answers, out, ranker)) is None and not out.exists()
    first = len(ranker.grader.asked)  # type: ignore[attr-defined]
    given_up = tmp_path / "other" / "pairs.jsonl"
    assert make_pairs(config(answers, given_up, replace(ranker, give_up=True))) == given_up
    counts = account(given_up)["counts"]
    assert isinstance(counts, dict) and counts[UNRANKED] == 1
    broken = False
    again = judged(answer)
    assert make_pairs(config(answers, out, again)) == out
    assert len(again.grader.asked) == 4 * 3 < first  # type: ignore[attr-defined]  # those about "sing" alone


def test_a_dry_run_says_once_what_all_prompts_take_and_asks_nothing(
    answers: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rankers, "AT_ONCE", 1)
    out = tmp_path / "made" / "pairs.jsonl"
    ranker = judged(longest)
    dry = replace(ranker, limits=GradingLimits(dry_run=True))
    with caplog.at_level(logging.INFO):
        assert main(config(answers, out, dry)) == 0
    told = [record.getMessage() for record in caplog.records if "limits.dry_run" in record.getMessage()]
    assert len(told) == 1 and told[0].startswith("limits.dry_run: 30 grading calls, 0 already stored, 30 to send: ")
    assert "again" not in caplog.text and not ranker.grader.asked  # type: ignore[attr-defined]
    assert not list(out.parent.glob("*")), "it binds no command to its ranker"
    other = judged(lambda call: GradingFailure("busy") if "sing" in call.messages[0]["content"] else longest(call))
    assert main(config(answers, out, replace(other, limits=GradingLimits(max_calls=8)))) == 1
    caplog.clear()
    with caplog.at_level(logging.INFO):
        assert main(config(answers, out, replace(other, limits=GradingLimits(dry_run=True)))) == 0
    assert "limits.dry_run: 24 grading calls, 2 already stored, 22 to send: " in caplog.text and not out.exists()


def test_a_dry_run_with_a_served_judge_needs_neither_key_nor_server(
    answers: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    words = [f"answers.path={answers}", f"output={tmp_path / 'pairs.jsonl'}", "trainer.accelerator=cpu"]
    cfg = load("pair", [*words, "grader@ranker.grader=openai", "ranker.limits.dry_run=true"])
    with caplog.at_level(logging.INFO):
        assert main(cfg) == 0
    assert "limits.dry_run: 30 grading calls" in caplog.text and "at most $" in caplog.text


# ------------------------------------------------------------------------------------------------ a reward model


def test_a_reward_model_scores_whole_conversations(world: World, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(world.model))
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_labels=1, pad_token_id=0, initializer_range=0.5,
    )  # fmt: skip
    model = LlamaForSequenceClassification(shape).eval().requires_grad_(False)
    model.save_pretrained(tmp_path / "reward")
    tokenizer.save_pretrained(tmp_path / "reward")
    rows = [json.loads(line) for line in (world.data / "train.jsonl").read_text(encoding="utf-8").splitlines()]
    answers = [{"prompt": row["prompt"], "answer": row[side]} for row in rows for side in ("chosen", "rejected")]
    answers = [
        {**row, "answer": text if isinstance(text := row["answer"], str) else text[-1]["content"]} for row in answers
    ]
    out = tmp_path / "pairs.jsonl"
    ranker = RewardRanker(str(tmp_path / "reward"), token_budget=64)
    assert make_pairs(config(str(write(tmp_path / "a.jsonl", answers)), out, ranker)) == out
    chat = ChatFormat(tokenizer)
    for row in rows_of(out):
        for side in ("chosen", "rejected"):
            (turn,) = row[side]  # type: ignore[misc]
            one = chat.encode(row["prompt"], turn["content"])  # type: ignore[arg-type]
            alone = model(input_ids=torch.tensor([[*one.prompt_ids, *one.response_ids]])).logits[0, 0]
            assert row[f"{side}_score"] == pytest.approx(float(alone), abs=1e-5)
        assert float(str(row["chosen_score"])) > float(str(row["rejected_score"]))
    assert torch.equal(score_conversations(model, [[3, 4], [5]], 1), score_conversations(model, [[3, 4], [5]], 1))
    short = replace(ranker, max_length=3)
    with pytest.raises(UserError, match=r"a conversation is longer than ranker\.max_length=3"):
        make_pairs(config(str(tmp_path / "a.jsonl"), tmp_path / "none.jsonl", short))


# ------------------------------------------------------------------------------------------------ going on


SCORED: list[str] = []


@dataclass(frozen=True)
class Noting(ColumnRanker):
    """A column, and a list of the prompts that were scored."""

    def scores(self, sets, device, folder):  # type: ignore[no-untyped-def]
        SCORED.extend(one.prompt[-1]["content"] for one in sets)
        return super().scores(sets, device, folder)


def test_a_repeated_command_scores_what_is_missing(answers: str, tmp_path: Path) -> None:
    SCORED.clear()
    out, ranker = tmp_path / "pairs.jsonl", Noting("points")
    make_pairs(config(answers, out, ranker))
    assert SCORED == ["name a colour", "count", "sing"]
    first = out.read_bytes()
    file = tmp_path / "pairs.scores.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    file.write_text("".join(lines[:-1]) + lines[-1][:-9], encoding="utf-8")  # stopped while it wrote
    SCORED.clear()
    make_pairs(config(answers, out, ranker))
    assert SCORED == ["sing"] and out.read_bytes() == first
    make_pairs(config(answers, out, ranker, PairRules(PairSelection.ALL)))
    assert SCORED == ["sing"] and len(rows_of(out)) > 2, "other rules need no new score"


def test_processes_share_the_prompts(answers: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, shared = tmp_path / "whole.jsonl", tmp_path / "shared.jsonl"
    make_pairs(config(answers, whole))
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert make_pairs(config(answers, shared)) is None
    monkeypatch.setenv("RANK", "0")
    assert make_pairs(config(answers, shared)) == shared
    assert shared.read_bytes() == whole.read_bytes()


# ------------------------------------------------------------------------------------------------ refused


def test_what_was_made_of_something_else_is_refused(answers: str, tmp_path: Path) -> None:
    out = tmp_path / "pairs.jsonl"
    make_pairs(config(answers, out))
    with pytest.raises(
        UserError, match=r"pairs\.scores\.jsonl contains scores with ranker\.higher_is_better true, but this"
    ):
        make_pairs(config(answers, out, ColumnRanker("points", higher_is_better=False)))
    rows = rows_of(Path(answers))
    write(Path(answers), [*rows, {"prompt": "more", "answer": "x", "points": 1}, {"prompt": "more", "answer": "y"}])
    with pytest.raises(UserError, match="contains scores with answers "):
        make_pairs(config(answers, out))


def test_answers_that_are_all_equal_or_alone_are_refused_with_counts(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    rows = [{"prompt": "p", "answer": text} for text in ("x", "x", " x\n")] + [{"prompt": "q", "answer": "y"}]
    path = write(tmp_path / "answers.jsonl", rows)
    with pytest.raises(
        UserError, match=rf"no pairs can be built \({EQUAL}: 1; prompts with a single answer: 1\)"
    ) as refused:
        AnswerSource(str(path)).load()
    message = str(refused.value).replace(str(tmp_path), "TMP")
    record_property(PROPERTY, ("K answers all equal", message, "nothing is ranked"))
    (tmp_path / "answers.json").write_text('{"key": {"model": "m"}}', encoding="utf-8")
    with pytest.raises(UserError, match=r"attnpo\.generate has not finished this file"):
        AnswerSource(str(path)).load()
    with pytest.raises(UserError, match=r'has no column "answer".*answers\.answer=COLUMN'):
        AnswerSource(str(write(tmp_path / "b.jsonl", [{"prompt": "p"}]))).load()


def test_a_column_without_numbers(answers: str, tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"ranker\.column=scroe: no answer has a value in this column; columns: .*points"
    ):
        make_pairs(config(answers, tmp_path / "pairs.jsonl", ColumnRanker("scroe")))


def test_every_ranker_composes() -> None:
    for words in (
        ["ranker.grader.path=J"],
        ["grader@ranker.grader=openai", "ranker.limits.max_cost=2"],
        ["ranker=reward", "ranker.path=R"],
        ["ranker=column", "ranker.column=points", "pairs.take=all"],
    ):
        validate(compose("pair", ["answers.path=X", *words]))
