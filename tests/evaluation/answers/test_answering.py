"""``attnpo.generate`` on a tiny random model: what it writes, what a repeated command adds, what it refuses."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from attnpo.config.compose import compose, load, parse_as, validate
from attnpo.data.prompts import REFUSED, PromptSource
from attnpo.evaluation.answers import AnswerConfig, AnswerRow, AnswerRules, answer_prompts, default_path
from attnpo.evaluation.jsonl_store import JsonlStore
from attnpo.evaluation.local_chat import HFAnswering
from attnpo.generate import main
from attnpo.lab.testbed.tokenizer import build_tokenizer
from attnpo.models.loading import load_tokenizer
from attnpo.run.run import run
from attnpo.schema import UserError
from attnpo.text.chat import ChatFormat
from tests.evaluation.answers.tiny import batches, rows_of
from tests.run.worlds import GRAMMAR, VAL, World

ASKED = [prompt.text for prompt in GRAMMAR.prompts("train")[:7]]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """Seven prompts with names."""
    return write(tmp_path / "prompts.jsonl", [{"prompt": text, "uid": f"u{n}"} for n, text in enumerate(ASKED)])


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def config(world: World, data: Path, output: Path, *more: str) -> AnswerConfig:
    overrides = [
        f"model.path={world.model}",
        f"data.path={data}",
        f"output={output}",
        "data.columns.id=uid",
        "sampling.max_new_tokens=6",
        "trainer.accelerator=cpu",
        *more,
    ]
    raw = compose("generate", overrides)
    validate(raw)
    cfg = parse_as(raw, AnswerConfig)
    return cfg


def account(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
    return found


# ------------------------------------------------------------------------------------------------ what is written


def test_a_row_per_prompt_in_their_order_and_an_account(
    world: World, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "deep" / "answers.jsonl"
    assert main(config(world, prompts, out)) == 0
    assert capsys.readouterr().out == f"{out}\n"
    rows = rows_of(out)
    assert [row["id"] for row in rows] == [f"u{n}" for n in range(7)]
    assert [row["prompt"][-1]["content"] for row in rows] == ASKED
    assert all(set(row) == {"id", "draw", "prompt", "answer", "finish_reason", "tokens", "digest"} for row in rows)
    for row in rows:
        assert (row["tokens"] == 6) == (row["finish_reason"] == "length")
        assert row["tokens"] <= 6 and row["draw"] == 0
    told = account(out)
    assert told["key"]["sampling"] == {"max_new_tokens": 6, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "seed": 0}
    assert len(told["key"]["model"]["weights"]) == 64 and told["versions"]["attnpo"]
    assert told["tokens"] == sum(row["tokens"] for row in rows)
    assert sum(told["finish_reasons"].values()) == told["answers"] == 7


def test_prompts_that_are_rendered_already_are_warned_of(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    chat = ChatFormat(load_tokenizer(world.model))
    texts = [chat.render([{"role": "user", "content": text}], add_generation_prompt=True) for text in ASKED[:2]]
    path = write(tmp_path / "rendered.jsonl", [{"prompt": text} for text in texts])
    answer_prompts(config(world, path, tmp_path / "a.jsonl", "data.columns.id=null"))
    assert "2 of 2 prompts" in caplog.text and "contain special tokens as text" in caplog.text


def test_batches_decide_no_answer(world: World, prompts: Path, tmp_path: Path) -> None:
    """Small batches, few tokens and several draws at once give the very rows of one large batch."""
    whole = rows_of(answer_prompts(config(world, prompts, tmp_path / "a.jsonl", "answers.per_prompt=2")))
    small = ["answers.per_prompt=2", "answering.batch_size=3", "answering.token_budget=80", "data.rows=2:4"]
    some = rows_of(answer_prompts(config(world, prompts, tmp_path / "b.jsonl", *small)))
    assert some == [row for row in whole if row["id"] in ("u2", "u3")]
    first, second = ([row["answer"] for row in whole if row["draw"] == draw] for draw in (0, 1))
    assert first != second


def test_a_runs_folder_gives_the_answers_its_samples_have(world: World, tmp_path: Path) -> None:
    """Model and prompts are all that has to be named; the draws are those of the run's own samples."""
    run(world.config("callbacks.report=false"), tmp_path / "run")
    samples = rows_of(tmp_path / "run" / "generations.jsonl")
    overrides = [f"model.path={tmp_path / 'run' / 'last'}", f"data.path={world.data}", f"output={tmp_path / 'a.jsonl'}"]
    rows = rows_of(answer_prompts(load("generate", [*overrides, "sampling.max_new_tokens=6"])))
    assert len(rows) == VAL and len(samples) == 2
    answers = {row["prompt"][-1]["content"]: row["answer"] for row in rows}
    assert [answers[sample["prompt"][-1]["content"]] for sample in samples] == [one["policy"] for one in samples]


