"""The real `openai` package against `nuthatch serve` on the default model.

    python eval/serve/openai_client.py target/release/nuthatch

Starts a server of its own on a free port, asks it everything a client would, and ends it. Every check
is an assertion; the last line says how many there were. `cargo xtask clients` makes the environment.
"""

import json
import pathlib
import re
import sys

import openai
from pydantic import BaseModel

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from server import Serve, check, n_checks  # noqa: E402


def start(binary):
    return Serve(binary, "--served-model-name", "small", "--api-key", "secret", "--tool-call-parser",
                 "hermes", "-c", "2K")


def chat(client):
    messages = [{"role": "user", "content": "Name a bird that stores seeds. Answer in one sentence."}]
    whole = client.chat.completions.create(model="small", messages=messages, max_tokens=40,
                                           temperature=0)
    text = whole.choices[0].message.content
    print("chat:", text)
    check(len(text.split()) > 3, text)
    check(whole.usage.completion_tokens <= 40, whole.usage)
    again = client.chat.completions.create(model="small", messages=messages, max_tokens=40,
                                           temperature=0)
    check(again.choices[0].message.content == text, "the same question, another answer")
    check(again.usage.prompt_tokens_details.cached_tokens > 0, again.usage)

    pieces, usage = [], None
    stream = client.chat.completions.create(model="small", messages=messages, max_tokens=40,
                                            temperature=0, stream=True,
                                            stream_options={"include_usage": True})
    for chunk in stream:
        usage = chunk.usage or usage
        pieces += [choice.delta.content or "" for choice in chunk.choices]
    check("".join(pieces) == text, "a streamed answer differs")
    check(usage.completion_tokens == whole.usage.completion_tokens, usage)
    check(len(pieces) >= usage.completion_tokens, "fewer chunks than tokens")

    several = client.chat.completions.create(model="small", messages=messages, max_tokens=12, n=3,
                                             seed=1, temperature=1.0, logprobs=True, top_logprobs=2)
    check(len({choice.message.content for choice in several.choices}) > 1, "all samples are equal")
    content = several.choices[2].logprobs.content
    check(all(len(token.top_logprobs) == 2 and token.logprob <= 0 for token in content), content)


def completions(client):
    answer = client.completions.create(model="small", prompt="One, two, three,", max_tokens=8,
                                       temperature=0, logprobs=1, stop=["six"])
    print("completion:", repr(answer.choices[0].text))
    check(len(answer.choices[0].logprobs.tokens) >= 1, answer)
    check("six" not in answer.choices[0].text, answer)
    both = client.completions.create(model="small", prompt=["a b c", "1 2 3"], max_tokens=4, n=2)
    check([choice.index for choice in both.choices] == [0, 1, 2, 3], both)
    echo = client.completions.create(model="small", prompt="One, two,", max_tokens=4, echo=True)
    check(echo.choices[0].text.startswith("One, two,"), echo)


class Bird(BaseModel):
    name: str
    wings: int


def structured(client):
    messages = [{"role": "user", "content": "Describe a nuthatch as JSON with name and wings."}]
    answer = client.chat.completions.parse(model="small", messages=messages, max_tokens=200,
                                           temperature=0, response_format=Bird)
    print("structured:", answer.choices[0].message.content)
    check(isinstance(answer.choices[0].message.parsed, Bird), answer)
    answer = client.chat.completions.create(model="small", messages=messages, max_tokens=200,
                                            response_format={"type": "json_object"}, temperature=0)
    if answer.choices[0].finish_reason == "stop":
        check(isinstance(json.loads(answer.choices[0].message.content), dict), answer)
    extra = {"structured_outputs": {"regex": "[0-9]{3}-[0-9]{2}"}}
    answer = client.chat.completions.create(model="small", messages=messages, extra_body=extra)
    check(re.fullmatch("[0-9]{3}-[0-9]{2}", answer.choices[0].message.content), answer)
    extra = {"guided_choice": ["yes", "no"]}
    pieces = client.chat.completions.create(model="small", messages=messages, extra_body=extra,
                                            stream=True)
    text = "".join(choice.delta.content or "" for chunk in pieces for choice in chunk.choices)
    check(text in ("yes", "no"), text)


TOOL = {"type": "function", "function": {
    "name": "weather", "description": "The weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}},
                   "required": ["city"], "additionalProperties": False}}}


def tools(client):
    messages = [{"role": "user", "content": "What is the weather in Paris?"}]
    for choice in ["required", {"type": "function", "function": {"name": "weather"}}]:
        answer = client.chat.completions.create(model="small", messages=messages, tools=[TOOL],
                                                tool_choice=choice, max_tokens=120, temperature=0)
        check(answer.choices[0].finish_reason == "tool_calls", answer)
        call = answer.choices[0].message.tool_calls[0]
        check(call.function.name == "weather" and "city" in json.loads(call.function.arguments), call)
    print("tool call:", call.function.name, call.function.arguments)
    messages += [answer.choices[0].message.model_dump(exclude_none=True),
                 {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    answer = client.chat.completions.create(model="small", messages=messages, max_tokens=20)
    check(answer.choices[0].message.content is not None, answer)


def responses(client):
    answer = client.responses.create(model="small", instructions="Be brief.", input="Say hello.",
                                     max_output_tokens=20, temperature=0)
    print("response:", answer.output_text)
    check(answer.output_text and answer.usage.output_tokens <= 20, answer)
    events = list(client.responses.create(model="small", instructions="Be brief.",
                                          input="Say hello.", max_output_tokens=20, temperature=0,
                                          stream=True))
    deltas = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    check(deltas == answer.output_text, "a streamed response differs")
    check(events[-1].type in ("response.completed", "response.incomplete"), events[-1])
    numbers = [event.sequence_number for event in events]
    check(numbers == list(range(len(events))), numbers)


def expect(error, code, call):
    try:
        call()
    except error as found:
        check(found.code == code, found)
        return
    raise AssertionError(f"no {error.__name__}")


def errors(client, url):
    hi = [{"role": "user", "content": "Hi"}]
    create = client.chat.completions.create
    expect(openai.NotFoundError, "model_not_found", lambda: create(model="gpt-4", messages=hi))
    expect(openai.BadRequestError, "context_length_exceeded",
           lambda: create(model="small", messages=hi, max_tokens=100_000))
    expect(openai.BadRequestError, "invalid_value",
           lambda: create(model="small", messages=hi, temperature=-1))
    expect(openai.BadRequestError, "invalid_format",
           lambda: create(model="small", messages=hi, extra_body={"guided_regex": "("}))
    stranger = openai.OpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0)
    expect(openai.AuthenticationError, "invalid_api_key", stranger.models.list)


def leaving(client):
    hi = [{"role": "user", "content": "Tell me a very long story."}]
    stream = client.chat.completions.create(model="small", messages=hi, stream=True)
    next(iter(stream))
    stream.close()
    check(client.models.list().data[0].id == "small", "the server answers afterwards")


def main():
    server = start(sys.argv[1])
    url = server.url
    try:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="secret", max_retries=0)
        check([model.id for model in client.models.list()] == ["small"], "models")
        chat(client)
        completions(client)
        structured(client)
        tools(client)
        responses(client)
        errors(client, url)
        leaving(client)
    finally:
        server.end()
    print(f"{n_checks()} checks with openai {openai.__version__}: all fine")


if __name__ == "__main__":
    main()
