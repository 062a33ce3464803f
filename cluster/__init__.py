"""What routers and workers agree on, and how they are deployed."""
