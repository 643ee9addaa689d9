"""Interrupts: when Ctrl-C is let through, when it waits, and when it is ignored."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from vla_async.interrupts import Interrupts


@pytest.fixture(autouse=True)
def handlers_stay_as_they_were() -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    yield
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def send(number: int = signal.SIGINT) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_both_signals_interrupt(number: int) -> None:
    """A scheduler's SIGTERM must end a run as tidily as Ctrl-C."""
    with Interrupts(), pytest.raises(KeyboardInterrupt, match=signal.Signals(number).name):
        send(number)


def test_a_critical_section_is_finished_first() -> None:
    """An optimizer step that was torn apart would be saved as a checkpoint."""
    done = []
    with Interrupts() as interrupts:
        with pytest.raises(KeyboardInterrupt), interrupts.critical():  # noqa: PT012
            send()
            with interrupts.critical():
                done.append("inner")
            done.append("outer")
        done.append("after")
        with interrupts.critical():
            done.append("later")
    assert done == ["inner", "outer", "after", "later"], "one interrupt must be raised once"


def test_an_error_inside_a_critical_section_is_not_replaced() -> None:
    """The error is the news; the interrupt follows at the next occasion."""
    with Interrupts() as interrupts:
        with pytest.raises(ZeroDivisionError), interrupts.critical():  # noqa: PT012
            send()
            raise ZeroDivisionError
        with pytest.raises(KeyboardInterrupt), interrupts.critical():
            pass


def test_a_shielded_section_forgets_interrupts() -> None:
    """A second Ctrl-C must not stop the checkpoint that the first one asked for, nor come back later."""
    with Interrupts() as interrupts:
        with interrupts.shielded():
            send()
            with interrupts.critical():
                send(signal.SIGTERM)
        with interrupts.critical():
            pass


def test_a_second_signal_right_after_the_first_is_the_same_interrupt() -> None:
    """It would hit the way out, before the shield is up, and leave workers and no checkpoint."""
    with Interrupts() as interrupts:
        with pytest.raises(KeyboardInterrupt):
            send()
        send()
        send(signal.SIGTERM)
        interrupts.same_s = 0.0
        with pytest.raises(KeyboardInterrupt):
            send()


def test_each_use_starts_afresh() -> None:
    """The interrupt of one run must not make the next run deaf."""
    interrupts = Interrupts()
    for _ in range(2):
        with interrupts, pytest.raises(KeyboardInterrupt):
            send()


def test_outside_the_main_thread_nothing_is_changed() -> None:
    """Python allows no handlers there; training in a thread must still work."""
    seen = []

    def body() -> None:
        with Interrupts() as interrupts, interrupts.critical():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGTERM)]


@contextmanager
def nobody_hears() -> Iterator[None]:
    """The main thread as it is in a wait outside of Python: its handlers do not run."""
    handlers = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_a_wait_that_hears_of_no_signal_is_ended_from_another_thread() -> None:
    """Ctrl-C must work most of all where another rank hangs."""
    ended = threading.Event()
    interrupts = Interrupts(heed_s=0.2)
    interrupts.unheeded = ended.set
    with interrupts, nobody_hears():
        os.kill(os.getpid(), signal.SIGINT)
        assert ended.wait(20.0)
    cause = interrupts.cause()
    assert cause is not None
    assert str(cause) == "SIGINT"
    assert interrupts.cause() is None


def test_an_interrupt_that_is_raised_is_not_the_cause_of_a_later_error() -> None:
    """Or the error of the next run would be told as the interrupt of this one."""
    ended = threading.Event()
    interrupts = Interrupts(same_s=0.0, heed_s=0.2)
    interrupts.unheeded = ended.set
    with interrupts:
        with nobody_hears():
            os.kill(os.getpid(), signal.SIGTERM)
            assert ended.wait(20.0)
        with pytest.raises(KeyboardInterrupt, match="SIGINT"):
            send()
    assert interrupts.cause() is None


def test_a_signal_that_is_heard_ends_nothing() -> None:
    """Two in quick succession are one to Python, and still no reason to kill anybody."""
    ended = threading.Event()
    interrupts = Interrupts(heed_s=0.3)
    interrupts.unheeded = ended.set
    before = signal.set_wakeup_fd(-1)
    with interrupts:
        with pytest.raises(KeyboardInterrupt):
            send()
        send()
        send()
        assert not ended.wait(1.0)
    assert signal.set_wakeup_fd(before) == -1, "whoever listened to signals before does so again"
