"""Fleets in virtual time: the router's and the engine's own objects, and a clock that jumps.

prompts.py    requests as tokens and block hashes
worker.py     one worker: the engine core, and how long its steps take
reporting.py  what a worker publishes, and when
events.py     the clock
fleet.py      gateway and workers; requests in, outcomes out
run.py        policies compared on the same requests; the summary
command.py    `loadgen simulate`
"""
