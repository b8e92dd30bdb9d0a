"""The benchmarks at toy size: they run, they show what they say, and they refuse to time what is not the same work."""

import ast
import json
import logging
import random
import re
import statistics
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as library

from attnpo.config.compose import load
from attnpo.judge.base import JudgeReading
from attnpo.models.layouts import LAYOUTS, padded_layout
from attnpo.models.scored import ScoredLM
from attnpo.run.run import run
from experiments.benchmarks import extraction, gpu, gpu_step, harness, long_memory, pipeline, start, step, step_length
from experiments.benchmarks.harness import Bar, Worker, bars_table, interleaved, median, peak, ratio, slope
from experiments.benchmarks.rows import make_rows, read_sample
from experiments.benchmarks.shapes import (
    EOS,
    LLAMA3_8B,
    Pair,
    Shape,
    draw_lengths,
    floor_flops,
    make_pairs,
    padded_tokens,
    random_llama,
    step_flops,
    typical_lengths,
)
from experiments.benchmarks.systems import Ours, examples

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "experiments" / "benchmarks"
TRL_PYTHON = ROOT / ".venv-trl" / "bin" / "python"
TINY = ["--width", "32", "--heads", "4", "--layers", "2", "--rounds", "1"]
TINY_STEP = [*TINY, "--vocab", "64", "--micro", "2", "--batches", "1", "--scale", "0.1"]


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """The benchmarks silence libraries for good; here only for one test."""
    lightning, bars = logging.getLogger("lightning.pytorch"), library.is_progress_bar_enabled()
    level = lightning.level
    yield
    lightning.setLevel(level)
    (library.enable_progress_bar if bars else library.disable_progress_bar)()


def rows_of(printed: str) -> dict[str, list[str]]:
    """The lines of all markdown tables by their first cell."""
    lines = [
        [cell.strip() for cell in line.strip("|").split(" | ")] for line in printed.splitlines() if line[:1] == "|"
    ]
    return {line[0]: line[1:] for line in lines}


# ------------------------------------------------------------------------------------------------ rows


def test_rows_have_texts_of_their_own_in_the_lengths_of_the_sample(tmp_path: Path) -> None:
    sample = [
        {"prompt": "Why? Tell me. Now!", "chosen": "Yes. It is so.\nReally so.", "rejected": "No."},
        {"prompt": "Hm.", "chosen": "A long answer: of a few. Short. Sentences.", "rejected": "Ask again."},
    ]
    drawn = list(make_rows(sample, 50, seed=1))
    assert drawn == list(make_rows(sample, 50, seed=1)) != list(make_rows(sample, 50, seed=2))
    assert len({row["prompt"] for row in drawn}) == 50
    assert {len(row["chosen"]) for row in drawn} <= set(range(1, 1 + max(len(row["chosen"]) for row in sample)))
    file = tmp_path / "sample.jsonl"
    whole = [{**row, **{side: [{"content": row[side]}] for side in ("chosen", "rejected")}} for row in sample]
    file.write_text("".join(json.dumps(row) + "\n" for row in whole), encoding="utf-8")
    assert read_sample(file) == sample


