"""The only door between the core and a framework.

A backend is a bundle of Python modules, one per protocol below. `hyper_parallel.backends.torch` and
`hyper_parallel.backends.mindspore` hold the same file names with the same function names; nothing else in
HyperParallel calls a framework. A backend supplies tensors, collectives, autograd glue and module surgery;
it never decides an order, an owner, a group, a layout or a size.

`Tensor`, `Parameter` and `Module` below stand for the framework's own types: `torch.Tensor`,
`torch.nn.Parameter`, `torch.nn.Module`, or `mindspore.Tensor`, `mindspore.Parameter`, `mindspore.nn.Cell`.
Dtypes are named by their numpy spelling: "float32", "float16", "bfloat16", "float64", "int32", "int64", ...
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import (
    TYPE_CHECKING,
    Any,
    Callable,
    ContextManager,
    Iterable,
    Iterator,
    Mapping,
    NamedTuple,
    NoReturn,
    Protocol,
    Sequence,
)

import numpy as np

from hyper_parallel.core.errors import ConfigError
from hyper_parallel.core.layout import Layout
from hyper_parallel.core.muon.newton_schulz import NewtonSchulz
from hyper_parallel.core.regions import Box

if TYPE_CHECKING:
    from hyper_parallel.core.muon.optimizer import MuonEngine

Tensor = Any
Parameter = Any
Module = Any

NO_COPY = (
    "a sharded model, or a module of it, can't be copied or pickled, this process holds only a part of it; "
    "copy before sharding, restore first, or keep hyper_parallel.full_parameters(model)"
)


class Move(NamedTuple):
    """A strided copy between two flat tensors, in elements: element `[i, j, ...]` of the box goes from
    `source_start + i * source_strides[0] + ...` to `target_start + i * target_strides[0] + ...`."""

    sizes: tuple[int, ...]
    target_start: int
    target_strides: tuple[int, ...]
    source_start: int
    source_strides: tuple[int, ...]


class LocatedTargets(NamedTuple):
    """Where the targets of N tokens lie in one rank's part of a vocabulary that is cut over ranks: 1-D tensors."""

    places: Tensor
    """int64: the target's place in the part; 0 where it is not here."""
    here: Tensor
    """bool: the token counts, and its target lies in the part."""
    counted: Tensor
    """bool: the token counts."""


