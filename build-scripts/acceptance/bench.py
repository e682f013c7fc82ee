"""What the server itself costs: times to start, of a call, to end; throughput of a batch by lanes; memory over many requests.

Prints a table; checks nothing. usage: bench.py PROGRAM [REQUESTS]   (REQUESTS of the last part, 10000 without)
"""

import json
import os
import pathlib
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time

QUESTION = {"prompt": "2 + 2 =", "max_tokens": 4, "seed": 1}
SUMS = {"input_path": "in.jsonl", "template": "{{a}} + {{b}} =", "max_tokens": 16}


class Server:
    def __init__(self, program: str, state: str, *arguments: str) -> None:
        start = time.perf_counter()
        self.process = subprocess.Popen(
            [program, "--state-dir", state, "--threads", "1", *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
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

    def resources(self) -> str:
        proc = pathlib.Path(f"/proc/{self.process.pid}")
        fields = dict(line.split(":", 1) for line in (proc / "status").read_text().splitlines())
        return f"{fields['VmRSS'].strip()}, {fields['Threads'].strip()} threads, {len(list((proc / 'fd').iterdir()))} descriptors"

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


def percentiles(ms: list[float]) -> str:
    ms = sorted(ms)
    return f"p50 {statistics.median(ms):.2f} ms, p99 {ms[int(len(ms) * 0.99)]:.2f} ms, most {ms[-1]:.2f} ms (n = {len(ms)})"


def times(server: Server, n: int, tool: str, arguments: dict) -> str:
    taken = []
    for _ in range(n):
        start = time.perf_counter()
        answer = server.call(tool, arguments)
        # The engine's own time is not the server's.
        engine_ms = answer.get("data", {}).get("receipt", {}).get("total_ms", 0)
        taken.append((time.perf_counter() - start) * 1e3 - engine_ms)
    return percentiles(taken)


def calls(program: str, state: str) -> None:
    started = []
    for _ in range(20):
        server = Server(program, state)
        started.append(server.initialize_ms)
        server.close()
    print("start of the process to the reply to initialize:", percentiles(started))
    server = Server(program, state)
    print("dllm_status:", times(server, 1000, "dllm_status", {}))
    server.call("dllm_generate", QUESTION)
    print("dllm_generate less the engine's time:", times(server, 300, "dllm_generate", QUESTION))
    server.close()


def ends(program: str, state: str, n: int = 10) -> None:
    def end_of_input(server: Server) -> None:
        server.process.stdin.close()

    def terminate(server: Server) -> None:
        server.process.send_signal(signal.SIGTERM)

    for name, end in (("end of input", end_of_input), ("SIGTERM", terminate)):
        for busy in (False, True):
            taken = []
            for _ in range(n):
                server = Server(program, state)
                if busy:
                    server.call("dllm_batch", SUMS)
                    server.call("dllm_generate", QUESTION)
                start = time.perf_counter()
                end(server)
                server.process.wait()
                taken.append((time.perf_counter() - start) * 1e3)
            print(f"{name}, {'busy' if busy else 'idle'}:", percentiles(taken))
    deaths = [parent_death(program, state) for _ in range(n)]
    print("death of the parent, pipes held by others:", percentiles(deaths))


def parent_death(program: str, state: str) -> float:
    """The shell starts the server and is killed once that has answered, while we hold both pipes."""
    script = 'exec 3<&0; "$0" --state-dir "$1" <&3 & echo $!; wait'
    shell = subprocess.Popen(["sh", "-c", script, program, state], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    server = os.pidfd_open(int(shell.stdout.readline()))
    shell.stdin.write(b'{"jsonrpc":"2.0","id":1,"method":"ping"}\n')
    shell.stdin.flush()
    shell.stdout.readline()
    start = time.perf_counter()
    shell.kill()
    select.select([server], [], [])
    taken = (time.perf_counter() - start) * 1e3
    os.close(server)
    return taken


def lanes(program: str, state: str) -> None:
    for n in (1, 4, 8):
        server = Server(program, state, "--lanes", str(n))
        server.call("dllm_models", {"operation": "load", "model": "dllm-tiny"})
        start = time.perf_counter()
        batch = server.call("dllm_batch", SUMS)
        while server.call("dllm_job", {"operation": "wait", "job_id": batch["data"]["job_id"]})["data"]["state"] == "running":
            pass
        rate = 200 / (time.perf_counter() - start)
        step_ms = server.call("dllm_benchmark", {"preset": "standard", "wait_s": 25})["data"].get("ms_per_step")
        print(f"batch of 200, {n} lanes: {rate:.1f} items/s; a step of all lanes: {step_ms} ms")
        server.close()


def soak(program: str, state: str, requests: int) -> None:
    server = Server(program, state)
    for n in range(requests + 1):
        if n % max(requests // 10, 1) == 0:
            print(f"after {n} requests: {server.resources()}")
        server.call("dllm_generate", QUESTION | {"seed": n})
    server.close()


def main() -> None:
    program = sys.argv[1]
    requests = int(sys.argv[2]) if len(sys.argv) > 2 else 10_000
    with tempfile.TemporaryDirectory() as state:
        (pathlib.Path(state) / "files").mkdir()
        rows = "".join(json.dumps({"id": i, "a": 10 + i % 80, "b": 11 + i % 60}) + "\n" for i in range(200))
        (pathlib.Path(state) / "files/in.jsonl").write_text(rows, encoding="utf-8")
        calls(program, state)
        ends(program, state)
        lanes(program, state)
        soak(program, state, requests)


if __name__ == "__main__":
    main()
