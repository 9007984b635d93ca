"""Downloads over HTTPS from a local server: a redirect to plain HTTP is never followed."""

import hashlib
import ssl
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from download_server import DownloadServer, serving

from ctta.data.datasets import DATASETS, Dataset, DownloadError, download

CONTENT = b"the file"


class HttpsServer(ThreadingHTTPServer):
    """Serves the file at /file, and redirects every other path to ``target``."""

    daemon_threads = True
    target = ""


class _Handler(BaseHTTPRequestHandler):
    server: HttpsServer

    def do_GET(self) -> None:
        is_file = self.path == "/file"
        self.send_response(200 if is_file else 302)
        self.send_header("Content-Length", str(len(CONTENT) if is_file else 0))
        if not is_file:
            self.send_header("Location", self.server.target)
        self.end_headers()
        self.wfile.write(CONTENT if is_file else b"")

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file with a new certificate for 127.0.0.1 and its key."""
    path = tmp_path_factory.mktemp("certificate") / "both.pem"
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    name = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    command = ["openssl", "req", "-x509", *key, *name, "-days", "1", "-keyout", f"{path}.key", "-out", str(path)]
    subprocess.run(command, check=True, capture_output=True)
    with path.open("a") as file:
        file.write(Path(f"{path}.key").read_text())
    return path


@pytest.fixture
def https(certificate: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HttpsServer]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(certificate))
    with HttpsServer(("127.0.0.1", 0), _Handler) as server:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def http() -> Iterator[DownloadServer]:
    with serving(CONTENT) as server:
        yield server


def offer(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sha256 = hashlib.sha256(CONTENT).hexdigest()
    monkeypatch.setitem(DATASETS, "file", Dataset(url, "file.bin", sha256, is_archive=False))


def test_https_all_the_way(https: HttpsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offer(f"https://127.0.0.1:{https.server_port}/moved", monkeypatch)
    https.target = "/file"
    assert download("file", cache=tmp_path).read_bytes() == CONTENT


def test_a_redirect_to_http_is_refused_before_it_is_followed(
    https: HttpsServer, http: DownloadServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The right content would arrive, but anybody on the way could read and change the request."""
    offer(f"https://127.0.0.1:{https.server_port}/moved", monkeypatch)
    https.target = http.url
    with pytest.raises(DownloadError, match="not encrypted"):
        download("file", cache=tmp_path)
    assert http.requests == []
    assert {path.name for path in tmp_path.iterdir()} == {"file.bin.lock"}


def test_an_untrusted_certificate_is_refused(
    https: HttpsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer(f"https://127.0.0.1:{https.server_port}/file", monkeypatch)
    monkeypatch.delenv("REQUESTS_CA_BUNDLE")
    with pytest.raises(DownloadError, match="certificate"):
        download("file", cache=tmp_path)


def test_plain_http_is_only_for_this_machine(
    http: DownloadServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    offer("http://data.example/file", monkeypatch)
    with pytest.raises(DownloadError, match="not encrypted"):
        download("file", cache=tmp_path)
    offer(http.url, monkeypatch)
    http.behavior = "redirects to another host"
    with pytest.raises(DownloadError, match="not encrypted"):
        download("file", cache=tmp_path)


def test_md5_is_a_second_check(http: DownloadServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    offer(http.url, monkeypatch)
    monkeypatch.setitem(DATASETS, "file", replace(DATASETS["file"], md5="0" * 32))
    with pytest.raises(DownloadError, match="checksum"):
        download("file", cache=tmp_path)
    monkeypatch.setitem(DATASETS, "file", replace(DATASETS["file"], sha256=None, md5=hashlib.md5(CONTENT).hexdigest()))
    with pytest.raises(DownloadError, match="SHA-256"):
        download("file", cache=tmp_path)
    assert download("file", cache=tmp_path, insecure=True).read_bytes() == CONTENT
