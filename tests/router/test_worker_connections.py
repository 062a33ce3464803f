"""HTTP to a worker, against a server that sends exactly the bytes that a test says."""

import asyncio
from types import SimpleNamespace

import pytest

from router import worker_connections
from router.worker_connections import (
    MAX_FRAMING_BYTES,
    WorkerConnections,
    WorkerLost,
    WorkerStalled,
    WorkerUnreachable,
)
from tests.router.test_forwarding import refused_address

OK = b"HTTP/1.1 200 OK\r\nX-Told: 7\r\nContent-Length: 2\r\n\r\nhi"
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: Chunked\r\n\r\n"


class Server:
    """Accepts connections; a test reads what came and writes what goes."""

    async def __aenter__(self):
        self.accepted = asyncio.Queue()
        self._writers = []
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        self.address = f"http://127.0.0.1:{port}"
        self.workers = WorkerConnections({"X-Key": "k"}, connect_timeout_s=5.0)
        return self

    async def __aexit__(self, *_):
        self.workers.close()
        for writer in self._writers:
            writer.close()
        self._server.close()
        await self._server.wait_closed()
        await asyncio.sleep(0)
        assert not self.workers._connections()

    def _accept(self, reader, writer):
        self._writers.append(writer)
        self.accepted.put_nowait((reader, writer))

    def post(self, body=b"body"):
        return asyncio.create_task(self.workers.post(self.address, "/generate", body, 30.0))

    async def asked(self):
        """A request on a new connection: its task, and both ends of the connection."""
        posting = self.post()
        return posting, *await self.accepted.get()

    async def answered(self, sent):
        """A request on a new connection, and what was sent to it: the answer, and both ends."""
        posting, reader, writer = await self.asked()
        writer.write(sent)
        return await posting, reader, writer


def also(function, more):
    """A function that does both."""

    def both(*arguments):
        function(*arguments)
        more()

    return both


async def read_request(reader, length=4):
    head = await reader.readuntil(b"\r\n\r\n")
    return head, await reader.readexactly(length)


async def test_a_request_goes_out_whole_and_its_answer_comes_back():
    async with Server() as server:
        posting, reader, writer = await server.asked()
        head, body = await read_request(reader)
        host = server.address.removeprefix("http://").encode()
        assert head.split(b"\r\n")[:-2] == [
            b"POST /generate HTTP/1.1",
            b"Host: " + host,
            b"X-Key: k",
            b"Content-Length: 4",
        ]
        assert body == b"body"
        writer.write(OK)
        answer = await posting
        assert (answer.status, answer.headers["x-told"]) == (200, "7")
        assert await answer.read() == b"hi"
        assert await answer.some() == b""
        answer.close()


async def test_a_connection_whose_answer_was_read_serves_the_next_request():
    async with Server() as server:
        posting, reader, writer = await server.asked()
        for _ in range(3):
            await read_request(reader)
            writer.write(CHUNKED + b"2\r\nhi\r\n0\r\n\r\n")
            answer = await posting
            assert await answer.read() == b"hi"
            answer.close()
            answer.close()  # once is enough, twice is harmless
            posting = server.post()
        await read_request(reader)
        assert server.accepted.empty()
        posting.cancel()


@pytest.mark.parametrize(
    "sent",
    [
        b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nhi",
        b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nhi",
        CHUNKED + b"2\r\nhi\r\n",  # not read to its end
    ],
)
async def test_other_connections_are_cut_and_the_worker_notices(sent):
    async with Server() as server:
        posting, reader, writer = await server.asked()
        await read_request(reader)
        writer.write(sent)
        answer = await posting
        assert await answer.some() == b"hi"
        answer.close()
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await reader.readexactly(1)


async def test_idle_connections_are_given_up_in_time(monkeypatch):
    async with Server() as server:
        answer, _, writer = await server.answered(OK)
        await answer.read()
        answer.close()
        monkeypatch.setattr(worker_connections, "IDLE_S", -1.0)
        posting = server.post()
        _, writer = await server.accepted.get()  # a new one
        writer.write(OK)
        (await posting).close()


async def test_an_idle_connection_that_the_worker_closes_is_not_used_again(monkeypatch):
    async with Server() as server:
        answer, _, writer = await server.answered(OK)
        await answer.read()
        answer.close()
        lost = asyncio.Event()
        monkeypatch.setattr(server.workers, "_lost", also(server.workers._lost, lost.set))
        writer.close()
        await asyncio.wait_for(lost.wait(), 10)
        assert not server.workers._idle
        answer, _, _ = await server.answered(OK)
        answer.close()


async def test_a_worker_that_has_left_is_forgotten(monkeypatch):
    async with Server() as server:
        answer, reader, writer = await server.answered(OK)
        await read_request(reader)
        await answer.read()
        answer.close()
        posting = server.post()
        await read_request(reader)
        lost = asyncio.Event()
        monkeypatch.setattr(server.workers, "_lost", also(server.workers._lost, lost.set))
        writer.close()
        with pytest.raises(WorkerLost):
            await posting
        await asyncio.wait_for(lost.wait(), 10)
        assert not server.workers._idle


