"""The address of a Ray cluster, and the configuration that workers need to run on any of its
nodes.
"""

from __future__ import annotations

from kvrelay.config.listen import is_address
from kvrelay.config.redis_url import hosts_of
from kvrelay.config.schema import ClusterConfig
from kvrelay.errors import ConfigError
from kvrelay.loopback import is_loopback

# The Ray that runs on this machine, or the Ray that RAY_ADDRESS names.
AUTO = "auto"


def check_ray_address(address: str) -> None:
    """Raises ConfigError unless it is `auto` or HOST:PORT."""
    if address.startswith("ray://"):
        raise ConfigError(
            f"--ray-address {address}: Ray Client is not supported; run this "
            "command on one of the cluster's nodes, with --ray-address auto or HOST:PORT of Ray's "
            "head"
        )
    if address != AUTO and not is_address(address):
        raise ConfigError(
            f"--ray-address {address!r} is neither auto nor HOST:PORT; give auto, or the "
            "address of Ray's head"
        )


def check_reachable(config: ClusterConfig) -> None:
    """Raises ConfigError unless workers on any host can reach Redis and are reachable."""
    url = config.redis.url
    if url == "embedded" or url.startswith("unix:"):
        raise ConfigError(
            f"redis.url: {url} is reachable on this machine only, and workers on other Ray "
            "nodes need it; run a Redis and set redis://HOST:PORT/DB"
        )
    for host in hosts_of(url):
        if not is_loopback(f"{host}:0"):
            continue
        raise ConfigError(
            f"redis.url: {host} is a loopback address, and all Ray nodes need one Redis; set "
            "an address of the network between the nodes"
        )
    if config.listen.workers_on_loopback:
        raise ConfigError(
            f"listen.worker_host: other Ray nodes cannot reach {config.listen.worker_host}; "
            "set worker_host: auto and security.tls (`kvrelay certs` creates certificates)"
        )
