"""Experiments on every setting: each arm is a sound run, headers count right, controls are there, grids are fair."""

import csv
import random
import re
from functools import cache
from pathlib import Path

import pytest

from attnpo.config.compose import CONFIG_DIR, list_groups, load
from attnpo.lab.studies.arms import arm_identity, make_composer
from attnpo.lab.studies.config import FitConfig
from attnpo.lab.studies.study import ONLY, Arm, Study, expand_arms, settings_digest, settings_record
from attnpo.run.identity import make_identity
from attnpo.schema import UserError

EXPERIMENTS = [name for name in list_groups()["experiment"] if name not in ("none", "quickstart")]
SETTINGS = list_groups()["setting"]
PAPER = ("llama3_8b_base_sft", "llama3_8b_instruct", "mistral_7b_base_sft")
DEPTH = {"testbed": 4, **dict.fromkeys(PAPER, 32)}
TESTBED_ONLY = ("regimes", "why", "long_answers")  # their worlds are the testbed's knobs
SEEDS = {"controls": 10, "long_answers": 3}  # of the others: 5
OWN_BETAS = ("why", "long_answers", "regimes")  # sharp weights and flat ones have other betas, as many
NAMED = (
    *("layer_sweep", "weight_sources", "attention_sink", "length_norm", "cross_model", "beta_sweep", "controls"),
    "main_results",
)
OF_MODELS = ("weight_sources", "cross_model")  # the judge, the verbalizer, another judge
OF_METHODS = "main_results"  # every arm has another objective, with hyperparameters of its own
# Studies without a control transform among their arms, and the words of the header that say why.
NO_TRANSFORM = {"faithfulness": "Controls: the measure brings its own"}


@cache
def composed(experiment: str, setting: str) -> FitConfig:
    """An experiment on a setting; composed once, so it must not be changed."""
    return load("fit", [f"experiment={experiment}", f"setting={setting}"])


@cache
def study_of(experiment: str, setting: str) -> Study:
    made = composed(experiment, setting).study
    assert isinstance(made, Study)
    return made


@cache
def arm_of(experiment: str, setting: str, overrides: tuple[str, ...], world: str = ONLY) -> FitConfig:
    """Returns the config of an arm as the runner composes it; composed once."""
    composer = make_composer(composed(experiment, setting), study_of(experiment, setting))
    return composer.compose_arm(overrides, world).config


def registered(experiment: str) -> bool:
    """Whether the predictions of a study name the settings they were fixed for."""
    return "\n    settings: " in (CONFIG_DIR / "experiment" / f"{experiment}.yaml").read_text(encoding="utf-8")


@cache
def header(experiment: str) -> str:
    lines = (CONFIG_DIR / "experiment" / f"{experiment}.yaml").read_text(encoding="utf-8").splitlines()
    return " ".join(" ".join(line.removeprefix("#").split()) for line in lines if line.startswith("#"))


def on(*settings: str) -> list[tuple[str, str]]:
    """(experiment, setting) of every experiment that stands on each setting."""
    return [(e, s) for s in settings for e in EXPERIMENTS if s == "testbed" or e not in TESTBED_ONLY]


def arms_of(study: Study, setting: str) -> dict[str, list[Arm]]:
    """The arms of each world; the only one of a study without worlds is "" """
    truth = composed(study.name, setting).truth is not None
    return {world: expand_arms(study, DEPTH[setting], truth=truth, world=world) for world in study.worlds or [ONLY]}


def points(study: Study, setting: str) -> tuple[int, set[int]]:
    """The arms of all worlds, and the numbers of grid points they have."""
    arms = [arm for found in arms_of(study, setting).values() for arm in found]
    return len(arms), {len((arm.grid or study.grid).point_overrides()) for arm in arms}


# ------------------------------------------------------------------------------------------------ composing


def test_every_study_of_the_paper_is_here() -> None:
    assert set(NAMED) <= set(EXPERIMENTS)
    assert all(study_of(name, "testbed").name == name for name in EXPERIMENTS)


@pytest.mark.parametrize(("experiment", "setting"), on(*SETTINGS))
def test_an_experiment_composes_and_checks(experiment: str, setting: str) -> None:
    assert composed(experiment, setting).study is not None


