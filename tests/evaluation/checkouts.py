"""Tiny checkouts of FastChat and arena-hard-auto with invented texts, in the layout of the real ones."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf

from attnpo.config.compose import CONFIG_DIR, instantiate
from attnpo.evaluation.base import Benchmark, ModelAnswer, Question, RoundScores
from attnpo.evaluation.chat import GradingReply
from attnpo.schema import UserError

FASTCHAT = Path("fastchat/llm_judge/data")
MT_QUESTIONS = {"81": "writing", "101": "reasoning", "111": "math"}
MT_PROMPTS = {
    "single-v1": ("Be fair.", "Rate {answer} to {question} as [[n]]."),
    "single-math-v1": ("Be fair.", "Rate {answer} to {question}, right is {ref_answer_1}."),
    "single-v1-multi-turn": ("Be fair twice.", "Rate {answer_2} to {question_2} after {question_1} {answer_1}."),
    "single-math-v1-multi-turn": (
        "",
        "{question_1} {ref_answer_1} {question_2} {ref_answer_2} | {question_1} {answer_1} {question_2} {answer_2}",
    ),
    "pair-v2": ("Choose.", "{question} {answer_a} {answer_b}"),
}
ARENA = {
    "arena-hard-v0.1": {"a1": "arena-hard-v0.1", "a2": "arena-hard-v0.1", "a3": "arena-hard-v0.1"},
    "arena-hard-v2.0": {"h1": "hard_prompt", "w1": "creative_writing", "h2": "hard_prompt"},
}
JUDGES = """
import nowhere_to_be_found
raise SystemExit("this file was run")
FAIR = "Be fair" ".\\d"
JUDGE_SETTINGS = {
    "hard_prompt": {"baseline": "old", "system_prompt": FAIR + " Solve it first."},
    "creative_writing": {"baseline": "poet", "system_prompt": "Read it aloud."},
    "arena-hard-v0.1": {"baseline": "old", "system_prompt": FAIR},
}
"""
CONFIG = r"""judge_model: some-judge
regex_patterns:
  - \[\[([AB<>=]+)\]\]
  - \[([AB<>=]+)\]
prompt_template: "<{QUESTION}>\nA: {ANSWER_A}\nB: {ANSWER_B}"
"""


def json_lines(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def fastchat(folder: Path) -> Path:
    """Three questions of two turns, two of them with references; U+2028 in the first as in real prompts."""
    data = folder / FASTCHAT
    json_lines(
        data / "mt_bench/question.jsonl",
        [
            {"question_id": int(name), "category": category, "turns": [f"ask\u2028{name}", f"more {name}"]}
            for name, category in MT_QUESTIONS.items()
        ],
    )
    json_lines(
        data / "judge_prompts.jsonl",
        [
            {
                "name": name,
                "type": "single",
                "system_prompt": system,
                "prompt_template": text,
                "output_format": "[[A]]" if name == "pair-v2" else "[[rating]]",
            }
            for name, (system, text) in MT_PROMPTS.items()
        ],
    )
    json_lines(
        data / "mt_bench/reference_answer/gpt-4.jsonl",
        [
            {"question_id": int(name), "choices": [{"index": 0, "turns": [f"right {name}", f"also right {name}"]}]}
            for name, category in MT_QUESTIONS.items()
            if category != "writing"
        ],
    )
    return folder


def arena_hard_auto(folder: Path) -> Path:
    """Three questions of each release; baselines old (all) and poet."""
    for release, categories in ARENA.items():
        data = folder / "data" / release
        json_lines(
            data / "question.jsonl",
            [{"uid": uid, "category": category, "prompt": f"ask {uid}"} for uid, category in categories.items()],
        )
        for baseline in ("old", "poet"):
            json_lines(
                data / "model_answer" / f"{baseline}.jsonl",
                [
                    {
                        "uid": uid,
                        "messages": [
                            {"role": "user", "content": f"ask {uid}"},
                            {"role": "assistant", "content": {"answer": f"{baseline} on {uid}"}},
                        ],
                    }
                    for uid in reversed(categories)
                ],
            )
        (folder / "config").mkdir(exist_ok=True)
        (folder / f"config/{release}.yaml").write_text(CONFIG, encoding="utf-8")
    (folder / "utils").mkdir()
    (folder / "utils/judge_utils.py").write_text(JUDGES, encoding="utf-8")
    return folder


def change(path: Path, old: str, new: str) -> None:
    """Replaces a text in a file, which has to hold it."""
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")


def hold_refusal(option: str, checkout: Path, *expected: str) -> None:
    """Reads the benchmark's files, which has to be refused with all of ``expected``."""
    with pytest.raises(UserError) as refused:
        configured(option, path=str(checkout)).questions()
    assert [part for part in expected if part not in str(refused.value)] == []


def configured(option: str, **values: object) -> Benchmark:
    """The benchmark of configs/benchmark with some keys changed."""
    node = OmegaConf.load(CONFIG_DIR / "benchmark" / f"{option}.yaml")
    for key, value in values.items():
        node[key] = value
    benchmark: Benchmark = instantiate(DictConfig({"benchmark": node}).benchmark)
    return benchmark


def answers_to(questions: Sequence[Question]) -> dict[str, ModelAnswer]:
    """An answer to each turn of every question."""
    return {
        question.id: ModelAnswer(
            question.id, tuple(f"mine {turn} {question.id}" for turn in range(len(question.turns)))
        )
        for question in questions
    }


def graded_with(benchmark: Benchmark, texts: Mapping[tuple[str, str], str]) -> RoundScores:
    """The grade where the judge says ``texts`` by (question, part), and nothing of other calls."""
    answers = answers_to(benchmark.questions())
    calls = {(call.item, call.part): call for call in benchmark.grading_calls(answers, 0)}
    return benchmark.grade(answers, {calls[place]: GradingReply(text) for place, text in texts.items()})


def check_means(graded: RoundScores) -> None:
    """Each score has to be the weighted mean of its questions' values, NaN and weight 0 going together."""
    for name, score in graded.scores.items():
        values, weights = graded.values[name], graded.weights[name]
        assert len(values) == len(weights) == len(graded.questions)
        pairs = [(float(v), float(w)) for v, w in zip(values, weights, strict=True)]
        assert all((value != value) == (weight == 0) for value, weight in pairs), name
        mass = sum(weight for _, weight in pairs)
        if mass:
            assert score == pytest.approx(sum(v * w for v, w in pairs if w) / mass, abs=1e-12), name
        else:
            assert score != score, name
