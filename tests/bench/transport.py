"""CPU per SSE frame of the HTTP transports that the router could stand on.

What it measures: N streams open on loopback, every `--step-ms` one frame goes to each of them
(a decode step). The server's CPU seconds (user + system, all threads, the kernel's loopback
work included) divided by the frames written. Nothing is rendered: the frame is a constant, so
this is the floor under the router's budget of 35 us a frame (aim 20).

Two ways of delivery, since the wake-up costs as much as some transports:
  task    each stream is a coroutine that sleeps on its own future and writes when woken
  direct  the dispatcher writes to every stream inside one callback, no task wakes
Direct under uvicorn drives ASGI's `send` coroutine by hand: it ends without suspending unless
the client reads too slowly. `starlette` is a StreamingResponse over an async generator, under
uvicorn.

Run: python tests/bench/transport.py [--streams 200] [--frames 200] [--repeats 3] [--record]
"""

import argparse
import asyncio
import json
import os
import platform
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "transport_cpu.jsonl"
FRAME = (
    b'data: {"id":"chatcmpl-0123456789abcdef0123456789abcdef","object":"chat.completion.chunk",'
    b'"created":1760000000,"model":"HuggingFaceTB/SmolLM2-135M-Instruct","choices":[{"index":0,'
    b'"delta":{"content":" the"},"logprobs":null,"finish_reason":null}]}\n\n'
)
VARIANTS = (
    "uvicorn-task",
    "uvicorn-direct",
    "starlette-task",
    "granian-task",
    "raw-task",
    "raw-direct",
)
_HEADERS = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]
_RAW_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncache-control: no-cache\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
_END = "event: end\ndata: "
Write = Callable[[bytes, bool], None]


# --- server -----------------------------------------------------------------------------------


class Ticker:
    """Waits for N streams, then hands each one a frame every step; the last frame says the CPU."""

    def __init__(self) -> None:
        self.num_streams = int(os.environ["BENCH_STREAMS"])
        self.num_frames = int(os.environ["BENCH_FRAMES"])
        self.step_s = float(os.environ["BENCH_STEP_MS"]) / 1e3
        self.writes: list[Write] = []
        self._run: asyncio.Task[None] | None = None

    def add(self, write: Write) -> None:
        self.writes.append(write)
        if len(self.writes) == self.num_streams:
            self._run = asyncio.get_running_loop().create_task(self.run())

    async def run(self) -> None:
        await asyncio.sleep(0.3)  # headers out, sockets idle
        begin, wall = time.process_time(), time.perf_counter()
        for _ in range(self.num_frames):
            await asyncio.sleep(self.step_s)
            for write in self.writes:
                write(FRAME, False)
        await asyncio.sleep(0.2)
        cpu, wall = time.process_time() - begin, time.perf_counter() - wall - 0.2
        end = f"{_END}{json.dumps({'cpu_s': cpu, 'wall_s': wall})}\n\n".encode()
        for write in self.writes:
            write(end, True)
        self.writes.clear()


class Mailbox:
    """A stream's frames for the coroutine that sends them (the `task` way)."""

    def __init__(self) -> None:
        self.frames: list[tuple[bytes, bool]] = []
        self.waiter: asyncio.Future[None] | None = None

    def put(self, frame: bytes, is_last: bool) -> None:
        self.frames.append((frame, is_last))
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)

    async def get(self) -> tuple[bytes, bool]:
        if not self.frames:
            self.waiter = asyncio.get_running_loop().create_future()
            await self.waiter
            self.waiter = None
        return self.frames.pop(0)


def asgi_app(delivery: str) -> Callable[..., Awaitable[None]]:
    ticker = Ticker()

    async def stream_by_task(send: Any) -> None:
        mailbox = Mailbox()
        ticker.add(mailbox.put)
        is_last = False
        while not is_last:
            frame, is_last = await mailbox.get()
            await send({"type": "http.response.body", "body": frame, "more_body": not is_last})

    async def stream_directly(send: Any) -> None:
        done = asyncio.get_running_loop().create_future()

        def write(frame: bytes, is_last: bool) -> None:
            sending = send({"type": "http.response.body", "body": frame, "more_body": not is_last})
            try:
                sending.send(None)
            except StopIteration:
                if is_last:
                    done.set_result(None)
                return
            raise AssertionError("the client reads too slowly for this benchmark")

        ticker.add(write)
        await done

    async def stream_by_response(scope: Any, receive: Any, send: Any) -> None:
        from starlette.responses import StreamingResponse

        async def frames() -> AsyncIterator[bytes]:
            mailbox = Mailbox()
            ticker.add(mailbox.put)
            is_last = False
            while not is_last:
                frame, is_last = await mailbox.get()
                yield frame

        await StreamingResponse(frames(), media_type="text/event-stream")(scope, receive, send)

    if delivery == "response":
        return stream_by_response

    async def app(scope: dict[str, Any], _receive: Any, send: Any) -> None:
        assert scope["type"] == "http"
        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        await (stream_by_task if delivery == "task" else stream_directly)(send)

    return app


