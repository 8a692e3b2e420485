"""The server behind `torchlens serve`: the page of the runs in a folder, and their numbers as they
come.

It listens on this machine only. A request needs the token, a `Host` header that names this machine
(against DNS rebinding), and a `Sec-Fetch-Site` header, if any, that does not name another site. The
server only reads: it knows only GET and HEAD, and runs are numbered, so no request contains a path
of a file.
"""

import hmac
import json
import secrets
import socket
import sys
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

from torchlens._monitor.read.run_tables import STATISTICS, block
from torchlens._monitor.record.series import KINDS, WATCHED
from torchlens._monitor.serve.live_runs import LiveRun, LiveRuns
from torchlens._monitor.serve.run_page import live_page_text

_HEARTBEAT = 10.0  # seconds; so that a page that is gone is noticed
_MOST_LISTENERS = 64
_LARGEST = 1 << 53
_HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "X-Frame-Options": "DENY",
}


class _Refused(Exception):  # noqa: N818 - it is an answer, not an error
    def __init__(self, status: HTTPStatus, why: str) -> None:
        super().__init__(why)
        self.status = status


class RunServer(ThreadingHTTPServer):
    """Serves the runs below a folder on 127.0.0.1. With port 0 the system chooses one.

    >>> with RunServer(Path('runs')) as server:
    ...     print(server.url)
    ...     server.serve_forever()
    """

    daemon_threads = True
    # A port that another process listens on must not be taken over.
    allow_reuse_port = False

    def __init__(self, root: Path, port: int = 0, token: str | None = None) -> None:
        if not root.is_dir():
            raise FileNotFoundError(f"There is no folder {str(root)!r}.")
        super().__init__(("127.0.0.1", port), _Handler)
        self.token = token or secrets.token_urlsafe(24)
        self.live = LiveRuns(root.resolve())
        self.page = live_page_text(root.resolve().name or "runs").encode()
        self.listeners = threading.BoundedSemaphore(_MOST_LISTENERS)
        self.is_closing = False

    @property
    def hosts(self) -> set[str]:
        """The accepted `Host` headers."""
        return {f"{name}:{self.server_port}" for name in ("127.0.0.1", "localhost")}

    @property
    def url(self) -> str:
        """The address of the page, with the token."""
        return f"http://127.0.0.1:{self.server_port}/?{urlencode({'token': self.token})}"

    def shutdown(self) -> None:
        self.is_closing = True
        super().shutdown()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Prints nothing for a page that was closed in the middle of an answer."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: RunServer
    server_version = "torchlens"
    sys_version = ""
    protocol_version = "HTTP/1.1"
    timeout = 30

    def do_GET(self) -> None:
        self._answer(has_body=True)

    def do_HEAD(self) -> None:
        self._answer(has_body=False)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("do_"):  # any other method, whatever it is called
            return self._refuse_method
        raise AttributeError(name)

    def _refuse_method(self) -> None:
        self.close_connection = True  # the body, if there is one, is not read
        self._send(
            HTTPStatus.METHOD_NOT_ALLOWED,
            b"This server only reads: GET.",
            "text/plain",
            {"Allow": "GET, HEAD"},
        )

    def _answer(self, has_body: bool) -> None:
        try:
            asked = urlsplit(self.path)
            options = self._checked(asked.query)
            route = (
                None if asked.scheme or asked.netloc else _ROUTES.get(asked.path)
            )  # the address of the request names another host
            if self.path.partition("?")[0] == "/events":
                self._events(has_body)
            elif route is None:
                raise _Refused(HTTPStatus.NOT_FOUND, "There is nothing here.")
            else:
                kind, body = route(self.server, options)
                self._send(HTTPStatus.OK, body, kind, has_body=has_body)
        except _Refused as refused:
            self._send(refused.status, str(refused).encode(), "text/plain", has_body=has_body)
        except ConnectionError:
            self.close_connection = True

    def _checked(self, query: str) -> dict[str, str]:
        """The options of a valid request; raises for any other."""
        hosts = self.headers.get_all("Host") or []
        if len(hosts) != 1 or hosts[0].lower() not in self.server.hosts:
            raise _Refused(
                HTTPStatus.FORBIDDEN,
                "This server is only for this machine: ask for 127.0.0.1 or localhost.",
            )
        if not {"none", "same-origin"}.issuperset(self.headers.get_all("Sec-Fetch-Site") or ()):
            raise _Refused(
                HTTPStatus.FORBIDDEN, "Another site asked for this. Open the address yourself."
            )
        try:
            options = {
                name: values[-1]
                for name, values in parse_qs(query, True, max_num_fields=16).items()
            }
        except ValueError:
            raise _Refused(HTTPStatus.BAD_REQUEST, "Too much was asked.") from None
        if not hmac.compare_digest(options.get("token", "").encode(), self.server.token.encode()):
            raise _Refused(
                HTTPStatus.FORBIDDEN,
                "The address lacks its token. Take the one that `torchlens serve` printed.",
            )
        return options

    def _send(
        self,
        status: HTTPStatus,
        body: bytes,
        kind: str,
        more: dict[str, str] | None = None,
        has_body: bool = True,
    ) -> None:
        self.send_response(status)
        for name, value in (_HEADERS | (more or {})).items():
            self.send_header(name, value)
        self.send_header(
            "Content-Type", f"{kind}; charset=utf-8" if kind.startswith("text/") else kind
        )
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if has_body:
            self.wfile.write(body)

    def _events(self, has_body: bool) -> None:
        """Sends the revisions of the runs, now and at each change, until the page is closed."""
        if not self.server.listeners.acquire(blocking=False):
            raise _Refused(HTTPStatus.SERVICE_UNAVAILABLE, "Too many pages listen already.")
        try:
            self.close_connection = True
            self.send_response(HTTPStatus.OK)
            for name, value in _HEADERS.items():
                self.send_header(name, value)
            self.send_header("Content-Type", "text/event-stream; charset=utf-8")
            self.send_header("Connection", "close")
            self.end_headers()
            if not has_body:
                return
            self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.wfile.write(b"retry: 1000\n\n")
            told: dict[int, int] | None = None
            state = -1
            while not self.server.is_closing:
                state = self.server.live.wait(state, _HEARTBEAT)
                revisions = self.server.live.revisions()
                text = (
                    ": still here\n\n"
                    if revisions == told
                    else f"data: {json.dumps(revisions)}\n\n"
                )
                told = revisions
                self.wfile.write(text.encode())
                self.wfile.flush()
        finally:
            self.server.listeners.release()

    def log_message(self, *_: Any) -> None:
        """Nothing is printed for a request: the address holds the token."""


