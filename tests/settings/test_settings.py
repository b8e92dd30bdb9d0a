"""The paper's settings, as ``--cfg job`` prints them, against its table; what hardware may change; the judges."""

import csv
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, MistralConfig, PretrainedConfig

from attnpo.config.compose import CONFIG_DIR, compose, list_groups, load, validate
from attnpo.data.base import pairs_from_rows
from attnpo.data.rules import BatchPlan
from attnpo.judge.prompts import JudgePromptBuilder
from attnpo.judge.settings import TOKEN_BUDGET, JudgeRules
from attnpo.lab.studies.config import FitConfig
from attnpo.lab.studies.study import expand_arms
from attnpo.models.memory import GIB, MOST, ROUND, MemoryEstimate, estimate_pass, estimate_training, max_token_budget
from attnpo.models.spec import ModelSpec
from attnpo.run import combinations as settings
from attnpo.run.memory import choose_fastest_fit, make_memory_plan, maximize_token_budgets
from attnpo.schema import SIDES, Message, PreferencePair
from attnpo.text.alignment import align
from attnpo.text.chat import ChatFormat
from tests import own_texts
from tests.text.formats import EDGE_MERGE, GPT2, MISTRAL, SHARED, TESTS

SETTINGS = ("llama3_8b_base_sft", "llama3_8b_instruct", "mistral_7b_base_sft")
# Usable memory of each device in GiB and the number of devices.
HARDWARE = {
    **{"1x24gb": (23.6, 1), "1x80gb": (79.2, 1), "2x80gb": (79.2, 2), "1x141gb": (139.8, 1)},
    **{"8x80gb": (79.2, 8), "8x141gb": (139.8, 8)},
}
WHOLE = {"layers": 32, "heads": 32, "keys": 8, "hidden": 4096, "inner": 14336}


