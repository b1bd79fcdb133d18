"""An arena that another process reads through NIXL: `python nixl_sender.py` prints how, as JSON.
Ends with stdin.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

from support.transfer_ends import MemoryFile

from kv_transfer.transports.nixl import ServedArena

if __name__ == "__main__":
    served = ServedArena(MemoryFile(), "127.0.0.1")
    remote = asdict(served.remote())
    print(json.dumps({**remote, "access": remote["access"].hex()}), flush=True)
    sys.stdin.read()
    served.close()
