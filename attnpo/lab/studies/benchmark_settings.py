"""Composes a study's evaluation configs and checks them before training starts."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from omegaconf import OmegaConf

from attnpo.config.compose import compose, list_groups, parse
from attnpo.config.reader import did_you_mean
from attnpo.evaluation.base import Benchmark
from attnpo.evaluation.evaluate_config import EvaluateConfig
from attnpo.evaluation.implicit_reward import ImplicitReward
from attnpo.lab.studies.study import ALL, Study, format_value
from attnpo.models.loading import weights_fingerprint
from attnpo.models.spec import ModelSpec
from attnpo.schema import UserError
from attnpo.system.files import Json

OF_BASE = "BASE"
"""Placeholder in ``study.evaluate`` for the path of a row's base model, which depends on its world and seed."""
GRAMMAR = "benchmark.grammar"


@dataclass(frozen=True)
class EvaluationConfigs:
    """Composes a study's evaluation configs, which all use the same ``accelerator``.

    ``config_dir``: folder with the user's own configs. ``grammar``: grammar of the study's own world, if it has one;
    otherwise empty.
    """

    study: Study
    config_dir: Path | None
    accelerator: str
    grammar: Mapping[str, Json]

    def compose_config(
        self,
        benchmark: str,
        model: ModelSpec,
        base: str | None = None,
        grammar: Mapping[str, Json] | None = None,
        **named: str,
    ) -> EvaluateConfig:
        """Composes the ``attnpo.evaluate`` config for one model. ``named``: values of ``label`` and ``output``.

        ``grammar``: grammar of the model's world, for benchmarks that need one; a grammar in ``study.evaluate`` takes
        precedence.

        Raises:
            UserError: the config is invalid.
        """
        given = _evaluation_settings(self.study, benchmark)
        values = {key: base if value == OF_BASE and base is not None else value for key, value in given.items()}
        overrides = [f"benchmark={benchmark}", *(f"{key}={format_value(value)}" for key, value in values.items())]
        try:
            raw = compose("evaluate", overrides, self.config_dir)
            own = grammar if grammar and OmegaConf.select(raw, GRAMMAR) is not None else {}
            found: dict[str, Json] = {f"{GRAMMAR}.{key}": value for key, value in own.items()}
            found |= {"trainer.accelerator": self.accelerator, "model.path": model.path, **named}
            for key, value in found.items():
                if key not in given:
                    OmegaConf.update(raw, key, value)
            made: EvaluateConfig = parse(raw, complete=True).as_type(EvaluateConfig)
        except UserError as problem:
            raise UserError(_explain_error(self.study, benchmark, problem)) from problem
        kwargs = {**(made.model.chat_template_kwargs or {}), **(model.chat_template_kwargs or {})}
        for name in ("revision", "chat_template", "fallback_template", "fold_system"):
            made = made.with_value(f"model.{name}", getattr(model, name) or getattr(made.model, name))
        return made.with_value("model.chat_template_kwargs", cast(dict[str, Json], kwargs) or None)


def _evaluation_settings(study: Study, benchmark: str) -> dict[str, object]:
    return {**(study.evaluate.get(ALL) or {}), **(study.evaluate.get(benchmark) or {})}


def _explain_error(study: Study, benchmark: str, problem: Exception) -> str:
    return (
        f"study {study.name}, benchmark {benchmark}: {problem}; set keys of this benchmark with "
        f"'study.evaluate.{benchmark}={{KEY:VALUE}}', or use study.evaluate.{ALL} for every benchmark"
    )


def prepared_grammar(prepare: Json) -> Mapping[str, Json]:
    """Returns the grammar from a ``prepare`` config node; empty if it has none."""
    grammar = prepare.get("grammar") if isinstance(prepare, dict) else None
    return grammar if isinstance(grammar, dict) else {}


# ------------------------------------------------------------------------------------------------ before training


def check_benchmarks(evaluations: EvaluationConfigs, base: ModelSpec | None) -> None:
    """Checks a study's benchmarks, so that errors surface before training starts.

    ``base``: model that training starts from; if None (not built yet), settings that refer to it are not checked.

    Raises:
        UserError: unknown benchmark or key, missing data, a grader without its API key or package, a cost limit
            without a price, or an unreadable published model.
    """
    study = evaluations.study
    known_names = list_groups(evaluations.config_dir)["benchmark"]
    for name in study.benchmarks:
        if name not in known_names:
            raise UserError(
                f"study.benchmarks has {name}, which is not an option of the config group benchmark"
                f"{did_you_mean(name, known_names)} The options are: {', '.join(known_names)}"
            )
        unknown = [key for key, value in _evaluation_settings(study, name).items() if base is None and value == OF_BASE]
        known = base or ModelSpec(OF_BASE)
        made = evaluations.compose_config(name, known, known.path, evaluations.grammar)
        try:
            if isinstance(made.benchmark, Benchmark):
                if made.limits.dry_run:
                    raise UserError(
                        "limits.dry_run=true would leave the study without scores: remove it; a study always logs "
                        "calls, tokens and cost before it trains"
                    )
                made.benchmark.questions()
                made.limits.check_price(made.grader)
                if not any(key.startswith("grader.") for key in unknown):
                    made.grader.check_ready()
            if isinstance(made.benchmark, ImplicitReward):
                made.benchmark.require_paths()
            if not unknown:
                made.benchmark.fingerprint()
        except (UserError, ImportError) as problem:
            raise UserError(_explain_error(study, name, problem)) from problem
    for path in study.published:
        try:
            weights_fingerprint(path)
        except UserError as problem:
            raise UserError(f"study.published has {path}, which cannot be read: {problem}") from problem
