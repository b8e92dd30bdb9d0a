"""Trains the base model from scratch: a small Llama that learns to answer, to judge and to score parts.

The judge task is learnt suddenly, so training continues in blocks until the judge reaches the required accuracy (its
gate) on pairs of the base's own samples. The result is a plain Hugging Face folder.
"""

import logging
import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from attnpo.lab.testbed import words
from attnpo.lab.testbed.grammar import Grammar, ReviewPrompt
from attnpo.lab.testbed.recipes import BaseRecipe
from attnpo.lab.testbed.sampling import batches_by_length, evaluating, sample_answers
from attnpo.lab.testbed.tokenizer import (
    END,
    SCORE_TEMPLATE,
    VERDICTS,
    build_tokenizer,
    chat_prompts,
    encode_all,
    judge_prompts,
    token_ids,
)
from attnpo.training.export import add_older_keys

logger = logging.getLogger(__name__)

ANSWER, JUDGE, SCORE = range(3)


# ------------------------------------------------------------------------------------------------ rows of the tasks


@dataclass(frozen=True)
class TaskRow:
    """Token ids of one row, the positions of its target tokens, and its task."""

    ids: list[int]
    places: list[int]
    task: int


@dataclass(frozen=True)
class PaddedBatch:
    """Right-padded ids and, for each target, its row, the column that predicts it, its token and its task."""

    ids: Int[Tensor, "rows tokens"]
    row: Int[Tensor, " targets"]
    column: Int[Tensor, " targets"]
    targets: Int[Tensor, " targets"]
    tasks: Int[Tensor, " targets"]


