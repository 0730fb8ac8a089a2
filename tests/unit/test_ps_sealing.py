"""Messages between the processes of a cluster: what is not authentic or not new is refused before it is looked at."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchstrat.errors import AuthenticationError, InvalidArgumentError
from torchstrat.parameter_server.wire.sealing import WINDOW, Kind, ReplayWindow, Sealer

SECRET = b"known to both"


@pytest.fixture
def alice() -> Sealer:
    return Sealer(SECRET, "a11ce")


@pytest.fixture
def bob() -> Sealer:
    return Sealer(SECRET, "b0b")


def test_an_authentic_message_is_opened(alice: Sealer, bob: Sealer) -> None:
    counter, sealed = alice.seal(Kind.REQUEST, "b0b", b"hello", attachments=2)
    opened = bob.open(sealed, attachments=2)
    assert (opened.kind, opened.sender, opened.counter, opened.body) == (Kind.REQUEST, "a11ce", counter, b"hello")


def test_a_reply_says_what_it_replies_to(alice: Sealer, bob: Sealer) -> None:
    bob.seal(Kind.REPLY, "a11ce", b"")
    counter, sealed = bob.seal(Kind.REPLY, "a11ce", b"fine", in_reply_to=17)
    opened = alice.open(sealed)
    assert (opened.kind, opened.counter, opened.in_reply_to) == (Kind.REPLY, counter, 17)
    assert counter == 1


@pytest.mark.parametrize("body", [b"", b"\x00", b"x" * 100_000])
def test_any_body_arrives_as_it_was(alice: Sealer, bob: Sealer, body: bytes) -> None:
    assert bob.open(alice.seal(Kind.REQUEST, "b0b", body)[1]).body == body


def test_every_flipped_bit_is_noticed(alice: Sealer, bob: Sealer) -> None:
    _, sealed = alice.seal(Kind.REQUEST, "b0b", b"pay 100")
    for position in range(8 * len(sealed)):
        forged = bytearray(sealed)
        forged[position // 8] ^= 1 << position % 8
        with pytest.raises(AuthenticationError, match="not sealed with this cluster's secret"):
            bob.open(bytes(forged))
    assert bob.open(sealed).body == b"pay 100"


def test_every_truncation_and_extension_is_noticed(alice: Sealer, bob: Sealer) -> None:
    _, sealed = alice.seal(Kind.REQUEST, "b0b", b"pay 100")
    for forged in [*(sealed[:length] for length in range(len(sealed))), sealed + b"\x00", sealed * 2, b"\x00" + sealed]:
        with pytest.raises(AuthenticationError):
            bob.open(forged)


@given(st.binary(max_size=300))
def test_garbage_is_refused(garbage: bytes) -> None:
    with pytest.raises(AuthenticationError):
        Sealer(SECRET, "b0b").open(garbage)


def test_another_secret_is_refused(bob: Sealer) -> None:
    with pytest.raises(AuthenticationError, match="give all processes of the cluster the same secret"):
        bob.open(Sealer(b"guessed", "a11ce").seal(Kind.REQUEST, "b0b", b"hello")[1])


def test_a_repetition_is_refused(alice: Sealer, bob: Sealer) -> None:
    sealed = [alice.seal(kind, "b0b", b"hello")[1] for kind in Kind for _ in range(50)]
    for message in sealed:
        bob.open(message)
    for message in sealed:
        with pytest.raises(AuthenticationError, match="arrived twice"):
            bob.open(message)


def test_a_message_for_the_process_that_ran_here_before_is_refused(alice: Sealer, bob: Sealer) -> None:
    _, sealed = alice.seal(Kind.REQUEST, "b0b", b"hello")
    bob.open(sealed)
    restarted = Sealer(SECRET, "b0b2")
    with pytest.raises(AuthenticationError, match="for b0b reached b0b2"):
        restarted.open(sealed)


def test_a_message_does_not_come_back_to_its_sender(alice: Sealer) -> None:
    with pytest.raises(AuthenticationError, match="for b0b reached a11ce"):
        alice.open(alice.seal(Kind.REQUEST, "b0b", b"hello")[1])


def test_lost_and_added_tensors_are_noticed(alice: Sealer, bob: Sealer) -> None:
    _, sealed = alice.seal(Kind.REQUEST, "b0b", b"hello", attachments=2)
    for attachments in (0, 1, 3):
        with pytest.raises(AuthenticationError, match=f"came with {attachments} tensors, but was sent with 2"):
            bob.open(sealed, attachments=attachments)
    bob.open(sealed, attachments=2)  # what was refused does not count as seen


def test_what_is_refused_uses_up_no_counter(alice: Sealer, bob: Sealer) -> None:
    """Otherwise anybody could make a process refuse its peers."""
    _, sealed = alice.seal(Kind.REQUEST, "b0b", b"hello")
    for _ in range(3):
        with pytest.raises(AuthenticationError):
            bob.open(sealed[:-1] + bytes([sealed[-1] ^ 1]))
    bob.open(sealed)


def test_reordered_messages_of_several_senders_are_accepted_once(bob: Sealer) -> None:
    senders = [Sealer(SECRET, name) for name in ("a", "c", "d")]
    messages = [sender.seal(kind, "b0b", b"")[1] for sender in senders for kind in Kind for _ in range(100)]
    random.Random(1).shuffle(messages)
    for message in messages:
        bob.open(message)
    for message in messages:
        with pytest.raises(AuthenticationError):
            bob.open(message)


def test_counters_are_kept_for_each_receiver(alice: Sealer, bob: Sealer) -> None:
    """So that talking much to others does not push the window past a slow message to this one."""
    for _ in range(10):
        alice.seal(Kind.REQUEST, "somebody else", b"")
    assert alice.seal(Kind.REQUEST, "b0b", b"")[0] == 0


def test_an_empty_secret_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="secret is empty"):
        Sealer(b"", "a11ce")


@given(st.lists(st.integers(0, 40)))
def test_the_window_agrees_with_a_set(counters: list[int]) -> None:
    window, seen = ReplayWindow(size=1000), set[int]()
    for counter in counters:
        assert window.accept(counter) == (counter not in seen)
        seen.add(counter)


@given(st.lists(st.integers(0, 200)), st.integers(1, 20))
def test_a_small_window_never_accepts_twice(counters: list[int], size: int) -> None:
    window, seen, newest = ReplayWindow(size), set[int](), -1
    for counter in counters:
        accepted = window.accept(counter)
        assert not (accepted and counter in seen)
        assert accepted or counter in seen or counter <= newest - size, "refused a new one that is not too late"
        if accepted:
            seen.add(counter)
            newest = max(newest, counter)


def test_the_window_keeps_little() -> None:
    window = ReplayWindow()
    for counter in range(1, 3 * WINDOW):  # 0 never arrives
        assert window.accept(counter)
    assert window._mask.bit_length() <= WINDOW
    assert not window.accept(0)
    assert window.accept(2**64 - 1)
    assert window._mask.bit_length() <= WINDOW
    assert not window.accept(2**64 - 1)


def test_the_latest_that_is_not_too_late() -> None:
    window = ReplayWindow(size=100)
    assert window.accept(99 + 1000)
    assert not window.accept(999)
    assert window.accept(1000)
    assert not window.accept(1000)
