"""The front of several replicas: one API over all of them, tokens, and actors that are replaced."""

import asyncio
import gzip
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from clusters import local_cluster, make_batch
from command_line import output, user_error
from serving import infer_request

from ctta.cli.serve import serve
from ctta.cli.service import ServiceRecipe
from ctta.serve import Tokens
from ctta.serve.cluster.actors import RayOptions, RemoteCoordinator
from ctta.serve.cluster.messages import HttpRequest, call_app
from ctta.serve.cluster.view import View

STREAMS = [f"camera{number}" for number in range(5)]


class ActorDied(Exception):
    """As Ray raises it."""


class FakeActor:
    """An actor of Ray, with one method."""

    def __init__(self, outcome: object) -> None:
        self.outcome, self.get_view = outcome, self

    async def remote(self) -> object:
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


def test_an_actor_that_was_replaced_is_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica that is removed and added later has the same name, and is another actor."""
    actors: dict[str, FakeActor] = {}

    def get_actor(name: str, namespace: str) -> FakeActor:
        if name not in actors:
            raise ValueError(f"no actor {name} in {namespace}")
        return actors[name]

    ray = SimpleNamespace(get_actor=get_actor, exceptions=SimpleNamespace(RayActorError=ActorDied))
    monkeypatch.setattr("ctta.serve.cluster.actors.import_ray", lambda: ray)

    async def run() -> None:
        coordinator = RemoteCoordinator("ctta-coordinator")
        with pytest.raises(ConnectionError, match="no actor"):
            await coordinator.get_view()
        for actor in (FakeActor(View(1)), FakeActor(View(2))):
            actors["ctta-coordinator"] = actor
            assert await coordinator.get_view() == actor.outcome
            actor.outcome = ActorDied()
            with pytest.raises(ConnectionError, match="does not answer"):
                await coordinator.get_view()
        actors["ctta-coordinator"] = FakeActor(ValueError("of the method"))
        with pytest.raises(ValueError, match="of the method"):
            await coordinator.get_view()

    asyncio.run(run())


def test_the_front_merges_lists_metrics_and_readiness(tmp_path: Path) -> None:
    async def run() -> None:
        async with local_cluster(tmp_path) as cluster:
            for stream in STREAMS:
                await cluster.infer(stream, make_batch(stream, 0))
            listed = json.loads((await cluster.call("GET", "/streams", query=b"order=name&offset=1&limit=3")).body)
            assert [each["name"] for each in listed["streams"]] == STREAMS[1:4]
            assert (listed["total"], listed["matching"], listed["totals"]["images"]) == (5, 5, 30)
            text = (await cluster.call("GET", "/metrics")).body.decode()
            values = [line.split()[-1] for line in text.splitlines() if line.startswith("ctta_streams{")]
            assert len(values) == 3 and sum(map(float, values)) == 5
            assert text.count("# HELP ctta_streams ") == 1
            assert (await cluster.call("GET", "/v2/health/ready")).status == 200
            shown = await cluster.call("GET", "/streams/camera3")
            assert json.loads(shown.body)["updates"] == 1
            body = gzip.compress(json.dumps(infer_request("camera3", make_batch("camera3", 1))).encode())
            compressed = [(b"host", b"localhost"), (b"content-encoding", b"gzip")]
            request = HttpRequest("POST", "/v2/models/ctta/infer", b"", compressed, body)
            answer = json.loads((await call_app(cluster.app, request)).body)
            assert answer["parameters"] == {**answer["parameters"], "sequence_id": "camera3", "update": 2}
            cluster.replicas["r1"].service.store.is_closed = True
            assert (await cluster.call("GET", "/v2/models/ctta/ready")).status == 503
            assert (await cluster.call("GET", "/streams/nobody")).status == 404
            assert (await cluster.call("GET", "/")).body.startswith(b"<!doctype html>")
            assert (await cluster.call("POST", "/v2/models/ctta/infer", body=b"{")).status == 400
            assert (await cluster.call("GET", "/streams", query=b"limit=0")).status == 400

    asyncio.run(run())


def test_tokens_are_checked_before_a_body_is_read(tmp_path: Path) -> None:
    tokens = Tokens("i" * 20, "a" * 20)

    async def run() -> None:
        async with local_cluster(tmp_path, num_replicas=1, tokens=tokens) as cluster:
            body = json.dumps(infer_request("a", make_batch("a", 0))).encode()
            for token, status in ((None, 401), ("x" * 20, 401), (tokens.infer, 200), (tokens.admin, 200)):
                assert (await cluster.call("POST", "/v2/models/ctta/infer", body=body, token=token)).status == status
            assert (await cluster.call("POST", "/streams/a/image", body=b"x" * 2**25)).status == 401
            for token, status in ((None, 401), (tokens.infer, 403), (tokens.admin, 200)):
                assert (await cluster.call("POST", "/streams/a/reset", token=token)).status == status
            for path, status in (("/streams", 401), ("/metrics", 401), ("/cluster", 401), ("/v2/health/ready", 200)):
                assert (await cluster.call("GET", path)).status == status
            assert (await cluster.call("GET", "/streams/a/../a")).status == 401

    asyncio.run(run())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--replicas", 2], "need --ray"),
        (["--state", "s3://bucket/streams"], "need --ray"),
        (["--ray", "auto"], "--ray needs --state"),
        (["--ray", "auto", "--state", "x", "--source", "a=/dev/video0"], "--source needs one process"),
    ],
)
def test_options_that_contradict_each_other(options: list[object], message: str) -> None:
    assert message in user_error(serve, "--model", "embedded", *options)


def test_replicas_get_absolute_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They run in other folders."""
    options: list[RayOptions] = []

    class FakeService:
        def __init__(self, given: RayOptions) -> None:
            options.append(given)

        def start(self, num_replicas: int, *, host: str, port: int) -> None:
            assert (num_replicas, host) == (2, "127.0.0.1")

    monkeypatch.chdir(tmp_path)
    Path("names.txt").write_text("bird\ncat\n")
    for name, value in (("connect", None), ("is_running", False), ("wait_for_signal", None)):
        monkeypatch.setattr(f"ctta.serve.cluster.{name}", lambda *_, value=value: value)
    monkeypatch.setattr("ctta.serve.cluster.RayService", FakeService)
    files = ("--classes", "names.txt", "--model", "file:net.py:build")
    output(serve, *files, "--ray", "auto", "--replicas", 2, "--state", "streams")
    recipe = getattr(options[0].make_service, "__self__", None)
    assert isinstance(recipe, ServiceRecipe) and options[0].state == str(tmp_path / "streams")
    assert recipe.classes == tmp_path / "names.txt"
    assert recipe.model == f"file:{tmp_path / 'net.py'}:build"
