import logging
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from attnpo.models import trial
from attnpo.models.layouts import LAYOUTS, _log_unshared_prompts, packed_layout, padded_layout, shared_prefix_layout
from attnpo.models.lora import AdapterDisabledReference, add_lora
from attnpo.models.scored import ScoredLM
from attnpo.models.spec import LoraSpec
from attnpo.models.trial import make_small_copy, select_layout
from attnpo.schema import UserError

Build = Callable[..., PreTrainedModel]


def test_rows_and_predict_index_by_hand() -> None:
    inputs, ids, mask = padded_layout([([1, 5], [7, 8, 9]), ([1], [6])], 0)
    assert inputs.input_ids.tolist() == [[1, 5, 7, 8, 9], [1, 6, 0, 0, 0]]
    assert inputs.attention_mask is not None
    assert inputs.attention_mask.tolist() == [[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]]
    assert inputs.position_ids.tolist() == [[0, 1, 2, 3, 4]] * 2
    assert ids.tolist() == [[7, 8, 9], [6, 0, 0]]
    assert mask.tolist() == [[True, True, True], [True, False, False]]
    # row 0: the state at position 1 predicts 7; row 1: flat 5 + 0 predicts 6.
    assert inputs.predict_index.tolist() == [[1, 2, 3], [5, 0, 0]]
    assert inputs.segments is None


def test_packed_by_hand() -> None:
    laid = packed_layout([([1, 5], [7, 8, 9]), ([1], [6])], 0)
    inputs = laid.inputs
    assert inputs.input_ids.tolist() == [[1, 5, 7, 8, 9, 1, 6]]
    assert inputs.position_ids.tolist() == [[0, 1, 2, 3, 4, 0, 1]]
    assert inputs.predict_index.tolist() == [[1, 2, 3], [5, 0, 0]]
    assert inputs.segments is not None and inputs.segments.tolist() == [[0, 5, 0, 0], [5, 2, 0, 0]]
    assert laid.response_ids.tolist() == [[7, 8, 9], [6, 0, 0]]
    assert laid.response_mask.tolist() == [[True, True, True], [True, False, False]]


def test_shared_prefix_by_hand() -> None:
    laid = shared_prefix_layout([([1, 5], [7, 8, 9]), ([2, 3, 4], [6]), ([1, 5], [10, 11]), ([2, 3, 4], [])], 0)
    inputs = laid.inputs
    assert inputs.input_ids.tolist() == [[1, 5, 7, 8, 9, 10, 11, 2, 3, 4, 6]]
    assert inputs.position_ids.tolist() == [[0, 1, 2, 3, 4, 2, 3, 0, 1, 2, 3]]
    # The state of 5, at place 1, predicts the first token of both responses.
    assert inputs.predict_index.tolist() == [[1, 2, 3], [9, 0, 0], [1, 5, 0], [0, 0, 0]]
    assert inputs.segments is not None
    assert inputs.segments.tolist() == [[0, 5, 0, 0], [5, 2, 0, 2], [7, 4, 0, 0], [11, 0, 7, 3]]
    assert laid.response_ids.tolist() == [[7, 8, 9], [6, 0, 0], [10, 11, 0], [0, 0, 0]]


def test_pairs_with_other_prompts_lie_apart_and_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    _log_unshared_prompts.cache_clear()
    rows = [([1, 5], [7]), ([3, 4], [6]), ([5], [8, 9]), ([3, 4], [2])]
    with caplog.at_level(logging.INFO, "attnpo"):
        inputs = shared_prefix_layout(rows, 0).inputs
        shared_prefix_layout(rows, 0)
    assert inputs.input_ids.tolist() == [[1, 5, 7, 5, 8, 9, 3, 4, 6, 2]]
    assert inputs.position_ids.tolist() == [[0, 1, 2, 0, 1, 2, 0, 1, 2, 2]]
    assert inputs.segments is not None and inputs.segments[:, 3].tolist() == [0, 0, 0, 2]
    assert inputs.predict_index.tolist() == [[1, 0], [7, 0], [3, 4], [7, 0]]
    assert [record.message for record in caplog.records if "the prompts of some pairs differ" in record.message]
    assert len(caplog.records) == 1


def test_rows_of_an_odd_number_are_no_pairs() -> None:
    rows = [([1, 5], [7]), ([1, 5], [8]), ([1, 5], [9])]
    assert shared_prefix_layout(rows, 0).inputs.input_ids.tolist() == packed_layout(rows, 0).inputs.input_ids.tolist()


