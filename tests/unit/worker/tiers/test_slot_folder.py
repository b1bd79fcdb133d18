"""Files of KV blocks: whatever happened to them, a reader gets the block or an error."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.block_files import BYTES, LAYOUT, content, digest, folder, key, sound, write

from kv_transfer.blocks.single_blocks import BlockCopy
from kvrelay.types.kv_block import BlockKey, tenant_folder
from kvrelay.worker.tiers.block_file import HEADER_BYTES, BadBlockFile, BlockHeader
from kvrelay.worker.tiers.disk_files import write_blocks
from kvrelay.worker.tiers.slot_folder import FolderLost, SlotFolder, file_bytes
from kvrelay.worker.tiers.tier import StoredBlock

TESTS = Path(__file__).parents[3]
ENV = os.environ | {"PYTHONPATH": os.pathsep.join((str(TESTS), str(TESTS.parent)))}
files_stay = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


def test_a_block_comes_back(tmp_path: Path) -> None:
    made = folder(tmp_path / "kv")
    write(made, 1)
    assert sound(made, 1)
    own, foreign = made.scan()
    assert [(one.tenant, one.hash, one.identity) for one in own] == [
        (tenant_folder("a"), key(1).hash, key(1).identity)
    ]
    assert not foreign
    assert own[0].size <= file_bytes(BYTES)
    made.remove(key(1))
    made.remove(key(1))
    with pytest.raises(FileNotFoundError):
        made.read(key(1), own=True)


@files_stay
@given(st.data())
def test_no_damage_gives_another_block(tmp_path: Path, data: st.DataObject) -> None:
    """A file that is cut, longer, or has other bytes, at any place."""
    made = folder(tmp_path / "kv")
    write(made, 1)
    (path,) = (tmp_path / "kv").rglob("*.kv")
    raw = bytearray(path.read_bytes())
    damage = data.draw(st.sampled_from(("cut", "append", "flip", "swap", "zero")))
    place = data.draw(st.integers(0, len(raw) - 1))
    if damage == "cut":
        del raw[place:]
    elif damage == "append":
        raw += b"\0" * (place + 1)
    elif damage == "flip":
        raw[place] ^= data.draw(st.integers(1, 255))
    elif damage == "zero":
        # A page that never reached the disk.
        end = min(len(raw), place + 64)
        if not any(raw[place:end]):
            raw[place] ^= 1
        raw[place:end] = bytes(end - place)
        if bytes(raw) == path.read_bytes():
            raw[0] ^= 1
    else:
        other = bytearray(content(2).tobytes())
        raw[HEADER_BYTES:] = other
    path.write_bytes(raw)
    try:
        read, expected = made.read(key(1), own=True)
    except BadBlockFile:
        return
    finally:
        made.release()
    assert digest(read) != expected


@given(st.binary(min_size=0, max_size=2 * HEADER_BYTES))
def test_no_bytes_are_taken_for_a_header(raw: bytes) -> None:
    with pytest.raises(BadBlockFile):
        BlockHeader.unpack(raw)


@given(st.integers(0, HEADER_BYTES - 1), st.integers(1, 255))
def test_a_damaged_header_is_refused(place: int, change: int) -> None:
    raw = bytearray(BlockHeader(LAYOUT, key(1).identity, BYTES, 5).pack())
    raw[place] ^= change
    with pytest.raises(BadBlockFile):
        BlockHeader.unpack(bytes(raw))


def test_a_longer_file_is_refused(tmp_path: Path) -> None:
    made = folder(tmp_path / "kv")
    write(made, 1)
    (path,) = (tmp_path / "kv").rglob("*.kv")
    path.write_bytes(path.read_bytes() + b"more")
    with pytest.raises(BadBlockFile, match="bytes"):
        made.read(key(1), own=True)


def test_no_reader_sees_a_file_that_is_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = folder(tmp_path / "kv")
    seen: list[bool] = []
    writev = os.writev

    def look(*arguments: object) -> int:
        written: int = writev(*arguments)  # type: ignore[arg-type]
        try:
            made.read(key(1), own=True)
            seen.append(True)
        except FileNotFoundError:
            seen.append(False)
        return written

    monkeypatch.setattr(os, "writev", look)
    write(made, 1)
    assert seen == [False]
    assert sound(made, 1)


@given(st.sampled_from(("layout", "identity", "block_bytes")))
def test_a_block_of_another_model_or_place_is_refused(field: str) -> None:
    header = BlockHeader(LAYOUT, key(1).identity, BYTES, 5)
    assert BlockHeader.unpack(header.pack()) == header
    asked = {"layout": LAYOUT, "identity": key(1).identity, "block_bytes": BYTES}
    header.check(**asked)  # type: ignore[arg-type]
    other = {"layout": "f" * 16, "identity": key(2).identity, "block_bytes": BYTES + 1}
    with pytest.raises(BadBlockFile):
        header.check(**(asked | {field: other[field]}))  # type: ignore[arg-type]


def test_a_file_of_another_model_under_this_ones_name_is_refused(tmp_path: Path) -> None:
    other = folder(tmp_path / "other", layout="f" * 16)
    write(other, 1)
    made = folder(tmp_path / "kv")
    write(made, 1)
    (theirs,), (ours,) = ((tmp_path / name).rglob("*.kv") for name in ("other", "kv"))
    ours.write_bytes(theirs.read_bytes())
    with pytest.raises(BadBlockFile, match="layout"):
        made.read(key(1), own=True)


def test_only_the_owner_can_read(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        made = folder(tmp_path / "kv")
        write(made, 1)
    finally:
        os.umask(before)
    for path in (tmp_path / "kv", *(tmp_path / "kv").rglob("*")):
        mode = stat.S_IMODE(path.lstat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), path


def test_a_folder_that_others_can_write_to_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    path.mkdir()
    path.chmod(0o777)
    with pytest.raises(PermissionError, match="chmod 700"):
        folder(path)
    # Nor is it read.
    with pytest.raises(PermissionError, match="chmod 700"):
        SlotFolder(path, LAYOUT, BYTES).look_around()
    path.chmod(0o700)
    (path / "worker-0").symlink_to(tmp_path)
    made = folder(path)
    assert made.slot == path / "worker-1"
    made.release()


@pytest.mark.parametrize("trap", ["symlink", "folder", "fifo"])
def test_what_is_not_a_regular_file_is_not_read(tmp_path: Path, trap: str) -> None:
    made = folder(tmp_path / "kv")
    write(made, 1)
    (path,) = (tmp_path / "kv").rglob("*.kv")
    kept = tmp_path / "kept"
    path.rename(kept)
    if trap == "symlink":
        path.symlink_to(kept)
    elif trap == "folder":
        path.mkdir()
    else:
        os.mkfifo(path)
    with pytest.raises((BadBlockFile, OSError)):
        made.read(key(1), own=True)
    assert made.scan() == ([], [])


def test_what_the_tier_did_not_write_is_left_alone(tmp_path: Path) -> None:
    made = folder(tmp_path / "kv")
    write(made, 1)
    (path,) = (tmp_path / "kv").rglob("*.kv")
    notes = [tmp_path / "kv" / "notes", path.parent / "notes.kv", path.with_suffix(".txt")]
    for note in notes:
        note.write_text("mine")
    own, foreign = made.scan()
    assert ([one.path for one in own], foreign) == ([path], [])
    assert all(note.read_text() == "mine" for note in notes)


def test_each_worker_has_a_folder_and_takes_over_its_own(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    first, second = folder(path), folder(path, layout="f" * 16)
    assert first.slot != second.slot
    write(first, 1)
    write(second, 2)
    names = first.slot, second.slot
    first.release()
    second.release()
    # In the other order: each finds the folder with files of its layout.
    second, first = folder(path, layout="f" * 16), folder(path)
    assert (first.slot, second.slot) == names
    assert sound(first, 1)
    # A third worker reads the files of the first.
    third = folder(path)
    assert third.slot not in names
    assert third.holds_elsewhere(key(1))
    assert sound(third, 1, own=False)
    assert not third.holds_elsewhere(key(2))
    # Not if other users could have written them.
    assert first.slot is not None
    first.slot.chmod(0o777)
    third.look_around()
    assert not third.holds_elsewhere(key(1))
    first.slot.chmod(0o700)
    # Of another layout, and the folder of a worker that has ended is taken before a new one.
    first.release()
    fourth = folder(path, layout="e" * 16)
    assert fourth.slot == names[0]
    own, foreign = fourth.scan()
    assert (own, len(foreign)) == ([], 1)


WRITER = """
import sys
from pathlib import Path
from support.block_files import folder, write
made = folder(Path(sys.argv[1]), size=200_000)
print("writing", flush=True)
for number in range(100_000):
    write(made, number % 50, size=200_000)
