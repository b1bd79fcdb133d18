"""Imports gRPC, whose C++ library logs each failed handshake on stderr, around the error that says
what to do. The library reads the level of its log once, at the import: this one allows only errors.

A level that the user has set stays, and so does a gRPC that was imported before. The environment is
afterwards as it was.
"""

from __future__ import annotations

import os
import sys

_LEVEL = "GRPC_VERBOSITY"

if "grpc" not in sys.modules and _LEVEL not in os.environ:
    os.environ[_LEVEL] = "ERROR"
    try:
        import grpc  # noqa: F401
    finally:
        del os.environ[_LEVEL]
