"""Every number of every component: infinite, not a number, huge or negative is refused where it means nothing."""

import importlib
import math
from collections.abc import Iterator
from typing import Any, NamedTuple, get_args, get_type_hints

import pytest
from omegaconf import DictConfig, OmegaConf

from attnpo.config import compose as config
from attnpo.schema import UserError

REAL = "setting=real_smoke"
TRANSFORMS = (
    "cross_pair inverse mixture one_side position_profile sharpness shuffled tail_cut token_profile uniform_on_support"
)
# Between them they name every component that has a number.
CONFIGS = [
    ("fit", ["setting=testbed"]),
    ("fit", [REAL, "model=qlora", "weights=verbalized", "logger=wandb", "objective=simpo"]),
    ("fit", [REAL, "weights=rollout", "objective=cpo"]),
    ("fit", [REAL, "weights=transport", "objective=otpo"]),
    ("fit", [REAL, "weights=gradient", "objective=tidpo"]),
    ("fit", ["experiment=faithfulness", f"transform=[{TRANSFORMS.replace(' ', ',')}]"]),
    *(("fit", [REAL, f"objective={name}"]) for name in ("ipo", "kto", "orpo", "rdpo", "rrhf", "slic_hf", "tdpo2")),
    ("generate", []),
]
# Seeds that are digested with a pair's id or given to torch, where any whole number is as good; layers are counted
# from 1, which is told when the judge's depth is known; -1 steps leave it to the epochs.
NEGATIVE = {"seed", "layer"}


class Number(NamedTuple):
    """A number of a component: the component's node, its key there, its type."""

    node: DictConfig
    key: str
    kind: type


def numbers(node: DictConfig) -> Iterator[Number]:
    if "_target_" in node and node._key() is not None:
        module, _, name = str(node._target_).rpartition(".")
        for key, hint in get_type_hints(getattr(importlib.import_module(module), name)).items():
            kinds = {hint, *get_args(hint)}
            if key in node and kinds & {int, float}:
                yield Number(node, key, float if float in kinds else int)
    for key in node:
        if not OmegaConf.is_missing(node, key) and isinstance(node[key], DictConfig):
            yield from numbers(node[key])


@pytest.fixture(scope="module")
def every() -> dict[tuple[str, str], Number]:
    """Each number of each component once."""
    found: dict[tuple[str, str], Number] = {}
    for entry, overrides in CONFIGS:
        for number in numbers(config.compose(entry, ["model.path=x", "data.path=x", *overrides])):
            found.setdefault((str(number.node._target_), number.key), number)
    return found


def taken(number: Number, value: Any) -> bool:
    """Whether the component is made with that value; anything but a UserError that names the key is an error."""
    before = number.node[number.key]
    number.node[number.key] = value
    try:
        config.instantiate(number.node)
    except UserError as problem:
        assert number.key in str(problem) and "\n" not in str(problem)
        return False
    finally:
        number.node[number.key] = before
    return True


def test_the_numbers_are_found(every: dict[tuple[str, str], Number]) -> None:
    assert len(every) > 90
    assert sum(number.kind is float for number in every.values()) > 35


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 10**400], ids=["inf", "-inf", "nan", "10**400"])
def test_no_number_is_without_bounds(every: dict[tuple[str, str], Number], value: float) -> None:
    assert [place for place, number in every.items() if taken(number, value)] == []


def test_no_whole_number_is_larger_than_a_tensor_holds(every: dict[tuple[str, str], Number]) -> None:
    assert [place for place, number in every.items() if number.kind is int and taken(number, 2**63)] == []


def test_no_number_below_zero_means_anything(every: dict[tuple[str, str], Number]) -> None:
    found = [place for place, number in every.items() if place[1] not in NEGATIVE and taken(number, -5)]
    assert found == []
