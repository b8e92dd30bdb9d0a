"""Model folders that are missing, half written or put together wrongly, tokenizers and templates that do not serve."""

import io
import json
import logging
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from attnpo import Weigher, generate
from attnpo.cli.entry import run_entry
from attnpo.models.loading import load_model, load_tokenizer, num_layers, weights_fingerprint
from attnpo.schema import UserError
from attnpo.system import hub_access
from attnpo.text import chat
from attnpo.text.chat import ChatFormat
from tests.bad_input.attempts import Attempts
from tests.bad_input.conftest import Record

NOT_STARTED = "run not started"


def rewrite(name: str, **values: Any) -> Callable[[Path], object]:
    """Damage: other values in a JSON file of the folder, None takes a key away."""

    def damage(folder: Path) -> None:
        content = {**json.loads((folder / name).read_text()), **values}
        content = {key: value for key, value in content.items() if value is not None}
        (folder / name).write_text(json.dumps(content))

    return damage


def cut(name: str) -> Callable[[Path], object]:
    """Damage: the first half of a file is left."""

    def damage(folder: Path) -> None:
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: len(content) // 2])

    return damage


def gone(name: str) -> Callable[[Path], object]:
    """Damage: a file is not there."""
    return lambda folder: (folder / name).unlink()


def index(content: str) -> Callable[[Path], object]:
    """Damage: a list of weight files with this content."""
    return lambda folder: (folder / "model.safetensors.index.json").write_text(content)


CONFIG, WEIGHTS = "config.json", "model.safetensors"
DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config.json": (gone(CONFIG), "has no config.json: it is not a model folder, or it is incomplete"),
    "no weights": (gone(WEIGHTS), "has no weight file (*.safetensors or *.bin) besides config.json"),
    "weights that were cut off": (cut(WEIGHTS), "Error while deserializing header: incomplete metadata"),
    "an empty weight file": (
        lambda folder: (folder / WEIGHTS).write_bytes(b""),
        "Error while deserializing header: header too small",
    ),
    "a weight file that is missing": (
        index('{"weight_map": {"a": "model-00002-of-00002.safetensors"}}'),
        "lists 1 weight files, but 1 are missing (first: model-00002-of-00002.safetensors)",
    ),
    "a list of weight files that was cut off": (index('{"weight_map": '), "is not a list of weight files"),
    "a config of a deeper model": (
        rewrite(CONFIG, num_hidden_layers=3),
        "9 parameters of LlamaForCausalLM are missing from the weight files (first: model.layers.2.",
    ),
    "a config of a wider model": (
        rewrite(CONFIG, hidden_size=64),
        "parameters have different shapes in the weight files and in config.json (first: model.",
    ),
    "a config with a smaller vocabulary": (
        rewrite(CONFIG, vocab_size=20),
        "but the model has 20 token embeddings (vocab_size in its config.json): remove it from the chat template",
    ),
    "a config with a larger vocabulary": (
        rewrite(CONFIG, vocab_size=2000),
        "parameters have different shapes in the weight files and in config.json (first: model.embed_tokens.weight",
    ),
    "a config of an unknown architecture": (rewrite(CONFIG, model_type="nonsense"), "model type `nonsense`"),
    "a config that was cut off": (cut(CONFIG), "is not a valid JSON file"),
    "a tokenizer that was cut off": (cut("tokenizer.json"), "could not load the tokenizer"),
    "no tokenizer": (gone("tokenizer.json"), "could not load the tokenizer"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_a_damaged_folder_is_one_line(attempts: Attempts, record: Record, case: str) -> None:
    damage, message = DAMAGE[case]
    world = attempts.broken_model(damage)
    answer = attempts.fit("weights=uniform", world=world)
    assert message in answer.refused() and str(world.model) in answer.error
    assert not any("LOAD REPORT" in line for line in answer.log)
    record(case, answer.refused(), NOT_STARTED)


def with_code(folder: Path) -> None:
    """Damage: config, tokenizer and model of kinds of their own, in a Python file that leaves a mark when it is run."""
    (folder / "own.py").write_text(f"from pathlib import Path\nPath({str(folder / 'ran')!r}).touch()\n" + OWN)
    classes = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    rewrite(CONFIG, model_type="own", auto_map=classes)(folder)


def with_tokenizer_code(folder: Path) -> None:
    """Damage: a tokenizer of a kind of its own."""
    with_code(folder)
    rewrite(CONFIG, model_type="llama", auto_map=None)(folder)
    classes = {"AutoTokenizer": ["own.OwnTokenizer", "own.OwnTokenizer"]}
    rewrite("tokenizer_config.json", tokenizer_class="OwnTokenizer", auto_map=classes)(folder)


OWN = """
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
class OwnConfig(LlamaConfig):
    model_type = "own"
class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""


@pytest.mark.parametrize("damage", [with_code, with_tokenizer_code])
def test_a_model_with_code_of_its_own_is_refused_and_its_code_not_run(
    attempts: Attempts, record: Record, monkeypatch: pytest.MonkeyPatch, damage: Callable[[Path], object]
) -> None:
    """Also where the standard input would answer the library's question with yes."""
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 9))
    world = attempts.broken_model(damage)
    message = attempts.fit("weights=uniform", world=world).refused()
    assert "it contains its own Python code (auto_map in its JSON files), which attnpo never runs" in message
    assert str(world.model) in message and not (world.model / "ran").exists()
    record(f"a model folder {damage.__name__.replace('_', ' ')}", message, NOT_STARTED)


