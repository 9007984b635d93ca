"""Checks of one call: the modes around it, valid and invalid inputs, steps that fail."""

import torch

from ctta.errors import InputError
from ctta.testing.case import (
    ContractCase,
    assert_equal,
    collect_state,
    collect_tensors,
    count_optimizer_steps,
    register_check,
    run_stream,
)


@register_check
def check_returns_detached_logits(case: ContractCase) -> None:
    """Check that logits have the network's number of rows and classes, dense ones the input's size, and no graph."""
    logits = case.make_model()(case.make_batch(0))
    expected = case.make_network()(case.make_batch(0))
    assert logits.shape[:2] == expected.shape[:2], f"logits of shape {tuple(logits.shape)}"
    assert logits.ndim == 2 or logits.shape[2:] == (16, 16), "dense logits must have the input's size"
    assert not logits.requires_grad, "logits must be detached"


@register_check
def check_adapts_under_no_grad_and_inference_mode(case: ContractCase) -> None:
    """Check that ``eval()``, ``no_grad`` and ``inference_mode`` around the loop change nothing."""
    plain = case.make_model()
    expected = run_stream(plain, case.make_stream())
    without_grad = case.make_model().eval()
    with torch.no_grad():
        assert_equal(run_stream(without_grad, case.make_stream()), expected, "logits under eval and no_grad")
    inferring = case.make_model()
    with torch.inference_mode():
        assert_equal(run_stream(inferring, case.make_stream()), expected, "logits under inference_mode")
    for model in (without_grad, inferring):
        assert_equal(collect_state(model), collect_state(plain), "state under eval, no_grad or inference_mode")


@register_check
def check_autocast_sees_updated_weights(case: ContractCase) -> None:
    """Check that one ``autocast`` around the whole loop equals one around each call."""
    around_loop, around_call = case.make_model(), case.make_model()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = run_stream(around_loop, case.make_stream())
    for x, logits in zip(case.make_stream(), expected, strict=True):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(around_call(x), logits), "autocast around the loop predicts with cached weights"
    assert_equal(collect_state(around_loop), collect_state(around_call), "state under autocast")


@register_check
def check_train_and_eval_keep_network_modes(case: ContractCase) -> None:
    """Check that ``train()`` and ``eval()`` set the flag of the model and leave its networks alone."""
    model = case.make_model()
    modes = [module.training for module in model.source.modules()]
    model.train()
    assert model.training, "train() does not set the model's flag"
    assert [module.training for module in model.source.modules()] == modes, "train() changed the modes of the source"
    assert not model.eval().training, "eval() does not clear the model's flag"


@register_check
def check_empty_batch_is_returned(case: ContractCase) -> None:
    """Check that an empty batch comes back as the same object and changes nothing."""
    model = case.make_model()
    before, empty = collect_state(model), case.make_batch(0)[:0]
    assert model(empty) is empty, "calling the model with an empty batch must return that batch"
    assert model.predict(empty) is empty, "predict of an empty batch must return that batch"
    assert_equal(collect_state(model), before, "state after an empty batch")


@register_check
def check_bad_input_changes_nothing(case: ContractCase) -> None:
    """Check that NaN, infinite, integer and unbatched inputs raise InputError or TypeError before anything changes."""
    model = case.make_model()
    model(case.make_batch(0))
    before = collect_state(model)
    with_nan = case.make_batch(1)
    with_nan[0, 0, 0, 0] = torch.nan
    bad = [
        with_nan,
        case.make_batch(1).mul(torch.inf),
        case.make_batch(1)[0],
        case.make_batch(1).mul(255).byte(),
        torch.rand(()),
    ]
    for x in bad:
        for call in (model, model.predict):
            try:
                call(x)
            except (InputError, TypeError):
                assert_equal(collect_state(model), before, "state after a rejected batch")
            else:
                raise AssertionError(f"a bad input was accepted: {x.dtype} {tuple(x.shape)}")


@register_check
def check_non_finite_step_is_skipped(case: ContractCase) -> None:
    """Check that a step whose loss is not finite predicts, is counted, and updates nothing.

    A method that selects samples may select none of a batch without finite predictions, and take no step at all.
    """
    model = case.make_model()
    student = getattr(model, "student", None)
    if student is None:
        return  # a method without a student makes no updates that could fail
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.fill_(torch.nan)
    before = [tensor.nan_to_num() for tensor in collect_tensors(model)]
    with count_optimizer_steps(model) as steps:
        assert model(case.make_batch(0)).shape[0] == 6, "no prediction for a batch whose loss is not finite"
    assert_equal([tensor.nan_to_num() for tensor in collect_tensors(model)], before, "state after a skipped step")
    assert not steps, "the optimizer stepped with a loss that is not finite: call self.minimize(loss), which checks it"
    assert model.num_steps == 1, f"num_steps is {model.num_steps} after one batch whose loss is not finite, expected 1"
    step = model.last_step
    if model.num_skipped == 0 and (step is None or (step.selected is not None and not step.selected > 0)):
        return  # it selected no sample, so there was no loss to minimize
    assert model.num_skipped == 1, (
        f"num_skipped is {model.num_skipped} after one batch whose loss is not finite, expected 1"
    )
    assert model.last_step is not None and model.last_step.skipped, (
        f"last_step is {model.last_step} after a skipped step, expected one with skipped=True"
    )


@register_check
def check_accepts_any_memory_format(case: ContractCase) -> None:
    """Check that channels-last and non-contiguous inputs give the same logits, up to rounding."""
    x = case.make_batch(0)
    expected = case.make_model()(x)
    strided = torch.stack([x, x], -1)[..., 0]
    assert not strided.is_contiguous(), "the strided batch of this check is contiguous"
    for name, variant in (("channels-last", x.to(memory_format=torch.channels_last)), ("non-contiguous", strided)):
        message = f"logits of a {name} batch differ by more than rounding from those of a contiguous one"
        torch.testing.assert_close(case.make_model()(variant), expected, msg=message)
