"""Recorded traffic: request traces of four formats, read into one form.

trace = read_trace([Path("conversation.jsonl")], "mooncake", TraceOptions(speed_up=2))
trace.requests   list[TraceRequest], by arrival
trace.notes      what was changed or assumed on the way, in sentences for a summary
"""

from loadgen.traces.records import TraceError, TraceRequest
from loadgen.traces.shaping import Trace, TraceOptions, read_trace, trace_format

__all__ = [
    "Trace",
    "TraceError",
    "TraceOptions",
    "TraceRequest",
    "read_trace",
    "trace_format",
]
