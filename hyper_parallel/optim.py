"""The public optimizer: look at what is to be trained, plan, and wrap the plan as the framework's own optimizer."""

from __future__ import annotations

from typing import Any, Iterable, Mapping

from hyper_parallel import backends
from hyper_parallel.core.backend import Backend, Module
from hyper_parallel.core.dtensor import DTensor
from hyper_parallel.core.errors import ConfigError
from hyper_parallel.core.mesh import DeviceMesh
from hyper_parallel.core.muon.groups import WITHOUT_DECAY, Asked, read_groups, read_model
from hyper_parallel.core.muon.matrices import MatrixView
from hyper_parallel.core.muon.optimizer import MuonEngine, Settings
from hyper_parallel.core.muon.options import ADAMW, MUON, NorMuon, check_options
from hyper_parallel.core.muon.parameters import MuonPolicy
from hyper_parallel.core.muon.qk_clip import QKClip
from hyper_parallel.core.topology import Topology
from hyper_parallel.core.topology_sources import topology_of


def Muon(
    model_or_groups: Module | Iterable[Any],
    *,
    lr: float = 1e-3,
    weight_decay: float = 0.1,
    momentum: float = 0.95,
    nesterov: bool = True,
    momentum_form: str = "ema",
    coefficients: Any = "legacy",
    steps: int = 5,
    ns_dtype: str = "bfloat16",
    ns_method: str = "auto",
    eps: float = 1e-7,
    scale: str | float = "match_rms",
    second_moment: NorMuon | None = None,
    adamw_lr: float | None = None,
    adamw_betas: tuple[float, float] = (0.9, 0.95),
    adamw_eps: float = 1e-8,
    adamw_weight_decay: float | None = None,
    routes: Mapping[str, str] | None = None,
    matrices: Mapping[str, MatrixView | Mapping[str, Any] | str] | None = None,
    qk_clip: QKClip | None = None,
    mesh: DeviceMesh | None = None,
    topology: Topology | None = None,
    slow_shard: str = "refuse",
    replicas: str = "owner",
    master_dtype: str | None = None,
    check_finite: bool = True,
    foreach: bool | None = None,
) -> Any:
    """Muon on the matrices of a model and AdamW on all else, as the framework's own optimizer.

    In PyTorch it is a `torch.optim.Optimizer`: `loss.backward(); optimizer.step()`. In MindSpore it is a
    `mindspore.experimental.optim.Optimizer`: `optimizer(gradients)`. Both have `state_dict`, `load_state_dict`,
    `full_state`, `load_full_state`, `observe_attention` and `describe`; learning-rate schedulers of the framework set
    the rates of both parts. docs/muon.md tells more.

    Every matrix is orthogonalized once in each group of ranks that hold parts of it, wherever they lie: parameters of
    `fully_shard` and `parallelize`, PyTorch's DTensors (FSDP2), or plain ones. Of replicas in one supernode one keeps
    the momentum and computes, and sends the result to the others.

    Called by all ranks that share parameters, with equal arguments, after the model has been sharded. `step` too is
    called by all of them.

    Args:
        model_or_groups: a model, whose parameters are routed by what they do; or a list of parameters, or of pairs
            (name, parameter); or of dicts with "params" and options of their own: "algorithm" ("muon", the default, or
            "adamw"), "lr", "weight_decay" and the others below, for AdamW also "betas" and "eps". A parameter may be a
            `hyper_parallel.DTensor` around one. What asks for no gradient is left out.
        lr: learning rate of Muon. With scale="match_rms" rates of AdamW serve.
        weight_decay: decoupled, by the unscaled rate: `W *= 1 - lr * weight_decay` before the update.
        momentum: from 0 to below 1.
        nesterov: orthogonalize the gradient and the momentum, not the momentum alone.
        momentum_form: "ema", a mean (PyTorch's), or "heavy_ball", a sum 1 / (1 - momentum) times as large.
        coefficients: of Newton-Schulz: "legacy" (the quintic), "asym5", "polar_express", or (a, b, c) for each step.
        steps: how many steps of it.
        ns_dtype: what it computes in, and matrices travel in: "bfloat16", "float16" (float32 on the way) or "float32".
        ns_method: "auto", "direct" or "gram"; `hyper_parallel.NewtonSchulz` tells more, of the five above as well.
        eps: added to the norm of a matrix.
        scale: what an orthogonalized update is multiplied with, by the shape [out, in] of the logical matrix:
            "match_rms" 0.2 * sqrt(max), "original" sqrt(max(1, out / in)), "spectral" sqrt(max), "unit_rms"
            sqrt(out / in), or a number.
        second_moment: `NorMuon()` for rows that move alike.
        adamw_lr: learning rate of AdamW; `lr` when not given.
        adamw_betas: its averages' rates.
        adamw_eps: added to its denominator.
        adamw_weight_decay: of its matrices; `weight_decay` when not given. Norms and biases of a model have none.
        routes: "muon" or "adamw" for parameters by pattern over their names; the later entry wins.
        matrices: a `MatrixView` or a short form by pattern, where a parameter is not one matrix, or another than the
            model tells; docs/muon_matrices.md lists the short forms.
        qk_clip: `QKClip()` to bound attention logits, whose maxima `observe_attention({module: [heads]})` is told
            before each step. For a model only.
        mesh: where plain parameters lie, replicated; by default each rank has its own.
        topology: where ranks sit; by default what `hyper_parallel.initialize` has found.
        slow_shard: "refuse" a matrix that is cut between supernodes, or exchange it in two stages, "hierarchical".
        replicas: "owner", one replica in a supernode computes, or "everywhere".
        master_dtype: "float32" to keep a float32 copy of half-precision parameters, taken at the first step, and to
            keep momentum and moments in float32. Otherwise they are of the parameter's dtype.
        check_finite: look at all gradients before a step, which waits for the device once.
        foreach: False to take tensors one by one; None or True for lists where the framework has operators for lists.

    Raises:
        ConfigError: an unknown option or value, a vector given to Muon, a parameter in two groups, or one without
            values; names it and says what to write. On all ranks, where one has found it.
        LayoutError: a parameter that does not lie as its layout says, or is cut between supernodes.

    A step raises, on all ranks and before anything is changed, `GradientError` for a gradient that is not finite, is
    missing on some ranks, or is of another shape, and `LayoutError` for a parameter that lies otherwise than before
    (`restore`, another `parallelize`). A parameter without a gradient on all ranks stays as it is.
    """
    model_or_groups = _listed(model_or_groups)
    backend = _backend_of(model_or_groups)
    muon = {
        "lr": lr,
        "weight_decay": weight_decay,
        "momentum": momentum,
        "nesterov": nesterov,
        "momentum_form": momentum_form,
        "coefficients": coefficients,
        "steps": steps,
        "ns_dtype": ns_dtype,
        "ns_method": ns_method,
        "eps": eps,
        "scale": scale,
        "second_moment": second_moment,
    }
    adamw = {
        "lr": lr if adamw_lr is None else adamw_lr,
        "weight_decay": weight_decay if adamw_weight_decay is None else adamw_weight_decay,
        "betas": adamw_betas,
        "eps": adamw_eps,
    }
    check_options(MUON, muon, "Muon")
    check_options(ADAMW, adamw, "Muon, of its AdamW")
    _check_arguments(qk_clip, mesh, topology, master_dtype, check_finite, foreach)
    defaults = {MUON: muon, ADAMW: adamw, WITHOUT_DECAY: {**adamw, "weight_decay": 0.0}}
    asked = Asked(defaults, dict(routes or {}), dict(matrices or {}), mesh)
    read = read_model if backend.modules.is_module(model_or_groups) else read_groups
    settings = Settings(
        topology or topology_of(backend), MuonPolicy(slow_shard, replicas), master_dtype, check_finite, foreach, qk_clip
    )
    return backend.optimizer.muon(MuonEngine(backend, read(backend, model_or_groups, asked), settings))


