"""Does a sweep measure what is asked, resume, refuse what does not fit, and show what was measured?"""

import csv
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

import pytest

from hybrid_connector.core.errors import ConfigError, PeerError
from hybrid_connector.tools.cli import main
from hybrid_connector.tools.completions import Agreement, Answer
from hybrid_connector.tools.sweeping import gsm8k
from hybrid_connector.tools.sweeping.cells import Cell, Parameters, Record
from hybrid_connector.tools.sweeping.clients import CLIENTS, Load, Measurement, read_result
from hybrid_connector.tools.sweeping.deployments import Deployment, Endpoint, parse_deployment, read_deployments
from hybrid_connector.tools.sweeping.frontier import frontier
from hybrid_connector.tools.sweeping.parity import compare_answers, make_prompts
from hybrid_connector.tools.sweeping.report import make_page, make_rows, write_csv

from stand_ins import CLIENT, serve_completions

SCRIPT = Path(sys.executable).parent / "hybrid-connector"
GOLDEN = Path(__file__).parent / "golden" / "sweep"


def run_script(*arguments, **kwargs):
    """The installed console script."""
    words = [SCRIPT, "sweep", *map(str, arguments)]
    return subprocess.run(words, capture_output=True, text=True, timeout=60, **kwargs)


@dataclass
class Done:
    """How a command in this process ended, and what it said."""

    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def sweep(capsys):
    """The command in this process, which spares a second per call; the client is a process of its own all the same."""

    def run(*arguments):
        capsys.readouterr()
        status = main(["sweep", *map(str, arguments)])
        return Done(status, *capsys.readouterr())

    return run


def refused(error, part):
    """The block under it must raise ``error``, and ``part`` be in what it says."""
    return pytest.raises(error, match=re.escape(part))


def without(module):
    """The console script's program where a module is not installed."""
    hidden = f"import sys; sys.modules[{module!r}] = None; "
    return hidden + "from hybrid_connector.tools.cli import main; sys.exit(main())"


# The frontier.


def beats(one, other):
    return one[0] >= other[0] and one[1] >= other[1] and one != other


def test_the_frontier_is_what_no_other_point_beats():
    """Against every pair compared, on small grids where ties abound and on scattered points."""
    generator = random.Random(7)
    for trial in range(400):
        extent = 4 if trial % 2 else 1000
        points = [(generator.randrange(extent), generator.randrange(extent)) for _ in range(generator.randrange(12))]
        expected = sorted(point for point in points if not any(beats(other, point) for other in points))
        found = frontier(points, lambda point: (float(point[0]), float(point[1])))
        assert sorted(found) == expected, points
        assert [x for x, _ in found] == sorted(x for x, _ in found)


def test_points_in_one_place_do_not_beat_each_other():
    assert frontier([("a", 1.0), ("b", 1.0)], lambda item: (item[1], item[1])) != []
    assert {name for name, _ in frontier([("a", 1.0), ("b", 1.0)], lambda item: (item[1], item[1]))} == {"a", "b"}


# Deployments.


def test_a_deployment_is_read_from_an_option_and_from_a_file_alike(tmp_path):
    file = tmp_path / "deployments.toml"
    file.write_text('[pd]\nurl = "http://router:8000/v1/"\ngpus = 16\nmodel = "m"\n[agg]\nurl = "http://a:1"\n')
    pd = Deployment(url="http://router:8000/v1/", gpus=16, model="m")
    assert parse_deployment("pd=http://router:8000/v1/,gpus=16,model=m") == ("pd", pd)
    assert read_deployments(file) == {"pd": pd, "agg": Deployment(url="http://a:1")}
    assert pd.base == "http://router:8000"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("pd", "expected NAME=URL[,gpus=N], got 'pd'"),
        ("pd=", "expected NAME=URL[,gpus=N], got 'pd='"),
        ("../x=http://a:1", "expected a deployment's name of letters, digits, '.', '_' and '-', got '../x'"),
        ("pd=router:8000", "expected a URL as http://HOST:PORT, got 'router:8000'"),
        ("pd=http://a:1,gpus=0", "Expected `int` >= 1"),
        ("pd=http://a:1,gpus=many", "Expected `int`, got `str`"),
        ("pd=http://a:1,cpus=2", "known settings: url, gpus, model, tokenizer"),
        ("pd=http://a:1,gpus=2,gpus=3", "expected each setting once, as KEY=VALUE, got 'gpus=3'"),
    ],
)
def test_a_deployment_that_is_none(text, reason):
    with refused(ConfigError, reason):
        parse_deployment(text)


