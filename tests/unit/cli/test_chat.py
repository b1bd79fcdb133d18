"""`kvrelay chat`: what lines do, and what the cluster is asked."""

from __future__ import annotations

import io
import os
import pty
import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.prepared import prepared
from support.scripted_router import ScriptedRouter, last, serving, tokens

from kvrelay.cli.main import run
from kvrelay.errors import InvalidArgument

Output = pytest.CaptureFixture[str]
COMMAND = [sys.executable, "-c", "from kvrelay.cli.main import main; main()"]
# The terminal of stdin becomes the one that sends signals to this process.
TAKE_TERMINAL = "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0)"
NO_SIGHUP = "; import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)"


def talk(
    lines: list[str],
    router: ScriptedRouter,
    monkeypatch: pytest.MonkeyPatch,
    *options: str,
    code: int = 0,
) -> list[list[tuple[str, str]]]:
    """The messages of each request of a command that exits with `code`."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    with serving(router) as target:
        assert run(["chat", "--target", target, "--max-tokens", "2", *options]) == code
    return [
        [(message.role, message.content) for message in request.messages]
        for request in router.requests
    ]


def test_the_model_gets_the_whole_conversation(
    capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    router = ScriptedRouter()
    lines = ["Hello", "", "And then?", "/reset", "New"]
    first, second, third = talk(lines, router, monkeypatch, "--system", "Be brief.")
    assert first == [("system", "Be brief."), ("user", "Hello")]
    assert second == [*first, ("assistant", " t100 t101"), ("user", "And then?")]
    assert third == [("system", "Be brief."), ("user", "New")]
    out, err = capsys.readouterr()
    assert out == " t100 t101\n" * 3
    assert err.count("(cut at 2 tokens)") == 3


def test_commands(capsys: Output, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # Longer than a line of the terminal.
    tmp_path /= "long" * 25
    tmp_path.mkdir()
    file = tmp_path / "long.txt"
    file.write_text("two\nlines\n")
    router = ScriptedRouter()
    lines = [
        "/system",
        "/system Rhyme.",
        f"/file {file}",
        f"/file {tmp_path}/none",
        "/ledger",
        "Hi",
        "/nonsense",
        "/help",
        "/quit",
        "not sent",
    ]
    first, second = talk(lines, router, monkeypatch)
    assert first == [("system", "Rhyme."), ("user", "two\nlines\n")]
    assert second[-1] == ("user", "Hi")
    shown = capsys.readouterr().err
    assert "Instruction: none" in shown
    assert "Instruction: Rhyme." in shown
    assert f"/file {tmp_path}/none: No such file or directory." in shown
    assert "/nonsense is no command; /help lists them." in shown
    assert shown.count("TTFT, the sum") == 1
    documented = re.findall(r"^(/\w+)", shown[shown.index("/system TEXT") :], re.MULTILINE)
    assert documented == ["/system", "/model", "/ledger", "/file", "/reset", "/quit"]


def test_one_of_several_models_is_named_at_the_start_and_changed_in_the_conversation(
    capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    router = ScriptedRouter()
    router.models = ["small", "big/Model-X"]
    assert talk(["Hi"], router, monkeypatch, code=2) == []
    told = "serves several models; name one with --model: small, big/Model-X\n"
    assert capsys.readouterr().err.endswith(told)
    lines = ["One", "/model big/Model-X", "Two", "/model none", "/model", "Three"]
    talk(lines, router, monkeypatch, "--model", "small")
    assert [request.model for request in router.requests] == ["small", *["big/Model-X"] * 2]
    assert [len(request.messages) for request in router.requests] == [1, 3, 5]
    notes = capsys.readouterr().err
    assert "/model: 'none' is not served; served are small, big/Model-X\n" in notes
    assert notes.count("Model: big/Model-X; served are small, big/Model-X.\n") == 2


def test_a_failed_answer_is_one_line_and_not_kept(
    capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    router = ScriptedRouter([InvalidArgument("too long", field="messages")])
    first, second = talk(["one", "two"], router, monkeypatch, code=1)
    assert (first, second) == ([("user", "one")], [("user", "two")])
    assert re.match(r"127.0.0.1:\d+: too long\n", capsys.readouterr().err)


def test_an_error_has_lines_of_its_own_on_a_terminal(
    capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    for stream in (sys.stdout, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "40")
    words = [f"word{number}" for number in range(20)]
    router = ScriptedRouter([tokens(0, 1), InvalidArgument(" ".join(words), field="messages")])
    talk(["one"], router, monkeypatch, code=1)
    out, err = capsys.readouterr()
    assert out == "t1\n"
    lines = re.sub(r"\x1b\[[0-9;]*m", "", err).splitlines()
    assert max(map(len, lines)) <= 40
    assert " ".join(lines).split()[1:] == words


@pytest.mark.parametrize("encoding", ["ascii", "latin1", "utf-8"])
def test_a_pipe_is_read_as_utf_8(encoding: str) -> None:
    router = ScriptedRouter()
    with serving(router) as target:
        done = subprocess.run(
            [*COMMAND, "chat", "--target", target, "--max-tokens", "2"],
            input="größe ☃\n".encode() + b"\xff\n",
            capture_output=True,
            timeout=120,
            env={**os.environ, "PYTHONIOENCODING": encoding},
        )
    ((message,),) = [request.messages for request in router.requests]
    assert message.content == "größe ☃"
    assert done.returncode == 1
    assert b"it is not valid text; convert it to UTF-8" in done.stderr
    assert b"Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("text", "asked"),
    [(b"", []), (b"Hello", ["Hello"]), (b"Hello\n/qu", ["Hello"]), (b"\n\n  ", []), (b"/quit", [])],
)
def test_a_stdin_that_ends_anywhere_ends_the_conversation(text: bytes, asked: list[str]) -> None:
    router = ScriptedRouter()
    with serving(router) as target:
        done = subprocess.run(
            [*COMMAND, "chat", "--target", target, "--max-tokens", "2"],
            input=text,
            capture_output=True,
            timeout=120,
        )
    assert done.returncode == 0
    assert [one.messages[-1].content for one in router.requests] == asked
    assert b"Traceback" not in done.stderr


@pytest.mark.parametrize("stdin", ["</dev/null", "<&-"])
def test_a_chat_without_stdin_ends_at_once(stdin: str) -> None:
    with serving(ScriptedRouter()) as target:
        command = shlex.join([*COMMAND, "chat", "--target", target])
        done = subprocess.run(["sh", "-c", f"{command} {stdin}"], capture_output=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


@pytest.mark.parametrize("keys", ["\x04", "half a li", "half\x04\x15\x04"])
def test_a_terminal_that_is_closed_ends_the_conversation(keys: str, tmp_path: Path) -> None:
    """With Ctrl-D, also within a line, and in the middle of a line, where SIGHUP is ignored."""
    with serving(ScriptedRouter()) as target:
        ours, theirs = pty.openpty()
        command = subprocess.Popen(
            prepared(TAKE_TERMINAL + NO_SIGHUP, *COMMAND, "chat", "--target", target),
            stdin=theirs,
            stdout=theirs,
            stderr=subprocess.PIPE,
            env={**os.environ, "XDG_STATE_HOME": str(tmp_path), "TERM": "dumb"},
            start_new_session=True,
        )
        os.close(theirs)
        with ended(command):
            shown = b""
            while not shown.endswith(b"> "):
                shown += os.read(ours, 65536)
            os.write(ours, keys.encode())
            if "\x04" not in keys:
                os.close(ours)
            _, said = command.communicate(timeout=60)
            assert command.returncode == 0, said
            assert b"Traceback" not in said
            if "\x04" in keys:
                os.close(ours)


def test_ctrl_c_ends_the_answer_and_keeps_what_came(tmp_path: Path) -> None:
    router = ScriptedRouter([tokens(0, 1, 2), "hang"], [last(tokens(0, 3))])
    with serving(router) as target:
        ours, theirs = pty.openpty()
        command = subprocess.Popen(
            prepared(TAKE_TERMINAL, *COMMAND, "chat", "--target", target),
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**os.environ, "XDG_STATE_HOME": str(tmp_path), "TERM": "dumb"},
            start_new_session=True,
        )
        os.close(theirs)
        with ended(command):
            screen = Screen(ours)
            screen.wait_for("> ")
            os.write(ours, b"first\n")
            screen.wait_for("t1 t2")
            os.write(ours, b"\x03")
            screen.wait_for("(ended)")
            screen.wait_for("> ")
            assert router.cancelled.wait(60)
            os.write(ours, b"second\n")
            screen.wait_for("t3")
            screen.wait_for("> ")
            os.write(ours, b"\x04")
            assert command.wait(60) == 0
    assert [(one.role, one.content) for one in router.requests[1].messages] == [
        ("user", "first"),
        ("assistant", " t1 t2"),
        ("user", "second"),
    ]
    history = tmp_path / "kvrelay" / "chat_history"
    assert history.read_text().splitlines()[-2:] == ["first", "second"]
    assert history.stat().st_mode & 0o077 == 0


@contextmanager
def ended(command: subprocess.Popen[bytes]) -> Iterator[None]:
    """No process outlives a failed test."""
    try:
        yield
    finally:
        command.kill()
        command.wait()


class Screen:
    """What a program writes to a terminal."""

    def __init__(self, end: int) -> None:
        self._shown = ""
        self._more = threading.Condition()
        threading.Thread(target=self._read, args=(end,), daemon=True).start()

    def _read(self, end: int) -> None:
        while True:
            try:
                text = os.read(end, 65536).decode(errors="replace")
            except OSError:  # the program has ended
                return
            with self._more:
                self._shown += text
                self._more.notify_all()

    def wait_for(self, text: str) -> None:
        """Waits until the text is shown, and forgets everything up to its end."""
        with self._more:
            assert self._more.wait_for(lambda: text in self._shown, 60), self._shown
            self._shown = self._shown.partition(text)[2]
