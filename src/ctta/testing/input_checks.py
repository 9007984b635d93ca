"""Checks of a call: modes around it, good and bad input, steps that fail."""

import torch

from ctta.testing.case import Case, assert_same, contract, run, state_of, tensors_of


@contract
def answers_one_row_of_logits_per_element(case: Case) -> None:
    logits = case.model()(case.batch(0))
    expected = case.net()(case.batch(0))
    assert logits.shape[:2] == expected.shape[:2], f"logits of shape {tuple(logits.shape)}"
    assert logits.ndim == 2 or logits.shape[2:] == (16, 16), "dense logits must have the input's size"
    assert not logits.requires_grad, "logits must be detached"


@contract
def adapts_under_eval_no_grad_and_inference_mode(case: Case) -> None:
    plain = case.model()
    expected = run(plain, case.stream())
    evaluated = case.model().eval()
    with torch.no_grad():
        assert_same(run(evaluated, case.stream()), expected, "under eval and no_grad")
    inferring = case.model()
    with torch.inference_mode():
        assert_same(run(inferring, case.stream()), expected, "under inference_mode")
    for model in (evaluated, inferring):
        assert_same(state_of(model), state_of(plain), "state under a mode")


@contract
def adapts_inside_one_autocast_as_in_many(case: Case) -> None:
    inside, outside = case.model(), case.model()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        answers = run(inside, case.stream())
    for x, answer in zip(case.stream(), answers, strict=True):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(outside(x), answer), "autocast around the loop answers by old weights"
    assert_same(state_of(inside), state_of(outside), "state under autocast")


@contract
def train_and_eval_do_not_reach_the_networks_inside(case: Case) -> None:
    model = case.model()
    modes = [module.training for module in model.source.modules()]
    model.train()
    assert model.training and [module.training for module in model.source.modules()] == modes
    assert not model.eval().training


@contract
def an_empty_batch_comes_back_as_it_is(case: Case) -> None:
    model = case.model()
    before, empty = state_of(model), case.batch(0)[:0]
    assert model(empty) is empty and model.predict(empty) is empty
    assert_same(state_of(model), before, "state after an empty batch")


@contract
def bad_input_is_refused_before_anything_changes(case: Case) -> None:
    model = case.model()
    model(case.batch(0))
    before = state_of(model)
    spoilt = case.batch(1)
    spoilt[0, 0, 0, 0] = torch.nan
    bad = [
        spoilt,
        case.batch(1).mul(torch.inf),
        case.batch(1)[0],
        case.batch(1).mul(255).byte(),
        torch.rand(()),
    ]
    for x in bad:
        for call in (model, model.predict):
            try:
                call(x)
            except (ValueError, TypeError):
                assert_same(state_of(model), before, "state after a refused batch")
            else:
                raise AssertionError(f"took a bad input: {x.dtype} {tuple(x.shape)}")


@contract
def a_step_that_is_not_finite_is_skipped(case: Case) -> None:
    model = case.model()
    student = getattr(model, "student", None)
    if student is None:
        return  # nothing is learnt, so no step can fail
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.fill_(torch.nan)
    before = [tensor.nan_to_num() for tensor in tensors_of(model)]
    assert model(case.batch(0)).shape[0] == 6, "no prediction"
    assert_same([tensor.nan_to_num() for tensor in tensors_of(model)], before, "state after a skipped step")
    assert model.num_skipped == 1 and model.num_steps == 1
    assert model.last_step is not None and model.last_step.skipped


@contract
def takes_channels_last_and_non_contiguous_input(case: Case) -> None:
    x = case.batch(0)
    expected = case.model()(x)
    strided = torch.stack([x, x], -1)[..., 0]
    assert not strided.is_contiguous()
    for variant in (x.to(memory_format=torch.channels_last), strided):
        torch.testing.assert_close(case.model()(variant), expected)
