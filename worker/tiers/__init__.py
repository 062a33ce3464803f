"""Cold tiers of the KV cache: blocks that had to leave the device, in host memory and on disk."""