class Tensors(Protocol):
    """Tensors without autograd. Every function that ends in `_` changes its first argument in place, really."""

    def is_tensor(self, value: object) -> bool:
        """Tell whether `value` is a tensor of this framework."""

    def dtype_name(self, tensor: Tensor) -> str:
        """The dtype by its numpy spelling, "bfloat16" included."""

    def from_numpy(self, array: np.ndarray, dtype: str | None = None) -> Tensor:
        """A new tensor on this process's device holding a copy of `array`, cast to `dtype` when given."""

    def to_numpy(self, tensor: Tensor) -> np.ndarray:
        """A copy on the host, without autograd history; bfloat16, and what else numpy lacks, comes back in a wider
        dtype (exact)."""

    def repeats_elements(self, tensor: Tensor) -> bool:
        """Tell whether elements of different places are one in memory, so that they can't be overwritten."""

    def has_values(self, tensor: Tensor) -> bool:
        """False for a tensor of the meta device, and for a parameter that is to be initialised later: they have a shape
        only."""

    def on_meta(self, shape: Sequence[int], dtype: str) -> Tensor:
        """A new tensor that has a shape only, for a parameter to hold; operators need not run on it."""

    def without_values(self, shape: Sequence[int], dtype: str) -> Tensor:
        """A new tensor that has a shape and takes no memory, as the parameters of a model made inside
        `Modules.without_values`; zeros where the framework runs no operators on such tensors."""

    def to_device(self, tensor: Tensor) -> Tensor:
        """The tensor itself where this process's operators find it, else a copy on this process's device."""

    def on_host(self, numel: int, dtype: str, pinned: bool) -> Tensor:
        """A new 1-D tensor in the host's memory, contents undefined; `pinned` for the device to reach, where there is
        one."""

    def empty(self, shape: Sequence[int], dtype: str) -> Tensor:
        """A new contiguous tensor on this process's device, contents undefined."""

    def zeros(self, shape: Sequence[int], dtype: str) -> Tensor:
        """A new contiguous tensor of zeros on this process's device."""

    def buffer(self, like: Tensor, numel: int, zero: bool = False) -> Tensor:
        """A new 1-D tensor of the dtype and on the device of `like`; contents undefined unless `zero`."""

    def duplicate(self, tensor: Tensor) -> Tensor:
        """A new contiguous tensor of the shape, dtype and elements of `tensor`, of any strides; no history."""

    def zero_(self, tensor: Tensor) -> None:
        """Fill a tensor, of any strides, possibly an alias, with zeros."""

    def flat(self, tensor: Tensor) -> Tensor:
        """The elements in row-major order as a 1-D tensor without history; shares storage when contiguous."""

    def alias(self, flat: Tensor, start: int, shape: Sequence[int]) -> Tensor:
        """A contiguous tensor of `shape` over the elements `[start, start + prod(shape))` of the 1-D contiguous
        tensor `flat`. Shares its storage: a write through either, collectives included, shows in both. No history."""

    def stretched(self, tensor: Tensor, numel: int) -> Tensor | None:
        """The `numel` elements from the first one of a contiguous tensor on, as a 1-D tensor over the same storage,
        beyond the tensor's end if need be; None where the storage ends before."""

    def address(self, tensor: Tensor) -> int:
        """Where in memory the first element lies, in bytes."""

    def item_bytes(self, dtype: str) -> int:
        """Bytes of one element."""

    def reads_parts_in_place(self) -> bool:
        """Tell whether operators read an alias of a part of a buffer where it is; if not, they read (and autograd
        saves) a copy, so that what is to be released must fill its buffer."""

    def copy_(self, target: Tensor, source: Tensor, factor: float = 1.0) -> None:
        """Overwrite `target` (of any strides, possibly an alias) with `source` of the same number of elements, cast,
        and multiplied on the way."""

    def scale_(self, tensor: Tensor, factor: float) -> None:
        """Multiply a tensor, possibly an alias, in place."""

    def divide_(self, tensor: Tensor, divisor: int) -> None:
        """Divide a contiguous floating-point tensor, possibly an alias, in place, each element rounded once."""

    def add_(self, tensor: Tensor, other: Tensor) -> None:
        """Add `other`, of the same shape, to a contiguous tensor, possibly an alias, in place."""

    def move_(self, target: Tensor, source: Tensor, moves: Sequence[Move]) -> None:
        """Copy boxes of elements from `source` to `target`: contiguous, of one dtype, over different memory. One copy
        for each move; nothing else of `target` is touched."""

    def reduce_rows(self, tensor: Tensor, rows: int, op: str) -> Tensor:
        """A new 1-D tensor of n elements from the `rows * n` of a 1-D one: "sum", "max" or "min" over the rows, in
        row order. Half precision is summed in float32 and rounded once. NaN wins a max or a min."""

    def tie_shares(self, tensor: Tensor, rows: int, result: Tensor) -> Tensor:
        """For a 1-D floating `tensor` of `rows * n` elements and `result` (n), its max or min over the rows: a new 1-D
        tensor of `rows * n` that is 0 where a row differs from `result`, else 1 over the number of rows that don't."""

    def multiply_rows(self, tensor: Tensor, rows: int, row: Tensor) -> Tensor:
        """A new 1-D tensor: each of the `rows` rows of the 1-D `tensor` (`rows * n`) times the 1-D `row` (n)."""

    def chunk_rows(self, tensor: Tensor, dim: int, pieces: Sequence[int]) -> list[Tensor]:
        """Contiguous copies of consecutive pieces along `dim`, of the given lengths (zero allowed)."""

    def concatenate(self, tensors: Sequence[Tensor], dim: int) -> Tensor:
        """Join along `dim`; empty pieces allowed."""

    def storage_bytes(self, tensor: Tensor) -> int:
        """Bytes that the storage of `tensor` holds now; 0 after `release_storage`."""

    def release_storage(self, tensor: Tensor) -> None:
        """Give the memory back; every alias keeps its shape but must not be read until `restore_storage`."""

    def restore_storage(self, tensor: Tensor) -> None:
        """Take memory again for the `numel` elements of the 1-D `tensor`; contents undefined, aliases valid again."""

    def squared_norm(self, tensors: Iterable[Tensor]) -> float:
        """Sum of squares of all elements of all tensors, accumulated in float64 where the device has it."""

    def memory_bytes(self) -> int:
        """Peak bytes held by this process's device, or, on a CPU, the peak resident size of the process."""


