"""Exports trained policies as plain Hugging Face model folders, which ``from_pretrained`` and vLLM can load.

Many versions of vLLM come with transformers 4.x, which lacks a tokenizer class of transformers 5 and ignores
``rope_parameters``, so it would silently use the default rotary base.
"""

import copy
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from attnpo.models.loading import DTYPES
from attnpo.models.lora import MergeRounding, adapter_state, dtype_name, merge_state_dict, write_adapter
from attnpo.system.files import apply_umask, write_atomically
from attnpo.text.template import with_default_template
from attnpo.training.model_card import Facts, model_card

log = logging.getLogger(__name__)

ADAPTER = "adapter"
"""Subfolder of an export for the adapters alone; transformers would load adapters located next to the weights."""


def make_empty_model(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Returns a model of the same class and config without weights or adapters, to call its ``save_pretrained``."""
    config = copy.deepcopy(model.config)
    if getattr(config, "quantization_config", None) is not None:
        del config.quantization_config  # the saved weights are dequantised and merged
    with torch.device("meta"):
        # FSDP2 changes the class of a model it shards; calling it creates an instance of the original class.
        empty: PreTrainedModel = type(model)(config)
    empty.to(dtype)  # type: ignore[arg-type]
    if hasattr(model, "_weight_conversions"):  # maps names of parameters to names in the files
        empty._weight_conversions = model._weight_conversions
    return empty


def generation_config(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, end_ids: tuple[int, ...]
) -> GenerationConfig:
    """Returns the base's generation settings with all turn-ending ids as EOS and the tokenizer's BOS and padding ids.

    Keeps the ids in the base's own generation_config.json. Without such a file, keeps the config's EOS ids that are
    special tokens, and its BOS and padding ids if they are special and the tokenizer has none. If transformers refuses
    to save the settings, logs a warning and keeps only the ids.
    """
    base: Any = model.generation_config or GenerationConfig()  # type: ignore[no-untyped-call]
    given = base.eos_token_id if isinstance(base.eos_token_id, list) else [base.eos_token_id]
    special = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    written = not base._from_model_config
    own_ends = {index for index in given if written or index in special - {tokenizer.bos_token_id}}
    ends = sorted({*own_ends, tokenizer.eos_token_id, *end_ids} - {None})
    ids: dict[str, Any] = {"eos_token_id": ends[0] if len(ends) == 1 else (ends or None)}
    for name in ("bos_token_id", "pad_token_id"):
        own, ids[name] = getattr(base, name), getattr(tokenizer, name)
        if own is not None and (written or (ids[name] is None and own in special)):
            ids[name] = own
    config: GenerationConfig = copy.deepcopy(base)
    config.update(**ids)  # type: ignore[no-untyped-call]
    try:
        config.validate(strict=True)
    except ValueError as problem:
        reason = " ".join(str(problem).split())
        log.warning("the base model's generation settings are invalid, so they are not exported: %s", reason)
        config = GenerationConfig(**ids)  # type: ignore[no-untyped-call]
    return config


@dataclass(frozen=True)
class Exporter:
    """Exports a policy as a Hugging Face model folder.

    ``chat_template``: None keeps the tokenizer's own. ``end_ids``: tokens that end an assistant turn. ``dtype``: a name
    in DTYPES for the weights (None: the model's own). ``facts``: data for the model card (None: no card). ``notes``:
    remarks for the card.
    """

    tokenizer: PreTrainedTokenizerBase
    end_ids: tuple[int, ...] = ()
    dtype: str | None = None
    facts: Facts | None = None
    max_shard_size: str = "5GB"
    chat_template: str | None = None
    notes: tuple[str, ...] = ()

    def export(
        self,
        model: PreTrainedModel,
        folder: Path,
        *,
        write: bool = True,
        metrics: Mapping[str, float] | None = None,
        step: int | None = None,
    ) -> MergeRounding | None:
        """Writes weights, configs, tokenizer, chat template and model card in the format of ``from_pretrained``.

        Returns the rounding error of merged adapters, which are also saved in ``adapter/``; None without adapters.
        ``write`` is false on ranks that only gather shards. ``metrics`` and ``step`` go into the card.
        """
        dtype = model.dtype if self.dtype is None else DTYPES[self.dtype]
        rounding = MergeRounding.for_merge(model, dtype)
        state = merge_state_dict(model, keep=write, dtype=dtype, rounding=rounding if write else None)
        adapters = adapter_state(model, keep=write)
        if not write:
            return None
        folder.mkdir(parents=True, exist_ok=True)
        empty = make_empty_model(model, dtype)
        if empty.can_generate():  # a reward model cannot
            empty.generation_config = generation_config(model, self.tokenizer, self.end_ids)
        empty.save_pretrained(folder, state_dict=convert_dtype(state, empty, dtype), max_shard_size=self.max_shard_size)
        self._save_tokenizer(folder)
        add_older_keys(folder)
        facts, notes = self.facts or {}, list(self.notes)
        if adapters:
            base = facts.get("base", {})
            found = Path(base.get("path", "?")).expanduser().is_dir()  # a base built by a setting has no folder
            name = base["path"] if found else base.get("hub")
            write_adapter(model, adapters, folder / ADAPTER, name, base.get("revision"))
            notes += [
                f"the weights are those of the base with the trained adapters merged in float32 and saved in "
                f"{rounding.dtype}; `{ADAPTER}/` holds the adapters alone, for peft with the base in "
                f'{rounding.base}: `PeftModel.from_pretrained(base, "FOLDER/{ADAPTER}")`',
                f"the numbers in this card were measured on the policy as trained, with unmerged adapters on the base "
                f"in {rounding.base}",
                *(
                    [f"the merged weights differ from that policy: {rounding.describe()}"]
                    if rounding.lost_share
                    else ()
                ),
            ]
        if self.facts is not None:
            card = model_card(facts, metrics or {}, step=step, dtype=dtype_name(dtype), notes=notes)
            (folder / "README.md").write_text(card, encoding="utf-8")
        log.debug("exported the policy to %s", folder)
        return rounding if adapters else None

    def _save_tokenizer(self, folder: Path) -> None:
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is not None:  # it would save the truncation and padding of its last call
            backend.no_truncation()
            backend.no_padding()
        saved = copy.copy(self.tokenizer)
        if self.chat_template is not None:
            saved.chat_template = with_default_template(saved, self.chat_template)
        saved.save_pretrained(folder)


def convert_dtype(state: Mapping[str, Tensor], empty: PreTrainedModel, dtype: torch.dtype) -> dict[str, Tensor]:
    """Converts the parameters of ``empty`` in ``state`` to ``dtype``; keeps ties and leaves buffers unchanged."""
    parameters = dict(empty.named_parameters(remove_duplicate=False))
    first: dict[int, str] = {}
    converted: dict[str, Tensor] = {}
    for name, value in state.items():
        if name not in parameters or not value.is_floating_point():
            converted[name] = value
            continue
        twin = first.setdefault(id(parameters[name]), name)
        tied = twin != name and torch.equal(state[twin], value)
        converted[name] = converted[twin] if tied else value.to(dtype)
    return converted


# ------------------------------------------------------------------------------------------------ other readers


UNKNOWN_ROTARY = (
    "this model's rotary settings have other names in transformers 4.x, or differ between layers: compare its logits "
    "there before using this folder with transformers 4.x, or use transformers 5"
)


def add_older_keys(folder: Path) -> None:
    """Adds the keys of transformers 4.x to a saved model folder, and makes its files readable by other users."""
    for name, older in (("config.json", to_older_config), ("tokenizer_config.json", to_older_tokenizer_config)):
        path = folder / name
        content = json.loads(path.read_text(encoding="utf-8"))
        write_atomically(path, json.dumps(older(content), indent=2, ensure_ascii=False) + "\n")
    for path in folder.glob("*.safetensors"):
        apply_umask(path)


def to_older_config(config: dict[str, object]) -> dict[str, object]:
    """Adds ``torch_dtype``, ``rope_theta`` and ``rope_scaling`` to a config and its nested configs."""
    made = {k: to_older_config(v) if isinstance(v, dict) and "model_type" in v else v for k, v in config.items()}
    if "dtype" in made:
        made["torch_dtype"] = made["dtype"]
    rotary = made.get("rope_parameters")
    if isinstance(rotary, dict) and not any(isinstance(value, dict) for value in rotary.values()):
        apart = ("rope_theta", "partial_rotary_factor")
        made |= {key: rotary[key] for key in apart if key in rotary}
        scaling = {key: value for key, value in rotary.items() if key not in apart}
        made["rope_scaling"] = None if scaling in ({}, {"rope_type": "default"}) else scaling
    return made


def to_older_tokenizer_config(config: dict[str, object]) -> dict[str, object]:
    """Replaces a tokenizer config's class and special tokens with ones that both major versions support."""
    made = dict(config)
    if made.get("tokenizer_class") == "TokenizersBackend":
        made["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(made.get("extra_special_tokens"), list):
        made["additional_special_tokens"] = made.pop("extra_special_tokens")
    return made


def rotary_warning(config: PretrainedConfig) -> str | None:
    """Returns a warning if transformers 4.x may not find the exported rotary settings of a model, else None."""
    rotary = getattr(config, "rope_parameters", None) or {}
    renamed = type(config).convert_rope_params_to_dict is not PretrainedConfig.convert_rope_params_to_dict
    layered = any(isinstance(value, dict) for value in rotary.values())
    return UNKNOWN_ROTARY if rotary and (renamed or layered) else None