class TaskSampler:
    """Sampler of rows for all tasks from one seeded stream, with prompts of the training split.

    `damage`: share of clauses that are damaged in reviews to judge or score. The base will judge its own samples,
    which contain errors that never occur in the grammar's reviews.
    """

    def __init__(
        self, grammar: Grammar, tokenizer: PreTrainedTokenizerFast, rng: random.Random, damage: float = 0.0
    ) -> None:
        self.damage, self.vocabulary = damage, grammar.vocabulary()
        self.grammar, self.tokenizer, self.rng = grammar, tokenizer, rng
        self.shorten(1.0)
        self.prompts = grammar.prompts("train")
        self.end, self.separator = token_ids(tokenizer, [END, words.PART_SEPARATOR])
        self.verdicts = token_ids(tokenizer, VERDICTS)
        self.scores = token_ids(tokenizer, words.PART_SCORES)

    def shorten(self, scale: float) -> None:
        """Scales the length of subsequent reviews by `scale`, dropping fillers first."""
        whole = self.grammar
        self.scale = scale
        self.drawn = replace(
            whole,
            min_clauses=max(1, round(scale * whole.min_clauses)),
            max_clauses=max(1, round(scale * whole.max_clauses)),
            p_sentiment=min(max(whole.p_sentiment, 1.0 - whole.p_neutral), whole.p_sentiment / scale),
        )

    def _review(self) -> tuple[ReviewPrompt, str]:
        prompt = self.rng.choice(self.prompts)
        return prompt, self.drawn.sample_review(self.rng, prompt)

    def _with_slips(self, prompt: ReviewPrompt, review: str) -> str:
        """Damages some clauses of a review: drops or replaces a word, merges two clauses, or uses a wrong topic."""
        clauses = [clause.split() for clause in review.removesuffix(" .").split(" . ")]
        for index, clause in enumerate(clauses):
            if self.rng.random() >= self.damage:
                continue
            kind, place = self.rng.randrange(4), self.rng.randrange(len(clause))
            if kind == 0:
                del clause[place]
            elif kind == 1:
                clause[place] = self.rng.choice(self.vocabulary)
            elif kind == 2:
                clauses[index] = clause[:place] + self.rng.choice(clauses)
            else:
                other = replace(prompt, topic=self.rng.choice(list(words.TOPICS)))
                clauses[index] = self.grammar.sample_review(self.rng, other).split(" . ")[0].split()
        return "".join(" ".join(clause).removesuffix(" .") + " . " for clause in clauses if clause).rstrip()

    def answer_rows(self, count: int) -> list[TaskRow]:
        """Samples prompts with a review; every review token and the end token is a target."""
        drawn = [self._review() for _ in range(count)]
        heads = chat_prompts(self.tokenizer, [prompt.text for prompt, _ in drawn])
        tails = [[*ids, self.end] for ids in encode_all(self.tokenizer, [review for _, review in drawn])]
        return [
            TaskRow(head + tail, list(range(len(head), len(head) + len(tail))), ANSWER)
            for head, tail in zip(heads, tails, strict=True)
        ]

    def judge_rows(self, count: int, min_gap: float = 0.0) -> list[TaskRow]:
        """Samples judge prompts with two reviews whose rewards differ, by at least `min_gap`; targets are verdicts."""
        rows: list[tuple[str, str, str]] = []
        verdicts: list[int] = []
        while len(rows) < count:
            prompt, first = self._review()
            first = self._with_slips(prompt, first)
            second = self._with_slips(prompt, self.drawn.sample_review(self.rng, prompt))
            gap = (
                self.grammar.true_reward(first, prompt.topic).reward
                - self.grammar.true_reward(second, prompt.topic).reward
            )
            if gap == 0 or abs(gap) < min_gap:
                continue
            rows.append((prompt.text, first, second))
            verdicts.append(self.verdicts[0] if gap > 0 else self.verdicts[1])
        splice = [self.rng.random() < 0.5 for _ in rows]
        ids = judge_prompts(self.tokenizer, rows, splice)
        return [TaskRow([*row, verdict], [len(row)], JUDGE) for row, verdict in zip(ids, verdicts, strict=True)]

    def score_rows(self, count: int) -> list[TaskRow]:
        """Samples reviews followed by their parts and importance digits; each digit and the next token are targets."""
        drawn = [(p, self._with_slips(p, review)) for p, review in (self._review() for _ in range(count))]
        contents = [SCORE_TEMPLATE.format(question=prompt.text, answer=review) for prompt, review in drawn]
        rows: list[TaskRow] = []
        for head, (prompt, review) in zip(chat_prompts(self.tokenizer, contents), drawn, strict=True):
            row, targets = list(head), list[int]()
            for part, score in self.grammar.part_scores(review, prompt.topic):
                if len(row) > len(head):
                    row.append(self.separator)
                row.extend(encode_all(self.tokenizer, [part])[0])
                targets.extend((len(row), len(row) + 1))
                row.append(self.scores[score - 1])
            row.append(self.end)
            rows.append(TaskRow(row, targets, SCORE))
        return rows


def pad_rows(rows: Sequence[TaskRow]) -> PaddedBatch:
    """Pads rows on the right to a common length and shifts target positions to the columns that predict them."""
    longest = max(len(row.ids) for row in rows)
    ids = torch.tensor([[*row.ids, *[0] * (longest - len(row.ids))] for row in rows])
    row = torch.tensor([index for index, task_row in enumerate(rows) for _ in task_row.places])
    column = torch.tensor([place for task_row in rows for place in task_row.places])
    tasks = torch.tensor([task_row.task for task_row in rows for _ in task_row.places])
    return PaddedBatch(ids, row, column - 1, ids[row, column], tasks)


# ------------------------------------------------------------------------------------------------ the base


