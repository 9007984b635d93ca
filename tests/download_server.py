"""A server on loopback that serves one file, well or badly."""

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
    """Serves `content` in the way that `manner` says, and remembers what was asked for."""

    daemon_threads = True

    def __init__(self, content: bytes) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.content, self.manner = content, "well"
        self.asked: list[tuple[str, str | None]] = []
        self.go_on = threading.Event()
        self.url = f"http://127.0.0.1:{self.server_port}/file"


class _Handler(BaseHTTPRequestHandler):
    server: DownloadServer

    def do_GET(self) -> None:
        self.server.asked.append((self.path, self.headers["Range"]))
        assert self.headers["Accept-Encoding"] == "identity"
        manner, content = self.server.manner, self.server.content
        if manner == "drive" and self.path == "/file":
            return self._page(CONFIRMATION)
        if manner == "drive" and self.path != CONFIRMED:
            return self.send_error(400)
        if manner == "drive, over quota":
            return self._page(QUOTA)
        if manner == "page without a type":
            return self._send(b" \n" + QUOTA.encode(), 200, {"Content-Length": str(len(QUOTA) + 2)})
        if manner == "broken page":
            return self._page("<html><![nonsense[x]]>" + QUOTA)
        if manner == "not ready":
            return self._send(b"come back later", 202, {"Content-Length": "15"})
        if manner == "redirects" and self.path == "/file":
            return self._send(b"", 302, {"Location": "/elsewhere", "Content-Length": "0"})
        if manner == "redirects forever":
            return self._send(b"", 302, {"Location": "/file", "Content-Length": "0"})
        if isinstance(manner, int):
            return self.send_error(manner)
        start = 0
        if (wanted := self.headers["Range"]) and manner != "ignores ranges":
            start = int(re.fullmatch(r"bytes=(\d+)-", wanted)[1])
        if manner == "only a piece" or (start and manner in ("nonsense range", "another range")):
            start += 5
        if start and start >= len(content):
            return self._send(b"", 416, {"Content-Range": f"bytes */{len(content)}", "Content-Type": "text/html"})
        body, headers = content[start:], {"Content-Length": str(len(content) - start)}
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        if manner == "nonsense range" and start:
            headers["Content-Range"] = "something else"
        if manner in ("breaks off", "tells no length and breaks off"):
            body = body[: len(body) // 2]
        if manner == "gives too much":
            body += b"more"
            headers["Content-Length"] = str(len(body))
        if manner == "says too little":
            headers["Content-Length"] = str(len(body) - 7)
        if manner.startswith("tells no length"):
            del headers["Content-Length"]
        if manner == "compresses":
            body = gzip.compress(body)
            headers["Content-Length"] = str(len(body))
        if manner in ("claims an encoding", "compresses"):
            headers["Content-Encoding"] = "gzip"
        self._send(body, 206 if start else 200, headers, stalls=manner == "stalls")

    def _page(self, text: str) -> None:
        self._send(text.encode(), 200, {"Content-Type": "text/html; charset=utf-8"})

    def _send(self, body: bytes, status: int, headers: dict[str, str], stalls: bool = False) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if stalls:
            self.wfile.write(body[: len(body) // 2])
            self.server.go_on.wait(20)
        else:
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Tests stay quiet."""


@contextmanager
def serving(content: bytes) -> Iterator[DownloadServer]:
    with DownloadServer(content) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.go_on.set()
            server.shutdown()
            thread.join()
