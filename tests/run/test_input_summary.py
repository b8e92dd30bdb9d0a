"""What a command says of itself: the lines before anything is loaded, the account of the inputs, the store's hits."""

import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from attnpo.config.compose import load
from attnpo.data.arrow_rows import count_row_tokens
from attnpo.data.example_statistics import token_percentiles
from attnpo.data.micro_batches import PADDED, SHARED_PREFIX
from attnpo.data.prepare import percentiles
from attnpo.models.loading import load_config
from attnpo.models.memory import ModelShape
from attnpo.models.spec import LoraSpec, ModelSpec
from attnpo.run import messages
from attnpo.run.folders import store_root
from attnpo.run.input_summary import example_statistics, log_inputs, log_plan, require_budgets, require_examples
from attnpo.run.inputs import Inputs
from attnpo.run.memory import make_memory_plan
from attnpo.run.messages import log_opening_lines
from attnpo.run.resolve import log_model, resolve
from attnpo.run.run import run
from attnpo.run.run_config import RunConfig
from attnpo.schema import UserError
from attnpo.system import machine, processes
from attnpo.system.files import format_bytes
from attnpo.system.machine import package_versions
from attnpo.training.processes import planned_processes
from tests.run.made import make, make_inputs
from tests.run.worlds import TRAIN, VAL, World, judge_loads

PAIRS = TRAIN + VAL


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """A process that has logged nothing yet."""
    monkeypatch.setattr(messages, "_said", set())
    with caplog.at_level(logging.INFO, logger="attnpo"):
        yield


def opening(
    caplog: pytest.LogCaptureFixture, command: str, cfg: RunConfig, folder: Path | None, budget: str | None = None
) -> list[str]:
    """What a command says before anything is loaded."""
    caplog.clear()
    log_opening_lines(command, cfg, folder, budget)
    return [record.getMessage() for record in caplog.records]


def tell(cfg: RunConfig) -> Inputs:
    """The inputs of a configuration, with the account of them that a run gives before it trains."""
    made = make(cfg)
    cfg, inputs = made.cfg, made.inputs
    log_inputs(inputs, example_statistics(inputs))
    for split, examples in inputs.examples.items():
        require_examples(split, examples, planned_processes(cfg.trainer))
    batch = make_memory_plan(cfg).smallest_batch
    require_budgets(inputs.examples, cfg.layout, batch)
    log_plan(inputs.examples["train"], batch, cfg.trainer, cfg.callbacks, made.base.tokenizer)
    return inputs


# ------------------------------------------------------------------------------------------------ before anything loads


def test_the_opening_says_in_six_lines_what_is_about_to_be_done(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    given = world.overrides(f"store={tmp_path}", "transform=shuffled")
    lines = opening(caplog, "fit", load("fit", given), tmp_path / "run")
    assert lines == [
        "fit       one run, setting real_smoke",
        f"model     {world.model}; reference live",
        f"data      {world.data}, 4 pairs a step",
        "weights   attention, layer last, judge the model itself, transforms shuffled",
        "objective twdpo, beta 0.1, learning rate 0.0001",
        f"budget    1 epoch; seed 0, CPU; results in {tmp_path / 'run'} (all settings: config.yaml)",
    ]
    weigh = opening(caplog, "weigh", load("weigh", given), None)
    assert weigh[0].startswith("weigh ") and weigh[5] == f"results   in the store {tmp_path}"


def test_a_study_is_announced_by_what_it_compares(caplog: pytest.LogCaptureFixture) -> None:
    cfg = load("fit", ["experiment=layer_sweep", "seeds=2"])
    lines = opening(caplog, "fit", cfg, Path("out"), "as planned")
    assert len(lines) == 6 and lines[0].startswith("fit       study layer_sweep: One layer of judge attention")
    assert lines[3] == "weights   set by each arm" and "each arm's grid: lr [2.5e-05, 5e-05]" in lines[4]
    assert lines[1].startswith("model     built by testbed") and lines[5].startswith("budget    as planned; ")


def test_versions_are_those_installed_and_the_checkouts_commit() -> None:
    line = machine.version_line()
    for name, version in package_versions().items():
        assert f"{name} {version}" in line
    if (machine.ROOT / ".git").exists():
        assert re.search(r"\(commit [0-9a-f]{7,}(, changed)?\)", line)


def test_no_commit_is_claimed_outside_a_checkout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "ROOT", tmp_path)
    assert machine.git_commit() is None and "commit" not in machine.version_line()


