"""`python -m loadgen` is the command `loadgen`."""

from loadgen.cli import main

main()
