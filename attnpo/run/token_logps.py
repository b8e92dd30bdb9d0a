"""Log-probabilities of the first training pairs' tokens under the trained policy, for the run's page."""

from collections.abc import Sequence

import torch

from attnpo.cli.progress import phase
from attnpo.data.collate import TrainingExample, bare_rows
from attnpo.models.layouts import padded
from attnpo.models.scored import ScoredLM
from attnpo.run.base import BaseModel


@phase("log-probabilities of the first pairs")
def first_logps(
    base: BaseModel, policy: ScoredLM, examples: Sequence[TrainingExample]
) -> list[tuple[list[float], list[float]]]:
    """Of the ``examples`` the log-probability of each response token, chosen and rejected.

    None of a reward model, whose numbers on tokens are rewards.
    """
    if base.spec.reward:
        return []
    sides = [side for example in examples for side in example.sides]
    found: list[list[float]] = []
    policy.eval().to(base.device)
    for side in sides:
        group = bare_rows([(side.prompt_ids, side.response_ids)], padded, base.chat.rows.pad_id).to(base.device)
        if group.inputs is None:
            raise ValueError("the rows have no model inputs")
        with torch.no_grad(), base.autocast():
            stats = policy(group.inputs, group.response_ids, group.response_mask)
        found.append(stats.logps[0][group.response_mask[0]].double().cpu().tolist())
    return list(zip(found[::2], found[1::2], strict=True))
