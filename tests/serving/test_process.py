"""`convergeflow serve` as a process: the unchanged OpenAI client, disconnects, signals, models that change."""

from __future__ import annotations

import json
import random
import shutil
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

import convergeflow as cf
from convergeflow.cli.main import main
from convergeflow.serving.models import Served, Shelf
from convergeflow.training import checkpoint
from served import running, until, write_model

pytestmark = pytest.mark.slow


def test_the_openai_client_completes_and_streams(models: list[str]) -> None:
    alone = cf.load(models[0]).generate(2, seed=11, settings=cf.Settings(nfe=6))
    assert alone.texts is not None
    with running(*models) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        assert {model.id for model in client.models.list()} == {"tiny", "blocks", "ar", "langflow"}
        own = {"convergeflow": {"nfe": 6}}
        made = client.completions.create(model="tiny", prompt="", seed=11, n=2, extra_body=own)
        assert [choice.text for choice in made.choices] == alone.texts
        joined = ["", ""]
        for chunk in client.completions.create(model="tiny", prompt="", seed=11, n=2, stream=True, extra_body=own):
            for choice in chunk.choices:
                joined[choice.index] += choice.text
        assert joined == alone.texts
        with pytest.raises(openai.BadRequestError, match="at most 16"):
            client.completions.create(model="tiny", prompt="", n=99)
        with pytest.raises(openai.NotFoundError, match="unknown model"):
            client.completions.create(model="tinny", prompt="")
        assert server.stop() == 0
    assert all("Traceback" not in line for line in server.lines)


def test_disconnects_cancel_and_leave_nothing_behind(models: list[str]) -> None:
    with running(models[0], "--limit", "queue=1000") as server:
        host, port = server.url.removeprefix("http://").split(":")
        rng = random.Random(0)

        def drop(stream: bool) -> None:
            body = json.dumps(
                {"model": "tiny", "stream": stream, "convergeflow": {"nfe": 2000, "frames": True}}
            ).encode()
            head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
            with socket.create_connection((host, int(port)), timeout=20) as connection:
                connection.sendall(
                    f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body[: rng.choice([10, 999])]
                )
                time.sleep(rng.random() * 0.05)

        threads = [threading.Thread(target=drop, args=(number % 2 == 0,)) for number in range(200)]
        for start in range(0, 200, 20):
            for thread in threads[start : start + 20]:
                thread.start()
            for thread in threads[start : start + 20]:
                thread.join()

        def idle() -> bool:
            text = httpx.get(f"{server.url}/metrics", timeout=20).text
            return all(f'convergeflow_{what}{{lane="flows"}} 0.0' in text for what in ("waiting", "running"))

        until(idle)
        answer = httpx.post(
            f"{server.url}/v1/completions", json={"model": "tiny", "convergeflow": {"nfe": 4}}, timeout=20
        )
        assert answer.status_code == 200
        process = psutil.Process(server.process.pid)
        until(lambda: len([c for c in process.net_connections() if c.status == "ESTABLISHED"]) <= 1)
        assert server.stop() == 0
    assert all("Traceback" not in line for line in server.lines)


def test_a_client_that_reads_a_byte_a_second_stalls_nobody(models: list[str]) -> None:
    with running(models[0], "--limit", "stall=2", "--limit", "frames=20") as server:
        host, port = server.url.removeprefix("http://").split(":")
        own = {"nfe": 2000, "self_condition": "none", "frames": True}
        body = json.dumps({"model": "tiny", "stream": True, "n": 8, "convergeflow": own}).encode()
        slow = socket.socket()
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        slow.connect((host, int(port)))
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        slow.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        idle = socket.create_connection((host, int(port)), timeout=20)  # and one whose body never comes
        idle.sendall(f"{head}Content-Length: 500\r\n\r\n".encode())
        for _ in range(3):
            assert slow.recv(1)
            answer = httpx.post(
                f"{server.url}/v1/completions", json={"model": "tiny", "convergeflow": {"nfe": 4}}, timeout=20
            )
            assert answer.status_code == 200
        until(lambda: any(line.get("failure") for line in server.log), 30)
        slow.close()
        assert b" 408 " in idle.recv(200)
        idle.close()
        assert server.stop() == 0


def test_sigterm_finishes_what_runs(models: list[str]) -> None:
    with running(models[0]) as server:
        answers: list[Any] = []

        def ask(seed: int, stream: bool) -> None:
            body = {"model": "tiny", "seed": seed, "stream": stream, "convergeflow": {"nfe": 300, "frames": stream}}
            answers.append((stream, httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)))

        threads = [threading.Thread(target=ask, args=(seed, seed % 2 == 0)) for seed in range(6)]
        for thread in threads:
            thread.start()
        until(lambda: 'lane="flows"} 6.0' in httpx.get(f"{server.url}/metrics").text)
        assert server.stop() == 0
        for thread in threads:
            thread.join()
    assert len(answers) == 6
    for stream, response in answers:
        assert response.status_code == 200
        assert not stream or response.text.rstrip().endswith("[DONE]")
    assert all("Traceback" not in line for line in server.lines)


