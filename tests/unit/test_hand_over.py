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


def test_runs_arrive_in_order_and_then_the_end_until_which_the_leader_stays(ranks):
    leader, *followers = ranks
    runs = [{"folder": "a", "overrides": ["x=1"]}, {"folder": "b", "overrides": []}, 3]
    for run in runs:
        leader.publish(run)
    with ThreadPoolExecutor(1) as pool:
        staying = pool.submit(leader.wait_until_read, LATER)
        for follower in followers:
            assert not staying.done()
            assert [follower.receive(SOON) for _ in runs] == runs
        staying.result(timeout=30)
    with pytest.raises(CommunicationTimeoutError, match=r"rank 1 waited 0 s for rank 0 to hand over run 3"):
        ranks[1].receive(SOON)


def test_outcomes_belong_to_their_run(ranks):
    leader, *followers = ranks

    def start():
        leader.publish({})
        for follower in followers:
            follower.receive(SOON)

    start()
    leader.report_outcome(succeeded=False)
    followers[0].report_outcome(succeeded=False)
    assert followers[1].failed(0, SOON)
    assert not leader.everyone_failed(SOON)  # rank 2 is still at it, and may be waiting for the others
    followers[1].report_outcome(succeeded=False)
    assert leader.everyone_failed(SOON)
    start()
    assert not followers[0].failed(0, SOON)
    leader.report_outcome(succeeded=True)
    assert not followers[0].failed(0, SOON)
    assert not leader.everyone_failed(SOON)
