"""Tasks of lm_eval written to disk, on a small model, against plain transformers; and what cannot be had."""

import json
import logging
import math
import random
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from attnpo.config import compose as config
from attnpo.evaluation.base import EvaluatedModel, UngradedBenchmark, UngradedResult
from attnpo.evaluation.lm_eval_tasks import WORDS, LmEvalTasks, metric_to_score, silence_lm_eval
from attnpo.models.loading import load_model, load_tokenizer
from attnpo.models.spec import ModelSpec
from attnpo.schema import UserError
from attnpo.text.chat import ChatFormat
from tests.text.formats import STORIES

pytest.importorskip("lm_eval", reason="needs the extra eval")

DOCUMENTS = [
    {"text": "Once upon a time, there was a little girl named", "choices": ["Lily", "xzqy"], "label": 0},
    {"text": "The dog was very", "choices": ["qqq", "happy"], "label": 1},
    {"text": "She said to her mom:", "choices": ["hello", "bbb zz"], "label": 0},
    {"text": "Tim and Sue went to the", "choices": ["park", "of"], "label": 1},
    {"text": "It was a sunny", "choices": ["day", "xylophone quark"], "label": 0},
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of two tasks: a choice between two words, and a text that goes on."""
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    (tasks / "words.jsonl").write_text("".join(json.dumps(row) + "\n" for row in DOCUMENTS), encoding="utf-8")
    common = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tasks / "words.jsonl")}},
        "test_split": "test",
        "metadata": {"version": 3.0},
    }
    choice = {
        "task": "words",
        "output_type": "multiple_choice",
        "doc_to_text": "{{text}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "label",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
    going_on = {
        "task": "going_on",
        "output_type": "generate_until",
        "doc_to_text": "{{text}}",
        "doc_to_target": "TO BE FILLED",
        "generation_kwargs": {"until": ["\n\n\n"], "do_sample": False, "max_gen_toks": 8},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }
    for name, task in (("words", choice), ("going_on", going_on)):
        (tasks / f"{name}.yaml").write_text(yaml.safe_dump({**common, **task}), encoding="utf-8")
    return tasks


def subject_of(model: Path, folder: Path) -> EvaluatedModel:
    spec = ModelSpec(str(model), chat_template=STORIES)
    chat = ChatFormat(load_tokenizer(model), STORIES)
    return EvaluatedModel(spec, chat, torch.device("cpu"), folder / "evaluation")


def plain_choices(model: Path, documents: Sequence[dict[str, Any]]) -> list[bool]:
    """Whether the continuation " WORD" of most log-probability is the labelled one; transformers alone."""
    lm, tokenizer = load_model(model), load_tokenizer(model)
    right = []
    for row in documents:
        before = len(tokenizer(row["text"]).input_ids)
        sums = []
        for word in row["choices"]:
            ids = torch.tensor([tokenizer(f"{row['text']} {word}").input_ids])
            with torch.no_grad():
                logps = lm(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
            sums.append(float(logps[before - 1 :].sum()))
        right.append(int(np.argmax(sums)) == row["label"])
    return right


def measure(tasks: LmEvalTasks, babbler: Path, tmp_path: Path) -> UngradedResult:
    assert isinstance(tasks, UngradedBenchmark)
    return tasks.measure(subject_of(babbler, tmp_path))


# ------------------------------------------------------------------------------------------------ the numbers


def test_a_choice_on_disk_gives_the_accuracy_of_a_plain_computation(
    babbler: Path, folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    found = measure(LmEvalTasks(("words",), include_path=str(folder)), babbler, tmp_path)
    shown = capfd.readouterr()
    assert (shown.out, shown.err) == ("", "")
    right = plain_choices(babbler, DOCUMENTS)
    assert 0 < sum(right) < len(right)
    (score,) = found.scores
    assert (score.name, score.questions) == ("words.acc", 5)
    assert score.mean == pytest.approx(np.mean(right))
    error = np.std(right, ddof=1) / math.sqrt(5)
    assert score.interval == pytest.approx((score.mean - 1.96 * error, score.mean + 1.96 * error))
    (row,) = found.table
    assert (row["version"], row["shots"], row["documents"], row["metric"]) == (3.0, 0, 5, "acc")
    assert (tmp_path / "evaluation" / WORDS).is_file()


def test_an_answer_ends_where_the_settings_say_and_is_greedy(babbler: Path, folder: Path, tmp_path: Path) -> None:
    lm, tokenizer = load_model(babbler), load_tokenizer(babbler)
    ids = tokenizer(DOCUMENTS[0]["text"], return_tensors="pt").input_ids
    made = lm.generate(ids, max_new_tokens=5, do_sample=False)
    target = tokenizer.decode(made[0, ids.shape[1] :])
    task = yaml.safe_load((folder / "going_on.yaml").read_text(encoding="utf-8"))
    task["doc_to_target"] = target
    (folder / "going_on.yaml").write_text(yaml.safe_dump(task), encoding="utf-8")
    asked = LmEvalTasks(("going_on",), include_path=str(folder), max_gen_toks=5, limit=1)
    found = measure(asked, babbler, tmp_path)
    assert (found.scores[0].name, found.scores[0].mean) == ("going_on.exact_match", 1.0)
    assert found.counts["documents left out by benchmark.limit"] == 4
    longer = measure(replace(asked, max_gen_toks=7), babbler, tmp_path)
    assert longer.scores[0].mean == 0.0
    assert measure(replace(asked, apply_chat_template=True), babbler, tmp_path).scores[0].mean == 0.0


def test_a_group_is_scored_as_a_whole(babbler: Path, folder: Path, tmp_path: Path) -> None:
    """Its own figure is the score, weighted by documents; its tasks are rows."""
    few = yaml.safe_load((folder / "words.yaml").read_text(encoding="utf-8"))
    (folder / "few.jsonl").write_text(json.dumps(DOCUMENTS[0]) + "\n", encoding="utf-8")
    few |= {"task": "few", "dataset_kwargs": {"data_files": {"test": str(folder / "few.jsonl")}}}
    group = {"group": "both", "task": ["words", "few"]}
    group["aggregate_metric_list"] = [{"metric": "acc", "aggregation": "mean", "weight_by_size": True}]
    for name, task in (("few", few), ("both", group)):
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(task), encoding="utf-8")
    found = measure(LmEvalTasks(("both",), include_path=str(folder)), babbler, tmp_path)
    right = [*plain_choices(babbler, DOCUMENTS), *plain_choices(babbler, DOCUMENTS[:1])]
    (score,) = found.scores
    assert (score.name, score.mean) == ("both.acc", pytest.approx(np.mean(right)))
    assert {row["task"]: row["documents"] for row in found.table} == {"both": 6, "words": 5, "few": 1}
    strict = metric_to_score({**found.table[0], "filter": "strict", "stderr": None})
    assert (strict.name, strict.interval) == (f"{found.table[0]['task']}.acc.strict", None)


def test_a_perplexity_is_the_better_the_lower(babbler: Path, folder: Path, tmp_path: Path) -> None:
    """The direction is the task's own, also when its figures are read back."""
    task = yaml.safe_load((folder / "words.yaml").read_text(encoding="utf-8"))
    for name in ("doc_to_text", "doc_to_choice", "metric_list"):
        del task[name]
    task |= {"task": "stories", "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}"}
    task["metric_list"] = [{"metric": "word_perplexity"}, {"metric": "byte_perplexity"}]
    (folder / "stories.yaml").write_text(yaml.safe_dump(task), encoding="utf-8")
    found = measure(LmEvalTasks(("stories", "words"), include_path=str(folder)), babbler, tmp_path)
    assert {score.name: score.higher_is_better for score in found.scores} == {
        "stories.word_perplexity": False,
        "stories.byte_perplexity": False,
        "words.acc": True,
    }
    assert {row["metric"]: row["higher_is_better"] for row in found.table}["word_perplexity"] is False
    assert measure(LmEvalTasks(("stories",), include_path=str(folder)), babbler, tmp_path).scores == found.scores[:2]


def test_a_finished_task_is_read_and_a_changed_one_is_not(
    babbler: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import lm_eval

    asked = LmEvalTasks(("words",), include_path=str(folder))
    first = measure(asked, babbler, tmp_path)
    calls: list[int] = []
    original = lm_eval.simple_evaluate
    monkeypatch.setattr(lm_eval, "simple_evaluate", lambda **named: (calls.append(1), original(**named))[1])
    with caplog.at_level(logging.INFO):
        again = measure(asked, babbler, tmp_path)
    assert again == first and not calls and "words is already finished; its scores were read from" in caplog.text
    kept = tmp_path / "evaluation" / "task-words.json"
    kept.write_text(kept.read_text(encoding="utf-8").replace('"value"', '"other"'), encoding="utf-8")
    assert measure(asked, babbler, tmp_path) == first and calls == [1]  # damaged: computed again
    (folder / "words.jsonl").write_text(json.dumps(DOCUMENTS[0]) + "\n", encoding="utf-8")
    changed = measure(asked, babbler, tmp_path)
    assert calls == [1, 1] and changed.scores[0].questions == 1 and changed.scores[0].interval is None
    assert changed.table[0]["data"] != first.table[0]["data"]


def test_what_is_cut_is_counted(babbler: Path, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    long = {**DOCUMENTS[0], "text": "Once upon a time " * 300}
    (folder / "words.jsonl").write_text(json.dumps(long) + "\n", encoding="utf-8")
    with caplog.at_level(logging.WARNING):
        found = measure(LmEvalTasks(("words",), include_path=str(folder)), babbler, tmp_path)
    (reason,) = found.counts
    assert "exceeds model's maximum length (N)" in reason and found.counts[reason] == 2  # once for each choice
    assert "lm_eval warned 2 times: Combined length" in caplog.text


# ------------------------------------------------------------------------------------------------ settings


def test_versions_follow_settings_and_the_folder(folder: Path) -> None:
    asked = LmEvalTasks(("words",), include_path=str(folder))
    seen = [asked.fingerprint()]
    assert seen[0]["lm_eval"] and set(seen[0]["own_tasks"]) == {"words.jsonl", "words.yaml", "going_on.yaml"}
    for changed in (
        replace(asked, tasks=("going_on",)),
        replace(asked, num_fewshot=1),
        replace(asked, apply_chat_template=True),
        replace(asked, limit=3),
        replace(asked, max_gen_toks=9),
        replace(asked, include_path=None),
    ):
        assert changed.fingerprint() not in seen
        seen.append(changed.fingerprint())
    assert replace(asked, batch_size=3).fingerprint() == seen[0]
    (folder / "words.yaml").write_text("task: words\n", encoding="utf-8")
    assert asked.fingerprint() != seen[0]


def test_configs_compose_and_ask_for_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(config.CONFIG_DIR / "benchmark", tmp_path / "benchmark")
    (tmp_path / "measured.yaml").write_text('defaults: [{benchmark: "???"}]\n', encoding="utf-8")
    monkeypatch.setattr(config, "CONFIG_DIR", tmp_path)
    ifeval = config.instantiate(config.compose("measured", ["benchmark=ifeval"]).benchmark)
    assert ifeval == LmEvalTasks(("ifeval",), "ifeval", apply_chat_template=True, nltk_data=("punkt_tab",))
    plain = config.instantiate(config.compose("measured", ["benchmark=lm_eval"]).benchmark)
    assert plain == LmEvalTasks()
    with pytest.raises(
        UserError, match=r"benchmark\.tasks is empty: set it to lm_eval tasks, for example benchmark\.tasks=\["
    ):
        plain.fingerprint()


# ------------------------------------------------------------------------------------------------ what cannot be had


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tasks": ()}, r"benchmark\.tasks is empty"),
        ({"tasks": ("words", "words")}, "contains a task twice"),
        ({"include_path": "nowhere"}, r"benchmark\.include_path=nowhere: no such folder"),
        (
            {"nltk_data": ("no_such_data",)},
            r"nltk lacks no_such_data.*cannot download it.*nltk\.downloader no_such",
        ),
        ({"tasks": ("going_on",), "max_gen_toks": 512}, "up to 512 tokens, but .* has only 512 positions"),
        ({"tasks": ("broken",)}, r"lm_eval cannot load broken \(|the data of broken"),
        ({"tasks": ("gone",)}, r"data set json of lm_eval's gone is not in the cache|gone.*cannot be"),
    ],
)
def test_what_cannot_be_had_is_named(
    change: dict[str, Any],
    message: str,
    babbler: Path,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    good = yaml.safe_load((folder / "words.yaml").read_text(encoding="utf-8"))
    broken = {**good, "task": "broken", "output_type": "no_such_type"}
    gone = {**good, "task": "gone", "dataset_kwargs": {"data_files": {"test": str(folder / "gone.jsonl")}}}
    for task in (broken, gone):
        (folder / f"{task['task']}.yaml").write_text(yaml.safe_dump(task), encoding="utf-8")
    asked = LmEvalTasks(**{"tasks": ("words",), "include_path": str(folder), **change})
    monkeypatch.setattr("nltk.download", lambda name, **_: False)
    with pytest.raises(UserError, match=message):
        measure(asked, babbler, tmp_path)


def test_data_of_nltk_are_downloaded_as_the_task_would(
    babbler: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr("nltk.download", lambda name, **_: asked.append(name) or True)
    found = measure(LmEvalTasks(("words",), include_path=str(folder), nltk_data=("no_such_data",)), babbler, tmp_path)
    assert asked == ["no_such_data"] and found.scores


def test_a_data_set_that_cannot_be_downloaded_is_named_with_what_to_do(babbler: Path, tmp_path: Path) -> None:
    """IFEval's own data, which no test may download."""
    with pytest.raises(UserError) as refused:
        measure(LmEvalTasks(("ifeval",)), babbler, tmp_path)
    text = str(refused.value)
    assert "the data set google/IFEval of lm_eval's ifeval is not in the cache and cannot be downloaded" in text
    assert "datasets.load_dataset('google/IFEval')" in text and "benchmark.include_path" in text


def test_an_unknown_task_is_named_with_those_like_it(
    babbler: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all there is, whose index takes ten seconds to read: here of the user's folder alone."""
    import lm_eval.tasks

    indexes: list[dict[str, Any]] = []
    original = lm_eval.tasks.TaskManager

    def index(**named: Any) -> object:
        indexes.append(named)
        return original(**{"include_defaults": False, **named})

    monkeypatch.setattr(lm_eval.tasks, "TaskManager", index)
    with pytest.raises(
        UserError,
        match=r"word is not a task, group or tag of lm_eval or of benchmark\.include_path.*similar names: words",
    ):
        measure(LmEvalTasks(("word",), include_path=str(folder)), babbler, tmp_path)
    assert indexes[-1] == {"include_path": folder.resolve()}, "lm_eval's own tasks are among them"


def test_settings_without_sense_are_refused() -> None:
    for change, message in (
        ({"limit": 0}, r"benchmark\.limit must be at least 1"),
        ({"num_fewshot": -1}, r"benchmark\.num_fewshot must be at least 0"),
        ({"system": "be kind"}, r"benchmark\.system needs a chat format"),
    ):
        with pytest.raises(UserError, match=message):
            LmEvalTasks(("words",), **change)  # type: ignore[arg-type]


def test_quiet_gives_the_random_states_back(tmp_path: Path) -> None:
    random.seed(5)  # of silence_lm_eval alone: beartype draws from it for every sequence that it checks
    np.random.seed(6)
    torch.manual_seed(7)
    expected = random.Random(5).random(), np.random.RandomState(6).rand(), torch.Generator().manual_seed(7)
    with silence_lm_eval(tmp_path, torch.device("cpu")):
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
    assert (random.random(), np.random.rand()) == expected[:2]
    assert torch.equal(torch.rand(3), torch.rand(3, generator=expected[2]))


def test_quiet_lets_an_exception_through_and_gives_everything_back(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    logger = logging.getLogger("lm_eval")
    before = logger.propagate, logger.level, list(logger.handlers)
    with pytest.raises(ValueError, match="a fault"), silence_lm_eval(tmp_path, torch.device("cpu")) as heard:
        logger.warning("took %d of %d", 3, 4)
        logger.getChild("models").warning("took 5 of 6")
        sys.stderr.write("printed\n")
        subprocess.run([sys.executable, "-c", "print('from a child')"], check=True)
        raise ValueError("a fault")
    assert heard == {"took N of N": 2}
    assert (logger.propagate, logger.level, list(logger.handlers)) == before
    assert capfd.readouterr() == ("", "")
    assert {"printed", "from a child"} <= set((tmp_path / WORDS).read_text(encoding="utf-8").split("\n"))
    subprocess.run([sys.executable, "-c", "print('heard again')"], check=True)
    assert capfd.readouterr().out == "heard again\n"
