"""Every test starts from the same seed and one thread; a test about threads sets its own."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _same_start():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)
