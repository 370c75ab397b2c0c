"""How long a ranker waits: scores of given candidates over HTTP, one client.

    python benchmarks/score.py [--items 100000] [--candidates 1000] [--folder DIR] [--keep FILE]

The run is that of serve.py (kept in --folder). A client on a kept connection asks /v1/score for one history of 50 raw
events and for 16 of them, then /v1/recommend for the 10 best of the whole catalogue and, with `only_items`, of the same
candidates. The first requests warm up.
"""

import argparse
import http.client
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from serve import EVENTS, Server, prepare
from softmax import machine


def main() -> None:
    """Print a line per question, then one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--items", type=int, default=100_000)
    parser.add_argument("--candidates", type=int, default=1_000)
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--threads", type=int, default=1, help="of the server's computations")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/habitus-serve-benchmark"))
    parser.add_argument("--keep", type=Path, help="write the JSON here too")
    options = parser.parse_args()
    folder = prepare(options.folder / str(options.items), options.items, ["exact"])
    histories = [json.loads(body)["history"] for body in json.loads((folder / "bodies.json").read_text())]
    draw = random.Random(0)
    rows = []
    server = Server(folder, "exact", "--threads", str(options.threads))
    try:
        for name, path, count in (
            ("score", "/v1/score", 1),
            ("score, 16 histories", "/v1/score", 16),
            ("recommend 10 of all", "/v1/recommend", 1),
            ("recommend 10 of the candidates", "/v1/recommend", 1),
        ):
            bodies = []
            for _ in range(options.requests):
                some, candidates = draw.sample(histories, count), draw.sample(range(options.items), options.candidates)
                if path == "/v1/score":
                    bodies.append({"histories": some, "item_ids": candidates})
                else:
                    bodies.append({"history": some[0], "k": 10} | ({} if "all" in name else {"only_items": candidates}))
            times = ask(int(server.port), path, bodies)
            p50, p95, p99 = np.percentile(times, [50, 95, 99]).tolist()
            rows.append({"question": name, "requests": len(times), "p50_ms": p50, "p95_ms": p95, "p99_ms": p99})
            print(f"{name:32} p50 p95 p99 {p50:7.1f}{p95:7.1f}{p99:7.1f} ms", flush=True)
    finally:
        server.process.kill()
        server.process.wait()
    sizes = {"items": options.items, "candidates": options.candidates, "events": EVENTS}
    result = {"benchmark": "score", **machine(), **sizes, "threads": options.threads, "rows": rows}
    print(json.dumps(result))
    if options.keep:
        options.keep.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def ask(port: int, path: str, bodies: list[dict[str, Any]]) -> list[float]:
    """Milliseconds from sending a body to having read its answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    times = []
    for number, body in enumerate(bodies):
        content = json.dumps(body).encode()
        began = time.perf_counter()
        connection.request("POST", path, content, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        text = answer.read()
        assert answer.status == 200, text[:300]
        if number >= min(20, len(bodies) // 2):
            times.append(1e3 * (time.perf_counter() - began))
    return times


if __name__ == "__main__":
    main()
