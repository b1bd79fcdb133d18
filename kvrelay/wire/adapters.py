"""The adapters of a cluster: converts Adapter of proto/kvrelay/v1/cluster.proto."""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.v1 import cluster_pb2 as pb
from kvrelay.wire.encoding.fields import to_message, to_value


@dataclass(frozen=True, slots=True)
class AdapterStatus:
    """A LoRA adapter, for operators."""

    # The name that requests give as their model.
    name: str
    # The folder.
    path: str
    # Hash of the files.
    adapter_id: str
    # False while workers load it.
    served: bool
    # In the configuration file, so that it cannot be unloaded.
    configured: bool
    # Number of workers that have loaded it.
    workers: int
    # Name of the base model. Empty if the router is of an earlier release.
    model: str = ""
    # Name of a worker that refuses it, and the reason. Empty if no worker refuses it.
    refused: str = ""


def adapter_to_proto(adapter: AdapterStatus) -> pb.Adapter:
    """Converts an adapter to its message."""
    return to_message(pb.Adapter, adapter)


def adapter_from_proto(message: pb.Adapter) -> AdapterStatus:
    """Converts a message to an adapter."""
    return to_value(AdapterStatus, message)
