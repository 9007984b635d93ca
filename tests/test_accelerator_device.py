"""The simulated accelerator keeps the rules of a GPU, counts what costs there, and computes what the CPU computes."""

import copy
import io
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerator
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ctta.testing.networks import NETWORKS, VISION_TRANSFORMERS

SIM = torch.device("sim:0")


def on_device(*shape: int) -> Tensor:
    """Return the same numbers in [0, 1) at every call."""
    return torch.rand(*shape, generator=torch.Generator().manual_seed(0)).to(SIM)


HOST = torch.rand(3, 4)
INDEX = torch.tensor([[0, 1, 0, 1]])

# ---- devices and operands ----


@pytest.mark.parametrize(
    "operation",
    [
        lambda x: x + HOST,
        lambda x: HOST + x,
        lambda x: HOST.add_(x[0, 0]),
        lambda x: HOST * x[0, 0],
        lambda x: torch.cat([x, HOST]),
        lambda x: torch.stack([x, HOST]),
        lambda x: x @ HOST.T,
        lambda x: torch.where(HOST > 0, x, x),
        lambda x: nn.functional.linear(x, HOST),
        lambda x: nn.functional.batch_norm(x, torch.zeros(4), torch.ones(4)),
        lambda x: x.index_select(0, torch.tensor([0])),
        lambda x: x.index_select(0, torch.tensor(0)),
        lambda x: x.gather(0, INDEX),
        lambda x: x.scatter(0, INDEX, 1.0),
        lambda x: x.take_along_dim(INDEX, 0),
        lambda x: nn.functional.embedding(torch.tensor([0]), x),
        lambda x: nn.functional.cross_entropy(x, torch.tensor([0, 1, 2])),
        lambda x: HOST[torch.tensor([0, 1], device=SIM)],
        lambda x: HOST[x > 0],
        lambda x: x.masked_fill(HOST > 0, 0.0),
        lambda x: x.lerp_(HOST, 0.5),
        lambda x: torch._foreach_add([x], [HOST]),
        lambda x: torch.add(x, 1, out=torch.empty(3, 4)),
        lambda x: torch.amax(x, (0, 1), out=torch.tensor(0.0)),
        lambda x: x.clamp(max=torch.tensor(1.0)),
        lambda x: x + x.to("sim:1"),
        lambda x: x[0, 0] + x.to("sim:1")[0, 0],
        lambda x: x.set_(HOST.untyped_storage(), 0, (2,), (1,)),
    ],
)
def test_several_devices_in_an_operator_are_an_error(operation: Callable[[Tensor], Any]) -> None:
    with pytest.raises(
        RuntimeError, match=r"Expected all tensors to be on the same device|Expected tensor to have sim:0 Device"
    ):
        operation(on_device(3, 4))


@pytest.mark.parametrize(
    "operation",
    [
        lambda x, one: x + one,
        lambda x, one: one * x,
        lambda x, one: x.clone().mul_(one),
        lambda x, one: torch.where(x > 0.5, x, one),
        lambda x, one: x // one,
        lambda x, one: x.clone().ge_(one),
        lambda x, one: x.clone().fill_(one),
        lambda x, one: x.masked_fill(x > 0.5, one),
        lambda x, one: torch._foreach_mul([x], one)[0],
        lambda x, one: x.to(x.device, non_blocking=True).copy_(one),
    ],
)
def test_a_number_in_a_tensor_of_the_host_mixes(operation: Callable[[Tensor, Tensor], Tensor]) -> None:
    x, one = on_device(3, 4), torch.tensor(0.75)
    assert torch.equal(operation(x, one).cpu(), operation(x.cpu(), one))


def test_indexing_takes_an_index_of_the_host() -> None:
    x = on_device(3, 4)
    for index in (torch.tensor([2, 0]), torch.tensor([True, False, True])):
        with accelerator.count() as counts:
            found = x[index]
        assert (counts.copies_to_device, counts.host_reads) == (1, 0)
        assert torch.equal(found.cpu(), x.cpu()[index])
        changed = x.clone()
        changed[index] = 5.0
        assert (changed.cpu()[index] == 5.0).all()