class Group(Protocol):
    """A set of ranks that communicate. `ranks` are global, in order; `index` is this process's place among them."""

    ranks: tuple[int, ...]
    index: int

    @property
    def size(self) -> int:
        """Number of ranks in the group."""


class Work(Protocol):
    """A collective in flight."""

    def wait(self) -> None:
        """Return when the output may be read and the input may be changed. Calling it twice is harmless."""


class Collectives(Protocol):
    """Collectives on contiguous tensors. Outputs are written in place, aliases included.

    All reductions are sums. With `async_op` a call returns at once and the result is there after `Work.wait()`;
    without it the returned work is already done. All ranks of a group call in the same order, with the same
    `async_op`. A group of one moves nothing over a network and gives the same results. Errors are
    `CommunicationError`s that name the operation, the ranks of the group and the rank that noticed; shapes, dtypes and
    contiguity are checked before anything is launched.
    """

    def initialize(self, launch: Launch) -> None:
        """Join the job: set the device, connect to the other ranks. Called once per process, before anything else.

        Raises `CommunicationError` when a rank does not come within `launch.timeout_s`."""

    def shutdown(self) -> None:
        """Leave the job; harmless when not initialised. Where all goes well it comes after a `barrier`."""

    def is_initialized(self) -> bool:
        """Tell whether `initialize` has run."""

    def rank(self) -> int:
        """Global rank of this process; 0 before `initialize`."""

    def world_size(self) -> int:
        """Number of ranks; 1 before `initialize`."""

    def world(self) -> Group:
        """The group of all ranks."""

    def groups(self, partition: Sequence[Sequence[int]], apart: bool = False) -> Group | None:
        """The group of `partition` (disjoint, ascending lists of global ranks) that holds this rank, or None.

        Called by the ranks of each group in the same order; ranks that the partition leaves out need not call. Process
        groups are made once and reused. With `apart` it is one for collectives that begin `behind` others, and for
        nothing else: they keep an order of their own."""

    def gathers_uneven(self) -> bool:
        """Tell whether `all_gather` takes pieces of different sizes on this device."""

    def scatters_uneven(self) -> bool:
        """Tell whether `reduce_scatter` takes pieces of different sizes on this device."""

    def folds_scale(self, casts: bool) -> bool:
        """Tell whether `reduce_scatter` scales in a pass that it makes anyway on this device, where it casts as well or
        does not."""

    def all_gather(
        self,
        output: Tensor,
        input: Tensor,
        group: Group,
        async_op: bool = False,
        pieces: Sequence[int] | None = None,
    ) -> Work:
        """`output` (k*n elements) receives the `input` (n elements) of every rank, in group order. Where they differ in
        size, `pieces` tells the elements of each."""

    def reduce_scatter(
        self,
        output: Tensor,
        input: Tensor,
        group: Group,
        async_op: bool = False,
        pieces: Sequence[int] | None = None,
        scale: float = 1.0,
    ) -> Work:
        """`output` (n elements) receives this rank's part of the sum of all `input`s (k*n elements), times `scale`.

        Where parts differ in size, `pieces` tells the elements of each. `output` may be of another floating dtype: it
        is the one that is summed in, unless that is half precision and can be summed better, and elements travel in
        the narrower of both."""

    def all_reduce(self, tensor: Tensor, group: Group, async_op: bool = False) -> Work:
        """Sum over the group, in place."""

    def broadcast(self, tensor: Tensor, source: int, group: Group, async_op: bool = False) -> Work:
        """Overwrite `tensor` with that of global rank `source`."""

    def all_to_all(
        self,
        output: Tensor,
        input: Tensor,
        group: Group,
        output_splits: Sequence[int] | None = None,
        input_splits: Sequence[int] | None = None,
        async_op: bool = False,
    ) -> Work:
        """Send piece j of the flat `input` to group member j, receive piece i of the flat `output` from member i.
        Splits are element counts (zero allowed), equal when not given."""

    def send(self, tensor: Tensor, destination: int, group: Group, async_op: bool = False) -> Work:
        """Send to global rank `destination`. Sends and receives of a pair match in order; there are no tags."""

    def receive(self, tensor: Tensor, source: int, group: Group, async_op: bool = False) -> Work:
        """Receive into `tensor` from global rank `source`."""

    def behind(self, works: Sequence[Work], start: Callable[[], Sequence[Work]]) -> tuple[Work, Work]:
        """Let `start`, which issues collectives on groups made `apart`, be called once `works` are done, and return
        without waiting where there is anything to wait for. What is put behind begins in the order of these calls.

        Returns:
            What to wait for until `works` are done, in the place of them, and what until the collectives are."""

    def barrier(self, group: Group | None = None) -> None:
        """Return when every rank of the group (default: world) has called. After that of the world any rank may end."""

    def gather_objects(self, value: object, group: Group | None = None) -> list[object]:
        """Every rank's picklable `value`, in group order. For small things outside the step."""


