"""The tables of ``report``: weights of a tiny world against loops of their own, studies and runs read back."""

import base64
import csv
import json
import math
import zlib
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from attnpo.config.compose import compose, parse_as
from attnpo.display.output import read_tables, tables_to_json
from attnpo.display.page import Paragraph, Section, TableBlock
from attnpo.display.printed import KeyedTable
from attnpo.display.tables import Cell
from attnpo.lab.reports.folder_report import headline_column, keyed_tables, list_figures
from attnpo.lab.reports.report import write_report
from attnpo.lab.reports.report_config import ReportConfig
from attnpo.lab.reports.weight_explorer import merge_views
from attnpo.lab.results import folder_kind, read_study
from attnpo.lab.studies.tables import main_table
from attnpo.run.models import reference_table
from attnpo.schema import SIDES, UserError
from attnpo.weights.capture import store_logps
from tests.display.explored import hard
from tests.lab.studied import Finished
from tests.run.made import make, make_inputs
from tests.run.worlds import World, judge_loads


def asked(what: list[str], *overrides: str) -> ReportConfig:
    """A composed and checked report."""
    raw = compose("report", list(overrides))
    OmegaConf.update(raw, "what", what)
    cfg = parse_as(raw, ReportConfig)
    return cfg


def weights_of(world: World, folder: Path, *more: str) -> list[dict[str, str]]:
    """The rows of weights.csv of a report on the world's weights."""
    write_report(asked(["weights"], *world.overrides(f"output={folder}", "name=r", "heat_maps=1", *more)))
    return rows_of(folder / "r" / "weights.csv")


@pytest.fixture(scope="module")
def every_token(world: World, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """Returns the rows of a report on the attention of the last layer, with every token."""
    return weights_of(world, tmp_path_factory.mktemp("every"), "min_count=1", "label=m")


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines))


def table(rows: list[dict[str, str]], name: str, **wanted: str) -> list[dict[str, str]]:
    return [row for row in rows if row["table"] == name and all(row[key] == value for key, value in wanted.items())]


# ------------------------------------------------------------------------------------------------ weights


def test_the_tables_of_a_tiny_world_by_hand(world: World, tmp_path: Path) -> None:
    """Plain loops over the same training examples and the same captured rows."""
    rows = weights_of(world, tmp_path, "layers=[1,2]", "min_count=3", "top=1000", "label=m")
    for layer in (1, 2):
        label = f"attention L{layer}"
        made = make(world.config(f"weights.layer={layer}"))
        inputs, tokenizer = made.inputs, made.base.tokenizer
        examples = inputs.examples["train"].examples
        for place, side in enumerate(SIDES):
            std, largest, length = 0.0, 0.0, 0.0
            by_token: dict[int, list[float]] = defaultdict(list)
            for example in examples:
                weights = example.weights[place].tolist()
                mean = sum(weights) / len(weights)
                std += math.sqrt(sum((weight - mean) ** 2 for weight in weights) / len(weights))
                largest += max(weights)
                length += example.lengths[place]
                for token, weight in zip(example.sides[place].response_ids, weights, strict=True):
                    by_token[token].append(weight)
            (found,) = table(rows, "statistics", weights=label, side=side)
            for name, total in (("std", std), ("max", largest), ("mean_length", length)):
                assert float(found[name]) == pytest.approx(total / len(examples), rel=1e-6)
            often = {token: values for token, values in by_token.items() if len(values) >= 3}
            tokens = table(rows, "tokens", weights=label, side=side, model="m")
            assert len(tokens) == len(often) and 1 < len(often) < len(by_token)
            means = {tokenizer.decode([token]): sum(v) / len(v) for token, v in often.items()}
            counts = {tokenizer.decode([token]): len(v) for token, v in often.items()}
            listed = [float(row["weight"]) for row in tokens]
            assert listed == pytest.approx(sorted(means.values(), reverse=True), rel=1e-6)
            for row in tokens:
                word = tokenizer.convert_tokens_to_string([row["token"]])
                assert float(row["weight"]) == pytest.approx(means[word], rel=1e-6)
                assert int(row["count"]) == counts[word]
        shares, uniform, responses = [0.0, 0.0, 0.0], 0.0, 0
        for example in examples:
            captured = inputs.weighed.captured[example.pair_id]
            for side in SIDES:
                one, other = (item.side(side).weights[0].tolist() for item in captured.rounds)
                mean_row = [(a + b) / 2 for a, b in zip(one, other, strict=True)]
                for place in range(3):
                    shares[place] += mean_row[place] / sum(mean_row)
                uniform += 1 / len(mean_row)
                responses += 1
        (sink,) = table(rows, "sink", weights=label)
        places = ("first", "second", "third")
        ours = [float(sink[f"{place}_token_percent"]) for place in places]
        assert ours == pytest.approx([100 * share / responses for share in shares], rel=1e-5)
        assert float(sink["uniform_percent"]) == pytest.approx(100 * uniform / responses)
        assert (tmp_path / "r" / f"heat-attention_L{layer}.svg").read_text(encoding="utf-8").startswith("<svg")
    page = (tmp_path / "r" / "report.html").read_text(encoding="utf-8")
    for text in (
        "uniform_percent",
        "Token weights of the first pairs: attention L2",
        'class="heat',
        "Pairs and coverage: ",
    ):
        assert text in page
    text = (tmp_path / "r" / "weights.md").read_text(encoding="utf-8")
    assert text.count("## ") == 4 and "## Notes" in text and "| attention L1 | chosen |" in text