def test_copies_cross_devices() -> None:
    x = on_device(3, 4)
    with accelerator.count() as counts:
        back = torch.empty(4, 4)[1:].copy_(x)
        x.copy_(HOST), x[0].copy_(x[1]), x.copy_(HOST[0])  # the last is broadcast
        x.to("sim:1")
    assert (counts.copies_to_host, counts.copies_to_device, counts.kernels) == (1, 2, 2)
    assert torch.equal(back, on_device(3, 4).cpu()) and torch.equal(x.cpu(), HOST[0].expand(3, 4))
    with pytest.raises(TypeError, match="can't convert sim:0 device type tensor to numpy"):
        x.numpy()


def test_current_device() -> None:
    assert (accelerator.sim.device_count(), accelerator.sim.current_device()) == (2, 0)
    with accelerator.sim.device(1):
        assert torch.empty(1, device="sim").device == torch.device("sim:1")
    with torch.device("sim:1"):
        assert nn.Linear(2, 2).weight.device == torch.device("sim:1")
    assert torch.accelerator.current_accelerator() == torch.device("sim")
    with pytest.raises(RuntimeError, match="2 devices"):
        torch.empty(1, device="sim:2")


# ---- random numbers ----


@pytest.mark.parametrize(
    "draw",
    [
        lambda x, generator: x.normal_(generator=generator),
        lambda x, generator: torch.bernoulli(x, generator=generator),
        lambda x, generator: torch.randn(4, device=x.device, generator=generator),
        lambda x, generator: torch.randperm(4, device=x.device, generator=generator),
        lambda x, generator: torch.multinomial(x, 1, generator=generator),
    ],
)
def test_generators_are_of_the_device(draw: Callable[[Tensor, torch.Generator], Tensor]) -> None:
    drawn = [draw(on_device(3, 4), torch.Generator("sim").manual_seed(3)) for _ in range(2)]
    assert torch.equal(*drawn) and drawn[0].device == SIM
    with pytest.raises(RuntimeError, match="Expected a 'sim' device type for generator but found 'cpu'"):
        draw(on_device(3, 4), torch.Generator())
    with pytest.raises(RuntimeError, match="Expected a 'cpu' device type for generator but found 'sim'"):
        torch.rand(2, generator=torch.Generator("sim"))


def test_a_seed_gives_other_numbers_than_on_the_cpu() -> None:
    torch.manual_seed(3)
    state, host_state = accelerator.sim.get_rng_state(), torch.get_rng_state()
    first = torch.rand(4, device="sim")
    assert torch.equal(torch.get_rng_state(), host_state)
    assert not torch.equal(first.cpu(), torch.rand(4))
    accelerator.sim.set_rng_state(state)
    assert torch.equal(torch.rand(4, device="sim"), first)
    torch.manual_seed(3)
    assert torch.equal(torch.rand(4, device="sim"), first)
    with accelerator.numbers_of_cpu():
        same = torch.rand(4, device="sim", generator=torch.Generator("sim").manual_seed(3))
        assert torch.equal(same.cpu(), torch.rand(4, generator=torch.Generator().manual_seed(3)))
    assert torch.Generator("sim").manual_seed(7).initial_seed() == 7
    dropped = nn.functional.dropout(torch.ones(1000, device="sim"), 0.25)
    assert 600 < (dropped > 0).sum() < 900 and dropped.max().item() == pytest.approx(4 / 3)


# ---- counts ----


