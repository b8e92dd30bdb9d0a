"""What a checkout of arena-hard-auto holds, in the layout it has since 2025."""

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from attnpo.evaluation.answers.questions import Question
from attnpo.evaluation.checkout import Checkout, Row, once
from attnpo.evaluation.prompt_template import GraderPrompt, PromptTemplate
from attnpo.evaluation.python_constants import constant
from attnpo.schema import Json

SOURCE = (
    "Get it with `git clone https://github.com/lmarena/arena-hard-auto` (files laid out as in commit 196f6b8; those of "
    "2024 are not read) and give benchmark.path=arena-hard-auto"
)
JUDGES = "utils/judge_utils.py"
SETTINGS = "JUDGE_SETTINGS"
PLACES = ("QUESTION", "ANSWER_A", "ANSWER_B")

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ArenaHardFiles:
    """Questions, baseline answers by question, judge prompts by category, patterns of verdicts, digests of files."""

    questions: tuple[Question, ...]
    baselines: Mapping[str, str]
    prompts: Mapping[str, GraderPrompt]
    patterns: tuple[re.Pattern[str], ...]
    digests: Mapping[str, str]


def read_files(path: str, release: str, categories: Sequence[str]) -> ArenaHardFiles:
    """Returns the files of a ``release`` (arena-hard-v0.1) for the questions of some ``categories``.

    Raises:
        UserError: a file is missing, damaged or laid out otherwise, or lacks what the questions need.
    """
    checkout = Checkout(Path(path).expanduser(), "benchmark.path", path, SOURCE)
    data = f"data/{release}"
    questions = _questions(checkout, f"{data}/question.jsonl", categories)
    settings = _settings(checkout)
    template, patterns = _asking(checkout, f"config/{release}.yaml")
    prompts: dict[str, GraderPrompt] = {}
    baselines: dict[str, str] = {}
    for category in categories:
        baseline, system = _judge(checkout, settings, category)
        prompts[category] = GraderPrompt(system, template)
        asked = [question.id for question in questions if question.category == category]
        baselines |= _answers(checkout, f"{data}/model_answer/{baseline}.jsonl", asked)
    return ArenaHardFiles(questions, baselines, prompts, patterns, checkout.digests)


def _questions(checkout: Checkout, name: str, categories: Sequence[str]) -> tuple[Question, ...]:
    rows = once(checkout.rows(name), "uid")
    found = {row.text("category") for row in rows.values()}
    absent = [category for category in categories if category not in found]
    if absent:
        checkout.refuse(name, f"has no question of category {absent[0]}; benchmark.figures can have {sorted(found)}")
    kept = [(uid, row) for uid, row in rows.items() if row.text("category") in categories]
    return tuple(Question(uid, (row.text("prompt"),), category=row.text("category")) for uid, row in kept)


def _settings(checkout: Checkout) -> Mapping[str, Json]:
    try:
        settings = constant(checkout.text(JUDGES), SETTINGS)
    except ValueError as error:
        checkout.refuse(JUDGES, str(error))
    if not isinstance(settings, dict):
        checkout.refuse(JUDGES, f"has to give {SETTINGS} a dict by category")
    return settings


def _judge(checkout: Checkout, settings: Mapping[str, Json], category: str) -> tuple[str, str]:
    """Returns the baseline's name and the system prompt of a category."""
    setting = settings.get(category)
    values = [setting.get(key) for key in ("baseline", "system_prompt")] if isinstance(setting, dict) else []
    texts = [value for value in values if isinstance(value, str) and value]
    if len(texts) != 2:
        checkout.refuse(JUDGES, f"has to give {SETTINGS}[{category!r}] the texts baseline and system_prompt")
    return texts[0], texts[1]


def _asking(checkout: Checkout, name: str) -> tuple[PromptTemplate, tuple[re.Pattern[str], ...]]:
    """Returns the template of the judge's user message, and the patterns of verdicts in their order."""
    try:
        values = yaml.safe_load(checkout.text(name))
    except (yaml.YAMLError, RecursionError) as error:
        checkout.refuse(name, f"is no YAML ({str(error).splitlines()[0]})")
    values = values if isinstance(values, dict) else {}
    row = Row(checkout, name, values)
    template = PromptTemplate.read(row.text("prompt_template"), PLACES, checkout, f"{name}: prompt_template")
    try:
        patterns = tuple(re.compile(pattern) for pattern in row.texts("regex_patterns"))
    except re.error as error:
        checkout.refuse(f"{name}: regex_patterns", f"has a pattern that is none ({error})")
    if any(pattern.groups != 1 for pattern in patterns):
        checkout.refuse(f"{name}: regex_patterns", "has to have patterns of one group each, the verdict")
    return template, patterns


def _answers(checkout: Checkout, name: str, asked: Sequence[str]) -> dict[str, str]:
    """Returns a baseline's answers to the questions ``asked``, the last one where a question has several (as there)."""
    rows = checkout.rows(name)
    found = {row.id("uid"): row for row in rows}
    if len(found) < len(rows):
        _log.warning("%s: %d questions answered again, the last answer is taken", name, len(rows) - len(found))
    missing = [uid for uid in asked if uid not in found]
    if missing:
        checkout.refuse(name, f"has no baseline answer to {len(missing)} questions ({', '.join(missing[:5])})")
    return {uid: found[uid].item("messages", -1).within("content").text("answer") for uid in asked}
