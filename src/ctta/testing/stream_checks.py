"""Checks of a stream: reset, save, fork, copy, move, predict, and no trace of anything else."""

import copy
import gc
import io
import pickle
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from ctta.checkpoint.files import load, save
from ctta.testing.case import Case, assert_same, contract, integers_of, run, state_of


@contract
def reset_equals_new(case: Case) -> None:
    model, new = case.model(), case.model()
    run(model, case.stream())
    model.reset()
    assert_same(state_of(model), state_of(new), "state after reset")
    assert_same(run(model, case.stream()), run(new, case.stream()), "answers after reset")
    assert_same(state_of(model), state_of(new), "state after reset and a stream")


@contract
def a_saved_stream_goes_on_bit_identically(case: Case) -> None:
    uninterrupted, stopped = case.model(), case.model()
    first, rest = case.stream(6)[:3], case.stream(6)[3:]
    run(uninterrupted, first), run(stopped, first)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "stream.safetensors"
        save(stopped, path)
        assert list(Path(folder).iterdir()) == [path], "save left something behind"
        resumed = load(path, case.net(), method=case.method, **case.not_storable())
    for name, value in integers_of(uninterrupted).items():
        found = getattr(resumed, name, None)
        assert found == value, (
            f"{name} is {value} before saving and {found} after loading: declare it with register_counter({name!r})"
        )
    assert_same(state_of(resumed), state_of(uninterrupted), "state after load")
    assert_same(run(resumed, rest), run(uninterrupted, rest), "answers after load")
    assert_same(state_of(resumed), state_of(uninterrupted), "state after load and a stream")


@contract
def interleaved_streams_equal_isolated_ones(case: Case) -> None:
    one, other = case.model(), case.model()
    stream, backwards = case.stream(), case.stream()[::-1]
    mixed = [(one(x), other(y)) for x, y in zip(stream, backwards, strict=True)]
    assert_same([answer for answer, _ in mixed], run(case.model(), stream), "first of two interleaved streams")
    assert_same([answer for _, answer in mixed], run(case.model(), backwards), "second of two interleaved streams")


@contract
def forks_share_the_source_and_nothing_else(case: Case) -> None:
    model = case.model()
    model(case.batch(7))
    fork = model.fork()
    assert fork.source is model.source, "a fork must share the source"
    shared = {id(tensor) for tensor in (*model.source.parameters(), *model.source.buffers())}
    ours = {id(tensor) for tensor in (*model.parameters(), *model.buffers())} - shared
    assert not ours & {id(tensor) for tensor in (*fork.parameters(), *fork.buffers())}, "a fork shares more"
    before = state_of(model)
    assert_same(run(fork, case.stream()), run(case.model(), case.stream()), "a fork's answers and a new model's")
    assert_same(state_of(model), before, "the forked stream's state")
    fork.double()
    assert_same(state_of(model), before, "state after a fork's .double()")


@contract
def neither_reads_nor_moves_the_global_generator(case: Case) -> None:
    state = torch.get_rng_state()
    model = case.model()
    answers = run(model, case.stream())
    model.predict(case.batch(0))
    assert torch.equal(torch.get_rng_state(), state), "the global generator moved"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(12345)
        assert_same(run(case.model(), case.stream()), answers, "under another global seed")


@contract
def predict_changes_nothing_and_equals_the_next_adapt(case: Case) -> None:
    model = case.model()
    model(case.batch(9))
    for x in case.stream():
        before, step = state_of(model), model.last_step
        predicted = model.predict(x)
        with torch.inference_mode():
            assert torch.equal(model.predict(x), predicted), "predict differs from itself"
        assert_same(state_of(model), before, "state after predict")
        assert model.last_step is step, "predict wrote last_step"
        assert torch.equal(predicted, model.adapt(x)), "predict is not what adapt returns next"


@contract
def frozen_predicts_only(case: Case) -> None:
    model = case.model()
    model(case.batch(9))
    before = state_of(model)
    expected = model.predict(case.batch(0))
    assert torch.equal(model.freeze()(case.batch(0)), expected)
    assert_same(state_of(model), before, "state while frozen")
    assert model.reset().frozen, "frozen is a mode and survives a reset"
    model.unfreeze()(case.batch(0))
    assert model.num_steps == 1, "unfrozen does not adapt"


@contract
def copies_and_pickles_are_independent_streams(case: Case) -> None:
    model = case.model()
    run(model, case.stream())
    copied = copy.deepcopy(model)
    buffer = io.BytesIO(pickle.dumps(model))
    unpickled = pickle.load(buffer)
    before = state_of(model)
    answers = run(copied, case.stream())
    assert_same(state_of(model), before, "the state of the original of a copy")
    assert_same(run(unpickled, case.stream()), answers, "a pickled stream and a copied one")
    assert_same(run(model, case.stream()), answers, "the original and its copy")
    assert_same(state_of(model), state_of(copied), "the state of original and copy")


@contract
def moves_between_dtypes_and_devices_mid_stream(case: Case) -> None:
    model = case.model()
    run(model, case.stream())
    before = state_of(model)
    model.to("cpu")
    assert_same(state_of(model), before, "state after .to()")
    model.double()
    assert model(case.batch(0).double()).dtype == torch.float64
    floats = [tensor for tensor in (*model.parameters(), *model.buffers()) if tensor.is_floating_point()]
    assert all(tensor.dtype == torch.float64 for tensor in floats), ".double() left something behind"
    model.reset()
    assert model(case.batch(0).double()).dtype == torch.float64, "reset lost the dtype"


@contract
def memory_is_bounded(case: Case) -> None:
    def live() -> int:
        gc.collect()
        tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), Tensor)]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    model, x = case.model(), case.batch(0)
    for _ in range(3):  # an optimiser makes its state at the first step
        model(x)
    before = live()
    for _ in range(200):
        model(x)
    assert live() <= before, f"{live() - before} bytes more after 200 steps"
