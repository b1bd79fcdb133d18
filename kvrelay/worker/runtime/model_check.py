"""Asks transformers whether workers could serve a model, in a process of its own: `kvrelay serve`
and `kvrelay check` do not import transformers' models.

`python -m kvrelay.worker.runtime.model_check` reads a cluster's configuration as JSON on stdin. Its
last line on stdout is JSON: why a pool's workers would refuse the model, or null.
"""

from __future__ import annotations

import json
import sys

from kvrelay.config.schema import ClusterConfig
from kvrelay.engine.model.checkpoint import find_checkpoint
from kvrelay.engine.model.loader import check_model
from kvrelay.engine.parallel.plan import check_degree
from kvrelay.errors import KvRelayError
from kvrelay.types.workers import POOLS


def main() -> None:
    """Checks the model, and the degree of each pool. Loads no weights."""
    config = ClusterConfig.model_validate_json(sys.stdin.read())
    refusal = None
    try:
        checkpoint = find_checkpoint(config.model.path)
        check_model(config.model.path, checkpoint)
        for pool in POOLS:
            if (degree := config.pool(pool).tensor_parallel) > 1:
                check_degree(checkpoint, degree)
    except KvRelayError as error:
        refusal = error.message
    print(json.dumps(refusal))


if __name__ == "__main__":
    main()
