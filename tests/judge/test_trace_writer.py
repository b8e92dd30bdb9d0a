"""Traces token by token: where they end, and that a batch, its size and its order decide nothing."""

from typing import Any

import pytest
from transformers import AutoTokenizer

from attnpo.judge.base import WrittenTrace
from attnpo.judge.traces import TraceWriter
from attnpo.schema import Sampling
from tests.run.worlds import build_world

MOST = 12
PROMPTS = [[2, 3, 30, 31, 4], [2, 3, 40, 4], [2, 3, 50, 51, 52, 53, 4]]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM

    world = build_world(tmp_path_factory.mktemp("traces"), train=1, val=1)
    return AutoModelForCausalLM.from_pretrained(world.model), AutoTokenizer.from_pretrained(world.model)


def written(
    tiny: tuple[Any, Any], until: str, budget: int = 4096, end_ids: tuple[int, ...] = (), **sampling: Any
) -> list[WrittenTrace]:
    decoding = Sampling(max_new_tokens=MOST, **{"temperature": 0.0, **sampling})
    writer = TraceWriter(*tiny, decoding, until, token_budget=budget, end_ids=end_ids)
    found: dict[int, WrittenTrace] = {}
    for batch in writer.write(PROMPTS):
        found |= batch
    return [found[place] for place in range(len(PROMPTS))]


def test_a_trace_ends_with_a_text_of_several_tokens(tiny: tuple[Any, Any]) -> None:
    """The text is that of two tokens of one trace; it ends with the second, and the others go on."""
    whole = written(tiny, "never written")
    assert not any(trace.closed for trace in whole)
    ids = whole[0].ids
    place = next(
        place for place in range(1, len(ids) - 2) if ids[place] != ids[place - 1] and ids[place] != ids[place + 1]
    )
    until = tiny[1].decode(ids[place : place + 2])
    ended = written(tiny, until)
    assert ended[0].closed and ended[0].ids == ids[: place + 2] and ended[0].text.endswith(until)
    for one, other in zip(ended[1:], whole[1:], strict=True):
        assert one == other or (one.closed and one.ids == other.ids[: len(one.ids)])


def test_a_turn_that_the_model_ends_is_a_trace_without_its_end(tiny: tuple[Any, Any]) -> None:
    whole = written(tiny, "never written")
    last = whole[1].ids[3]
    stopped = written(tiny, "never written", end_ids=(last,))[1]
    first = whole[1].ids.index(last)
    assert stopped.ids == whole[1].ids[:first] and not stopped.closed
    spelled = written(tiny, tiny[1].decode([last]), end_ids=(last,))[1]
    assert spelled.ids == whole[1].ids[: first + 1] and spelled.closed, "the text that ends a trace is kept"


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 4}])
def test_batches_decide_nothing(tiny: tuple[Any, Any], sampling: dict[str, Any]) -> None:
    together = written(tiny, "never written", **sampling)
    assert together == written(tiny, "never written", budget=1, **sampling)
    assert (together != written(tiny, "never written", **{**sampling, "seed": 5})) == bool(sampling)