"""


def test_a_worker_whose_folder_was_removed_does_not_write_to_its_successors(
    tmp_path: Path,
) -> None:
    """Every folder has one writer."""
    first = folder(tmp_path)
    write(first, 1)
    shutil.rmtree(tmp_path / "worker-0")
    with pytest.raises(FolderLost, match="removed the folder"):
        first.check_claim()
    second = folder(tmp_path)
    assert second.slot == tmp_path / "worker-0"
    write(second, 2)
    block = StoredBlock(key(1), BlockCopy(content(1), digest(content(1))))
    done = write_blocks(first, [], [block], set())
    assert isinstance(done.error, FolderLost)
    assert len(list(tmp_path.rglob("*.kv"))) == 1
    first.claim()
    assert first.slot == tmp_path / "worker-1"
    first.check_claim()
    second.check_claim()


def test_a_writer_that_is_killed_leaves_whole_files(tmp_path: Path) -> None:
    """kill -9 at any moment of a write."""
    path = tmp_path / "kv"
    rng = random.Random(7)
    for _ in range(6):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True, env=ENV
        )
        assert writer.stdout is not None
        assert writer.stdout.readline() == "writing\n"
        time.sleep(0.02 + rng.random() / 20)
        os.kill(writer.pid, signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
        # The kernel has released the lock: the same folder again.
        made = folder(path, size=200_000)
        assert made.slot == path / "worker-0"
        own, _ = made.scan()
        assert own
        assert not list(path.rglob("*.part"))
        for one in own:
            data, expected = made.read(BlockKey(one.hash, one.identity, one.tenant), own=True)
            assert digest(data) == expected
        made.release()


def test_an_error_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = folder(tmp_path / "kv")

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "writev", full)
    with pytest.raises(OSError, match="No space"):
        write(made, 1)
    assert not [one for one in (tmp_path / "kv").rglob("*") if one.suffix in (".kv", ".part")]
    monkeypatch.undo()
    write(made, 1)
    assert sound(made, 1)


FULL = """
from pathlib import Path
from support.block_files import folder, sound, write
made = folder(Path("/mnt/kv"), size=640)
written = 0
try:
    for number in range(10_000):
        write(made, number)
        written += 1
