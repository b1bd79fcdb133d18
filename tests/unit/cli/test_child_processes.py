"""Children of the command's process start only the program that they are for."""

from __future__ import annotations

import subprocess
import sys

# A server and a channel of gRPC, then forks as uvloop makes them: libc calls the handlers that
# libraries have registered. Each child tells its threads.
_FORKS = """
import asyncio, ctypes, os, time
import kvrelay.cli.main as command

command.run = lambda words: 0
try:
    command.main()
except SystemExit:
    pass
import grpc

async def main():
    server = grpc.aio.server()
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
    await server.start()
    await channel.channel_ready()
    libc = ctypes.PyDLL(None)
    for _ in range(5):
        reader, writer = os.pipe()
        if libc.fork() == 0:
            # gRPC's handlers would have started threads by now.
            time.sleep(0.1)
            os.write(writer, f"{len(os.listdir('/proc/self/task'))} ".encode())
            os._exit(0)
        os.wait()
        print(os.read(reader, 100).decode(), end="")
    await channel.close()
    await server.stop(0)

asyncio.run(main())
"""


def test_grpc_starts_no_threads_in_children() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _FORKS], capture_output=True, text=True, timeout=120
    )
    assert (done.stdout.split(), done.stderr) == (["1"] * 5, "")
