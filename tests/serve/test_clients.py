"""Five client libraries of OpenAI's protocol call a tool, in streams where they can. Those that are missing skip."""

import json
import os
import shutil
from itertools import pairwise

import pytest

from tests.serve.test_command import server
from tests.serve.test_structured import ASKED, TEMPLATE, TOOL, Person

pytestmark = pytest.mark.long
MESSAGES, KEY, NAME = ASKED["messages"], "none", "tools"


def of_openai(url):
    client = pytest.importorskip("openai").OpenAI(base_url=url, api_key=KEY)
    tool = TOOL | {"function": TOOL["function"] | {"strict": True}}
    with client.chat.completions.stream(
        model=NAME, messages=MESSAGES, tools=[tool], tool_choice="required", max_tokens=80
    ) as stream:
        (call,) = stream.get_final_completion().choices[0].message.tool_calls
    return json.loads(call.function.arguments)


def of_litellm(url):
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it looks for prices in the network
    litellm, _ = pytest.importorskip("litellm"), pytest.importorskip("mcp")
    asked = {"model": f"openai/{NAME}", "api_base": url, "api_key": KEY, "messages": MESSAGES}
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(**asked | {"messages": [{"role": "user", "content": "x" * 4000}]})
    chunks = list(litellm.completion(**asked, tools=[TOOL], tool_choice="required", stream=True, max_tokens=80))
    (call,) = litellm.stream_chunk_builder(chunks).choices[0].message.tool_calls
    return json.loads(call.function.arguments)


def of_instructor(url):
    instructor = pytest.importorskip("instructor")
    client = instructor.from_openai(pytest.importorskip("openai").OpenAI(base_url=url, api_key=KEY))
    partial = client.chat.completions.create_partial(
        model=NAME, messages=MESSAGES, response_model=Person, max_tokens=80, max_retries=0
    )
    person = list(partial)[-1]
    return {"n": 1 + (person.age is None)}


def of_langchain(url):
    chat = pytest.importorskip("langchain_openai").ChatOpenAI(base_url=url, api_key=KEY, model=NAME, max_tokens=80)
    pieces = list(chat.bind_tools([TOOL], tool_choice="required").stream("Who?"))
    whole = pieces[0]
    for _, piece in pairwise(pieces):
        whole += piece
    return whole.tool_calls[0]["args"]


def of_llama_index(url):
    like = pytest.importorskip("llama_index.llms.openai_like")
    model = like.OpenAILike(
        model=NAME, api_base=url, api_key=KEY, is_chat_model=True, is_function_calling_model=True, max_tokens=80
    )
    tools = pytest.importorskip("llama_index.core.tools")

    def count(n: int) -> int:
        """Count."""
        return n

    *_, last = model.stream_chat_with_tools(
        [tools.FunctionTool.from_defaults(count)], user_msg="Who?", tool_required=True
    )
    (call,) = model.get_tool_calls_from_response(last)
    return call.tool_kwargs


@pytest.fixture(scope="module")
def url(tiny_model_dir, tmp_path_factory):
    home = tmp_path_factory.mktemp("clients")
    shutil.copytree(tiny_model_dir, folder := home / NAME)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    with server(folder, home) as (_, client):
        yield f"{str(client.base_url).rstrip('/')}/v1"


@pytest.mark.parametrize("ask", [of_openai, of_litellm, of_instructor, of_langchain, of_llama_index])
def test_a_client_reads_the_call_of_a_tool(url, ask):
    assert isinstance(ask(url)["n"], int)
