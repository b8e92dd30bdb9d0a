"""``python -m tests.conformance``: passes on what is right, and fails on each thing that could be wrong."""

import json
import pkgutil
import subprocess
import sys
from collections.abc import Callable
from copy import deepcopy
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from attnpo.judge.prompts import JudgeTemplate, RenderedPrompt
from attnpo.objectives.base import LengthFrom
from attnpo.objectives.terms import LossType, Sft
from attnpo.text.chat import ChatFormat
from tests.conformance import records as records_module
from tests.conformance.__main__ import main
from tests.conformance.recompute import verify
from tests.conformance.records import Absent, Check, Comparison, Status

KEPT = (2, 6, 16)  # with rows per head and a shared last token; an empty response; equal responses


@pytest.fixture(scope="module")
def contents(vectors: Path) -> dict[str, Any]:
    """The golden files with three short pairs left."""
    folder = vectors / "extraction"
    pairs = json.loads((folder / "pairs.json").read_text())
    pairs["pairs"] = [pair for pair in pairs["pairs"] if pair["index"] in KEPT]
    tensors = load_file(folder / "expected.safetensors")
    return {
        "losses.json": json.loads((vectors / "losses.json").read_text()),
        "pairs.json": pairs,
        "span_cases.json": json.loads((folder / "span_cases.json").read_text()),
        "unit_cases.json": json.loads((folder / "unit_cases.json").read_text()),
        "expected.safetensors": {key: row for key, row in tensors.items() if int(key[:2]) in KEPT},
    }


Small = Callable[..., Path]


@pytest.fixture
def small(vectors: Path, contents: dict[str, Any], tmp_path: Path) -> Small:
    """Writes a golden folder, some of its files changed; of records of the name that ``only`` begins with."""

    def write(changed: dict[str, Any], only: str = "*") -> Path:
        folder, made, name = tmp_path / "golden/extraction", contents | changed, only.partition(" ")[0]
        folder.parent.mkdir()
        losses = {"records": [one for one in made.pop("losses.json")["records"] if fnmatchcase(one["name"], name)]}
        if losses["records"]:
            (folder.parent / "losses.json").write_text(json.dumps(losses), encoding="utf-8")
        if only == "*" or name.startswith("extraction"):
            folder.mkdir()
            for part in ("model", "tokenizer", "template.txt"):
                (folder / part).symlink_to(vectors / "extraction" / part)
            save_file(made.pop("expected.safetensors"), folder / "expected.safetensors")
            for file, content in made.items():
                (folder / file).write_text(json.dumps(content), encoding="utf-8")
        return folder.parent

    return write


# --------------------------------------------------------------------------------------------- what is right


def test_every_golden_record_passes(vectors: Path) -> None:
    found = list(verify([vectors / "losses.json", vectors / "extraction", vectors / "evaluation"]))
    failed = [record.line() for record in found if record.status is Status.FAIL]
    assert failed == []
    statuses = {name: [r.status for r in found if r.name == name] for name in {r.name for r in found}}
    lengths = {"twdpo": 4, "twdpo_len_norm": 4, "attnpo_weights_layer": 8}
    lengths |= dict.fromkeys(("dpo", "ipo", "cpo", "simpo", "rdpo", "rrhf", "slic_hf"), 4)
    for name, count in lengths.items():
        assert statuses[name] == [Status.OK] * count, name
    # TRL's SFT term reads the prompt: compared as it is with the prompt's tokens added, and listed beside its record.
    assert statuses["orpo"] == [Status.OK, Status.VARIANT] * 4
    # The one record with edited training ids.
    assert sorted(s.value for s in statuses["attnpo_align"]) == ["ok"] * 6 + ["variant"]
    for name in ("rows", "weights", "verdict"):
        assert statuses[f"extraction/{name}"] == [Status.OK] * 23, name
    assert statuses["extraction/rows_per_head"] == [Status.OK] * 2
    assert statuses["extraction/span_cases"] == [Status.OK] * 16
    # Three pairs are longer than the judge's limit; three have a side on which the reference edited the ids.
    for name in ("prompt", "span", "training_ids", "aligned"):
        assert sorted(s.value for s in statuses[f"extraction/{name}"]) == ["ok"] * 20 + ["variant"] * 3, name
    rebuilt = [r.note for r in found if r.name == "extraction/span" and r.status is Status.VARIANT]
    assert all("was checked on the texts it shows" in note for note in rebuilt)
    # Zero mass after the sink, twice; two edited completions and weights that do not fit.
    assert sorted(s.value for s in statuses["extraction/sink_fix"]) == ["ok"] * 8 + ["variant"] * 2
    assert sorted(s.value for s in statuses["extraction/alignment"]) == ["ok"] * 34 + ["variant"] * 3
    assert {record.name for record in found} >= {"alpaca_eval", "arena_hard", "mt_bench"}