@pytest.mark.parametrize("setting", ["testbed", *PAPER])
def test_every_arm_is_a_sound_run(setting: str) -> None:
    """Composed as the runner does it; arms that several studies share are composed once.

    The paper's settings differ from each other in models and data: their studies have the same arms, so all of them are
    composed in one setting, and in the others those that read another model.
    """
    seen: set[tuple[str, ...]] = set()
    for experiment, _ in on(setting) if setting in ("testbed", PAPER[0]) else [(name, setting) for name in OF_MODELS]:
        study = study_of(experiment, setting)
        known: set[str] = set()
        for world, arms in arms_of(study, setting).items():
            # Worlds and arms set different keys (below), so every world once and every arm once are enough.
            new = [arm for arm in arms if arm.name not in known] or arms[:1]
            known |= {arm.name for arm in arms}
            for arm in new:
                given = (*study.shared, *study.worlds.get(world, ()), *arm.overrides)
                if given in seen:
                    continue
                seen.add(given)
                try:
                    made = arm_of(experiment, setting, arm.overrides, world)
                except UserError as error:
                    raise AssertionError(f"{experiment}, {world}, {arm.name}: {error}") from error
                assert made.study is None
                last = {key: value for key, _, value in (item.partition("=") for item in given)}
                if "weights.layer" in last:
                    assert str(made.weights.layer) == last["weights.layer"]
    assert len(seen) > 10


@pytest.mark.parametrize("experiment", TESTBED_ONLY)
@pytest.mark.parametrize("setting", PAPER)
def test_a_study_of_the_testbeds_knobs_is_refused_elsewhere(experiment: str, setting: str) -> None:
    with pytest.raises(UserError, match=rf"study {experiment}: .*worlds.*prepare"):
        composed(experiment, setting)


@pytest.mark.parametrize("setting", PAPER)
def test_truth_has_arms_where_it_is_known_only(setting: str) -> None:
    for experiment, _ in on(setting):
        study = study_of(experiment, setting)
        here = {arm.name for arm in expand_arms(study, 32, truth=composed(experiment, setting).truth is not None)}
        there = {arm.name for arm in expand_arms(study, 4, truth=composed(experiment, "testbed").truth is not None)}
        assert study.truth_arms.keys() <= there
        assert not study.truth_arms.keys() & here


# ------------------------------------------------------------------------------------------------ rules


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_a_study_has_controls(experiment: str) -> None:
    """DPO is compared with, and some arm destroys what the weights know, or the header says why none does."""
    study = study_of(experiment, "testbed")
    assert study.control is not None and study.arms[study.control] == ["weights=uniform"]
    changed = [name for name, arm in study.arms.items() if any(item.startswith("transform=") for item in arm)]
    assert bool(changed) != (experiment in NO_TRANSFORM), changed
    assert NO_TRANSFORM.get(experiment, "") in header(experiment)


def test_every_control_is_explained() -> None:
    """The arms of ``controls``, and for every study the control transforms it runs."""
    text = (CONFIG_DIR.parent / "docs" / "controls.md").read_text(encoding="utf-8")
    study = study_of("controls", "testbed")
    assert all(f"\n| {arm} | " in text for arm in {**study.arms, **study.truth_arms} if arm != "attention")
    table = text.partition("## Which study runs which")[2].partition("##")[0]
    assert all(f"`{experiment}`" in table for experiment in EXPERIMENTS)


@pytest.mark.parametrize(("experiment", "setting"), on("testbed", *PAPER))
def test_every_arm_gets_as_many_points(experiment: str, setting: str) -> None:
    """And the same learning rates; betas too, unless the objective counts them in another unit.

    Methods have learning rates of their own where they are published, one point each.
    """
    study = study_of(experiment, setting)
    assert len(points(study, setting)[1]) == 1
    if experiment == OF_METHODS and setting != "testbed":
        return
    assert all(grid.lr == study.grid.lr for grid in study.grids.values())
    for name in study.arms if experiment not in (OF_METHODS, *OWN_BETAS) else []:
        other_unit = "objective.length_scale=false" in study.arms[name]
        assert (study.grid_of(name) == study.grid) != other_unit, name


@pytest.mark.parametrize("setting", ["testbed", *PAPER])
def test_length_normalised_betas_are_the_main_ones_times_a_length(setting: str) -> None:
    study = study_of("length_norm", setting)
    own = study.grid_of("attention length-normalised")
    ratios = [long / short for long, short in zip(own.beta, study.grid.beta, strict=True)]
    assert ratios == pytest.approx([26.0 if setting == "testbed" else 400.0] * len(ratios))


