"""Profiles of emulated accelerators: the duration of a step and the size of the KV pool.

The profiles of real accelerators are derived from published figures of chip and model with the
efficiencies below; docs/emulated.md shows the calculation. `stemroute calibrate` fits one from
the steps of a real engine.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from worker.prefill_speed import Speed

GIGA, TERA = 1e9, 1e12

BANDWIDTH_SHARE = 0.8
"""Share of a chip's memory bandwidth reached when reading weights and KV."""
FLOPS_SHARE = 0.5
"""Share of a chip's dense FLOP/s reached by matrix products and attention of a long prefill."""
MEMORY_SHARE = 0.9
"""Share of a chip's memory for weights and KV pool; vLLM's default."""
LAUNCH_S = 0.001
"""Host and launch time of a step that does not overlap with computing."""
USUAL_BATCH = 32
"""Batch size at which the weights read by a mixture of experts are counted."""


class ProfileError(ValueError):
    """A profile that cannot be used. The message lists the profiles or the error in a file."""


class CostModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds of one step, linear in what the step does; none is negative.

    ```
    step_s                                        reading the weights, launching the kernels
    + prefill_token_s * prefill tokens            matrix products of the prompt
    + prefill_pair_s  * (prefill token, token it attends to)    attention: the quadratic part
    + decode_s        * decoding sequences        cost of each, excluding its context
    + context_token_s * context tokens of all decodes           reading their KV
    ```
    """

    step_s: float
    prefill_token_s: float = 0.0
    prefill_pair_s: float = 0.0
    decode_s: float = 0.0
    context_token_s: float = 0.0

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name} must not be negative, got {getattr(self, name):g}")

    def seconds(self, parts: Iterable[tuple[int, int]]) -> float:
        """Seconds of a step; each sequence, (start, count), computes `count` tokens after `start`.

        A count of 1 is a decode. A prefill of `count` attends to
        `count * start + count * (count + 1) / 2` pairs.
        """
        total = self.step_s
        for start, count in parts:
            if count == 1:
                total += self.decode_s + self.context_token_s * (start + 1)
            else:
                pairs = count * start + count * (count + 1) / 2
                total += self.prefill_token_s * count + self.prefill_pair_s * pairs
        return total

    def decode_seconds(self, sequences: int, context_tokens: int) -> tuple[float, float]:
        """Seconds of a step in which `sequences` decode, and the increase per following step.

        `context_tokens` is their total context in the first step; each context then grows by one.
        """
        first = self.step_s + self.decode_s * sequences + self.context_token_s * context_tokens
        return first, self.context_token_s * sequences

    def first_speed(self, chunk_tokens: int) -> Speed:
        """Prefill speed with chunks of this size, as a worker fits it from its steps."""
        return Speed.rounded(self.prefill_token_s + self.step_s / chunk_tokens, self.prefill_pair_s)


class Profile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An emulated accelerator with its model.

    kv_tokens        size of its KV pool, unless the settings give one
    context_tokens   longest prompt + output
    """

    cost: CostModel
    kv_tokens: int
    context_tokens: int

    def __post_init__(self) -> None:
        for name in ("kv_tokens", "context_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


class Chip(msgspec.Struct, frozen=True, kw_only=True):
    """Published figures of an accelerator: bytes per second, dense FLOP per second (without
    sparsity) of products with weights and of attention, and bytes of memory.
    """

    bandwidth: float
    flops: float
    attention_flops: float
    memory: float


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """Published figures of a model.

    parameters, active    in total, and those used for one token
    expert_parameters     of the total, those in experts; 0 in a dense model
    experts, used         experts per layer, and those used for one token
    weight_bytes          of one parameter
    kv_bytes              of one element of keys or values
    """

    parameters: float
    active: float
    layers: int
    query_heads: int
    kv_heads: int
    head_size: int
    context_tokens: int
    weight_bytes: int = 2
    kv_bytes: int = 2
    expert_parameters: float = 0.0
    experts: int = 1
    used: int = 1

    @property
    def kv_bytes_a_token(self) -> int:
        """Bytes of keys and values of one token in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_size * self.kv_bytes

    @property
    def flops_a_pair(self) -> int:
        """FLOP of one query-key pair in all layers: the score and the weighted value, a
        multiplication and an addition per element of both."""
        return 4 * self.layers * self.query_heads * self.head_size

    @property
    def bytes_a_step(self) -> float:
        """Weights read by a step in which `USUAL_BATCH` sequences decode: all except the experts,
        and the experts that at least one sequence uses, if chosen uniformly."""
        touched = 1 - (1 - self.used / self.experts) ** USUAL_BATCH
        dense = self.parameters - self.expert_parameters
        return (dense + self.expert_parameters * touched) * self.weight_bytes


def derive(chip: Chip, model: Model) -> Profile:
    """The profile of one chip with the model.

    A step reads the weights; a decode reads its context; a prefill token costs two FLOP per active
    parameter and `flops_a_pair` per attended token. Their sum is an upper bound: real kernels
    overlap reading with computing.
    """
    read = chip.bandwidth * BANDWIDTH_SHARE
    room = chip.memory * MEMORY_SHARE - model.parameters * model.weight_bytes
    return Profile(
        cost=CostModel(
            step_s=LAUNCH_S + model.bytes_a_step / read,
            prefill_token_s=2 * model.active / (chip.flops * FLOPS_SHARE),
            prefill_pair_s=model.flops_a_pair / (chip.attention_flops * FLOPS_SHARE),
            context_token_s=model.kv_bytes_a_token / read,
        ),
        kv_tokens=int(room // model.kv_bytes_a_token),
        context_tokens=model.context_tokens,
    )


H20 = Chip(bandwidth=4.0 * TERA, flops=148 * TERA, attention_flops=148 * TERA, memory=96 * GIGA)
H100_SXM = Chip(
    bandwidth=3.35 * TERA, flops=989 * TERA, attention_flops=989 * TERA, memory=80 * GIGA
)
H200_FP8 = Chip(
    bandwidth=4.8 * TERA, flops=1979 * TERA, attention_flops=989 * TERA, memory=141 * GIGA
)
"""The H200 with weights in FP8 and everything else in bfloat16."""

QWEN3_30B_A3B = Model(
    parameters=30.5 * GIGA,
    active=3.3 * GIGA,
    layers=48,
    query_heads=32,
    kv_heads=4,
    head_size=128,
    context_tokens=131_072,
    expert_parameters=48 * 128 * 3 * 2048 * 768,
    experts=128,
    used=8,
)
LLAMA3_8B = Model(
    parameters=8.03 * GIGA,
    active=8.03 * GIGA,
    layers=32,
    query_heads=32,
    kv_heads=8,
    head_size=128,
    context_tokens=131_072,
)
LLAMA3_70B_FP8 = Model(
    parameters=70.6 * GIGA,
    active=70.6 * GIGA,
    layers=80,
    query_heads=64,
    kv_heads=8,
    head_size=128,
    context_tokens=131_072,
    weight_bytes=1,
)

PROFILES = {
    # The same time for every step: for measuring everything except the accelerator.
    "steady-25ms": Profile(
        cost=CostModel(step_s=0.025),
        kv_tokens=524_288,
        context_tokens=8192,
    ),
    "h20-qwen3-30b-a3b": derive(H20, QWEN3_30B_A3B),
    "h100-llama3-8b": derive(H100_SXM, LLAMA3_8B),
    "h200-llama3-70b-fp8": derive(H200_FP8, LLAMA3_70B_FP8),
}

FILE_SUFFIXES = (".toml", ".json")


def profile_of(name: str) -> Profile:
    """The profile with this name or in this TOML or JSON file. Raises ProfileError."""
    if name.endswith(FILE_SUFFIXES):
        return read_profile(Path(name))
    if name not in PROFILES:
        raise ProfileError(
            f"unknown emulated profile {name!r}; use {', '.join(PROFILES)}, or a file "
            f"({' or '.join(FILE_SUFFIXES)})"
        )
    return PROFILES[name]


def read_profile(path: Path) -> Profile:
    """Read a profile from a file with the fields of `Profile`. Raises ProfileError."""
    decode = msgspec.toml.decode if path.suffix == ".toml" else msgspec.json.decode
    try:
        return decode(path.expanduser().read_bytes(), type=Profile)
    except OSError as error:
        raise ProfileError(f"cannot read the profile {path}: {error.strerror}") from error
    except msgspec.MsgspecError as error:
        raise ProfileError(f"the profile {path} is invalid: {error}") from error


def write_profile(profile: Profile, comment: str) -> str:
    """The profile as a TOML file that `read_profile` reads, with `comment` before it."""
    lines = [f"# {line}" for line in comment.splitlines()]
    lines += [f"kv_tokens = {profile.kv_tokens}", f"context_tokens = {profile.context_tokens}"]
    lines += ["", "[cost]"]
    cost = profile.cost
    lines += [f"{name} = {getattr(cost, name):.6g}" for name in cost.__struct_fields__]
    return "\n".join(lines) + "\n"
