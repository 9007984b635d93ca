"""Authentication: tokens of two scopes, loopback only without tokens, and no requests of foreign origins."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import network_error, user_error, write_network
from serving import SIZE, Client, make_png, make_tent, serve_in_thread

from ctta.cli.serve import serve
from ctta.errors import ConfigError
from ctta.serve import Service, Tokens, read_tokens

INFER, ADMIN = "i" * 20, "a" * 20


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("service")
    with serve_in_thread(Service(make_tent(folder), folder / "state", image_size=SIZE), Tokens(INFER, ADMIN)) as client:
        assert client.call("POST", "/streams/a/image", data=make_png()).status_code == 200
        yield client.address


READ = [
    ("GET", "/v2"),
    ("GET", "/v2/models/ctta"),
    ("GET", "/streams"),
    ("GET", "/streams/a"),
    ("GET", "/metrics"),
    ("POST", "/streams/a/image"),
]
CHANGE = [
    ("POST", "/streams/a/reset"),
    ("POST", "/streams/a/freeze"),
    ("POST", "/streams/a/unfreeze"),
    ("GET", "/streams/a/state"),
    ("PUT", "/streams/a/state"),
    ("DELETE", "/streams/none"),
]


def test_scopes(address: str) -> None:
    anonymous, unknown, user, admin = (Client(address, token) for token in (None, "x" * 20, INFER, ADMIN))
    for method, path in [*READ, *CHANGE]:
        for client in (anonymous, unknown):
            response = client.call(method, path, data=make_png())
            assert response.status_code == 401 and response.headers["WWW-Authenticate"] == "Bearer"
        expected = 403 if (method, path) in CHANGE else 200
        assert user.call(method, path, data=make_png()).status_code == expected
        assert admin.call(method, path, data=make_png()).status_code not in (401, 403)
    for path in ("/", "/page.js", "/v2/health/live", "/v2/health/ready", "/v2/models/ctta/ready"):
        assert anonymous.call("GET", path).status_code == 200
    for header in ("Basic " + INFER, INFER, "Bearer", "Bearer ", "Bearer \xff"):
        assert anonymous.call("GET", "/streams", headers={"Authorization": header.encode("latin-1")}).status_code == 401


def test_no_body_is_read_without_a_token(address: str) -> None:
    assert Client(address).call("POST", "/streams/a/image", data=bytes(17 * 2**20)).status_code == 401


def test_with_tokens_foreign_origins_are_rejected_but_not_foreign_hosts(address: str) -> None:
    user = Client(address, INFER)
    assert user.call("GET", "/streams", headers={"Host": "cameras.example.org"}).status_code == 200
    for headers in ({"Origin": "https://evil.example"}, {"Origin": "null"}, {"Sec-Fetch-Site": "cross-site"}):
        assert user.call("POST", "/streams/a/image", data=make_png(), headers=headers).status_code == 403
    assert user.call("POST", "/streams/a/image", data=make_png(), headers={"Origin": address}).status_code == 200


def test_without_tokens_only_loopback_is_answered(tmp_path: Path) -> None:
    with serve_in_thread(Service(make_tent(tmp_path), tmp_path / "state", image_size=SIZE)) as client:
        assert client.call("POST", "/streams/a/image", data=make_png()).status_code == 200
        for host in ("evil.example", "127.0.0.1.evil.example:80", ""):
            assert client.call("GET", "/streams", headers={"Host": host}).status_code in (400, 403)
        foreign = {"Origin": "http://evil.example"}
        assert client.call("POST", "/streams/a/reset", headers=foreign).status_code == 403
        assert client.call("DELETE", "/streams/a", headers=foreign).status_code == 403
        assert client.call("GET", "/streams/a").json()["updates"] == 0


def test_tokens_come_from_files_or_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(f"{INFER}\n")
    assert read_tokens(file, None, {"CTTA_SERVE_ADMIN_TOKEN": ADMIN}) == Tokens(INFER, ADMIN)
    assert not read_tokens(None, None, {})
    file.write_text("\n")
    with pytest.raises(ConfigError, match="is empty"):
        read_tokens(file, None, {})
    file.write_bytes(b"\xff" * 20)
    with pytest.raises(ConfigError, match="is not text"):
        read_tokens(file, None, {})
    with pytest.raises(ConfigError, match="at least 16"):
        Tokens("short")
    with pytest.raises(ConfigError, match="the same"):
        Tokens(INFER, INFER)


def test_errors_of_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("CTTA_SERVE")]:
        monkeypatch.delenv(name)
    spec = write_network(tmp_path)
    assert "so a token is needed" in user_error(serve, "--model", spec, "--host", "0.0.0.0")
    assert "there is no method 'magic'" in user_error(serve, "--model", spec, "--method", "magic")
    assert "no setting 'speed'" in user_error(serve, "--model", spec, "--set", "speed=1")
    assert "fraction above 0" in user_error(serve, "--model", spec, "--budget", 2, "--size", *SIZE)
    assert "workers need as many" in user_error(serve, "--model", spec, "--workers", 3, "--live-streams", 2)
    assert "The network failed on" in network_error(serve, "--model", spec, "--size", 2, 2)