def test_without_an_output_the_file_is_named_after_model_and_prompts(world: World) -> None:
    named = default_path("outputs/run-7/best", PromptSource("sets/hard.v2.jsonl"))
    assert named == Path("outputs/answers-run-7-best-hard/answers.jsonl")
    named = default_path("org/chat", PromptSource("org/pairs", split="val", rows="100:300"))
    assert named.parent.name == "answers-org-chat-pairs-val-100_300", "another split or other rows are another file"
    assert default_path("./m", PromptSource("org/set")) == Path("outputs/answers-m-set-test/answers.jsonl")


def test_what_cannot_be_answered_is_named_and_not_cut(world: World, tmp_path: Path) -> None:
    turns = [{"role": "system", "content": "be kind"}, {"role": "user", "content": ASKED[0]}]
    long = " ".join([ASKED[0]] * 30)
    rows: list[dict[str, Any]] = [
        {"uid": "fits", "prompt": [{"role": "user", "content": ASKED[0]}]},
        {"uid": "long", "prompt": [{"role": "user", "content": long}]},
        {"uid": "refused", "prompt": turns},
        {"uid": "blank", "prompt": [{"role": "user", "content": " "}]},
    ]
    template = tmp_path / "strict.jinja"
    template.write_text(
        "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system turns') }}{% endif %}"
        "{{ m['content'] + eos_token }}{% endfor %}",
        encoding="utf-8",
    )
    data, out = write(tmp_path / "mixed.jsonl", rows), tmp_path / "answers.jsonl"
    answer_prompts(config(world, data, out, f"model.chat_template={template}", "answering.max_length=60"))
    assert [row["id"] for row in rows_of(out)] == ["fits"]
    told = account(out)["prompts"]
    assert told["rows_left_out"] == {"empty prompt": [3]}
    assert told["left_out"] == {"too long: prompt and 6 new tokens exceed 60": ["long"], REFUSED: ["refused"]}


# ------------------------------------------------------------------------------------------------ repeated commands


