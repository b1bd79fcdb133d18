"""`kvrelay router`: one router over a Redis and workers that run elsewhere."""

from __future__ import annotations

import asyncio

from kvrelay.cli.cluster_extra import requires_cluster_extra
from kvrelay.cli.options.cluster import Config, LogLevel
from kvrelay.cli.serve import require_shared_redis, set_log_level


@requires_cluster_extra
def router(config: Config = None, log_level: LogLevel = None) -> None:
    """Run one router for the workers of a controller. `kvrelay serve` starts both.

    Router and controller share the Redis that redis.url names. Prints one line on stdout when the
    router is ready.

    Example: kvrelay router -c cluster.yaml
    """
    import uvloop

    import router.main
    from kvrelay.config.config_file import load_config
    from kvrelay.models import local_folder, resolve_model
    from kvrelay.process.telemetry import configure_logging
    from router.process import end_now

    loaded = load_config(config)
    require_shared_redis(loaded.redis.url, "router")
    set_log_level(log_level)
    configure_logging()

    def ready(line: str) -> None:
        print(line, flush=True)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        folders = [local_folder(resolve_model(one.model.path)) for one in loaded.served]
        runner.run(router.main.serve(loaded, folders=folders, ready=ready))
        end_now()
