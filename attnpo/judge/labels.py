"""The tokens of a judge's labels, as it would write them right after its prompt, and a prefill that ends there."""

from collections.abc import Sequence

from attnpo.schema import UserError
from attnpo.text.chat import ChatFormat


def label_tokens(chat: ChatFormat, prompt: str, labels: Sequence[str], key: str = "judge.labels") -> tuple[int, ...]:
    """Returns the id of each label as the model would write it after ``prompt``, a rendered text.

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


def check_prefill(chat: ChatFormat, prompt: str, prefill: str, labels: Sequence[str]) -> None:
    """Raises UserError unless the tokens of ``prompt``, which ends in ``prefill``, end there whichever label follows.

    Otherwise the position before the label would be none that a model has when it writes the label: the tokenizer drops
    blanks at the end of a text, or makes one token of the prefill's end and the label.
    """
    before, places = chat.tokenize(prompt)
    if not prefill.strip() or not places or places[-1][1] < len(prompt):
        raise UserError(
            f"judge.prefill: the judge's tokenizer strips the end of {prefill!r}, so the verdict would not follow it: "
            "expected text that ends in a character which is no blank"
        )
    for label in labels:
        whole, _ = chat.tokenize(prompt + label)
        if whole[: len(before)] != before:
            advice = f"end it before the letter's token, or begin the labels with a blank ({' ' + label!r})"
            if prefill[-1].isspace():
                cut = prefill.rstrip()
                advice = f"take judge.prefill={cut!r} and give the labels what was cut off, {prefill[len(cut) :]!r}"
            raise UserError(
                f"judge.prefill: the end of {prefill!r} becomes one token with the label {label!r}, so the verdict is "
                f"not written after it: {advice}"
            )
