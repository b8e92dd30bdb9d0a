"""Generates the numbers and the figure of docs/judge_prompts.md: one pair from the judge's prompt to the loss.

    python -m experiments.pages.judge_to_loss
    python -m experiments.pages.judge_to_loss --folder F KEY=VALUE ...

The first command writes docs/judge_to_loss.json, the figure (.svg) and the block in the page. The second one writes
into F and takes overrides of attnpo.fit.

The pair is the shortest of the first 64 validation pairs. The policy takes ten optimizer steps on this pair alone, so
that log-ratios are not all 0. Takes about ten seconds on a laptop once the testbed is prepared.
"""

import argparse
import copy
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from html import escape
from pathlib import Path

import torch

from attnpo.cli.terminal import log_to_terminal
from attnpo.config.compose import load
from attnpo.data.collate import TrainingExample, collate
from attnpo.judge.judge import RunJudge
from attnpo.models.layouts import padded_layout
from attnpo.models.loading import load_model
from attnpo.models.scored import ScoredLM
from attnpo.models.spec import ModelSpec
from attnpo.objectives.base import PreferenceObjective, log_ratios
from attnpo.objectives.twdpo import twdpo_loss
from attnpo.run.inputs import Inputs, read_inputs
from attnpo.run.resolve import resolve
from attnpo.schema import SIDES, PreferencePair
from attnpo.system.files import Json, write_atomically
from attnpo.system.machine import inference_device

DOCS = Path(__file__).resolve().parents[2] / "docs"
NAME = "judge_to_loss"
STEPS = 10
PAIRS = 64
Record = Mapping[str, Json]

# ------------------------------------------------------------------------------------------------ numbers


def build_record(overrides: Sequence[str]) -> Record:
    """Computes everything the page shows about one pair, rounded to six digits."""
    asked = ["experiment=none", "weights=attention", f"data.train_rows={PAIRS}", f"data.val_rows={PAIRS}"]
    cfg, base, readers, _ = resolve(load("fit", [*asked, *overrides]))
    inputs = read_inputs(cfg, base, readers)
    pairs = {pair.pair_id: pair for pair in inputs.pairs["val"].pairs}
    example = min(inputs.examples["val"].examples, key=lambda one: sum(len(side.response_ids) for side in one.sides))
    pair = pairs[example.pair_id]
    torch.manual_seed(0)
    return {
        "command": " ".join([f"python -m experiments.pages.{NAME}", *overrides]),
        "question": pair.prompt[-1]["content"],
        "layer": inputs.weighed.source.rows_to_read()[0],
        "layers": int(inputs.weighed.depth),
        "prompts": _describe_prompts(inputs, readers.make_judge(), pair),
        **_train_and_describe(
            inputs, base.spec, base.tokenizer.pad_token_id or 0, cfg.objective, cfg.optimizer.lr, example, pair
        ),
    }


def _describe_prompts(inputs: Inputs, judge: RunJudge, pair: PreferencePair) -> list[Json]:
    """Returns the text, verdict, and attention on the responses for both rounds."""
    captured = inputs.weighed.source.select(inputs.weighed.captured[pair.pair_id], inputs.weighed.layers)
    shown: list[Json] = []
    for prompt, heard in zip(judge.prompts.build(pair), captured.rounds, strict=True):
        logits = heard.verdict_logits
        on_responses = sum(float(heard.side(side).weights[0].sum()) for side in SIDES)
        shown.append(
            {
                "text": judge.tokenizer.decode(prompt.input_ids),
                "chosen_is": judge.settings.labels[0 if prompt.chosen_is_a else 1],
                "says_a": None if logits is None else _round(torch.softmax(logits.double(), 0)[0]),
                "on_responses": _round(on_responses),
            }
        )
    return shown