def test_sizes_are_for_readers() -> None:
    assert [format_bytes(count) for count in (0, 1023, 1536, 5 * 2**30, 3 * 2**40)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "5.0 GiB",
        "3.0 TiB",
    ]


def test_a_store_that_is_a_number_is_a_folder_of_that_name() -> None:
    assert store_root(load("fit", ["store=3"]).store) == Path("3")


# ------------------------------------------------------------------------------------------------ who reports


@pytest.mark.parametrize(
    ("environment", "place", "reports"),
    [
        ({}, (0, 1), True),
        ({"RANK": "0", "WORLD_SIZE": "2"}, (0, 2), True),
        ({"RANK": "1", "WORLD_SIZE": "2"}, (1, 2), False),
        ({"SLURM_PROCID": "3", "SLURM_NTASKS": "4"}, (3, 4), False),
        ({"LOCAL_RANK": "1", "NODE_RANK": "0", "WORLD_SIZE": "2"}, (1, 2), False),  # started by Lightning
        ({"NODE_RANK": "1"}, (0, 1), False),
    ],
)
def test_one_process_of_a_job_reports(
    environment: dict[str, str], place: tuple[int, int], reports: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS", "LOCAL_RANK", "NODE_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert (processes.rank_and_world_size(), processes.is_main_process()) == (place, reports)


# ------------------------------------------------------------------------------------------------ the inputs


def test_what_the_store_lacks_is_said_with_the_reason_and_the_size(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    make_inputs(world.config())
    said = [record.getMessage() for record in caplog.records]
    first = next(line for line in said if line.startswith("weights: "))
    assert re.fullmatch(
        rf"weights: 0 of {PAIRS} pairs in the store; computing {PAIRS}, at most about .* to write", first
    )
    caplog.clear()
    with judge_loads() as loaded:
        make_inputs(world.config())
    assert loaded == []
    assert [line for record in caplog.records if (line := record.getMessage()).startswith("weights: ")] == [
        f"weights: {PAIRS} of {PAIRS} pairs in the store"
    ]
    caplog.clear()
    make_inputs(world.config("judge.dtype=float64"))
    assert (
        f"0 of {PAIRS} pairs in the store (most similar in the store: judge.dtype: stored float32, requested float64)"
        in caplog.text
    )


def test_the_estimate_covers_what_is_written(world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_inputs(world.config(f"store={tmp_path}"))
    found = re.search(r"at most about ([\d.]+) KiB to write", caplog.text)
    tables = list(tmp_path.glob("weights/*"))
    assert found is not None and len(tables) == 1
    arrays = 0.0
    for made in make_inputs(world.config(f"store={tmp_path}")).weighed.captured.values():
        parts = [part for item in made.rounds for part in (item.chosen, item.rejected)]
        arrays += sum(part.token_ids.numel() * (2 * 4 + 12) for part in parts) / 1024  # two layers, an id, a range
    assert 0.7 * arrays < float(found[1]) < 1.5 * arrays


def test_the_model_is_told_once_from_its_config(world: World, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        resolve(world.config())
    told = [record.getMessage() for record in caplog.records if record.getMessage().startswith("model: ")]
    assert told == [f"model: {world.model}, LlamaForCausalLM, 20,064 parameters, float32, 2 layers"]


def test_the_shares_that_adapters_and_four_bits_reach_are_told(world: World, caplog: pytest.LogCaptureFixture) -> None:
    log_model(ModelSpec(str(world.model), lora=LoraSpec(), quantize="nf4"))
    shape = ModelShape.from_model_config(load_config(world.model))
    share = f"{shape.linear / shape.parameters:.0%} of the parameters"
    assert f"model.lora: adapters on 14 linear modules, which contain {share}" in caplog.text
    assert f"model.quantize: {share} (the blocks' linear modules) are stored in 4 bits" in caplog.text


def test_cut_and_dropped_pairs_are_counted_with_their_share(world: World, caplog: pytest.LogCaptureFixture) -> None:
    inputs = tell(world.config("lengths.max_length=26", "lengths.max_prompt_length=11", "lengths.overlong=cut"))
    assert f"train: {TRAIN} pairs of {TRAIN} rows (0 dropped while reading, 0 later)" in caplog.text
    assert f"train: cut: prompt to its last 11 tokens: 7 of {TRAIN} (58.3%; first: " in caplog.text
    assert "prompt 11/11/11/11, chosen " in caplog.text and "longest " in caplog.text
    statistics = example_statistics(inputs)["train"]
    longest = sorted(example.longest_branch for example in inputs.examples["train"].examples)
    assert statistics["tokens"]["longest"] == statistics["lengths"] == percentiles(longest)
    assert statistics["lengths"]["max"] == longest[-1] == 26
    assert statistics["tokens"]["prompt"] == {"p50": 11, "p90": 11, "p99": 11, "max": 11}
    assert token_percentiles(count_row_tokens([]))["longest"] == {}
    assert "steps: 4 pairs each = 2 per forward x 2 accumulated x 1 process; 3 per epoch, 3 in total" in caplog.text
    assert "validation and saving every 20 and at the end" in caplog.text
    assert caplog.text.count("row 0, ") == 3
    shown = re.findall(
        r"weights w sum to ([\d.]+), \|y\| is (\d+); each token is shown with \|y\| w \(uniform: 1\): (.*)", caplog.text
    )
    example = inputs.examples["train"].examples[0]
    for (total, length, tokens), row, count in zip(shown, example.weights, example.lengths, strict=True):
        assert (float(total), float(length)) == (pytest.approx(float(row.sum()), abs=1e-3), count)
        written = [0.0 if value == "." else float(value) for value in re.findall(r"'\|(\S+)", tokens)]
        assert written == pytest.approx((count * row).tolist(), abs=6e-3), "few enough to be shown in full"


def test_what_ends_a_run_of_both_steps_and_epochs_is_said_before_it(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    tell(world.config("weights=uniform", "trainer.max_steps=2", "trainer.max_epochs=5"))
    said = "3 per epoch, 2 in total (trainer.max_steps ends the run; trainer.max_epochs=5 would take 15); validation"
    assert said in caplog.text


def test_factors_are_shown_as_they_are(world: World, caplog: pytest.LogCaptureFixture) -> None:
    tell(world.config("weights=decay", "weights.gamma=0.5", "weights.first_exponent=0"))
    (first, _) = re.findall(r"each token is shown with its factor \(uniform: 1\): (.*)", caplog.text)
    assert re.findall(r"'\|(\S+)", first)[:3] == ["1.00", "0.50", "0.25"]


BUDGETS = ("batch.micro=null", "batch.eval_micro=null", "batch.tokens=4096", "batch.eval_tokens=1024")


def test_a_budget_of_tokens_is_told_and_held_against_the_pairs(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Any layout takes at least what shared_prefix does, so auto is refused early below that alone."""
    inputs = tell(world.config("batch.pairs=5", *BUDGETS))
    assert "steps: 5 pairs each, at most 4096 tokens per forward on 1 process; 3 per epoch, 3 in total" in caplog.text
    for layout, cost in (("padded", PADDED), ("auto", SHARED_PREFIX)):
        for split, key in (("train", "tokens"), ("val", "eval_tokens")):
            made = inputs.examples[split].examples
            needed = max(cost.pair_cost([(side.prompt_ids, side.response_ids) for side in pair.sides]) for pair in made)
            with pytest.raises(UserError, match=f"^batch.{key}=9 is too small for .* has {needed} tokens in "):
                run(world.config(*BUDGETS, f"batch.{key}=9", f"layout={layout}"), tmp_path / "run")
            tell(world.config(*BUDGETS, f"batch.{key}={needed}", f"layout={layout}"))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["weights.layer=3"], "weights.layer: expected a whole number from 1 to 2"),
        (["batch.pairs=5"], "batch.pairs=5 must be a multiple of batch.micro=2 x 1 processes"),
        (["objective=dpo"], "objective DPO uses no token weights"),
    ],
)
def test_what_cannot_work_is_refused_before_the_data_is_read(
    overrides: list[str], message: str, world: World, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        make_inputs(world.config(*overrides, f"data.path={tmp_path / 'nowhere'}"))
