"""Push streams over gRPC: the sender is the client, the receiver's worker hosts the server.

Both ends are synchronous and run on threads, since an event loop would hold the interpreter where the engine needs
it. The transport moves messages and knows nothing of tickets.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import grpc

from kv_transfer.manifest import Manifest, TicketRef
from kv_transfer.messages import (
    Abort,
    Hello,
    LaneClose,
    LaneFrame,
    LaneOpen,
    Piece,
    PushMessage,
    PushReply,
)
from kv_transfer.threads import pin_thread
from kv_transfer.transport import LinkListener, PushStream, StreamListener
from kv_transfer.transports.grpc_options import CHANNEL_OPTIONS
from kv_transfer.transports.wire import message_from_proto, message_to_proto, reply_from_proto, reply_to_proto
from pdcore.errors import FrameError
from protos import kv_pb2, kv_pb2_grpc
from security.internal import PLAIN, Internal

_WAIT_S = 1.0  # how long a thread sleeps before it looks whether its stream is gone


class _Frame:
    """A frame in the outbox; cut into pieces only when the wire takes them."""

    __slots__ = ("attempt", "data", "index", "ref")

    def __init__(self, ref: TicketRef, index: int, attempt: int, data: bytes) -> None:
        self.ref, self.index, self.attempt, self.data = ref, index, attempt, data

    def pieces(self, message_bytes: int) -> Iterator[Piece]:
        total = len(self.data)
        # A little more than a message goes as one: a second message for the header's sake would cost a copy.
        step = total if total <= message_bytes + message_bytes // 8 else message_bytes
        for offset in range(0, total, step):
            data = self.data if step == total else self.data[offset : offset + step]
            yield Piece(self.ref, self.index, self.attempt, offset, total, data)


class GrpcPushLink:
    """`PushLink` over one gRPC call.

    Args:
        address: ``host:port`` of the receiver's worker.
        hello: sent first.
        listener: hears replies and the end, from the link's reader thread.
        message_bytes: payload of one message, about.
        cores: affinity of the link's own thread; empty leaves it free.
        internal: how other workers are called.
    """

    def __init__(
        self,
        address: str,
        hello: Hello,
        listener: LinkListener,
        *,
        message_bytes: int,
        cores: tuple[int, ...] = (),
        internal: Internal = PLAIN,
    ) -> None:
        self._listener = listener
        self._message_bytes = message_bytes
        self._cores = cores
        self._changed = threading.Condition()
        self._outbox: deque[_Frame | tuple[PushMessage, Callable[[], None] | None]] = deque()
        self._outbox.append((hello, None))
        self._finishing = False  # no more posts; the outbox is sent, then the stream half-closed
        self._gone = False
        self._channel = internal.channel(address, CHANNEL_OPTIONS)
        self._call = kv_pb2_grpc.KvStub(self._channel).Push(self._requests(), metadata=internal.metadata)
        self._reader = threading.Thread(target=self._read, name=f"kv-link {address}", daemon=True)
        self._reader.start()

    def post_frame(self, ref: TicketRef, frame_index: int, attempt: int, frame: bytes) -> None:
        self._post(_Frame(ref, frame_index, attempt, frame))

    def post_manifest(self, manifest: Manifest, on_sent: Callable[[], None]) -> None:
        self._post((manifest, on_sent))

    def post_abort(self, ref: TicketRef, reason: str) -> None:
        self._post((Abort(ref, reason), None))

    def post_lane(self, message: LaneOpen | LaneFrame | LaneClose) -> None:
        self._post((message, None))

    def cancel(self) -> None:
        self._call.cancel()

    def finish(self) -> None:
        with self._changed:
            self._finishing = True
            self._changed.notify_all()

    def close(self, timeout_s: float) -> None:
        self.finish()
        self._reader.join(timeout_s / 2)
        if self._reader.is_alive():
            self._call.cancel()
            self._reader.join(timeout_s / 2)

    def _post(self, item: _Frame | tuple[PushMessage, Callable[[], None] | None]) -> None:
        with self._changed:
            if self._gone or self._finishing:
                return
            self._outbox.append(item)
            self._changed.notify_all()

    def _requests(self) -> Iterator[kv_pb2.PushMessage]:
        """Runs on a thread of gRPC's, which asks for the next message when it has taken the last one."""
        while True:
            with self._changed:
                while not self._outbox and not self._gone and not self._finishing:
                    self._changed.wait(_WAIT_S)
                if self._gone or not self._outbox:
                    return
                item = self._outbox.popleft()
            if isinstance(item, _Frame):
                for piece in item.pieces(self._message_bytes):
                    yield message_to_proto(piece)
            else:
                message, on_sent = item
                yield message_to_proto(message)
                if on_sent is not None:
                    on_sent()

    def _read(self) -> None:
        pin_thread(self._cores)
        reason, refused = "the receiver ended the stream", False
        try:
            for reply in self._call:
                self._listener.on_reply(reply_from_proto(reply))
        except grpc.RpcError as error:
            reason = f"{error.code().name}: {error.details()}"
            refused = error.code() in (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.UNAUTHENTICATED)
        except FrameError as error:
            reason = str(error)
        finally:
            with self._changed:
                self._gone = True
                self._outbox.clear()
                self._changed.notify_all()
            self._call.cancel()
            self._channel.close()
            self._listener.on_closed(reason, refused)