def test_a_start_is_timed_on_rows_and_a_tokenizer_of_its_own(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    given = ["--rows", "80", "--threads", "1", "--trl-python", str(tmp_path / "none"), "--json", str(tmp_path / "j")]
    assert start.main(given) == 0
    rows = rows_of(capsys.readouterr().out)
    assert {"ours, 64 rows", "ours, cold", "ours, warm"} <= rows.keys()
    found = json.loads((tmp_path / "j").read_text(encoding="utf-8"))["results"]["seconds_and_gb"]
    assert all(seconds > 0 and resident > private > 0 for seconds, resident, private in found.values())


# ------------------------------------------------------------------------------------------------ harness


def test_competitors_run_in_turn_in_a_rotated_order_and_the_first_round_does_not_count() -> None:
    order: list[str] = []
    clock = iter(range(100))

    def competitor(name: str) -> Callable[[], float]:
        def once() -> float:
            order.append(name)
            return float(next(clock))

        return once

    times = interleaved({name: competitor(name) for name in "abc"}, 2)
    assert "".join(order) == "abc" + "bca" + "cab"
    assert times == {"a": [5.0, 7.0], "b": [3.0, 8.0], "c": [4.0, 6.0]}


def test_a_ratio_is_the_median_of_the_ratios_within_each_round() -> None:
    times = {"a": [1.0, 6.0, 2.0], "b": [2.0, 2.0, 4.0]}
    assert median(times, "a") == 2.0
    assert ratio(times, "a", "b") == 0.5  # of 0.5, 3, 0.5; the ratio of the medians is 1
    assert ratio(times, "a", "c") is None


def test_peak_counts_what_is_held_at_once_and_not_what_was_there() -> None:
    before = torch.ones(500, 500)  # 1 MB

    def work() -> None:
        one = before + 1  # 1 MB
        del one
        two, three = before + 1, before.repeat(2, 1)  # 3 MB
        del two, three

    assert 3_000_000 <= peak(work) < 3_100_000


def test_a_profile_names_the_operator_that_takes_the_time() -> None:
    matrix = torch.ones(300, 300)
    lines = harness.profiled(lambda: [matrix @ matrix for _ in range(3)]).splitlines()
    name, calls, _, share = (cell.strip() for cell in lines[2].strip("|").split(" | "))
    assert (name, calls) == ("`aten::mm`", "3")
    assert float(share.removesuffix(" %")) > 50


def test_slope_is_the_exponent() -> None:
    assert slope([1, 2, 4], [3, 12, 48]) == pytest.approx(2)
    assert slope([100, 1000], [7, 70]) == pytest.approx(1)


def test_bars_say_whether_they_are_met_and_why_nothing_was_measured() -> None:
    bars = [
        Bar("fast", 2.0, 2.0, at_least=True),
        Bar("slow", 2.0, 1.9, at_least=True),
        Bar("small", 0.5, 0.51, at_least=False),
        Bar("absent", 0.5, None, at_least=False, why="no opponent"),
    ]
    assert [bar.met for bar in bars] == [True, False, False, None]
    rows = rows_of(bars_table(bars))
    assert rows["fast"] == [">= 2x", "2.00x", "yes"]
    assert rows["slow"] == [">= 2x", "1.90x", "**no**"]
    assert rows["small"] == ["<= 0.5x", "0.51x", "**no**"]
    assert rows["absent"] == ["<= 0.5x", "not measured", "no opponent"]


def test_results_are_saved_with_versions_and_command_and_their_bars_make_one_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["x", "--short"])
    for name in ("one", "two"):
        options = Namespace(json=tmp_path / f"{name}.json", rounds=3)
        harness.finish(name, options, {"seconds": [1.0]}, [Bar(f"bar of {name}", 1.0, 2.0, True)], {"trl": "1"})
    saved = json.loads((tmp_path / "one.json").read_text(encoding="utf-8"))
    assert saved["command"] == "python -m experiments.benchmarks.one --short"
    assert saved["versions"]["torch"] == torch.__version__
    assert (saved["settings"]["rounds"], saved["bars"][0]["met"]) == (3, True)
    capsys.readouterr()
    assert harness.main([str(tmp_path / "one.json"), str(tmp_path / "two.json")]) == 0
    assert {"bar of one", "bar of two"} <= rows_of(capsys.readouterr().out).keys()


def test_a_worker_answers_whatever_else_it_prints_and_its_end_is_an_error() -> None:
    code = "from experiments.benchmarks.harness import serve; serve({'twice': lambda x: print('noise') or 2 * x})"
    with Worker([sys.executable, "-c", code]) as worker:
        assert worker.ask("twice", x=4) == 8
        assert worker.ask("twice", x=[1]) == [1, 1]
        with pytest.raises(RuntimeError, match="ended with status 1 at 'thrice'"):
            worker.ask("thrice", x=1)


# ------------------------------------------------------------------------------------------------ shapes


def test_the_head_has_the_share_of_an_8b_model() -> None:
    assert Shape().head_share() == pytest.approx(0.07, abs=0.002)


def test_lengths_and_padding_are_those_of_the_papers_data() -> None:
    rng = random.Random(0)
    drawn = [draw_lengths(rng, 1.0, 2048) for _ in range(4000)]
    for part, mean in zip(zip(*drawn, strict=True), (171, 272, 238), strict=True):
        assert statistics.mean(part) == pytest.approx(mean, rel=0.05)
    real = sum(2 * prompt + chosen + rejected for prompt, chosen, rejected in drawn)
    for count, share in ((1, 1.14), (4, 1.94)):
        assert padded_tokens(drawn, count) / real == pytest.approx(share, rel=0.05)


