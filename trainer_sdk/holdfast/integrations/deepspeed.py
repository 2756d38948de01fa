"""DeepSpeed's engine with ZeRO 1, 2 or 3: the content of engine.save_checkpoint() as the state of a Checkpointer.

    deepspeed.initialize(…) -> engine_state(engine) -> checkpointer.restore(state), checkpointer.step(step, state)

The partitions of master weights and of the optimizer's slots are saved as the shards that they are. Another number of
ranks cuts them anew, without DeepSpeed's conversion. For Adam and AdamW. Written against deepspeed 0.19.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils import (
    safe_get_local_fp32_param,
    safe_get_local_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_optimizer_state,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from holdfast.errors import ConfigurationError

_SLOTS = ("exp_avg", "exp_avg_sq")
_COUNTERS = ("global_steps", "global_samples", "skipped_steps", "micro_steps")


def engine_state(engine: Any) -> dict[str, Any]:
    """The state of a DeepSpeedEngine, made once after deepspeed.initialize(). With ZeRO 1 and 2: `model` and `zero`;
    with ZeRO 3 only `zero`, because no rank has a whole model.

    Call step() where engine.step() has stepped: accumulated gradients are in no checkpoint. Buffers must be the same on
    all ranks.

    Raises ConfigurationError for another optimizer than Adam, for what has parts that are not known here (amsgrad,
    quantized weights, copies within a node), and for pipelines, tensor parallel, experts, states on NVMe and
    round_robin_gradients, whose parts no other number of ranks could be given.
    """
    _refuse(engine)
    if isinstance(engine.optimizer, DeepSpeedZeroOptimizer_Stage3):
        return {"zero": _ByName(engine)}
    return {"model": engine.module, "zero": _ByGroup(engine)}


def _refuse(engine: Any) -> None:
    zero = engine.optimizer
    if type(zero) not in (DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer_Stage3):
        raise ConfigurationError(
            f"The engine's optimizer is a {type(zero).__name__}, and holdfast knows those of ZeRO 1 to 3. Without ZeRO "
            "give engine.module and the optimizer themselves."
        )
    inner = type(zero.optimizer)
    if not issubclass(inner, torch.optim.Adam | torch.optim.AdamW | FusedAdam | DeepSpeedCPUAdam):
        raise ConfigurationError(
            f"ZeRO is around {inner.__name__}, and holdfast knows the slots of Adam and AdamW only."
        )
    not_known = {
        "a pipeline": getattr(engine, "num_stages", 1) > 1,
        "tensor parallel, or experts": dist.get_world_size(zero.dp_process_group) != dist.get_world_size(),
        "states on NVMe": getattr(zero, "swap_optimizer", False),
        "amsgrad": any(group.get("amsgrad") for group in zero.optimizer.param_groups),
        "quantized weights": getattr(zero, "zero_quantized_nontrainable_weights", False),
        "zero_hpz_partition_size": getattr(zero, "zero_hpz_partition_size", 1) > 1,
        "round_robin_gradients": getattr(zero, "round_robin_gradients", False),
    }
    if found := [name for name, there in not_known.items() if there]:
        raise ConfigurationError(f"This engine has {found[0]}, which holdfast does not know how to save. Leave it out.")


class _Engine:
    """What all stages have beside their partitions."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.zero = engine, engine.optimizer
        # Where the partitions are: from_local() moves what is elsewhere, and offloaded states do not fit a device.
        device = next(iter(self.flat_partitions())).device.type
        self.mesh = init_device_mesh(device, (dist.get_world_size(),))
        # Adam makes its slots at the first step, as here, if there are none; a restore needs them before.
        inner = self.zero.optimizer
        on_device = inner.defaults.get("fused") or inner.defaults.get("capturable")
        for flat in self.flat_partitions():
            own = inner.state[flat]
            for slot in _SLOTS:
                own.setdefault(slot, torch.zeros_like(flat, requires_grad=False))
            if isinstance(inner, torch.optim.Adam | torch.optim.AdamW):
                own.setdefault("step", torch.zeros((), device=flat.device if on_device else "cpu"))
            else:
                own.setdefault("step", 0)

    def flat_partitions(self) -> Iterable[torch.Tensor]:
        raise NotImplementedError

    def shards(self) -> Any:
        raise NotImplementedError

    def take(self, saved: Any) -> None:
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """Equal on all ranks but for the shards, which are DTensors."""
        engine, zero = self.engine, self.zero
        return {
            "shards": self.shards(),
            "steps": [_number(zero.optimizer.state[flat]["step"]) for flat in self.flat_partitions()],
            "groups": [{key: value for key, value in group.items() if key != "params"} for group in zero.param_groups],
            "loss_scale": {key: value for key, value in vars(zero.loss_scaler).items() if type(value) in (int, float)},
            "lr_scheduler": engine.lr_scheduler.state_dict() if engine.lr_scheduler else None,
            "counters": {name: getattr(engine, name) for name in _COUNTERS},
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        engine, zero = self.engine, self.zero
        self.take(saved["shards"])
        step = saved["steps"][0]
        for flat in self.flat_partitions():
            own = zero.optimizer.state[flat]
            own["step"] = torch.full_like(own["step"], step) if isinstance(own["step"], torch.Tensor) else int(step)
        for group, values in zip(zero.param_groups, saved["groups"], strict=True):
            group.update(values)
        vars(zero.loss_scaler).update(saved["loss_scale"])
        if engine.lr_scheduler:
            engine.lr_scheduler.load_state_dict(saved["lr_scheduler"])
        for name in _COUNTERS:
            setattr(engine, name, saved["counters"][name])

    def load_resharded_state_dict(self, states: list[Any], *, rank: int, world_size: int) -> None:
        self.load_state_dict(states[0])

    def shard(self, local: torch.Tensor, items: int) -> DTensor:
        """This rank's part of a flat tensor of so many items."""
        shape = torch.Size([items])
        return DTensor.from_local(local.detach(), self.mesh, [Shard(0)], run_check=False, shape=shape, stride=(1,))


class _ByGroup(_Engine):
    """ZeRO 1 and 2: each rank has a part of the flat master weights and slots of each group."""

    def flat_partitions(self) -> Iterable[torch.Tensor]:
        partitions: list[torch.Tensor] = self.zero.single_partition_of_fp32_groups
        return partitions

    def shards(self) -> list[dict[str, Any]]:
        return [
            {
                "items": items,
                **{name: self.shard(part, part.numel() * self.mesh.size()) for name, part in parts.items()},
            }
            for items, parts in self._groups()
        ]

    def take(self, saved: list[dict[str, Any]]) -> None:
        for (items, parts), group in zip(self._groups(), saved, strict=True):
            if group["items"] != items:
                raise ConfigurationError(
                    f"A group of parameters had {group['items']} items and has {items} now. Build the engine alike."
                )
            for name, part in parts.items():
                part.data.copy_(_own(group[name], items, part.numel(), self.mesh.get_local_rank()))

    def _groups(self) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
        """Its items without padding, and this rank's parts, of each group."""
        for parameters, flat in zip(self.zero.bit16_groups, self.flat_partitions(), strict=True):
            own = self.zero.optimizer.state[flat]
            yield sum(each.numel() for each in parameters), {"master": flat, **{slot: own[slot] for slot in _SLOTS}}


def _own(saved: torch.Tensor, items: int, part: int, rank: int) -> torch.Tensor:
    """A rank's part, of the whole tensor if another number of ranks has padded it in another way."""
    if isinstance(saved, DTensor):
        return saved.to_local()
    padded = torch.nn.functional.pad(saved[:items], (0, max(0, part * (rank + 1) - items)))
    return padded.narrow(0, part * rank, part)


class _ByName(_Engine):
    """ZeRO 3: each rank has a part of each parameter. DeepSpeed cuts it as torch.chunk does, and pads the last part.
    The padding is not saved."""

    def flat_partitions(self) -> Iterable[torch.Tensor]:
        partitions: list[torch.Tensor] = self.zero.fp32_partitioned_groups_flat
        return partitions

    def shards(self) -> dict[str, Any]:
        module = self.engine.module
        return {
            "parameters": {name: self._of_parameter(each) for name, each in module.named_parameters()},
            "buffers": {
                name: DTensor.from_local(each.detach(), self.mesh, [Replicate()], run_check=False)
                for name, each in module.named_buffers()
            },
        }

    def take(self, saved: dict[str, Any]) -> None:
        module = self.engine.module
        self.zero.checkpoint_event_prologue()  # small parameters are whole on every rank: parted here, gathered below
        for name, parameter in module.named_parameters():
            padded = {key: self._padded(parameter, shard) for key, shard in saved["parameters"][name].items()}
            parameter.ds_tensor.data.copy_(padded["value"])  # what is gathered for the forward pass, in its precision
            if parameter.requires_grad:
                safe_set_local_fp32_param(parameter, padded["value"])
                for slot in _SLOTS:
                    safe_set_local_optimizer_state(parameter, padded[slot], slot)
        self.zero.checkpoint_event_epilogue()
        for name, buffer in module.named_buffers():
            restored = saved["buffers"][name]
            buffer.copy_(restored.to_local() if isinstance(restored, DTensor) else restored)

    def _of_parameter(self, parameter: Any) -> dict[str, DTensor]:
        if not parameter.requires_grad:  # it has no master weights and no slots
            return {"value": self._shard(parameter, parameter.ds_tensor)}
        slots = {slot: self._shard(parameter, safe_get_local_optimizer_state(parameter, slot)) for slot in _SLOTS}
        return {"value": self._shard(parameter, safe_get_local_fp32_param(parameter)), **slots}

    def _shard(self, parameter: Any, padded: torch.Tensor) -> DTensor:
        begin = self.mesh.get_local_rank() * padded.numel()
        local = padded[: max(0, min(padded.numel(), parameter.ds_numel - begin))]
        return self.shard(local, parameter.ds_numel)

    def _padded(self, parameter: Any, shard: DTensor) -> torch.Tensor:
        local = shard.to_local()
        return torch.nn.functional.pad(local, (0, parameter.ds_tensor.numel() - local.numel()))


def _number(step: Any) -> Any:
    return step.item() if isinstance(step, torch.Tensor) else step
