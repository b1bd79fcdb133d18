"""The operator's view of a cluster: converts proto/kvrelay/v1/cluster.proto to and from frozen
dataclasses.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from typing import cast, get_args

from kvrelay.errors import InvalidArgument
from kvrelay.protocol_version import Protocol, ours, printable
from kvrelay.types.control_plane import ControllerInfo, ControllerState, RouterLoad, ScalingDecision
from kvrelay.types.workers import (
    POOLS,
    PendingWorker,
    PoolName,
    Role,
    StandbyWorker,
    TierLoad,
    WorkerInfo,
    WorkerLoad,
    WorkerState,
)
from kvrelay.v1 import cluster_pb2 as pb
from kvrelay.v1.cluster_pb2_grpc import (
    ClusterServiceServicer,
    ClusterServiceStub,
    add_ClusterServiceServicer_to_server,
)
from kvrelay.wire.encoding.fields import optional, to_message, to_value
from kvrelay.wire.protocol_version import protocol_from_proto, protocol_to_proto

__all__ = [
    "SERVICE_NAME",
    "ClusterServiceServicer",
    "ClusterServiceStub",
    "ClusterStatus",
    "PoolStatus",
    "WorkerStatus",
    "add_ClusterServiceServicer_to_server",
    "check_client",
    "cluster_status_from_proto",
    "cluster_status_to_proto",
    "pb",
    "status_request",
    "worker_status_from_proto",
    "worker_status_to_proto",
]

SERVICE_NAME: str = pb.DESCRIPTOR.services_by_name["ClusterService"].full_name
_LOAD_FIELDS = tuple(field.name for field in fields(WorkerLoad) if field.name != "tiers")
# Only the autoscaler needs these fields.
_NOT_SENT = {"begun", "recent"}
_ROUTER_FIELDS = tuple(one.name for one in fields(RouterLoad) if one.name not in _NOT_SENT)
_STATES: tuple[WorkerState, ...] = get_args(WorkerState)
_CONTROLLER_STATES: tuple[ControllerState, ...] = get_args(ControllerState)


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """The status of a worker, for operators."""

    worker_id: str
    pool: PoolName
    epoch: int
    state: WorkerState
    address: str
    load: WorkerLoad
    pid: int = 0
    # Why the answering router gives the worker no new requests; empty if it does.
    unfit: str = ""
    # Number of processes that share the weights and KV heads.
    tensor_parallel: int = 1
    # Protocol version of the worker.
    protocol: int = 0
    model_id: str = ""
    # Kernels and dtypes of the worker, for people.
    engine: str = ""
    # Hashes of the files of the adapters that it has loaded.
    adapters: tuple[str, ...] = ()

    @property
    def host(self) -> str:
        """The host of the worker's address."""
        return self.address.rpartition(":")[0]

    @classmethod
    def of(cls, info: WorkerInfo, unfit: str = "") -> WorkerStatus:
        """Builds the status from the worker's entry in the registry."""
        return cls(
            info.worker_id,
            info.pool,
            info.epoch,
            info.state,
            info.address,
            info.load,
            info.pid,
            unfit,
            info.tensor_parallel,
            info.protocol.version,
            info.model_id,
            info.engine,
            info.adapters,
        )


@dataclass(frozen=True, slots=True)
class PoolStatus:
    """The status of a pool and its workers."""

    name: PoolName
    desired: int
    workers: tuple[WorkerStatus, ...]


@dataclass(frozen=True, slots=True)
class ClusterStatus:
    """The status of a whole cluster, as one router sees it."""

    model: str
    # State of the router.
    state: WorkerState
    pools: tuple[PoolStatus, ...]
    # Newest first.
    decisions: tuple[ScalingDecision, ...]
    router: RouterLoad
    block_bytes: int
    # Tokens.
    block_size: int
    # ok, or the problem with Redis.
    registry: str
    # Workers that still have to be replaced, as an operator requested.
    restarting: tuple[str, ...] = ()
    # Requested workers that no node has room for.
    pending: tuple[PendingWorker, ...] = ()
    # Workers without a pool. They replace workers that die.
    standby: tuple[StandbyWorker, ...] = ()
    # At most one leads.
    controllers: tuple[ControllerInfo, ...] = ()
    # Protocol of the router.
    protocol: Protocol = field(default_factory=Protocol)
    # router.policy; empty if the router does not report it.
    routing: str = ""
    # Name of the autoscaling policy's file; empty without one.
    autoscaling: str = ""
    # Names of all models that the router serves; this is the status of one.
    models: tuple[str, ...] = ()
    # Decisions that a delay of the scaling policy holds back.
    delayed: tuple[ScalingDecision, ...] = ()


def status_request(model: str = "") -> pb.GetStatusRequest:
    """Returns a status request with the protocol of this end. `model` is the name of one of several
    models; empty stands for the first.
    """
    return pb.GetStatusRequest(protocol=protocol_to_proto(ours()), model=model)


def check_client(request: pb.GetStatusRequest) -> None:
    """Raises FailedPrecondition for a client with an incompatible protocol."""
    ours().check(protocol_from_proto(request.protocol), "the admin client")


