"""An Ascend NPU through torch-npu. Importing it imports no torch_npu."""
