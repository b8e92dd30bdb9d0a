"""Settings that do not exist, are out of range, or contradict each other: one line that names the key."""

import pytest

from attnpo.data.prepare import Tally, encode_pair
from attnpo.data.rules import LengthRules
from attnpo.lab.testbed.grammar import Grammar
from attnpo.lab.testbed.tokenizer import build_tokenizer
from attnpo.run import combinations as settings
from attnpo.schema import PreferencePair
from attnpo.text.chat import ChatFormat
from tests.bad_input.attempts import Attempts
from tests.bad_input.conftest import Record
from tests.run.worlds import judge_loads

NOT_STARTED = "run not started"

LAYERS = ["weights.layer=3", "weights.layer=0", "weights.layer=3/2", "weights.layer=1/0", "weights.layer=first",
          "weights.layer=1.5"]  # fmt: skip


@pytest.mark.parametrize("override", LAYERS)
def test_a_layer_that_the_judge_does_not_have(attempts: Attempts, record: Record, override: str) -> None:
    message = attempts.weigh(override).refused()
    expected = 'expected a whole number from 1 to 2, "last", or a fraction such as "1/4"'
    assert message.startswith("weights.layer: ") and (expected in message or "expected int or str, got 1.5" in message)
    record(override, message, NOT_STARTED)


# override -> what the message must say; several lines of the configuration library are allowed here
KEYS = {
    "+data.columns.chsen=x": ("data.columns.chsen: unknown key", "did you mean data.columns.chosen?"),
    "trainer.max_epochs=many": ("trainer.max_epochs: expected int, got 'many'",),
    "lengths.overlong=keep": ("lengths.overlong: expected one of cut, drop, got 'keep'",),
    "align.min_coverage=2": ("align.min_coverage must be in [0, 1], got 2.0",),
    "batch.pairs=0": ("batch.pairs must be at least 1",),
    "batch.eval_tokens=0": ("batch.eval_tokens must be at least 1, or null",),
    "batch.tokens=4096": ("batch.micro=2 and batch.tokens=4096 both limit a forward pass", "batch.micro=null"),
    "batch.micro=3": ("batch.pairs=4 must be a multiple of batch.micro=3",),
    "lengths.max_prompt_length=512": ("lengths.max_prompt_length must be between 1 and lengths.max_length - 1 = 511",),
    "data.train_rows=some": ('data.train_rows="some" is not a row selection',),
    "data.train_rows=100:200": ('data.train_rows="100:200" selects no rows: the split has 12 rows',),
    "data.val_split=nowhere": ("data.val_split=nowhere", "its files: test.jsonl, train.jsonl"),
    "data.path=nowhere.jsonl": ("data.path=nowhere.jsonl: no such file or folder",),
    "judge.labels=[A,A]": ("judge.labels: expected two different labels, got A twice",),
    "judge.max_length=9": ("judge.max_length is 9, but the judge template alone needs about",),
    "judge.template_file=nowhere.txt": ("judge.template_file=nowhere.txt: no such file",),
    "model.dtype=int8": ("unknown dtype 'int8'; choose one of float64, float32, bfloat16, float16",),
    "model.gradient_checkpointing=maybe": ("model.gradient_checkpointing must be true, false or auto, got 'maybe'",),
    "model.logps_chunk=many": ("model.logps_chunk must be at least 1 token, or auto, got 'many'",),
    "resume=nowhere": ("resume=nowhere: there is no checkpoint at",),
    "optimizer.lr=0": ("optimizer.lr must be above 0",),
    "optimizer.lr=inf": ("optimizer.lr: expected a finite number", "got inf"),
    "optimizer.lr=nan": ("optimizer.lr: expected a finite number", "got nan"),
    "optimizer.betas=[1.0,.99]": ("optimizer.betas must be two numbers in [0, 1), got [1.0, 0.99]",),
    "optimizer.weight_decay=-1": ("optimizer.weight_decay must be at least 0, got -1.0",),
    "trainer.threads=0": ("trainer.threads must be at least 1, got 0",),
    "trainer.accelerator=tpu": ("trainer.accelerator must be one of auto, cpu, gpu, cuda, mps, got 'tpu'",),
    "trainer.devices=0": ("trainer.devices must be auto, a number of at least 1 or a list like 0,1, got '0'",),
    "trainer.max_steps=0": ("trainer.max_steps must be at least 1 optimiser step, or -1", "got 0"),
    "trainer.max_epochs=0": ("trainer.max_epochs must be at least 1, or -1", "got 0"),
    "trainer.log_every_n_steps=0": ("trainer.log_every_n_steps must be at least 1, got 0",),
    "callbacks.samples=-1": ("callbacks.samples must be at least 0, got -1",),
    "judge.dtype=int8": ("judge.dtype must be one of float64, float32, bfloat16, float16, got 'int8'",),
    "seed=4294967296": ("seed: expected a whole number from 0 to 4294967295, got 4294967296",),
    "seed=10000000000000000000000": ("seed: expected a whole number of at most 64 bits",),
    "data.train_rows='200%'": ('data.train_rows="200%" is not a row selection', "a percentage up to 100%"),
    "data.subset=part": ("data.subset=part applies to datasets on the hub, but data.path=", "data.subset=null"),
    "store=''": ("store: expected a folder path with only printable characters, got ''",),
    "output=''": ("output: expected a folder path with only printable characters, got ''",),
    "name='a\nb'": (r"name: expected only printable characters, got 'a\nb'",),
    "name='a\x1b[2Jb'": (r"name: expected only printable characters, got 'a\x1b[2Jb'",),
}


