"""How long a step must take at least, from what was measured of the device and the model's shape.

Pure arithmetic: bytes that have to be read and products that have to be computed.
"""

from __future__ import annotations

from typing import NamedTuple

from worker.models import LlamaModel


class DeviceRates(NamedTuple):
    """Measured on the device: bytes read or written, and products and sums, in a second."""

    bytes_per_s: float
    flop_per_s: float


class ModelCost(NamedTuple):
    """What a model costs.

    weight_bytes     read by every step: all but the embedding's rows that no token asks for
    token_flop       products and sums of one token outside attention, the head left out
    head_flop        those of the head, for each sampled token
    pair_flop        those of attention for a token and one that it sees
    kv_token_bytes   keys and values of one token in all layers
    """

    weight_bytes: int
    token_flop: int
    head_flop: int
    pair_flop: int
    kv_token_bytes: int


class Speed(NamedTuple):
    """Throughput of one kind of step beside its floors, in tokens a second.

    memory_bound, compute_bound   what the floors allow
    share                         of the lower one
    """

    what: str
    tokens_per_s: float
    memory_bound: float
    compute_bound: float

    @property
    def share(self) -> float:
        return self.tokens_per_s / min(self.memory_bound, self.compute_bound)


def cost_of(model: LlamaModel) -> ModelCost:
    """The costs of a model's shape."""
    config = model.config
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.query_heads * config.head_dim, config.kv_heads * config.head_dim
    layer = hidden * (queries + 2 * keys) + queries * hidden + 3 * hidden * inner
    head = config.vocab_size * hidden
    return ModelCost(
        weight_bytes=(config.layers * layer + head) * model.dtype.itemsize,
        token_flop=2 * config.layers * layer,
        head_flop=2 * head,
        pair_flop=4 * config.layers * queries,
        kv_token_bytes=2 * config.layers * keys * model.dtype.itemsize,
    )


def decode_speed(
    cost: ModelCost, rates: DeviceRates, batch: int, context: int, step_s: float
) -> Speed:
    """A step of `batch` decodes that see `context` tokens each and took `step_s` seconds."""
    read = cost.weight_bytes + batch * context * cost.kv_token_bytes
    computed = batch * (cost.token_flop + cost.head_flop + context * cost.pair_flop)
    return Speed(
        f"decode, batch {batch}, context {context}",
        batch / step_s,
        batch * rates.bytes_per_s / read,
        batch * rates.flop_per_s / computed,
    )


def prefill_speed(cost: ModelCost, rates: DeviceRates, tokens: int, step_s: float) -> Speed:
    """A prompt of `tokens` tokens, computed in one step of `step_s` seconds."""
    read = cost.weight_bytes + tokens * cost.kv_token_bytes
    pairs = tokens * (tokens + 1) // 2
    computed = tokens * cost.token_flop + cost.head_flop + pairs * cost.pair_flop
    return Speed(
        f"prefill, {tokens} tokens",
        tokens / step_s,
        tokens * rates.bytes_per_s / read,
        tokens * rates.flop_per_s / computed,
    )


def table(speeds: list[Speed]) -> str:
    """The figures as text, a line for each."""
    lines = [f"{'':34} {'tokens/s':>12} {'memory':>12} {'compute':>12} {'of floor':>9}"]
    lines += [
        f"{speed.what:34} {speed.tokens_per_s:12,.0f} {speed.memory_bound:12,.0f} "
        f"{speed.compute_bound:12,.0f} {speed.share:9.1%}"
        for speed in speeds
    ]
    return "\n".join(lines)
