"""Every method on a device that is not the CPU, with the CPU's answers; see accelerator/ for the device.

The kernels of the simulated device are those of the CPU, and here its random numbers too, so that the answers are equal
bit for bit.
"""

import copy
import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import accelerator
import numpy as np
import pytest
import torch
from command_line import output, write_images, write_network
from serving import SIZE, serve_in_thread
from torch import Tensor, nn

import ctta
from benchmarks.speed import device as device_benchmark
from benchmarks.speed import precision
from benchmarks.speed.kernels import count_bare, find_trained
from ctta.advise.candidates import count_state_bytes
from ctta.cli.adapt import adapt as adapt_command
from ctta.core.options import resolve_device
from ctta.core.parallel import read
from ctta.core.state import LazyModule
from ctta.data.datasets import sample
from ctta.data.streams import Batch, Segment, Stream, in_memory
from ctta.errors import DataError, is_user_error
from ctta.evaluation.steps import count_passes, feed
from ctta.guard import Guarded
from ctta.guard.detector import CollapseDetector
from ctta.models.registry import to_device
from ctta.policies import POLICIES, parse_policy
from ctta.serve import Service
from ctta.testing import NETWORKS, ContractCase, select_networks, select_settings
from ctta.testing.case import run_stream
from ctta.testing.networks import VISION_TRANSFORMERS, BlockViT

DEVICE = "sim"


@pytest.fixture(autouse=True)
def numbers_of_cpu() -> Iterator[None]:
    """The noise of views is drawn on the device."""
    with accelerator.numbers_of_cpu():
        yield


@pytest.fixture(params=["float64", "no_float64"])
def _dtypes(request: pytest.FixtureRequest) -> Iterator[None]:
    """With float64 on the device, and without."""
    with accelerator.no_float64() if request.param == "no_float64" else nullcontext():
        yield


on_every_device = pytest.mark.usefixtures("_dtypes")


@cache
def make_case(method: str, network: str | None = None) -> ContractCase:
    cls = ctta.METHODS[method]
    networks = select_networks(cls)
    return ContractCase(cls, networks[network or next(iter(networks))], select_settings(cls))


def make_model(case: ContractCase, device: str, **hyperparameters: Any) -> ctta.AdaptiveModel:
    net = case.make_network()
    stats = case.make_source_stats(net)  # on the CPU, as from a file
    return case.method(net.to(device), **stats, **case.hyperparameters, **hyperparameters)


def run(model: nn.Module, stream: list[Tensor]) -> list[Tensor]:
    """Return the logits of a stream, as tensors of the host."""
    device = next(model.parameters()).device
    logits = run_stream(model, [x.to(device) for x in stream])  # type: ignore[arg-type]
    assert all(each.device == device for each in logits)
    assert_placed(model)
    return [each.cpu() for each in logits]


def assert_placed(model: nn.Module) -> None:
    """Raise an AssertionError if state is elsewhere than the network, but what is declared to stay on the host."""
    device = next(model.parameters()).device
    for name, module in model.named_modules():
        for key, value in (*module._parameters.items(), *module._buffers.items()):
            is_on_cpu = isinstance(module, LazyModule) and key in module._buffers and module.stays_on_cpu(key)
            expected = torch.device("cpu") if is_on_cpu else device
            assert value is None or value.device == expected, f"{name}.{key} is on {value.device}"


def assert_equal(actual: list[Tensor], expected: list[Tensor]) -> None:
    for index, (one, other) in enumerate(zip(actual, expected, strict=True)):
        assert torch.equal(one, other), f"batch {index} differs by up to {(one - other).abs().max():.3g}"


def check_adapt(case: ContractCase) -> None:
    assert_equal(run(make_model(case, DEVICE), case.make_stream()), case.expected_logits)


def check_predict(case: ContractCase) -> None:
    model = make_model(case, DEVICE)
    for x in case.make_stream():
        predicted = model.predict(x.to(DEVICE))
        assert torch.equal(predicted.cpu(), model(x.to(DEVICE)).cpu())
        assert model.predict_once(x.to(DEVICE)).device.type == DEVICE


