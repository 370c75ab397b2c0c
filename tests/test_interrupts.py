"""Ctrl-C waits for the end of a block that it must not break."""

import os
import signal
import threading

import pytest

from habitus.interrupts import hold_interrupts


def test_an_interrupt_is_raised_at_the_end_of_the_block() -> None:
    before, reached = signal.getsignal(signal.SIGINT), []
    with pytest.raises(KeyboardInterrupt), hold_interrupts():
        os.kill(os.getpid(), signal.SIGINT)
        reached.append("the end")
    assert reached == ["the end"] and signal.getsignal(signal.SIGINT) is before


def test_an_error_of_the_block_comes_out_and_the_handler_is_back() -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(ImportError), hold_interrupts():
        raise ImportError("no such module")
    assert signal.getsignal(signal.SIGINT) is before


def test_other_threads_hold_nothing() -> None:
    seen: list[object] = []

    def work() -> None:
        with hold_interrupts():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGINT)]
