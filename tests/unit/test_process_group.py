"""The meeting point of a job, which a later job of the same process may find at the same port."""

import gc
from datetime import timedelta

from torch.distributed import TCPStore

from torchstrat.collectives.default_group import answers


def test_a_store_whose_host_has_gone_is_not_used_again():
    host = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    guest = TCPStore("127.0.0.1", host.port, is_master=False, timeout=timedelta(seconds=5))
    assert answers(guest)
    del host
    gc.collect()
    assert not answers(guest)
