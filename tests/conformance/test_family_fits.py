"""The commands of docs/running.md that train a model of each kind, on models as `families` leaves them."""

import shlex
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from attnpo import fit
from attnpo.cli.entry import run_entry
from tests.conformance.families import PAIRS
from tests.conformance.family_models import tiny_model
from tests.conformance.family_tokenizer import tiny_tokenizer, write_pairs
from tests.docs.commands import of_markdown

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "running.md").read_text(encoding="utf-8")
KINDS = ("gemma2", "gpt_oss", "qwen3_next", "qwen3_moe", "gemma4", "deepseek_v3")
TRAINED = ("gpt_oss", "qwen3_next", "gemma4", "deepseek_v3")
"""Sinks in eager attention, linear attention, a config of parts, latent keys; no kind has a command apart."""
# Where the test runs, and as little of it as a test needs.
HERE = ["trainer.accelerator=cpu", "trainer.threads=1", "trainer.progress=false", "trainer.max_epochs=1", "store=store",
        "callbacks.samples=0", "callbacks.report=false"]  # fmt: skip


def commands(word: str) -> list[list[str]]:
    """The words of the page's commands that have ``word``."""
    return [shlex.split(command) for command in of_markdown(PAGE) if word in command]


def test_the_page_has_a_command_for_every_kind() -> None:
    (left,) = commands("keep=outputs/tiny")
    assert f"only={','.join(KINDS)}" in left and left[1:4] == ["-m", "tests.conformance", "families"]
    fits = [shlex.join(words) for words in commands("model.path=outputs/tiny/")]
    assert fits == [fits[0].replace(KINDS[0], kind) for kind in KINDS]


@pytest.mark.parametrize("kind", list(TRAINED))
def test_a_kind_trains_by_its_command(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = Path("outputs/tiny") / kind
    tiny_model(kind).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    write_pairs(Path("outputs/tiny") / PAIRS)
    (words,) = commands(f"model.path={folder} ")
    assert words[:3] == ["python", "-m", "attnpo.fit"]
    with caplog.at_level("INFO"):
        status = run_entry(fit.main, "fit", [*words[3:], *HERE], "", "", complete=lambda cfg: cfg.prepare is None)
    assert status == 0
    log = [record.getMessage() for record in caplog.records]
    assert any(
        line.startswith(f"judge pass: reading {'1 layer' if kind == 'qwen3_next' else '4 layers'} of ") for line in log
    )
    assert any(line.startswith("weights: 8 pairs computed") for line in log)
    exported = Path("outputs") / f"tiny_{kind}" / "last"
    ids = AutoTokenizer.from_pretrained(exported)("Tell me about the soup.", return_tensors="pt").input_ids
    with torch.no_grad():
        before, after = (
            AutoModelForCausalLM.from_pretrained(each)(input_ids=ids).logits for each in (folder, exported)
        )
    assert torch.isfinite(after).all() and not torch.equal(before, after)