def test_a_file_of_deployments_that_is_none(tmp_path):
    file = tmp_path / "deployments.toml"
    file.write_text("[pd\n")
    with refused(ConfigError, str(file)):
        read_deployments(file)
    file.write_text("[pd]\ngpus = 2\n")
    with refused(ConfigError, "missing required field `url`"):
        read_deployments(file)


# Clients.

ENDPOINT = Endpoint("pd", "http://router:8000", 2, "m", "/models/m")
LOAD = Load(ENDPOINT, concurrency=2, num_prompts=8, input_len=64, output_len=8, seed=5, percentiles=(50.0, 99.0))


@pytest.mark.parametrize("name", CLIENTS)
def test_a_client_is_told_everything(name, tmp_path):
    words = CLIENTS[name].options(LOAD, tmp_path)
    told = dict(itertools.pairwise(words))
    assert ENDPOINT.url in words
    assert told["--model"] == "m"
    assert told["--tokenizer"] == "/models/m"
    assert {told.get("--max-concurrency"), told.get("--concurrency")} == {"2", None}
    assert {told.get("--num-prompts"), told.get("--request-count")} == {"8", None}
    assert {told.get("--random-input-len"), told.get("--isl")} == {"64", None}
    assert {told.get("--random-output-len"), told.get("--osl")} == {"8", None}
    assert {told.get("--seed"), told.get("--random-seed")} == {"5", None}
    assert str(tmp_path) in words


@pytest.mark.parametrize("name", CLIENTS)
def test_a_clients_own_result_is_read(name):
    """The files are what vllm bench serve 0.32 and aiperf 0.13 wrote, without what is not read."""
    measured = CLIENTS[name].read(json.loads((GOLDEN / f"{name}.json").read_text()), (50, 90, 99))
    assert (measured.completed, measured.failed, measured.output_tokens) == (4, 0, 64)
    assert measured.input_tokens in (256, 257)
    assert 0.2 < measured.duration_s < 0.4
    assert measured.ttft_ms.keys() == measured.tpot_ms.keys() == {"mean", "p50", "p90", "p99"}
    for times in (measured.ttft_ms, measured.tpot_ms):
        assert times["p50"] <= times["p90"] <= times["p99"]
    assert measured.ttft_ms["p50"] > 40 > 10 > measured.tpot_ms["p99"]


def test_a_result_that_is_none(tmp_path):
    client = CLIENTS["vllm"]
    with refused(PeerError, "expected a result of vllm"):
        read_result(client, tmp_path, LOAD)
    for text in ("{", "[]", "{}", '{"duration": 1}'):
        client.result(tmp_path).write_text(text)
        with refused(PeerError, "expected a result of vllm, got none"):
            read_result(client, tmp_path, LOAD)


def test_aiperf_reports_only_some_percentiles():
    with refused(ConfigError, "--percentiles: aiperf reports 1, 5, 10, 25, 50, 75, 90, 95, 99, got 99.9"):
        CLIENTS["aiperf"].check((50, 99.9))


# Running and resuming, with a stand-in for the client.


@pytest.fixture
def bench(tmp_path, sweep):
    """The options of a small sweep with the stand-in, and a way to change its behaviour at a concurrency."""
    return Bench(tmp_path, sweep)