@pytest.mark.parametrize(
    ("read", "kernels", "copies"),
    [
        (lambda x: x[0, 0].item(), 0, 0),
        (lambda x: float(x[0, 0]), 0, 0),
        (lambda x: bool(x[0, 0]), 0, 0),
        (lambda x: x.cpu(), 0, 1),
        (lambda x: torch.empty(3, 4).copy_(x, non_blocking=True), 0, 1),  # into memory that is not pinned
        (lambda x: x.tolist(), 0, 1),
        (lambda x: x.nonzero(), 1, 0),
        (lambda x: x[x > 0.5], 2, 0),
        (lambda x: x.masked_select(x > 0.5), 2, 0),
        (lambda x: x.unique(), 1, 0),
        (lambda x: torch.equal(x, x), 1, 0),
        (lambda x: torch.allclose(x, x), None, 0),
        (lambda x: torch.where(x), None, 0),
    ],
)
def test_host_reads_are_counted(read: Callable[[Tensor], Any], kernels: int | None, copies: int) -> None:
    x = on_device(3, 4)
    with accelerator.count() as counts:
        read(x)
    assert (counts.host_reads, counts.copies_to_host) == (1, copies)
    assert kernels is None or counts.kernels == kernels
    with accelerator.no_host_reads(), pytest.raises(RuntimeError, match="the host would wait"):
        read(x)


def test_what_needs_no_host_read() -> None:
    x = on_device(3, 4)
    pinned = torch.empty(3, 4, pin_memory=True)
    with accelerator.no_host_reads():
        (x > 0.5).any(), x.argmax(1), x.topk(2), x.sort(), x.clone().masked_fill_(x > 0.5, 0.0)
        pinned.copy_(x, non_blocking=True)
        assert x.to("cpu", non_blocking=True).is_pinned()
        x[x > 0.5] = 0.0
    assert torch.equal(pinned, on_device(3, 4).cpu())


def test_kernels_are_counted_and_views_are_not() -> None:
    x = on_device(3, 4)
    with accelerator.count() as counts:
        y = (x.t()[1:].flatten(0).unsqueeze(0).expand(2, 9) * 2 + 1).view(3, 6)  # flatten copies
        y.unfold(0, 2, 1).sum().detach(), torch.empty(3, device=SIM), y.unbind(), y.chunk(2)
    assert counts.names == {"copy_": 1, "mul": 1, "add": 1, "sum": 1} and counts.kernels == 4
    with accelerator.count() as counts:
        torch.zeros(3, device=SIM), torch.ones(3, device=SIM)
    assert counts.names == {"zero_": 1, "fill_": 1}
    layers = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.GroupNorm(1, 2), nn.LayerNorm(8)).to(
        SIM
    )
    with accelerator.count() as counts:
        loss = layers(on_device(2, 1, 10, 10)).mean()
    num_forward = counts.kernels
    assert num_forward == 7  # of which one counts the batches of BatchNorm
    with accelerator.count() as counts:
        loss.backward()
    assert counts.names["convolution_backward"] == counts.names["native_batch_norm_backward"] == 1
    parameters = [nn.Parameter(on_device(3, 4)) for _ in range(20)]
    optimizer = torch.optim.SGD(parameters, 0.1, momentum=0.9)
    for parameter in parameters:
        parameter.grad = on_device(3, 4)
    optimizer.step()
    with accelerator.count() as counts:
        optimizer.step()
    assert counts.kernels == 3  # all tensors at once, as on CUDA


# ---- memory ----


def test_views_share_memory() -> None:
    x = on_device(3, 4)
    view = x.t()[1:3, ::2]
    view.add_(1)
    expected = on_device(3, 4).cpu()
    expected.t()[1:3, ::2].add_(1)
    assert torch.equal(x.cpu(), expected) and view.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    windows = x.unfold(1, 2, 1)
    windows[0].zero_()
    assert (x[0] == 0).all()
    torch.mul(x, 2, out=(out := torch.zeros(6, 4, device=SIM))[::2])
    assert torch.equal(out[::2].cpu(), 2 * x.cpu()) and (out[1::2] == 0).all()
    grown = torch.empty(0, device=SIM)
    torch.add(x, 1, out=grown)
    assert torch.equal(grown.cpu(), x.cpu() + 1)
    assert torch.equal(x.clone().resize_(2, 2).cpu(), x.cpu().flatten()[:4].view(2, 2))
    assert torch.view_as_real(torch.view_as_complex(x.view(3, 2, 2))).data_ptr() == x.data_ptr()