@pytest.mark.parametrize("seed", range(2))
def test_no_seed_draws_an_odd_share_of_padding(seed: int) -> None:
    lengths = typical_lengths(4, 4, seed)
    assert padded_tokens(lengths, 4) == pytest.approx(1.95 * 4 * (2 * 171 + 272 + 238), rel=0.15)
    assert sum(map(sum, lengths)) == pytest.approx(4 * (171 + 272 + 238), rel=0.15)


def short_pairs(count: int, vocab: int = 64, seed: int = 0) -> list[Pair]:
    return make_pairs(typical_lengths(count, count, seed, scale=0.1), vocab, seed)


def test_the_floor_is_the_work_of_every_product_and_every_attended_pair() -> None:
    shape = Shape(width=16, layers=2, heads=4, kv_heads=1, mlp=24, vocab=32)
    pair = Pair([4, 5, 6], [7, 8, EOS], [9, EOS])
    model = random_llama(shape, 0)
    linear = {name: part.weight.numel() for name, part in model.named_modules() if isinstance(part, nn.Linear)}
    head = linear.pop("lm_head")
    attended = sum(place + 1 for place in range(3)) + sum(3 + place + 1 for place in (*range(3), *range(2)))
    forward = 2 * sum(linear.values()) * 8 + 2 * head * 5 + 4 * 16 * 2 * attended
    assert floor_flops(shape, [pair]) == 3 * forward
    frozen = 2 * (2 * sum(linear.values()) * 8 + 2 * head * 5) + 3 * 4 * 16 * 2 * attended
    assert floor_flops(shape, [pair], trained=False) == frozen


# ------------------------------------------------------------------------------------------------ step


class Opponent:
    """Stands in for TRL's worker: plain DPO from the saved folders and texts; ``spoil`` scales the policy's head."""

    def __init__(self, spoil: float = 1.0) -> None:
        self.spoil = spoil
        self.found: list[float] = []

    def ask(self, request: str, **details: Any) -> Any:
        if request == "prepare":
            return self.prepare(**details)
        return {"losses": self.found, "step": 1.0, "memory": 1 << 30, "tokens": 1}[request]

    @torch.no_grad()
    def prepare(
        self,
        policy: str,
        reference: str,
        batches: list[list[Pair]],
        texts: list[list[list[str]]],
        beta: float,
        threads: int,
    ) -> Mapping[str, Any]:
        tokenizer = AutoTokenizer.from_pretrained(policy)
        models = [AutoModelForCausalLM.from_pretrained(folder) for folder in (policy, reference)]
        models[0].get_output_embeddings().weight.mul_(self.spoil)
        for batch, written in zip(batches, texts, strict=True):
            losses = []
            for pair, (prompt, *answers) in zip(batch, written, strict=True):
                assert [tokenizer(text)["input_ids"] for text in (prompt, *answers)] == [list(part) for part in pair]
                sums = []
                for model in models:
                    for answer in pair.rows:
                        logits = model(torch.tensor([pair.prompt + answer])).logits[0, len(pair.prompt) - 1 : -1]
                        picked = torch.log_softmax(logits, -1)[torch.arange(len(answer)), torch.tensor(answer)]
                        sums.append(float(picked.sum()))
                margin = sums[0] - sums[1] - sums[2] + sums[3]
                losses.append(float(nn.functional.softplus(torch.tensor(-beta * margin))))
            self.found.append(sum(losses) / len(losses))
        return {"arguments": {"beta": beta}, "versions": {"trl": "stand-in"}}


def joined(opponent: Opponent, weighted: int | None = None) -> Mapping[str, Any]:
    shape = Shape(width=32, layers=2, heads=4, kv_heads=1, mlp=112, vocab=64, spread=0.1)
    pairs = short_pairs(2)
    models, ours = (random_llama(shape, 0), random_llama(shape, 1)), [examples(pairs, weighted)]
    return step.join(opponent, Namespace(vocab=shape.vocab), models, [pairs], ours, {})  # type: ignore[arg-type]


def test_the_loss_with_uniform_weights_is_that_of_plain_dpo() -> None:
    report = joined(Opponent())
    assert max(report["loss_gap"].values()) <= 1e-6
    assert abs(report["losses"][0] - 0.6931472) > 1e-4, "policy and reference must differ, or any loss would do"


