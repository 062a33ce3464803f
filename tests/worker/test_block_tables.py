"""Rows of block tables kept between steps: always what a table made anew would be."""

import random

import pytest

from worker.block_tables import BlockTables

SIZE = 4


def row_of(tables, table, start, used, widest=8):
    tables.begin(widest)
    return tables.take([tables.update(table, start, used)], widest)[0].tolist()


def padded(blocks, widest=8):
    return blocks + [0] * (widest - len(blocks))


def test_a_row_grows_with_its_list():
    tables, table = BlockTables(SIZE), [5, 6]
    assert row_of(tables, table, 0, 2) == padded([5, 6])
    table.append(9)
    assert row_of(tables, table, 8, 3) == padded([5, 6, 9])


def test_blocks_reserved_beyond_the_step_are_left_out():
    tables, table = BlockTables(SIZE), [5, 6, 7]
    assert row_of(tables, table, 0, 1) == padded([5])
    assert row_of(tables, table, 4, 2) == padded([5, 6])


def test_a_block_replaced_when_it_became_full_is_noticed():
    tables, table = BlockTables(SIZE), [5]
    row_of(tables, table, 3, 1)
    table[0] = 2  # an equal block was cached already
    table.append(8)
    assert row_of(tables, table, 4, 2) == padded([2, 8])


def test_blocks_filled_and_replaced_by_one_chunk_are_noticed():
    tables, table = BlockTables(SIZE), [5, 6, 7]
    row_of(tables, table, 1, 3)
    table[:2] = [11, 12]
    assert row_of(tables, table, 10, 3) == padded([11, 12, 7])


def test_a_step_that_begins_before_the_last_one_starts_afresh():
    tables, table = BlockTables(SIZE), [5, 6, 7]
    row_of(tables, table, 9, 3)
    table[:] = [1, 2]
    assert row_of(tables, table, 2, 2) == padded([1, 2])


def test_only_what_is_new_is_read():
    class Counted(list):
        read = 0

        def __getitem__(self, place):
            got = super().__getitem__(place)
            self.read += len(got) if isinstance(place, slice) else 1
            return got

    tables, table = BlockTables(SIZE), Counted(range(1, 101))
    row_of(tables, table, 390, 98, widest=100)
    assert table.read == 98
    row_of(tables, table, 391, 98, widest=100)
    assert table.read == 98
    row_of(tables, table, 392, 99, widest=100)
    assert table.read == 100, "the block that became full, and the new one"


def test_rows_of_sequences_that_are_gone_are_taken_over_clean():
    tables = BlockTables(SIZE)
    for first in range(1, 200):
        assert row_of(tables, [first, first + 1], 0, 1 + first % 2) == padded(
            [first, first + 1][: 1 + first % 2]
        )
    assert len(tables) <= 8


@pytest.mark.parametrize("seed", range(5))
def test_any_course_of_sequences_gives_tables_as_made_anew(seed):
    """Sequences that come, grow, have full blocks replaced, start anew and go, in any order."""
    rng = random.Random(seed)
    tables, running = BlockTables(SIZE), {}
    for step in range(300):
        for name in list(running):
            if rng.random() < 0.05:
                del running[name]
        while len(running) < rng.randint(1, 20):
            running[f"{step}/{len(running)}"] = (list(range(step + 1, step + 2)), 0)
        chosen = rng.sample(sorted(running), rng.randint(1, len(running)))
        items = []
        for name in chosen:
            table, start = running[name]
            if rng.random() < 0.05:  # preempted and admitted again
                table, start = [rng.randint(1, 999)], 0
            end = start + rng.choice([1, 1, 1, 7])
            while len(table) * SIZE < end:
                table.append(rng.randint(1, 999))
            running[name] = (table, end)
            items.append((table, start, -(-end // SIZE), end))
        widest = max(used for _, _, used, _ in items)
        tables.begin(widest)
        rows = [tables.update(table, start, used) for table, start, used, _ in items]
        assert tables.take(rows, widest).tolist() == [
            padded(table[:used], widest) for table, _, used, _ in items
        ]
        for table, start, _, end in items:
            for index in range(start // SIZE, end // SIZE):
                if rng.random() < 0.3:
                    table[index] = rng.randint(1, 999)
