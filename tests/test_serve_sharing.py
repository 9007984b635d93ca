"""Single images that the source answers share passes with those of other streams, and get the same bits as alone."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from serving import SIZE, make_images, make_tent
from torch import Tensor, nn

import ctta
from ctta.base import AdaptiveModel
from ctta.guard.diagnostics import source_as_trained
from ctta.serve import Limits, Service
from ctta.serve.errors import ApiError
from ctta.serve.passes import MAX_ROWS, SourcePasses
from ctta.serve.stream import InferenceResult

NUM_STREAMS = 7  # passes of four, two and one


class CountingNetwork(nn.Module):
    """Count passes and their rows, and fail on bright images."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net, self.sizes = net, list[int]()

    def forward(self, x: Tensor) -> Tensor:
        self.sizes.append(len(x))
        if bool((x.flatten(1).mean(1) > 0.9).any()):
            raise RuntimeError("too bright")
        logits: Tensor = self.net(x)
        return logits


def batch_norm_model(folder: Path) -> AdaptiveModel:
    return ctta.Guarded(ctta.Tent(CountingNetwork(make_tent(folder).copy_of_source()), batch_stats=0.5))


def group_norm_model(folder: Path) -> AdaptiveModel:
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3, stride=2), nn.GroupNorm(2, 8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 7 * 7, 5)
    return ctta.Guarded(ctta.Tent(CountingNetwork(nn.Sequential(*layers)), lr=0.1))


MODELS = pytest.mark.parametrize("build", [batch_norm_model, group_norm_model])


def make_service(model: AdaptiveModel, folder: Path, **limits: int) -> Service:
    return Service(model, folder / "state", image_size=SIZE, num_workers=1, limits=Limits(**limits))


def pass_sizes(service: Service) -> list[int]:
    network = service.reference.network
    assert isinstance(network, CountingNetwork)
    return network.sizes


async def predict_all(service: Service, images: Tensor, *, together: bool) -> list[InferenceResult | BaseException]:
    """Predict an image of each of several streams."""
    jobs = [service.infer(f"camera{number}", image[None], adapt=False) for number, image in enumerate(images)]
    if together:
        return await asyncio.gather(*jobs, return_exceptions=True)
    return [await job for job in jobs]


def get_logits(results: list[InferenceResult | BaseException]) -> Tensor:
    return torch.cat([result.logits for result in results if isinstance(result, InferenceResult)])


@MODELS
def test_streams_share_passes_and_get_the_same_bits_as_alone(
    tmp_path: Path, build: Callable[[Path], AdaptiveModel]
) -> None:
    service, images = make_service(build(tmp_path), tmp_path), make_images(NUM_STREAMS)

    async def run() -> None:
        alone = get_logits(await predict_all(service, images, together=False))
        assert alone.shape == (NUM_STREAMS, 5)
        sizes = pass_sizes(service)
        for order in (torch.arange(NUM_STREAMS), torch.randperm(NUM_STREAMS)):
            sizes.clear()
            together = get_logits(await predict_all(service, images[order], together=True))
            assert torch.equal(together, alone[order])
            assert sum(sizes) == NUM_STREAMS + 1 and sorted(sizes) == [2, 2, 4]  # the last is padded to two rows

    asyncio.run(run())
    service.release()


@MODELS
def test_a_stream_that_has_learned_no_longer_shares(tmp_path: Path, build: Callable[[Path], AdaptiveModel]) -> None:
    """Nor does one that continues with what another has learned, until it is reset."""
    service, model, images = make_service(build(tmp_path), tmp_path), build(tmp_path), make_images(4)
    window = make_images(16, seed=1)

    async def run() -> None:
        await predict_all(service, images, together=False)
        await service.infer("camera1", window, adapt=True)
        model(window)
        results = await predict_all(service, images, together=True)
        expected = model.predict(torch.cat([window[1:], images[1:2]]) if service.factory.window_size else images[1:2])
        assert isinstance(results[1], InferenceResult) and torch.equal(results[1].logits, expected[-1:])
        assert isinstance(results[2], InferenceResult) and results[2].num_updates == 0
        await service.store.run("camera1", lambda stream: stream.act("reset"))
        fresh = get_logits(await predict_all(service, images, together=False))
        shared = get_logits(await predict_all(service, images, together=True))
        assert torch.equal(shared, fresh) and not torch.equal(shared[1:2], expected[-1:])

    asyncio.run(run())
    service.release()


def test_a_failure_in_company_fails_alone(tmp_path: Path) -> None:
    service, images = make_service(batch_norm_model(tmp_path), tmp_path), make_images(4)

    async def run() -> None:
        expected = get_logits(await predict_all(service, images, together=False))
        images[2] = 0.95
        results = await predict_all(service, images, together=True)
        failure = results.pop(2)
        assert isinstance(failure, ApiError) and failure.status == 500
        assert torch.equal(get_logits(results), expected[[0, 1, 3]])

    asyncio.run(run())
    assert b'ctta_failures_total{cause="internal"} 1.0' in service.metrics.render()
    service.release()


