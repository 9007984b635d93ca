"""Checks of a stream: reset, save, fork, copy, move and predict leave exactly the state they promise."""

import copy
import gc
import inspect
import pickle
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from ctta.checkpoint.files import load, save
from ctta.core.state import CpuState, LazyModule
from ctta.testing.case import ContractCase, assert_equal, collect_state, integer_attributes, register_check, run_stream


@register_check
def check_reset_equals_new(case: ContractCase) -> None:
    """Check that after ``reset`` a model has the state of a new one and continues like it."""
    model, new = case.make_model(), case.make_model()
    run_stream(model, case.make_stream())
    model.reset()
    assert_equal(collect_state(model), collect_state(new), "state after reset")
    assert_equal(run_stream(model, case.make_stream()), run_stream(new, case.make_stream()), "logits after reset")
    assert_equal(collect_state(model), collect_state(new), "state after reset and a stream")


@register_check
def check_lr_replaces_that_of_the_optimizer(case: ContractCase) -> None:
    """Check that a method with ``optimizer`` and an optional ``lr`` trains with ``lr``, and that a fork keeps it."""
    parameters = inspect.signature(case.method).parameters
    if "optimizer" not in parameters or "lr" not in parameters or parameters["lr"].default is not None:
        return
    net = case.make_network()
    model = case.method(net, **case.make_source_stats(net), **case.hyperparameters | {"lr": 0.0123})
    for each in (model, model.fork()):
        rates = [group["lr"] for group in each.optimizer.param_groups] if each.optimizer else []
        assert rates and set(rates) == {0.0123}, f"lr=0.0123 gives {rates}: call super().__init__(net, lr=lr, ...)"


@register_check
def check_resume_is_bit_identical(case: ContractCase) -> None:
    """Check that a saved and loaded stream continues exactly like the uninterrupted one."""
    uninterrupted, stopped = case.make_model(), case.make_model()
    first, rest = case.make_stream(6)[:3], case.make_stream(6)[3:]
    run_stream(uninterrupted, first), run_stream(stopped, first)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "stream.safetensors"
        save(stopped, path)
        assert list(Path(folder).iterdir()) == [path], "save left something behind"
        resumed = load(path, case.make_network(), method=case.method, **case.unserializable_arguments())
    for name, value in integer_attributes(uninterrupted).items():
        found = getattr(resumed, name, None)
        assert found == value, (
            f"{name} is {value} before saving and {found} after loading: declare it with register_counter({name!r})"
        )
    assert_equal(collect_state(resumed), collect_state(uninterrupted), "state after load")
    assert_equal(run_stream(resumed, rest), run_stream(uninterrupted, rest), "logits after load")
    assert_equal(collect_state(resumed), collect_state(uninterrupted), "state after load and a stream")


@register_check
def check_interleaved_streams_equal_isolated(case: ContractCase) -> None:
    """Check that two models called in turn give the logits that each gives alone."""
    one, other = case.make_model(), case.make_model()
    stream, backwards = case.make_stream(), case.make_stream()[::-1]
    mixed = [(one(x), other(y)) for x, y in zip(stream, backwards, strict=True)]
    also_alone = run_stream(case.make_model(), backwards)
    assert_equal([logits for logits, _ in mixed], case.expected_logits, "first of two interleaved streams")
    assert_equal([logits for _, logits in mixed], also_alone, "second of two interleaved streams")


@register_check
def check_forks_share_only_the_source(case: ContractCase) -> None:
    """Check that a fork equals a new model, shares the source weights, and is otherwise independent."""
    model = case.make_model()
    model(case.make_batch(7))
    fork = model.fork()
    shared = {id(tensor) for tensor in (*model.source.parameters(), *model.source.buffers())}
    assert {id(tensor) for tensor in (*fork.source.parameters(), *fork.source.buffers())} == shared, (
        "a fork must share the source's tensors"
    )
    assert {id(layer) for layer in fork.source.modules()}.isdisjoint(id(layer) for layer in model.source.modules()), (
        "a fork must have layers of its own, since layers hold the mode of the call in progress"
    )
    own = {id(tensor) for tensor in (*model.parameters(), *model.buffers())} - shared
    assert own.isdisjoint(id(tensor) for tensor in (*fork.parameters(), *fork.buffers())), "a fork shares more"
    before, expected = collect_state(model), case.expected_logits
    assert_equal(run_stream(fork, case.make_stream()), expected, "a fork's logits and a new model's")
    assert_equal(collect_state(model), before, "the forked stream's state")
    fork.double()
    assert_equal(collect_state(model), before, "state after a fork's .double()")


@register_check
def check_global_rng_is_unused(case: ContractCase) -> None:
    """Check that torch's global random generator is neither read nor advanced."""
    state = torch.get_rng_state()
    model = case.make_model()
    expected = run_stream(model, case.make_stream())
    model.predict(case.make_batch(0))
    assert torch.equal(torch.get_rng_state(), state), "the global generator moved"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(12345)
        assert_equal(run_stream(case.make_model(), case.make_stream()), expected, "under another global seed")


