import asyncio
import os
import signal
import subprocess
import sys
import threading

import pytest

from loadgen.cli import main, split_policies, spread_goodput
from ops.demo import GROUPS, TURNS, USERS, loadgen_arguments
from tests.loadgen.fake_gateway import FakeGateway, serving, whole_answer

SMALL = ["--groups=2", "--users=2", "--turns=2", "--system-tokens=30", "--output-tokens=4"]
QUICK = ["--request-rate", "200", "--num-warmups", "1", "--max-client-lag-ms", "30000"]


@pytest.fixture
def gateway():
    """A fake gateway on a loop of its own; yields it with its URL."""
    fake = FakeGateway()
    loop = asyncio.new_event_loop()
    ready, url = threading.Event(), []

    async def serve():
        stop = asyncio.Event()
        fake.soon = loop.call_soon_threadsafe
        fake.stop = lambda: fake.soon(stop.set)
        async with serving(fake) as address:
            url.append(address)
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    ready.wait()
    fake.url = url[0]
    yield fake
    fake.stop()
    thread.join()
    loop.close()


def call(*arguments):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    return ended.value.code


def test_a_valid_comparison_prints_its_table_and_ends_with_0(gateway, tmp_path, capsys):
    code = call("compare", "--url", gateway.url, "--out", str(tmp_path), *SMALL, *QUICK)
    out = capsys.readouterr().out
    assert code == 0, out
    for word in ("round_robin", "locality", "cached tokens", "p99", "goodput", "imbalance"):
        assert word in out
    assert "locality against round_robin, 24 pairs: cached tokens × " in out, "three repeats"
    assert "\nvalid\n" in out
    assert f"report: {tmp_path / 'report.html'}" in out
    assert "\x1b" not in out


def test_an_invalid_comparison_prints_each_reason_and_ends_with_3(gateway, tmp_path, capsys):
    gateway.left_blocks = 1

    async def fewer(gateway, request, body):
        gateway.requests_total += 1
        return await whole_answer(gateway, request, body)

    gateway.behave = fewer
    code = call(
        "run", "--url", gateway.url, "--out", str(tmp_path), *SMALL, *QUICK,
        "--goodput", "ttft:60000", "tpot:60000",
    )  # fmt: skip
    out = capsys.readouterr().out
    assert code == 3
    assert "invalid: locality: the gateway routed 8 requests that were not ours" in out
    assert "\nvalid\n" not in out


def test_a_search_prints_what_each_policy_can_be_asked(gateway, tmp_path, capsys):
    code = call(
        "goodput", "--url", gateway.url, "--out", str(tmp_path), *SMALL, *QUICK,
        "--max-trials", "2", "--goodput", "ttft:60000",
    )  # fmt: skip
    out = capsys.readouterr().out
    assert code == 0, out
    assert "400.00" in out
    assert "90 % of the requests met TTFT 60,000 ms" in out
    assert (tmp_path / "goodput.json").exists()


def test_no_gateway_ends_with_1_and_a_sentence(tmp_path, capsys):
    code = call("compare", "--url", "http://127.0.0.1:1", "--out", str(tmp_path))
    assert code == 1
    assert "is the gateway running there?" in capsys.readouterr().err


@pytest.mark.parametrize(
    "wrong",
    [
        ["--policies", "locality,magic"],
        ["--request-rate", "0"],
        ["--goodput", "speed:1"],
        ["--workload", "other"],
        ["--repeats", "0"],
        ["--groups", "0"],
        ["--documents", "3"],
        ["--speed-up", "2"],
        ["--burstiness", "0"],
        ["--no-such-flag"],
    ],
)
def test_wrong_usage_ends_with_2(gateway, tmp_path, wrong):
    assert call("compare", "--url", gateway.url, "--out", str(tmp_path), *wrong) == 2
    assert gateway.bodies == []


def test_a_bad_request_file_ends_with_1(gateway, tmp_path, capsys):
    (tmp_path / "bad").write_text("{}\n")
    code = call("run", "--url", gateway.url, "--requests", str(tmp_path / "bad"))
    assert code == 1
    assert "line 1 is not a request" in capsys.readouterr().err


def ignore_ctrl_c():
    """As a shell does for what it begins in the background."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_with_130_and_puts_the_policy_back(gateway, tmp_path, how):
    gateway.policy = "locality"
    begun, held = threading.Event(), asyncio.Event()

    async def behave(gateway, request, body):
        begun.set()
        await held.wait()
        return await whole_answer(gateway, request, body)

    gateway.behave = behave
    process = subprocess.Popen(
        [
            sys.executable, "-c", "from loadgen.cli import main; main()", "compare",
            "--url", gateway.url, "--policies", "round_robin", "--out", str(tmp_path),
            "--num-warmups", "0", *SMALL,
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=ignore_ctrl_c,
    )  # fmt: skip
    try:
        assert begun.wait(60)
        assert gateway.policy == "round_robin"
        process.send_signal(how)
        _, err = process.communicate(timeout=60)
    finally:
        gateway.soon(held.set)
        if process.poll() is None:
            process.kill()
            process.wait()
    assert process.returncode == 130, err
    assert "interrupted" in err
    assert "Traceback" not in err
    assert gateway.policy == "locality"


def test_the_load_generator_needs_neither_torch_nor_ray():
    code = "import loadgen.cli, sys; print({'torch', 'ray', 'zmq'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ
    )
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize(
    ("given", "spread"),
    [
        (
            "--goodput ttft:1 tpot:2 --seed 3",
            "--goodput ttft:1 --goodput tpot:2 --seed 3",
        ),
        ("--goodput ttft:1 --goodput tpot:2", "--goodput ttft:1 --goodput tpot:2"),
        ("--url http:1 ttft:1", "--url http:1 ttft:1"),
    ],
)
def test_goodput_takes_several_bounds(given, spread):
    assert spread_goodput(given.split()) == spread.split()


@pytest.mark.parametrize(
    ("text", "policies"),
    [
        ("round_robin,locality", ("round_robin", "locality")),
        ("dynamo:a=1,b=2, locality", ("dynamo:a=1,b=2", "locality")),
        ("", ()),
    ],
)
def test_policies_are_split_at_commas_but_keep_their_parameters(text, policies):
    assert split_policies(text) == policies


def test_the_demo_is_understood(gateway, tmp_path):
    arguments = loadgen_arguments(gateway.url, request_rate=400.0, out=tmp_path)
    assert call(*arguments, "--max-client-lag-ms", "30000", "--num-warmups", "0") == 0
    assert len(gateway.bodies) == 2 * GROUPS * USERS * TURNS
