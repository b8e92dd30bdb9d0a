"""From what a judge gave for one prompt to the two responses' own rows."""

import torch
from jaxtyping import Float
from torch import Tensor

from attnpo.schema import SIDES, JudgePrompt, JudgeReading, Round, TokenWeights, UserError


def cut_round(prompt: JudgePrompt, rows: Float[Tensor, "layers T"], reading: JudgeReading) -> Round:
    """The round of one prompt: the spans of both responses cut out of ``rows``, and the verdict of ``reading``.

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
    )
