"""The interface as clients see it: OpenAI's shapes, our controls, one sentence for every mistake."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from starlette.testclient import TestClient

import convergeflow as cf
from convergeflow.data.tokenizer import stories_tokenizer
from convergeflow.sampling.settings import Settings
from convergeflow.serving.api import Server
from convergeflow.serving.limits import Limits


@pytest.fixture
def client(server: Callable[..., Server]) -> Iterator[TestClient]:
    made = server()
    with TestClient(made.application(), raise_server_exceptions=True) as client:
        client.server = made  # type: ignore[attr-defined]
        yield client


def complete(client: TestClient, **body: Any) -> Any:
    return client.post("/v1/completions", json={"model": "tiny", **body})


def test_a_completion_has_the_tokens_of_sample(client: TestClient, models: list[str]) -> None:
    answer = complete(client, seed=7, n=3, convergeflow={"nfe": 9, "refine": 2, "scg": 1.5}).json()
    settings = cf.Settings(nfe=9, controls=cf.Controls(refine=2, scg=1.5))
    alone = cf.load(models[0]).generate(3, seed=7, settings=settings)
    assert alone.texts is not None
    assert [choice["text"] for choice in answer["choices"]] == alone.texts
    assert [choice["convergeflow"]["tokens"] for choice in answer["choices"]] == alone.ids.tolist()
    assert [choice["convergeflow"]["seed"] for choice in answer["choices"]] == [7, 8, 9]
    assert answer["usage"] == {"prompt_tokens": 0, "completion_tokens": 36, "total_tokens": 36, "network_calls": 27}
    assert answer["object"] == "text_completion" and answer["model"] == "tiny"


def test_prompt_echo_infill_and_pins(client: TestClient) -> None:
    whole = complete(client, seed=1, prompt="Once there was", echo=True, convergeflow={"nfe": 4}).json()
    assert whole["choices"][0]["text"].startswith("Once there was ")
    rest = complete(client, seed=1, prompt="Once there was", convergeflow={"nfe": 4}).json()
    assert "Once there was" + rest["choices"][0]["text"] == whole["choices"][0]["text"]
    assert rest["usage"]["prompt_tokens"] == 3 and rest["usage"]["completion_tokens"] == 9
    filled = complete(client, seed=1, prompt="Once", suffix="a girl .", convergeflow={"nfe": 4, "gap": 2}).json()
    tokens = filled["choices"][0]["convergeflow"]["tokens"]
    tokenizer = stories_tokenizer()
    assert tokens[0] == tokenizer.encode("once")[0] and tokens[3:6] == tokenizer.encode("a girl .")
    middle = tokenizer.decode(tokens[:3]).removeprefix("Once")
    assert filled["choices"][0]["text"] == middle
    pins = [{"position": 5, "text": "girl"}, {"position": 6, "token": 9}]
    pinned = complete(client, seed=1, convergeflow={"nfe": 4, "pins": pins}).json()
    assert pinned["choices"][0]["convergeflow"]["tokens"][5:7] == [tokenizer.encode("girl")[0], 9]


def test_a_text_holds_all_that_was_not_in_the_prompt(client: TestClient) -> None:
    tokenizer = stories_tokenizer()

    def answered(**body: Any) -> tuple[str, list[int]]:
        choice = complete(client, seed=1, **body).json()["choices"][0]
        return choice["text"], choice["convergeflow"]["tokens"]

    nfe = {"nfe": 4, "gap": 2}
    text, tokens = answered(suffix="a girl .", convergeflow=nfe)
    assert text == tokenizer.decode(tokens[:2]), "the middle, without the suffix"
    pins = [{"position": 1, "text": "little"}]
    text, tokens = answered(prompt="Once", suffix="a girl .", convergeflow={**nfe, "pins": pins})
    assert text == tokenizer.decode(tokens[:3]).removeprefix("Once") and text.startswith(" little ")
    text, tokens = answered(prompt="Once", convergeflow={"nfe": 4, "pins": pins})
    assert text == tokenizer.decode(tokens).removeprefix("Once") and text.startswith(" little ")
    same = [{"position": 0, "text": "once"}]  # says again what the prompt says
    assert answered(prompt="Once", convergeflow={"nfe": 4, "pins": same}) == answered(
        prompt="Once", convergeflow={"nfe": 4}
    )


def test_blocks_and_rivals_answer_too(client: TestClient, models: list[str]) -> None:
    settings = {"nfe": 30, "self_condition": "previous"}
    blocks = complete(client, model="blocks", seed=2, convergeflow=settings).json()["choices"][0]["convergeflow"]
    alone = cf.load(models[1]).generate(1, seed=2, settings=Settings(**settings))  # type: ignore[arg-type]
    assert blocks["tokens"] == alone.ids[0].tolist() and blocks["calls"] == 30
    ar = complete(client, model="ar", seed=2, temperature=0.5).json()["choices"][0]["convergeflow"]
    assert ar["tokens"] == cf.load(models[2]).sample(1, 12, seeds=[2], temperature=0.5).ids[0].tolist()
    assert ar["calls"] == 12
    langflow = cf.load(models[3])
    for own, how in (({"nfe": 5}, {"nfe": 5}), ({"nfe": 6, "refine": 2}, {"nfe": 6, "refine": 2})):
        told = complete(client, model="langflow", seed=2, convergeflow=own).json()["choices"][0]["convergeflow"]
        assert told["tokens"] == langflow.generate(seed=2, **how).ids[0].tolist() and told["calls"] == own["nfe"]


def events(response: Any) -> list[Any]:
    """The data of a stream, with its end checked."""
    data = [line.removeprefix("data: ") for line in response.text.split("\n") if line.startswith("data: ")]
    assert data[-1] == "[DONE]"
    return [json.loads(each) for each in data[:-1]]


def test_a_plain_stream_can_be_joined(client: TestClient) -> None:
    body = {"seed": 3, "n": 2, "convergeflow": {"nfe": 4}}
    whole = complete(client, **body).json()
    chunks = events(complete(client, stream=True, stream_options={"include_usage": True}, **body))
    joined = ["", ""]
    for chunk in chunks:
        for choice in chunk["choices"]:
            joined[choice["index"]] += choice["text"]
    assert joined == [choice["text"] for choice in whole["choices"]]
    assert chunks[-1]["usage"] == whole["usage"] and chunks[-1]["choices"] == []


@pytest.mark.parametrize("model", ["tiny", "blocks", "ar"])
def test_a_diffusing_stream_ends_at_the_text(client: TestClient, model: str) -> None:
    own: dict[str, Any] = {"diffusing": True, "frames": True} | ({} if model == "ar" else {"nfe": 10})
    if model == "blocks":
        own["self_condition"] = "previous"
    chunks = events(complete(client, model=model, seed=3, stream=True, convergeflow=own))
    frames = [chunk["choices"][0]["convergeflow"]["frame"] for chunk in chunks[:-1]]
    last = chunks[-1]["choices"][0]
    assert last["finish_reason"] == "length" and last["text"] == last["convergeflow"]["text"]
    assert chunks[-2]["choices"][0]["text"] == last["text"], "the last state is the answer"
    assert frames[-1]["tokens"] == last["convergeflow"]["tokens"][frames[-1]["start"] :]
    assert [frame["calls"] for frame in frames] == sorted(frame["calls"] for frame in frames)
    assert frames[-1]["calls"] == last["convergeflow"]["calls"]


def test_a_stream_names_the_words_that_were_given(client: TestClient) -> None:
    own = {"nfe": 12, "self_condition": "previous", "frames": True, "diffusing": True}
    chunks = events(complete(client, model="blocks", prompt="Once there was", stream=True, convergeflow=own))
    tokenizer = stories_tokenizer()
    first = chunks[0]["choices"][0]
    assert first["convergeflow"]["known"] == [[n, token] for n, token in enumerate(tokenizer.encode("once there was"))]
    assert first["text"].startswith("Once there was ") and first["convergeflow"]["frame"]["start"] == 3
    assert all("known" not in chunk["choices"][0]["convergeflow"] for chunk in chunks[1:])


MISTAKES: dict[str, tuple[dict[str, Any], int, str]] = {
    "model": ({"model": "tini"}, 404, "did you mean 'tiny'"),
    "field": ({"promt": "x"}, 400, "did you mean `prompt`"),
    "control": ({"convergeflow": {"refin": 1}}, 400, "did you mean `refine`"),
    "kind": ({"n": "2"}, 400, "`n`"),
    "number": ({"n": 17}, 400, "at most 16"),
    "length": ({"max_tokens": 5000}, 400, "at most 1024"),
    "calls": ({"convergeflow": {"nfe": 5000}}, 400, "at most 2048"),
    "none": ({"convergeflow": {"nfe": 0}}, 400, "at least 1"),
    "preset": ({"convergeflow": {"preset": "sharb"}}, 400, "sharp"),
    "grid": ({"convergeflow": {"grid": [0.5, 0.4]}}, 400, "increase"),
    "file": ({"convergeflow": {"grid": "/etc/passwd.npy"}}, 400, "not a file"),
    "word": ({"prompt": "Xyzzy"}, 400, "vocabulary"),
    "together": ({"convergeflow": {"self_condition": "none", "refine": 3}}, 400, "drop them"),
    "pin": ({"convergeflow": {"pins": [{"position": 99, "token": 1}]}}, 400, "behind the last"),
    "two": ({"convergeflow": {"pins": [{"position": 1}]}}, 400, "either"),
    "rival": ({"model": "ar", "convergeflow": {"scg": 2.0}}, 400, "scg"),
    "settings": ({"model": "langflow", "convergeflow": {"set": {"settings": 1}}}, 400, "settings"),
    "set": ({"model": "ar", "convergeflow": {"set": {"heat": 1}}}, 400, "heat"),
    "too strong": ({"convergeflow": {"scg": 1e300, "nfe": 8}}, 400, "scg"),
    "said twice": ({"temperature": 0.5, "convergeflow": {"temperature": 0.9}}, 400, "give one"),
    "said twice to a rival": (
        {"model": "ar", "temperature": 0.5, "convergeflow": {"set": {"temperature": 1}}},
        400,
        "give one",
    ),
    "gap of nothing": ({"prompt": "Once", "convergeflow": {"gap": 2}}, 400, "`gap` has no effect without `suffix`"),
    "frames of no stream": ({"convergeflow": {"frames": True}}, 400, "`frames` has no effect without `stream`"),
    "states of no stream": ({"convergeflow": {"diffusing": True}}, 400, "without `stream`"),
    "usage of no stream": ({"stream_options": {"include_usage": True}}, 400, "without `stream`"),
    "budget of a call a token": ({"model": "ar", "convergeflow": {"nfe": 4}}, 400, "one network call a token"),
    "two pins": (
        {"convergeflow": {"pins": [{"position": 1, "token": 4}, {"position": 1, "token": 5}]}},
        400,
        "position 1",
    ),
    "pin on the prompt": (
        {"prompt": "Once", "convergeflow": {"pins": [{"position": 0, "token": 5}]}},
        400,
        "position 0",
    ),
    "gap in a prompt": ({"prompt": "a ___ girl"}, 400, "between `prompt` and `suffix`"),
    "too short": ({"prompt": "Once there was", "max_tokens": 2}, 400, "more than `max_tokens` 2"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_sentence_in_openais_format(client: TestClient, name: str) -> None:
    body, status, says = MISTAKES[name]
    response = complete(client, **body)
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and says in error["message"]
    assert "\n" not in error["message"] and "Traceback" not in response.text


def test_a_flow_that_leaves_the_numbers_is_the_requests_failure(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "lerp", lambda start, end, weight: start * float("nan"))  # guidance goes astray
    response = complete(client, convergeflow={"refine": 2, "scg": 2.0, "nfe": 9})
    assert response.status_code == 422, response.text
    assert "finite" in response.json()["error"]["message"]


def test_bodies_that_are_no_requests(client: TestClient) -> None:
    def post(content: bytes, kind: str = "application/json") -> Any:
        return client.post("/v1/completions", content=content, headers={"content-type": kind})

    bodies = [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"x"',
        b"\xff\xfe",
        b'{"model": NaN}',
        b"[" * 5000,
        b'{"model":"tiny","seed":1e400}',
    ]
    for content in bodies:
        response = post(content)
        assert response.status_code == 400, content
        assert response.json()["error"]["message"]
    assert post(b'{"model":"tiny","prompt":"' + b"a" * 70_000 + b'"}').status_code == 413
    assert post(b'{"model":"tiny"}', "text/plain").status_code == 415
    assert client.get("/v1/completions").status_code == 405
    assert client.get("/nowhere").json()["error"]["type"] == "not_found_error"


def test_fifty_broken_bodies_are_refused_and_the_server_goes_on(client: TestClient) -> None:
    rng = random.Random(7)
    whole = json.dumps({"model": "tiny", "seed": 1, "convergeflow": {"nfe": 4}}).encode()
    for number in range(50):
        cut = whole[: rng.randrange(1, len(whole) - 1)]
        broken = [cut, rng.randbytes(40), whole + b"x", b" " * 70_000 + whole][number % 4]
        response = client.post("/v1/completions", content=broken, headers={"content-type": "application/json"})
        assert response.status_code in (400, 413) and "Traceback" not in response.text
        assert response.json()["error"]["message"]
    assert complete(client, seed=1, convergeflow={"nfe": 4}).status_code == 200


def test_only_files_of_the_page_are_files(client: TestClient) -> None:
    assert client.get("/").status_code == 200 and client.get("/page/main.js").status_code == 200
    for path in (
        "/page/api.py",
        "/page/..%2fapi.py",
        "/page/%2e%2e/api.py",
        "/page//etc/passwd",
        "/page/words/..%2f..%2f",
    ):
        assert client.get(path).status_code == 404, path


def test_headers_allow_nothing_from_outside(client: TestClient) -> None:
    for path in ("/", "/v1/models", "/page/main.js", "/nowhere"):
        headers = client.get(path, headers={"origin": "http://evil.example"}).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy and "*" not in policy
        assert "access-control-allow-origin" not in headers
        assert headers["x-content-type-options"] == "nosniff"


def test_a_token_is_asked_for_everywhere_but_on_the_page(server: Callable[..., Server]) -> None:
    with TestClient(server(token="secret-token").application()) as client:
        for path in ("/", "/healthz", "/page/main.js", "/openapi.json"):
            assert client.get(path).status_code == 200
        for given in ("", "Bearer", "Bearer secret-toke", "Bearer secret-tokenX", "secret-token", "Bearer \xff"):
            for path in ("/v1/models", "/metrics", "/page/words/tiny"):
                response = client.get(path, headers={"authorization": given.encode("latin-1")})
                assert response.status_code == 401 and response.json()["error"]["type"] == "authentication_error"
        assert client.get("/v1/models", headers={"authorization": "Bearer secret-token"}).status_code == 200
        answer = client.post("/v1/completions", json={"model": "tiny"})
        assert answer.status_code == 401


def test_other_names_of_this_machine_get_no_answer(server: Callable[..., Server]) -> None:
    hosts = frozenset({"localhost", "127.0.0.1", "[::1]"})
    with TestClient(server().application(hosts), base_url="http://localhost") as client:
        assert client.get("/healthz").status_code == 200
        assert client.get("/healthz", headers={"host": "[::1]:8000"}).status_code == 200
        assert client.get("/healthz", headers={"host": "evil.example:8000"}).status_code == 400


def test_a_full_queue_says_when_to_come_back(server: Callable[..., Server]) -> None:
    made = server(Limits(queue=1))
    with TestClient(made.application()) as client:
        # Both places are taken by hand: what runs never ends by itself.
        from convergeflow.serving.requests import Completion, job_of

        asked = Completion(model="tiny", convergeflow={"nfe": 2000})  # type: ignore[call-arg, arg-type]
        job = job_of(asked, made.shelf["tiny"], made.limits)
        made.engine.flows.limits = Limits(queue=1, rows=1)
        held = [made.engine.submit(job)]
        while made.engine.flows.waiting:
            pass
        held.append(made.engine.submit(job))
        response = complete(client)
        assert response.status_code == 429 and 1 <= int(response.headers["retry-after"]) <= 60
        assert response.json()["error"]["type"] == "rate_limit_error"
        for ticket in held:
            ticket.cancel()


def test_a_plan_of_a_model_with_a_call_a_token_counts_its_tokens(client: TestClient) -> None:
    assert client.post("/plan", json={"model": "ar", "max_tokens": 7}).json()["calls"] == 7


def test_a_wrong_method_is_told_the_right_one(client: TestClient) -> None:
    for path, right in (("/v1/completions", "POST"), ("/healthz", "GET")):
        answer = client.delete(path)
        assert answer.status_code == 405 and right in answer.json()["error"]["message"]


def test_models_health_metrics_plan_and_description(client: TestClient) -> None:
    listed = client.get("/v1/models").json()["data"]
    assert {each["id"] for each in listed} == {"tiny", "blocks", "ar", "langflow"}
    assert client.get("/v1/models/tiny").json()["convergeflow"]["length"] == 12
    assert client.get("/v1/models/x").status_code == 404
    assert client.get("/healthz").json() == {"status": "ok", "models": ["tiny", "blocks", "ar", "langflow"]}
    assert client.get("/page/words/tiny").json()["words"]["0"] == "\u23ce"
    complete(client, convergeflow={"nfe": 5})
    text = client.get("/metrics").text
    assert 'convergeflow_requests_ended_total{how="answered",lane="flows"} 1.0' in text
    assert 'convergeflow_http_requests_total{route="completions",status="200"} 1.0' in text
    plan = client.post("/plan", json={"model": "tiny", "convergeflow": {"nfe": 9, "refine": 2}}).json()
    assert plan["calls"] == 9 and plan["steps"] == 3
    assert client.get("/openapi.json").json()["paths"].keys() >= {"/v1/completions", "/v1/models"}


def test_the_access_log_is_a_json_line_for_every_request(client: TestClient) -> None:
    complete(client, seed=5, convergeflow={"nfe": 5})
    complete(client, prompt="\n{}")
    lines = [json.loads(line) for line in client.server.lines]  # type: ignore[attr-defined]
    first, second = lines[-2:]
    assert first["path"] == "/v1/completions" and first["status"] == 200 and first["calls"] == 5 and first["seed"] == 5
    assert second["status"] == 400 and "failure" in second


def test_a_prompt_with_markup_is_only_text(client: TestClient) -> None:
    response = complete(client, prompt="<script>alert(1)</script>")
    assert response.status_code == 400 and response.headers["content-type"] == "application/json"
