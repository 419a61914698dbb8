"""HTTP servers on this machine, in a thread of the test."""

import json
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self


class Server(ThreadingHTTPServer):
    """Answers by a `Handler`, whose `server` it is, while it is a context."""

    def __init__(self, handler: type["Handler"]) -> None:
        super().__init__(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self.server_port}"

    def __enter__(self) -> Self:
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()

    def leave(self) -> None:
        self.shutdown()
        self.server_close()

    def handle_error(self, *_: object) -> None:
        """A client that gave up or was killed is no error."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # it would hold a body back for 40 ms, until its headers are acknowledged

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def send(
        self, content: bytes, status: int = 200, headers: Mapping[str, str] = {}, sent: int | None = None
    ) -> None:
        """sent: after so many bytes of the content, no more come."""
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content[:sent])

    def send_json(self, value: object, status: int = 200) -> None:
        self.send(json.dumps(value).encode(), status, {"Content-Type": "application/json"})

    def log_message(self, *_: object) -> None:
        pass