def check_fork(case: ContractCase) -> None:
    model = make_model(case, DEVICE)
    run(model, case.make_stream(1))
    fork = model.fork()
    assert_placed(fork)
    assert_equal(run(fork, case.make_stream()), case.expected_logits)


def check_reset(case: ContractCase) -> None:
    model = make_model(case, DEVICE)
    run(model, case.make_stream(2))
    model.reset()
    assert_placed(model)
    assert_equal(run(model, case.make_stream()), case.expected_logits)


def check_saved_on_cpu(case: ContractCase, folder: Path) -> None:
    model = make_model(case, "cpu")
    run(model, case.make_stream(1))
    ctta.save(model, folder / "stream.safetensors")
    loaded = ctta.load(folder / "stream.safetensors", case.make_network().to(DEVICE))
    assert_equal(run(loaded, case.make_stream()[1:]), case.expected_logits[1:])


def check_saved_on_device(case: ContractCase, folder: Path) -> None:
    model = make_model(case, DEVICE)
    run(model, case.make_stream(1))
    ctta.save(model, folder / "stream.safetensors")
    for device in ("cpu", DEVICE):
        loaded = ctta.load(folder / "stream.safetensors", case.make_network().to(device))
        assert_equal(run(loaded, case.make_stream()[1:]), case.expected_logits[1:])


def check_deepcopy(case: ContractCase) -> None:
    model = make_model(case, DEVICE)
    run(model, case.make_stream(1))
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_equal(run(copied, case.make_stream()[1:]), case.expected_logits[1:])


def check_to_device(case: ContractCase) -> None:
    model = make_model(case, "cpu")
    run(model, case.make_stream(1))
    assert_equal(run(model.to(DEVICE), case.make_stream()[1:]), case.expected_logits[1:])
    model.reset()
    assert_equal(run(model, case.make_stream()), case.expected_logits)


def check_to_cpu(case: ContractCase) -> None:
    model = make_model(case, DEVICE)
    run(model, case.make_stream(1))
    assert_equal(run(model.to("cpu"), case.make_stream()[1:]), case.expected_logits[1:])


def check_to_other_device(case: ContractCase) -> None:
    model = make_model(case, f"{DEVICE}:0")
    run(model, case.make_stream(1))
    assert_equal(run(model.to(f"{DEVICE}:1"), case.make_stream()[1:]), case.expected_logits[1:])


def check_deploy(case: ContractCase) -> None:
    on_cpu, model = make_model(case, "cpu"), make_model(case, DEVICE)
    for x in case.make_stream(2):
        on_cpu(x), model(x.to(DEVICE))
    x = case.make_batch(8)
    with torch.no_grad():
        assert_equal([model.deploy()(x.to(DEVICE)).cpu()], [on_cpu.deploy()(x)])
        batches = case.make_stream(2)
        deployed = model.deploy([each.to(DEVICE) for each in batches])
        assert_equal([deployed(x.to(DEVICE)).cpu()], [on_cpu.deploy(batches)(x)])


def check_guard(case: ContractCase) -> None:
    expected = run(Guarded(make_model(case, "cpu")), case.make_stream())
    model = Guarded(make_model(case, DEVICE))
    assert_equal(run(model, case.make_stream()), expected)
    assert_equal(run(model.fork(), case.make_stream()), expected)
    model.reset()
    assert_equal(run(model, case.make_stream()), expected)


def check_guard_moves(case: ContractCase, folder: Path) -> None:
    expected = run(Guarded(make_model(case, "cpu")), case.make_stream())
    model = Guarded(make_model(case, "cpu"), bad_rows="source")
    run(model, case.make_stream(1))
    ctta.save(model, folder / "guarded.safetensors")
    assert_equal(run(model.to(DEVICE), case.make_stream()[1:]), expected[1:])
    loaded = ctta.load(folder / "guarded.safetensors", case.make_network().to(DEVICE))
    assert_equal(run(loaded, case.make_stream()[1:]), expected[1:])


