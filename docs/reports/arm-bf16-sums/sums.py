"""A bf16 matrix product of PyTorch on Arm that keeps its running sum in bf16. Needs torch alone.

On a processor without bf16 instructions, and on x86, the sum is whole, and the script ends with 0.
"""

import sys

import torch


def products(name: str) -> float:
    """Print what products come to, beside those that are rounded once, and give 2^14 + 2,047 ones."""
    ones = torch.ones(1, 2048, dtype=torch.bfloat16)
    ones[0, 0] = 2.0**14  # 2^14 and 2,047 ones: 18431, and 18432 is the number of bf16 nearest to it
    total = (ones.expand(128, -1) @ torch.ones(2048, 128, dtype=torch.bfloat16))[0, 0]
    print(f"{name:12} 2^14 + 2047 ones: {total:.0f}")
    generator = torch.Generator().manual_seed(1)
    for k in (128, 192, 512, 2048, 4096):
        shapes = (128, k), (k, 128)
        a, b = (torch.randint(1, 4097, shape, generator=generator).bfloat16() / 4096 for shape in shapes)
        exact = a.double() @ b.double()
        product = a @ b
        alike = 100 * (product == exact.bfloat16()).double().mean()
        ulp = 2.0 ** (torch.log2(exact).floor() - 7)
        rms = ((product.double() - exact) / ulp).square().mean().sqrt()
        print(f"{name:12} 128 x {k:4} x 128: {alike:6.2f} % as rounded once, rms {rms:.2f} ulp")
    return total.item()


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(torch.__version__)
    total = products("as it is")
    with torch.backends.mkldnn.flags(enabled=False):
        products("mkldnn off")
    sys.exit(total != 18432)
