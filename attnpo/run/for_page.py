"""Examples that a run saves for its study's page: a few pairs with token weights, and a few responses."""

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from attnpo.display.weighted_pair import WeightedPair
from attnpo.schema import PreferencePair
from attnpo.system.files import parse_json, write_atomically

log = logging.getLogger(__name__)

FILE = "for_page.json"
ANSWERS, PAIRS = 4, 1  # of each run


@dataclass(frozen=True)
class SampledAnswer:
    """Last message of a prompt, with the responses of the trained policy and its base model."""

    prompt: str
    policy: str
    base: str


@dataclass(frozen=True)
class PageExamples:
    """Examples that a run saved for its study's page."""

    heat: list[WeightedPair]
    answers: list[SampledAnswer]


def save_page_examples(folder: Path, heat: Sequence[WeightedPair], sampled: Sequence[PreferencePair]) -> None:
    """Saves the first pairs, and responses to a few prompts spread evenly over ``sampled``.

    ``sampled``: pairs with the policy's response as chosen and the base model's as rejected. If it is empty, the
    responses come from ``generations.jsonl``.
    """
    some = sampled[:: max(1, len(sampled) // ANSWERS)][:ANSWERS]
    answers = [{"prompt": pair.prompt[-1]["content"], "policy": pair.chosen, "base": pair.rejected} for pair in some]
    written = folder / "generations.jsonl"
    if not answers and written.is_file():
        rows = [parse_json(line) for line in written.read_text(encoding="utf-8").splitlines()[:ANSWERS]]
        answers = [
            {"prompt": row["prompt"][-1]["content"], "policy": row["policy"], "base": row["reference"]} for row in rows
        ]
    record = {"pairs": [pair.to_dict() for pair in heat[:PAIRS]], "answers": answers}
    write_atomically(folder / FILE, json.dumps(record, ensure_ascii=False) + "\n")


def load_page_examples(folder: Path) -> PageExamples | None:
    """Returns a run's saved examples. Returns None if nothing was saved, or (with a warning) if it cannot be read."""
    path = folder / FILE
    try:
        record = parse_json(path.read_text(encoding="utf-8"))
        pairs = [
            WeightedPair.from_dict(pair) for pair in record.get("pairs", [])
        ]  # earlier runs: "heat", of other rows
        return PageExamples(pairs, [SampledAnswer(**answer) for answer in record["answers"]])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, IndexError) as problem:
        log.warning("%s cannot be read, so the page omits it (%r)", path, problem)
        return None
