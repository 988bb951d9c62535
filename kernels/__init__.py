"""The vocabulary of attention numerics and the algorithms, written once over an arithmetic."""

import os

# With torch-npu installed, `import torch` imports it, and fails where the NPU's driver is missing. A backend that needs
# torch-npu imports it itself; everything else must work without.
os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
