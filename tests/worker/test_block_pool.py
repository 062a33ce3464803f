import pytest

from worker.block_pool import BlockPool, InvariantError


def test_blocks_are_numbered_from_one_and_block_zero_is_never_given():
    pool = BlockPool(3)
    assert [pool.allocate() for _ in range(3)] == [1, 2, 3]
    assert pool.free_blocks == 0
    with pytest.raises(InvariantError, match="3 blocks, 0 free"):
        pool.allocate()
    pool.check()


def test_a_pool_needs_a_block():
    with pytest.raises(ValueError, match="at least 1"):
        BlockPool(0)


def test_worthless_blocks_are_used_before_kept_ones_and_kept_ones_in_order_of_release():
    pool = BlockPool(4)
    a, b, c, d = (pool.allocate() for _ in range(4))
    pool.release(b, keep=True)
    pool.release(a, keep=True)
    pool.release(d, keep=False)
    pool.release(c, keep=False)
    assert pool.free_list() == [c, d, b, a]
    assert pool.kept_blocks() == [b, a]
    assert (pool.free_blocks, pool.vacant) == (4, 2)
    pool.check()
    assert [pool.allocate(), pool.allocate()] == [c, d]
    assert pool.oldest_kept() == b


def test_a_kept_block_is_not_allocated_before_it_is_vacated():
    pool = BlockPool(1)
    block = pool.allocate()
    pool.release(block, keep=True)
    with pytest.raises(InvariantError):
        pool.allocate()
    pool.vacate(block)
    assert pool.allocate() == block


def test_sharing_takes_a_kept_block_from_the_middle_of_the_list():
    pool = BlockPool(3)
    a, b, c = (pool.allocate() for _ in range(3))
    for block in (a, b, c):
        pool.release(block, keep=True)
    assert pool.share(b) is True
    assert pool.share(b) is False
    assert pool.references(b) == 2
    assert pool.free_list() == [a, c]
    pool.check()
    assert pool.release(b, keep=True) is False
    assert pool.release(b, keep=True) is True
    assert pool.free_list() == [a, c, b]
    pool.check()


def test_misuse_is_refused():
    pool = BlockPool(2)
    block = pool.allocate()
    with pytest.raises(InvariantError, match="cannot be vacated"):
        pool.vacate(block)
    pool.release(block, keep=False)
    with pytest.raises(InvariantError, match="without a reference"):
        pool.release(block, keep=False)
    with pytest.raises(InvariantError, match="holds nothing"):
        pool.share(block)
    with pytest.raises(InvariantError):
        BlockPool(1).release(0, keep=False)


def test_check_sees_a_block_both_free_and_referenced():
    pool = BlockPool(2)
    pool.allocate()
    pool.check()
    pool._references[2] = 1
    with pytest.raises(InvariantError, match="block 2 has 1 references and is on the free list"):
        pool.check()
    pool._references[2] = 0
    pool._references[1] = 0
    with pytest.raises(InvariantError, match="block 1 has 0 references and is not on"):
        pool.check()
