"""Tokenizers of very different habits, each with a chat template."""

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
# name -> folder below shared/, template (None: the tokenizer's own)
FORMATS: dict[str, tuple[str, str | None]] = {
    "golden": ("golden/extraction/tokenizer", None),
    "edge_merge": ("models/tokenizers/edge_merge_2k", None),
    "edge_merge_untrimmed": (
        "models/tokenizers/edge_merge_2k",
        "{{ bos_token }}{% for m in messages %}{{ '<|' + m['role'] + '|>' }}\n\n{{ m['content'] }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n\n{% endif %}",
    ),
    "gpt2_plain": ("models/tokenizers/gpt2", PLAIN),
    "gpt2_chatml": ("models/tokenizers/gpt2", CHATML),
    "mistral": ("models/tokenizers/mistral_v3", LLAMA2_LIKE),
    "stories": ("models/stories260K", STORIES),
}


class Formats:
    """Fresh ChatFormats by name; tokenizers are loaded once."""

    def __init__(self, shared: Path) -> None:
        self.shared = shared
        self.loaded: dict[str, Any] = {}

    def tokenizer(self, folder: str, fresh: bool = False) -> Any:
        from transformers import AutoTokenizer

        if fresh:
            return AutoTokenizer.from_pretrained(self.shared / folder)
        if folder not in self.loaded:
            self.loaded[folder] = AutoTokenizer.from_pretrained(self.shared / folder)
        return self.loaded[folder]

    def __call__(self, name: str, template: str | None = None) -> ChatFormat:
        folder, own = FORMATS[name]
        return ChatFormat(self.tokenizer(folder), template or own)
