"""Look-ups in Dynamo's radix tree, run by the Python that has `ai-dynamo-runtime`.

    PEERS/bin/python radix_peer.py < chains.json

Reads {"held": [[worker, [block, …]], …], "asked": [[block, …], …]}, prints the seconds of each
look-up and the depths it found for the first one. It needs no network: the tree is fed directly.
"""

import json
import sys
import time

from dynamo._core import RadixTree


def main() -> None:
    chains = json.load(sys.stdin)
    tree = RadixTree()
    for number, (worker, blocks) in enumerate(chains["held"]):
        stored = [{"block_hash": block, "tokens_hash": block} for block in blocks]
        data = {"stored": {"parent_hash": None, "blocks": stored}}
        event = {"event_id": number, "data": data, "dp_rank": 0}
        tree.apply_event(worker, json.dumps(event).encode())
    times_s = []
    for blocks in chains["asked"]:
        began = time.perf_counter()
        tree.find_matches(blocks)
        times_s.append(time.perf_counter() - began)
    scores = tree.find_matches(chains["asked"][0]).scores
    print(json.dumps({"times_s": times_s, "depths": sorted(scores.values())}))


if __name__ == "__main__":
    main()
