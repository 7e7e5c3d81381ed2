"""Triton under one name: the package, or where it is not installed a stub with which kernels can be defined all the
same, so that their references and the functions that pick can be imported everywhere. Launching one raises
`DraftsmithError`."""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from draftsmith.kernels.device import no_triton

if find_spec("triton") is not None:
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor
else:

    class _Kernel:
        """What `triton.jit` makes of a function here."""

        def __init__(self, function: Callable[..., Any]) -> None:
            self._name = function.__name__

        def __getitem__(self, grid: object) -> Any:
            raise no_triton(f"the kernel {self._name}")

    class _Stub:
        """The names that kernels and their modules use at import."""

        @staticmethod
        def jit(function: Callable[..., Any] | None = None, **options: Any) -> Any:
            return _Kernel if function is None else _Kernel(function)

        @staticmethod
        def constexpr(value: object) -> object:
            return value

        def __getattr__(self, name: str) -> Any:
            raise no_triton(f"triton's {name}")

    triton = tl = _Stub()
    TensorDescriptor = Any

__all__ = ["TensorDescriptor", "tl", "triton"]
