"""`octavo serve` as a person runs it: start, the printed curl, a killed worker, Ctrl-C."""

import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import pytest
import redis

START_TIMEOUT_S = 90.0
STOP_TIMEOUT_S = 60.0


class Served:
    """An `octavo serve` process; its output is read as it comes, its children are known."""

    def __init__(self, cache: Path, *arguments: str, **environ: str) -> None:
        # The demo model stays where it is; run folders are this test's own.
        own = {"PYTHONUNBUFFERED": "1", "OCTAVO_CACHE": str(cache)}
        self._environ = {**os.environ, **own, **environ}
        self._arguments = arguments
        self.log_lines: list[str] = []
        self.out_lines: list[str] = []
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Self:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "octavo", "serve", *self._arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=self._environ,
        )
        for stream, lines in (
            (self.process.stdout, self.out_lines),
            (self.process.stderr, self.log_lines),
        ):
            thread = threading.Thread(target=lambda s=stream, n=lines: n.extend(s), daemon=True)
            thread.start()
            self._threads.append(thread)
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.wait()

    def wait(self, timeout_s: float = STOP_TIMEOUT_S) -> int:
        status = self.process.wait(timeout_s)
        for thread in self._threads:
            thread.join(10)
        for stream in (self.process.stdout, self.process.stderr):
            assert stream is not None
            stream.close()
        return status

    def until(self, condition: Callable[[], Any], timeout_s: float = START_TIMEOUT_S) -> Any:
        deadline = time.monotonic() + timeout_s
        while not (found := condition()):
            assert self.process.poll() is None, self.log
            assert time.monotonic() < deadline, self.log
            time.sleep(0.02)
        return found

    def wait_ready(self) -> None:
        self.until(lambda: any(line.startswith("curl ") for line in self.out_lines))

    @property
    def log(self) -> str:
        return "".join(self.log_lines)

    @property
    def curl(self) -> str:
        return next(line.strip() for line in self.out_lines if line.startswith("curl "))

    @property
    def url(self) -> str:
        match = re.search(r"http://[\d.:]+", self.curl)
        assert match is not None
        return match[0]

    def children(self) -> dict[str, int]:
        """Process ids of the services by command (a worker's number is left out)."""
        found: dict[str, int] = {}
        for pid in _children_of(self.process.pid):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            name = words[3].decode() if words[1:3] == [b"-m", b"octavo"] else "valkey"
            found[name] = pid
        return found

    def descendants(self) -> list[int]:
        """All processes under this one (Valkey's server runs under a guard)."""
        found = _children_of(self.process.pid)
        for pid in found:
            found.extend(_children_of(pid))
        return found

    def ask(self) -> dict[str, Any]:
        """Run the printed command as a shell would."""
        answer = subprocess.run(
            self.curl, shell=True, capture_output=True, text=True, timeout=60, check=True
        )
        return json.loads(answer.stdout)


def _children_of(pid: int) -> list[int]:
    """A child belongs to the thread that started it."""
    found: list[int] = []
    for thread in Path(f"/proc/{pid}/task").iterdir():
        found += map(int, (thread / "children").read_text().split())
    return found


def _is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def _gone(pids: list[int]) -> bool:
    for _ in range(1000):
        if not any(map(_is_running, pids)):
            return True
        time.sleep(0.01)
    return False


def test_the_demo_model_answers_the_printed_command(demo_folder: Path, tmp_path: Path) -> None:
    with Served(demo_folder.parents[1], "--port", "0", "--max-num-seqs", "4") as served:
        served.wait_ready()
        assert "Octavo serves SmolLM2-135M-Instruct" in "".join(served.out_lines)
        answer = served.ask()
        assert "Paris" in answer["choices"][0]["message"]["content"]
        assert answer["model"] == "SmolLM2-135M-Instruct"
        served.process.terminate()
        assert served.wait() == 0


def test_a_killed_worker_comes_back_and_ctrl_c_drains_in_order(
    tiny_folder: Path, tmp_path: Path
) -> None:
    flags = ("--workers", "2", "--port", "0", "--num-kv-blocks", "64")
    with Served(tmp_path, str(tiny_folder), *flags) as served:
        served.wait_ready()
        children = served.children()
        assert children.keys() == {"router", "scheduler", "worker", "valkey"}
        assert served.ask()["choices"][0]["finish_reason"] in ("stop", "length")
        os.kill(children["worker"], signal.SIGKILL)
        served.until(lambda: "(signal 9); again in 0.5 s" in served.log)
        # Three times ready: two at the start, one again.
        served.until(lambda: served.log.count("ready: worker") == 3)
        assert served.ask()["choices"][0]["finish_reason"] in ("stop", "length")
        pids = served.descendants()
        served.process.send_signal(signal.SIGINT)
        assert served.wait() == 0
    assert _gone(pids)
    assert served.log_lines[-1].endswith("stopped\n")
    # Each says so when its turn comes, which is when the one before has ended.
    drained = re.findall(r"^([\w-]+) +│ [\d:]+ draining", served.log, re.MULTILINE)
    assert [name.rstrip("-01") for name in drained] == ["router", "scheduler", "worker", "worker"]
    # Nobody took the end of another for a crash.
    assert served.log.count("again in") == 1
    # Run folders are cleaned up.
    assert list((tmp_path / "run").iterdir()) == []