@cache
def composed(name: str, *overrides: str) -> FitConfig:
    """The configuration of a setting; composed once, so it must not be changed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(settings, "find_spec", lambda package: package)  # peft and torchao are extras
        return load("fit", [f"setting={name}", *overrides])


@cache
def setting(name: str, *overrides: str) -> dict[str, Any]:
    return composed(name, *overrides).values


def leaves(node: Any, path: str = "") -> dict[str, Any]:
    """Every value under its dotted key; lists are values."""
    if not isinstance(node, Mapping):
        return {path: node}
    found: dict[str, Any] = {}
    for key, value in node.items():
        found |= leaves(value, f"{path}.{key}".lstrip("."))
    return found


def header(file: Path) -> str:
    """The comment lines of a configuration."""
    lines = file.read_text(encoding="utf-8").splitlines()
    return " ".join(line.removeprefix("#").strip() for line in lines if line.startswith("#"))


# ------------------------------------------------------------------------------------------------ the paper's numbers

# Row of hyperparameters.csv -> the keys that hold its value.
KEYS = {
    ("training", "max_context_length"): "lengths.max_length",
    ("training", "max_prompt_length"): "lengths.max_prompt_length",
    ("training", "learning_rate"): "optimizer.lr",
    ("training", "beta"): "objective.beta",
    ("training", "batch_size"): "batch.pairs",
    ("training", "epochs"): "trainer.max_epochs",
    ("training", "scheduler"): "optimizer.schedule",
    ("training", "warmup_ratio"): "optimizer.warmup",
    ("training", "validate_every_steps"): "trainer.validate_every",
    ("training", "beta_search"): "grid.beta",
    ("weights", "layer"): "weights.layer",
    ("weights", "K"): "weights.postprocess.sink_tokens",
    ("weights", "K_prime"): "weights.postprocess.sink_min_length",
}
ELSEWHERE = {
    ("training", "train_examples"): "the rows of data.train_split: test_rows_of_the_splits",
    ("training", "validation_examples"): "the rows of data.val_split: test_rows_of_the_splits",
    ("training", "optimizer"): "the class that the optimizer node makes: test_the_optimiser_is_adamw",
}


def paper_rows(paper_tables: Path) -> dict[tuple[str, str], str]:
    with (paper_tables / "hyperparameters.csv").open(newline="", encoding="utf-8") as file:
        return {(row["group"], row["name"]): row["value"] for row in csv.DictReader(file)}


def number_or_word(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


@pytest.mark.parametrize("name", SETTINGS)
def test_every_hyperparameter_is_the_papers(name: str, paper_tables: Path) -> None:
    rows = paper_rows(paper_tables)
    asked = {key for key in rows if key[0] in ("training", "weights")}
    assert asked == KEYS.keys() | ELSEWHERE.keys()
    values = leaves(setting(name))
    for key, place in KEYS.items():
        wanted = [number_or_word(word) for word in rows[key].split()]
        found = values[place]
        assert (found if isinstance(found, list) else [found]) == wanted, place
    assert values["grid.lr"] == [float(rows["training", "learning_rate"])]


def test_the_optimiser_is_adamw(paper_tables: Path) -> None:
    for name in SETTINGS:
        made = composed(name).optimizer.build([torch.nn.Parameter(torch.ones(2))])
        assert type(made).__name__ == paper_rows(paper_tables)["training", "optimizer"]


@pytest.mark.parametrize("name", SETTINGS)
def test_what_the_authors_files_add(name: str) -> None:
    """Values that the paper's text leaves open, from its repository's training files."""
    values = leaves(setting(name))
    wanted = {
        "seed": 42,
        "batch.tokens": 4096,
        "trainer.gradient_clip_val": 1.0,
        "trainer.precision": "bf16-mixed",
        "model.dtype": "float32",
        "lengths.overlong": "cut",
        "reference": "cached",
        "callbacks.monitor": "val/loss",
        "callbacks.mode": None,
    }
    assert {key: values[key] for key in wanted} == wanted


SPLITS = {
    "llama3_8b_base_sft": ("ultrafeedback_binarized", "train_prefs", "test_prefs"),
    "llama3_8b_instruct": ("llama3_ultrafeedback", "train", "test"),
    "mistral_7b_base_sft": ("ultrafeedback_binarized", "train_prefs", "test_prefs"),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_rows_of_the_splits(name: str, paper_tables: Path) -> None:
    """The counts stand as comments beside the splits, since no file of the data is here."""
    data, train, val = SPLITS[name]
    node = setting(name)["data"]
    assert (node["train_split"], node["val_split"]) == (train, val)
    assert node["path"].rpartition("/")[2].replace("-", "_") == data
    own = (CONFIG_DIR / "setting" / f"{name}.yaml").read_text(encoding="utf-8")
    text = own if "train_split" in own else (CONFIG_DIR / "setting" / f"{SETTINGS[0]}.yaml").read_text(encoding="utf-8")
    rows = paper_rows(paper_tables)
    for part, split in (("train", train), ("validation", val)):
        count = int(rows["data", f"{data}_{part}"])
        assert re.search(rf"_split: {split} +# {count:,} rows", text), (split, count)


@pytest.mark.parametrize("name", SETTINGS)
def test_headers_hold_the_printed_results(name: str, paper_tables: Path) -> None:
    file = "mistral_7b_base_sft.csv" if name.startswith("mistral") else "main_results.csv"
    with (paper_tables / file).open(newline="", encoding="utf-8") as stream:
        rows = [
            row
            for row in csv.DictReader(stream)
            if row["base_model"].replace("-", "_") == name.replace("llama3", "llama_3")
        ]
    text = header(CONFIG_DIR / "setting" / f"{name}.yaml")
    wanted = {"Base": "base", "DPO": "DPO", "AttentionPO": "AttentionPO"}
    found = [row for row in rows if row["method"] in wanted]
    assert len(found) == 3
    for row in found:
        scores = f"{row['alpacaeval_lc']} / {row['alpacaeval_wr']}, {row['mt_bench']}, {row['arena_hard_wr']}"
        assert f"{wanted[row['method']]} {scores}" in text


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_alone_asks_for_no_gpu(name: str) -> None:
    trainer = setting(name)["trainer"]
    assert {trainer[key] for key in ("accelerator", "devices", "strategy")} == {"auto"}


def test_layers_of_the_papers_figure() -> None:
    for name in SETTINGS:
        study = composed(name, "experiment=layer_sweep").study
        layers = [arm.layer for arm in expand_arms(study, WHOLE["layers"]) if arm.layer is not None]
        assert layers == [1, 8, 16, 24, 32]
        assert study.grid.beta == (1e-3, 5e-3, 1e-2, 2e-2)


# ------------------------------------------------------------------------------------------------ hardware

LAYOUT = {
    *("trainer.accelerator", "trainer.devices", "trainer.strategy"),
    *("model.gradient_checkpointing", "model.logps_chunk", "model.compile"),
    *("batch.tokens", "batch.eval_tokens", "judge.token_budget"),
}
# Keys that change the numbers, and the words by which the file's header says so.
CHANGES: dict[str, dict[str, str]] = {
    "1x24gb": {
        "model.lora": "low-rank adapters",
        "model.dtype": "bf16 base",
        "reference": "the reference is the base",
        "live_reference": "the reference is the base",
    },
    "1x80gb": {
        "model.dtype": "bf16 weights",
        "optimizer.moments": "moments in 8 bits",
        "optimizer.stochastic_rounding": "stochastic rounding",
    },
    "2x80gb": {},
    "1x141gb": {},
    "8x80gb": {},
    "8x141gb": {},
}


def test_every_hardware_option_is_tested_here() -> None:
    assert list_groups()["hardware"] == sorted(HARDWARE)


@pytest.mark.parametrize("option", HARDWARE)
@pytest.mark.parametrize("name", SETTINGS)
def test_hardware_changes_only_what_its_header_says(name: str, option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "find_spec", lambda package: package)  # peft and torchao are extras
    validate(compose("fit", [f"setting={name}", f"hardware={option}"]))
    alone, with_it = leaves(setting(name)), leaves(setting(name, f"hardware={option}"))
    changed = {key for key in alone.keys() | with_it.keys() if alone.get(key) != with_it.get(key)}
    changed = {re.sub(r"^model\.lora\..*", "model.lora", key) for key in changed if not key.startswith("composed.")}
    assert changed - LAYOUT == CHANGES[option].keys()
    text = header(CONFIG_DIR / "hardware" / f"{option}.yaml")
    assert all(words in text for words in CHANGES[option].values())
    assert ("Changes no number" in text) == (not CHANGES[option])


def test_hardware_wins_over_the_setting_and_loses_to_the_command_line() -> None:
    assert setting(SETTINGS[0], "hardware=1x24gb")["reference"] == "adapter_off"
    words = ["hardware=2x80gb", "trainer.devices=4", "model.gradient_checkpointing=false", "optimizer=adamw8bit"]
    for order in (words, words[::-1]):
        values = leaves(setting(SETTINGS[0], *order))
        assert values["trainer.devices"] == 4
        assert not values["model.gradient_checkpointing"]
        assert values["optimizer.moments"] == "8bit"


def test_weigh_composes_what_fit_composes() -> None:
    overrides = [f"setting={SETTINGS[2]}", "hardware=1x24gb", "objective.beta=0.02"]
    weigh, fit = (compose(name, overrides) for name in ("weigh", "fit"))
    assert {**weigh, "_target_": fit["_target_"]} == {**fit, "export": None, "prune": None}


def config_of(name: str) -> PretrainedConfig:
    shape: dict[str, Any] = {
        "hidden_size": WHOLE["hidden"],
        "intermediate_size": WHOLE["inner"],
        "num_hidden_layers": WHOLE["layers"],
        "num_attention_heads": WHOLE["heads"],
        "num_key_value_heads": WHOLE["keys"],
    }
    mistral = name.startswith("mistral")
    return MistralConfig(vocab_size=32000, **shape) if mistral else LlamaConfig(vocab_size=128256, **shape)


def estimate(cfg: FitConfig, config: PretrainedConfig, capacity: float) -> MemoryEstimate:
    """Of training, with what ``auto`` stands for on devices of so many GiB."""
    room, choices, least = (
        int(capacity * GIB),
        cfg.model.memory_choices(),
        cfg.batch.resolve_auto(cfg.lengths.max_length),
    )
    place, _ = choose_fastest_fit([_estimate(cfg, model, config, least) for model in choices], room)
    return _estimate(
        cfg, choices[place], config, maximize_token_budgets(make_memory_plan(cfg), config, choices[place], room)
    )


def judge_estimate(cfg: FitConfig, config: PretrainedConfig, capacity: float) -> MemoryEstimate:
    def made(tokens: int) -> MemoryEstimate:
        return estimate_pass(config, dtype=cfg.judge.dtype, tokens=tokens)

    assert cfg.judge.token_budget == "auto"
    return made(max_token_budget(lambda tokens: made(tokens).fits(int(capacity * GIB)), TOKEN_BUDGET))


def _estimate(cfg: FitConfig, model: ModelSpec, config: PretrainedConfig, plan: BatchPlan) -> MemoryEstimate:
    devices = str(cfg.trainer.devices)
    return estimate_training(
        config,
        model,
        cfg.optimizer.moments,
        precision=cfg.trainer.precision,
        max_length=cfg.lengths.max_length,
        reference=cfg.reference,
        strategy=cfg.trainer.strategy,
        devices=int(devices) if devices.isdigit() else 1,
        micro=plan.pairs_per_forward,
        eval_micro=plan.eval_pairs_per_forward,
        tokens=plan.token_budget,
        eval_tokens=plan.eval_token_budget,
    )


@pytest.mark.parametrize("option", HARDWARE)
@pytest.mark.parametrize("name", SETTINGS)
def test_the_paper_models_fit_the_hardware(name: str, option: str) -> None:
    capacity, devices = HARDWARE[option]
    cfg = composed(name, f"hardware={option}")
    found = estimate(cfg, config_of(name), capacity)
    assert found.devices == devices
    assert found.fits(int(capacity * GIB)), found.lines(int(capacity * GIB))
    assert judge_estimate(cfg, config_of(name), capacity).fits(int(capacity * GIB))


# What each header says of an 8B model, in the order it says it: further overrides, or the judge.
SAID: dict[str, list[list[str] | None]] = {
    "1x24gb": [[], None],
    "1x80gb": [[], ["model.gradient_checkpointing=true", "batch.tokens=4096", "batch.eval_tokens=8192"]],
    "2x80gb": [[]],
    "1x141gb": [[], ["optimizer=adamw8bit"]],
    "8x80gb": [[]],
    "8x141gb": [[]],
}


@pytest.mark.parametrize("option", HARDWARE)
def test_headers_hold_the_estimates(option: str) -> None:
    sizes = []
    for overrides in SAID[option]:
        cfg = composed(SETTINGS[0], f"hardware={option}", *(overrides or []))
        config = config_of(SETTINGS[0])
        found = (judge_estimate if overrides is None else estimate)(cfg, config, HARDWARE[option][0])
        sizes.append(found.total / GIB)
    text = header(CONFIG_DIR / "hardware" / f"{option}.yaml")
    said = [float(number) for number in re.findall(r"(?:\(8B model: |judge pass |\(| and )(\d+\.\d)(?= GiB|\))", text)]
    assert said == [round(size, 1) for size in sizes]


# What fills each card for an 8B model: whether blocks are computed again, and tokens of a forward.
FILLED = {
    **{"1x24gb": (True, 13056), "1x80gb": (False, 6144), "2x80gb": (True, 5376), "1x141gb": (True, 14848)},
    **{"8x80gb": (False, 7936), "8x141gb": (False, 16384)},
}


@pytest.mark.parametrize("option", HARDWARE)
def test_a_card_is_filled_and_five_percent_of_it_stay_free(option: str) -> None:
    """One more step of tokens would not fit, if a process has so many; nor would blocks that keep their activations."""
    capacity, config = int(HARDWARE[option][0] * GIB), config_of(SETTINGS[0])
    cfg = composed(SETTINGS[0], f"hardware={option}")
    again, tokens = FILLED[option]
    for choice in cfg.model.memory_choices():
        plan = cfg.batch.resolve_auto(cfg.lengths.max_length)
        if choice.uses_checkpointing == again:
            plan = maximize_token_budgets(make_memory_plan(cfg), config, choice, capacity)
            assert (choice.chunk, plan.tokens, plan.eval_tokens) == (1024, tokens, MOST)
            assert _estimate(cfg, choice, config, plan).fits(capacity)
            if tokens < 2 * cfg.lengths.max_length * cfg.batch.pairs // HARDWARE[option][1]:
                assert not _estimate(cfg, choice, config, replace(plan, tokens=tokens + ROUND)).fits(capacity)
            return
        assert not _estimate(cfg, choice, config, plan).fits(capacity)


# ------------------------------------------------------------------------------------------------ long pairs

FRAME = 512  # tokens that are left for the judge's wording and the chat around it


def test_every_length_is_tested_here() -> None:
    assert list_groups()["lengths"] == ["16k", "8k"]


@pytest.mark.parametrize("length", [8, 16])
@pytest.mark.parametrize("name", ["testbed", "real_smoke", SETTINGS[2]])
def test_a_length_goes_with_any_setting_and_adds_up(name: str, length: int) -> None:
    made, tokens = composed(name, f"lengths={length}k"), length * 1024
    assert (made.lengths.max_length, made.judge.max_length) == (tokens, tokens)
    assert FRAME + made.lengths.max_prompt_length + 2 * made.judge.max_response_length == tokens
    assert (made.batch.tokens, made.batch.eval_tokens, made.batch.micro) == ("auto", 2 * tokens, None)
    assert made.batch.resolve_auto(tokens).tokens == 2 * tokens
    assert (made.model.gradient_checkpointing, made.model.logps_chunk) == ("auto", "auto")


def test_a_length_wins_over_hardware_and_loses_to_the_command_line() -> None:
    words = ["hardware=1x141gb", "lengths=8k", "model=lora", "judge.max_length=7000"]
    for order in (words, words[::-1]):
        made = composed(SETTINGS[2], *order)
        assert made.model.gradient_checkpointing == "auto" and made.model.lora is not None
        assert (made.lengths.max_length, made.judge.max_length) == (8192, 7000)


@pytest.mark.parametrize("length", [8, 16])
def test_the_judge_reads_prompts_and_answers_of_that_length_whole(length: int) -> None:
    """One token more than its rules add up to and what the frame leaves is cut, and counted."""
    made = composed(SETTINGS[0], f"lengths={length}k")
    prompts = JudgePromptBuilder(made.judge.prompt_rules(), chat_of(GPT2, LINES))
    prompt, answers = made.lengths.max_prompt_length, made.judge.max_response_length

    def pair(more: int) -> PreferencePair:
        question = [Message(role="user", content="word" + " word" * (prompt - 1 + more))]
        return PreferencePair.from_texts(question, "good" + " good" * (answers - 1), "bad" + " bad" * (answers - 1))

    for seen in prompts.build(pair(0)):
        assert length * 1024 - FRAME < len(seen.input_ids) < length * 1024 and not seen.cut
        assert {stop - start for start, stop in seen.spans.values()} == {answers}
    first, _ = prompts.build(pair(FRAME))
    assert first.cut and len(first.input_ids) < length * 1024


@pytest.mark.parametrize("name", list_groups()["setting"])
def test_a_setting_leaves_what_a_model_brings(name: str) -> None:
    """Its chat template, with the values of its variables; only a template for a tokenizer without one may be named."""
    for hardware in (None, *HARDWARE):
        made = setting(name, *([] if hardware is None else [f"hardware={hardware}"]))
        for part in ("model", "judge", "other_judge", "verbalizer"):
            assert made[part]["chat_template"] is made[part].get("chat_template_kwargs") is None
        assert made["judge"]["chat"] is True and made["model"]["fold_system"] is False
        assert made["model"].get("fallback_template") == (None if name != "real_smoke" else "model/plain_chat.jinja")


# ------------------------------------------------------------------------------------------------ judges

# Chats of the models whose tokenizers cannot be here, on tokenizers of the same habits.
TURN = "{{ m['role'] }}:\n{{ m['content'] }}{{ eos_token }}"
LINES = f"{{% for m in messages %}}{TURN}\n{{% endfor %}}{{% if add_generation_prompt %}}assistant:\n{{% endif %}}"
ZEPHYR = (
    "{% for m in messages %}\n{{ '<|' + m['role'] + '|>\n' + m['content'] + eos_token }}\n"
    "{% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>' }}\n{% endif %}\n{% endfor %}"
)
INST = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] }}[/INST]"
    "{% else %} {{ m['content'] }}{{ eos_token }}{% endif %}{% endfor %}"
)
LOSSLESS = [
    ("llama3_8b_base_sft", EDGE_MERGE, None),
    ("llama3_8b_base_sft", GPT2, LINES),
    ("mistral_7b_base_sft", MISTRAL, ZEPHYR),
    ("mistral_inst", MISTRAL, INST),
]
if SHARED.is_dir():  # what ours are like
    real = {name: str(SHARED / "models/tokenizers" / name) for name in ("edge_merge_2k", "gpt2", "mistral_v3")}
    LOSSLESS += [
        ("llama3_8b_base_sft", real["edge_merge_2k"], None),
        ("llama3_8b_base_sft", real["gpt2"], LINES),
        ("mistral_7b_base_sft", real["mistral_v3"], ZEPHYR),
        ("mistral_inst", real["mistral_v3"], INST),
    ]


@pytest.fixture(scope="module")
def pairs() -> list[PreferencePair]:
    """Pairs of our own, and the paper's kind of data where it is at hand."""
    whole = pairs_from_rows(own_texts.rows(70)).pairs
    # The judge reads answers without blanks around them, which these rules do not speak of.
    found = [pair for pair in whole if all(pair.response(side) == pair.response(side).strip() for side in SIDES)]
    for file in SHARED.glob("data/ultrafeedback_sample/test.jsonl"):
        found += pairs_from_rows(map(json.loads, file.read_text(encoding="utf-8").splitlines())).pairs
    return found


