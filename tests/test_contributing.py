"""The examples of CONTRIBUTING.md: each runs, and works where the text says that it is registered."""

import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from command_line import output
from documents import ROOT
from fastapi.testclient import TestClient
from torch import nn

import ctta
from ctta.cli.app import app
from ctta.data.corruptions import CORRUPTIONS, HOLD_OUT, OTHERS, corrupt
from ctta.data.datasets import sample
from ctta.data.streams import PROTOCOLS, CorruptionSequence, parse_protocol
from ctta.data.streams.protocols import NamedProtocol
from ctta.guard import EventKind
from ctta.guard.recovery import REMEDIES
from ctta.policies import POLICIES, parse_policy
from ctta.serve import Service, create_app
from ctta.serve.http import Authenticator, Tokens

WAYS_IN = (ROOT / "CONTRIBUTING.md").read_text().partition("## Ways in")[2].partition("\n## ")[0]
EXAMPLES = dict(re.findall(r"^### An? ([a-z ]+)\n.*?^```python\n(.*?)^```", WAYS_IN, re.MULTILINE | re.DOTALL))
IMAGES = np.random.default_rng(0).integers(0, 256, (4, 32, 32, 3), np.uint8)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Return a function that runs an example, and returns it as a module."""

    def run_example(way: str) -> Any:
        module = ModuleType("example")  # a class of it is copied and pickled by its name
        monkeypatch.setitem(sys.modules, "example", module)
        exec(compile(EXAMPLES[way], f"CONTRIBUTING.md: {way}", "exec"), vars(module))
        return module

    return run_example


def make_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))


def test_every_example_has_a_test() -> None:
    tested = {
        name.removeprefix("test_example_of_a_").replace("_", " ") for name in globals() if "_example_of_a" in name
    }
    assert tested == set(EXAMPLES) and len(tested) == 9


def test_example_of_a_method(run: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ctta.METHODS, "mine", run("method").Mine)
    model = ctta.adapt(make_net(), "mine", lr=0.1)
    x = torch.rand(6, 3, 16, 16)
    expected = model.predict(x)
    assert torch.equal(model(x), expected) and not torch.equal(model.predict(x), expected)
    ctta.testing.check_method(type(model), networks={"small": make_net})


def test_example_of_a_policy(run: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(POLICIES, "reset_on_loss", run("policy").ResetOnLoss)
    x = torch.rand(6, 3, 16, 16)
    for limit, is_reset in ((0.0, True), (10.0, False)):
        model = ctta.adapt(make_net(), "tent", policies=[parse_policy(f"reset_on_loss={limit}")])
        before = model.predict(x)
        model(x)
        assert torch.equal(model.predict(x), before) == is_reset


def test_example_of_a_view(run: Callable[[str], Any]) -> None:
    flip, x = run("view").Flip(), torch.rand(2, 3, 8, 8)
    assert torch.equal(flip(lambda images: images, x), x)
    assert ctta.CoTTA(make_net(), views=[flip])(x).shape == (2, 10)


def test_example_of_a_corruption(run: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OTHERS, "darken", run("corruption").darken)
    assert (corrupt(IMAGES, "darken", 3) == IMAGES // 2).all()
    assert "darken" not in {*CORRUPTIONS, *HOLD_OUT}
    stream = ctta.data.streams.continual(sample(), names=("darken",), limit=10)
    assert stream.domains == ["darken 5"] and next(iter(stream)).x.mean() < 0.2


def test_example_of_a_dataset(run: Callable[[str], Any]) -> None:
    stream = run("dataset").stream
    labels = [batch.y.tolist() for batch in stream]
    assert labels == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    assert ctta.evaluate(make_net(), stream).value == 0.9  # the images are equal, and so are the answers


def test_example_of_a_protocol(run: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PROTOCOLS, "reverse", NamedProtocol(run("protocol").build_reverse, "a paper"))
    sequence = CorruptionSequence(names=("fog", "snow", "frost"), limit=4)
    stream = parse_protocol("reverse,num_skipped=1").build(sample(), sequence)
    assert stream.domains == ["snow 5", "fog 5"]
    assert output(app, "protocols").count("Show the corruptions from the last to the first.") == 1


def test_example_of_a_guard_remedy(run: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(REMEDIES, "half_reset", run("guard remedy").half_reset)
    net = make_net()
    model = ctta.Guarded(ctta.Tent(net, lr=3.0), on_collapse="half_reset")
    x = torch.rand(64, 3, 16, 16)
    for _ in range(40):
        model(x)
    assert EventKind.REMEDY in [event.kind for event in model.events]


def test_example_of_a_route(run: Callable[[str], Any], tmp_path: Path) -> None:
    service = Service(ctta.Tent(make_net()), tmp_path)
    served = create_app(service)
    served.include_router(run("route").count_routes(service, Authenticator(Tokens())))
    with TestClient(served, base_url="http://127.0.0.1") as client:
        assert client.get("/count").json() == 0
        assert "/count" in client.get("/openapi.json").json()["paths"]


def test_example_of_a_command(run: Callable[[str], Any], tmp_path: Path) -> None:
    (tmp_path / "a.png").touch()
    assert output(run("command").count, tmp_path) == "1\n"
