"""Does a deployment still solve grade-school mathematics? lm-eval's own task, through the completions endpoint.

lm-eval runs the task and scores it; here are only its command line, a look whether it can run, and its result.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from hybrid_connector.core.errors import ConfigError, PeerError
from hybrid_connector.tools.sweeping.deployments import Endpoint

DATASET = "openai/gsm8k"


def check_available(environment: Mapping[str, str] = os.environ) -> None:
    """Raise ``ConfigError`` where lm-eval is not installed, or its data set not in the local Hugging Face cache."""
    if find_spec("lm_eval") is None:
        raise ConfigError("--gsm8k needs lm-eval beside this Python: pip install 'lm-eval[api]'")
    prepared = _prepared(environment)
    if not prepared.is_dir():
        raise ConfigError(
            f"--gsm8k: expected the data set {DATASET} in {prepared}, got none; where the hub can be reached, "
            f"datasets.load_dataset({DATASET!r}, 'main') in Python puts it there"
        )


def _prepared(environment: Mapping[str, str]) -> Path:
    """Where ``datasets`` keeps it: a download in the hub's own cache is of no use to it without the hub."""
    home = Path(environment.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    cache = Path(environment.get("HF_DATASETS_CACHE") or home / "datasets")
    return cache / DATASET.replace("/", "___") / "main"


def make_command(endpoint: Endpoint, directory: Path, *, concurrency: int, limit: int | None) -> list[str]:
    """lm-eval's command line; its result goes below ``directory``."""
    model = {
        "model": endpoint.model,
        "base_url": f"{endpoint.url}/v1/completions",
        "tokenizer": endpoint.tokenizer,
        "num_concurrent": concurrency,
        "tokenized_requests": False,
    }
    command = [sys.executable, "-m", "lm_eval", "--model", "local-completions", "--tasks", "gsm8k"]
    command += ["--model_args", ",".join(f"{key}={value}" for key, value in model.items())]
    command += ["--output_path", str(directory)]
    return command if limit is None else [*command, "--limit", str(limit)]


def run_task(command: Sequence[str], directory: Path) -> dict[str, float]:
    """Run it with the hub's client offline and return its scores by name. Raises ``PeerError`` where it fails."""
    directory.mkdir(parents=True, exist_ok=True)
    log = directory / "lm-eval.log"
    known = set(directory.rglob("results_*.json"))
    with log.open("wb") as out:
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=environment, check=False)
    results = set(directory.rglob("results_*.json")) - known
    if done.returncode != 0 or not results:
        raise PeerError(f"lm-eval: expected a result and exit status 0, got {done.returncode}; {log} says why")
    (result,) = results
    return read_scores(json.loads(result.read_text("utf-8")))


def read_scores(document: Mapping[str, Mapping[str, Mapping[str, object]]]) -> dict[str, float]:
    """The scores in lm-eval's result; its standard errors are scores too."""
    scores = document["results"]["gsm8k"]
    return {name: float(value) for name, value in scores.items() if isinstance(value, (int, float)) and "," in name}