@pytest.mark.parametrize("override", KEYS, ids=ascii)
def test_a_setting_that_cannot_be_is_named(attempts: Attempts, record: Record, override: str) -> None:
    answer = attempts.fit(override)
    assert answer.status == 2 and answer.error.startswith("error: ") and "Traceback" not in answer.error
    for part in KEYS[override]:
        assert part in answer.error, answer.error
    record(override, answer.error.removeprefix("error: "), NOT_STARTED)


FORMATS = {
    "model.dtype=bfloat16": "model.dtype=bfloat16 would lose the small updates",
    "model.dtype=float16": "model.dtype=float16 would lose the small updates",
    "model.dtype=float16 optimizer=adamw8bit optimizer.stochastic_rounding=true": "but they are float16: set",
    "optimizer=adamw8bit optimizer.stochastic_rounding=true": "but they are float32: set model.dtype=bfloat16",
    "model=lora model.dtype=bfloat16 optimizer=adamw8bit optimizer.stochastic_rounding=true": "(without model.lora)",
}


@pytest.mark.parametrize("given", FORMATS)
def test_a_format_that_loses_updates_is_refused_before_data_and_judge(
    attempts: Attempts, record: Record, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    monkeypatch.setattr(settings, "find_spec", lambda package: package)  # peft and torchao are extras
    with judge_loads() as loaded:
        answer = attempts.fit("weights=attention", *given.split())
    assert loaded == [] and not any("rows read" in line for line in answer.log)
    assert FORMATS[given] in answer.refused()
    record(given, answer.refused(), NOT_STARTED)


def test_weights_are_read_for_a_model_in_any_format(attempts: Attempts) -> None:
    assert attempts.weigh("model.dtype=bfloat16").status == 0


def test_long_pairs_need_a_model_of_as_many_positions(attempts: Attempts, record: Record) -> None:
    long = ("lengths=16k", "batch.micro=null", "batch.eval_micro=null")
    message = attempts.fit(*long, world=attempts.saying(chosen="good " * 600)).refused()
    assert message.startswith("train: a row of pair ") and "was trained on only 512 positions" in message
    assert "set lengths.max_length=512 or lower" in message
    record("lengths=16k, a row past the positions", message, NOT_STARTED)


def test_judge_prompts_are_cut_to_the_positions_that_the_judge_has(attempts: Attempts, record: Record) -> None:
    both = attempts.saying(chosen="good " * 300, rejected="bad " * 300)
    answer = attempts.weigh("judge.max_length=4096", world=both)
    assert answer.status == 0
    told = answer.noted("judge.max_length=4096: prompts are cut to 512 tokens, the judge")
    answer.noted("2 of 36 judge prompts were truncated to judge.max_length")
    record("judge.max_length beyond the judge's positions", told, "the prompts' ends, counted")


def test_an_override_may_be_longer_than_a_file_name(attempts: Attempts) -> None:
    """A chat template as text: the folder's own after a long remark."""
    own = (attempts.world.model / "chat_template.jinja").read_text(encoding="utf-8")
    template = "{# " + "a remark " * 40 + "#}" + own
    quoted = template.replace("'", "\\'")
    assert attempts.fit("weights=uniform", f"model.chat_template='{quoted}'").status == 0


@pytest.mark.parametrize("key", ["model.path", "data.path", "name", "store", "resume"])
def test_a_path_that_is_too_long_is_one_line(attempts: Attempts, record: Record, key: str) -> None:
    weights = "attention" if key == "store" else "uniform"  # which asks for a store
    message = attempts.fit(f"weights={weights}", f"{key}={'x' * 300}").refused()
    assert "x" * 20 in message and len(message) < 800
    record(f"{key} of 300 characters", message, NOT_STARTED)


def test_a_monitor_that_is_never_logged(attempts: Attempts, record: Record) -> None:
    """Known before anything is loaded where its direction is asked for, else from the validation before training."""
    message = attempts.fit("callbacks=default", "callbacks.monitor=val/los").refused()
    assert "callbacks.monitor=val/los has no known best direction" in message and "margins" in message
    record("callbacks.monitor=val/los", message, NOT_STARTED)
    message = attempts.fit("callbacks=default", "callbacks.monitor=val/los", "callbacks.mode=min").refused()
    assert message.startswith("callbacks.monitor=val/los is not a logged metric; choose one of: ")
    assert "val/loss" in message and "val/rewards/margins" in message
    record("callbacks.monitor=val/los callbacks.mode=min", message, "the validation before training")


def test_a_mode_that_would_keep_the_worst(attempts: Attempts, record: Record) -> None:
    message = attempts.fit("callbacks=default", "callbacks.monitor=val/rewards/margins", "callbacks.mode=min").refused()
    assert "callbacks.mode=min would keep the worst checkpoint by callbacks.monitor=val/rewards/margins" in message
    record("callbacks.monitor=val/rewards/margins callbacks.mode=min", message, NOT_STARTED)


TESTBED = {
    "pairs.margin=0": "pairs.margin must be positive",
    "pairs.label_noise=2": "pairs.label_noise is a share and must lie in [0, 1]",
    "pairs.train=0": "pairs.train and pairs.validation must be >= 1",
    "pairs.temperature=-1": "pairs.temperature at least 0",
    "base.width=33": "base.width must be an even multiple of base.heads",
    "base.layers=0": "base: each of layers, ",
    "base.heads=0": "base: each of layers, ",
    "grammar.p_echo=2": "grammar.p_echo is a share and must lie in [0, 1]",
    "grammar.min_clauses=9": "grammar needs 1 <= min_clauses <= max_clauses",
}


@pytest.mark.parametrize("setting", TESTBED)
def test_a_testbed_that_cannot_be_built(attempts: Attempts, record: Record, setting: str) -> None:
    message = attempts.fit("prepare=testbed", f"++prepare.{setting}").refused()
    assert TESTBED[setting] in message
    record(f"prepare.{setting}", message, NOT_STARTED)


@pytest.mark.parametrize("setting", ["prompts=0", "max_new_tokens=0", "temperature=-1"])
def test_a_scorer_that_cannot_score(attempts: Attempts, record: Record, setting: str) -> None:
    """Refused before training, not when the trained policy is to be scored."""
    message = attempts.fit("+truth._target_=attnpo.lab.testbed.scoring.TruthScorer", f"+truth.{setting}").refused()
    assert message.startswith("truth: scorer.") and setting.partition("=")[0] in message
    record(f"truth.{setting}", message, NOT_STARTED)


def test_a_response_cut_to_nothing(record: Record) -> None:
    """No legal setting leaves a response without a token; should one ever, the pair goes and is counted."""
    rules = LengthRules(20, 9)
    object.__setattr__(rules, "max_length", 9)
    pair = PreferencePair.from_texts([{"role": "user", "content": "good " * 30}], "good .", "bad .")
    tally = Tally()
    assert encode_pair(pair, ChatFormat(build_tokenizer(Grammar())), rules, tally) is None
    assert tally.format_lines() == [f"dropped: a response was truncated to zero tokens: 1 ({pair.pair_id[:8]})"]
    record("a response cut to nothing", tally.format_lines()[0], "1 of 1 pairs, counted")
