"""Sample answers of the trained policy beside the reference's, for a person to read."""

import json
import logging
from pathlib import Path

from transformers import PreTrainedModel

from attnpo.models.generate import HFGenerator
from attnpo.models.loading import load_model
from attnpo.schema import Sampling
from attnpo.studies.inputs import Inputs
from attnpo.training.settings import CallbackSettings

log = logging.getLogger(__name__)


def write_samples(inputs: Inputs, policy: PreTrainedModel, settings: CallbackSettings, path: Path) -> None:
    """Nothing; answers the first ``settings.samples`` validation prompts with both models, a JSON line per prompt."""
    ground = inputs.ground
    pairs = inputs.pairs["val"].pairs[: settings.samples]
    sampling = Sampling(max_new_tokens=settings.sample_tokens, seed=ground.cfg.seed)
    reference = load_model(ground.model.path, dtype=ground.model.dtype, revision=ground.model.revision)
    answers = {
        name: HFGenerator(model, ground.tokenizer, ground.chat.prompt_ids).generate(
            [pair.prompt for pair in pairs], sampling
        )
        for name, model in (("policy", policy), ("reference", reference))
    }
    with path.open("w", encoding="utf-8") as file:
        for i, pair in enumerate(pairs):
            row = {"prompt": list(pair.prompt), **{name: texts[i] for name, texts in answers.items()}}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    log.info("%d sample answers in %s", len(pairs), path)
