"""Loads causal language models and tokenizers with actionable errors, and computes digests of weights.

Models are loaded directly in their dtype and never cast: ``.to(bfloat16)`` would also round the rotary frequencies,
which shifts positions by whole radians on long texts.
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from textwrap import shorten
from typing import Any, cast

import torch
from huggingface_hub import resolve_revision
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BitsAndBytesConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as library
from transformers.utils.peft_utils import ADAPTER_SAFE_WEIGHTS_NAME, ADAPTER_WEIGHTS_NAME, find_adapter_config_file

from attnpo.config.named_files import read_template
from attnpo.models.description import (
    ModelDescription,
    build_on_meta,
    config_vocabulary_size,
    describe_model,
    values_per_layer,
)
from attnpo.models.spec import ModelSpec
from attnpo.models.stored_digests import cached_digest
from attnpo.models.trial import check_causal
from attnpo.schema import UserError, check_choice, digest
from attnpo.system.files import SEAL, describe_change, has_checksums, parse_json
from attnpo.system.hub_access import hub_unreachable_reason, offline_if_unreachable
from attnpo.text.chat import ChatFormat
from attnpo.text.template import with_default_template

logger = logging.getLogger(__name__)

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
WEIGHT_PATTERNS = ("*.safetensors", "*.bin")
ADAPTERS = (ADAPTER_SAFE_WEIGHTS_NAME, ADAPTER_WEIGHTS_NAME)  # read only together with an adapter_config.json
TEXT_PATTERNS = ("*.json", "*.jinja", "additional_chat_templates/*", "*.model", "*.txt")  # configs and tokenizer
# In eval mode bitsandbytes repacks 4-bit weights on CPUs with bf16 units, which rounds them and drops gradients.
CPU_REPACKING = "support_avx512bf16_for_cpu"


def load_model(
    path: str | Path,
    *,
    dtype: str = "float32",
    attn_implementation: str = "sdpa",
    revision: str | None = None,
    quantize: str | None = None,
    device: torch.device | str = "cpu",
    reward: bool = False,
    fresh_head: bool = False,
    tried: bool = False,
) -> PreTrainedModel:
    """Loads a causal LM in eval mode from a local folder or the hub, with weights in ``dtype`` (a name in DTYPES).

    ``reward``: load with a sequence classification head; ``fresh_head`` initialises one with a single output if the
    folder has none. ``quantize`` (nf4 or fp4) stores the blocks' linear layers in 4 bits, on ``device``.
    ``attn_implementation="sdpa"`` falls back to eager if the class supports nothing else. ``tried``: the model is known
    to be causal, so it is not checked again.

    Raises:
        UserError: files are missing or incomplete, weights have the wrong shape or belong to an adapter, the hub is
            unreachable, or the model is not causal.
    """
    check_choice("dtype", dtype, list(DTYPES))
    source = _resolve_source(path, "model")
    if isinstance(source, Path):
        _check_folder(source)
    else:
        _check_no_adapter(source, revision)
    more = {} if quantize is None else _quantization_kwargs(quantize, DTYPES[dtype], device)
    try:
        with _wrap_loading_errors("model", path, revision):
            kind = AutoModelForSequenceClassification if reward else AutoModelForCausalLM
            loaded: Any = kind.from_pretrained(
                source,
                dtype=DTYPES[dtype],
                # None means sdpa with a fallback to eager; naming sdpa would be an error for classes without it.
                attn_implementation=None if attn_implementation == "sdpa" else attn_implementation,
                revision=revision or "main",
                trust_remote_code=False,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # reported below by name
                **({"num_labels": 1} if fresh_head else {}),
                **more,
            )
    except UserError:
        _check_attention(path, revision, attn_implementation)
        raise
    model: PreTrainedModel = loaded[0]
    for part in model.modules():
        if hasattr(part, CPU_REPACKING):
            setattr(part, CPU_REPACKING, False)
    _check_loading_info(path, model, loaded[1], fresh_head)
    check_rotary(model)
    model.train(False)
    if not tried:
        check_causal(cast(PreTrainedModel, model.base_model) if reward else model, str(path))
    return model


def resolve_attention(path: str | Path, revision: str | None, asked: str) -> str:
    """Returns the attention implementation that ``load_model`` would use, based on the model's config."""
    return inspect_model(path, revision).attention if asked == "sdpa" else asked


