"""Sample answers of the trained policy beside the reference's, for a person to read."""

import json
import logging
from pathlib import Path

from transformers import PreTrainedModel

from attnpo.data.prompts import Prompt
from attnpo.models.generate import context_length
from attnpo.schema import Sampling
from attnpo.studies.answering import chat_generator, encode_prompts
from attnpo.studies.inputs import Inputs
from attnpo.studies.policies import load_start
from attnpo.training.settings import CallbackSettings

log = logging.getLogger(__name__)


def write_samples(inputs: Inputs, policy: PreTrainedModel, settings: CallbackSettings, path: Path) -> None:
    """Nothing; answers the first ``settings.samples`` validation prompts with both models, a JSON line per prompt.

    Only pairs that are trained on, and prompts that leave room for ``settings.sample_tokens`` within lengths.max_length
    and the model's positions.
    """
    ground = inputs.ground
    trained = {example.pair_id for example in inputs.examples["val"].examples}
    pairs = [pair for pair in inputs.pairs["val"].pairs if pair.pair_id in trained]
    limit = min(ground.cfg.lengths.max_length, context_length(policy.config) or ground.cfg.lengths.max_length)
    encoded = encode_prompts(
        [Prompt(pair.pair_id, pair.prompt) for pair in pairs], ground.chat, settings.sample_tokens, limit
    )
    pairs = [pair for pair in pairs if pair.pair_id in encoded.kept][: settings.samples]
    if not pairs:
        log.info("no validation prompt leaves room for %d sample tokens", settings.sample_tokens)
        return
    sampling = Sampling(max_new_tokens=settings.sample_tokens, seed=ground.cfg.seed)
    reference = load_start(ground)
    reference.to(policy.device)  # type: ignore[arg-type]
    answers = {
        name: chat_generator(model, ground.chat).generate([pair.prompt for pair in pairs], sampling)
        for name, model in (("policy", policy), ("reference", reference))
    }
    with path.open("w", encoding="utf-8") as file:
        for i, pair in enumerate(pairs):
            row = {"prompt": list(pair.prompt), **{name: texts[i] for name, texts in answers.items()}}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    log.info("%d sample answers in %s", len(pairs), path)