NESTED = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
RUNAWAY = {
    "loops in loops": NESTED,
    "a loop over long texts": "{% for m in messages if m.content | length > 9 %}" + NESTED + "{% endfor %}",
    "a power of powers": "{{ 10 ** (10 ** 9) }}",
}


@pytest.mark.parametrize(("case", "origin"), [*((case, "folder") for case in RUNAWAY), ("a power of powers", "option")])
def test_a_chat_template_that_runs_away_is_stopped(
    attempts: Attempts, record: Record, monkeypatch: pytest.MonkeyPatch, case: str, origin: str
) -> None:
    monkeypatch.setattr(chat, "RENDERING", 0.3)
    template, world, given = RUNAWAY[case], attempts.world, []
    if origin == "folder":
        world = attempts.broken_model(lambda folder: (folder / "chat_template.jinja").write_text(template))
    else:
        given = [f"model.chat_template='{template}'"]
    began = time.thread_time()
    message = attempts.fit("weights=uniform", *given, world=world).refused()
    assert (
        "computed for 0.3 seconds on one conversation and was stopped; set model.chat_template to a different template"
        in message
    )
    assert "model.chat_template" in message and str(world.model) in message
    assert time.thread_time() - began < 20
    record(f"a chat template with {case} ({origin})", message, NOT_STARTED)


def test_weights_of_a_deeper_model_are_said_to_be_left_out(attempts: Attempts, record: Record) -> None:
    answer = attempts.fit("weights=uniform", world=attempts.broken_model(rewrite(CONFIG, num_hidden_layers=1)))
    found = [line for line in answer.log if "do not exist in LlamaForCausalLM and are ignored" in line]
    assert answer.status == 0 and "9 tensors" in found[0] and "(first: model.layers.1." in found[0]
    record("a config of a shallower model", found[0], "the further layers, logged")


def test_depth_is_asked_of_a_config_that_is_there(attempts: Attempts) -> None:
    assert num_layers(attempts.world.model) == 2
    for damage, message in (DAMAGE["no config.json"], DAMAGE["a config of an unknown architecture"]):
        with pytest.raises(UserError) as caught:
            num_layers(attempts.broken_model(damage).model)
        assert message in str(caught.value)


def test_a_folder_that_is_not_there(attempts: Attempts, record: Record) -> None:
    message = attempts.weigh(world=attempts.on(model=attempts.folder / "nowhere" / "model")).refused()
    assert (
        message.startswith("no folder at ")
        and "to load the tokenizer from" in message
        and "give an existing folder or a hub name" in message
    )
    record("a model folder that is not there", message, NOT_STARTED)


