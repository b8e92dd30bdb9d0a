"""The tokens of a judge's labels, as it would write them right after its prompt."""

from collections.abc import Sequence

from attnpo.schema import UserError
from attnpo.text.chat import ChatFormat


def label_tokens(chat: ChatFormat, prompt: str, labels: Sequence[str], key: str = "judge.labels") -> tuple[int, ...]:
    """The id of each label as the model would write it after ``prompt``, a rendered text.

    Raises UserError, naming ``key``, when a label is more than one token there and also on its own, when it is not in
    the vocabulary, or when two are the same token.
    """
    before, _ = chat.tokenize(prompt)
    found: list[int] = []
    for label in labels:
        whole, _ = chat.tokenize(prompt + label)
        alone, _ = chat.tokenize(label, start=False)
        if len(whole) == len(before) + 1 and whole[:-1] == before:
            alone = whole[-1:]
        if len(alone) != 1:
            raise UserError(f"{key}: {label!r} is {len(alone)} tokens {alone}, expected one: choose another")
        if alone[0] == chat.tokenizer.unk_token_id:
            raise UserError(
                f"{key}: {label!r} is not in the vocabulary of the judge, which reads it as "
                f"{chat.tokenizer.unk_token!r}: choose another"
            )
        if alone[0] in found:
            raise UserError(f"{key}: {tuple(labels)} are the same token {alone[0]}: choose two that differ")
        found.append(alone[0])
    return tuple(found)
