"""Both clients against a real gRPC server that plays scripts. Each test runs for the blocking and
the asyncio twin.
"""

from __future__ import annotations

import asyncio
import math
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Protocol

import grpc
import pytest
from support.scripted_router import LEDGER, ScriptedRouter, last, serving, tokens

import kvrelay
from kvrelay.client import channels
from kvrelay.client.base_client import BaseClient, channel_options
from kvrelay.errors import Code, InvalidArgument, error_for
from kvrelay.types.requests import TokenLogprobs
from kvrelay.wire.inference import (
    GenerateRequest,
    GenerateResponse,
    InferenceServiceStub,
    ModelInfo,
    request_to_proto,
)


class Twin(Protocol):
    """One face for both clients. `waits` holds the seconds that the client would have slept."""

    waits: list[float]

    def events(
        self, targets: Any, *args: Any, take: int | None = None, **options: Any
    ) -> list[GenerateResponse]: ...
    def result(self, targets: Any, *args: Any, **options: Any) -> kvrelay.Completion: ...
    def call(self, targets: Any, method: str, *args: Any, **options: Any) -> Any: ...


class Blocking:
    def __init__(self) -> None:
        self.waits: list[float] = []

    def _client(self, targets: Any, options: dict[str, Any]) -> kvrelay.Client:
        client = kvrelay.Client(targets, **options.pop("client", {}))
        client._pause.wait = lambda seconds, ended: self.waits.append(seconds)  # type: ignore[method-assign]
        return client

    def events(
        self, targets: Any, *args: Any, take: int | None = None, **options: Any
    ) -> list[GenerateResponse]:
        events = []
        with self._client(targets, options) as client, client.generate(*args, **options) as stream:
            for event in stream:
                events.append(event)
                if len(events) == take:
                    break
        return events

    def result(self, targets: Any, *args: Any, **options: Any) -> kvrelay.Completion:
        with self._client(targets, options) as client:
            return client.generate(*args, **options).result()

    def call(self, targets: Any, method: str, *args: Any, **options: Any) -> Any:
        with self._client(targets, options) as client:
            return getattr(client, method)(*args, **options)


class Asyncio:
    def __init__(self) -> None:
        self.waits: list[float] = []

    def _client(self, targets: Any, options: dict[str, Any]) -> kvrelay.AsyncClient:
        client = kvrelay.AsyncClient(targets, **options.pop("client", {}))

        async def wait(seconds: float, ended: object) -> None:
            self.waits.append(seconds)

        client._pause.wait = wait  # type: ignore[method-assign]
        return client

    def events(
        self, targets: Any, *args: Any, take: int | None = None, **options: Any
    ) -> list[GenerateResponse]:
        async def run() -> list[GenerateResponse]:
            events = []
            async with (
                self._client(targets, options) as client,
                client.generate(*args, **options) as stream,
            ):
                async for event in stream:
                    events.append(event)
                    if len(events) == take:
                        break
            return events

        return asyncio.run(run())

    def result(self, targets: Any, *args: Any, **options: Any) -> kvrelay.Completion:
        async def run() -> kvrelay.Completion:
            async with self._client(targets, options) as client:
                return await client.generate(*args, **options).result()

        return asyncio.run(run())

    def call(self, targets: Any, method: str, *args: Any, **options: Any) -> Any:
        async def run() -> Any:
            async with self._client(targets, options) as client:
                return await getattr(client, method)(*args, **options)

        return asyncio.run(run())


@pytest.fixture(params=[Blocking, Asyncio])
def twin(request: pytest.FixtureRequest) -> Twin:
    return request.param()  # type: ignore[no-any-return]


def refused() -> Iterator[str]:
    """The address of nobody."""
    with serving(ScriptedRouter()) as target:
        pass
    yield target


nobody = pytest.fixture(refused, name="nobody")


def test_tokens_come_one_by_one(twin: Twin) -> None:
    with serving(ScriptedRouter()) as target:
        events = twin.events(target, "Once", max_tokens=3)
    assert [event.token_ids for event in events] == [(100,), (101,), (102,)]
    assert events[-1].finish_reason == "length"


