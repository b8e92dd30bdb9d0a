"""The judge's own values of chat template variables, beside those of the model."""

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from attnpo.config.compose import compose, parse
from attnpo.judge.base import JudgePrompt
from attnpo.run.resolve import resolve
from attnpo.schema import Message, PreferencePair, UserError
from attnpo.weigher import Weigher
from tests.run.worlds import World, build_world

OFF = "chat_template_kwargs={enable_thinking: false}"
PAIR = PreferencePair.from_texts([Message(role="user", content="review the film .")], "it was good .", "it was awful .")
THINKING_OFF = "{% if add_generation_prompt and enable_thinking is defined and not enable_thinking %} it was{% endif %}"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """A tiny model whose template writes two words into the answer where thinking is off."""
    made = build_world(tmp_path_factory.mktemp("thinking"))
    tokenizer = AutoTokenizer.from_pretrained(made.model)
    tokenizer.chat_template += THINKING_OFF
    tokenizer.save_pretrained(made.model)
    return made


def asked(world: World, *more: str) -> tuple[JudgePrompt, str, str]:
    """The first round, what it ends in, and what a prompt of training ends in."""
    made = resolve(world.config("weights=attention", *more))
    judge = made.readers.make_judge()
    prompt = judge.prompts.build(PAIR)[0]
    own = made.base.chat.prompt_ids(PAIR.prompt)
    return prompt, judge.decode_token(prompt.input_ids[-1]).strip(), judge.decode_token(own[-1]).strip()


@pytest.mark.parametrize(
    ("given", "judge", "training"),
    [
        ((), "<assistant>", "<assistant>"),
        ((f"judge.{OFF}",), "was", "<assistant>"),
        ((f"judge.{OFF}", "judge.assembly=ids"), "was", "<assistant>"),
        ((f"model.{OFF}",), "was", "was"),
        ((f"model.{OFF}", "judge.chat_template_kwargs={}"), "<assistant>", "was"),
        ((f"model.{OFF}", "judge.path=SAME"), "<assistant>", "was"),
        ((f"judge.{OFF}", "judge.path=SAME"), "was", "<assistant>"),
    ],
)
def test_who_has_thinking_off(world: World, given: tuple[str, ...], judge: str, training: str) -> None:
    words = [word.replace("SAME", str(world.model)) for word in given]
    assert asked(world, *words)[1:] == (judge, training)


def test_the_python_api_frames_the_judge_alike(world: World) -> None:
    weigher = Weigher(
        world.model,
        template="judge/testbed.txt",
        max_length=512,
        chat_template_kwargs={"enable_thinking": False},
        device="cpu",
    )
    assert weigher.prompts.build(PAIR)[0].input_ids == asked(world, f"model.{OFF}")[0].input_ids


def test_ids_are_those_of_training_whatever_the_judge_is_told(world: World) -> None:
    """The ids of both responses, which stand behind other words in training than in the judge's frame."""
    made = resolve(world.config("weights=attention", "judge.assembly=ids", f"judge.{OFF}"))
    judge = made.readers.make_judge()
    prompt = judge.prompts.build(PAIR)[0]
    for side in ("chosen", "rejected"):
        encoded = made.base.chat.encode(PAIR.prompt, PAIR.response(side))
        begin, end = prompt.spans[side]
        assert prompt.input_ids[begin:end] == encoded.response_ids[: end - begin]
    plain = resolve(world.config("weights=attention", "judge.assembly=ids")).readers.make_judge().prompts
    assert judge.prompts.fingerprint()["tokenizer"] != plain.fingerprint()["tokenizer"]
    assert judge.prompts.fingerprint()["training"] == plain.fingerprint()["tokenizer"]
    assert "training" not in plain.fingerprint()


def test_what_has_no_effect_and_what_is_refused(world: World, tmp_path: Path) -> None:
    for path in ([], [f"judge.path={world.model}"]):
        with pytest.raises(UserError, match=r"judge\.chat_template_kwargs\.enable_thinkin\b"):
            asked(world, "judge.chat_template_kwargs={enable_thinkin: false}", *path)
    assert asked(world, "judge.chat=false", f"judge.{OFF}")[1] != "was"
    reading = parse(compose("fit", world.overrides("judge.chat=false", f"judge.{OFF}")))
    assert reading.unused["judge.chat_template_kwargs"] == "judge.chat=false"
