"""Composition, typed checks and the command line front, on configuration folders made here; then the shipped ones."""

import importlib
import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable
from unittest.mock import ANY

import pytest
from omegaconf import DictConfig, OmegaConf

from attnpo.cli import entry as command_line
from attnpo.config import compose as config
from attnpo.config import fields as component_fields
from attnpo.config.reader import import_target
from attnpo.lab.reports.report_config import ReportConfig
from attnpo.run import combinations as settings
from attnpo.schema import UserError

ROOT = Path(__file__).resolve().parents[1]
HERE = __name__


class End(Enum):
    ZERO = "zero"
    MEAN = "mean"


@dataclass(frozen=True)
class Sink:
    tokens: int = 1
    end: End = End.ZERO

    def __post_init__(self) -> None:
        if self.tokens < 0:
            raise UserError(f"tokens: expected 0 or more, got {self.tokens}")


@dataclass(frozen=True)
class Attention:
    layer: int | str = "last"
    sink: Sink = field(default_factory=Sink)
    labels: tuple[str, str] = ("A", "B")
    heads: tuple[int, ...] = ()
    limit: int | None = None
    scale: float = 1.0
    signed: bool = False


@dataclass(frozen=True)
class Mixture:
    parts: tuple[Sink, ...]
    shares: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.parts:
            raise ValueError("parts: expected at least one")


@dataclass(frozen=True)
class Fit(config.RootConfig):
    weights: Attention | Mixture
    seed: int
    beta: object = None
    path: tuple[str, ...] | None = None
    model: str = "base"


FIT = f"""
_target_: {HERE}.Fit
defaults: [_self_, {{weights: attention}}, {{setting: small}}, optional experiment: null]
seed: 1
beta: ${{weights.scale}}
path: null
model: base
composed: {{}}
"""
FILES = {
    "fit.yaml": FIT,
    "weights/attention.yaml": f"""
_target_: {HERE}.Attention
layer: last
scale: 1.0
limit: null
heads: [1, 2]
labels: [A, B]
signed: false
sink: {{_target_: {HERE}.Sink, tokens: 1, end: zero}}
""",
    "weights/mixture.yaml": f"""
_target_: {HERE}.Mixture
scale: 2.0
parts: [{{tokens: 2}}, {{tokens: 3, end: mean}}]
""",
    "setting/small.yaml": "# @package _global_\nseed: 2\n",
    "experiment/sinkless.yaml": "# @package _global_\nseed: 3\nweights: {sink: {tokens: 0}}\n",
}