def check_without_float64(case: ContractCase) -> None:
    with accelerator.no_float64():
        model = make_model(case, DEVICE)
        assert_equal(run(model, case.make_stream()), case.expected_logits)
        run(model.fork(), case.make_stream(1))
        run(model.reset(), case.make_stream(1))


def check_guard_without_float64(case: ContractCase) -> None:
    with accelerator.no_float64():
        run(Guarded(make_model(case, DEVICE)), case.make_stream())


def check_autocast(case: ContractCase) -> None:
    model = make_model(case, DEVICE)
    with torch.autocast(DEVICE, torch.bfloat16):
        for x, expected in zip(case.make_stream(), case.expected_logits, strict=True):
            # Eight bits of precision; what decides by thresholds or neighbors may decide otherwise for an image.
            difference = (model(x.to(DEVICE)).cpu().float().softmax(1) - expected.softmax(1)).abs()
            assert difference.mean() < 0.05, f"probabilities differ by {difference.mean():.3f}"


def check_inference_mode(case: ContractCase) -> None:
    model = make_model(case, DEVICE)
    with torch.inference_mode():
        assert_equal(run(model, case.make_stream()), case.expected_logits)


def check_evaluate(case: ContractCase) -> None:
    if case.make_model()(case.make_batch(0)).dim() > 2:
        return
    batches = [(x, torch.arange(len(x)) % 5) for x in case.make_stream()]
    expected = ctta.evaluate(make_model(case, "cpu"), batches)
    found = ctta.evaluate(make_model(case, DEVICE), batches)
    assert found.error == expected.error


PATHS: dict[str, Callable[..., None]] = {
    name.removeprefix("check_"): check for name, check in tuple(vars().items()) if name.startswith("check_")
}


@pytest.mark.parametrize(("method", "path"), list(product(ctta.METHODS, PATHS)))
def test_path(method: str, path: str, tmp_path: Path) -> None:
    check = PATHS[path]
    check(make_case(method), tmp_path) if "folder" in check.__annotations__ else check(make_case(method))


@pytest.mark.parametrize(
    ("method", "network"),
    [(name, network) for name, cls in ctta.METHODS.items() for network in list(select_networks(cls))[1:]],
)
def test_other_networks(method: str, network: str) -> None:
    check_adapt(make_case(method, network))


#: The most times that the host waits for the device in a step: that of a method that is not here is 3.
HOST_READS = {
    **dict.fromkeys(("source", "bn_stats", "bn_alpha", "bn_ema", "test_aug", "t3a", "tent", "pseudo_label"), 1),
    **dict.fromkeys(("neo", "unmix_tns", "tda", "dota"), 1),
    "pea": 2,  # see test_host_reads_of_pea
    **dict.fromkeys(("eta", "eata", "rpl", "slr", "rdumb", "shot_im", "santa", "rmt", "tea", "memo", "rem"), 1),
    **dict.fromkeys(("zerosiam",), 1),
    **dict.fromkeys(("rotta", "note", "tribe", "roid", "cmf", "lame", "palm", "delta", "foa", "cotta"), 2),
}


@pytest.mark.parametrize("method", ctta.METHODS)
def test_host_reads(method: str) -> None:
    """In steps that learn, after the first few, which allocate."""
    case = make_case(method)
    stream = [x.to(DEVICE) for x in case.make_stream(8)]
    # One update per step, since each of them reads, and from all images.
    settings = {"update_every": len(stream[0]), "min_confidence": 0.0, "redundancy": 2.0}
    settings = {name: settings.get(name, value) for name, value in case.hyperparameters.items()}
    model = make_model(ContractCase(case.method, case.make_network, settings), DEVICE)
    counts = []
    for number, x in enumerate(stream):
        with accelerator.count() as found:
            model(x)
        if number >= 3:
            counts.append(found.host_reads)
            assert model.optimizer is None or (model.last_step is not None and model.last_step.updated)
    assert max(counts) <= HOST_READS.get(method, 3), f"the host read {counts} times"