@pytest.mark.parametrize(("spoil", "weighted"), [(1.01, None), (1.0, 0)], ids=["model weights", "token weights"])
def test_nothing_is_timed_when_weights_differ(spoil: float, weighted: int | None) -> None:
    with pytest.raises(step.Unequal) as error:
        joined(Opponent(spoil), weighted)
    text = str(error.value)
    losses = [float(found) for found in re.findall(r"(?:ours|theirs) +(0\.\d+)", text)]
    assert "expected at most 1e-06" in text
    assert len(losses) == 2 and losses[0] != losses[1]


def test_the_shared_layout_forwards_each_prompt_once() -> None:
    shape = Shape(width=32, layers=1, heads=4, kv_heads=1, mlp=32, vocab=64)
    pairs = short_pairs(3)
    seen = {
        name: Ours(random_llama(shape, 0), random_llama(shape, 1), name, [examples(pairs)]).tokens() for name in LAYOUTS
    }
    whole = sum(pair.tokens for pair in pairs)
    assert seen == {
        "shared_prefix": whole,
        "packed": whole + sum(len(pair.prompt) for pair in pairs),
        "padded": padded_tokens([pair.lengths for pair in pairs], 3),
    }


def test_step_without_trl_shows_its_own_rows_and_says_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    absent, saved = tmp_path / "no" / "python", tmp_path / "step.json"
    assert step.main([*TINY_STEP, "--trl-python", str(absent), "--json", str(saved)]) == 0
    printed = capsys.readouterr().out
    rows = rows_of(printed)
    assert {"plain", *(f"{name}, {kind}" for name in LAYOUTS for kind in ("live", "cached"))} <= rows.keys()
    assert not any(name.startswith("TRL") for name in rows)
    assert "TRL: no TRL environment; `make trl` builds it" in printed
    assert rows["step: both with live reference"][1:] == ["not measured", "no TRL environment; `make trl` builds it"]
    results = json.loads(saved.read_text(encoding="utf-8"))["results"]
    assert len(results["seconds"]["plain"]) == 1 and results["peak_bytes"]["plain"] > 0
    assert results["floor_seconds"] > 0


