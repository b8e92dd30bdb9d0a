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
    """Nothing; answers the first ``settings.samples`` validation prompts with both models, a JSON line per prompt.

    Prompts that leave no room for an answer of ``settings.sample_tokens`` within lengths.max_length are passed over.
    """
    ground = inputs.ground
    room = ground.cfg.lengths.max_length - settings.sample_tokens
    fitting = {one.pair_id for one in inputs.examples["val"].examples if len(one.chosen.prompt_ids) <= room}
    pairs = [pair for pair in inputs.pairs["val"].pairs if pair.pair_id in fitting][: settings.samples]
    if not pairs:
        log.info("no validation prompt leaves room for %d sample tokens", settings.sample_tokens)
        return
    sampling = Sampling(max_new_tokens=settings.sample_tokens, seed=ground.cfg.seed)
    reference = load_model(ground.model.path, dtype=ground.model.dtype, revision=ground.model.revision)
    answers = {
        name: HFGenerator(
            model, ground.tokenizer, ground.chat.prompt_ids, end_ids=sorted(ground.chat.end_ids)
        ).generate([pair.prompt for pair in pairs], sampling)
        for name, model in (("policy", policy), ("reference", reference))
    }
    with path.open("w", encoding="utf-8") as file:
        for i, pair in enumerate(pairs):
            row = {"prompt": list(pair.prompt), **{name: texts[i] for name, texts in answers.items()}}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    log.info("%d sample answers in %s", len(pairs), path)
