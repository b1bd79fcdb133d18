"""`kvrelay router`: one router over a Redis and workers that run elsewhere."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from kvrelay.cli.options.cluster import Config, LogLevel
from kvrelay.cli.required_packages import requires_cluster_extra
from kvrelay.cli.serve import require_shared_redis, set_log_level
from kvrelay.errors import KvRelayError


@requires_cluster_extra
def router(
    config: Config = None,
    log_level: LogLevel = None,
    sibling: Annotated[
        str | None,
        typer.Option(hidden=True, help="FOLDER:NUMBER of one of several processes."),
    ] = None,
) -> None:
    """Run one router for the workers of a controller. `kvrelay serve` starts both.

    Router and controller share the Redis that redis.url names. Prints one line on stdout when the
    router is ready. With router.processes, that many processes share its ports.

    Example: kvrelay router -c cluster.yaml
    """
    import uvloop

    import router.main
    from kvrelay.config.config_file import load_config
    from kvrelay.launch.router_group import run_group
    from kvrelay.models import local_folder, resolve_model
    from kvrelay.process.telemetry import configure_logging, get_logger, name_process
    from router.process import end_now
    from router.sibling_processes import Place

    loaded = load_config(config)
    require_shared_redis(loaded.redis.url, "router")
    set_log_level(log_level)
    configure_logging()
    log = get_logger("router")
    folders = [local_folder(resolve_model(one.model.path)) for one in loaded.served]
    if loaded.router.processes > 1 and sibling is None:
        asyncio.run(run_group(loaded.model_copy(update=loaded.with_paths(folders)), _show))
        return
    place = None if sibling is None else Place.parse(sibling, loaded.router.processes)
    if place is not None:
        name_process(router_process=place.number)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            runner.run(router.main.serve(loaded, folders=folders, ready=_show, place=place))
        except KvRelayError:
            raise
        except Exception:
            # The usual end of the process could crash in gRPC's threads, and hide the cause.
            log.exception("router_failed")
            end_now(1)
        end_now()


def _show(line: str) -> None:
    print(line, flush=True)
