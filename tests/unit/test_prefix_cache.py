"""Names of blocks, and the prefix cache under the block manager against a model that knows tokens only."""

from __future__ import annotations

import hashlib
import struct
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.blocks import BlockManager, Owner, OwnerKind
from engine.prefix_cache import CacheEvent, CacheEventLog
from pdcore.hashing import HASH_BYTES, block_hashes, chain_root
from pdcore.placement import run_rest_here
from pdcore.types import RequestKey

Path = tuple[int, ...]

GOLDEN_ROOT = "fd3933062ebab142d2739431e8ace337"
GOLDEN_NAMES = ["510d6211467603449447a574bab5f1fe", "5ebcefb910bb69bd7742f9158eed61d4"]

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=70)


class TestNames:
    def test_are_the_documented_hash(self) -> None:
        root, tokens = chain_root("model", salt="s"), [1, 2**32 - 1, 3, 4, 5]
        fields = b"".join(struct.pack("<Q", len(text)) + text for text in (b"model", b"s"))
        assert root == hashlib.blake2b(fields, digest_size=16, person=b"pdserve.root").digest()
        first = hashlib.blake2b(root + struct.pack("<2I", 1, 2**32 - 1), digest_size=16).digest()
        second = hashlib.blake2b(first + struct.pack("<2I", 3, 4), digest_size=16).digest()
        assert block_hashes(root, tokens, 2) == [first, second]
        assert len(first) == HASH_BYTES

    def test_never_change(self) -> None:
        """Workers of different versions meet in one cluster, and routers compare what they say."""
        assert chain_root("model", "salt").hex() == GOLDEN_ROOT
        assert [name.hex() for name in block_hashes(chain_root("model"), range(40), 16)] == GOLDEN_NAMES

    def test_are_equal_in_another_process(self) -> None:
        code = "from pdcore.hashing import *; print(block_hashes(chain_root('m', salt='x'), range(16), 8)[1].hex())"
        there = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
        assert there.stdout.strip() == block_hashes(chain_root("m", salt="x"), range(16), 8)[1].hex()

    @given(tokens=TOKENS, size=st.sampled_from([1, 8, 16]), cut=st.integers(0, 5))
    def test_piece_by_piece_is_at_once(self, tokens: list[int], size: int, cut: int) -> None:
        root = chain_root("m")
        whole = block_hashes(root, tokens, size)
        front = block_hashes(root, tokens[: cut * size], size)
        rest = block_hashes(front[-1] if front else root, tokens[len(front) * size :], size)
        assert front + rest == whole
        assert len(whole) == len(tokens) // size

    @given(one=TOKENS, two=TOKENS, size=st.sampled_from([1, 8]))
    def test_agree_exactly_as_far_as_the_tokens_do(self, one: list[int], two: list[int], size: int) -> None:
        root = chain_root("m")
        for i, (a, b) in enumerate(zip(block_hashes(root, one, size), block_hashes(root, two, size), strict=False)):
            end = (i + 1) * size
            assert (a == b) == (one[:end] == two[:end])

    def test_differ_by_model_and_salt(self) -> None:
        roots = [chain_root(*fields) for fields in (("ab",), ("a", "b"), ("", "ab"), ("b", "a"), ("a",))]
        assert len({block_hashes(root, [1, 2], 2)[0] for root in roots}) == 5

    def test_a_root_is_not_the_name_of_a_block(self) -> None:
        fields = struct.pack("<Q", 0) * 2
        assert block_hashes(fields, [], 1) == []
        assert chain_root("") != hashlib.blake2b(fields, digest_size=16).digest()


class TestEvents:
    def test_are_numbered_and_told_to_whoever_asks_from_where_he_is(self) -> None:
        log = CacheEventLog(8)
        assert log.since(0) == (0, (), False)
        log.append(CacheEvent(True, b"a"))
        log.append(CacheEvent(False, b"a"))
        assert log.since(0) == (0, (CacheEvent(True, b"a"), CacheEvent(False, b"a")), False)
        assert log.since(1) == (1, (CacheEvent(False, b"a"),), False)
        assert log.since(2) == (2, (), False)
        assert log.next == 2

    def test_who_is_too_far_behind_is_told_and_memory_is_bounded(self) -> None:
        log = CacheEventLog(3)
        for number in range(10):
            log.append(CacheEvent(True, bytes([number])))
        first, kept, gap = log.since(6)
        assert (first, gap) == (7, True)
        assert [event.block_hash for event in kept] == [b"\7", b"\10", b"\11"]
        assert log.since(7)[::2] == (7, False)