class RawProtocol(asyncio.Protocol):
    """Answers any request head with an endless chunked body; no HTTP parser."""

    def __init__(self, ticker: Ticker, delivery: str) -> None:
        self.ticker, self.delivery = ticker, delivery
        self.transport: asyncio.Transport
        self.task: asyncio.Task[None] | None = None

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        del data
        self.transport.write(_RAW_HEAD)
        if self.delivery == "direct":
            self.ticker.add(self.write)
        else:
            self.task = asyncio.get_running_loop().create_task(self.stream())

    def write(self, frame: bytes, is_last: bool) -> None:
        tail = b"\r\n0\r\n\r\n" if is_last else b"\r\n"
        self.transport.write(b"%x\r\n%b%b" % (len(frame), frame, tail))

    async def stream(self) -> None:
        mailbox = Mailbox()
        self.ticker.add(mailbox.put)
        is_last = False
        while not is_last:
            frame, is_last = await mailbox.get()
            self.write(frame, is_last)


def granian_app() -> Callable[..., Awaitable[None]]:
    """Factory that granian imports in its worker process."""
    return asgi_app("task")


def serve(variant: str, port: int) -> None:
    server, delivery = variant.split("-")
    if server in ("uvicorn", "starlette"):
        import uvicorn

        uvicorn.run(
            asgi_app("response" if server == "starlette" else delivery),
            port=port,
            http="httptools",
            loop="uvloop",
            lifespan="off",
            access_log=False,
            log_level="error",
        )
    elif server == "granian":
        from granian.constants import Interfaces, Loops
        from granian.server import Server

        Server(
            "transport:granian_app",
            port=port,
            interface=Interfaces.ASGINL,
            loop=Loops.uvloop,
            workers=1,
            factory=True,
            log_enabled=False,
            working_dir=Path(__file__).parent,
        ).serve()
    else:
        import uvloop

        async def main() -> None:
            ticker = Ticker()
            loop = asyncio.get_running_loop()
            server = await loop.create_server(
                lambda: RawProtocol(ticker, delivery), "127.0.0.1", port
            )
            await server.serve_forever()

        uvloop.run(main())


# --- client -----------------------------------------------------------------------------------


def connect(port: int) -> socket.socket:
    deadline = time.monotonic() + 15
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=1)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def read_streams(port: int, num_streams: int, num_frames: int) -> dict[str, float]:
    """Open the streams, read all, check that every frame came; returns the server's figures."""
    connect(port).close()
    selector = selectors.DefaultSelector()
    received: dict[socket.socket, list[bytes]] = {}
    for _ in range(num_streams):
        client = connect(port)
        client.sendall(b"GET / HTTP/1.1\r\nhost: bench\r\n\r\n")
        client.setblocking(False)
        selector.register(client, selectors.EVENT_READ)
        received[client] = []
    num_open = num_streams
    while num_open:
        events = selector.select(timeout=60)
        assert events, "no frame for a minute"
        for key, _ in events:
            client: Any = key.fileobj
            data = client.recv(1 << 16)
            received[client].append(data)
            if not data or data.endswith(b"0\r\n\r\n"):
                selector.unregister(client)
                client.close()
                num_open -= 1
    selector.close()
    bodies = [b"".join(parts) for parts in received.values()]
    assert all(body.count(FRAME) == num_frames for body in bodies), "frames were lost"
    start = bodies[0].index(_END.encode()) + len(_END)
    return json.loads(bodies[0][start : bodies[0].index(b"\n", start)])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def measure(variant: str, args: argparse.Namespace) -> dict[str, float]:
    port = free_port()
    env = os.environ | {
        "BENCH_STREAMS": str(args.streams),
        "BENCH_FRAMES": str(args.frames),
        "BENCH_STEP_MS": str(args.step_ms),
        "PYTHONPATH": str(Path(__file__).parent),
    }
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [sys.executable, __file__, "--serve", variant, "--port", str(port)],
            env=env,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            figures = read_streams(port, args.streams, args.frames)
        finally:
            os.killpg(process.pid, signal.SIGKILL)  # its own session: granian has children
            process.wait()
    frames = args.streams * args.frames
    return {
        "cpu_us_per_frame": 1e6 * figures["cpu_s"] / frames,
        "frames_per_s": frames / figures["wall_s"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="CPU per SSE frame of HTTP transports")
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--frames", type=int, default=200, help="per stream")
    parser.add_argument("--step-ms", type=float, default=25.0)
    parser.add_argument("--repeats", type=int, default=3, help="the least is reported")
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--record", action="store_true", help=f"append to {RESULTS.name}")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve, args.port)
        return

    table: dict[str, dict[str, float]] = {}
    print(f"{'transport':<16}{'us/frame':>10}{'spread':>16}{'frames/s':>12}")
    for variant in args.variants.split(","):
        runs = [measure(variant, args) for _ in range(args.repeats)]
        costs = sorted(run["cpu_us_per_frame"] for run in runs)
        best = min(runs, key=lambda run: run["cpu_us_per_frame"])
        table[variant] = {name: round(value, 2) for name, value in best.items()}
        spread = f"{costs[0]:.1f}-{costs[-1]:.1f}"
        print(f"{variant:<16}{costs[0]:>10.1f}{spread:>16}{best['frames_per_s']:>12.0f}")
    if args.record:
        record = {
            "benchmark": "transport_cpu",
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "command": f"python tests/bench/transport.py --streams {args.streams} --frames "
            f"{args.frames} --step-ms {args.step_ms} --repeats {args.repeats}",
            "cpu": cpu_name(),
            "num_cpus": os.cpu_count(),
            "versions": {
                "python": platform.python_version(),
                **{name: version(name) for name in ("uvicorn", "uvloop", "httptools", "granian")},
            },
            "frame_bytes": len(FRAME),
            "results": table,
        }
        RESULTS.parent.mkdir(exist_ok=True)
        with RESULTS.open("a") as file:
            file.write(json.dumps(record) + "\n")


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


if __name__ == "__main__":
    main()