@pytest.mark.parametrize("depth", [3, 8])
@pytest.mark.parametrize("group_size", [768, 6])
def test_host_reads_of_pea(depth: int, group_size: int) -> None:
    """One for the weights of the blocks, and one for the eigendecomposition in each block but the nearest."""
    torch.manual_seed(0)
    net = BlockViT(depth=depth)
    stream = make_case("pea").make_stream(3)
    stats = ctta.source_stats(net, stream, blocks=True)
    reads = count_reads(ctta.PEA(net.to(DEVICE), source_stats=stats, group_size=group_size), stream)
    assert max(reads[1:]) == depth


@pytest.mark.parametrize("policy", POLICIES)
def test_policies(policy: str) -> None:
    case = make_case("cotta" if policy == "frozen_teacher" else "tent")
    settings = {"reset_every": "reset_every=2", "restore": "restore=0.5"}
    policies = {"policies": [parse_policy(settings.get(policy, policy))]}
    expected = run(make_model(case, "cpu", **policies), case.make_stream())
    model = make_model(case, DEVICE, **policies)
    assert_equal(run(model, case.make_stream()), expected)
    assert_equal(run(model.fork(), case.make_stream()), expected)
    assert_equal(run(model.reset(), case.make_stream()), expected)


VIEWS: dict[str, Callable[[], Any]] = {
    "image": lambda: ctta.views.image_views(4),
    "fast_image": lambda: ctta.views.fast_image_views(4),
    "geometric": lambda: ctta.views.geometric_views(4),
    "multiscale_flip": lambda: ctta.views.multiscale_flip(),
}


@pytest.mark.parametrize("views", VIEWS)
@pytest.mark.parametrize("network", ["batch_norm", "segmentation"])
def test_views(views: str, network: str) -> None:
    def predict(device: str) -> list[Tensor]:
        net = ContractCase(ctta.TestAug, NETWORKS[network], {}).make_network().to(device)
        return run(ctta.TestAug(net, views=VIEWS[views]()), make_case("test_aug").make_stream())

    # The CPU has its own way to compute the moments of large layers.
    torch.testing.assert_close(predict(DEVICE), predict("cpu"), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("views", "most"),
    [(ctta.views.image_views(32), 450), (ctta.views.fast_image_views(), 220), (ctta.views.geometric_views(), 40)],
)
def test_views_are_augmented_together(views: Any, most: int) -> None:
    """The model costs nothing, so that what runs is the views and their average."""
    x = make_case("tent").make_batch(0).to(DEVICE)
    drawn = views.draw(torch.Generator().manual_seed(0))
    with accelerator.count() as counts:
        ctta.views.average_views(drawn, lambda images: images[:, :, 0, 0], x, "logits")
    assert counts.kernels <= most
    assert counts.copies_to_device <= 1


#: The most kernels of a step beyond the passes of a network of two layers. With the threshold of the preset, the source
#: of CoTTA fast is asked whether views are needed. VANE measures and blends statistics in every layer.
KERNELS = {"cotta_fast": 265, "cotta": 410, "tent": 50, "vane": 440}


@pytest.mark.parametrize(("preset", "most"), KERNELS.items())
def test_kernels_beyond_the_passes_of_the_network(preset: str, most: int) -> None:
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU()]
    net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)).to(DEVICE)
    generator = torch.Generator().manual_seed(0)
    stream = [torch.rand(16, 3, 16, 16, generator=generator).to(DEVICE) for _ in range(8)]
    # With views in every step: of the preset, the source's answers on this untrained network are below its threshold.
    settings: dict[str, Any] = {"threshold": 1.1} if preset == "cotta" else {}
    model = ctta.adapt(net, preset, **settings)
    forward, backward = count_bare(net, stream[0], find_trained(model))
    for x in stream[:3]:
        model(x)
    with count_passes(type(model.source)) as passes, accelerator.count() as found:
        for x in stream[3:]:
            model(x)
    bare = (passes.forward * forward + passes.backward * backward) / len(stream[0])
    beyond = (found.kernels - bare) / len(stream[3:])
    assert beyond <= most, f"{beyond:.0f} kernels beyond those of the passes"