def test_the_whole_answer(twin: Twin) -> None:
    router = ScriptedRouter()
    with serving(router) as target:
        whole = twin.result(target, "Once", max_tokens=3, temperature=0.0, seed=1, stop="x")
    assert (whole.text, whole.token_ids, whole.finish_reason) == (
        " t100 t101 t102",
        (100, 101, 102),
        "length",
    )
    assert (whole.path, whole.why, whole.ledger, whole.calls) == (
        "disaggregated",
        "policy",
        LEDGER,
        1,
    )
    assert whole.ttft_seconds is not None
    assert 0 < whole.ttft_seconds <= whole.e2e_seconds
    (request,) = router.requests
    assert (request.prompt, request.sampling.stop, request.sampling.temperature) == (
        "Once",
        ("x",),
        0.0,
    )
    assert not router.cancelled.is_set()


@pytest.mark.parametrize(
    "code", [one for one in Code if one not in (Code.UNAVAILABLE, Code.DATA_LOSS, Code.CANCELLED)]
)
def test_an_error_that_is_final_comes_typed_and_at_once(twin: Twin, code: Code) -> None:
    router = ScriptedRouter([error_for(code, "no", field="sampling.top_p")])
    with serving(router) as target, pytest.raises(kvrelay.KvRelayError) as caught:
        twin.result(target, "p")
    assert type(caught.value) is type(error_for(code, ""))
    assert caught.value.message == f"{target}: no"
    assert caught.value.field == "sampling.top_p"
    assert (len(router.requests), twin.waits) == (1, [])


@pytest.mark.parametrize(
    "text",
    [
        "the deadline had already passed when the request arrived",
        "the deadline passed while the request was queued",
    ],
)
def test_a_deadline_says_how_to_give_more_time(twin: Twin, text: str) -> None:
    router = ScriptedRouter([kvrelay.DeadlineExceeded(f"{text}; send a later deadline")])
    with serving(router) as target, pytest.raises(kvrelay.DeadlineExceeded) as caught:
        twin.result(target, "p")
    assert caught.value.message == (
        f"{target}: {text}; give more time (--timeout SECONDS, or timeout=)"
    )


def test_a_failure_before_the_first_token_is_tried_again_after_the_servers_delay(
    twin: Twin,
) -> None:
    router = ScriptedRouter(
        [kvrelay.ResourceExhausted("full", retry_after_s=7.0)],
        [kvrelay.Unavailable("draining", retry_after_s=2.0)],
    )
    with serving(router) as target:
        whole = twin.result(target, "p", max_tokens=2)
    assert (whole.token_ids, whole.calls) == ((100, 101), 3)
    first, second = twin.waits
    assert 7.0 <= first <= 7.1
    assert 2.0 <= second <= 2.2


def test_a_long_wait_is_told(twin: Twin, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "kvrelay.client")
    router = ScriptedRouter(
        [kvrelay.ResourceExhausted("acme has used its limit", retry_after_s=7.0)],
        [kvrelay.ResourceExhausted("full", retry_after_s=0.5)],
    )
    with serving(router) as target:
        twin.result(target, "p", max_tokens=2)
    (line,) = caplog.messages
    assert line.endswith(": acme has used its limit; asking again in 7 s")


def test_a_long_wait_for_the_list_of_models_is_told(
    twin: Twin, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "kvrelay.client")
    router = ScriptedRouter()
    router.list_errors = [
        kvrelay.ResourceExhausted("acme has used its limit", retry_after_s=7.0),
        kvrelay.ResourceExhausted("full", retry_after_s=0.5),
    ]
    with serving(router) as target:
        twin.call(target, "models")
    (line,) = caplog.messages
    assert line.endswith(": acme has used its limit; asking again in 7 s")


def test_an_answer_goes_on_after_a_failure_in_its_midst(twin: Twin) -> None:
    down = kvrelay.Unavailable("router stops")
    router = ScriptedRouter([tokens(0, 100), tokens(1, 101, 102), down], [tokens(3, 103), down])
    with serving(router) as target:
        whole = twin.result(target, "p", max_tokens=6)
    assert whole.token_ids == (100, 101, 102, 103, 104, 105)
    assert whole.text == " t100 t101 t102 t103 t104 t105"
    assert whole.calls == 3
    assert [request.resume for request in router.requests] == [
        (),
        (100, 101, 102),
        (100, 101, 102, 103),
    ]
    assert len({request.sampling.seed for request in router.requests}) == 1


def test_each_token_earns_new_attempts(twin: Twin) -> None:
    down = kvrelay.Unavailable("router stops")
    router = ScriptedRouter(*([tokens(index, 100 + index), down] for index in range(5)))
    with serving(router) as target:
        whole = twin.result(
            target, "p", max_tokens=6, client={"retry": kvrelay.RetryPolicy(max_attempts=2)}
        )
    assert (whole.token_ids, whole.calls) == ((100, 101, 102, 103, 104, 105), 6)


