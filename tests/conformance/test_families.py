"""Every causal LM of transformers, built tiny: here a fixed score; all of them by `make families`."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from attnpo.models.backbone import first_position
from attnpo.models.layouts import LAYOUTS
from attnpo.models.scored import ScoredLM
from attnpo.schema import TokenStats, UserError
from tests.conformance import family_checks, family_commands
from tests.conformance.families import verify_families
from tests.conformance.family_checks import findings
from tests.conformance.family_models import LARGEST, families, tiny_config, tiny_model
from tests.conformance.family_table import (
    EQUAL,
    FAILED,
    NO_JUDGE,
    NOT_BUILT,
    REFUSED,
    STATUSES,
    Family,
    append,
    recorded,
    share,
    summary,
    write_page,
)

SOME = (
    "llama", "mistral_window", "qwen2_window", "gemma2", "vaultgemma", "gpt_oss", "granite_swa", "mimo_v2_flash",
    "deepseek_v3", "gemma3n_text", "gemma4_text", "modernbert-decoder", "diffllama", "roberta",
    "jamba", "qwen3_next", "granitemoehybrid", "lfm2", "doge", "stablelm", "falcon",
)  # fmt: skip
"""Windows, soft-caps, sinks, latent keys, shared layers, hybrids, and those read by their maps alone."""


def test_every_type_of_the_library_is_a_family() -> None:
    assert families()[: len(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)] == list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    assert len(set(families())) == len(families())


@pytest.mark.parametrize("name", SOME)
def test_numbers_are_the_librarys_own(name: str, tmp_path: Path) -> None:
    tiny_model(name).save_pretrained(tmp_path)
    found = list(findings(tmp_path))
    assert [one for one in found if one.problem] == []
    checks = {one.check for one in found if one.error is not None}
    assert {"rows together", "rows alone", "verdict alone", "padded log-probs", "padded gradients", "memory"} <= checks
    assert not any(one.reason for one in found if one.check in ("load", "rows", "layouts"))


def test_a_wrong_number_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained

    def other(*args: Any, **named: Any) -> PreTrainedModel:
        model: PreTrainedModel = loaded(*args, **named)
        if named.get("attn_implementation") == "eager":
            model.model.layers[1].self_attn.scaling *= 1.01
        return model

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", other)
    failed = {one.check for one in findings(tmp_path) if one.problem}
    assert {"rows together", "verdict alone", "rollout alone"} <= failed


def test_a_wrong_log_probability_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Off(ScoredLM):
        def forward(self, *given: Any) -> TokenStats:
            found = super().forward(*given)
            return replace(found, logps=found.logps * 1.01)

    tiny_model("llama").save_pretrained(tmp_path)
    monkeypatch.setattr(family_checks, "ScoredLM", Off)
    failed = {one.check for one in findings(tmp_path) if one.problem}
    assert failed == {f"{name} {what}" for name in LAYOUTS for what in ("log-probs", "gradients")}


def test_what_the_library_cannot_run_or_we_refuse_has_its_reason(tmp_path: Path) -> None:
    tiny_model("bert_encoder").save_pretrained(tmp_path / "bert")
    (refused,) = findings(tmp_path / "bert")
    assert refused.check == "load" and "is not causal" in refused.reason
    tiny_model("mamba").save_pretrained(tmp_path / "mamba")
    reasons = {one.check: one.reason for one in findings(tmp_path / "mamba") if one.reason}
    assert reasons["rows"].startswith("MambaForCausalLM: it has no softmax attention: ") and "packed" in reasons
    tiny_model("deepseek_v4").save_pretrained(tmp_path / "own")
    found = {one.check: one for one in findings(tmp_path / "own")}
    assert re.search(r"DeepseekV4ForCausalLM: the attention of layer \d cannot be read", found["rows"].reason)
    assert "padded log-probs" in found and not any(one.problem for one in found.values())


def test_models_are_tiny_and_seeded() -> None:
    one, two = tiny_model("qwen3"), tiny_model("qwen3")
    assert sum(part.numel() for part in one.parameters()) < LARGEST
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert tiny_config("llama_one_key").num_key_value_heads == 1


def test_positions_begin_where_the_model_has_them() -> None:
    assert first_position(tiny_model("llama")) == 0
    roberta = tiny_model("roberta")
    assert first_position(roberta) == roberta.config.pad_token_id + 1
    backbone: Any = roberta.roberta
    forward = backbone.forward

    def shifted(*args: object, position_ids: torch.Tensor | None = None, **named: object) -> object:
        return forward(*args, position_ids=None if position_ids is None else position_ids + 5, **named)

    backbone.forward = shifted
    with pytest.raises(UserError, match="does not number token positions from 0"):
        ScoredLM(roberta)


def test_an_outcome_counts_commands_that_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(family_commands, "fit", lambda words: 1)
    (family,) = verify_families(["qwen3"], tmp_path)
    assert family.status == FAILED and family.notes[0] == "fit: exit status 1" and "qwen3" in family.line()
    assert (tmp_path / "qwen3" / "tokenizer.json").is_file()
    (refused,) = verify_families(["bert_encoder"])
    assert refused.status == REFUSED and "is not causal" in refused.notes[0]
    assert summary([family, refused]) == f"2 families: 0 {EQUAL}, 0 {NO_JUDGE}, 1 {REFUSED}, 0 {NOT_BUILT}, 1 {FAILED}"
    with pytest.raises(UserError, match="families: none matches qwen33"):
        next(verify_families(["qwen33"]))


def test_outcomes_survive_a_stop_and_make_a_page(tmp_path: Path) -> None:
    records, page = tmp_path / "records.jsonl", tmp_path / "models.md"
    refusal = "DogeForCausalLM cannot follow segments of a row (UserError: no segments)"
    segments = (f"packed: {refusal}", f"shared_prefix: {refusal}")
    done = [
        Family("llama", "LlamaForCausalLM", EQUAL, "shared_prefix", "sdpa, 4 of 4"),
        Family("doge", "DogeForCausalLM", NO_JUDGE, "padded", "-, 4 of 4", ("rows: a|b", *segments)),
        Family("jamba", "JambaForCausalLM", EQUAL, "padded", "sdpa, 2 of 4"),
        Family("mistral", "MistralForCausalLM", EQUAL, "shared_prefix", "sdpa, 4 of 4"),
    ]
    assert recorded(records) == {}
    for family in (Family("doge", "", FAILED), *done):
        append(records, family)
    assert list(recorded(records).values()) == [done[1], done[0], *done[2:]], "the last outcome of a name counts"
    assert share(done) == "Of the 3 with softmax attention in every layer 2 are equal"
    write_page(page, done, {"torch": "2.13"}, "python -m tests.conformance families")
    text = page.read_text(encoding="utf-8")
    assert "Versions: torch 2.13. 4 families: 3 equal, 1 policy only" in text and "families\n```" in text
    assert "| `llama`, `mistral` | equal | sdpa 4 of 4 | shared_prefix |  |\n| `jamba` | equal | sdpa 2 of 4 |" in text
    assert "| `doge` | policy only | - 4 of 4 | padded | rows: a\\|b; packed, shared_prefix: no segments |\n" in text
    records.write_text("{}\n", encoding="utf-8")
    with pytest.raises(UserError, match="holds no outcomes of families"):
        recorded(records)


def test_the_committed_page_has_every_family() -> None:
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.split(" | ")] for line in page.splitlines() if line.startswith("| `")]
    assert sorted(name for row in rows for name in re.findall("`([^`]+)`", row[0])) == sorted(families())
    assert {row[1] for row in rows} <= set(STATUSES) - {FAILED}
    assert all(row[4] != "|" for row in rows if row[1] != EQUAL), "a refusal has its reason"
