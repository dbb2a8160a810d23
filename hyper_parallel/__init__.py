"""HyperParallel: one static sharding plan, run on MindSpore or PyTorch. Importing this imports no framework."""

from importlib import import_module as _import_module
from typing import Any

_WHERE = {
    # Mesh and placements: pure data.
    "DeviceMesh": "core.mesh",
    "Topology": "core.topology",
    "Layout": "core.layout",
    "Shard": "core.placement",
    "Replicate": "core.placement",
    "StridedShard": "core.placement",
    "RaggedShard": "core.placement",
    "Partial": "core.placement",
    "lower": "core.transition",
    # Distributed tensors.
    "DTensor": "tensor",
    "distribute_tensor": "tensor",
    "redistribute": "tensor",
    "zeros": "tensor",
    "ones": "tensor",
    "full": "tensor",
    "empty": "tensor",
    "rand": "tensor",
    "randn": "tensor",
    "dropout": "tensor",
    "Generator": "core.random",
    # The plan.
    "ModelDescription": "core.plan.model",
    "ShardingPlan": "core.plan.plan",
    "plan": "api",
    # Running it.
    "register_rule": "core.rules.table",
    "Launch": "core.backend",
    "initialize": "api",
    "parallelize": "api",
    "validate": "api",
    "check_gradients": "api",
    "GradientReport": "core.equivalence.report",
    "fully_shard": "api",
    "fully_sharded": "api",
    "register_fsdp_forward_method": "api",
    "MixedPrecisionPolicy": "core.fsdp.policy",
    "OffloadPolicy": "core.fsdp.policy",
    "CPUOffloadPolicy": "core.fsdp.policy",
    "describe": "api",
    "trace_step": "api",
    "restore": "api",
    "collectives": "api",
    "layout_of": "api",
    "trainable_parameters": "api",
    "full_parameters": "api",
    "load_full_parameters": "api",
    "value_and_grad": "api",
    "cross_entropy": "api",
    "clip_grad_norm_": "api",
    "manual_seed": "seeds",
    # Optimizers.
    "Muon": "optim",
    "NorMuon": "core.muon.options",
    "QKClip": "core.muon.qk_clip",
    "NewtonSchulz": "core.muon.newton_schulz",
    "LogicalMatrix": "core.muon.matrices",
    "MatrixView": "core.muon.matrices",
    "split_rows": "core.muon.matrices",
    # Errors.
    "HyperParallelError": "core.errors",
    "BackendUnavailable": "core.errors",
    "ConfigError": "core.errors",
    "PlanError": "core.errors",
    "LayoutError": "core.errors",
    "ContractError": "core.errors",
    "GradientError": "core.errors",
    "CheckpointError": "core.errors",
    "CommunicationError": "core.errors",
}

__all__ = sorted(_WHERE)
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'hyper_parallel' has no attribute {name!r}")
    value = getattr(_import_module(f"hyper_parallel.{_WHERE[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
