"""Tokenizers of very different habits, each with a chat template."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from attnpo.text.chat import ChatFormat

LLAMA2_LIKE = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] }}[/INST]"
    "{% elif m['role'] == 'assistant' %} {{ m['content'] }}{{ eos_token }}{% else %}{{ m['content'] }}\n\n{% endif %}"
    "{% endfor %}"
)
PLAIN = (  # no BOS, no end of turn, nothing trimmed
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
CHATML = (  # the end token is followed by a newline
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
STORIES = "{{ bos_token }}" + PLAIN.replace("{{ m['content'] }}\n", "{{ m['content'] }}{{ eos_token }}")
TESTS = Path(__file__).resolve().parents[1]
SHARED = TESTS.parents[1] / "shared"
# Trained on this repository's own texts by the rules of GPT-2 and of Mistral's v3, and by one that makes a line break
# stick to the sign before it.
GPT2, MISTRAL, EDGE_MERGE = (f"text/tokenizers/{name}" for name in ("gpt2", "mistral", "edge_merge"))
GOLDEN = "conformance/vectors/extraction/tokenizer"
# name -> folder below tests/, template (None: the tokenizer's own)
FORMATS: dict[str, tuple[str, str | None]] = {
    "golden": (GOLDEN, None),
    "edge_merge": (EDGE_MERGE, None),
    "edge_merge_untrimmed": (
        EDGE_MERGE,
        "{{ bos_token }}{% for m in messages %}{{ '<|' + m['role'] + '|>' }}\n\n{{ m['content'] }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n\n{% endif %}",
    ),
    "gpt2_plain": (GPT2, PLAIN),
    "gpt2_chatml": (GPT2, CHATML),
    "mistral": (MISTRAL, LLAMA2_LIKE),
    "stories": ("conformance/vectors/extraction_sentencepiece/tokenizer", STORIES),
}
# The vocabularies that ours are made like, of which two are too large for the repository, where they are at hand.
REAL: dict[str, tuple[str, str | None]] = {}
if SHARED.is_dir():
    models = SHARED / "models"
    REAL = {
        "real_gpt2_plain": (str(models / "tokenizers/gpt2"), PLAIN),
        "real_gpt2_chatml": (str(models / "tokenizers/gpt2"), CHATML),
        "real_mistral": (str(models / "tokenizers/mistral_v3"), LLAMA2_LIKE),
        "real_stories": (str(models / "stories260K"), STORIES),
    }


class Formats:
    """Fresh ChatFormats by name; tokenizers are loaded once."""

    def __init__(self) -> None:
        self.loaded: dict[str, Any] = {}

    def tokenizer(self, folder: str, fresh: bool = False) -> Any:
        from transformers import AutoTokenizer

        if fresh:
            return AutoTokenizer.from_pretrained(TESTS / folder)
        if folder not in self.loaded:
            self.loaded[folder] = AutoTokenizer.from_pretrained(TESTS / folder)
        return self.loaded[folder]

    def mark_turns(self, words: Iterable[str], folder: str = GOLDEN) -> Any:
        """Returns a tokenizer that has ``words`` as special tokens; made once."""
        words = sorted(set(words))
        key = " ".join([folder, *words])
        if key not in self.loaded:
            self.loaded[key] = self.tokenizer(folder, fresh=True)
            self.loaded[key].add_special_tokens({"additional_special_tokens": words})
        return self.loaded[key]

    def __call__(self, name: str, template: str | None = None) -> ChatFormat:
        folder, own = (FORMATS | REAL)[name]
        return ChatFormat(self.tokenizer(folder), template or own)
