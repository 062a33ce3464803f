"""The scheduler: which tokens of which sequences the next step computes.

There are no phases: in every step, each running sequence's computed tokens catch up with its tokens
as far as the budget allows. A whole prompt, a chunk of it, the suffix after a cached prefix,
recomputation after preemption and a decode (one token) differ only in numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from cluster.priority_queue import PriorityQueue
from cluster.start_rate import StartRate
from worker.block_pool import BlockPool, InvariantError
from worker.decodes import Decodes
from worker.engine_config import EngineConfig
from worker.in_flight import InFlight
from worker.pending import PendingPrefill
from worker.pins import Pins
from worker.plan import Plan
from worker.prefix_cache import PrefixCache
from worker.sequence import Sequence, Status
from worker.tiers.cold_tiers import ColdTiers
from worker.tiers.loading import Loading


class Scheduler:
    """Owns the sequences' state, the waiting queue and the running set.

    Order of a step: decodes, then prefills already started, then admissions from the queue's front.
    The queue is in order of priority, lower first, then of arrival.
    A decode costs one token and a client may be reading its stream; a started prefill holds blocks
    that are useless before it is complete.
    """

    def __init__(
        self,
        config: EngineConfig,
        pool: BlockPool,
        cache: PrefixCache,
        hash_block: Callable[[bytes, bytes], bytes],
        tiers: ColdTiers | None = None,
    ) -> None:
        self._config = config
        self._block_size = config.block_size
        self._chunk_limit = config.chunk_limit
        self._pool = pool
        self._cache = cache
        self._hash_block = hash_block
        self.pins = Pins(cache, config, hash_block)
        self.loading = None if tiers is None else Loading(tiers, pool, cache, config.block_size)
        """Loads from cold tiers; None without cold tiers."""
        self.waiting: PriorityQueue[str, Sequence] = PriorityQueue()
        self.running: dict[str, Sequence] = {}
        self.decodes = Decodes(config.block_size)
        """The running sequences that have nothing left to prefill."""
        self._in_flight = InFlight(config)
        self.pending = PendingPrefill()
        self.start_rate = StartRate()
        self.hits = self.partial_hits = self.misses = 0
        self.reused_tokens = self.resumed_tokens = self.computed_prompt_tokens = 0
        self.preemptions = self.held_requests = 0

    @property
    def waiting_by_priority(self) -> tuple[tuple[int, int], ...]:
        """As `Load` has it."""
        counts = self.waiting.by_priority()
        return () if all(priority == 0 for priority, _ in counts) else tuple(counts)

    def add(self, sequence: Sequence) -> None:
        """Append a new sequence to the waiting queue."""
        self._extend_hashes(sequence)
        self.waiting.add(sequence.request_id, sequence, sequence.priority)
        self._estimate(sequence, self._cache.probe(sequence.hashes, self._hit_limit(sequence))[0])

    def schedule(self, now: float) -> Plan:
        """Plan one step. Every planned sequence has the blocks that its tokens need."""
        self.expire(now)
        for sequence in self.decodes.full[:]:
            if sequence.due:  # else it was preempted for another
                self._grow(sequence)
        prefills: dict[Sequence, int] = {}
        # The budget has at least one token per running sequence, so one for each decode.
        budget = self._plan_prefills(prefills, self._config.token_budget - len(self.decodes))
        self._admit(prefills, budget)
        if self.loading is not None:
            self.loading.tiers.copy_out()  # the step overwrites blocks evicted for it
        return Plan(self.decodes, prefills)

    def steady_steps(self) -> int:
        """Number of coming steps that only decode: nothing is admitted, allocated, cached, evicted
        or preempted, and no answer reaches its limit. 0 with cold tiers, whose loads end at any
        time."""
        if self.loading is not None or len(self.decodes) < len(self.running):
            return 0
        steps = self.decodes.steps_alone()
        return steps if steps > 0 and self._admits_none() else 0

    def advance(self, steps: int, sampled: Iterable[Iterable[int]], now: float) -> None:
        """Do what `schedule` and the commits of `steps` steady steps do, the last one at `now`."""
        self.expire(now)
        self._admit({}, self._config.token_budget - len(self.running))
        self.decodes.leap(steps, sampled)

    def commit_decodes(self, sampled: list[list[int]]) -> list[Sequence]:
        """Commit one computed and one sampled token per decode. Returns the sequences whose answers
        are at their limit."""
        at_limit = []
        for sequence in self.decodes.advance(sampled):
            full, rest = divmod(sequence.computed_tokens, self._block_size)
            if not rest:
                self._settle(sequence, full)
                self.decodes.full.append(sequence)
            if len(sequence.tokens) < sequence.limit_tokens:
                self.decodes.wait(sequence)
            else:
                at_limit.append(sequence)
        return at_limit

    def commit_prefill(self, sequence: Sequence, count: int, sampled: int | None) -> None:
        """Commit `count` more prefill tokens whose KV was written. After the last one, from which a
        token was sampled, the sequence ends or joins `decodes`."""
        self.pending.set(sequence, sequence.pending_tokens - count)
        self.computed_prompt_tokens += count
        if sampled is not None:
            sequence.tokens.append(sampled)
        full = sequence.computed_tokens // self._block_size
        if full > sequence.settled_blocks:
            self._settle(sequence, full)

    def end(self, sequence: Sequence) -> None:
        """Remove a sequence at any stage and release what it holds."""
        if sequence.status is Status.WAITING:
            del self.waiting[sequence.request_id]
            self.pending.set(sequence, 0)
        else:
            self._stop_running(sequence)
        sequence.status = Status.ENDED

    def restart(self, sequence: Sequence) -> None:
        """Recompute a running sequence in blocks of its own: from now on it neither reuses nor
        caches anything. Its outputs stay."""
        sequence.isolated = True
        self.preempt(sequence)

    def distrust(self, blocks: list[int]) -> None:
        """Drop these blocks and their continuations from the cache. Running sequences continue with
        theirs, but cache nothing more below a dropped block."""
        gone = self._cache.forget(blocks)
        if not gone:
            return
        self.pins.drop(gone)
        for sequence in self.running.values():
            if sequence.publishes and not gone.isdisjoint(sequence.block_table):
                self._in_flight.leave(sequence)
                sequence.publishes = False
        if self.loading is not None:
            self.loading.flush()

    def flush(self) -> None:
        """Drop all cached blocks. Running sequences continue with theirs.

        Blocks computed before the flush must never be hit again, and a block computed later would
        be cached without its parent. So a sequence that runs during a flush caches nothing more,
        unless it is preempted and recomputed. Pins end.
        """
        self.pins.release()
        self._cache.flush()
        if self.loading is not None:
            self.loading.flush()
        self._in_flight.blocks.clear()
        for sequence in self.running.values():
            sequence.publishes = False
        for sequence in self.waiting.values():
            sequence.held_for = None
            self._estimate(sequence, 0)

    def expire(self, now: float) -> None:
        """Advance the clock and let cached blocks expire."""
        self._cache.now = now
        self._cache.expire()
        if self.loading is not None:
            self.loading.settle()

    def _plan_prefills(self, prefills: dict[Sequence, int], budget: int) -> int:
        # Their blocks were all allocated at admission.
        if self.pending.tokens:
            for sequence in self.running.values():
                if not budget:
                    break
                if sequence.pending_tokens:
                    count = min(budget, self._chunk_limit, sequence.pending_tokens)
                    prefills[sequence] = count
                    budget -= count
        return budget

    def _admit(self, prefills: dict[Sequence, int], budget: int) -> None:
        """In the order of the queue: a request that does not fit also blocks those behind it, or a
        long prompt would starve. Only a request that waits for another's prefix is overtaken: its
        wait is short, and it would compute nothing new.
        """
        admitted = []
        blocked = False
        for sequence in self.waiting.values():
            if not budget or len(self.running) >= self._config.max_batch_size:
                blocked = True
                break
            if sequence.held_for is not None:
                if sequence.held_for in self._in_flight.blocks or (
                    self.loading is not None and self.loading.holds(sequence.held_for)
                ):
                    continue
                sequence.held_for = None
            limit = self._hit_limit(sequence)
            cached, referenced = self._cache.probe(sequence.hashes, limit)
            shared = self._in_flight.worth_waiting_for(sequence.hashes, cached, limit)
            if shared:
                sequence.held_for = sequence.hashes[shared - 1]
                self._estimate(sequence, shared)
                self.held_requests += 1
                continue
            if self.loading is not None:
                reusable = self.loading.begin(
                    sequence, cached, referenced, limit, len(self.running)
                )
                if reusable:
                    self._estimate(sequence, reusable)
                    continue
            if not self._place(sequence, limit, referenced):
                self._estimate(sequence, cached)
                blocked = True
                break
            admitted.append(sequence)
            count = min(budget, self._chunk_limit, sequence.pending_tokens)
            prefills[sequence] = count
            budget -= count
        for sequence in admitted:
            del self.waiting[sequence.request_id]
        self.start_rate.observe(
            self._cache.now,
            sum(not sequence.output_tokens for sequence in admitted),  # the others resume
            waiting=blocked,
            idle=len(self.running) == len(admitted),
        )

    def _admits_none(self) -> bool:
        """Whether `_admit` admits none, after decodes only and with no prefix in flight."""
        running = len(self.running)
        if not self.waiting or running >= min(
            self._config.max_batch_size, self._config.token_budget
        ):
            return True
        first = next(iter(self.waiting.values()))
        referenced = self._cache.probe(first.hashes, self._hit_limit(first)).referenced
        total = -(-len(first.tokens) // self._block_size)
        return total - referenced + running > self._pool.free_blocks

    def _place(self, sequence: Sequence, limit: int, referenced: int) -> bool:
        """Reference the cached prefix, then allocate blocks for all other tokens.

        All at once, so that a started prefill never waits for blocks. One more block per running
        sequence must stay free: each needs one within `block_size` steps, and using it here would
        end in preemption. Allocates nothing if there are too few blocks.
        """
        pool = self._pool
        total = -(-len(sequence.tokens) // self._block_size)
        headroom = len(self.running)
        # `referenced` blocks are in use already; all others, cached or not, are free blocks.
        if total - referenced + headroom > pool.free_blocks:
            return False
        blocks: list[int] = []
        if limit:
            use = sequence.use(self._cache.now, 0, self._block_size)
            blocks = self._cache.acquire(
                sequence.request.namespace_root, sequence.hashes, sequence.packed(), limit, use
            )
        if total - len(blocks) + headroom > pool.free_blocks:  # the match is shorter than the probe
            self._cache.release(blocks)
            return False
        hit_blocks = len(blocks)
        blocks.extend([self._cache.allocate() for _ in range(total - hit_blocks)])
        sequence.block_table = blocks
        sequence.settled_blocks = hit_blocks
        sequence.publishes = self._config.prefix_caching and not sequence.isolated
        sequence.status = Status.RUNNING
        self._estimate(sequence, hit_blocks)
        self.running[sequence.request_id] = sequence
        self._in_flight.enter(sequence)
        self._count_hit(sequence, hit_blocks, limit)
        return True

    def _count_hit(self, sequence: Sequence, hit_blocks: int, limit: int) -> None:
        if sequence.hit_tokens is not None:
            self.resumed_tokens += sequence.computed_tokens
            return
        sequence.hit_tokens = sequence.computed_tokens
        self.reused_tokens += sequence.computed_tokens
        if not hit_blocks:
            self.misses += 1
        elif hit_blocks == limit:
            self.hits += 1
        else:
            self.partial_hits += 1

    def _grow(self, sequence: Sequence) -> None:
        """Allocate one more block for a decode; while none is free, preempts the latest arrival of
        the highest priority number.

        That may be the sequence itself. The first of all is never preempted for others, so one
        sequence always makes progress.
        """
        while not self._pool.free_blocks:
            victim = max(self.running.values(), key=lambda each: (each.priority, each.order))
            self.preempt(victim)  # not again in this step: one of its blocks is taken
            if victim is sequence:
                return
        sequence.block_table.append(self._cache.allocate())
        self.decodes.full.remove(sequence)

    def preempt(self, sequence: Sequence) -> None:
        """Put a running sequence back at the front of its priority. Its outputs stay; its KV is
        looked up or recomputed."""
        self._stop_running(sequence)
        sequence.status = Status.WAITING
        sequence.loaded = False
        self.waiting.add(sequence.request_id, sequence, sequence.priority, first=True)
        self._extend_hashes(sequence)
        self._estimate(sequence, self._cache.probe(sequence.hashes, self._hit_limit(sequence))[0])
        self.preemptions += 1

    def _stop_running(self, sequence: Sequence) -> None:
        self.decodes.leave(sequence)
        self._in_flight.leave(sequence)
        self._cache.release(sequence.block_table)
        sequence.block_table = []
        sequence.settled_blocks = 0
        sequence.publishes = False
        self.pending.set(sequence, 0)
        del self.running[sequence.request_id]

    def _settle(self, sequence: Sequence, full: int) -> None:
        """Offer the blocks [settled, full), now written, to the cache."""
        if sequence.publishes:
            cache, in_flight, block_size = self._cache, self._in_flight.blocks, self._block_size
            table, hashes = sequence.block_table, sequence.hashes
            first = sequence.settled_blocks
            parent, key = table[first - 1] if first else 0, sequence.parent_key(first)
            for index in range(first, full):
                packed = sequence.packed_block(index, block_size)
                if index == len(hashes):
                    hashes.append(self._hash_block(key, packed))
                block_hash = hashes[index]
                use = sequence.use(cache.now, index, block_size)
                parent = cache.store(table[index], block_hash, parent, key, packed, use)
                if not parent:  # a collision: later blocks would be cached below other content
                    self._in_flight.leave(sequence)
                    sequence.publishes = False
                    break
                table[index] = parent
                if in_flight and in_flight.get(block_hash) is sequence:
                    del in_flight[block_hash]
                key = block_hash
        sequence.settled_blocks = full

    def _hit_limit(self, sequence: Sequence) -> int:
        """Blocks that may be reused: those without the last token, which must be computed."""
        if not self._config.prefix_caching or sequence.isolated:
            return 0
        return (len(sequence.tokens) - 1) // self._block_size

    def _extend_hashes(self, sequence: Sequence) -> None:
        """Hash all full blocks: before the first admission, or later with the outputs."""
        if not self._config.prefix_caching or sequence.isolated:
            sequence.hashes = []
            return
        hashes = sequence.hashes
        for index in range(len(hashes), len(sequence.tokens) // self._block_size):
            packed = sequence.packed_block(index, self._block_size)
            hashes.append(self._hash_block(sequence.parent_key(index), packed))

    def _estimate(self, sequence: Sequence, reusable_blocks: int) -> None:
        self.pending.set(sequence, len(sequence.tokens) - reusable_blocks * self._block_size)

    def check(self) -> None:
        """Raises InvariantError unless pool, cache and sequences agree. O(pool + tables)."""
        self._pool.check()
        self._cache.check()
        self.decodes.check()
        held = [0] * (self._pool.capacity + 1)
        for block in self.pins.blocks:
            held[block] += 1
        if self.loading is not None:
            self.loading.tiers.check()
            for block in self.loading.blocks():
                held[block] += 1
        for sequence in self.running.values():
            for block in sequence.block_table:
                held[block] += 1
            if sequence.computed_tokens > len(sequence.block_table) * self._block_size:
                raise InvariantError(
                    f"{sequence.request_id} has computed {sequence.computed_tokens} tokens "
                    f"into {len(sequence.block_table)} blocks of {self._block_size}"
                )
            for block in sequence.block_table[sequence.settled_blocks :]:
                if self._cache.holds(block) or self._pool.references(block) != 1:
                    raise InvariantError(
                        f"{sequence.request_id} writes block {block}, which is cached or has "
                        f"{self._pool.references(block)} references"
                    )
        for block, references in enumerate(held):
            if references != self._pool.references(block):
                raise InvariantError(
                    f"block {block} is in {references} block tables, pins and loads but has "
                    f"{self._pool.references(block)} references"
                )
        for sequence in self.waiting.values():
            if sequence.block_table or sequence.computed_tokens or sequence.settled_blocks:
                raise InvariantError(f"{sequence.request_id} waits but holds KV")
        self.pending.check((*self.running.values(), *self.waiting.values()))
        for holder in self._in_flight.blocks.values():
            if self.running.get(holder.request_id) is not holder or not holder.publishes:
                raise InvariantError(f"{holder.request_id} has blocks in flight without computing")
