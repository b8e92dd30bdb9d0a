"""The testbed's word-level fast tokenizer, its chat template and the task texts that the base is taught.

Like the vocabularies of Llama 3 it has one token for a full stop directly followed by a newline. Text assembly
of a judge prompt therefore merges the end of a review with the delimiter, and ids assembly does not.
"""

from collections.abc import Sequence
from typing import cast

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from attnpo.testbed import words
from attnpo.testbed.grammar import Grammar

PAD, UNK, BOS, USER, ASSISTANT, END = "<pad>", "<unk>", "<bos>", "<user>", "<assistant>", "<end>"
SPECIALS = (PAD, UNK, BOS, USER, ASSISTANT, END)
VERDICTS = ("A", "B")

JUDGE_TEMPLATE = (
    "judge two reviews of {question}\nreview A :\n{answer_a}\nreview B :\n{answer_b}\nwhich is better , A or B ?"
)
SCORE_TEMPLATE = "score the parts of this review of {question}\n{answer}"

CHAT_TEMPLATE = (
    "{{ '<bos>' }}{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ '<user> ' + message['content'] }}"
    "{% elif message['role'] == 'assistant' %}{{ '<assistant> ' + message['content'] + '<end>' }}"
    "{% else %}{{ raise_exception('the testbed chat knows the roles user and assistant only') }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


def build_tokenizer(grammar: Grammar) -> PreTrainedTokenizerFast:
    """A fast tokenizer over exactly the words of the grammar and of the task texts; `<end>` ends an answer."""
    task_words = {word for text in (JUDGE_TEMPLATE, SCORE_TEMPLATE) for word in text.split() if "{" not in word}
    task_words.update((*VERDICTS, *words.PART_SCORES, words.PART_SEPARATOR))
    vocabulary = [*SPECIALS, "\n", ".\n", *sorted(task_words.union(grammar.vocabulary()))]
    core = Tokenizer(models.WordLevel({token: index for index, token in enumerate(vocabulary)}, unk_token=UNK))
    # Matches are the tokens and what lies between them (spaces) is dropped, so offsets stay those of the text.
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"\.\n|\n|[^\s]+"), behavior="removed", invert=True)
    core.decoder = decoders.Sequence(
        [
            decoders.WordPiece(prefix="\0", cleanup=False),  # words joined by one space
            decoders.Fuse(),
            decoders.Replace(" \n ", "\n"),
            decoders.Replace(".\n ", ".\n"),
        ]
    )
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=core,
        pad_token=PAD,
        unk_token=UNK,
        bos_token=BOS,
        eos_token=END,
        additional_special_tokens=[USER, ASSISTANT],
        clean_up_tokenization_spaces=False,
        padding_side="left",
        model_max_length=512,
        model_input_names=["input_ids", "attention_mask"],
        chat_template=CHAT_TEMPLATE,
    )


def encode_all(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of every text, nothing added."""
    if not texts:
        return []
    encoded = tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False)
    return cast("list[list[int]]", encoded["input_ids"])


def token_ids(tokenizer: PreTrainedTokenizerFast, tokens: Sequence[str]) -> list[int]:
    """The id of every token, which must be whole entries of the vocabulary."""
    return cast("list[int]", tokenizer.convert_tokens_to_ids(list(tokens)))


def chat_prompts(tokenizer: PreTrainedTokenizerFast, contents: Sequence[str]) -> list[list[int]]:
    """Ids of one user message each, up to and including the generation prompt."""
    rendered = [
        cast(
            str,
            tokenizer.apply_chat_template(
                [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
            ),
        )
        for content in contents
    ]
    return encode_all(tokenizer, rendered)


def judge_prompts(
    tokenizer: PreTrainedTokenizerFast, rows: Sequence[tuple[str, str, str]], splice: Sequence[bool]
) -> list[list[int]]:
    """Ids of judge prompts for rows (question, answer A, answer B), ending in the generation prompt.

    `splice` chooses the assembly per row: False tokenises the rendered text (full stop and newline merge), True
    splices the reviews' own ids between separately tokenised template parts (they do not).
    """
    head, middle, tail = _judge_parts()
    texts: list[str] = []
    counts: list[int] = []
    for (question, first, second), spliced in zip(rows, splice, strict=True):
        opening, closing = f"{BOS}{USER} {head.format(question=question)}", f"{tail}{ASSISTANT}"
        pieces = [opening, first, middle, second, closing]
        texts.extend(pieces if spliced else ["".join(pieces)])
        counts.append(len(pieces) if spliced else 1)
    encoded = iter(encode_all(tokenizer, texts))
    return [[token for _ in range(count) for token in next(encoded)] for count in counts]


def _judge_parts() -> tuple[str, str, str]:
    head, rest = JUDGE_TEMPLATE.split("{answer_a}")
    middle, tail = rest.split("{answer_b}")
    return head, middle, tail
