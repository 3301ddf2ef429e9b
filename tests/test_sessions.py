"""Processes that a tool starts are known to it before anything can end it."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from hybrid_connector.tools.servers import _Subprocesses
from hybrid_connector.tools.sessions import stop_sessions, uninterrupted


@pytest.fixture
def heeded():
    """pytest may have been started with SIGINT ignored."""
    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, former)


def test_an_interruption_waits_until_a_started_process_is_known(heeded):
    processes = []

    def start():
        with uninterrupted():
            signal.raise_signal(signal.SIGINT)
            sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
            processes.append(subprocess.Popen(sleep, start_new_session=True))

    with pytest.raises(KeyboardInterrupt):
        start()
    (started,) = processes
    assert started.poll() is None
    stop_sessions([started.pid], 1.0, reap=started.poll)
    assert started.poll() == -signal.SIGTERM
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_program_that_only_its_launcher_knows_ends_with_it(tmp_path):
    """As after an interruption between its start and its being entered among the servers."""
    launcher = _Subprocesses()
    pid = launcher.run([sys.executable, "-c", "import time; time.sleep(60)"], tmp_path / "log", os.environ)
    assert launcher.exit_code(pid) is None
    launcher.close()
    assert launcher.exit_code(pid) == -signal.SIGTERM


def test_the_first_of_two_interruptions_is_delivered(heeded):
    came = []
    former = signal.signal(signal.SIGTERM, lambda number, _: came.append(number))
    try:
        with uninterrupted():
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGINT)
            assert came == []
        assert came == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, former)


def test_what_was_ignored_stays_ignored():
    former = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with uninterrupted():
            os.kill(os.getpid(), signal.SIGINT)
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, former)


def test_another_thread_is_left_alone():
    ended = []

    def run():
        with uninterrupted():
            ended.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert ended == [signal.getsignal(signal.SIGTERM)]
