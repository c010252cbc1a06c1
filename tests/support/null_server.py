"""A `NullCluster` as a process of its own, for clients that are other programs.

As a program (``FOLDER JSON``) it prints one line, READY and its addresses, and ends with its standard input.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pdcore.security import PublicTls
from tests.support.processes import REPOSITORY

STEP_S, TLS = "step_s", "tls"


class NullServer:
    """Use with `with`. `address` and `url`: of the router, by gRPC and by HTTP.

    Args:
        model: folder with a tokenizer.
        step_s: of the workers, seconds. tls: of the public end. options: of RouterConfig, as far as JSON
            can say them.
    """

    def __init__(self, model: Path, *, step_s: float = 0.0, tls: PublicTls | None = None, **options: object) -> None:
        self._scheme = "http" if tls is None else "https"
        files = None if tls is None else asdict(tls)
        self._arguments = [str(model), json.dumps({STEP_S: step_s, TLS: files, "http_port": 0, **options})]
        self.addresses: dict[str, str] = {}

    @property
    def address(self) -> str:
        return self.addresses["grpc"]

    @property
    def url(self) -> str:
        return f"{self._scheme}://{self.addresses['http']}"

    def __enter__(self) -> NullServer:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.null_server", *self._arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=REPOSITORY,
        )
        assert self._process.stdout is not None
        bound = threading.Timer(60.0, self._process.kill)
        bound.start()
        line = self._process.stdout.readline()
        bound.cancel()
        if not line.startswith("READY "):
            self.__exit__()
            raise AssertionError("the null cluster did not start; its standard error says why")
        self.addresses = json.loads(line.removeprefix("READY "))
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(20.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10.0)
        self._process.stdout.close()


async def _serve(model: Path, options: dict[str, Any]) -> None:
    from tests.support.null_cluster import NullCluster, pair

    files = options.pop(TLS)
    tls = None if files is None else PublicTls(**files)
    workers = pair(step_s=options.pop(STEP_S))
    async with NullCluster(model, workers, tls=tls, **options) as cluster:
        addresses = {"grpc": cluster.router.address, "http": cluster.router.http_address}
        print("READY " + json.dumps(addresses), flush=True)
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(_serve(Path(sys.argv[1]), json.loads(sys.argv[2])))