def _check_attention(path: str | Path, revision: str | None, attention: str) -> None:
    """Raises ``UserError`` if the model's class does not support an attention implementation."""
    if attention in ("sdpa", "eager"):
        return
    config = load_config(path, revision)
    description = describe_model(config)
    try:
        build_on_meta(config, attention)
    except UserError as error:
        reason = error.__cause__ or error
        words = shorten(str(reason) or type(reason).__name__, 200, placeholder=" ...").rstrip(".")
        raise UserError(
            f"model.attn_implementation={attention}: {description.name} cannot use it here ({words}): set "
            "model.attn_implementation=sdpa, which falls back to eager if necessary"
        ) from error


def _quantization_kwargs(quantize: str, compute: torch.dtype, device: torch.device | str) -> dict[str, object]:
    """Returns transformers' arguments for 4-bit weights with double quantization (Dettmers et al. 2023)."""
    if find_spec("bitsandbytes") is None:
        raise UserError(
            f"model.quantize={quantize} needs the package bitsandbytes: pip install 'attnpo[qlora]', or set "
            "model.quantize=null"
        )
    settings = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=quantize,
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=compute,
    )  # type: ignore[no-untyped-call]
    return {"quantization_config": settings, "device_map": {"": device}}


_Report = Mapping[str, Any]
"""Loading info from transformers: names of missing and unexpected parameters; names and shapes of mismatched ones."""


def _check_loading_info(path: str | Path, model: PreTrainedModel, info: _Report, fresh_head: bool) -> None:
    """Raises ``UserError`` unless all parameters, except a fresh head, were loaded in the right shape."""
    what = type(model).__name__
    other = sorted(info["mismatched_keys"])
    if other:
        name, stored, wanted = other[0]
        raise UserError(
            f"{path}: {len(other)} parameters have different shapes in the weight files and in config.json (first: "
            f"{name} is {list(stored)}, {what} has {list(wanted)}); config and weights belong to different models"
        )
    backbone = f"{model.base_model_prefix}."
    missing = sorted(name for name in info["missing_keys"] if not fresh_head or name.startswith(backbone))
    if missing:
        raise UserError(
            f"{path}: {len(missing)} parameters of {what} are missing from the weight files (first: {missing[0]}) and "
            "would stay randomly initialised: check that the folder is complete and matches its config.json"
        )
    unused = sorted(info["unexpected_keys"])
    if unused:
        logger.warning(
            "%s: %d tensors in the weight files do not exist in %s and are ignored (first: %s): check that config.json "
            "belongs to these weights",
            *(path, len(unused), what, unused[0]),
        )


def check_rotary(model: nn.Module) -> None:
    """Raises ``UserError`` if a buffer of rotary frequencies is not in full precision."""
    for name, buffer in model.named_buffers():
        if name.endswith("inv_freq") and buffer.dtype not in (torch.float32, torch.float64):
            raise UserError(
                f"{name} is {buffer.dtype}: rotary frequencies must stay float32, or positions shift: load the model "
                "in the desired dtype instead of casting it afterwards"
            )


def load_tokenizer(path: str | Path, revision: str | None = None) -> PreTrainedTokenizerBase:
    """Loads a tokenizer from a folder or the hub; if it has no pad token, its EOS or unknown token is used."""
    source = _resolve_source(path, "tokenizer")
    if isinstance(source, Path):
        _verify_checksums(source, TEXT_PATTERNS)
    with _wrap_loading_errors("tokenizer", path, revision):
        tokenizer = AutoTokenizer.from_pretrained(source, revision=revision or "main", trust_remote_code=False)
    if tokenizer.pad_token_id is None:
        fallback = tokenizer.eos_token or tokenizer.unk_token
        if fallback is None:
            raise UserError(
                f"{path}: the tokenizer has no pad, EOS or unknown token; set pad_token in its tokenizer_config.json"
            )
        tokenizer.pad_token = fallback
    return tokenizer


def num_layers(path: str | Path, revision: str | None = None) -> int:
    """Returns the number of layers from a model's config.

    Raises ``UserError`` if the config lacks it.
    """
    depth = getattr(load_text_config(path, revision), "num_hidden_layers", None)
    if not isinstance(depth, int):
        raise UserError(f"{path}: its config.json has no num_hidden_layers; choose a causal language model")
    return depth


