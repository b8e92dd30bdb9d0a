"""Adds low-rank adapters to a causal LM, merges them into plain weights, and disables them to obtain the reference.

The adapter layers are peft's, injected in place, so the model keeps its class, its parts and its vocabulary head. peft
is imported only here, and only if a model has or gets adapters.
"""

import copy
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from jaxtyping import Bool, Float, Int
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from attnpo.models.backbone import eval_mode
from attnpo.models.logps import LMHead, to_full_tensor
from attnpo.models.scored import ScoredLM
from attnpo.models.spec import LoraSpec
from attnpo.schema import ModelInputs, TokenStats, UserError
from attnpo.system.files import Json, apply_umask

if TYPE_CHECKING:
    from peft.tuners.lora import LoraConfig, LoraLayer

ADAPTER = "default"
PLAIN = nn.Parameter  # type of a weight that is not in 4 bits
PIECE = 1 << 24  # weights processed at once; each needs four temporary float32 numbers
FUSED = 3  # number of dimensions of a tensor that holds the weights of several experts
BASE = "base_layer."  # attribute under which peft keeps the adapted module
PEFT_MODEL = "base_model.model."  # prefix of parameter names saved by peft's wrapper


def add_lora(model: PreTrainedModel, spec: LoraSpec) -> PreTrainedModel:
    """Adds new adapters to the model, freezes its own weights, and returns it; the logits do not change.

    Adapters on a half-precision base are float32.

    Raises:
        UserError: peft is missing, a target is neither a linear module nor a fused expert, a target is the vocabulary
            head, or the model already has adapters.
    """
    if find_spec("peft") is None:
        raise UserError("model.lora needs the package peft: pip install 'attnpo[lora]', or set model.lora=null")
    from peft import LoraConfig
    from peft.tuners.tuners_utils import cast_adapter_dtype

    if has_adapters(model):
        raise UserError(
            "model.lora: the model already has an adapter: merge the adapter, and set model.path to the merged folder"
        )
    targets = target_names(model, spec)
    transposed = any(isinstance(model.get_submodule(name), Conv1D) for name in targets)
    model.add_adapter(
        LoraConfig(
            r=spec.rank,
            lora_alpha=spec.alpha,  # type: ignore[arg-type]  # declared int, but only divided by the rank
            lora_dropout=spec.dropout,
            target_modules=targets,
            target_parameters=expert_tensor_names(model, spec),
            fan_in_fan_out=transposed,
            task_type="CAUSAL_LM",
        ),
        ADAPTER,
    )
    cast_adapter_dtype(model, ADAPTER)
    return model


def has_adapters(model: nn.Module) -> bool:
    """Returns whether the model has adapters."""
    return bool(getattr(model, "peft_config", None))


def dtype_name(dtype: torch.dtype) -> str:
    """Returns the name of a dtype as used in configs."""
    return str(dtype).removeprefix("torch.")


@dataclass
class MergeRounding:
    """Rounding loss from merging adapters into weights, summed over all adapted weights.

    ``update``, ``lost``: squared norms of the update and of its lost part. ``unchanged``: how many of the ``weights``
    equal the base's after rounding to ``dtype``.
    """

    base: str
    dtype: str
    update: float = 0.0
    lost: float = 0.0
    weights: int = 0
    unchanged: int = 0

    @classmethod
    def for_merge(cls, model: PreTrainedModel, dtype: torch.dtype) -> "MergeRounding":
        """Creates an empty record for merging a model's adapters into weights in ``dtype``."""
        quantized = getattr(model.config, "quantization_config", None) is not None
        return cls("4 bits" if quantized else dtype_name(model.dtype), dtype_name(dtype))

    def add(self, base: Tensor, merged: Tensor, written: Tensor) -> None:
        """Adds a weight to the record; ``merged`` is base plus update before rounding, ``written`` after rounding."""
        pieces = zip(*(torch.split(whole.flatten(), PIECE) for whole in (base, merged, written)), strict=True)
        for old, exact, rounded in pieces:
            start, update = old.to(rounded.dtype), exact - old.to(exact.dtype)
            missed = update - (rounded.to(exact.dtype) - start.to(exact.dtype))
            self.weights += rounded.numel()
            self.unchanged += int((rounded == start).sum())
            self.update += float(update.norm()) ** 2
            self.lost += float(missed.norm()) ** 2

    @property
    def lost_share(self) -> float:
        """Returns the norm of the lost part relative to the update; 0 for untrained adapters."""
        return (self.lost / self.update) ** 0.5 if self.update else 0.0

    @property
    def unchanged_share(self) -> float:
        """Returns the share of the adapted weights that equal the base's."""
        return self.unchanged / max(1, self.weights)

    def to_json(self) -> dict[str, Json]:
        """Returns the values stored in checkpoint records and run results."""
        shares = {"lost_share": self.lost_share, "unchanged_share": self.unchanged_share}
        return {"base": self.base, "dtype": self.dtype, **shares}

    def describe(self) -> str:
        """Describes the rounding loss in a sentence."""
        return (
            f"rounding the merged weights to {self.dtype} lost {100 * self.lost_share:.3g} % of the adapters' update "
            f"(in norm) and left {100 * self.unchanged_share:.3g} % of the adapted weights equal to the base's"
        )