def rules(judge: str) -> JudgeRules:
    made: JudgeRules = composed("real_smoke", f"judge={judge}").judge.prompt_rules()
    return made


def chat_of(tokenizer: str, template: str | None) -> ChatFormat:
    return ChatFormat(AutoTokenizer.from_pretrained(TESTS / tokenizer), template)


def complete(prompts: JudgePromptBuilder, pairs: list[PreferencePair]) -> float:
    """The share of responses, in both rounds, whose judge tokens are exactly the training side's, spans included."""
    whole = total = 0
    for pair in pairs:
        trained = {side: prompts.chat.encode(pair.prompt, pair.response(side)) for side in SIDES}
        for seen in prompts.build(pair):
            for side in SIDES:
                start, end = seen.spans[side]
                ids, offsets = seen.input_ids[start:end], seen.offsets[side]
                found = align(ids, offsets, torch.ones(len(ids)), trained[side].response_ids, trained[side].offsets)
                whole += found.coverage == found.source_coverage == 1.0
                total += 1
    assert total >= 200
    return whole / total


@pytest.mark.parametrize(("judge", "tokenizer", "template"), LOSSLESS)
def test_delimiters_keep_every_token(
    judge: str, tokenizer: str, template: str | None, pairs: list[PreferencePair]
) -> None:
    uncut = replace(rules(judge), max_length=1 << 20, max_response_length=1 << 20)
    assert complete(JudgePromptBuilder(uncut, chat_of(tokenizer, template)), pairs) == 1.0


