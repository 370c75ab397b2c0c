"""Serving under an open load: requests arrive when they arrive, whether or not earlier ones have been answered.

    python benchmarks/serve_load.py [--items 1000000] [--seconds 200 20] [--folder DIR] [--keep FILE]

Arrivals are a Poisson process. A latency counts from the moment when a request was due, so that a server which stalls
is charged for those that queue up behind it. The capacity is measured first, with a few clients in a closed loop; then
come 50, 80 and 95% of it for --seconds each, twice the capacity for a while, and 50% again. Under the last load the
model is replaced several times. Beside `habitus serve` the same is asked of a plain FastAPI + faiss server
(serve_plain.py) with the same model and vectors. Client and server get a core each where the machine has two.
"""

import argparse
import asyncio
import json
import os
import random
import re
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from serve import prepare, processor_seconds
from serve_client import main as closed_loop
from softmax import machine

SHARES = (0.5, 0.8, 0.95)
OVERLOAD = 2.0
MOST_OPEN = 4096  # connections; what is due beyond them waits, and its time counts
SWAPS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--items", type=int, default=1_000_000)
    parser.add_argument("--index", default="exact")
    parser.add_argument(
        "--seconds", type=float, nargs="+", default=[200.0], help="of each share of the capacity, one for each server"
    )
    parser.add_argument("--servers", nargs="+", default=["habitus", "plain"])
    parser.add_argument("--folder", type=Path, default=Path("/tmp/habitus-serve-benchmark"))
    parser.add_argument("--keep", type=Path, help="write the JSON here too")
    options = parser.parse_args()
    folder = prepare(options.folder / str(options.items), options.items, [options.index])
    if len(os.sched_getaffinity(0)) > 1:
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    seconds = options.seconds + options.seconds[-1:] * len(options.servers)
    rows = [row for name, s in zip(options.servers, seconds, strict=False) for row in measure(name, folder, options, s)]
    result = {"benchmark": "serve_load", **machine(), "items": options.items, "index": options.index, "rows": rows}
    print(json.dumps(result))
    if options.keep:
        options.keep.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def measure(name: str, folder: Path, options: argparse.Namespace, long: float) -> list[dict[str, Any]]:
    """The rows of one server: capacity, shares of it, overload, recovery, and replacement of the model."""
    bodies = json.loads((folder / "bodies.json").read_text(encoding="utf-8"))
    server = Server(name, folder, options.index)
    rows = []
    try:
        closed = asyncio.run(closed_loop(server.port, bodies, 16, max(5.0, long / 10), 10**9))
        capacity = float(closed["per_s"])  # type: ignore[arg-type]
        print(f"{name}: {capacity:.1f} requests/s with 16 clients")
        short = max(10.0, long / 5)
        plan = [(f"{share:.0%}", share, long) for share in SHARES]
        plan += [(f"{OVERLOAD:.0%}", OVERLOAD, short), ("50% after it", 0.5, short)]
        plan += [("50%, model replaced", 0.5, short)] if name == "habitus" else []
        for label, share, seconds in plan:
            before, cpu_s = server.resident_bytes(), processor_seconds(server.process.pid)
            swap = server.swap if "replaced" in label else None
            row = asyncio.run(open_loop(server.port, bodies, share * capacity, seconds, swap))
            row["cpu_ms"] = round(1e3 * (processor_seconds(server.process.pid) - cpu_s) / max(1, row["asked"]), 1)
            grown = (server.resident_bytes() - before) / 2**20
            row |= {"seconds": seconds, "grown_mib": round(grown, 1)}
            rows.append({"server": name, "load": label, "capacity": capacity, **row})
            show(rows[-1])
    finally:
        server.process.kill()
        server.process.wait()
    return rows


