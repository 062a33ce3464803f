"""`python -m tests.chaos`: see `tests.chaos.run`."""

from tests.chaos.run import main

if __name__ == "__main__":
    raise SystemExit(main())