class SharingMachine(RuleBasedStateMachine):
    """Blocks of one token. An owner takes what is cached of its tokens and writes the rest, as an engine would.

    `memory` is what was last written to each block; a path of tokens stands for the KV of its last one.
    """

    @initialize(num_blocks=st.integers(5, 12))
    def build(self, num_blocks: int) -> None:
        self.blocks = BlockManager(num_blocks, 1)
        self.root = chain_root("m")
        self.memory: dict[int, Path] = {}
        self.owned: dict[Owner, list[tuple[Path, int]]] = {}
        self.cached: dict[Path, int] = {}
        self.used_at: dict[Path, int] = {}  # of cached paths; the end of the last use
        self.clock = 0
        self.count = 0
        self.heard = 0  # events
        self.known: set[bytes] = set()  # names, as somebody knows them who listens to events only

    # -- the model -----------------------------------------------------------------------------------------------

    def _in_use(self) -> set[int]:
        return {block for held in self.owned.values() for _, block in held}

    def _sequences(self) -> list[Owner]:
        return [owner for owner in self.owned if owner.kind is OwnerKind.SEQUENCE]

    def _idle(self) -> list[Path]:
        in_use = self._in_use()
        return [path for path, block in self.cached.items() if block not in in_use]

    def _make_room(self, count: int) -> None:
        """Evict as the documentation says until `count` blocks are neither cached nor in use."""
        while self.blocks.num_blocks - len(self._in_use() | set(self.cached.values())) < count:
            oldest = min(self._idle(), key=self.used_at.__getitem__)
            for path in [path for path in self.cached if path[: len(oldest)] == oldest]:
                del self.cached[path], self.used_at[path]

    def _names(self, path: Path) -> list[bytes]:
        return block_hashes(self.root, path, 1)

    # -- what happens ----------------------------------------------------------------------------------------------

    @rule(path=st.lists(st.integers(0, 1), min_size=1, max_size=6).map(tuple), ticket=st.booleans())
    def start(self, path: Path, ticket: bool) -> None:
        names = self._names(path)
        hits = self.blocks.cache.match(names, len(path) - 1, guess=self.count % 7)
        assert hits == sum(path[:length] in self.cached for length in range(1, len(path)))
        blocks = self.blocks.cache.blocks(names, hits)
        assert blocks == [self.cached[path[: i + 1]] for i in range(hits)]
        idle = sum(path[: i + 1] in self._idle() for i in range(hits))
        if len(path) - hits + idle > self.blocks.free:
            return
        self.count += 1
        name = f"o{self.count}"
        owner = Owner.ticket(name) if ticket else Owner.sequence(RequestKey(name, 0))
        self.blocks.share(owner, blocks)
        self.owned[owner] = [(path[: i + 1], block) for i, block in enumerate(blocks)]
        self._make_room(len(path) - hits)
        for i, block in enumerate(self.blocks.allocate(owner, len(path) - hits)):
            assert block not in self._in_use(), "a block that somebody uses was given away"
            assert self.blocks.is_private(block)
            self.memory[block] = path[: hits + i + 1]
            self.owned[owner].append((path[: hits + i + 1], block))

    @precondition(lambda self: self._sequences())
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        """Cache what an owner has and the cache has not; a prefix of it, for not all may be computed."""
        owner = data.draw(st.sampled_from(self._sequences()))
        held = self.owned[owner]
        full = data.draw(st.integers(0, len(held)))
        self.blocks.publish(owner, self._names(held[-1][0]), full, guess=self.count % 7)
        for path, block in held[:full]:
            if path in self.cached:
                continue
            if any(block == other for them, theirs in self.owned.items() if them != owner for _, other in theirs):
                break  # distrusted under several owners
            self.cached[path], self.used_at[path] = block, -1

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def hand_over(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from(list(self.owned)))
        self.count += 1
        heir = (Owner.sequence if owner.kind is OwnerKind.TICKET else Owner.send)(RequestKey(f"o{self.count}", 0))
        self.blocks.transfer(owner, heir)
        self.owned[heir] = self.owned.pop(owner)

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from(list(self.owned)))
        held = self.owned.pop(owner)
        assert self.blocks.release(owner) == len(held)
        mine = [path for path, block in held if self.cached.get(path) == block]
        idle = set(self._idle())
        for length in range(len(mine[-1]) if mine else 0, 0, -1):
            if (path := mine[-1][:length]) in idle:
                self.clock += 1
                self.used_at[path] = self.clock

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def distrust(self, data: st.DataObject) -> None:
        """What an owner holds turns out to be wrong: nobody else may come to use it."""
        owner = data.draw(st.sampled_from(list(self.owned)))
        self.blocks.unpublish(owner)
        for path, block in self.owned[owner]:
            if self.cached.get(path) == block:
                for longer in [other for other in self.cached if other[: len(path)] == path]:
                    del self.cached[longer], self.used_at[longer]

    @rule()
    def listen(self) -> None:
        _, events, gap = self.blocks.cache.events.since(self.heard)
        assert not gap
        self.heard += len(events)
        for added, name in events:
            assert (name in self.known) != added
            (self.known.add if added else self.known.remove)(name)
        assert self.known == set(self.blocks.cache.names())

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "blocks"):
            return
        self.blocks.check_integrity()
        assert set(self.blocks.cache.names()) == {self._names(path)[-1] for path in self.cached}
        assert all(self.memory[block] == path for path, block in self.cached.items())
        for owner, held in self.owned.items():
            assert list(self.blocks.blocks_of(owner)) == [block for _, block in held]
            assert all(self.memory[block] == path for path, block in held), "a block was written under its owner"
            others = {block for other, theirs in self.owned.items() if other != owner for _, block in theirs}
            assert self.blocks.shared(owner) == tuple(block for _, block in held if block in others)
            wanted = {block for _, block in held[:1]}
            assert set(self.blocks.shared(owner, wanted)) == wanted | set(self.blocks.shared(owner))
            assert self.blocks.freed_by([owner]) == len(held) - len(self.blocks.shared(owner))
        assert self.blocks.freed_by(self.owned) == len({b for held in self.owned.values() for _, b in held})
        assert self.blocks.free == self.blocks.num_blocks - len(self._in_use())
        assert self.blocks.cached == len(self.cached)


