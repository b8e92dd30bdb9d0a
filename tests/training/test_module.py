"""What the module sees to around a step: modes, number formats, what checkpoints hold, the speed it logs."""

import time
from collections import defaultdict
from pathlib import Path

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from attnpo.data.rules import BatchPlan
from attnpo.models.backbone import freeze
from attnpo.schema import UserError
from attnpo.training.module import PreferenceModule, check_models
from attnpo.training.trainer import quiet_lightning
from tests.training.stored import epoch_order
from tests.training.tiny import Copies, Fit, column, make_data, make_examples, make_module

PLAN = BatchPlan(8, 2)
FLIPS = (
    "on_train_start",
    "on_train_epoch_start",
    "on_train_batch_start",
    "on_train_batch_end",
    "on_before_zero_grad",
    "on_validation_start",
    "on_validation_epoch_start",
    "on_validation_end",
)


# ---------------------------------------------------------------------------------------------------- modes


def flip(trainer: L.Trainer, pl_module: PreferenceModule, *args: object) -> None:
    """Leaves every mode wrong, as a callback that generates samples might."""
    if trainer.state.fn == "fit":
        pl_module.policy.train(trainer.validating)
        assert pl_module.reference is not None
        pl_module.reference.train()
        pl_module.reference.requires_grad_(True)


def test_modes_are_right_at_every_step_whatever_a_callback_does(fit: Fit) -> None:
    """Each of six steps' forwards and each validation's, with one micro-batch a step; from every hook at once."""
    flipping = L.Callback()
    for hook in FLIPS:
        setattr(flipping, hook, flip)
    module = make_module(6)
    assert module.reference is not None
    modes: dict[str, set[bool]] = defaultdict(set)

    def policy(model: nn.Module, args: object) -> None:
        name = "policy" if torch.is_grad_enabled() else "policy in validation"
        modes[name].update(part.training for part in model.modules())

    def reference(model: nn.Module, args: object) -> None:
        modes["reference"].update(part.training for part in model.modules())
        modes["gradient"].update(parameter.requires_grad for parameter in model.parameters())

    module.policy.register_forward_pre_hook(policy)
    module.reference.register_forward_pre_hook(reference)
    data = make_data(make_examples(20), BatchPlan(8, 8))
    fit(module, data, steps=6, epochs=2, validate_every=1, callbacks=(flipping,))
    assert modes["policy"] == {True} and modes["policy in validation"] == {False}
    assert modes["reference"] == {False} and modes["gradient"] == {False}
    assert all(parameter.grad is None for parameter in module.reference.parameters())


class Stubborn(nn.Module):
    """A submodule that cannot be put in train mode."""

    def train(self, mode: bool = True) -> "Stubborn":
        self.training = False
        return self


def test_a_submodule_that_stays_in_eval_mode_is_named(fit: Fit) -> None:
    module = make_module(3)
    module.policy.model.model.layers[1].stub = Stubborn().train()
    with pytest.raises(
        UserError, match=r"1 modules of the policy stay in eval mode \(first: model\.model\.layers\.1\.stub\)"
    ):
        fit(module, make_data(make_examples(20), PLAN), steps=3, epochs=1)


def test_a_reference_that_cannot_be_frozen_is_refused() -> None:
    module = make_module(1).train()
    assert module.reference is not None
    module.reference.requires_grad_(True)
    with pytest.raises(UserError, match="reference must be in eval mode and without gradients"):
        check_models(module.policy, module.reference, rounding=False)
    check_models(module.policy, freeze(module.reference), rounding=False)


def test_an_activation_that_both_models_share_has_one_mode() -> None:
    module = make_module(1).train()
    assert module.reference is not None
    freeze(module.reference)
    shared = torch.nn.ReLU().eval()
    for model in (module.policy, module.reference):
        model.add_module("act", shared)
    check_models(module.policy, module.reference, rounding=False)
    module.policy.add_module("own", torch.nn.ReLU().eval())
    with pytest.raises(UserError, match=r"1 modules of the policy stay in eval mode \(first: own\)"):
        check_models(module.policy, module.reference, rounding=False)


# ---------------------------------------------------------------------------------------------------- number formats


@pytest.mark.parametrize("which", ["policy", "reference"])
def test_rounded_rotary_frequencies_are_refused(fit: Fit, which: str) -> None:
    module = make_module(3)
    rotary = getattr(module, which).model.model.rotary_emb
    rotary.inv_freq = rotary.inv_freq.to(torch.bfloat16)
    with pytest.raises(
        UserError, match=r"rotary_emb\.inv_freq is torch\.bfloat16: rotary frequencies must stay float32"
    ):
        fit(module, make_data(make_examples(20), PLAN), steps=3, epochs=1)


def test_a_precision_that_casts_the_policy_is_caught() -> None:
    """What Lightning does to the module after its construction is seen too."""
    module, data = make_module(3), make_data(make_examples(20), PLAN)
    with quiet_lightning():
        silent = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
        trainer = L.Trainer(accelerator="cpu", devices=1, precision="bf16-true", max_epochs=1, **silent)
        with pytest.raises(UserError, match="rotary frequencies must stay float32"):
            trainer.fit(module, data)


def test_weights_in_half_precision_need_stochastic_rounding() -> None:
    module = make_module(1).train()
    module.policy.model.lm_head.to(torch.bfloat16)
    with pytest.raises(
        UserError, match=r"1 of \d+ trained parameters are not float32 \(first: .*lm_head.weight, torch.bf"
    ):
        check_models(module.policy, None, rounding=False)
    check_models(module.policy, None, rounding=True)
    module.policy.model.lm_head.requires_grad_(False)
    check_models(module.policy, None, rounding=False)  # a frozen base may be short


