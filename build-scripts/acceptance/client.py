"""The Python clients (mcp, fastmcp) against a built dllm-mcp: list, generate, an error, progress, a job, a batch file, cancel.

usage: client.py mcp|fastmcp PROGRAM [ARGUMENT...]
"""

import asyncio
import json
import pathlib
import sys
import tempfile

PASSED: list[str] = []
FAILED: list[str] = []
# Steps at this temperature are never confident, so it runs until it is cancelled.
ENDLESS = {"prompt": "Tell a story", "max_tokens": 4096, "max_steps": 4096, "t_min": 10, "t_max": 10, "n": 4, "wait_s": 25}


def check(name: str, good: bool, detail: object = "") -> None:
    (PASSED if good else FAILED).append(name)
    if not good:
        print(f"FAILED {name}: {detail}")


def body(result) -> dict:
    return json.loads(result.content[0].text)


async def answers(call) -> None:
    answer = body(await call("dllm_generate", {"prompt": "86 + 45 =", "seed": 1, "max_tokens": 32}))
    check("generate", answer["data"]["text"] == "131", answer)

    error = body(await call("dllm_generate", {"prompt": "p", "max_tokens": 0}))
    check("error", error["error"]["type"] == "bad_argument" and "1..=131072" in error["message"], error)

    notes: list[float] = []

    async def on_progress(progress, total, message) -> None:
        notes.append(progress)

    rows = [{"id": str(i), "prompt": f"{i + 10} + 5 ="} for i in range(32)]
    await call("dllm_batch", {"items_json": json.dumps(rows), "max_tokens": 64, "wait_s": 20}, on_progress)
    check("progress", len(notes) > 0 and notes == sorted(set(notes)), notes)

    job = body(await call("dllm_generate", {"prompt": "7 + 8 =", "seed": 1, "max_tokens": 32, "wait_s": 0}))["data"]["job_id"]
    waited = body(await call("dllm_job", {"operation": "wait", "job_id": job, "wait_s": 20}))
    check("job", waited["data"]["text"] == "15", waited)


async def batch_file(call, state: pathlib.Path) -> None:
    rows = "".join(json.dumps({"id": f"r{i}", "a": 10 + i}) + "\n" for i in range(40))
    source, output = state / "files/in.jsonl", state / "files/out.jsonl"
    source.write_text(rows, encoding="utf-8")
    arguments = {"input_path": str(source), "output_path": str(output), "template": "{{a}} + 7 =", "max_tokens": 16, "wait_s": 25}
    batch = body(await call("dllm_batch", arguments))
    job = batch["data"]["job_id"]
    while batch["data"]["state"] in ("queued", "running"):
        batch = body(await call("dllm_job", {"operation": "wait", "job_id": job, "wait_s": 20}))
    lines = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    check("batch file", len(lines) == 40 and all(line["ok"] for line in lines), batch)


async def cancel(call) -> None:
    async def jobs() -> dict:
        listed = body(await call("dllm_job", {"operation": "list"}))["data"]["jobs"]
        return {job["job_id"]: job["state"] for job in listed}

    before = await jobs()
    endless = asyncio.create_task(call("dllm_generate", ENDLESS))
    while not (new := {job for job, state in (await jobs()).items() if job not in before and state == "running"}):
        await asyncio.sleep(0.05)
    endless.cancel()
    await asyncio.gather(endless, return_exceptions=True)
    # Some of these clients only stop listening, so the job is cancelled by name, too.
    ended = [body(await call("dllm_job", {"operation": "cancel", "job_id": job}))["data"]["state"] for job in new]
    check("cancel", ended == ["cancelled"], ended)
    status = body(await call("dllm_status", {}))
    check("the next call after a cancel", status["success"] is True, status)


async def scenario(list_tools, call, state: pathlib.Path) -> None:
    """`call(tool, arguments, on_progress)` returns the raw result."""
    tools = await list_tools()
    check("list", len(tools) == 8, tools)
    await answers(call)
    await batch_file(call, state)
    await cancel(call)


async def with_mcp(program: str, arguments: list[str], state: pathlib.Path) -> None:
    from mcp import StdioServerParameters

    params = StdioServerParameters(command=program, args=arguments)
    try:
        from mcp import Client
    except ImportError:
        from mcp import ClientSession
        from mcp.client.stdio import stdio_client

        async with stdio_client(params) as (read, write), ClientSession(read, write) as session:
            await session.initialize()

            async def listed():
                return (await session.list_tools()).tools

            await scenario(listed, lambda tool, args, note=None: session.call_tool(tool, args, progress_callback=note), state)
        return
    async with Client(params) as client:

        async def listed():
            return (await client.list_tools()).tools

        await scenario(listed, lambda tool, args, note=None: client.call_tool(tool, args, progress_callback=note), state)


async def with_fastmcp(program: str, arguments: list[str], state: pathlib.Path) -> None:
    from fastmcp import Client
    from fastmcp.client.transports import StdioTransport

    async with Client(StdioTransport(program, arguments)) as client:
        await scenario(client.list_tools, lambda tool, args, note=None: client.call_tool_mcp(tool, args, progress_handler=note), state)


def main() -> int:
    kind, program, *arguments = sys.argv[1:]
    with tempfile.TemporaryDirectory(prefix="dllm mcp ä ") as folder:
        state = pathlib.Path(folder)
        (state / "files").mkdir()
        run = with_mcp if kind == "mcp" else with_fastmcp
        arguments += ["--state-dir", folder, "--root", str(state / "files"), "--threads", "1"]
        asyncio.run(asyncio.wait_for(run(program, arguments, state), 300))
    print(f"{len(PASSED)} passed, {len(FAILED)} failed")
    return 1 if FAILED else 0


if __name__ == "__main__":
    sys.exit(main())