def merge_state_dict(
    model: nn.Module, *, keep: bool = True, dtype: torch.dtype | None = None, rounding: MergeRounding | None = None
) -> dict[str, Tensor]:
    """Merges the adapters into a CPU state dict of the plain base model, with the base's own parameter names.

    Sums are computed in float32 and rounded once to ``dtype`` (None: the base's); ``rounding`` records the loss. The
    model is not changed, and tensors without an adapter may share its memory. 4-bit weights are dequantized. Sharded
    tensors are gathered one by one (a collective: every rank must call it); if ``keep`` is false, the dict is empty.
    """
    adapted = _adapter_layers(model)
    packed = {name: value for name, value in model.named_parameters() if hasattr(value, "quant_state")}
    state = {}
    for name, value in model.state_dict().items():
        # A module with several adapted tensors has nested adapters.
        owners = [path for path in parent_paths(name) if path in adapted]
        if any(not name.startswith(f"{owner}.{BASE}") for owner in owners):
            continue  # the adapter's own
        if not packed.keys().isdisjoint(parent_paths(name)):
            continue  # the scales of 4-bit weights
        whole = _dequantize(packed[name]) if name in packed else to_full_tensor(value).detach()
        plain = name
        for owner in owners:
            inner = plain.removeprefix(f"{owner}.{BASE}")
            if inner == getattr(adapted[owner], "parameter_name", "weight"):
                whole = _merge_weight(whole, adapted[owner], dtype or whole.dtype, rounding)
            plain = f"{owner}.{inner}"
        if name in packed and getattr(model.get_submodule(name.rpartition(".")[0]), "source_cls", None) is Conv1D:
            whole = whole.T.contiguous()  # the quantized module stores its weight transposed
        if keep:
            state[plain] = whole.cpu()
    return state


def adapter_state(model: nn.Module, *, keep: bool = True) -> dict[str, Tensor]:
    """Gathers the adapters' tensors on the CPU under peft's names (a collective: every rank must call it).

    If ``keep`` is false, the dict is empty.
    """
    if not has_adapters(model):
        return {}
    from peft import get_peft_model_state_dict

    own = get_peft_model_state_dict(model, model.state_dict(), ADAPTER, save_embedding_layers=False)
    whole = {name: to_full_tensor(value).detach() for name, value in own.items()}
    return {name: value.cpu() for name, value in whole.items()} if keep else {}


def write_adapter(
    model: PreTrainedModel, state: Mapping[str, Tensor], folder: Path, base: str | None, revision: str | None
) -> None:
    """Writes ``adapter_state`` and the name of the base in the format that ``PeftModel.from_pretrained`` loads."""
    config = cast("LoraConfig", copy.deepcopy(model.peft_config[ADAPTER]))
    config.base_model_name_or_path, config.revision, config.inference_mode = base, revision, True
    config.target_modules = sorted(config.target_modules or ())  # peft keeps a set: the file would differ each time
    config.save_pretrained(str(folder))
    weights = folder / "adapter_model.safetensors"
    named = {f"{PEFT_MODEL}{name}": value.contiguous() for name, value in state.items()}
    save_file(named, weights, metadata={"format": "pt"})
    apply_umask(weights)


