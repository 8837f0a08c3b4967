"""Being asked to stop: real signals in real processes."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import time

import pytest

from pretrain.runtime.signals import HEARD, STOPPED, StopListener, Stopped
from tests.helpers.launch import ROOT
from tests.helpers.marks import slow


class Program:
    """A small program with a StopListener; what it prints, and how it ended."""

    def __init__(self, body: str, options: str = "") -> None:
        code = (
            f"import time, sys\nfrom pretrain.runtime.signals import *\nlistener = StopListener({options})\n"
        )
        code += "print('ready', flush=True)\n" + textwrap.dedent(body)
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-c", code],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    def send(self, *signals: signal.Signals) -> None:
        for number in signals:
            self.process.send_signal(number)

    def end(self) -> tuple[int, str]:
        output, _ = self.process.communicate(timeout=30)
        return self.process.returncode, output


WAIT = """
while listener.reason is None:
    time.sleep(0.01)
print(listener.reason, listener.exit_code)
"""
AT_ONCE = """
try:
    with listener.raising():
        time.sleep(30)
except Stopped as stopped:
    print(stopped, stopped.exit_code)
"""
# ctypes releases the GIL but runs no Python in the main thread, as a compiler or a collective does.
STUCK = "import ctypes\nlibc = ctypes.CDLL(None)\nwhile True: libc.sleep(60)\n"


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGUSR1, STOPPED), (signal.SIGTERM, STOPPED), (signal.SIGINT, 130), (signal.SIGHUP, STOPPED)],
)
def test_a_signal_only_leaves_a_note(number, code):
    with Program(WAIT) as program:
        program.send(number)
        assert program.end() == (0, f"{number.name} {code}\n")


OTHERS = [number for number in HEARD if number not in (signal.SIGTERM, signal.SIGINT)]


@pytest.mark.parametrize("number", [signal.SIGINT, *slow(OTHERS)])
def test_a_compiler_survives_what_asks_its_rank_to_stop(number):
    """The terminal sends Ctrl-C to every process of a run, SLURM its warning."""
    body = """
    import signal, subprocess
    with listener.raising():
        pass
    # A program that did not ignore it would die.
    child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1); print("compiled")'])
    time.sleep(0.3)
    child.send_signal(NUMBER)
    print(child.wait(), listener.reason)
    """
    with Program(body.replace("NUMBER", str(int(number)))) as program:
        assert program.end() == (0, "compiled\n0 None\n")


def test_a_program_that_was_started_can_be_ended():
    body = """
    import subprocess
    child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])
    time.sleep(0.3)
    child.terminate()
    print(child.wait(), listener.reason)
    """
    with Program(body) as program:
        assert program.end() == (0, "-15 None\n")


def test_a_worker_of_a_pool_ends_when_its_parent_asks_it_to():
    """Which is not asked to stop itself."""
    body = """
    import multiprocessing
    context = multiprocessing.get_context('fork')
    with context.Pool(2) as pool:
        print(pool.map(abs, [-1, 2]))
    print(listener.reason)
    """
    with Program(body) as program:
        assert program.end() == (0, "[1, 2]\nNone\n")


def test_nohup_is_respected():
    with Program(
        "listener.close()\nimport signal\nsignal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
        "listener = StopListener()\nprint('ready', flush=True)\n" + WAIT
    ) as program:
        assert program.process.stdout.readline() == "ready\n"
        program.send(signal.SIGHUP)
        time.sleep(0.5)
        program.send(signal.SIGTERM)
        assert program.end() == (0, f"SIGTERM {STOPPED}\n")


def test_the_same_signal_again_ends_at_once_even_inside_a_library():
    with Program(STUCK) as program:
        program.send(signal.SIGTERM)
        time.sleep(0.5)
        program.send(signal.SIGTERM)  # soon after the first: the same event, heard twice
        time.sleep(2)
        assert program.process.poll() is None
        program.send(signal.SIGTERM)
        assert program.end() == (143, "rank 0: SIGTERM again; ending at once, without saving\n")


@pytest.mark.slow
def test_sigterm_after_ctrl_c_is_no_repetition():
    """The deepspeed launcher sends it to the ranks after Ctrl-C has reached them."""
    with Program(WAIT + "time.sleep(4)\nprint('saved')") as program:
        program.send(signal.SIGINT)
        time.sleep(2.5)
        program.send(signal.SIGTERM)
        assert program.end() == (0, "SIGINT 130\nsaved\n")


def test_ctrl_c_counts_even_when_it_is_heard_second():
    """Of two signals that wait for a process, the kernel may hand over the later one first."""
    body = """
    while listener.exit_code != 130:
        time.sleep(0.01)
    print(listener.reason)
    """
    with Program(body) as program:
        program.send(signal.SIGTERM)
        time.sleep(0.5)
        program.send(signal.SIGINT)
        assert program.end() == (0, "SIGINT\n")


@pytest.mark.parametrize(
    ("ranks", "why"),
    [*slow([("1", "its current operation has not ended")]), ("2", "the other ranks have not agreed")],
)
def test_without_an_agreement_it_ends_without_saving(monkeypatch, ranks, why):
    monkeypatch.setenv("WORLD_SIZE", ranks)
    with Program(STUCK, "agreement_seconds=0.5") as program:
        program.send(signal.SIGUSR1)
        code, output = program.end()
        assert code == STOPPED and f"{why}; ending without saving" in output


def test_after_the_agreement_saving_may_take_its_time():
    body = WAIT + "listener.mark_agreed()\ntime.sleep(1.5)\nprint('saved')"
    with Program(body, "agreement_seconds=0.5") as program:
        program.send(signal.SIGUSR1)
        assert program.end() == (0, f"SIGUSR1 {STOPPED}\nsaved\n")


def test_before_anything_began_it_stops_at_once():
    with Program(AT_ONCE) as program:
        began = time.monotonic()
        program.send(signal.SIGTERM)
        assert program.end() == (0, f"SIGTERM {STOPPED}\n")
        assert time.monotonic() - began < 10


def test_a_signal_that_another_thread_receives_interrupts_a_wait():
    """As does one that arrives between the interpreter's last look and the system call that waits."""
    body = "signals.LOOK_SECONDS = 0.05\nlistener = StopListener()\nimport signal, threading\n"
    body += "to_thread = lambda: signal.pthread_kill(listener._thread.ident, signal.SIGTERM)\n"
    body += "threading.Timer(0.3, to_thread).start()\n" + AT_ONCE
    code = "import time\nfrom pretrain.runtime import signals\nfrom pretrain.runtime.signals import *\n"
    code += body
    began = time.monotonic()
    said = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert said.stdout == f"SIGTERM {STOPPED}\n" and not said.stderr
    assert time.monotonic() - began < 10


