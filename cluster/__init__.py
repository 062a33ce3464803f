"""What routers and workers agree on: block hashes, messages, the bus, settings."""
