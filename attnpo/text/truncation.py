"""The one truncation rule of training sequences."""

from typing import NamedTuple

from attnpo.schema import EncodedResponse


class Cut(NamedTuple):
    """Which sides of a training sequence lost tokens."""

    prompt: bool
    response: bool


def truncate(
    encoded: EncodedResponse, max_prompt_length: int, max_length: int, *, keep_end: bool = False
) -> tuple[EncodedResponse, Cut]:
    """Returns the sequence cut to length, and which sides lost tokens.

    The prompt keeps its last ``max_prompt_length`` tokens (a BOS in front goes with the rest, as in the paper's run),
    then the response keeps its first ``max_length`` less the prompt's length. The response may come out empty: the
    caller drops such a pair and counts it.

    With ``keep_end`` prompt and response keep their last ``max_length`` tokens instead, as in TRL's keep_end. Of a
    response that fills them all the first one stands for the prompt, since nothing predicts it.
    """
    prompt = encoded.prompt_ids[max(0, len(encoded.prompt_ids) - max(0, max_prompt_length)) :]
    over = len(prompt) + len(encoded.response_ids) - max_length
    if keep_end and over > 0:
        kept, left = (prompt + encoded.response_ids)[over:], max(1, len(prompt) - over)
        lost = len(encoded.response_ids) - (len(kept) - left)
        return EncodedResponse(kept[:left], kept[left:], encoded.offsets[lost:]), Cut(prompt=True, response=lost > 0)
    room = max(0, max_length - len(prompt))
    cut = Cut(prompt=len(prompt) < len(encoded.prompt_ids), response=room < len(encoded.response_ids))
    return EncodedResponse(prompt, encoded.response_ids[:room], encoded.offsets[:room]), cut
