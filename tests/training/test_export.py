"""Exported folders: they load without attnpo, stop where a turn ends, and hold every weight once."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
)
from transformers import (
    PreTrainedTokenizerFast as Tokenizer,
)

from attnpo.lab.testbed.grammar import Grammar
from attnpo.lab.testbed.tokenizer import build_tokenizer
from attnpo.models.loading import load_model, load_tokenizer
from attnpo.models.lora import add_lora, has_adapters, merge_state_dict
from attnpo.models.spec import LoraSpec
from attnpo.schema import UserError
from attnpo.system.files import write_checksums
from attnpo.text.chat import ChatFormat
from attnpo.training.export import Exporter
from attnpo.training.module import shard_model
from tests.conformance.family_models import tiny_model
from tests.training.tiny import SHAPE

IDS = torch.tensor([[5, 9, 3, 11, 7, 4]])


@pytest.fixture
def tokenizer() -> Tokenizer:
    return build_tokenizer(Grammar())


def small(tokenizer: Tokenizer, **more: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    shape: dict[str, Any] = SHAPE | {"vocab_size": len(tokenizer), "max_position_embeddings": 2048, **more}
    return LlamaForCausalLM(LlamaConfig(**shape)).eval()


def logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


def names_in(folder: Path) -> list[str]:
    names: list[str] = []
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            names += list(opened.keys())
    return sorted(names)


def test_the_folder_loads_to_the_same_logits_and_talks_the_same_language(tokenizer: Tokenizer, tmp_path: Path) -> None:
    model = small(tokenizer)
    (tmp_path / "state.ckpt").write_bytes(b"the trainer's own")
    Exporter(tokenizer).export(model, tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(logits(loaded), logits(model)) and loaded.dtype == torch.float32
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert again.chat_template == tokenizer.chat_template and again.get_vocab() == tokenizer.get_vocab()
    files = {file.name for file in tmp_path.iterdir()}
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} <= files
    # What vLLM's loader and from_pretrained look for: nothing but the weights may match.
    assert [file.name for pattern in ("*.safetensors", "*.bin", "*.pt") for file in tmp_path.glob(pattern)] == [
        "model.safetensors"
    ]
    assert (tmp_path / "state.ckpt").read_bytes() == b"the trainer's own"
    assert "README.md" not in files


def test_templates_that_the_base_has_by_name_are_exported(tokenizer: Tokenizer, tmp_path: Path) -> None:
    default, tools = str(tokenizer.chat_template), "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}"
    tokenizer.chat_template = {"default": default, "tool_use": tools}
    Exporter(tokenizer, chat_template="{{ bos_token }}" + default).export(small(tokenizer), tmp_path)
    exported = AutoTokenizer.from_pretrained(tmp_path)
    assert exported.chat_template == {"default": "{{ bos_token }}" + default, "tool_use": tools}
    assert tokenizer.chat_template["default"] == default, "the run's own tokenizer stays as it is"
    write_checksums(tmp_path)
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    with pytest.raises(UserError, match=r"tool_use\.jinja"):
        load_tokenizer(tmp_path)


# ------------------------------------------------------------------------------------------------ other readers

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip


@pytest.mark.parametrize("lora", [False, True], ids=["plain", "merged"])
def test_keys_of_transformers_4_stand_beside_the_newer_ones(tokenizer: Tokenizer, tmp_path: Path, lora: bool) -> None:
    """Without them 4.x knows no tokenizer class and takes 10000 as the base for positions without a word."""
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|done|>"]})
    model = small(tokenizer, rope_parameters=dict(LLAMA3))
    if lora:
        add_lora(model, LoraSpec(rank=2, alpha=8.0))
    Exporter(tokenizer, dtype="bfloat16").export(model, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["rope_parameters"] == LLAMA3 and config["rope_theta"] == 500000.0
    assert config["rope_scaling"] == {key: value for key, value in LLAMA3.items() if key != "rope_theta"}
    assert config["torch_dtype"] == config["dtype"] == "bfloat16"
    named = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert named["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert named["additional_special_tokens"] == ["<|done|>"] and "extra_special_tokens" not in named
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="float32")
    assert loaded.config.rope_parameters == LLAMA3
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert again.all_special_tokens == tokenizer.all_special_tokens and again.get_vocab() == tokenizer.get_vocab()


# ------------------------------------------------------------------------------------------------ generation


def test_generation_stops_at_every_id_that_ends_a_turn(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """EOS and the template's own end of turn, as in Llama 3, and not the id 2 of LlamaConfig, which is BOS here."""
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|done|>"]})
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ '<assistant>' + m['content'] + '<|done|>' }}"
        "{% else %}{{ '<bos><user>' + m['content'] }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
    )
    ends = ChatFormat(tokenizer).end_ids
    done = tokenizer.convert_tokens_to_ids("<|done|>")
    assert ends == {tokenizer.eos_token_id, done}
    model = small(tokenizer)
    model.generation_config.temperature, model.generation_config.do_sample = 0.6, True
    Exporter(tokenizer, tuple(ends)).export(model, tmp_path)
    loaded = GenerationConfig.from_pretrained(tmp_path)
    assert set(loaded.eos_token_id) == ends and loaded.pad_token_id == tokenizer.pad_token_id
    assert (loaded.temperature, loaded.do_sample) == (0.6, True)
    assert AutoModelForCausalLM.from_pretrained(tmp_path).generation_config.eos_token_id == loaded.eos_token_id


