"""Every test starts from the same seed and one thread; a test about threads sets its own.

Without a GPU the Triton kernels run in triton's interpreter, mended (helpers_interpreter.py); with one, compiled, on it.
"""

import importlib.util
import os

import pytest
import torch

if importlib.util.find_spec("triton") is not None and not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports a kernel
    import helpers_interpreter

    helpers_interpreter.mend()


@pytest.fixture(autouse=True)
def _same_start():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)
