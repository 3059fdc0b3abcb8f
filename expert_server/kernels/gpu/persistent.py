"""The host's side of the persistent kernel (persistent.cu): its memory, its experts, and who owns a slot.

Never run on a GPU, and no server starts it: see ADR 0047. The device uses the host's addresses (CUDA's
unified addressing): of memory that torch has pinned, and of an arena that is registered with the driver.

L layers, E experts, S slots.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from eaas.wire import Arena
from expert_server.kernels.activation import Activation
from expert_server.kernels.gpu.device import Device
from expert_server.kernels.gpu.packing import DeviceExpert, Layout, padded
from expert_server.kernels.gpu.tiles import Coding
from expert_server.kernels.kernel import UnsupportedError

__all__ = ["Arguments", "PersistentKernel", "Sizes"]

# Of each slot's words: a line of its own.
_LINE_WORDS = 16
_JOB_BYTES = 256
_POLL_S = 1e-5

_word, _long, _float = ctypes.c_uint32, ctypes.c_uint64, ctypes.c_float
_pointer = ctypes.c_void_p


class Arguments(ctypes.Structure):
    """`struct Persistent` of persistent.cu, which describes the fields."""

    _fields_ = (
        ("slots", _pointer),
        ("request_bytes", _long),
        ("slot_bytes", _long),
        *((name, _pointer) for name in ("flags", "busy", "generations", "table")),
        *((name, _pointer) for name in ("begun", "ended", "stop")),
        ("payload_capacity", _long),
        ("result_capacity", _long),
        *((name, _word) for name in ("count", "hidden", "layers", "experts", "pairs")),
        *((name, _word) for name in ("intermediate", "up_inputs", "down_inputs")),
        *((name, _word) for name in ("has_up_bias", "has_down_bias", "kind", "has_gate")),
        ("alpha", _float),
        ("limit", _float),
        *((name, _long) for name in ("up_at", "down_at", "up_bias_at", "down_bias_at")),
        *((name, _pointer) for name in ("job", "arrived", "bad", "x", "ids", "addresses")),
        *((name, _pointer) for name in ("scores", "order", "order_ids", "h", "y")),
    )


@dataclass(frozen=True)
class Sizes:
    """What a persistent kernel is made for.

    Attributes:
        layers, experts: L, E.
        pairs: Most token-expert pairs of a request.
    """

    layers: int
    experts: int
    pairs: int


class PersistentKernel:
    """Memory that the device code works with. `arguments` are what it is launched with.

    One thread publishes and withdraws experts; one grants and revokes slots.

    Args:
        arena: Slots; registered with the driver, if the device is a GPU.
        layout: Of all experts.
        activation: Of all layers.
        sizes: Limits.
        device: Holds the scratch memory and the experts.
        pin: Pins a host tensor; on the CPU it returns it as it is.

    Raises:
        UnsupportedError: The experts are not bfloat16, or the hidden size is odd.
    """

    def __init__(
        self,
        arena: Arena,
        layout: Layout,
        activation: Activation,
        sizes: Sizes,
        device: Device,
        pin: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        if layout.coding is not Coding.BFLOAT16 or layout.hidden % 2:
            raise UnsupportedError(
                "the persistent kernel takes bfloat16 experts of even hidden size"
            )
        self._arena = arena
        # busy, generation: (2, S); begun, ended, stop: (3).
        self._slots = pin(torch.zeros(2, arena.slots, _LINE_WORDS, dtype=torch.int32))
        self._words = pin(torch.zeros(3, _LINE_WORDS, dtype=torch.int32))
        self._table_LE = pin(torch.zeros(sizes.layers, sizes.experts, dtype=torch.int64))
        self._busy_S, self._generation_S = self._slots.numpy()[:, :, 0]
        self._begun, self._ended, self._stop = (word.numpy()[:1] for word in self._words)
        self._experts: dict[tuple[int, int], DeviceExpert] = {}
        self._arguments = self._make(layout, activation, sizes, device)

    @property
    def arguments(self) -> Arguments:
        """What the device code is launched with; valid as long as this object."""
        return self._arguments

    def _make(
        self, layout: Layout, activation: Activation, sizes: Sizes, device: Device
    ) -> Arguments:
        arena = self._arena
        flags, _, _, slots = arena.offsets
        base = ctypes.addressof(ctypes.c_char.from_buffer(arena.buffer))
        up, down, _, _, up_bias, down_bias = layout.offsets
        inner, h_inner = padded(layout.hidden), padded(layout.intermediate)
        shapes = {
            "job": (_JOB_BYTES, torch.uint8),
            "arrived": (1, torch.int32),
            "bad": (1, torch.int32),
            "x": (sizes.pairs * inner, torch.bfloat16),
            "ids": (sizes.pairs, torch.int32),
            "addresses": (sizes.pairs, torch.int64),
            "scores": (sizes.pairs, torch.float32),
            "order": (sizes.pairs, torch.int32),
            "order_ids": (sizes.pairs, torch.int32),
            "h": (sizes.pairs * h_inner, torch.bfloat16),
            "y": (sizes.pairs * layout.hidden, torch.float32),
        }
        self._scratch = {
            name: torch.zeros(size, dtype=dtype, device=device.at)
            for name, (size, dtype) in shapes.items()
        }
        return Arguments(
            slots=base + slots,
            request_bytes=arena.request_stride,
            slot_bytes=arena.request_stride + arena.result_stride,
            flags=base + flags,
            busy=self._slots[0].data_ptr(),
            generations=self._slots[1].data_ptr(),
            table=self._table_LE.data_ptr(),
            begun=self._words[0].data_ptr(),
            ended=self._words[1].data_ptr(),
            stop=self._words[2].data_ptr(),
            payload_capacity=arena.payload_capacity,
            result_capacity=arena.result_capacity,
            count=arena.slots,
            hidden=layout.hidden,
            layers=sizes.layers,
            experts=sizes.experts,
            pairs=sizes.pairs,
            intermediate=layout.intermediate,
            up_inputs=inner,
            down_inputs=h_inner,
            has_gate=activation.has_gate,
            kind=int(activation.kind),
            has_up_bias=layout.has_bias[0],
            has_down_bias=layout.has_bias[1],
            up_at=up,
            down_at=down,
            up_bias_at=up_bias,
            down_bias_at=down_bias,
            alpha=activation.alpha,
            limit=activation.limit,
            **{name: tensor.data_ptr() for name, tensor in self._scratch.items()},
        )

    # -- experts ----------------------------------------------------------------------------------------

    def publish(self, layer: int, expert: int, packed: DeviceExpert) -> None:
        """Let requests find an expert, which is on the device.

        Raises:
            ValueError: It is published; withdraw it first.
        """
        if (layer, expert) in self._experts:
            raise ValueError(f"layer {layer}: expert {expert} is published")
        self._experts[layer, expert] = packed
        self._arena.flags.fence()
        self._table_LE.numpy()[layer, expert] = packed.memory.data_ptr()

    def withdraw(self, layer: int, expert: int, timeout_s: float) -> None:
        """Hide an expert from requests, wait for those that may have found it, and free its memory.

        Raises:
            TimeoutError: The device did not end its request in time; the memory is kept.
        """
        self._table_LE.numpy()[layer, expert] = 0
        self._arena.flags.fence()
        begun = int(self._begun[0])
        deadline = time.monotonic() + timeout_s
        # Both count modulo 2^32.
        while (int(self._ended[0]) - begun) & 1 << 31:
            if time.monotonic() > deadline:
                raise TimeoutError(f"the device is busy with one request for {timeout_s} s")
            time.sleep(_POLL_S)
        self._experts.pop((layer, expert), None)

    # -- slots (poll.h) -----------------------------------------------------------------------------------

    def grant(self, slot: int, generation: int) -> bool:
        """Give a slot to a client (S2). False: the device is busy with it; try again later."""
        self._arena.flags.fence()
        if self._busy_S[slot]:
            return False
        self._arena.server_offline(slot)
        self._arena.set_generation(slot, generation)
        self._generation_S[slot] = generation
        self._arena.flags.fence()
        return self._arena.server_reclaim(slot)

    def revoke(self, slot: int) -> None:
        """Take a slot from its client (S1); an answer on its way is dropped."""
        self._generation_S[slot] = 0
        self._arena.flags.fence()
        self._arena.server_offline(slot)

    def stop(self) -> None:
        """Make the device code end after its request."""
        self._stop[0] = 1