class Bench:
    def __init__(self, directory, sweep):
        self.sweep = sweep
        self.behaviours = directory / "behaviours"
        self.behaviours.mkdir()
        self.output = directory / "out"
        script = directory / "client.py"
        script.write_text(CLIENT)
        self.client = f"{sys.executable} {script} {self.behaviours}"

    def behave(self, concurrency, how):
        (self.behaviours / str(concurrency)).write_text(how)

    @property
    def calls(self):
        """Concurrency and seed of each run of the client."""
        file = self.behaviours / "calls"
        lines = file.read_text().splitlines() if file.exists() else []
        return [tuple(map(int, line.split())) for line in lines]

    def words(self, url, *more):
        words = ["--deployment", f"pd={url},gpus=2", "--concurrency", "1", "2", "4", "--input-len", "20"]
        words += ["--output-len", "4", "--rounds", "3", "--client-command", self.client, "--output", self.output]
        return [*map(str, words), *more]

    def run(self, url, *more):
        return self.sweep(*self.words(url, *more))


def test_what_has_finished_is_not_run_again(bench):
    with serve_completions() as endpoint:
        done = bench.run(endpoint.url)
        assert done.returncode == 0, done.stderr
        assert [concurrency for concurrency, _ in bench.calls] == [1, 2, 4]
        assert sum(request["max_tokens"] == 4 for request in endpoint.requests) == 1 + 2 + 4  # a warm-up per user

        again = bench.run(endpoint.url)
        assert again.returncode == 0
        assert len(bench.calls) == 3
        assert again.stdout.count("measured before") == 3

        more = bench.run(endpoint.url, "--concurrency", "4", "8")
        assert more.returncode == 0
        assert [concurrency for concurrency, _ in bench.calls] == [1, 2, 4, 8]

        assert bench.run(endpoint.url, "--fresh").returncode == 0
        assert [concurrency for concurrency, _ in bench.calls] == [1, 2, 4, 8, 1, 2, 4]
    # A prefix cache must not know what a later run sends.
    assert len({seed for _, seed in bench.calls}) == 7


def test_deployments_get_the_same_prompts(bench):
    with serve_completions() as one, serve_completions() as other:
        assert bench.run(one.url, "--deployment", f"agg={other.url}").returncode == 0
    seeds = [seed for _, seed in bench.calls]
    assert seeds[:3] == seeds[3:]


def test_a_changed_parameter_is_refused_before_anything_runs(bench):
    with serve_completions() as endpoint:
        assert bench.run(endpoint.url, "--concurrency", "4").returncode == 0
        done = bench.run(endpoint.url, "--input-len", "21")
        assert done.returncode == 1
        assert "was measured with input_len 20, now 21: expected the same, another --output, or --fresh" in done.stderr
        assert done.stderr.count("\n") == 1
        assert len(bench.calls) == 1
        # What only divides may change.
        words = [word.replace("gpus=2", "gpus=4") for word in bench.words(endpoint.url, "--concurrency", "4")]
        assert bench.sweep(*words).returncode == 0
        assert len(bench.calls) == 1
        assert bench.run(endpoint.url, "--concurrency", "4", "--input-len", "21", "--fresh").returncode == 0
        assert len(bench.calls) == 2


def test_a_damaged_record_is_refused(bench):
    with serve_completions() as endpoint:
        assert bench.run(endpoint.url, "--concurrency", "1").returncode == 0
        (bench.output / "pd" / "concurrency-1" / "cell.json").write_text('{"attempt": 1')
        done = bench.run(endpoint.url, "--concurrency", "1")
    assert done.returncode == 1
    assert "expected the record of a cell" in done.stderr
    assert "--fresh measures it again" in done.stderr


