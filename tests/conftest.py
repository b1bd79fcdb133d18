from __future__ import annotations

import gc
import os
import signal
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from hypothesis import HealthCheck, settings

os.environ["HF_HUB_OFFLINE"] = "1"
# Users do not have it, and with it no test sees what stays in a buffer.
os.environ.pop("PYTHONUNBUFFERED", None)
# As in kvrelay's own processes: a fork must not stop the gRPC servers of the tests.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A busy machine must not fail a property: nothing here is about seconds.
settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")


# Folders whose tests share processes that are expensive to start. Each runs in one xdist process.
SHARED = ("tests/cluster/shared/", "tests/faults/", "tests/vllm_engine/")
# What the warnings about connections of redis-py name.
LEFT_BY_REDIS = ("StreamWriter", "_SelectorTransport", "AbstractConnection", r"redis\.sock")
# Folders with tests that end Redis servers.
ENDING_REDIS = ("tests/cluster/", "tests/faults/", "tests/vllm_engine/")


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    """`--dist loadfile` distributes tests by file, and those of a shared folder together."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class ByFileOrFolder(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file: str = super()._split_scope(nodeid)
            return next((folder for folder in SHARED if file.startswith(folder)), file)

    return ByFileOrFolder(config, log)


def pytest_configure() -> None:
    """Tests interrupt processes that they start; a shell starts its background jobs, and so their
    children, with SIGINT ignored.

    Collected tests and imported modules stay, so the garbage collector leaves them alone: it would
    take half of the time of collecting, and a third of a second each time a test calls it.
    """
    gc.disable()
    # Without structlog's tracebacks for people: one of them takes two seconds of processor time.
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.format_exc_info,
            structlog.processors.KeyValueRenderer(key_order=["level", "event"], drop_missing=True),
        ]
    )
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks most cases of a sweep as long, before pytest selects by marks."""
    cases: Counter[str] = Counter()
    for item in items:
        if (sweep := item.get_closest_marker("sweep")) is not None:
            test = item.nodeid.partition("[")[0]
            if cases[test] % sweep.args[0]:
                item.add_marker(pytest.mark.long)
            cases[test] += 1
    _forgive_redis(items)


def pytest_collection_finish() -> None:
    """What is there now is not looked at again."""
    gc.freeze()
    gc.enable()


def _forgive_redis(items: list[pytest.Item]) -> None:
    """redis-py loses a connection whose set-up is cancelled. What it left is found when memory is
    collected, in the test that is running then.
    """
    for item in items:
        if _uses_redis(item.nodeid, getattr(item, "module", None)):
            for what in LEFT_BY_REDIS:
                ignored = f"ignore:.*{what}:pytest.PytestUnraisableExceptionWarning"
                item.add_marker(pytest.mark.filterwarnings(ignored))


def _uses_redis(nodeid: str, module: object) -> bool:
    return nodeid.startswith(ENDING_REDIS) or hasattr(module, "EmbeddedRedis")


@pytest.fixture(autouse=True, scope="module")
def collect_what_redis_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """No test of a later module finds it."""
    yield
    if _uses_redis(request.node.nodeid, request.module):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            gc.collect()


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """A command that is run in this process sets what all later tests would log, and find in the
    log.
    """
    before = structlog.get_config()
    yield
    structlog.configure(**before)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """tiny_model(architecture="llama") -> folder of a tiny random model (see tiny_models.py), built
    once a session.
    """
    from support.tiny_models import build

    folders: dict[str, Path] = {}

    def folder(architecture: str = "llama") -> Path:
        if architecture not in folders:
            folders[architecture] = build(architecture, tmp_path_factory.mktemp(architecture))
        return folders[architecture]

    return folder