# ------------------------------------------------------------------------------------------------ adapters


def with_adapter(folder: Path) -> None:
    """Damage: an adapter with weights of its own, left beside the model's."""
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    model.add_adapter(LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    model.save_pretrained(folder)


def adapter_alone(folder: Path) -> None:
    """Damage: only the adapter is there."""
    with_adapter(folder)
    for name in (CONFIG, WEIGHTS):
        (folder / name).unlink()


ALONE = "contains an adapter without base weights (adapter_config.json): give a folder in which the adapter is merged"
BESIDE = "delete adapter_config.json and adapter_model.* to load those weights unchanged, or give a folder"


@pytest.mark.parametrize(
    ("damage", "words", "given"),
    [
        (adapter_alone, ALONE, ()),
        *((with_adapter, BESIDE, given) for given in ((), ("model=lora",), ("judge.path=FOLDER", "weights=attention"))),
    ],
)
def test_an_adapter_beside_the_weights_is_refused_by_fit(
    attempts: Attempts, record: Record, damage: Callable[[Path], object], words: str, given: tuple[str, ...]
) -> None:
    world = attempts.broken_model(damage)
    overrides = [one.replace("FOLDER", str(world.model)) for one in given]
    policy = attempts.on() if "weights=attention" in given else world
    message = attempts.fit("weights=uniform", *overrides, world=policy).refused()
    assert f"{world.model} contains an adapter" in message and words in message
    record(f"{' '.join(given) or 'policy'}: {damage.__name__.replace('_', ' ')}", message, NOT_STARTED)


def test_an_adapter_beside_the_weights_is_refused_by_everything_that_loads(attempts: Attempts) -> None:
    folder = attempts.broken_model(with_adapter).model
    ways: list[Callable[[], object]] = [
        lambda: load_model(folder),
        lambda: load_model(folder, reward=True, fresh_head=True),
        lambda: Weigher(folder),
        lambda: weights_fingerprint(folder),  # so that rows in the store are not found without it
        lambda: num_layers(folder),
    ]
    for way in ways:
        with pytest.raises(UserError, match="contains an adapter"):
            way()
    (folder / "adapter_config.json").unlink()
    assert weights_fingerprint(folder) == weights_fingerprint(attempts.world.model), "without it, its weights are read"
    load_model(folder)


def test_generate_refuses_an_adapter_beside_the_weights(attempts: Attempts, capsys: pytest.CaptureFixture[str]) -> None:
    folder, prompts = attempts.broken_model(with_adapter).model, attempts.folder / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "write a review of the film"}) + "\n")
    given = [f"model.path={folder}", f"data.path={prompts}", f"output={attempts.folder / 'answers.jsonl'}"]
    assert run_entry(generate.main, "generate", [*given, "trainer.accelerator=cpu"], "description", "example") == 2
    assert "contains an adapter" in capsys.readouterr().err


@pytest.mark.usefixtures("hub_forgotten")
@pytest.mark.parametrize("damage", [with_adapter, lambda folder: None])
def test_a_hub_name_is_known_by_its_commit_and_refused_with_an_adapter(
    attempts: Attempts, monkeypatch: pytest.MonkeyPatch, damage: Callable[[Path], object]
) -> None:
    commit, cache = "0123456789abcdef" * 2 + "01234567", attempts.folder / "hub"
    place = cache / "models--somebody--something"
    (place / "refs").mkdir(parents=True)
    (place / "refs" / "main").write_text(commit)
    shutil.copytree(attempts.broken_model(damage).model, place / "snapshots" / commit)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    if damage is with_adapter:
        for way in (load_model, weights_fingerprint):
            with pytest.raises(UserError, match="somebody/something contains an adapter"):
                way("somebody/something")
    else:
        assert weights_fingerprint("somebody/something") == {"hub": "somebody/something", "commit": commit}
        load_model("somebody/something")


# ------------------------------------------------------------------------------------------------ ids without a row

OUTSIDE = "[outside]"


