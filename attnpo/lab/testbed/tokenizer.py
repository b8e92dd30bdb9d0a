"""Fast tokenizers of the testbed (word-level and byte-level BPE), their chat templates, and the base's task prompts.

As in Llama 3's vocabulary, a full stop followed by a newline is a single token in both. Assembling a judge prompt as
text therefore merges the end of a review with the delimiter, while assembling it from ids does not. In both tokenizers,
each verdict letter, each digit of a part score and the separator of parts is a single token, with the same id as the
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

# BLANK between a role token and the content: a space for the word-level tokenizer. The BPE must have none, because the
# first word would otherwise differ from its token in generated answers and after a line break.
_CHAT_TEMPLATE = (
    "{{ '<bos>' }}{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ '<user>BLANK' + message['content'] }}"
    "{% elif message['role'] == 'assistant' %}{{ '<assistant>BLANK' + message['content'] + '<end>' }}"
    "{% else %}{{ raise_exception('the testbed chat knows the roles user and assistant only') }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
CHAT_TEMPLATE = _CHAT_TEMPLATE.replace("BLANK", " ")
BPE_CHAT_TEMPLATE = _CHAT_TEMPLATE.replace("BLANK", "")
_BPE_REVIEWS = 2000  # reviews from which the merges are learnt
# Llama 3's pre-tokenization: a space belongs to the next word, line breaks to the punctuation before them.
_PIECES = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def build_tokenizer(grammar: Grammar, merges: int | None = None, max_length: int = 512) -> PreTrainedTokenizerFast:
    """Builds a fast tokenizer for reviews and task prompts, with `<end>` as end token.

    Without `merges`, the vocabulary is exactly the words in reviews and task prompts. With `merges`, it is a BPE of the
    256 bytes and at most that many merges learnt from the reviews. Token offsets exclude the space before a word.
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
    # Matches are the tokens; the spaces between them are dropped, and offsets refer to the original text.
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
    """Yields judge prompts with random reviews as training text for the BPE."""
    rng, prompts = random.Random("bpe"), grammar.prompts("train")
    for _ in range(_BPE_REVIEWS // 2):
        prompt = rng.choice(prompts)
        first, second = (grammar.sample_review(rng, prompt) for _ in range(2))
        yield JUDGE_TEMPLATE.format(question=prompt.text, answer_a=first, answer_b=second)


def encode_all(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> list[list[int]]:
    """Tokenizes all texts without adding special tokens."""
    if not texts:
        return []
    encoded = tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False)
    return cast("list[list[int]]", encoded["input_ids"])


def token_ids(tokenizer: PreTrainedTokenizerFast, tokens: Sequence[str]) -> list[int]:
    """Returns the ids of the given tokens, which must be entries of the vocabulary."""
    return cast("list[int]", tokenizer.convert_tokens_to_ids(list(tokens)))


def chat_prompts(tokenizer: PreTrainedTokenizerFast, contents: Sequence[str]) -> list[list[int]]:
    """Tokenizes each text as a single user message, followed by the generation prompt."""
    return encode_all(tokenizer, [_render(tokenizer, content) for content in contents])


def judge_prompts(
    tokenizer: PreTrainedTokenizerFast, rows: Sequence[tuple[str, str, str]], splice: Sequence[bool]
) -> list[list[int]]:
    """Tokenizes judge prompts for rows of (question, answer A, answer B), including the generation prompt.

    `splice` selects the assembly per row. False tokenizes the rendered text, which merges full stop and newline. True
    tokenizes reviews and template parts separately and joins their ids, which keeps them apart.
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
    """Returns the text that the chat template adds before and after a single user message."""
    before, _, after = _render(tokenizer, "{content}").partition("{content}")
    return before, after


def _render(tokenizer: PreTrainedTokenizerFast, content: str) -> str:
    turns = [{"role": "user", "content": content}]
    return cast(str, tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))


def _judge_parts() -> tuple[str, str, str]:
    head, rest = JUDGE_TEMPLATE.split("{answer_a}")
    middle, tail = rest.split("{answer_b}")
    return head, middle, tail