def test_a_whole_answer_is_not_cancelled_while_its_call_ends(twin: Twin) -> None:
    router = ScriptedRouter([last(tokens(0, 1)), 0.05])
    with serving(router) as target:
        assert twin.result(target, "p").token_ids == (1,)
    assert not router.cancelled.is_set()


def test_repeated_tokens_are_dropped(twin: Twin) -> None:
    router = ScriptedRouter(
        [tokens(0, 1), tokens(0, 1), tokens(1, 2), tokens(0, 1), last(tokens(2, 3))]
    )
    with serving(router) as target:
        events = twin.events(target, "p")
    assert [event.token_ids for event in events] == [(1,), (2,), (3,)]


def test_missing_tokens_are_asked_for_again(twin: Twin) -> None:
    router = ScriptedRouter([tokens(0, 100), tokens(2, 102), "hang"])
    with serving(router) as target:
        whole = twin.result(target, "p", max_tokens=3)
        assert router.cancelled.wait(60)
    assert whole.token_ids == (100, 101, 102)


class Babbling(grpc.GenericRpcHandler):
    """Answers every call with bytes that are no message."""

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        if details.method.endswith("Generate"):
            return grpc.unary_stream_rpc_method_handler(lambda request, context: iter([b"\xff"]))
        return grpc.unary_unary_rpc_method_handler(lambda request, context: b"\xff")


def test_a_response_that_cannot_be_read_is_an_internal_error(twin: Twin) -> None:
    server = grpc.server(ThreadPoolExecutor(1), [Babbling()])
    target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        for call in (lambda: twin.result(target, "p"), lambda: twin.call(target, "models")):
            with pytest.raises(kvrelay.Internal, match=target):
                call()
    finally:
        server.stop(None).wait()
    assert not twin.waits


def test_a_stream_that_ends_early_is_a_failure(twin: Twin) -> None:
    router = ScriptedRouter([tokens(0, 100)])
    with serving(router) as target:
        assert twin.result(target, "p", max_tokens=3).token_ids == (100, 101, 102)
    router = ScriptedRouter(*[[]] * 5)
    with (
        serving(router) as target,
        pytest.raises(kvrelay.Unavailable, match="ended before the answer was complete"),
    ):
        twin.result(target, "p")


def test_attempts_are_bounded(twin: Twin) -> None:
    router = ScriptedRouter(*[[kvrelay.Unavailable("draining")]] * 9)
    with serving(router) as target, pytest.raises(kvrelay.Unavailable, match="draining"):
        twin.result(target, "p", client={"retry": kvrelay.RetryPolicy(max_attempts=3)})
    assert (len(router.requests), len(twin.waits)) == (3, 2)


def test_the_next_target_is_tried_at_once(twin: Twin, nobody: str) -> None:
    with serving(ScriptedRouter()) as target:
        whole = twin.result([nobody, target], "p", max_tokens=2)
        assert twin.call([nobody, target], "models") == (
            ModelInfo("demo", 4096, "float32", "LlamaForCausalLM", 337),
        )
    assert (whole.token_ids, whole.calls, twin.waits) == ((100, 101), 2, [0.0, 0.0])


@pytest.mark.parametrize(
    "error", [kvrelay.Unavailable("killed"), kvrelay.Cancelled("by nobody's user")]
)
def test_an_answer_goes_on_at_another_router(twin: Twin, error: kvrelay.KvRelayError) -> None:
    dying = ScriptedRouter([tokens(0, 100), tokens(1, 101), error])
    other = ScriptedRouter()
    with serving(dying) as first, serving(other) as second:
        assert twin.result([first, second], "p", max_tokens=4).token_ids == (100, 101, 102, 103)
        dying.list_errors.append(error)
        assert len(twin.call([first, second], "models")) == 1
    assert other.requests[0].resume == (100, 101)


def test_the_error_is_what_a_router_answered_not_that_another_is_gone(
    twin: Twin, nobody: str
) -> None:
    for order in (1, -1):
        router = ScriptedRouter(*[[kvrelay.Unavailable("no worker serves it")]] * 9)
        with serving(router) as target, pytest.raises(kvrelay.Unavailable) as caught:
            twin.result([nobody, target][::order], "p")
        assert caught.value.message == f"{target}: no worker serves it"