def test_no_token_is_forwarded_twice(tiny: Build) -> None:
    model, seen = tiny("llama"), []
    model.model.layers[0].mlp.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0].shape[:-1]))
    scored = ScoredLM(model)
    seen.clear()
    prompt, chosen, rejected = [5, 3], [4, 9], [7, 1]
    rows = [([3] * p, [4] * c) for p, c in zip(prompt, chosen, strict=True)]
    rows += [([3] * p, [6] * r) for p, r in zip(prompt, rejected, strict=True)]
    for name in ("shared_prefix", "packed", "padded"):
        scored(*LAYOUTS[name](rows, 0))
    total = sum(prompt) + sum(chosen) + sum(rejected)
    assert seen == [(1, total), (1, total + sum(prompt)), (4, 12)]


@pytest.mark.parametrize("layout", LAYOUTS.values())
def test_errors_name_row_and_remedy(layout: Callable[..., object]) -> None:
    with pytest.raises(UserError, match="row 1: the prompt has no token"):
        layout([([1], [2]), ([], [3])], 0)
    with pytest.raises(UserError, match="at least one sequence"):
        layout([], 0)


# ------------------------------------------------------------------------------------------------ which a model takes
@pytest.mark.parametrize("name", ["auto", "packed"])
def test_every_family_takes_every_layout(tiny: Build, family: str, name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Holds that ``auto`` begins with ``shared_prefix_layout``."""
    models = [ScoredLM(tiny(family)) for _ in range(2 if family == "llama" else 1)]
    state, modes = torch.get_rng_state(), [module.training for module in models[0].model.modules()]
    with caplog.at_level(logging.INFO, "attnpo"):
        chosen = select_layout(name, models, {"logps", "hidden", "joint:kl_ref_policy"})
    assert chosen is LAYOUTS["shared_prefix" if name == "auto" else name]
    assert not caplog.records
    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in models[0].model.modules()] == modes
    assert all(p.grad is None for p in models[0].parameters())


def test_adapters_on_and_off_take_the_row(tiny: Build) -> None:
    policy = ScoredLM(add_lora(tiny("llama"), LoraSpec(rank=2)))
    off = AdapterDisabledReference(policy)
    for name, parameter in policy.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    rows = [([5, 9, 3], [7, 8]), ([5, 9, 3], [4])]
    assert select_layout("shared_prefix", [policy, off]) is shared_prefix_layout
    for model in (policy, off):
        with torch.no_grad():
            assert torch.allclose(
                model(*shared_prefix_layout(rows, 0)).logps, model(*padded_layout(rows, 0)).logps, atol=1e-5
            )
    with torch.no_grad():
        assert not torch.allclose(policy(*padded_layout(rows, 0)).logps, off(*padded_layout(rows, 0)).logps, atol=1e-2)


def refused(name: str, model: PreTrainedModel, caplog: pytest.LogCaptureFixture, *requests: str) -> str:
    """The one line that says why a layout is not taken; the model is left as it was."""
    before = model.config._attn_implementation
    with caplog.at_level(logging.INFO, "attnpo"):
        assert select_layout(name, [ScoredLM(model)], requests) is padded_layout
    assert model.config._attn_implementation == before
    lines = [record for record in caplog.records if "padded rows are used instead" in record.message]
    assert len(lines) == 1
    assert lines[0].levelno == (logging.INFO if name == "auto" else logging.WARNING)
    return str(lines[0].message)


def test_where_prompts_cannot_be_shared_rows_are_packed(tiny: Build, caplog: pytest.LogCaptureFixture) -> None:
    """Dropout draws for two answers to one prompt apart, which a shared prompt cannot."""
    with caplog.at_level(logging.INFO, "attnpo"):
        assert select_layout("auto", [ScoredLM(tiny("llama", attention_dropout=0.25))]) is packed_layout
    (line,) = [record.message for record in caplog.records]
    assert line.startswith("layout shared_prefix: ") and "packed rows are used instead" in line


def test_a_layer_that_mixes_along_the_row_falls_back(tiny: Build, caplog: pytest.LogCaptureFixture) -> None:
    model = tiny("llama")
    model.model.layers[1].register_forward_hook(lambda module, inputs, output: output + 0.01 * output.cumsum(1))
    line = refused("packed", model, caplog)
    assert line.startswith("layout packed: LlamaForCausalLM produces different results (final states differ by ")


def test_a_backbone_that_does_not_hand_the_plan_on_falls_back(
    tiny: Build, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny("llama")
    forward = model.model.forward

    def strict(input_ids: Tensor, attention_mask: Tensor | None = None, **more: object) -> object:
        if "segment_plan" in more:
            raise TypeError("unexpected keyword argument")
        return forward(input_ids=input_ids, attention_mask=attention_mask, **more)

    monkeypatch.setattr(model.model, "forward", strict)
    assert "cannot follow segments of a row (TypeError: unexpected keyword argument)" in refused(
        "shared_prefix", model, caplog
    )


def test_a_plan_lost_on_the_way_falls_back(
    tiny: Build, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny("llama")
    forward = model.model.forward

    def deaf(segment_plan: object = None, **more: object) -> object:
        return forward(**more)

    monkeypatch.setattr(model.model, "forward", deaf)
    assert "produces different results" in refused("shared_prefix", model, caplog)


def test_what_else_speaks_against_a_layout(tiny: Build, caplog: pytest.LogCaptureFixture) -> None:
    for request in ("input_gradient", "group:anchors"):
        expected = f"layout packed: {request} needs rows that contain one sequence each; padded rows are used"
        assert expected in refused("auto", tiny("llama"), caplog, request, "logps")
        caplog.clear()
    assert "uses dropout with rate 0.25" in refused("shared_prefix", tiny("llama", attention_dropout=0.25), caplog)
    caplog.clear()
    model = tiny("llama")
    model.model._can_set_attn_implementation = lambda: False
    assert "attention does not go through transformers' AttentionInterface" in refused("packed", model, caplog)
    caplog.clear()
    assert "has no weights yet" in refused("packed", tiny("llama").to("meta"), caplog)


def test_a_model_that_cannot_run_at_all_is_no_reason_to_fall_back(tiny: Build) -> None:
    scored = ScoredLM(tiny("llama"))
    scored.model.model.layers[0].register_forward_pre_hook(lambda module, inputs: (inputs[0].double(),))
    with pytest.raises(RuntimeError, match="dtype"):
        select_layout("packed", [scored])


def test_names_are_checked(tiny: Build, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "attnpo"):
        assert select_layout("padded", [ScoredLM(tiny("llama"))], device="cuda") is padded_layout
    assert not caplog.records
    with pytest.raises(
        UserError, match="layout='shared' is unknown: choose one of auto, padded, packed, shared_prefix"
    ):
        select_layout("shared", [])


# ------------------------------------------------------------------------------------------------ on another device


def test_few_layers_hold_one_of_every_kind(tiny: Build) -> None:
    model = tiny("gemma2").to(torch.bfloat16)
    ScoredLM(model)(
        *packed_layout([([5, 9], [7, 8])], 0)
    )  # the model's attention is set to that of segments from here on
    small = make_small_copy(model, torch.device("cpu"))
    kinds = model.config.layer_types
    assert set(small.config.layer_types) == set(kinds) and len(small.model.layers) == len(small.config.layer_types)
    assert len(make_small_copy(tiny("llama"), torch.device("cpu")).model.layers) == 1
    assert {parameter.dtype for parameter in small.parameters()} == {torch.bfloat16}
    assert small.config._attn_implementation == "eager" and model.config._attn_implementation != "eager"
    assert len(model.model.layers) == len(kinds)


def test_kernels_that_mix_along_the_row_there_fall_back(
    tiny: Build, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def leaky(model: PreTrainedModel, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
        small = make_small_copy(model, torch.device("cpu"), dtype)
        small.model.layers[0].register_forward_hook(lambda module, inputs, output: output + 0.01 * output.cumsum(1))
        return small

    monkeypatch.setattr(trial, "make_small_copy", leaky)
    with caplog.at_level(logging.INFO, "attnpo"):
        assert select_layout("packed", [ScoredLM(tiny("llama"))], device="meta") is padded_layout
    (line,) = [record.message for record in caplog.records]
    assert line.startswith("layout packed: LlamaForCausalLM on meta produces different results")


def test_a_device_that_is_not_there_falls_back(tiny: Build, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "attnpo"):
        assert select_layout("packed", [ScoredLM(tiny("llama"))], device="xpu") is padded_layout
    assert "LlamaForCausalLM cannot be checked on xpu: a small copy cannot be built" in caplog.text


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_auto_shares_prompts_on_a_gpu(tiny: Build, family: str) -> None:
    model = ScoredLM(tiny(family))
    assert select_layout("auto", [model], device="cuda") is shared_prefix_layout