def token_outside(folder: Path) -> None:
    """Damage: the tokenizer has one token more than the model has embeddings."""
    tokenizer, config = (json.loads((folder / name).read_text()) for name in ("tokenizer.json", CONFIG))
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    tokenizer["added_tokens"].append({"id": config["vocab_size"], "content": OUTSIDE, "special": True, **flags})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


def pad_outside(folder: Path) -> None:
    """Damage: it is the padding token."""
    token_outside(folder)
    rewrite("tokenizer_config.json", pad_token=OUTSIDE)(folder)


def template_outside(folder: Path) -> None:
    """Damage: the chat template writes it."""
    token_outside(folder)
    template = folder / "chat_template.jinja"
    template.write_text(f"{OUTSIDE} {template.read_text()}")


def answer_template_outside(folder: Path) -> None:
    """Damage: the chat template writes it behind an answer, where its turn ends."""
    token_outside(folder)
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text().replace("<end>", f"{OUTSIDE} <end>"))


@pytest.mark.parametrize("given", [("weights=uniform",), ("weights=attention",), ("model=reward", "weights=uniform")])
def test_a_padding_token_without_a_row_changes_no_number(
    attempts: Attempts, record: Record, given: tuple[str, ...]
) -> None:
    """In padded rows, in the judge's and in the sample answers after the last step, which cost the result before."""
    numbers, place, samples = [], Path(), 0 if "model=reward" in given else 2
    reward = (
        ("objective=cpo", "objective.sft_coef=0", "objective.beta=1", "callbacks.checkpoints=true")
        if samples == 0
        else ()
    )
    for damage in (lambda folder: None, pad_outside):
        place = attempts.new("runs")
        more = (*given, *reward, f"output={place}", "layout=padded", f"callbacks.samples={samples}", "drift.pairs=0")
        answer = attempts.fit(*more, world=attempts.broken_model(damage))
        assert answer.status == 0, answer.error
        numbers.append(json.loads((place / "run" / "result.json").read_text())["metrics"])
    assert {name: value for name, value in numbers[0].items() if "_per_s" not in name} == {
        name: value for name, value in numbers[1].items() if "_per_s" not in name
    }
    found = answer.noted(f"the padding token '{OUTSIDE}'", "which does not change results")
    if samples:
        assert len((place / "run" / "generations.jsonl").read_text().splitlines()) == samples
    else:
        load_model(place / "run" / "last", reward=True)  # its padding id has a row
    record(f"a padding token without a row ({' '.join(given)})", found, "nothing")


@pytest.mark.parametrize(
    ("damage", "given"),
    [
        (template_outside, ("weights=uniform",)),
        (template_outside, ("weights=attention", "judge.path=FOLDER")),
        (answer_template_outside, ("weights=uniform",)),
    ],
)
def test_a_template_with_a_token_without_a_row_is_refused_at_once(
    attempts: Attempts, record: Record, damage: Callable[[Path], object], given: tuple[str, ...]
) -> None:
    world = attempts.broken_model(damage)
    overrides = [one.replace("FOLDER", str(world.model)) for one in given]
    policy = attempts.on() if "weights=attention" in given else world
    answer = attempts.fit(*overrides, "align.method=characters", "objective.length_from=train", world=policy)
    size = json.loads((world.model / CONFIG).read_text())["vocab_size"]
    words = f"the token '{OUTSIDE}' of '{world.model}' has the id {size}, but the model has {size} token embeddings"
    assert words in answer.refused() and "resize_token_embeddings" in answer.error
    assert not any("rows read" in line for line in answer.log), "before the data"
    record(f"{damage.__name__.replace('_', ' ')} ({' '.join(given)})", answer.refused(), NOT_STARTED)


