"""Reasoning traces of the data, from the command line to the ids that are trained on."""

import json
import logging
from pathlib import Path

import pytest
import torch

from attnpo import fit
from attnpo.data.base import SPLITS
from attnpo.schema import UserError
from tests.run.made import make, make_inputs
from tests.run.worlds import World, build_world


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


def test_a_trace_weighed_apart_has_its_share_and_the_judge_reads_the_answer(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """The judge's rows are those of the same pairs without traces; the trace has 1/|y| per token."""
    with caplog.at_level(logging.INFO):
        apart = make_inputs(world.config("weights=attention", "data.columns.traces=weigh_apart"))
        bare = make_inputs(world.config("weights=attention", "data.columns.traces=strip"))
    assert caplog.text.count("reasoning trace excluded from weighting: 2 (rows 0, 1)") == 2
    traced = [(0, 0), (1, 1)]  # place of the pair and its side
    for split in SPLITS:
        rows = list(zip(apart.examples[split].examples, bare.examples[split].examples, strict=True))
        for place, side in [(place, side) for place in range(len(rows)) for side in (0, 1)]:
            found, expected = rows[place][0].weights[side].double(), rows[place][1].weights[side].double()
            length, answer = rows[place][0].lengths[side], rows[place][1].lengths[side]
            assert (length > answer) is ((place, side) in traced)
            trace = int(length - answer)
            shared = found[-expected.numel() :]
            torch.testing.assert_close(shared, expected * answer / length, rtol=1e-6, atol=0)
            held = [at for at, (start, end) in enumerate(rows[place][0].sides[side].offsets) if end > start]
            torch.testing.assert_close(found[held[:trace]], torch.full((trace,), 1 / length).double())
            assert float(found.sum()) == pytest.approx((float(expected.sum()) * answer + trace) / length)


def test_a_run_with_a_trace_weighed_apart_trains_and_refuses_factors(world: World, tmp_path: Path) -> None:
    asked = ["experiment=none", "data.columns.traces=weigh_apart", f"output={tmp_path}", "name=apart"]
    assert fit.main(world.config("weights=attention", "callbacks=none", "trainer.max_steps=1", *asked)) == 0
    account = json.loads((tmp_path / "apart" / "result.json").read_text())
    assert account["steps"] == 1
    with pytest.raises(UserError, match=r"weigh_apart .* Decay yields factors"):
        world.config("weights=decay", *asked)
    mixed = "data.mix={a: {path: x, columns: {traces: weigh_apart}}}"
    with pytest.raises(UserError, match=r"weigh_apart .* Decay yields factors"):
        world.config("weights=decay", "experiment=none", mixed)


USES_TOOLS = (
    "{% if tools %}tools:{% for tool in tools %} {{ tool.name }}{% endfor %}\n{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}\n"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


def test_tools_of_a_column_reach_the_training_prompt(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [json.loads(line) for line in (world.data / "train.jsonl").read_text().splitlines()]
    rows[0]["tools"] = json.dumps([{"name": "weather"}, {"name": "maps"}])
    (world.data / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    mapped = ["weights=uniform", "data.columns.tools=tools", f"data.path={world.data / 'train.jsonl'}"]
    (tmp_path / "uses.jinja").write_text(USES_TOOLS)
    asked = ["data.val_share=0.3", f"model.chat_template={tmp_path / 'uses.jinja'}"]
    with caplog.at_level(logging.INFO):
        made = make(world.config(*mapped, *asked))
    inputs, chat = made.inputs, made.base.chat
    pairs = [pair for split in SPLITS for pair in inputs.pairs[split].pairs]
    examples = [example for split in SPLITS for example in inputs.examples[split].examples]
    assert [example.chosen.prompt_ids for example in examples] == [chat.prompt_ids(pair.prompt) for pair in pairs]
    texts = [chat.render(pair.prompt, True) for pair in pairs]
    (with_tools,) = [text for text in texts if "tools" in text]
    assert with_tools.startswith("tools: weather mapsuser: ")
    assert "not used: tools" not in caplog.text and "never reads tools" not in caplog.text
    with caplog.at_level(logging.INFO):
        make_inputs(world.config("weights=uniform", mapped[2], *asked))
    assert "topic, tools" in caplog.text
