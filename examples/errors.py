"""Shows deadlines, cancellation and typed errors."""

from __future__ import annotations

import os
import sys

import kvrelay


def main() -> None:
    policy = kvrelay.RetryPolicy(max_attempts=3, max_backoff_s=1.0)
    with kvrelay.Client(
        os.environ.get("KVRELAY_TARGET", "127.0.0.1:50051"), retry=policy
    ) as client:
        try:
            client.generate(
                "A long story:", max_tokens=4000, ignore_eos=True, timeout=0.25
            ).result()
        except kvrelay.DeadlineExceeded as error:
            print("deadline:", error)

        try:
            client.generate("A story:", top_p=7.0).result()
        except kvrelay.InvalidArgument as error:
            print(f"bad argument, field {error.field}:", error)

        try:
            client.generate("A story:", model="no-such-model").result()
        except kvrelay.NotFound as error:
            print("no such model:", error)

        stream = client.generate("A story:", max_tokens=4000, ignore_eos=True)
        print("first piece:", repr(next(stream).text))
        # Frees the batch slot and the blocks of the request.
        stream.cancel()
        try:
            next(stream)
        except kvrelay.Cancelled as error:
            print("cancelled:", error)

    try:
        with kvrelay.Client("127.0.0.1:1", retry=policy) as unreachable:
            unreachable.models(timeout=2.0)
    except kvrelay.Unavailable as error:
        print("unreachable:", error)
    except kvrelay.KvRelayError as error:
        # The base class of all errors.
        print(type(error).__name__, error)


if __name__ == "__main__":
    try:
        main()
    except kvrelay.KvRelayError as error:
        sys.exit(f"{type(error).__name__}: {error}")
