import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, save
from transformers import PreTrainedModel

from attnpo.models.backbone import parameter_count
from attnpo.models.loading import load_model, load_tokenizer, weights_fingerprint
from attnpo.schema import UserError
from tests.text.formats import GPT2, TESTS

Build = Callable[..., PreTrainedModel]


@pytest.fixture
def folder(tiny: Build, tmp_path: Path) -> Path:
    path = tmp_path / "model"
    tiny("llama").save_pretrained(path)
    return path


def test_loads_in_eval_mode_with_the_dtype_asked(folder: Path) -> None:
    model = load_model(folder, dtype="bfloat16")
    assert not model.training
    assert model.lm_head.weight.dtype == torch.bfloat16
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32
    assert load_model(str(folder)).dtype == torch.float32


def test_missing_places_say_what_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no folder at '\./nowhere' to load the tokenizer from"):
        load_tokenizer("./nowhere")
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="is a file: give the folder"):
        load_model(tmp_path / "file")


@pytest.mark.parametrize("load", [load_model, load_tokenizer, weights_fingerprint])
def test_a_hub_name_without_network_is_a_user_error(load: Callable[[str], object]) -> None:
    with pytest.raises(UserError, match=r"could not load the [\w ]+ 'attnpo-tests/not-there'.*network"):
        load("attnpo-tests/not-there")


def test_a_folder_below_outputs_is_suggested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outputs" / "lora" / "best").mkdir(parents=True)
    with pytest.raises(UserError, match=r"could not load the tokenizer 'lora/best': did you mean outputs/lora/best\?"):
        load_tokenizer("lora/best")


def test_fingerprint_follows_content_not_place(folder: Path, tmp_path: Path) -> None:
    before = weights_fingerprint(folder)
    copy = shutil.copytree(folder, tmp_path / "copy")
    assert weights_fingerprint(copy) == before
    file = copy / "model.safetensors"
    tensors = load(file.read_bytes())
    tensors["model.norm.weight"][0] += 1
    file.write_bytes(save(tensors, {"format": "pt"}))
    changed = weights_fingerprint(copy)
    assert changed["weights"] != before["weights"] and changed["config"] == before["config"]
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-3}))
    assert weights_fingerprint(copy)["config"] != before["config"]


def test_parameters_count_tied_ones_once(tiny: Build) -> None:
    loose, tied = tiny("llama"), tiny("llama", tie_word_embeddings=True)
    assert parameter_count(loose) - parameter_count(tied) == 97 * 32


def test_tokenizer_pads_with_a_token_it_has() -> None:
    from transformers import AutoTokenizer

    path = TESTS / GPT2
    plain = AutoTokenizer.from_pretrained(path)
    tokenizer = load_tokenizer(path)
    assert plain.pad_token_id is None
    assert tokenizer.pad_token_id == plain.eos_token_id and len(tokenizer) == len(plain)
    text = "The cat sat."
    assert tokenizer(text).input_ids == plain(text).input_ids