def test_nobody_there(twin: Twin, nobody: str) -> None:
    with pytest.raises(kvrelay.Unavailable, match=f"{nobody}: cannot connect"):
        twin.result(nobody, "p")
    with pytest.raises(kvrelay.Unavailable, match=f"{nobody}: cannot connect"):
        twin.call(nobody, "models")


def test_leaving_a_stream_cancels_the_request(twin: Twin) -> None:
    router = ScriptedRouter([tokens(0, 100), "hang"])
    with serving(router) as target:
        assert len(twin.events(target, "p", take=1)) == 1
        assert router.cancelled.wait(60)


def test_a_deadline_ends_an_answer_that_does_not(twin: Twin) -> None:
    router = ScriptedRouter([tokens(0, 100), "hang"])
    with serving(router) as target:
        with pytest.raises(kvrelay.DeadlineExceeded):
            twin.result(target, "p", timeout=1.0)
        assert router.cancelled.wait(60)
    assert router.time_remaining[0] is not None
    assert router.time_remaining[0] <= 1.0 + 0.01  # gRPC rounds deadlines


def test_a_deadline_in_the_past_sends_nothing(twin: Twin) -> None:
    router = ScriptedRouter()
    with serving(router) as target, pytest.raises(kvrelay.DeadlineExceeded):
        twin.result(target, "p", timeout=0.0)
    assert router.requests == []


def test_readiness_is_waited_for(twin: Twin) -> None:
    router = ScriptedRouter()
    router.list_errors = [kvrelay.Unavailable("no worker yet")] * 9
    with serving(router) as target:
        twin.call(target, "wait_ready", 30)
    assert len(twin.waits) == 9


def test_readiness_is_not_waited_for_forever(twin: Twin, nobody: str) -> None:
    with pytest.raises(kvrelay.Unavailable, match="cannot connect"):
        twin.call(nobody, "wait_ready", 0.3)


def test_a_token_is_sent_as_bearer(twin: Twin) -> None:
    router = ScriptedRouter()
    with serving(router) as target:
        twin.result(target, "p", client={"token": "s3cret"})
    assert router.metadata[0]["authorization"] == "Bearer s3cret"


def test_a_bad_request_is_refused_before_it_is_sent(twin: Twin) -> None:
    router = ScriptedRouter()
    with serving(router) as target:
        with pytest.raises(kvrelay.InvalidArgument, match="max_tokens"):
            twin.result(target, "p", max_tokens=2**40)
        with pytest.raises(kvrelay.InvalidArgument, match="prompt"):
            twin.result(target)
    assert router.requests == []


@pytest.mark.parametrize(
    "target", ["", "localhost", "http://127.0.0.1:80", "127.0.0.1:", "a b:1", ":50051"]
)
def test_a_target_is_host_and_port(target: str) -> None:
    with pytest.raises(kvrelay.InvalidArgument, match="HOST:PORT"):
        BaseClient(target)
    with pytest.raises(kvrelay.InvalidArgument, match="targets is empty"):
        BaseClient([])


def test_another_thread_may_cancel_a_blocking_stream() -> None:
    router = ScriptedRouter(["hang"])
    with serving(router) as target, kvrelay.Client(target) as client:
        stream = client.generate("p")
        canceller = threading.Thread(target=lambda: router.hanging.wait(60) and stream.cancel())
        canceller.start()
        with pytest.raises(kvrelay.Cancelled):
            stream.result()
        canceller.join()
        with pytest.raises(kvrelay.Cancelled):
            next(stream)


def test_reading_on_after_a_failure_raises_it_again() -> None:
    router = ScriptedRouter([kvrelay.NotFound("no model x")])
    with serving(router) as target, kvrelay.Client(target) as client:
        stream = client.generate("p")
        for read in (stream.result, stream.result, lambda: next(stream)):
            with pytest.raises(kvrelay.NotFound):
                read()
    assert len(router.requests) == 1


def test_reading_on_raises_what_a_router_answered_though_another_is_gone(nobody: str) -> None:
    router = ScriptedRouter([kvrelay.Unavailable("draining")])
    once_each = kvrelay.RetryPolicy(max_attempts=2)
    with serving(router) as target, kvrelay.Client([target, nobody], retry=once_each) as client:
        stream = client.generate("p")
        for _ in range(2):
            with pytest.raises(kvrelay.Unavailable, match="draining"):
                stream.result()
    assert len(router.requests) == 1