@register_check
def check_predict_equals_next_adapt(case: ContractCase) -> None:
    """Check that ``predict`` changes nothing and returns what ``adapt`` returns next."""
    model = case.make_model()
    model(case.make_batch(9))
    for x in case.make_stream():
        before, step = collect_state(model), model.last_step
        predicted = model.predict(x)
        with torch.inference_mode():
            assert torch.equal(model.predict(x), predicted), "predict differs from itself"
        assert_equal(collect_state(model), before, "state after predict")
        assert model.last_step is step, "predict wrote last_step"
        assert torch.equal(predicted, model.adapt(x)), "predict is not what adapt returns next"


@register_check
def check_frozen_only_predicts(case: ContractCase) -> None:
    """Check that a frozen model predicts without adapting, also after ``reset``, until ``unfreeze``."""
    model = case.make_model()
    model(case.make_batch(9))
    before = collect_state(model)
    expected = model.predict(case.make_batch(0))
    assert torch.equal(model.freeze()(case.make_batch(0)), expected), "a frozen model returns other logits than predict"
    assert_equal(collect_state(model), before, "state while frozen")
    assert model.reset().frozen, "frozen is a mode and survives a reset"
    model.unfreeze()(case.make_batch(0))
    assert model.num_steps == 1, "an unfrozen model does not adapt"


@register_check
def check_copies_are_independent(case: ContractCase) -> None:
    """Check that deep copies and unpickled models continue alike, without affecting the original."""
    model = case.make_model()
    run_stream(model, case.make_stream())
    copied = copy.deepcopy(model)
    unpickled = pickle.loads(pickle.dumps(model))
    before = collect_state(model)
    expected = run_stream(copied, case.make_stream())
    assert_equal(collect_state(model), before, "state of the original after its copy adapted")
    assert_equal(run_stream(unpickled, case.make_stream()), expected, "a pickled stream and a copied one")
    assert_equal(run_stream(model, case.make_stream()), expected, "the original and its copy")
    assert_equal(collect_state(model), collect_state(copied), "the state of original and copy")


@register_check
def check_moves_mid_stream(case: ContractCase) -> None:
    """Check that a stream keeps its state on ``to()``, and its dtype on ``reset``."""
    model = case.make_model()
    run_stream(model, case.make_stream())
    before = collect_state(model)
    model.to("cpu")
    assert_equal(collect_state(model), before, "state after .to()")
    model.double()
    assert model(case.make_batch(0).double()).dtype == torch.float64, "logits are not float64 after .double()"
    moved = [part for part in model.modules() if not isinstance(part, CpuState)]
    tensors = [tensor for part in moved for tensor in (*part.parameters(recurse=False), *part.buffers(recurse=False))]
    floats = [tensor for tensor in tensors if tensor.is_floating_point()]
    assert all(tensor.dtype == torch.float64 for tensor in floats), ".double() left something behind"
    model.reset()
    assert model(case.make_batch(0).double()).dtype == torch.float64, "reset lost the dtype"


@register_check
def check_state_is_where_the_network_is(case: ContractCase) -> None:
    """Check that a constructor, a fork and a reset create state where the network is; meta is any accelerator."""
    net = case.make_network()
    given = case.make_source_stats(net) | case.hyperparameters
    if "source_stats" in given:
        given["source_stats"].is_verified = True  # a network without values has no fingerprint
    model = case.method(net.to("meta"), **given)
    for name, build in {"the constructor": lambda: model, "fork()": model.fork, "reset()": model.reset}.items():
        built = build()
        tensors = {f"self.{key}": value for key, value in vars(built).items() if isinstance(value, Tensor)}
        for prefix, part in built.named_modules():
            buffers = part.named_buffers(prefix, recurse=False)
            tensors |= dict(part.named_parameters(prefix, recurse=False))
            tensors |= {
                key: value
                for key, value in buffers
                if not (isinstance(part, LazyModule) and part.stays_on_cpu(key.rpartition(".")[2]))
            }
        left = sorted(key for key, value in tensors.items() if value.device.type != "meta")
        assert not left, f"{name} leaves tensors on the CPU: {', '.join(left)}; register them as buffers"


@register_check
def check_memory_is_bounded(case: ContractCase) -> None:
    """Check that a stream allocates no tensors that stay."""

    def count_bytes() -> int:
        gc.collect()
        tensors = [item for item in gc.get_objects() if issubclass(type(item), Tensor)]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    gc.freeze()  # what exists already is neither searched nor counted, which would take most of the time
    try:
        model, x = case.make_model(), case.make_batch(0)
        for _ in range(3):  # an optimizer creates its state at the first step
            model(x)
        before = count_bytes()
        for _ in range(case.num_steps):
            model(x)
        growth = count_bytes() - before
    finally:
        gc.unfreeze()
    assert growth <= 0, f"{growth} bytes more after {case.num_steps} steps"