def num_heads(path: str | Path, revision: str | None = None) -> int:
    """Returns the number of query heads per layer; raises ``UserError`` if it varies by layer or is missing."""
    return num_heads_from_config(load_text_config(path, revision), path)


def num_heads_from_config(config: PretrainedConfig, path: str | Path) -> int:
    """Returns the number of query heads per layer from a text config; ``path`` names the model in errors."""
    counts = values_per_layer(config, "num_attention_heads_per_layer") or values_per_layer(
        config, "num_attention_heads"
    )
    if len(set(counts)) > 1:
        raise UserError(
            f"weights.heads: the layers of {path} have different numbers of query heads "
            f"({', '.join(map(str, counts))}), so a head index has no fixed meaning: set weights.heads=[] (the mean "
            "over the heads of each layer) or choose another judge"
        )
    if not counts:
        raise UserError(f"weights.heads: the config of {path} does not state the number of heads: set weights.heads=[]")
    return counts[0]


def load_text_config(path: str | Path, revision: str | None) -> PretrainedConfig:
    """Loads the text config of a model. Raises ``UserError`` like ``load_config``."""
    return load_config(path, revision).get_text_config()


def inspect_model(path: str | Path, revision: str | None = None) -> ModelDescription:
    """Describes a model's class and attention from its config; raises ``UserError`` if it is not a causal LM."""
    return describe_model(load_config(path, revision))


def load_config(path: str | Path, revision: str | None = None) -> PretrainedConfig:
    """Loads a model's config without the weights; raises ``UserError`` if the config cannot be read."""
    source = _resolve_source(path, "model")
    if isinstance(source, Path):
        _check_config(source)
    with _wrap_loading_errors("config of the model", path, revision):
        config: PretrainedConfig = AutoConfig.from_pretrained(
            source, revision=revision or "main", trust_remote_code=False
        )
        return config


def weights_fingerprint(path: str | Path, revision: str | None = None) -> dict[str, str]:
    """Returns the fingerprint of a model: digests of config and weights for a folder, the commit for a hub name.

    Raises ``UserError`` like ``load_model`` if the model is missing or incomplete, or has an adapter.
    """
    source = _resolve_source(path, "model")
    if isinstance(source, str):
        _check_no_adapter(source, revision)
        load_config(path, revision)  # raises if the model does not exist
        with _wrap_loading_errors("model", path, revision):
            cached = hub_unreachable_reason() is not None
            commit = resolve_revision(source, revision=revision or "main", local_files_only=cached).resolved
        return {"hub": source, "commit": commit}
    _check_folder(source)
    files = {file.name: cached_digest(file) for file in _weight_files(source)}
    return {"config": cached_digest(source / "config.json"), "weights": digest(files)}


def _resolve_source(path: str | Path, what: str) -> Path | str:
    """Returns ``path`` as an existing folder or a hub name; raises ``UserError`` if it is neither."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    text = str(path)
    if folder.exists():
        raise UserError(f"{what} path {text!r} is a file: give the folder that contains it")
    parts = text.split("/")
    if isinstance(path, Path) or len(parts) > 2 or not all(parts) or text.startswith((".", "~")):
        raise UserError(
            f"no folder at {text!r} to load the {what} from (relative to {Path.cwd()}): give an existing folder or a "
            "hub name such as organisation/model"
        )
    return text


def _check_no_adapter(source: Path | str, revision: str | None = None) -> None:
    """Raises ``UserError`` for a folder or hub name with an adapter, which transformers would apply silently."""
    with _wrap_loading_errors("config of the model", source, revision):
        found = find_adapter_config_file(str(source), revision=revision or "main")
    if found is None:
        return
    merged = "give a folder in which the adapter is merged into its base (peft's merge_and_unload)"
    if isinstance(source, Path) and not _weight_files(source):
        raise UserError(
            f"{source} contains an adapter without base weights (adapter_config.json): {merged}, e.g. best/ or "
            "last/ of a run"
        )
    raise UserError(
        f"{source} contains an adapter (adapter_config.json), which would be applied to the weights next to it, even "
        "if it is already merged into them: delete adapter_config.json and adapter_model.* to load those weights "
        f"unchanged, or {merged}"
    )


def _check_config(folder: Path) -> None:
    _check_no_adapter(folder)
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder} has no config.json: it is not a model folder, or it is incomplete")
    _verify_checksums(folder, TEXT_PATTERNS)


def _verify_checksums(folder: Path, patterns: tuple[str, ...]) -> None:
    """Raises ``UserError`` if files have changed in a folder with checksums, e.g. a run's best/."""
    if has_checksums(folder) and (problem := describe_change(folder, only=patterns, digest=cached_digest)) is not None:
        raise UserError(
            f"{folder}: {problem}: copy or export the folder again, or remove its {SEAL} if the change is intended"
        )