def test_the_rows_of_the_authors_own_run_are_met(shared: Path) -> None:
    """Reads the same texts through the model of the authors' run, whose weights are too large for the repository.

    Prompts, spans and ids of the first folder are those of the record before.
    """
    numbers = [f"extraction/{name} *" for name in ("verdict", "rows", "rows_per_head", "weights", "aligned", "rollout")]
    found = list(verify([shared / "golden"], [*numbers, "alpaca_eval *"]))
    found += verify([shared / "golden_sentencepiece"], ["extraction/*"])
    assert [record.line() for record in found if record.status is Status.FAIL] == []
    assert sum(record.name == "extraction/rows" for record in found) == 27


def test_the_command_prints_records_and_counts(
    small: Small, contents: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    losses = deepcopy(contents["losses.json"])
    losses["records"].append({**losses["records"][0], "name": "unheard_of"})
    assert main([str(small({"losses.json": losses}))]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("twdpo ") and line.endswith("  ok") for line in lines) == 4
    assert sum(line.startswith("unheard_of ") and line.endswith("configs/objective/unheard_of.yaml)") for line in lines)
    counts = {word: sum(f"  {word}" in line for line in lines[:-1]) for word in ("ok", "FAIL", "variant", "not built")}
    assert counts["FAIL"] == 0 and counts["ok"] > 100
    assert lines[-1] == f"{len(lines) - 1} records: " + ", ".join(f"{n} {word}" for word, n in counts.items())


def test_one_call_reads_every_pair(small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    from attnpo.judge.causal_judge import CausalJudge

    calls, read = [], CausalJudge.read
    monkeypatch.setattr(
        CausalJudge, "read", lambda self, ids, **asked: calls.append(len(ids)) or read(self, ids, **asked)
    )
    folder = small({}, "extraction")
    assert {r.status for r in verify([folder], ["extraction/rows *", "extraction/weights *"])} == {Status.OK}
    assert calls == [2 * len(KEPT)]


# --------------------------------------------------------------------------------------------- golden numbers changed

Change = Callable[[Any], None]


def record(name: str, case: int, change: Change) -> Change:
    def apply(content: Any) -> None:
        change(next(r for r in content["records"] if (r["name"], r["case"]) == (name, case)))

    return apply


def add(path: str, amount: float) -> Change:
    """Adds to the number at a dotted path."""

    def apply(content: Any) -> None:
        *keys, last = [int(key) if key.isdigit() else key for key in path.split(".")]
        for key in keys:
            content = content[key]
        content[last] += amount

    return apply


def shift(key: str, place: tuple[int, ...], amount: float) -> Change:
    def apply(tensors: Any) -> None:
        tensors[key][place] += amount

    return apply


CHANGES = [
    ("losses.json", record("dpo", 0, add("expected.loss", 1e-7)), "dpo 0"),
    ("losses.json", record("dpo", 3, add("expected.rejected_rewards.0", 1e-8)), "dpo 3"),
    ("losses.json", record("twdpo", 1, add("inputs.chosen.weights.0.0", 1e-6)), "twdpo 1"),
    ("losses.json", record("twdpo", 2, add("inputs.rejected.judge_token_count.0", 1)), "twdpo 2"),
    ("losses.json", record("twdpo", 0, add("expected.unweighted_accuracy", -0.5)), "twdpo 0"),
    ("losses.json", record("twdpo", 3, add("expected.unweighted_chosen_rewards.0", 1e-8)), "twdpo 3"),
    ("losses.json", record("twdpo_len_norm", 0, add("expected.loss_per_example.1", -1e-7)), "twdpo_len_norm 0"),
    ("losses.json", record("ipo", 1, add("expected.loss_per_example.2", 1e-8)), "ipo 1"),
    ("losses.json", record("ipo", 2, add("expected.loss_per_example_summed_variant.0", 1e-3)), "ipo 2"),
    ("losses.json", record("cpo", 0, add("expected.preference_loss_per_example.1", 1e-8)), "cpo 0"),
    ("losses.json", record("cpo", 1, add("expected.loss_per_example_sequence_sum_variant.0", 1e-7)), "cpo 1"),
    ("losses.json", record("cpo", 3, add("expected.nll_token_mean_over_batch", 1e-8)), "cpo 3"),
    ("losses.json", record("cpo", 2, add("hyperparameters.sft_coef", 1e-6)), "cpo 2"),
    ("losses.json", record("orpo", 0, add("expected.odds_ratio_loss_per_example.0", 1e-6)), "orpo 0"),
    ("losses.json", record("orpo", 1, add("expected.rejected_avg_logp.1", 1e-6)), "orpo 1"),
    ("losses.json", record("orpo", 2, add("expected.loss_trl_float32_with_prompt_nll", 1e-4)), "orpo 2 loss_trl*"),
    ("losses.json", record("simpo", 0, add("hyperparameters.gamma", 1e-8)), "simpo 0"),
    ("losses.json", record("simpo", 3, add("expected.loss", 1e-8)), "simpo 3"),
    ("losses.json", record("rdpo", 1, add("expected.loss_per_example.0", 1e-8)), "rdpo 1"),
    ("losses.json", record("rrhf", 2, add("expected.rejected_score.1", 1e-6)), "rrhf 2"),
    ("losses.json", record("rrhf", 0, add("expected.rank_loss_per_example.0", 1e-8)), "rrhf 0"),
    ("losses.json", record("slic_hf", 1, add("expected.hinge_per_example.1", 1e-7)), "slic_hf 1"),
    ("losses.json", record("slic_hf", 0, add("expected.nll_token_mean_over_batch", 1e-7)), "slic_hf 0"),
    (
        "losses.json",
        record("attnpo_weights_layer", 2, add("expected.rejected_paper_order_sink_fixed.3", 1e-8)),
        "attnpo_weights_layer 2",
    ),
    (
        "losses.json",
        record("attnpo_align", 4, add("expected.aligned_weights_times_judge_count.2", 1e-7)),
        "attnpo_align 4",
    ),
    (
        "losses.json",
        record("attnpo_align", 1, add("expected.matched_fraction_of_judge_tokens", 1e-7)),
        "attnpo_align 1",
    ),
    ("losses.json", record("attnpo_align", 6, add("expected.training_token_ids_after.0", 1)), "attnpo_align 6"),
    ("expected.safetensors", shift("02/L04/rc/row", (7,), 1e-4), "extraction/rows 02 code L01..L08"),
    ("expected.safetensors", shift("02/all_layers/cr/rows_per_head", (3, 1, 9), 1e-3), "extraction/rows_per_head 02*"),
    ("expected.safetensors", shift("16/L01/cr/rejected", (1,), 1e-3), "extraction/weights 16*"),
    ("expected.safetensors", shift("02/L04/fixed/chosen", (0,), 1e-3), "extraction/weights 02*"),
    ("expected.safetensors", shift("02/aligned/rejected", (5,), 1e-3), "extraction/aligned 02*"),
    ("expected.safetensors", shift("06/aligned/chosen", (0,), 1e-3), "extraction/aligned 06*"),
    ("pairs.json", add("pairs.0.rounds.rc.span_b.1", 1), "extraction/span 02*"),
    ("pairs.json", add("pairs.1.rounds.cr.content_b.touch.0", -1), "extraction/span 06*"),
    ("pairs.json", add("pairs.1.rounds.cr.content_b.inside.1", 1), "extraction/span 06*"),
    ("pairs.json", add("pairs.0.rounds.cr.judge_ids.40", 1), "extraction/prompt 02*"),
    ("pairs.json", add("pairs.2.rounds.rc.argmax_token_id", 1), "extraction/verdict 16*"),
    ("pairs.json", add("pairs.0.training.chosen.completion_ids.3", 1), "extraction/training_ids 02*"),
    ("pairs.json", add("pairs.1.training.chosen.completion_ids.0", 1), "extraction/training_ids 06*"),
    ("span_cases.json", add("5.tokens_a.1", 1), "extraction/span_cases 05"),
    ("span_cases.json", add("5.chars_b.0", -1), "extraction/span_cases 05"),
    ("unit_cases.json", add("sink_fix.3.fixed.2", 1e-6), "extraction/sink_fix 03"),
    ("unit_cases.json", add("alignment.3.expected_weights.4", 1e-6), "extraction/alignment 03*"),
    ("unit_cases.json", add("alignment.11.expected_weights.4", 1e-6), "extraction/alignment 11 repeats"),
]


@pytest.mark.parametrize(("file", "change", "only"), CHANGES, ids=[f"{i}-{c[2]}" for i, c in enumerate(CHANGES)])
def test_one_changed_number_fails_its_record(
    small: Small,
    contents: dict[str, Any],
    file: str,
    change: Change,
    only: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    content = contents[file]
    if file == "losses.json":
        content = {"records": [one for one in content["records"] if one["name"] == only.partition(" ")[0]]}
    content = deepcopy(content)
    change(content)
    assert main([str(small({file: content}, only)), "--only", only]) == 1
    line, counts = capsys.readouterr().out.splitlines()
    assert line.startswith(only.split()[0] + " ") and only.split()[1].rstrip("*") in line and "  FAIL  (" in line
    assert counts == "1 records: 0 ok, 1 FAIL, 0 variant, 0 not built"


# --------------------------------------------------------------------------------------------- product functions broken


def moved_spans(render: Any) -> Any:
    def broken(self: JudgeTemplate, question: str, answer_a: str, answer_b: str) -> RenderedPrompt:
        text, spans = render(self, question, answer_a, answer_b)
        return RenderedPrompt(text, {name: (begin + 2, end + 2) for name, (begin, end) in spans.items()})

    return broken


def without_last_token(tokenize: Any) -> Any:
    def broken(self: ChatFormat, text: str, start: bool = True) -> Any:
        ids, offsets = tokenize(self, text, start)
        return ids[:-1], offsets[:-1]

    return broken


def without_end_of_turn(encode: Any) -> Any:
    def broken(self: ChatFormat, prompt: Any, response: str) -> Any:
        whole = encode(self, prompt, response)
        return whole._replace(response_ids=whole.response_ids[:-1], offsets=whole.offsets[:-1])

    return broken


def without_weights(align: Any) -> Any:
    return lambda *args: align(*args)._replace(weights=args[2].new_zeros(len(args[3])))


def swapped_rounds(build: Any) -> Any:
    return lambda self, pair: build(self, pair)[::-1]


def with_other_verdicts(function: Callable[..., Any]) -> Callable[..., Any]:
    def broken(probe: Any, wanted: Any, logits: Any, *rest: Any) -> Any:
        return function(probe, wanted, None if logits is None else -logits, *rest)

    return broken


TWDPO, DPO, OBJECTIVES = "attnpo.objectives.twdpo.", "attnpo.objectives.dpo.", "attnpo.objectives."
LENGTHS = OBJECTIVES + "base.response_lengths"
POST, TAP = "attnpo.weights.postprocess.", "attnpo.judge.attention."
Broken = Callable[[Any], Any]
BREAKS: list[tuple[str, Broken, str]] = [
    (DPO + "margin_loss", lambda f: lambda margin, kind, smoothing: f(margin, kind), "dpo *"),
    (DPO + "margin_loss", lambda f: lambda margin, kind, smoothing: f(-margin, kind, smoothing), "dpo *"),
    (TWDPO + "weighted_sum", lambda f: lambda *rows: f(*rows) * 1.001, "twdpo *"),
    (OBJECTIVES + "ipo.mean_factors", lambda f: lambda rows: f(rows) * 1.001, "ipo *"),
    (OBJECTIVES + "ipo.response_lengths", lambda f: lambda rows, scale, by: f(rows, False, by), "ipo *"),
    (OBJECTIVES + "terms.chosen_nll", lambda f: lambda p, mask, form, by: f(p, mask, Sft.MEAN), "cpo *"),
    (OBJECTIVES + "terms.chosen_nll", lambda f: lambda p, mask, form, by: f(p, mask, Sft.SUM), "orpo *"),
    (OBJECTIVES + "terms.chosen_nll", lambda f: lambda p, mask, form, by: f(p, mask, Sft.MEAN), "slic_hf *"),
    (OBJECTIVES + "orpo.log_odds", lambda f: lambda means: means, "orpo *"),
    (OBJECTIVES + "rdpo.sigmoid_loss", lambda f: lambda margin, smoothing: f(-margin, smoothing), "rdpo *"),
    (OBJECTIVES + "simpo.SimPO.gamma", lambda f: property(lambda self: self.gamma_beta_ratio), "simpo *"),
    (OBJECTIVES + "simpo.margin_loss", lambda f: lambda margin, kind, by: f(margin, LossType.SIGMOID, by), "simpo 3"),
    (OBJECTIVES + "rrhf.mean_factors", lambda f: lambda rows: f(rows) * 1.001, "rrhf *"),
    (LENGTHS, lambda f: lambda rows, scale, by: f(rows, False, by), "slic_hf *"),
    (DPO + "reduce", lambda f: lambda x, w, mask, how: f(x, w, mask, how) * 1.001, "dpo *"),
    (TWDPO + "weighted_sum", lambda f: lambda x, w, mask, lengths: x.sum(-1), "twdpo*"),
    (LENGTHS, lambda f: lambda rows, scale, by: f(rows, True, by), "twdpo_len_norm *"),
    (LENGTHS, lambda f: lambda rows, scale, by: f(rows, scale, LengthFrom.TRAIN), "twdpo *"),
    (TWDPO + "log_ratios", lambda f: lambda *args: f(*args) + 1e-6, "twdpo *"),
    (DPO + "log_ratios", lambda f: lambda p, r, mask: p - r + 1e-6, "dpo *"),
    (POST + "normalize", lambda f: lambda row: torch.softmax(row, 0), "attnpo_weights_layer *"),
    (POST + "fix_sink", lambda f: lambda row, first, least: row, "attnpo_weights_layer *"),
    (POST + "fix_sink", lambda f: lambda row, first, least: f(row, first, least + 1), "extraction/sink_fix *"),
    (POST + "average_rounds", lambda f: lambda rounds: rounds[0], "attnpo_weights_layer *"),
    (POST + "combine_rounds", lambda f: lambda rounds, order: f(rounds, type(order)("mean_then_normalize")),
     "attnpo_we*"),
    ("attnpo.weights.pipeline.align", without_weights, "attnpo_align *"),
    ("attnpo.text.alignment.match_equal_ids", lambda f: lambda a, b: (min(len(a), len(b)), []),
     "extraction/alignment *"),
    ("attnpo.judge.prompts.JudgeTemplate.render", moved_spans, "extraction/span *"),
    ("attnpo.judge.prompts.JudgeTemplate.render", moved_spans, "extraction/span_cases *"),
    ("attnpo.judge.prompts.JudgePromptBuilder._reference_end", lambda f: lambda self, first, last, closing: last,
     "extraction/span *"),
    ("attnpo.judge.prompts.JudgePromptBuilder.build", swapped_rounds, "extraction/prompt *"),
    ("attnpo.text.chat.ChatFormat.tokenize", without_last_token, "extraction/prompt *"),
    ("attnpo.text.chat.ChatFormat.encode", without_end_of_turn, "extraction/training_ids *"),
    (TAP + "LayerAttention.rows_at", lambda f: lambda self, last: f(self, last - 1), "extraction/rows *"),
    (TAP + "LayerAttention.rows_at", lambda f: lambda self, last: f(self, last).roll(1, 1),
     "extraction/rows_per_head *"),
    ("attnpo.judge.causal_judge.make_readings", with_other_verdicts, "extraction/verdict *"),
    ("attnpo.weights.sources.attention.Attention.rows_to_read", lambda f: lambda self: (2,), "extraction/weights *"),
]  # fmt: skip


@pytest.mark.parametrize(("target", "broken", "only"), BREAKS, ids=[f"{i}-{b[0]}" for i, b in enumerate(BREAKS)])
def test_a_broken_product_function_fails(
    small: Small, monkeypatch: pytest.MonkeyPatch, target: str, broken: Broken, only: str
) -> None:
    folder = small({}, only)
    monkeypatch.setattr(target, broken(pkgutil.resolve_name(target)))
    found = [record.status for record in verify([folder], [only])]
    assert Status.FAIL in found


def test_a_loss_that_reads_masked_values_fails(small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    """Off by a part of what stands under mask 0, which is too little to see in the record's own numbers."""
    from attnpo.objectives import dpo

    ratios = dpo.log_ratios
    monkeypatch.setattr(dpo, "log_ratios", lambda p, r, mask: ratios(p, r, mask) + 1e-13 * p.max())
    found = list(verify([small({}, "dpo 1")], ["dpo 1"]))
    assert [record.status for record in found] == [Status.FAIL]
    assert "changes with values under mask 0" in found[0].note


def test_a_judge_pass_that_breaks_runs_once(small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    from attnpo.judge.causal_judge import CausalJudge

    calls: list[int] = []

    def read(self: CausalJudge, prompts: Any, **asked: Any) -> None:
        calls.append(len(prompts))
        raise RuntimeError("out of memory\nand more")

    monkeypatch.setattr(CausalJudge, "read", read)
    found = list(verify([small({}, "extraction")], ["extraction/rows *", "extraction/aligned *"]))
    assert [record.status for record in found] == [Status.FAIL] * 2 * len(KEPT)
    assert found[0].note == "RuntimeError: out of memory" and len(calls) == 1


# --------------------------------------------------------------------------------------------- paths and statuses


def test_nothing_found_is_a_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes.json").write_text("{}")
    (tmp_path / "deeper").mkdir()
    assert main([str(tmp_path)]) == 1
    assert capsys.readouterr().out == "no golden record found\n"


def test_paths_that_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "losses.json").write_text('{"records": [')
    (tmp_path / "other.json").write_text('{"records": [{"name": "dpo"}]}')
    (tmp_path / "extraction").mkdir()
    (tmp_path / "extraction/pairs.json").write_text("{}")
    expected = {
        "absent": "expected a golden file or folder, there is none",
        "losses.json": "cannot read golden records",
        "other.json": 'expected {"records": [...]} with case, expected, hyperparameters',
        "extraction": "lacks expected.safetensors, template.txt, span_cases.json, unit_cases.json, model/, tokenizer/",
    }
    for name, text in expected.items():
        assert main([str(tmp_path / name)]) == 2
        assert text in capsys.readouterr().err, name


def test_a_missing_value_fails_its_record_under_its_key(small: Small, contents: dict[str, Any]) -> None:
    content = {"records": [deepcopy(one) for one in contents["losses.json"]["records"] if one["name"] == "dpo"][:2]}
    content["records"][0]["inputs"]["chosen"]["mask"] = "all"
    del content["records"][1]["inputs"]["rejected"]["policy_logps"]
    found = list(verify([small({"losses.json": content}, "dpo")]))
    assert [record.status for record in found] == [Status.FAIL] * 2 and "KeyError: 'policy_logps'" in found[1].note


def test_a_damaged_pair_is_refused_with_its_key(
    small: Small, contents: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    pairs = deepcopy(contents["pairs.json"])
    del pairs["pairs"][1]["training"]["chosen"]["completion_ids"]
    folder = small({"pairs.json": pairs}) / "extraction"
    assert main([str(folder)]) == 2
    assert f"{folder}: cannot read golden" in (shown := capsys.readouterr().err) and "completion_ids" in shown


def test_several_paths_and_patterns(vectors: Path) -> None:
    losses = vectors / "losses.json"
    found = list(verify([losses, vectors / "evaluation", losses], ["twdpo 0", "mt_bench *"]))
    assert [(record.name, record.case, record.status.value) for record in found] == [
        ("twdpo", "0", "ok"),
        ("mt_bench", "Meta-Llama-3-8B-Instruct-Normal", "ok"),
        ("twdpo", "0", "ok"),
    ]


@pytest.fixture
def scores(vectors: Path, tmp_path: Path) -> Path:
    """A copy of the known scores of Arena-Hard and MT-Bench."""
    for name in ("arena_hard", "mt_bench"):
        (tmp_path / "evaluation" / name).mkdir(parents=True)
        for path in (vectors / "evaluation" / name).iterdir():
            (tmp_path / "evaluation" / name / path.name).write_bytes(path.read_bytes())
    return tmp_path / "evaluation"


def test_known_scores_are_met(scores: Path) -> None:
    found = list(verify([scores]))
    assert [record.status for record in found] == [Status.OK] * 2
    assert all(record.absolute <= 1e-6 for record in found)


@pytest.mark.parametrize(
    ("file", "old", "new", "note"),
    [
        (
            "arena_hard/expected.json",
            "23.33804809",
            "23.33805809",
            "score by the rules of 2024: expected 23.33805809, got 23",
        ),
        (
            "arena_hard/expected.json",
            "23.34",
            "23.35",
            "score: 23.338048 is not the leaderboard's 23.35 in two decimals",
        ),
        ("arena_hard/expected.json", '"n_questions": 500', '"n_questions": 499', "questions: expected 499, got 500"),
        ("arena_hard/expected.json", "1414", "1415", "battles: expected 1415, got 1414"),
        (
            "arena_hard/gpt-3.5-turbo-0125.csv",
            "A=B,A>B,1,1,0",
            "A=B,A>>B,1,1,0",
            "score by the rules of 2024: expected 23.338",
        ),
        ("arena_hard/gpt-3.5-turbo-0125.csv", "A=B,A>B,1,1,0", "A=B,A>B,1,1,1", "battles of a question[0]"),
        ("arena_hard/gpt-3.5-turbo-0125.csv", "game1", "game", "KeyError"),
        ("mt_bench/expected.json", "7.843373", "7.843383", "FastChat's average: expected 7.843383"),
        ("mt_bench/expected.json", "7.76875", "7.76876", "average: expected 7.76876, got 7.76875"),
        ("mt_bench/expected.json", '"coding": 5.6', '"coding": 5.7', "coding: expected 5.7, got 5.6"),
        ("mt_bench/expected.json", '"n_invalid": 4', '"n_invalid": 3', "valid rows: expected 167, got 166"),
        ("mt_bench/expected.json", '"fastchat_average"', '"other"', "KeyError: 'fastchat_average'"),
    ],
)
def test_scores_that_differ_fail_with_what_differs(scores: Path, file: str, old: str, new: str, note: str) -> None:
    path = scores / file
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")
    (found,) = verify([path.parent])
    assert found.status is Status.FAIL and note in found.note


@pytest.mark.parametrize(
    ("change_file", "expected"),
    [
        (lambda folder: (folder / "expected.json").write_text("{"), "cannot read known scores"),
        (lambda folder: (folder / "expected.json").write_text("[]"), "expected an object with known scores by model"),
    ],
)
def test_known_scores_that_cannot_be_read_are_named(
    scores: Path, change_file: Change, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    change_file(scores / "arena_hard")
    assert main([str(scores)]) == 2
    assert expected in capsys.readouterr().err


def test_a_missing_verdict_costs_its_game_as_in_the_code_that_made_the_leaderboard(scores: Path) -> None:
    """The first row's second game, won once, is taken out of the judgments and of what is expected of them."""
    folder = scores / "arena_hard"
    judged, expected = folder / "gpt-3.5-turbo-0125.csv", folder / "expected.json"
    judged.write_text(judged.read_text().replace("A=B,A>B,1,1,0", "A=B,,0,1,0", 1))
    values = json.loads(expected.read_text())
    (model,) = values.values()
    mean = (model["exact_weighted_mean_percent"] * 1414 - 100) / 1413
    model |= {"exact_weighted_mean_percent": mean, "leaderboard_score": round(mean, 2), "n_weighted_battles": 1413}
    expected.write_text(json.dumps(values))
    (found,) = verify([folder])
    assert found.status is Status.OK, found.note


def test_judgments_that_are_missing_fail_their_record(scores: Path) -> None:
    (scores / "arena_hard/gpt-3.5-turbo-0125.csv").unlink()
    (found,) = verify([scores], ["arena_hard *"])
    assert found.status is Status.FAIL and "gpt-3.5-turbo-0125.csv: cannot read judgments" in found.note


def test_what_is_built_must_be_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    item = Absent("attnpo_weights_rollout", "0", "weights", "rollout")
    monkeypatch.setattr(records_module, "_options", lambda: {"weights": ["attention"]})
    assert item.run().status is Status.NOT_BUILT
    monkeypatch.setattr(records_module, "_options", lambda: {"weights": ["attention", "rollout"]})
    found = item.run()
    assert found.status is Status.FAIL and "configs/weights/rollout.yaml exists" in found.note


def test_an_unknown_hyperparameter_fails_its_record(small: Small, contents: dict[str, Any]) -> None:
    content = {"records": [deepcopy(one) for one in contents["losses.json"]["records"] if one["name"] == "twdpo"][:1]}
    content["records"][0]["hyperparameters"]["gamma"] = 1.0
    unweighted = {"unweighted_chosen_rewards": content["records"][0]["expected"]["unweighted_chosen_rewards"]}
    content["records"].append(
        {**content["records"][0], "name": "dpo", "hyperparameters": {"beta": 0.005}, "expected": unweighted}
    )
    found = list(verify([small({"losses.json": content}, "*dpo")], ["twdpo*", "dpo*"]))
    assert [record.status for record in found] == [Status.FAIL, Status.FAIL]
    assert "gamma" in found[0].note
    # DPO has no second pair of rewards: what a record expects and nothing computes is no pass.
    assert "unweighted_chosen_rewards: expected by the record, but nothing here computes it" in found[1].note


def test_quantities_that_stand_apart_are_never_passed_over(small: Small, contents: dict[str, Any]) -> None:
    """They have a line of their own, and one that no rule knows fails its record."""
    content = {"records": [deepcopy(one) for one in contents["losses.json"]["records"] if one["name"] == "orpo"][:2]}
    content["records"][1]["expected"]["loss_of_another_library"] = 1.0
    found = list(verify([small({"losses.json": content}, "orpo")], ["orpo *"]))
    apart = "loss_trl_float32_with_prompt_nll"
    assert [record.case for record in found] == ["0", f"0 {apart}", "1", f"1 {apart}"]
    assert [record.status.value for record in found] == ["ok", "variant", "FAIL", "variant"]
    assert "reads the prompt too" in found[1].note and "loss_of_another_library" in found[2].note


def test_errors_and_tolerances() -> None:
    def run(compare: Callable[[Comparison], None]) -> tuple[str, float, float]:
        found = Check("name", "0", compare).run()
        return found.status.value, found.absolute, found.relative

    # 0.5 off 2.0 and 0.25 off 0.5: largest absolute error 0.5, largest relative 0.5.
    pair = ([2.5, 0.75], [2.0, 0.5])
    assert run(lambda c: c.numbers("x", *pair, rtol=0.5)) == ("ok", 0.5, 0.5)
    assert run(lambda c: c.numbers("x", *pair, rtol=0.25)) == ("FAIL", 0.5, 0.5)
    assert run(lambda c: c.numbers("x", *pair, atol=0.5)) == ("ok", 0.5, 0.25)  # 0.5 is not above the tolerance
    assert run(lambda c: c.numbers("x", [float("nan")], [1.0], atol=1e9))[0] == "FAIL"
    assert run(lambda c: c.numbers("x", [1.0], [1.0, 1.0], atol=1e9))[0] == "FAIL"
    assert run(lambda c: c.same("x", [1, 2], [1, 3])) == ("FAIL", float("inf"), float("inf"))
    assert run(lambda c: c.require(True, "no"))[0] == "ok"


def test_help_is_quick_to_come() -> None:
    code = "import sys, tests.conformance.__main__ as v\n"
    code += "try: v.main(['--help'])\nfinally: assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "python -m tests.conformance golden/ --only" in done.stdout
