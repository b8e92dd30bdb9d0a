"""An exported folder's own chat template gives the prompt ids of training, whether or not the base's writes BOS."""

import html
import json
import logging
from pathlib import Path

import pytest
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from attnpo.config.compose import load
from attnpo.evaluation.answers import answer_prompts
from attnpo.evaluation.local_chat import describe_model
from attnpo.models.loading import load_tokenizer
from attnpo.run.input_summary import example_statistics
from attnpo.run.report import card_facts, make_exporter
from attnpo.run.run import run
from attnpo.schema import UserError
from tests.run.made import Made, make, make_inputs
from tests.run.worlds import World, build_world
from tests.text.formats import PLAIN

TOKENIZERS = {"llama": "extraction/tokenizer", "mistral": "extraction_sentencepiece/tokenizer"}
ZEPHYR = (
    "{% for m in messages %}\n{{ '<|' + m['role'] + '|>\n' + m['content'] + eos_token }}\n"
    "{% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>' }}\n{% endif %}\n{% endfor %}"
)
QUESTION = [{"role": "user", "content": "Why is the sky blue?"}]


@pytest.fixture
def world(vectors: Path, tmp_path: Path, request: pytest.FixtureRequest) -> World:
    """A tiny random Llama with the tokenizer that the test's parameter names, in its folder."""
    made = build_world(tmp_path)
    tokenizer = load_tokenizer(vectors / TOKENIZERS[request.param])
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    LlamaForCausalLM(config).save_pretrained(made.model)
    tokenizer.save_pretrained(made.model)
    return made


def exported_ids(folder: Path) -> list[int]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids: list[int] = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_dict=False)
    return ids


def made_of(world: World, template: str | None, folder: Path) -> Made:
    more = ["weights=uniform"]
    if template is not None:
        (folder / "chat.jinja").write_text(template)
        more.append(f"model.chat_template={folder / 'chat.jinja'}")
    return make(world.config(*more))


def export(made: Made, folder: Path) -> None:
    """Writes the model that training starts from as a run would its policy."""
    spec, chat = made.base.spec, made.base.chat
    facts = card_facts(made.cfg, spec, made.inputs, example_statistics(made.inputs))
    exporter = make_exporter(spec, chat, None, facts)
    exporter.export(LlamaForCausalLM.from_pretrained(spec.path), folder)


@pytest.mark.parametrize("template", [None, PLAIN, ZEPHYR], ids=["with BOS", "plain", "zephyr"])
@pytest.mark.parametrize("world", TOKENIZERS, indirect=True)
def test_the_exported_template_gives_the_ids_of_training(world: World, template: str | None, tmp_path: Path) -> None:
    made = made_of(world, template, tmp_path)
    chat = made.base.chat
    assert (chat.inference_template() == chat.chat_template) == (template is None)
    export(made, tmp_path / "out")
    ids = chat.prompt_ids(QUESTION)
    assert ids.count(chat.tokenizer.bos_token_id) == 1 and exported_ids(tmp_path / "out") == ids
    assert ("so the exported chat template adds it" in (tmp_path / "out/README.md").read_text()) == bool(template)
    assert made.base.tokenizer.chat_template == chat.chat_template, "the run's own tokenizer stays as it is"


THINKS = "{{ '/off ' if enable_thinking is defined and not enable_thinking }}" + PLAIN
NO_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"


