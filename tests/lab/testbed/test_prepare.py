"""The content-addressed folders: what is in them, reuse, keys, races."""

import json
import logging
import multiprocessing
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from transformers import AutoModelForCausalLM, AutoTokenizer

from attnpo.lab.testbed import prepare as module
from attnpo.lab.testbed.prepare import REPORT, Testbed
from attnpo.lab.testbed.pretrain import build_base
from attnpo.run.components import BuiltFolders
from attnpo.schema import UserError
from attnpo.system.files import describe_change
from tests.lab.testbed import racing


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_folders_are_plain_artefacts(built_folders: BuiltFolders, tiny_testbed: Testbed) -> None:
    names = {path.name for path in built_folders.model_path.iterdir()}
    assert names >= {"config.json", "model.safetensors", "generation_config.json", "tokenizer.json", REPORT}
    model = AutoModelForCausalLM.from_pretrained(built_folders.model_path)
    tokenizer = AutoTokenizer.from_pretrained(built_folders.model_path)
    assert tokenizer.is_fast and tokenizer.chat_template
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert len(tokenizer) == model.config.vocab_size
    assert len(lines(built_folders.data_path / "train.jsonl")) == 40
    assert len(lines(built_folders.data_path / "validation.jsonl")) == 12
    trained = {row["prompt"] for row in lines(built_folders.data_path / "train.jsonl")}
    assert trained.isdisjoint({row["prompt"] for row in lines(built_folders.data_path / "test_prompts.jsonl")})
    assert built_folders.report["digest"] == tiny_testbed.grammar.digest()


def test_second_call_reuses_and_says_so(
    built_folders: BuiltFolders, tiny_testbed: Testbed, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="attnpo.lab.testbed"):
        again = tiny_testbed.prepare(built_folders.model_path.parent)
    assert again.reused and not built_folders.reused
    assert (again.model_path, again.data_path, again.report) == (
        built_folders.model_path,
        built_folders.data_path,
        built_folders.report,
    )
    assert "testbed base: reused from" in caplog.text


def test_another_pair_count_keeps_the_base(built_folders: BuiltFolders, tiny_testbed: Testbed) -> None:
    stamp = (built_folders.model_path / "model.safetensors").stat().st_mtime_ns
    fewer = replace(tiny_testbed, pairs=replace(tiny_testbed.pairs, train=8))
    other = fewer.prepare(built_folders.model_path.parent)
    assert other.model_path == built_folders.model_path and other.data_path != built_folders.data_path
    assert (other.model_path / "model.safetensors").stat().st_mtime_ns == stamp
    assert lines(other.data_path / "train.jsonl") == lines(built_folders.data_path / "train.jsonl")[:8]


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
        module._ensure_built(scratch / "base-x", "base", fail)
    assert list(scratch.iterdir()) == []


def numbers(folder: Path, text: str = "1 2 3") -> dict[str, object]:
    (folder / "numbers").write_text(text, encoding="utf-8")
    return {"numbers": len(text)}


def test_losing_a_race_uses_the_winner(scratch: Path) -> None:
    target = scratch / "base-x"

    def overtaken(folder: Path) -> dict[str, object]:
        module._ensure_built(target, "base", lambda other: {**numbers(other), "winner": True})
        return {**numbers(folder), "winner": False}

    module._ensure_built(target, "base", overtaken)
    assert json.loads((target / REPORT).read_text(encoding="utf-8"))["winner"]
    assert [path.name for path in scratch.iterdir()] == ["base-x"]


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_a_foreign_folder_is_moved_aside(scratch: Path, caplog: pytest.LogCaptureFixture) -> None:
    (scratch / "base-x" / "something").mkdir(parents=True)
    assert not module._ensure_built(scratch / "base-x", "base", numbers)
    assert module._ensure_built(scratch / "base-x", "base", numbers)
    assert sorted(path.name for path in scratch.iterdir()) == ["base-x", "base-x.damaged"]
    assert (
        "base-x was changed since it was built (it has no digests.json): moved it to base-x.damaged and rebuilding"
        in caplog.text
    )


