"""Testbed's two fast tokenizers (words, byte-level BPE), their chat templates and the task texts of the base.

Like the vocabularies of Llama 3 both have one token for a full stop directly followed by a newline. Text assembly
of a judge prompt therefore merges the end of a review with the delimiter, and ids assembly does not. In both every
verdict letter, every digit of a part score and the separator of parts is one token at its place, with the id of that
character alone.
"""

import random
from collections.abc import Iterator, Sequence
from typing import cast

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from attnpo.lab.testbed import words
from attnpo.lab.testbed.grammar import Grammar

PAD, UNK, BOS, USER, ASSISTANT, END = "<pad>", "<unk>", "<bos>", "<user>", "<assistant>", "<end>"
SPECIALS = (PAD, UNK, BOS, USER, ASSISTANT, END)
VERDICTS = ("A", "B")

JUDGE_TEMPLATE = (
    "judge two reviews of {question}\nreview A :\n{answer_a}\nreview B :\n{answer_b}\nwhich is better , A or B ?"
)
SCORE_TEMPLATE = "score the parts of this review of {question}\n{answer}"

# `blank` stands between a role's token and the content: the words' texts have one there, the BPE's must not, since its
# first word would be another token than where an answer is generated or follows a line break.
_CHAT_TEMPLATE = (
    "{{ '<bos>' }}{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ '<user>BLANK' + message['content'] }}"
    "{% elif message['role'] == 'assistant' %}{{ '<assistant>BLANK' + message['content'] + '<end>' }}"
    "{% else %}{{ raise_exception('the testbed chat knows the roles user and assistant only') }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
CHAT_TEMPLATE = _CHAT_TEMPLATE.replace("BLANK", " ")
BPE_CHAT_TEMPLATE = _CHAT_TEMPLATE.replace("BLANK", "")
_BPE_REVIEWS = 2000  # reviews the merges are learnt from
# Llama 3's cut into pieces: a blank goes with the word after it, line breaks with the punctuation before them.
_PIECES = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def build_tokenizer(grammar: Grammar, merges: int | None = None, max_length: int = 512) -> PreTrainedTokenizerFast:
    """Returns a fast tokenizer for the grammar's and the tasks' texts; `<end>` ends an answer.

    It has exactly their words, or with `merges` the 256 bytes and at most so many merges learnt from the grammar's own
    reviews (a BPE); a token's characters are those of its word, without the blank before it.
    """
    core = _word_level(grammar) if merges is None else _byte_level(grammar, merges)
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=core,
        pad_token=PAD,
        unk_token=UNK,
        bos_token=BOS,
        eos_token=END,
        additional_special_tokens=[USER, ASSISTANT],
        clean_up_tokenization_spaces=False,
        padding_side="left",
        model_max_length=max_length,
        model_input_names=["input_ids", "attention_mask"],
        chat_template=CHAT_TEMPLATE if merges is None else BPE_CHAT_TEMPLATE,
    )


def _word_level(grammar: Grammar) -> Tokenizer:
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
    return core


def _byte_level(grammar: Grammar, merges: int) -> Tokenizer:
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.post_processor = processors.ByteLevel(add_prefix_space=False, trim_offsets=True)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=len(SPECIALS) + len(alphabet) + merges,
        special_tokens=list(SPECIALS),
        initial_alphabet=alphabet,
        show_progress=False,
    )
    core.train_from_iterator(_texts(grammar), trainer)
    return core


def _texts(grammar: Grammar) -> Iterator[str]:
    """Returns judge prompts of random reviews.

    Every word and every line break of the tasks, answers as in the grammar.
    """
    rng, prompts = random.Random("bpe"), grammar.prompts("train")
    for _ in range(_BPE_REVIEWS // 2):
        prompt = rng.choice(prompts)
        first, second = (grammar.sample_review(rng, prompt) for _ in range(2))
        yield JUDGE_TEMPLATE.format(question=prompt.text, answer_a=first, answer_b=second)


def encode_all(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> list[list[int]]:
    """Returns token ids of every text, nothing added."""
    if not texts:
        return []
    encoded = tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False)
    return cast("list[list[int]]", encoded["input_ids"])


def token_ids(tokenizer: PreTrainedTokenizerFast, tokens: Sequence[str]) -> list[int]:
    """Returns the id of every token, which must be whole entries of the vocabulary."""
    return cast("list[int]", tokenizer.convert_tokens_to_ids(list(tokens)))


def chat_prompts(tokenizer: PreTrainedTokenizerFast, contents: Sequence[str]) -> list[list[int]]:
    """Returns ids of one user message each, up to and including the generation prompt."""
    return encode_all(tokenizer, [_render(tokenizer, content) for content in contents])


def judge_prompts(
    tokenizer: PreTrainedTokenizerFast, rows: Sequence[tuple[str, str, str]], splice: Sequence[bool]
) -> list[list[int]]:
    """Returns ids of judge prompts for rows (question, answer A, answer B), ending in the generation prompt.

    `splice` chooses the assembly per row: False tokenises the rendered text (full stop and newline merge), True
    splices the reviews' own ids between separately tokenised template parts (they do not).
    """
    head, middle, tail = _judge_parts()
    before, after = _frame(tokenizer)
    texts: list[str] = []
    counts: list[int] = []
    for (question, first, second), spliced in zip(rows, splice, strict=True):
        pieces = [before + head.format(question=question), first, middle, second, tail + after]
        texts.extend(pieces if spliced else ["".join(pieces)])
        counts.append(len(pieces) if spliced else 1)
    encoded = iter(encode_all(tokenizer, texts))
    return [[token for _ in range(count) for token in next(encoded)] for count in counts]


def _frame(tokenizer: PreTrainedTokenizerFast) -> tuple[str, str]:
    """Returns what the chat template puts before and after a lone user message."""
    before, _, after = _render(tokenizer, "{content}").partition("{content}")
    return before, after


def _render(tokenizer: PreTrainedTokenizerFast, content: str) -> str:
    turns = [{"role": "user", "content": content}]
    return cast(str, tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))


def _judge_parts() -> tuple[str, str, str]:
    head, rest = JUDGE_TEMPLATE.split("{answer_a}")
    middle, tail = rest.split("{answer_b}")
    return head, middle, tail