def test_a_repeated_command_loads_no_model_and_a_longer_one_adds(world: World, prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "answers.jsonl"
    unbroken = rows_of(answer_prompts(config(world, prompts, tmp_path / "whole.jsonl")))
    with batches() as made:
        answer_prompts(config(world, prompts, out, "data.rows=3"))
        assert [size for size, _ in made] == [3]
        answer_prompts(config(world, prompts, out, "data.rows=3"))
        assert [size for size, _ in made] == [3]
        answer_prompts(config(world, prompts, out))
        assert [size for size, _ in made] == [3, 4]
    assert rows_of(out) == unbroken
    answer_prompts(config(world, prompts, out, "data.rows=2"))
    assert rows_of(out) == unbroken, "answers to other prompts stay"


def test_a_stopped_command_goes_on_where_it_was(world: World, prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "answers.jsonl"
    unbroken = rows_of(answer_prompts(config(world, prompts, tmp_path / "whole.jsonl")))
    with batches(stop_after=2), pytest.raises(KeyboardInterrupt):
        answer_prompts(config(world, prompts, out, "answering.batch_size=2"))
    assert len(rows_of(out)) == 4
    # The next row was only half written.
    out.write_text(out.read_text(encoding="utf-8")[:-20], encoding="utf-8")
    with batches() as made:
        answer_prompts(config(world, prompts, out))
    assert [size for size, _ in made] == [4]
    assert rows_of(out) == unbroken


def test_answers_of_two_kinds_do_not_mix(world: World, prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "answers.jsonl"
    answer_prompts(config(world, prompts, out, "data.rows=2"))
    before = out.read_bytes()
    for override, named in (
        ("sampling.temperature=0.5", "sampling.temperature 1.0, but this command has 0.5"),
        ("sampling.seed=9", "sampling.seed 0, but this command has 9"),
        ("model.dtype=float64", "model.dtype float32, but this command has float64"),
        ("model.chat_template=model/plain_chat.jinja", "chat.chat_template "),
        (f"model.path={other_model(world, tmp_path / 'other')}", "model.weights "),
    ):
        with pytest.raises(UserError, match=named):
            answer_prompts(config(world, prompts, out, override))
        assert out.read_bytes() == before


def other_model(world: World, folder: Path) -> Path:
    """A copy of the world's model with one weight changed."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(world.model)
    model.lm_head.weight.data[3, 3] += 1.0
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(world.model).save_pretrained(folder)
    return folder


def test_answers_that_end_elsewhere_are_answers_of_another_model(world: World, prompts: Path, tmp_path: Path) -> None:
    """Ends stand in generation_config.json; other settings of that file decide nothing here."""
    folder, out = tmp_path / "model", tmp_path / "answers.jsonl"
    shutil.copytree(world.model, folder)
    settings = folder / "generation_config.json"
    before = rows_of(answer_prompts(config(world, prompts, out, f"model.path={folder}")))
    plain = json.loads(settings.read_text())
    settings.write_text(json.dumps({**plain, "do_sample": True, "temperature": 0.3}))
    with batches() as made:
        answer_prompts(config(world, prompts, out, f"model.path={folder}"))
    assert not made
    words = [token for row in before for token in row["answer"].split()]
    common = build_tokenizer(GRAMMAR).convert_tokens_to_ids(max(words, key=words.count))
    settings.write_text(json.dumps({**plain, "eos_token_id": [plain["eos_token_id"], common]}))
    with pytest.raises(UserError, match=r"ends in generation_config\.json"):
        answer_prompts(config(world, prompts, out, f"model.path={folder}"))
    after = rows_of(answer_prompts(config(world, prompts, tmp_path / "new.jsonl", f"model.path={folder}")))
    assert [row["answer"] for row in after] != [row["answer"] for row in before]


def test_a_name_cannot_come_to_mean_another_prompt(world: World, prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "answers.jsonl"
    answer_prompts(config(world, prompts, out, "data.rows=2"))
    write(prompts, [{"prompt": ASKED[3], "uid": "u0"}])
    with pytest.raises(UserError, match="different prompt under the id 'u0'"):
        answer_prompts(config(world, prompts, out))


# ------------------------------------------------------------------------------------------------ several processes


def test_processes_share_the_prompts_and_the_last_one_merges(
    world: World, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = rows_of(answer_prompts(config(world, prompts, tmp_path / "whole.jsonl")))
    out = tmp_path / "answers.jsonl"
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank, size in (("1", 3), ("0", 4)):
        assert not out.exists()
        monkeypatch.setenv("RANK", rank)
        with batches() as made:
            answer_prompts(config(world, prompts, out))
        assert [count for count, _ in made] == [size]
    assert rows_of(out) == whole
    assert sorted(file.name for file in tmp_path.glob("answers*")) == ["answers.json", "answers.jsonl"]
    assert account(out)["answers"] == 7


def test_one_process_takes_over_from_several(
    world: World, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = rows_of(answer_prompts(config(world, prompts, tmp_path / "whole.jsonl")))
    out = tmp_path / "answers.jsonl"
    with monkeypatch.context() as patch:
        patch.setenv("WORLD_SIZE", "3")
        patch.setenv("RANK", "1")
        answer_prompts(config(world, prompts, out))
    with batches() as made:
        answer_prompts(config(world, prompts, out))
    assert [size for size, _ in made] == [5] and rows_of(out) == whole
    assert not list(tmp_path.glob("answers.part*"))


# ------------------------------------------------------------------------------------------------ refusals


def test_what_is_refused(world: World, prompts: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "last").symlink_to(world.model)
    for more, message in (
        (["answers.per_prompt=2", "sampling.temperature=0"], "gives the same answer 2 times"),
        (["sampling.max_new_tokens=600"], "leaves no room for a prompt: the limit is"),
        (["answering.max_length=7"], "none of the 7 prompts can be answered: too long"),
        (["output=answers.txt"], "output=answers.txt must end in .jsonl"),
        (["model=lora"], "model.lora is only for training"),
        ([f"model.path={tmp_path / 'run'}"], "is a run folder: use the model inside it, model.path="),
    ):
        with pytest.raises(UserError, match=message):
            answer_prompts(config(world, prompts, tmp_path / "answers.jsonl", *more))


def test_rules_out_of_range() -> None:
    for make, key in (
        (AnswerRules, "answers.per_prompt"),
        *((HFAnswering, f"answering.{name}") for name in ("batch_size", "token_budget", "max_length")),
    ):
        with pytest.raises(UserError, match=f"{key} must be at least 1, got 0"):
            make(**{key.partition(".")[2]: 0})


def test_a_file_without_its_account_or_with_a_broken_row_is_not_touched(tmp_path: Path) -> None:
    file = JsonlStore[AnswerRow](tmp_path / "answers.jsonl", "answers")
    file.path.write_text('{"id": "a", "draw": 0, "answer": ""}\n', encoding="utf-8")
    with pytest.raises(UserError, match=r"has no file answers.json describing its answers"):
        file.open({"sampling": 1})
    file.write_sidecar({"sampling": 1}, {})
    with pytest.raises(UserError, match=r"line 1: .* If no line has a digest, the file is from an earlier version"):
        file.open({"sampling": 1})
    file.path.unlink()
    row = AnswerRow(id="a", draw=0, prompt=[], answer="é", finish_reason="stop", tokens=0)
    file.append([row])
    assert file.open({"sampling": 1}) == {("a", 0): row}
    whole = '{"id": "a", "draw": 0, "prompt": [], "answer": "é", "finish_reason": "stop", "tokens": 0, '
    whole += '"digest": "f5ffa24e20688f8c"}\n'
    assert file.path.read_text(encoding="utf-8") == whole, "as earlier versions wrote it"
    file.sidecar.write_text('{"of": "somebody"}\n', encoding="utf-8")
    for _ in range(2):
        with pytest.raises(UserError, match=r"has no file answers.json"):
            file.open({"sampling": 1})
        file.path.unlink(missing_ok=True)
    assert file.sidecar.read_text(encoding="utf-8") == '{"of": "somebody"}\n', "not replaced, though no row is there"