class Server:
    """One of the two servers in a process of its own, on the first core."""

    def __init__(self, name: str, folder: Path, index: str) -> None:
        run = str(folder / "run")
        commands = {
            "habitus": ["-m", "habitus", "serve", run, "--port", "0", "--device", "cpu", "--index", index],
            "plain": [str(Path(__file__).with_name("serve_plain.py")), run],
        }
        command = [sys.executable, *commands[name], *(["--threads", "1", "--read-only"] if name == "habitus" else [])]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment)
        assert self.process.stdout is not None
        line = self.process.stdout.readline().decode()
        match = re.search(r":(\d+)$", line.strip())
        assert match, line
        self.port = int(match[1])
        if (os.cpu_count() or 1) > 1:
            for task in Path(f"/proc/{self.process.pid}/task").iterdir():
                os.sched_setaffinity(int(task.name), {0})

    def resident_bytes(self) -> int:
        text = Path(f"/proc/{self.process.pid}/status").read_text(encoding="ascii")
        return 1024 * int(re.search(r"VmRSS:\s+(\d+)", text)[1])  # type: ignore[index]

    def swap(self) -> int:
        """Replace the model by itself; the status of the answer."""
        url = f"http://127.0.0.1:{self.port}/v1/admin/swap"
        request = urllib.request.Request(url, b"", {"Content-Type": "application/json"}, method="POST")
        with urllib.request.urlopen(request, timeout=600) as answer:
            return int(answer.status)


async def open_loop(port: int, bodies: list[str], rate: float, seconds: float, swap: Any = None) -> dict[str, Any]:
    """Requests at a rate for some seconds; percentiles of the time since each was due, and the answers by status."""
    head = "POST /v1/recommend HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    head += "Content-Length: {}\r\n\r\n"
    requests = [head.format(len(body.encode())).encode() + body.encode() for body in bodies]
    chance, statuses, latencies = random.Random(1), Counter[str](), []
    idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
    room = asyncio.Semaphore(MOST_OPEN)

    async def exchange(number: int) -> bytes:
        """Headers of the answer. A kept connection that the server has closed meanwhile is replaced, as clients do."""
        while True:
            kept = bool(idle)
            reader, writer = idle.pop() if kept else await asyncio.open_connection("127.0.0.1", port)
            try:
                writer.write(requests[number % len(requests)])
                headers = await reader.readuntil(b"\r\n\r\n")
            except (ConnectionError, asyncio.IncompleteReadError) as error:
                if kept and not getattr(error, "partial", b""):
                    continue
                raise
            place = headers.lower().index(b"content-length:") + 15
            await reader.readexactly(int(headers[place : headers.index(b"\r\n", place)]))
            if b"connection: close" in headers.lower():
                writer.close()
            else:
                idle.append((reader, writer))
            return headers

    async def ask(number: int, due: float) -> None:
        async with room:
            try:
                headers = await exchange(number)
            except (OSError, asyncio.IncompleteReadError):
                statuses["lost"] += 1
                return
            status = headers[9:12].decode()
            statuses[status] += 1
            if status == "200":
                latencies.append(time.perf_counter() - due)

    began, tasks, number, at = time.perf_counter(), [], 0, 0.0
    swaps = [asyncio.create_task(replace_model(swap, seconds, statuses))] if swap else []
    while (at := at + chance.expovariate(rate)) < seconds:
        due = began + at
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        tasks.append(asyncio.create_task(ask(number, due)))
        number += 1
    await asyncio.gather(*tasks, *swaps)
    took = time.perf_counter() - began
    for _, writer in idle:
        writer.close()
    latencies.sort()
    at_share = {f"p{share:g}_ms": latencies[int(share / 100 * (len(latencies) - 1))] * 1e3 for share in (50, 99)}
    rounded = {name: round(value, 1) for name, value in at_share.items()} if latencies else {}
    return {"asked": number, "per_s": round(number / took, 1), **rounded, "answers": dict(statuses)}


async def replace_model(swap: Any, seconds: float, statuses: Counter[str]) -> None:
    for _ in range(SWAPS):
        await asyncio.sleep(seconds / (2 * SWAPS))
        statuses[f"swap {await asyncio.to_thread(swap)}"] += 1


def show(row: dict[str, Any]) -> None:
    print(
        f"{row['server']:8} {row['load']:>20}: {row['asked']:6,} asked, p50 {row.get('p50_ms', 0):8.1f} ms, "
        f"p99 {row.get('p99_ms', 0):8.1f} ms, "
        f"{row['cpu_ms']:.1f} ms of processor each, {row['answers']}, {row['grown_mib']:+.1f} MiB",
        flush=True,
    )


if __name__ == "__main__":
    main()