@dataclass(frozen=True)
class Launch:
    """How this process joins the others.

    `launcher` is "torchrun", "msrun" or "rank_table" when such a launcher started it (the framework then reads
    its own environment), "local" when `hyper-parallel` did, "single" for one process alone.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    master_address: str = "127.0.0.1"
    master_port: int = 0
    launcher: str = "single"
    timeout_s: float = 120.0


class Autograd(Protocol):
    """What the engine must do for parameters that come and go."""

    def grad_enabled(self) -> bool:
        """Tell whether operations are being recorded."""

    def no_grad(self) -> ContextManager[None]:
        """Record nothing inside."""

    def enable_grad(self) -> ContextManager[None]:
        """Record inside, in a backward pass too."""

    def requires_grad(self, tensor: Tensor) -> bool:
        """Tell whether `tensor` is the result of a recorded operation, so that a gradient flows through it. A leaf is
        none: its gradient can be complete before those of other things that a module computes."""

    def takes_part(self, tensor: Tensor) -> bool:
        """Tell whether a gradient flows to `tensor`: a recorded result, or a leaf that asks for one."""

    def is_leaf(self, tensor: Tensor) -> bool:
        """Tell whether `tensor` is one that training asks a gradient for: no result, and in MindSpore a parameter."""

    def as_leaf(self, tensor: Tensor, like: Tensor) -> Tensor:
        """A leaf with the values of `tensor` that asks for a gradient; a parameter where `like` is one."""

    def deep_copy(self, tensor: Tensor, memo: dict[int, Any]) -> Tensor:
        """What `copy.deepcopy(tensor, memo)` promises: a tensor over memory of its own, a leaf where this is one."""

    def cast(self, tensor: Tensor, dtype: str) -> Tensor:
        """The tensor in another dtype, recorded as an operation: its gradient is cast back."""

    def attach(
        self,
        parameters: Sequence[Parameter],
        fulls: Sequence[Tensor],
        on_gradients: Callable[[list[Tensor | None]], Iterable[Tensor]],
    ) -> list[Tensor]:
        """Tensors over the storage of `fulls` whose gradients flow to `parameters` through one node.

        When the gradients of all of them are complete, `on_gradients` gets them (None where nothing flowed; each
        of the full shape) and returns one tensor per parameter, of the parameter's shape, that holds the
        parameter's gradient at the latest when the callbacks of `queue_final_callback` have run."""

    def differentiable(
        self,
        tensor: Tensor,
        forward: Callable[[Tensor], tuple[Tensor, Any]],
        backward: Callable[[Tensor, Any], Tensor],
        name: str = "",
    ) -> Tensor:
        """The result of `forward(tensor)`, recorded as one operation when `tensor` takes part in autograd.

        `forward` runs without recording and returns the result (any shape, over any memory but that of an input that
        it changes) and what it keeps for backward. `backward(gradient, kept)` runs without recording, once for each
        backward, and returns the gradient of `tensor`, of its shape. Where nothing is recorded, nothing is kept. `name`
        is what the framework's own errors call the operation, as when its result is changed in place."""

    def deliver(self, parameter: Parameter, gradient: Tensor) -> None:
        """Hand a finished gradient to the parameter where the engine has not done so already (accumulating)."""

    def forget_gradient(self, parameter: Parameter) -> None:
        """Drop the gradient that a parameter holds, where the framework keeps it there."""

    def on_gradient(self, tensor: Tensor, callback: Callable[[], None]) -> None:
        """Call back in backward when the gradient of a recorded `tensor` is complete, before it flows further."""

    def watch_leaf(self, parameter: Parameter, callback: Callable[[], None]) -> HookHandle:
        """Call `callback` when a gradient comes to a trainable parameter otherwise than by `attach` and `deliver`:
        before it gets there, or before `value_and_grad` returns it."""

    def follows_casts(self) -> bool:
        """Tell whether gradients have the dtype that a parameter was cast to, not that with which it was made."""

    def queue_final_callback(self, callback: Callable[[], None]) -> None:
        """Inside backward only: call back once all gradients are complete, before backward returns."""

    def graph_is_kept(self) -> bool:
        """Inside backward only: tell whether it may run once more over what was kept. True where the engine does not
        tell."""

    def in_backward(self) -> bool:
        """Tell whether the engine is running a backward pass on this thread now (so a forward is a recompute)."""

    def differentiates_empty_tensors(self) -> bool:
        """Tell whether what is broadcast against an empty tensor gets a gradient of zeros, as it should."""

    def runs_in_threads(self) -> bool:
        """Tell whether several threads may each run a forward and a backward at a time."""

    def value_and_grad(
        self, function: Callable[..., Tensor], parameters: Sequence[Parameter]
    ) -> Callable[..., tuple[Tensor, list[Tensor | None]]]:
        """`function`, returning (value, gradients of `parameters`); nothing is left on the parameters.

        `function` returns a scalar tensor. An unused parameter's gradient is None or zeros, as the framework has it.
        That of an attached one is what `deliver` has brought meanwhile, None where it has brought nothing."""


