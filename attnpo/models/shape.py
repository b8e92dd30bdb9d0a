"""What a model's config says of its size: parameter counts and widths, read before any weight is loaded.

Parameters are counted on the real module tree, built without memory (a second for 8B).
"""

from dataclasses import dataclass

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from attnpo.models.backbone import layer_stack, parameter_count
from attnpo.models.described import backbone_of, on_meta, widest
from attnpo.models.lora import expert_names, target_names
from attnpo.models.spec import LoraSpec


@dataclass(frozen=True)
class Shape:
    """Parameter counts and widths of a model.

    ``blocks`` are the parameters of all decoder blocks, ``block`` those of the largest, ``cast`` those of the blocks'
    matrices (what autocast copies), ``linear`` those of the blocks' linear layers (what 4 bits can hold), ``largest``
    those of the largest tensor, ``adapters`` those LoRA would add, of ``rank`` numbers inside (0 without).
    """

    parameters: int
    blocks: int
    block: int
    cast: int
    linear: int
    largest: int
    adapters: int
    rank: int
    layers: int
    hidden: int
    inner: int
    queries: int
    keys: int
    heads: int
    vocab: int

    @classmethod
    def of(cls, config: PretrainedConfig, lora: LoraSpec | None = None) -> "Shape":
        """Returns the shape of the causal LM that ``config`` describes; layers that differ count as the widest of them.

        Raises UserError when it describes none.
        """
        model = on_meta(config)
        stack = layer_stack(backbone_of(model))
        text = config.get_text_config()
        hidden = widest(text, "hidden_size") or 1
        heads = widest(text, "num_attention_heads") or 1
        width = widest(text, "head_dim") or hidden // heads
        inner = widest(text, "intermediate_size") or 4 * hidden
        return cls(
            parameters=parameter_count(model),
            blocks=parameter_count(stack),
            block=max(map(parameter_count, stack)),
            cast=sum(parameter.numel() for parameter in stack.parameters() if parameter.dim() > 1),
            linear=sum(part.weight.numel() for part in stack.modules() if isinstance(part, nn.Linear | Conv1D)),
            largest=max(parameter.numel() for parameter in model.parameters()),
            adapters=0 if lora is None else adapters_of(model, lora),
            rank=0 if lora is None else lora.rank,
            layers=len(stack),
            hidden=hidden,
            inner=inner * (widest(text, "num_experts_per_tok") or 1),
            queries=heads * width,
            keys=(widest(text, "num_key_value_heads") or heads) * width,
            heads=heads,
            vocab=widest(text, "vocab_size") or 1,
        )


def adapters_of(model: PreTrainedModel, lora: LoraSpec) -> int:
    """Returns the number of parameters LoRA adds: rank x (inputs + outputs) of every linear layer or expert with an
    adapter.
    """
    weights = (model.get_submodule(name).get_parameter("weight") for name in target_names(model, lora))
    experts = (model.get_parameter(name).shape for name in expert_names(model, lora))
    return lora.rank * (sum(sum(weight.shape) for weight in weights) + sum(n * (a + b) for n, a, b in experts))
