"""What tests of the kernels for Hopper need."""

import pytest
import torch

from kernels.flash.dispatch import machine_lacks

HOPPER = torch.cuda.is_available() and machine_lacks(torch.device("cuda")) is None
ON_HOPPER = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU, and the Triton that its kernels take")
