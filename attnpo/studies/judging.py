"""The judge as a component of a run: its prompts' rules, its model, and how it is loaded only when needed.

The setting's other judge is described here too: the model whose attention ``judge=other`` reads in place of the own.
"""

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from attnpo.models.spec import DTYPES
from attnpo.objectives.base import LengthFrom
from attnpo.schema import UserError, check_choice, check_least
from attnpo.studies.files import find_file
from attnpo.text.alignment import AlignMethod
from attnpo.text.judge_template import JudgePrompts, JudgeRules
from attnpo.weights.base import Tools
from attnpo.weights.layers import Depth

if TYPE_CHECKING:
    import torch

    from attnpo.models.spec import ModelSpec
    from attnpo.text.chat import ChatFormat


@dataclass(frozen=True)
class Judge(JudgeRules):
    """The judge's prompt rules (``JudgeRules``) and its model.

    ``path`` None is the run's own model and chat format. ``verdict`` also reads the two label logits, which runs the
    full depth; without it the forward stops behind the deepest stored layer. ``token_budget`` is tokens per forward.
    ``other``: another model is meant, so ``path`` None is one that ``prepare`` has yet to build, never the own model.
    """

    path: str | None = None
    revision: str | None = None
    dtype: str = "float32"
    chat_template: str | None = None
    verdict: bool = True
    token_budget: int = 16384
    other: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("judge.dtype", self.dtype, DTYPES)
        check_least("judge", 1, token_budget=self.token_budget)

    def rules(self) -> JudgeRules:
        """The prompt rules alone, with the template's path settled."""
        plain = JudgeRules(**{item.name: getattr(self, item.name) for item in fields(JudgeRules)})
        return replace(plain, template_file=str(find_file(self.template_file, "judge.template_file")))


@dataclass(frozen=True)
class OtherJudge:
    """The other judge of a setting, which ``judge=other`` takes its keys from.

    ``path`` None is the model that ``prepare`` builds as one. ``layer`` is the one to read, ``align`` and
    ``length_from`` are what its tokens ask of ``align.method`` and ``objective.length_from``: levenshtein and source
    for the run's own tokenizer, characters and train for another.
    """

    template_file: str
    path: str | None = None
    revision: str | None = None
    chat_template: str | None = None
    dtype: str = "float32"
    max_length: int = 2048
    max_response_length: int = 768
    layer: int | str = "last"
    align: AlignMethod = AlignMethod.LEVENSHTEIN
    length_from: LengthFrom = LengthFrom.SOURCE

    def __post_init__(self) -> None:
        check_choice("other_judge.dtype", self.dtype, DTYPES)
        check_least("other_judge", 1, max_length=self.max_length, max_response_length=self.max_response_length)


class JudgeRoom:
    """A judge that is described cheaply and loaded at most once.

    Args:
        judge: the component. UserError when another model is meant and none is named, and for a tokenizer that gives
            no characters.
        model: the run's model, which judges unless ``judge.path`` names another.
        chat: the run's chat format, used unless ``judge.path`` names another model.
    """

    def __init__(self, judge: Judge, model: "ModelSpec", chat: "ChatFormat") -> None:
        from attnpo.models.loading import load_tokenizer
        from attnpo.text.chat import ChatFormat

        own = judge.path is None
        if own and judge.other:
            raise UserError(
                "judge.other=true means another model than the run's own, and judge.path is null: set "
                "other_judge.path=FOLDER_OR_HUB_NAME (with judge=other) or judge.path"
            )
        self.tokenizer = chat.tokenizer
        self.judge = judge
        self.path = model.path if judge.path is None else judge.path
        self.revision = model.revision if own else judge.revision
        if not own:
            self.tokenizer = load_tokenizer(self.path, self.revision)
            if not self.tokenizer.is_fast:
                raise UserError(
                    f"judge.path={self.path}: expected a fast tokenizer, which tells each token's characters, got "
                    f"{type(self.tokenizer).__name__}, which does not, so its weights cannot be carried onto the "
                    "training tokens: name a model folder with a tokenizer.json, or another judge"
                )
            chat = ChatFormat(self.tokenizer, read_template(judge.chat_template, "judge.chat_template"))
        self.prompts = JudgePrompts(judge.rules(), chat)

    @property
    def num_layers(self) -> Depth:
        """Depth of the judge, with the layers that have attention, read from its config alone.

        UserError when there is none to read.
        """
        from attnpo.models.loading import described, model_depth

        found, depth = described(self.path, self.revision), model_depth(self.path, self.revision)
        if not found.layers:
            raise UserError(
                f"judge: no layer of {self.path} ({found.name}) has softmax attention that can be read, since none "
                "goes through transformers' AttentionInterface; name another model as judge.path"
            )
        return Depth(depth, found.layers)

    @property
    def num_heads(self) -> int:
        """Query heads of each layer of the judge, read from its config alone; UserError when layers differ in it."""
        from attnpo.models.loading import model_heads

        return model_heads(self.path, self.revision)

    def fingerprint(self) -> dict[str, Any]:
        """What identifies the judge's numbers: weights, number format, attention kernel family."""
        from attnpo.models.judge import kernel_for
        from attnpo.models.loading import described, weights_fingerprint

        return {
            "weights": weights_fingerprint(self.path, self.revision),
            "dtype": self.judge.dtype,
            "kernel": kernel_for(described(self.path, self.revision).attention),
        }

    def tools(self, device: "torch.device") -> Tools:
        """Model and prompts for capturing; loads the model onto ``device``."""
        from attnpo.models.judge import CausalJudge, kernel_for
        from attnpo.models.loading import described, load_model

        model = load_model(self.path, dtype=self.judge.dtype, revision=self.revision)
        model.to(device)  # type: ignore[arg-type]
        kernel = kernel_for(described(self.path, self.revision).attention)
        judge = CausalJudge(model, token_budget=self.judge.token_budget, kernel=kernel)
        return Tools(judge=judge, prompts=self.prompts, verdict=self.judge.verdict)


def read_template(template: str | None, key: str = "model.chat_template") -> str | None:
    """A chat template's text: as given when it holds Jinja, else the content of the file it names."""
    if template is None or "{%" in template or "{{" in template:
        return template
    path = find_file(template, key)
    text = path.read_text(encoding="utf-8")
    if "{" not in text:
        raise UserError(f"{key}={template}: {path} holds no Jinja template")
    return text.removesuffix("\n")
