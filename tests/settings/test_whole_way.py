"""The paper's settings from pairs to answers, as a user types them: nothing is overridden but the model and the data.

A two-layer model of each setting's own class goes through four optimiser steps, export and generate; one of them in
more commands: weigh, fit with a SIGTERM between the steps, resume. The hardware groups are not needed: without a GPU
the same settings run on a CPU.
"""

import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from attnpo.config.compose import load
from tests import warm
from tests.settings.small_models import write_model, write_pairs

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = {"llama3_8b_base_sft": "llama", "llama3_8b_instruct": "llama", "mistral_7b_base_sft": "mistral"}
STOPPED = "mistral_7b_base_sft"  # and gone on with; how, hangs on no setting
STEPS, BATCH = 4, 32
PATIENCE = 400.0


class Shell:
    """Commands in a folder of their own, with a store of their own and no network."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "ATTNPO_CACHE": str(folder / "store"),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        }

    def start(self, name: str, *words: str) -> tuple[warm.Process, Path]:
        log = self.folder / f"log-{time.monotonic_ns()}.txt"
        log.touch()
        return warm.start(["-m", f"attnpo.{name}", *words], self.environment, log, self.folder), log

    def run(self, name: str, *words: str, status: int = 0) -> str:
        process, log = self.start(name, *words)
        assert process.wait(PATIENCE) == status, log.read_text()[-3000:]
        return log.read_text()

    def run_and_terminate(self, line: str, name: str, *words: str) -> tuple[int, str]:
        """Exit status and log of a command that got SIGTERM once its log held ``line``."""
        process, log = self.start(name, *words)
        limit = time.monotonic() + PATIENCE
        while line not in log.read_text():
            assert process.poll() is None and time.monotonic() < limit, log.read_text()[-3000:]
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        return process.wait(PATIENCE), log.read_text()


@pytest.mark.parametrize("setting", sorted(SETTINGS))
def test_from_pairs_to_answers(setting: str, tmp_path: Path) -> None:
    cfg = load("fit", [f"setting={setting}"])
    corpus = write_pairs(tmp_path / "data", {cfg.data.train_split: STEPS * BATCH, cfg.data.val_split: 8})
    write_model(SETTINGS[setting], corpus, tmp_path / "model")
    shell = Shell(tmp_path)
    # An untrained judge has no verdict to give, which the settings stop at.
    words = [f"setting={setting}", "judge.low_label_mass=warn"]
    words += [f"model.path={tmp_path / 'model'}", f"data.path={tmp_path / 'data'}"]

    run, pairs = tmp_path / "outputs" / "run", STEPS * BATCH + 8
    if setting == STOPPED:
        said = shell.run("weigh", *words)
        assert f"weights: 0 of {pairs} pairs in the store" in said and f"weights: {pairs} pairs computed" in said
        status, log = shell.run_and_terminate("step 1/4", "fit", *words, "name=run")
        assert status == 143, log[-3000:]
        assert "judge pass: reading" not in log, "weigh had put every weight into the store"
        assert "resume=auto" in log.strip().splitlines()[-1]
        halfway = torch.load(run / "last" / "state.ckpt", weights_only=True)["global_step"]
        assert 1 <= halfway < STEPS
        shell.run("fit", *words, "name=run", "resume=auto")
    else:
        said = shell.run("fit", *words, "name=run")
        assert f"weights: {pairs} pairs computed" in said
    result = json.loads((run / "result.json").read_text())
    assert result["steps"] == STEPS
    rows = (run / "metrics.csv").read_text().splitlines()
    column = rows[0].split(",").index("train/loss")
    losses = {int(row.split(",")[0]): row.split(",")[column] for row in rows[1:]}
    assert [step for step, loss in sorted(losses.items()) if loss] == list(range(STEPS))
    assert abs(result["metrics"]["first/val/loss"] - 0.693147) < 1e-3

    for name in ("best", "last"):
        exported = AutoModelForCausalLM.from_pretrained(run / name)
        assert type(exported).__name__.lower().startswith(SETTINGS[setting])
        tokenizer = AutoTokenizer.from_pretrained(run / name)
        ends = GenerationConfig.from_pretrained(run / name).eos_token_id
        assert tokenizer.eos_token_id in (ends if isinstance(ends, list) else [ends])
        assert tokenizer.chat_template == AutoTokenizer.from_pretrained(tmp_path / "model").chat_template
        card = (run / name / "README.md").read_text()
        step = torch.load(run / name / "state.ckpt", weights_only=True)["global_step"]
        assert "TwDPO" in card and f"step {step}" in card and cfg.model.path.partition("/")[0] not in card

    answers = tmp_path / "answers.jsonl"
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"Tell me about {word}."}) + "\n" for word in ("rain", "maps")))
    shell.run(
        "generate",
        f"model.path={run / 'best'}",
        f"data.path={prompts}",
        f"output={answers}",
        "sampling.max_new_tokens=8",
    )
    assert len(answers.read_text().splitlines()) == 2
    assert OmegaConf.load(run / "config.yaml").optimizer.lr == 1e-6
