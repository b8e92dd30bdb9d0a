"""The content-addressed folders: what is in them, reuse, keys, races."""

import json
import logging
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from transformers import AutoModelForCausalLM, AutoTokenizer

from attnpo.schema import UserError
from attnpo.testbed import prepare as module
from attnpo.testbed.prepare import REPORT, Prepared, Testbed
from attnpo.testbed.pretrain import build_base


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_folders_are_plain_artefacts(prepared: Prepared, tiny_testbed: Testbed) -> None:
    names = {path.name for path in prepared.model_path.iterdir()}
    assert names >= {"config.json", "model.safetensors", "generation_config.json", "tokenizer.json", REPORT}
    model = AutoModelForCausalLM.from_pretrained(prepared.model_path)
    tokenizer = AutoTokenizer.from_pretrained(prepared.model_path)
    assert tokenizer.is_fast and tokenizer.chat_template
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert len(tokenizer) == model.config.vocab_size
    assert len(lines(prepared.data_path / "train.jsonl")) == 40
    assert len(lines(prepared.data_path / "validation.jsonl")) == 12
    trained = {row["prompt"] for row in lines(prepared.data_path / "train.jsonl")}
    assert trained.isdisjoint({row["prompt"] for row in lines(prepared.data_path / "test_prompts.jsonl")})
    assert prepared.report["digest"] == tiny_testbed.grammar.digest()


def test_second_call_reuses_and_says_so(
    prepared: Prepared, tiny_testbed: Testbed, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="attnpo.testbed"):
        again = tiny_testbed.prepare(prepared.model_path.parent)
    assert again.reused and not prepared.reused
    assert (again.model_path, again.data_path, again.report) == (
        prepared.model_path,
        prepared.data_path,
        prepared.report,
    )
    assert "testbed base: reused from" in caplog.text


def test_another_pair_count_keeps_the_base(prepared: Prepared, tiny_testbed: Testbed) -> None:
    stamp = (prepared.model_path / "model.safetensors").stat().st_mtime_ns
    fewer = replace(tiny_testbed, pairs=replace(tiny_testbed.pairs, train=8))
    other = fewer.prepare(prepared.model_path.parent)
    assert other.model_path == prepared.model_path and other.data_path != prepared.data_path
    assert (other.model_path / "model.safetensors").stat().st_mtime_ns == stamp
    assert lines(other.data_path / "train.jsonl") == lines(prepared.data_path / "train.jsonl")[:8]


def test_keys_change_with_every_part(tiny_testbed: Testbed) -> None:
    others = [
        replace(tiny_testbed, seed=1),
        replace(tiny_testbed, base=replace(tiny_testbed.base, steps=61)),
        replace(tiny_testbed, grammar=replace(tiny_testbed.grammar, style=True)),
    ]
    assert len({testbed.base_key() for testbed in [tiny_testbed, *others]}) == 4
    noisy = replace(tiny_testbed, pairs=replace(tiny_testbed.pairs, label_noise=0.3))
    assert noisy.base_key() == tiny_testbed.base_key() and noisy.data_key() != tiny_testbed.data_key()


def test_building_is_deterministic_and_keeps_the_random_state(tiny_testbed: Testbed, scratch: Path) -> None:
    recipe = replace(tiny_testbed.base, steps=6, judge_pairs=2)
    torch.manual_seed(99)
    before = torch.get_rng_state()
    for name, seed in (("one", 3), ("two", 3), ("three", 4)):
        build_base(tiny_testbed.grammar, recipe, scratch / name, seed=seed)
    assert torch.equal(before, torch.get_rng_state())
    one, two, three = ((scratch / name / "model.safetensors").read_bytes() for name in ("one", "two", "three"))
    assert one == two != three


def test_a_failed_build_leaves_nothing_behind(scratch: Path) -> None:
    def fail(folder: Path) -> dict[str, object]:
        (folder / "half").write_text("x", encoding="utf-8")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        module._ensure(scratch / "base-x", "base", fail)
    assert list(scratch.iterdir()) == []


def test_losing_a_race_uses_the_winner(scratch: Path) -> None:
    target = scratch / "base-x"

    def overtaken(folder: Path) -> dict[str, object]:
        target.mkdir()
        (target / REPORT).write_text('{"winner": true}', encoding="utf-8")
        return {"winner": False}

    module._ensure(target, "base", overtaken)
    assert json.loads((target / REPORT).read_text(encoding="utf-8")) == {"winner": True}
    assert [path.name for path in scratch.iterdir()] == ["base-x"]


def test_foreign_folder_in_the_way_is_an_error(scratch: Path) -> None:
    (scratch / "base-x" / "something").mkdir(parents=True)
    with pytest.raises(UserError, match="remove it and run again"):
        module._ensure(scratch / "base-x", "base", lambda folder: {})


def test_knobs_fit_a_structured_config() -> None:
    node = OmegaConf.structured(Testbed)
    for part in (node, node.grammar, node.base, node.pairs):
        OmegaConf.set_readonly(part, False)  # frozen dataclasses become read-only nodes
    merged = OmegaConf.merge(node, {"grammar": {"style": True}, "base": {"steps": 10}, "seed": 2})
    testbed = OmegaConf.to_object(merged)
    assert isinstance(testbed, Testbed)
    assert testbed.grammar.style and testbed.base.steps == 10 and testbed.seed == 2
    assert testbed.base_key() != Testbed().base_key()


def test_configs_are_checked_without_transformers() -> None:
    code = (
        "import sys; import attnpo.testbed.prepare, attnpo.testbed.scoring;"
        "sys.exit(any(name in sys.modules for name in ('transformers', 'torch', 'lightning')))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(module.__file__).parents[2])
