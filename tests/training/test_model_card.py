"""The model card: metadata the Hub reads, numbers that all come from the facts, nothing that was not given."""

import re
from typing import Any

import yaml
from huggingface_hub import ModelCard

from attnpo.training.model_card import TEMPLATE, model_card

FACTS: dict[str, Any] = {
    "base": {
        "name": "tiny-base",
        "path": "someone/tiny-base",
        "hub": "someone/tiny-base",
        "revision": None,
        "fingerprint": {"config": "ab71fe", "weights": "cd82"},
    },
    "data": {
        "path": "../pairs",
        "hub": None,
        "splits": {
            "train": {"read": 1203, "kept": 1187, "dropped": {"no chosen | column": 14, "cut to nothing": 2}},
            "val": {"read": 301, "kept": 301, "dropped": {}, "noted": {"duplicates": 17}},
        },
    },
    "method": {
        "objective": {"name": "TwDPO", "settings": {"beta": 0.0317, "length_scale": True}},
        "weights": {"name": "Attention", "settings": {"layer": 23, "postprocess.sink_tokens": 4}},
        "judge": {"name": "the base model itself", "settings": {"labels": ["A", "B"], "max_length": 1921}},
        "verdicts": {"pair_accuracy": 0.8123},
    },
    "statistics": {"train": {"coverage": 0.99231, "effective_share": 0.4127}, "val": {"coverage": 0.98765}},
    "hyperparameters": {"optimizer.lr": 7.5e-07, "batch.pairs": 37, "trainer.max_steps": None, "schedule": "cosine"},
    "versions": {"attnpo": "9.8.7", "torch": "6.5.4"},
    "command": ["python", "-m", "attnpo.fit", "model.path=someone/tiny-base", "objective.beta=0.0317"],
}
CITATION = TEMPLATE.read_text().rpartition("## Citation")[2]
METRICS = {"val/loss": 0.612345, "val/rewards/accuracies": 0.71875, "train/loss": 0.55555}


def front(card: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(card.split("---\n")[1])
    return found


def test_the_metadata_is_what_the_hub_reads() -> None:
    card = model_card(FACTS, METRICS, step=640)
    found = front(card)
    assert found == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "base_model": "someone/tiny-base",
        "base_model_relation": "finetune",
        "tags": ["preference-optimization", "attnpo", "twdpo", "attention"],
    }
    loaded = ModelCard(card)
    assert loaded.data.to_dict() == found and loaded.text.lstrip().startswith("# tiny-base")


def test_places_that_are_not_on_the_hub_stay_out_of_the_metadata() -> None:
    """The Hub refuses a card whose base_model is no id of its own; the text names the place all the same."""
    facts = {**FACTS, "base": {**FACTS["base"], "hub": None, "path": "models/mine"}}
    card = model_card(facts, METRICS)
    assert "base_model" not in front(card) and "| path | models/mine |" in card
    on_hub = model_card({**FACTS, "data": {**FACTS["data"], "hub": "someone/pairs"}}, METRICS)
    assert front(on_hub)["datasets"] == ["someone/pairs"]


def numbers_in(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w.])\d+(?:\.\d+)*(?:e-?\d+)?(?![\w.]*\w)", text))


def leaves(node: Any) -> str:
    if isinstance(node, dict):
        return " ".join(f"{key} {leaves(value)}" for key, value in node.items())
    if isinstance(node, list):
        return " ".join(map(leaves, node))
    return f"{node:.6g}" if isinstance(node, float) else str(node)


def test_every_number_comes_from_the_facts() -> None:
    card = model_card(FACTS, METRICS, step=640, dtype="bfloat16")
    shown = numbers_in(card.replace(CITATION.strip(), ""))
    validation = {name: value for name, value in METRICS.items() if name.startswith("val/")}
    known = numbers_in(leaves(FACTS) + " " + leaves(validation) + " 640")
    assert shown <= known, shown - known
    for given in ("1203", "1187", "14", "0.0317", "23", "0.8123", "0.4127", "7.5e-07", "0.612345", "0.71875", "640"):
        assert given in shown, given
    assert "0.55555" not in card, "a training metric is no result of validation"


def test_a_card_of_nothing_known_claims_nothing() -> None:
    card = model_card({}, {})
    assert numbers_in(card.replace(CITATION.strip(), "")) == set()
    assert "not evaluated for safety" in card and "Token-weighted Direct Preference Optimization" in card
    for absent in ("## Data", "## Method", "## Validation", "## Hyperparameters", "base_model"):
        assert absent not in card


def test_what_data_say_cannot_break_the_card() -> None:
    """Names with bars, line breaks, tags and quotes stay one cell, and the metadata stay YAML."""
    ugly = 'a|b\nc <script> "q" --- `x`'
    facts = {
        **FACTS,
        "base": {**FACTS["base"], "name": ugly, "path": ugly, "hub": 'odd": [name'},
        "method": {"objective": {"name": ugly, "settings": {ugly: ugly}}},
    }
    card = model_card(facts, METRICS)
    assert front(card)["base_model"] == 'odd": [name'
    row = next(line for line in card.splitlines() if line.startswith("| path"))
    assert row.count("|") - row.count("\\|") == 3 and "\\<script\\>" in row


def test_no_licence_and_no_author_is_invented() -> None:
    card = model_card(FACTS, METRICS)
    assert "license" not in front(card) and "author" not in CITATION.partition("}\n")[0]
