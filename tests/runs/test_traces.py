"""Reasoning traces of the data, from the command line to the ids that are trained on."""

import json
import logging

import pytest

from attnpo.data.base import SPLITS
from attnpo.runs.inputs import make_inputs
from tests.runs.worlds import World, build_world


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """A world with a trace beside the first chosen answer of each split, and one inside the second rejected."""
    made = build_world(tmp_path_factory.mktemp("traces"))
    for path in made.data.glob("*.jsonl"):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        rows[0]["chosen"][-1]["reasoning_content"] = "the window"
        rows[1]["rejected"][-1]["content"] = "<think> the window </think> " + rows[1]["rejected"][-1]["content"]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return made


def test_traces_are_trained_on_or_stripped_by_choice(world: World, caplog: pytest.LogCaptureFixture) -> None:
    kept = make_inputs(world.config("weights=uniform"))
    with caplog.at_level(logging.INFO):
        stripped = make_inputs(world.config("weights=uniform", "data.columns.traces=strip"))
    for split in SPLITS:
        first, second = kept.pairs[split].pairs[:2]
        assert first.chosen.startswith("<think>\nthe window\n</think>\n\n")
        bare = stripped.pairs[split].pairs
        assert first.chosen.endswith(bare[0].chosen) and second.rejected.endswith(bare[1].rejected)
        assert "<think>" not in bare[0].chosen + bare[1].rejected
        assert [pair.pair_id for pair in bare[2:]] == [pair.pair_id for pair in kept.pairs[split].pairs[2:]]
        longer = [
            len(side.response_ids) - len(other.response_ids)
            for one, two in zip(kept.examples[split].examples, stripped.examples[split].examples, strict=True)
            for side, other in zip(one.sides, two.sides, strict=True)
        ]
        assert longer[0] > 0 and longer[3] > 0 and not any(longer[1:3] + longer[4:])
    assert caplog.text.count("reasoning trace stripped: 2 (rows 0, 1)") == 2
