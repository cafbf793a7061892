"""What people use to talk to a server, against the demo pair: HTTP, the OpenAI client, SGLang's own language."""

import json
import re
import urllib.request
from collections.abc import Iterator

import pytest
from openai import OpenAI
from serving import Server, serve
from sglang.lang.api import function, gen, select
from sglang.lang.backend.runtime_endpoint import RuntimeEndpoint
from workload import nightjar

MODEL = "SmolLM2-135M-Instruct"
QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """No `--model-path`: the demo pair, three drafts a step."""
    with serve() as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def test_chat_whole_and_streamed(client: OpenAI) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=24, temperature=0)
    text = whole.choices[0].message.content
    assert "Paris" in text
    assert whole.choices[0].finish_reason == "stop"
    assert whole.usage.completion_tokens <= 24

    stream = client.chat.completions.create(
        model=MODEL,
        messages=QUESTION,
        max_tokens=24,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    pieces = [choice.delta.content for chunk in chunks for choice in chunk.choices if choice.delta.content]
    assert "".join(pieces) == text
    assert len(pieces) > 1
    assert [choice.finish_reason for chunk in chunks for choice in chunk.choices][-1] == "stop"
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_completions_whole_and_streamed(client: OpenAI) -> None:
    options = {"model": MODEL, "prompt": "One, two, three, four,", "max_tokens": 16, "temperature": 0}
    whole = client.completions.create(**options, n=1)
    assert "five" in whole.choices[0].text
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage.completion_tokens == 16
    streamed = client.completions.create(**options, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == whole.choices[0].text


def test_completions_with_logprobs_and_several_answers(client: OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL, prompt="The sea is", max_tokens=8, temperature=0.8, n=3, seed=1, logprobs=2
    )
    assert len(answer.choices) == 3
    for choice in answer.choices:
        assert len(choice.logprobs.token_logprobs) == 8
        assert all(value <= 0 for value in choice.logprobs.token_logprobs)


def test_a_json_schema_through_the_openai_client(client: OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}, "big": {"type": "boolean"}},
        "required": ["city", "big"],
    }
    answer = client.chat.completions.create(
        model=MODEL,
        messages=QUESTION,
        max_tokens=64,
        temperature=0,
        response_format={"type": "json_schema", "json_schema": {"name": "city", "schema": schema}},
    )
    content = json.loads(answer.choices[0].message.content)
    assert isinstance(content["city"], str)
    assert isinstance(content["big"], bool)


def test_generate_speculates_and_says_so(server: Server) -> None:
    answer = server.generate("The sun rises in the", max_new_tokens=40, ignore_eos=True)
    meta = answer["meta_info"]
    assert meta["completion_tokens"] == len(answer["output_ids"]) == 40
    assert meta["spec_accept_length"] > 1
    assert meta["spec_verify_ct"] < 40
    assert 0 < meta["spec_accept_rate"] <= 1


def test_generate_streamed_equals_generate_whole(server: Server) -> None:
    sampling = {"temperature": 0, "max_new_tokens": 24}
    whole = server.generate("Water boils at", **sampling)["text"]
    body = json.dumps({"text": "Water boils at", "sampling_params": sampling, "stream": True}).encode()
    request = urllib.request.Request(f"{server.url}/generate", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as response:
        assert response.headers["Content-Type"].startswith("text/event-stream")
        events = [line.decode().removeprefix("data: ").strip() for line in response if line.strip()]
    assert events[-1] == "[DONE]"
    texts = [json.loads(event)["text"] for event in events[:-1]]
    assert texts[-1] == whole
    assert len(texts) > 1
    assert all(later.startswith(earlier) for earlier, later in zip(texts, texts[1:], strict=False))


@function
def facts(s, topic):  # type: ignore[no-untyped-def]
    s += f"Facts about {topic}.\n"
    forks = s.fork(2)
    forks[0] += "Its colour is" + gen("colour", max_tokens=6, stop=["\n", "."], temperature=0)
    forks[1] += "It was first described in the year " + gen("year", regex=r"1[0-9]{3}", temperature=0)
    s += f"Colour:{forks[0]['colour']}. Year: {forks[1]['year']}.\n"
    s += "Is it a living thing? The answer is " + select("alive", ["yes", "no"])
    s += ".\nIn one word, it is" + gen("word", max_tokens=4, temperature=0)


def test_a_program_in_sglangs_language(server: Server) -> None:
    state = facts.run(topic="the moon", backend=RuntimeEndpoint(server.url))
    assert re.fullmatch(r"1[0-9]{3}", re.search(r"Year: (\S+)\.\n", state.text()).group(1))
    assert state["alive"] in ("yes", "no")
    assert state["word"]
    assert state.text().endswith(state["word"])
    assert state.text().startswith("Facts about the moon.\nColour:")


def test_a_program_run_as_a_batch(server: Server) -> None:
    topics = [{"topic": topic} for topic in ("gold", "a cat", "the sky")]
    states = facts.run_batch(topics, backend=RuntimeEndpoint(server.url), num_threads=3, progress_bar=False)
    assert [state.text().split(".")[0] for state in states] == [f"Facts about {topic['topic']}" for topic in topics]
    assert all(state["alive"] in ("yes", "no") for state in states)


def test_what_the_server_says_about_itself(server: Server, client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    server.generate("The sea is", max_new_tokens=48, ignore_eos=True)
    info = server.get("/server_info")
    assert info["speculative_algorithm"] == "STANDALONE"
    assert info["speculative_num_steps"] == 5, "the most the default policy may choose"
    own = nightjar(server)
    assert sum(own["steps_by_gamma"]) > 0 and own["draft_forwards"] > 0, own
    assert info["speculative_draft_model_quantization"] == "nightjar_w8"
    assert (info["device"], info["dtype"]) == ("cpu", "float32")
    assert own["accept_length"] > 1
    assert server.get("/model_info")["is_generation"] is True
    assert server.get("/health") is None
    assert server.get("/health_generate") is None


def test_a_prompt_beyond_the_context(server: Server) -> None:
    """SmolLM2 reads 8192 tokens; the server refuses more, and lives."""
    assert server.status_of("/generate", {"text": "word " * 9000}) == 400
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "word " * 9000}]}
    assert server.status_of("/v1/chat/completions", chat) == 400
    assert server.status_of("/generate", {"text": "word", "sampling_params": {"max_new_tokens": 9000}}) == 400
    assert "Paris" in server.generate("The capital of France is")["text"]
    assert server.alive()
