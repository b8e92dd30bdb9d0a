"""docs/judge_prompts.md: its numbers are those of the record, the record adds up, and its command runs."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from attnpo.config.compose import load
from attnpo.judge.settings import TraceRules
from attnpo.objectives.twdpo import twdpo_loss
from attnpo.schema import SIDES
from experiments.pages.judge_to_loss import DOCS, NAME, draw_svg, insert_block, main, page_block
from tests.run.worlds import build_world

RECORD: dict[str, Any] = json.loads((DOCS / f"{NAME}.json").read_text(encoding="utf-8"))


def check(record: dict[str, Any]) -> None:
    """The record's own numbers, put together anew, give its weights, rewards and losses."""
    ratios, weights, masks, lengths = [], [], [], []
    width = max(len(record[side]["tokens"]) for side in SIDES)
    for side in SIDES:
        shown = record[side]
        mean = torch.tensor(shown["rounds"], dtype=torch.float64).mean(0)
        expected = mean / mean.sum()
        if len(mean) >= 5:  # the sink: the first token gets the mean, the others share the rest
            expected = torch.cat(
                [torch.tensor([1 / len(mean)]), expected[1:] / expected[1:].sum() * (1 - 1 / len(mean))]
            )
        held = torch.tensor(shown["weights"], dtype=torch.float64)
        found = held[: len(mean)] > 0  # a token without a partner has no weight, and counts against coverage
        assert float(found.double().mean()) == pytest.approx(shown["coverage"], abs=1e-5)
        torch.testing.assert_close(held[: len(mean)][found], expected.double()[found], atol=2e-4, rtol=0)
        assert held[len(mean) :].tolist() == [0.0] * (len(held) - len(mean))
        assert shown["length"] == len(mean)
        pad = [0.0] * (width - len(held))
        ratios.append([*shown["ratios"], *pad])
        weights.append([*shown["weights"], *pad])
        masks.append([True] * len(held) + [False] * len(pad))
        lengths.append(shown["length"])
    mask = torch.tensor(masks)
    policy, zero = torch.tensor(ratios), torch.zeros(2, width)
    again = twdpo_loss(policy, zero, torch.tensor(weights), mask, torch.tensor(lengths), record["beta"])
    counts = mask.sum(-1).float()
    plain = twdpo_loss(policy, zero, mask / counts[:, None], mask, counts, record["beta"])
    for made, loss, rewards in ((again, "loss", "rewards"), (plain, "plain_loss", "plain_rewards")):
        assert made.losses.tolist() == pytest.approx([record[loss]], abs=1e-4)
        both = [made.chosen_rewards[0], made.rejected_rewards[0]]
        assert [float(one) for one in both] == pytest.approx(record[rewards], abs=1e-4)


def test_the_page_and_its_picture_are_those_of_the_record() -> None:
    page = (DOCS / "judge_prompts.md").read_text(encoding="utf-8")
    assert insert_block(page, page_block(RECORD)) == page and RECORD["prompts"][0]["text"].strip() in page
    assert RECORD["command"] in page
    assert (DOCS / f"{NAME}.svg").read_text(encoding="utf-8") == draw_svg(RECORD)


def test_its_options_mean_what_they_say_as_a_shell_hands_them_on() -> None:
    page = (DOCS / "judge_prompts.md").read_text(encoding="utf-8")
    given = re.findall(r"`'(judge\.[^`]+)'`", page)
    judge = load("fit", given).judge
    assert judge.prefill == "The better answer is (" and judge.labels == (" A", " B")
    assert judge.chat_template_kwargs == {"enable_thinking": False} and len(given) == 4
    assert judge.trace == TraceRules(1024, until="</think>", temperature=0.0)


def test_the_record_adds_up() -> None:
    check(RECORD)
    assert RECORD["loss"] < RECORD["loss_before"]


def test_what_the_page_says_of_single_words() -> None:
    chosen = RECORD["chosen"]
    held = {token: place for place, token in enumerate(chosen["tokens"])}
    for word in ("poor", "horrible", "good"):
        assert chosen["weights"][held[word]] > 1 / chosen["length"] and chosen["ratios"][held[word]] > 0
    assert all(RECORD[side]["tokens"][-2] == "." and RECORD[side]["weights"][-2] == 0 for side in SIDES)


def test_its_command_runs_on_another_world(tmp_path: Path) -> None:
    world = build_world(tmp_path)
    assert main(["--folder", str(tmp_path), *world.overrides()]) == 0
    check(json.loads((tmp_path / f"{NAME}.json").read_text(encoding="utf-8")))
    assert "</svg>" in (tmp_path / f"{NAME}.svg").read_text(encoding="utf-8")
