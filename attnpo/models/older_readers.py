"""Saved model folders as others read them: transformers 4.x, which knows other keys, and other users of the machine.

transformers 5 names a tokenizer class that 4.x lacks, and keeps what 4.x calls ``rope_theta`` and ``rope_scaling`` in
``rope_parameters``, which 4.x ignores: it would silently use the default base for positions. Many versions of vLLM
come with 4.x.
"""

import json
from pathlib import Path

from transformers import PretrainedConfig

from attnpo.system.files import share, write_whole

UNKNOWN_ROTARY = (
    "this model's rotary settings have other names in transformers 4.x, or differ from layer to layer: compare its "
    "logits there before you use the folder with such a version, or take transformers 5"
)


def open_to_readers(folder: Path) -> None:
    """Adds the keys of transformers 4.x to a folder that ``save_pretrained`` wrote, and opens its files to others.

    safetensors writes files that only their owner can read; here they get the permissions of the umask.
    """
    for name, older in (("config.json", older_config), ("tokenizer_config.json", older_tokenizer)):
        path = folder / name
        content = json.loads(path.read_text(encoding="utf-8"))
        write_whole(path, json.dumps(older(content), indent=2, ensure_ascii=False) + "\n")
    for path in folder.glob("*.safetensors"):
        share(path)


def older_config(config: dict[str, object]) -> dict[str, object]:
    """Returns a model's configuration with ``torch_dtype``, ``rope_theta`` and ``rope_scaling`` beside the newer keys.

    Nested configurations get them too. There are no such keys for rotary settings that differ from layer to layer.
    """
    made = {k: older_config(v) if isinstance(v, dict) and "model_type" in v else v for k, v in config.items()}
    if "dtype" in made:
        made["torch_dtype"] = made["dtype"]
    rotary = made.get("rope_parameters")
    if isinstance(rotary, dict) and not any(isinstance(value, dict) for value in rotary.values()):
        apart = ("rope_theta", "partial_rotary_factor")
        made |= {key: rotary[key] for key in apart if key in rotary}
        scaling = {key: value for key, value in rotary.items() if key not in apart}
        made["rope_scaling"] = None if scaling in ({}, {"rope_type": "default"}) else scaling
    return made


def older_tokenizer(config: dict[str, object]) -> dict[str, object]:
    """Returns a tokenizer's configuration with a class and special tokens that both versions know."""
    made = dict(config)
    if made.get("tokenizer_class") == "TokenizersBackend":
        made["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(made.get("extra_special_tokens"), list):
        made["additional_special_tokens"] = made.pop("extra_special_tokens")
    return made


def warning_for(config: PretrainedConfig) -> str | None:
    """Returns a warning when 4.x may not find a model's rotary settings under the keys that are written; else None."""
    rotary = getattr(config, "rope_parameters", None) or {}
    renamed = type(config).convert_rope_params_to_dict is not PretrainedConfig.convert_rope_params_to_dict
    layered = any(isinstance(value, dict) for value in rotary.values())
    return UNKNOWN_ROTARY if rotary and (renamed or layered) else None