@pytest.mark.parametrize("how", ["grace", "twice"])
def test_an_end_before_the_answers_is_told_to_every_client(models: list[str], how: str) -> None:
    with running(models[0], "--limit", "calls=20000", "--limit", f"grace={1 if how == 'grace' else 60}") as server:
        answers: dict[bool, Any] = {}

        def ask(stream: bool) -> None:
            own = {"nfe": 20_000, "self_condition": "none"}
            body = {"model": "tiny", "seed": 1, "stream": stream, "convergeflow": own}
            answers[stream] = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)

        threads = [threading.Thread(target=ask, args=(stream,)) for stream in (True, False)]
        for thread in threads:
            thread.start()
        until(lambda: 'running{lane="flows"} 2.0' in httpx.get(f"{server.url}/metrics").text)
        # A body that never comes keeps nobody.
        half = socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])))
        half.sendall(
            b"POST /plan HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{"
        )
        until(lambda: len(httpx.get(f"{server.url}/healthz").content) > 0)
        if how == "twice":
            server.process.send_signal(signal.SIGINT)
            time.sleep(0.5)
        assert server.stop(signal.SIGINT) == 0
        for thread in threads:
            thread.join()
        half.settimeout(10)
        half.close()
    assert answers[False].status_code == 503 and "closing" in answers[False].json()["error"]["message"]
    said = [line for line in answers[True].text.split("\n") if line.startswith("data: ")]
    assert "closing" in json.loads(said[-2].removeprefix("data: "))["error"]["message"] and said[-1] == "data: [DONE]"
    assert all("Traceback" not in line for line in server.lines), "".join(server.lines)


def test_every_address_of_loopback_answers_under_its_own_name(models: list[str]) -> None:
    with running(models[0], "--host", "127.0.0.2") as server:
        assert server.url.startswith("http://127.0.0.2:")
        assert httpx.get(f"{server.url}/healthz").status_code == 200
        assert httpx.get(f"{server.url}/healthz", headers={"host": "127.0.0.3"}).status_code == 400


def test_a_killed_server_starts_again_at_its_address(models: list[str]) -> None:
    with running(models[0]) as server:
        port = server.url.rpartition(":")[2]
        with httpx.stream(
            "POST",
            f"{server.url}/v1/completions",
            json={"model": "tiny", "stream": True, "convergeflow": {"nfe": 2000}},
        ):
            server.stop(signal.SIGKILL)
    with running(models[0], "--port", port) as server:
        assert httpx.get(f"{server.url}/healthz").status_code == 200


def test_a_model_that_changes_is_loaded_again_and_a_torn_one_is_not(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", seed=3)
    other = write_model(tmp_path / "other", seed=4)
    with running(str(folder)) as server:

        def tokens() -> list[int]:
            body = {"model": "m", "seed": 1, "convergeflow": {"nfe": 4}}
            answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=20).json()
            return list(answer["choices"][0]["convergeflow"]["tokens"])

        settings = cf.Settings(nfe=4)
        before = cf.load(folder).generate(1, seed=1, settings=settings).ids[0].tolist()
        after = cf.load(other).generate(1, seed=1, settings=settings).ids[0].tolist()
        assert tokens() == before != after
        (folder / "model.safetensors").write_bytes((other / "model.safetensors").read_bytes()[:1000])
        until(lambda: any("cannot be loaded" in line for line in server.lines))
        assert tokens() == before
        shutil.copy(other / "model.safetensors", folder / "model.safetensors")
        until(lambda: any("loaded again" in line for line in server.lines))
        assert tokens() == after
        shutil.rmtree(folder)
        time.sleep(3)
        assert tokens() == after
        assert server.stop(signal.SIGINT) == 0


def test_a_copy_that_ends_with_a_small_file_is_loaded(tmp_path: Path) -> None:
    """A manifest lists every file of a model: one that comes late, whichever it is, makes the copy whole."""
    folder, other = tmp_path / "m", write_model(tmp_path / "other", seed=4)
    write_model(folder, seed=3)
    for each in (folder, other):
        (each / "card.md").write_text(f"# {each.name}\n")
        checkpoint.seal(each)
    new = {path.name: path.read_bytes() for path in other.iterdir()}
    shelf = Shelf([str(folder)])
    said: list[str] = []
    changed = [name for name in new if (folder / name).read_bytes() != new[name]]
    for name in sorted(changed, key=lambda name: name == "card.md"):  # the card comes last
        assert shelf.refresh(said.append) == []
        (folder / name).write_bytes(new[name])
    assert said and all("cannot be loaded" in line for line in said)
    assert shelf.refresh(said.append) == ["m"]


def test_a_copy_that_becomes_whole_while_it_is_refused_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, other = write_model(tmp_path / "m", seed=3), write_model(tmp_path / "other", seed=4)
    new = (other / "model.safetensors").read_bytes()
    shelf = Shelf([str(folder)])
    load = Served.load

    def slow(*how: Any) -> Served:
        try:
            return load(*how)
        finally:
            (folder / "model.safetensors").write_bytes(new)  # the copy ends while the server reads a part of it

    (folder / "model.safetensors").write_bytes(new[:1000])
    monkeypatch.setattr(Served, "load", slow)
    assert shelf.refresh() == []
    monkeypatch.setattr(Served, "load", load)
    assert shelf.refresh() == ["m"]


def test_an_open_address_needs_a_token(capsys: pytest.CaptureFixture[str]) -> None:
    for words, says in (
        (["--host", "0.0.0.0"], "--token"),
        (["--token", "short"], "8 printable"),
        (["--limit", "quue=3"], "did you mean 'queue'"),
        (["nowhere"], "unknown model"),
        (["--threads", "100000"], "cores of this machine"),
        (["--host", "203.0.113.7", "--token", "long enough"], "--host"),
        (["--host", "nowhere.invalid", "--token", "long enough"], "--host"),
    ):
        assert main(["serve", *words]) == 2
        assert says in capsys.readouterr().err


def test_a_taken_port_is_one_line(models: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["serve", models[0], "--port", str(taken.getsockname()[1])]) == 2
    assert "already in use: choose another with --port" in capsys.readouterr().err
