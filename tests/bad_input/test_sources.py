"""Weight sources that nothing reads, that are asked for what is not there, or that give what is no weight."""

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from attnpo.lab.testbed.pretrain import new_model
from attnpo.lab.testbed.tokenizer import build_tokenizer
from attnpo.schema import SIDES, PairWeights, PreferencePair, TokenWeights
from attnpo.weights.base import TextSource
from attnpo.weights.score_parser import parse_scores
from attnpo.weights.sources.attention import Attention
from tests.bad_input.attempts import Attempts
from tests.bad_input.conftest import Record
from tests.run.worlds import GRAMMAR, RECIPE, TRAIN
from tests.text.test_score_answers import MALFORMED, RESPONSE

NOT_STARTED = "run not started"
NO_DATA_READ = "data.path=nowhere"

# ------------------------------------------------------------------------------------------------ read by nothing


@pytest.mark.parametrize("source", ["attention", "rollout", "verbalized", "true_importance"])
def test_weights_of_an_objective_that_reads_none(attempts: Attempts, record: Record, source: str) -> None:
    """Refused with the configuration: no model folder is looked at."""
    world = attempts.on(model=attempts.folder / "nowhere")
    overrides = [f"weights={source}", "objective=dpo", NO_DATA_READ, "prepare=testbed"]
    answer = attempts.fit(*overrides, world=world)
    message = answer.refused()
    assert message.startswith("objective DPO uses no token weights, so computing the weights of ") and answer.log == []
    assert "set weights=uniform, or an objective with token weights (objective=twdpo)" in message
    record(f"weights={source} objective=dpo", message, NOT_STARTED)


# ------------------------------------------------------------------------------------------------ layers, heads, judges

# overrides -> what the message must say; no data are read where they name none
ASKED: dict[tuple[str, ...], tuple[str, ...]] = {
    ("weights.layers=[1,1]", NO_DATA_READ): ("weights.layers: expected each layer once, got 1 twice",),
    ("weights.layers=[1/2,1/2]", NO_DATA_READ): ("weights.layers: expected each layer once, got 1/2 twice",),
    ("weights.layers=[1,3]", NO_DATA_READ): ("weights.layers: expected a whole number from 1 to 2",),
    ("weights.layers=[1,auto]", NO_DATA_READ): ("got 'auto'; auto is allowed only for weights.layer of a run",),
    ("weights.layer=auto", "weights.layers=[1,2]", NO_DATA_READ): (
        "weights.layer=auto searches for one layer, but weights.layers=[1, 2] names the layers to read",
    ),
    ("weights.heads=[3]",): ("weights.heads: expected query heads from 1 to 2 for this judge, got 3 in [3]",),
    ("weights.heads=[0]", NO_DATA_READ): ("weights.heads: expected distinct query heads numbered from 1", "got [0]"),
    ("weights.heads=[1,1]", NO_DATA_READ): ("weights.heads: expected distinct query heads numbered from 1",),
    ("judge=other", NO_DATA_READ): ("judge=other needs a second model", "set other_judge.path=FOLDER_OR_HUB_NAME"),
    ("judge.path=FOREIGN", NO_DATA_READ): (
        "has a different vocabulary from ",
        "so token ids cannot be matched: set align.method=characters (and objective.length_from=train)",
    ),
    ("weights=verbalized", "verbalizer.template_file=nope.txt", NO_DATA_READ): (
        "verbalizer.template_file=nope.txt: no such file",
    ),
    ("weights=verbalized", "verbalizer.system_file=nope.txt", NO_DATA_READ): (
        "verbalizer.system_file=nope.txt: no such file",
    ),
    ("weights=verbalized", "verbalizer.path=./nowhere", NO_DATA_READ): (
        "no folder at './nowhere' to load the tokenizer from",
        "give an existing folder or a hub name",
    ),
    ("weights=verbalized", "verbalizer.max_length=9", NO_DATA_READ): (
        "verbalizer.sampling.max_new_tokens=2048 leaves no room for a prompt within 9 tokens (verbalizer.max_length)",
    ),
}


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with another vocabulary than the world's."""
    folder = tmp_path_factory.mktemp("foreign")
    tokenizer = build_tokenizer(GRAMMAR, 250)
    new_model(RECIPE, tokenizer, seed=8).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("overrides", ASKED, ids=" ".join)
def test_what_is_not_there_is_named(
    attempts: Attempts, record: Record, foreign: Path, overrides: tuple[str, ...]
) -> None:
    given = [override.replace("FOREIGN", str(foreign)) for override in overrides]
    message = attempts.fit(*given).refused()
    for part in ASKED[overrides]:
        assert part in message, message
    case = " ".join(override for override in overrides if override != NO_DATA_READ)
    record(case, message.replace(str(foreign), "FOREIGN"), NOT_STARTED)


# ------------------------------------------------------------------------------------------------ studies


