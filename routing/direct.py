"""Launches whose form is known: what does not change is bound once, and the compiled kernel is started by itself.

A form is all that Triton compiles for: dtypes, strides, presence of each argument, the class of the batch size. The
first call of a form takes the long way (full checks, Triton's dispatch) and leaves the compiled kernel here. Later
calls compare their attributes with the form's, in a few microseconds, and start that kernel on the current stream.
Whatever is not exactly as before (another dtype, device, stride, a subclass of Tensor, a profiler's hook) takes the
long way again, where it is checked in full.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from evenroute.routing.batch.state import CHUNK
from evenroute.routing.dispatch import as_signed32
from evenroute.routing.kernels.plan import size_class, supports_groups
from evenroute.routing.launch import Launched
from evenroute.routing.output import (
    OUTPUT_NAMES,
    RouteCall,
    RouterPlan,
    RoutingOutput,
    Written,
    allocate_output,
)

# Those whose `CompiledKernel.run` takes grid, stream, function, metadata, hooks, then the kernel's arguments.
TRITON_VERSIONS = ((3, 6), (3, 9))
_PLAIN = (Tensor, Parameter)  # a subclass may be anything
_MAX_FORMS = 256
_MAX_ROW_OFFSET = 1 << 62


def supports_direct(installed: str | None = None) -> bool:
    """Whether this Triton's compiled kernels can be started without its dispatch (default: the one installed)."""
    try:
        major, minor = (int(part) for part in (installed or version("triton")).split(".")[:2])
    except (PackageNotFoundError, ValueError):
        return False
    return TRITON_VERSIONS[0] <= (major, minor) <= TRITON_VERSIONS[1]


class Form(NamedTuple):
    """How a compiled form is started.

    start, head   Triton's launcher, called with grid and stream, `head`, then the kernel's arguments
    rows          of a program
    constants     compiled in
    by_ticket     the deal takes tickets; deal: the launch behind it that deals the batch
    """

    start: Callable[..., Any]
    head: tuple[Any, ...]
    rows: int
    constants: Any
    by_ticket: bool = False
    deal: Form | None = None


# A call's key among the forms; rows, row stride; where logits, bias, valid and count begin (the seed for none).
Inputs = tuple[tuple[Any, ...], int, int, int, int, int, int]


def _no_device(*_: int) -> int:
    """A torch without CUDA has none."""
    return -1


def _addresses(out: RoutingOutput) -> tuple[int, ...]:
    """Where each output begins; 0 for what is not emitted."""
    return tuple([0 if tensor is None else tensor.data_ptr() for tensor in out.tensors()])


def _form(kernel: Any, constants: Any, rows: int) -> Form:
    """Of a kernel that was loaded by its launch or by `compile_kernel`.

    Under Triton 3.6 the C function behind `run` is called at once, a microsecond less: scratch memory is all that the
    frame between sees to, and these kernels need none.
    """
    run = kernel.run
    scratch = [getattr(run, f"{kind}_scratch_size", None) for kind in ("global", "profile")]
    if scratch == [0, 0] and version("triton").startswith("3.6."):
        modes = (run.launch_cooperative_grid, run.launch_pdl)
        head = (kernel.function, *modes, None, None, kernel.packed_metadata, None, None, None)
        return Form(run.launch, head, rows, constants)
    return Form(run, (kernel.function, kernel.packed_metadata, None, None, None), rows, constants)


