"""A judge that knows nothing, through the commands: said in the terminal, on the page, in result and tables."""

import json
from pathlib import Path

import pytest

from attnpo import fit, report
from attnpo.cli.entry import run_entry
from tests import own_texts


def test_a_judge_that_knows_nothing_is_a_warning_wherever_its_run_is_shown(
    babbler: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    own_texts.write_rows(tmp_path / "data" / "train.jsonl", 30)
    own_texts.write_rows(tmp_path / "data" / "test.jsonl", 50, start=30)
    overrides = [
        "setting=real_smoke",
        "experiment=none",
        f"model.path={babbler}",
        f"data.path={tmp_path / 'data'}",
        'data.train_rows="30"',
        'data.val_rows="20"',
        "batch.pairs=4",
        "batch.micro=2",
        f"store={tmp_path / 'store'}",
        f"output={tmp_path}",
        "name=run",
        "trainer.max_steps=1",
        "trainer.accelerator=cpu",
        "trainer.threads=1",
        "trainer.progress=false",
        "callbacks.checkpoints=false",
        "callbacks.samples=0",
    ]
    assert run_entry(fit.main, "fit", overrides, "", "") == 0
    (said,) = [record for record in caplog.records if "does not know" in record.getMessage()]
    assert said.levelname == "WARNING"
    text = said.getMessage().removeprefix("warning: ")
    folder = tmp_path / "run"
    judge = json.loads((folder / "result.json").read_text())["inputs"]["judge"]
    assert judge["pairs"] >= 20 and judge["other_tokens"] == 1.0 and judge["warning"] == text
    assert text.startswith(
        f"the judge does not know which answer is better (right in {100 * judge['pair_accuracy']:.0f} % of "
    )
    assert "; 100 % of its verdicts name no label): its weights say nothing about preference" in text
    assert f'<p class="warning">WARNING: {text}</p>' in (folder / "report.html").read_text()
    capsys.readouterr()
    assert run_entry(report.main, "report", ["run", str(folder), f"output={tmp_path}", "name=told"], "", "",
                     positional="what") == 0  # fmt: skip
    for shown in (capsys.readouterr().out, next(tmp_path.glob("told/*.md")).read_text()):
        assert f"WARNING: run: {text}" in " ".join(shown.split())
