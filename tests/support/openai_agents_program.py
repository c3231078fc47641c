"""Runs an agent with a tool by openai-agents, in its environment, whole and streamed; prints the answers."""

from __future__ import annotations

import asyncio
import json
import sys

from agents import Agent, Runner, function_tool, set_default_openai_client, set_tracing_disabled
from openai import AsyncOpenAI

ASKED = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'


@function_tool
def add(a: int, b: int) -> int:
    """Adds."""
    return a + b


async def main(url: str, model: str) -> None:
    """The agent asks for the sum, and answers with what the tool says."""
    set_tracing_disabled(True)
    set_default_openai_client(AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0))
    agent = Agent(name="adder", instructions="Add.", model=model, tools=[add])
    whole = await Runner.run(agent, ASKED)
    streamed = Runner.run_streamed(agent, ASKED)
    kinds = {
        event.data.type async for event in streamed.stream_events() if event.type == "raw_response_event"
    }
    told = {"whole": whole.final_output, "streamed": streamed.final_output, "events": sorted(kinds)}
    sys.stdout.write(json.dumps(told) + "\n")


asyncio.run(main(*sys.argv[1:]))
