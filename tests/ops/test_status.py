"""What `stemroute status` and `stemroute reload` print, with a real gateway and fake workers."""

import asyncio

import msgspec
from rich.console import Console
from typer.testing import CliRunner

from cluster.protocol import Load
from ops.cli import app
from ops.status import cache_table, encoder_line
from tests.router.support import Rig, report
from tests.router.test_worker_admin import VIEW, changing, telling


def printed(renderable) -> str:
    console = Console(width=200, record=True, file=None)
    with console.capture() as capture:
        console.print(renderable)
    return capture.get()


def test_the_cache_of_each_worker_in_one_line():
    silent = {"w1": "no answer within 5 s"}
    text = printed(cache_table({"workers": [msgspec.to_builtins(VIEW)], "silent": silent}))
    line = next(line for line in text.splitlines() if line.startswith("w0"))
    assert " ".join(line.split()) == "w0 lru 3 2 1 64% 4/0/0 12.5 s 5 256 25%"
    assert "no cache statistics from w1: no answer within 5 s" in text


def test_a_worker_that_did_nothing_yet_has_no_ratio():
    fresh = msgspec.structs.replace(
        VIEW, reused_tokens=0, computed_prompt_tokens=0, mean_eviction_age_s=None
    )
    text = printed(cache_table({"workers": [msgspec.to_builtins(fresh)], "silent": {}}))
    assert text.splitlines()[1].split()[5:8] == ["-", "4/0/0", "-"]


def test_the_encoder_of_a_model_in_one_line():
    info = {"model": "m", "library": "tokenizers", "version": "1.2", "reason": "it differs"}
    assert encoder_line(info) == "m: prompts are encoded by tokenizers 1.2, because it differs"
    assert encoder_line({**info, "reason": ""}) == "m: prompts are encoded by tokenizers 1.2"


async def test_the_commands_ask_a_gateway():
    async with Rig() as rig:
        order = []
        rig.workers[0].others["GET /stats"] = telling(VIEW)
        rig.workers[0].others["POST /admin/weights"] = changing(order, rig.workers[0])

        def run(*arguments):
            command = [*arguments, "--url", rig.gateway.url]
            return asyncio.to_thread(CliRunner().invoke, app, command)

        await rig.complete()  # the gateway fetches the tokenizer
        status = await run("status")
        assert "w0" in status.output
        assert "tiny: prompts are encoded by fastokens" in status.output
        assert "4/0/0" in status.output
        changed = await run("reload", "--model", "/m/next")
        assert (changed.exit_code, order) == (0, [("w0", "/m/next", True)])
        assert "w0: weights d1, epoch 7" in changed.output
        rig.workers[0].others["POST /admin/weights"] = changing(order, rig.workers[0], 400)
        refused = await run("reload", "--model", "/m/other")
        assert refused.exit_code == 1
        assert "another architecture" in refused.output


async def test_a_worker_that_disagrees_is_shown_and_the_command_fails():
    async with Rig() as rig:
        rig.fleet.on_report(report("w0", load=Load(cached_blocks=50)))
        rig.follower.status.disagreeing = {"w0": 3}
        command = ["status", "--url", rig.gateway.url]
        status = await asyncio.to_thread(CliRunner().invoke, app, command)
        words = " ".join(status.output.split())
        assert "w0: it reports 50 cached blocks, but has published 0" in words
        assert status.exit_code == 2
