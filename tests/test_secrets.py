"""Secrets stay out of every file: values of the environment, and credentials in addresses and in ``extra_body``.

Commands are typed with secrets of which each is a word of its own, and every file that they write is searched.
"""

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from attnpo import evaluate, fit, generate, pair, show
from attnpo.cli.entry import run_entry
from attnpo.config.compose import load
from attnpo.evaluation.chat import GradingReply
from attnpo.evaluation.jsonl_store import ReplyStore
from attnpo.evaluation.openai_chat import OpenAIGrader
from attnpo.schema import digest
from attnpo.system.files import file_digest
from tests.evaluation.checkouts import fastchat
from tests.evaluation.grading.calls import call
from tests.evaluation.grading.loopback import Body, Loopback, Reply
from tests.run.worlds import World, build_world
from tests.training.wandb_files import keep_home

VARIABLE = "OF_A_TEST"
OURS, LOGIN, PARAMETER, KEY, TOKEN = "of4the-env1ronment", "hunter22login", "p4rameter", "b0dykey", "b0dytoken"
SECRETS = (OURS, LOGIN, PARAMETER, KEY, TOKEN)
READ = f"${{oc.env:{VARIABLE}}}"
BODY = f"{{effort: low, api_key: {KEY}, nested: {{access_token: {TOKEN}}}, other_key: '{READ}'}}"


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> World:
    return build_world(tmp_path_factory.mktemp("secrets"))


@pytest.fixture(autouse=True)
def surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_home(tmp_path, monkeypatch)
    monkeypatch.setenv(VARIABLE, OURS)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.chdir(tmp_path)


def leaks(*folders: Path) -> list[str]:
    """Files with a secret in them or in their names, with the secret."""
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    assert files
    return [
        f"{path}: {secret}"
        for path in files
        for secret in SECRETS
        if secret.encode() in path.read_bytes() or secret in str(path)
    ]


def told(capsys: pytest.CaptureFixture[str]) -> str:
    """Returns what was printed, without a secret in it."""
    seen = capsys.readouterr()
    assert [secret for secret in SECRETS if secret in seen.out + seen.err] == []
    return seen.out + seen.err


def login(server: Loopback) -> str:
    return server.base_url.replace("http://", f"http://me:{LOGIN}@")


# ------------------------------------------------------------------------------------------------ a run


def trains(world: World, folder: Path, *more: str, prefill: str = READ) -> int:
    words = world.overrides("experiment=none", f"output={folder}", "name=run", "trainer.max_steps=1", *more)
    words += ["logger=wandb", "logger.wandb.mode=offline", "callbacks.samples=0", f"judge.prefill='{prefill}'"]
    return run_entry(fit.main, "fit", words, "", "")