@pytest.fixture
def configs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of configurations that stands in for the shipped one."""
    folder = tmp_path / "configs"
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    monkeypatch.setattr(config, "CONFIG_DIR", folder)
    return folder


def refused(*overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        config.validate(config.compose("fit", overrides))
    return str(caught.value)


# --------------------------------------------------------------------------------------------- composition


@pytest.mark.usefixtures("configs")
def test_later_overlays_win_and_the_command_line_beats_all() -> None:
    assert config.compose("fit").seed == 2
    assert config.compose("fit", ["experiment=sinkless"]).seed == 3
    overrides = ["experiment=sinkless", "seed=9", "beta=${seed}"]
    cfg = config.compose("fit", overrides)
    assert (cfg.seed, cfg.weights.sink.tokens, cfg.beta) == (9, 0, 9)
    assert list(cfg.composed.overrides) == overrides
    assert "hydra" not in cfg


@pytest.mark.usefixtures("configs")
@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("weights.leyer=3", ["weights.leyer=3: there is no key weights.leyer; did you mean weights.layer?\n", "has: "]),
        ("tokens=3", ["tokens=3: there is no key tokens; did you mean weights.sink.tokens?\n`fit` has: "]),
        ("wieghts=attention", ["wieghts", "did you mean weights?"]),
        ("weights.sink.tokenz=3", ["weights.sink.tokenz", "`weights.sink` has: end, tokens", "weights.sink.tokens?"]),
        ("seed.x=3", ["seed.x", "`seed` is a value"]),
        ("weights=atention", ["weights/atention", "attention, mixture"]),
        ("experiment=sinkles", ["experiment/sinkles", "did you mean experiment=sinkless?"]),
        ("seed=[1", ["seed=[1 cannot be parsed (", "spaces must be quoted"]),
        ("seed=1,2", ["--multirun"]),
        (
            "weights=null",
            ["weights=null: expected one of the group's options (attention, mixture)", "~weights removes"],
        ),
        ("setting=smal", ["setting/smal", "did you mean setting=small?"]),
        ("beta=${nothing}", ["beta: Interpolation key 'nothing' not found"]),
    ],
)
def test_what_cannot_be_composed_is_named(override: str, expected: list[str]) -> None:
    text = refused(override)
    assert [part for part in expected if part not in text] == []
    assert text.count("\n") <= 4
    assert "struct" not in text and "+" not in text, "Hydra's advice to add the key with +, which is refused"


@pytest.mark.usefixtures("configs")
def test_unknown_configuration_names_the_search_path() -> None:
    with pytest.raises(UserError, match="Cannot find primary config 'fot'"):
        config.compose("fot")


def test_config_dir_adds_options_and_may_stand_alone(configs: Path, tmp_path: Path) -> None:
    own = tmp_path / "own, 'odd' name"
    (own / "weights").mkdir(parents=True)
    (own / "weights" / "mine.yaml").write_text(f"{{_target_: {HERE}.Attention, layer: 7, scale: 1.0}}")
    cfg = config.compose("fit", ["weights=mine"], own)
    assert cfg.weights.layer == 7
    assert config.list_groups(own)["weights"] == ["attention", "mine", "mixture"]
    assert cfg.composed.config_dir == str(own)
    with pytest.raises(UserError, match=r"--config-dir .*nowhere"):
        config.compose("fit", [], tmp_path / "nowhere")


def test_missing_folder_names_the_way_out(monkeypatch: pytest.MonkeyPatch, configs: Path, tmp_path: Path) -> None:
    monkeypatch.setattr(config, "CONFIG_DIR", tmp_path / "gone")
    with pytest.raises(UserError, match="--config-dir DIR"):
        config.compose("fit")
    assert config.compose("fit", [], configs).seed == 2


# --------------------------------------------------------------------------------------------- checks


@pytest.mark.usefixtures("configs")
@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("+weights.leyer=3", f"weights.leyer: unknown key of {HERE}.Attention; it has: layer, sink, labels, heads"),
        ("+weights.sink.tokns=3", "did you mean weights.sink.tokens?"),
        ("weights.layer=3.5", "weights.layer: expected int or str, got 3.5 (float)"),
        ("weights.scale=big", "weights.scale: expected float, got 'big' (str)"),
        ("weights.scale=true", "weights.scale: expected float, got True (bool)"),
        ("weights.scale=null", "weights.scale: expected float, got null"),
        ("weights.signed=3", "weights.signed: expected bool, got 3 (int)"),
        ("weights.limit=x", "weights.limit: expected int, got 'x' (str)"),
        ("weights.heads=[1,x]", "weights.heads.1: expected int, got 'x' (str)"),
        ("weights.heads=3", "weights.heads: expected a list, got 3 (int)"),
        ("weights.labels=[A,B,C]", "weights.labels: expected a list of 2 items, got ['A', 'B', 'C'] (list)"),
        ("weights.sink.end=half", "weights.sink.end: expected one of zero, mean, got 'half' (str)"),
        ("weights.sink.tokens=-1", "weights.sink: tokens: expected 0 or more, got -1"),
        ("weights.sink=5", "weights.sink: expected the keys of Sink, got 5 (int)"),
        ("weights._target_=attnpo.nowhere.Thing", "weights._target_: cannot import attnpo.nowhere.Thing"),
        (f"weights._target_={HERE}.Atention", f"weights._target_: cannot import {HERE}.Atention"),
        (
            f"weights.sink._target_={HERE}.End",
            f"weights.sink._target_: expected Sink, got {HERE}.End, which is not a frozen dataclass",
        ),
        ("weights.layer=???", "weights.layer: required; set weights.layer=VALUE"),
    ],
)
def test_one_wrong_value_is_one_line(override: str, expected: str) -> None:
    text = refused(override)
    assert text.startswith(expected) or text.endswith(expected)
    assert "\n" not in text


@pytest.mark.usefixtures("configs")
def test_lists_of_components_are_checked_item_by_item() -> None:
    text = refused("weights=mixture", "weights.parts=[{tokens:1},{tokens:x},{tokns:2}]", "+weights.shares={a:1,b:y}")
    assert text.splitlines() == [
        "4 problems in the configuration:",
        f"  weights.scale: unknown key of {HERE}.Mixture; it has: parts, shares",
        "  weights.parts.1.tokens: expected int, got 'x' (str)",
        f"  weights.parts.2.tokns: unknown key of {HERE}.Sink; it has: tokens, end; "
        "did you mean weights.parts.2.tokens?",
        "  weights.shares.b: expected float, got 'y' (str)",
    ]


@pytest.mark.usefixtures("configs")
def test_all_problems_come_together() -> None:
    lines = refused("weights.layer=2.5", "weights.sink.tokens=-2", "beta=${gone}", "weights.heads=[a]").splitlines()
    assert lines[0] == "4 problems in the configuration:"
    assert sorted(line.split(":")[0].strip() for line in lines[1:]) == [
        "beta",
        "weights.heads.0",
        "weights.layer",
        "weights.sink",
    ]


@pytest.mark.usefixtures("configs")
def test_a_value_read_from_another_key_is_reported_where_it_is_set() -> None:
    assert refused("weights.scale=${gone}") == "weights.scale: Interpolation key 'gone' not found"
    assert refused("weights.limit=${beta}") == "weights.limit (read from beta): expected int, got 1.0 (float)"
    assert refused("weights._target_=???") == "weights._target_: required; set weights._target_=VALUE"


@pytest.mark.usefixtures("configs")
@pytest.mark.parametrize("reads", ["path.grammar", "weights.limit.size.x"])
def test_a_value_read_below_a_null_is_said_in_words(reads: str) -> None:
    empty = reads.partition(".grammar")[0].removesuffix(".size.x")
    advice = f"`{empty}` is null in this setting: set setting=testbed, or choose another option of `weights`"
    assert refused(f"weights.sink.tokens=${{{reads}}}") == f"weights.sink.tokens (read from {reads}): {advice}"
    cfg = config.compose("fit", [f"weights.sink.tokens=${{{reads}}}"])
    for failing in (lambda: config.instantiate(cfg.weights), lambda: config.to_container(cfg)):
        with pytest.raises(UserError, match=r"^" + re.escape(f"weights.sink.tokens: {advice}") + "$"):
            failing()


@pytest.mark.usefixtures("configs")
def test_required_fields() -> None:
    text = refused("weights=mixture", "~weights.parts", "~weights.scale", "beta=1")
    assert text == "weights.parts: required by Mixture; set weights.parts=VALUE"
    cfg = config.compose("fit", ["weights.scale=???"])
    config.validate(cfg, complete=False)  # neither weights.scale nor beta, which reads it
    with pytest.raises(UserError, match=r"^weights.scale: required; set weights.scale=VALUE$"):
        config.validate(cfg)


# --------------------------------------------------------------------------------------------- building


@pytest.mark.usefixtures("configs")
def test_build_gives_the_dataclass_with_nested_ones_and_tuples() -> None:
    cfg = config.compose("fit", ["weights.layer=3", "weights.scale=2", "weights.sink.end=MEAN", "weights.limit=4"])
    built = config.instantiate(cfg.weights)
    assert built == Attention(3, Sink(1, End.MEAN), ("A", "B"), (1, 2), 4, 2.0, False)
    assert type(built.scale) is float
    parts = config.instantiate(config.compose("fit", ["weights=mixture", "~weights.scale"]).weights).parts
    assert parts == (Sink(2), Sink(3, End.MEAN))


@pytest.mark.usefixtures("configs")
def test_build_reports_the_full_key() -> None:
    cfg = config.compose("fit", ["weights.sink.tokens=-1"])
    with pytest.raises(UserError, match=r"^weights\.sink: tokens: expected 0 or more"):
        config.instantiate(cfg.weights)
    with pytest.raises(UserError, match=r"^weights\.sink: tokens"):
        config.instantiate(cfg.weights.sink)
    with pytest.raises(UserError, match=r"^weights: parts: expected at least one"):
        config.instantiate(config.compose("fit", ["weights=mixture", "~weights.scale", "weights.parts=[]"]).weights)
    with pytest.raises(UserError, match="expected a component"):
        config.instantiate(cfg.composed)


@dataclass(frozen=True)
class Quiet:
    level: int = 0
    words: int = field(default=1, metadata={"moves_numbers": False})


@runtime_checkable
class Talks(Protocol):
    def talk(self) -> str: ...


@dataclass(frozen=True)
class Loud:
    quiet: Quiet = field(default_factory=Quiet)
    device: str = field(default="cpu", metadata={"moves_numbers": False})

    def talk(self) -> str:
        return "!"


@dataclass(frozen=True)
class Whole:
    talks: Talks
    log: Quiet = field(default_factory=Quiet, metadata={"moves_numbers": False})
    either: Quiet | Loud | None = None
    named: dict[str, Quiet] = field(default_factory=dict)
    several: tuple[Quiet, ...] = ()


@dataclass(frozen=True)
class Choosing:
    mode: Literal["first", "last", 3] = "first"
    maybe: Literal["on"] | None = None


def test_a_literal_takes_its_own_values_alone() -> None:
    cfg = OmegaConf.create({"_target_": f"{HERE}.Choosing", "mode": 3, "maybe": "on"})
    assert config.instantiate(cfg) == Choosing(3, "on")
    cfg = OmegaConf.create({"_target_": f"{HERE}.Choosing", "mode": 3.0, "maybe": "off"})
    with pytest.raises(UserError) as caught:
        config.instantiate(cfg)
    assert str(caught.value).splitlines()[1:] == [
        "  mode: expected one of first, last, 3, got 3.0 (float)",
        "  maybe: expected one of on, got 'off' (str)",
    ]


def test_keys_that_move_no_number_are_declared_at_their_fields() -> None:
    assert list(component_fields.bookkeeping_keys(Quiet)) == ["words"]
    of_class = ["log", "either.words", "either.quiet.words", "either.device"]
    assert list(component_fields.bookkeeping_keys(Whole)) == of_class, (
        "what a protocol stands for is not known of a class"
    )
    built = Whole(Loud(), named={"a": Quiet()}, several=(Quiet(), Quiet()))
    assert list(component_fields.bookkeeping_keys(built)) == [
        *("talks.quiet.words", "talks.device", "log", "named.a.words", "several.0.words", "several.1.words")
    ]


def test_the_root_of_fit_is_one_typed_component() -> None:
    root = config.load("fit", ["batch.micro=2"])
    assert (root.batch.micro, root.model.path, root.values["model"]["path"]) == (2, "???", "???")
    changed = root.with_value("model.path", "x").with_value("weights.layer", 2)
    assert (changed.model.path, changed.weights.layer) == ("x", 2) and root.model.path == "???"
    assert (changed.values["model"]["path"], changed.values["weights"]["layer"]) == ("x", 2)
    assert {key.partition(".")[0] for key in component_fields.bookkeeping_keys(root)} >= {
        "batch",
        "trainer",
        "output",
        "study",
    }
    assert "optimizer.lr" not in set(component_fields.bookkeeping_keys(root))
    with pytest.raises(UserError, match="_target_ at the top level must be a ReportConfig, got FitConfig"):
        config.parse_as(config.compose("fit"), ReportConfig)


# --------------------------------------------------------------------------------------------- what may be named


@pytest.fixture
def foreign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package beside attnpo whose import, and whose function, leave a file behind."""
    mark = tmp_path / "ran"
    text = f"""
from dataclasses import dataclass
from pathlib import Path
Path({str(mark)!r}).touch()
@dataclass(frozen=True)
class Mine:
    limit: int = 1
    requires = frozenset()
    def __call__(self, policy, reference, batch): ...
@dataclass
class Loose:
    limit: int = 1
@dataclass(frozen=True)
class Other:
    limit: int = 1
def function(**keys):
    Path({str(mark)!r}).touch()
"""
    (tmp_path / "foreign_parts.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv("ATTNPO_ALLOW_TARGETS")
    yield mark
    sys.modules.pop("foreign_parts", None)


def fit_with(*overrides: str) -> DictConfig:
    return config.compose("fit", overrides)


def test_a_target_outside_attnpo_is_refused_before_it_is_imported(foreign: Path) -> None:
    for node in ("~objective", "~optimizer", "~trainer"):
        key = node.lstrip("~")
        cfg = fit_with(node, f"+{key}={{_target_:foreign_parts.function}}")
        message = (
            rf"(?m)^ *{key}\._target_: expected a class of attnpo, got foreign_parts\.function; .*ATTNPO_ALLOW_TARGETS"
        )
        for look in (config.validate, lambda cfg, key=key: config.instantiate(cfg[key])):
            with pytest.raises(UserError, match=message):
                look(cfg)
    assert not foreign.exists() and "foreign_parts" not in sys.modules


@pytest.mark.parametrize(
    "target", ["os.system", "builtins.eval", "subprocess.run", "attnpo_other.Thing", "os", ".os.x"]
)
def test_targets_of_other_packages_are_not_imported(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ATTNPO_ALLOW_TARGETS")
    with pytest.raises(UserError, match=r"^objective\._target_: expected a class of attnpo, got"):
        config.validate(fit_with("~objective", f"+objective={{_target_:{target}}}"), complete=False)


@pytest.mark.parametrize(
    ("key", "target", "message"),
    [
        (
            "objective",
            "attnpo.run.run.run",
            "expected a PreferenceObjective, got attnpo.run.run.run, which is not a frozen dataclass",
        ),
        (
            "objective",
            "attnpo.config.compose.os.system",
            "expected a class of attnpo, got attnpo.config.compose.os.system, which is defined in posix;",
        ),
        (
            "weights",
            "attnpo.data.base.PairSource.load",
            "expected a WeightSource, got attnpo.data.base.PairSource.load, which is no",
        ),
        ("optimizer", "attnpo.fit.main", "expected Optimizer, got attnpo.fit.main, which is not a frozen dataclass"),
        ("objective", "attnpo.training.optimizer.Optimizer", "expected a PreferenceObjective, got"),
        ("weights", "attnpo.objectives.dpo.DPO", "expected a WeightSource, got"),
        ("data", "attnpo.data.adapters.Columns", "expected a PairReader, got"),
        ("optimizer", "attnpo.objectives.dpo.DPO", "expected Optimizer, got"),
        ("prepare", "attnpo.objectives.dpo.DPO", "expected a Preparer or null, got"),
    ],
)
def test_only_a_component_of_the_role_is_made(key: str, target: str, message: str) -> None:
    with pytest.raises(UserError, match=rf"(?m)^ *{key}\._target_: {re.escape(message)}"):
        config.validate(fit_with("setting=real_smoke", f"~{key}", f"+{key}={{_target_:{target}}}"), complete=False)


def test_what_an_allowed_module_imports_is_not_allowed_with_it(
    foreign: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = """
import os, foreign_parts
from functools import cache, partial, wraps
from foreign_parts import Mine, function
from pathlib import Path
half = partial(function, limit=1)
whole = partial(half, limit=2)
cached = cache(function)
words = "a b"
method = Mine.__call__
unbound = Path.unlink
bound = Path("x").unlink
def own(tokens): return [1.0] * len(tokens.ids)
@cache
def kept(tokens): return own(tokens)
quarter = partial(own)
class Rules:
    @classmethod
    def one(cls, tokens): return own(tokens)
"""
    (tmp_path / "my_parts.py").write_text(code, encoding="utf-8")
    monkeypatch.setenv("ATTNPO_ALLOW_TARGETS", "my_parts")
    try:
        for name, home in {
            **dict.fromkeys(("function", "half", "whole", "cached", "method", "Mine"), "foreign_parts"),
            **{"foreign_parts": "foreign_parts", "foreign_parts.function": "foreign_parts"},
            **{"os": "os", "os.remove": "posix", "unbound": "pathlib", "bound": "pathlib", "Path": "pathlib"},
            **{"words.split": "builtins", "words.__add__": "builtins", "wraps": "functools"},
        }.items():
            assert import_target(f"my_parts.{name}", "function") == (None, ANY), name
            _, why = import_target(f"my_parts.{name}", "function")
            assert (
                f"got my_parts.{name}, which is defined in {home};" in why
                and f"ATTNPO_ALLOW_TARGETS={home} only" in why
            )
        for name in ("own", "kept", "quarter", "Rules", "Rules.one", "words"):
            assert import_target(f"my_parts.{name}", "function")[1] == "", name
        cfg = fit_with("~objective", "+objective={_target_:my_parts.Mine}")
        with pytest.raises(
            UserError, match=r"objective\._target_: .* my_parts\.Mine, which is defined in foreign_parts;"
        ):
            config.validate(cfg, complete=False)
        asked = ["weights=formula", "weights.function=my_parts.function"]
        with pytest.raises(
            UserError, match=r"weights\.function: .* my_parts\.function, which is defined in foreign_parts;"
        ):
            config.validate(fit_with("setting=real_smoke", *asked), complete=False)
        monkeypatch.setenv("ATTNPO_ALLOW_TARGETS", "my_parts,foreign_parts")
        config.validate(cfg, complete=False)
    finally:
        sys.modules.pop("my_parts", None)


def test_a_package_that_the_environment_names_may_be_used(foreign: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNPO_ALLOW_TARGETS", "elsewhere, foreign_parts")
    cfg = fit_with("~objective", "+objective={_target_:foreign_parts.Mine,limit:3}")
    assert config.instantiate(cfg.objective).limit == 3 and foreign.exists()
    config.validate(cfg, complete=False)
    foreign.unlink()
    for name in ("Loose", "function", "Other"):
        with pytest.raises(
            UserError, match=r"objective\._target_: expected a .*PreferenceObjective.*, got foreign_parts"
        ):
            config.validate(fit_with("~objective", f"+objective={{_target_:foreign_parts.{name}}}"), complete=False)
    assert not foreign.exists()


@pytest.mark.usefixtures("configs")
def test_plain_and_its_yaml_are_resolved() -> None:
    cfg = config.compose("fit", ["weights.scale=0.25", "+where=${cache_root:}/x"])
    values = config.to_container(cfg)
    assert values["beta"] == 0.25
    assert values["where"] == f"{config.cache_root()}/x"
    assert config.to_container(OmegaConf.create(config.to_yaml(values))) == values


def test_cache_root_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ATTNPO_CACHE", str(tmp_path))
    assert config.cache_root() == tmp_path
    monkeypatch.delenv("ATTNPO_CACHE")
    assert config.cache_root() == Path.home() / ".cache" / "attnpo"


# --------------------------------------------------------------------------------------------- command line

Main = Callable[[Fit], int | None]


def enter(main: Main, *argv: str, positional: str | None = None) -> int:
    return command_line.run_entry(
        main, "fit", list(argv), "Trains.", "python -m attnpo.fit seed=1", positional=positional
    )


def never(cfg: Fit) -> int:
    raise AssertionError(f"main was reached with {cfg}")


@pytest.mark.usefixtures("configs")
def test_help_lists_groups_and_the_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert enter(never, "--help") == 0
    shown = capsys.readouterr().out
    for part in (
        "usage: python -m attnpo.fit",
        "Trains.",
        "python -m attnpo.fit seed=1",
        "weights=attention | mixture",
    ):
        assert part in shown


@pytest.mark.usefixtures("configs")
def test_cfg_prints_the_resolved_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    assert enter(never, "weights.scale=0.5", "--cfg", "job") == 0
    shown = OmegaConf.create(capsys.readouterr().out)
    assert (shown.beta, shown.weights.scale, shown.seed) == (0.5, 0.5, 2)
    assert enter(never, "--cfg", "weights.sink") == 0
    assert capsys.readouterr().out == f"_target_: {HERE}.Sink\ntokens: 1\nend: zero\n"
    assert enter(never, "--cfg", "path") == 0
    assert capsys.readouterr().out == "None\n"
    assert enter(never, "--cfg", "nothing") == 2
    assert "keys of the configuration" not in capsys.readouterr().out


@pytest.mark.usefixtures("configs")
@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["weights.layer=2.5"], "error: weights.layer: expected int or str"),
        (["layer_sweep"], "error: 'layer_sweep': expected GROUP=OPTION or KEY=VALUE"),
        (["--bogus"], "error: unrecognized arguments: --bogus"),
        (["--config-dir", "nowhere"], "error: --config-dir nowhere"),
    ],
)
def test_errors_of_the_user_are_one_line(argv: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert enter(never, *argv) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith(expected)
    assert shown.out == ""


@pytest.mark.usefixtures("configs")
def test_exit_status(capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(cfg: Fit) -> int:
        raise KeyboardInterrupt

    def broken(cfg: Fit) -> int:
        raise RuntimeError("a fault of ours")

    assert enter(lambda cfg: None) == 0
    assert enter(lambda cfg: 1) == 1
    assert enter(interrupted) == 130
    assert capsys.readouterr().err == "interrupted\n"
    with pytest.raises(RuntimeError, match="a fault of ours"):
        enter(broken)
    assert enter(never, "weights.layer=???") == 2
    assert "weights.layer" in capsys.readouterr().err


@pytest.mark.usefixtures("configs")
def test_complete_says_when_nothing_may_be_missing(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["model=???"]
    assert (
        command_line.run_entry(lambda cfg: len(cfg.model) - 3, "fit", argv, "", "") == 0
    )  # main may still fill in texts
    assert command_line.run_entry(never, "fit", argv, "", "", complete=lambda cfg: cfg.path is None) == 2
    assert capsys.readouterr().err == "error: model: required; set model=VALUE\n"
    assert command_line.run_entry(never, "fit", ["weights.layer=???"], "", "") == 2  # nothing stands for a number
    assert capsys.readouterr().err == "error: weights.layer: required; set weights.layer=VALUE\n"


@pytest.mark.usefixtures("configs")
def test_a_file_called_like_an_override_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But where a command takes paths, as the folders of runs, a path may hold an equals sign."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "seed=7").touch()
    seen: list[Fit] = []
    assert enter(lambda cfg: seen.append(cfg) or 0, "seed=7") == 0 and seen[0].seed == 7


@pytest.mark.usefixtures("configs")
def test_positional_arguments_fill_their_key() -> None:
    seen = []
    assert enter(lambda cfg: seen.append(list(cfg.path)), "runs/a", "runs/b", "seed=3", positional="path") == 0
    assert seen == [["runs/a", "runs/b"]]


def test_multirun_expands_in_order(configs: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert config.expand_sweep(["seed=1,2", "beta=0.1", "weights=glob(*)"]) == [
        ["seed=1", "beta=0.1", "weights=attention"],
        ["seed=1", "beta=0.1", "weights=mixture"],
        ["seed=2", "beta=0.1", "weights=attention"],
        ["seed=2", "beta=0.1", "weights=mixture"],
    ]
    seen: list[tuple[int, float]] = []
    with caplog.at_level(logging.INFO):
        assert enter(lambda cfg: seen.append((cfg.seed, cfg.beta)), "-m", "seed=1,2", "weights.scale=3,4") == 0
    assert seen == [(1, 3), (1, 4), (2, 3), (2, 4)]
    assert "job 3 of 4: seed=2 weights.scale=3" in caplog.text


@pytest.mark.usefixtures("configs")
def test_multirun_goes_on_after_a_failure_and_names_it(capsys: pytest.CaptureFixture[str]) -> None:
    seen = []

    def main(cfg: Fit) -> int:
        seen.append(cfg.seed)
        if cfg.seed == 1:
            raise RuntimeError("out of luck")
        if cfg.seed == 2:
            raise UserError("no such file")
        return 0

    assert enter(main, "-m", "seed=1,2,3") == 1
    assert seen == [1, 2, 3]
    assert capsys.readouterr().err.endswith("error: 2 of 3 jobs failed:\n  seed=1\n  seed=2\n")


@pytest.mark.usefixtures("configs")
def test_multirun_checks_every_job_before_the_first_runs() -> None:
    assert enter(never, "-m", "weights.layer=1,2,3.5") == 2


@pytest.mark.usefixtures("configs")
def test_multirun_is_refused_with_several_processes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert enter(never, "-m", "seed=1,2") == 2
    assert "WORLD_SIZE is 2" in capsys.readouterr().err


@pytest.mark.usefixtures("configs")
def test_an_exception_with_an_exit_status_ends_the_command_with_it(capsys: pytest.CaptureFixture[str]) -> None:
    class Ended(Exception):
        exit_status = 75

    def main(cfg: Fit) -> int:
        raise Ended(f"ended at seed {cfg.seed}")

    assert enter(main, "seed=4") == 75
    assert capsys.readouterr().err == "ended at seed 4\n"
    assert enter(main, "-m", "seed=1,2") == 75, "the other jobs must not be started"
    assert capsys.readouterr().err == "ended at seed 1\n"


@pytest.mark.usefixtures("configs")
@pytest.mark.parametrize("module", ["peft", "wandb"])
def test_a_missing_package_is_one_line_with_what_to_install(
    module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, module, None)

    def imports(cfg: Fit) -> int:
        importlib.import_module(module)
        return 0

    def asks(cfg: Fit) -> int:
        raise ImportError(f"this needs `{module}`, which cannot be found")

    advice = {"peft": "it is part of the extra `lora`: pip install -e '.[lora]'", "wandb": "pip install wandb"}
    for main in (imports, asks):
        assert enter(main) == 2
        shown = capsys.readouterr().err
        assert shown.startswith(f"error: the package {module} is not installed") and shown.count("\n") == 1
        assert advice[module] in shown


@pytest.mark.usefixtures("configs")
def test_an_import_error_of_our_own_keeps_its_traceback() -> None:
    def main(cfg: Fit) -> int:
        importlib.import_module("attnpo.no_such_module")
        return 0

    with pytest.raises(ImportError, match="no_such_module"):
        enter(main)


def test_warnings_become_lines_but_those_for_library_authors_are_dropped(configs: Path) -> None:
    code = (
        "import warnings, sys; from pathlib import Path\n"
        "from attnpo.cli import entry as command_line; from attnpo.config import compose as config\n"
        "def main(cfg):\n"
        "    warnings.warn('first\\nsecond'); warnings.warn('old', FutureWarning)\n"
        f"config.CONFIG_DIR = Path({str(configs)!r})\n"
        "sys.exit(command_line.run_entry(main, 'fit', [], '', ''))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0
    first, *_, warning = done.stderr.splitlines()  # on a busy machine, that it is at work comes between
    assert first.endswith("checking the configuration") and "warning: UserWarning: first second (<string>:4)" in warning


# --------------------------------------------------------------------------------------------- the shipped folder


@pytest.mark.parametrize("group", sorted(config.list_groups()))
def test_a_wrong_option_of_any_group_names_the_nearest(group: str) -> None:
    option = max(config.list_groups()[group], key=len)
    root = next((root for root in roots() if group in groups_of(root)), None)
    if root is not None:
        with pytest.raises(UserError, match=re.escape(f"; did you mean {group}={option}?")):
            config.compose(root, whole(root, f"{group}={option[:-1]}"))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["+new.key=3"], "new: unknown key of attnpo.lab.studies.config.FitConfig; it has: data, model"),
        (["~seed"], "seed: required by FitConfig"),
        (["~weights"], "weights: required by FitConfig"),
        (["~weights._target_"], "weights: expected a component of type WeightSource (keys with _target_), got keys"),
        (
            ["weights=uniform", "weights._target_=attnpo.data.rules.AlignRules"],
            "weights._target_: expected a WeightSource, got attnpo.data.rules.AlignRules",
        ),
        (["seed=-1"], "seed: expected a whole number from 0 to 4294967295, got -1"),
        (["seeds=0"], "seeds: expected at least 1, or null"),
        (["name=[1]"], "name: expected str, got [1] (list)"),
        (["grid.lr=[a]"], "grid.lr.0: expected float, got 'a' (str)"),
        (["seed=${nowhere}"], "seed: Interpolation key 'nowhere' not found"),
        (
            ["experiment=none", "objective=dpo"],
            "objective DPO uses no token weights, so computing the weights of Attention would be",
        ),
    ],
)
def test_what_is_wrong_in_the_whole_is_one_line(overrides: list[str], message: str) -> None:
    with pytest.raises(UserError) as caught:
        config.validate(config.compose("fit", overrides), complete=False)
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)


IDLE = [
    (["weights=uniform", "experiment=none", "judge.dtype=bfloat16"], "judge.dtype", "needs no judge"),
    (
        ["weights=uniform", "experiment=none", "align.method=characters"],
        "align.method",
        "computed on the training tokens",
    ),
    (["grid.lr=[1.0e-3]"], "grid.lr", "study quickstart does not use it"),
    (["experiment=none", "seeds=3"], "seeds", "there is no study"),
    (["experiment=none", "grid.beta=[0.1]"], "grid.beta", "there is no study"),
    (["callbacks.checkpoints=false", "callbacks.monitor=val/x"], "callbacks.monitor", "callbacks.checkpoints=false"),
    (["callbacks.checkpoints=false", "callbacks.save_every=5"], "callbacks.save_every", "callbacks.checkpoints=false"),
    (["callbacks=none", "callbacks.export_dtype=float16"], "callbacks.export_dtype", "callbacks.checkpoints=false"),
    (["callbacks.samples=0", "callbacks.sample_tokens=9"], "callbacks.sample_tokens", "callbacks.samples=0"),
    (["trainer.max_steps=20", "trainer.max_epochs=3"], "trainer.max_epochs", "trainer.max_steps=20 ends the run"),
    (["optimizer.decay_all=true"], "optimizer.decay_all", "optimizer.weight_decay=0"),
    (["optimizer.warmup=0", "optimizer.warmup_from=zero"], "optimizer.warmup_from", "optimizer.warmup=0"),
    (["optimizer.final_share=0.1"], "optimizer.final_share", "optimizer.schedule=constant"),  # the testbed's
    (["callbacks.report=false", "callbacks.heat_maps=9"], "callbacks.heat_maps", "callbacks.report=false"),
    (["model.revision=v2"], "model.revision", "a folder on this machine"),
    (["judge.chat_template=x.jinja"], "judge.chat_template", "judge.path=null"),
]


@pytest.mark.parametrize(("overrides", "key", "reason"), IDLE)
def test_an_override_without_effect_is_noticed(overrides: list[str], key: str, reason: str) -> None:
    found = config.parse(config.compose("fit", overrides)).unused_overrides()
    assert [override.partition("=")[0] for override in found] == [key]
    assert all(reason in why for why in found.values())


@pytest.mark.parametrize(
    "overrides",
    [
        ["judge.dtype=bfloat16", "align.method=characters", "weights.layer=2"],
        ["weights=uniform", "experiment=none", "objective.beta=1", "lengths.max_length=300"],
        ["experiment=layer_sweep", "grid.lr=[1.0e-3]", "seeds=2", "judge.verdict=false"],
        ["callbacks.report=false", "callbacks.heat_maps=9", "logger=wandb"],
        ["callbacks.save_every=5", "callbacks.export_dtype=float16", "trainer.max_epochs=3"],
        ["callbacks.checkpoints=false", "callbacks.export_dtype=float16", "study.benchmarks=[testbed]"],
        ["optimizer.weight_decay=0.1", "optimizer.decay_all=true", "optimizer.warmup_from=zero"],
        ["optimizer.schedule=cosine", "optimizer.final_share=0.1", "trainer.max_steps=20"],
        [
            "setting=real_smoke",
            "model.path=organisation/name",
            "model.revision=v2",
            "judge.path=a/b",
            "judge.revision=c",
        ],
    ],
)
def test_an_override_that_some_part_reads_is_not(overrides: list[str]) -> None:
    assert config.parse(config.compose("fit", overrides)).unused_overrides() == {}


def test_a_grid_is_warned_of_what_has_an_effect_in_none_of_its_jobs(caplog: pytest.LogCaptureFixture) -> None:
    def warned(*argv: str) -> list[str]:
        caplog.clear()
        assert command_line.run_entry(lambda cfg: 0, "fit", ["-m", "experiment=none", *argv], "", "") == 0
        return [record.getMessage() for record in caplog.records if "no effect" in record.getMessage()]

    assert warned("weights=uniform,attention", "judge.dtype=bfloat16") == []
    assert warned("weights=uniform", "seed=1,2", "judge.dtype=bfloat16") == [
        "warning: judge.dtype has no effect: weights are Uniform, which needs no judge"
    ]


def shipped_options() -> list[tuple[str, str]]:
    return [(group, option) for group, options in config.list_groups().items() for option in options]


def roots() -> list[str]:
    return sorted(path.stem for path in config.CONFIG_DIR.glob("*.yaml"))


@cache
def groups_of(root: str) -> set[str]:
    """The groups that a root's defaults list names."""
    defaults = OmegaConf.load(config.CONFIG_DIR / f"{root}.yaml").get("defaults", [])
    return {str(key).removeprefix("optional ") for item in defaults if isinstance(item, DictConfig) for key in item}


def composing(group: str, option: str) -> list[tuple[str, str]]:
    """The roots an option can be composed in, with the override; one with ``+`` in all where none lists the group."""
    found = [(root, f"{group}={option}") for root in roots() if group in groups_of(root)]
    return found or [(root, f"+{group}={option}") for root in roots()]


# A benchmark has no default: the testbed's stands where another group is meant.
MANDATORY = {"evaluate": "benchmark=testbed"}


def whole(root: str, *overrides: str) -> list[str]:
    """The overrides, with what a root has to be given before them."""
    first = MANDATORY.get(root, "")
    named = any(override.partition("=")[0] == first.partition("=")[0] for override in overrides)
    return [*overrides] if named or not first else [first, *overrides]


def test_every_shipped_configuration_composes_and_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "find_spec", lambda package: package)  # peft and torchao are extras
    files = [path for path in config.CONFIG_DIR.rglob("*") if path.suffix in (".yaml", ".yml")]
    assert files
    checked = set()
    for root in roots():
        config.validate(config.compose(root, whole(root)), complete=False)
        checked.add(config.CONFIG_DIR / f"{root}.yaml")
    for group, option in shipped_options():
        for root, override in composing(group, option):
            config.validate(config.compose(root, whole(root, *override.split())), complete=False)
        checked.add(config.CONFIG_DIR / group / f"{option}.yaml")
    checked |= {path for path in files if path.name.startswith("_")}  # what options have in common
    assert checked == set(files)


@pytest.mark.parametrize(
    ("overrides", "key"),
    [(["weights=true_importance"], "weights.grammar"), (["verbalizer=testbed"], "verbalizer.known_parts.grammar")],
)
def test_options_of_the_testbed_say_what_they_lack_elsewhere(overrides: list[str], key: str) -> None:
    cfg = config.compose("fit", ["setting=llama3_8b_instruct", *overrides])
    with pytest.raises(UserError) as caught:
        config.validate(cfg, complete=False)
    assert str(caught.value) == (
        f"{key} (read from prepare.grammar): `prepare` is null in this setting: set setting=testbed, or "
        f"choose another option of `{key.partition('.')[0]}`"
    )


def test_shipped_files_name_no_place_of_this_machine() -> None:
    for path in config.CONFIG_DIR.rglob("*"):
        if path.is_file():
            text = path.read_text(encoding="utf-8")
            assert str(Path.home()) + os.sep not in text and str(ROOT.parent) + os.sep not in text, path


@pytest.mark.parametrize("name", ["", ".", "..", "a/../b", "/tmp/elsewhere"])
def test_a_name_is_a_folder_below_output(name: str) -> None:
    with pytest.raises(UserError, match="name: expected the name of a folder below `output`"):
        config.validate(config.compose("fit", [f"name='{name}'"]), complete=False)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("reference=chached", "reference=chached: expected one of live, cached, first_epoch, adapter_off"),
        ("reference=adapter_off", "reference=adapter_off needs a new adapter"),
        ("optimizer=adamw8bit", r"needs the package torchao, which is not installed: pip install 'attnpo\[opt8bit\]'"),
    ],
)
def test_what_cannot_be_trained_is_refused_with_the_configuration(
    override: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(UserError, match=message):
        config.validate(config.compose("fit", [override]), complete=False)


@pytest.mark.parametrize(
    "words",
    [
        ["weights=attention", "seed=3", "weights.layer=2"],
        ["weights.layer=2", "weights=attention", "transform=shuffled", "optimizer.lr=1e-3"],
        ["setting=real_smoke", "model.path='a, b'", "+data.columns.new={a: 1}", "++seed=4"],
        ["~callbacks.samples", "experiment=layer_sweep", "study.sources=[attention,decay]", "name=${seed}"],
        ["weights@weights.inner=attention", "seed=1", "seed=2", "data.path=null"],
        ["name=[1"],
        ["seed=1,2"],
        ["seed@other=1"],
        ["~nothing", "seed=1"],
        ["+seed=4"],
        ["weights.layr=2", "seed=1"],
        ["weights=uniform", "weights.layer=1"],
        ["weights={layer: 2}", "seed=1"],
        ["objective=dp", "seed=1"],
        ["transform=[shuffled]", "seed=1"],
        ["hydra.run.dir=x", "seed=1"],
        ["composed.config_dir=x", "seed=1"],
    ],
    ids=" ".join,
)
def test_choices_and_values_apart_compose_as_hydra_composes_the_whole(words: list[str]) -> None:
    """The same tree in the same order, or the same words about what is wrong; twice, since the choices are kept."""

    def outcome(compose: Callable[..., DictConfig]) -> tuple[str, bool]:
        try:
            cfg = compose("fit", words, None)
        except UserError as error:
            return str(error), False
        return OmegaConf.to_yaml(cfg), bool(OmegaConf.is_struct(cfg))

    expected = outcome(config._compose)
    assert outcome(config.compose) == expected
    assert outcome(config.compose) == expected


@pytest.fixture
def compositions(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Collects the overrides of each composition that Hydra is asked for."""
    calls: list[str] = []
    whole = config._compose

    def counting(name: str, overrides: Sequence[str], folder: Path | None) -> DictConfig:
        calls.append(" ".join(overrides))
        return whole(name, overrides, folder)

    monkeypatch.setattr(config, "_compose", counting)
    monkeypatch.setattr(config, "_composed", {})
    return calls


def test_points_of_the_same_choices_ask_hydra_for_one_composition(compositions: list[str]) -> None:
    for seed in range(3):
        cfg = config.compose("fit", ["weights=attention", f"seed={seed}", "name=a"])
        assert (cfg.seed, cfg.composed.overrides[1]) == (seed, f"seed={seed}")
    assert compositions == ["weights=attention"]


def test_files_are_composed_once_and_again_when_they_change(compositions: list[str], tmp_path: Path) -> None:
    """What a composition does to its copy stays there, and an edit between two compositions is seen."""
    file = tmp_path / "objective" / "mine.yaml"
    file.parent.mkdir()
    file.write_text("defaults:\n  - dpo\nbeta: 0.25\n", encoding="utf-8")
    for words in (["objective=mine"], ["objective=mine", "seed=3"]):
        first = config.compose("fit", words, tmp_path)
        assert first.objective.beta == 0.25
        first.objective.beta = 7
        again = config.compose("fit", words, tmp_path)
        assert again.objective.beta == 0.25 and OmegaConf.is_struct(again)
    assert compositions == ["objective=mine"]
    file.write_text("defaults:\n  - dpo\nbeta: 0.125\n", encoding="utf-8")
    assert config.compose("fit", ["objective=mine"], tmp_path).objective.beta == 0.125
    assert compositions == ["objective=mine"] * 2