def test_runs_that_fail_do_not_end_the_sweep_and_run_again(bench):
    bench.behave(1, "exit")
    bench.behave(2, "fail")
    bench.behave(4, "garble")
    with serve_completions() as endpoint:
        done = bench.run(endpoint.url, "--concurrency", "1", "2", "4", "8")
        assert done.returncode == 1
        assert "the tokenizer is missing" in done.stdout
        assert "expected every request to complete, 5 of 6 requests did" in done.stdout
        assert "expected a result of vllm, got none" in done.stdout
        assert "3 of 4 runs failed" in done.stdout
        with (bench.output / "sweep.csv").open() as lines:
            assert [line["concurrency"] for line in csv.DictReader(lines)] == ["8"]
        for concurrency in (1, 2, 4):
            bench.behave(concurrency, "")
        assert bench.run(endpoint.url, "--concurrency", "1", "2", "4", "8").returncode == 0
    assert [concurrency for concurrency, _ in bench.calls] == [1, 2, 4, 8, 1, 2, 4]
    assert len({seed for _, seed in bench.calls}) == 7


def test_requests_that_fail_to_warm_up_are_not_measured(bench):
    with serve_completions(lambda prompt, position: None) as endpoint:
        done = bench.run(endpoint.url, "--json")
    assert done.returncode == 1
    document = json.loads(done.stdout)
    assert document["cells"] == []
    assert len(document["failures"]) == 3
    assert "HTTP 500: out of memory" in document["failures"][0]
    assert bench.calls == []


def test_a_run_without_end_is_ended(bench):
    bench.behave(1, "hang")
    with serve_completions() as endpoint:
        done = bench.run(endpoint.url, "--concurrency", "1", "--timeout", "1")
    assert done.returncode == 1
    assert "got none within 1 s (--timeout)" in done.stdout
    assert_gone(int((bench.behaviours / "hanging").read_text()))