class _GrpcPushStream:
    """`PushStream` over one call that a server received."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._replies: deque[PushReply] = deque()
        self._over = False
        self.refusal: str | None = None

    def reply(self, reply: PushReply) -> None:
        with self._changed:
            if not self._over:
                self._replies.append(reply)
                self._changed.notify_all()

    def refuse(self, reason: str) -> None:
        with self._changed:
            if self.refusal is None and not self._over:
                self.refusal = reason
            self._over = True
            self._changed.notify_all()

    def end(self) -> None:
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def outgoing(self) -> Iterator[kv_pb2.PushReply]:
        """Replies as they come; ends with the stream, behind the last of them."""
        while True:
            with self._changed:
                while not self._replies and not self._over:
                    self._changed.wait(_WAIT_S)
                if not self._replies:
                    return
                replies = list(self._replies)
                self._replies.clear()
            for reply in replies:
                yield reply_to_proto(reply)


class GrpcPushServicer(kv_pb2_grpc.KvServicer):
    """Hands every stream that comes in to a receiver.

    Each stream holds one thread of the server's pool for as long as it lives, and one of its own that reads.

    Args:
        accept: makes the listener of a new stream.
        cores: affinity of the reading threads; empty leaves them free.
    """

    def __init__(self, accept: Callable[[PushStream], StreamListener], cores: tuple[int, ...] = ()) -> None:
        self._accept = accept
        self._cores = cores

    def Push(self, request_iterator: Iterator[kv_pb2.PushMessage], context: Any) -> Iterator[kv_pb2.PushReply]:
        stream = _GrpcPushStream()
        if not context.add_callback(stream.end):  # called when the call is over, whatever ended it
            return
        reader = threading.Thread(
            target=self._read,
            args=(request_iterator, stream, self._accept(stream)),
            name=f"kv-stream {context.peer()}",
            daemon=True,
        )
        reader.start()
        yield from stream.outgoing()
        if stream.refusal is not None:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, stream.refusal)

    def _read(
        self, request_iterator: Iterator[kv_pb2.PushMessage], stream: _GrpcPushStream, listener: StreamListener
    ) -> None:
        pin_thread(self._cores)
        reason = "the sender ended the stream"
        try:
            for message in request_iterator:
                listener.on_message(message_from_proto(message))
        except grpc.RpcError:
            reason = "the stream to the sender broke"
        except FrameError as error:
            reason = str(error)
            stream.refuse(reason)
        finally:
            listener.on_closed(reason)
            stream.end()