def test_a_worker_out_of_memory_says_so_and_is_replaced(tiny_folder: Path, tmp_path: Path) -> None:
    """The request that it fails on goes on at its successor, which has the memory."""
    flags = ("--port", "0", "--num-kv-blocks", "200", "--max-num-batched-tokens", "2048")
    # Memory comes from the system when it is asked for, not from what glibc holds in reserve.
    environ = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
    with Served(tmp_path, str(tiny_folder), *flags, **environ) as served:
        served.wait_ready()
        served.ask()
        worker = served.children()["worker"]
        status = Path(f"/proc/{worker}/status").read_text()
        size_bytes = int(re.search(r"VmSize:\s+(\d+) kB", status)[1]) * 1024  # type: ignore[index]
        limit = (size_bytes + (1 << 20), resource.RLIM_INFINITY)
        resource.prlimit(worker, resource.RLIMIT_AS, limit)
        body = {"prompt": [5] * 2000, "max_tokens": 5, "temperature": 0, "ignore_eos": True}
        request = urllib.request.Request(
            f"{served.url}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=90) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] == 5
        assert re.search(r"worker-0 +│ .*CRITICAL .*ending: \w+: .*memory", served.log)
        assert "worker-0 ended after" in served.log
        assert "(status 1); again in 0.5 s" in served.log
        assert served.children()["worker"] != worker
        served.process.send_signal(signal.SIGINT)
        assert served.wait() == 0


def test_a_killed_valkey_comes_back_and_is_told_everything_again(
    tiny_folder: Path, tmp_path: Path
) -> None:
    with Served(tmp_path, str(tiny_folder), "--port", "0", "--num-kv-blocks", "64") as served:
        served.wait_ready()
        ready = re.search(r"ready: valkey on unix://(\S+)", served.log)
        assert ready is not None
        with redis.Redis(unix_socket_path=ready[1]) as client:
            kinds = ("worker", "usage", "scheduler")

            def is_told() -> bool:
                try:
                    return all(client.keys(f"octavo:*:{kind}:*") for kind in kinds)
                except redis.ConnectionError:
                    return False

            served.until(is_told)
            os.kill(int(client.info("server")["process_id"]), signal.SIGKILL)
            served.until(lambda: "valkey ended; going on without Redis, again in" in served.log)
            assert served.ask()["choices"][0]["finish_reason"] in ("stop", "length")
            served.until(lambda: served.log.count(ready[0]) == 2)
            served.until(is_told)
        assert served.ask()["choices"][0]["finish_reason"] in ("stop", "length")
        pids = served.descendants()
        served.process.send_signal(signal.SIGINT)
        assert served.wait() == 0
    assert _gone(pids)
    assert not Path(ready[1]).parent.exists()
    # Nobody else was started again.
    assert served.log.count("again in") == 1


def test_without_a_valkey_it_says_so_and_serves(tiny_folder: Path, tmp_path: Path) -> None:
    # A socket's path has a hundred bytes at most: no server can start here.
    temporary = tmp_path / ("d" * 120)
    temporary.mkdir()
    environ = {"TMPDIR": str(temporary)}
    with Served(tmp_path, str(tiny_folder), "--port", "0", **environ) as served:
        served.wait_ready()
        assert "WARNING going on without Redis: " in served.log
        assert "ready: valkey" not in served.log
        assert served.children().keys() == {"router", "scheduler", "worker"}
        assert served.ask()["choices"][0]["finish_reason"] in ("stop", "length")
        served.process.send_signal(signal.SIGINT)
        assert served.wait() == 0
    assert list(temporary.glob("octavo-valkey-*")) == []


def test_a_second_ctrl_c_ends_at_once(tiny_folder: Path, tmp_path: Path) -> None:
    """A stream that goes on for long keeps the drain waiting: a second Ctrl-C doesn't."""
    with Served(tmp_path, str(tiny_folder), "--port", "0", "--drain-grace-s", "600") as served:
        served.wait_ready()
        body = {"prompt": "a", "max_tokens": 400, "ignore_eos": True, "stream": True}
        request = urllib.request.Request(
            f"{served.url}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        pids = served.descendants()
        with urllib.request.urlopen(request, timeout=30) as stream:
            stream.readline()
            # Held still, so that the stream can't end by itself.
            os.kill(served.children()["worker"], signal.SIGSTOP)
            served.process.send_signal(signal.SIGINT)
            served.until(lambda: "press Ctrl-C again" in served.log)
            served.process.send_signal(signal.SIGINT)
            assert served.wait() == 130
    assert _gone(pids)
    assert "ending at once" in served.log


def test_no_service_outlives_a_killed_parent(tiny_folder: Path, tmp_path: Path) -> None:
    with Served(tmp_path, str(tiny_folder), "--port", "0") as served:
        served.wait_ready()
        pids = served.descendants()
        assert len(pids) >= 5  # three services, Valkey's server and its guard
        served.process.kill()
        assert _gone(pids)


@pytest.mark.parametrize("flag", ["--port", "--grpc-port"])
def test_a_taken_port_is_said_before_anything_starts(
    flag: str, tiny_folder: Path, tmp_path: Path
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        other = "--grpc-port" if flag == "--port" else "--port"
        with Served(tmp_path, str(tiny_folder), flag, port, other, "0") as served:
            assert served.wait() == 2
    assert f"port {port} on 127.0.0.1 is taken" in served.log
    assert "ready" not in served.log


def test_a_model_that_is_not_there_is_named(tmp_path: Path) -> None:
    with Served(tmp_path, str(tmp_path / "absent"), "--port", "0") as served:
        assert served.wait() == 2
    assert f"model '{tmp_path / 'absent'}': no such folder" in served.log


def test_a_service_that_refuses_to_start_ends_it_all_with_its_reason(
    tiny_folder: Path, tmp_path: Path
) -> None:
    flags = ("--port", "0", "--kv-cache-memory", "lots")
    with Served(tmp_path, str(tiny_folder), *flags) as served:
        assert served.wait() == 2
    assert "worker-0 refused to start" in served.log
    assert "OCTAVO_KV_CACHE_MEMORY='lots' is no size" in served.log
