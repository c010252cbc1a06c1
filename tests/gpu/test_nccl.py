"""What one GPU can show of process groups on NCCL, which takes no two ranks on one GPU: a send to itself."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch

from kv_transfer.transports import process_group


def test_a_gpu_sends_to_itself(device: torch.device) -> None:
    if not torch.distributed.is_nccl_available():
        pytest.skip("torch is built without NCCL")
    store = process_group.host_store("127.0.0.1", 30.0)
    group = process_group._nccl_group(store, 0, timedelta(seconds=60), device, size=1)
    generator = torch.Generator(device).manual_seed(1)
    for size in (256, 262_400, 4 << 20):
        source = torch.randint(0, 256, (size,), dtype=torch.uint8, device=device, generator=generator)
        target = torch.zeros_like(source)
        group._start_coalescing()  # one after the other they would wait for each other
        group.send([source], 0, 0)
        group.recv([target], 0, 0)
        group._end_coalescing().wait(timedelta(seconds=60))
        torch.cuda.synchronize(device)
        assert torch.equal(source, target)
    group.abort()
