"""Links between services: who has the certificates and the token gets in, nobody else does."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from octavo.errors import ConfigurationError
from octavo.security import OPEN, Security, public_security
from octavo.serving import GrpcServer, open_channel
from octavo.settings import RouterSettings, SchedulerSettings, load
from octavo.v1 import inference_pb2, inference_pb2_grpc
from tests.certificates import Authority, CertificateFiles

AUTHORITY, STRANGER = Authority(), Authority("another authority")
TIMEOUT_S = 30.0
Stub = inference_pb2_grpc.InferenceStub
ASK = inference_pb2.InferenceListModelsRequest()


class Inference(inference_pb2_grpc.InferenceServicer):
    """Counts what gets in; a stream goes on until it is told to end."""

    def __init__(self) -> None:
        self.num_calls = 0
        self.may_end = asyncio.Event()

    async def ListModels(  # noqa: N802
        self,
        request: Any,  # noqa: ARG002
        context: Any,  # noqa: ARG002
    ) -> Any:
        self.num_calls += 1
        return inference_pb2.InferenceListModelsResponse()

    async def Generate(  # noqa: N802
        self,
        request: Any,  # noqa: ARG002
        context: Any,  # noqa: ARG002
    ) -> AsyncIterator[Any]:
        self.num_calls += 1
        yield inference_pb2.InferenceGenerateResponse(text="first")
        await self.may_end.wait()
        yield inference_pb2.InferenceGenerateResponse(text="last")


class Server:
    """A running server and how it was called."""

    def __init__(self, address: str, servicer: Inference) -> None:
        self.address = address
        self.servicer = servicer

    async def ask(self, security: Security) -> None:
        """One call on a channel of its own; raises grpc.RpcError if it is refused."""
        async with open_channel(self.address, security) as channel:
            await Stub(channel).ListModels(ASK, timeout=TIMEOUT_S)

    async def refusal(self, security: Security) -> grpc.aio.AioRpcError:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await self.ask(security)
        return caught.value


@asynccontextmanager
async def serving(security: Security) -> AsyncGenerator[Server]:
    server, servicer = GrpcServer(security=security), Inference()
    inference_pb2_grpc.add_InferenceServicer_to_server(servicer, server.server)
    port = await server.start("127.0.0.1", 0, inference_pb2.DESCRIPTOR)
    await server.set_serving(True)
    try:
        yield Server(f"127.0.0.1:{port}", servicer)
    finally:
        servicer.may_end.set()
        await server.stop(0)


def run(security: Security, check: Callable[[Server], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        async with serving(security) as server:
            await check(server)

    asyncio.run(main())


def security_of(files: CertificateFiles | None, **given: str) -> Security:
    flags: dict[str, str] = {**given}
    if files is not None:
        flags |= {f"tls_{name}": str(path) for name, path in files._asdict().items()}
    return Security.of(load(SchedulerSettings, flags, {}))


@pytest.fixture
def ours(tmp_path: Path) -> CertificateFiles:
    return AUTHORITY.issue(tmp_path / "ours")


def test_certificates_and_token_let_in(ours: CertificateFiles) -> None:
    security = security_of(ours, internal_token="word-of-the-fleet")

    async def check(server: Server) -> None:
        await server.ask(security)
        async with open_channel(server.address, security) as channel:
            request = inference_pb2.InferenceGenerateRequest()
            call = Stub(channel).Generate(request, timeout=TIMEOUT_S, metadata=(("a", "b"),))
            server.servicer.may_end.set()
            assert [message.text async for message in call] == ["first", "last"]

    run(security, check)


def test_without_certificates_nobody_gets_in(ours: CertificateFiles, tmp_path: Path) -> None:
    theirs = STRANGER.issue(tmp_path / "theirs")
    # Trusts our authority, but was signed by another.
    mixed = theirs._replace(ca=ours.ca)

    async def check(server: Server) -> None:
        for security in (OPEN, security_of(theirs), security_of(mixed)):
            assert (await server.refusal(security)).code() is grpc.StatusCode.UNAVAILABLE
        distrusting = await server.refusal(security_of(theirs))
        assert "CERTIFICATE_VERIFY_FAILED" in (distrusting.details() or "")
        assert server.servicer.num_calls == 0

    run(security_of(ours), check)


def test_a_client_with_certificates_refuses_a_plaintext_server(ours: CertificateFiles) -> None:
    async def check(server: Server) -> None:
        refusal = await server.refusal(security_of(ours))
        assert refusal.code() is grpc.StatusCode.UNAVAILABLE
        assert "andshake failed" in (refusal.details() or "")

    run(OPEN, check)


def test_a_certificate_of_another_name_is_refused_unless_the_name_is_expected(
    tmp_path: Path,
) -> None:
    elsewhere = AUTHORITY.issue(tmp_path, names=("scheduler.octavo.svc",))

    async def check(server: Server) -> None:
        refusal = await server.refusal(security_of(elsewhere))
        assert refusal.code() is grpc.StatusCode.UNAVAILABLE
        await server.ask(security_of(elsewhere, tls_server_name="scheduler.octavo.svc"))

    run(security_of(elsewhere), check)


@pytest.mark.parametrize("token", ["", "wrong", "word", "word-of-the-fleet2"])
def test_without_the_token_nobody_gets_in(token: str) -> None:
    async def check(server: Server) -> None:
        refusal = await server.refusal(security_of(None, internal_token=token))
        assert refusal.code() is grpc.StatusCode.UNAUTHENTICATED
        details = refusal.details() or ""
        assert "OCTAVO_INTERNAL_TOKEN" in details
        assert "word-of-the-fleet" not in details
        assert server.servicer.num_calls == 0

    run(security_of(None, internal_token="word-of-the-fleet"), check)


def test_streams_are_refused_before_their_first_message() -> None:
    async def check(server: Server) -> None:
        async with open_channel(server.address) as channel:
            # Nothing is ever sent.
            method = channel.stream_stream("/octavo.v1.Scheduler/Session")
            call = method(timeout=TIMEOUT_S)
            assert await call.code() is grpc.StatusCode.UNAUTHENTICATED

    run(security_of(None, internal_token="word"), check)


def test_health_probes_need_no_token() -> None:
    async def check(server: Server) -> None:
        async with open_channel(server.address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING

    run(security_of(None, internal_token="word"), check)


def test_a_token_rotates_through_a_list() -> None:
    async def check(server: Server) -> None:
        for token in ("old", "new", "new,old"):
            await server.ask(security_of(None, internal_token=token))
        for token in ("newer", "new old"):
            await server.refusal(security_of(None, internal_token=token))
        twice = replace(security_of(None, internal_token="new"), tokens=("new",))
        async with open_channel(server.address, twice) as channel:
            call = Stub(channel).ListModels(
                ASK, timeout=TIMEOUT_S, metadata=(("octavo-internal-token", "new"),)
            )
            assert await call.code() is grpc.StatusCode.UNAUTHENTICATED

    run(security_of(None, internal_token="new, old"), check)


def test_certificates_rotate_while_streams_run(ours: CertificateFiles) -> None:
    security = security_of(ours)

    async def check(server: Server) -> None:
        async with open_channel(server.address, security) as channel:
            request = inference_pb2.InferenceGenerateRequest()
            call = Stub(channel).Generate(request, timeout=TIMEOUT_S)
            assert (await call.read()).text == "first"
            # Another authority even: whoever dials from now on is asked for its certificates.
            before = security_of(AUTHORITY.issue(other))
            await server.ask(before)
            STRANGER.issue(ours.cert.parent)
            await server.ask(security)
            await server.refusal(before)
            server.servicer.may_end.set()
            assert (await call.read()).text == "last"

    other = ours.cert.parent.parent / "other"
    run(security, check)


def test_settings_that_dont_go_together_are_refused(ours: CertificateFiles) -> None:
    for missing in ("tls_cert", "tls_key", "tls_ca"):
        paths = {f"tls_{name}": str(path) for name, path in ours._asdict().items()}
        del paths[missing]
        with pytest.raises(ConfigurationError, match=f"^OCTAVO_{missing.upper()}: ") as caught:
            security_of(None, **paths)
        assert caught.value.param == missing
    with pytest.raises(ConfigurationError, match=r"^OCTAVO_INTERNAL_TOKEN: ") as caught:
        security_of(None, internal_token="tökén")
    assert "tök" not in caught.value.message


def test_public_doors_ask_clients_for_certificates_only_if_told(ours: CertificateFiles) -> None:
    paths = {"public_tls_cert": str(ours.cert), "public_tls_key": str(ours.key)}
    one_sided = public_security(load(RouterSettings, paths, {}))
    mutual = public_security(load(RouterSettings, {**paths, "public_tls_ca": str(ours.ca)}, {}))
    anonymous = grpc.ssl_channel_credentials(ours.ca.read_bytes())

    async def call(server: Server) -> grpc.StatusCode:
        async with grpc.aio.secure_channel(server.address, anonymous) as channel:
            return await Stub(channel).ListModels(ASK, timeout=TIMEOUT_S).code()

    async def is_let_in(server: Server) -> None:
        assert await call(server) is grpc.StatusCode.OK

    async def is_refused(server: Server) -> None:
        assert await call(server) is grpc.StatusCode.UNAVAILABLE

    run(one_sided, is_let_in)
    run(mutual, is_refused)


def test_no_token_shows_in_the_texts_of_a_security() -> None:
    assert "word" not in repr(security_of(None, internal_token="word"))
