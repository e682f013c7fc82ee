"""What the server itself costs: time to start, time of a call, throughput of a batch by lanes. Prints a table; checks nothing.

usage: bench.py PROGRAM
"""

import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time


class Server:
    def __init__(self, program: str, state: str, *arguments: str) -> None:
        start = time.perf_counter()
        self.process = subprocess.Popen([program, "--state-dir", state, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.id = 0
        self.request("initialize", {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "bench", "version": "1"}})
        self.initialize_ms = (time.perf_counter() - start) * 1e3
        self.send({"jsonrpc": "2.0", "method": "notifications/initialized"})

    def send(self, message: dict) -> None:
        self.process.stdin.write(json.dumps(message).encode() + b"\n")
        self.process.stdin.flush()

    def request(self, method: str, params: dict) -> dict:
        self.id += 1
        self.send({"jsonrpc": "2.0", "id": self.id, "method": method, "params": params})
        while True:
            line = json.loads(self.process.stdout.readline())
            if line.get("id") == self.id:
                return line

    def call(self, tool: str, arguments: dict) -> dict:
        return self.request("tools/call", {"name": tool, "arguments": arguments})["result"]["structuredContent"]

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


def times(server: Server, n: int, tool: str, arguments: dict) -> str:
    taken = []
    for _ in range(n):
        start = time.perf_counter()
        answer = server.call(tool, arguments)
        taken.append((time.perf_counter() - start) * 1e3)
        # The engine's own time is not the server's.
        taken[-1] -= answer.get("data", {}).get("receipt", {}).get("total_ms", 0)
    taken.sort()
    return f"p50 {statistics.median(taken):.2f} ms, p99 {taken[int(n * 0.99)]:.2f} ms"


def main() -> None:
    program = sys.argv[1]
    with tempfile.TemporaryDirectory() as state:
        server = Server(program, state)
        print(f"initialize: {server.initialize_ms:.1f} ms")
        print("dllm_status:", times(server, 500, "dllm_status", {}))
        question = {"prompt": "2 + 2 =", "max_tokens": 4, "seed": 1}
        server.call("dllm_generate", question)
        print("dllm_generate less the engine's time:", times(server, 200, "dllm_generate", question))
        server.close()
        rows = "".join(json.dumps({"id": i, "a": 10 + i % 80, "b": 11 + i % 60}) + "\n" for i in range(200))
        (pathlib.Path(state) / "files/in.jsonl").write_text(rows, encoding="utf-8")
        for lanes in (1, 4, 8):
            server = Server(program, state, "--lanes", str(lanes))
            server.call("dllm_generate", question)
            start = time.perf_counter()
            batch = server.call("dllm_batch", {"input_path": "in.jsonl", "template": "{{a}} + {{b}} =", "max_tokens": 16})
            while server.call("dllm_job", {"operation": "wait", "job_id": batch["data"]["job_id"]})["data"]["state"] == "running":
                pass
            print(f"batch of 200, {lanes} lanes: {200 / (time.perf_counter() - start):.1f} items/s")
            server.close()


if __name__ == "__main__":
    main()
