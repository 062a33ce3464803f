"""The queue by priority, against sorted lists."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cluster.priority_queue import PriorityQueue


class Queue(RuleBasedStateMachine):
    """`model` has (priority, place, key); lower places are earlier, also negative ones."""

    def __init__(self):
        super().__init__()
        self.queue = PriorityQueue()
        self.model = []
        self.added = 0

    @rule(priority=st.integers(-2, 2), first=st.booleans())
    def add(self, priority, first):
        self.added += 1
        self.queue.add(self.added, -self.added, priority, first=first)
        self.model.append((priority, -self.added if first else self.added, self.added))

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def remove(self, data):
        gone = data.draw(st.sampled_from(self.model))
        self.model.remove(gone)
        del self.queue[gone[2]]
        assert gone[2] not in self.queue
        assert self.queue.get(gone[2]) is None

    @rule()
    def clear(self):
        self.queue.clear()
        self.model.clear()

    @rule(priority=st.integers(-3, 3))
    def count(self, priority):
        assert self.queue.up_to(priority) == sum(each <= priority for each, _, _ in self.model)

    @invariant()
    def is_in_order(self):
        order = [key for _, _, key in sorted(self.model)]
        assert list(self.queue) == order
        assert list(self.queue.values()) == [-key for key in order]
        assert self.queue.keys() == set(order)
        assert len(self.queue) == len(order)
        assert bool(self.queue) == bool(order)
        assert all(key in self.queue and self.queue[key] == -key for key in order)
        levels = sorted({priority for priority, _, _ in self.model})
        counts = [(p, sum(each == p for each, _, _ in self.model)) for p in levels]
        assert self.queue.by_priority() == counts


TestQueue = Queue.TestCase
TestQueue.settings = settings(max_examples=40, deadline=None)