@pytest.mark.parametrize("world", ["mistral"], indirect=True)
def test_options_of_the_template_are_exported_and_told(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """From the command line to the exported folder, whose template alone gives the prompts of training."""
    (tmp_path / "chat.jinja").write_text(NO_SYSTEM + THINKS)
    given = ["weights=uniform", f"model.chat_template={tmp_path / 'chat.jinja'}"]
    plain = make(world.config(*given)).base.chat
    options = ["model.chat_template_kwargs={enable_thinking: false}", "model.fold_system=true"]
    made = make(world.config(*given, *options))
    chat = made.base.chat
    assert chat.render(QUESTION, True) == "/off " + plain.render(QUESTION, True)
    with caplog.at_level(logging.INFO):
        export(made, tmp_path / "out")
    words = (
        "template applies the training settings: "
        'model.chat_template_kwargs={"enable_thinking": false}, model.fold_system='
    )
    assert words in caplog.text and words in (tmp_path / "out/README.md").read_text()
    assert exported_ids(tmp_path / "out") == chat.prompt_ids(QUESTION)
    answering = load("generate", [f"model.path={tmp_path / 'out'}", "data.path=none.jsonl"]).model
    turns = [{"role": "system", "content": "Be brief."}, *QUESTION]
    assert describe_model(answering)[1].prompt_ids(turns) == chat.prompt_ids(turns)
    asked = load("generate", [f"model.path={world.model}", "data.path=none.jsonl", *given[1:], *options]).model
    assert describe_model(asked)[1].prompt_ids(turns) == chat.prompt_ids(turns)
    with pytest.raises(UserError, match=r"kwargs\.enable_thinkin: the chat template never reads .*: enable_thinking"):
        make_inputs(world.config(*given, "model.chat_template_kwargs={enable_thinkin: false}"))


@pytest.mark.parametrize("world", ["mistral"], indirect=True)
def test_a_run_says_it_and_generation_begins_with_one_bos(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Through fit and generate: the same answers from the exported folder, whoever puts the BOS in front."""
    chat = tmp_path / "chat.jinja"
    chat.write_text(ZEPHYR)
    with caplog.at_level(logging.INFO):
        run(world.config("weights=uniform", f"model.chat_template={chat}", "callbacks.samples=0"), tmp_path / "run")
    assert caplog.text.count("so the exported chat template adds it") == 1
    best = tmp_path / "run" / "best"
    assert exported_ids(best)[0] == 1 and exported_ids(best).count(1) == 1
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "Why?"}) + "\n")
    answers = []
    for number, template in enumerate(("null", str(chat))):
        asked = [f"model.path={best}", f"data.path={tmp_path}/prompts.jsonl", f"output={tmp_path}/{number}.jsonl"]
        asked += [f"model.chat_template={template}", "sampling.max_new_tokens=4", "sampling.temperature=0"]
        answer_prompts(load("generate", [*asked, "trainer.accelerator=cpu"]))
        answers.append(json.loads((tmp_path / f"{number}.jsonl").read_text())["answer"])
    assert answers[0] == answers[1]


@pytest.mark.parametrize("replaced", [False, True])
def test_a_replaced_template_is_told_and_those_by_name_are_exported(
    replaced: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In log, model card and page; what the base has beside its default stays either way."""
    world, given = build_world(tmp_path), tmp_path / "chat.jinja"
    own = AutoTokenizer.from_pretrained(world.model).chat_template
    (world.model / "additional_chat_templates").mkdir()
    (world.model / "additional_chat_templates" / "tool_use.jinja").write_text(PLAIN)
    given.write_text("{{ bos_token }}" + PLAIN)
    more = [f"model.chat_template={given}"] if replaced else []
    with caplog.at_level(logging.INFO):
        run(world.config("weights=uniform", "trainer.max_steps=1", "callbacks.samples=0", *more), tmp_path / "run")
    best = tmp_path / "run" / "best"
    exported = AutoTokenizer.from_pretrained(best).chat_template
    assert exported == {"default": given.read_text() if replaced else own, "tool_use": PLAIN}
    words = "hat_template replaces the tokenizer's own chat template"
    card, page = (best / "README.md").read_text(), html.unescape((tmp_path / "run" / "report.html").read_text())
    assert [text.count(words) for text in (caplog.text, card, page)] == [int(replaced)] * 3
    origin = "model.chat_template" if replaced else "the tokenizer's own"
    assert f"the one used in training, {origin}" in caplog.text