@pytest.mark.parametrize(("with_signal", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interruption_stops_the_client_and_the_same_command_goes_on(bench, with_signal, status):
    bench.behave(2, "hang")
    with serve_completions() as endpoint:
        words = bench.words(endpoint.url)
        # A shell may have started us with SIGINT ignored, which a child inherits.
        heed = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # noqa: E731
        sweep = subprocess.Popen([SCRIPT, "sweep", *words], stdout=subprocess.PIPE, text=True, preexec_fn=heed)
        hanging = bench.behaviours / "hanging"
        deadline = time.monotonic() + 30
        while not (hanging.exists() and hanging.read_text()):
            assert sweep.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        sweep.send_signal(with_signal)
        said, _ = sweep.communicate(timeout=30)
        assert sweep.returncode == status
        assert with_signal != signal.SIGINT or "1 of 3 runs have finished; the same command goes on" in said
        assert_gone(int(hanging.read_text()))
        bench.behave(2, "")
        assert bench.run(endpoint.url).returncode == 0
    assert [concurrency for concurrency, _ in bench.calls] == [1, 2, 2, 4]
    assert len({seed for _, seed in bench.calls}) == 4


def assert_gone(pid):
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


# What is shown.


def row_of(name, gpus, concurrency, *, seconds_per_round, tpot_ms):
    """A finished cell: 3 prompts per user, of 20 and 4 tokens."""
    endpoint = Endpoint(name, "http://x:1", gpus, "m", "m")
    prompts = 3 * concurrency
    times = {"mean": tpot_ms, "p50": tpot_ms, "p99": 2 * tpot_ms}
    measured = Measurement(3 * seconds_per_round, prompts, 0, 20 * prompts, 4 * prompts, times, times)
    asked = Parameters("vllm", (), endpoint.url, "m", "m", concurrency, prompts, 1, 20, 4, 0, (50.0, 99.0))
    return Cell(endpoint, asked, Path("x")), Record(asked, 1, (), measured)


ROWS = make_rows(
    dict(
        [
            row_of("p/d & <b>", 2, 1, seconds_per_round=0.5, tpot_ms=10),
            row_of("p/d & <b>", 2, 2, seconds_per_round=0.5, tpot_ms=20),
            row_of("p/d & <b>", 2, 4, seconds_per_round=2.0, tpot_ms=40),
            row_of("agg", 1, 1, seconds_per_round=1.0, tpot_ms=25),
        ]
    )
)


def test_a_rows_figures():
    """Each round: as many prompts as users, of 24 tokens."""
    assert [row.total_per_gpu for row in ROWS] == [24 / 0.5 / 2, 48 / 0.5 / 2, 96 / 2.0 / 2, 24 / 1.0]
    assert [row.output_per_gpu for row in ROWS] == [4 / 0.5 / 2, 8 / 0.5 / 2, 16 / 2.0 / 2, 4 / 1.0]
    assert [row.per_user for row in ROWS] == [100, 50, 25, 40]


def test_a_rows_place_on_the_frontiers():
    assert [row.on_own for row in ROWS] == [True, True, False, True]
    assert [row.on_combined for row in ROWS] == [True, True, False, False]


def test_the_csv_has_every_figure(tmp_path):
    file = tmp_path / "sweep.csv"
    write_csv(ROWS, file)
    with file.open(newline="") as lines:
        found = list(csv.DictReader(lines))
    assert [line["deployment"] for line in found] == [row.name for row in ROWS]
    for line, row in zip(found, ROWS, strict=True):
        assert float(line["total_tokens_per_s_per_gpu"]) == row.total_per_gpu
        assert float(line["output_tokens_per_s_per_user"]) == row.per_user
        assert line["on_combined_frontier"] == str(row.on_combined)
        assert float(line["ttft_p99_ms"]) == row.record.measurement.ttft_ms["p99"]
        assert float(line["tpot_p50_ms"]) == row.record.measurement.tpot_ms["p50"]


class Page(HTMLParser):
    """Open elements, every attribute that loads something, and the text of each table cell."""

    VOID = ("meta", "img")

    def __init__(self, text):
        super().__init__()
        self.open, self.loaded, self.cells, self.tags = [], [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)
        if tag in ("td", "th"):
            self.cells.append("")
        self.loaded += [value for name, value in attributes if name in ("src", "href", "srcset", "data")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in ("td", "th"):
            self.cells[-1] += data


def test_the_page_is_well_formed_and_loads_nothing():
    page = make_page(ROWS, b"\x89PNG")
    read = Page(page)
    assert read.open == []
    assert len(read.loaded) == 1
    assert read.loaded[0].startswith("data:image/png;base64,iVBORw")
    assert not re.search(r"https?://|url\(|@import", page)
    assert read.cells.count("p/d & <b>") == 3
    assert {"48.0", "100.0", "combined"} <= set(read.cells)
    assert len(read.cells) == 5 * (6 + 4)
    assert "b" not in read.tags


def test_files_and_json_through_the_console_script(bench):
    pytest.importorskip("matplotlib")
    with serve_completions() as endpoint:
        done = run_script(*bench.words(endpoint.url, "--json"))
    assert done.returncode == 0, done.stderr
    cells = json.loads(done.stdout)["cells"]
    assert [cell["concurrency"] for cell in cells] == [1, 2, 4]
    assert cells[2]["total_tokens_per_s_per_gpu"] == 3 * 4 * 24 / 2.0 / 2
    assert cells[2]["output_tokens_per_s_per_user"] == 1000 / (4 * 1.5)
    assert (bench.output / "sweep.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert (bench.output / "sweep.png").stat().st_size > 10_000
    assert Page((bench.output / "sweep.html").read_text()).open == []


def test_without_matplotlib_what_was_measured_stays(bench):
    with serve_completions() as endpoint:
        words = [sys.executable, "-c", without("matplotlib"), "sweep", *bench.words(endpoint.url)]
        done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "the picture needs matplotlib: pip install 'hybrid-connector[plot]'" in done.stderr
    assert len(list(bench.output.rglob("cell.json"))) == 3
    assert (bench.output / "sweep.csv").exists()


# What a user gets wrong.


def test_help_has_an_example():
    done = run_script("--help")
    assert done.returncode == 0
    assert "hybrid-connector sweep --deployment pd=http://router:8000,gpus=16" in done.stdout


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ([], "expected --deployment NAME=URL or --deployments FILE.toml"),
        (["--deployment", "pd=http://127.0.0.1:1"], "pd: http://127.0.0.1:1/v1/models: expected a list of models, got"),
        (["--deployment", "a=http://a:1", "--deployment", "a=http://a:2"], "a: expected each deployment once"),
        (
            ["--deployment", "a=http://a:1", "--parity", "b"],
            "--parity: expected one of at least two deployments",
        ),
        (["--deployments", "missing.toml"], "missing.toml"),
    ],
)
def test_what_is_wrong_is_one_line(words, reason, sweep):
    done = sweep(*words)
    assert done.returncode == 1
    assert reason in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--concurrency", "0"], "--concurrency: expected a whole number of at least 1, got 0"),
        (["--output-len", "1"], "--output-len: expected a whole number of at least 2, got 1"),
        (["--percentiles", "100"], "--percentiles: expected more than 0 and less than 100, got 100"),
        (["--client", "wrk"], "invalid choice: 'wrk'"),
    ],
)
def test_an_option_that_is_wrong(words, reason, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["sweep", "--deployment", "a=http://a:1", *words])
    assert reason in capsys.readouterr().err


