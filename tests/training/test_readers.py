"""Exported folders in transformers 4.x, in an environment of its own: the same logits, ids and greedy text."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers import PreTrainedTokenizerFast as Tokenizer

from attnpo.models.lora import add_lora
from attnpo.models.spec import LoraSpec
from attnpo.training.export import Exporter
from tests.training.test_export import LLAMA3, small, tokenizer

__all__ = ["tokenizer"]  # the fixture

PYTHON = Path(__file__).resolve().parents[2] / ".venv-readers" / "bin" / "python"
READ = """
import json, sys, torch, transformers
from transformers import AutoModelForCausalLM, AutoTokenizer
torch.set_num_threads(1)
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], torch_dtype="auto").eval()
messages = [{"role": "user", "content": "good <|done|> good"}]
text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
ids = tokenizer(text, add_special_tokens=False)["input_ids"]
with torch.no_grad():
    logits = model(torch.tensor([[5 + place % 20 for place in range(100)]])).logits[0, -1].float()
made = model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)[0, len(ids):].tolist()
print(json.dumps({"version": transformers.__version__, "ids": ids, "logits": logits.tolist(), "text": made,
    "special": tokenizer.all_special_tokens, "dtype": str(model.dtype), "ends": model.generation_config.eos_token_id}))
"""

pytestmark = pytest.mark.skipif(
    not PYTHON.is_file(), reason="no environment with transformers 4.x (.venv-readers); `make readers` builds it"
)


def read_there(folder: Path) -> dict[str, Any]:
    done = subprocess.run([PYTHON, "-c", READ, folder], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert found["version"].startswith("4.")
    return found


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_an_exported_folder_is_the_same_model_there(tokenizer: Tokenizer, tmp_path: Path, dtype: str | None) -> None:
    """Llama 3's positions, a token of the template's own, and (float32) a merged adapter."""
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|done|>"]})
    model = small(tokenizer, rope_parameters=dict(LLAMA3))
    if dtype is None:
        add_lora(model, LoraSpec(rank=2, alpha=8.0))
        torch.manual_seed(1)
        for name, value in model.named_parameters():
            if "lora_B" in name:
                value.data.normal_(0, 0.2)
    Exporter(tokenizer, dtype=dtype).export(model, tmp_path)
    there = read_there(tmp_path)
    here, own = (
        AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto").eval(),
        AutoTokenizer.from_pretrained(tmp_path),
    )
    messages = [{"role": "user", "content": "good <|done|> good"}]
    ids = own.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    with torch.no_grad():
        logits = here(torch.tensor([[5 + place % 20 for place in range(100)]])).logits[0, -1].float()
    made = here.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)[0, len(ids) :].tolist()
    assert there["ids"] == ids and own.convert_tokens_to_ids("<|done|>") in ids
    assert set(there["special"]) == set(own.all_special_tokens)
    assert there["text"] == made and there["ends"] == here.generation_config.eos_token_id
    assert there["dtype"] == str(here.dtype) == f"torch.{dtype or 'float32'}"
    torch.testing.assert_close(torch.tensor(there["logits"]), logits, rtol=1e-5, atol=1e-5)


def test_without_the_older_keys_it_would_be_another_model(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """The base for positions is lost without a word, which is why the keys are written."""
    model = small(tokenizer, rope_parameters=dict(LLAMA3))
    Exporter(tokenizer).export(model, tmp_path)
    right = read_there(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps({k: v for k, v in config.items() if k not in ("rope_theta", "rope_scaling")})
    )
    wrong = read_there(tmp_path)
    assert (torch.tensor(wrong["logits"]) - torch.tensor(right["logits"])).abs().max() > 1e-2
