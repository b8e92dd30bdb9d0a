"""Tokenizers with word marks, where the reference ends spans and tokenises differently; `tests.conformance` on one."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from attnpo.config.compose import load
from attnpo.judge.prompts import JudgePromptBuilder
from attnpo.models.loading import load_tokenizer
from attnpo.schema import PreferencePair
from attnpo.text.chat import ChatFormat
from tests.conformance.__main__ import main
from tests.conformance.recompute import verify
from tests.conformance.records import Status
from tests.conformance.weights import is_tied

KEPT = (0, 6, 8)  # with rows per head; one token on each side; leading blanks
ALONE = "the reference tokenises completions alone"
Change = Callable[[dict[str, Any], dict[str, torch.Tensor]], None]


@pytest.fixture
def folder(vectors: Path, tmp_path: Path) -> Callable[[Change], Path]:
    """Writes the golden folder with three short pairs, changed."""
    source = vectors / "extraction_sentencepiece"

    def write(change: Change) -> Path:
        folder = tmp_path / "extraction"
        folder.mkdir()
        for name in ("model", "tokenizer", "template.txt", "span_cases.json", "unit_cases.json"):
            (folder / name).symlink_to(source / name)
        pairs = json.loads((source / "pairs.json").read_text())
        pairs["pairs"] = [pair for pair in pairs["pairs"] if pair["index"] in KEPT]
        tensors = {k: v for k, v in load_file(source / "expected.safetensors").items() if int(k[:2]) in KEPT}
        change(pairs, tensors)
        (folder / "pairs.json").write_text(json.dumps(pairs), encoding="utf-8")
        save_file(tensors, folder / "expected.safetensors")
        return folder

    return write


def test_every_record_passes(folder: Callable[[Change], Path], capsys: pytest.CaptureFixture[str]) -> None:
    """Spans end where reference_span says; ids differ where a completion stood alone, and the weights are compared."""
    assert main([str(folder(lambda pairs, tensors: None))]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "41 records: 34 ok, 0 FAIL, 7 variant, 0 not built"
    differing = [line for line in lines if ALONE in line]
    assert [line.split()[0] for line in differing] == ["extraction/training_ids", "extraction/aligned"] * len(KEPT)


def drop_more(pairs: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    pairs["reference_span"]["drop_tokens_before"] += 1


def close_later(pairs: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    pairs["reference_span"]["closing_text"] = "<|The End of Answer"


def in_conversation(pairs: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    pairs["reference_span"]["completion_tokenised"] = "in the conversation"


def other_text(pairs: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    pairs["pairs"][0]["training"]["chosen"]["completion_ids"][5] += 1


def other_weight(pairs: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    tensors["00/aligned/chosen"][5] += 1e-2


def weight_in_front(pairs: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    tensors["06/aligned/chosen"] = tensors["06/aligned/chosen"].flip(0)


@pytest.mark.parametrize(
    ("change", "only"),
    [
        (drop_more, "extraction/span 00*"),
        (close_later, "extraction/span 00*"),
        (in_conversation, "extraction/training_ids 00*"),
        (other_text, "extraction/training_ids 00*"),
        (other_weight, "extraction/aligned 00*"),
        (weight_in_front, "extraction/aligned 06*"),
    ],
)
def test_one_change_fails_its_record(folder: Callable[[Change], Path], change: Change, only: str) -> None:
    (found,) = verify([folder(change)], [only])
    assert found.status is Status.FAIL, found.line()


def test_closing_text_that_the_wording_lacks(folder: Callable[[Change], Path]) -> None:
    def change(pairs: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        pairs["reference_span"]["closing_text"] = "no such text"

    (found,) = verify([folder(change)], ["extraction/span 00*"])
    assert (
        found.status is Status.FAIL and "judge.span=reference: expected 'no such text' after both answers" in found.note
    )


THEIRS = (
    "Q {question}\n<|The Start of Answer A|>\n{answer_a}\n<|The End of Answer A|>\n{answer_b}\n<|The End of Answer B|>"
)


@pytest.mark.parametrize("wording", ["ours", "theirs"])
def test_the_mistral_setting_reproduces_their_spans_as_its_header_says(
    vectors: Path, tmp_path: Path, wording: str
) -> None:
    """An answer loses its last two tokens, a short one keeps its first."""
    (tmp_path / "theirs.txt").write_text(THEIRS)
    keys = ["setting=mistral_7b_base_sft", "judge.span=reference"]
    if wording == "theirs":
        keys += [f"judge.template_file={tmp_path}/theirs.txt", 'judge.span_closing="\n<|The End of Answer"']
    rules = load("fit", keys).judge.prompt_rules()
    chat = ChatFormat(load_tokenizer(vectors / "extraction_sentencepiece/tokenizer"))
    pair = PreferencePair.from_texts([{"role": "user", "content": "Why?"}], "It is because of rain.", "So.")
    whole = JudgePromptBuilder(load("fit", [*keys, "judge.span=touch"]).judge.prompt_rules(), chat).build(pair)
    for short, full in zip(JudgePromptBuilder(rules, chat).build(pair), whole, strict=True):
        begin, end = full.spans["chosen"]
        assert end - begin > 4 and short.spans["chosen"] == (begin, end - 2)
        begin, end = full.spans["rejected"]
        assert short.spans["rejected"] == (begin, max(begin + 1, end - 2))


def test_what_counts_as_another_best_alignment() -> None:
    """Judge 1 2 3, completion 2 3 3 1: 2 3 with two insertions, or two replacements and the second 3, cost three."""
    judge, ids = [1, 2, 3], [2, 3, 3, 1]
    weights = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    ours = 3 * torch.tensor([0.3, 0.5, 0, 0], dtype=torch.float64)
    tied = {}
    for theirs in ([0, 0, 0.5, 0], [0.3, 0.5, 0, 0], [0, 0.5, 0, 0.2], [0, 0, 0.4, 0], [0, 0, 0, 0.5], [0, 0, 0, 0]):
        row = 3 * torch.tensor(theirs, dtype=torch.float64)
        tied[tuple(theirs)] = is_tied(ours, row, judge, weights, ids)
    assert [row for row, found in tied.items() if found] == [(0, 0, 0.5, 0)]
