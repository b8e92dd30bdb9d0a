"""The README's commands for one's own data: the model's own chat template trains, judges and is exported."""

import json
import logging
import re
import shlex
from ast import literal_eval
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoTokenizer,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from attnpo import evaluate, fit, show
from attnpo.cli.entry import run_entry
from attnpo.config.compose import CONFIG_DIR
from attnpo.judge.causal_judge import CausalJudge
from attnpo.run import messages
from tests.conformance.family_tokenizer import BAD, GOOD, tiny_tokenizer
from tests.docs.commands import ROOT

TEMPLATES = ROOT / "tests" / "text" / "templates"
SHAPE = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
GROUPED = {**SHAPE, "num_key_value_heads": 2, "head_dim": 16}
# Template in the folder, and the model that stands there. Gemma's refuses a system turn, Qwen3's adds an empty thought.
FAMILIES: dict[str, tuple[str | None, Any]] = {
    "llama": ("llama3", lambda ids: LlamaForCausalLM(LlamaConfig(**SHAPE, **ids))),
    "qwen3": ("qwen3", lambda ids: Qwen3ForCausalLM(Qwen3Config(**GROUPED, **ids))),
    "gemma3": ("gemma", lambda ids: Gemma3ForCausalLM(Gemma3TextConfig(**GROUPED, **ids))),
    "gpt2": (None, lambda ids: GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=2, **ids))),
}
WHOLE = ("gemma3", "gpt2")  # with all commands, the others with the first run alone
ROWS = [{"prompt": f"Tell me about soup {i}.", "chosen": f"Soup {i}? {GOOD}", "rejected": BAD} for i in range(20)]
TURNS = [
    {"role": "user", "content": "Why?"},
    {"role": "assistant", "content": "So."},
    {"role": "user", "content": "And then?"},
]
PLAIN = "<s>user:\nWhy?\nassistant:\nSo.</s>\nuser:\nAnd then?\nassistant:\n"
WORDING = (CONFIG_DIR / "judge" / "short.txt").read_text(encoding="utf-8")
BRIEF = (
    *("trainer.max_steps=1", "trainer.accelerator=cpu", "trainer.threads=1", "trainer.progress=false"),
    *("callbacks.samples=0", "callbacks.report=false"),
)


def write_model(family: str, folder: Path) -> None:
    """Writes a random model with byte pairs, its end of turn and the template of its family."""
    name, make = FAMILIES[family]
    template = None if name is None else (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8").removesuffix("\n")
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    words = sorted(set(re.findall(r"<[|]?\w+[|]?>", template or "")) - {"<think>"})
    tokenizer.add_special_tokens({"additional_special_tokens": words})
    torch.manual_seed(0)
    ids = {"vocab_size": len(tokenizer), "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    model: PreTrainedModel = make(ids)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def readme_commands() -> list[list[str]]:
    """Returns the words of the commands under "Your own data"."""
    text = (ROOT / "README.md").read_text(encoding="utf-8").partition("## Your own data")[2].partition("\n## ")[0]
    lines = [line.partition(" #")[0] for line in text.splitlines() if line.startswith("python -m attnpo.")]
    return [shlex.split(line.removeprefix("python -m attnpo.")) for line in lines]


def run_command(words: list[str], given: list[str]) -> None:
    """Runs one README command in this process."""
    name, *rest = words
    if name == "show":
        assert show.run_show([*rest, *given]) == 0
    elif name == "fit":
        assert run_entry(fit.main, name, [*rest, *given, *BRIEF], "", "") == 0
    else:
        rest.remove("benchmark=judge")
        assert (
            run_entry(evaluate.run_judge_passport, "passport", [*rest, *given, "passport.removal_pairs=0"], "", "") == 0
        )


def judged_texts(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    """Renders both rounds of every row as the short wording in a user turn of ``tokenizer``'s template."""
    found = set()
    for row in ROWS:
        for a, b in (("chosen", "rejected"), ("rejected", "chosen")):
            text = WORDING.format(question=row["prompt"], answer_a=row[a], answer_b=row[b])
            turn = [{"role": "user", "content": text}]
            found.add(tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True))
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_the_models_own_template_trains_judges_and_is_exported(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By the README's commands; a model without a template gets the plain one, with one warning."""
    write_model(family, tmp_path / "model")
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    monkeypatch.setattr(messages, "_said", set())
    read, prompts = CausalJudge.read, []

    def listen(judge: CausalJudge, asked: Any, **named: Any) -> Any:
        prompts.extend(asked)
        return read(judge, asked, **named)

    monkeypatch.setattr(CausalJudge, "read", listen)
    commands = readme_commands()
    assert [words[0] for words in commands] == ["evaluate", "fit", "fit", "show"]
    commands = commands if family in WHOLE else commands[1:2]
    runs = [f"run{number}" for number, words in enumerate(commands) if words[0] == "fit"]
    paths = {"MODEL": str(tmp_path / "model"), "PAIRS.jsonl": str(tmp_path / "pairs.jsonl")}
    for number, words in enumerate(commands):
        filled = [re.sub("MODEL|PAIRS.jsonl", lambda name: paths[name[0]], word) for word in words]
        with caplog.at_level(logging.INFO):
            run_command(filled, [f"name=run{number}", f"output={tmp_path}", f"store={tmp_path / 'store'}"])

    own = AutoTokenizer.from_pretrained(tmp_path / "model")
    for run in runs:
        exported = AutoTokenizer.from_pretrained(tmp_path / run / "best")
        shown = exported.apply_chat_template(TURNS, tokenize=False, add_generation_prompt=True)
        assert shown == (
            PLAIN
            if own.chat_template is None
            else own.apply_chat_template(TURNS, tokenize=False, add_generation_prompt=True)
        )
    # What is trained on and judged, rendered by plain transformers with the exported template.
    conversations = [
        exported.apply_chat_template(
            [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["chosen"]}],
            tokenize=False,
        )
        for row in ROWS
    ]
    lines = [record.getMessage() for record in caplog.records]
    trained = [literal_eval(line.partition("(masked): ...")[2]) for line in lines if "prompt (masked): ..." in line]
    assert len(trained) == len(runs) and all(any(text in whole for whole in conversations) for text in trained)
    assert {exported.decode(ids) for ids in prompts} == judged_texts(exported)
    origin = "the tokenizer's own" if own.chat_template is not None else "model.fallback_template"
    assert f"chat template: training uses {origin}; the judge prompt is a user turn in it" in lines
    assert lines.count(f"checkpoints: the exported chat template is the one used in training, {origin}") == len(runs)
    warnings = [
        record.getMessage()
        for record in caplog.records
        if "chat template" in record.getMessage() and record.levelno == logging.WARNING
    ]
    said = f"{tmp_path / 'model'}: the tokenizer has no chat template; model.fallback_template is used instead"
    assert warnings == ([said] if own.chat_template is None else [])
