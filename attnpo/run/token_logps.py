"""Log-probabilities of the first training pairs' tokens under the trained policy, for the run's page."""

import torch

from attnpo.cli.progress import phase
from attnpo.data.collate import bare_rows
from attnpo.models.layouts import padded
from attnpo.models.scored import ScoredLM
from attnpo.run.inputs import Inputs
from attnpo.run.models import autocast
from attnpo.system.machine import device_of


@phase("log-probabilities of the first pairs")
def first_logps(inputs: Inputs, policy: ScoredLM, count: int) -> list[tuple[list[float], list[float]]]:
    """Of the first ``count`` training pairs the log-probability of each response token, chosen and rejected.

    None of a reward model, whose numbers on tokens are rewards.
    """
    if inputs.context.model.reward:
        return []
    cfg, pad_id = inputs.context.cfg, inputs.context.chat.rows.pad_id
    sides = [side for example in inputs.examples["train"].examples[:count] for side in example.sides]
    found: list[list[float]] = []
    policy.eval().to(device_of(cfg.trainer.accelerator))
    for side in sides:
        group = bare_rows([(side.prompt_ids, side.response_ids)], padded, pad_id).to(device_of(cfg.trainer.accelerator))
        if group.inputs is None:
            raise ValueError("the rows have no model inputs")
        with torch.no_grad(), autocast(cfg):
            stats = policy(group.inputs, group.response_ids, group.response_mask)
        found.append(stats.logps[0][group.response_mask[0]].double().cpu().tolist())
    return list(zip(found[::2], found[1::2], strict=True))