def test_a_weigher_and_generate_take_the_padding_token_and_refuse_the_template(
    attempts: Attempts, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = attempts.folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"write {text} ."}) + "\n" for text in ("a", "a review of it")))
    texts, weights = [], []
    for damage, status in ((lambda folder: None, 0), (pad_outside, 0), (template_outside, 2)):
        folder, out = attempts.broken_model(damage).model, attempts.new("answers").with_suffix(".jsonl")
        given = [f"model.path={folder}", f"data.path={prompts}", f"output={out}", "sampling.max_new_tokens=4"]
        assert (
            run_entry(generate.main, "generate", [*given, "trainer.accelerator=cpu"], "description", "example")
            == status
        )
        if status:
            assert "token embeddings" in capsys.readouterr().err
            with pytest.raises(UserError, match="token embeddings"):
                Weigher(folder, template=WORDING)
        else:
            texts.append([json.loads(line)["answer"] for line in out.read_text().splitlines()])
            weights.append(Weigher(folder, template=WORDING)("the film .", "it was great .", "awful .").chosen.weights)
    assert texts[0] == texts[1] and weights[0].tolist() == weights[1].tolist()


WORDING = "{question}\nA : {answer_a}\nB : {answer_b}\nA or B ?"


def test_a_row_that_spells_a_token_without_a_row_is_dropped_and_counted(attempts: Attempts, record: Record) -> None:
    world = attempts.broken_model(token_outside)
    data = attempts.saying(chosen=f"the film was {OUTSIDE} great .").data
    answer = attempts.fit("weights=uniform", "layout=padded", world=attempts.on(model=world.model, data=data))
    found = answer.noted("dropped (similar pairs are only counted)", "token embeddings")
    assert any("dropped: a token that the model has no embedding for: 1" in line for line in answer.log)
    record("a row with a token without a row", found, "1 pair of 12")


# ------------------------------------------------------------------------------------------------ the hub


@pytest.mark.usefixtures("hub_forgotten")
@pytest.mark.parametrize("key", ["model.path", "judge.path", "data.path"])
def test_a_hub_name_while_offline_fails_at_once(attempts: Attempts, record: Record, key: str) -> None:
    begin = time.monotonic()
    message = attempts.weigh(f"{key}=attnpo-tests/not-there").refused()
    assert time.monotonic() - begin < 10
    assert "attnpo-tests/not-there" in message and "HF_HUB_OFFLINE is set" in message
    assert "in the hub's cache" in message
    record(f"{key}: a hub name, HF_HUB_OFFLINE set", message, NOT_STARTED)


@pytest.mark.usefixtures("hub_forgotten")
@pytest.mark.parametrize("load", [load_model, load_tokenizer, weights_fingerprint, num_layers])
def test_a_hub_that_does_not_answer_is_asked_once(
    load: Callable[[str], object], monkeypatch: pytest.MonkeyPatch, record: Record
) -> None:
    """The libraries alone would try five times for each file, which takes 23 seconds and more for a model."""
    asked = []

    def unreachable(request: Any, timeout: float) -> None:
        asked.append(request.full_url)
        raise OSError("Name or service not known")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub_access, "urlopen", unreachable)
    begin = time.monotonic()
    for _ in range(2):
        with pytest.raises(UserError) as caught:
            load("attnpo-tests/not-there")
    assert time.monotonic() - begin < 5
    assert asked == [constants.ENDPOINT] and not constants.HF_HUB_OFFLINE
    message = str(caught.value)
    assert "cannot be reached (Name or service not known)" in message and "in the hub's cache" in message
    record("a hub name without a network", message, NOT_STARTED)


# ------------------------------------------------------------------------------------------------ tokenizers, templates


def slow(folder: Path) -> None:
    """Damage: ByT5's tokenizer, which works on bytes in Python; no fast one could say what characters a token holds."""
    from transformers import ByT5Tokenizer

    (folder / "tokenizer.json").unlink()
    tokenizer = ByT5Tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer.save_pretrained(folder)


def test_a_tokenizer_without_offsets(attempts: Attempts, record: Record) -> None:
    message = attempts.fit(world=attempts.broken_model(slow)).refused()
    assert "provides no character offsets (ByT5Tokenizer, not a fast tokenizer)" in message
    record("a tokenizer without offsets", message, NOT_STARTED)