def test_a_policy_without_anything_to_train_is_refused(fit: Fit) -> None:
    module = make_module(3)
    module.policy.requires_grad_(False)
    with pytest.raises(UserError, match="no parameter of the policy has requires_grad"):
        check_models(module.train().policy, None, rounding=False)


# ---------------------------------------------------------------------------------------------------- checkpoints


def partly_frozen(steps: int) -> PreferenceModule:
    """Returns a module that trains its second layer alone."""
    module = make_module(steps)
    module.policy.requires_grad_(False)
    module.policy.model.model.layers[1].requires_grad_(True)
    return module


def save_state(fit: Fit, folder: Path, module: PreferenceModule) -> dict[str, Tensor]:
    data = make_data(make_examples(40), PLAN)
    fit(module, data, steps=2, epochs=1, validate_every=1, max_steps=2, callbacks=(Copies(folder, 2),))
    state: dict[str, Tensor] = torch.load(folder / "2.ckpt", weights_only=True)["state_dict"]
    return state


def test_a_checkpoint_holds_what_is_trained(fit: Fit, tmp_path: Path) -> None:
    module = partly_frozen(5)
    state = save_state(fit, tmp_path / "part", module)
    trained = {name for name, value in module.named_parameters() if value.requires_grad}
    assert set(state) == trained and all(".layers.1." in name for name in trained) and len(trained) == 9
    assert set(save_state(fit, tmp_path / "whole", make_module(5))) == set(module.state_dict())


def test_a_partly_frozen_run_goes_on_as_if_unbroken(fit: Fit, tmp_path: Path) -> None:
    data = make_examples(40)
    whole, resumed = partly_frozen(5), partly_frozen(5)
    rows = fit(whole, make_data(data, PLAN), steps=5, epochs=1, validate_every=1, callbacks=(Copies(tmp_path, 2),))
    more = fit(resumed, make_data(data, PLAN), steps=5, epochs=1, validate_every=1, resume=tmp_path / "2.ckpt")
    expected = [row["train/loss"] for row in rows if row["step"] >= 2 and "train/loss" in row]
    assert column(more) == pytest.approx(expected, rel=1e-6)
    assert all(torch.equal(value, resumed.state_dict()[name]) for name, value in whole.state_dict().items())


def resume(fit: Fit, path: Path, module: PreferenceModule) -> None:
    fit(module, make_data(make_examples(40), PLAN), steps=5, epochs=1, validate_every=1, resume=path)


def test_a_checkpoint_of_other_weights_is_refused(fit: Fit, tmp_path: Path) -> None:
    path = tmp_path / "2.ckpt"
    save_state(fit, tmp_path, partly_frozen(5))
    with pytest.raises(
        UserError, match=r"does not match the 21 trained weights .* 12 missing \(first: policy\.model\."
    ) as error:
        resume(fit, path, make_module(5))
    assert "unexpected" not in str(error.value) and "shape" not in str(error.value)
    shallow = partly_frozen(5)
    shallow.policy.model.model.layers = shallow.policy.model.model.layers[:1]
    shallow.policy.model.requires_grad_(True)
    with pytest.raises(UserError, match=r"9 unexpected \(first: policy\.model\.model\.layers\.1\.self_attn\.q_proj"):
        resume(fit, path, shallow)
    wide = partly_frozen(5)
    wide.policy.model.model.layers[1].mlp.down_proj.weight = nn.Parameter(torch.zeros(32, 50))
    with pytest.raises(
        UserError, match=r"1 of another shape \(first: .*down_proj\.weight \[32, 48\], here \[32, 50\]\)"
    ):
        resume(fit, path, wide)
    torch.save({"state_dict": {}, "pytorch-lightning_version": L.__version__}, path)
    with pytest.raises(UserError, match="has no list of trained weights"):
        resume(fit, path, make_module(5))


# ---------------------------------------------------------------------------------------------------- speed


def test_speed_counts_the_step_s_pairs_and_tokens(fit: Fit) -> None:
    """Tokens over pairs is a step's mean number of tokens, padding left out, however it is cut; the short step too."""
    examples = make_examples(20)
    rows = fit(make_module(3), make_data(examples, PLAN), steps=3, epochs=1)
    order = epoch_order(20, PLAN)
    for step, row in enumerate(row for row in rows if "train/loss" in row):
        pairs = [examples[i] for i in order[8 * step : 8 * step + 8]]
        tokens = sum(len(side.prompt_ids) + len(side.response_ids) for pair in pairs for side in pair.sides)
        assert row["train/tokens_per_s"] / row["train/pairs_per_s"] == pytest.approx(tokens / len(pairs), rel=1e-5)
        assert row["train/pairs_per_s"] > 0
        assert "train/gpu_mem_gib" not in row and "train/tokens" not in row
    assert not any(name.startswith("val/") and name.endswith(("tokens", "_per_s")) for row in rows for name in row)


def test_speed_does_not_count_what_happens_between_steps(fit: Fit) -> None:
    """Waits a second and a half between two steps, as validation and saving do: the next step is no slower."""

    class Slow(L.Callback):
        def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            if trainer.state.fn == "fit" and trainer.global_step == 1:
                time.sleep(1.5)

    rows = fit(
        make_module(3), make_data(make_examples(20), PLAN), steps=3, epochs=1, validate_every=1, callbacks=(Slow(),)
    )
    assert column(rows, "train/pairs_per_s")[1] > 8 / 1.5, "8 pairs take far less than the sleep"