class DirectLaunch:
    """The known forms of one router's launch: logits, a bias [E], padding and counting, into fresh or given outputs.

    On the device of the tables, which must be the current one.
    """

    def __init__(self, plan: RouterPlan, pdl: bool) -> None:
        from triton import knobs

        from evenroute.routing.kernels.route import route

        tables, counters = plan.tables, plan.counters
        self.plan, self.pdl = plan, pdl
        self.hooks = (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook)
        self.before = route.pre_run_hooks
        self.forms: dict[tuple[Any, ...], Form] = {}
        self.experts, self.layers = plan.config.num_experts, tables.num_layers
        self.device, self.index = tables.storage.device, tables.storage.get_device()
        self.current_device = getattr(torch._C, "_cuda_getDevice", _no_device)
        self.current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", _no_device)
        self.seed = plan.seed.data_ptr()
        self.scratch = plan.histogram_scratch().data_ptr() if "slot_histogram" in plan.emit else self.seed
        tickets = counters.tickets
        self.fixed = [
            (counters.counts[layer].data_ptr(), self.seed if tickets is None else tickets[layer].data_ptr())
            for layer in range(self.layers)
        ]
        self.batch_rows = 0 if plan.batch is None or plan.batch.small is None else plan.batch.rows
        self.state = None if plan.batch is None else plan.batch.state
        self.salt, self.rank = as_signed32(plan.salt), tables.ep_rank
        aligned = not any(pointer & 15 for pair in self.fixed for pointer in pair)
        alone = plan.batch is None or plan.batch.node is None
        self.usable = alone and aligned and supports_direct() and supports_groups(plan.config)

    def launch(
        self,
        logits: Any,
        layer: Any,
        bias: Any,
        valid: Any,
        row_offset: Any,
        count: Any,
        route_padding: Any,
        out: Any,
    ) -> RoutingOutput | None:
        """Start a known form and return its output; None if this call is not exactly of one."""
        try:
            inputs = self._inputs(logits, bias, valid, count, route_padding)
        except RuntimeError:  # a tensor without strides or memory
            return None
        if inputs is None or type(layer) is not int or not 0 <= layer < self.layers:
            return None
        form = self.forms.get(inputs[0])
        if form is None or type(row_offset) is not int or not 0 <= row_offset < _MAX_ROW_OFFSET:
            return None
        if self.current_device() != self.index or self.hooks[0].calls or self.hooks[1].calls or self.before:
            return None
        if out is None:
            out = allocate_output(self.plan, inputs[1], self.device)
            pointers = _addresses(out)
        else:
            known = self._written(out, inputs[1])
            if known is None:
                return None
            pointers = known
        self._start(form, inputs, layer, row_offset, pointers)
        return out  # type: ignore[no-any-return]

    def _inputs(self, logits: Any, bias: Any, valid: Any, count: Any, route_padding: Any) -> Inputs | None:
        """None where a full check is due: whatever could differ from a checked call is in the key."""
        index = self.index
        if type(logits) is not Tensor or logits.requires_grad or logits.get_device() != index:
            return None
        shape, strides = logits.shape, logits.stride()
        if len(shape) != 2 or shape[1] != self.experts or shape[0] == 0:
            return None
        rows = shape[0]
        logits_at, bias_at, valid_at, count_at = logits.data_ptr(), self.seed, self.seed, self.seed
        bias_form = valid_form = None
        if bias is not None:
            if type(bias) not in _PLAIN or bias.get_device() != index:
                return None
            bias_form, bias_at = (bias.dtype, bias.shape, bias.stride()), bias.data_ptr()
        if valid is not None:
            if type(valid) is not Tensor or valid.numel() != 1 or valid.get_device() != index:
                return None
            valid_form, valid_at = valid.dtype, valid.data_ptr()
        if count is not True and count is not False:
            if type(count) is not Tensor or count.numel() != 1 or count.get_device() != index:
                return None
            count, count_at = count.dtype, count.data_ptr()
        if (logits_at | bias_at) & 15 or type(route_padding) is not bool:
            return None
        key = (
            logits.dtype,
            strides,
            bias_form,
            valid_form,
            count,
            route_padding,
            size_class(rows),
            rows < self.batch_rows,
        )
        return key, rows, strides[0], logits_at, bias_at, valid_at, count_at

    def _written(self, out: Any, rows: int) -> tuple[int, ...] | None:
        """Where given outputs begin, if a call like this one checked them before and they are the same tensors."""
        written = out.written if type(out) is RoutingOutput else None
        if written is None or written.plan is not self.plan or written.rows != rows:
            return None
        for name, held, pointer in written.tensors:
            tensor = getattr(out, name)
            if tensor is not held or tensor.data_ptr() != pointer:
                return None
        return written.pointers  # type: ignore[no-any-return]

    def _start(
        self, form: Form, inputs: Inputs, layer: int, row_offset: int, pointers: tuple[int, ...]
    ) -> None:
        """The arguments of `kernels.route.route`, in its order, as `launch.launch_arguments` has them."""
        _, rows, stride, logits, bias, valid, count = inputs
        counts, tickets = self.fixed[layer]
        seed, state, chunks = self.seed, self.seed, 0
        stream = self.current_stream(self.index)
        tables = self.plan.view_of(rows).layer_rows[layer].data_ptr()
        if form.deal is not None and self.state is not None:
            self.state.hold(rows)
            state, chunks = self.state.words.data_ptr(), self.state.chunks
        form.start(
            -(-rows // form.rows),
            1,
            1,
            stream,
            *form.head,
            *pointers,
            self.scratch,
            counts,
            tickets if form.by_ticket else seed,
            logits,
            bias,
            seed,
            seed,
            seed,
            seed,
            seed,
            seed,
            valid,
            count,
            seed,
            tables,
            state,
            rows,
            stride,
            0,
            0,
            row_offset and as_signed32(row_offset & 0xFFFFFFFF),
            self.salt,
            self.rank,
            chunks,
            form.constants,
        )
        if form.deal is not None:
            deal = form.deal
            grid = -(-rows // deal.rows)
            _, physical, logical, local, packed, histogram = pointers
            outputs = (physical, logical, local, packed, histogram, self.scratch)
            numbers = (rows, chunks, self.salt, self.rank, deal.constants)
            deal.start(grid, 1, 1, stream, *deal.head, *outputs, state, seed, tables, *numbers)

    def learn(self, call: RouteCall, out: RoutingOutput, launched: Launched | None) -> None:
        """Keep the form of a call that was checked and launched (or compiled) the long way, if it is one of ours."""
        plain = all(
            tensor is None
            for tensor in (
                call.marked_bias,
                call.token_marker,
                call.given_ids,
                call.given_weights,
                call.expert_ids_by_token,
            )
        )
        if launched is None or not plain:
            return
        inputs = self._inputs(call.logits, call.bias, call.num_valid_tokens, call.count, call.route_padding)
        if inputs is None or (inputs[0][1][1] != 1 and self.experts > 1):
            return
        bias = call.bias
        if bias is not None and (
            bias.dim() != 1 or bias.element_size() == 1 or (bias.stride(0) != 1 and self.experts > 1)
        ):
            return  # a row each, or copied before each launch
        pointers = _addresses(out)
        if any(pointer & 15 for pointer in pointers):
            return
        held = tuple(
            (name, tensor, pointer)
            for name, tensor, pointer in zip(OUTPUT_NAMES, out.tensors(), pointers, strict=True)
            if tensor is not None
        )
        out.written = Written(self.plan, call.num_tokens, held, pointers)
        if inputs[0] not in self.forms and len(self.forms) < _MAX_FORMS:
            kernel, constants, second = launched
            form = _form(kernel, constants, constants.plan.layout.rows)
            deal = None if second is None else _form(second.kernel, second.constants, CHUNK)
            self.forms[inputs[0]] = form._replace(by_ticket=constants.mode.pick == "ticket", deal=deal)