def test_the_sink_rule_moves_the_statistics_and_not_the_sink_share(
    world: World, every_token: list[dict[str, str]], tmp_path: Path
) -> None:
    kept = weights_of(world, tmp_path, "weights.postprocess.sink_tokens=0", "label=m")
    assert table(every_token, "sink") == table(kept, "sink")
    assert table(every_token, "statistics")[0]["max"] != table(kept, "statistics")[0]["max"]


def test_every_layer_is_read_in_one_judge_pass(world: World, tmp_path: Path) -> None:
    with judge_loads() as loaded:
        rows = weights_of(
            world, tmp_path, "layers=all", "++weights.store_layers=selected", f"store={tmp_path / 'store'}"
        )
    assert len(loaded) == 1
    assert [row["weights"] for row in table(rows, "sink")] == ["attention L1", "attention L2"]
    assert table(rows, "sink")[0]["first_token_percent"] != table(rows, "sink")[1]["first_token_percent"]


def test_other_weights_and_transforms_have_tables_too(
    world: World, every_token: list[dict[str, str]], tmp_path: Path
) -> None:
    uniform = weights_of(world, tmp_path / "u", "weights=uniform")
    assert {row["weights"] for row in uniform} == {"uniform"}
    assert all(float(row["std"]) == pytest.approx(0, abs=1e-9) for row in table(uniform, "statistics"))
    shuffled = weights_of(world, tmp_path / "s", "transform=[shuffled]", "min_count=1")
    assert table(shuffled, "sink")[0]["weights"] == "attention L2 + shuffled"
    assert float(table(shuffled, "statistics")[0]["mass"]) <= 1 + 1e-6
    for name in ("first_token_percent", "second_token_percent"):
        assert table(shuffled, "sink")[0][name] == table(every_token, "sink")[0][name]
    assert [row["weight"] for row in table(shuffled, "tokens")] != [
        row["weight"] for row in table(every_token, "tokens")
    ]