def new_model(recipe: BaseRecipe, tokenizer: PreTrainedTokenizerFast, seed: int) -> LlamaForCausalLM:
    """Creates an untrained model with the recipe's architecture, without changing the global random state."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=recipe.width,
        intermediate_size=recipe.mlp,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.heads,
        max_position_embeddings=recipe.max_positions,
        initializer_range=recipe.initializer_range,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


def build_base(grammar: Grammar, recipe: BaseRecipe, folder: Path, *, seed: int = 0) -> dict[str, float | int]:
    """Trains a base, saves it to `folder` in Hugging Face format, and returns a report.

    The report includes the results of `measure_base` and final losses. `gate_passed`: whether the judge reached its
    gate in the worse of the two prompt assemblies.
    """
    started = time.monotonic()
    tokenizer = build_tokenizer(grammar, recipe.merges, recipe.max_positions)
    model = new_model(recipe, tokenizer, seed)
    rng = random.Random(f"base {seed}")
    trainer = _Trainer(model, recipe, TaskSampler(grammar, tokenizer, rng, recipe.damage))
    losses = trainer.block(recipe.steps, recipe.learning_rate, recipe.warmup, recipe.easy_length)
    done = recipe.steps
    while True:
        measured = measure_base(model, tokenizer, grammar, recipe, seed=seed)
        worst = min(measured["judge_text"], measured["judge_ids"])
        if worst >= recipe.judge_gate or done >= recipe.max_steps:
            break
        block = min(recipe.extra_steps, recipe.max_steps - done)
        logger.info("testbed base: judge at %.3f after %d steps, %d more", worst, done, block)
        losses = trainer.block(block, 0.5 * recipe.learning_rate, warmup=5)
        done += block
    passed = worst >= recipe.judge_gate
    if not passed:
        logger.warning(
            "testbed base: judge at %.3f, under its gate %.2f after %d steps", worst, recipe.judge_gate, done
        )
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        do_sample=True,
        temperature=1.0,
        max_new_tokens=recipe.answer_tokens,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    add_older_keys(folder)
    return {
        "seed": seed,
        "steps": done,
        "seconds": time.monotonic() - started,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        **measured,
        "gate_passed": passed,
        **dict(zip(("answer_loss", "judge_loss", "score_loss"), losses, strict=True)),
    }


class _Trainer:
    """Training loop with AdamW on the sum of the three tasks' mean losses; each block has its own cosine schedule."""

    def __init__(self, model: LlamaForCausalLM, recipe: BaseRecipe, tasks: TaskSampler) -> None:
        self.model, self.recipe, self.tasks = model, recipe, tasks
        self.optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=recipe.learning_rate,
            betas=(recipe.beta1, recipe.beta2),
            weight_decay=recipe.weight_decay,
            fused=True,
        )

    def block(self, steps: int, peak: float, warmup: int, length: float = 1.0) -> tuple[float, float, float]:
        """Trains for `steps`; in the easy part, reviews grow from the share `length` of their length to full length.

        Returns the mean loss of each task over the last tenth of the steps.
        """
        self.model.train()
        recent: list[tuple[float, ...]] = []
        for step in range(steps):
            rate = peak * _schedule(step, steps, warmup, self.recipe.final_fraction)
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            easy = self.recipe.easy_share * steps
            self.tasks.shorten(length ** min(1.0, 2.0 - 2.0 * step / easy) if step < easy else 1.0)
            losses = self._losses(self.recipe.easy_gap if step < easy else 0.0)
            self.optimizer.zero_grad(set_to_none=True)
            torch.stack(losses).sum().backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.clip)
            self.optimizer.step()
            if step >= steps - max(1, steps // 10):
                recent.append(tuple(loss.item() for loss in losses))
            if (step + 1) % 50 == 0:
                logger.info("step %d: answer %.3f judge %.3f score %.3f", step + 1, *(v.item() for v in losses))
        self.model.train(False)
        answer, judge, score = (sum(column) / len(recent) for column in zip(*recent, strict=True))
        return answer, judge, score

    def _losses(self, min_gap: float) -> list[torch.Tensor]:
        """Returns the mean cross-entropy of each task over newly sampled rows, batched by length."""
        recipe, tasks = self.recipe, self.tasks
        answer, judge, score = (
            round(count / tasks.scale) for count in (recipe.answer_rows, recipe.judge_rows, recipe.score_rows)
        )
        rows = tasks.answer_rows(answer) + tasks.judge_rows(judge, min_gap) + tasks.score_rows(score)
        rows.sort(key=lambda row: len(row.ids))
        size = math.ceil(len(rows) / 3)  # three batches: little padding, little overhead
        parts = [pad_rows(rows[start : start + size]) for start in range(0, len(rows), size)]
        losses = torch.cat([_target_losses(self.model, part) for part in parts])
        owner = torch.cat([part.tasks for part in parts])
        return [losses[owner == task].mean() for task in (ANSWER, JUDGE, SCORE)]


def _target_losses(model: LlamaForCausalLM, rows: PaddedBatch) -> Float[torch.Tensor, " targets"]:
    # Right padding needs no mask: causal attention never sees it. The head runs on target positions only.
    hidden = model.model(input_ids=rows.ids, use_cache=False).last_hidden_state
    return functional.cross_entropy(model.lm_head(hidden[rows.row, rows.column]), rows.targets, reduction="none")


def _schedule(step: int, steps: int, warmup: int, final: float) -> float:
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * progress))


