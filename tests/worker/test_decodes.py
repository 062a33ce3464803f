"""The batch's decodes, kept from step to step."""

import pytest

from cluster.blocks import pack_tokens
from cluster.protocol import Sampling
from worker.batch import BatchItem, check_sampled
from worker.block_pool import InvariantError
from worker.decodes import Decodes
from worker.messages import EngineRequest
from worker.sequence import Sequence, Status

BLOCK = 4


def decoding(name, tokens, max_tokens=100, outputs=1):
    """A sequence whose `tokens` end in so many outputs, the last of which is to be computed."""
    request = EngineRequest(
        request_id=name,
        token_ids=pack_tokens(tokens[:-outputs]),
        namespace_root=b"r" * 32,
        sampling=Sampling(max_tokens=max_tokens),
    )
    sequence = Sequence(request, 1, 1000)
    sequence.tokens.extend(tokens[-outputs:])
    sequence.block_table = list(range(1, -(-(len(tokens) - 1) // BLOCK) + 1))
    sequence.status = Status.RUNNING
    return sequence


def batch_of_three():
    decodes = Decodes(BLOCK)
    sequences = [
        decoding("a", [5, 6, 7, 8]),  # 3 of 4 computed
        decoding("b", [1, 2]),
        decoding("c", [3, 4, 5, 6, 7]),  # 4 of 4: the next token needs a block
    ]
    for sequence in sequences:
        decodes.join(sequence)
    decodes.check()
    return decodes, sequences


def sampled(decodes, token):
    return decodes.advance([[token] for _ in decodes.items])


def test_items_follow_the_tokens():
    decodes, (a, b, c) = batch_of_three()
    assert [(i.request_id, i.token_ids, i.start, i.output_index) for i in decodes.items] == [
        ("a", [8], 3, 1),
        ("b", [2], 1, 1),
        ("c", [7], 4, 1),
    ]
    c.block_table.append(9)
    decodes.full.remove(c)
    sampled(decodes, 9)
    assert [(i.token_ids, i.start, i.output_index) for i in decodes.items] == [
        ([9], 4, 2),
        ([9], 2, 2),
        ([9], 5, 2),
    ]
    assert [list(s.tokens)[-1] for s in (a, b, c)] == [9, 9, 9]
    assert all(
        i.block_table is s.block_table for i, s in zip(decodes.items, (a, b, c), strict=True)
    )


def test_who_has_filled_its_blocks_is_full_at_once():
    decodes, (_, _, c) = batch_of_three()
    assert decodes.full == [c]
    assert decodes.steps_alone() == 0


def test_a_sequence_is_due_when_its_block_is_full_or_its_answer_at_its_limit():
    decodes = Decodes(BLOCK)
    fills, ends = decoding("fills", [1, 2]), decoding("ends", [1, 2, 3, 4, 5, 6], 3)
    decodes.join(fills)
    decodes.join(ends)
    assert decodes.steps_alone() == 1
    assert sampled(decodes, 7) == []
    assert sampled(decodes, 7) == [ends]  # three outputs
    decodes.leave(ends)
    assert sampled(decodes, 7) == [fills]  # tokens 0 to 3 are computed
    decodes.full.append(fills)
    decodes.wait(fills)
    decodes.check()


def test_who_leaves_takes_its_row_along_and_is_due_no_more():
    decodes, (a, b, c) = batch_of_three()
    decodes.leave(a)
    decodes.leave(c)
    decodes.check()
    assert (decodes.request_ids, decodes.full) == (["b"], [])
    assert [len(due) for due in (sampled(decodes, 1), sampled(decodes, 1))] == [0, 0]
    assert sampled(decodes, 1) == [b]
    decodes.leave(a)  # it is not in
    assert len(decodes) == 1


def test_a_leap_is_so_many_steps():
    single, leaping = Decodes(BLOCK), Decodes(BLOCK)
    for decodes in (single, leaping):
        decodes.join(decoding("a", [1, 2]))
        decodes.join(decoding("b", [3] * 10))
    assert single.steps_alone() == 2
    for token in (7, 8):
        sampled(single, token)
    leaping.leap(2, [[7, 8], [7, 8]])
    assert [vars_of(item) for item in leaping.items] == [vars_of(item) for item in single.items]
    assert leaping.steps_alone() == single.steps_alone() == 0
    leaping.check()


def vars_of(item):
    return item.request_id, item.token_ids, item.start, item.output_index


def test_a_check_sees_tokens_that_were_changed_elsewhere():
    decodes, (a, _, _) = batch_of_three()
    a.tokens.append(1)
    with pytest.raises(InvariantError, match="a has the columns"):
        decodes.check()


@pytest.mark.parametrize(
    "answers", [[None, 1, None], [1, None, None], [1, 1, 1], [1, 1], [1, 1, None, 1]]
)
def test_a_runner_samples_for_exactly_those_that_ask(answers):
    def item(sample):
        return BatchItem("r", [1], 0, [1], sample, Sampling(max_tokens=1), 0)

    batch = [item(True), item(True), item(False)]
    check_sampled(batch, [1, 1, None], decodes=2)
    check_sampled(batch, [1, 1, None], decodes=0)
    with pytest.raises(InvariantError, match="of 3 items"):
        check_sampled(batch, answers, decodes=2)
