"""The process group: sums and gathers over the ranks' tensors.

NCCL between cards, gloo between CPUs. The same call comes in the same order on every rank, with
the same shapes, or all hang until `_TIMEOUT_S`. Must not know: models, plans. Entry points:
`open_store`, `join`, `Ranks`.
"""

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store, TCPStore, rendezvous  # type: ignore[attr-defined]

from octavo_worker.parallel.places import Place
from octavo_worker.parallel.shares import Share

# Nobody waits longer in a collective. Between steps ranks wait for plans, not for each other.
_TIMEOUT_S = 60.0
_JOIN_TIMEOUT_S = 600.0
# One operation by two names: where there is the newer one, the older one warns.
_NAMES = ("all_gather_single", "all_gather_into_tensor")
_LOOPBACK = {"linux": "lo", "darwin": "lo0"}


class Ranks:
    """See `sharded.Exchange`. Both collectives give the same bits on every rank."""

    def __init__(self, share: Share) -> None:
        self.share = share
        self._gather = next(getattr(dist, name) for name in _NAMES if hasattr(dist, name))

    def all_reduce(self, x: Tensor) -> Tensor:
        dist.all_reduce(x)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        parts = x.new_empty((self.share.size, *x.shape))
        self._gather(parts.flatten(0, 1), x)
        return parts


def open_store(place: Place) -> Store:
    """Where the ranks tell each other their addresses: rank 0's, or torchrun's.

    Waits for rank 0. A place that is alone opens a store on a free port of the loopback.
    """
    timeout = timedelta(seconds=_JOIN_TIMEOUT_S)
    if place.is_alone:
        return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timeout)
    store, _, _ = next(rendezvous("env://", timeout=timeout))
    return store


def join(place: Place, store: Store, device: torch.device, *, on_loopback: bool) -> Ranks:
    """Join the ranks that share a model; returns when all have."""
    # A multicast all-reduce fails on machines whose fabric manager isn't set up for it.
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    if on_loopback and sys.platform in _LOOPBACK:
        # Else gloo looks the machine's own name up, which containers often don't know.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", _LOOPBACK[sys.platform])
    if device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, torch.get_num_threads() // place.num_local))
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=place.share.rank,
        world_size=place.share.size,
        timeout=timedelta(seconds=_TIMEOUT_S),
        device_id=device if device.type == "cuda" else None,
    )
    return Ranks(place.share)