class ParameterUse(NamedTuple):
    """One place where a module holds a parameter; a tied parameter has several."""

    name: str
    owner: Module
    attribute: str
    parameter: Parameter


class BufferUse(NamedTuple):
    """One place where a module holds a tensor that belongs to it and is no parameter. What is not `persistent` is made
    anew with the module and is in no checkpoint."""

    name: str
    buffer: Tensor
    persistent: bool


class HookHandle(Protocol):
    """A registered hook."""

    def remove(self) -> None:
        """Take the hook away; harmless when done twice."""


class Modules(Protocol):
    """Reading a model and replacing what it sees, without changing its class or its code."""

    def is_module(self, value: object) -> bool:
        """Tell whether `value` is a model of this framework."""

    def named_modules(self, module: Module) -> Iterator[tuple[str, Module]]:
        """Every module with its qualified name ("" for the root), parents before children; one that stands in several
        places comes once for each."""

    def class_name(self, module: Module) -> str:
        """The name of a module's class. A framework's own layers go by the names that PyTorch gives them."""

    def without_values(self) -> ContextManager[None]:
        """Modules made inside have names, shapes and dtypes, and take no memory for the values of parameters."""

    def parameter_uses(self, module: Module) -> list[ParameterUse]:
        """Every use of every parameter below `module`, in definition order, tied ones and shared modules repeated.

        A name ends with the attribute that holds the parameter, or, in a framework's own layers, with the name that
        PyTorch gives it: "weight" and "bias". Running statistics are no parameters, whatever the framework makes of
        them."""

    def buffers(self, module: Module) -> list[BufferUse]:
        """Every registered buffer below `module`, running statistics included, module after module. Names are as
        those of parameters."""

    def load_parameters(self, module: Module, values: Mapping[str, np.ndarray]) -> None:
        """Overwrite whole (not yet sharded) parameters from numpy, by name.

        Raises `ConfigError` that lists missing and unknown names and wrong shapes; then nothing is changed."""

    def convert(self, module: Module, dtype: str) -> None:
        """Make every floating parameter and buffer of a whole (not yet sharded) model one of `dtype`, in place."""

    def place_buffers(self, module: Module) -> None:
        """Move what a module keeps beside its parameters to this process's device, where operators don't do so."""

    def is_trainable(self, parameter: Parameter) -> bool:
        """Tell whether the parameter asks for a gradient."""

    def replace_parameter(self, uses: Sequence[ParameterUse], value: Tensor) -> Parameter:
        """Make every use hold a parameter with the data of `value` (not copied), of any shape, with the name and
        trainability of the old one. Returns the parameter that the module holds now; frameworks that allow it keep
        the object."""

    def stand_in(self, parameter: Parameter, refuse: Callable[[str], NoReturn]) -> Tensor:
        """A tensor to be seen in the place of `parameter`, which it `stands_for`: it tells the same shape, dtype,
        device and attributes, and calls `refuse`, which raises, with the name of an operator that is given it or reads
        its values."""

    def registered(self, owner: Module, attribute: str) -> Parameter | None:
        """The parameter that `owner` has registered under `attribute`, whatever its instance dictionary shows."""

    def before_forward(self, module: Module, hook: Callable[[tuple, dict], None]) -> HookHandle:
        """Call `hook(args, kwargs)` before each forward of `module`, and before the user's own hooks."""

    def after_forward(self, module: Module, hook: Callable[[Any], None]) -> HookHandle:
        """Call `hook(output)` after each forward of `module`."""

    def around_forward(
        self,
        module: Module,
        enter: Callable[[tuple, dict], tuple[tuple, dict]],
        leave: Callable[[Any], Any],
    ) -> HookHandle:
        """Run each forward of `module` on the arguments that `enter(args, kwargs)` returns, before the user's own
        hooks, and hand on what `leave(output)` returns. Both are recorded by autograd as the forward is."""