async def test_another_task_may_cancel_an_asyncio_stream() -> None:
    router = ScriptedRouter(["hang"])
    with serving(router) as target:
        async with kvrelay.AsyncClient(target) as client:
            stream = client.generate("p")
            reader = asyncio.create_task(stream.result())
            await asyncio.to_thread(router.hanging.wait, 10)
            stream.cancel()
            with pytest.raises(kvrelay.Cancelled):
                await reader


async def test_a_cancelled_task_cancels_its_request() -> None:
    router = ScriptedRouter(["hang"])
    with serving(router) as target:
        async with kvrelay.AsyncClient(target) as client:
            reader = asyncio.create_task(client.generate("p").result())
            await asyncio.to_thread(router.hanging.wait, 10)
            reader.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reader
            assert await asyncio.to_thread(router.cancelled.wait, 10)


async def test_one_asyncio_client_streams_many_answers_at_once() -> None:
    with serving(ScriptedRouter()) as target:
        async with kvrelay.AsyncClient(target) as client:
            answers = await asyncio.gather(
                *(client.generate("p", max_tokens=n).result() for n in range(1, 21))
            )
    assert [len(answer.token_ids) for answer in answers] == list(range(1, 21))


def test_threads_share_a_blocking_client() -> None:
    with serving(ScriptedRouter()) as target, kvrelay.Client(target) as client:
        results: list[kvrelay.Completion] = []
        threads = [
            threading.Thread(
                target=lambda: results.append(client.generate("p", max_tokens=5).result())
            )
            for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
    assert [result.token_ids for result in results] == [(100, 101, 102, 103, 104)] * 8


def test_a_closed_client_says_so() -> None:
    client = kvrelay.Client("127.0.0.1:1")
    client.close()
    with pytest.raises(kvrelay.Cancelled, match="closed"):
        client.models()
    with pytest.raises(kvrelay.Cancelled, match="closed"):
        next(client.generate("p"))


def test_importing_the_package_imports_no_dependency() -> None:
    code = (
        "import sys, kvrelay; assert not {'grpc', 'torch', 'google.protobuf'} & set(sys.modules), "
        "'import kvrelay';kvrelay.Client; heavy = {'torch', 'ray', 'redis', 'pydantic', 'numpy', "
        "'yaml', 'transformers'};assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_every_public_name_is_there() -> None:
    assert all(getattr(kvrelay, name) is not None for name in kvrelay.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Klient'"):
        kvrelay.Klient  # noqa: B018


def test_tokens_one_by_one_with_index_and_logprobs() -> None:
    some = tokens(1, 101, 102)
    script = [
        tokens(0, 100),
        replace(some, logprobs=(TokenLogprobs(-0.5), TokenLogprobs(-1.0))),
        last(tokens(3, 103)),
    ]
    with serving(ScriptedRouter(script, script)) as target:
        with kvrelay.Client(target) as client:
            blocking = list(client.generate("p").tokens())

        async def read() -> list[kvrelay.Token]:
            async with kvrelay.AsyncClient(target) as client:
                return [token async for token in client.generate("p").tokens()]

        assert asyncio.run(read()) == blocking
    assert [(one.index, one.token_id) for one in blocking] == [
        (0, 100),
        (1, 101),
        (2, 102),
        (3, 103),
    ]
    assert [one.logprobs and one.logprobs.logprob for one in blocking] == [None, -0.5, -1.0, None]


def test_a_stream_is_text_or_may_be_awaited_whole() -> None:
    with serving(ScriptedRouter()) as target:
        with kvrelay.Client(target) as client:
            stream = client.generate("p", max_tokens=2)
            assert (stream.text, stream.text) == (" t100 t101", " t100 t101")
            assert repr(client) == f"<kvrelay.Client of {target}>"
            assert repr(stream) == "<kvrelay.Stream: 2 tokens, 1 calls, finished>"

        async def read() -> str:
            async with kvrelay.AsyncClient(target) as client:
                return (await client.generate("p", max_tokens=2)).text

        assert asyncio.run(read()) == " t100 t101"


def test_threads_that_come_with_the_first_call_share_one_channel() -> None:
    with serving(ScriptedRouter()) as target, kvrelay.Client(target) as client:
        barrier = threading.Barrier(8)
        stubs: list[object] = []

        def call() -> None:
            barrier.wait(10)
            stubs.append(client._channels_to(0).stub())

        threads = [threading.Thread(target=call) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
    assert len(stubs) == 8
    assert len(set(map(id, stubs))) == 1


def test_a_client_that_was_used_says_that_it_does_not_survive_a_fork() -> None:
    code = (
        "import os, sys, kvrelay\n"
        "client = kvrelay.Client(sys.argv[1])\n"
        "client.models()\n"
        "stream = client.generate('p', max_tokens=3)\n"
        "if os.fork() == 0:\n"
        "    for call in (client.models, lambda: next(stream), stream.result):\n"
        "        try:\n"
        "            call()\n"
        "            os._exit(1)\n"
        "        except kvrelay.FailedPrecondition as error:\n"
        "            if 'forked' not in error.message:\n"
        "                os._exit(2)\n"
        "    stream.cancel()\n"
        "    os._exit(7)\n"
        "assert os.waitstatus_to_exitcode(os.wait()[1]) == 7\n"
        "client.models()\n"
        "assert len(stream.result().token_ids) == 3\n"
    )
    with serving(ScriptedRouter()) as target:
        subprocess.run([sys.executable, "-c", code, target], check=True, timeout=60)


@pytest.mark.parametrize("method", ["models", "wait_ready", "generate"])
def test_an_asyncio_client_says_that_it_is_of_another_event_loop(method: str) -> None:
    with serving(ScriptedRouter()) as target:
        client = kvrelay.AsyncClient(target)

        async def call() -> None:
            await (client.generate("p") if method == "generate" else getattr(client, method)())

        with asyncio.Runner() as first:
            first.run(call())
            with pytest.raises(kvrelay.FailedPrecondition, match="for each event loop, such as"):
                asyncio.run(call())
            first.run(call())
            first.run(client.close())


def test_a_stream_that_has_begun_says_that_it_is_of_another_event_loop() -> None:
    with serving(ScriptedRouter()) as target, asyncio.Runner() as first:
        client = kvrelay.AsyncClient(target)
        stream = client.generate("p", max_tokens=3)
        first.run(anext(stream))
        with pytest.raises(kvrelay.FailedPrecondition, match="for each event loop, such as"):
            asyncio.run(stream.result())
        assert len(first.run(stream.result()).token_ids) == 3
        first.run(client.close())


@pytest.mark.parametrize("debug", [False, True])
def test_another_event_loop_closes_an_asyncio_client(debug: bool) -> None:
    router = ScriptedRouter(["hang"])
    with serving(router) as target, asyncio.Runner(debug=debug) as first:
        client = kvrelay.AsyncClient(target)

        async def closed_elsewhere() -> None:
            reader = asyncio.create_task(client.generate("p").result())
            await asyncio.to_thread(router.hanging.wait, 10)
            await asyncio.to_thread(asyncio.run, client.close(), debug=debug)
            with pytest.raises(kvrelay.Cancelled, match="closed"):
                await reader

        first.run(closed_elsewhere())
        with pytest.raises(kvrelay.Cancelled, match="closed"):
            asyncio.run(client.models())


async def test_closing_an_asyncio_client_ends_its_readers_with_cancelled() -> None:
    router = ScriptedRouter(["hang"])
    with serving(router) as target:
        client = kvrelay.AsyncClient(target)
        stream = client.generate("p")
        reader = asyncio.create_task(stream.result())
        await asyncio.to_thread(router.hanging.wait, 10)
        await client.close()
        with pytest.raises(kvrelay.Cancelled, match="closed"):
            await reader
        assert not reader.cancelled()
        with pytest.raises(kvrelay.Cancelled, match="closed"):
            await stream.result()


async def test_a_task_that_was_cancelled_is_though_the_client_closes_too() -> None:
    router = ScriptedRouter(["hang"])
    with serving(router) as target:
        client = kvrelay.AsyncClient(target)
        reader = asyncio.create_task(client.generate("p").result())
        await asyncio.to_thread(router.hanging.wait, 10)
        reader.cancel()
        await client.close()
        with pytest.raises(asyncio.CancelledError):
            await reader


async def test_an_answer_that_is_whole_stays_whole_when_the_client_closes() -> None:
    router = ScriptedRouter([last(tokens(0, 1)), "hang"])
    with serving(router) as target:
        client = kvrelay.AsyncClient(target)
        stream = client.generate("p")
        reader = asyncio.create_task(stream.result())
        await asyncio.to_thread(router.hanging.wait, 10)
        while not stream._answer.finished:
            await asyncio.sleep(0)
        await client.close()
        assert (await reader).token_ids == (1,)


def test_tokens_that_were_not_taken_are_there_again() -> None:
    script = [tokens(0, 100, 101, 102), last(tokens(3, 103))]
    with serving(ScriptedRouter(script, script)) as target:
        with kvrelay.Client(target) as client:
            stream = client.generate("p")
            assert next(stream.tokens()).index == 0
            assert [one.token_id for one in stream.tokens()] == [101, 102, 103]

        async def read() -> list[int]:
            async with kvrelay.AsyncClient(target) as client:
                stream = client.generate("p")
                async for token in stream.tokens():
                    assert token.index == 0
                    break
                return [one.token_id async for one in stream.tokens()]

        assert asyncio.run(read()) == [101, 102, 103]


def test_time_counts_from_the_first_read(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(ScriptedRouter()) as target, kvrelay.Client(target) as client:
        stream = client.generate("p", timeout=30.0)
        later = SimpleNamespace(monotonic=lambda: time.monotonic() + 1000.0)
        monkeypatch.setattr("kvrelay.client.base_stream.time", later)
        assert stream.result().e2e_seconds < 30.0


def test_routers_behind_one_name_take_turns() -> None:
    """What a client does with a headless Service's name, which stands for several addresses."""
    first, second = ScriptedRouter(), ScriptedRouter()
    with (
        serving(first) as one,
        serving(second) as other,
        grpc.insecure_channel(f"ipv4:{one},{other}", channel_options("10.0.0.1:1")) as channel,
    ):
        stub = InferenceServiceStub(channel)
        for _ in range(200):  # until both are connected, the one that is has all
            list(stub.Generate(request_to_proto(GenerateRequest("r", prompt="p")), timeout=10))
            if first.requests and second.requests:
                break
        before = len(first.requests), len(second.requests)
        for _ in range(4):
            list(stub.Generate(request_to_proto(GenerateRequest("r", prompt="p")), timeout=10))
        assert (len(first.requests), len(second.requests)) == (before[0] + 2, before[1] + 2)


async def test_an_answer_goes_on_after_a_read_that_timed_out() -> None:
    """The timeout is the task's own, so nobody has cancelled the stream."""
    router = ScriptedRouter([tokens(0, 1, 2), "hang"], [last(tokens(2, 3, 4))])
    with serving(router) as target:
        async with kvrelay.AsyncClient(target) as client:
            stream = client.generate("p", max_tokens=4)
            found = [*(await anext(stream)).token_ids]
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2):
                    await anext(stream)
            async for response in stream:
                found += response.token_ids
    assert found == [1, 2, 3, 4]
    assert router.requests[1].resume == (1, 2)


@pytest.mark.parametrize("timeout", [math.inf, 1e300, 1e12, 1e8])
def test_a_timeout_may_be_without_end(twin: Twin, timeout: float) -> None:
    with serving(ScriptedRouter()) as target:
        assert len(twin.result(target, "p", max_tokens=2, timeout=timeout).token_ids) == 2


def test_a_timeout_that_is_no_number_is_refused() -> None:
    with (
        kvrelay.Client("127.0.0.1:1", timeout=math.nan) as client,
        pytest.raises(kvrelay.InvalidArgument, match="timeout is nan"),
    ):
        client.models()


@pytest.mark.parametrize("end", ["cancel", "close"])
def test_the_wait_before_a_retry_ends_with_its_stream(nobody: str, end: str) -> None:
    slow = kvrelay.RetryPolicy(initial_backoff_s=2000.0, max_backoff_s=2000.0)
    client = kvrelay.Client(nobody, retry=slow, timeout=math.inf)
    stream, caught = client.generate("p"), list[BaseException]()

    def read() -> None:
        try:
            stream.result()
        except kvrelay.KvRelayError as error:
            caught.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    while not stream._retry.calls:
        reader.join(0.01)
    reader.join(0.2)
    (stream.cancel if end == "cancel" else client.close)()
    reader.join(60)
    assert not reader.is_alive()
    assert isinstance(caught[0], kvrelay.Cancelled)
    client.close()


@pytest.mark.parametrize("end", ["cancel", "close"])
async def test_the_wait_before_a_retry_ends_with_its_asyncio_stream(nobody: str, end: str) -> None:
    slow = kvrelay.RetryPolicy(initial_backoff_s=2000.0, max_backoff_s=2000.0)
    async with kvrelay.AsyncClient(nobody, retry=slow, timeout=math.inf) as client:
        stream = client.generate("p")
        reader = asyncio.create_task(stream.result())
        await asyncio.wait([reader], timeout=0.3)
        if end == "cancel":
            stream.cancel()
        else:
            await client.close()
        async with asyncio.timeout(60):
            with pytest.raises(kvrelay.Cancelled):
                await reader


async def test_a_client_opens_a_channel_for_more_calls_than_one_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(channels, "CALLS", 2)
    router = ScriptedRouter(*([["hang"]] * 5))
    with serving(router) as target:
        async with kvrelay.AsyncClient(target) as client:
            streams = [client.generate("p", max_tokens=2) for _ in range(5)]
            reads = [asyncio.create_task(anext(aiter(one))) for one in streams]
            own = client._channels_to(0)
            async with asyncio.timeout(30):
                while len(router.requests) < 5:
                    await asyncio.sleep(0.01)
            assert own._calls == [2, 2, 1]
            for stream in streams:
                stream.cancel()
            await asyncio.gather(*reads, return_exceptions=True)
            assert (await client.generate("p", max_tokens=2)).text == " t100 t101"
            del stream, streams, reads
            assert len(own.opened) == 3
            async with asyncio.timeout(30):
                while sum(own._calls):
                    await asyncio.sleep(0.01)


@pytest.mark.parametrize("end", ["read", "left", "cancelled", "failed"])
def test_an_ended_call_makes_room_on_its_channel(end: str) -> None:
    router = ScriptedRouter()
    with serving(router) as target, kvrelay.Client(target) as client:
        for _ in range(3):
            if end == "failed":
                router.scripts = [[InvalidArgument("no")]]
            stream = client.generate("p", max_tokens=5)
            try:
                if end == "read":
                    stream.result()
                elif end == "failed":
                    with pytest.raises(InvalidArgument):
                        stream.result()
                else:
                    next(stream)
                    if end == "cancelled":
                        stream.cancel()
            finally:
                del stream
        assert client._channels_to(0)._calls == [0]


async def test_a_stream_that_is_dropped_is_cancelled() -> None:
    router = ScriptedRouter([tokens(0, 1), "hang"])
    with serving(router) as target:
        async with kvrelay.AsyncClient(target) as client, asyncio.timeout(30):
            async for _ in client.generate("p", max_tokens=5):
                break
            while sum(client._channels_to(0)._calls):
                await asyncio.sleep(0.01)
            assert await asyncio.to_thread(router.cancelled.wait, 30)


def test_threads_that_begin_together_share_no_channel_beyond_its_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(channels, "CALLS", 2)
    router = ScriptedRouter(*([[tokens(0, 1), "hang"]] * 16))
    with serving(router) as target, kvrelay.Client(target) as client:
        barrier = threading.Barrier(16)
        streams = [client.generate("p", max_tokens=5) for _ in range(16)]

        def begin(stream: kvrelay.Stream) -> None:
            barrier.wait(30)
            next(stream)

        threads = [threading.Thread(target=begin, args=(one,)) for one in streams]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert client._channels_to(0)._calls == [2] * 8
        for stream in streams:
            stream.cancel()


def test_close_ends_the_streams_of_threads_after_an_interrupt() -> None:
    router = ScriptedRouter([tokens(0, 1), "hang"])
    found: list[BaseException] = []
    with serving(router) as target, kvrelay.Client(target) as client:
        stream = client.generate("p", max_tokens=5)
        next(stream)

        def read() -> None:
            try:
                stream.result()
            except kvrelay.Cancelled as error:
                found.append(error)

        thread = threading.Thread(target=read, daemon=True)
        thread.start()
        with pytest.raises(KeyboardInterrupt), client._renewing_channels():
            raise KeyboardInterrupt
        assert client.generate("p", max_tokens=2).text == " t100 t101"
        client.close()
        thread.join(30)
    assert [str(one) for one in found] == ["the client is closed"]


def test_a_call_on_a_client_that_another_thread_closes_is_cancelled() -> None:
    with serving(ScriptedRouter()) as target, kvrelay.Client(target) as client:
        client.models()
        # As if the other thread came between the check and the call.
        for channel in client._channels_to(0).opened:
            channel.close()
        client._closed = True
        client._raise_if_closed = lambda: None  # type: ignore[method-assign]
        for call in (client.models, client.generate("p").result):
            with pytest.raises(kvrelay.Cancelled):
                call()
