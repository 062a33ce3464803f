"""Every setting as a page: `python -m ops.settings_doc > docs/settings.md`.

The meanings are those of the docstrings in `cluster.settings`, so the page cannot differ from them.
"""

from __future__ import annotations

import inspect
import re
import sys

import msgspec

from cluster.settings import (
    BusSettings,
    GatewaySettings,
    ServeSettings,
    Settings,
    WorkerSettings,
)

SECTIONS: list[tuple[str, type[msgspec.Struct], str]] = [
    ("The whole", Settings, ""),
    ("Gateway", GatewaySettings, "gateway."),
    ("Worker", WorkerSettings, "worker."),
    ("Ray Serve", ServeSettings, "serve."),
    ("Bus", BusSettings, "bus."),
]

INTRODUCTION = """# Settings

One tree: a TOML file (`--config FILE`) < environment variables < flags of the command. The
variable of `gateway.port` is `STEMROUTE_GATEWAY_PORT`, that of `pool` is `STEMROUTE_POOL`. A name
that does not exist and a value of the wrong type are errors that say where they come from.

```toml
pool = "chat"
redis_url = "redis://10.0.0.5:6379"

[gateway]
host = "0.0.0.0"
policy = "locality"
```
"""


def meanings(struct: type[msgspec.Struct]) -> dict[str, str]:
    """Field -> meaning, from the lines `field   meaning` of a struct's docstring."""
    found: dict[str, str] = {}
    last = ""
    for line in (inspect.getdoc(struct) or "").splitlines()[1:]:
        entry = re.match(r"^([a-z_]+) +(\S.*)$", line)
        if entry and entry.group(1) in struct.__struct_fields__:
            last = entry.group(1)
            found[last] = entry.group(2)
        elif last and line.startswith(" "):
            found[last] += " " + line.strip()
    return found


def render() -> str:
    """The page in Markdown."""
    parts = [INTRODUCTION]
    for title, struct, prefix in SECTIONS:
        lines = [f"## {title}", "", "| setting | default | meaning |", "|---|---|---|"]
        said, defaults = meanings(struct), struct()
        for field in struct.__struct_fields__:
            value = getattr(defaults, field)
            if isinstance(value, msgspec.Struct):
                continue
            shown = repr(value).replace("'", '"')
            lines.append(f"| `{prefix}{field}` | `{shown}` | {said.get(field, '')} |")
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


if __name__ == "__main__":
    sys.stdout.write(render())