def _train_and_describe(
    inputs: Inputs,
    spec: ModelSpec,
    pad: int,
    objective: PreferenceObjective,
    lr: float,
    example: TrainingExample,
    pair: PreferencePair,
) -> dict[str, Json]:
    """Trains on the pair; returns tokens, attention, weights and log-ratios of both responses, and losses."""
    loaded = load_model(spec.path, dtype="float32", revision=spec.revision).to(inference_device("cpu"))  # type: ignore[arg-type]
    reference, policy = ScoredLM(loaded).eval(), ScoredLM(copy.deepcopy(loaded)).eval()
    batch = collate([replace(example, reference_logps=None)], padded_layout, pad, 1)
    rows = batch.main
    beta = float(getattr(objective, "beta"))  # noqa: B009
    with torch.no_grad():
        held = reference(rows.inputs, rows.response_ids, rows.response_mask)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=lr, weight_decay=0.0)
    for _ in range(STEPS):
        optimizer.zero_grad()
        objective(policy(rows.inputs, rows.response_ids, rows.response_mask), held, batch).losses.sum().backward()
        optimizer.step()
    with torch.no_grad():
        now = policy(rows.inputs, rows.response_ids, rows.response_mask)
        ratios = log_ratios(now.logps, held.logps, rows.response_mask)
        after = objective(now, held, batch)
        flat = torch.where(rows.response_mask, 1 / rows.response_mask.sum(-1, keepdim=True), 0.0)
        counts = rows.response_mask.sum(-1).float()
        plain = twdpo_loss(now.logps, held.logps, flat, rows.response_mask, counts, beta)
    captured = inputs.weighed.source.select(inputs.weighed.captured[pair.pair_id], inputs.weighed.layers)
    sides: dict[str, Json] = {}
    for place, side in enumerate(SIDES):
        encoded, count = example.sides[place], int(rows.response_mask[place].sum())
        text = pair.response(side)
        sides[side] = {
            "text": text,
            "tokens": [text[start:end] or "(end)" for start, end in encoded.offsets],
            "rounds": [_numbers(heard.side(side).weights[0]) for heard in captured.rounds],
            "weights": _numbers(example.weights[place]),
            "length": example.lengths[place],
            "coverage": _round(example.coverage[place]),
            "ratios": _numbers(ratios[place, :count]),
        }
    return {
        "beta": beta,
        "steps": STEPS,
        "lr": lr,
        **sides,
        "rewards": [_round(after.chosen_rewards[0]), _round(after.rejected_rewards[0])],
        "plain_rewards": [_round(plain.chosen_rewards[0]), _round(plain.rejected_rewards[0])],
        "loss_before": _round(math.log(2)),
        "loss": _round(after.losses[0]),
        "plain_loss": _round(plain.losses[0]),
    }


def _round(value: float | torch.Tensor) -> float:
    return round(float(value), 6)


def _numbers(row: torch.Tensor) -> list[Json]:
    return [_round(value) for value in row]


# ------------------------------------------------------------------------------------------------ page


def page_block(record: Record) -> str:
    """Returns the text between the page's two markers: the judge's prompt, and the resulting rewards and losses."""
    first, second = record["prompts"]
    rewards, plain = record["rewards"], record["plain_rewards"]
    sums = [sum(record[side]["weights"]) for side in SIDES]
    verdicts = [f"{name} {shown['says_a']:.2f}" for name, shown in (("order 1", first), ("order 2", second))]
    return "\n".join(
        [
            f"The pair is the shortest of the first {PAIRS} validation pairs. The judge, which is the model before",
            f"training, reads this in order 1 (the chosen answer is {first['chosen_is']}):",
            "```text",
            first["text"].strip(),
            "```",
            f"Its probability of A against B: {', '.join(verdicts)}. A judge that saw the better answer would",
            "be above 0.5 in order 1 and below it in order 2. Of its attention in layer "
            f"{record['layer']} of {record['layers']},",
            f"{first['on_responses']:.0%} and {second['on_responses']:.0%} lie on the two answers.",
            "",
            f"![From attention to the loss of one pair]({NAME}.svg)",
            "",
            f"After {record['steps']} steps on this pair alone (learning rate {record['lr']:g}, "
            f"beta {record['beta']:g}):",
            "",
            "| | reward of chosen | reward of rejected | margin | loss |",
            "|---|---:|---:|---:|---:|",
            _row("weighted by attention", rewards, record["loss"]),
            _row("the same log-probabilities, all tokens alike (DPO)", plain, record["plain_loss"]),
            f"| before the first step | 0 | 0 | 0 | {record['loss_before']:.4f} |",
            "",
            f"The weights sum to {sums[0]:.3f} and {sums[1]:.3f}; coverage, the share of tokens that found a partner,",
            f"is {record['chosen']['coverage']:.3f} and {record['rejected']['coverage']:.3f}.",
        ]
    )


def _row(name: str, rewards: Sequence[float], loss: float) -> str:
    return f"| {name} | {rewards[0]:.4f} | {rewards[1]:.4f} | {rewards[0] - rewards[1]:.4f} | {loss:.4f} |"


def insert_block(page: str, text: str) -> str:
    """Inserts ``text`` between the page's markers."""
    return re.sub(
        r"(<!-- made -->\n).*?(<!-- /made -->)", lambda marks: f"{marks[1]}{text}\n{marks[2]}", page, flags=re.S
    )


# ------------------------------------------------------------------------------------------------ figure

CELL, LINE, LABEL, PER_LINE = 68, 22, 150, 10
STYLE = """
  text { font: 12px ui-monospace, Menlo, Consolas, monospace; fill: #1f2328 }
  .note { font-family: system-ui, sans-serif } .head { font: 600 14px system-ui, sans-serif }
  .title { font: 600 17px system-ui, sans-serif }
  .page { fill: #ffffff } .w { fill: #e8590c } .up { fill: #1a7f37 } .down { fill: #cf222e } .grid { stroke: #d0d7de }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 } .page { fill: #0d1117 } .w { fill: #ff8a3d } .up { fill: #3fb950 } .down { fill: #f85149 }
    .grid { stroke: #3d444d }
  }
"""


