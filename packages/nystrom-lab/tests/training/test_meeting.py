"""Processes that meet in a store which those of a former start have used."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from nystrom_lab.training.ranks import own_place

WAIT = timedelta(seconds=60)


def places(store, size):
    with ThreadPoolExecutor(size) as pool:
        return [future.result() for future in [pool.submit(own_place, store, rank, size, WAIT) for rank in range(size)]]


def test_each_start_has_a_place_of_its_own_that_all_its_processes_share():
    store = dist.HashStore()
    store.set_timeout(WAIT)
    for start in ("first", "second", "third"):
        found = places(store, 3)
        assert not any(place.check(["address"]) for place in found)
        found[0].set("address", start)
        assert [place.get("address") for place in found] == [start.encode()] * 3


def test_what_processes_of_a_former_start_drew_is_no_sign_of_life():
    store = dist.HashStore()
    store.set_timeout(WAIT)
    places(store, 2)
    with pytest.raises(dist.DistStoreError, match="ranks 1 of 2 did not come"):
        own_place(store, 0, 2, timedelta(seconds=0.5))