def test_printed_numbers_stand_below_ours(world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ours in full, then the rows of this model with ours; other models, and a file of them, are left out by name."""
    printed, foreign = tmp_path / "printed.csv", tmp_path / "foreign.csv"
    printed.write_text("side,model,std,max,mean_length\nchosen,m,0.01,0.5,7.25\nchosen,other,0.02,0.4,9\n")
    foreign.write_text("side,model,std\nchosen,one,0.01\nchosen,two,0.02\n")
    rows = weights_of(world, tmp_path, f"printed=[{printed},{foreign}]", "label=m")
    chosen, rejected = table(rows, "statistics")
    (beside,) = table(rows, "statistics printed")
    assert (beside["model"], beside["side"], beside["weights"]) == ("m", "chosen", chosen["weights"])
    assert (beside["max"], beside["max printed"]) == (chosen["max"], "0.5") and rejected["side"] == "rejected"
    assert float(beside["max difference"]) == pytest.approx(float(chosen["max"]) - 0.5)
    out = capsys.readouterr().out
    assert out.index("top10 share") < out.index("max printed")
    assert "skipped rows for other models (other)" in out
    assert out.count("its numbers are for models other than m; if m is") == 1 and "label=one (or two)" in out


def test_a_printed_token_finds_ours_at_any_rank(
    world: World, every_token: list[dict[str, str]], tmp_path: Path
) -> None:
    first, second, *_ = table(every_token, "tokens", side="chosen")
    printed = tmp_path / "printed.csv"
    with printed.open("w", encoding="utf-8", newline="") as lines:
        writer = csv.writer(lines)
        writer.writerows([["model", "side", "rank", "token", "weight"], ["m", "chosen", 1, second["token"], 0.5]])
        writer.writerow(["m", "chosen", 2, "nowhere", 0.25])
    rows = weights_of(world, tmp_path / "b", "min_count=1", "top=1", "label=m", f"printed={printed}")
    assert [row["token"] for row in table(rows, "tokens", side="chosen")] == [first["token"]]
    found, lacking = table(rows, "tokens printed")
    assert (found["token"], found["rank"], found["weight"]) == (second["token"], "2", second["weight"])
    assert (found["rank printed"], lacking["token"], lacking["weight"]) == ("1", "nowhere", "")


def test_the_explorer_has_the_weights_of_both_sources(world: World, tmp_path: Path) -> None:
    """Every weight is that of its source's and layer's training examples; rounds and the judge's order are told."""
    made = make(world.config("reference=cached", "weights.layer=2"))
    inputs = made.inputs
    sources = {("attention", "L2"): inputs, ("rollout", ""): make_inputs(world.config("weights=rollout"))}
    table = reference_table(made.base, made.cfg.lengths)
    first = inputs.examples["train"].examples[0]
    logps = [torch.full((len(side.response_ids),), -0.5) for side in first.sides]
    store_logps(table, {first.pair_id: (logps[0], logps[1])})
    weights_of(world, tmp_path, "layers=[1,2]", "explorer=5", "against=rollout")
    page = (tmp_path / "r" / "explorer.html").read_text(encoding="utf-8")
    told = json.loads(packed_in(page, "texts"))
    assert [pair["id"] for pair in told["pairs"]] == [one.pair_id for one in inputs.examples["train"].examples[:5]]
    assert "round 1: chosen is A" in told["pairs"][0]["note"]
    names = [(view["source"], view["layer"], view["round"]) for view in told["views"]]
    rounds = ("combined", "round 1", "round 2")
    layers = [("attention", "L1"), ("attention", "L2"), ("rollout", "")]
    assert sorted(names) == sorted((*layer, one) for layer in layers for one in rounds)
    for name, made in sources.items():
        number = names.index((*name, "combined"))
        view, codes = told["views"][number], packed_in(page, f"weights-{number}")
        relative = [
            weight * example.lengths[side]
            for example in made.examples["train"].examples[:5]
            for side in range(2)
            for weight in example.weights[side].tolist()
        ]
        shown = [2 ** (view["low"] + (code - 1) * view["step"]) if code else 0.0 for code in codes]
        assert shown == pytest.approx(relative, rel=view["error"] + 1e-6), name
    rounds_of = [packed_in(page, f"weights-{names.index(('attention', 'L2', one))}") for one in rounds]
    assert len(set(rounds_of)) == 3 and len({len(one) for one in rounds_of}) == 1
    assert told["logps"][0]["name"] == "reference"
    assert packed_in(page, "logps-0")[:2] != b"\xff\xff", "the first pair's log-probs are stored"


def test_a_second_source_is_told_from_the_first_and_is_on_the_same_tokens() -> None:
    pair = hard(1)[0]
    both = merge_views(pair, pair, " (judge=other)")
    assert {view.source for view in both} == {
        *("attention", "rollout"),
        *("attention (judge=other)", "rollout (judge=other)"),
    }
    view, one = next(iter(pair.items()))
    other = {view: replace(one, rejected=replace(one.rejected, token_ids=(1,) * len(one.rejected.token_ids)))}
    with pytest.raises(
        UserError, match=r"against: pair pair-0, rejected: the second source has different training tokens"
    ):
        merge_views(pair, other)


def packed_in(page: str, name: str) -> bytes:
    """What the explorer holds under a name, unpacked."""
    packed = page.partition(f'id="data-{name}">')[2].partition("<")[0]
    return zlib.decompress(base64.b64decode(packed))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["explorer=-1"], "explorer at least 0"),
        (["layers=[3]"], "layers: expected a whole number from 1 to 2"),
        (["layers=[1]", "weights=rollout"], "weights=rollout has no layer to select"),
        (["objective=dpo", "weights=attention"], "uses no token weights"),
    ],
)
def test_what_cannot_be_reported_is_said(world: World, tmp_path: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        weights_of(world, tmp_path, *overrides)


def test_a_report_replaces_its_own_and_nothing_else(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And says that no token is frequent enough."""
    assert table(weights_of(world, tmp_path), "tokens") == []
    assert "no token occurs at least 100 times on either side" in capsys.readouterr().out
    weights_of(world, tmp_path)
    with pytest.raises(UserError, match="contains the report of another command"):
        weights_of(world, tmp_path, "min_count=7")
    foreign = tmp_path / "other"
    foreign.mkdir()
    (foreign / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"contains notes\.txt, which would be overwritten"):
        write_report(asked(["weights"], *world.overrides(f"output={tmp_path}", "name=other")))
    assert [path.name for path in foreign.iterdir()] == ["notes.txt"]


# ------------------------------------------------------------------------------------------------ folders

ARMS = ["arm", "point", "reward", "95 %", "KL"]


def a_study(folder: Path, rewards: dict[str, float], setting: str = "toy_1") -> Path:
    """A finished study with one table, one run per arm."""
    rows: list[list[Cell]] = [["base", "", -0.25, None, 0.0]]
    rows += [
        [arm, "lr 5e-05 beta 0.1", reward, f"[{reward - 1:.3f}, {reward + 1:.3f}]", 1.5]
        for arm, reward in rewards.items()
    ]
    folder.mkdir(parents=True)
    sections = [Section("Arms", [TableBlock(ARMS, rows, digits={"KL": 2}), Paragraph("seeds 0")])]
    (folder / "tables.json").write_text(tables_to_json(sections))
    runs = [
        {"world": "", "arm": arm, "layer": None, "values": [], "seed": 3, "folder": f"points/{arm}-seed0-00000000"}
        for arm in rewards
    ]
    (folder / "study.json").write_text(json.dumps({"kl_limit": 2.0, "digest": "d", "runs": runs}))
    (folder / "results.csv").write_text("arm,seed,test/reward\n" + "".join(f"{a},0,{r}\n" for a, r in rewards.items()))
    for arm, reward in rewards.items():
        place = a_run(folder / "points" / f"{arm}-seed0-00000000", reward)
        (place / "config.yaml").write_text(f"composed: {{choices: {{setting: {setting}}}}}\n")
    return folder


def a_run(folder: Path, reward: float | None) -> Path:
    folder.mkdir(parents=True)
    scores = {"reward": reward, "win_rate": 0.5, "kl": 1.25, "length": 9.0}
    result = {
        "seed": 3,
        "steps": 12,
        "metrics": {"val/loss": 0.5},
        "inputs": {"train": {"effective_share": 0.25, "coverage": 1.0}},
        "seconds": {"all": 2.5},
        "truth": None if reward is None else {"scores": {"test": scores}},
    }
    (folder / "result.json").write_text(json.dumps(result))
    return folder


def report_on(tmp_path: Path, what: list[str], *overrides: str) -> tuple[Path, str]:
    write_report(asked(what, f"output={tmp_path}", "name=r", *overrides))
    return tmp_path / "r", (tmp_path / "r" / "report.html").read_text(encoding="utf-8")


def test_studies_stand_side_by_side(tmp_path: Path) -> None:
    one = a_study(tmp_path / "one", {"uniform": 0.5, "attention L1": 0.25})
    two = a_study(tmp_path / "two", {"uniform": 0.75, "rollout": 1.0})
    folder, _ = report_on(tmp_path, [str(one), str(two)])
    rows = {row["arm"]: row for row in rows_of(folder / "study.csv") if row["table"] == "studies"}
    assert list(rows) == ["base", "uniform", "attention L1", "rollout"]
    assert rows["uniform"]["one: reward"] == "0.500 [-0.500, 1.500]"
    assert rows["uniform"]["two: reward"] == "0.750 [-0.250, 1.750]"
    assert (rows["rollout"]["one: reward"], rows["base"]["two: reward"]) == ("", "-0.250")


def test_an_unfinished_study_is_said_to_be_and_has_no_headline(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its points are listed; side by side stand finished studies alone, and none where there is only one."""
    one = a_study(tmp_path / "one", {"uniform": 0.5})
    two = a_study(tmp_path / "two", {"uniform": 0.75})
    part = a_study(tmp_path / "part", {"uniform": 0.5})
    (part / "tables.json").unlink()
    (part / "frontier.png").write_bytes(PNG)
    (part / "points" / "begun").mkdir()
    folder, page = report_on(tmp_path, [str(one), str(part), str(two)])
    rows = rows_of(folder / "study.csv")
    columns = {name for row in rows if row["table"] == "studies" for name, cell in row.items() if cell}
    assert columns == {"table", "arm", "one: reward", "two: reward"}
    assert [row["run"] for row in rows if row["table"] == "part"] == ["uniform-seed0-00000000"]
    assert "part: not finished, 1 of 2 started points have a result" in capsys.readouterr().out
    assert "<figure" not in page and "part: all runs" not in page
    (two / "tables.json").unlink()
    folder, _ = report_on(tmp_path / "less", [str(one), str(part), str(two)])
    assert {row["table"] for row in rows_of(folder / "study.csv")} == {"one", "part", "two"}


def test_the_headline_is_the_reward_else_the_validation_accuracy() -> None:
    numbers: dict[str, Cell] = {"beta": 0.1, "val loss": 0.6, "val accuracy": 0.75, "reward": 0.5}
    rows: tuple[dict[str, Cell], ...] = ({"arm": "uniform", **numbers},)
    for count, name in ((4, "reward"), (3, "val accuracy"), (2, "beta")):
        table = KeyedTable("arms", "", ("arm", *list(numbers)[:count]), rows, ("arm",))
        assert headline_column(table)[0] == name


PNG = b"\x89PNG\r\n\x1a\n"


def test_only_figures_that_the_study_draws_are_shown(tmp_path: Path) -> None:
    """Those that its study.json names, whatever they show: a later kind of figure needs no list here."""
    study = a_study(tmp_path / "a", {"uniform": 0.5})
    drawn = ["arms-few_pairs", "frontier", "gains", "layers", "probe-few_pairs", "yardstick"]
    for name in (*drawn, "frontiers", "curves", "mine"):
        (study / f"{name}.png").write_bytes(PNG)
    record = json.loads((study / "study.json").read_text())
    record["figures"] = [f"{name}{end}" for name in (*drawn, "removed") for end in (".png", ".svg")]
    (study / "study.json").write_text(json.dumps(record))
    assert [path.stem for path in list_figures(read_study(study))] == drawn
    _, page = report_on(tmp_path, ["study", str(study)])
    assert page.count("<figure") == len(drawn)


def test_folders_of_one_name_are_told_apart_and_one_given_twice_is_refused(tmp_path: Path) -> None:
    one, two = (a_study(tmp_path / place / "runs" / "study", {"uniform": 0.5}) for place in ("here", "there"))
    folder, _ = report_on(tmp_path / "both", ["study", str(one), str(two)])
    assert {row["table"] for row in rows_of(folder / "study.csv")} >= {"here/runs/study", "there/runs/study"}
    (tmp_path / "link").symlink_to(one)
    for what in (["study", str(one), str(one)], [str(one), str(tmp_path / "link")], ["study", str(one), f"{one}/."]):
        with pytest.raises(UserError, match=r"expected each folder and file once, got .* more than once"):
            report_on(tmp_path, what)
    printed = tmp_path / "printed.csv"
    printed.write_text("method,score\nSecond,1.5\n")
    with pytest.raises(UserError, match=r"printed\.csv more than once"):
        report_on(tmp_path, [str(one)], f"printed=[{printed},{printed}]")


PRINTED = """base_model,setting,method,arm,mt_bench,reward
Toy-1,toy_1,Base,base,5,-
Toy-1,toy_1,DPO,uniform,6.70,0.4
Toy-1,toy_1,Rollout,rollout,6.80,-
Toy-2,toy_2,Base,base,4,-
"""


def test_printed_rows_of_the_setting_stand_below_a_study(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ours stays as the study printed it; rows of another model are left out, and what has none of ours is named."""
    study = a_study(tmp_path / "a", {"uniform": 0.5, "shuffled": 0.25})
    plain_folder, _ = report_on(tmp_path / "plain", ["study", str(study)])
    before = capsys.readouterr().out
    printed = tmp_path / "printed.csv"
    printed.write_text(PRINTED)
    folder, page = report_on(tmp_path, ["study", str(study)], f"printed={printed}")
    out = capsys.readouterr().out
    assert before[before.index("a: Arms\n") : before.index("Notes\n")].strip() in out
    rows = rows_of(folder / "study.csv")
    ours = [{name: row[name] for name in ("table", *ARMS)} for row in rows if row["table"] == "a"]
    assert ours == rows_of(plain_folder / "study.csv") and len(ours) == 3
    base, uniform, rollout = (row for row in rows if row["table"] == "a printed")
    assert (base["method"], base["arm"], base["mt_bench printed"], base["reward"]) == ("Base", "base", "5.0", "-0.25")
    assert (uniform["method"], uniform["arm"], uniform["reward difference"]) == ("DPO", "uniform", str(0.5 - 0.4))
    assert (rollout["arm"], rollout["reward"], rollout["mt_bench printed"]) == ("rollout", "", "6.8")
    for text in (out, page):
        assert "printed.csv: skipped rows for other models (toy_2)" in text
        assert "printed.csv: printed rows with no matching arm in our tables: rollout" in text
    assert out.count("has no scores of graded answers") == 1 and "Toy-2" not in page


@pytest.mark.parametrize("columns", ["base_model,setting,method,arm,mt_bench,reward", "model,x,method,arm,n,reward"])
def test_printed_rows_meet_no_study_of_another_setting(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], columns: str
) -> None:
    """Whether a file names the setting, or the model alone."""
    study = a_study(tmp_path / "a", {"uniform": 0.5}, setting="testbed")
    printed = tmp_path / "printed.csv"
    printed.write_text(PRINTED.replace(PRINTED.splitlines()[0], columns))
    folder, page = report_on(tmp_path, ["study", str(study)], f"printed={printed}")
    assert {row["table"] for row in rows_of(folder / "study.csv")} == {"a"}
    out = capsys.readouterr().out
    assert out.count("skipped, because its rows are for other models") == 1 and "for setting testbed" in out
    assert "6.7" not in page and "base_model" not in page


def test_a_models_name_is_its_settings(tmp_path: Path) -> None:
    """A file without a column of settings: names are compared by letters and digits; each study has its own rows."""
    one = a_study(tmp_path / "one", {"uniform": 0.5}, setting="toy_1")
    two = a_study(tmp_path / "two", {"uniform": 0.75, "rollout": 1.0}, setting="toy_2")
    more = a_study(tmp_path / "more", {"rollout": 0.25}, setting="toy_1")
    printed = tmp_path / "printed.csv"
    printed.write_text(PRINTED.replace(",toy_1", "").replace(",toy_2", "").replace(",setting", ""))
    folder, _ = report_on(tmp_path, [str(one), str(two), str(more)], f"printed={printed}")
    found = [
        (row["table"], row["base_model"], row["arm"]) for row in rows_of(folder / "study.csv") if row["base_model"]
    ]
    assert found == [
        ("one printed", "Toy-1", "base"),
        ("one printed", "Toy-1", "uniform"),
        ("two printed", "Toy-2", "base"),
        ("more printed", "Toy-1", "base"),
        ("more printed", "Toy-1", "rollout"),
    ]


def test_runs_are_rows(tmp_path: Path) -> None:
    a_run(tmp_path / "x" / "run", 0.5)
    a_run(tmp_path / "y" / "run", None)
    (tmp_path / "y" / "run" / "config.yaml").write_text(
        "weights: {layer: 2}\ntransforms: {inverse: 1}\nobjective: {beta: 0.3}\noptimizer: {lr: 5.0e-05}\n"
        "composed: {choices: {weights: attention, objective: twdpo}}\n"
    )
    folder, _ = report_on(tmp_path, ["run", str(tmp_path / "x" / "run"), str(tmp_path / "y" / "run")])
    one, two = rows_of(folder / "runs.csv")
    assert (one["run"], one["reward"], one["seed"], one["weights"]) == ("x/run", "0.5", "3", "")
    assert (two["weights"], two["beta"], two["lr"], two["reward"]) == ("attention L2 + inverse", "0.3", "5e-05", "")


def test_what_runs_share_is_said_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On the terminal; the files have every column."""
    for name, reward in (("a", 0.5), ("b", 0.25)):
        a_run(tmp_path / "runs" / name, reward)
    folder, _ = report_on(tmp_path, ["run", *(str(tmp_path / "runs" / name) for name in "ab")])
    out = capsys.readouterr().out
    assert "Finished runs (same in all rows: seed 3, steps 12, val loss 0.500, " in out
    assert next(line for line in out.splitlines() if "run" in line.split()).split() == ["run", "reward"]
    assert [row["seed"] for row in rows_of(folder / "runs.csv")] == ["3", "3"]


def test_tables_are_read_back_as_they_were_printed(tmp_path: Path) -> None:
    """With full numbers, and the digits that the study showed."""
    study = a_study(tmp_path / "a", {"uniform": 0.5})
    numbers: list[list[Cell]] = [["a", 1.501, 3, 2.0, math.nan], ["b", None, 4, "-", 5e-7]]
    sections = [
        Section("one", [TableBlock(["arm", "n", "k", "rank", "lr"], numbers, digits={"n": 2}), Paragraph("note")]),
        Section("two", [TableBlock(["x"], [["|"]], caption="within")]),
    ]
    path = study / "tables.json"
    path.write_text(tables_to_json(sections))
    assert tables_to_json(read_tables(path)) == path.read_text() and "1.501" in path.read_text()
    read = read_study(study)
    tables = keyed_tables(read)
    assert [(table.title, table.keys) for table in tables] == [("one", ("arm",)), ("within", ("x",))]
    assert tables[0].digits["n"] == 2
    one, two = tables[0].rows
    assert (one["n"], one["k"], one["rank"]) == (1.501, 3, 2.0) and math.isnan(float(str(one["lr"])))
    assert (two["n"], two["rank"], two["lr"], read.notes[0]) == (None, "-", 5e-7, "note")


@pytest.mark.parametrize("text", ["", "[]", '{"sections": [{"title": "t"}]}', '{"sections": []}'])
def test_a_file_without_tables_is_refused(tmp_path: Path, text: str) -> None:
    study = a_study(tmp_path / "a", {"uniform": 0.5})
    (study / "tables.json").write_text(text)
    with pytest.raises(
        UserError, match=r"tables\.json: (cannot be read as study tables|expected the tables of a study)"
    ):
        read_study(study)


def test_folders_that_hold_nothing_are_named(tmp_path: Path) -> None:
    a_run(tmp_path / "outputs" / "one", 0.5)
    with pytest.raises(UserError, match=r"outputs: expected the folder of .*found one/; subfolders .* one: one"):
        report_on(tmp_path, [str(tmp_path / "outputs")])
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"expected the folder of a finished run \(result.json\), found nothing"):
        report_on(tmp_path, ["run", str(tmp_path / "empty")])
    with pytest.raises(UserError, match="it does not exist"):
        report_on(tmp_path, ["study", str(tmp_path / "nowhere")])
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "result.json").write_text("{")
    assert folder_kind(tmp_path / "broken") == "run"
    with pytest.raises(UserError, match="cannot be read as a run result"):
        report_on(tmp_path, [str(tmp_path / "broken")])
    assert not (tmp_path / "r").exists()


# ------------------------------------------------------------------------------------------------ studies that ran


def markdown_tables(path: Path) -> list[list[str]]:
    """The lines of every table of a Markdown file."""
    blocks = path.read_text(encoding="utf-8").split("\n\n")
    return [block.strip().splitlines() for block in blocks if block.startswith("|")]


@pytest.mark.parametrize("truth", [False, True])
def test_the_report_on_a_study_has_exactly_its_tables(
    plain_study: Finished, true_study: Finished, tmp_path: Path, truth: bool
) -> None:
    """From the command's overrides through every point to table.md, and from there to the report's files."""
    study = true_study if truth else plain_study  # a choice of betas gives the table of rewards at equal KL
    arms = ["base", "uniform", "attention L2"] if truth else ["uniform", "broken", "attention"]
    printed = tmp_path / "printed.csv"
    printed.write_text(f"setting,method,arm,score\nreal_smoke,Second,{arms[-1]},1.5\ntestbed,Other,uniform,2.5\n")
    folder, page = report_on(tmp_path, ["study", str(study.folder)], f"printed={printed}")
    tables = markdown_tables(folder / "study.md")
    paper = tables.pop(1)
    assert tables == markdown_tables(study.folder / "table.md") and len(tables) == 1 + truth
    columns, rows = main_table(study.outcome)
    ours = [row for row in rows_of(folder / "study.csv") if row["table"] == "out"][: len(rows)]
    assert [row["arm"] for row in ours] == arms
    for told, row in zip(ours, rows, strict=True):
        for name in columns:
            cell = row.get(name)
            assert told[name] == ("" if cell is None else str(cell)) or float(told[name]) == cell
    assert paper[2:] == [f"| Second | {arms[-1]} | 1.5 |"]
    drawn = [name for name in json.loads((study.folder / "study.json").read_text())["figures"] if "png" in name]
    assert page.count("<figure") == len(drawn) >= 1 and "out: all runs" in page
