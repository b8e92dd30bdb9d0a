"""An ``extraction/`` folder as it lies on disk, and how its pairs reach the run's judge."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from attnpo.schema import SIDES, JudgeModel, JudgePrompt, JudgeReading, Message, PreferencePair, UserError
from attnpo.text.judge_template import JudgePrompts

ROUNDS = ("cr", "rc")  # chosen as answer A, then rejected as answer A
FILES = ("pairs.json", "expected.safetensors", "template.txt", "span_cases.json", "unit_cases.json")
FOLDERS = ("model", "tokenizer")


def is_folder(path: Path) -> bool:
    """Whether ``path`` looks like extraction records, complete or not."""
    return (path / "pairs.json").is_file() or (path / "expected.safetensors").is_file()


@dataclass(frozen=True)
class Golden:
    """The files of one folder as they are; ``reference_span`` tells how the reference ends a span, if it is there."""

    path: Path
    sources: list[str]
    pairs: list[dict[str, Any]]
    expected: dict[str, Tensor]
    span_cases: list[dict[str, Any]]
    unit_cases: dict[str, Any]
    reference_span: dict[str, Any]

    @classmethod
    def read(cls, path: Path) -> "Golden":
        """The folder's content; UserError when a part is missing or cannot be read."""
        absent = [name for name in FILES if not (path / name).is_file()]
        absent += [f"{name}/" for name in FOLDERS if not (path / name).is_dir()]
        if absent:
            raise UserError(
                f"{path}: expected golden extraction records, lacks {', '.join(absent)}; copy the whole folder"
            )
        try:
            parsed = {name: json.loads((path / name).read_text(encoding="utf-8")) for name in FILES if "json" in name}
            pairs, units = parsed["pairs.json"], parsed["unit_cases.json"]
            expected = load_file(path / "expected.safetensors")
            span = dict(pairs.get("reference_span", {}))
            return cls(path, pairs["sources"], pairs["pairs"], expected, parsed["span_cases.json"], units, span)
        except (OSError, ValueError, LookupError, TypeError, SafetensorError) as error:
            raise UserError(
                f"{path}: cannot read golden extraction records ({error}); copy the folder again"
            ) from error

    def value(self, pair: dict[str, Any], key: str) -> Tensor:
        """One expected tensor of a pair."""
        return self.expected[f"{pair['index']:02d}/{key}"]

    @property
    def span_rules(self) -> dict[str, Any]:
        """The judge's options that end a span where the reference ends it."""
        names = {"closing_text": "span_closing", "drop_tokens_before": "span_drop"}
        return {names[key]: value for key, value in self.reference_span.items() if key in names}

    @property
    def completions_alone(self) -> bool:
        """Whether the reference tokenised completions without what stands before them in the conversation."""
        return self.reference_span.get("completion_tokenised") == "alone"

    @property
    def layers(self) -> list[int]:
        """The 1-based layers among the sources, rising."""
        return sorted(int(source[1:]) for source in self.sources if re.fullmatch(r"L\d+", source))


class Recorder:
    """A judge that keeps what it read last."""

    def __init__(self, judge: JudgeModel) -> None:
        self.judge = judge
        self.readings: list[JudgeReading] = []

    @property
    def num_layers(self) -> int:
        """Depth of the judge."""
        return self.judge.num_layers

    def read(self, prompts: Sequence[Sequence[int]], **asked: Any) -> list[JudgeReading]:
        """The judge's readings."""
        self.readings = self.judge.read(prompts, **asked)
        return self.readings


class GivenCuts:
    """The run's judge prompts, except for pairs that the reference cut: these have the reference's tokens and spans."""

    def __init__(self, prompts: JudgePrompts, cut: dict[str, dict[str, Any]]) -> None:
        self.prompts, self.cut = prompts, cut

    @property
    def label_ids(self) -> tuple[int, int]:
        """The labels' token ids."""
        return self.prompts.label_ids

    def fingerprint(self) -> dict[str, Any]:
        """The prompts' own."""
        return self.prompts.fingerprint()

    def build(self, pair: PreferencePair) -> tuple[JudgePrompt, JudgePrompt]:
        """Both rounds."""
        if pair.pair_id not in self.cut:
            return self.prompts.build(pair)
        first, second = (_given_prompt(pair.pair_id, self.cut[pair.pair_id]["rounds"][order]) for order in ROUNDS)
        return first, second


def _given_prompt(pair_id: str, info: dict[str, Any]) -> JudgePrompt:
    spans = {side: tuple(info[f"span_{answer_of(info, side)}"]) for side in SIDES}
    # No character is known; tokens are numbered instead.
    offsets = {side: [(place, place + 1) for place in range(end - start)] for side, (start, end) in spans.items()}
    return JudgePrompt(pair_id, list(info["judge_ids"]), info["answer_a"] == "chosen", spans, offsets, cut=True)


def answer_of(info: dict[str, Any], side: str) -> str:
    """ "a" or "b": the place of ``side`` in a golden round."""
    return "a" if info["answer_a"] == side else "b"


def preference(pair: dict[str, Any]) -> PreferencePair:
    """The golden pair as the run knows it."""
    return PreferencePair.make([Message(role="user", content=pair["prompt"])], pair["chosen"], pair["rejected"])


def is_cut(pair: dict[str, Any]) -> bool:
    """Whether the reference cut the pair's judge prompts."""
    return any(pair["rounds"][order]["truncated"] for order in ROUNDS)
