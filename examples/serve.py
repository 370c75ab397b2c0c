"""Serve a run, ask it over HTTP, stop it. Needs the extra: pip install 'habitus[serve]'.

python examples/serve.py run/best --data dataset
"""

import argparse
import json
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve a run and ask it once.")
    parser.add_argument("run")
    parser.add_argument("--data", required=True, help="the prepared dataset of the run")
    parser.add_argument("--item-column", default="item_id", help="the item's column in the log")
    parser.add_argument("--history", type=json.loads, default=[1, 2], help="item ids as JSON, oldest first")
    options = parser.parse_args()

    command = [sys.executable, "-m", "habitus", "serve", options.run, "--data", options.data, "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        address = re.search(r"http://\S+", server.stdout.readline())  # printed once it answers
        if address is None:
            raise SystemExit("the server did not start")
        body = {"history": [{options.item_column: item} for item in options.history], "k": 3}
        request = urllib.request.Request(
            f"{address[0]}/v1/recommend",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            for item in json.load(answer)["items"]:
                print(item["item_id"], round(item["probability"], 4))
    except urllib.error.HTTPError as error:
        raise SystemExit(error.read().decode()) from None  # what was wrong with the request, and what to do
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(timeout=60)


if __name__ == "__main__":
    main()
