"""Two-layer random models of the paper's own classes, with tokenizers of the same kind, and pairs to train on.

Nothing is read from outside: the vocabularies are trained on the pairs themselves.
"""

import json
import random
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, PreTrainedTokenizerFast

# Llama-3's splitting rule: punctuation takes the line breaks after it along.
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_CHAT = (
    "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' }}"
    "{{ m['content'] | trim }}{{ '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
ZEPHYR_CHAT = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "initializer_range": 0.2,
}
TOPICS = ("bread", "a long walk", "the night train", "old maps", "rain", "a first job")
WORDS = (
    "it is",
    "a good plan",
    "to start early,",
    "and then",
    "to rest;",
    "bring water.",
    "why not",
    "two hours will do!",
)


def texts(rng: random.Random) -> Iterator[str]:
    """Answers of one or two short paragraphs, without end."""
    while True:
        parts = [" ".join(rng.choices(WORDS, k=rng.randint(3, 10))).capitalize() for _ in range(rng.randint(1, 2))]
        yield ".\n\n".join(parts) + rng.choice([".", "!", "", "?\n"])


def llama3_like(corpus: list[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE with Llama-3's splitting rule, special tokens and chat template."""
    special = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LLAMA3_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(corpus, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=special[0], eos_token=special[-1], additional_special_tokens=special[1:-1]
    )
    tokenizer.chat_template = LLAMA3_CHAT
    return tokenizer


def mistral_like(corpus: list[str]) -> PreTrainedTokenizerFast:
    """BPE over word marks with byte fallback, as SentencePiece models are converted, and zephyr's kind of chat."""
    special = ["<unk>", "<s>", "</s>"]
    special += [f"<0x{byte:02X}>" for byte in range(256)]
    backend = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    split = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    split.normalizer = backend.normalizer
    split.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=True)
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=special, show_progress=False)
    split.train_from_iterator(corpus, trainer)
    backend.model = split.model
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    tokenizer.chat_template = ZEPHYR_CHAT
    return tokenizer


def write_model(kind: str, corpus: list[str], folder: Path) -> None:
    """Writes a random two-layer model of class ``kind`` ("llama" or "mistral") with its tokenizer."""
    torch.manual_seed(5)
    if kind == "llama":
        tokenizer = llama3_like(corpus)
        config = LlamaConfig(
            vocab_size=len(tokenizer),
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
            **SHAPE,
        )
        model: LlamaForCausalLM | MistralForCausalLM = LlamaForCausalLM(config)
    else:
        tokenizer = mistral_like(corpus)
        model = MistralForCausalLM(
            MistralConfig(
                vocab_size=len(tokenizer),
                bos_token_id=tokenizer.bos_token_id,
                eos_token_id=tokenizer.eos_token_id,
                sliding_window=None,
                **SHAPE,
            )
        )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write_pairs(folder: Path, splits: dict[str, int]) -> list[str]:
    """All texts; writes a JSONL file per split in the form of ultrafeedback_binarized (full conversations)."""
    rng = random.Random(11)
    answers = texts(rng)
    folder.mkdir(parents=True)
    corpus = []
    for split, count in splits.items():
        with (folder / f"{split}.jsonl").open("w", encoding="utf-8") as file:
            for number in range(count):
                prompt = f"Tell me about {rng.choice(TOPICS)}, please. Case {number} of {split}."
                chosen, rejected = next(answers), next(answers)
                corpus += [prompt, chosen, rejected]
                row = {
                    "prompt": prompt,
                    **{
                        side: [{"role": "user", "content": prompt}, {"role": "assistant", "content": text}]
                        for side, text in (("chosen", chosen), ("rejected", rejected))
                    },
                    "score_chosen": 8.0,
                    "score_rejected": 6.0,
                }
                file.write(json.dumps(row) + "\n")
    return corpus
