"""Measures on real text which share of a response is covered when judge tokens are matched to training tokens.

    python experiments/benchmarks/token_coverage.py DATA_FOLDER TOKENIZER_FOLDER[@CHAT_TEMPLATE] ... [--pairs N]

Prints the Markdown tables of token_coverage.md. No model is involved: training tokens come from ``ChatFormat``, judge
tokens from ``JudgePromptBuilder``, and weights are mapped by ``align``, all as in a run. Only the length limits are
lifted, so that nothing is cut. Every option of the config group ``judge`` is measured.
"""

import argparse
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from attnpo.config.compose import compose, instantiate, list_groups
from attnpo.config.named_files import read_template
from attnpo.data.base import PairSource
from attnpo.judge.base import JudgePrompt
from attnpo.judge.prompts import JudgePromptBuilder
from attnpo.judge.settings import Assembly, JudgeRules
from attnpo.models.loading import load_tokenizer
from attnpo.schema import SIDES, EncodedResponse, PreferencePair
from attnpo.text.alignment import AlignMethod, align
from attnpo.text.chat import ChatFormat

PLAIN = "model/plain_chat.jinja"  # for tokenizers that bring no chat template
ENOUGH = 0.95
UNLIMITED = 1 << 30
IDS_STEP = 5  # every fifth pair under ids assembly, which is exact by construction
_TRAIN = re.compile(r"train(_\w+)?\.jsonl")


@dataclass(frozen=True)
class Match:
    """One response under one matching method.

    ``coverage``: share of its ``content`` tokens (those with characters) that are matched. ``last``: whether the last
    content token is matched. ``lost``: share of uniform weights on the judge's tokens that reaches no training token.
    """

    coverage: float
    content: int
    last: bool
    lost: float


@dataclass(frozen=True)
class Summary:
    """Statistics of many responses as in the tables; shares are between 0 and 1."""

    responses: int
    complete: float
    enough: float
    mean: float
    pooled: float
    last_lost: float
    lost: float
    lowest: float

    @classmethod
    def of(cls, matches: Sequence[Match]) -> "Summary":
        count = len(matches)
        tokens = sum(match.content for match in matches)
        return cls(
            responses=count,
            complete=sum(match.coverage == 1 for match in matches) / count,
            enough=sum(match.coverage >= ENOUGH for match in matches) / count,
            mean=sum(match.coverage for match in matches) / count,
            pooled=sum(match.coverage * match.content for match in matches) / tokens,
            last_lost=sum(not match.last for match in matches) / count,
            lost=sum(match.lost for match in matches) / count,
            lowest=min(match.coverage for match in matches),
        )


# ------------------------------------------------------------------------------------------------ what is measured


def data_sets(folder: Path, pairs: int | None = None) -> dict[str, list[PreferencePair]]:
    """Returns the pairs of every folder with a train and a test file, by name; the first ``pairs`` of each file."""
    found = {}
    for file in sorted(folder.glob("*/train*.jsonl")):
        name = _TRAIN.fullmatch(file.name)
        if name is None:
            continue
        part, rows = name[1] or "", None if pairs is None else str(pairs)
        source = PairSource(str(file.parent), f"train{part}", f"test{part}", train_rows=rows, val_rows=rows)
        found[f"{file.parent.name}{part.replace('_', ' ')}"] = source.load("train").pairs + source.load("val").pairs
    return found


def chat_format(tokenizer: str) -> ChatFormat:
    """Returns the chat format of ``FOLDER`` or ``FOLDER@TEMPLATE``; without any template, the plain one."""
    folder, _, template = tokenizer.partition("@")
    loaded = load_tokenizer(folder)
    own = template or (None if loaded.chat_template else PLAIN)
    return ChatFormat(loaded, read_template(own))


def judge_options() -> dict[str, JudgeRules]:
    """Returns the rules of every option of the group ``judge`` without length limits; merges those of equal wording."""
    named: dict[tuple[str, JudgeRules], tuple[list[str], JudgeRules]] = {}
    for option in list_groups()["judge"]:
        rules = instantiate(compose("fit", [f"judge={option}"]).judge).prompt_rules()
        rules = replace(rules, max_length=UNLIMITED, max_response_length=UNLIMITED, assembly=Assembly.TEXT)
        wording = Path(rules.template_file).read_text(encoding="utf-8")
        same = replace(rules, template_file="", span_closing=None)  # where a reference span ends: none is measured
        named.setdefault((wording, same), ([], rules))[0].append(option)
    return {", ".join(names): rules for names, rules in named.values()}


def match(prompt: JudgePrompt, side: str, target: EncodedResponse, method: AlignMethod) -> Match | None:
    """Matches ``side`` of a judge prompt with its training tokens; None for a response without characters."""
    content = [index for index, (start, end) in enumerate(target.offsets) if end > start]
    if not content:
        return None
    first, last = prompt.spans[side]
    ids = prompt.input_ids[first:last]
    same = ids == [target.response_ids[index] for index in content]
    if same and list(prompt.offsets[side]) == [target.offsets[index] for index in content]:
        return Match(1.0, len(content), True, 0.0)  # what align() gives for equal tokens, without asking it
    uniform = torch.full((len(ids),), 1 / max(1, len(ids)), dtype=torch.float64)
    aligned = align(ids, prompt.offsets[side], uniform, target.response_ids, target.offsets, method)
    kept = float(aligned.weights[content].sum())
    return Match(aligned.coverage, len(content), bool(aligned.matched[content[-1]]), max(0.0, 1 - kept))


Key = tuple[str, Assembly, AlignMethod]