def test_the_bases_own_ends_stay_only_where_they_are_special(tokenizer: Tokenizer, tmp_path: Path) -> None:
    word = next(index for index in range(len(tokenizer)) if index not in tokenizer.added_tokens_decoder)
    special = next(
        index
        for index, token in tokenizer.added_tokens_decoder.items()
        if token.special and index not in (tokenizer.eos_token_id, tokenizer.bos_token_id)
    )
    model = small(tokenizer)
    model.generation_config.eos_token_id = [word, special, tokenizer.bos_token_id]
    Exporter(tokenizer).export(model, tmp_path)
    ends = GenerationConfig.from_pretrained(tmp_path).eos_token_id
    assert sorted(ends) == sorted({special, tokenizer.eos_token_id})
    assert model.generation_config.eos_token_id == [word, special, tokenizer.bos_token_id], (
        "the model itself is left as it is"
    )


def test_ids_in_the_bases_own_generation_config_stay(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Qwen's has a BOS that its tokenizer lacks, others another padding; a word may end an answer there."""
    word = next(index for index in range(len(tokenizer)) if index not in tokenizer.added_tokens_decoder)
    special = int(tokenizer.bos_token_id)
    tokenizer.bos_token = None
    model = small(tokenizer)
    GenerationConfig(bos_token_id=special, pad_token_id=special, eos_token_id=[word]).save_pretrained(tmp_path / "base")
    model.generation_config = GenerationConfig.from_pretrained(tmp_path / "base")
    Exporter(tokenizer).export(model, tmp_path / "out")
    found = GenerationConfig.from_pretrained(tmp_path / "out")
    assert (found.bos_token_id, found.pad_token_id) == (special, special) != (None, tokenizer.pad_token_id)
    assert found.eos_token_id == sorted([word, int(tokenizer.eos_token_id)])


def test_generation_settings_that_cannot_be_saved_cost_no_export(
    tokenizer: Tokenizer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Bases with a temperature but without sampling exist, and transformers refuses to write such settings."""
    model = small(tokenizer)
    model.generation_config.temperature, model.generation_config.do_sample = 0.6, False
    with pytest.raises(ValueError, match="temperature"):
        model.save_pretrained(tmp_path / "plain")
    with caplog.at_level(logging.WARNING):
        Exporter(tokenizer).export(model, tmp_path / "ours")
    assert "so they are not exported" in caplog.text
    assert GenerationConfig.from_pretrained(tmp_path / "ours").eos_token_id == tokenizer.eos_token_id


def test_padding_of_the_last_caller_is_not_exported(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """tokenizer.json keeps padding and truncation, and whoever loads it would pad and cut every text."""
    tokenizer(["good", "good good"], padding=True, truncation=True, max_length=4)
    assert tokenizer.backend_tokenizer.padding is not None
    Exporter(tokenizer).export(small(tokenizer), tmp_path)
    stored = json.loads((tmp_path / "tokenizer.json").read_text())
    assert stored["padding"] is None and stored["truncation"] is None


# ------------------------------------------------------------------------------------------------ weights


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_tied_weights_are_written_once_and_stay_tied(tokenizer: Tokenizer, tmp_path: Path, dtype: str | None) -> None:
    model = small(tokenizer, tie_word_embeddings=True)
    Exporter(tokenizer, dtype=dtype).export(model, tmp_path)
    assert "lm_head.weight" not in names_in(tmp_path) and "model.embed_tokens.weight" in names_in(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="float32")
    assert loaded.lm_head.weight.data_ptr() == loaded.model.embed_tokens.weight.data_ptr()
    wanted = model.lm_head.weight.to(torch.bfloat16).float() if dtype else model.lm_head.weight
    assert torch.equal(loaded.lm_head.weight, wanted)


def test_another_number_format_is_that_of_file_and_config_alone(tokenizer: Tokenizer, tmp_path: Path) -> None:
    model = small(tokenizer)
    Exporter(tokenizer, dtype="bfloat16").export(model, tmp_path)
    assert model.dtype == torch.float32 and model.config.dtype in (None, torch.float32, "float32")
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert loaded.dtype == torch.bfloat16 and loaded.model.rotary_emb.inv_freq.dtype == torch.float32
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value.to(torch.bfloat16)), name


def test_big_models_are_cut_into_files_with_an_index(tokenizer: Tokenizer, tmp_path: Path) -> None:
    model = small(tokenizer)
    Exporter(tokenizer, max_shard_size="20KB").export(model, tmp_path)
    (tmp_path / "plain").write_text("")
    wanted = (tmp_path / "plain").stat().st_mode  # the umask rules the files
    assert {file.name: file.stat().st_mode for file in tmp_path.iterdir() if file.stat().st_mode != wanted} == {}
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    assert sorted(index["weight_map"]) == names_in(tmp_path)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), logits(model))


@pytest.mark.parametrize("tied", [False, True])
def test_adapters_are_exported_merged(tokenizer: Tokenizer, tmp_path: Path, tied: bool) -> None:
    """The folder is a plain model with the base's names; the trained policy keeps its adapters."""
    model = small(tokenizer, tie_word_embeddings=tied)
    plain = names_in_model(model)
    before = logits(model)
    add_lora(model, LoraSpec(rank=2, alpha=8.0))
    torch.manual_seed(1)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "lora_B" in name:
                value.normal_(0, 0.2)
    trained = logits(model)
    assert not torch.allclose(trained, before, atol=1e-3)
    Exporter(tokenizer).export(model, tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert not (tmp_path / "adapter_config.json").exists() and names_in_model(loaded) == plain
    assert names_in(tmp_path) == [name for name in plain if not (tied and name == "lm_head.weight")]
    torch.testing.assert_close(logits(loaded), trained, rtol=1e-5, atol=1e-5)
    assert torch.equal(logits(model), trained)


def add_small_adapters(path: Path, dtype: str, quantize: str | None = None) -> PreTrainedModel:
    """Returns a base with adapters that moved by less than bfloat16 resolves in most weights."""
    model = load_model(path, dtype=dtype, quantize=quantize)
    model = add_lora(model, LoraSpec(rank=2, alpha=8.0))
    torch.manual_seed(1)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "lora_A" in name or "lora_B" in name:
                value.normal_(0, 0.005)
    return model


@pytest.fixture(params=["llama", "gpt2", "qwen3_moe"])
def base(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Writes a folder with a model in bfloat16: plain linear layers, transposed ones, fused experts."""
    tiny_model(request.param).to(torch.bfloat16).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def test_a_float32_export_of_a_bfloat16_base_holds_all_of_its_adapters(
    base: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    Exporter(tokenizer, dtype="float32").export(add_small_adapters(base, "bfloat16"), tmp_path / "out")
    start, wanted = logits(load_model(base)), logits(add_small_adapters(base, "float32"))
    found = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto"))
    assert float((found - wanted).norm() / (wanted - start).norm()) < 1e-2


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")  # peft's wrapper reads it
@pytest.mark.parametrize("quantize", [None, "nf4"])
def test_adapters_lie_beside_the_merged_weights_as_peft_reads_them(
    base: Path, tokenizer: Tokenizer, tmp_path: Path, quantize: str | None
) -> None:
    """With the base as it was trained they are the trained policy to the bit; whoever loads the folder sees none."""
    trained, out = add_small_adapters(base, "bfloat16", quantize), tmp_path / "out"
    facts = {"base": {"name": "base", "path": str(base), "hub": None, "revision": None}}
    Exporter(tokenizer, facts=facts).export(trained, out)
    merged = AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    assert not has_adapters(merged) and merged.dtype == torch.bfloat16
    again = PeftModel.from_pretrained(load_model(base, dtype="bfloat16", quantize=quantize), str(out / "adapter"))
    assert torch.equal(logits(again.eval()), logits(trained))
    assert again.peft_config["default"].base_model_name_or_path == str(base)
    card = (out / "README.md").read_text()
    assert "on the policy as trained, with unmerged adapters on the base in " + ("4 bits" if quantize else "bf") in card
    assert "The merged weights differ from that policy: rounding the merged weights to bfloat16 lost " in card


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_weights_of_four_bits_are_merged_in_float32(tokenizer: Tokenizer, tmp_path: Path, dtype: str) -> None:
    tiny_model("llama").to(torch.bfloat16).save_pretrained(tmp_path / "base")
    start = merge_state_dict(load_model(tmp_path / "base", dtype="bfloat16", quantize="nf4"))
    model = add_small_adapters(tmp_path / "base", "bfloat16", "nf4")
    Exporter(tokenizer, dtype=dtype).export(model, tmp_path / "out")
    layer = model.model.layers[1].mlp.down_proj
    moved = 4.0 * (layer.lora_B["default"].weight @ layer.lora_A["default"].weight).detach()
    wanted = start["model.layers.1.mlp.down_proj.weight"].float() + moved
    found = load_file(tmp_path / "out" / "model.safetensors")["model.layers.1.mlp.down_proj.weight"]
    assert torch.equal(found, wanted.to(getattr(torch, dtype)))


def names_in_model(model: PreTrainedModel) -> list[str]:
    return sorted(model.state_dict())


def test_a_merged_policy_is_not_called_quantised(tokenizer: Tokenizer, tmp_path: Path) -> None:
    model = small(tokenizer)
    model.config.quantization_config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    Exporter(tokenizer).export(model, tmp_path)
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    assert model.config.quantization_config is not None


def test_experts_come_back_under_the_names_of_the_files_they_came_from(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """transformers holds the experts of a layer in one tensor; files, and vLLM, have one per expert."""
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=2, initializer_range=0.2,
    )  # fmt: skip
    MixtralForCausalLM(config).save_pretrained(tmp_path / "start")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "start").eval()
    Exporter(tokenizer).export(model, tmp_path / "out")
    assert names_in(tmp_path / "out") == names_in(tmp_path / "start")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out")), logits(model))


def test_a_sharded_policy_is_exported_whole(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """FSDP2 over one process: tensors are gathered, the folder names the original class, other ranks keep nothing."""
    model = small(tokenizer)
    wanted = {name: value.clone() for name, value in model.state_dict().items()}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        shard_model(model, init_device_mesh("cpu", (1,)))
        assert merge_state_dict(model, keep=False) == {}
        Exporter(tokenizer).export(model, tmp_path / "elsewhere", write=False)
        assert not (tmp_path / "elsewhere").exists()
        Exporter(tokenizer).export(model, tmp_path / "out")
    finally:
        dist.destroy_process_group()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in wanted.items())
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]


# ------------------------------------------------------------------------------------------------ beside the weights


def test_the_card_tells_the_facts_the_step_and_the_format(tokenizer: Tokenizer, tmp_path: Path) -> None:
    facts = {"base": {"name": "tiny", "path": "tiny"}, "hyperparameters": {"seed": 31}}
    exporter = Exporter(tokenizer, dtype="bfloat16", facts=facts)
    exporter.export(small(tokenizer), tmp_path, metrics={"val/loss": 0.4375}, step=12)
    card = (tmp_path / "README.md").read_text()
    assert "| seed | 31 |" in card and "Validation at step 12" in card and "| val/loss | 0.4375 |" in card
    assert "weights in bfloat16" in card


def test_no_file_tells_where_the_base_lay(tokenizer: Tokenizer, tmp_path: Path) -> None:
    home = tmp_path / "private-place"
    small(tokenizer).save_pretrained(home)
    tokenizer.save_pretrained(home)
    model, read = AutoModelForCausalLM.from_pretrained(home), AutoTokenizer.from_pretrained(home)
    Exporter(read).export(model, tmp_path / "out")
    for file in (tmp_path / "out").iterdir():
        assert b"private-place" not in file.read_bytes(), file.name
