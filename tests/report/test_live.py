"""The live page: on loopback, for our own names, two addresses, current."""

from __future__ import annotations

import http.client
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from asfp import AsfpError
from asfp.report.live import Server

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("plotly") is None, reason="needs plotly: pip install 'asfp[report]'"
)
Copy = Callable[[str], Path]


@pytest.fixture
def served(copied: Copy) -> Iterator[tuple[Path, Server]]:
    folder = copied("asfp-0")
    with Server([folder], port=0) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield folder, server
        server.shutdown()
        thread.join()


def get(server: Server, path: str, method: str = "GET", **headers: str) -> tuple[int, bytes, http.client.HTTPMessage]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    connection.putrequest(method, path, skip_host="Host" in headers)
    for name, value in headers.items():
        connection.putheader(name.replace("_", "-"), value)
    connection.endheaders()
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer.status, content, answer.headers


def test_it_listens_on_loopback_alone(served: tuple[Path, Server]) -> None:
    _, server = served
    assert server.server_address[0] == "127.0.0.1"


def test_the_page_and_its_data(served: tuple[Path, Server]) -> None:
    folder, server = served
    status, content, headers = get(server, "/")
    assert status == 200
    assert b'data-every="5"' in content
    assert b"connect-src 'self'" in content
    assert headers["X-Frame-Options"] == "DENY"
    status, content, _ = get(server, "/data")
    first = json.loads(content)
    assert set(first) == {"version", "title", "html", "data"}
    assert get(server, "/data", If_None_Match=first["version"])[:2] == (304, b"")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"epoch": 4, "loss": 0.125, "accuracy_after": 0.5}\n')
    status, content, _ = get(server, "/data", If_None_Match=first["version"])
    assert status == 200
    lines = json.loads(content)["data"]["charts"]["training"]["panels"][0]["series"]
    assert lines[0]["x"] == [1, 2, 3, 4]
    assert lines[0]["y"][-1] == 0.125


@pytest.mark.parametrize(
    "path", ["/../../etc/passwd", "/record.json", "//etc/passwd", "/%2e%2e/", "/data/..", "/data?x=1", "/page.js"]
)
def test_nothing_else_is_served(served: tuple[Path, Server], path: str) -> None:
    assert get(served[1], path)[0] == 404


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:PORT", "127.0.0.1.evil.example:PORT", "127.0.0.1:1", ""]
)
def test_other_names_are_refused(served: tuple[Path, Server], host: str) -> None:
    server = served[1]
    for path in ("/", "/data"):
        status, content, _ = get(server, path, Host=host.replace("PORT", str(server.server_port)))
        assert status == 403
        assert b"asfp" not in content


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "LOCALHOST"])
def test_our_own_names_are_answered(served: tuple[Path, Server], host: str) -> None:
    assert get(served[1], "/data", Host=f"{host}:{served[1].server_port}")[0] == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_nothing_can_be_changed(served: tuple[Path, Server], method: str) -> None:
    assert get(served[1], "/", method)[0] == 501


def test_a_folder_that_vanishes_is_an_answer_and_not_a_traceback(served: tuple[Path, Server]) -> None:
    import shutil

    folder, server = served
    shutil.rmtree(folder)
    status, content, _ = get(server, "/data")
    assert status == 503
    assert b"there is no" in content


def test_a_port_in_use_is_an_error_with_a_way_out(served: tuple[Path, Server]) -> None:
    folder, server = served
    with pytest.raises(AsfpError, match=r"--port 0 for any free one"):
        Server([folder], port=server.server_port)
    with pytest.raises(AsfpError, match=r"port=70000 is not a port"):
        Server([folder], port=70000)


@pytest.mark.skipif(os.name == "nt", reason="interrupts are sent differently there")
def test_the_command_serves_until_it_is_interrupted(runs: Path) -> None:
    command = [sys.executable, "-u", "-m", "asfp", "report", "--live", str(runs), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        port = int(line.partition("127.0.0.1:")[2].partition("/")[0])
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        connection.request("GET", "/data")
        answer = connection.getresponse()
        assert answer.status == 200
        answer.read()
        connection.close()
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "Traceback" not in stderr
