"""What the store's versions promise: the same version gives the same numbers, pinned here for each.

Where a test fails because a number was meant to move, raise the version in ``attnpo/weights`` and pin the new numbers
under it; where nothing was meant to move, the change is wrong. The tolerance is that of other kernels and machines.
"""

from pathlib import Path

import pytest
import torch

from attnpo.judge.base import CAPTURE_VERSION, LoadedJudge
from attnpo.judge.causal_judge import CausalJudge
from attnpo.judge.prompts import JudgePromptBuilder
from attnpo.judge.settings import JudgeRules
from attnpo.models.layouts import padded_layout
from attnpo.models.loading import load_model, load_tokenizer
from attnpo.models.scored import ScoredLM
from attnpo.schema import SIDES, Message, PreferencePair
from attnpo.system.store import Store
from attnpo.text.chat import ChatFormat
from attnpo.weights.capture import REFERENCE_VERSION, load_captured, load_logps, store_captured, store_logps
from attnpo.weights.score_parser import parse_scores
from attnpo.weights.sources.attention import Attention
from attnpo.weights.sources.rollout import Rollout
from attnpo.weights.sources.verbalized import READER, spread_scores
from tests.conformance.drawn import model_folder

PAIR = PreferencePair.from_texts(
    [Message(role="user", content="Why is the sky blue? Say it in two sentences, please.")],
    "Short waves are scattered more.\n\nSo blue light comes from everywhere.",
    " I do not know, ask 日本 ",
)
# Per round and side: tokens, and the sum of each row times the place of its tokens (a row moved by one token shows).
CAPTURED: dict[str, dict[str, list[float]]] = {
    "2": {
        "attention": [26, 0.864756, 1.0653, 14, 0.368981, 0.586568, 26, 0.94026, 1.64654, 14, 0.227274, 0.28109],
        "cut": [10, 0.489628, 8, 0.0966144, 10, 0.144496, 8, 0.153377],
        "rollout": [26, 0.182235, 14, 0.0389692, 26, 0.112384, 14, 0.0815928],
    }
}
# Per side: tokens, and the sum of the log-probabilities times their places.
REFERENCE: dict[str, list[float]] = {"1": [27, -2782.09, 15, -838.954]}
ANSWER = '[{"part": "Short waves", "score": 5}, {"part": "everywhere.", "score": "2"}, {"part": "green", "score": 3}]'
READ: dict[str, list[float]] = {"2": [5.0, 5.0, 5.0, 0.0, 2.0]}


def placed(row: torch.Tensor) -> float:
    return float((row.double() * torch.arange(1, len(row) + 1)).sum())


@pytest.fixture(scope="module")
def golden(vectors: Path) -> Path:
    return vectors / "extraction"


@pytest.fixture(scope="module")
def chat(golden: Path) -> ChatFormat:
    return ChatFormat(load_tokenizer(golden / "tokenizer"))


def test_captured_rows_are_those_of_their_version(golden: Path, chat: ChatFormat, tmp_path: Path) -> None:
    judge, seen = CausalJudge(load_model(model_folder(golden / "model"))), {}
    for name, source, layers, length in (
        ("attention", Attention(), (1, 8), 2048),
        ("cut", Attention(), (4,), 175),
        ("rollout", Rollout(), (0,), 2048),
    ):
        rules = JudgeRules(str(golden / "template.txt"), max_length=length, max_response_length=10)
        table = Store(tmp_path).table("weights", {"name": name})
        store_captured(
            table, source.capture([PAIR], LoadedJudge(judge, JudgePromptBuilder(rules, chat)), layers), layers
        )
        rounds = load_captured(table, [PAIR.pair_id], layers)[PAIR.pair_id].rounds
        parts = [item.side(side) for item in rounds for side in SIDES]
        seen[name] = [value for part in parts for value in (len(part.token_ids), *map(placed, part.weights))]
        assert any(item.cut for item in rounds) == (name == "cut")
    assert CAPTURE_VERSION in CAPTURED and seen.keys() == CAPTURED[CAPTURE_VERSION].keys(), seen
    for name, values in seen.items():
        assert values == pytest.approx(CAPTURED[CAPTURE_VERSION][name], rel=1e-3), (name, values)


def test_reference_log_probabilities_are_those_of_their_version(golden: Path, chat: ChatFormat, tmp_path: Path) -> None:
    model = ScoredLM(load_model(model_folder(golden / "model"))).eval()
    encoded = [chat.encode(PAIR.prompt, PAIR.response(side)) for side in SIDES]
    inputs, ids, mask = padded_layout([(row.prompt_ids, row.response_ids) for row in encoded], 0)
    with torch.no_grad():
        logps = model(inputs, ids, mask).logps
    table = Store(tmp_path).table("reference", {})
    chosen, rejected = (row[kept] for row, kept in zip(logps, mask, strict=True))
    store_logps(table, {PAIR.pair_id: (chosen, rejected)})
    stored = load_logps(table, [PAIR.pair_id])[PAIR.pair_id]
    seen = [value for row in stored for value in (len(row), placed(row))]
    assert seen == pytest.approx(REFERENCE.get(REFERENCE_VERSION, []), rel=1e-3), seen


def test_answers_are_read_as_their_version_says() -> None:
    places = [(0, 5), (5, 11), (11, 12), (12, 24), (58, 69)]
    seen = spread_scores(parse_scores(ANSWER, PAIR.chosen).spans, PAIR.chosen, places).tolist()
    assert seen == READ.get(READER), seen