def test_a_server_of_several_models_must_be_told_which():
    with serve_completions(models=("one", "two")) as endpoint:
        done = run_script("--deployment", f"pd={endpoint.url}")
    assert done.returncode == 1
    assert "lists 2 models: expected model=, one of one, two" in done.stderr


def test_a_client_that_is_no_program(bench):
    bench.client = "no-such-client"
    with serve_completions() as endpoint:
        done = bench.run(endpoint.url)
    assert done.returncode == 1
    assert done.stderr == "hybrid-connector: --client-command: expected a program, got 'no-such-client'\n"
    assert not bench.output.exists()


# Parity.


def answer_of(*steps):
    """Tokens, and at each position the log-probabilities."""
    return Answer(3, tuple(token for token, _ in steps), tuple(top for _, top in steps), 0.1)


def test_log_probabilities_are_compared_up_to_the_first_difference():
    ours = answer_of(("a", {"a": -0.5}), ("b", {"b": -0.25}), ("c", {"c": -0.1}), ("e", {"e": -9.0}))
    theirs = answer_of(("a", {"a": -0.75}), ("b", {"x": -0.25}), ("d", {"d": -0.5, "c": -0.625}), ("e", {"e": -1.0}))
    compared = compare_answers(ours, theirs)
    assert compared.agreement == Agreement(2, 0.125)
    assert compared.num_shared == 2
    assert compared.differences_nats == (0.25,)  # at the second token the reference did not name it
    assert (compared.mean_nats, compared.max_nats) == (0.25, 0.25)


def test_answers_that_part_at_once_have_nothing_to_compare():
    compared = compare_answers(answer_of(("a", {"a": -0.5})), answer_of(("b", {"b": -0.5})))
    assert (compared.num_shared, compared.mean_nats, compared.max_nats) == (0, None, None)


def test_prompts_made_here_are_of_all_lengths_and_share_no_beginning():
    prompts = make_prompts(2000)
    assert len(prompts[0]) == 1
    assert len(prompts[-1]) == 2000
    assert len(prompts) > 12
    assert len({prompt[:20] for prompt in prompts if len(prompt) >= 20}) == sum(len(prompt) >= 20 for prompt in prompts)


def compare(sweep, give, reference, *more):
    with serve_completions(give) as one, serve_completions(reference) as other:
        words = ["--deployment", f"pd={one.url}", "--deployment", f"agg={other.url}", "--parity", "agg"]
        return sweep(*words, "--input-len", "50", "--output-len", "4", "--json", *more)