@pytest.mark.parametrize("preset", ["cotta_fast", "cotta", "vane", "tent", "memo"])
def test_adapt_by_name(preset: str) -> None:
    case = make_case("tent")
    expected = run(ctta.adapt(case.make_network(), preset), case.make_stream())
    assert_equal(run(ctta.adapt(case.make_network().to(DEVICE), preset), case.make_stream()), expected)


@on_every_device
@pytest.mark.parametrize("batches_on", ["cpu", DEVICE])
@pytest.mark.parametrize("settings", [{"labels": torch.arange(18) % 5}, {"parameters": "all"}])
def test_source_stats(settings: dict[str, Any], batches_on: str) -> None:
    case = make_case("eata")
    stream = case.make_stream()
    expected = ctta.source_stats(case.make_network(), stream, **settings)
    found = ctta.source_stats(case.make_network().to(DEVICE), [x.to(batches_on) for x in stream], **settings)
    assert found.tensors.keys() == expected.tensors.keys()
    for name, value in expected.tensors.items():
        torch.testing.assert_close(found.tensors[name].cpu(), value)


@on_every_device
def test_compare() -> None:
    case = make_case("tent")
    batches = [(x, torch.arange(len(x)) % 5) for x in case.make_stream()]
    names = ["source", "bn_stats", "tent", "cotta_fast", "vane"]
    expected = ctta.compare(names, batches, net=case.make_network())
    found = ctta.compare(names, batches, net=case.make_network().to(DEVICE))
    assert [each.error for each in found.results.values()] == [each.error for each in expected.results.values()]


