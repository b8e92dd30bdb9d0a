"""Reward model as a policy: its rewards take the place of log-probabilities, so that objectives can train it.

The reward is placed on the last token of each row and all other tokens get 0, so the sum over a response is its reward;
at beta 1, CPO's loss on the reward margin is then the Bradley-Terry loss.
"""

from collections.abc import Collection, Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from attnpo.models.backbone import eval_mode, final_hidden_states, first_position, probe_bound
from attnpo.models.generate import batch_longest_first
from attnpo.models.logps import LMHead
from attnpo.models.scored import ScoredLM
from attnpo.models.trial import right_pad_prompts
from attnpo.schema import ModelInputs, TokenStats, UserError


class RewardPolicy(ScoredLM):
    """Hugging Face sequence classification model with one label; its forward returns ``TokenStats``.

    Rows are right-padded. Raises UserError unless the logit is a linear function of the last token's final state.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        nn.Module.__init__(self)
        self.model = model
        _check_plain_head(model, _reward_head(model))
        self._first = first_position(model)

    def head(self) -> LMHead:
        """Raises UserError, because a reward model has no vocabulary head."""
        raise UserError(
            f"{type(self.model).__name__} is a reward model and has no distribution over tokens: set model.reward="
            "false, or choose an objective that does not need one"
        )

    def forward(
        self,
        inputs: ModelInputs,
        response_ids: Int[Tensor, "rows R"],
        response_mask: Bool[Tensor, "rows R"],
        requests: Collection[str] = frozenset({"logps"}),
        other: tuple[Float[Tensor, "rows R e"], LMHead] | None = None,
    ) -> TokenStats:
        """Returns ``logps`` with each row's reward on its last response token and 0 elsewhere.

        Raises ``UserError`` for other requests.
        """
        more = sorted(set(requests) - {"logps"})
        if more or inputs.segments is not None:
            asked = ", ".join(more) or "packed rows"
            raise UserError(f"a reward model returns only rewards of padded rows, but was asked for {asked}")
        places = {"attention_mask": None, "position_ids": inputs.position_ids + self._first}
        states = final_hidden_states(self.model.base_model, inputs.input_ids, **places).flatten(0, 1)
        rows = torch.arange(len(response_mask), device=response_mask.device)
        last = response_mask.sum(-1) - 1
        # The state that predicts a token is that of the token before it.
        rewards = _reward_head(self.model)(states.index_select(0, inputs.predict_index[rows, last] + 1)).squeeze(-1)
        return TokenStats(logps=rewards.new_zeros(response_mask.shape).index_put((rows, last), rewards))


@torch.inference_mode()
def score_conversations(
    model: PreTrainedModel, conversations: Sequence[Sequence[int]], token_budget: int
) -> Float[Tensor, " conversations"]:
    """Computes each conversation's reward as float64 on the CPU, in batches of at most ``token_budget`` tokens."""
    head = _reward_head(model)
    _check_plain_head(model, head)
    found = torch.zeros(len(conversations), dtype=torch.float64)
    with eval_mode(model):
        for batch in batch_longest_first([len(ids) for ids in conversations], lambda length: token_budget // length):
            ids, last = right_pad_prompts([conversations[index] for index in batch], head.weight.device)
            states = final_hidden_states(model.base_model, ids)
            found[batch] = head(states[torch.arange(len(batch), device=ids.device), last]).squeeze(-1).double().cpu()
    return found


def _reward_head(model: PreTrainedModel) -> nn.Linear:
    """Returns the linear layer with a single output outside the backbone."""
    heads = [part for part in model.children() if isinstance(part, nn.Linear) and part.out_features == 1]
    if len(heads) != 1:
        raise UserError(
            f"model.reward=true: {type(model).__name__} has {len(heads)} linear heads with a single output, but "
            "exactly one is needed: choose another base model"
        )
    return heads[0]


@torch.no_grad()
def _check_plain_head(model: PreTrainedModel, head: nn.Linear) -> None:
    """Checks on one row that the model's reward is ``head`` applied to the last token's final state.

    Raises:
        UserError: the reward differs.
    """
    ids = torch.arange(3, 9, device=head.weight.device)[None]
    pad, model.config.pad_token_id = model.config.pad_token_id, None  # one row, of which every token counts
    try:
        with eval_mode(model):
            expected = model(input_ids=ids, use_cache=False).logits[0]
            found = head(final_hidden_states(model.base_model, ids)[0, -1])
    finally:
        model.config.pad_token_id = pad
    gap = float((found - expected).abs().max())
    if not gap <= probe_bound(expected):
        raise UserError(
            f"model.reward=true: the reward of {type(model).__name__} differs by {gap:.3g} from the output of its "
            "head on the last token's final state: choose another base model"
        )