def test_a_time_budget_asks_by_itself():
    listener = StopListener(budget_seconds=60)
    try:
        assert listener.reason is None
        listener.budget_seconds = 0.05
        time.sleep(0.1)
        with (
            pytest.raises(Stopped, match=r"time budget of .* minutes used up") as stopped,
            listener.raising(),
        ):
            pass
        assert stopped.value.exit_code == STOPPED
    finally:
        listener.close()


LAUNCHER = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-u", "-c", sys.argv[1]])
time.sleep(60)
"""


@pytest.mark.parametrize(("name", "body"), [("torchrun", WAIT), ("torchrun", AT_ONCE), ("nohup", WAIT)])
def test_ranks_stop_when_their_launcher_has_gone(tmp_path, name, body):
    """Killed with -9, so that nobody passes anything on; a parent that is not a launcher is not missed."""
    (tmp_path / name).write_text(LAUNCHER)
    rank = "import time\nfrom pretrain.runtime import signals\nfrom pretrain.runtime.signals import *\n"
    rank += (
        "signals.LOOK_SECONDS = 0.05\nlistener = StopListener(budget_seconds=0.5)\nprint('ready')\n" + body
    )
    with subprocess.Popen(
        [sys.executable, str(tmp_path / name), rank], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None and parent.stdout.readline() == "ready\n"
        parent.kill()
        said = parent.stdout.read()
    why = f"its launcher, process {parent.pid}, has gone" if name == "torchrun" else "time budget of"
    assert said.startswith(why) and said.endswith(f" {STOPPED}\n")


def test_signals_are_given_back():
    before = [signal.getsignal(number) for number in HEARD]
    StopListener().close()
    assert [signal.getsignal(number) for number in HEARD] == before
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, [])
    assert signal.set_wakeup_fd(-1) == -1