except OSError as error:
    print(error.errno, written, len(list(Path("/mnt/kv").rglob("*.part"))))
assert all(sound(made, number) for number in range(written))
"""


@pytest.mark.parametrize("limit", ["size=256k", "nr_inodes=40"])
def test_a_disk_that_is_really_full(limit: str) -> None:
    """A small file system of its own; skipped where the kernel gives users no namespaces."""
    mount = f'mount -t tmpfs -o {limit} none /mnt && exec "$@"'
    command = ["unshare", "-Urm", "sh", "-c", mount, "sh", sys.executable, "-c", FULL]
    done = subprocess.run(command, capture_output=True, text=True, env=ENV, check=False)
    if "unshare" in done.stderr or "mount" in done.stderr:
        pytest.skip(done.stderr.strip()[:200])
    errno, written, parts = map(int, done.stdout.split())
    assert errno == 28
    assert written
    assert not parts


def take(name: Path, what: str, elsewhere: Path) -> None:
    """Puts something that no worker has made under the name of a worker's folder."""
    match what:
        case "file":
            name.write_text("notes")
        case "link":
            elsewhere.mkdir()
            name.symlink_to(elsewhere)
        case "dangling":
            name.symlink_to(elsewhere)
        case "loop":
            name.symlink_to(name)
        case "pipe":
            os.mkfifo(name)
        case "shared":
            name.mkdir()
            name.chmod(0o777)
        case "lock is a folder":
            (name / "lock").mkdir(parents=True)
            name.chmod(0o700)
        case _:
            name.mkdir(mode=0o700)
            (name / "lock").symlink_to(elsewhere)


@pytest.mark.parametrize(
    "what",
    ["file", "link", "dangling", "loop", "pipe", "shared", "lock is a folder", "lock is a link"],
)
def test_a_name_that_something_else_has_taken_is_passed_over(tmp_path: Path, what: str) -> None:
    path = tmp_path / "kv"
    path.mkdir(mode=0o700)
    take(path / "worker-0", what, tmp_path / "elsewhere")
    made = folder(path)
    assert made.slot == path / "worker-1"
    write(made, 1)
    assert sound(made, 1)
    made.release()


def test_a_folder_under_the_name_of_a_file_does_no_harm(tmp_path: Path) -> None:
    made = folder(tmp_path / "kv")
    write(made, 1)
    (file,) = (tmp_path / "kv").rglob("*.kv")
    file.unlink()
    file.mkdir()
    file.with_suffix(".part").mkdir()
    write(made, 2)
    own, foreign = made.scan()
    assert ([one.identity for one in own], foreign) == ([key(2).identity], [])
    made.remove(key(1))
    blocks = [
        StoredBlock(key(one), BlockCopy(content(one), digest(content(one)))) for one in (1, 3)
    ]
    done = write_blocks(made, (), blocks, set())
    assert ([one.key for one in done.blocks], done.error) == ([key(3)], None)
    assert sound(made, 3)


@files_stay
@given(st.integers(1, 12), st.sets(st.integers(0, 11)))
def test_what_cannot_be_removed_holds_up_nothing_else(
    tmp_path: Path, count: int, stuck: set[int]
) -> None:
    made = folder(tmp_path / "kv")
    keys = [key(number) for number in range(count)]
    for number in range(count):
        write(made, number)
    unlink = os.unlink

    def fail(path: Path) -> None:
        if any(keys[one].identity.hex() in str(path) for one in stuck if one < count):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        unlink(path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "unlink", fail)
        gone: list[BlockKey | Path] = list(keys)
        for _ in range(count + 1):
            done = write_blocks(made, gone, (), set())
            assert not done.not_removed
            assert (done.error is not None) == bool(done.stuck)
            gone = done.stuck
    assert gone == [keys[one] for one in sorted(stuck) if one < count]
    assert {one.identity for one in made.scan()[0]} == {
        keys[one].identity for one in stuck if one < count
    }
    for number in range(count):
        made.remove(key(number))
    made.release()