class AdapterDisabledReference(ScoredLM):
    """Reference model: the policy with its adapters disabled, in eval mode and without gradients.

    It owns no parameters and follows the policy's device and sharding. Raises UserError for a policy without adapters.
    """

    model: PreTrainedModel
    policy: ScoredLM

    def __init__(self, policy: ScoredLM) -> None:
        nn.Module.__init__(self)  # ScoredLM.__init__ would register the model as a submodule
        if not has_adapters(policy.model):
            raise UserError("reference=adapter_off needs a policy with a new adapter: set model=lora")
        object.__setattr__(self, "policy", policy)
        object.__setattr__(self, "model", policy.model)
        self.chunk = policy.chunk
        self.training = False

    def train(self, mode: bool = True) -> "AdapterDisabledReference":
        """Returns self, always in eval mode; the policy's mode does not change."""
        return self

    def head(self) -> LMHead:
        """Returns the vocabulary head, shared by policy and reference."""
        return self.policy.head()

    def forward(
        self,
        inputs: ModelInputs,
        response_ids: Int[Tensor, "rows R"],
        response_mask: Bool[Tensor, "rows R"],
        requests: Collection[str] = frozenset({"logps"}),
        other: tuple[Float[Tensor, "rows R e"], LMHead] | None = None,
    ) -> TokenStats:
        """Computes statistics of all response tokens under the base, then restores the policy's mode and adapters."""
        with torch.no_grad(), eval_mode(self.policy), disable_adapters(self.policy.model):
            stats: TokenStats = self.policy(inputs, response_ids, response_mask, requests, other)
        return stats


@contextmanager
def disable_adapters(model: nn.Module) -> Iterator[None]:
    """Disables the adapters of ``model`` inside the context.

    Only sets the flag that peft's layers read; peft's own switch would make frozen adapters trainable.
    """
    layers = [layer for layer in _adapter_layers(model).values() if not layer._disable_adapters]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def _adapter_layers(model: nn.Module) -> "dict[str, LoraLayer]":
    """Returns all modules with an adapter by name; peft is imported only if the model can have one."""
    if not has_adapters(model):
        return {}
    from peft.tuners.lora import LoraLayer

    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}


def _linear_modules(model: nn.Module) -> dict[str, nn.Linear | Conv1D]:
    return {name: part for name, part in model.named_modules() if isinstance(part, nn.Linear | Conv1D)}


def target_names(model: PreTrainedModel, spec: LoraSpec) -> list[str]:
    """Returns the full names of the linear modules that get an adapter.

    Raises ``UserError`` for a target without a match.
    """
    head: object = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    linear, refused = _linear_modules(model), unadaptable_names(model)
    allowed = [name for name, part in linear.items() if part is not head and name.rpartition(".")[2] not in refused]
    experts = expert_tensor_names(model, spec)
    if isinstance(spec.target_modules, str):
        chosen = allowed
    else:
        chosen = [name for name in allowed if any(_is_target(name, target) for target in spec.target_modules)]
        for target in spec.target_modules:
            if not any(_is_target(name, target) for name in (*chosen, *experts)):
                is_head = any(_is_target(name, target) for name in linear)
                what = "is the vocabulary head, which cannot be adapted" if is_head else "matches no linear module"
                if target.rpartition(".")[2] in refused:
                    what = "is a module whose weight is not used as a plain matrix product, so an adapter is bypassed"
                short = dict.fromkeys(name.rpartition(".")[2] for name in allowed)
                raise UserError(
                    f"model.lora.target_modules: {target!r} {what}; the linear modules of {type(model).__name__} are "
                    f"{', '.join(short) or 'none'}"
                )
    if not chosen and not experts:
        raise UserError(f"model.lora: {type(model).__name__} has no linear module to adapt besides its head")
    return chosen