def test_a_run_keeps_no_value_of_the_environment_and_goes_on(
    template: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    world, out = World(template.model, template.data, tmp_path / "store"), tmp_path / "out"
    assert trains(world, out) == 0
    told(capsys)
    run = out / "run"
    assert leaks(out, world.store) == []
    saved = (run / "config.yaml").read_text()
    assert f"prefill: {READ}\n" in saved and READ in (run / "best" / "README.md").read_text()
    assert READ in (run / "report.html").read_text().replace("&#36;", "$")
    assert READ.encode() in b"".join(path.read_bytes() for path in run.glob("wandb/*/*.wandb"))
    # It is read again with what the environment has: shown, and resumed.
    assert show.run_show([f"run={run}", "rows=1"]) == 0
    before = file_digest(run / "result.json")
    assert trains(world, out, "resume=auto") == 0 and trains(world, out, "resume=auto", prefill=OURS) == 0
    assert file_digest(run / "result.json") == before
    (run / "result.json").unlink()
    assert trains(world, out, "resume=auto", prefill=OURS) == 0, "from the checkpoint, whose account has a digest of it"
    capsys.readouterr()
    # Another value of it is another run, said without either; without one the variable is named.
    monkeypatch.setenv(VARIABLE, "another")
    assert trains(world, out, "resume=auto") == 2
    assert "judge.prefill was 'of the environment (" in told(capsys)
    monkeypatch.delenv(VARIABLE)
    assert show.run_show([f"run={run}", "rows=1"]) == 2
    assert f"judge.prefill: KeyError raised while resolving interpolation: 'environment variable {VARIABLE}" in told(
        capsys
    ).replace('"', "'")


def test_typed_credentials_are_masked_and_asked_for_again(
    template: World,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    world, out = World(template.model, template.data, tmp_path / "store"), tmp_path / "out"
    address = f"http://me:{LOGIN}@host/x?n=1&api_key={PARAMETER}"
    monkeypatch.setattr("sys.argv", ["fit", f"judge.prefill={address}"])  # which W&B keeps
    assert trains(world, out, prefill=address) == 0
    told(capsys)
    command = next(line for line in caplog.messages if line.lstrip().startswith("python -m attnpo.fit"))
    masked = "http://***@host/x?n=1&api_key=***"
    assert masked in command and masked in (out / "run" / "config.yaml").read_text()
    assert masked in (out / "run" / "best" / "README.md").read_text()
    assert leaks(out, world.store) == []
    assert trains(world, out, "resume=auto", prefill=address) == 0
    capsys.readouterr()
    assert show.run_show([f"run={out / 'run'}", "rows=1"]) == 2
    assert "judge.prefill: credentials in this value were masked when the config was saved" in told(capsys)


STUDY = """
# @package study
defaults: [_base, _self_]
_target_: attnpo.lab.studies.study.Study
name: small
control: null
arms:
  attention: [weights=attention]
grid: {lr: [1.0e-3], beta: [0.2]}
seeds: 1
workers: 1
shared: [callbacks=none, reference=cached, trainer.max_steps=1, callbacks.samples=0]
"""


def test_a_study_keeps_none_either(template: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    world, out = World(template.model, template.data, tmp_path / "store"), tmp_path / "out"
    (tmp_path / "configs" / "experiment").mkdir(parents=True)
    (tmp_path / "configs" / "experiment" / "small.yaml").write_text(STUDY)
    words = ["--config-dir", str(tmp_path / "configs"), f"output={out}", "name=small", f"judge.prefill='{READ}'"]
    words += world.overrides("experiment=small", f"judge.span_closing='http://me:{LOGIN}@host/'")
    for _ in range(2):
        assert run_entry(fit.main, "fit", words, "", "") == 0
    told(capsys)
    assert leaks(out, world.store) == []
    assert len(list(out.glob("small/points/*"))) == 1, "the second time it finds its point"


# ------------------------------------------------------------------------------------------------ servers


def chances(body: Body) -> Reply:
    """A mark, and a verdict for the answer "alpha" wherever it stands."""
    first = re.findall("alpha|beta|gamma", body["messages"][-1]["content"])[:1] == ["alpha"]
    return Reply("A [[7]]", logprobs={"A": -0.2, "B": -1.8} if first else {"A": -1.8, "B": -0.2})


def type_command(command: str, server: Loopback, world: World, folder: Path) -> Callable[[], int]:
    """A command that asks ``server``, typed with secrets."""
    of_grader, cpu = ["base_url=" + login(server), f"+extra_body={BODY}", "price_model=null"], "trainer.accelerator=cpu"
    folder.mkdir(exist_ok=True)
    if command == "generate":
        (folder / "prompts.jsonl").write_text('{"prompt": "say hi"}\n{"prompt": "count"}\n')
        asked = ["model.path=loop-back-model", f"data.path={folder / 'prompts.jsonl'}", "answering=openai", cpu]
        asked += [f"answering.base_url={login(server)}", f"output={folder / 'out' / 'answers.jsonl'}"]
        asked += ["answering.retries=0", f"model.chat_template_kwargs={{text: '{READ}'}}"]
        return partial(run_entry, generate.main, "generate", asked, "", "", complete=lambda cfg: True)
    if command == "pair":
        rows = [{"prompt": "count", "answer": text} for text in ("alpha", "beta", "gamma")]
        (folder / "answers.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        asked = [f"answers.path={folder / 'answers.jsonl'}", "grader@ranker.grader=openai", cpu]
        asked += [f"output={folder / 'out' / 'pairs.jsonl'}", "ranker.grader.max_retries=0"]
        asked += [re.sub(r"^(\+?)", r"\1ranker.grader.", word) for word in of_grader]
        return partial(run_entry, pair.main, "pair", asked, "", "", complete=lambda cfg: True)
    asked = ["benchmark=mt_bench", f"benchmark.path={fastchat(folder)}", f"model.path={world.model}", cpu]
    asked += ["grader=openai", "grading.rounds=1", "benchmark.sampling.max_new_tokens=4", "grader.max_retries=0"]
    asked += [f"output={folder / 'out'}", *(re.sub(r"^(\+?)", r"\1grader.", word) for word in of_grader)]
    return partial(run_entry, evaluate.main, "evaluate", asked, "", "", complete=lambda cfg: True)


@pytest.mark.parametrize("command", ["generate", "pair", "evaluate"])
def test_what_a_server_is_asked_with_is_in_no_file_and_no_message(
    command: str, template: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Loopback(chances) as server:
        typed = type_command(command, server, template, tmp_path)
        assert typed() == 0, capsys.readouterr().err
        count = len(server.requests)
        assert count
        assert typed() == 0 and len(server.requests) == count, "given again, it asks nothing"
        if command != "generate":
            sent = server.requests[0].body
            assert (sent["api_key"], sent["other_key"], sent["effort"]) == (KEY, OURS, "low")
    told(capsys)
    assert leaks(tmp_path / "out") == []
    with Loopback(chances, key="another") as refusing:
        assert type_command(command, refusing, template, tmp_path / "refused")() == 2
        assert "***@127.0.0.1" in told(capsys)
    type_command(command, refusing, template, tmp_path / "gone")()
    told(capsys)
    assert leaks(tmp_path / "refused" / "out", tmp_path / "gone" / "out") == []


def test_replies_are_found_under_another_key_and_under_an_older_identity(tmp_path: Path) -> None:
    def grader(**values: object) -> OpenAIGrader:
        return OpenAIGrader(**{"base_url": f"http://me:{LOGIN}@host/v1", **values})  # type: ignore[arg-type]

    asked, store = call(0), ReplyStore(tmp_path)
    with store.open_for_writing():
        store.add(asked, grader(extra_body={"api_key": KEY, "effort": "low"}).identity(), GradingReply("ours"))
    assert leaks(tmp_path) == []
    for body, found in (({"api_key": "new"}, True), ({"api_key": "new", "effort": "high"}, False)):
        identity = grader(base_url="http://you:other@host/v1", extra_body={"effort": "low", **body}).identity()
        assert (ReplyStore(tmp_path).reply(asked, identity) is not None) == found == bool(store.replies(identity))
    # As a version wrote it that kept the identity as it was.
    (line,) = store.path.read_text().splitlines()
    old = {**json.loads(line), "grader": grader().identity()}
    old["key"] = asked.key(old["grader"])
    del old["digest"]
    store.path.write_text(json.dumps({**old, "digest": digest(old)[:16]}) + "\n")
    assert ReplyStore(tmp_path).reply(asked, grader().identity()) == GradingReply("ours")
    assert len(ReplyStore(tmp_path).replies(grader().identity())) == 1


def test_addresses_of_the_environment_tell_graders_apart_without_being_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, store, found = call(0), ReplyStore(tmp_path), []
    for value in (OURS, "elsewhere", OURS):
        monkeypatch.setenv(VARIABLE, value)
        cfg = load(
            "evaluate", ["benchmark=mt_bench", "model.path=x", "grader=openai", f"grader.base_url=http://{READ}/v1"]
        )
        identity = cfg.grader.identity()
        found.append(store.reply(asked, identity) is not None)
        with store.open_for_writing():
            store.add(asked, identity, GradingReply(value))
    assert found == [False, False, True]
    assert OURS not in str([json.loads(line)["grader"] for line in store.path.read_text().splitlines()])