def test_memory_is_counted_and_limited() -> None:
    before = accelerator.sim.memory_allocated()
    accelerator.sim.reset_peak_memory_stats()
    x = torch.zeros(1000, device=SIM)
    y = x + 1
    assert accelerator.sim.memory_allocated() == before + 8000
    del x
    assert accelerator.sim.memory_allocated() == before + 4000
    assert accelerator.sim.max_memory_allocated() == before + 8000
    assert torch.accelerator.max_memory_allocated() == before + 8000
    assert accelerator.sim.memory_allocated(1) == 0
    with accelerator.memory_limit(before + 10_000), pytest.raises(torch.OutOfMemoryError, match="sim out of memory"):
        torch.cat([y, y])


def test_pinned_memory() -> None:
    x = torch.rand(10)
    assert not x.is_pinned() and x.pin_memory().is_pinned() and x.pin_memory()[5:].is_pinned()
    assert torch.equal(x.pin_memory(), x)


# ---- dtypes ----


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x.double(),
        lambda x: HOST.double().to(SIM),
        lambda x: torch.zeros(2, dtype=torch.float64, device=SIM),
        lambda x: x.sum(dtype=torch.float64),
        lambda x: torch.tensor(0.5, dtype=torch.float64, device=SIM),
        lambda x: nn.Linear(2, 2).double().to(SIM),
    ],
)
def test_float64_can_be_refused(make: Callable[[Tensor], Any]) -> None:
    x = on_device(3, 4)
    make(x)
    with accelerator.no_float64(), pytest.raises(TypeError, match="doesn't support float64"):
        make(x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype: torch.dtype) -> None:
    x, weight = on_device(4, 4), nn.Parameter(on_device(4, 4))
    with torch.autocast("sim", dtype):
        product = nn.functional.linear(x, weight)
        assert (product.dtype, product.softmax(1).dtype, product.exp().dtype) == (dtype, torch.float32, torch.float32)
        assert nn.functional.layer_norm(product, (4,)).dtype == torch.float32
        assert nn.functional.conv2d(x[None, None], weight[None, None]).dtype == dtype
        assert torch.addcmul(x, product, product).dtype == torch.float32
    product.float().sum().backward()
    assert weight.grad is not None and weight.grad.dtype == torch.float32
    assert nn.functional.linear(x, weight).dtype == torch.float32
    scaler = torch.amp.GradScaler("sim")
    optimizer = torch.optim.SGD([weight], 0.1)
    scaler.scale(product.detach().float().mean() * weight.sum()).backward()
    scaler.step(optimizer)
    scaler.update()


# ---- networks ----


