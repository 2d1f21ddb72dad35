"""Processes that do a parent's bidding over pipes, and end with it.

Must not know: what is sent. Entry point: `ClientProcesses`.
"""

import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Self

_END_TIMEOUT_S = 5.0


class ClientProcesses:
    """`num_processes` that run `serve(connection, this process's id)`; in a `with` block."""

    def __init__(self, num_processes: int, serve: Callable[[Connection, int], None]) -> None:
        self.num_processes = num_processes
        self._serve = serve
        self._processes: list[BaseProcess] = []
        self.connections: list[Connection] = []

    def __enter__(self) -> Self:
        context = multiprocessing.get_context("spawn")
        for number in range(self.num_processes):
            here, there = context.Pipe()
            arguments, name = (there, os.getpid()), f"client-{number}"
            process = context.Process(target=self._serve, args=arguments, name=name)
            process.start()
            there.close()
            self._processes.append(process)
            self.connections.append(here)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for connection in self.connections:
            connection.close()
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join(_END_TIMEOUT_S)
            process.kill()
