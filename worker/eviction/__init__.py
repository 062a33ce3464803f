"""Eviction policies: which cached block to evict when a block is needed.

Only *leaves* may be evicted: cached blocks that no sequence references and no cached block
continues. So the cached set stays prefix-closed under every policy. The cache tells its policy when
a block becomes a leaf or stops being one; the policy orders leaves by their use.

    base.py            the interface of a policy
    lru.py             least recently used
    lfu.py             least frequently used, with aging
    ttl.py             expiry after a fixed time, else least recently used
    workload_aware.py  least likely to be used again, by class of request
    registry.py        policies by name, with parameters
"""