def test_other_delimiters_lose_tokens(pairs: list[PreferencePair], tmp_path: Path) -> None:
    """What the files avoid: a line break after the answer, and the other kind of chat's opening."""
    own = rules("llama3_8b_base_sft")
    text = Path(own.template_file).read_text(encoding="utf-8")
    (tmp_path / "lines.txt").write_text(text.replace("} [end of answer", "}\n[end of answer"), encoding="utf-8")
    lines = replace(own, template_file=str(tmp_path / "lines.txt"), max_length=1 << 20, max_response_length=1 << 20)
    assert complete(JudgePromptBuilder(lines, chat_of(EDGE_MERGE, None)), pairs[:50]) < 0.5
    other = replace(rules("mistral_inst"), max_length=1 << 20, max_response_length=1 << 20)
    assert complete(JudgePromptBuilder(other, chat_of(MISTRAL, ZEPHYR)), pairs[:50]) < 0.5


def test_both_llamas_are_judged_alike() -> None:
    """They share chat template and tokenizer, so that what holds for one judge's file holds for the other's."""
    assert rules("llama3_8b_instruct") == rules("llama3_8b_base_sft")


@pytest.mark.parametrize("name", SETTINGS)
def test_every_setting_has_its_judge(name: str) -> None:
    judge = setting(name)["judge"]
    assert (judge["dtype"], judge["max_length"], judge["max_response_length"]) == ("bfloat16", 2048, 768)
    assert judge["verdict"] is True and judge["low_label_mass"] == "stop"
    assert judge["path"] is None
    assert composed(name).composed.choices["judge"] == name


@pytest.mark.parametrize("judge", sorted({judge for judge, _, _ in LOSSLESS}))
def test_no_judge_prompt_tells_which_answer_is_preferred(judge: str, pairs: list[PreferencePair]) -> None:
    made = rules(judge)
    assert not re.search("chosen|rejected|preferred", Path(made.template_file).read_text(encoding="utf-8"))
    template = INST if judge == "mistral_inst" else ZEPHYR
    prompts = JudgePromptBuilder(made, chat_of(MISTRAL, template))
    for pair in pairs[:20]:
        swapped = replace(pair, chosen=pair.rejected, rejected=pair.chosen)
        first, second = prompts.build(pair)
        assert [prompt.input_ids for prompt in prompts.build(swapped)] == [second.input_ids, first.input_ids]
