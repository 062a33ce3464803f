"""Which cached block is evicted when a block is needed.

The cache may only lose *leaves*: cached blocks that no sequence references and that no cached block
continues. Then what is cached stays prefix-closed whatever the policy. The cache tells its policy
which blocks are leaves, as they change; a policy orders them by what it knows of their use.

    base.py            what a policy is told and asked
    lru.py             least recently used
    lfu.py             least frequently used, with aging
    ttl.py             expiry after a fixed time, else least recently used
    workload_aware.py  least likely to be used again, by class of request
    registry.py        policies by name, with parameters
"""
