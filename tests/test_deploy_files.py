"""The files in deploy/: they parse, their options exist, and they keep the promises of the documentation."""

import configparser
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from ctta import Tent, models
from ctta.cli.app import app
from ctta.serve import Service, create_app

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
PAGE = ROOT / "docs" / "how-to" / "deploy-the-service.md"


def options_of_serve() -> set[str]:
    root: Any = get_command(app)
    return {
        name for parameter in root.commands["serve"].params for name in (*parameter.opts, *parameter.secondary_opts)
    }


def read_dockerfile() -> list[tuple[str, str]]:
    """Return every instruction with its arguments."""
    text = re.sub(r"\\\n\s*", "", (DEPLOY / "Dockerfile").read_text())
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1]) for line in lines]


def read_manifests() -> list[dict[str, Any]]:
    return [each for path in sorted(DEPLOY.glob("kubernetes/*.yaml")) for each in yaml.safe_load_all(path.read_text())]


def containers() -> Iterator[dict[str, Any]]:
    for manifest in read_manifests():
        if manifest["kind"] == "StatefulSet":
            yield from manifest["spec"]["template"]["spec"]["containers"]


def read_unit() -> configparser.RawConfigParser:
    class Options(configparser.RawConfigParser):
        def optionxform(self, optionstr: str) -> str:
            return optionstr

    unit = Options(strict=False)
    unit.read_string((DEPLOY / "ctta-serve.service").read_text())
    return unit


def commands() -> Iterator[list[str]]:
    """Yield the arguments of every ``ctta serve`` in the files and on the page."""
    yield shlex.split(read_unit()["Service"]["ExecStart"])[2:]
    instructions = dict(read_dockerfile())
    yield json.loads(instructions["ENTRYPOINT"])[2:] + json.loads(instructions["CMD"])
    for container in containers():
        if "command" not in container:
            yield container["args"]
    shell = [text for container in containers() if "command" in container for text in container["args"]]
    comments = [path.read_text() for path in DEPLOY.glob("kubernetes/*.yaml")]
    for text in [*shell, *comments, PAGE.read_text().replace("\n  ", " ")]:
        for found in re.findall(r"ctta serve (--[^\n`#]*)", text):
            yield shlex.split(found)


def test_options_exist() -> None:
    known, seen = options_of_serve(), list(commands())
    assert len(seen) >= 6
    for arguments in seen:
        given = [text for text in arguments if text.startswith("--")]
        assert given and set(given) <= known, arguments


def test_paths_of_probes_exist(tmp_path: Path) -> None:
    service = Service(Tent(models.embedded()), tmp_path / "state")
    routes = set(create_app(service).openapi()["paths"])
    service.release()
    texts = [
        (DEPLOY / name).read_text() for name in ("Dockerfile", "kubernetes/ctta-serve.yaml", "kubernetes/ctta-ray.yaml")
    ]
    probes = [path for text in texts for path in re.findall(r"/v2/health/\w+", text)]
    assert len(probes) == 5 and set(probes) <= routes


def test_nothing_runs_as_root_and_all_streams_are_saved() -> None:
    instructions = read_dockerfile()
    names = [name for name, _ in instructions]
    assert names[:2] == ["ARG", "FROM"] and dict(instructions)["FROM"] == "${BASE}"
    assert dict(instructions)["USER"] == "10001:10001" and "RUN" not in names[names.index("USER") :]
    assert "HEALTHCHECK" in names and any("dist/ctta-*.whl" in text for name, text in instructions if name == "COPY")
    assert (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()[1:] == ["*", "!dist/ctta-*.whl"]
    service = read_unit()["Service"]
    assert service["DynamicUser"] == "yes" and int(service["TimeoutStopSec"]) >= 120
    sets = [manifest for manifest in read_manifests() if manifest["kind"] == "StatefulSet"]
    assert [each["metadata"]["name"] for each in sets] == ["ctta-ray-head", "ctta-ray-worker", "ctta-serve"]
    for each in sets:
        pod = each["spec"]["template"]["spec"]
        assert pod["securityContext"]["runAsUser"] == 10001 and pod["terminationGracePeriodSeconds"] >= 120
        assert each["spec"]["selector"]["matchLabels"] == each["spec"]["template"]["metadata"]["labels"]
        assert "/state" in [mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]]


def test_addresses_agree() -> None:
    """The proxy, the probes and the services find the port at which the service listens."""
    assert "reverse_proxy 127.0.0.1:8000" in (DEPLOY / "Caddyfile").read_text()
    assert (DEPLOY / "Caddyfile").read_text().count("{") == (DEPLOY / "Caddyfile").read_text().count("}")
    assert "--port 8000" in read_unit()["Service"]["ExecStart"]
    assert dict(read_dockerfile())["EXPOSE"] == "8000"
    manifests = {(each["kind"], each["metadata"]["name"]): each for each in read_manifests()}
    head = manifests["Service", "ctta-ray-head"]["metadata"]["name"]
    (worker,) = [each for each in containers() if each["name"] == "worker"]
    assert f"ctta-ray-head-0.{head}:6379" in worker["args"][0]


@pytest.mark.parametrize("name", ["ctta-serve.service", "Dockerfile", "Caddyfile", "kubernetes/ctta-serve.yaml"])
def test_the_page_names_the_file(name: str) -> None:
    assert f"../../deploy/{name}" in PAGE.read_text()
