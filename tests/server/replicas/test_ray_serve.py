"""Replicas on Ray Serve, on loopback: they answer as one server does, whatever ends."""

import asyncio
import os
import random
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
from anthropic import Anthropic

from tests.support.folders import ROOT
from tests.support.patience import PATIENCE_S, wait_until
from tests.support.ray_cluster import NAME, USUAL, Replicas, ray_cluster
from tests.support.running_server import PagedRunningServer
from tests.support.server_process import metrics
from tests.support.soak_questions import Answer, Question, answer, asked, calm_answers, questions
from tests.support.tier_servers import RedisServer

# Of the soak in which a replica is killed after each 20 answers.
REQUESTS = int(os.environ.get("PAGED_KV_SOAK_REQUESTS", "80"))

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900 + 3 * REQUESTS),
    pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc"),
]

TEXT = "def first(numbers):\n    return numbers[0]\n" * 30


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with ray_cluster() as port:
        yield port


@pytest.fixture(scope="module")
def calm() -> Iterator[PagedRunningServer]:
    """One server, with the options of the replicas."""
    options = ["--model", USUAL["model"], "--dtype", "float32", "--prefill-step-size", "256"]
    running = PagedRunningServer(*options, "--drop-tools")
    yield running
    running.stop()


def chat(server: Any, *turns: str, **more: Any) -> Any:
    roles = ("user", "assistant")
    messages: Any = [{"role": roles[at % 2], "content": turn} for at, turn in enumerate(turns)]
    usual = {"model": "default_model", "temperature": 0, "max_tokens": 8}
    return server.client(**more.pop("client", {})).chat.completions.create(
        messages=messages, **usual | more
    )


def cached(answered: Any) -> int:
    return int(answered.usage.prompt_tokens_details.cached_tokens)


def of_each(port: int, name: str) -> list[float]:
    """A metric of each replica."""
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE_S) as got:
        lines = got.read().decode().splitlines()
    return [
        float(each.rpartition(" ")[2]) for each in lines if each.startswith(f"paged_kv:{name}{{")
    ]


def test_replicas_answer_as_one_server(port: int, calm: PagedRunningServer) -> None:
    """All four interfaces, whole and in streams; conversations come back to their replica, and kept
    responses are found there."""
    replicas = Replicas(port, num_replicas=2, drop_tools=True)
    asked_of = questions({})[::3]
    assert asyncio.run(calm_answers(port, asked_of)) == asyncio.run(
        calm_answers(calm.port, asked_of)
    )
    of_both = []
    for server in (replicas, calm):
        client = server.client()
        usual: dict[str, Any] = {"model": "default_model", "extra_body": {"temperature": 0}}
        claude = Anthropic(base_url=f"http://127.0.0.1:{server.port}", api_key="none")
        said: Any = [{"role": "user", "content": TEXT}]
        message = claude.messages.create(messages=said, max_tokens=8, **usual)
        with claude.messages.stream(messages=said, max_tokens=8, **usual) as stream:
            streamed = stream.get_final_message()
        said_by_it: list[Any] = [*message.content, *streamed.content]
        texts = [each.text for each in said_by_it]
        last = client.responses.create(input=TEXT, max_output_tokens=8, **usual)
        for turn in range(5):
            texts.append(last.output_text)
            last = client.responses.create(
                input=f"again {turn}", previous_response_id=last.id, max_output_tokens=8, **usual
            )
        assert client.responses.retrieve(last.id).output_text == last.output_text
        assert client.responses.input_items.list(last.id).data
        client.responses.delete(last.id)
        for _ in range(4):
            with pytest.raises(Exception, match="404"):
                client.responses.retrieve(last.id)
        of_both.append([*texts, last.output_text])
    assert of_both[0] == of_both[1]

    for number in range(6):
        turns, known = [f"conversation {number}: {TEXT}"], 0
        for turn in range(3):
            answered = chat(replicas, *turns)
            assert cached(answered) >= known
            known = answered.usage.prompt_tokens - 8  # the template ends the turn in another way
            turns += [answered.choices[0].message.content, f"and {turn}? {TEXT[:200]}"]
    assert all(count > 0 for count in of_each(port, "prompt_tokens_total"))