class Training(Protocol):
    """What a training loop needs from the framework: its own optimizer and a loss."""

    def adamw(
        self,
        groups: Sequence[tuple[Sequence[Parameter], float]],
        learning_rate: float,
        betas: tuple[float, float],
        eps: float,
    ) -> Any:
        """The framework's AdamW over `(parameters, weight_decay)` groups (decay decoupled)."""

    def set_learning_rate(self, optimizer: Any, learning_rate: float, algorithm: str | None = None) -> None:
        """Set it for every group, or for those whose "algorithm" is this one: "muon" or "adamw"."""

    def apply_gradients(
        self, optimizer: Any, parameters: Sequence[Parameter], gradients: Sequence[Tensor | None]
    ) -> None:
        """One optimizer step with `gradients`, which belong to `parameters` in order."""

    def is_profiled(self) -> bool:
        """Tell whether the framework's profiler is recording now."""

    def profiler_range(self, name: str) -> ContextManager[None]:
        """What runs inside is called `name` in the profiler's record."""

    def cross_entropy(
        self, logits: Tensor, targets: Tensor, reduction: str = "mean", ignore_index: int = -100
    ) -> Tensor:
        """Cross entropy of `logits` [..., V] and integer `targets` [...], a scalar, in float32 at least. `reduction` is
        "sum", or "mean" over the tokens that count: NaN when none does. Targets equal to `ignore_index` don't."""

    # The loss of logits [..., n] that hold a part of the vocabulary, N tokens in all. Nothing here is recorded. "Wide"
    # is float64 for float64 logits, else float32.

    def locate_targets(self, targets: Tensor, start: int, length: int, ignore_index: int) -> LocatedTargets:
        """Where integer `targets` [...] lie among the `length` entries of the vocabulary from `start` on."""

    def largest_logits(self, logits: Tensor) -> Tensor:
        """The largest logit of each token [N], wide; minus infinity where the part is empty."""

    def vocabulary_terms(self, logits: Tensor, largest: Tensor, targets: LocatedTargets) -> tuple[Tensor, Tensor]:
        """The exponentials [N, n] of logits minus `largest` [N], and what is to be summed over the ranks [2 * N]: each
        token's sum of them, then its target's logit minus `largest`, 0 where the target is not here. All wide."""

    def vocabulary_loss(self, terms: Tensor, targets: LocatedTargets, mean: bool) -> Tensor:
        """From terms that are summed over the ranks the loss, a scalar: the sum over the tokens that count, or the
        mean."""

    def vocabulary_gradient(
        self,
        exponentials: Tensor,
        terms: Tensor,
        targets: LocatedTargets,
        gradient: Tensor,
        mean: bool,
        dtype: str,
        overwrite: bool,
    ) -> Tensor:
        """The gradient [N, n] of the logits, of `dtype`, for `gradient`, a scalar, of the loss. It may be made in the
        memory of `exponentials` if `overwrite`, and changes nothing else."""