def _listed(given: Any) -> Any:
    """Generators, such as `model.parameters()`, as lists: they are looked at more than once."""
    if hasattr(given, "__next__"):
        given = list(given)
    if not isinstance(given, (list, tuple)):
        return given
    dicts = [isinstance(item, Mapping) and hasattr(item.get("params"), "__next__") for item in given]
    return [{**item, "params": list(item["params"])} if lazy else item for item, lazy in zip(given, dicts)]


def _backend_of(given: Any) -> Backend:
    """The framework of a model, or of the first parameter of a list."""
    if isinstance(given, (str, bytes, Mapping)) or hasattr(given, "shape"):
        raise ConfigError(f"Muon: found {type(given).__name__}; give a model, a list of parameters, or a list of dicts")
    if not isinstance(given, (list, tuple)):
        return backends.of_model(given)
    for item in given:
        found = item.get("params", ()) if isinstance(item, Mapping) else [item]
        for each in found if isinstance(found, (list, tuple)) else [found]:
            parameter = each[1] if isinstance(each, tuple) and len(each) == 2 else each
            return parameter.backend if isinstance(parameter, DTensor) else backends.of_tensor(parameter)
    raise ConfigError("Muon: there are no parameters; give a model, a list of parameters, or groups of them")


def _check_arguments(
    qk_clip: Any, mesh: Any, topology: Any, master_dtype: Any, check_finite: Any, foreach: Any
) -> None:
    wanted = (
        (
            "qk_clip",
            qk_clip,
            qk_clip is None or isinstance(qk_clip, QKClip),
            "hyper_parallel.QKClip(), or leave it out",
        ),
        ("mesh", mesh, mesh is None or isinstance(mesh, DeviceMesh), "a hyper_parallel.DeviceMesh"),
        ("topology", topology, topology is None or isinstance(topology, Topology), "a hyper_parallel.Topology"),
        ("master_dtype", master_dtype, master_dtype in (None, "float32"), '"float32", or leave it out'),
        ("check_finite", check_finite, isinstance(check_finite, bool), "True or False"),
        ("foreach", foreach, foreach is None or isinstance(foreach, bool), "None, True or False"),
    )
    for name, value, fits, words in wanted:
        if not fits:
            raise ConfigError(f"Muon: {name} is {value!r}; write {words}")