@pytest.mark.parametrize(
    ("method", "network", "kind"),
    [("tent", "batch_norm", "frozen"), ("tent", "block_vit", "checkpoint"), ("cotta", "block_vit", "checkpoint")],
)
def test_reduced_memory(method: str, network: str, kind: Any) -> None:
    make_network = (NETWORKS | {"block_vit": VISION_TRANSFORMERS["vit"]})[network]
    case = ContractCase(ctta.METHODS[method], make_network, make_case(method).hyperparameters)
    expected = run(make_model(case, "cpu").reduce_memory(kind), case.make_stream())
    assert_equal(run(make_model(case, DEVICE).reduce_memory(kind), case.make_stream()), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("method", ["source", "bn_stats", "test_aug", "tent", "cotta", "vane"])
def test_half_precision(method: str, dtype: torch.dtype) -> None:
    """Under autocast and, for methods that do not learn, with a network of the dtype."""
    case = make_case(method)
    model = make_model(case, DEVICE)
    with torch.autocast(DEVICE, dtype):
        found = [run(model, case.make_stream())]
    if model.optimizer is None:
        stream = [x.to(dtype) for x in case.make_stream()]
        on_cpu = run(case.method(case.make_network().to(dtype), **case.hyperparameters), stream)
        found.append(run(case.method(case.make_network().to(DEVICE, dtype), **case.hyperparameters), stream))
        assert_equal(found[-1], on_cpu)
    for logits in found:
        for one, other in zip(logits, case.expected_logits, strict=True):
            assert (one.float().softmax(1) - other.softmax(1)).abs().mean() < 0.05


@on_every_device
def test_a_stream_is_evaluated_and_resumed(tmp_path: Path) -> None:
    def make_stream() -> Stream:
        images = np.random.default_rng(0).integers(0, 256, (24, 16, 16, 3), np.uint8)
        return in_memory(images, np.arange(24) % 5, name="drawn", batch_size=6)

    case = make_case("tent")
    expected = ctta.evaluate(make_model(case, "cpu"), make_stream())
    for _ in range(2):
        found = ctta.evaluate(make_model(case, DEVICE), make_stream(), folder=tmp_path / "result")
        assert found.error == expected.error


@on_every_device
def test_a_folder_is_predicted(tmp_path: Path) -> None:
    write_images(tmp_path / "images", range(10))
    options = [
        "--model",
        write_network(tmp_path),
        "--images",
        tmp_path / "images",
        "--method",
        "tent",
        "--batch-size",
        4,
    ]
    tables = [tmp_path / f"{device}.csv" for device in ("cpu", DEVICE)]
    for table, device in zip(tables, ("cpu", DEVICE), strict=True):
        output(
            adapt_command, *options, "--out", table, "--device", device, "--state", tmp_path / f"{device}.safetensors"
        )
    assert tables[0].read_text() == tables[1].read_text()


def test_a_folder_is_predicted_in_16_bits(tmp_path: Path) -> None:
    write_images(tmp_path / "images", range(10))
    options = ["--model", write_network(tmp_path), "--images", tmp_path / "images", "--batch-size", 4, "--compare"]
    for device in ("cpu", "auto"):
        output(adapt_command, *options, "--out", tmp_path / device, "--device", device, "--amp", "bf16")
    assert (tmp_path / "cpu").read_text() == (tmp_path / "auto").read_text()


class Watched:
    """Images that record which threads read them."""

    name, labels = "watched", np.arange(24) % 5

    def __init__(self) -> None:
        self.threads: list[str] = []

    def __len__(self) -> int:
        return 24

    def read(self, rows: Any) -> tuple[Tensor, Tensor | None]:
        self.threads.append(threading.current_thread().name)
        return torch.from_numpy(rows).float().view(-1, 1, 1, 1).expand(-1, 3, 16, 16) / 24, torch.from_numpy(rows % 5)


def test_batches_are_read_beside_the_device_and_copied_from_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    sources: list[tuple[bool, bool]] = []
    copy_to = Tensor.to

    def watch(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if tensor.device.type == "cpu" and isinstance(args[0], Tensor) and args[0].device.type == DEVICE:
            sources.append((tensor.is_pinned(), kwargs.get("non_blocking", False)))
        return copy_to(tensor, *args, **kwargs)

    monkeypatch.setattr(Tensor, "to", watch)
    case, results = make_case("tent"), []
    for device in ("cpu", DEVICE):
        images = Watched()
        stream = Stream("watched", [Segment("watched", images, np.arange(24))], batch_size=6)
        results.append(ctta.evaluate(make_model(case, device), stream))
        assert [name.startswith("ctta-feed") for name in images.threads] == [device == DEVICE] * 4
    assert sources == [(True, True)] * 4
    assert results[0].error == results[1].error


def test_a_stream_that_cannot_be_read_ends_the_feed() -> None:
    def read() -> Iterator[Batch]:
        for number in range(2):
            yield Batch(torch.rand(2, 3, 4, 4), None, str(number), torch.arange(2))
        raise DataError("the disk is gone")

    found = []
    with pytest.raises(DataError, match="disk"):
        for batch in feed(read(), torch.device(DEVICE)):
            found.append((batch.domain, batch.x.is_pinned()))
    assert found == [("0", True), ("1", True)]


@pytest.mark.parametrize("is_guarded", [False, True])
@pytest.mark.parametrize("name", ["source", "tent", "cotta_fast", "vane"])
def test_a_batch_that_does_not_fit_says_which_would(name: str, is_guarded: bool) -> None:
    model = ctta.adapt(ctta.models.embedded().to(DEVICE), name)
    model = Guarded(model) if is_guarded else model
    x = torch.rand(64, 3, 32, 32, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    model(x[:16])
    before = torch.accelerator.memory_allocated()
    torch.accelerator.reset_peak_memory_stats()
    model(x[:16])
    limit = torch.accelerator.max_memory_allocated() + count_state_bytes(model)  # and room for a copy
    fork = copy.deepcopy(model)
    with accelerator.memory_limit(limit + torch.accelerator.memory_allocated() - before):
        with pytest.raises(torch.OutOfMemoryError, match="memory for a batch of 64 inputs") as found:
            model(x)
        assert is_user_error(found.value) and isinstance(found.value.__cause__, torch.OutOfMemoryError)
        fitting = int(str(found.value).partition("a batch size of ")[2].partition(",")[0])
        assert 16 <= fitting < 64
        assert model.num_steps == fork.num_steps
        model(x[:fitting])
    if is_guarded or name == "source":  # a guard undoes half a step
        assert torch.equal(model(x[:8]), [fork(x[:fitting]), fork(x[:8])][1])


@pytest.mark.parametrize("error", ["forward", "backward"])
def test_a_batch_that_never_fits_says_so(error: str) -> None:
    model = ctta.Tent(ctta.models.embedded().to(DEVICE), amp="bf16")
    x = torch.rand(4, 3, 32, 32).to(DEVICE)
    room = 2**12 if error == "forward" else 2**20
    with (
        accelerator.memory_limit(torch.accelerator.memory_allocated() + room),
        pytest.raises(torch.OutOfMemoryError, match=r"a batch of 4 .*: use smaller batches"),
    ):
        model(x)


@on_every_device
@pytest.mark.parametrize("method", ["tent", "vane"])
def test_a_service_answers(method: str, tmp_path: Path) -> None:
    case = make_case("tent")

    def answers(device: str) -> list[Tensor]:
        model = Guarded(ctta.adapt(case.make_network().to(device), method))
        service = Service(model, tmp_path / device, image_size=SIZE, window_size=0)
        with serve_in_thread(service) as client:
            return [torch.tensor(client.infer(name, x)["logits"]) for x in case.make_stream() for name in ("a", "b")]

    assert_equal(answers(DEVICE), answers("cpu"))


def test_the_benchmark_of_a_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "bench.md"
    arguments = ["device", "--device", DEVICE, "--small", "--out", str(out), "source", "tent"]
    monkeypatch.setattr("sys.argv", arguments)
    monkeypatch.setattr(device_benchmark, "BUDGET", 0.0)
    num_threads = torch.get_num_threads()
    device_benchmark.main()
    torch.set_num_threads(num_threads)
    about, _, headings, _, *rows = out.read_text().splitlines()
    assert about.startswith("simulated accelerator 0, torch ") and capsys.readouterr().out == out.read_text()
    for method, row in zip(("source", "tent"), rows, strict=True):
        cells = dict(zip(*(line.strip("| ").split(" | ") for line in (headings, row)), strict=True))
        assert cells["method"] == method and cells["network"] == "ResNet-20, batch 96"
        assert float(cells["ms/image"]) > 0 and float(cells["step / bare passes"]) > 0
        assert 1 <= int(cells["peak MiB"]) < 100, "that of the device, not of the process"


@on_every_device
def test_settings_are_found_from_images() -> None:
    case = make_case("tent")
    thresholds = [
        ctta.calibrate_threshold(case.make_network().to(device), [x.to(device) for x in case.make_stream()])
        for device in ("cpu", DEVICE)
    ]
    assert thresholds[0] == thresholds[1]


@on_every_device
def test_a_guard_compares_answers_with_labels() -> None:
    case = make_case("tent")

    def answer(device: str) -> list[Any]:
        model = Guarded(make_model(case, device), remember_answers=64, on_harm="reset")
        found = []
        for x in case.make_stream():
            model(x.to(device))
            assert model.last_ids is not None
            found.append(model.feedback(model.last_ids, torch.arange(len(x)) % 5))
        return found

    assert answer(DEVICE) == answer("cpu")


@on_every_device
def test_a_posterior_is_computed() -> None:
    case = make_case("petal")
    net, snapshots = case.make_network(), [case.make_network() for _ in range(3)]
    for number, snapshot in enumerate(snapshots):
        for parameter in snapshot.parameters():
            parameter.data.mul_(1 + number / 8)
    expected = ctta.weight_posterior(net, snapshots).by_name("posterior.mean")
    found = ctta.weight_posterior(net.to(DEVICE), [each.to(DEVICE) for each in snapshots]).by_name("posterior.mean")
    assert all(torch.equal(found[name].cpu(), value) for name, value in expected.items())


def test_tensors_of_all_dtypes_are_read_exactly_and_at_once() -> None:
    values = [
        torch.tensor([2**40 + 1, -3]),
        torch.tensor([[1 / 3, 2.0]], dtype=torch.bfloat16),
        torch.tensor(True),
        torch.tensor(1 / 3, dtype=torch.float64),
        torch.empty(0),
    ]
    with accelerator.count() as counts:
        found = read(*(value.to(DEVICE) if number else value for number, value in enumerate(values)))
    assert counts.host_reads == 1
    assert all(torch.equal(*pair) and pair[0].dtype == pair[1].dtype for pair in zip(found, values, strict=True))
    assert torch.equal(read(values[0].to(DEVICE), values[1].to(DEVICE))[0], values[0])


def test_the_device_is_found() -> None:
    assert resolve_device("auto") == DEVICE
    assert {parameter.device.type for parameter in to_device(nn.Linear(2, 2), "auto").parameters()} == {DEVICE}


def test_a_compiled_network() -> None:
    case = make_case("tent")
    expected = run(make_model(case, "cpu").compile(backend="eager"), case.make_stream())
    found = run(make_model(case, DEVICE).compile(backend="eager"), case.make_stream())
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


def count_reads(model: nn.Module, stream: list[Tensor]) -> list[int]:
    """Return how many times the host waited for the device at each batch."""
    reads = []
    for x in stream:
        batch = x.to(DEVICE)
        with accelerator.count() as counts:
            model(batch)
        reads.append(counts.host_reads)
    return reads


@pytest.mark.parametrize("settings", [{}, {"bad_rows": "source"}, {"remember_answers": 64}, {"max_update": 0.1}])
@pytest.mark.parametrize("name", ["source", "tent", "cotta_fast", "vane"])
def test_a_guard_reads_once(name: str, settings: dict[str, Any]) -> None:
    """What a guard measures is read at once, also on a batch that it inspects, and its own counters are on the host."""
    case = make_case("tent")
    net = case.make_network().to(DEVICE)
    generator = torch.Generator().manual_seed(0)
    stream = [torch.rand(20, 3, 16, 16, generator=generator) for _ in range(20)]
    expected = count_reads(ctta.adapt(net, name), stream)
    model = Guarded(ctta.adapt(net, name), **settings)
    count_reads(model, stream[:4])
    inspected = []
    for x, reads in zip(stream[4:], expected[4:], strict=True):
        inspected.append(model.schedule.should_inspect(0))
        (found,) = count_reads(model, [x])
        if name != "vane" or not inspected[-1]:  # VANE reads for what it would predict without learning
            assert found == reads + 1
    assert any(inspected) and not all(inspected) and not model.events


def test_a_guard_reads_twice_where_it_suspects_few_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the method is less sure than usual, the source is asked about some images; here by turns."""
    asked: list[bool] = []

    def is_unsure(detector: CollapseDetector, predictions: Any) -> bool:
        asked.append(len(asked) % 2 == 0)
        return asked[-1]

    monkeypatch.setattr(CollapseDetector, "is_unsure", is_unsure)
    pixels = torch.from_numpy(np.ascontiguousarray(sample().images[:256])).permute(0, 3, 1, 2)
    stream = list((pixels.float() / 255).split(16))
    net = ctta.models.embedded().to(DEVICE)
    model = Guarded(ctta.adapt(net, "tent"), on_collapse=None)  # or clean batches, which lose, are all inspected
    expected, found = count_reads(ctta.adapt(net, "tent"), stream)[4:], []
    count_reads(model, stream[:4])
    for x, reads in zip(stream[4:], expected, strict=True):
        asked_before = len(asked)
        (total,) = count_reads(model, [x])
        found.append((total - reads, any(asked[asked_before:])))
    assert set(found) == {(1, False), (2, True)} and not model.events


@pytest.mark.long
@pytest.mark.parametrize("name", ["tent", "cotta_fast", "vane"])
def test_error_in_16_bits(name: str) -> None:
    """On the CPU: 15 corruptions of the embedded sample."""
    stream = precision.read_stream()
    errors = [precision.measure_error(name, stream, "cpu", amp) for amp in (None, "bf16")]
    assert abs(errors[0] - errors[1]) <= 0.3
