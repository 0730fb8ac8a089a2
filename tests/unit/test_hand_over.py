"""Rank 0 hands runs to the others: order, the end, and who is told of whose failure."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

pytest.importorskip("hydra")

from torchstrat.errors import CommunicationTimeoutError
from torchstrat.experiments.launch import HandOver

SOON = timedelta(seconds=0.2)
LATER = timedelta(seconds=30)


@pytest.fixture
def ranks():
    """Three ranks of one launch. In a real one each has its own client of the launcher's store."""
    store = dist.HashStore()
    return [HandOver(store, rank, size=3) for rank in range(3)]


def test_runs_arrive_in_order_and_then_the_end(ranks):
    leader, *followers = ranks
    leader.publish({"folder": "a", "overrides": ["x=1"]})
    leader.publish({"folder": "b", "overrides": []})
    leader.publish(3)
    for follower in followers:
        assert follower.receive(SOON) == {"folder": "a", "overrides": ["x=1"]}
        assert follower.receive(SOON) == {"folder": "b", "overrides": []}
        assert follower.receive(SOON) == 3


def test_waiting_for_a_silent_leader_ends(ranks):
    with pytest.raises(CommunicationTimeoutError, match=r"rank 1 waited 0 s for rank 0 to hand over run 0"):
        ranks[1].receive(SOON)


def test_everyone_failed(ranks):
    leader, *followers = ranks
    leader.publish({})
    for follower in followers:
        follower.receive(SOON)
    leader.report_outcome(succeeded=False)
    followers[0].report_outcome(succeeded=False)
    assert not leader.everyone_failed(SOON)  # rank 2 is still at it, and may be waiting for the others
    followers[1].report_outcome(succeeded=False)
    assert leader.everyone_failed(SOON)
    assert followers[0].failed(0, SOON)


def test_outcomes_belong_to_their_run(ranks):
    leader, follower, _ = ranks
    leader.publish({})
    follower.receive(SOON)
    leader.report_outcome(succeeded=False)
    assert follower.failed(0, SOON)
    leader.publish({})
    follower.receive(SOON)
    assert not follower.failed(0, SOON)
    leader.report_outcome(succeeded=True)
    assert not follower.failed(0, SOON)


def test_the_leader_stays_until_the_end_was_read(ranks):
    leader, *followers = ranks
    leader.publish(0)
    with ThreadPoolExecutor(1) as pool:
        staying = pool.submit(leader.wait_until_read, LATER)
        for follower in followers:
            assert not staying.done()
            assert follower.receive(SOON) == 0
        staying.result(timeout=30)
