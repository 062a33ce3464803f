"""How long an emulated accelerator takes for a step, and how large its KV pool is.

The profiles of real accelerators are derived here from published figures of chip and model, with
the efficiencies below; docs/emulated.md shows them worked out. `stemroute calibrate` fits one from
the steps of a real engine.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from worker.prefill_speed import Speed

GIGA, TERA = 1e9, 1e12

BANDWIDTH_SHARE = 0.8
"""Of a chip's memory bandwidth that reading weights and KV reaches."""
FLOPS_SHARE = 0.5
"""Of a chip's dense FLOP/s that matrix products and attention of a long prefill reach."""
MEMORY_SHARE = 0.9
"""Of a chip's memory that weights and KV pool may take; vLLM's default."""
LAUNCH_S = 0.001
"""Host and launch time of a step that the chip does not hide."""
USUAL_BATCH = 32
"""Decoding sequences for which the weights read by a mixture of experts are counted."""


class ProfileError(ValueError):
    """A profile that cannot be had. Its text says which there are, or what is wrong in a file."""


class CostModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds of one step, linear in what the step does; none is negative.

    ```
    step_s                                        reading the weights, launching the kernels
    + prefill_token_s * prefill tokens            matrix products of the prompt
    + prefill_pair_s  * (prefill token, token it attends to)    attention: the quadratic part
    + decode_s        * decoding sequences        what each of them adds beside its context
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
        """Seconds of a step whose sequences compute `count` tokens after `start`: (start, count).

        One token is a decode. A prefill of `count` attends to
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
        """Seconds of a step in which `sequences` decode, and how much longer each next one is.

        `context_tokens` is what they attend to together in the first; each then grows by one.
        """
        first = self.step_s + self.decode_s * sequences + self.context_token_s * context_tokens
        return first, self.context_token_s * sequences

    def first_speed(self, chunk_tokens: int) -> Speed:
        """Of prefill in chunks of that size, as a worker fits it from its steps."""
        return Speed.rounded(self.prefill_token_s + self.step_s / chunk_tokens, self.prefill_pair_s)


class Profile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An accelerator with a model on it.

    kv_tokens        tokens that its KV pool holds, where the settings do not say
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
    """Published figures of an accelerator: bytes a second, dense FLOP a second (without sparsity)
    of products with weights and of attention, bytes.
    """

    bandwidth: float
    flops: float
    attention_flops: float
    memory: float


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """Published figures of a model.

    parameters, active    in all, and those that one token is multiplied with
    expert_parameters     of them in experts; 0 in a dense model
    experts, used         experts of a layer, and how many of them a token takes
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
        """Keys and values of one token in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_size * self.kv_bytes

    @property
    def flops_a_pair(self) -> int:
        """Of one query with one key in all layers: the score and its share of the values, a
        multiplication and an addition for each element of both."""
        return 4 * self.layers * self.query_heads * self.head_size

    @property
    def bytes_a_step(self) -> float:
        """Weights read by a step in which `USUAL_BATCH` sequences decode: all that is no expert,
        and the experts that at least one of them takes, chosen evenly."""
        touched = 1 - (1 - self.used / self.experts) ** USUAL_BATCH
        dense = self.parameters - self.expert_parameters
        return (dense + self.expert_parameters * touched) * self.weight_bytes


def derive(chip: Chip, model: Model) -> Profile:
    """The profile of one chip with the model.

    A step reads the weights; a decode reads its context; a prefill token costs two FLOP for each
    active parameter, and each pair of its attention `flops_a_pair`. Summing them is an upper
    bound: real kernels overlap reading with computing.
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
"""The H200 with weights in FP8; all else in bfloat16."""

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
    # Takes the same for every step: for measuring everything around the accelerator.
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
    """The profile of that name, or of that TOML or JSON file. Raises ProfileError."""
    if name.endswith(FILE_SUFFIXES):
        return read_profile(Path(name))
    if name not in PROFILES:
        raise ProfileError(
            f"unknown emulated profile {name!r}; use {', '.join(PROFILES)}, or a file "
            f"({' or '.join(FILE_SUFFIXES)})"
        )
    return PROFILES[name]


def read_profile(path: Path) -> Profile:
    """The profile in a file with the fields of `Profile`. Raises ProfileError."""
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
