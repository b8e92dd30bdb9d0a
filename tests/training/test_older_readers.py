"""Keys of transformers 4.x beside those of 5.x, and what is said where they do not suffice."""

import pytest
from transformers import AutoConfig

from attnpo.training.export import UNKNOWN_ROTARY, rotary_warning, to_older_config, to_older_tokenizer_config

PLAIN = {"rope_type": "default", "rope_theta": 1e6}
LAYERED = {"full_attention": dict(PLAIN), "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}


def test_plain_positions_have_no_scaling() -> None:
    made = to_older_config({"model_type": "llama", "rope_parameters": PLAIN})
    assert made == {"model_type": "llama", "rope_parameters": PLAIN, "rope_theta": 1e6, "rope_scaling": None}


def test_a_part_of_the_head_is_rotated() -> None:
    made = to_older_config({"rope_parameters": PLAIN | {"partial_rotary_factor": 0.4}})
    assert made["partial_rotary_factor"] == 0.4 and made["rope_scaling"] is None


def test_a_configuration_within_another() -> None:
    inner = {"model_type": "text", "dtype": "bfloat16", "rope_parameters": PLAIN}
    made = to_older_config({"text_config": inner, "quantization_config": {"dtype": "int8"}})
    assert made["text_config"]["rope_theta"] == 1e6 and made["text_config"]["torch_dtype"] == "bfloat16"
    assert made["quantization_config"] == {"dtype": "int8"}


def test_settings_per_kind_of_layer_get_no_key_that_would_be_wrong() -> None:
    assert to_older_config({"rope_parameters": LAYERED}) == {"rope_parameters": LAYERED}


def test_a_tokenizer_class_that_both_know_stays() -> None:
    assert to_older_tokenizer_config({"tokenizer_class": "LlamaTokenizerFast"}) == {
        "tokenizer_class": "LlamaTokenizerFast"
    }


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("llama", None),
        ("mistral", None),
        ("qwen2", None),
        ("gpt2", None),
        ("gemma3_text", UNKNOWN_ROTARY),
        ("gpt_neox", UNKNOWN_ROTARY),
    ],
)
def test_what_is_said(kind: str, said: str | None) -> None:
    assert rotary_warning(AutoConfig.for_model(kind)) == said