def test_a_folder_that_came_into_the_way_is_an_error(scratch: Path) -> None:
    def overtaken(folder: Path) -> dict[str, object]:
        (scratch / "base-x" / "something").mkdir(parents=True)
        return numbers(folder)

    with pytest.raises(
        UserError, match=r"something else is there \(it has no digests\.json\): remove it and run again"
    ):
        module._ensure_built(scratch / "base-x", "base", overtaken)
    assert [path.name for path in scratch.iterdir()] == ["base-x"]


def test_a_damaged_folder_that_cannot_be_moved_is_an_error(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module._ensure_built(scratch / "base-x", "base", numbers)
    numbers(scratch / "base-x", "1 2 4")

    def refuse(path: Path) -> Path:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(module, "rename_damaged", refuse)
    with pytest.raises(
        UserError, match=r"\(numbers has changed since it was written\) and cannot be moved aside .*remove it"
    ):
        module._ensure_built(scratch / "base-x", "base", numbers)


def test_what_another_process_has_built_meanwhile_is_put_back_and_used(
    scratch: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It has moved the damaged folder and built a sound one after this process looked, before it acted."""
    target = scratch / "base-x"
    module._ensure_built(target, "base", numbers)
    numbers(target, "1 2 4")
    move = module.rename_damaged

    def late(path: Path) -> Path:
        monkeypatch.setattr(module, "rename_damaged", move)
        module._ensure_built(target, "base", numbers)
        return move(path)

    monkeypatch.setattr(module, "rename_damaged", late)
    assert module._ensure_built(target, "base", numbers)
    assert (target / "numbers").read_text(encoding="utf-8") == "1 2 3"
    assert sorted(path.name for path in scratch.iterdir()) == ["base-x", "base-x.damaged"]
    assert len(warnings_in(caplog)) == 1


def test_processes_that_find_the_same_damage_all_end_well(scratch: Path) -> None:
    target = scratch / "base-x"
    target.mkdir(parents=True)
    racing.build(target)
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=racing.use, args=(str(target),)) for _ in range(3)]
    for process in workers:
        process.start()
    for process in workers:
        process.join(120)
    assert [process.exitcode for process in workers] == [0, 0, 0]
    assert describe_change(target) is None
    assert sorted(path.name for path in scratch.iterdir()) == ["base-x", "base-x.damaged"]


def test_a_rebuild_that_gives_another_base_says_so(scratch: Path, caplog: pytest.LogCaptureFixture) -> None:
    target = scratch / "base-x"
    module._ensure_built(target, "base", numbers)
    (target / "numbers").unlink()
    module._ensure_built(target, "base", lambda folder: numbers(folder, "1 2 4"))
    moved, differs = warnings_in(caplog)
    assert "numbers is missing" in moved and "base-x differs from the previous one in numbers" in differs


def test_pairs_of_another_base_are_made_anew(scratch: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The key of the pairs has that of the base, whose recipe may give other weights elsewhere."""
    base, data = scratch / "base-x", scratch / "data-x"

    def prepare(text: str) -> list[bool]:
        return [
            module._ensure_built(base, "base", lambda folder: numbers(folder, text)),
            module._ensure_built(data, "pairs", numbers, base),
        ]

    assert prepare("1") == [False, False] and prepare("1") == [True, True]
    shutil.rmtree(base)
    assert prepare("1") == [False, True]  # the same again
    shutil.rmtree(base)
    assert prepare("2") == [False, False]
    assert ["it was built from a different base-x" in line for line in warnings_in(caplog)] == [True]


def test_what_is_built_may_be_read_by_whom_the_umask_allows(built_folders: BuiltFolders) -> None:
    """The library writes weights for their owner alone."""
    plain = built_folders.model_path.parent / "plain"
    plain.write_text("x", encoding="utf-8")
    modes = {path.name: path.stat().st_mode for path in built_folders.model_path.iterdir()}
    assert set(modes.values()) == {plain.stat().st_mode}
    plain.unlink()


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
        "import sys; import attnpo.lab.testbed.prepare, attnpo.lab.testbed.scoring;"
        "sys.exit(any(name in sys.modules for name in ('transformers', 'torch', 'lightning')))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(module.__file__).parents[3])
