"""HTTP/2 by hand: a client of a gRPC server that does what gRPC's own clients cannot be made to do."""

from __future__ import annotations

import asyncio
import struct
from dataclasses import dataclass

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
ACK = END_STREAM = 1
END_HEADERS = 4
MAX_CONCURRENT_STREAMS = 3


@dataclass(frozen=True)
class Frame:
    kind: int
    flags: int
    stream: int
    payload: bytes


class Http2Connection:
    """One connection. It acknowledges settings, and pings only if `polite`. Use with `async with`.

    Attributes:
        settings: of the server, by number. pongs: pings that the server has acknowledged. pinged: that it has sent.
        goaway: payload of its GOAWAY; None if there was none. ended: the server has closed the connection.
    """

    def __init__(self, address: str, *, polite: bool = True) -> None:
        self._host, _, port = address.rpartition(":")
        self._port = int(port)
        self._polite = polite
        self.settings: dict[int, int] = {}
        self.pongs = self.pinged = 0
        self.goaway: bytes | None = None
        self.ended = False
        self.frames: list[Frame] = []
        self._ready = asyncio.Event()

    async def __aenter__(self) -> Http2Connection:
        self._reader, self._writer = await asyncio.open_connection(self._host, self._port)
        self._writer.write(PREFACE)
        self.send(SETTINGS)
        self._task = asyncio.create_task(self._read())
        await asyncio.wait_for(self._ready.wait(), 10.0)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._writer.close()

    def send(self, kind: int, flags: int = 0, stream: int = 0, payload: bytes = b"") -> None:
        self._writer.write(struct.pack("!I", len(payload))[1:] + struct.pack("!BBI", kind, flags, stream) + payload)

    def ping(self) -> None:
        self.send(PING, payload=b"12345678")

    def call(self, stream: int, method: str, message: bytes) -> None:
        """Begin a call with one message. `stream`: an odd number, above those before it."""
        headers = {
            ":method": "POST",
            ":scheme": "http",
            ":path": method,
            ":authority": "test",
            "content-type": "application/grpc",
            "te": "trailers",
        }
        # Literals without indexing, neither name nor value compressed.
        block = b"".join(b"\x00" + _text(name) + _text(value) for name, value in headers.items())
        self.send(HEADERS, END_HEADERS, stream, block)
        self.send(DATA, END_STREAM, stream, struct.pack("!BI", 0, len(message)) + message)

    async def _read(self) -> None:
        try:
            while True:
                head = await self._reader.readexactly(9)
                length = int.from_bytes(head[:3])
                kind, flags, stream = struct.unpack("!BBI", head[3:])
                self._take(Frame(kind, flags, stream, await self._reader.readexactly(length)))
        except (asyncio.IncompleteReadError, ConnectionError):
            self.ended = True

    def _take(self, frame: Frame) -> None:
        self.frames.append(frame)
        if frame.kind == SETTINGS and not frame.flags & ACK:
            self.settings |= dict(struct.iter_unpack("!HI", frame.payload))
            self.send(SETTINGS, ACK)
            self._ready.set()
        elif frame.kind == PING and frame.flags & ACK:
            self.pongs += 1
        elif frame.kind == PING:
            self.pinged += 1
            if self._polite:
                self.send(PING, ACK, payload=frame.payload)
        elif frame.kind == GOAWAY:
            self.goaway = frame.payload


def _text(text: str) -> bytes:
    assert len(text) < 127
    return bytes([len(text)]) + text.encode()
