"""AttentionPO in plain PyTorch and transformers: the whole method in one file, without importing attnpo.

    python -m experiments.minimal MODEL PAIRS.jsonl FOLDER [--beta 0.1] [--lr 1e-6] [--epochs 1] [--pairs 4] [--layer 0]

MODEL is a causal LM with a chat template, PAIRS has rows of ``prompt``, ``chosen`` and ``rejected`` texts, and the
trained policy is saved to FOLDER. The frozen reference judges each pair in both orders. Its attention from the verdict
position becomes token weights, which multiply the log-ratios in the DPO loss. Responses are processed one at a time,
without caching or truncation. ``python -m attnpo.fit`` does the same at scale, and tests/test_minimal.py checks that
both give the same losses.
"""

import argparse
import copy
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers import PreTrainedTokenizerFast as Tokenizer

JUDGE = """Which of two answers helps the person who asked more?

[request]
{question}

[answer A]
{answer_a}

[answer B]
{answer_b}

Reply with one letter, A or B."""
SINK, LEAST = 1, 5  # the first K tokens get the mean weight in responses of at least K' tokens
SIDES = ("chosen", "rejected")
Row = dict[str, str]


def render(tokenizer: Tokenizer, *turns: str) -> str:
    """Formats a conversation, user first, with the chat template; adds the assistant's header after a user turn."""
    roles = [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(turns)]
    return str(tokenizer.apply_chat_template(roles, tokenize=False, add_generation_prompt=len(turns) % 2 == 1))


def encode(tokenizer: Tokenizer, prompt: str, response: str) -> tuple[list[int], list[int]]:
    """Returns the token ids of the prompt, and of the response including its end of turn."""
    before, whole = render(tokenizer, prompt), render(tokenizer, prompt, response)
    prompt_ids = tokenizer(before, add_special_tokens=False)["input_ids"]
    ids = tokenizer(whole, add_special_tokens=False)["input_ids"]
    if ids[: len(prompt_ids)] != prompt_ids or tokenizer.eos_token_id not in ids[len(prompt_ids) :]:
        raise SystemExit(f"this script does not support the model's chat template: {whole!r}")
    end = ids.index(tokenizer.eos_token_id, len(prompt_ids))
    return prompt_ids, ids[len(prompt_ids) : end + 1]


@torch.no_grad()
def read_attention(
    judge: nn.Module, tokenizer: Tokenizer, wording: str, question: str, answers: Sequence[str], layer: int
) -> list[tuple[list[int], Tensor]]:
    """Returns the token ids of both answers and the attention that the verdict position pays to them, each [n]."""
    a, b = (answer.strip() for answer in answers)
    before, between, after = re.split(r"\{answer_[ab]\}", wording)
    before = before.replace("{question}", question)
    text = before + a + between + b + after
    full = render(tokenizer, text)
    shift = full.index(text)
    read = tokenizer(full, add_special_tokens=False, return_offsets_mapping=True)
    input_ids = torch.tensor([read["input_ids"]])
    maps = judge(input_ids=input_ids, output_attentions=True).attentions  # of every layer, [1 heads T T]
    row = maps[layer][0, :, -1].mean(dim=0)  # the last token is the verdict position
    found = []
    for begin, answer in ((shift + len(before), a), (shift + len(before + a + between), b)):
        end = begin + len(answer)
        held = [t for t, (start, stop) in enumerate(read["offset_mapping"]) if start < end and stop > begin]
        found.append(([read["input_ids"][t] for t in held], row[held]))
    return found


def fix_sink(weights: Tensor) -> Tensor:
    """Sets the first K weights to the mean weight and rescales the others so that the sum stays 1."""
    count = len(weights)
    if count < LEAST:
        return weights
    rest = weights[SINK:] / weights[SINK:].sum() * (count - SINK) / count
    return torch.cat([torch.full((SINK,), 1 / count, dtype=weights.dtype), rest])


def align(source: Sequence[int], target: Sequence[int]) -> list[tuple[int, int]]:
    """Returns the index pairs of equal tokens in an alignment of minimal edit distance."""
    cost = [[i + j if not i * j else 0 for j in range(len(target) + 1)] for i in range(len(source) + 1)]
    for i, a in enumerate(source, 1):
        for j, b in enumerate(target, 1):
            cost[i][j] = min(cost[i - 1][j - 1] + (a != b), cost[i - 1][j] + 1, cost[i][j - 1] + 1)
    i, j, pairs = len(source), len(target), []
    while i and j:
        if source[i - 1] == target[j - 1] and cost[i][j] == cost[i - 1][j - 1]:
            i, j = i - 1, j - 1
            pairs.append((i, j))
        elif cost[i][j] == cost[i - 1][j - 1] + 1:
            i, j = i - 1, j - 1
        elif cost[i][j] == cost[i - 1][j] + 1:
            i -= 1
        else:
            j -= 1
    return pairs[::-1]