def measure_base(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    grammar: Grammar,
    recipe: BaseRecipe,
    *,
    seed: int,
) -> dict[str, float]:
    """Measures judge accuracy in both prompt assemblies and the quality of samples, on validation prompts."""
    prompts = grammar.prompts("validation")
    prompts = tuple(prompts[index % len(prompts)] for index in range(2 * recipe.judge_pairs))
    doubled = [prompt for prompt in prompts for _ in range(2)]
    answers = sample_answers(
        model,
        tokenizer,
        [prompt.text for prompt in doubled],
        seed=1_000_003 + seed,
        max_new_tokens=recipe.answer_tokens,
    )
    scored = [grammar.true_reward(text, p.topic) for text, p in zip(answers.texts, doubled, strict=True)]
    rewards = torch.tensor([score.reward for score in scored])
    pairs = [
        (doubled[i], answers.texts[i], answers.texts[i + 1], scored[i].reward - scored[i + 1].reward)
        for i in range(0, len(doubled), 2)
        if answers.ended[i] and answers.ended[i + 1]
    ]
    clear = [pair for pair in pairs if abs(pair[3]) >= recipe.judge_margin][: recipe.judge_pairs]
    judge_text, consistency_text = judge_accuracy(model, tokenizer, clear, spliced=False)
    judge_ids, consistency_ids = judge_accuracy(model, tokenizer, clear, spliced=True)
    clauses = sum(score.clauses for score in scored)
    tokens = sum(answers.lengths)
    finals = sum(text.endswith(".") for text in answers.texts)
    return {
        "judge_text": judge_text,
        "judge_ids": judge_ids,
        "consistency_text": consistency_text,
        "consistency_ids": consistency_ids,
        "reward": rewards.mean().item(),
        "reward_sd": rewards.std().item(),
        "polarity": sum(score.polarity for score in scored) / len(scored),
        "broken_rate": sum(score.broken for score in scored) / max(1, clauses),
        "mean_length": tokens / len(scored),
        "ended_rate": sum(answers.ended) / len(scored),
        "full_stop_share": finals / max(1, tokens),
    }


def judge_accuracy(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    pairs: Sequence[tuple[ReviewPrompt, str, str, float]],
    *,
    spliced: bool,
) -> tuple[float, float]:
    """Returns the share of correct verdicts over both orders and the share of consistent pairs; 0 without pairs.

    A verdict is correct if the better answer gets the larger logit. `pairs`: prompt, two answers, true reward gap.
    """
    if not pairs:
        return 0.0, 0.0
    rows = [(prompt.text, first, second) for prompt, first, second, _ in pairs]
    rows += [(prompt.text, second, first) for prompt, first, second, _ in pairs]
    prefers_first = _prefers_first(model, tokenizer, judge_prompts(tokenizer, rows, [spliced] * len(rows)))
    truth = torch.tensor([gap > 0 for *_, gap in pairs])
    forward, backward = prefers_first[: len(pairs)], ~prefers_first[len(pairs) :]
    right = torch.cat([forward == truth, backward == truth]).double().mean().item()
    return right, (forward == backward).double().mean().item()


def _prefers_first(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, ids: Sequence[Sequence[int]]
) -> torch.Tensor:
    first, second = token_ids(tokenizer, VERDICTS)
    preferred = torch.zeros(len(ids), dtype=torch.bool)
    with evaluating(model):
        for chosen in batches_by_length(ids, 128):
            logits = model(input_ids=torch.tensor([ids[i] for i in chosen]), logits_to_keep=1).logits[:, -1]
            preferred[chosen] = logits[:, first] > logits[:, second]
    return preferred
