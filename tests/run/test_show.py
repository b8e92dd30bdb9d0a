"""``attnpo.show`` through its command: texts as typed, rows of runs and saved steps, every column, view and output."""

import io
import json
import re
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from attnpo import show
from attnpo.data.collate import collate
from attnpo.data.scoring import score_examples
from attnpo.display import token_table
from attnpo.display.weighted_pair import WeightedPair
from attnpo.models.layouts import padded_layout
from attnpo.models.loading import load_model
from attnpo.models.scored import ScoredLM
from attnpo.run import show as showing
from attnpo.run.run import run
from attnpo.run.show import load_weighted_pairs
from attnpo.run.show_config import ShowConfig
from attnpo.schema import SIDES, PreferencePair, TokenStats, UserError
from attnpo.training.nonfinite import MicroBatchRecord, save_nonfinite_step
from attnpo.weigher import Weigher
from tests.run.made import Made, make
from tests.run.worlds import World, build_world

TEXTS = {
    "commas": "a, b,c",
    "quotes": "it's \"quoted\" 'twice'",
    "brackets": "[a](b){c} <d>",
    "interpolation": "${oc.env:HOME} $HOME",
    "equals": "a=b= c",
    "exclamation": "!no !",
    "lines": "first\n\n second\tthird",
    "number": "4",
    "true": "true",
    "null": "null",
    "sign": "@@mention @ home",
    "dash": "- not input",
    "backslash": "\\n C:\\x",
    "script": "שלום 世界 e\u0301",
}
TYPED = (
    "prompt=review the film .",
    "chosen=the film was great . it was raining today .",
    "rejected=the film was awful .",
)
PAIR = PreferencePair.from_texts([{"role": "user", "content": TYPED[0][7:]}], TYPED[1][7:], TYPED[2][9:])


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return build_world(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def finished(world: World) -> Path:
    """A run with two transforms, one of which is learnt from its training pairs, and its policy."""
    folder = world.store.parent / "run"
    run(world.config("transform=[mixture,position_profile]", "callbacks.report=false"), folder)
    return folder


def words(world: World, *more: str) -> list[str]:
    return [f"model.path={world.model}", f"store={world.store}", "judge=testbed", "trainer.accelerator=cpu", *more]


def rows(capsys: pytest.CaptureFixture[str], *argv: str) -> list[dict[str, Any]]:
    """What the command writes as JSON lines."""
    capsys.readouterr()
    assert show.run_show([*argv, "out=-"]) == 0, capsys.readouterr().err
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The one line that the command says of what is wrong."""
    capsys.readouterr()
    assert show.run_show(argv) == 2
    return capsys.readouterr().err


def values(found: list[dict[str, Any]], column: str, **which: object) -> list[float]:
    return [row[column] for row in found if all(row[name] == value for name, value in which.items())]


# ------------------------------------------------------------------------------------------------ texts as typed


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS.keys())
def test_a_text_means_itself(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """From the command line to what is composed; a typed pair below is shown as it is composed."""
    asked: list[ShowConfig] = []
    monkeypatch.setattr(showing, "show", asked.append)
    assert show.run_show(["model.path=M", f"prompt={text}", f"chosen=good {text}", f"rejected={text} bad"]) == 0
    meant = text.removeprefix("@")
    assert (asked[0].prompt, asked[0].chosen, asked[0].rejected) == (meant, f"good {text}", f"{meant} bad")


def test_answers_of_the_same_tokens_are_no_pair_to_show(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    assert show.run_show([*words(world), "prompt=p", "chosen=it was good .", "rejected=it was good . "]) == 2
    assert "none of the 1 pairs is usable (dropped: both responses have the same" in capsys.readouterr().err


def test_files_and_standard_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("said\n"))
    (tmp_path / "a.txt").write_text("two\nlines, =[x]\n\n", encoding="utf-8")
    argv = ["column=weight", f"prompt=@{tmp_path}/a.txt", "chosen=-", "rejected=@@x", "model.path=M"]
    texts, rest = show.parse_pair_texts(argv)
    assert texts == {"prompt": "two\nlines, =[x]\n", "chosen": "said", "rejected": "@x"}
    assert rest == ["column=weight", "model.path=M"]
    with pytest.raises(UserError, match=r"prompt=@none\.txt cannot be read .* use @@none\.txt"):
        show.parse_pair_texts(["prompt=@none.txt", "chosen=a", "rejected=b"])
    with pytest.raises(UserError, match=r"prompt=- and chosen=-: standard input can be read only once"):
        show.parse_pair_texts(["prompt=-", "chosen=-", "rejected=b"])
    with pytest.raises(UserError, match="prompt= is set twice"):
        show.parse_pair_texts(["prompt=a", "prompt=b"])


def test_a_pair_typed_in_part_names_what_lacks_and_what_is_near(capsys: pytest.CaptureFixture[str]) -> None:
    told = refused(capsys, "prompt=a", "chosen=b", "rejectd=c, d")
    assert "got only prompt=, chosen=: add rejected=TEXT (rejectd= looks like rejected=)" in told


# ------------------------------------------------------------------------------------------------ the numbers


def test_a_typed_pair_has_the_weights_of_its_views(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    found = rows(capsys, *words(world, "layers=[all]", "rounds=[mean,1,2]", "stages=[all]"), *TYPED)
    assert {row["pair_id"] for row in found} == {PAIR.pair_id}
    views = {(row["layer"], row["round"], row["stage"]) for row in found}
    assert views == {
        (layer, one, stage) for layer in (1, 2) for one in ("mean", "1", "2") for stage in ("captured", "source")
    }
    for layer in (1, 2):
        at: dict[str, Any] = {"layer": layer, "side": "chosen"}
        raw = [values(found, "weight", round=one, stage="captured", **at) for one in ("1", "2", "mean")]
        assert [(a + b) / 2 for a, b in zip(*raw[:2], strict=True)] == pytest.approx(raw[2], rel=1e-5)
        done = values(found, "weight", round="mean", stage="source", **at)
        length = round(values(found, "relative", round="mean", stage="source", **at)[0] / done[0])
        # Sink rule of the paper: the first weight is 1/|y|, the others keep their proportions.
        assert done[0] == pytest.approx(1 / length, rel=1e-5)
        assert [one / done[1] for one in done[1:-2]] == pytest.approx(
            [one / raw[2][1] for one in raw[2][1:-2]], rel=1e-4
        )
    tokens = [row["token"] for row in found if row["layer"] == 1 and row["stage"] == "source" and row["round"] == "1"]
    assert "".join(tokens).startswith(PAIR.chosen)


@pytest.fixture(scope="module")
def trained(world: World, finished: Path) -> Made:
    return make(world.config("transform=[mixture,position_profile]"))


def test_a_prefill_is_shown_and_moves_the_weights(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    prefill, labels = "the better review is", (" A", " B")
    as_text = "judge.assembly=text"  # as a Weigher reads a wording
    given = words(world, as_text, f"judge.prefill={prefill}", "judge.labels=[' A',' B']", *TYPED)
    bare, after = rows(capsys, *words(world, as_text), *TYPED), rows(capsys, *given)
    weigher = Weigher(world.model, template="judge/testbed.txt", prefill=prefill, labels=labels, device="cpu")
    weighed = weigher(*(text.partition("=")[2] for text in TYPED))
    assert values(after, "weight", side="chosen") == pytest.approx(weighed.chosen.weights.tolist(), abs=1e-6)
    assert values(after, "weight", side="chosen") != pytest.approx(values(bare, "weight", side="chosen"), abs=1e-6)
    assert show.run_show(given) == 0
    assert f"attention after '{prefill}'" in " ".join(capsys.readouterr().out.split())


def test_rows_of_a_run_are_what_it_trained_on_and_a_typed_pair_is_weighed_as_they_are(
    finished: Path, trained: Made, capsys: pytest.CaptureFixture[str]
) -> None:
    found = rows(capsys, f"run={finished}", "rows=2:4", "stages=[all]")
    stages = ["captured", "source", "mixture", "position_profile"]
    assert list(dict.fromkeys(row["stage"] for row in found)) == stages
    examples = {example.pair_id: example for example in trained.inputs.examples["train"].examples}
    wanted = [pair.pair_id for pair in trained.inputs.pairs["train"].pairs[2:4]]
    assert list(dict.fromkeys(row["pair_id"] for row in found)) == wanted
    for pair_id in wanted:
        for side, weights in zip(SIDES, examples[pair_id].weights, strict=True):
            at = {"pair_id": pair_id, "side": side}
            assert values(found, "weight", stage="position_profile", **at) == weights.tolist()
            source, mixed = (values(found, "weight", stage=one, **at) for one in ("source", "mixture"))
            count = len(source) - 2  # the last full stop and the end of the turn have no weight
            share = trained.cfg.transforms["mixture"].share  # type: ignore[attr-defined]
            expected = [(1 - share) / (count + 1) + share * one for one in source[:count]]
            assert mixed[:count] == pytest.approx(expected, rel=1e-4)
    typed = rows(capsys, f"run={finished}", *TYPED)
    assert {(row["stage"], row["pair_id"]) for row in typed} == {("position_profile", PAIR.pair_id)}


def test_contributions_add_up_to_the_margin(finished: Path, trained: Made, capsys: pytest.CaptureFixture[str]) -> None:
    pair_id = trained.inputs.pairs["train"].pairs[5].pair_id
    found = rows(capsys, f"run={finished}", f"ids=[{pair_id[:12]}]", "column=contribution")
    example = next(one for one in trained.inputs.examples["train"].examples if one.pair_id == pair_id)
    logps = []
    for folder in (finished / "best", trained.base.spec.path):
        logps.append(dict(score_examples(ScoredLM(load_model(folder)), [example], 0))[pair_id])
    beta, margin = trained.cfg.objective.beta, 0.0  # type: ignore[attr-defined]
    for place, (side, sign) in enumerate(zip(SIDES, (1, -1), strict=True)):
        policy, reference = values(found, "logp", side=side), values(found, "reference_logp", side=side)
        assert policy == pytest.approx(logps[0][place].tolist(), abs=1e-5)
        assert reference == pytest.approx(logps[1][place].tolist(), abs=1e-5)
        ratio = logps[0][place] - logps[1][place]
        expected = sign * beta * example.lengths[place] * example.weights[place] * ratio
        assert values(found, "contribution", side=side) == pytest.approx(expected.tolist(), abs=1e-6)
        assert values(found, "log_ratio", side=side) == pytest.approx(ratio.tolist(), abs=1e-5)
        margin += float(expected.sum())
    assert sum(values(found, "contribution")) == pytest.approx(margin, abs=1e-5) and abs(margin) > 1e-6


# ------------------------------------------------------------------------------------------------ a saved step


@pytest.fixture(scope="module")
def saved(finished: Path, trained: Made) -> tuple[Path, Any]:
    examples = trained.inputs.examples["train"].examples[:3]
    batch = collate(examples, padded_layout, 0, 3)
    policy, reference = (torch.full(batch.main.response_mask.shape, value) for value in (-2.0, -1.5))
    policy[1, 2] = float("nan")
    losses = torch.tensor([0.5, float("nan"), 0.5])
    path = finished / "nonfinite-step-4.pt"
    save_nonfinite_step(
        [MicroBatchRecord(batch, TokenStats(policy), TokenStats(reference), losses)], {}, path, 4, 1, leads=True
    )
    return path, examples


def test_a_saved_step_shows_its_bad_pair(saved: tuple[Path, Any], capsys: pytest.CaptureFixture[str]) -> None:
    path, examples = saved
    found = rows(capsys, f"bad_batch={path}", "column=log_ratio")
    assert {row["pair_id"] for row in found} == {examples[1].pair_id}
    assert values(found, "token_id", side="chosen") == examples[1].chosen.response_ids
    ratios = values(found, "log_ratio", side="chosen")
    assert ratios[2] == "nan" and set(ratios[:2] + ratios[3:]) == {-0.5}
    assert values(found, "weight", side="rejected") == examples[1].weights[1].tolist()
    other = rows(capsys, f"bad_batch={path}", f"ids=[{examples[0].pair_id[:9]}]")
    assert {row["pair_id"] for row in other} == {examples[0].pair_id}


def test_what_is_wrong_with_a_saved_step(
    saved: tuple[Path, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, _ = saved
    (tmp_path / "moved.pt").write_bytes(path.read_bytes())
    (tmp_path / "text.pt").write_text("no step", encoding="utf-8")
    assert "set model.path=" in refused(capsys, f"bad_batch={tmp_path}/moved.pt")
    assert "expected a file nonfinite-step-N.pt" in refused(capsys, f"bad_batch={tmp_path}/text.pt", "model.path=x")
    assert "expected a file nonfinite-step-N.pt" in refused(capsys, f"bad_batch={tmp_path}/none.pt", "model.path=x")
    assert "has no per-token rewards" in refused(capsys, f"bad_batch={path}", "column=contribution")
    assert "none of the 3 pairs" in refused(capsys, f"bad_batch={path}", "ids=[zz]")


# ------------------------------------------------------------------------------------------------ outputs


def test_terminal_and_files_hold_the_same(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = [*words(world, "layers=[1,2]"), *TYPED]
    found: list[WeightedPair] = []

    def weighed_once(cfg: ShowConfig) -> list[WeightedPair]:
        found.extend([] if found else load_weighted_pairs(cfg))
        return found

    monkeypatch.setattr(showing, "load_weighted_pairs", weighed_once)
    lines = rows(capsys, *argv)
    place = tmp_path / "deep"
    for ending in ("jsonl", "csv", "parquet", "html"):
        assert show.run_show([*argv, f"out={place}/x.{ending}"]) == 0
    assert [json.loads(line) for line in (place / "x.jsonl").read_text(encoding="utf-8").splitlines()] == lines
    for frame in (pd.read_csv(place / "x.csv", dtype={"round": str}), pd.read_parquet(place / "x.parquet")):
        assert list(frame.columns) == list(lines[0]) and len(frame) == len(lines)
        assert frame["weight"].tolist() == pytest.approx([row["weight"] for row in lines])
    page = (place / "x.html").read_text(encoding="utf-8")
    assert page.count('class="heat-side chosen"') == 2 and "layer 1, mean of the rounds" in page

    del found[1:]
    exact = [row for row in lines if row["layer"] == 1]
    last = exact[-1]["token_id"]
    for width in (80, 120):
        monkeypatch.setenv("COLUMNS", str(width))
        capsys.readouterr()
        assert show.run_show(argv) == 0
        shown = capsys.readouterr().out.splitlines()
        assert max(map(len, shown)) <= width
        numbered = [line.split() for line in shown if re.match(r" *\d+ ", line)]
        assert len(numbered) == len(values(exact, "token", side="chosen"))
        for cells, row in zip(numbered, exact, strict=False):  # chosen comes first in both
            told = [row["token"].strip() or "▯", f"{row['relative']:.2f}"]
            assert cells[1:3] == told or row["token_id"] == last
        assert any("relative: weight times |y|" in line for line in shown)
        assert any("p(chosen)" in line for line in shown)


# ------------------------------------------------------------------------------------------------ what is refused


WRONG = [
    ((), "nothing to show: set prompt=TEXT"),
    (("colum=weight",), "did you mean column"),
    (("column=wieght",), "column must be one of relative, weight"),
    (("rounds=[3]",), "rounds must be one of mean, 1, 2"),
    (("out=x.xls",), "out=x.xls: expected a file with extension .jsonl"),
    (("out=x.html", "column=logp"), "a page shows only weights"),
    (("run=a", "bad_batch=b"), "set only one of them"),
    (("experiment=layer_sweep",), "shows pairs of a single run"),
    (("run=/no/such/run",), "this is not a run folder"),
]


@pytest.mark.parametrize(("argv", "story"), WRONG, ids=[story for _, story in WRONG])
def test_what_cannot_be_asked(capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], story: str) -> None:
    assert story in refused(capsys, *argv)


def test_what_this_pair_has_not(world: World, finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cases = {
        ("layers=[9]", *TYPED): "layers: expected a whole number from 1 to 2",
        ("stages=[mixture]", *TYPED): "stages must be one of captured, source, got 'mixture'",
        ("weights=uniform", "rounds=[1]", *TYPED): "uses no judge",
        ("weights=rollout", "layers=[1]", *TYPED): "does not read a single layer",
        ("weights=wpo", *TYPED): "computed in every training step",
        ("transform=[position_profile]", *TYPED): "fitted transforms need training pairs",
        ("objective=tdpo1", "column=contribution", *TYPED): "objective TDPO1 also reads",
        (
            f"data.path={world.data}",
            "ids=[zz]",
        ): "none of the 12 pairs of split=train has an id that starts with any of these",
    }
    for argv, story in cases.items():
        assert story in refused(capsys, *words(world), *argv), story


def test_rounding_noise_is_printed_as_zero() -> None:
    told = [token_table._format_number(value, "log_ratio") for value in (-4e-4, 4e-7, 0.25, -0.25)]
    assert told == ["0.000", "0.000", "+0.250", "-0.250"]
