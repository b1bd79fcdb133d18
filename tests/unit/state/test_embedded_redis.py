from __future__ import annotations

import asyncio
import os
import signal
import stat
import sys
from pathlib import Path

import pytest

from kvrelay.errors import Unavailable
from kvrelay.process.owned_folder import remove_abandoned_folders
from kvrelay.state import embedded_redis
from kvrelay.state.embedded_redis import EmbeddedRedis, find_redis_server
from kvrelay.state.registry import Registry


def _running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def _until_ended(pid: int) -> None:
    async with asyncio.timeout(60):
        while True:
            if not _running(pid):
                return
            await asyncio.sleep(0.01)


async def test_serves_inside_and_leaves_nothing_behind() -> None:
    async with EmbeddedRedis() as server:
        folder = Path(server.url.removeprefix("unix://")).parent
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        async with await Registry.connect(server.url) as registry:
            assert await registry.next_name("decode", 0) == "decode-0"
        pid = server.pid
    assert not _running(pid)
    assert not folder.exists()


async def test_opens_no_tcp_port_and_writes_no_dump() -> None:
    async with EmbeddedRedis() as server:
        async with await Registry.connect(server.url) as registry:
            config = await registry._call("CONFIG", "GET", "*")
        assert config[b"port"] == b"0"
        assert config[b"save"] == b""
        assert config[b"appendonly"] == b"no"


async def test_a_killed_server_comes_back_at_the_same_url() -> None:
    async with EmbeddedRedis() as server, await Registry.connect(server.url) as registry:
        await registry.next_name("decode", 0)
        pid = server.pid
        os.kill(pid, signal.SIGKILL)
        async with asyncio.timeout(60):
            while True:
                try:
                    name = await registry.next_name("decode", 0)
                except Unavailable:
                    await asyncio.sleep(0.01)
                else:
                    break
        assert name == "decode-0", "the new server starts empty"
        assert server.pid != pid


_CHILD = """
import asyncio
from kvrelay.state.embedded_redis import EmbeddedRedis

async def main():
    async with EmbeddedRedis() as server:
        print(server.pid, server.url, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


async def test_dies_with_its_parent_and_leaves_nothing(tmp_path: Path) -> None:
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _CHILD, stdout=asyncio.subprocess.PIPE, env=environment
    )
    assert parent.stdout is not None
    pid = int((await parent.stdout.readline()).split()[0])
    assert _running(pid)
    parent.kill()
    await parent.wait()
    await _until_ended(pid)
    assert os.listdir(tmp_path)
    remove_abandoned_folders(tmp_path)
    assert not os.listdir(tmp_path)


async def test_a_server_that_does_not_start_says_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = tmp_path / "redis-server"
    broken.write_text("#!/bin/sh\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setattr(embedded_redis, "find_redis_server", lambda: broken)
    with pytest.raises(Unavailable, match="ended with exit code 3"):
        async with EmbeddedRedis():
            pass


async def test_a_temporary_folder_with_too_long_a_name_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    with pytest.raises(Unavailable, match="TMPDIR"):
        async with EmbeddedRedis():
            pass
    assert list(deep.iterdir()) == []


def test_falls_back_to_the_server_on_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    binary = tmp_path / "redis-server"
    binary.touch(mode=0o755)
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_redis_server() == binary
    binary.unlink()
    with pytest.raises(Unavailable, match=r"redis\.url"):
        find_redis_server()


async def test_it_comes_back_once_processes_can_be_started_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with EmbeddedRedis() as server:
        tried = asyncio.Event()

        async def failing(*_: object, **__: object) -> None:
            tried.set()
            raise BlockingIOError("no more processes")

        with monkeypatch.context() as patched:
            patched.setattr(embedded_redis.asyncio, "create_subprocess_exec", failing)
            os.kill(server.pid, signal.SIGKILL)
            await asyncio.wait_for(tried.wait(), 60)
        async with asyncio.timeout(60):
            while True:
                try:
                    async with await Registry.connect(server.url):
                        break
                except Unavailable:
                    await asyncio.sleep(0.05)
