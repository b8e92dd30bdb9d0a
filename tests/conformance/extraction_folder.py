"""An ``extraction/`` folder as it lies on disk, and how its pairs reach the run's judge."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from attnpo.judge.base import JudgeModel, JudgePrompt, JudgeReading
from attnpo.judge.prompts import JudgePromptBuilder
from attnpo.schema import SIDES, Json, Message, PreferencePair, UserError
from attnpo.system.files import parse_json
from tests.conformance.fields import Fields

ROUNDS = ("cr", "rc")  # chosen as answer A, then rejected as answer A
ANSWERS = ("a", "b")
FILES = ("pairs.json", "expected.safetensors", "template.txt", "span_cases.json", "unit_cases.json")
FOLDERS = ("model", "tokenizer")


def is_folder(path: Path) -> bool:
    """Whether ``path`` looks like extraction records, complete or not."""
    return (path / "pairs.json").is_file() or (path / "expected.safetensors").is_file()


class GoldenRound(Fields):
    """Reference's judge prompt of one round; ``answer_a`` is a side."""

    def span(self, side: str) -> tuple[int, int]:
        """Returns the tokens of a side's response."""
        start, end = self["span_a" if self["answer_a"] == side else "span_b"]
        return start, end


@dataclass(frozen=True)
class GoldenPair:
    """A pair with what the reference made of it: rounds by name, judge tokens and training completions by side."""

    index: int
    name: str
    prompt: str
    responses: dict[str, str]
    rounds: dict[str, GoldenRound]
    judge_tokens: dict[str, list[int]]
    completion_texts: dict[str, str]
    completion_ids: dict[str, list[int]]

    @classmethod
    def read(cls, fields: Fields) -> "GoldenPair":
        """Reads the pair; KeyError for a part that is missing."""
        training = fields["training"]
        return cls(
            fields["index"],
            fields["name"],
            fields["prompt"],
            {side: fields[side] for side in SIDES},
            {order: GoldenRound(fields["rounds"][order]) for order in ROUNDS},
            {side: fields[f"{side}_tokens"] for side in SIDES},
            {side: training[side]["completion_text"] for side in SIDES},
            {side: training[side]["completion_ids"] for side in SIDES},
        )

    @property
    def cut(self) -> bool:
        """Whether the reference cut the pair's judge prompts."""
        return any(info["truncated"] for info in self.rounds.values())

    @property
    def preference(self) -> PreferencePair:
        """The pair as the run knows it."""
        return preference(self.prompt, **self.responses)


def preference(prompt: str, chosen: str, rejected: str) -> PreferencePair:
    """A pair with a single user turn."""
    return PreferencePair.from_texts([Message(role="user", content=prompt)], chosen, rejected)


@dataclass(frozen=True)
class Golden:
    """The files of one folder as they are; ``reference_span`` tells how the reference ends a span, if it is there."""

    path: Path
    sources: list[str]
    pairs: list[GoldenPair]
    expected: dict[str, Tensor]
    span_cases: list[Fields]
    unit_cases: Fields
    reference_span: Mapping[str, Json]

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
            parsed = {name: parse_json((path / name).read_text(encoding="utf-8")) for name in FILES if "json" in name}
            files, expected = Fields(parsed), load_file(path / "expected.safetensors")
            content = files.at("pairs.json")
            return cls(
                path,
                content["sources"],
                [GoldenPair.read(Fields(pair)) for pair in content["pairs"]],
                expected,
                [Fields(case) for case in files["span_cases.json"]],
                files.at("unit_cases.json"),
                content.get("reference_span", {}),
            )
        except (OSError, ValueError, LookupError, TypeError, SafetensorError) as error:
            raise UserError(
                f"{path}: cannot read golden extraction records ({error!r}); copy the folder again"
            ) from error

    def value(self, pair: GoldenPair, key: str) -> Tensor:
        """One expected tensor of a pair."""
        return self.expected[f"{pair.index:02d}/{key}"]

    @property
    def span_rules(self) -> dict[str, Json]:
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
        self.num_layers = judge.num_layers
        self.readings: list[JudgeReading] = []

    def read(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        layers: Sequence[int],
        per_head: bool = False,
        rollout: bool = False,
        verdict: bool = True,
        label_ids: tuple[int, int] | None = None,
    ) -> list[JudgeReading]:
        """The judge's readings."""
        self.readings = self.judge.read(
            prompts, layers=layers, per_head=per_head, rollout=rollout, verdict=verdict, label_ids=label_ids
        )
        return self.readings


class GivenCuts:
    """The run's judge prompts, except for pairs that the reference cut: these have the reference's tokens and spans."""

    def __init__(self, prompts: JudgePromptBuilder, pairs: Sequence[GoldenPair]) -> None:
        self.prompts = prompts
        self.label_ids, self.fingerprint = prompts.label_ids, prompts.fingerprint
        self.cut = {pair.preference.pair_id: pair for pair in pairs if pair.cut}

    def build(self, pair: PreferencePair) -> tuple[JudgePrompt, JudgePrompt]:
        """Both rounds."""
        if pair.pair_id not in self.cut:
            return self.prompts.build(pair)
        first, second = (_given_prompt(pair.pair_id, self.cut[pair.pair_id].rounds[order]) for order in ROUNDS)
        return first, second


def _given_prompt(pair_id: str, info: GoldenRound) -> JudgePrompt:
    spans = {side: info.span(side) for side in SIDES}
    # No character is known; tokens are numbered instead.
    offsets = {side: [(place, place + 1) for place in range(end - start)] for side, (start, end) in spans.items()}
    return JudgePrompt(pair_id, info["judge_ids"], info["answer_a"] == "chosen", spans, offsets, cut=True)