def expert_tensor_names(model: PreTrainedModel, spec: LoraSpec) -> list[str]:
    """Returns the full names of fused expert tensors [experts _ _] that get an adapter per expert.

    Empty if dropout is set, which peft cannot apply to experts, and for models with transposed linear layers, which
    peft rejects.
    """
    if spec.dropout or any(isinstance(module, Conv1D) for module in model.modules()):
        return []
    return [
        f"{owner}.{name}"
        for owner, module in model.named_modules()
        if hasattr(module, "is_transposed")
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.dim() == FUSED and len(parameter) > 1 and parameter.is_floating_point()
        if isinstance(spec.target_modules, str) or any(_is_target(f"{owner}.{name}", t) for t in spec.target_modules)
    ]


def unadaptable_names(model: PreTrainedModel) -> list[str]:
    """Returns the short names of linear modules that cannot be adapted because their weight is used directly."""
    if find_spec("peft") is None:
        return []
    plain = (nn.Linear.forward, Conv1D.forward)
    from peft import LoraConfig
    from peft.tuners.tuners_utils import _check_lora_target_modules_mamba

    linear = _linear_modules(model)
    odd = [name for name, part in linear.items() if type(part).forward not in plain and type(part.weight) is PLAIN]
    refused = list(dict.fromkeys(name.rpartition(".")[2] for name in odd))
    for short in dict.fromkeys(name.rpartition(".")[2] for name in linear):
        try:
            _check_lora_target_modules_mamba(LoraConfig(), model, short)
        except ValueError:
            refused.append(short)
    return refused


def describe_adapter_coverage(model: PreTrainedModel, spec: LoraSpec) -> str:
    """Summarises for the log the share of parameters in adapted modules, and which modules are not adapted."""
    targets, experts = target_names(model, spec), expert_tensor_names(model, spec)
    owned = {f"{name}.weight" for name in targets} | set(experts)
    reached, stacked, total = 0, 0, 0
    first = ""
    for name, parameter in model.named_parameters():
        total += parameter.numel()
        if name in owned:
            reached += parameter.numel()
        elif parameter.dim() == FUSED and not isinstance(model.get_submodule(name.rpartition(".")[0]), nn.Conv1d):
            stacked, first = stacked + parameter.numel(), first or name
    words = f"model.lora: adapters on {len(targets)} linear modules"
    words += f" and {len(experts)} tensors of fused experts" if experts else ""
    words += f", which contain {reached / total:.0%} of the parameters"
    if stacked:
        words += f"; {stacked / total:.0%} are fused expert weights without an adapter ({first})"
        words += "; set model.lora.dropout=0 to adapt those that can be" if spec.dropout else ""
    refused = unadaptable_names(model)
    return words + (
        f"; none on {', '.join(refused)}, whose weight is not used as a plain matrix product" if refused else ""
    )


def _is_target(name: str, target: str) -> bool:
    return f".{name}".endswith(f".{target}")


def parent_paths(name: str) -> Iterator[str]:
    """Yields the paths of all modules that contain the tensor ``name``, longest first."""
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def _dequantize(weight: nn.Parameter) -> Tensor:
    from peft.utils.integrations import dequantize_bnb_weight

    return dequantize_bnb_weight(weight).detach()


def _merge_weight(base: Tensor, layer: "LoraLayer", dtype: torch.dtype, rounding: MergeRounding | None) -> Tensor:
    """Adds the product of the adapter matrices to the weight in at least float32, and rounds once to ``dtype``."""
    total = base.to(torch.promote_types(base.dtype, torch.float32), copy=True)
    for adapter in layer.active_adapters:
        maps = (layer.lora_A[adapter], layer.lora_B[adapter])
        down, up = (to_full_tensor(part.get_parameter("weight")).detach().to(total) for part in maps)
        if base.dim() == FUSED:  # peft keeps the ranks of A by expert, those of B the experts by rank
            each = up.reshape(len(up), -1, len(base)).permute(2, 0, 1) @ down.reshape(len(base), -1, down.shape[1])
            delta = each if getattr(layer, "_did_swap_in_out_features", False) else each.mT
        else:
            delta = (up @ down).T if getattr(layer, "fan_in_fan_out", False) else up @ down
        total.add_(delta, alpha=layer.scaling[adapter])
    merged = total.to(dtype)
    if rounding is not None:
        rounding.add(base, total, merged)
    return merged
