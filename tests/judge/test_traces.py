"""A judge that thinks first: its prompts with room for a trace, and traces token by token."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from attnpo.judge.base import ReasoningTrace
from attnpo.judge.prompts import JudgePromptBuilder
from attnpo.judge.settings import Assembly, JudgeRules, TraceRules
from attnpo.judge.traces import TraceGenerator
from attnpo.schema import Message, PreferencePair, Sampling, UserError
from tests.run.worlds import build_world
from tests.text.formats import CHATML, Formats

WORDING = "Which is better?\n{question}\n### A\n{answer_a}\n### B\n{answer_b}\n###\nA or B?"
PAIR = PreferencePair.from_texts([Message(role="user", content="Which?")], "the first one", "the second one, longer")
THINKS = TraceRules(40)
PREFILL = "\n\nThe better letter:"


@pytest.fixture
def rules(tmp_path: Path) -> JudgeRules:
    path = tmp_path / "wording.txt"
    path.write_text(WORDING)
    return JudgeRules(str(path))


@pytest.mark.parametrize("name", ["golden", "gpt2_chatml", "mistral"])
@pytest.mark.parametrize("assembly", list(Assembly))
def test_the_prompt_is_that_without_a_prefill_which_comes_after_the_trace(
    formats: Formats, rules: JudgeRules, name: str, assembly: Assembly
) -> None:
    chat, bare = formats(name), replace(rules, assembly=assembly)
    prompts = JudgePromptBuilder(replace(bare, trace=THINKS, prefill=PREFILL), chat)
    assert prompts.build(PAIR) == JudgePromptBuilder(bare, chat).build(PAIR)
    after = prompts.trace_suffix
    assert after is not None
    assert chat.tokenizer.decode(after.closing).strip() == "</think>"
    assert chat.tokenizer.decode([*after.closing, *after.prefill]).strip() == f"</think>{PREFILL}"
    assert [chat.tokenizer.decode([label]).strip() for label in prompts.label_ids] == ["A", "B"]
    assert JudgePromptBuilder(bare, chat).trace_suffix is None


@pytest.mark.parametrize("assembly", list(Assembly))
def test_max_length_holds_for_prompt_trace_and_prefill(formats: Formats, rules: JudgeRules, assembly: Assembly) -> None:
    long = PreferencePair.from_texts([Message(role="user", content="why " * 60)], "yes " * 80, "no " * 80)
    cuts = replace(rules, assembly=assembly, max_length=200, trace=THINKS, prefill=PREFILL)
    prompts = JudgePromptBuilder(cuts, formats("gpt2_chatml"))
    assert prompts.trace_suffix is not None
    free = THINKS.max_new_tokens + prompts.trace_suffix.token_count
    rounds = prompts.build(long)
    assert 200 - 8 < max(len(prompt.input_ids) for prompt in rounds) + free < 200
    assert all(prompt.cut for prompt in rounds)
    with pytest.raises(UserError, match=r"judge\.max_length is 60, but .* and judge\.trace reserves \d+: raise it"):
        JudgePromptBuilder(replace(cuts, max_length=60), formats("gpt2_chatml"))


def test_what_closes_a_trace_by_itself_is_refused(formats: Formats, rules: JudgeRules) -> None:
    off = CHATML.replace(
        "<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<think>\n\n</think>\n\n{% endif %}"
    )
    on = CHATML.replace("<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<think>\n{% endif %}")
    assert off != CHATML != on
    thinks = replace(rules, trace=THINKS)
    JudgePromptBuilder(thinks, formats("gpt2_chatml", on))
    with pytest.raises(UserError, match=r"prompt ends with .*judge\.trace\.until='</think>'.*chat_template_kwa"):
        JudgePromptBuilder(thinks, formats("gpt2_chatml", off))
    plain = Path(rules.template_file).with_name("plain.txt")
    plain.write_text(f"{WORDING}</think>\n")
    with pytest.raises(UserError, match=r"judge\.trace: the judge's prompt ends with"):
        JudgePromptBuilder(replace(thinks, template_file=str(plain), chat=False), formats("gpt2_plain"))
    plain.write_text(f"Think, then write </think>.\n{WORDING}")
    JudgePromptBuilder(replace(thinks, template_file=str(plain)), formats("gpt2_plain"))
    with pytest.raises(UserError, match=r"judge\.prefill='</think> So:' contains the end of a trace"):
        JudgePromptBuilder(replace(thinks, prefill="</think> So:"), formats("gpt2_chatml"))


def test_settings_and_what_identifies_them() -> None:
    """Greedy decoding draws nothing, so what would be drawn with makes no other trace."""
    assert TraceRules(8).fingerprint() == TraceRules(8, seed=3, top_p=0.5).fingerprint()
    assert TraceRules(8).unused_keys().keys() == {"top_p", "top_k", "seed"}
    drawn = TraceRules(8, temperature=0.6)
    others = [TraceRules(8), TraceRules(9), TraceRules(8, "done"), drawn, replace(drawn, seed=1),
              replace(drawn, top_p=0.5), replace(drawn, top_k=2)]  # fmt: skip
    assert len({str(one.fingerprint()) for one in others}) == len(others) and not drawn.unused_keys()
    with pytest.raises(UserError, match="top_p"):
        TraceRules(8, top_p=2.0)


# --------------------------------------------------------------------------------------- writing


MOST = 12
PROMPTS = [[2, 3, 30, 31, 4], [2, 3, 40, 4], [2, 3, 50, 51, 52, 53, 4]]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM

    world = build_world(tmp_path_factory.mktemp("traces"), train=1, val=1)
    return AutoModelForCausalLM.from_pretrained(world.model), AutoTokenizer.from_pretrained(world.model)


def written(
    tiny: tuple[Any, Any], until: str, budget: int = 4096, end_ids: tuple[int, ...] = (), **sampling: Any
) -> list[ReasoningTrace]:
    decoding = Sampling(max_new_tokens=MOST, **{"temperature": 0.0, **sampling})
    generator = TraceGenerator(*tiny, decoding, until, token_budget=budget, end_ids=end_ids)
    found: dict[int, ReasoningTrace] = {}
    for batch in generator.generate(PROMPTS):
        found |= batch
    return [found[place] for place in range(len(PROMPTS))]


def test_a_trace_ends_with_a_text_of_several_tokens(tiny: tuple[Any, Any]) -> None:
    """Checks a text of two tokens of one trace; it ends with the second, and the others go on."""
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