TITLE = "From a judge's attention to the loss: one preference pair"
TOLD = (
    "A model was asked which of two answers is better, in both orders. Orange: how much it attended to a word,",
    "and a, the weight of the word in training: the mean of both, scaled to sum to 1 (the first word of five or more,",
    "where attention gathers, gets the average). Green and red: d, how much training on this pair raised or lowered",
    "the word's log-probability. The stronger a colour, the more.",
)


def draw_svg(record: Record) -> str:
    """Draws each response's tokens with both rounds' attention, weights and log-ratios, and the loss below."""
    parts = [f'<text class="title" x="16" y="28">{TITLE}</text>']
    y = 28
    for words in (f"The prompt: {record['question']}", *TOLD):
        y += LINE - 2
        parts.append(f'<text class="note" x="16" y="{y}">{escape(words)}</text>')
    y += LINE + 14
    for side in SIDES:
        y = _draw_response(parts, record, side, y) + 18
    first, second = record["rewards"]
    for words in (
        f"reward of a response = beta |y| \u03a3 a d:  chosen {first:+.4f}, rejected {second:+.4f}",
        f"loss = -log sigmoid({first:+.4f} - ({second:+.4f})) = {record['loss']:.4f}; "
        f"with all tokens alike (DPO): {record['plain_loss']:.4f}",
    ):
        parts.append(f'<text x="16" y="{y}">{escape(words)}</text>')
        y += LINE
    width = LABEL + PER_LINE * CELL + 24
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {y}" width="{width}" height="{y}" role="img">\n'
        f"<title>From the judge's attention to the loss of one pair</title>\n<style>{STYLE}</style>\n"
        f'<rect class="page" width="{width}" height="{y}"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _draw_response(parts: list[str], record: Record, side: str, y: int) -> int:
    """Draws one response at height ``y``; returns the height below it."""
    shown = record[side]
    letters = " and ".join(
        f"{'A' if (prompt['chosen_is'] == 'A') == (side == 'chosen') else 'B'} in order {place}"
        for place, prompt in enumerate(record["prompts"], 1)
    )
    parts.append(f'<text class="head" x="16" y="{y}">{side} response (answer {letters})</text>')
    y += LINE + 4
    lines = [
        ("attention, order 1", shown["rounds"][0], "w", "{:.4f}"),
        ("attention, order 2", shown["rounds"][1], "w", "{:.4f}"),
        ("weight a", shown["weights"], "w", "{:.3f}"),
        ("log-ratio d", shown["ratios"], "d", "{:+.3f}"),
    ]
    for start in range(0, len(shown["tokens"]), PER_LINE):
        for place, token in enumerate(shown["tokens"][start : start + PER_LINE]):
            cut = token.strip() if len(token.strip()) <= 9 else token.strip()[:8] + "\u2026"
            parts.append(
                f'<text x="{LABEL + place * CELL + CELL / 2}" y="{y}" text-anchor="middle">{escape(cut)}</text>'
            )
        for name, values, colour, form in lines:
            y += LINE
            parts.append(f'<text class="note" x="16" y="{y}">{name}</text>')
            largest = max(map(abs, values)) or 1.0
            for place, value in enumerate(values[start : start + PER_LINE]):
                parts.append(_draw_cell(LABEL + place * CELL, y, value, largest, colour, form))
        y += LINE + 12
        x = LABEL + PER_LINE * CELL
        parts.append(f'<line class="grid" x1="16" y1="{y - 24}" x2="{x}" y2="{y - 24}"/>')
    return y


def _draw_cell(x: int, y: int, value: float, largest: float, colour: str, form: str) -> str:
    kind = colour if colour == "w" else "up" if value > 0 else "down"
    strength = 0.75 * abs(value) / largest
    return (
        f'<rect class="{kind}" x="{x + 1}" y="{y - 15}" width="{CELL - 2}" height="{LINE - 2}" '
        f'fill-opacity="{strength:.2f}"/>'
        f'<text x="{x + CELL / 2}" y="{y}" text-anchor="middle">{_format_number(value, form)}</text>'
    )


def _format_number(value: float, form: str) -> str:
    """Formats a number; zeros have no sign."""
    found = form.format(value)
    return found if float(found) else found.lstrip("+-")


# ------------------------------------------------------------------------------------------------ command


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the record and the figure, and updates the page if it is in the folder."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--folder", type=Path, default=DOCS)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="overrides, as for attnpo.fit")
    given = parser.parse_args(argv)
    with log_to_terminal():
        record = build_record(given.overrides)
        write_atomically(given.folder / f"{NAME}.json", json.dumps(record, indent=1, ensure_ascii=False) + "\n")
        write_atomically(given.folder / f"{NAME}.svg", draw_svg(record))
        page = given.folder / "judge_prompts.md"
        if page.is_file():
            write_atomically(page, insert_block(page.read_text(encoding="utf-8"), page_block(record)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