class ResidualNet(nn.Module):
    """What vision networks are made of, beside what the networks of the contract have."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.grouped, self.group_norm = nn.Conv2d(16, 16, 3, padding=2, dilation=2, groups=4), nn.GroupNorm(4, 16)
        self.up, self.head = nn.ConvTranspose2d(16, 16, 3), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.relu(self.norm(self.stem(x)))
        x = self.up(x + nn.functional.silu(self.group_norm(self.grouped(x))))
        x = nn.functional.interpolate(nn.functional.max_pool2d(x, 3, 2, 1), scale_factor=2.0, mode="bilinear")
        logits: Tensor = self.head(nn.functional.adaptive_avg_pool2d(x, 1).flatten(1))
        return logits


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("network", [*NETWORKS.values(), *VISION_TRANSFORMERS.values(), ResidualNet])
def test_training_equals_that_on_the_cpu(
    network: Callable[[], nn.Module], optimizer: Callable[..., torch.optim.Optimizer]
) -> None:
    torch.manual_seed(0)
    net = network()
    same, parameters = copy.deepcopy(net), [*net.parameters()]
    net.to(SIM)
    assert all(one is other for one, other in zip(parameters, net.parameters(), strict=True)), "as on CUDA"
    for each in (net, same):
        steps = optimizer(each.parameters(), lr=0.01)
        for number in range(3):
            x = torch.rand(8, 3, 16, 16, generator=torch.Generator().manual_seed(number))
            logits = each(x.to(next(each.parameters()).device))
            logits = logits.flatten(2).mean(2) if logits.ndim > 2 else logits
            steps.zero_grad()
            nn.functional.cross_entropy(logits, (torch.arange(8) % 5).to(logits.device)).backward()
            steps.step()
    for (name, value), other in zip(net.state_dict().items(), same.state_dict().values(), strict=True):
        assert value.device == SIM and torch.equal(value.cpu(), other), name


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.stft(x.flatten(), 8, window=torch.hann_window(8, device=x.device), return_complex=True).abs(),
        lambda x: torch.histc(x, 5),
        lambda x: torch.fft.ifft2(torch.fft.fft2(x)).real,
        lambda x: torch.linalg.svd(x).S,
        lambda x: torch.linalg.inv(x @ x.T + torch.eye(len(x), device=x.device)),
        lambda x: nn.functional.grid_sample(
            x[None, None], torch.zeros(1, 2, 2, 2, device=x.device), align_corners=False
        ),
        lambda x: nn.functional.scaled_dot_product_attention(
            x[None, None], x[None, None], x[None, None], is_causal=True
        ),
        lambda x: torch.einsum("ij,kj->ik", x, x),
        lambda x: torch.vmap(lambda row: row * 2)(x),
        lambda x: torch.tril_indices(3, 3, device=x.device),
        lambda x: nn.functional.one_hot(torch.tensor([1, 2], device=x.device), 4),
        lambda x: torch.quantile(x, 0.3),
        lambda x: torch.func.jacrev(lambda y: y.exp().sum(1))(x),
    ],
)
def test_other_functions_equal_those_of_the_cpu(function: Callable[[Tensor], Tensor]) -> None:
    x = on_device(12, 12)
    found = function(x)
    assert found.device == SIM and torch.equal(found.cpu(), function(x.cpu()))


# ---- files and copies ----


def test_saving_and_copying(tmp_path: Path) -> None:
    net = NETWORKS["batch_norm"]().to(SIM)
    copies = [copy.deepcopy(net), pickle.loads(pickle.dumps(net))]
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    copies.append(torch.load(file, weights_only=False))
    file.seek(0)
    assert next(torch.load(file, map_location="cpu", weights_only=False).parameters()).device.type == "cpu"
    for each in copies:
        for one, other in zip(each.parameters(), net.parameters(), strict=True):
            assert one.device == SIM and torch.equal(one, other) and one.data_ptr() != other.data_ptr()
    state = {name: value.cpu() for name, value in net.state_dict().items()}
    save_file(state, tmp_path / "net.safetensors")
    net.load_state_dict(load_file(tmp_path / "net.safetensors"))
    assert next(net.parameters()).device == SIM


def test_streams_and_events() -> None:
    start, end = torch.Event("sim", enable_timing=True), torch.Event("sim", enable_timing=True)
    start.record()
    with torch.Stream("sim:0") as stream:
        assert torch.accelerator.current_stream() == stream
        on_device(3, 4).record_stream(stream)
    end.record()
    torch.accelerator.synchronize()
    assert start.elapsed_time(end) > 0 and end.query()


def test_processes_that_start_together_compile_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler, log, built = tmp_path / "compiler", tmp_path / "log", accelerator.build()
    find_output = 'while [ "$1" != -o ]; do shift; done'
    compiler.write_text(f'#!/bin/sh\necho compiled >> {log}\nsleep 1\n{find_output}\ncp {built} "$2"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("PYTHONPATH", str(Path(accelerator.__file__).parents[1]))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", str(compiler))
    script = "import accelerator, torch; print((torch.ones(2, device='sim') + 1).sum().item())"
    both = [subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [process.communicate()[0] for process in both] == ["4.0\n"] * 2
    assert accelerator.build().parent.parent == tmp_path / "cache"
    assert log.read_text() == "compiled\n"


def test_a_compiler_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(RuntimeError, match="the simulated accelerator does not compile: false -std"):
        accelerator.build()
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match="needs a compiler of"):
        accelerator.build()
