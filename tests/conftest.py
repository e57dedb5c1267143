"""Every test starts from the same seed and one thread; a test about threads sets its own.

Without a GPU the Triton kernels run in triton's interpreter, mended (helpers_interpreter.py); with one, compiled, on it.
"""

import contextlib
import importlib.util
from collections.abc import Iterator

import pytest
import torch

_WITHOUT_GPU = importlib.util.find_spec("triton") is not None and not torch.cuda.is_available()


@contextlib.contextmanager
def interpreting() -> Iterator[None]:
    """Kernels defined meanwhile run in the interpreter, where there is no GPU. Programs that tests start do not inherit it."""
    with pytest.MonkeyPatch.context() as patch:
        if _WITHOUT_GPU:
            patch.setenv("TRITON_INTERPRET", "1")
        yield


if _WITHOUT_GPU:
    with interpreting():  # triton itself and whatever asks for the variable once
        import helpers_interpreter

        from sapo_fast import triton_rows
        from sapo_fast.kernels import row_grad, row_loss, row_stats, scale  # noqa: F401

        triton_rows.obstacle()
    helpers_interpreter.mend()


@pytest.fixture(autouse=True)
def _same_start():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)
