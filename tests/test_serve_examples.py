"""Every example in /openapi.json runs on the service that describes it."""

import base64
import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from serving import SIZE, Client, make_tent, serve_in_thread

import ctta
from ctta.serve import Service, create_app

#: A state is a file that only the service itself can write.
WITHOUT_EXAMPLES = {"PUT /streams/{name}/state"}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    folder = tmp_path_factory.mktemp("examples")
    model = ctta.Guarded(make_tent(folder))
    service = Service(model, folder / "state", image_size=SIZE, num_answers=10, keep_images=True)  # as routes need
    with serve_in_thread(service) as client:
        yield client


def get_values(parameter: dict[str, Any]) -> list[str]:
    """Return the example values of a parameter of a path."""
    examples = [example["value"] for example in parameter.get("examples", {}).values()]
    return examples or parameter["schema"]["enum"]


def get_paths(path: str, operation: dict[str, Any]) -> Iterator[str]:
    parameters = [each for each in operation.get("parameters", []) if each["in"] == "path"]
    for values in product(*map(get_values, parameters)):
        names = [parameter["name"] for parameter in parameters]
        yield path.format(**dict(zip(names, values, strict=True)))


def get_bodies(operation: dict[str, Any]) -> Iterator[tuple[str, bytes]]:
    """Yield the media type and the content of each example of a body."""
    for media_type, content in operation.get("requestBody", {}).get("content", {}).items():
        for example in content.get("examples", {}).values():
            if "value" in example:
                yield media_type, json.dumps(example["value"]).encode()
            else:
                head, data = example["externalValue"].split(",")
                assert head == f"data:{media_type};base64"
                yield media_type, base64.b64decode(data)


def test_every_example_runs(client: Client) -> None:
    operations = [
        (method.upper(), path, operation)
        for path, methods in client.json("GET", "/openapi.json")["paths"].items()
        for method, operation in methods.items()
    ]
    # What creates the stream comes first, then what shows it, and what deletes it last.
    operations.sort(
        key=lambda each: (
            each[0] == "DELETE",
            each[0] == "GET" or not each[1].endswith(("/infer", "/image")),
            each[0] != "GET",
        )
    )
    num_sent, without = 0, set()
    for method, path, operation in operations:
        bodies: list[tuple[str | None, bytes | None]] = list(get_bodies(operation))
        if "requestBody" in operation and not bodies:
            without.add(f"{method} {path}")
            continue
        for url in get_paths(path, operation):
            for media_type, body in bodies or [(None, None)]:
                headers = {"Content-Type": media_type} if media_type else {}
                response = client.call(method, url, data=body, headers=headers)
                assert response.status_code == 200, f"{method} {url}: {response.text}"
                num_sent += 1
    assert without == WITHOUT_EXAMPLES and num_sent >= len(operations)
    assert client.json("GET", "/streams")["total"] == 0


def test_examples_are_left_out_where_they_would_not_run(tmp_path: Path) -> None:
    """Without a size nobody knows which images the network takes, and large ones are too long in JSON."""
    for size, count in ((None, 1), ((64, 64), 2), (SIZE, 4)):
        model = ctta.Tent(torch.nn.Sequential(torch.nn.BatchNorm2d(3), torch.nn.Flatten()))
        service = Service(model, tmp_path / str(size), image_size=size)
        paths = create_app(service).openapi()["paths"]
        service.release()
        described = [operation for methods in paths.values() for operation in methods.values()]
        assert sum(bool(list(get_bodies(operation))) for operation in described) == count
