"""From what a judge gave for one prompt to the two responses' own rows."""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from attnpo.judge.base import JudgePrompt, JudgeReading, LoadedJudge
from attnpo.schema import SIDES, PairWeights, PreferencePair, Round, TokenWeights, UserError


def judge_rounds(
    source: str,
    pairs: Sequence[PreferencePair],
    judge: object,
    rows_of: Callable[[JudgeReading], Float[Tensor, "layers T"]],
    layers: Sequence[int],
    *,
    per_head: bool = False,
    rollout: bool = False,
) -> list[PairWeights]:
    """Returns both judge rounds of each pair, with ``rows_of`` what the judge gave; all prompts go to it in one call.

    UserError naming the ``source`` when there is no judge.
    """
    if not isinstance(judge, LoadedJudge):
        raise UserError(f"weights={source} reads a judge: set judge.path and judge.template_file")
    prompts = [prompt for pair in pairs for prompt in judge.prompts.build(pair)]
    readings = judge.model.read(
        [prompt.input_ids for prompt in prompts],
        layers=layers,
        per_head=per_head,
        rollout=rollout,
        verdict=judge.verdict,
        label_ids=judge.prompts.label_ids if judge.verdict else None,
    )
    cut = [cut_round(prompt, rows_of(reading), reading) for prompt, reading in zip(prompts, readings, strict=True)]
    return [PairWeights(pair.pair_id, (cut[2 * i], cut[2 * i + 1])) for i, pair in enumerate(pairs)]


def cut_round(prompt: JudgePrompt, rows: Float[Tensor, "layers T"], reading: JudgeReading) -> Round:
    """Returns the round of one prompt: the spans of both responses cut out of ``rows``, and the verdict of ``reading``.

    UserError naming the pair and the side when a span is empty or outside the rows.
    """
    sides = {}
    for side in SIDES:
        start, end = prompt.spans[side]
        if not 0 <= start < end <= rows.shape[-1]:
            raise UserError(
                f"pair {prompt.pair_id}, {side}: expected a judge span inside {rows.shape[-1]} tokens, got "
                f"[{start}, {end}); raise judge.max_length or drop the pair"
            )
        sides[side] = TokenWeights(
            token_ids=torch.tensor(prompt.input_ids[start:end], dtype=torch.long),
            offsets=torch.tensor(prompt.offsets[side], dtype=torch.long).reshape(-1, 2),
            weights=rows[:, start:end].detach().to("cpu", torch.float32).contiguous(),
        )
    logits = None if reading.verdict_logits is None else reading.verdict_logits.detach().to("cpu", torch.float32)
    return Round(
        chosen_is_a=prompt.chosen_is_a,
        chosen=sides["chosen"],
        rejected=sides["rejected"],
        verdict_logits=logits,
        verdict_token=None if reading.verdict_token is None else int(reading.verdict_token),
        cut=prompt.cut,
        trace=reading.trace,
    )
