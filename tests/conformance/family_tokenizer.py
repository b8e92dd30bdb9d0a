"""A tokenizer for the tiny models, and a few pairs that it can read."""

import json
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as Decoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

from attnpo.schema import UserError

VOCABULARY = 512
SPECIAL = ["<pad>", "<s>", "</s>", "<other>"]  # ids 0 to 3, as families.yaml has them in the configs
TEMPLATE = (
    "{% for message in messages %}{{ '[' + message['role'] + '] ' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant] ' }}{% endif %}"
)
SUBJECTS = (
    "the soup",
    "the train",
    "a letter",
    "the garden",
    "the new bridge",
    "a song",
    "the market",
    "the old clock",
)
GOOD, BAD = "It is bright, warm and well made, and people like it.", "I do not know. No, no."


def pairs() -> list[dict[str, str]]:
    """Preference pairs in the convention of prompt, chosen, rejected."""
    return [
        {"prompt": f"Tell me about {subject}.", "chosen": f"{subject.capitalize()}? {GOOD}", "rejected": BAD}
        for subject in SUBJECTS
    ]


def write_pairs(folder: Path) -> Path:
    """``folder`` with the pairs as train.jsonl and test.jsonl. UserError where other rows are in their place."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in (("train", pairs()), ("test", pairs()[:2])):
        file, text = folder / f"{name}.jsonl", "".join(json.dumps(row) + "\n" for row in rows)
        if file.exists() and file.read_bytes() != text.encode():
            raise UserError(
                f"families: {file} is another file, which would be replaced: move it away, or name a new folder"
            )
        file.write_text(text, encoding="utf-8")
    return folder


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Byte pairs learnt on the pairs, with a chat template; deterministic."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = Decoder()
    trainer = BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=SPECIAL, initial_alphabet=ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([" ".join(row.values()) for row in pairs()] * 4, trainer)
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        pad_token=SPECIAL[0],
        bos_token=SPECIAL[1],
        eos_token=SPECIAL[2],
        chat_template=TEMPLATE,
    )
