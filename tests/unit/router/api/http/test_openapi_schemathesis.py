"""Schemathesis against the description: requests made from it, right and wrong, are answered as it
says.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest
from support.router_harness import running_router

EXAMPLES = os.environ.get("SCHEMATHESIS_EXAMPLES", "6")  # of each operation
CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,"
    "response_schema_conformance"
)


@pytest.mark.long
async def test_generated_requests(tmp_path: Path) -> None:
    async with running_router() as router:
        for worker in router.workers.values():
            worker.worker.tokens_per_step = 256
        process = await asyncio.create_subprocess_exec(
            *(str(Path(sys.executable).with_name("st")), "run", f"{router.http}/openapi.json"),
            *(
                "--checks",
                CHECKS,
                "--phases",
                "fuzzing",
                "--max-examples",
                EXAMPLES,
                "--request-timeout",
                "20",
            ),
            *("--seed", "1", "--no-color", "--generation-database", "none"),
            cwd=tmp_path,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        try:
            said, _ = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
        assert process.returncode == 0, said.decode()
