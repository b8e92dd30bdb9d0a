"""Trained policies as plain Hugging Face folders, which ``from_pretrained`` and vLLM load.

A ``state.ckpt`` beside the weights does not disturb them: both look for ``*.safetensors`` (vLLM also for ``*.bin`` and
``*.pt`` where there are none).
"""

import copy
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from attnpo.models.loading import DTYPES
from attnpo.models.lora import Rounding, adapter_state, merged_state, write_adapter
from attnpo.models.older_readers import open_to_readers
from attnpo.text.template import with_default
from attnpo.training.model_card import Facts, model_card

log = logging.getLogger(__name__)

ADAPTER = "adapter"
"""Folder of the adapters alone, in an exported folder: transformers looks for them only beside the weights."""


def shell(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Returns a model of the same class and config without adapters, shards or values: its ``save_pretrained`` is
    called.
    """
    config = copy.deepcopy(model.config)
    if getattr(config, "quantization_config", None) is not None:
        del config.quantization_config  # what is saved are the dequantised, merged weights
    with torch.device("meta"):
        # FSDP2 changes the class of a model it shards; its instances are of the original one.
        empty: PreTrainedModel = type(model)(config)
    empty.to(dtype)  # type: ignore[arg-type]
    if hasattr(model, "_weight_conversions"):  # how the files' names differ from the module's
        empty._weight_conversions = model._weight_conversions
    return empty


def generation_config(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, end_ids: tuple[int, ...]
) -> GenerationConfig:
    """Returns the base's generation settings, each id that ends a turn as EOS, and the tokenizer's BOS and padding.

    Ids of the base's own generation_config.json stay. Of others, which may be defaults of a config's class and so any
    token, EOS stays if it is special and not BOS, and BOS and padding if they are special and the tokenizer has none.
    Base settings that transformers refuses to save (a temperature without sampling) are left out with a warning.
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
        log.warning("the base's generation settings are not valid and are left out of the export: %s", reason)
        config = GenerationConfig(**ids)  # type: ignore[no-untyped-call]
    return config


def format_name(dtype: torch.dtype) -> str:
    """Returns the name of a number format as a configuration has it."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Merge:
    """Adapters merged into exported weights: the number formats of base and export, and what the rounding took.

    ``lost_share`` is the norm of what the rounded weights miss of the update over the norm of the update;
    ``unchanged_share`` the share of the adapted weights that came out equal to the base's.
    """

    base: str
    dtype: str
    lost_share: float
    unchanged_share: float

    @classmethod
    def of(cls, model: PreTrainedModel, dtype: torch.dtype, rounding: Rounding) -> "Merge":
        """Returns the account of one export in ``dtype``."""
        quantized = getattr(model.config, "quantization_config", None) is not None
        base = "4 bits" if quantized else format_name(model.dtype)
        return cls(base, format_name(dtype), rounding.lost_share, rounding.unchanged_share)

    def text(self) -> str:
        """Returns what the rounding took, in words."""
        return (
            f"rounding the merged weights to {self.dtype} took {100 * self.lost_share:.3g} % of the adapters' update "
            f"(in norm) and left {100 * self.unchanged_share:.3g} % of the adapted weights equal to the base's"
        )

    def notes(self) -> tuple[str, ...]:
        """Returns what the model card tells of it."""
        return (
            f"the weights are the base's with the trained adapters merged in float32 and written in {self.dtype}; "
            f"`{ADAPTER}/` holds the adapters alone, for peft beside the base in {self.base}: "
            f'`PeftModel.from_pretrained(base, "FOLDER/{ADAPTER}")`',
            f"the numbers of this card are of the policy as it was trained, adapters beside the base in {self.base}",
            *([f"the merged weights differ from that policy: {self.text()}"] if self.lost_share else ()),
        )


@dataclass(frozen=True)
class Exporter:
    """Writes a policy as a Hugging Face folder.

    Args:
        tokenizer: with the chat template in use.
        chat_template: written in place of the tokenizer's, which stays; None writes that. Templates that the tokenizer
            has by name are written as they are.
        notes: what the model card tells about using the folder.
        end_ids: ids that end an assistant turn (``ChatFormat.end_ids``), beside the tokenizer's EOS.
        dtype: number format of the exported weights, a name in DTYPES; None takes the model's own (under adapters that
            of their base).
        facts: what the model card tells (``card.Facts``); None writes no card.
        max_shard_size: size from which the weights are cut into several files.
    """

    tokenizer: PreTrainedTokenizerBase
    end_ids: tuple[int, ...] = ()
    dtype: str | None = None
    facts: Mapping[str, object] | None = None
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
    ) -> Merge | None:
        """Writes weights, configs, tokenizer, chat template and model card that from_pretrained loads.

        Adapters are merged into the weights, and lie in ``adapter/`` unmerged; returns what the merging rounded off,
        None without adapters. ``write`` is false on ranks that only take part in gathering shards. ``metrics`` and
        ``step`` (optimiser steps so far) go into the card.
        """
        dtype = model.dtype if self.dtype is None else DTYPES[self.dtype]
        rounding = Rounding()
        state = merged_state(model, keep=write, dtype=dtype, rounding=rounding if write else None)
        adapters = adapter_state(model, keep=write)
        if not write:
            return None
        folder.mkdir(parents=True, exist_ok=True)
        empty = shell(model, dtype)
        if empty.can_generate():  # a reward model cannot
            empty.generation_config = generation_config(model, self.tokenizer, self.end_ids)
        empty.save_pretrained(folder, state_dict=in_dtype(state, empty, dtype), max_shard_size=self.max_shard_size)
        self._save_tokenizer(folder)
        open_to_readers(folder)
        merge = Merge.of(model, dtype, rounding) if adapters else None
        facts = cast(Facts, self.facts or {})  # plain data of a run's inputs
        if adapters:
            base = facts.get("base", {})
            found = Path(base.get("path", "?")).expanduser().is_dir()  # no folder is named where a setting built it
            name = base["path"] if found else base.get("hub")
            write_adapter(model, adapters, folder / ADAPTER, name, base.get("revision"))
        if self.facts is not None:
            notes = (*self.notes, *(merge.notes() if merge else ()))
            card = model_card(facts, metrics or {}, step=step, dtype=format_name(dtype), notes=notes)
            (folder / "README.md").write_text(card, encoding="utf-8")
        log.debug("exported the policy to %s", folder)
        return merge

    def _save_tokenizer(self, folder: Path) -> None:
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is not None:  # it would save the truncation and padding that its last caller set
            backend.no_truncation()
            backend.no_padding()
        saved = copy.copy(self.tokenizer)
        if self.chat_template is not None:
            saved.chat_template = with_default(saved, self.chat_template)
        saved.save_pretrained(folder)


def in_dtype(state: Mapping[str, Tensor], empty: PreTrainedModel, dtype: torch.dtype) -> dict[str, Tensor]:
    """``state`` with the parameters of ``empty`` in ``dtype``; buffers (rotary frequencies) keep theirs.

    Weights that are tied there become one tensor, of which ``save_pretrained`` writes one copy.
    """
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