def test_step_beside_an_opponent_fills_every_bar(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Alone(Opponent):
        def __init__(self, command: list[str]) -> None:
            super().__init__()

        def __enter__(self) -> "Alone":
            return self

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(step, "Worker", Alone)
    assert step.main([*TINY_STEP, "--short", "--trl-python", sys.executable]) == 0
    rows = rows_of(capsys.readouterr().out)
    assert rows["TRL, live"][0] == "1.000 (1.000 to 1.000)"
    assert rows["step: both with cached reference"][-1] == "yes"  # a second is long for a toy
    assert rows["step: peak memory, both live, ours of TRL's"][1:] == ["0.00x", "yes"]


def test_a_sweep_fits_exponents(capsys: pytest.CaptureFixture[str]) -> None:
    assert step.main([*TINY_STEP, "--short", "--no-trl", "--sweep", "micro", "--values", "1", "3"]) == 0
    rows = rows_of(capsys.readouterr().out)
    assert rows["exponent in micro"] == ["time", "peak memory"]
    assert 0.3 < float(rows["plain"][1]) < 2  # memory; the last table with such a row has the exponents


@pytest.mark.skipif(not TRL_PYTHON.is_file(), reason="no TRL environment (.venv-trl); `make trl` builds it")
def test_step_runs_beside_trl(capsys: pytest.CaptureFixture[str]) -> None:
    assert step.main([*TINY_STEP, "--short"]) == 0
    printed = capsys.readouterr().out
    assert "TRL 1.16.0, DPOConfig:" in printed
    assert {"TRL, live", "TRL, cached"} <= rows_of(printed).keys()


# ------------------------------------------------------------------------------------------------ extraction

PROMPTS = ["--instruction", "30", "--prompt", "20", "--answers", "30", "20", "--closing", "5", "--pairs", "2"]


def test_extraction_shows_rows_memory_and_growth(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = tmp_path / "extraction.json"
    lengths = ["--lengths", "64", "128", "--rollout-width", "32"]
    assert extraction.main([*TINY, "--vocab", "64", *PROMPTS, *lengths, "--json", str(saved), "--profile"]) == 0
    rows = rows_of(capsys.readouterr().out)
    assert "`aten::mm`" in rows or "`aten::addmm`" in rows
    assert {"authors' way", "last layer", "all layers", "layer 1, no verdict"} <= rows.keys()
    assert len(json.loads(saved.read_text(encoding="utf-8"))["bars"]) == 5
    assert json.loads(saved.read_text(encoding="utf-8"))["results"]["rows_gap"] <= 1e-5


def test_judge_prompts_of_a_pair_have_its_answers_in_both_orders() -> None:
    options = Namespace(seed=0, vocab=64, pairs=1, instruction=30, prompt=20, answers=[30, 20], closing=5)
    first, second = extraction.judge_prompts(options)
    assert len(first) == len(second) and first != second
    same = next(place for place, (a, b) in enumerate(zip(first, second, strict=True)) if a != b)
    assert same >= 30 + 2 * extraction.MARK + 18, "instruction and question come first"
    assert first[-5:] == second[-5:]


def test_rows_of_another_layer_are_refused() -> None:
    maps = torch.softmax(torch.randn(2, 7), -1)
    readings = [JudgeReading(rows=maps[[1]].clone())]
    assert extraction.require_same_rows(readings, [maps], [2]) == 0
    with pytest.raises(SystemExit, match=r"layers \[1\]: rows differ from the authors'"):
        extraction.require_same_rows(readings, [maps], [1])


# ------------------------------------------------------------------------------------------------ pipeline

TINY_PIPELINE = [*TINY, "--vocab", "256", "--pairs", "4", "--step", "2", "--micro", "2", "--scale", "0.1"]


def in_process(command: list[str]) -> str:
    """A run of ours without the process around it."""
    assert command[:3] == [sys.executable, "-m", "attnpo.fit"]
    cfg = load("fit", command[3:])
    run(cfg, Path(cfg.output) / cfg.name)
    return ""


def test_pipeline_runs_cold_and_warm(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "process", in_process)
    saved = tmp_path / "pipeline.json"
    assert pipeline.main([*TINY_PIPELINE, "--no-trl", "--json", str(saved)]) == 0
    rows = rows_of(capsys.readouterr().out)
    assert {"ours, store empty", "ours, store warm"} <= rows.keys()
    assert rows["whole run: ours of TRL's, store empty"][1:] == ["not measured", "left out (--no-trl)"]
    results = json.loads(saved.read_text(encoding="utf-8"))["results"]
    assert all(len(seconds) == 1 for seconds in results["seconds"].values())


def test_pipeline_refuses_an_opponent_on_other_tokens_or_steps(tmp_path: Path) -> None:
    options = Namespace(vocab=256, width=32, layers=1, heads=4, seed=0, pairs=3, micro=1, scale=0.1)
    world = pipeline.World(options, tmp_path)
    tokens = world.tokens()
    first = len((tmp_path / "data" / "train.jsonl").read_text(encoding="utf-8").splitlines())
    assert first == 3 and tokens[1] > 3
    world.trl, world.steps = {"tokens": tokens}, {pipeline.TRL: 2, pipeline.WARM: 2}
    world.require_same_work()
    for changed in ({"tokens": [tokens[0] + 1, *tokens[1:]]}, {"tokens": tokens}):
        world.trl, world.steps[pipeline.WARM] = changed, 3 if changed["tokens"] == tokens else 2
        with pytest.raises(SystemExit, match="expected the same work on both sides"):
            world.require_same_work()


@pytest.mark.parametrize(("found", "computed", "empty"), [(0, 4, True), (4, 0, False)])
def test_pipeline_knows_an_empty_store_from_a_warm_one(found: int, computed: int, empty: bool) -> None:
    pipeline.require_store("run", found=found, computed=computed, empty=empty)
    with pytest.raises(SystemExit, match="run: "):
        pipeline.require_store("run", found=found, computed=computed, empty=not empty)


# ------------------------------------------------------------------------------------------------ GPU form


def tiny_gpu(saved: Path, *more: str) -> dict[str, Any]:
    """Runs the GPU form and reads what it saves of one part at toy size; settings as they are tested here."""
    assert gpu.main(["--tiny", "--device", "cpu", "--json", str(saved), *more]) == 0
    parts: dict[str, Any] = json.loads(saved.read_text(encoding="utf-8"))["parts"]
    return parts


# Each layout, recomputed and compiled blocks, and adapters; what else is timed is a mixture of these.
KINDS = (
    *("full:shared_prefix:16384:checkpoint:compile", "full:padded:4096", "full:packed:4096:checkpoint"),
    "lora:shared_prefix:8192:compile",
)


def test_the_gpu_form_runs_at_toy_size(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every part, the steps in a process of their own, and every row in the table and in the file."""
    alone = gpu.is_finished

    def is_finished(command: list[str], limit: float) -> bool:
        steps = command[command.index("--steps", -6) + 1]
        return alone(command, limit) if steps == "step" else gpu.main(command[3:]) == 0

    monkeypatch.setattr(gpu, "is_finished", is_finished)
    parts = tiny_gpu(tmp_path / "gpu.json", "--no-trl", "--settings", *KINDS)
    printed, said = capfd.readouterr()
    assert "Traceback" not in printed + said and "nan" not in printed
    shown = rows_of(printed)
    assert list(parts) == list(gpu.STEPS) and all(part["results"]["done"] for part in parts.values())
    rows = {name: part["results"]["rows"] for name, part in parts.items()}
    assert all(row["name"] in shown and shown[row["name"]][-1] == row["note"] for part in rows.values() for row in part)
    assert len(rows["tests"]) >= 5 and {row["note"] for row in rows["tests"]} == {"not run: needs CUDA"}
    assert len(rows["step"]) == len(KINDS) and all(row["pairs_per_s"] > 0 for row in rows["step"])
    assert {cells[-3] for name, cells in shown.items() if name.startswith(("full,", "lora,"))} == {"needs CUDA"}
    tokens = {layout: sum(next(r for r in rows["step"] if layout in r["name"])["sizes"]) for layout in LAYOUTS}
    assert tokens["shared_prefix"] < tokens["packed"] < tokens["padded"]
    assert [row["name"] for row in rows["judge"]] == [extraction.AUTHORS, *(name for name, _ in extraction.BARS)]
    assert all(row["pairs_per_s"] > 0 for row in rows["judge"])
    assert {row["note"] for row in rows["trl"]} == {"not run: left out (--no-trl)"}
    assert [row["name"] for row in rows["run"]] == ["store empty", "store warm"]
    assert all(row["start"] > 0 and row["training"] > 0 and row["end"] > 0 for row in rows["run"])
    part = parts["step"]
    assert part["commit"] and part["date"] and part["versions"]["torch"] == torch.__version__ and not part["bars"]


def test_a_setting_that_fails_is_a_row_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ("full:padded:4096", "full:packed:4096", "full:shared_prefix:4096", "lora:padded:4096")
    errors = iter((torch.OutOfMemoryError("CUDA"), SystemExit("a | b\nsecond line"), RuntimeError("no kernel"), None))
    measure = gpu_step.Bench.measure

    def failing(self: gpu_step.Bench, setting: gpu_step.Setting) -> gpu_step.Timed:
        if (error := next(errors)) is not None:
            raise error
        return measure(self, setting)

    monkeypatch.setattr(gpu_step.Bench, "measure", failing)
    rows = tiny_gpu(tmp_path / "gpu.json", "--steps", "step", "--settings", *names)["step"]["results"]["rows"]
    notes = [row["note"] for row in rows]
    assert notes[:3] == ["out of memory", "SystemExit: a | b second line", "RuntimeError: no kernel"]
    assert rows[3]["pairs_per_s"] > 0 and [bool(row.get("failed")) for row in rows] == [True, True, True, False]
    shown = rows_of(capsys.readouterr().out)
    assert shown["full, packed, 102 tokens, no checkpointing"][-1] == "SystemExit: a / b second line"


def test_what_there_is_no_time_for_is_named(tmp_path: Path) -> None:
    rows = tiny_gpu(tmp_path / "gpu.json", "--steps", "step", "--seconds", "1e-9")["step"]["results"]["rows"]
    assert [row["note"] for row in rows] == ["not run: no time left"] * len(gpu_step.DEFAULT)


def test_a_part_that_hangs_is_ended_with_what_it_started() -> None:
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])"
    assert not gpu.is_finished([sys.executable, "-c", code], 2.0)
    assert gpu.is_finished([sys.executable, "-c", ""], 60.0) and not gpu.is_finished(
        [sys.executable, "-c", "1 / 0"], 60.0
    )


def test_a_model_of_full_size_needs_a_gpu() -> None:
    with pytest.raises(SystemExit, match="needs a GPU; --tiny runs all of it"):
        gpu.main(["--device", "cpu"])
    assert len({gpu_step.Setting.parse(text) for text in gpu_step.DEFAULT}) == len(gpu_step.DEFAULT)
    with pytest.raises(ValueError, match=r"expected METHOD:LAYOUT:TOKENS\[:checkpoint\]"):
        gpu_step.Setting.parse("full:padded:4096:compiled")


def test_outcomes_of_tests_become_a_row_for_each_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [
        "collected 4 items",
        "tests/a.py::test_one[x-1] PASSED  [ 25%]",
        "tests/a.py::test_two FAILED       [ 50%]",
        "tests/b.py::test_one SKIPPED (no) [ 75%]",
        "tests/b.py::test_two PASSED       [100%]",
        "FAILED tests/a.py::test_two - assert 1 == 2",
    ]
    options = Namespace(json=tmp_path / "gpu.json")
    sheet = harness.Sheet("tests", options, ("tests marked gpu", "passed", "failed", "skipped", "seconds"))
    gpu.add_outcomes(sheet, lines)
    shown = rows_of(capsys.readouterr().out)
    assert shown["tests/a.py"][:3] == ["1", "1", "0"] and shown["tests/a.py"][-1] == "failed: test_two"
    assert shown["tests/b.py"][:3] == ["1", "0", "1"]
    assert [row["failures"] for row in sheet.results["rows"]] == [1, 0]


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_flops_of_a_step_are_those_that_torch_counts(layout: str, recomputed: bool) -> None:
    """But for attention, which torch does not count on a CPU."""
    shape, pairs = Shape(width=32, layers=2, heads=4, kv_heads=1, mlp=48, vocab=64), short_pairs(4)
    model = random_llama(shape, 0)
    if recomputed:
        model.activation_checkpointing_enable()
    made = gpu_step.Step(ScoredLM(model, chunk=16).train(), layout, gpu_step.cut(pairs, layout, 100), None)
    with FlopCounterMode(display=False) as counter:
        made.run()
    scored = sum(len(row) for pair in pairs for row in pair.rows)
    assert step_flops(shape, sum(made.sizes), scored, 0, recomputed=recomputed) == counter.get_total_flops()
    whole = step_flops(shape, sum(made.sizes), scored, made.seen)
    assert (whole == floor_flops(shape, pairs)) == (layout == "shared_prefix")


def test_the_estimate_is_near_what_an_h100_held() -> None:
    """Peaks of a laboratory, without an optimiser; tests/training/test_memory.py has those since."""
    options = Namespace(dtype="bfloat16", chunk=1024, max_length=2048)
    bench = gpu_step.Bench.__new__(gpu_step.Bench)
    bench.shape, bench.options = LLAMA3_8B, options
    measured = {"full:shared_prefix:4096:checkpoint": 34.3, "full:shared_prefix:16384:checkpoint": 38.2}
    for text, held in measured.items():
        setting = gpu_step.Setting.parse(text)
        assert bench.estimate(setting, setting.tokens, None).total / gpu.GIB == pytest.approx(held, rel=0.05), text


@pytest.mark.skipif(not TRL_PYTHON.is_file(), reason="no TRL environment (.venv-trl); `make trl` builds it")
def test_the_gpu_form_runs_beside_trl(tmp_path: Path) -> None:
    rows = tiny_gpu(tmp_path / "gpu.json", "--steps", "trl")["trl"]["results"]["rows"]
    assert [row["pairs_per_s"] > 0 for row in rows if "pairs_per_s" in row] == [True] * 5 and len(rows) == 7


def test_the_gpu_form_keeps_rotary_frequencies_in_full_precision() -> None:
    model = gpu_step.make_model(Namespace(seed=0, dtype="bfloat16"), gpu.TINY, torch.device("cpu"))
    assert model.dtype == torch.bfloat16
    assert {buffer.dtype for name, buffer in model.named_buffers() if "inv_freq" in name} == {torch.float32}


def test_the_gpu_form_refuses_a_layout_with_other_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(rows: Any, pad_id: int) -> Any:
        return padded_layout([([*prompt[:-1], 5], response) for prompt, response in rows], pad_id)

    monkeypatch.setitem(LAYOUTS, "packed", wrong)
    rows = tiny_gpu(tmp_path / "gpu.json", "--steps", "step", "--settings", "full:packed:4096")["step"]["results"][
        "rows"
    ]
    assert "refused: LlamaForCausalLM produces different results" in rows[0]["note"]
    monkeypatch.setattr(gpu_step, "find_layout_problem", lambda *_: None)
    rows = tiny_gpu(tmp_path / "gpu.json", "--steps", "step", "--settings", "full:packed:4096")["step"]["results"][
        "rows"
    ]
    assert re.match(r"refused: log-probabilities differ from padded rows by \S+, more than rounding", rows[0]["note"])


# ------------------------------------------------------------------------------------------------ imports, docs


def file_of(module: str) -> Path | None:
    """The file of a module of this checkout, None for any other."""
    path = ROOT / Path(*module.split("."))
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)


def imported(start: str) -> tuple[set[str], set[str]]:
    """All modules of this checkout that a module leads to, and the names of the packages they import."""
    seen: set[str] = set()
    packages: set[str] = set()
    waiting = [start]
    while waiting:
        module = waiting.pop()
        file = file_of(module)
        if module in seen or file is None:
            packages |= {module.split(".")[0]} - {"attnpo", "experiments"} if file is None else set()
            continue
        seen.add(module)
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                waiting += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module is not None:
                waiting.append(node.module)
                waiting += [
                    f"{node.module}.{alias.name}" for alias in node.names if file_of(f"{node.module}.{alias.name}")
                ]
    return seen, packages - set(sys.stdlib_module_names)


def test_the_gpu_form_needs_what_the_package_needs() -> None:
    """Beside that, extras alone: peft for adapters, torchao for its optimiser; a row without them says so."""
    _, packages = imported("experiments.benchmarks.gpu")
    known = (ROOT / "setup.cfg").read_text(encoding="utf-8").partition("install_requires")[2].partition("[options")[0]
    wanted = set(re.findall(r"^    ([\w-]+)>", known, re.MULTILINE)) | {"hydra", "Levenshtein"}
    # What these bring with them.
    assert packages - wanted == {"huggingface_hub", "peft", "tokenizers", "torchao", "yaml"}


def test_the_worker_needs_no_more_than_trl_brings() -> None:
    modules, packages = imported("experiments.benchmarks.trl_worker")
    assert modules == {"experiments.benchmarks.trl_worker", "experiments.benchmarks.harness"}
    assert packages == {"torch", "transformers", "datasets", "trl"}


def test_the_page_names_every_benchmark_and_none_that_is_not_there() -> None:
    page = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    named = set(re.findall(r"python -m experiments\.benchmarks\.(\w+)", page))
    with_main = {file.stem for file in FOLDER.glob("*.py") if "--json" in file.read_text(encoding="utf-8")}
    assert named == with_main | {"gpu", "rollout_memory", "step_length", "long_memory"}
    assert all(re.search(rf"^## {name}$", page, re.MULTILINE) for name in ("step", "extraction", "pipeline", "gpu"))


def test_the_cost_of_a_step_over_length_is_printed_with_slopes(capsys: pytest.CaptureFixture[str]) -> None:
    step_length.main(["--lengths", "32", "128", "--layers", "1", "--width", "32", "--vocab", "64", "--rounds", "1"])
    rows = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert [cell.strip() for cell in rows[0]] == ["step", "T=32", "T=128", "slope"] and len(rows) == 8
    memory = {row[0].strip(): [float(cell) for cell in row[1:]] for row in rows[2:] if "MiB" in row[0]}
    assert all(0 < short < long and slope > 0 for short, long, slope in memory.values())


def test_the_estimates_of_long_pairs_on_the_page_are_those_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    """Every recipe is composed; what the page says of them in words is in the rows."""
    long_memory.main()
    printed = capsys.readouterr().out.strip()
    page = (ROOT / "docs" / "running.md").read_text(encoding="utf-8")
    assert f"\n\n{printed}\n\n" in page and "Never run on a GPU: these are estimates." in page
    rows = {
        (line.split(" | ")[0].strip("| "), line.rsplit(" | ", 1)[1].strip(" |")) for line in printed.splitlines()[2:]
    }
    every = {(length, machine) for length in long_memory.LENGTHS for machine in long_memory.CAPACITY}
    named = {name: fits == "yes" for name, fits in rows}
    assert len(rows) == len(named) == 14
    assert all(named[f"{length}, {machine}, LoRA"] for length, machine in every)
    assert {key for key, fits in named.items() if not fits} == {f"{length}, 1x141gb, full" for length in ("8k", "16k")}
