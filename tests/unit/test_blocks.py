"""The block manager against a plain model of who owns what."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.blocks import BlockManager, Owner, OwnerKind
from pdcore.types import RequestKey

KEYS = [RequestKey(f"r{i}", 0) for i in range(3)]
OWNERS = [make(key) for key in KEYS for make in (Owner.sequence, Owner.send, Owner.swap)] + [
    Owner.ticket("t0"),
    Owner.ticket("t1"),
]
HEIRS = [owner for owner in OWNERS if owner.kind is not OwnerKind.TICKET]


class BlocksMachine(RuleBasedStateMachine):
    """The model: a dictionary from owner to blocks. Blocks are told apart, not only counted."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = BlockManager(num_blocks=9, block_size=4)
        self.owned: dict[Owner, list[int]] = {}

    @precondition(lambda self: self.blocks.free > 0)
    @rule(owner=st.sampled_from(OWNERS), data=st.data())
    def allocate(self, owner: Owner, data: st.DataObject) -> None:
        count = data.draw(st.integers(0, self.blocks.free))
        taken = self.blocks.allocate(owner, count)
        assert len(taken) == count
        if count:
            self.owned.setdefault(owner, []).extend(taken)

    @precondition(lambda self: any(owner not in self.owned for owner in HEIRS))
    @rule(data=st.data())
    def transfer(self, data: st.DataObject) -> None:
        source = data.draw(st.sampled_from(OWNERS))
        target = data.draw(st.sampled_from([owner for owner in HEIRS if owner not in self.owned]))
        self.blocks.transfer(source, target)
        if source in self.owned:
            self.owned[target] = self.owned.pop(source)

    @rule(owner=st.sampled_from(OWNERS))
    def release(self, owner: Owner) -> None:
        assert self.blocks.release(owner) == len(self.owned.pop(owner, []))
        assert self.blocks.release(owner) == 0

    @invariant()
    def agrees(self) -> None:
        self.blocks.check_integrity()
        for owner in OWNERS:
            assert list(self.blocks.blocks_of(owner)) == self.owned.get(owner, [])
        for kind in OwnerKind:
            assert set(self.blocks.owners(kind)) == {owner for owner in self.owned if owner.kind is kind}
        all_owned = [block for blocks in self.owned.values() for block in blocks]
        assert len(set(all_owned)) == len(all_owned)
        assert self.blocks.free == 9 - len(all_owned)
        assert self.blocks.reserved == sum(len(b) for o, b in self.owned.items() if o.kind is OwnerKind.TICKET)


TestBlocks = BlocksMachine.TestCase
TestBlocks.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_blocks_for_rounds_up() -> None:
    blocks = BlockManager(4, 16)
    assert [blocks.blocks_for(n) for n in (0, 1, 16, 17, 32, 33)] == [0, 1, 1, 2, 2, 3]


def test_more_than_is_free_is_never_given() -> None:
    blocks = BlockManager(4, 16)
    blocks.allocate(Owner.ticket("a"), 3)
    with pytest.raises(AssertionError):
        blocks.allocate(Owner.ticket("b"), 2)
    blocks.check_integrity()


def test_integrity_check_sees_a_block_with_two_owners() -> None:
    blocks = BlockManager(4, 16)
    mine = blocks.allocate(Owner.ticket("a"), 2)
    blocks._owned[Owner.ticket("b")] = [mine[0]]
    with pytest.raises(AssertionError):
        blocks.check_integrity()


def test_integrity_check_sees_a_lost_block() -> None:
    blocks = BlockManager(4, 16)
    blocks._free.pop()
    with pytest.raises(AssertionError):
        blocks.check_integrity()