async def test_a_head_may_come_in_pieces_and_after_an_interim_one():
    async with Server() as server:
        posting, _, writer = await server.asked()
        for place in range(0, len(OK), 7):
            writer.write(
                (b"HTTP/1.1 102 Processing\r\n\r\n" if not place else b"") + OK[place:][:7]
            )
            await writer.drain()
            await asyncio.sleep(0)
        assert await (await posting).read() == b"hi"


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
async def test_chunks_give_their_content_however_they_are_cut(size):
    sent = CHUNKED + b"2;a=b\r\nab\r\n10\r\n" + b"c" * 16 + b"\r\n0\r\nX-Told: no\r\nX-B: 1\r\n\r\n"
    async with Server() as server:
        posting, reader, writer = await server.asked()
        for _ in range(2):
            await read_request(reader)
            for place in range(0, len(sent), size):
                writer.write(sent[place : place + size])
                await asyncio.sleep(0)
            answer = await posting
            assert await answer.read() == b"ab" + b"c" * 16
            assert answer.headers == {"transfer-encoding": "Chunked"}  # trailers are no headers
            answer.close()
            posting = server.post()
        assert server.accepted.empty()
        posting.cancel()


@pytest.mark.parametrize("more", [OK, b"more"])
async def test_a_connection_with_bytes_after_an_answer_is_not_used_again(more):
    async with Server() as server:
        answer, reader, _ = await server.answered(OK + more)
        assert await answer.read() == b"hi"
        answer.close()
        await server.answered(OK)  # on a new connection
        await read_request(reader)
        assert await reader.read() == b""


async def test_an_answer_that_nobody_asked_for_ends_the_connection(monkeypatch):
    async with Server() as server:
        answer, _, writer = await server.answered(OK)
        await answer.read()
        answer.close()
        lost = asyncio.Event()
        monkeypatch.setattr(server.workers, "_lost", also(server.workers._lost, lost.set))
        writer.write(OK)
        await asyncio.wait_for(lost.wait(), 10)
        assert not server.workers._idle


async def test_a_body_without_length_ends_with_the_connection():
    async with Server() as server:
        answer, _, writer = await server.answered(b"HTTP/1.1 200 OK\r\n\r\nall ")
        assert await answer.some() == b"all "
        writer.write(b"of it")
        writer.close()
        assert await answer.read() == b"of it"


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"HTTP/1.1 200 OK\r\nContent-Le",
        b"SSH-2.0\r\n\r\n",
        b"HTTP/1.1 abc\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nno header\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Type: a\nX-For-The-Client: b\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Type: a\rb\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked, gzip\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\nhi",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX-A: a\r\n b\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n" + OK,
        b"HTTP/2.0 200 OK\r\n\r\n",
        b"HTTP/1.1 000 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX-A: " + b"a" * MAX_FRAMING_BYTES,
    ],
)
async def test_a_worker_that_sends_no_answer_is_lost(sent):
    async with Server() as server:
        posting, _, writer = await server.asked()
        writer.write(sent)
        writer.close()
        with pytest.raises(WorkerLost):
            await posting


@pytest.mark.parametrize(
    "rest",
    [
        b"",
        b"2\r\nhi\r\n",
        b"2\r\nhi\r\n0\r\n",
        b"9\r\nhi",
        b"nonsense\r\n",
        b"-1\r\n",
        b"2\r\nabc\r\n0\r\n\r\n",
        b"2\r\nab\rc",
        b"2\nab\n0\n\n",
        b"0\r\nno trailer\r\n\r\n",
        b"1;" + b"a" * MAX_FRAMING_BYTES,
        b"2\r\nhi\r\n0\r\nX-A: " + b"a" * MAX_FRAMING_BYTES,
    ],
)
async def test_an_answer_that_breaks_off_is_lost(rest):
    async with Server() as server:
        answer, _, writer = await server.answered(CHUNKED)
        writer.write(rest)
        writer.close()
        with pytest.raises(WorkerLost):
            await answer.read()
        answer.close()


async def test_nobody_at_the_address_is_said_so():
    workers = WorkerConnections({}, connect_timeout_s=5.0)
    with pytest.raises(WorkerUnreachable, match=r"127\.0\.0\.1"):
        await workers.post(refused_address(), "/generate", b"", 30.0)


async def test_a_worker_that_does_not_begin_in_time_is_not_waited_for():
    async with Server() as server:
        posting = asyncio.create_task(
            server.workers.post(server.address, "/generate", b"body", 0.0)
        )
        reader, _ = await server.accepted.get()
        with pytest.raises(TimeoutError):
            await posting
        assert (await reader.read()).endswith(b"body")  # and then the end: the worker is told


