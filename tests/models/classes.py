"""Tiny random models of many classes of the library, saved as folders: what a user's ``model.path`` may name."""

from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

VOCAB = 97
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MOE = {"num_local_experts": 2, "num_experts_per_tok": 1}
ROUTED = {"n_routed_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    **ROUTED,
}
INDEXED = {**LATENT, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 4}
HALF = ["linear_attention", "full_attention"] * 2
TURNS = ["sliding_attention", "full_attention"] * 2
LINEAR = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
BERT = {"max_position_embeddings": 64, "head_dim": None, "num_key_value_heads": None}

OWN: dict[str, dict[str, Any]] = {
    "gemma2": {"sliding_window": 6, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 2.0},
    "gpt_oss": {"sliding_window": 6, **MOE, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    "deepseek_v4": {"sliding_window": 6, **INDEXED},
    "gemma3n_text": {
        "num_kv_shared_layers": 2,
        "layer_types": TURNS,
        "laurel_rank": 8,
        "altup_num_inputs": 2,
        "activation_sparsity_pattern": [0.0] * 4,
        "intermediate_size": [48, 48, 64, 64],
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCAB,
        "sliding_window": 6,
    },
    "gemma4_text": {
        "num_kv_shared_layers": 2,
        "layer_types": TURNS,
        "global_head_dim": 16,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCAB,
        "sliding_window": 6,
    },
    "modernbert-decoder": {"local_attention": 8},
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
        "num_experts": 2,
        "num_experts_per_tok": 1,
    },
    "qwen3_next": {"layer_types": HALF, **LINEAR, **EXPERTS, "shared_expert_intermediate_size": 16},
    "deepseek_v32": INDEXED,
    "doge": {},
    "falcon": {"head_dim": None, "num_key_value_heads": None},
    "mamba": {"state_size": 8},
    "bert": BERT,
    "stablelm": {},
    "llama": {},
    "phi3": {},
}


def tiny_folder(kind: str, folder: Path, **more: Any) -> Path:
    """``folder`` with a random model of the library's type ``kind``, its attention peaked; seeded."""
    fields = {**SHAPE, **OWN[kind], **more}
    config = CONFIG_MAPPING[kind](**{name: value for name, value in fields.items() if value is not None})
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(8.0 if name.endswith(("q_proj.weight", "k_proj.weight")) else 3.0)
        if name.endswith(("sinks", "sink_bias")):
            parameter.data.normal_()
    model.save_pretrained(folder)
    return folder
