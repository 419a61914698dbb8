"""Data parallel: every rank holds the model, and the gradients are averaged while the backward still runs.

DDP reads the annotations of its hook, so they are not postponed here.
"""

import logging
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from .config import GradientDtype

# DDP labels its forward for the profiler; torch.compile ignores that, and each rank would warn of it.
logging.getLogger("torch._dynamo.variables.ctx_manager").addFilter(
    lambda record: not str(record.msg).startswith("Profiler record function")
)


def replicated(
    model: nn.Module, mesh: DeviceMesh, dtype: GradientDtype, backward_ended: Callable[[], None]
) -> DistributedDataParallel:
    """The model with its gradients exchanged in buckets, each as soon as the backward has filled it.

    backward_ended: called when the last bucket is full. What then passes until the backward returns is the exchange
        that no computation hides. It must not refer to the model: the hook is held in C++, where Python's collector
        sees no cycle, and nothing of the model would ever be freed.
    """
    group = mesh.get_group()
    # As parts of the buckets, gradients take no further memory, and are not copied there and back. Each bucket is a
    # piece of the compiled step; with DDP's 25 MB a step of GPT-2 small on two H100 takes 0.5 ms longer, of 129.
    replicas = DistributedDataParallel(
        model, process_group=group, gradient_as_bucket_view=True, bucket_cap_mb=100
    )
    exchanged = torch.bfloat16 if dtype is GradientDtype.bf16 else torch.float32
    divides = dist.get_backend(group) == "nccl"  # as it sums, without a kernel before; gloo cannot

    def hook(_state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        if bucket.is_last():
            backward_ended()
        gradients = bucket.buffer()
        sent = gradients.to(exchanged)  # in float32 the buffer itself
        if not divides:
            sent.div_(group.size())
        operation = dist.ReduceOp.AVG if divides else dist.ReduceOp.SUM
        work = dist.all_reduce(sent, operation, group=group, async_op=True)
        return work.get_future().then(lambda done: gradients.copy_(done.value()[0]))

    replicas.register_comm_hook(None, hook)
    return replicas