def step(token, gap, shift=0.0):
    """A token, and how much likelier 'a' is than 'b'."""
    return lambda prompt, position: (token if position == 2 else "c", {"a": -1.0, "b": -1.0 - gap, "c": -0.5 - shift})


def test_parity_reports_what_it_saw(sweep):
    done = compare(sweep, step("a", 1.0, shift=0.125), step("a", 1.0))
    assert done.returncode == 0, done.stderr
    prompts = json.loads(done.stdout)["prompts"]
    assert all(prompt["agrees"] and prompt["first_difference"] is None for prompt in prompts)
    assert {prompt["max_logprob_difference_nats"] for prompt in prompts} == {0.125}
    assert {prompt["mean_logprob_difference_nats"] for prompt in prompts} == {0.125 * 3 / 4}


def test_parity_fails_where_answers_differ_by_more_than_a_tie(tmp_path, sweep):
    file = tmp_path / "prompts"
    file.write_text("One prompt.\n\nAnother.\n")
    done = compare(sweep, step("b", 0.5), step("a", 0.5), "--prompts", file)
    assert done.returncode == 1
    prompts = json.loads(done.stdout)["prompts"]
    assert [(prompt["first_difference"], prompt["gap_nats"]) for prompt in prompts] == [(2, 0.5)] * 2
    assert "0 of 2 answers agree with agg's" in done.stderr
    assert compare(sweep, step("b", 0.5), step("a", 0.5), "--tie-nats", "0.5").returncode == 0


def test_parity_fails_where_a_deployment_does(sweep):
    done = compare(sweep, lambda prompt, position: None, step("a", 0.5))
    assert done.returncode == 1
    assert "HTTP 500: out of memory" in json.loads(done.stdout)["prompts"][0]["error"]


# gsm8k.


def test_the_command_of_lm_eval(tmp_path):
    """As lm-eval 0.4.13 takes it (docs/sweep.md says what of it ran)."""
    words = gsm8k.make_command(ENDPOINT, tmp_path, concurrency=8, limit=20)
    told = dict(itertools.pairwise(words))
    assert words[:3] == [sys.executable, "-m", "lm_eval"]
    assert told["--model"] == "local-completions"
    assert told["--tasks"] == "gsm8k"
    assert told["--limit"] == "20"
    model = dict(setting.split("=", 1) for setting in told["--model_args"].split(","))
    assert model["base_url"] == "http://router:8000/v1/completions"
    assert (model["model"], model["tokenizer"], model["num_concurrent"]) == ("m", "/models/m", "8")
    assert "--limit" not in gsm8k.make_command(ENDPOINT, tmp_path, concurrency=8, limit=None)


def test_the_result_of_lm_eval():
    """Its names of scores; the values are made up."""
    scores = {
        "name": "gsm8k",
        "sample_len": 3,
        "exact_match,strict-match": 0.75,
        "exact_match_stderr,strict-match": "N/A",
        "exact_match,flexible-extract": 1,
    }
    found = gsm8k.read_scores({"results": {"gsm8k": scores}})
    assert found == {"exact_match,strict-match": 0.75, "exact_match,flexible-extract": 1.0}


def test_without_lm_eval_or_its_data_it_says_so(tmp_path):
    """Real environment variables and a real package on the path."""
    words = ["--deployment", "a=http://a:1", "--gsm8k"]
    nothing = {**os.environ, "HF_HOME": str(tmp_path)}
    program = [sys.executable, "-c", without("lm_eval"), "sweep"]
    done = subprocess.run([*program, *words], capture_output=True, text=True, env=nothing)
    assert done.returncode == 1
    assert "--gsm8k needs lm-eval beside this Python: pip install 'lm-eval[api]'" in done.stderr
    (tmp_path / "lm_eval.py").write_text("")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = run_script(*words, env={**nothing, "PYTHONPATH": path})
    assert done.returncode == 1
    assert f"expected the data set openai/gsm8k in {tmp_path}/datasets/openai___gsm8k/main" in done.stderr
    assert done.stderr.count("\n") == 1
