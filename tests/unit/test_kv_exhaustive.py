"""Every interleaving of two transfers that use one ticket slot and one block, with every fault, explored to the end.

The channel is the set of messages ever sent: each may be delivered at any time, any number of times, or never. That
is loss, duplication, reordering and late arrival at once. Both tickets are for the same block; the second is granted
as soon as the block is free, while anything of the first may still be on its way or half done.

Two cuts keep the product small and lose nothing. Replies to a sender whose outcome is settled are dropped: it ignores
them. And when the second ticket is granted, everything that the first sender could still send counts as sent: the
receiver then meets every late message in every state, while what else the first sender goes through on its own is
explored without the second ticket.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from kv_transfer.head_ranges import HeadRange
from kv_transfer.manifest import FrameSpan, Manifest, frames_digest
from kv_transfer.planning import Computing
from kv_transfer.receiving import (
    AckFrame,
    CommitTicket,
    ConfirmCommit,
    DecodeFrame,
    RefuseTicket,
    RejectFrame,
    ReleaseTicket,
    ScatterFrame,
    Source,
)
from kv_transfer.session import (
    AbortSend,
    Acked,
    CommitConfirmed,
    Disconnected,
    Finish,
    FrameDropped,
    FrameSent,
    LayersDone,
    Nacked,
    Refused,
    SendAbort,
    SendDone,
    SendManifest,
    SendPhase,
    SendPlan,
    SendSession,
    Tick,
)
from kv_transfer.tickets import TicketTable
from pdcore.types import RequestKey

FRAMES = 2  # one layer each, one token
FIRST_TOKEN = 7
LEASE = (1.0, 2.0)  # of the first and the second ticket, so that the first can expire alone
RETRIES = (1, 0)  # of a frame; a second sender that retries, too, doubles the states and adds nothing
FOREVER = 1e9
HEADS = HeadRange(0, 1)
SPANS = tuple(FrameSpan(layer, 1, 0, 1) for layer in range(FRAMES))


def key_of(sender: int) -> RequestKey:
    return RequestKey(f"request-{sender}", 0)


def checksums_of(sender: int, index: int) -> tuple[int, ...]:
    return (100 * sender + index, 100 * sender + 50 + index)


class State(NamedTuple):
    """One state of the whole. Sets are bit masks over interned messages and jobs.

    Attributes:
        table, senders: numbers of interned machine states; -1 is a sender that is not open yet.
        to_receiver, to_sender: messages ever sent.
        decoding, scattering, committing: jobs in flight on the receiver's threads.
        owner: the block's: -1 free, 0 or 1 that sender's ticket, 2 or 3 the sequence made of it.
        content: which sender's frame each layer of the block holds; -1 is nothing.
        released, committed, done: masks over senders.
    """

    table: int
    senders: tuple[int, int]
    to_receiver: int
    to_sender: int
    decoding: int
    scattering: int
    committing: int
    owner: int
    content: tuple[int, ...]
    released: int
    committed: int
    done: int


class Interner:
    """Numbers for hashable values, and back."""

    def __init__(self) -> None:
        self.numbers: dict[Any, int] = {}
        self.values: list[Any] = []
        self.sets: dict[int, tuple[Any, ...]] = {}  # members of each mask met

    def number(self, key: Any, value: Any = None) -> int:
        found = self.numbers.get(key)
        if found is None:
            found = self.numbers[key] = len(self.values)
            self.values.append(key if value is None else value)
        return found


class World:
    """The transition relation. Machine transitions are memoised: one event in one state is computed once."""

    def __init__(self) -> None:
        self.tables, self.sessions = Interner(), Interner()
        self.messages, self.jobs = Interner(), Interner()
        self.table_moves: dict[Any, tuple[int, tuple[Any, ...]]] = {}
        self.sender_moves: dict[Any, tuple[int, tuple[Any, ...]]] = {}
        self.refs: dict[int, Any] = {}
        self.outcomes: set[tuple[int, str]] = set()

    # --- machines ---------------------------------------------------------------------------------------------

    def intern_table(self, table: TicketTable) -> int:
        table.check_integrity()
        return self.tables.number(table.snapshot(), table)

    def intern_sender(self, session: SendSession) -> int:
        return self.sessions.number((session.plan.ref, session.snapshot()), session)

    def move_table(self, number: int, name: str, *args: Any, **kwargs: Any) -> tuple[int, tuple[Any, ...]]:
        memo = (number, name, args, tuple(kwargs.items()))
        if memo not in self.table_moves:
            table = self.tables.values[number].copy()
            effects = getattr(table, name)(*args, **kwargs)
            self.table_moves[memo] = (self.intern_table(table), effects)
        return self.table_moves[memo]

    def move_sender(self, number: int, event: Any, now: float = 0.0) -> tuple[int, tuple[Any, ...]]:
        memo = (number, type(event), event, now)
        if memo not in self.sender_moves:
            session = self.sessions.values[number].copy()
            effects = session.on_event(event, now)
            self.sender_moves[memo] = (self.intern_sender(session), effects)
        return self.sender_moves[memo]

    def take(self, number: int) -> tuple[int, int] | None:
        """Let the sender take its next frame: (new state, frame index)."""
        memo = (number, "take", None, 0.0)
        if memo not in self.sender_moves:
            session = self.sessions.values[number].copy()
            task = session.take_frame()
            self.sender_moves[memo] = (self.intern_sender(session), () if task is None else (task.frame_index,))
        after, taken = self.sender_moves[memo]
        return (after, taken[0]) if taken else None

    # --- effects ----------------------------------------------------------------------------------------------

    def with_sender(self, state: State, sender: int, moved: tuple[int, tuple[Any, ...]]) -> State:
        number, effects = moved
        senders = (number, state.senders[1]) if sender == 0 else (state.senders[0], number)
        state = state._replace(senders=senders)
        for effect in effects:
            match effect:
                case SendManifest(manifest):
                    state = self.send(state, ("manifest", sender, manifest))
                case SendAbort(_):
                    state = self.send(state, ("abort", sender, 0))
                case SendDone(failure):
                    assert not state.done >> sender & 1, "a send ended twice"
                    assert not self.sessions.values[number].gathering, "a send ended with a gather in flight"
                    state = state._replace(done=state.done | 1 << sender)
                    self.outcomes.add((sender, failure.kind.value if failure else "committed"))
                    if failure is None:
                        assert state.committed >> sender & 1, "the sender believes in a commit that never was"
        if not self.sessions.values[number].active:
            # Nothing that a closing sender hears makes a difference any more: drop it, for fewer states.
            state = self.deafen(state, sender)
        return state

    def deafen(self, state: State, sender: int) -> State:
        """Lose every reply to `sender`."""
        if not state.to_sender:
            return state
        heard = self.members(state.to_sender, self.messages)
        keep = sum(1 << self.messages.numbers[message] for message in heard if message[1] != sender)
        return state._replace(to_sender=keep)

    def send(self, state: State, message: tuple[Any, ...]) -> State:
        return state._replace(to_receiver=state.to_receiver | 1 << self.messages.number(message))

    def reply(self, state: State, message: tuple[Any, ...]) -> State:
        if not self.sessions.values[state.senders[message[1]]].active:
            return state
        bit = 1 << self.messages.number(message)
        return state if state.to_sender & bit else state._replace(to_sender=state.to_sender | bit)

    def job(self, sender: int, index: int) -> int:
        return 1 << self.jobs.number((sender, index))

    def with_table(
        self, state: State, moved: tuple[int, tuple[Any, ...]], sender: int = -1, index: int = -1
    ) -> State:
        """Carry out the effects of a table transition; `sender` and `index` name the frame that it spoke of."""
        number, effects = moved
        if number != state.table:
            state = state._replace(table=number)
        for effect in effects:
            match effect:
                case DecodeFrame():
                    state = state._replace(decoding=state.decoding | self.job(sender, index))
                case ScatterFrame():
                    assert state.owner == sender, "a scatter into a block that the ticket does not own"
                    assert not state.scattering & self.job(sender, index), "one frame is scattered twice at once"
                    state = state._replace(scattering=state.scattering | self.job(sender, index))
                case AckFrame():
                    state = self.reply(state, ("ack", sender, index))
                case RejectFrame(retryable, _):
                    state = self.reply(state, ("nack", sender, (index, retryable)))
                case CommitTicket(ref, _, first_tokens, _):
                    which = self.sender_of(ref)
                    assert state.owner == which
                    assert state.content == (which,) * FRAMES, "a commit without all of the right data"
                    assert not self.in_flight(state.scattering, which), "a commit with a scatter in flight"
                    assert first_tokens == (FIRST_TOKEN,)
                    state = state._replace(committing=state.committing | 1 << which)
                case ConfirmCommit(_, ref):
                    which = self.sender_of(ref)
                    assert state.committed >> which & 1
                    state = self.reply(state, ("committed", which, 0))
                case RefuseTicket(_, ref, _):
                    state = self.reply(state, ("refused", self.sender_of(ref), 0))
                case ReleaseTicket(ref, _, _, _):
                    which = self.sender_of(ref)
                    assert state.owner == which, "a release of blocks that the ticket does not own"
                    assert not (state.released | state.committed) >> which & 1, "a ticket ended twice"
                    assert not self.in_flight(state.scattering, which), "a release with a scatter in flight"
                    state = state._replace(owner=-1, released=state.released | 1 << which)
        return state

    def sender_of(self, ref: Any) -> int:
        """Whose ticket it is: generations are granted in the order of the senders."""
        return int(ref.generation) - 1

    def in_flight(self, mask: int, sender: int) -> bool:
        return any(job[0] == sender for job in self.members(mask, self.jobs))

    def members(self, mask: int, interner: Interner) -> tuple[Any, ...]:
        found = interner.sets.get(mask)
        if found is None:
            values = interner.values
            found = tuple(values[number] for number in range(mask.bit_length()) if mask >> number & 1)
            interner.sets[mask] = found
        return found

    # --- actions ----------------------------------------------------------------------------------------------

    def start(self) -> State:
        table = self.intern_table(TicketTable())
        return self.grant(State(table, (-1, -1), 0, 0, 0, 0, 0, -1, (-1,) * FRAMES, 0, 0, 0), 0)

    def grant(self, state: State, sender: int) -> State:
        table = self.tables.values[state.table].copy()
        ref = table.grant(
            key=key_of(sender),
            router_id="router",
            num_layers=FRAMES,
            heads=HEADS,
            token_start=0,
            token_end=1,
            lease_s=LEASE[sender],
            now=0.0,
        )
        assert ref == (0, sender + 1), "both tickets use the same slot"
        self.refs[sender] = ref
        plan = SendPlan(
            key=key_of(sender),
            ref=ref,
            num_layers=FRAMES,
            token_start=0,
            token_end=1,
            frame_tokens=1,
            frame_bytes=1,
            layer_token_bytes=1,
            max_frame_retries=RETRIES[sender],
            timeout_s=1.0,
        )
        session = SendSession(plan)
        session.on_event(Computing(0, 1, 1), 0.0)
        number = self.intern_sender(session)
        senders = (number, state.senders[1]) if sender == 0 else (state.senders[0], number)
        # What the block held before is of no interest: it is as if uninitialised.
        table_number = self.intern_table(table)
        state = state._replace(table=table_number, senders=senders, owner=sender, content=(-1,) * FRAMES)
        return state if sender == 0 else self.let_go(state, 0)

    def let_go(self, state: State, sender: int) -> State:
        """Everything that `sender` might still send is sent, and it is over."""
        plan = self.sessions.values[state.senders[sender]].plan
        for index in range(FRAMES):
            state = self.send(state, ("frame", sender, index))
        checksums = [checksums_of(sender, index) for index in range(FRAMES)]
        manifest = Manifest(plan.ref, plan.key, plan.token_end, FRAMES, (FIRST_TOKEN,), frames_digest(checksums))
        state = self.send(self.send(state, ("manifest", sender, manifest)), ("abort", sender, 0))
        over = SendSession(plan)
        over.on_event(AbortSend("over"), 0.0)
        number = self.intern_sender(over)
        senders = (number, state.senders[1]) if sender == 0 else (state.senders[0], number)
        return self.deafen(state._replace(senders=senders, done=state.done | 1 << sender), sender)

    def successors(self, state: State) -> Iterator[State]:
        for sender in (0, 1):
            if state.senders[sender] >= 0:
                yield from self.sender_actions(state, sender)
                yield from self.owner_actions(state, sender)
        if state.senders[1] < 0 and state.owner == -1:
            yield self.grant(state, 1)
        for kind, sender, what in self.members(state.to_receiver, self.messages):
            yield self.deliver(state, kind, sender, what)
        for kind, sender, what in self.members(state.to_sender, self.messages):
            moved = self.move_sender(state.senders[sender], self.reply_event(kind, what))
            if moved[0] != state.senders[sender]:
                yield self.with_sender(state, sender, moved)
        yield from self.receiver_threads(state)
        for now in LEASE:
            yield self.with_table(state, self.move_table(state.table, "tick", now))
        if state.owner in (2, 3):  # the sequence runs to its end
            yield state._replace(owner=-1)

    def sender_actions(self, state: State, sender: int) -> Iterator[State]:
        number = state.senders[sender]
        session = self.sessions.values[number]
        if session.phase is SendPhase.DONE:
            return
        taken = self.take(number)
        if taken is not None:
            yield self.with_sender(state, sender, (taken[0], ()))
        for index in session.gathering:
            sent = FrameSent(index, checksums_of(sender, index), 1)
            if session.active:
                yield self.with_sender(
                    self.send(state, ("frame", sender, index)), sender, self.move_sender(number, sent)
                )
                yield self.with_sender(state, sender, self.move_sender(number, FrameDropped(index, "cannot gather")))
            else:
                yield self.with_sender(state, sender, self.move_sender(number, FrameDropped(index, "")))
        if not session.active:
            return
        for event in (LayersDone(1, 1), Finish((FIRST_TOKEN,)), AbortSend("x"), Disconnected("x")):
            yield self.with_sender(state, sender, self.move_sender(number, event))
        yield self.with_sender(state, sender, self.move_sender(number, Tick(), FOREVER))

    def owner_actions(self, state: State, sender: int) -> Iterator[State]:
        key = key_of(sender)
        yield self.with_table(state, self.move_table(state.table, "release", key, "released"))
        yield self.with_table(state, self.move_table(state.table, "release", key, "revoked", failed=True))
        yield self.with_table(state, self.move_table(state.table, "stream_closed", sender, "stream closed"))

    def deliver(self, state: State, kind: str, sender: int, what: Any) -> State:
        ref = self.refs[sender]
        match kind:
            case "frame":
                moved = self.move_table(
                    state.table,
                    "frame_offered",
                    ref,
                    what,
                    source=Source(sender, HEADS),
                    wire_bytes=1,
                    first_byte_at=0.0,
                    now=0.0,
                )
                return self.with_table(state, moved, sender, what)
            case "manifest":
                return self.with_table(
                    state, self.move_table(state.table, "manifest_arrived", what, Source(sender, HEADS), 0.0)
                )
            case _:
                return self.with_table(
                    state, self.move_table(state.table, "sender_aborted", ref, Source(sender, HEADS), "x")
                )

    @staticmethod
    def reply_event(kind: str, what: Any) -> Any:
        match kind:
            case "ack":
                return Acked(what)
            case "nack":
                return Nacked(what[0], what[1], "x")
            case "committed":
                return CommitConfirmed()
            case _:
                return Refused("x")

    def receiver_threads(self, state: State) -> Iterator[State]:
        for sender, index in self.members(state.decoding, self.jobs):
            after = state._replace(decoding=state.decoding & ~self.job(sender, index))
            ref = self.refs[sender]
            verified = self.move_table(
                state.table,
                "frame_verified",
                ref,
                sender,
                index,
                span=SPANS[index],
                checksums=checksums_of(sender, index),
                codec_bytes=(("raw", 2),),
            )
            yield self.with_table(after, verified, sender, index)
            for retryable in (True, False):
                bad = self.move_table(state.table, "frame_bad", ref, index, retryable, "bad")
                yield self.with_table(after, bad, sender, index)
        for sender, index in self.members(state.scattering, self.jobs):
            assert state.owner == sender, "a scatter is in flight into a block that changed hands"
            after = state._replace(scattering=state.scattering & ~self.job(sender, index))
            content = tuple(sender if layer == index else held for layer, held in enumerate(state.content))
            scattered = self.move_table(state.table, "frame_scattered", self.refs[sender], sender, index)
            yield self.with_table(after._replace(content=content), scattered, sender, index)
            failed = self.move_table(
                state.table, "scatter_failed", self.refs[sender], sender, index, "cannot scatter"
            )
            yield self.with_table(after, failed, sender, index)
        for sender in (0, 1):
            if state.committing >> sender & 1:
                after = state._replace(committing=state.committing & ~(1 << sender))
                taken = self.move_table(state.table, "commit_done", self.refs[sender], True)
                yield self.with_table(
                    after._replace(owner=sender + 2, committed=state.committed | 1 << sender), taken
                )
                yield self.with_table(after, self.move_table(state.table, "commit_done", self.refs[sender], False))

    # --- no state is stuck ------------------------------------------------------------------------------------

    def run_down(self, state: State) -> State:
        """What happens without any further message: threads finish their work, then time passes."""
        for sender in (0, 1):
            number = state.senders[sender]
            if number < 0:
                continue
            state = self.with_sender(state, sender, self.move_sender(number, Finish((FIRST_TOKEN,))))
            while (taken := self.take(state.senders[sender])) is not None:
                state = self.with_sender(state, sender, (taken[0], ()))
            for index in sorted(self.sessions.values[state.senders[sender]].gathering):
                sent = FrameSent(index, checksums_of(sender, index), 1)
                state = self.with_sender(state, sender, self.move_sender(state.senders[sender], sent))
            state = self.with_sender(state, sender, self.move_sender(state.senders[sender], Tick(), FOREVER))
        while state.decoding or state.scattering or state.committing:
            state = next(self.receiver_threads(state))
        return self.with_table(state, self.move_table(state.table, "tick", FOREVER))


def explore(world: World, visit: Callable[[State], None]) -> int:
    """Breadth first over everything reachable; returns the number of states."""
    start = world.start()
    seen = {start}
    queue = deque([start])
    while queue:
        state = queue.popleft()
        visit(state)
        for after in world.successors(state):
            if after not in seen:
                seen.add(after)
                queue.append(after)
    return len(seen)


def test_every_interleaving(tell: Callable[[str], None]) -> None:
    world = World()

    def visit(state: State) -> None:
        end = world.run_down(state)
        open_senders = sum(number >= 0 for number in state.senders)
        assert end.done == (1 << open_senders) - 1, "a sender never ends"
        assert world.tables.values[end.table].open_tickets == 0, "a ticket never ends"
        assert end.released ^ end.committed == (1 << open_senders) - 1, "a ticket has not exactly one end"

    states = explore(world, visit)
    tell(
        f"explored {states} states, {len(world.tables.values)} of the table, {len(world.sessions.values)} of a sender"
    )
    expected = {"committed", "aborted", "refused", "frame", "disconnected", "timeout"}
    assert world.outcomes == {(sender, outcome) for sender in (0, 1) for outcome in expected}