def _check_folder(folder: Path) -> None:
    _check_config(folder)
    _verify_checksums(folder, WEIGHT_PATTERNS)
    files = _weight_files(folder)
    if not files:
        raise UserError(
            f"{folder} has no weight file ({' or '.join(WEIGHT_PATTERNS)}) besides config.json: the folder is "
            "incomplete"
        )
    for index in sorted(folder.glob("*.index.json")):
        try:
            shards = set(parse_json(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(
                f"{folder}: {index.name} is not a list of weight files ({error!r}), so the folder is "
                "incomplete: copy it again"
            ) from error
        absent = sorted(shards - {file.name for file in folder.iterdir()})
        if absent:
            raise UserError(
                f"{folder}: {index.name} lists {len(shards)} weight files, but {len(absent)} are missing (first: "
                f"{absent[0]}): copy the folder again"
            )


def _weight_files(folder: Path) -> list[Path]:
    files = {file for pattern in WEIGHT_PATTERNS for file in folder.glob(pattern)}
    return sorted(file for file in files if file.name not in ADAPTERS)


@contextmanager
def _wrap_loading_errors(what: str, path: str | Path, revision: str | None) -> Iterator[None]:
    """Converts transformers' errors inside the context to ``UserError`` and silences the library's logging."""
    local = Path(path).expanduser().is_dir()
    level = library.get_verbosity()
    library.set_verbosity(logging.CRITICAL)  # transformers logs tables of keys; we report the problems ourselves
    try:
        with nullcontext() if local else offline_if_unreachable():
            yield
    except Exception as error:  # the library raises anything from OSError to SafetensorError here
        raise UserError(_describe_load_error(what, path, revision, error, local)) from error
    finally:
        library.set_verbosity(level)


def _describe_load_error(what: str, path: str | Path, revision: str | None, error: Exception, local: bool) -> str:
    words = shorten(str(error) or type(error).__name__, 300, placeholder=" ...").rstrip(".")
    start = f"could not load the {what} {str(path)!r}" + (f" at revision {revision!r}" if revision else "")
    if "trust_remote_code" in str(error):
        return (
            f"{start}: it contains its own Python code (auto_map in its JSON files), which attnpo never runs: choose a "
            "model whose architecture and tokenizer are part of this version of transformers"
        )
    if local:
        return f"{start}: {words}; if a file in this folder is damaged or missing, copy or export the folder again"
    if (Path("outputs") / path).is_dir():
        return f"{start}: did you mean {Path('outputs') / path}?"
    if (reason := hub_unreachable_reason()) is not None:
        return (
            f"{start}: there is no such local folder, no complete copy in the hub's cache, and {reason}: give an "
            "existing folder, or download the files on a machine with network access"
        )
    return (
        f"{start} from the hub: {words}; there is no local folder of that name either: check the name, the revision "
        "and the network"
    )


def load_chat(model: ModelSpec) -> tuple[ModelSpec, ChatFormat]:
    """Loads a model's chat format; returns the settings, with template files replaced by their text, and the format."""
    model = replace(
        model,
        chat_template=read_template(model.chat_template),
        fallback_template=read_template(model.fallback_template, "model.fallback_template"),
    )
    chat = ChatFormat(
        load_tokenizer(model.path, model.revision),
        model.chat_template,
        fallback=model.fallback_template,
        kwargs=model.chat_template_kwargs,
        fold_system=model.fold_system,
        rows=config_vocabulary_size(load_config(model.path, model.revision)),
    )
    chat.tokenizer.chat_template = with_default_template(chat.tokenizer, chat.chosen.text)
    return model, chat