class Interception(Protocol):
    """Following tensors through a model's own code. An operator that meets a followed tensor asks the tensor's watch
    (`core.validation.watch.Watch`) how its results lie, then runs on plain tensors; its results are followed."""

    def follow(self, tensor: Tensor, track: Any) -> Tensor:
        """A tensor of the values and history of `tensor`, possibly itself, that is followed and carries `track`."""

    def plain(self, tensor: Tensor) -> Tensor:
        """A tensor of the same values and history that is not followed."""

    def track_of(self, tensor: Any) -> Any:
        """What a followed tensor carries; None for anything else."""

    def repeated_dims(self, tensor: Tensor) -> tuple[int, ...]:
        """Dims of several elements along which all elements of a tensor are known to be equal."""

    def is_zero(self, tensor: Tensor) -> bool:
        """Tell whether all elements of a tensor are known to be zero."""

    def watch_gradient(self, tensor: Tensor, callback: Callable[[Tensor], None]) -> None:
        """Call back in backward with the gradient of a tensor that takes part, when it is complete."""

    def own_backward(self, tensor: Tensor) -> str:
        """The function with a backward of its own, written in Python, that has made a tensor; "" where none has."""

    def way_to_rule(self, function: str) -> str:
        """What to write so that a rule can be registered for such a function, or it is not needed; "" where there is no
        way."""

    def follow_backward(self, tensor: Tensor, made: Callable[[str], Any]) -> None:
        """Where a followed tensor comes out of a function with a backward of its own, follow that backward, once for
        each call of the function. `made` gives, for its name, the `core.validation.backward.OwnBackward` that is told;
        where the framework hides such a backward, it is told to refuse."""


class Randomness(Protocol):
    """The framework's default generators, of the host and of this process's device: what its dropout draws from."""

    def states(self) -> tuple[np.ndarray, ...]:
        """Their states, as bytes."""

    def restore(self, states: Sequence[np.ndarray]) -> None:
        """Go on from what `states` gave."""

    def seed(self, value: int) -> None:
        """Start all of them again with `value`, from 0 to 2**63 - 1."""

    def last_seed(self) -> int:
        """What the host's generator was last started with; `restore` brings it back too."""

    def draw(self) -> int:
        """A number from 0 to 2**31 - 1 off the host's generator. Waits for no device."""


class Orthogonalizing(Protocol):
    """What a Muon step computes. Nothing is recorded; what lists hold belongs together in order; empty tensors are
    allowed everywhere. `foreach` takes a list at once where the framework has operators for lists: the values are the
    same, bit for bit."""

    def newton_schulz(self, batch: Tensor, settings: NewtonSchulz) -> Tensor:
        """The matrices of a `batch` [k, m, n], of `settings.wire_dtype` or another floating dtype, orthogonalized in
        `settings.dtype`: a new contiguous tensor [k, m, n] of `settings.wire_dtype`.

        `batch` is cast first, then the norm of each matrix is taken in float32, and to float16 when it has its norm.
        Matrices that are taller than wide are transposed first. Intermediate results are made once for a batch, or for
        a part of it that suits a CPU's caches, where the framework lets its caller say where they go. A matrix that
        holds NaN or infinity, or whose norm float32 can't hold, comes out as NaN throughout; the others of the batch
        don't notice.

        Raises `LayoutError` for a batch of other than three dims."""

    def momenta_(
        self,
        buffers: Sequence[Tensor],
        gradients: Sequence[Tensor],
        momentum: float,
        form: str,
        nesterov: bool,
        dtype: str | None = None,
        foreach: bool = True,
    ) -> list[Tensor]:
        """Take the gradients into the momentum `buffers`, in place, in the buffers' dtype, and return what is to be
        orthogonalized, u: new contiguous tensors, cast to `dtype` where it is given.

        "ema" is `b = lerp(b, g, 1 - momentum)`, u = `lerp(g, b, momentum)` with Nesterov's, else b; "heavy_ball" is
        `b = momentum b + g`, u = `g + momentum b` or b, both 1 / (1 - momentum) times as large.

        Raises `ConfigError` for another form."""

    def apply_(
        self,
        parameters: Sequence[Tensor],
        updates: Sequence[Tensor],
        learning_rate: float,
        factors: Sequence[float],
        decay: float,
        foreach: bool = True,
    ) -> None:
        """`W *= 1 - learning_rate * decay`, then `W -= learning_rate * factor * update`, for `updates` of the
        parameters' shapes and of any floating dtype. In half precision both are computed in float32 and rounded once,
        or small decays would be lost."""

    def normalize_rows_(
        self, updates: Tensor, second: Tensor, beta2: float, eps: float, transposed: bool = False
    ) -> None:
        """NorMuon's second moment, for contiguous `updates` [k, m, n] and, in float32, `second` [k, m], both changed in
        place: `v = lerp(v, mean of squares of each row, 1 - beta2)`, then each row is divided by `sqrt(v) + eps`, and
        each matrix brought back to the norm that it had. A matrix of zeros stays one. `transposed` says that rows lie
        as columns here: `second` is [k, n]. Computed in float32."""

    def all_finite(self, tensors: Sequence[Tensor]) -> list[bool]:
        """For each tensor whether all of its elements are finite. One wait for the device in all."""

    def scale_blocks_(self, parameter: Tensor, boxes: Sequence[Box], factors: Sequence[float]) -> None:
        """Multiply each box of a contiguous tensor with its factor, in place. A slice has start and stop."""