# -- requests --------------------------------------------------------------------------------------

_Options = dict[str, str]


def _number(options: _Options, name: str, default: int | None = None) -> int:
    text = options.get(name, "" if default is None else str(default))
    if not text.isascii() or not text.isdigit() or len(text) > 16 or int(text) >= _LARGEST:
        raise _Refused(HTTPStatus.BAD_REQUEST, f"{name} must be a whole number.")
    return int(text)


def _run(server: RunServer, options: _Options) -> LiveRun:
    number = _number(options, "run")
    runs = server.live.runs
    if number >= len(runs):
        raise _Refused(HTTPStatus.NOT_FOUND, "There is no such run.")
    return runs[number]


def _json(value: Any) -> tuple[str, bytes]:
    return "application/json", json.dumps(value, separators=(",", ":")).encode()


def _send_page(server: RunServer, _: _Options) -> tuple[str, bytes]:
    return "text/html", server.page


def _send_runs(server: RunServer, _: _Options) -> tuple[str, bytes]:
    server.live.look()
    return _json(
        [
            {
                "run": run.number,
                "name": run.name,
                "model": str(run.reader.info.get("model", "")),
                "revision": run.revision,
            }
            for run in server.live.runs
        ]
    )


def _send_run(server: RunServer, options: _Options) -> tuple[str, bytes]:
    run = _run(server, options)
    return _json(
        run.summary(*(_number(options, name, 0) for name in ("have", "series", "findings")))
    )


def _send_graph(server: RunServer, options: _Options) -> tuple[str, bytes]:
    return _json(_run(server, options).graph_page())


def _send_table(server: RunServer, options: _Options) -> tuple[str, bytes]:
    run, kind, statistic = (
        _run(server, options),
        options.get("kind", ""),
        options.get("statistic", ""),
    )
    if kind not in (*KINDS, WATCHED) or statistic not in STATISTICS:
        raise _Refused(HTTPStatus.BAD_REQUEST, "There is no such table.")
    with run.lock:
        found = block(
            *run.tables.table(
                kind, statistic, _number(options, "from", 0), _number(options, "stride", 0)
            )
        )
    return "application/octet-stream", found


def _send_histograms(server: RunServer, options: _Options) -> tuple[str, bytes]:
    run, series = _run(server, options), _number(options, "series")
    with run.lock:
        if series >= len(run.tables.keys):
            raise _Refused(HTTPStatus.NOT_FOUND, "There is no such series.")
        found = run.tables.histograms(
            series, _number(options, "from", 0), _number(options, "stride", 0)
        )
    return "application/octet-stream", found


def _send_scalar(server: RunServer, options: _Options) -> tuple[str, bytes]:
    run, name = _run(server, options), options.get("name", "")
    with run.lock:
        if name not in run.reader.scalars:
            raise _Refused(HTTPStatus.NOT_FOUND, "There is no such scalar.")
        found = run.tables.scalar(name, _number(options, "from", 0), _number(options, "stride", 0))
    return "application/octet-stream", found


_ROUTES: dict[str, Callable[[RunServer, _Options], tuple[str, bytes]]] = {
    "/": _send_page,
    "/runs": _send_runs,
    "/run": _send_run,
    "/graph": _send_graph,
    "/table": _send_table,
    "/histograms": _send_histograms,
    "/scalar": _send_scalar,
}
