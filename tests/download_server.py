"""A local server that serves one file, correctly or with one of many faults."""

import gzip
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

CONFIRMATION = """<!DOCTYPE html><html><head><title>Google Drive - Virus scan warning</title></head><body>
<form action="/search"><input name="q"></form>
<form id="download-form" action="/confirmed" method="get"><input type="submit" value="Download anyway"/>
<input type="hidden" name="id" value="the id"><input type="hidden" name="confirm" value="t">
<input type="hidden" name="uuid" value="1-2&amp;3"></form></body></html>"""
CONFIRMED = "/confirmed?id=the+id&confirm=t&uuid=1-2%263"
QUOTA = "<html><head><title>Google Drive - Quota exceeded</title></head><body>Too many users</body></html>"


class DownloadServer(ThreadingHTTPServer):
    """Serves ``content`` in the way that ``behavior`` names (an integer is a status code), and records requests."""

    daemon_threads = True

    def __init__(self, content: bytes) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.content = content
        self.behavior: str | int = "normal"
        self.requests: list[tuple[str, str | None]] = []
        self.released = threading.Event()
        self.url = f"http://127.0.0.1:{self.server_port}/file"


class _Handler(BaseHTTPRequestHandler):
    server: DownloadServer

    def do_GET(self) -> None:
        self.server.requests.append((self.path, self.headers["Range"]))
        assert self.headers["Accept-Encoding"] == "identity"
        behavior, content = self.server.behavior, self.server.content
        if behavior == "confirmation page" and self.path == "/file":
            return self._page(CONFIRMATION)
        if behavior == "confirmation page" and self.path != CONFIRMED:
            return self.send_error(400)
        if behavior == "drive over quota":
            return self._page(QUOTA)
        if behavior == "page without a type":
            return self._send(b" \n" + QUOTA.encode(), 200, {"Content-Length": str(len(QUOTA) + 2)})
        if behavior == "broken page":
            return self._page("<html><![nonsense[x]]>" + QUOTA)
        if behavior == "not ready":
            return self._send(b"come back later", 202, {"Content-Length": "15"})
        if behavior == "redirects" and self.path == "/file":
            return self._send(b"", 302, {"Location": "/elsewhere", "Content-Length": "0"})
        if behavior == "redirects to another host":
            return self._send(b"", 302, {"Location": "http://data.example/file", "Content-Length": "0"})
        if behavior == "endless redirects":
            return self._send(b"", 302, {"Location": "/file", "Content-Length": "0"})
        if isinstance(behavior, int):
            return self.send_error(behavior)
        start = 0
        if (requested := self.headers["Range"]) and behavior != "ignores ranges":
            found = re.fullmatch(r"bytes=(\d+)-", requested)
            assert found
            start = int(found[1])
        if behavior == "partial only" or (start and behavior in ("malformed range", "wrong range")):
            start += 5
        if start and start >= len(content):
            return self._send(b"", 416, {"Content-Range": f"bytes */{len(content)}", "Content-Type": "text/html"})
        body, headers = content[start:], {"Content-Length": str(len(content) - start)}
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        if behavior == "malformed range" and start:
            headers["Content-Range"] = "something else"
        if behavior in ("disconnects", "no length, disconnects"):
            body = body[: len(body) // 2]
        if behavior == "too long":
            body += b"more"
            headers["Content-Length"] = str(len(body))
        if behavior == "understated length":
            headers["Content-Length"] = str(len(body) - 7)
        if behavior.startswith("no length"):
            del headers["Content-Length"]
        if behavior == "compressed":
            body = gzip.compress(body)
            headers["Content-Length"] = str(len(body))
        if behavior in ("claimed encoding", "compressed"):
            headers["Content-Encoding"] = "gzip"
        self._send(body, 206 if start else 200, headers, stalls=behavior == "stalls")

    def _page(self, text: str) -> None:
        self._send(text.encode(), 200, {"Content-Type": "text/html; charset=utf-8"})

    def _send(self, body: bytes, status: int, headers: dict[str, str], stalls: bool = False) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if stalls:
            self.wfile.write(body[: len(body) // 2])
            self.server.released.wait(20)
        else:
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@contextmanager
def serving(content: bytes) -> Iterator[DownloadServer]:
    """Run a server for the duration of a block."""
    with DownloadServer(content) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.released.set()
            server.shutdown()
            thread.join()