def measure(
    chat: ChatFormat, pairs: Sequence[PreferencePair], judges: dict[str, JudgeRules]
) -> tuple[dict[Key, Summary], Counter[str]]:
    """Returns a summary per judge option, assembly and method, and the responses tokenised differently by round.

    Each response counts once, as shown in the first round: chosen responses as answer A, rejected ones as answer B. The
    second round is averaged onto the first one's tokens, so it does not affect coverage.
    """
    matches: dict[Key, list[Match]] = {}
    differ: Counter[str] = Counter()
    encoded = [{side: chat.encode(pair.prompt, pair.response(side)) for side in SIDES} for pair in pairs]
    for option, rules in judges.items():
        for assembly in Assembly:
            prompts = JudgePromptBuilder(replace(rules, assembly=assembly), chat)
            step = IDS_STEP if assembly is Assembly.IDS else 1
            for pair, targets in list(zip(pairs, encoded, strict=True))[::step]:
                first, second = prompts.build(pair)
                for side in SIDES:
                    shown = [one.input_ids[slice(*one.spans[side])] for one in (first, second)]
                    differ[option] += assembly is Assembly.TEXT and shown[0] != shown[1]
                    for method in AlignMethod:
                        found = match(first, side, targets[side], method)
                        if found is not None:
                            matches.setdefault((option, assembly, method), []).append(found)
    return {key: Summary.of(found) for key, found in matches.items()}, differ


# ------------------------------------------------------------------------------------------------ tables


def percent(share: float, digits: int = 1) -> str:
    """Formats a share as a percentage that shows 100 and 0 only if exact."""
    text = f"{100 * share:.{digits}f}"
    if (share < 1 and float(text) == 100) or (share > 1e-12 and float(text) == 0):
        digits += 2
        text = f"{100 * share:.{digits}f}"
    return f"{text} %"


HEAD = (
    "| judge | data | responses | all matched | at least 95 % matched | mean | pooled | last token lost | mass lost: "
    "levenshtein | characters |",
    "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|",
)
Measured = dict[str, tuple[dict[Key, Summary], Counter[str]]]


def cells(found: dict[Key, Summary], option: str) -> tuple[str, ...]:
    """Returns a line of the text-assembly table, after its names."""
    paper = found[option, Assembly.TEXT, AlignMethod.LEVENSHTEIN]
    other = found[option, Assembly.TEXT, AlignMethod.CHARACTERS]
    shares = (percent(paper.complete), percent(paper.enough), percent(paper.mean), percent(paper.pooled, 2))
    return f"{paper.responses:,}", *shares, percent(paper.last_lost), percent(paper.lost, 2), percent(other.lost, 2)


def text_table(results: Measured, judges: Sequence[str]) -> Iterator[str]:
    """Returns the table of one tokenizer; options with the same numbers on all data share a line."""
    alike: dict[tuple[tuple[str, ...], ...], list[str]] = {}
    for option in judges:
        alike.setdefault(tuple(cells(found, option) for found, _ in results.values()), []).append(option)
    yield from HEAD
    for lines, options in alike.items():
        for name, line in zip(results, lines, strict=True):
            yield f"| {', '.join(options)} | {name} | {' | '.join(line)} |"


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the tables; returns 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "data", type=Path, metavar="DATA_FOLDER", help="a folder of data sets with train and test files"
    )
    parser.add_argument("tokenizers", nargs="+", metavar="TOKENIZER_FOLDER[@CHAT_TEMPLATE]")
    parser.add_argument("--pairs", type=int, help="number of pairs to use from each file")
    options = parser.parse_args(arguments)
    judges, sets = judge_options(), data_sets(options.data, options.pairs)
    exact: list[str] = []
    for tokenizer in options.tokenizers:
        chat, label = chat_format(tokenizer), label_of(tokenizer)
        results = {name: measure(chat, pairs, judges) for name, pairs in sets.items()}
        print(f"### {label}, text assembly\n")
        print("\n".join(text_table(results, list(judges))))
        differ = sum((counts for _, counts in results.values()), Counter[str]())
        rounds = ", ".join(f"{option}: {number}" for option, number in differ.items() if number) or "none"
        print(f"\nResponses tokenised differently in the two rounds: {rounds}.\n", flush=True)
        exact += exact_rows(label, [found for found, _ in results.values()], len(judges))
    print("### Methods that should be exact: worst case over all data sets and wordings\n")
    print("| tokenizer | assembly, method | wordings | responses | lowest coverage | mass lost |")
    print("|---|---|---:|---:|---:|---:|")
    print("\n".join(exact))
    return 0


def label_of(tokenizer: str) -> str:
    """Returns a label of a tokenizer's folder and its template."""
    folder, _, template = tokenizer.partition("@")
    return Path(folder).name + (f" with {Path(template).name}" if template else "")


def exact_rows(label: str, found: Sequence[dict[Key, Summary]], wordings: int) -> Iterator[str]:
    """Returns the lines of the methods that should be exact, over all data sets and wordings of one tokenizer."""
    for assembly, method in (
        (Assembly.IDS, AlignMethod.LEVENSHTEIN),
        (Assembly.IDS, AlignMethod.CHARACTERS),
        (Assembly.TEXT, AlignMethod.CHARACTERS),
    ):
        summaries = [one for table in found for key, one in table.items() if key[1:] == (assembly, method)]
        count = sum(one.responses for one in summaries)
        lowest, lost = min(one.lowest for one in summaries), max(one.lost for one in summaries)
        way = f"{assembly.value}, {method.value}"
        yield f"| {label} | {way} | {wordings} | {count:,} | {percent(lowest, 2)} | {percent(lost, 3)} |"


if __name__ == "__main__":
    sys.exit(main())
