"""Clients of the serving benchmark: one light process, many kept-alive connections, each asking again once answered.

    python benchmarks/serve_client.py PORT BODIES CLIENTS SECONDS COUNT

BODIES is a JSON file with a list of request bodies. Ends after SECONDS or COUNT answers and prints one JSON line with
the answers' number, the time they took, percentiles of the latency and the item ids of every body that was answered.
Requests are written as bytes made beforehand and answers are cut at Content-Length, so that the client costs little.
"""

import asyncio
import json
import sys
import time
from pathlib import Path


async def main(port: int, bodies: list[str], clients: int, seconds: float, count: int) -> dict[str, object]:
    """Ask until the time or the number is reached."""
    head = (
        "POST /v1/recommend HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n"
    )
    requests = [head.format(len(body.encode())).encode() + body.encode() for body in bodies]
    latencies: list[float] = []
    first_ids: dict[int, list[object]] = {}
    turn = iter(range(count))
    end = time.perf_counter() + seconds

    async def client() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for number in turn:
            if time.perf_counter() > end:
                break
            which = number % len(requests)
            began = time.perf_counter()
            writer.write(requests[which])
            headers = await reader.readuntil(b"\r\n\r\n")
            place = headers.lower().index(b"content-length:") + 15
            answer = await reader.readexactly(int(headers[place : headers.index(b"\r\n", place)]))
            latencies.append(time.perf_counter() - began)
            assert headers.startswith(b"HTTP/1.1 200"), (headers, answer)
            if which not in first_ids:
                first_ids[which] = [one["item_id"] for one in json.loads(answer)["items"]]
        writer.close()

    began = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    took = time.perf_counter() - began
    latencies.sort()
    ranks = {name: latencies[min(len(latencies) - 1, int(share * len(latencies)))] for name, share in SHARES.items()}
    return {
        "requests": len(latencies),
        "per_s": len(latencies) / took,
        **{f"{name}_ms": 1e3 * value for name, value in ranks.items()},
        "first_ids": first_ids,
        "client_cpu_s": time.process_time(),
    }


SHARES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}

if __name__ == "__main__":
    port, path, clients, seconds, count = sys.argv[1:]
    bodies = json.loads(Path(path).read_text(encoding="utf-8"))
    print(json.dumps(asyncio.run(main(int(port), bodies, int(clients), float(seconds), int(count)))))
