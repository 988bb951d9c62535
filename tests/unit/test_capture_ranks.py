"""Capturing under DDP and FSDP: two processes on the CPU, each keeps what its own layers were given and got."""

import json
import subprocess
import sys
from pathlib import Path

# The rank and the folder that the two processes meet in are its words. Every step's calls are kept by the layer too.
SCRIPT = """
import json, os, sys
from pathlib import Path
import torch
from safetensors.torch import load_file
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import scaled_dot_product_attention
from tiebreak.cases.capture import capture

rank, folder = int(sys.argv[1]), Path(sys.argv[2])
torch.set_num_threads(1)
distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.calls = nn.Linear(16, 48), []

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
        o = scaled_dot_product_attention(q, k, v, is_causal=True)
        call = {"q": q, "k": k, "v": v, "o": o}
        o.register_hook(lambda do: call.update(do=do.clone()))
        self.calls.append(call)
        return x + o.transpose(1, 2).flatten(2)

def sharded(model):
    mesh = init_device_mesh("cpu", (2,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)

def train(wrapped, captured):
    draw = torch.Generator().manual_seed(7 + rank)
    for _ in range(2):
        wrapped(torch.randn(2, 8, 16, generator=draw)).square().mean().backward()
        with torch.no_grad():
            for weight in wrapped.parameters():
                weight.sub_(weight.grad)
                weight.grad = None
        captured.step()

def same(layers, kept):
    for number, layer in enumerate(layers):
        batch, head = kept[f"layer{number}.heads"].T
        for part in ("q", "k", "v", "o", "do"):
            own = layer.calls[1][part].detach()[batch, head]
            if not torch.equal(kept[f"layer{number}.{part}"].reshape(own.shape), own):
                return f"layer {number}: {part}"
    return "the same"

found = {}
for name, wrap in {"ddp": nn.parallel.DistributedDataParallel, "fsdp": sharded}.items():
    torch.manual_seed(1)
    model = nn.Sequential(Layer(), Layer())
    wrapped = wrap(model)
    with capture(wrapped, folder / name, every=1, quiet=True) as captured:
        train(wrapped, captured)
    told = same(model, load_file(captured.written[1])) if captured.written else "nothing was kept"
    found[name] = {"kept": told, "files": sorted(path.name for path in captured.written)}
print(json.dumps(found), flush=True)
distributed.barrier()
os._exit(0)  # gloo may abort while the interpreter ends: "terminate called without an active exception"
"""


def test_a_process_keeps_the_tensors_of_its_own_layers(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    words = [[sys.executable, str(tmp_path / "train.py"), str(rank), str(tmp_path)] for rank in (0, 1)]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for command in words]
    outputs = [process.communicate(timeout=120) for process in both]
    assert [process.returncode for process in both] == [0, 0], "\n".join(error for _, error in outputs)
    for rank, (printed, _) in enumerate(outputs):
        files = [f"inputs-00000{step}-rank{rank}.safetensors" for step in (0, 1)]
        same = {"kept": "the same", "files": files}
        assert json.loads(printed.splitlines()[-1]) == {"ddp": same, "fsdp": same}