async def test_a_head_that_comes_in_the_last_moment_is_in_time():
    async with Server() as server:
        answer, reader, _ = await server.answered(OK)
        await read_request(reader)
        await answer.read()
        answer.close()
        (connection,) = server.workers._connections()
        loop, timers = connection._loop, []

        def call_later(delay, call, *arguments):
            timers.append(lambda: call(*arguments))
            return loop.call_later(delay, call, *arguments)

        connection._loop = SimpleNamespace(call_later=call_later, create_future=loop.create_future)
        posting = server.post()
        await read_request(reader)
        connection.data_received(CHUNKED)  # as the loop does: first what came, then timers
        timers[0]()
        answer = await posting
        reading = asyncio.create_task(answer.read())
        await asyncio.sleep(0)
        connection.data_received(b"2\r\nhi\r\n0\r\n\r\n")
        assert await reading == b"hi"
        answer.close()


async def test_giving_up_before_the_answer_cuts_the_connection():
    async with Server() as server:
        posting, reader, _ = await server.asked()
        await read_request(reader)
        posting.cancel()
        assert await reader.read() == b""


async def test_pieces_in_quick_succession_are_read_together(monkeypatch):
    monkeypatch.setattr(worker_connections, "GATHER_S", 3600.0)
    async with Server() as server:
        answer, _, writer = await server.answered(CHUNKED + b"1\r\na\r\n")
        assert await answer.some() == b"a"  # the first at once
        reading = asyncio.create_task(answer.some())
        for piece in (b"1\r\nb\r\n", b"1\r\nc\r\n"):
            writer.write(piece)
            await asyncio.sleep(0.0)
        writer.write(b"0\r\n\r\n")  # the end waits for nothing
        assert await asyncio.wait_for(reading, 10) == b"bc"
        assert await answer.some() == b""


async def test_a_worker_is_not_read_from_while_the_client_is_slow(monkeypatch):
    monkeypatch.setattr(worker_connections, "HIGH_WATER_BYTES", 1000)
    async with Server() as server:
        answer, _, writer = await server.answered(CHUNKED)
        (connection,) = server.workers._connections()
        paused = asyncio.Event()
        transport = connection.transport
        connection.transport = SimpleNamespace(
            pause_reading=also(transport.pause_reading, paused.set),
            resume_reading=transport.resume_reading,
            abort=transport.abort,
        )
        writer.write(b"7d0\r\n" + b"x" * 2000 + b"\r\n")
        await asyncio.wait_for(paused.wait(), 10)
        connection.transport = transport
        assert connection._paused
        assert len(await answer.some()) == 2000
        assert not connection._paused
        writer.write(b"1\r\ny\r\n0\r\n\r\n")
        assert await answer.read() == b"y"


async def test_all_requests_at_a_worker_can_be_failed_whatever_they_wait_for():
    async with Server() as server, Server() as other:
        kept, reader, writer = await server.asked()
        await read_request(reader)
        writer.write(OK)
        answer = await kept
        assert await answer.read() == b"hi"
        begun, _, writer = await server.answered(CHUNKED + b"2\r\nhi\r\n")
        without, *_ = await server.asked()
        answer.close()
        elsewhere, _, far = await other.asked()
        server.workers.fail(server.address, WorkerStalled("it is silent"))
        assert await begun.some() == b"hi"
        with pytest.raises(WorkerStalled, match="it is silent"):
            await begun.some()
        with pytest.raises(WorkerStalled, match="it is silent"):
            await without
        begun.close()
        again, _, writer = await server.asked()  # on a new connection
        for waiting, end in ((again, writer), (elsewhere, far)):
            end.write(OK)
            answer = await waiting
            assert await answer.read() == b"hi"
            answer.close()


async def test_bytes_of_a_worker_are_signs_of_life(monkeypatch):
    async with Server() as server:
        now = 1000.0
        assert server.workers.heard_at(server.address) == 0
        monkeypatch.setattr(worker_connections, "time", SimpleNamespace(monotonic=lambda: now))
        answer, _, writer = await server.answered(CHUNKED + b"2\r\nhi\r\n")
        assert server.workers.heard_at(server.address) == 1000
        now = 1007.0
        assert await answer.some() == b"hi"
        writer.write(b"2\r\nho\r\n")
        assert await answer.some() == b"ho"
        assert server.workers.heard_at(server.address) == 1007
        answer.close()


async def test_a_response_that_stands_still_fails_unless_its_client_is_slow(monkeypatch):
    async with Server() as server:
        now = 1000.0
        monkeypatch.setattr(worker_connections, "time", SimpleNamespace(monotonic=lambda: now))
        answer, _, writer = await server.answered(CHUNKED + b"2\r\nhi\r\n")
        waiting, *_ = await server.asked()  # has its own timeout
        assert await answer.some() == b"hi"
        now = 1100.0  # the client took its time
        server.workers.fail_quiet(60)
        reading = asyncio.create_task(answer.some())
        await asyncio.sleep(0)
        server.workers.fail_quiet(60)
        now = 1159.0
        server.workers.fail_quiet(60)
        writer.write(b"2\r\nho\r\n")
        assert await reading == b"ho"
        reading = asyncio.create_task(answer.some())
        await asyncio.sleep(0)
        now = 1220.0
        server.workers.fail_quiet(60)
        with pytest.raises(WorkerStalled, match="stood still for 60 s"):
            await reading
        answer.close()
        assert not waiting.done()
        waiting.cancel()