def worker_status_to_proto(worker: WorkerStatus) -> pb.WorkerStatus:
    """Converts the status of a worker to its message."""
    return pb.WorkerStatus(
        worker_id=worker.worker_id,
        pool=worker.pool,
        epoch=worker.epoch,
        state=worker.state,
        address=worker.address,
        pid=worker.pid,
        unfit=worker.unfit,
        tensor_parallel=worker.tensor_parallel,
        protocol=worker.protocol,
        model_id=worker.model_id,
        engine=worker.engine,
        tiers=[to_message(pb.TierStatus, tier) for tier in worker.load.tiers],
        adapters=worker.adapters,
        **{name: getattr(worker.load, name) for name in _LOAD_FIELDS},
    )


def worker_status_from_proto(message: pb.WorkerStatus) -> WorkerStatus:
    """Converts a message to the status of a worker. Keeps unknown states of future versions. Raises
    InvalidArgument for an unknown pool.
    """
    return WorkerStatus(
        worker_id=message.worker_id,
        pool=_pool(message.pool),
        epoch=message.epoch,
        state=_state(message.state),
        address=message.address,
        load=WorkerLoad(
            **{name: optional(message, name) for name in _LOAD_FIELDS},
            tiers=tuple(to_value(TierLoad, tier) for tier in message.tiers),
        ),
        pid=message.pid,
        unfit=message.unfit,
        tensor_parallel=message.tensor_parallel or 1,
        protocol=message.protocol,
        model_id=message.model_id,
        engine=message.engine,
        adapters=tuple(message.adapters),
    )


def cluster_status_to_proto(status: ClusterStatus) -> pb.ClusterStatus:
    """Converts the status of a cluster to its message."""
    return pb.ClusterStatus(
        model=status.model,
        state=status.state,
        pools=[
            pb.PoolStatus(
                name=pool.name,
                desired=pool.desired,
                workers=[worker_status_to_proto(worker) for worker in pool.workers],
            )
            for pool in status.pools
        ],
        decisions=[to_message(pb.ScalingDecision, one) for one in status.decisions],
        router=pb.RouterStatus(**{name: getattr(status.router, name) for name in _ROUTER_FIELDS}),
        block_bytes=status.block_bytes,
        block_size=status.block_size,
        registry=status.registry,
        restarting=status.restarting,
        pending=[
            pb.PendingWorker(worker_id=one.worker_id, pool=one.pool, reason=one.reason)
            for one in status.pending
        ],
        standby=[pb.StandbyWorker(**asdict(one)) for one in status.standby],
        controllers=[
            pb.ControllerStatus(controller_id=one.controller_id, state=one.state, term=one.term)
            for one in status.controllers
        ],
        protocol=protocol_to_proto(status.protocol),
        routing=status.routing,
        autoscaling=status.autoscaling,
        models=status.models,
        delayed=[to_message(pb.ScalingDecision, one) for one in status.delayed],
    )


def cluster_status_from_proto(message: pb.ClusterStatus) -> ClusterStatus:
    """Converts a message to the status of a cluster. Omits pools that this version does not know.
    Keeps unknown states of future versions.
    """
    return ClusterStatus(
        model=message.model,
        state=_state(message.state),
        pools=tuple(
            PoolStatus(
                _pool(pool.name),
                pool.desired,
                tuple(worker_status_from_proto(one) for one in pool.workers if one.pool in POOLS),
            )
            for pool in message.pools
            if pool.name in POOLS
        ),
        decisions=_decisions_from_proto(message.decisions),
        router=_router_from_proto(message.router),
        block_bytes=message.block_bytes,
        block_size=message.block_size,
        registry=message.registry,
        restarting=tuple(message.restarting),
        pending=tuple(
            PendingWorker(one.worker_id, _role(one.pool), one.reason)
            for one in message.pending
            if one.pool in get_args(Role)
        ),
        standby=tuple(_standby_from_proto(one) for one in message.standby),
        controllers=tuple(
            ControllerInfo(one.controller_id, _controller_state(one.state), one.term)
            for one in message.controllers
        ),
        protocol=protocol_from_proto(message.protocol),
        routing=message.routing,
        autoscaling=message.autoscaling,
        models=tuple(message.models),
        delayed=_decisions_from_proto(message.delayed),
    )


def _decisions_from_proto(messages: Iterable[pb.ScalingDecision]) -> tuple[ScalingDecision, ...]:
    """Converts the decisions about pools that this version knows."""
    return tuple(to_value(ScalingDecision, one) for one in messages if one.pool in POOLS)


def _router_from_proto(message: pb.RouterStatus) -> RouterLoad:
    return RouterLoad(**{name: optional(message, name) for name in _ROUTER_FIELDS})


def _standby_from_proto(message: pb.StandbyWorker) -> StandbyWorker:
    state = _state(message.state)
    if state not in ("starting", "ready"):
        raise InvalidArgument(
            f"state {state!r} of a standby worker is unknown; allowed are starting and ready",
            field="state",
        )
    return StandbyWorker(
        message.worker_id,
        state,
        message.host_id,
        message.pid,
        message.weight_bytes,
        message.rss_bytes,
    )


def _role(name: str) -> Role:
    return "standby" if name == "standby" else _pool(name)


def _pool(name: str) -> PoolName:
    if name not in POOLS:
        raise InvalidArgument(
            f"pool {name!r} is unknown; allowed are {', '.join(POOLS)}", field="pool"
        )
    return name


def _controller_state(name: str) -> ControllerState:
    return name if name in _CONTROLLER_STATES else cast(ControllerState, printable(name))


def _state(name: str) -> WorkerState:
    return name if name in _STATES else cast(WorkerState, printable(name))
