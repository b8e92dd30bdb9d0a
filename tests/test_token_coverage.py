"""experiments/benchmarks/token_coverage.md on a few dozen responses per tokenizer: its bounds hold, for its reason."""

import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

from attnpo.data.base import pairs_from_rows
from attnpo.judge.prompts import JudgePromptBuilder
from attnpo.judge.settings import Assembly
from attnpo.schema import SIDES, PreferencePair
from attnpo.text.alignment import AlignMethod
from attnpo.text.chat import ChatFormat
from experiments.benchmarks.token_coverage import (
    IDS_STEP,
    PLAIN,
    Summary,
    chat_format,
    data_sets,
    judge_options,
    main,
    match,
    measure,
    percent,
)
from tests import own_texts
from tests.text.formats import EDGE_MERGE, GPT2, TESTS

ROOT = Path(__file__).resolve().parents[1]
PAIRS = 2  # of each file: 40 responses
BOUND = re.compile(r"^\| (\w+) \| (\S+) \| (\w+) \| ([\d.]+) to ([\d.]+) \| ([\d.]+) to ([\d.]+) \|$", re.MULTILINE)
BOUNDS = BOUND.findall((ROOT / "experiments" / "benchmarks" / "token_coverage.md").read_text(encoding="utf-8"))


@cache
def sample(folder: Path) -> list[PreferencePair]:
    return [pair for pairs in data_sets(folder, PAIRS).values() for pair in pairs]


@cache
def chat_of(folder: Path, template: str) -> ChatFormat:
    own = "" if template == "own" else f"@{template if template == PLAIN else ROOT / template}"
    return chat_format(f"{folder}{own}")


@cache
def summaries(shared: Path, tokenizer: str, template: str) -> dict[tuple[str, Assembly, AlignMethod], Summary]:
    """By option, assembly and method, for the options that the bounds name."""
    chat = chat_of(shared / "models" / "tokenizers" / tokenizer, template)
    named = {bound[2] for bound in BOUNDS}
    judges = {option: rules for option, rules in judge_options().items() if named & set(option.split(", "))}
    found, _ = measure(chat, sample(shared / "data"), judges)
    return {(option, *key[1:]): one for key, one in found.items() for option in key[0].split(", ")}


def test_the_bounds_name_every_tokenizer_and_both_ends() -> None:
    assert {bound[0] for bound in BOUNDS} == {"edge_merge_2k", "gpt2", "mistral_v3"}
    assert {"pairwise", "short"} < {bound[2] for bound in BOUNDS}
    assert any(float(bound[4]) < 100 for bound in BOUNDS), "some way must lose something"


@pytest.mark.parametrize("tokenizer", sorted({bound[0] for bound in BOUNDS}))
def test_coverage_lies_within_the_stated_bounds(shared: Path, tokenizer: str) -> None:
    for _, template, judge, *stated in (bound for bound in BOUNDS if bound[0] == tokenizer):
        lies_within(summaries(shared, tokenizer, template), judge, [float(bound) for bound in stated])


def lies_within(found: dict[tuple[str, Assembly, AlignMethod], Summary], judge: str, bounds: Sequence[float]) -> None:
    paper = found[judge, Assembly.TEXT, AlignMethod.LEVENSHTEIN]
    assert paper.responses >= 36
    assert bounds[0] <= 100 * paper.mean <= bounds[1] + 1e-9
    assert bounds[2] <= 100 * paper.last_lost <= bounds[3]
    # Uniform weights lose what the judge's unmatched tokens carry: nothing where everything is matched.
    assert (paper.lost < 1e-9) == (paper.complete == 1)
    for key in ((Assembly.TEXT, AlignMethod.CHARACTERS), *((Assembly.IDS, method) for method in AlignMethod)):
        exact = found[judge, *key]
        assert exact.lowest == 1 and exact.lost < 1e-9, key
    assert found[judge, Assembly.IDS, AlignMethod.LEVENSHTEIN].responses >= paper.responses // IDS_STEP


def test_punctuation_before_a_line_break_is_what_is_lost() -> None:
    """A tokenizer of Llama-3's kind: full stops merge with the break after the answer, letters do not."""
    chat = chat_of(TESTS / EDGE_MERGE, "own")
    (rules,) = (rules for option, rules in judge_options().items() if "testbed" in option.split(", "))
    prompts = JudgePromptBuilder(rules, chat)
    lost: dict[str, list[bool]] = {"stop": [], "letter": []}
    for pair in pairs_from_rows(own_texts.rows(100)).pairs:
        first, _ = prompts.build(pair)
        for side in SIDES:
            text = pair.response(side).rstrip()
            found = match(first, side, chat.encode(pair.prompt, pair.response(side)), AlignMethod.LEVENSHTEIN)
            if found is not None and text.isascii():
                assert (found.coverage == 1) == found.last, "nothing but the last token differs"
                end = "stop" if re.search(r"\w\.$", text) else "letter" if text[-1].isalnum() else "other"
                lost.setdefault(end, []).append(not found.last)
    assert len(lost["stop"]) > 10 and all(lost["stop"])
    assert len(lost["letter"]) >= 2 and not any(lost["letter"])


def test_a_response_without_characters_is_left_out() -> None:
    chat = chat_of(TESTS / GPT2, PLAIN)
    (rules,) = (rules for option, rules in judge_options().items() if "testbed" in option.split(", "))
    pair = PreferencePair.from_texts([{"role": "user", "content": "why?"}], "", "so")
    first, _ = JudgePromptBuilder(rules, chat).build(pair)
    assert match(first, "chosen", chat.encode(pair.prompt, ""), AlignMethod.LEVENSHTEIN) is None


def test_the_command_prints_the_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("train_zh", "test_zh"):
        own_texts.write_rows(tmp_path / "ours" / f"{name}.jsonl", 4, start=3)
    main([str(tmp_path), str(TESTS / GPT2), "--pairs", "1"])
    text = capsys.readouterr().out
    assert "### gpt2, text assembly" in text and "| ours zh | 4 | " in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert {line.count("|") for line in rows} == {7, 11}


def test_a_share_is_rounded_to_all_or_nothing_only_where_it_is() -> None:
    shown = [percent(share) for share in (1.0, 0.9999, 0.0, 0.0001, 0.925)]
    assert shown == ["100.0 %", "99.990 %", "0.0 %", "0.010 %", "92.5 %"]
