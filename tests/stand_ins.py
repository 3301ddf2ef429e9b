"""Programs that stand in for a benchmark client and a completions endpoint, as real processes and real sockets."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

CLIENT = '''"""Takes the options of vllm bench serve, leaves a result file, and notes each call."""
import argparse, json, os, pathlib, signal, sys, time

parser = argparse.ArgumentParser()
parser.add_argument("behaviours", type=pathlib.Path)
parser.add_argument("--base-url")
parser.add_argument("--seed", type=int)
parser.add_argument("--num-prompts", type=int)
parser.add_argument("--max-concurrency", type=int)
parser.add_argument("--random-input-len", type=int)
parser.add_argument("--random-output-len", type=int)
parser.add_argument("--metric-percentiles")
parser.add_argument("--result-dir", type=pathlib.Path)
parser.add_argument("--result-filename")
asked, _ = parser.parse_known_args()

with (asked.behaviours / "calls").open("a") as calls:
    calls.write(f"{asked.max_concurrency} {asked.seed}\\n")
behaviour = asked.behaviours / str(asked.max_concurrency)
behaviour = behaviour.read_text() if behaviour.exists() else ""
if behaviour == "hang":
    (asked.behaviours / "hanging").write_text(str(os.getpid()))
    time.sleep(600)
if behaviour == "exit":
    sys.exit("the tokenizer is missing")
failed = 1 if behaviour == "fail" else 0
times = {"mean": 1.5, **{f"p{p}": 1 + float(p) / 100 for p in asked.metric_percentiles.split(",")}}
result = {
    "duration": 2.0,
    "completed": asked.num_prompts - failed,
    "failed": failed,
    "total_input_tokens": asked.num_prompts * asked.random_input_len,
    "total_output_tokens": asked.num_prompts * asked.random_output_len,
    **{f"{name}_ttft_ms": asked.max_concurrency * value for name, value in times.items()},
    **{f"{name}_tpot_ms": asked.max_concurrency * value for name, value in times.items()},
}
text = "{" if behaviour == "garble" else json.dumps(result)
(asked.result_dir / asked.result_filename).write_text(text)
'''


class Endpoint:
    """A completions endpoint that answers each prompt with tokens that a function gives."""

    def __init__(self, url, requests):
        self.url = url
        self.requests = requests


@contextmanager
def serve_completions(answer=None, models=("tiny",)):
    """``answer(prompt, position)``: a token and the log-probabilities there; ``None`` for an HTTP 500."""
    requests = []

    def plain(prompt, position):
        return "a", {"a": -0.5, "b": -1.5}

    give = answer or plain

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_):
            pass

        def _send(self, body, kind, status=200):
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self):
            data = {"data": [{"id": name, "object": "model"} for name in models]}
            self._send(json.dumps(data).encode(), "application/json")

        def do_POST(self):
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            requests.append(asked)
            given = [give(asked["prompt"], position) for position in range(asked["max_tokens"])]
            if None in given:
                self._send(b"out of memory", "text/plain", 500)
                return
            events = []
            for token, top in given:
                logprobs = {"tokens": [token], "top_logprobs": [top]}
                events.append({"choices": [{"text": token, "logprobs": logprobs, "finish_reason": None}]})
            events.append({"choices": [], "usage": {"prompt_tokens": len(asked["prompt"])}})
            lines = [f"data: {json.dumps(event)}\n\n" for event in events]
            self._send("".join([*lines, "data: [DONE]\n\n"]).encode(), "text/event-stream")

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield Endpoint(f"http://127.0.0.1:{server.server_port}", requests)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
