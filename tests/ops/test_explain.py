"""`stemroute explain`, from a real gateway's answer to the table."""

import asyncio
import json

import pytest
from rich.console import Console
from typer.testing import CliRunner

from cluster.protocol import Load
from ops.cli import app
from ops.explain import explain_table, verdict
from tests.router.support import Rig, card, report
from tests.router.test_forwarding import chain_of_text

TEXT = "a prompt of some blocks"


async def run(*arguments: str):
    """The command in a thread: the gateway that it asks lives on this loop."""
    return await asyncio.to_thread(CliRunner().invoke, app, ["explain", *arguments])


async def test_the_command_prints_the_table_and_the_verdict():
    async with Rig(workers=2) as rig:
        rig.fleet.on_report(
            report("w1", stored=chain_of_text(TEXT), load=Load(running=1, free_blocks=9))
        )
        rig.fleet.on_card(card("away", state="draining"))
        result = await run("--prompt", TEXT, "--url", rig.gateway.url)
        assert result.exit_code == 0, result.output
        lines = result.output.splitlines()
        assert "completion of 23 tokens for tiny (5 full blocks of 4), policy locality" in lines[0]
        table = {words[words[0] == "→"]: words for line in lines[2:5] if (words := line.split())}
        assert table["w1"] == ["→", "w1", "20", "0", "3", "0", "1", "9", "6"]
        assert table["w0"] == ["w0", "0", "0", "23", "0", "0", "1000", "23"]
        assert "it is draining" in lines[4]
        assert "w1 is chosen: no worker holds more of its prefix" in lines[5]
        assert "w0 is second best, its cost is higher by 17 (283.3%)" in lines[5]


async def test_the_table_says_why_the_policy_left_a_worker_out():
    async with Rig(workers=3, policy="aibrix") as rig:
        rig.fleet.on_report(report("w2", load=Load(running=5, free_blocks=9)))
        result = await run("--prompt", TEXT, "--url", rig.gateway.url)
        (line,) = [line for line in result.output.splitlines() if " w2 " in line]
        assert "-  it is busy: its batch exceeds the mean" in line


async def test_a_chat_a_file_and_json(tmp_path):
    async with Rig() as rig:
        result = await run("--chat", "hi", "--url", rig.gateway.url, "--json")
        assert json.loads(result.output)["kind"] == "chat"
        body = tmp_path / "body.json"
        body.write_text(json.dumps({"model": "tiny", "prompt": TEXT}))
        result = await run("--file", str(body), "--url", rig.gateway.url, "--json")
        answer = json.loads(result.output)
        assert (answer["prompt_tokens"], answer["chosen"]) == (23, "w0")


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ([], 2),
        (["--prompt", "x", "--chat", "y"], 2),
        (["--file", "no such file"], 1),
        (["--prompt", "x", "--url", "http://127.0.0.1:1"], 1),
    ],
)
async def test_what_cannot_be_explained_ends_with_a_sentence(arguments, code):
    result = await run(*arguments)
    assert result.exit_code == code
    assert "stemroute:" in result.output


@pytest.mark.parametrize(
    ("margin", "share", "words"),
    [
        (5.0, 0.5, "b is second best, its cost is higher by 5 (50.0%)"),
        (0.0, 0.0, "b has the same cost"),
        (-1.0, -0.01, "b costs less by 1 (1.0%): a near-tie is decided by load"),
        (5.0, None, "its cost is higher by 5"),
    ],
)
def test_the_verdict_in_words(margin, share, words):
    answer = {
        "chosen": "a",
        "because": "it is so",
        "second": "b",
        "margin": margin,
        "margin_share": share,
    }
    assert words in verdict(answer)


def test_no_candidate_is_said():
    answer = {
        "kind": "chat",
        "prompt_tokens": 1,
        "model": "m",
        "blocks": 0,
        "block_size": 16,
        "policy": "locality",
        "workers": [],
        "chosen": "",
    }
    console = Console(width=100)
    with console.capture() as captured:
        console.print(explain_table(answer))
    assert "no worker can serve it" in captured.get()
