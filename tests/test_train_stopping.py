"""Signals are noted rather than obeyed; each case in a process of its own, so that none can end the tests."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

NAMES = ["SIGINT", "SIGTERM"]


def run(code: str) -> str:
    program = "import signal, threading\nfrom asfp.train.stopping import stop_signals\n" + textwrap.dedent(code)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("name", NAMES)
def test_a_signal_is_noted_and_the_handlers_come_back(name: str) -> None:
    assert run(f"""
        before = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
        with stop_signals() as stop:
            signal.raise_signal(signal.{name})
            print(stop == [signal.{name}])
        print(before == [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)])
    """).split() == ["True", "True"]


@pytest.mark.parametrize(("patient", "outcome"), [(False, "interrupted 1 143"), (True, "went on 2")])
def test_a_second_signal_interrupts_unless_patient(patient: bool, outcome: str) -> None:
    said = run(f"""
        try:
            with stop_signals(patient={patient}) as stop:
                signal.raise_signal(signal.SIGINT)
                signal.raise_signal(signal.SIGTERM)
            print("went on", len(stop))
        except KeyboardInterrupt as end:
            print("interrupted", len(stop), end.code)
    """)
    assert said == outcome


def test_another_thread_gets_an_empty_list() -> None:
    said = run("""
        def work():
            with stop_signals() as stop:
                print(stop, signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    """)
    assert said == "[] True"


@pytest.mark.skipif(sys.platform == "win32", reason="signals cannot be blocked there")
def test_signals_that_were_blocked_are_heard_and_blocked_again() -> None:
    said = run("""
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        signal.raise_signal(signal.SIGTERM)
        with stop_signals() as stop:
            print(stop == [signal.SIGTERM])
        print(signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, ()))
    """)
    assert said.split() == ["True", "True"]