def test_streams_that_move_to_disk_and_requests_that_time_out(tmp_path: Path) -> None:
    service, images = make_service(batch_norm_model(tmp_path), tmp_path, max_live_streams=2), make_images(5)

    async def run() -> None:
        alone = get_logits(await predict_all(service, images, together=False))
        for _ in range(3):
            assert torch.equal(get_logits(await predict_all(service, images, together=True)), alone)
        service.store.limits = Limits(request_timeout=0.01)
        async with service.store._workers:  # as if the worker were busy
            results = await predict_all(service, images, together=True)
        assert all(isinstance(result, ApiError) and result.status == 503 for result in results)
        service.store.limits = Limits()
        assert torch.equal(get_logits(await predict_all(service, images, together=True)), alone)

    asyncio.run(run())
    service.release()


async def queue_request(service: Service, x: Tensor, *, adapt: bool) -> "asyncio.Task[InferenceResult]":
    """Send a request for a stream while the only worker is busy; it waits for a pass."""
    request = asyncio.create_task(service.infer("camera0", x, adapt=adapt))
    while not service.store._passes._waiting:
        await asyncio.sleep(0)
    return request


def test_a_request_that_is_given_up_when_a_worker_becomes_free_does_nothing(tmp_path: Path) -> None:
    service, x = make_service(batch_norm_model(tmp_path), tmp_path), make_images(1)

    async def run() -> None:
        await predict_all(service, make_images(2), together=False)
        store, stream = service.store, service.store.slots["camera0"].stream
        assert stream is not None
        await store._workers.acquire()
        request = await queue_request(service, x, adapt=True)
        (job,) = store._jobs
        store._workers.release()
        job.cancel()  # as after a timeout
        await asyncio.wait({request})
        assert request.cancelled()
        await service.infer("camera1", x, adapt=True)
        assert stream.num_images == 0 and not store._passes._waiting

    asyncio.run(run())
    service.release()


def test_a_stream_that_moves_to_disk_when_a_worker_becomes_free(tmp_path: Path) -> None:
    """Its snapshot has just been written, and its memory is needed for another one."""
    service, images = make_service(batch_norm_model(tmp_path), tmp_path), make_images(2)

    async def run() -> None:
        expected, _ = await predict_all(service, images, together=False)
        store, slot = service.store, service.store.slots["camera0"]
        await store.save_all()
        await store._workers.acquire()
        request = await queue_request(service, images[:1], adapt=False)
        await slot.in_use.acquire()

        async def move_to_disk() -> None:
            async with slot.in_use:
                slot.forget()
                del store._live[slot.name]

        moving = asyncio.create_task(move_to_disk())
        await asyncio.sleep(0)
        store._workers.release()
        slot.in_use.release()
        assert isinstance(expected, InferenceResult) and torch.equal((await request).logits, expected.logits)
        await moving

    asyncio.run(run())
    service.release()


def test_a_request_at_the_moment_when_the_last_pass_ends(tmp_path: Path) -> None:
    """The task that runs passes has seen that nobody waits, and is not done yet."""
    service, x = make_service(batch_norm_model(tmp_path), tmp_path, request_timeout=5), make_images(1)

    async def run() -> None:
        await predict_all(service, make_images(2), together=False)
        queue = service.store._passes
        job = asyncio.create_task(service.infer("camera0", x, adapt=False))
        while not queue._runners:
            await asyncio.sleep(0)
        (runner,) = queue._runners
        late: list[asyncio.Task[InferenceResult]] = []

        def start_late(_task: object) -> None:
            late.append(asyncio.ensure_future(service.infer("camera1", x, adapt=False)))

        runner.remove_done_callback(queue._runners.discard)  # as if it were called later
        runner.add_done_callback(start_late)
        await job
        while not late:
            await asyncio.sleep(0)
        assert torch.equal((await late[0]).logits, (await job).logits)

    asyncio.run(run())
    service.release()


class CenteredNetwork(nn.Module):
    """Subtract the mean of the batch, so that predictions depend on the company."""

    def forward(self, x: Tensor) -> Tensor:
        pixels = x.flatten(1)
        return pixels - pixels.mean(0)


@pytest.fixture
def passes(tmp_path: Path) -> Iterator[SourcePasses]:
    model = make_tent(tmp_path)
    yield SourcePasses(source_as_trained(model.source), model)


def test_a_row_does_not_depend_on_the_size_of_its_pass(passes: SourcePasses) -> None:
    images = make_images(2 * MAX_ROWS)
    alone = torch.cat([passes(image[None]) for image in images])
    for size in range(1, MAX_ROWS + 1):
        for start in (0, 3):
            part = slice(start, start + size)
            assert torch.equal(torch.cat(passes.predict_each(images[part].split(1))), alone[part])


def test_networks_whose_rows_depend_on_the_others_do_not_share(passes: SourcePasses) -> None:
    passes.network = CenteredNetwork()
    x = make_images(3)
    assert passes.min_rows(x) is None and not passes.may_share(x)
    assert all(torch.equal(row, torch.zeros(1, 768)) for row in passes.predict_each(x.split(1)))
