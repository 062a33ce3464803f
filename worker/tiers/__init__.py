"""Cold tiers of the KV cache: blocks that left the device, in host memory and on disk."""