TestSharing = SharingMachine.TestCase
TestSharing.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def filled(num_blocks: int, *paths: Path) -> BlockManager:
    """A manager whose cache holds these paths, idle, the first one used longest ago."""
    blocks = BlockManager(num_blocks, 1)
    for number, path in enumerate(paths):
        owner, names = Owner.sequence(RequestKey(f"r{number}", 0)), block_hashes(chain_root("m"), path, 1)
        hits = blocks.cache.match(names, len(path))
        blocks.share(owner, blocks.cache.blocks(names, hits))
        blocks.allocate(owner, len(path) - hits)
        blocks.publish(owner, names, len(path))
        blocks.release(owner)
    return blocks


def held(blocks: BlockManager, path: Path) -> int:
    return blocks.cache.match(block_hashes(chain_root("m"), path, 1), len(path))


class TestEviction:
    def test_tails_go_first_and_the_longest_unused(self) -> None:
        blocks = filled(7, (1, 2, 3), (1, 2, 9, 8))
        assert (blocks.free, blocks.cached) == (7, 5)
        left = []
        for _ in range(5):
            blocks.allocate(Owner.ticket("t"), 1 if left else 3)
            left.append((held(blocks, (1, 2, 3)), held(blocks, (1, 2, 9, 8))))
        assert left == [(2, 4), (2, 3), (2, 2), (1, 1), (0, 0)]
        assert blocks.free == 0

    def test_a_use_renews(self) -> None:
        blocks = filled(4, (1, 2), (5, 6))
        blocks.share(Owner.ticket("t"), blocks.cache.blocks(block_hashes(chain_root("m"), (1, 2), 1), 2))
        blocks.release(Owner.ticket("t"))
        blocks.allocate(Owner.ticket("t"), 2)
        assert (held(blocks, (1, 2)), held(blocks, (5, 6))) == (2, 0)

    def test_free_blocks_are_used_before_cached_ones(self) -> None:
        blocks = filled(4, (1, 2))
        blocks.allocate(Owner.ticket("t"), 2)
        assert held(blocks, (1, 2)) == 2

    def test_what_is_in_use_is_not_counted_and_not_given_away(self) -> None:
        blocks = filled(4, (1, 2), (5, 6))
        blocks.share(Owner.ticket("pin"), blocks.cache.blocks(block_hashes(chain_root("m"), (1, 2), 1), 2))
        assert (blocks.free, blocks.reserved) == (2, 0)
        with pytest.raises(AssertionError):
            blocks.allocate(Owner.ticket("t"), 3)
        blocks.allocate(Owner.ticket("t"), 2)
        assert (blocks.free, blocks.reserved, held(blocks, (1, 2))) == (0, 2, 2)
        blocks.release(Owner.ticket("pin"))
        assert blocks.free == 2


class TestIntegrity:
    def test_sees_a_reference_too_many(self) -> None:
        blocks = filled(4, (1, 2))
        blocks._refs[3] += 1
        with pytest.raises(AssertionError):
            blocks.check_integrity()

    def test_sees_a_cached_block_among_the_free_ones(self) -> None:
        blocks = filled(4, (1, 2))
        blocks._free.append(blocks.cache.blocks(block_hashes(chain_root("m"), (1,), 1), 1)[0])
        with pytest.raises(AssertionError):
            blocks.check_integrity()

    def test_sees_a_wrong_order_of_eviction(self) -> None:
        blocks = filled(4, (1, 2))
        blocks.cache._idle.move_to_end(next(iter(blocks.cache._idle)))
        with pytest.raises(AssertionError, match="tail"):
            blocks.check_integrity()


@pytest.mark.parametrize(
    ("rest", "held_tokens", "queued", "chunk", "here"),
    [
        (20, 32, 0, 64, True),
        (64, 32, 0, 64, True),
        (65, 32, 0, 64, False),
        (20, 0, 0, 64, False),
        (20, 32, 44, 64, True),
        (20, 32, 45, 64, False),
        (1, 320, 0, 0, False),
    ],
)
def test_the_rest_of_a_prompt_is_run_here(rest: int, held_tokens: int, queued: int, chunk: int, here: bool) -> None:
    assert run_rest_here(rest, held_tokens, queued, chunk) is here
