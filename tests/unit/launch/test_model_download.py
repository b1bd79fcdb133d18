from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path

import pytest
from support.hub_stand_in import MODEL, HubStandIn

from kvrelay.errors import ConfigError, Unavailable
from kvrelay.launch.model_download import ModelDownload

# The library writes parts of 10 MiB.
SIZE = 24 * 2**20


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HubStandIn:
    folder = tmp_path / "repository"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(SIZE))
    hub = HubStandIn(folder)
    for name in [name for name in os.environ if name.startswith("HF_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    return hub


async def test_progress(hub: HubStandIn) -> None:
    goes_on = threading.Event()

    def wait_in_the_middle(name: str, sent: int) -> None:
        if sent > SIZE / 2:
            goes_on.wait(60)

    hub.before_part = wait_in_the_middle
    with hub:
        async with ModelDownload(MODEL) as download:
            complete = asyncio.create_task(download.complete())
            async with asyncio.timeout(60):
                while download.done_bytes == 0:
                    await asyncio.sleep(0.02)
            assert 0 < download.done_bytes < SIZE
            assert (download.total_bytes, download.is_complete) == (SIZE, False)
            goes_on.set()
            await complete
            assert (download.done_bytes, download.is_complete) == (SIZE, True)
        async with ModelDownload(MODEL) as again:
            await again.complete()
    assert (again.total_bytes, again.done_bytes) == (0, 0)


async def test_a_cancelled_download_keeps_complete_files(hub: HubStandIn, tmp_path: Path) -> None:
    goes_on, begun = threading.Event(), threading.Event()

    def wait(name: str, sent: int) -> None:
        if name == "model.safetensors":
            begun.set()
            goes_on.wait(60)

    hub.before_part = wait
    with hub:
        async with ModelDownload(MODEL) as download:
            complete = asyncio.create_task(download.complete())
            assert await asyncio.to_thread(begun.wait, 60)
            complete.cancel()
            await asyncio.gather(complete, return_exceptions=True)
        assert download._process is not None
        assert download._process.returncode is not None
        blobs = list((tmp_path / "hub").glob("models--*/blobs/*"))
        assert len(blobs) == 1, "the complete file, and no part of another"
        goes_on.set()
        async with ModelDownload(MODEL) as again:
            await again.complete()
    assert again.done_bytes == SIZE


async def test_no_such_model(hub: HubStandIn) -> None:
    with hub:
        async with ModelDownload("someone/nothing") as download:
            with pytest.raises(
                ConfigError, match=r"^model\.path: model 'someone/nothing': .*HF_TO"
            ):
                await download.complete()


async def test_no_room(hub: HubStandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        free = SIZE - 1

    monkeypatch.setattr("shutil.disk_usage", lambda folder: Full)
    with hub:
        async with ModelDownload(MODEL) as download:
            with pytest.raises(Unavailable, match=r"has no room for someone/tiny: .* set HF_HOME"):
                await download.complete()
    assert "model.safetensors" not in hub.downloads