@pytest.mark.parametrize("overrides", [["judge.path=SLOW"], ["judge=other", "other_judge.path=SLOW"]])
def test_another_judges_tokenizer_without_offsets(attempts: Attempts, record: Record, overrides: list[str]) -> None:
    folder = attempts.broken_model(slow).model
    given = [override.replace("SLOW", str(folder)) for override in overrides]
    message = attempts.fit(*given, "align.method=characters", "data.path=nowhere").refused()
    assert f"judge.path={folder}: expected a fast tokenizer" in message and "got ByT5Tokenizer" in message
    record(f"{overrides[-1]}: a tokenizer without offsets", message, NOT_STARTED)


NO_TEMPLATE = "has no chat template: set {}.chat_template (chat_template= in Python) to the template's text"


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ("model", ["weights=uniform"]),
        ("judge", ["judge=other", "other_judge.path=MODEL", "other_judge.template_file=judge/testbed.txt"]),
        ("verbalizer", ["weights=verbalized", "verbalizer.path=MODEL", "verbalizer.sampling.max_new_tokens=8"]),
    ],
    ids=["model", "judge", "verbalizer"],
)
def test_a_tokenizer_without_a_template(attempts: Attempts, record: Record, part: str, words: list[str]) -> None:
    """Refuses it, unless a setting names one to stand in for it, which is told once."""
    broken = attempts.broken_model(gone("chat_template.jinja"))
    given = [word.replace("MODEL", str(broken.model)) for word in words]
    world = broken if given == words else attempts.world
    answer = attempts.fit(*given, "data.path=nowhere", world=world)
    assert "data.path" in answer.refused()
    told = [line for line in answer.log if "the tokenizer has no chat template;" in line]
    assert told == [f"{broken.model}: the tokenizer has no chat template; model.fallback_template is used instead"]
    message = attempts.fit(*given, "model.fallback_template=null", "data.path=nowhere", world=world).refused()
    assert NO_TEMPLATE.format(part) in message and str(broken.model) in message
    record(f"no chat template, {words[0]}", message, NOT_STARTED)


TEMPLATES = {
    "a chat template that is no Jinja": ("{% if %}", "the chat template is not valid Jinja: Expected an expression"),
    "a chat template that refuses everything": ("{{ raise_exception('no') }}", "the chat template rejects its turns"),
    "a chat template with a type error": ("{{ messages[0].content + 3 }}", "the chat template rejects its turns"),
    "a chat template that divides by zero": ("{{ 1 / 0 }}", "the chat template rejects its turns"),
    "a chat template without the content": ("{% for m in messages %}hello{% endfor %}", "content 0 times"),
    "a chat template that writes it twice": (
        "{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}",
        "content 2 times",
    ),
    "a chat template in capitals": (
        "{% for m in messages %}{{ m.content | upper }}<end>{% endfor %}",
        "the chat template rewrites the response",
    ),
    "a chat template that hides earlier turns": (
        "{{ messages[-1].content }}<end>",
        "the chat template renders the prompt differently",
    ),
}


@pytest.mark.parametrize("case", TEMPLATES)
def test_a_template_that_does_not_serve(attempts: Attempts, record: Record, case: str) -> None:
    template, message = TEMPLATES[case]
    (attempts.folder / "chat.jinja").write_text(template)
    answer = attempts.fit("weights=uniform", f"model.chat_template={attempts.folder / 'chat.jinja'}")
    assert message in answer.refused()
    record(case, answer.refused(), NOT_STARTED)


def test_a_template_that_is_not_there(attempts: Attempts, record: Record) -> None:
    message = attempts.weigh("model.chat_template=nowhere.jinja").refused()
    assert message.startswith("model.chat_template=nowhere.jinja: no such file")
    record("a chat template that is not there", message, NOT_STARTED)


def test_libraries_speak_again_after_a_load(attempts: Attempts) -> None:
    from transformers.utils import logging as library

    before = library.get_verbosity()
    ChatFormat(load_tokenizer(attempts.world.model))
    with pytest.raises(UserError):
        load_tokenizer("attnpo-tests/not-there")
    assert library.get_verbosity() == before != logging.CRITICAL
