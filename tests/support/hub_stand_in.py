"""A server that speaks as much of the Hugging Face hub's protocol as downloads need."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from urllib.parse import unquote, urlsplit

MODEL = "someone/tiny"
_COMMIT = "0" * 40
_PART = 64 * 1024


class HubStandIn:
    """Context manager: a hub with one model, `MODEL`, whose files are those of a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # Requests for the content of files, by name.
        self.downloads: list[str] = []
        # Answers that the hub gives for other models, instead of 404.
        self.refusals: dict[str, tuple[int, str]] = {}
        # Called before each part of a file with its name and the bytes sent so far.
        self.before_part: Callable[[str, int], None] = lambda name, sent: None
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_HEAD(self) -> None:
                hub._answer(self, with_body=False)

            def do_GET(self) -> None:
                hub._answer(self, with_body=True)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True

    @property
    def url(self) -> str:
        """The value for HF_ENDPOINT."""
        return f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> HubStandIn:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _answer(self, request: BaseHTTPRequestHandler, *, with_body: bool) -> None:
        path = unquote(urlsplit(request.path).path)
        if path == f"/api/models/{MODEL}/revision/main":
            self._send_json(request, {"id": MODEL, "sha": _COMMIT, "siblings": []})
        elif path == f"/api/models/{MODEL}/tree/{_COMMIT}":
            self._send_json(request, [self._entry(file) for file in self._files()])
        elif path.startswith(f"/{MODEL}/resolve/"):
            name = path.removeprefix(f"/{MODEL}/resolve/").split("/", 1)[1]
            self._send_file(request, name, with_body)
        else:
            model = path.removeprefix("/api/models/").removesuffix("/revision/main")
            status, code = self.refusals.get(model, (404, "RepoNotFound"))
            self._send(request, status, b"", {"X-Error-Code": code})

    def _files(self) -> list[Path]:
        return sorted(one for one in self.folder.rglob("*") if one.is_file())

    def _entry(self, file: Path) -> dict[str, object]:
        name = str(file.relative_to(self.folder))
        return {"type": "file", "path": name, "size": file.stat().st_size, "oid": _etag(file)}

    def _send_json(self, request: BaseHTTPRequestHandler, content: object) -> None:
        self._send(request, 200, json.dumps(content).encode(), {"Content-Type": "application/json"})

    def _send_file(self, request: BaseHTTPRequestHandler, name: str, with_body: bool) -> None:
        file = self.folder / name
        if not file.is_file():
            self._send(request, 404, b"", {"X-Error-Code": "EntryNotFound"})
            return
        data = file.read_bytes()
        start = int((request.headers.get("Range") or "bytes=0-")[6:].partition("-")[0])
        request.send_response(206 if start else 200)
        for header, value in {
            "ETag": f'"{_etag(file)}"',
            "X-Repo-Commit": _COMMIT,
            "Accept-Ranges": "bytes",
            "Content-Range": f"bytes {start}-{len(data) - 1}/{len(data)}",
            "Content-Length": str(len(data) - start),
        }.items():
            request.send_header(header, value)
        request.end_headers()
        if not with_body:
            return
        self.downloads.append(name)
        try:
            for at in range(start, len(data), _PART):
                self.before_part(name, at)
                request.wfile.write(data[at : at + _PART])
        except OSError:
            request.close_connection = True

    def _send(
        self, request: BaseHTTPRequestHandler, status: int, body: bytes, headers: dict[str, str]
    ) -> None:
        request.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            request.send_header(name, value)
        request.end_headers()
        if request.command == "GET":
            request.wfile.write(body)


def _etag(file: Path) -> str:
    return hashlib.sha1(file.read_bytes()).hexdigest()