def test_the_papers_length_normalised_beta_is_tried(paper_tables: Path) -> None:
    with (paper_tables / "hyperparameters.csv").open(newline="", encoding="utf-8") as file:
        beta = next(float(row["value"]) for row in csv.DictReader(file) if row["group"] == "length_norm")
    for setting in PAPER:
        assert beta in study_of("length_norm", setting).grid_of("attention length-normalised").beta


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_seeds(experiment: str) -> None:
    assert study_of(experiment, "testbed").seeds == SEEDS.get(experiment, 5)


# ------------------------------------------------------------------------------------------------ headers


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_the_header_counts_the_runs(experiment: str) -> None:
    study, text = study_of(experiment, "testbed"), header(experiment)
    arms, (grid,) = points(study, "testbed")
    worlds = len(study.worlds) or 1
    if study.only_in:
        product = f"{arms} arms of {worlds} worlds x {grid} grid points"
    else:
        product = f"{arms // worlds} arms x {grid} grid points" + (f" x {worlds} worlds" if study.worlds else "")
    assert re.search(rf"Cost on the testbed: [^.]*\b{product} = {arms * grid} runs per seed", text)
    if experiment not in TESTBED_ONLY:
        arms, (grid,) = points(study_of(experiment, PAPER[0]), PAPER[0])
        assert f"{arms} arms x {grid} grid points = {arms * grid} runs per seed" in text.partition("a paper setting")[2]


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_the_header_has_commands_of_its_experiment(experiment: str) -> None:
    """tests/docs composes them."""
    lines = (CONFIG_DIR / "experiment" / f"{experiment}.yaml").read_text(encoding="utf-8").splitlines()
    commands = [found[1].split() for line in lines if (found := re.match(r"# +python -m attnpo\.fit (.*)", line))]
    assert len(commands) >= 2
    assert all(f"experiment={experiment}" in words for words in commands)


def test_keys_of_the_study_reach_its_points() -> None:
    cfg = load("fit", ["experiment=layer_sweep", "study.layers=[last]", "study.seeds=2", "seed=5"])
    study = cfg.study
    assert (study.layers, study.seeds) == (("last",), 2)
    arms = [arm for arm in expand_arms(study, 4) if arm.layer is not None]
    assert [arm.name for arm in arms] == ["attention L4"]
    arm = make_composer(cfg, study).compose_arm(arms[0].overrides)
    made = arm.config
    assert (made.study, made.weights.layer, made.seed) == (None, 4, 5)
    assert not any(word.startswith("study.") for word in arm.overrides)


METHODS = [
    "RRHF",
    "SLiC-HF",
    "DPO",
    "TDPO",
    "TI-DPO",
    "OTPO",
    "IPO",
    "CPO",
    "KTO",
    "ORPO",
    "R-DPO",
    "SimPO",
    "AttentionPO",
]
PRINTED = {
    "weight_sources": ("weight_sources.csv", ["Base", "DPO", "AttentionPO", "w/ attn rollout", "w/ verbal w"]),
    "attention_sink": ("ablations.csv", ["DPO", "AttentionPO", "w/ attn sink"]),
    "length_norm": ("ablations.csv", ["DPO", "AttentionPO", "w/ len norm"]),
    "layer_sweep": ("ablations.csv", ["DPO", "AttentionPO"]),
    "cross_model": ("attention_from_other_models.csv", ["AttentionPO", "w/ attn from inst", "w/ attn from sft"]),
    "main_results": ("main_results.csv", ["Base", *METHODS]),
}


@pytest.mark.parametrize("experiment", PRINTED)
def test_headers_hold_the_printed_numbers(experiment: str, paper_tables: Path) -> None:
    file, wanted = PRINTED[experiment]
    with (paper_tables / file).open(newline="", encoding="utf-8") as stream:
        rows = [row for row in csv.DictReader(stream) if row["method"] in wanted]
    assert {row["method"] for row in rows} == set(wanted)
    for row in rows:
        scores = f"{row['alpacaeval_lc']} / {row['alpacaeval_wr']}, {row['mt_bench']}, {row['arena_hard_wr']}"
        assert scores in header(experiment), row


# ------------------------------------------------------------------------------------------------ why