def test_a_study_whose_layers_repeat(attempts: Attempts, record: Record) -> None:
    message = attempts.fit("experiment=layer_sweep", "study.layers=[2,1,2]", NO_DATA_READ).refused()
    assert message.endswith("study.layers lists 2 more than once: list each layer once")
    record("study.layers=[2,1,2]", message, NOT_STARTED)


LAUNCHERS = {
    "torchrun": {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "TORCHELASTIC_RUN_ID": "none"},
    "SLURM (srun or sbatch --ntasks)": {"SLURM_NTASKS": "2", "SLURM_PROCID": "0"},
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_study_in_several_processes(
    attempts: Attempts, record: Record, launcher: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "TORCHELASTIC_RUN_ID", "SLURM_NTASKS", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in LAUNCHERS[launcher].items():
        monkeypatch.setenv(name, value)
    message = attempts.fit("experiment=layer_sweep", NO_DATA_READ).refused()
    assert f"was started with 2 processes by {launcher}, but a study starts its own processes" in message
    record(f"a study in two processes: {launcher}", message.replace(str(attempts.folder.parent), "TMP"), NOT_STARTED)


# ------------------------------------------------------------------------------------------------ numbers that are none


@dataclass(frozen=True)
class Spoilt(Attention):
    """Attention with other numbers on the chosen response of one pair."""

    value: str = "0.0"
    pair: str = ""

    def capture(self, pairs: Any, reader: object, layers: Any) -> list[PairWeights]:
        """The rows of attention, those of one response replaced."""
        return [self._spoil(found) for found in super().capture(pairs, reader, layers)]

    def _spoil(self, found: PairWeights) -> PairWeights:
        if not found.pair_id.startswith(self.pair):
            return found
        return replace(
            found, rounds=tuple(replace(item, chosen=_filled(item.chosen, float(self.value))) for item in found.rounds)
        )


def _filled(row: TokenWeights, value: float) -> TokenWeights:
    return replace(row, weights=torch.full_like(row.weights, value))


@dataclass(frozen=True)
class Native(TextSource):
    """Weights of the training tokens, the same number on each of them in the chosen response of one pair."""

    value: str = "0.0"
    pair: str = ""

    def weigh(self, pair: PreferencePair, side: str, encoded: Any) -> Tensor:
        """1/|y|, or the number."""
        count = len(encoded.response_ids)
        spoilt = pair.pair_id.startswith(self.pair) and side == SIDES[0]
        return torch.full((count,), float(self.value) if spoilt else 1 / count)


NONE = {"nan": "got nan", "-0.5": "-0.5", "0.0": "all"}


@pytest.mark.parametrize("value", NONE)
@pytest.mark.parametrize("kind", ["Spoilt", "Native"])
def test_a_source_that_gives_no_weights_names_the_pair(
    attempts: Attempts, record: Record, kind: str, value: str
) -> None:
    """All-zero attention says nothing about its response and becomes uniform, counted; the others end the run."""
    row = attempts.rows[3]
    pair = PreferencePair.from_texts(row["chosen"][:-1], row["chosen"][-1]["content"], row["rejected"][-1]["content"])
    chosen = ["~weights", f"+weights={{_target_:{__name__}.{kind},value:{value},pair:{pair.pair_id}}}"]
    answer = attempts.fit(*chosen)
    case = f"{'captured' if kind == 'Spoilt' else 'native'} weights of {value} in one response"
    if kind == "Spoilt" and value == "0.0":
        message = answer.noted("all raw weights of the chosen response are 0: uniform weights are used")
        assert f": 1 of {TRAIN} (" in message and pair.pair_id[:8] in message
        record(case, message, "one response's weights, counted")
        return
    message = answer.refused()
    assert message.startswith(f"pair {pair.pair_id}, chosen: expected ") or (
        message.startswith(f"pair {pair.pair_id}, chosen: Native is declared ")
    )
    assert NONE[value] in message
    record(case, message.replace(__name__, "tests"), NOT_STARTED)


# ------------------------------------------------------------------------------------------------ answers in words


def test_malformed_answers_are_read_as_far_as_they_go(record: Record) -> None:
    """The answers themselves, and what is read of each, stand in tests/text/test_score_answers.py."""
    problems: Counter[str] = Counter()
    usable = 0
    for _, answer, _, _ in MALFORMED:
        found = parse_scores(answer, RESPONSE)
        problems.update(found.problems)
        usable += bool(found.spans)
    assert problems == sum((Counter(expected) for *_, expected in MALFORMED), Counter())
    assert len(MALFORMED) >= 30 and 0 < usable < len(MALFORMED)
    message = "; ".join(f"{reason}: {count}" for reason, count in sorted(problems.items()))
    record(
        f"{len(MALFORMED)} malformed answers in words (tests/text/test_score_answers.py)",
        f"{usable} contain a usable part; {message}",
        "what cannot be read, counted",
    )
