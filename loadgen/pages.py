"""Pages that open without a network: one HTML file, its style within, no script."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

import jinja2

from loadgen import plots, wording


def page(template: str, **values: Any) -> str:
    """`template` of this package, filled. Values are escaped unless they are Markup."""
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_template),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    return environment.get_template(template).render(
        colours=plots.COLOURS,
        percent=wording.percent,
        milliseconds=wording.milliseconds,
        number=wording.number,
        **values,
    )


def _template(name: str) -> str:
    return files("loadgen").joinpath(name).read_text(encoding="utf-8")