def test_the_explanations_are_separated_where_they_can_be() -> None:
    """Every arm's steps are as many as any other's, sharp weights have a grid shifted down, predictions cover all."""
    cfg, study = composed("why", "testbed"), study_of("why", "testbed")
    assert study.predictions is not None and cfg.seed == study.predictions.seeds[0]
    assert {claim.about[0] for claim in study.predictions.claims.values()} == set("abcde")
    steps, noise = set(), {}
    for name in study.worlds:
        made = arm_of("why", "testbed", ("weights=uniform",), name)
        steps.add(made.trainer.max_epochs * made.prepare.pairs.train // made.batch.pairs)
        noise[name] = made.prepare.pairs.label_noise
        robust = arm_of("why", "testbed", tuple(study.arms["robust DPO"]), name)
        assert robust.objective.label_smoothing == noise[name], "it is told the true rate"
    assert steps == {96}
    assert study.world_axis is not None and {name: noise[name] for name in study.world_axis.at} == study.world_axis.at
    assert [place for place in study.world_axis.at.values()] == [0.0, 0.1, 0.2, 0.3, 0.4]
    flat, sharp = study.grid.beta, study.grid_of("attention").beta
    assert len(flat) == len(sharp) and all(low < high for low, high in zip(sharp, flat, strict=True))
    for name, arm in study.all_arms(truth=True).items():
        source = next(item for item in arm if item.startswith("weights="))
        mixed = any(item.startswith("transform=mixture") for item in arm)
        own = study.grid_of(name).beta
        assert own == (sharp if source != "weights=uniform" and not mixed else flat) or name == "IPO", name


@pytest.mark.parametrize("experiment", [name for name in TESTBED_ONLY if registered(name)])
def test_predictions_stand_for_the_settings_they_were_fixed_for(experiment: str) -> None:
    """An option that changes what an arm or a world is would let fresh runs decide what was said of others."""
    study = study_of(experiment, "testbed")
    made = {
        (arm.world, arm.name): arm_of(experiment, "testbed", arm.overrides, arm.world)
        for arms in arms_of(study, "testbed").values()
        for arm in arms
    }
    arms = {
        f"{world}: {name}" if world else name: arm_identity(make_identity(config).result)
        for (world, name), config in made.items()
    }
    digests = {world: config.prepare.grammar.digest() for (world, _), config in made.items()}
    assert study.predictions is not None
    assert study.predictions.settings == settings_digest(settings_record(study, arms, digests))


# ------------------------------------------------------------------------------------------------ regimes


def test_worlds_differ_from_the_plain_one_by_what_they_say() -> None:
    """Steps of a run: 96 with 768 pairs, 48 with 96, 192 with 3,072; nothing that an arm sets is set by a world."""
    cfg, study = composed("regimes", "testbed"), study_of("regimes", "testbed")
    assert cfg.seed == study.predictions.seeds[0] == 25
    own = {item.partition("=")[0] for arm in study.arms.values() for item in arm}
    steps = {}
    for name, overrides in study.worlds.items():
        keys = {item.partition("=")[0] for item in overrides}
        assert bool(keys) == (name != "plain") and not keys & own
        assert (keys == {"prepare.pairs.label_noise"}) == (name == "clean")
        made = arm_of("regimes", "testbed", ("weights=uniform",), name)
        steps[name] = made.trainer.max_epochs * made.prepare.pairs.train // made.batch.pairs
        assert made.seed == cfg.seed
    assert steps == {**dict.fromkeys(study.worlds, 96), "few pairs": 48, "style words": 48, "many pairs": 192}
    flat, sharp = study.grid.beta, study.grid_of("attention").beta
    assert all(2 < high / low < 4 for low, high in zip(sharp, flat, strict=True))


# ------------------------------------------------------------------------------------------------ long answers


@pytest.mark.parametrize("world", ["clean", "label noise"])
def test_long_answers_have_room_everywhere(world: str) -> None:
    """What may be sampled fits into the lengths, the judge's prompt and the scorer: no ended answer is cut."""
    study = study_of("long_answers", "testbed")
    made = arm_of("long_answers", "testbed", ("weights=attention",), world)
    base, pairs = made.prepare.base, made.prepare.pairs
    assert made.seed >= 20 and pairs.label_noise == {"clean": 0.0, "label noise": 0.25}[world]
    assert made.truth.max_new_tokens == pairs.max_new_tokens == base.answer_tokens
    assert made.judge.max_response_length >= pairs.max_new_tokens
    assert 2 * pairs.max_new_tokens + 100 <= made.judge.max_length <= base.max_positions
    assert pairs.max_new_tokens + 32 <= made.lengths.max_length
    rng, lengths = random.Random(0), []
    for prompt in made.prepare.grammar.prompts("train")[:200]:
        lengths.append(len(made.prepare.grammar.sample_review(rng, prompt).split()))
    assert sorted(lengths)[10] >= 150 and sorted(lengths)[-10] <= 250
    assert study.grid.lr == study.grids["uniform"].lr and len(study.grid.beta) == len(study.grids["uniform"].beta) == 6
