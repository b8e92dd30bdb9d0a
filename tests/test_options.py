"""What users are shown of the config groups, the help and docs/options.md, against the files in configs/."""

import re
from functools import cache
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from attnpo.cli.help import WIDTH, ConfigGroup, parse_groups
from attnpo.config.compose import CONFIG_DIR, FAMILIAR, compose, list_groups
from attnpo.run.combinations import LAYOUTS, REFERENCES
from attnpo.schema import UserError
from tests.test_entry_points import in_turn

ROOT = Path(__file__).resolve().parents[1]
OPTIONS = (ROOT / "docs" / "options.md").read_text(encoding="utf-8")
SCREENS = {"fit": 43, "weigh": 42, "generate": 40, "pair": 40, "evaluate": 40, "report": 48}  # lines of help
UNSET = ("null", "???")  # left out, and to be given
ROOTS = sorted(CONFIG_DIR.glob("*.yaml"), key=lambda root: (root.stem != "fit", root.stem))
EVERY = [group for root in ROOTS for group in parse_groups(root)]
# Of a group that several commands compose, the first one's heading and words count.
GROUPS = [group for place, group in enumerate(EVERY) if group.name not in {one.name for one in EVERY[:place]}]


@cache
def every_help() -> dict[str, list[str]]:
    """Returns the help of every command, as each prints it."""
    found, _ = in_turn([[f"attnpo.{command}", "--help"] for command in SCREENS])
    return {command: done.stdout.splitlines() for command, done in zip(SCREENS, found, strict=True)}


# ------------------------------------------------------------------------------------------------ help


def test_every_group_has_a_meaning_under_a_heading() -> None:
    assert {group.name for group in GROUPS} == list_groups().keys()
    assert all(group.meaning and group.heading for group in GROUPS)
    assert all(group.default in (*UNSET, *list_groups()[group.name]) for group in GROUPS)


def test_help_fits_one_screen() -> None:
    for command, lines in SCREENS.items():
        shown = every_help()[command]
        assert 0 < len(shown) <= lines and max(map(len, shown)) <= WIDTH, command


def test_help_begins_with_commands_and_has_every_choice() -> None:
    shown = " ".join(" ".join(every_help()["fit"]).split())
    assert shown.index("examples: python -m attnpo.fit ") < shown.index(f"{GROUPS[0].heading} (")
    for group in parse_groups(CONFIG_DIR / "fit.yaml"):
        options = list_groups()[group.name]
        assert options == [group.default] or f"# {group.meaning}" in shown
        assert options == [group.default] or all(re.search(rf"[=| ]{option}\b", shown) for option in options)


def test_help_shows_the_groups_a_command_reads() -> None:
    shown = "\n".join(every_help()["generate"])
    assert "answering=hf | openai" in shown and "experiment=" not in shown and "model=causal_lm" not in shown


# ------------------------------------------------------------------------------------------------ the table


def test_the_document_has_the_headings_and_groups_of_the_help() -> None:
    expected: list[tuple[str, ...]] = []
    for group in GROUPS:
        if (group.heading,) not in expected:
            expected.append((group.heading,))
        expected.append((group.name, group.meaning))
    found = re.findall(r"^## (.+)|^### `(\w+)`: (.+)", OPTIONS, re.MULTILINE)
    named: list[tuple[str, ...]] = [(heading,) if heading else (name, meaning) for heading, name, meaning in found]
    assert named == [*expected, ("Keys with few values",)]


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.name)
def test_the_document_has_a_row_for_every_option(group: ConfigGroup) -> None:
    name, default = group.name, group.default
    table = OPTIONS.partition(f"### `{name}`: ")[2].partition("\n#")[0]
    rows = re.findall(r"^\| `(\w+)` \| ", table, re.MULTILINE)
    assert sorted(rows) == list_groups()[name]
    assert default in UNSET or rows[0] == default
    assert (default == "null") == ("None unless given" in table)


def test_the_document_has_the_values_of_keys() -> None:
    for key, values in (("layout", LAYOUTS), ("reference", REFERENCES)):
        listed = ", ".join(f"`{value}`" for value in values)
        assert f"| `{key}` | {listed}: " in OPTIONS


def test_readers_are_led_to_the_document() -> None:
    assert "(docs/options.md)" in (ROOT / "README.md").read_text(encoding="utf-8")


# ------------------------------------------------------------------------------------------------ options


def test_keys_of_the_study_are_typed_as_before() -> None:
    cfg = compose("fit", ["experiment=layer_sweep", "study.layers=[1,2]", "study.seeds=2", "study.workers=1"])
    assert (list(cfg.study.layers), cfg.study.seeds, cfg.study.workers) == ([1, 2], 2, 1)


def test_what_options_have_in_common_is_no_option() -> None:
    with pytest.raises(UserError) as refused:
        compose("fit", ["experiment=nowhere"])
    assert "Available options in 'experiment': attention_sink, " in str(refused.value)
    assert not re.search(r"[=| ]_", "\n".join(every_help()["fit"]))


def test_keys_of_other_trainers_point_to_keys_here() -> None:
    composed = compose("fit", ["setting=real_smoke", "model=lora", "objective=simpo", "model.path=x", "data.path=y"])
    for typed, meant in FAMILIAR.items():
        key, _, _ = meant.partition(" ")[0].partition("=")
        parent, _, name = key.rpartition(".")
        node = OmegaConf.select(composed, parent) if parent else composed
        assert name in node or name in list_groups(), (typed, key)
        with pytest.raises(UserError, match=re.escape(f"there is no key {typed}; did you mean {meant}?")):
            compose("fit", [f"{typed}=1"])