def weigh(judge: nn.Module, tokenizer: Tokenizer, wording: str, row: Row, layer: int) -> dict[str, tuple[Tensor, int]]:
    """Returns for each response its weights on the training tokens [m], and |y|, its number of judge tokens."""
    read = partial(read_attention, judge, tokenizer, wording, row["prompt"], layer=layer)
    chosen_first = read([row["chosen"], row["rejected"]])
    rejected_first = read([row["rejected"], row["chosen"]])[::-1]
    weighed = {}
    for side, (ids, first), (again, second) in zip(SIDES, chosen_first, rejected_first, strict=True):
        if ids != again:
            raise SystemExit(f"this response is tokenized differently in the two orders: {row[side]!r}")
        mean = (first + second) / 2
        weights = fix_sink(mean / mean.sum())
        target = encode(tokenizer, row["prompt"], row[side])[1]
        carried = torch.zeros(len(target), dtype=weights.dtype)
        for i, j in align(ids, target):
            carried[j] = weights[i]
        weighed[side] = (carried, len(ids))
    return weighed


def token_logps(model: nn.Module, prompt_ids: list[int], response_ids: list[int]) -> Tensor:
    """Returns the log-probability of every response token, shape [m], in nats."""
    input_ids = torch.tensor([prompt_ids + response_ids])
    logits = model(input_ids=input_ids).logits[0, len(prompt_ids) - 1 : -1]
    return F.log_softmax(logits, dim=-1).gather(1, torch.tensor(response_ids)[:, None])[:, 0]


def twdpo_loss(ratios: dict[str, Tensor], weighed: dict[str, tuple[Tensor, int]], beta: float) -> Tensor:
    """Returns -log sigmoid(beta |y_w| sum_t a_wt d_wt - beta |y_l| sum_t a_lt d_lt), d = log pi - log ref."""
    chosen, rejected = (beta * weighed[side][1] * (weighed[side][0] * ratios[side]).sum() for side in SIDES)
    return -F.logsigmoid(chosen - rejected)


@dataclass(frozen=True)
class Settings:
    """Training settings. ``pairs``: pairs per optimizer step. ``layer``: counted from 1; 0 is the last."""

    beta: float = 0.1
    lr: float = 1e-6
    epochs: int = 1
    pairs: int = 4
    layer: int = 0


def train(model: nn.Module, tokenizer: Tokenizer, rows: Sequence[Row], wording: str, how: Settings) -> Iterator[float]:
    """Trains ``model`` in place; yields the loss of every optimizer step."""
    reference = copy.deepcopy(model).eval().requires_grad_(False)
    model.eval()  # no dropout: policy and reference are the same function at the first step
    known = []
    for row in rows:
        ids = {side: encode(tokenizer, row["prompt"], row[side]) for side in SIDES}
        with torch.no_grad():
            frozen = {side: token_logps(reference, *ids[side]) for side in SIDES}
        known.append((ids, frozen, weigh(reference, tokenizer, wording, row, how.layer - 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=how.lr, weight_decay=0.0)
    for _ in range(how.epochs):
        for start in range(0, len(known) - how.pairs + 1, how.pairs):
            losses = []
            for ids, frozen, weighed in known[start : start + how.pairs]:
                ratios = {side: token_logps(model, *ids[side]) - frozen[side] for side in SIDES}
                losses.append(twdpo_loss(ratios, weighed, how.beta))
            loss = torch.stack(losses).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            yield loss.item()


def main() -> None:
    """Parses the command line, trains, prints the loss of every step, and saves the policy."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("file", type=Path, metavar="PAIRS.jsonl")
    parser.add_argument("output", metavar="FOLDER")
    for name, default in asdict(Settings()).items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    given = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32, attn_implementation="eager")
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    rows = [json.loads(line) for line in given.file.read_text(encoding="utf-8").splitlines()]
    how = Settings(**{name: getattr(given, name) for name in asdict(Settings())})
    for step, loss in enumerate(train(model, tokenizer, rows, JUDGE, how), 1):
        print(f"step {step}: loss {loss:.6f}", flush=True)
    model.save_pretrained(given.output)
    tokenizer.save_pretrained(given.output)


if __name__ == "__main__":
    main()
