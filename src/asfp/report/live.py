"""The page on localhost while runs go on: one address for the page, one for its data, and nothing else."""

from __future__ import annotations

import hashlib
import ipaddress
import json
import socket
import threading
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from asfp.errors import AsfpError
from asfp.report.content import gather
from asfp.report.page import page
from asfp.report.plot import page_data
from asfp.report.runs import COMPACT, PARTS, find_runs
from asfp.report.sections import body
from asfp.report.timings import BENCH

EVERY = 5.0
"""Seconds between two questions of the page."""
LOOPBACK = ("localhost", "127.0.0.1", "::1")


class Source:
    """The report of some paths, made again when a file of theirs has changed."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = list(paths)
        self.lock = threading.Lock()
        self.version = ""
        self.answer = b""

    def fingerprint(self) -> str:
        """Of names, sizes and times of all files that a report reads."""
        digest = hashlib.sha256()
        for run in find_runs(self.paths):
            files = [run] if run.is_file() else [run / name for name in (*PARTS, COMPACT, BENCH)]
            for file in files:
                try:
                    state = file.stat()
                except OSError:
                    continue
                digest.update(f"{file} {state.st_size} {state.st_mtime_ns}\n".encode())
        return digest.hexdigest()[:16]

    def page(self) -> bytes:
        """The whole page, as of now."""
        with self.lock:
            version = self.fingerprint()
            return page(gather(self.paths), EVERY, version).encode()

    def data(self) -> tuple[str, bytes]:
        """The version, and what the page replaces its content by."""
        with self.lock:
            version = self.fingerprint()
            if version != self.version:
                content = gather(self.paths)
                parts = {"version": version, "title": content.title, "html": body(content), "data": page_data(content)}
                self.answer, self.version = json.dumps(parts, allow_nan=False).encode(), version
            return self.version, self.answer


def allowed_host(header: str, bound: str, port: int) -> bool:
    """Is a request's Host one of ours? Others come from a page elsewhere whose name was pointed at this machine.

    Bound to loopback: only its names. Bound elsewhere: also any address written in digits, and this machine's name.

    >>> allowed_host("localhost:6007", "127.0.0.1", 6007), allowed_host("evil.example:6007", "127.0.0.1", 6007)
    (True, False)
    >>> allowed_host("192.168.0.9:6007", "127.0.0.1", 6007), allowed_host("192.168.0.9:6007", "0.0.0.0", 6007)
    (False, True)
    """
    host, colon, number = header.rpartition(":")
    if not colon or header.endswith("]"):
        host, number = header, "80"
    if number != str(port):
        return False
    host = host.strip("[]").lower()
    if host in LOOPBACK:
        return True
    if is_loopback(bound):
        return False
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host == socket.gethostname().lower()
    return True


def is_loopback(host: str) -> bool:
    """Can only this machine reach it?

    >>> is_loopback("127.0.0.1"), is_loopback("0.0.0.0")
    (True, False)
    """
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class Handler(BaseHTTPRequestHandler):
    """GET / and GET /data, for our own names only."""

    server: Server
    server_version = "asfp"
    sys_version = ""
    protocol_version = "HTTP/1.1"
    timeout = 30

    def do_GET(self) -> None:
        """Answer with the page, its data, or a refusal."""
        if not allowed_host(self.headers.get("Host", ""), self.server.bound, self.server.server_port):
            return self._send(HTTPStatus.FORBIDDEN, b"this name is not served", "text/plain")
        try:
            if self.path == "/":
                return self._send(HTTPStatus.OK, self.server.source.page(), "text/html; charset=utf-8")
            if self.path == "/data":
                version, answer = self.server.source.data()
                if self.headers.get("If-None-Match") == version:
                    return self._send(HTTPStatus.NOT_MODIFIED, b"", "application/json")
                return self._send(HTTPStatus.OK, answer, "application/json")
        except (AsfpError, OSError) as error:
            return self._send(HTTPStatus.SERVICE_UNAVAILABLE, str(error).encode(), "text/plain; charset=utf-8")
        return self._send(HTTPStatus.NOT_FOUND, b"there is only / and /data", "text/plain")

    do_HEAD = do_GET  # noqa: N815

    def _send(self, status: HTTPStatus, content: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        for name, value in (
            ("Cache-Control", "no-store"),
            ("X-Content-Type-Options", "nosniff"),
            ("X-Frame-Options", "DENY"),
            ("Referrer-Policy", "no-referrer"),
            ("Cross-Origin-Resource-Policy", "same-origin"),
        ):
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing: the terminal belongs to the person who waits for a run."""


class Server(ThreadingHTTPServer):
    """Bound and listening when it exists; `serve_forever` answers."""

    daemon_threads = True

    def __init__(self, paths: Sequence[Path], host: str = "127.0.0.1", port: int = 6007) -> None:
        self.bound, self.source = host, Source(paths)
        self.source.page()  # what cannot be shown is said before anything listens
        if ":" in host:
            self.address_family = socket.AF_INET6
        try:
            super().__init__((host, port), Handler)
        except OverflowError as error:
            raise AsfpError(f"port={port} is not a port: it must lie in 0..65535") from error
        except OSError as error:
            raise AsfpError(
                f"{host}:{port} cannot be listened on ({error.strerror or error}): choose another --port, "
                "or --port 0 for any free one"
            ) from error

    @property
    def url(self) -> str:
        host = f"[{self.bound}]" if ":" in self.bound else self.bound
        return f"http://{host}:{self.server_port}/"