class ElementWise(Protocol):
    """The framework's own AdamW over groups of parameters, which count through all groups."""

    counts_together: bool
    """Whether it counts the steps of all parameters alike, whatever gradients there were."""

    def __init__(self, groups: Sequence[tuple[Sequence[Parameter], Mapping[str, Any]]], foreach: bool | None):
        """Groups of parameters with "lr", "weight_decay", "betas" and "eps". Raises `ConfigError` for `foreach` where
        the framework has no operators for lists."""

    def step(self, gradients: Sequence[Tensor | None], options: Sequence[Mapping[str, Any]]) -> None:
        """One step with the options that groups have now. Without a gradient a parameter keeps value and moments."""

    def state(self, number: int) -> dict[str, Any]:
        """What it keeps of a parameter, the tensors themselves: "step", "exp_avg" and "exp_avg_sq". Empty before the
        first step, or where this rank holds nothing, in some frameworks."""

    def load(self, number: int, values: Mapping[str, Any]) -> None:
        """Overwrite that with a number and tensors of the local shape; what is not given is as before a step."""


class Optimizing(Protocol):
    """The framework's own kind of optimizer, and its own distributed parameters."""

    AdamW: type[ElementWise]

    def own_layout(self, parameter: Parameter) -> Layout | None:
        """How one of the framework's own distributed parameters lies; None for any other.

        Raises `LayoutError` where we have no words for it."""

    def lies_alike(self, gradient: Tensor, parameter: Parameter) -> bool:
        """Tell whether a gradient lies as its parameter does. PyTorch leaves that of a replicated DTensor as a pending
        sum where its inputs were cut."""
        ...

    def laid_alike(self, gradient: Tensor, parameter: Parameter) -> Tensor:
        """The gradient, brought to where its parameter lies. Called by all ranks of the parameter's mesh."""
        ...

    def local(self, tensor: Tensor) -> Tensor:
        """This rank's part of one of the framework's own distributed tensors, over its memory; another as it is."""

    def set_learning_rate(self, group: dict[str, Any], value: float) -> None:
        """Set that of a group of an optimizer."""

    def muon(self, engine: MuonEngine) -> Any:
        """The framework's optimizer around an engine, which does all that is more than its interface."""


@dataclass(frozen=True)
class Backend:
    """One framework, as the core sees it."""

    name: str
    tensors: Tensors
    collectives: Collectives
    autograd: Autograd
    modules: Modules
    training: Training
    interception: Interception
    randomness: Randomness
    muon: Orthogonalizing
    optimizer: Optimizing

    def __deepcopy__(self, memo: dict) -> Backend:
        raise ConfigError(NO_COPY)  # what parallelize has put on a model, or on a module of it, holds this

    def __reduce__(self) -> tuple:
        raise ConfigError(NO_COPY)