@pytest.mark.soak
def test_a_client_that_leaves_ends_its_request(port: int) -> None:
    replicas = Replicas(port)
    stream = chat(replicas, TEXT, stream=True, max_tokens=3000, extra_body={"ignore_eos": True})
    next(iter(stream))
    assert metrics(port)["num_requests_running"] == 1
    stream.close()
    wait_until(lambda: metrics(port)["num_requests_running"] == 0)
    assert metrics(port)["request_success_total.abort"] == 1


@pytest.mark.soak
def test_keys_are_those_of_the_server(port: int, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("one\ntwo\n")
    replicas = Replicas(port, num_replicas=2, api_key=str(tmp_path / "keys"))
    with pytest.raises(Exception, match="401"):
        chat(replicas, TEXT)
    assert cached(chat(replicas, TEXT, client={"api_key": "one"})) == 0
    assert cached(chat(replicas, TEXT, client={"api_key": "one"})) > 0
    assert cached(chat(replicas, TEXT, client={"api_key": "two"})) == 0


def test_a_replica_without_memory_is_passed_over(port: int) -> None:
    """Each has room for one long request, and none may wait. Those that share a prompt would go to
    one replica."""
    replicas = Replicas(
        port, num_replicas=2, max_kv_bytes="5MB", admission="reserve", admission_timeout=0
    )
    long = {"stream": True, "max_tokens": 300, "extra_body": {"ignore_eos": True}}
    streams = [chat(replicas, TEXT, **long) for _ in range(2)]
    for stream in streams:
        next(iter(stream))
    with pytest.raises(Exception, match="503"):
        chat(replicas, TEXT, max_tokens=300)
    assert of_each(port, "num_requests_running") == [1, 1]
    for stream in streams:
        stream.close()


def is_ready(port: int) -> bool:
    try:
        with urlopen(f"http://127.0.0.1:{port}/ready", timeout=PATIENCE_S) as got:
            return bool(got.status == 200)
    except HTTPError:
        return False


async def with_clients(
    port: int, asked_of: list[Question], number: int, then: Callable[[int], object] = abs
) -> list[Answer]:
    """The answers to questions that so many clients ask at once.

    Args:
        then: is called with the number of answers so far, while the others go on.
    """
    waiting, answers = iter(enumerate(asked_of)), [Answer(0)] * len(asked_of)
    count = 0

    async def client() -> None:
        nonlocal count
        for at, question in waiting:
            answers[at] = await answer(port, asked(question, stream=at % 2 == 0))
            count += 1
            await asyncio.to_thread(then, count)

    await asyncio.gather(*[client() for _ in range(number)])
    return answers


def without_counts(found: Answer) -> Answer:
    return Answer(found.status, found.choices, is_whole=found.is_whole)


def test_replicas_that_are_killed_make_no_answer_wrong(port: int, calm: PagedRunningServer) -> None:
    """Requests whose answer had not begun are answered elsewhere; streams that had begun end with
    an error; texts are those of one server."""
    replicas = Replicas(port, num_replicas=2, drop_tools=True)
    known = [each for each in questions({}) if each.kind != "tools"]
    right = asyncio.run(calm_answers(calm.port, known))
    asked_of = [known[at % len(known)] for at in range(REQUESTS)]
    chance = random.Random(5)
    killed = 0

    def kill(answered: int) -> None:
        nonlocal killed
        if answered % 20 == 10 and (found := replicas.processes()):
            replicas.kill(chance.choice(found))
            killed += 1

    answers = asyncio.run(with_clients(port, asked_of, 16, kill))
    counts: Counter[str] = Counter()
    for at, found in enumerate(answers):
        expected = right[at % len(known)]
        if found.is_whole:
            assert without_counts(found) == without_counts(expected), asked_of[at]
        else:
            assert at % 2 == 0, "only streams may break off"
        counts["whole" if found.is_whole else "broken off"] += 1
    assert killed >= REQUESTS / 40
    assert counts["whole"] > counts["broken off"]


@pytest.mark.soak
def test_no_request_is_lost_as_replicas_come_and_go(port: int, calm: PagedRunningServer) -> None:
    replicas = Replicas(port, num_replicas=1, drop_tools=True)
    known = questions({})[:12]
    right = asyncio.run(calm_answers(calm.port, known))
    over = False
    wrong: list[Any] = []
    served = 0

    def ask() -> None:
        nonlocal served
        while not over:
            answers = asyncio.run(with_clients(port, known, 4))
            served += len(answers)
            pairs = zip(answers, right, strict=True)
            wrong.extend(p for p in pairs if without_counts(p[0]) != without_counts(p[1]))

    client = Thread(target=ask)
    client.start()
    try:
        for number in (3, 1):
            replicas.deploy(num_replicas=number, drop_tools=True)
            before = served
            wait_until(lambda before=before: served > before)
    finally:
        over = True
        client.join()
    assert wrong == []


@pytest.mark.soak
def test_a_front_that_ends_is_replaced(port: int) -> None:
    replicas = Replicas(port, num_replicas=2)
    first = chat(replicas, TEXT)
    (front,) = replicas.processes("Front")
    replicas.kill(front)
    again = chat(replicas, TEXT, client={"max_retries": 20})
    assert again.choices[0].message.content == first.choices[0].message.content


@pytest.mark.soak
def test_pages_of_another_replica_come_through_a_tier(port: int, tmp_path: Path) -> None:
    server = RedisServer(tmp_path)
    try:
        tier = {"store": server.address, "store_after": 1, "store_unauthenticated": True}
        replicas = Replicas(port, num_replicas=1, **tier)
        chat(replicas, TEXT)
        wait_until(lambda: metrics(port)["store_written_bytes_total"] > 0)
        replicas.kill(replicas.processes()[0])
        again = chat(replicas, TEXT, client={"max_retries": 20})
        assert cached(again) >= 256
    finally:
        server.kill()


@pytest.mark.soak
def test_a_model_shared_by_ranks_is_one_replica(port: int, calm: PagedRunningServer) -> None:
    replicas = Replicas(port, ranks=2)
    assert chat(replicas, TEXT).choices[0] == chat(calm, TEXT).choices[0]
    assert cached(chat(replicas, TEXT)) > 0
    assert metrics(port)["rank_bytes.0.budget"] == metrics(port)["rank_bytes.1.budget"]


@pytest.mark.soak
def test_a_model_that_cannot_be_loaded_stops_the_deployment(port: int, tmp_path: Path) -> None:
    from ray import serve

    folder = Path(shutil.copytree(USUAL["model"], tmp_path / "model"))
    weights = next(folder.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:100_000])
    serve.delete(NAME)
    with pytest.raises(RuntimeError, match="Replica"):
        Replicas(port, model=str(folder), num_replicas=2)
    status = serve.status().applications[NAME]
    assert status.status == "DEPLOY_FAILED"
    message = status.deployments["Replica"].message
    assert f"--model {folder} cannot be loaded" in message
    assert "check that its files are complete" in message
    serve.delete(NAME)


@pytest.mark.soak
def test_the_example_of_a_config_file_is_served(port: int, tmp_path: Path) -> None:
    import ray
    from ray import serve

    with ThreadPoolExecutor(1) as one:
        one.submit(serve.delete, NAME).result()
    text = (ROOT / "examples/replicas.yaml").read_text("utf-8")
    assert "port: 8000" in text
    file = tmp_path / "replicas.yaml"
    file.write_text(text.replace("port: 8000", f"port: {port}"))
    command = [str(Path(sys.executable).with_name("serve")), "run", "--non-blocking"]
    address = ray.get_runtime_context().gcs_address
    done = subprocess.run(
        [*command, "--address", address, str(file)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    try:
        wait_until(lambda: is_ready(port))
        wait_until(lambda: len(of_each(port, "num_requests_running")) == 2)
    finally:
        for name in serve.status().applications:
            serve.delete(name)
