"""Replaces the calls of CUDA and NCCL in Megatron-Core for a machine without them; and one repair (MC-04).

Nothing of this is applied where CUDA is. Each shim is put into the library's own modules under the name that the
library looks up: torch itself, and whatever else runs in the process, stay as they are.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from types import CodeType, ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_conformance.stand_ins import streams
from moe_conformance.stand_ins.presenting import Namespace


def apply(
    token_dispatcher: ModuleType,
    moe_utils: ModuleType,
    moe_logging: ModuleType | None,
    mappings: ModuleType,
    random: ModuleType,
) -> tuple[str, ...]:
    """Make the imported library run without CUDA and over gloo; return what was replaced, in words."""
    cuda = Namespace(
        torch.cuda,
        # The library allocates on "the current GPU" and never asks which kind of device it is.
        current_device=lambda: torch.device("cpu"),
        # The all-to-all dispatcher copies its counts to the host on a stream of its own; combined 1F1B has one more.
        Stream=streams.Stream,
        Event=streams.Event,
        current_stream=streams.current_stream,
        stream=streams.stream,
        nvtx=streams.Ranges(),
    )
    on_cpu = Namespace(torch, cuda=cuda)
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.core") and getattr(module, "torch", None) is torch:
            module.torch = on_cpu  # type: ignore[attr-defined]

    # gloo has no all-gather of uneven sizes; the all-to-all dispatcher uses one if etp > 1. And it knows no streams.
    uneven = Namespace(dist, all_gather=_uneven_all_gather, all_to_all_single=streams.all_to_all_single)
    mappings.torch = Namespace(torch, cuda=cuda, distributed=uneven)  # type: ignore[attr-defined]

    # Its tracker of random states swaps those of the GPU's generator, and warns where the CPU's has been drawn from
    # meanwhile: here that is the one generator.
    drawing = Namespace(cuda, get_rng_state=torch.get_rng_state, manual_seed=torch.default_generator.manual_seed)
    unused = {"get_rng_state": lambda: torch.zeros(1), "set_rng_state": lambda state: None}
    random.torch = Namespace(torch, cuda=drawing, **unused)  # type: ignore[attr-defined]
    random._get_cuda_rng_state = lambda **_: torch.get_rng_state()  # type: ignore[attr-defined]
    random._set_cuda_rng_state = lambda state, **_: torch.set_rng_state(state)  # type: ignore[attr-defined]

    # It leaves CPU tensors alone, and then splits reach all_to_all_single as tensors, which torch refuses.
    token_dispatcher.maybe_move_tensor_to_cpu = _to_host  # type: ignore[attr-defined]

    # gloo averages nothing; reports of losses and loads are averaged over data parallel ranks.
    averaging = Namespace(dist, all_reduce=_averaging_all_reduce)
    for module in filter(None, (moe_utils, moe_logging)):
        module.torch = Namespace(torch, cuda=cuda, distributed=averaging)  # type: ignore[attr-defined]

    # Without Transformer Engine the name does not exist, and the router's linear raises NameError when it tests it for
    # None. That is a fault of 0.16.1, not of the machine; with the name set to None all the rest can be judged, and the
    # report says that it is.
    applied = ["torch.cuda", "uneven all_gather", "averages of all_reduce", "random states", "splits to host"]
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # type: ignore[attr-defined]
        applied.append("te_general_gemm, a repair: MC-04")
    return tuple(applied)


def apply_to_training(clip_grads: ModuleType, distrib_optimizer: ModuleType, *others: ModuleType) -> tuple[str, ...]:
    """Make schedules and optimisers run without CUDA; return what was replaced, in words."""
    # They make their sums on the device "cuda", by its name.
    for module in (clip_grads, distrib_optimizer, *others):
        on_host = {name: _made_on_host(getattr(torch, name)) for name in ("tensor", "zeros")}
        module.torch = Namespace(module.torch, **on_host)  # type: ignore[attr-defined]
    # It asserts that gradients are of the type torch.cuda.FloatTensor: the same code, compiled without assertions.
    clip = clip_grads.clip_grad_by_total_norm_fp32
    clip.__code__ = _without_assertions(clip)
    # It tells the dtypes of parameters apart by the names of types of the GPU's tensors.
    groups = distrib_optimizer.DistributedOptimizer._build_model_and_main_param_groups.__func__
    groups.__code__ = _of_host_types(groups.__code__)
    return (
        "tensors of schedule and optimizer",
        "clipping without its assertion of the type of a gradient",
        "names of tensor types",
    )


def _made_on_host(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def made(*given: Any, device: Any = None, **how: Any) -> Tensor:
        return make(*given, device=None if device == "cuda" else device, **how)

    return made


def _without_assertions(function: Any) -> CodeType:
    """Return the code of a function of a module as `python -O` compiles it."""
    module = sys.modules[function.__module__]
    compiled = compile(inspect.getsource(module), str(module.__file__), "exec", optimize=1)
    codes = (each for each in compiled.co_consts if isinstance(each, CodeType))
    return next(code for code in codes if code.co_name == function.__name__)


def _of_host_types(code: CodeType) -> CodeType:
    """Return code in which the names of types of tensors are those of the CPU."""

    def on_host(constant: Any) -> Any:
        if isinstance(constant, tuple):
            return tuple(map(on_host, constant))
        return constant.replace("torch.cuda.", "torch.") if isinstance(constant, str) else constant

    return code.replace(co_consts=tuple(map(on_host, code.co_consts)))


def _to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _averaging_all_reduce(values: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, **how: Any) -> Any:
    """Replace an average by a sum and a division."""
    if op != dist.ReduceOp.AVG:
        return dist.all_reduce(values, op, group=group, **how)
    dist.all_reduce(values, group=group)
    values.div_(dist.get_world_size(group))
    return None


def _uneven_all_gather(outputs: Sequence[Tensor], local_rows: Tensor, group: dist.ProcessGroup) -> None:
    """Fill outputs[w] with the rows of rank w."""
    sizes = [output.shape[0] for output in outputs]
    gathered = local_rows.new_empty(sum(sizes), *local_rows.shape[1:])
    copies = local_rows.repeat(len(sizes), *[1] * (local_rows.dim() - 1))
    dist.all_to_all_single(gathered, copies, sizes, [local_rows.shape[0]] * len(sizes), group=group)
    for output, part in zip(outputs, gathered.split(sizes), strict=True):
        output.copy_(part)
